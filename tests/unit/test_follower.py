"""The learner's inbox: commits in order and whole, payloads fetched before they are asked for."""

from __future__ import annotations

import pytest
import torch

from diloco_runtime.codec import encode_fragment
from diloco_runtime.errors import CorruptObject, MissingPayload, StoreUnavailable
from diloco_runtime.store_counting import CountingStore
from tests.support.inbox import Inbox, Selective, follower_of
from tests.support.run_records import commit


@pytest.fixture
def inbox(clock, nonces) -> Inbox:
    box = Inbox(clock, nonces)
    box.settle()
    box.store.read.clear()
    return box


# ---- following ------------------------------------------------------------------------------------------------------


def test_commits_are_fetched_before_the_learner_asks_and_handed_over_in_order(inbox: Inbox) -> None:
    assert inbox.take() == [] and not inbox.follower.pending() and not inbox.follower.has_ready()
    inbox.follower.news.clear()
    inbox.log.grow(2)
    assert inbox.follower.follow_once()
    assert inbox.follower.news.is_set() and inbox.follower.has_ready() and inbox.follower.head == inbox.log.head
    assert inbox.store.payloads() == [1, 2]
    assert inbox.take() == [(1, 1.0), (2, 2.0)]
    assert inbox.store.payloads() == [], "taking reads nothing"
    assert inbox.take() == [] and not inbox.follower.pending()
    inbox.log.grow()
    assert inbox.follower.follow_once() and inbox.take() == [(3, 3.0)]


def test_a_poll_without_news_is_two_requests(clock, nonces) -> None:
    """One GET of the next log key, one of the next call key: what the cost of a run is computed from."""
    box = Inbox(clock, nonces)
    box.settle()
    counting = CountingStore(box.store)
    box.follower, cursor = follower_of(box.log, counting, clock, nonces)
    box.settle()
    assert cursor.wanted() == 0
    before = dict(counting.requests)
    assert not box.follower.follow_once()
    assert {verb: n - before[verb] for verb, n in counting.requests.items() if n != before[verb]} == {"get": 2}


def test_a_look_claims_one_data_unit_at_most(clock, nonces) -> None:
    box = Inbox(clock, nonces)
    wanted = []
    while box.follower.follow_once():
        wanted.append(box.cursor.wanted())
    assert wanted == [3, 2, 1, 0], "the first look recovers what earlier lives own"


def test_calls_are_followed_up_to_one_round_beyond_the_head(inbox: Inbox) -> None:
    assert inbox.follower.called == 0
    inbox.log.call(1, 3)
    inbox.follower.news.clear()
    assert inbox.follower.follow_once() and inbox.follower.called == 1 and inbox.follower.news.is_set()
    inbox.log.call(2, 4, 5)
    assert inbox.follower.follow_once() and inbox.follower.called == 3
    assert not inbox.follower.follow_once()
    inbox.log.grow()
    assert inbox.follower.follow_once() and inbox.follower.called == 4


def test_a_commit_is_called_even_when_nobody_created_the_call(inbox: Inbox) -> None:
    inbox.log.grow(2)
    inbox.follower.follow_once()
    assert inbox.follower.called == 2


def test_the_chain_is_verified(inbox: Inbox) -> None:
    inbox.log.grow()
    inbox.settle()
    inbox.log.grow(parent="another")
    for _ in range(2):
        with pytest.raises(CorruptObject, match=f"{inbox.log.board.keys.log(2)} does not continue the log"):
            inbox.follower.follow_once()
    assert inbox.follower.head.seq == 1 and inbox.take() == [(1, 1.0)]


def test_a_commit_of_another_fragment_than_its_seq_says_is_refused(inbox: Inbox) -> None:
    inbox.log.grow(fragment=1)
    with pytest.raises(CorruptObject, match=f"{inbox.log.board.keys.log(1)} merges the wrong fragment"):
        inbox.follower.follow_once()
    assert inbox.follower.head.seq == 0 and inbox.take() == []


# ---- catching up ----------------------------------------------------------------------------------------------------


def test_of_every_fragment_only_the_newest_version_is_fetched(inbox: Inbox) -> None:
    inbox.log.grow(8)
    inbox.follower.follow_once()
    assert inbox.store.payloads() == [6, 7, 8]
    superseded = [(seq, None) for seq in range(1, 6)]
    assert inbox.take() == [*superseded, (6, 6.0), (7, 7.0), (8, 8.0)]


