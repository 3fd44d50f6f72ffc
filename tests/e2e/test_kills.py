"""`kill -9` of single processes at random moments, and of everything."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Callable

import pytest

from tests.e2e.live import LiveRun

pytestmark = pytest.mark.e2e

NEVER_REACHED = 50_000_000
"""A budget in tokens that no machine reaches while a test kills: the test itself ends the run."""

VICTIMS = ("learner_main", "island", "syncer_main", "cli")


def kill(run: LiveRun, victim: str, chance: random.Random) -> None:
    """SIGKILL one process: a learner, an agent, the syncer that merges, or the supervising command."""
    if victim == "cli":
        run.supervisors[-1].kill()
        run.supervisors[-1].wait()
        follower = run.train()
        run.wait(lambda: supervises(run, follower.pid), 30.0, "the next supervisor's claim")
        return
    island = run.log()[-1].author if victim == "syncer_main" else chance.choice(run.islands)
    run.signal(signal.SIGKILL, victim, island)


def supervises(run: LiveRun, pid: int) -> bool:
    newest = run.board().newest_supervisor()
    return newest is not None and newest.pid == pid


def kill_many(run: LiveRun, kills: int, seed: int) -> None:
    chance = random.Random(seed)
    run.train()
    run.wait_for_commits(3)
    for number in range(kills):
        moment = time.monotonic() + chance.uniform(0.3, 3.0)
        run.wait(lambda moment=moment: time.monotonic() >= moment, 10.0, "the moment of a kill")
        before = run.log_bytes()
        kill(run, VICTIMS[number % len(VICTIMS)], chance)
        after = run.log_bytes()
        assert after[: len(before)] == before, "a commit that was readable changed"
        run.wait_for_commits(1)
    run.end()
    log = run.log()
    assert log[-1].phase == "final"
    run.check_books()
    for beat in run.heartbeats():
        assert beat.learner.longest_gap < 1.0, f"{beat.island}-{beat.incarnation} stood still: {beat.learner}"
        assert beat.learner.waited_seconds < 2.0


@pytest.mark.timeout(420)
def test_kills_at_random_moments(live: Callable[..., LiveRun]) -> None:
    kill_many(live(tokens=NEVER_REACHED), 8, seed=1)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_more_kills_at_random_moments(live: Callable[..., LiveRun], seed: int) -> None:
    kill_many(live(tokens=NEVER_REACHED), 11, seed)


@pytest.mark.timeout(420)
def test_after_a_kill_of_everything_the_run_goes_on(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=NEVER_REACHED)
    for _ in range(3):
        run.train()
        run.wait_for_commits(25)
        before = run.log_bytes()
        run.kill_everything()
        assert run.log_bytes()[: len(before)] == before
    loss, position = run.held_out_loss(), run.head()
    run.train()
    run.wait_for_commits(12)
    run.end()
    log = run.log()
    assert log[-1].phase == "final"
    assert log[-1].seq > position
    run.check_books()
    assert run.held_out_loss() < loss + 0.02
    check_nothing_trained_twice(run)
    check_steps_continue(run)


def check_steps_continue(run: LiveRun) -> None:
    """Assert that every life counts its inner steps on from the checkpoint that its log says it started from."""
    beats = {(beat.island, beat.incarnation): beat.learner for beat in run.heartbeats()}
    for island in run.islands:
        begun = re.findall(r"life (\d+) starts at .* inner checkpoint \d+/\d+ of step (\d+)", run.island_log(island))
        assert begun, f"no life of {island} had a checkpoint to continue from"
        for life, step in begun:
            learner = beats.get((island, int(life)))
            # A life that was killed before its first heartbeat said nothing of its steps.
            if learner is not None and learner.state != "starting":
                assert learner.step >= int(step) > 0
                assert learner.progress > 0.0


def check_nothing_trained_twice(run: LiveRun) -> None:
    """Assert that no sample whose effect is in the global model was trained again by its island."""
    from diloco_runtime.audit import read_audit

    audit = read_audit(run.board())
    merged = {entry.nonce for commit in audit.commits for entry in commit.merged}
    for island in run.islands:
        for fragment in range(6):
            ranges = sorted(
                (offer.data_from.order(), offer.data_to.order())
                for offer in audit.offers
                if (offer.island, offer.fragment) == (island, fragment) and offer.nonce in merged
            )
            for (_, end), (begin, _) in zip(ranges[:-1], ranges[1:], strict=True):
                assert begin >= end, f"island {island} trained samples twice: {begin} after {end}"
