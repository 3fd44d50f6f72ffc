"""Looking around over a store: whose heartbeats are read, and what a store that fails does to the picture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.liveness import Peers
from diloco_runtime.peers import LIST_EVERY, PeerReader
from diloco_runtime.records import (
    ClaimRecord,
    HeartbeatRecord,
    LaunchIntent,
    LearnerStatus,
    SupervisorRecord,
    SyncerStatus,
)
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import RUN_ID, run_record

PERIOD, READS = 5.0, 4


class Patchy(Wrapped):
    """A store of which some keys cannot be read."""

    unreadable: tuple[str, ...] = ()

    def get(self, key: str) -> bytes | None:
        if any(part in key for part in self.unreadable):
            raise StoreUnavailable(f"{key} cannot be read")
        return self.inner.get(key)


class Neighbourhood:
    """Islands whose agents write heartbeats, seen from iowa."""

    def __init__(self, clock) -> None:
        self.memory = MemoryStore("unit/peers")
        self.store = Patchy(self.memory)
        self.clock = clock
        board = Blackboard(self.store, RUN_ID, clock, None)
        self.board = Blackboard(self.memory, RUN_ID, clock, None)
        self.board.create_run(run_record())
        self.peers = Peers(READS, PERIOD)
        self.reader = PeerReader(board, clock, self.peers, "iowa")
        self.counters: dict[str, int] = {}
        self.lives: dict[str, int] = {}

    def claim(self, island: str) -> None:
        life = self.lives[island] = self.lives.get(island, 0) + 1
        self.counters[island] = 0
        record = ClaimRecord(
            run_id=RUN_ID, nonce=f"{island}{life}", island=island, incarnation=life, agent=f"{island}{life}",
            host="h", pid=1, started=0.0, claimed_wall=0.0,
        )  # fmt: skip
        self.board.create(self.board.keys.claim(island, life), record)

    def beat(self, *islands: str) -> None:
        for island in islands:
            self.counters[island] += 1
            count, life = self.counters[island], self.lives[island]
            self.board.write_heartbeat(
                HeartbeatRecord(
                    run_id=RUN_ID,
                    nonce="n",
                    island=island,
                    incarnation=life,
                    agent=f"{island}{life}",
                    counter=count,
                    state="running",
                    learner=LearnerStatus(state="training", ticks=count),
                    syncer=SyncerStatus(progress=count),
                    host="h",
                    pid=1,
                    started=0.0,
                )  # fmt: skip
            )

    def supervise(self, number: int, islands: tuple[str, ...], given_up: tuple[str, ...] = ()) -> None:
        record = SupervisorRecord(
            run_id=RUN_ID, nonce=f"s{number}", number=number, supervisor="s", host="h", pid=1, started=0.0,
            islands=islands, given_up=given_up, launching=(LaunchIntent(island="iowa", launches=1, reason="start"),),
        )  # fmt: skip
        self.board.create(self.board.keys.supervisor(number), record)

    def look(self, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += PERIOD
            self.reader.look()

    def alive(self) -> set[str]:
        return set(self.peers.alive(self.clock.now))


@pytest.fixture
def near(clock) -> Iterator[Neighbourhood]:
    found = Neighbourhood(clock)
    yield found
    found.memory.delete_tree("")


def settled(near: Neighbourhood) -> None:
    """Iowa, oregon and tokyo live and have been seen."""
    for island in ("iowa", "oregon", "tokyo"):
        near.claim(island)
    near.beat("iowa", "oregon", "tokyo")
    near.look()
    assert near.alive() == {"iowa", "oregon", "tokyo"}


def test_who_stops_writing_is_noticed_after_n_looks(near: Neighbourhood) -> None:
    settled(near)
    for _ in range(READS):
        assert "oregon" in near.alive()
        near.beat("iowa", "tokyo")
        near.look()
    assert near.alive() == {"iowa", "tokyo"}


def test_an_observer_whose_own_heartbeat_stands_still_judges_nobody(near: Neighbourhood) -> None:
    settled(near)
    near.look(10 * READS)
    assert near.alive() == {"iowa", "oregon", "tokyo"}


def test_what_cannot_be_read_is_not_dead(near: Neighbourhood) -> None:
    settled(near)
    for look in range(6 * READS):
        near.beat("iowa")
        near.store.unreadable = ("islands/oregon/",) if look % READS == 0 else ()
        near.look()
    assert near.alive() == {"iowa", "oregon"}


def test_a_corrupt_heartbeat_is_a_failed_read(near: Neighbourhood) -> None:
    settled(near)
    near.memory.put(near.board.keys.heartbeat("oregon", 1), b"{}")
    for _ in range(2 * READS):
        near.beat("iowa", "tokyo")
        near.look()
    assert near.alive() == {"iowa", "oregon", "tokyo"}


def test_an_outage_is_reported_and_is_nobodys_death(near: Neighbourhood) -> None:
    settled(near)
    near.store.unreadable = ("",)
    for _ in range(10 * READS):
        with pytest.raises(StoreUnavailable):
            near.look()
    near.store.unreadable = ()
    for _ in range(READS):
        near.beat("iowa")
        near.look()
        assert near.alive() == {"iowa", "oregon", "tokyo"}
    near.beat("iowa")
    near.look()
    assert near.alive() == {"iowa"}


def test_a_new_life_is_found_when_the_old_one_stands_still(near: Neighbourhood) -> None:
    settled(near)
    near.claim("oregon")
    near.beat("iowa")
    near.look()
    assert near.peers.islands["oregon"].heartbeat is None, "it has not written a heartbeat yet"
    near.beat("iowa", "oregon")
    near.look()
    heartbeat = near.peers.islands["oregon"].heartbeat
    assert heartbeat is not None and heartbeat.incarnation == 2


def test_a_moving_life_is_not_looked_past(near: Neighbourhood) -> None:
    """One GET per island while its heartbeat moves: claims are read only when it stands still."""
    settled(near)
    near.beat("iowa", "oregon", "tokyo")
    near.store.unreadable = ("claim.json",)
    near.look()
    seen = {name: peer.heartbeat.counter for name, peer in near.peers.islands.items() if peer.heartbeat}
    assert seen == near.counters == {"iowa": 2, "oregon": 2, "tokyo": 2}


def test_the_supervisor_says_whom_to_expect(near: Neighbourhood) -> None:
    near.claim("iowa")
    near.beat("iowa")
    near.supervise(1, ("iowa", "oregon", "paris"), given_up=("paris",))
    near.look()
    assert near.alive() == {"iowa", "oregon"}
    near.supervise(2, ("iowa", "tokyo"))
    near.beat("iowa")
    near.look()
    assert near.alive() == {"iowa", "tokyo"}


def test_islands_that_no_supervisor_named_are_found_by_listing(near: Neighbourhood) -> None:
    near.claim("iowa")
    near.beat("iowa")
    near.supervise(1, ("iowa",))
    near.look()
    near.claim("oregon")
    near.beat("oregon")
    for look in range(1, LIST_EVERY + 1):
        assert near.alive() == {"iowa"}, look
        near.beat("iowa", "oregon")
        near.look()
    assert near.alive() == {"iowa", "oregon"}
