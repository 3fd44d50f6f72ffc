"""Which island reads what: every sample of a pass once, whoever claims when, whoever dies and comes back."""

from __future__ import annotations

import itertools
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.data_cursor import AHEAD, LOOK_BACK, DataCursor, Slice, UnitClaimer
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import Position, UnitRecord
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_counting import CountingStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import Unwritable, Wrapped
from tests.behaviours.samples import run_record
from tests.support.run_records import RUN_ID
from tests.support.world import World, WorldClock, WorldNonces

_numbers = itertools.count()
UNITS = 5
Sample = tuple[int, int, int]


def samples_of(data_pass: int, unit_index: int) -> int:
    """Return sizes that differ from unit to unit and from pass to pass: 3 to 6 samples."""
    return 3 + (data_pass + unit_index) % 4


def at(data_pass: int, unit_index: int, offset: int) -> Position:
    return Position(data_pass=data_pass, unit_index=unit_index, offset=offset)


def new_store() -> MemoryStore:
    store = MemoryStore(f"unit/cursor-{next(_numbers)}")
    Blackboard(store, "", WorldClock(World()), WorldNonces(World())).create_run(run_record(RUN_ID))
    return store


class Reader:
    """One life of an island: its cursor, its claimer, and what it has read for the first time."""

    def __init__(
        self, store: ObjectStore, name: str, life: int = 1, start: Position | None = None, units: int = UNITS
    ) -> None:
        world, start = World(life + 1000 * len(name)), start or Position()
        self.name, self.life = name, life
        self.board = Blackboard(store, RUN_ID, WorldClock(world), WorldNonces(world))
        self.cursor = DataCursor(samples_of, start)
        self.claimer = UnitClaimer(self.board, self.cursor, name, life, units, start)
        self.read: list[Sample] = []

    def claim(self) -> None:
        """Claim until nothing more is wanted."""
        while self.claimer.claim_once():
            pass

    def take(self, count: int) -> Slice:
        found = self.cursor.take(count)
        assert 1 <= found.count <= count
        assert found.start + found.count <= samples_of(found.data_pass, found.unit_index)
        if not found.reread:
            numbers = range(found.start, found.start + found.count)
            self.read += [(found.data_pass, found.unit_index, number) for number in numbers]
        return found

    def take_all(self) -> None:
        """Read everything that is claimed."""
        while self.cursor.ready() and self.cursor.wanted() < 1 + AHEAD:
            self.take(100)


def owner(board: Blackboard, data_pass: int, unit_index: int) -> str | None:
    record = board.read_unit(data_pass, unit_index)
    return None if record is None else record.island


def samples(data_pass: int, *units: int) -> list[Sample]:
    return [(data_pass, unit, number) for unit in units for number in range(samples_of(data_pass, unit))]


# ---- reading --------------------------------------------------------------------------------------------------------


def test_slices_follow_each_other_and_end_with_their_unit() -> None:
    cursor = DataCursor(lambda p, u: 5, Position())
    assert not cursor.ready() and cursor.wanted() == 1 + AHEAD
    with pytest.raises(RuntimeError, match="nothing was claimed yet"):
        cursor.take(2)
    cursor.claimed(0, 1)
    cursor.claimed(0, 4)
    assert cursor.ready() and cursor.wanted() == AHEAD - 1
    found = [cursor.take(2) for _ in range(4)]
    assert [(s.unit_index, s.start, s.count) for s in found] == [(1, 0, 2), (1, 2, 2), (1, 4, 1), (4, 0, 2)]
    assert cursor.position == at(0, 4, 2) and cursor.wanted() == AHEAD


def test_without_a_further_unit_the_newest_is_read_again_and_the_position_stays() -> None:
    cursor = DataCursor(lambda p, u: 5, Position())
    cursor.claimed(0, 2)
    cursor.take(5)
    again = [cursor.take(2) for _ in range(4)]
    assert [(s.unit_index, s.start, s.count) for s in again] == [(2, 0, 2), (2, 2, 2), (2, 4, 1), (2, 0, 2)]
    assert all(s.reread for s in again) and cursor.position == at(0, 2, 5)
    cursor.claimed(0, 3)
    assert cursor.take(2) == Slice(0, 3, 0, 2, reread=False)
    assert cursor.position == at(0, 3, 2)
    cursor.take(9)
    assert cursor.take(2) == Slice(0, 3, 0, 2, reread=True)


