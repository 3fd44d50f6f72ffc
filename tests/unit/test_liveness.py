"""Who is alive: neither an outage nor a frozen observer is everyone's death, and no live agent hides a dead learner."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_runtime.liveness import GAP_PERIODS, START_PERIODS, START_SECONDS, STEPS_STILL, Peers, Watch
from diloco_runtime.records import HeartbeatRecord, LearnerStatus, SyncerStatus

PERIOD, READS = 5.0, 4


def beat(
    counter: int,
    ticks: int | None = None,
    turns: int | None = None,
    *,
    name: str = "oregon",
    life: int = 1,
    agent: str = "a",
    state: str = "running",
    learner: dict[str, Any] | None = None,
    score: float = 1.0,
) -> HeartbeatRecord:
    """Return a heartbeat; learner and syncer have moved with the agent unless told otherwise."""
    ticks, turns = (counter if given is None else given for given in (ticks, turns))
    status = LearnerStatus.model_validate({"state": "training", "ticks": ticks, "step_seconds": 1.0, **(learner or {})})
    return HeartbeatRecord.model_validate(
        {"run_id": "00000000", "nonce": "n", "island": name, "incarnation": life, "agent": agent, "counter": counter,
         "state": state, "learner": status, "syncer": SyncerStatus(progress=turns, score=score), "host": "h", "pid": 1,
         "started": 0.0}
    )  # fmt: skip


class Observer:
    """Looks at one island once per heartbeat period."""

    def __init__(self) -> None:
        self.peers = Peers(READS, PERIOD)
        self.now = 0.0
        self.peers.expect(["oregon"], self.now)

    def look(self, heartbeat: HeartbeatRecord | None, counted: bool = True) -> None:
        self.now += PERIOD
        self.peers.heard("oregon", heartbeat, self.now, counted)

    def look_at_the_same(self, times: int, counter: int = 0) -> None:
        for _ in range(times):
            self.look(beat(counter))

    @property
    def failed(self) -> bool:
        return self.peers.failed("oregon")


# ---- one counter ----------------------------------------------------------------------------------------------------


def test_a_value_that_changes_is_alive_however_slowly_it_is_looked_at() -> None:
    watch = Watch(READS, PERIOD)
    for turn in range(50):
        watch.look(turn, now=turn * 4.9)
        assert watch.unchanged == 0 and not watch.failed


def test_death_is_n_spaced_looks_at_the_same_value() -> None:
    watch = Watch(READS, PERIOD)
    for look in range(READS + 1):
        assert (watch.unchanged, watch.failed) == (max(0, look - 1), False)
        watch.look("same", now=look * PERIOD)
    assert (watch.unchanged, watch.failed) == (READS, True)
    watch.look("moved", now=READS * PERIOD + 1.0)
    assert not watch.failed


def test_looks_closer_than_a_heartbeat_count_once() -> None:
    watch = Watch(READS, PERIOD)
    for turn in range(100):
        watch.look("same", now=turn * 0.1)
    assert watch.unchanged == 2, "10 s hold two spaced looks after the first"


def test_a_failed_read_starts_the_count_anew() -> None:
    watch = Watch(READS, PERIOD)
    for look in range(READS):
        watch.look("same", now=look * PERIOD)
    watch.missed()
    for look in range(READS, 2 * READS - 1):
        watch.look("same", now=look * PERIOD)
        assert not watch.failed
    watch.look("same", now=2 * READS * PERIOD)
    assert watch.failed


def test_a_gap_of_the_observer_starts_the_count_anew() -> None:
    for gap, counted in [(GAP_PERIODS * PERIOD, READS), (GAP_PERIODS * PERIOD + 0.1, 0)]:
        watch = Watch(READS, PERIOD)
        for look in range(READS):
            watch.look("same", now=look * PERIOD)
        watch.look("same", now=(READS - 1) * PERIOD + gap)
        assert watch.unchanged == counted


def test_a_look_says_nothing_while_the_observers_own_writes_do_not_arrive() -> None:
    watch = Watch(READS, PERIOD)
    for look in range(100):
        watch.look("same", now=look * PERIOD, counted=False)
    assert watch.unchanged == 0
    for look in range(100, 100 + READS):
        assert not watch.failed
        watch.look("same", now=look * PERIOD)
    assert watch.failed


# ---- an island ------------------------------------------------------------------------------------------------------


def test_an_island_whose_agent_stands_still_has_failed() -> None:
    observer = Observer()
    observer.look_at_the_same(READS)
    assert not observer.failed and observer.peers.alive(observer.now) == {"oregon"}
    observer.look_at_the_same(1)
    assert observer.failed and observer.peers.alive(observer.now) == observer.peers.training(observer.now) == set()


def test_a_live_agent_cannot_hide_a_hung_learner() -> None:
    observer = Observer()
    for counter in range(READS + 1):
        assert not counter or not observer.failed
        observer.look(beat(counter, ticks=7))
    assert observer.failed
    observer.look(beat(99, ticks=8))
    assert not observer.failed, "it was only slow"


def test_a_learner_that_waits_on_purpose_is_alive() -> None:
    observer = Observer()
    for counter in range(3 * READS):
        observer.look(beat(counter, learner={"state": "waiting", "step": 5}))
    assert observer.peers.training(observer.now) == {"oregon"}


def test_a_hung_syncer_takes_no_duty_and_the_island_goes_on() -> None:
    observer = Observer()
    observer.look(beat(0, score=3.0))
    assert observer.peers.syncers() == {"oregon": 3.0}
    for counter in range(1, READS + 2):
        observer.look(beat(counter, turns=0))
    assert observer.peers.syncers() == {} and not observer.failed


def test_a_new_life_is_alive_from_its_first_heartbeat() -> None:
    observer = Observer()
    observer.look_at_the_same(READS + 1)
    assert observer.failed
    observer.look(beat(0, life=2))
    assert not observer.failed
    observer.look_at_the_same(READS + 1)
    observer.look(beat(0, agent="b"))
    assert not observer.failed, "a new agent that continues the same incarnation"


@pytest.mark.parametrize("state", ["stopped", "failed"])
def test_an_island_that_says_it_stopped_is_believed_at_once(state: str) -> None:
    observer = Observer()
    observer.look(beat(0, state=state))
    assert observer.failed and observer.peers.syncers() == {}


# ---- outages --------------------------------------------------------------------------------------------------------


def test_an_outage_of_the_store_is_nobodys_death() -> None:
    """Nobody could write during the outage, so the counters stand still for one more look after it."""
    observer = Observer()
    observer.look_at_the_same(READS)
    for _ in range(50):
        observer.now += PERIOD
        observer.peers.missed("oregon")
    observer.look_at_the_same(READS)
    assert not observer.failed and observer.peers.alive(observer.now) == {"oregon"}
    observer.look_at_the_same(1)
    assert observer.failed, "and a death after the outage is noticed as usual"


def test_a_single_failed_read_is_enough() -> None:
    observer = Observer()
    for _ in range(10):
        observer.look_at_the_same(READS)
        observer.peers.missed("oregon")
    assert not observer.failed


def test_a_frozen_observer_wakes_up_among_the_living() -> None:
    observer = Observer()
    observer.look_at_the_same(READS)
    observer.now += 10_000.0
    observer.look_at_the_same(READS)
    assert not observer.failed
    observer.look_at_the_same(1)
    assert observer.failed


def test_an_observer_that_cannot_write_declares_nobody_dead() -> None:
    observer = Observer()
    for _ in range(50):
        observer.look(beat(0), counted=False)
    assert not observer.failed


def test_a_failed_read_of_an_unknown_island_is_ignored() -> None:
    peers = Peers(READS, PERIOD)
    peers.missed("nobody")
    assert peers.islands == {}


# ---- starting and leaving -------------------------------------------------------------------------------------------


def test_an_island_that_was_asked_for_is_waited_for_while_it_may_be_starting() -> None:
    observer = Observer()
    limit = max(START_SECONDS, 24 * PERIOD)
    assert observer.peers.alive(limit - 0.1) == {"oregon"} and observer.peers.training(0.0) == set()
    assert observer.peers.alive(limit) == set()
    observer.look(beat(0, learner={"state": "starting"}))
    assert observer.peers.alive(1e6) == {"oregon"} and observer.peers.training(1e6) == set()


def test_nobody_waits_for_an_island_that_nobody_asked_for() -> None:
    observer = Observer()
    observer.peers.heard("ames", None, 0.0, True)
    observer.peers.expect(["tokyo"], 1.0)
    assert observer.peers.alive(2.0) == {"tokyo"}
    observer.look(beat(0))
    assert observer.peers.alive(observer.now) == {"tokyo", "oregon"}, "asked for or not, it is there"


def test_a_life_without_a_heartbeat_yet_is_a_start() -> None:
    observer = Observer()
    observer.look_at_the_same(READS + 1)
    observer.now += 1000.0
    observer.look(None)
    assert not observer.failed and observer.peers.alive(observer.now) == {"oregon"}
    assert observer.peers.alive(observer.now + max(START_SECONDS, 24 * PERIOD)) == set()


def test_a_finished_learner_is_neither_failed_nor_waited_for() -> None:
    observer = Observer()
    observer.look(beat(0, learner={"state": "finished"}))
    assert not observer.failed and observer.peers.alive(observer.now) == set()
    assert observer.peers.syncers() == {"oregon": 1.0}, "its syncer may still merge"


@pytest.mark.parametrize(
    ("state", "learner", "expected"),
    [
        ("running", "training", True),
        ("running", "waiting", True),
        ("running", "draining", True),
        ("running", "starting", False),
        ("running", "failed", False),
        ("leaving", "training", False),
        ("starting", "starting", False),
    ],
)
def test_offers_are_expected_of_running_islands_past_their_start(state: str, learner: str, expected: bool) -> None:
    observer = Observer()
    observer.look(beat(0, state=state, learner={"state": learner}))
    assert ("oregon" in observer.peers.training(observer.now)) == expected


def test_the_living_tell_how_many_merges_may_be_open_and_the_shortest_step() -> None:
    peers = Peers(READS, PERIOD)
    assert (peers.in_flight(), peers.step_seconds()) == (1, None)
    for name, merges, seconds, state in [("a", 2, 0.5, "running"), ("b", 3, 0.2, "running"), ("c", 9, 0.1, "stopped")]:
        learner = {"in_flight": merges, "step_seconds": seconds}
        peers.heard(name, beat(0, name=name, state=state, learner=learner), 0.0, True)
    peers.heard("d", beat(0, name="d"), 0.0, True)
    assert (peers.in_flight(), peers.step_seconds()) == (3, 0.2)


@pytest.mark.parametrize(
    ("learner", "patience"),
    [
        ({"state": "starting"}, START_PERIODS * PERIOD),
        ({"state": "training", "step_seconds": None}, START_PERIODS * PERIOD),
        ({"step_seconds": 40.0}, STEPS_STILL * 40.0),
        ({"step_seconds": 0.1}, 0.0),
    ],
)
def test_a_learner_has_the_time_that_its_start_or_its_steps_take(learner: dict[str, Any], patience: float) -> None:
    observer, still = Observer(), -PERIOD
    for counter in range(200):
        observer.look(beat(counter, ticks=7, learner=learner))
        still += PERIOD
        assert observer.failed == (still >= max(patience, READS * PERIOD)), f"after {still} s"


def test_a_new_learner_life_is_no_news_of_the_syncer_beside_it() -> None:
    """A hung syncer is not to pass for a living one while its island's learner is started again and again."""
    observer = Observer()
    for number in range(READS + 1):
        observer.look(beat(number, turns=7, life=1 + number // 2))
    assert observer.peers.syncers() == {}
    assert not observer.failed
    observer.look(beat(READS + 1, turns=7, life=9, agent="b"))
    assert observer.peers.syncers() == {"oregon": 1.0}
