"""When a learner calls a merge, what it offers and when, and when it has to wait."""

from __future__ import annotations

import pytest

from diloco_runtime.learner_logic import Offer
from tests.support.learner_turns import learner, make, steps, turn
from tests.support.run_records import commit, entry

# ---- when merges are due --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sync_every", "fragments", "called_at"),
    [
        (6, 3, [2, 4, 6, 8, 10, 12, 14, 16, 18]),
        (24, 5, [5, 10, 15, 20, 24, 29, 34, 39, 44, 48]),
        (10, 4, [3, 5, 8, 10, 13, 15, 18, 20]),
        (7, 2, [4, 7, 11, 14, 18, 21]),
        (3, 1, [3, 6, 9, 12]),
    ],
)
def test_fractions_of_a_period_accumulate(sync_every: int, fragments: int, called_at: list[int]) -> None:
    logic = learner(fragments, sync_every=sync_every, in_flight=fragments)
    found = []
    for step in range(1, called_at[-1] + 1):
        seq, offered = turn(logic)
        if seq is not None:
            found.append(step)
            assert offered == [seq] == [len(found)]
            logic.on_commit(commit(seq, fragments, merged=(entry(f"n{seq}"),)))
    assert found == called_at


def test_a_merge_called_by_another_moves_the_own_next_one_a_period_on() -> None:
    logic = learner(3, sync_every=12, in_flight=3)
    steps(logic, 1)
    logic.on_called(1)
    assert make(logic, logic.offers()) == [1]
    called = [turn(logic)[0] for _ in range(8)]
    assert called == [None, None, None, 2, None, None, None, 3]


def test_adopting_past_a_merge_without_an_offer_makes_the_next_due_a_period_later() -> None:
    logic = learner(3, sync_every=12)
    steps(logic, 3)
    logic.on_commit(commit(1, 3, merged=(entry("x", "oregon"),)))
    assert [turn(logic)[0] for _ in range(4)] == [None, None, None, 2]


def test_a_call_of_another_is_not_repeated() -> None:
    logic = learner(3, sync_every=3)
    steps(logic, 1)
    logic.on_called(1)
    assert logic.call() is None
    assert make(logic, logic.offers()) == [1]


def test_an_own_call_is_made_once() -> None:
    logic = learner(3, sync_every=3)
    logic.on_step(8)
    assert logic.call() == 1
    logic.on_called(1)
    assert logic.call() is None


@pytest.mark.parametrize("allowed", [1, 2, 4])
def test_no_more_merges_are_called_beyond_the_head_than_in_flight(allowed: int) -> None:
    logic = learner(4, sync_every=4, in_flight=allowed)
    called = [turn(logic)[0] for _ in range(12)]
    assert [seq for seq in called if seq is not None] == list(range(1, allowed + 1))
    logic.on_commit(commit(1, 4, merged=(entry("n1"),)))
    assert [turn(logic)[0] for _ in range(6)].count(allowed + 1) == 1


def test_a_merge_whose_fragment_was_just_reset_is_called_a_step_later() -> None:
    logic = learner(2, sync_every=2)
    logic.on_step(8)
    logic.on_bad_delta(0)
    assert logic.call() is None and logic.last_offers() == [Offer(2, 1, 0, 1, 8)]
    logic.on_step(8)
    assert logic.call() == 1


def test_a_life_that_starts_at_a_later_head_goes_on_from_there() -> None:
    logic = learner(3, head=7, sync_every=3)
    logic.on_step(8)
    assert logic.call() == 8
    logic.on_called(8)
    assert logic.offers() == [Offer(8, 1, 5, 1, 8)]


# ---- what is offered ------------------------------------------------------------------------------------------------


def test_an_offer_says_its_anchor_steps_and_tokens() -> None:
    logic = learner(3, sync_every=9)
    steps(logic, 2, tokens=5)
    logic.on_called(3)
    assert logic.offers() == [Offer(1, 0, 0, 2, 10), Offer(2, 1, 0, 2, 10), Offer(3, 2, 0, 2, 10)]


def test_nothing_is_offered_without_a_step_since_the_anchor() -> None:
    logic = learner(2, sync_every=2)
    logic.on_called(2)
    assert logic.offers() == [] == logic.last_offers()
    logic.on_step(8)
    logic.on_commit(commit(1, 2))
    logic.on_called(3)
    assert [o.seq for o in logic.offers()] == [2], "fragment 0 was adopted and has no step since"


