"""A create that failed is settled by reading back: mine, another's, or still unknown."""

from __future__ import annotations

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import encode
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import LateWrite, LostAnswer, RetryingClient, Unwritable, Wrapped
from tests.behaviours.samples import RUN_ID, call_record, run_record


@pytest.fixture
def faulty(request: pytest.FixtureRequest, store: ObjectStore, clock, nonces) -> Blackboard:
    """Return the blackboard of an existing run over a faulty store."""
    Blackboard(store, RUN_ID, clock, nonces).create_run(run_record())
    return Blackboard(request.param(store), RUN_ID, clock, nonces)


@pytest.mark.parametrize("faulty", [LostAnswer, RetryingClient, LateWrite], indirect=True)
def test_my_own_write_is_recognised(faulty: Blackboard, store: ObjectStore) -> None:
    key, mine = faulty.keys.call(1), call_record(1, "mine")
    assert faulty.create(key, mine) == mine
    assert store.get(key) == encode(mine)


@pytest.mark.parametrize("faulty", [LostAnswer, RetryingClient, LateWrite, Unwritable], indirect=True)
def test_anothers_write_is_recognised(faulty: Blackboard, store: ObjectStore) -> None:
    key, theirs = faulty.keys.call(1), call_record(1, "theirs")
    store.create(key, encode(theirs))
    assert faulty.create(key, call_record(1, "mine")) == theirs
    assert store.get(key) == encode(theirs)


@pytest.mark.parametrize("faulty", [LateWrite], indirect=True)
def test_absent_on_reading_back_is_not_lost(faulty: Blackboard) -> None:
    """The write of the first try lands after the read-back: the second try has to send the very same bytes."""
    mine = call_record(1, "mine")
    assert faulty.create(faulty.keys.call(1), mine).nonce == "mine"
    assert faulty.store.bodies == [encode(mine)] * 2


@pytest.mark.parametrize("faulty", [Unwritable], indirect=True)
def test_an_unknown_outcome_is_an_error_and_the_same_record_can_be_tried_later(faulty: Blackboard) -> None:
    key, mine = faulty.keys.call(1), call_record(1, "mine")
    with pytest.raises(StoreUnavailable, match=f"{key}.*outcome unknown"):
        faulty.create(key, mine)
    assert set(faulty.store.bodies) == {encode(mine)}
    assert faulty.read_call(1) is None
    faulty.store.broken = False
    assert faulty.create(key, mine) == mine


def test_two_first_writers_of_run_json_agree(store: ObjectStore, clock, nonces) -> None:
    one = Blackboard(LostAnswer(store), "", clock, nonces).create_run(run_record("11111111", "one"))
    two = Blackboard(Wrapped(store), "", clock, nonces).create_run(run_record("22222222", "two"))
    assert one == two == run_record("11111111", "one")
