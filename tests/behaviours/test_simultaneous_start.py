"""Four islands begin at the same instant on an empty blackboard, again and again: one run id, one history."""

from __future__ import annotations

import hashlib
import multiprocessing
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock, SystemNonces
from diloco_runtime.store import open_store

ISLANDS, ROUNDS, FRAGMENTS = 4, 20, 6

Begun = tuple[str, str, str]
"""Run id, nonce of the initialisation, hash of the parameters that an island begins with."""


def begin(url: str, name: str, island: str) -> Begun:
    """Do what the command does to make a run, and what a learner does before its first step."""
    import torch

    from diloco_runtime.fragments import table_of, trained_parameters
    from diloco_runtime.learner import Life
    from diloco_runtime.life import Birth
    from diloco_runtime.records import RunRecord
    from tests.support.run_records import config
    from tests.support.tasks import LinearTask

    clock, nonces, store = SystemClock(), SystemNonces(), open_store(url, name)
    mine = nonces.new()
    record = RunRecord(run_id=mine, nonce=nonces.new(), name=name, code_version="0", config={}, created_wall=0.0)
    run_id = Blackboard(store, mine, clock, nonces).create_run(record).run_id
    board = Blackboard(store, run_id, clock, nonces)
    torch.set_num_threads(1)
    # Each island would begin with other parameters, if it were alone.
    task = LinearTask(seed=ord(island))
    life = Life(config(fragments=FRAGMENTS), island, 1, 8, table_of(task.model, FRAGMENTS))
    engine = Birth(life, board, clock, task, lambda status: None).begin()
    assert engine is not None
    found = hashlib.sha256()
    for key, value in sorted(trained_parameters(task.model).items()):
        found.update(key.encode() + value.detach().numpy().tobytes())
    return run_id, engine.head.nonce, found.hexdigest()


def begin_again_and_again(url: str, island: str, barrier: Barrier, results: Queue[list[Begun]]) -> None:
    begin(url, f"warm-up-{island}", island)  # imports must not spread the starts
    found = []
    for number in range(ROUNDS):
        barrier.wait()
        found.append(begin(url, f"round-{number}", island))
    results.put(found)


@pytest.mark.timeout(180)
def test_islands_that_start_together_agree_on_one_run_and_one_beginning(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/blackboard"
    spawn = multiprocessing.get_context("spawn")
    barrier, results = spawn.Barrier(ISLANDS), spawn.Queue()
    processes = [
        spawn.Process(target=begin_again_and_again, args=(url, island, barrier, results))
        for island in "abcdefgh"[:ISLANDS]
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=150) for _ in processes]
    for process in processes:
        process.join()
    for number, begun in enumerate(zip(*found, strict=True)):
        assert len(set(begun)) == 1, f"round {number}: the islands began differently: {begun}"
        run_id, nonce, _ = begun[0]
        board = Blackboard(open_store(url, f"round-{number}"), run_id, SystemClock(), SystemNonces())
        first = board.read_commit(0)
        assert first is not None and first.nonce == nonce and board.read_commit(1) is None
        assert len(board.store.list(board.keys.blobs(0))) == FRAGMENTS, "a loser left its payloads behind"