def test_nothing_is_offered_twice() -> None:
    logic = learner(2, sync_every=4)
    logic.on_step(8)
    logic.on_called(1)
    assert make(logic, logic.offers()) == [1]
    steps(logic, 1)
    assert logic.offers() == [] and [o.seq for o in logic.last_offers()] == [2]


def test_the_window_of_offers_ends_p_merges_beyond_the_head() -> None:
    logic = learner(3, head=4, sync_every=3)
    logic.on_step(8)
    logic.on_called(9)
    assert [(o.seq, o.anchor) for o in logic.offers()] == [(5, 2), (6, 3), (7, 4)]


def test_a_slow_uplink_starts_early() -> None:
    """Period 10: merge 1 is expected at step 10, merge 2 at 20, merge 3 at 30, and a fourth has no anchor yet."""
    logic = learner(3, sync_every=30)
    steps(logic, 5)
    for early, expected in [(4.9, []), (5.0, [1]), (14.9, [1]), (15.0, [1, 2]), (25.0, [1, 2, 3]), (1e6, [1, 2, 3])]:
        assert [offer.seq for offer in logic.offers(early)] == expected
    assert make(logic, logic.offers(5.0)) == [1]
    steps(logic, 4)
    assert logic.call() is None
    logic.on_step(8)
    assert logic.call() == 1, "an early offer does not silence its call"
    logic.on_called(1)
    assert [offer.seq for offer in logic.offers(9.9)] == []
    assert [offer.seq for offer in logic.offers(10.0)] == [2]


def test_nothing_is_offered_early_once_the_run_drains() -> None:
    logic = learner(1, sync_every=4)
    steps(logic, 2)
    logic.on_commit(commit(1, 1, phase="drain", drain_left=1))
    assert logic.offers(early_steps=100.0) == []


def test_early_means_slower_than_half_a_period() -> None:
    logic = learner(3, sync_every=30)
    assert logic.early_steps(None, 1.0) == logic.early_steps(1.0, None) == 0.0
    assert logic.early_steps(5.0, 1.0) == 0.0
    assert logic.early_steps(5.5, 1.0) == 5.5
    assert logic.early_steps(3.0, 0.5) == 6.0


def test_at_the_pace_of_each_nobody_joins_a_call_before_the_own_steps_are_done() -> None:
    logic = learner(2, sync_every=8, pace="each", min_quorum=2)
    steps(logic, 3)
    logic.on_called(1)
    assert logic.offers(early_steps=100.0) == []
    logic.on_step(8)
    assert logic.call() is None, "it is called already"
    assert make(logic, logic.offers()) == [1]


def test_at_the_pace_of_each_the_own_merge_is_called_when_nobody_did() -> None:
    logic = learner(2, sync_every=8, pace="each", min_quorum=2)
    assert [turn(logic) for _ in range(8)] == [(None, [])] * 3 + [(1, [1])] + [(None, [])] * 3 + [(2, [2])]


# ---- waiting --------------------------------------------------------------------------------------------------------


def test_a_learner_never_waits_by_default() -> None:
    logic = learner(1, sync_every=1)
    turn(logic)
    steps(logic, 500)
    assert logic.outstanding(0) == "n1" and not logic.must_wait()


def test_overlap_bounds_the_steps_past_an_unanswered_offer() -> None:
    logic = learner(2, sync_every=8, overlap_steps=3)
    waits = []
    for _ in range(7):
        turn(logic)
        waits.append(logic.must_wait())
    assert waits == [False, False, False, False, False, False, True]
    logic.on_commit(commit(1, 2, merged=(entry("n1"),)))
    assert not logic.must_wait()


def test_no_overlap_is_a_barrier() -> None:
    logic = learner(1, preset="diloco", sync_every=2)
    assert [turn(logic)[0], logic.must_wait()] == [None, False]
    assert [turn(logic)[0], logic.must_wait()] == [1, True]
    logic.on_commit(commit(1, 1, merged=(entry("n1"),)))
    assert not logic.must_wait()


def test_a_run_that_drains_holds_nobody_at_a_barrier() -> None:
    logic = learner(2, sync_every=2, overlap_steps=0)
    logic.on_step(8)
    logic.on_called(2)
    assert make(logic, logic.offers()) == [1, 2] and logic.must_wait()
    logic.on_commit(commit(1, 2, phase="drain", drain_left=2))
    assert logic.outstanding(1) == "n2" and not logic.must_wait()
