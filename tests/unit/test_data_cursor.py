"""Which island reads what: every sample of a pass once, whoever claims when."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.data_cursor import AHEAD, DataCursor, Slice
from diloco_runtime.records import Position
from diloco_runtime.store_counting import CountingStore
from tests.support.readers import UNITS, Reader, Sample, at, new_store, owner, samples, samples_of

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
