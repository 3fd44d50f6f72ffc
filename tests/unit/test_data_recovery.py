"""Where an island reads on that comes back, what is left out of one that does not, and a store that fails."""

from __future__ import annotations

import pytest

from diloco_runtime.data_cursor import LOOK_BACK, Slice
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import UnitRecord
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Unwritable, Wrapped
from tests.support.readers import UNITS, Reader, at, new_store, owner, samples
from tests.support.run_records import RUN_ID

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