def test_units_that_were_read_and_units_that_are_known_are_not_taken_again() -> None:
    cursor = DataCursor(lambda p, u: 5, at(1, 3, 2))
    for data_pass, unit_index in [(0, 4), (1, 2), (1, 3), (1, 3), (2, 0), (1, 1)]:
        cursor.claimed(data_pass, unit_index)
    assert cursor.wanted() == AHEAD - 1
    assert [cursor.take(9) for _ in range(2)] == [Slice(1, 3, 2, 3, False), Slice(2, 0, 0, 5, False)]
    finished = DataCursor(lambda p, u: 5, at(1, 3, 5))
    finished.claimed(1, 3)
    assert finished.wanted() == 1 + AHEAD


# ---- claiming -------------------------------------------------------------------------------------------------------


def test_units_are_claimed_lowest_first_and_two_ahead() -> None:
    store = CountingStore(new_store())
    reader = Reader(store, "iowa")
    reader.claim()
    assert [owner(reader.board, 0, unit) for unit in range(4)] == ["iowa"] * 3 + [None]
    assert store.requests["create"] == 3
    assert not reader.claimer.claim_once() and store.requests["create"] == 3
    reader.take(2)
    assert not reader.claimer.claim_once(), "a unit that is being read counts"
    reader.take(1)
    assert reader.claimer.claim_once() and owner(reader.board, 0, 3) == "iowa"


def test_units_that_others_claimed_meanwhile_are_passed_over_without_a_create_each() -> None:
    inner = new_store()
    store = CountingStore(inner)
    reader = Reader(store, "iowa", units=80)
    reader.claimer.claim_once()
    for name in ("oregon", "tokyo", "lima", "oslo"):
        Reader(inner, name, units=80).claim()
    assert reader.claimer.claim_once() and owner(reader.board, 0, 12) == "iowa"
    assert store.requests["create"] == 1 and store.requests["get"] < 24


def test_two_islands_share_a_pass_and_then_the_next() -> None:
    store = new_store()
    readers = [Reader(store, "iowa"), Reader(store, "oregon")]
    for _ in range(12):
        for reader in readers:
            reader.claimer.claim_once()
            if reader.cursor.ready():
                reader.take(2)
    for reader in readers:
        reader.take_all()
    assert all(len({unit for _, unit, _ in reader.read}) > 1 for reader in readers)
    read = Counter(readers[0].read + readers[1].read)
    assert set(read.values()) == {1}, "a sample was read twice in one pass"
    assert set(samples(0, *range(UNITS))) <= set(read), "the first pass was not read whole"
    assert any(data_pass == 1 for data_pass, _, _ in read)


def test_a_pass_of_one_unit_is_followed_by_the_next_pass() -> None:
    reader = Reader(new_store(), "iowa", units=1)
    reader.claim()
    assert [owner(reader.board, number, 0) for number in range(4)] == ["iowa", "iowa", "iowa", None]
    reader.take_all()
    assert reader.read == samples(0, 0) + samples(1, 0) + samples(2, 0)


NAMES = st.sampled_from(["iowa", "oregon", "tokyo"])
EVENTS = st.lists(st.tuples(NAMES, st.sampled_from(["claim", "claim", "read", "read", "die"])), max_size=120)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(events=EVENTS, count=st.integers(1, 4))
def test_whoever_claims_reads_and_restarts_when_no_sample_is_read_twice_or_left_out(
    events: list[tuple[str, str]], count: int
) -> None:
    store = new_store()
    readers = {name: Reader(store, name) for name in ("iowa", "oregon", "tokyo")}
    read: list[Sample] = []
    for name, event in events:
        reader = readers[name]
        if event == "claim":
            reader.claimer.claim_once()
        elif event == "read" and reader.cursor.ready():
            reader.take(count)
        elif event == "die":
            read += reader.read
            readers[name] = Reader(store, name, reader.life + 1, reader.cursor.position)
    for reader in readers.values():
        reader.claim()
        reader.take_all()
        assert reader.read == sorted(reader.read), "an island went back"
        read += reader.read
    counted = Counter(read)
    assert not [sample for sample, times in counted.items() if times > 1]
    claimed = [(p, u) for p in range(99) for u in range(UNITS) if owner(readers["iowa"].board, p, u)]
    assert set(counted) == {(p, u, number) for p, u in claimed for number in range(samples_of(p, u))}
    store.delete_tree("")


