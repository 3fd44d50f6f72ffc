"""A history in a bucket that refuses, loses, cuts and delays: contiguous, complete, nothing twice, nothing half."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock, SystemNonces
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import CommitRecord
from tests.behaviours.clouds import Cloud
from tests.behaviours.samples import RUN_ID, commit_record, run_record
from tests.support.proxy import Faults

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Faults(statuses={503: 0.1}, lost_answers=0.02, resets=0.02, latency=0.05)
AUTHORS = 2


def payload_of(nonce: str) -> bytes:
    return (nonce.encode() * 4096)[:50_000]


def new_board(cloud: Cloud) -> Blackboard:
    return Blackboard(cloud.store(), RUN_ID, SystemClock(), SystemNonces(), shard_bytes=20_000)


def patiently(action, *arguments):
    """Do what every process of a run does: ask again until the store answers."""
    while True:
        try:
            return action(*arguments)
        except StoreUnavailable:
            continue


def write_history(board: Blackboard, length: int, mine: list[str], start: threading.Barrier) -> None:
    """Build commits on the newest one, as a syncer does, against others that do the same; note those that won."""
    head = patiently(board.head)
    while head.seq < length:
        start.wait()  # otherwise the loser of one is always too late for the next
        nonce = board.new_nonce()
        key = board.keys.blob(head.seq + 1, "params", 0, nonce)
        ref = patiently(board.put_payload, key, payload_of(nonce))
        draft = commit_record(head.seq + 1).model_copy(update={"nonce": nonce, "parent": head.nonce, "params": (ref,)})
        standing: CommitRecord = patiently(board.create, board.keys.log(draft.seq), draft)
        if standing.nonce == nonce:
            mine.append(nonce)
        else:
            patiently(board.delete_payload, ref)
        head = standing


def follow_history(board: Blackboard, length: int, seen: list[str]) -> None:
    """Read each commit and its payload as it comes, as a learner does."""
    while len(seen) <= length:
        commit = patiently(board.read_commit, len(seen))
        if commit is not None:
            if commit.seq:
                assert patiently(board.get_payload, commit.params[0]) == payload_of(commit.nonce)
            seen.append(commit.nonce)


def check_history(cloud: Cloud, length: int) -> None:
    direct = Blackboard(cloud.direct, RUN_ID, SystemClock(), SystemNonces())
    direct.create_run(run_record())
    direct.create(direct.keys.log(0), commit_record(0))
    cloud.proxy.faults = FAULTS
    mine: list[list[str]] = [[] for _ in range(AUTHORS)]
    seen: list[str] = []
    start = threading.Barrier(AUTHORS)
    work = [threading.Thread(target=write_history, args=(new_board(cloud), length, won, start)) for won in mine]
    work.append(threading.Thread(target=follow_history, args=(new_board(cloud), length, seen)))
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    log = [direct.read_commit(seq) for seq in range(length + 1)]
    nonces = [commit.nonce for commit in log if commit is not None]
    assert len(nonces) == length + 1 and direct.read_commit(length + 1) is None
    assert all(commit.parent == before for commit, before in zip(log[1:], nonces, strict=False) if commit is not None)
    assert seen == nonces, "the follower saw the history that is there"
    assert sorted(nonce for won in mine for nonce in won) == sorted(nonces[1:]), "nobody believes wrongly to have won"
    assert all(won for won in mine), "both authors took part"
    for commit in log[1:]:
        assert commit is not None and direct.get_payload(commit.params[0]) == payload_of(commit.nonce)
    wanted = {f"{ref.key}.{number:06d}" for commit in log[1:] if commit for ref in commit.params for number in range(3)}
    assert set(cloud.direct.list(f"{RUN_ID}/blobs/")) == wanted, "the losers took their payloads back"
    for kind in ("503", "lost answer", "cut upload"):
        assert cloud.proxy.seen[kind] > 0, cloud.proxy.seen


def test_a_history_grows_through_all_faults(cloud: Cloud) -> None:
    check_history(cloud, 20)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_thousand_commits_grow_through_all_faults(cloud: Cloud) -> None:
    check_history(cloud, 1000)


def test_nothing_partial_is_visible_after_kill_9_in_mid_upload(cloud: Cloud) -> None:
    chance = random.Random(4)
    cloud.proxy.faults = Faults(upload_rate=20e6)  # half a second for a body that is larger than all buffers
    for life in range(4):
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'runtime'}"}
        command = [sys.executable, "-m", "tests.behaviours.racers", cloud.url(), str(life), "10_000_000"]
        writer = subprocess.Popen(command, cwd=ROOT, env=environment)
        try:
            deadline = time.monotonic() + 30.0
            while cloud.direct.get(f"kill/{life}-1") is None:
                assert time.monotonic() < deadline and writer.poll() is None
            time.sleep(chance.uniform(0.1, 0.5))  # the moment of death is random on purpose
        finally:
            writer.kill()
            writer.wait()
        for key in cloud.direct.list(""):
            data = cloud.direct.get(key)
            assert data is not None and len(data) == int(data[:16]), f"{key} is not whole"
    assert cloud.proxy.seen["client vanished"] > 0, "no kill fell into an upload: this test showed nothing"
