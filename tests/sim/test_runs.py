"""Whole runs in virtual time: phases, speeds, kills, frozen processes, outages, slow links. Real loops, real logic."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from diloco_runtime.audit import read_audit
from diloco_runtime.config import RunConfig
from diloco_runtime.records import CommitRecord
from tests.support.islands import Archipelago, archipelago
from tests.support.tasks import LinearTask

STEP = 1.0
SETTLED = 10
"""Commits after which islands have started and averages mean something."""


def config(tokens: int = 12_000, **sync: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "runs",
            "tokens": tokens,
            "model": {"kind": "tests.support.tasks:linear"},
            "inner": {"lr": 0.01, "batch_size": 16},
            "sync": {"heartbeat_every": 2.0, "checkpoint_every": 20.0, "takeover_after": 30.0, **sync},
        }
    )


def start(world: Archipelago, offsets: dict[str, float] | None = None) -> Archipelago:
    def later(name: str, seconds: float) -> None:
        world.world.sleep(seconds)
        world.islands[name].start()

    for name in world.islands:
        world.world.spawn(functools.partial(later, name, (offsets or {}).get(name, 0.0)))
    return world


def at(world: Archipelago, seconds: float, action: Any, *arguments: Any) -> None:
    def later() -> None:
        world.world.sleep(seconds)
        action(*arguments)

    world.world.spawn(later)


def finished(world: Archipelago, until: float = 5_000.0) -> list[CommitRecord]:
    world.run(until)
    log = world.log()
    assert log[-1].phase == "final", f"not finished at {world.world.now} s: commit {log[-1].seq} {log[-1].phase}"
    assert read_audit(world.observer()).check() == []
    return log


def offers_per_commit(log: list[CommitRecord]) -> float:
    merges = [commit for commit in log[1:] if commit.phase == "run"]
    return sum(len(commit.merged) for commit in merges) / len(merges)


@pytest.mark.parametrize("offsets", [{}, {"b": 1.0, "c": 2.0, "d": 3.0}, {"b": 0.3, "c": 2.6, "d": 7.9}])
def test_islands_out_of_phase_merge_together(offsets: dict[str, float]) -> None:
    log = finished(start(archipelago(config(), LinearTask, dict.fromkeys("abcd", STEP)), offsets))
    assert offers_per_commit(log) >= 0.9 * 4


@pytest.mark.parametrize("speeds", [{"a": STEP, "b": 4 * STEP}, {"a": 4 * STEP, "b": STEP}])
@pytest.mark.parametrize("offset", [0.0, 1.7])
def test_a_slow_island_contributes_and_slows_nobody(speeds: dict[str, float], offset: float) -> None:
    world = start(archipelago(config(), LinearTask, speeds), {"b": offset})
    log = finished(world)
    assert offers_per_commit(log) >= 0.9 * 2
    fast = world.islands[min(speeds, key=speeds.__getitem__)].learner_status
    assert fast.longest_gap < 1.5 * STEP
    assert fast.busy_seconds >= 0.95 * (world.world.now - 10 * STEP)
    board = world.observer()
    for commit in log[1:]:
        assert commit.phase != "run" or commit.seq == 1 or commit.merged, "a called merge was committed without anybody"
    assert board.read_call(log[-1].seq + 1) is None


@pytest.mark.parametrize(("step", "slow"), [(1.0, 4.05), (0.25, 3.96), (0.25, 3.9)])
def test_a_slow_island_contributes_in_every_phase(step: float, slow: float) -> None:
    """Speeds that are no multiples of each other: calls drift through the slow one's step, and it misses no stretch."""
    log = finished(start(archipelago(config(24_000), LinearTask, {"a": step, "b": slow * step})))
    merged = [len(commit.merged) for commit in log[SETTLED:] if commit.phase == "run"]
    assert len(merged) > 200
    stretches = [sum(merged[first : first + 25]) / 25 for first in range(len(merged) - 25)]
    assert min(stretches) >= 0.9 * 2


def test_a_call_is_answered_at_the_next_step_boundary() -> None:
    """Also one that came in the middle of a step that is as long as a whole period of the one that calls."""
    slow = 4.05 * STEP
    world = start(archipelago(config(), LinearTask, {"a": STEP, "b": slow}))
    written: dict[str, float] = {}
    put = world.store.put

    def note(key: str, data: bytes) -> None:
        written.setdefault(key, world.world.now)
        put(key, data)

    world.store.put = note  # type: ignore[method-assign]
    finished(world)
    keys = world.observer().keys
    waits = [
        offered - written[keys.call(seq)]
        for seq in range(SETTLED, 100)
        if (offered := written.get(keys.offer(seq, "b", 1))) and keys.call(seq) in written
    ]
    assert len(waits) > 50
    assert max(waits) < slow + 0.6 * STEP, "one poll and the way of the offer come on top"
    assert min(waits) < 0.2 * slow, "and phases drift through the whole step"


def test_killed_islands_cost_only_their_own_work() -> None:
    world = start(archipelago(config(16_000), LinearTask, dict.fromkeys("abc", STEP), seed=5))
    for moment, name in ((40.0, "b"), (90.0, "a"), (130.0, "c"), (150.0, "b")):
        at(world, moment, world.islands[name].kill)
        at(world, moment + 12.0, world.islands[name].start)
    log = finished(world)
    for island in world.islands.values():
        assert island.learner_status.longest_gap < 1.5 * STEP
    lives = {(entry.island, entry.incarnation) for commit in log for entry in commit.merged}
    assert {("a", 2), ("b", 3), ("c", 2)} <= lives


