"""Create-once is create-once, whoever races."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_runtime.store import ObjectStore, open_store
from tests.behaviours.racers import body, race, race_in_process


def check_one_winner_each(store: ObjectStore, rounds: int, won: dict[int, list[int]]) -> None:
    winners = {number: [racer for racer in won if number in won[racer]] for number in range(rounds)}
    assert {number: len(names) for number, names in winners.items()} == dict.fromkeys(range(rounds), 1)
    for number, (winner,) in winners.items():
        assert store.get(f"race/{number}") == body(winner)
    assert len(store.list("race/")) == rounds


@pytest.fixture
def nervous_threads() -> Iterator[None]:
    """Let the interpreter change threads all the time, not every 5 ms, so that each step can be interrupted."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_one_of_many_threads_wins(store_url: str, nervous_threads: None) -> None:
    rounds, racers = 150, 8
    barrier = threading.Barrier(racers)
    won: dict[int, list[int]] = {}

    def run(racer: int) -> None:
        # Half of the threads share a store object, the others have one of their own.
        won[racer] = race(shared if racer % 2 else open_store(store_url, "trial"), rounds, racer, barrier)

    shared = open_store(store_url, "trial")
    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(racers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_one_winner_each(shared, rounds, won)


def test_one_of_many_processes_wins(tmp_path: Path) -> None:
    rounds, racers = 60, 8
    url = f"file://{tmp_path}/blackboard"
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(racers), spawn.Queue()
    processes = [
        spawn.Process(target=race_in_process, args=(url, rounds, racer, barrier, results)) for racer in range(racers)
    ]
    for process in processes:
        process.start()
    won = dict(results.get(timeout=50) for _ in processes)
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * racers
    assert sum(1 for rounds_won in won.values() if rounds_won) > 1, "one process won everything: this was no race"
    check_one_winner_each(open_store(url, "trial"), rounds, won)