def test_the_learner_reads_while_the_follower_claims() -> None:
    """Two threads per island, two islands: nothing is read twice, nothing is skipped."""
    store, stop, pause = new_store(), threading.Event(), threading.Event()
    readers = [Reader(store, "iowa", units=80), Reader(store, "oregon", units=80)]

    def claims(reader: Reader) -> None:
        while not stop.is_set():
            if not reader.claimer.claim_once():
                pause.wait(0.0005)

    def reads(reader: Reader) -> None:
        while len(reader.read) < 100:
            if reader.cursor.wanted() < 1 + AHEAD:
                reader.take(2)
            else:
                pause.wait(0.0005)

    claimers = [threading.Thread(target=claims, args=(reader,), daemon=True) for reader in readers]
    learners = [threading.Thread(target=reads, args=(reader,), daemon=True) for reader in readers]
    for thread in claimers + learners:
        thread.start()
    for thread in learners:
        thread.join(20)
    stop.set()
    for thread in claimers:
        thread.join(20)
    assert not any(thread.is_alive() for thread in claimers + learners)
    for reader in readers:
        reader.take_all()
    read = Counter(readers[0].read + readers[1].read)
    claimed = [u for u in range(80) if owner(readers[0].board, 0, u)]
    assert set(read.values()) == {1} and sorted(read) == samples(0, *claimed)


# ---- coming back ----------------------------------------------------------------------------------------------------


def test_a_new_life_goes_on_at_the_position_with_the_units_it_owns() -> None:
    store = new_store()
    first, other = Reader(store, "iowa"), Reader(store, "oregon")
    for reader in (first, first, other, other):
        reader.claimer.claim_once()
    first.claim()
    assert [owner(first.board, 0, unit) for unit in range(4)] == ["iowa", "oregon", "iowa", "iowa"]
    first.take(100)
    first.take(2)
    assert first.cursor.position == at(0, 2, 2)
    second = Reader(store, "iowa", 2, first.cursor.position)
    second.claim()
    second.take_all()
    assert second.read == [*samples(0, 2)[2:], *samples(0, 3), *samples(0, 4)]
    assert owner(second.board, 0, 1) == "oregon"


def test_a_restart_reads_nothing_before_it_has_found_the_rest_of_its_unit() -> None:
    """It knows its position at once, and reading again would train what is merged a second time."""
    store = new_store()
    first = Reader(store, "iowa")
    first.claim()
    first.take(2)
    second = Reader(store, "iowa", 2, first.cursor.position)
    assert not second.cursor.ready()
    second.claimer.claim_once()
    assert second.cursor.ready() and second.take(1) == Slice(0, 0, 2, 1, reread=False)


def test_a_restart_at_the_end_of_a_unit_reads_it_again_rather_than_wait_for_ever() -> None:
    store = new_store()
    only = Reader(store, "iowa", units=1)
    only.claimer.claim_once()
    only.claimer.claim_once()
    only.take(100)
    store_of_second = Unwritable(store)
    second = Reader(store_of_second, "iowa", 2, only.cursor.position, units=1)
    second.claimer.claim_once()
    with pytest.raises(StoreUnavailable):
        second.claimer.claim_once()
    assert second.cursor.ready() and second.take(1).reread


def test_a_position_before_the_end_of_a_pass_leads_into_the_next_one() -> None:
    store = new_store()
    first = Reader(store, "iowa")
    for _ in range(4):
        first.claim()
        first.take(100)
    assert [owner(first.board, 1, unit) for unit in range(2)] == ["iowa", None]
    second = Reader(store, "iowa", 2, at(0, 3, 1))
    second.claim()
    second.take_all()
    assert second.read == [*samples(0, 3)[1:], *samples(0, 4), *samples(1, 0)]


