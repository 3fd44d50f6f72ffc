"""Create-once is create-once, whoever races, and every loser learns who won."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_runtime.store import ObjectStore, open_store
from tests.behaviours.clouds import Cloud
from tests.behaviours.racers import body, race, race_in_process
from tests.support.proxy import Faults

RACERS = 8
ROUNDS = {"memory": 150, "file": 150, "gs": 40, "s3": 4}
"""Of threads in one process; SeaweedFS takes seconds for eight writers of one key."""


def check_one_winner_each(store: ObjectStore, rounds: int, seen: list[list[int]]) -> None:
    """Assert that all racers saw the same winner of each round, whose bytes are there."""
    for number, views in enumerate(zip(*seen, strict=True)):
        assert len(set(views)) == 1 and views[0] >= 0, f"round {number}: {views}"
        assert store.get(f"race/{number}") == body(views[0])
    assert len(store.list("race/")) == rounds == len(seen[0])


@pytest.fixture
def nervous_threads() -> Iterator[None]:
    """Let the interpreter change threads all the time, not every 5 ms, so that each step can be interrupted."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_one_of_many_threads_wins(store_url: str, nervous_threads: None) -> None:
    rounds = ROUNDS[store_url.partition(":")[0]]
    barrier = threading.Barrier(RACERS)
    seen: list[list[int]] = [[] for _ in range(RACERS)]

    def run(racer: int) -> None:
        # Half of the threads share a store object, the others have one of their own.
        seen[racer] = race(shared if racer % 2 else open_store(store_url, "trial"), rounds, racer, barrier)

    shared = open_store(store_url, "trial")
    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(RACERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_one_winner_each(shared, rounds, seen)


def race_processes(url: str, rounds: int, seconds: float) -> list[list[int]]:
    """Let spawned processes race; return what each of them saw."""
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(RACERS), spawn.Queue()
    processes = [
        spawn.Process(target=race_in_process, args=(url, rounds, racer, barrier, results)) for racer in range(RACERS)
    ]
    for process in processes:
        process.start()
    try:
        seen = [results.get(timeout=seconds) for _ in processes]
    finally:
        for process in processes:
            process.join(1.0)
            process.kill()
            process.join()
    assert len({winner for views in seen for winner in views}) > 1, "one process won everything: this was no race"
    return seen


def test_one_of_many_processes_wins(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blackboard"
    check_one_winner_each(open_store(url, "trial"), 60, race_processes(url, 60, 50.0))


def race_in_bucket(cloud: Cloud, rounds: int, seconds: float) -> None:
    """Race with one answer in ten lost on its way."""
    cloud.proxy.faults = Faults(lost_answers=0.1)
    seen = race_processes(cloud.url(), rounds, seconds)
    assert cloud.proxy.seen["lost answer"] >= rounds * RACERS / 20
    check_one_winner_each(cloud.direct, rounds, seen)


def test_one_of_many_processes_wins_in_a_bucket_that_loses_answers(cloud: Cloud) -> None:
    race_in_bucket(cloud, {"s3": 4, "gs": 25}[cloud.kind], 50.0)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_many_races_in_a_bucket_that_loses_answers(cloud: Cloud) -> None:
    race_in_bucket(cloud, 200, 1700.0)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_many_races_in_a_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blackboard"
    check_one_winner_each(open_store(url, "trial"), 200, race_processes(url, 200, 280.0))