def test_nothing_is_trained_twice_after_a_kill() -> None:
    world = start(archipelago(config(16_000), LinearTask, dict.fromkeys("ab", STEP), seed=6))
    for moment in (45.0, 110.0, 160.0):
        at(world, moment, world.islands["b"].kill)
        at(world, moment + 8.0, world.islands["b"].start)
    log = finished(world)
    audit = read_audit(world.observer())
    merged = {entry.nonce for commit in log for entry in commit.merged}
    for fragment in range(6):
        ranges = sorted(
            (offer.data_from.order(), offer.data_to.order())
            for offer in audit.offers
            if offer.island == "b" and offer.fragment == fragment and offer.nonce in merged
        )
        assert len(ranges) > 10
        for (_, end), (begin, _) in zip(ranges[:-1], ranges[1:], strict=True):
            assert begin >= end, "samples whose effect was merged were trained again"


@pytest.mark.parametrize("frozen", ["syncer", "everything"])
def test_a_frozen_merging_syncer_is_replaced_and_wakes_harmlessly(frozen: str) -> None:
    settings = config(takeover_after=10.0)
    world = start(archipelago(settings, LinearTask, dict.fromkeys("abc", STEP), seed=7))
    world.run(60.0)
    author = world.log()[-1].author
    island = world.islands[author]
    parts = ["syncer"] if frozen == "syncer" else list(island.processes)
    before = world.log()
    for part in parts:
        world.world.freeze(island.processes[part])
    world.run(120.0)
    during = world.log()
    assert during[len(before) - 1] == before[-1]
    assert len(during) > len(before) + 5, "nobody took over"
    assert during[-1].author != author
    for part in parts:
        world.world.thaw(island.processes[part])
    log = finished(world)
    assert log[: len(during)] == during
    for other in world.islands.values():
        if other is not island:
            assert other.learner_status.longest_gap < 1.5 * STEP


@pytest.mark.parametrize("seconds", [5.0, 90.0])
def test_an_outage_of_the_store_stalls_and_fails_nobody(seconds: float) -> None:
    world = start(archipelago(config(), LinearTask, dict.fromkeys("abc", STEP), seed=8))
    at(world, 60.0, break_stores, world)
    at(world, 60.0 + seconds, mend_stores, world)
    log = finished(world)
    for island in world.islands.values():
        status = island.learner_status
        assert status.longest_gap < 1.5 * STEP
        assert status.waited_seconds == 0.0 or status.waited_seconds < 5.0
        assert island.syncer is not None
    assert offers_per_commit(log) > 2.5


def break_stores(world: Archipelago) -> None:
    for island in world.islands.values():
        island.store.broken = True


def mend_stores(world: Archipelago) -> None:
    for island in world.islands.values():
        island.store.broken = False


def test_lost_answers_change_nothing() -> None:
    world = archipelago(config(), LinearTask, dict.fromkeys("abc", STEP), seed=9)
    for island in world.islands.values():
        island.store.lost_answers = 0.05
    log = finished(start(world))
    assert offers_per_commit(log) > 2.5
    for island in world.islands.values():
        assert island.learner_status.longest_gap < 1.5 * STEP


def test_a_slow_uplink_starts_early_and_is_merged() -> None:
    world = archipelago(config(), LinearTask, {"a": STEP, "b": STEP}, seed=10)
    world.islands["b"].store.latency = 0.8  # four operations per offer: most of a fragment period
    log = finished(start(world))
    share = sum(any(entry.island == "b" for entry in commit.merged) for commit in log[1:]) / (len(log) - 1)
    assert share > 0.5
    assert world.islands["b"].learner_status.longest_gap < 1.5 * STEP


def test_a_quorum_of_all_goes_on_without_a_dead_island() -> None:
    settings = config(preset="streaming", sync_every=24, min_quorum=3)
    world = start(archipelago(settings, LinearTask, dict.fromkeys("abc", STEP), seed=11))
    at(world, 100.0, world.islands["c"].kill)
    log = finished(world)
    assert {len(commit.merged) for commit in log[5:10]} == {3}
    assert {len(commit.merged) for commit in log[-20:-7]} == {2}


def test_four_islands_start_together_on_an_empty_blackboard() -> None:
    for seed in range(5):
        world = start(archipelago(config(4_000), LinearTask, dict.fromkeys("abcd", STEP), seed=seed))
        log = finished(world)
        first = [key for key in world.observer().store.list(world.observer().keys.blobs(0)) if "params" in key]
        assert len(first) == 6, "a loser of the initialisation left its payloads behind"
        assert [commit.seq for commit in log] == list(range(len(log)))


def test_a_stop_request_drains_and_a_later_run_request_goes_on() -> None:
    from diloco_runtime.records import ControlRecord

    world = start(archipelago(config(12_000), LinearTask, dict.fromkeys("ab", STEP), seed=12))
    board = world.observer()

    def control(number: int, action: Any) -> None:
        record = ControlRecord(run_id=board.run_id, nonce=f"{number:016x}", number=number, action=action)
        board.create(board.keys.control(number), record)

    at(world, 60.0, control, 1, "stop")
    stopped = finished(world)
    assert stopped[-1].reason == "stop"
    assert stopped[-1].credited_total < 12_000 * 216
    control(2, "run")
    for island in world.islands.values():
        island.kill()
        island.start()
    world.run(world.world.now + 10.0)
    world.run(5_000.0)
    log = world.log()
    assert log[: len(stopped)] == stopped
    assert log[-1].phase == "final"
    assert log[-1].reason == "budget"
    assert read_audit(board).check() == []