def test_without_a_position_a_new_life_finds_what_it_owns_from_its_claims() -> None:
    """An island that died before its first offer and its first checkpoint."""
    store = new_store()
    Reader(store, "oregon").claimer.claim_once()
    other, first = Reader(store, "oregon"), Reader(store, "iowa")
    other.claimer.claim_once()
    other.claimer.claim_once()
    first.claim()
    assert [owner(first.board, 0, unit) for unit in range(4)] == ["oregon", "iowa", "iowa", "iowa"]
    second = Reader(store, "iowa", 2)
    second.claim()
    second.take_all()
    assert second.read == samples(0, 1, 2, 3)


def test_without_a_position_only_the_newest_claims_are_searched() -> None:
    store = new_store()
    board = Reader(store, "iowa").board
    taken = LOOK_BACK + 10
    for unit in range(taken):
        name = "iowa" if unit in (9, 10, taken - 1) else "oregon"
        record = UnitRecord(run_id=RUN_ID, nonce=f"{unit}", data_pass=0, unit_index=unit, island=name, incarnation=1)
        board.create(board.keys.unit(0, unit), record)
    reader = Reader(store, "iowa", 2, units=2 * LOOK_BACK)
    reader.claim()
    reader.take_all()
    assert reader.read == samples(0, 10, taken - 1, taken)


# ---- islands that do not come back ----------------------------------------------------------------------------------


def test_what_a_lost_island_claimed_is_left_out_in_this_pass_and_read_in_the_next() -> None:
    store = new_store()
    lost, alive = Reader(store, "iowa"), Reader(store, "oregon")
    lost.claim()
    lost.take(1)
    for _ in range(4):
        alive.claim()
        alive.take(100)
        alive.take_all()
    assert not {unit for data_pass, unit, _ in alive.read if data_pass == 0} & {0, 1, 2}
    assert samples(0, 3, 4) == [sample for sample in alive.read if sample[0] == 0]
    assert set(samples(1, *range(UNITS))) <= set(alive.read)
    unread = [(0, unit) for unit in range(UNITS) if owner(alive.board, 0, unit) == "iowa"]
    assert unread == [(0, 0), (0, 1), (0, 2)], "the claims tell what was lost"


# ---- a store that fails ---------------------------------------------------------------------------------------------


class Unreadable(Wrapped):
    """Reads fail as soon as `answers` of them were answered."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.answers = 10**9

    def get(self, key: str) -> bytes | None:
        if self.answers <= 0:
            raise StoreUnavailable(f"no answer for {key}")
        self.answers -= 1
        return self.inner.get(key)


def test_a_claim_of_unknown_outcome_is_tried_again_with_the_same_bytes() -> None:
    store = Unwritable(new_store())
    reader = Reader(store, "iowa")
    reader.claimer.claim_once()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="outcome unknown"):
            reader.claimer.claim_once()
    assert not reader.cursor.ready()
    store.broken = False
    assert reader.claimer.claim_once()
    assert len(store.bodies) > 3 and len(set(store.bodies)) == 1
    assert reader.take(100) == Slice(0, 0, 0, 3, reread=False)


def test_a_unit_that_another_island_took_during_the_outage_is_the_others() -> None:
    inner = new_store()
    store = Unwritable(inner)
    reader, other = Reader(store, "iowa"), Reader(inner, "oregon")
    reader.claimer.claim_once()
    with pytest.raises(StoreUnavailable):
        reader.claimer.claim_once()
    other.claimer.claim_once()
    other.claimer.claim_once()
    store.broken = False
    assert reader.claimer.claim_once() and not reader.cursor.ready()
    reader.claim()
    assert [owner(reader.board, 0, unit) for unit in range(4)] == ["oregon", "iowa", "iowa", "iowa"]
    assert reader.take(1).unit_index == 1


@pytest.mark.parametrize("answers", range(12))
def test_an_outage_anywhere_in_the_recovery_loses_nothing(answers: int) -> None:
    inner = new_store()
    first = Reader(inner, "iowa")
    first.claim()
    first.take(100)
    first.take(1)
    store = Unreadable(inner)
    second = Reader(store, "iowa", 2, first.cursor.position)
    store.answers = answers
    try:
        second.claim()
    except StoreUnavailable:
        store.answers = 10**9
        second.claim()
    second.take_all()
    assert second.read == [*samples(0, 1)[1:], *samples(0, 2, 3)]
