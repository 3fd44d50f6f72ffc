"""Looking at a run: what is read, what is remembered, and movement seen on the observer's own clock."""

import pytest

from diloco_cli.island_report import Scene
from diloco_cli.looking import Observer
from diloco_cli.sights import Sight
from diloco_cli.status import build_report, settled
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import ClaimRecord, SupervisorHeartbeat, encode
from diloco_runtime.store import ObjectStore, open_store
from tests.support.cli_records import CONFIG, RECORD, RUN, TABLE, beat, commit, supervisor

PERIOD = CONFIG.sync.heartbeat_every


class Outages:
    """A store that fails when told to."""

    def __init__(self, inner: ObjectStore) -> None:
        self.inner = inner
        self.url = inner.url
        self.fails_at = ""

    def get(self, key: str) -> bytes | None:
        if self.fails_at and self.fails_at in key:
            raise StoreUnavailable(f"{key}: out")
        return self.inner.get(key)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Stage:
    """A blackboard with one island on it, and an observer with a clock that the test turns."""

    def __init__(self, clock, nonces, name: str) -> None:  # type: ignore[no-untyped-def]
        self.store = Outages(open_store(f"memory://{name}", "demo"))
        self.store.inner.create("run.json", encode(RECORD))
        self.clock = clock
        self.board = Blackboard(self.store, RUN, clock, nonces)  # type: ignore[arg-type]
        self.counter = 0
        self.sights: dict[str, Sight] = {}
        self.observer = Observer(self.board, clock, ("a",), lambda: self.sights)

    def put(self, seq: int, **more: object) -> None:
        record = commit(seq, fragments=TABLE, **more) if seq == 0 else commit(seq, **more)
        self.store.inner.create(self.board.keys.log(seq), encode(record))

    def claim(self, incarnation: int, name: str = "a") -> None:
        record = ClaimRecord(run_id=RUN, nonce="c", island=name, incarnation=incarnation, agent="x", host="here", pid=7,
                             started=1.0, claimed_wall=0.0)  # fmt: skip
        self.store.inner.create(self.board.keys.claim(name, incarnation), encode(record))

    def beat(self, incarnation: int = 1, name: str = "a", **more: object) -> None:
        self.counter += 1
        self.board.write_heartbeat(beat(name, incarnation, self.counter, **more))


@pytest.fixture
def stage(clock, nonces, request) -> Stage:  # type: ignore[no-untyped-def]
    return Stage(clock, nonces, request.node.name)


def test_an_empty_run_can_be_looked_at(stage: Stage) -> None:
    found = stage.observer.look()
    assert found.head is None and found.islands["a"].lives == () and found.news == ()
    assert build_report(RUN, "s", Scene(found, CONFIG, "here")).state == "PENDING"


def test_news_of_the_log_come_once_and_survive_an_outage(stage: Stage) -> None:
    for seq in range(30):
        stage.put(seq)
    first = stage.observer.look()
    assert [c.seq for c in first.news] == [29] and [c.seq for c in first.recent] == list(range(10, 30))
    assert first.table == TABLE
    stage.put(30)
    stage.store.fails_at = "supervisor/"
    with pytest.raises(StoreUnavailable):
        stage.observer.look()
    stage.store.fails_at = ""
    stage.put(31)
    assert [c.seq for c in stage.observer.look().news] == [30, 31]
    assert stage.observer.look().news == ()


def test_movement_is_seen_on_the_observers_own_clock(stage: Stage) -> None:
    stage.claim(1)
    stage.beat()
    assert stage.observer.look().islands["a"].moved is None, "one look tells nothing"
    stage.clock.now += 3.0
    stage.beat()
    assert stage.observer.look().islands["a"].moved == stage.clock.now
    moved = stage.clock.now
    stage.clock.now += 60.0
    found = stage.observer.look()
    assert found.islands["a"].moved == moved and found.at == moved + 60.0


def test_ended_lives_are_remembered(stage: Stage) -> None:
    stage.claim(1)
    stage.beat(1)
    stage.observer.look()
    stage.claim(2)
    assert [b.incarnation for b in stage.observer.look().islands["a"].lives] == [1]
    stage.beat(2)
    found = stage.observer.look().islands["a"]
    assert [b.incarnation for b in found.lives] == [1, 2] and found.incarnation == 2
    assert found.beat is not None and found.beat.incarnation == 2


def test_islands_that_left_the_spec_are_found_by_listing(stage: Stage) -> None:
    stage.claim(1, "old")
    stage.beat(1, "old")
    assert set(stage.observer.look().islands) == {"a", "old"}


def test_a_damaged_heartbeat_is_named_and_harms_no_other(stage: Stage) -> None:
    stage.claim(1)
    stage.store.inner.put(stage.board.keys.heartbeat("a", 1), b"{}\n")
    assert "heartbeat.json is not a valid HeartbeatRecord" in stage.observer.look().unreadable[0]


def test_pace_is_tokens_per_second_of_own_looks(stage: Stage) -> None:
    stage.put(0)
    assert stage.observer.look().pace is None
    stage.clock.now += 10.0
    stage.put(1, credited_total=4000)
    assert stage.observer.look().pace == 10.0


def test_a_status_is_settled_when_everything_moved_or_was_watched_long_enough(stage: Stage) -> None:
    stage.claim(1)
    stage.beat()
    stage.sights = {"a": Sight("l1", pid=7)}
    record = supervisor()
    stage.store.inner.create(stage.board.keys.supervisor(1), encode(record))

    def supervise(counter: int) -> None:
        fields = {"run_id": RUN, "nonce": "b", "number": 1, "supervisor": "s", "counter": counter}
        stage.board.write_supervisor_heartbeat(SupervisorHeartbeat.model_validate(fields))

    supervise(1)
    assert not settled(stage.observer.look(), CONFIG, "here")
    stage.clock.now += 1.0
    stage.beat()
    assert not settled(stage.observer.look(), CONFIG, "here"), "the supervisor has not moved"
    supervise(2)
    assert settled(stage.observer.look(), CONFIG, "here")
    stage.sights = {}
    fresh = Observer(stage.board, stage.clock, ("a",), lambda: stage.sights)
    supervise(3)
    fresh.look()
    supervise(4)
    assert settled(fresh.look(), CONFIG, "here"), "an island without a process here will not move"


def test_an_island_that_never_moves_settles_after_two_periods(stage: Stage) -> None:
    stage.claim(1)
    stage.beat()
    stage.sights = {"a": Sight("l1", pid=7)}
    stage.observer.look()
    stage.clock.now += 2 * PERIOD - 0.1
    assert not settled(stage.observer.look(), CONFIG, "here")
    stage.clock.now += 0.1
    found = stage.observer.look()
    assert settled(found, CONFIG, "here")
    assert build_report(RUN, "s", Scene(found, CONFIG, "here")).islands[0].state == "STALE"
