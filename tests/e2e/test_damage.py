"""One flipped byte in a payload: the object is named, nobody trains on it, and the run goes on without it."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from diloco_runtime.records import PayloadRef
from tests.e2e.live import LiveRun

pytestmark = pytest.mark.e2e

NEVER_REACHED = 50_000_000


def flip(run: LiveRun, ref: PayloadRef) -> None:
    """Change one byte in the middle of a payload, as it lies on the disk; done twice, it is as before."""
    (path,) = run.folder.glob(f"blackboard/**/{ref.key.rpartition('/')[2]}")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.timeout(240)
def test_a_delta_with_a_flipped_byte_is_refused_and_named(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=NEVER_REACHED, sync='min_quorum = "all"')
    run.train()
    run.wait_for_commits(6)
    run.signal(signal.SIGSTOP, "syncer_main")
    board, seq = run.board(), run.head() + 2  # offers to the next one may have been read before the stop
    run.wait(lambda: len(board.list_offers(seq)) == len(run.islands), 30.0, f"all offers to {seq}")
    offer = board.read_offer(seq, "b", 1)
    assert offer is not None and board.read_commit(seq - 1) is None
    flip(run, offer.payload)
    run.signal(signal.SIGCONT, "syncer_main")
    run.wait_for_commits(3 * run.config().sync.fragments)
    commit = run.log()[seq]
    assert {entry.island for entry in commit.merged} == {"a", "c"}
    (refused,) = commit.refused
    assert refused.island == "b" and refused.nonce == offer.nonce
    assert offer.payload.key in refused.reason and "another hash than its record says" in refused.reason
    assert "b" in {entry.island for entry in run.log()[-1].merged}, "its next ones are as good as any"
    run.end()
    run.check_books()
    assert all(beat.incarnation == 1 for beat in run.heartbeats()), "nobody had to start again"


@pytest.mark.timeout(240)
def test_parameters_with_a_flipped_byte_are_named_and_never_trained_on(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=NEVER_REACHED)
    run.train()
    run.wait_for_commits(6)
    run.kill_everything()  # while anybody lives who has these parameters, the next merge supersedes them
    newest = run.log()[-1]
    flip(run, newest.params[0])
    run.train()

    def named() -> bool:
        problems = {island["name"]: island["problems"] for island in run.status()["islands"]}
        return all(
            any(newest.params[0].key in problem and "its learner failed: " in problem for problem in problems[island])
            for island in run.islands
        )

    run.wait(named, 60.0, "every island names the object")
    assert all(not beat.learner.step for beat in run.heartbeats() if beat.incarnation > 1), "nobody trains on it"
    flip(run, newest.params[0])
    run.wait_for_commits(6)
    run.end()
    run.check_books()
    assert not any("its learner failed" in problem for problem in run.status()["problems"])