def test_commits_that_supersede_each_other_are_handed_over_together(inbox: Inbox) -> None:
    """Else the learner would count a version as adopted whose values it does not hold."""
    inbox.log.grow(5)
    inbox.store.broken = {inbox.log.payload_key(5)}
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            inbox.follower.follow_once()
        assert inbox.take() == [] and not inbox.follower.has_ready() and inbox.follower.pending()
    assert inbox.store.payloads() == [3, 4], "what was fetched is not fetched again"
    inbox.store.broken.clear()
    assert inbox.follower.follow_once()
    assert inbox.take() == [(1, None), (2, None), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert not inbox.follower.pending()


def test_a_batch_is_not_whole_while_the_newest_version_of_any_fragment_is_missing(clock, nonces) -> None:
    """Though an older version of that fragment, in the same batch, was fetched."""
    box = Inbox(clock, nonces, fragments=2)
    box.settle()
    for length, missing in ((3, 3), (8, 8)):
        box.log.grow(length - box.log.head.seq)
        box.store.broken = {box.log.payload_key(missing)}
        with pytest.raises(StoreUnavailable):
            box.follower.follow_once()
        assert box.take() == []
    box.store.broken.clear()
    assert box.follower.follow_once()
    taken = box.take()
    assert [seq for seq, _ in taken] == list(range(1, 9))
    assert taken[-2:] == [(7, 7.0), (8, 8.0)]


def test_what_does_not_depend_on_a_missing_payload_is_handed_over_before_it(inbox: Inbox) -> None:
    inbox.log.grow(3)
    inbox.store.broken = {inbox.log.payload_key(2)}
    with pytest.raises(StoreUnavailable):
        inbox.follower.follow_once()
    assert inbox.take() == [(1, 1.0)] and inbox.follower.pending()
    inbox.store.broken.clear()
    inbox.follower.follow_once()
    assert inbox.take() == [(2, 2.0), (3, 3.0)]


# ---- what is not there, and what is not what it should be -----------------------------------------------------------


def test_a_collected_payload_makes_it_read_the_head_again(inbox: Inbox) -> None:
    """Between reading commit 1 and fetching its payload the run went on and collected it."""
    inbox.log.grow()

    class Moving(Selective):
        """The run moves on while the payload is asked for."""

        def get(self, key: str) -> bytes | None:
            if key == inbox.log.payload_key(1) and inbox.log.head.seq == 1:
                inbox.log.grow(6)
                inbox.log.collect(1, 2, 3)
            return super().get(key)

    inbox.store.inner = Moving(inbox.store.inner)
    assert inbox.follower.follow_once()
    assert inbox.take() == [*((seq, None) for seq in (1, 2, 3, 4)), (5, 5.0), (6, 6.0), (7, 7.0)]
    assert inbox.follower.head.seq == 7 and not inbox.follower.pending()


def test_a_payload_that_is_gone_without_a_newer_one_is_an_error_until_there_is_one(inbox: Inbox) -> None:
    inbox.log.grow()
    inbox.log.collect(1)
    for _ in range(2):
        with pytest.raises(MissingPayload, match=f"{inbox.log.payload_key(1)} is gone"):
            inbox.follower.follow_once()
        assert inbox.take() == [] and inbox.follower.pending()
    inbox.log.grow(2)
    with pytest.raises(MissingPayload):
        inbox.follower.follow_once()
    inbox.log.grow()
    assert inbox.follower.follow_once()
    assert inbox.take() == [(1, None), (2, 2.0), (3, 3.0), (4, 4.0)]


@pytest.mark.parametrize("damage", ["bit", "cut", "nan"])
def test_a_damaged_payload_is_never_handed_over(inbox: Inbox, damage: str) -> None:
    inbox.log.grow()
    key = inbox.log.payload_key(1)
    good = inbox.log.board.store.get(key) or b""
    bad = {"bit": good[:-1] + bytes([good[-1] ^ 1]), "cut": good[:-1], "nan": good[:-4] + b"\xff" * 4}[damage]
    inbox.log.board.store.put(key, bad)
    for _ in range(2):
        with pytest.raises(CorruptObject, match=key):
            inbox.follower.follow_once()
        assert inbox.take() == []
    inbox.log.board.store.put(key, good)
    assert inbox.follower.follow_once() and inbox.take() == [(1, 1.0)]


def test_parameters_that_are_not_finite_are_refused_though_their_hash_is_right(inbox: Inbox) -> None:
    board = inbox.log.board
    bad = encode_fragment({"w0[0:3]": torch.tensor([1.0, float("nan"), 1.0])}, "fp32")
    ref = board.put_payload(inbox.log.payload_key(1), bad)
    board.create(board.keys.log(1), commit(1, 3, params=(ref,)))
    with pytest.raises(CorruptObject, match="holds values that are not finite"):
        inbox.follower.follow_once()
    assert inbox.take() == []


@pytest.mark.parametrize("what", ["/log/", "/blobs/"])
def test_what_cannot_be_read_keeps_it_neither_from_seeing_calls_nor_from_claiming_data(inbox: Inbox, what: str) -> None:
    for _ in range(2):
        inbox.cursor.take(10)
    inbox.log.call(1, 2)
    inbox.log.grow()
    inbox.store.broken = {what}
    for wanted in (1, 0):
        with pytest.raises(StoreUnavailable):
            inbox.follower.follow_once()
        assert inbox.cursor.wanted() == wanted and inbox.follower.called == 2
    inbox.store.broken.clear()
    inbox.settle()
    assert inbox.take() == [(1, 1.0)]


def test_a_call_that_cannot_be_read_is_a_call(inbox: Inbox) -> None:
    inbox.log.board.store.create(inbox.log.board.keys.call(1), b"half a rec")
    assert inbox.follower.follow_once() and inbox.follower.called == 1
