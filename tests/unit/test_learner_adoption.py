"""How a learner adopts commits, what that does to its tokens and its progress, and how a run ends for it."""

from __future__ import annotations

from itertools import pairwise

import pytest

from diloco_runtime.learner_logic import Adoption, LearnerLogic, Offer
from diloco_runtime.records import Fates
from tests.support.learner_turns import learner, make, steps, turn
from tests.support.run_records import commit, config, entry, table


def after_an_offer(carry: bool) -> LearnerLogic:
    """Two steps of 8 tokens offered to merge 1, one step of 8 since."""
    logic = learner(2, sync_every=4, carry=carry)
    turn(logic)
    turn(logic)
    assert logic.outstanding(0) == "n1"
    logic.on_step(8)
    return logic


def test_what_was_learned_after_a_merged_offer_is_carried() -> None:
    logic = after_an_offer(carry=True)
    assert logic.on_commit(commit(1, 2, merged=(entry("x", "oregon"), entry("n1")))) == Adoption(1, 0, carry=True)
    assert logic.fates()[0] == Fates(processed=24, merged=16, fresh=8)
    assert logic.outstanding(0) is None
    logic.on_called(3)
    assert [o for o in logic.offers() if o.seq == 3] == [Offer(3, 0, 1, 1, 8)]


def test_without_carry_it_is_overwritten() -> None:
    logic = after_an_offer(carry=False)
    assert logic.on_commit(commit(1, 2, merged=(entry("n1"),))) == Adoption(1, 0, carry=False)
    assert logic.fates()[0] == Fates(processed=24, merged=16, overwritten=8)


@pytest.mark.parametrize("carry", [True, False])
def test_an_offer_that_came_too_late_is_not_carried(carry: bool) -> None:
    logic = after_an_offer(carry)
    assert logic.on_commit(commit(1, 2, merged=(entry("x", "oregon"),))) == Adoption(1, 0, carry=False)
    assert logic.fates()[0] == Fates(processed=24, late=16, overwritten=8)


@pytest.mark.parametrize("carry", [True, False])
def test_a_refused_offer_is_not_carried(carry: bool) -> None:
    logic = after_an_offer(carry)
    assert logic.on_commit(commit(1, 2, refused=(entry("n1"),))) == Adoption(1, 0, carry=False)
    assert logic.fates()[0] == Fates(processed=24, refused=16, overwritten=8)


def test_an_offer_of_another_life_of_the_island_is_not_mine() -> None:
    logic = after_an_offer(carry=True)
    assert not logic.on_commit(commit(1, 2, merged=(entry("of-an-earlier-life", "iowa"),))).carry
    assert logic.fates()[0].late == 16


def test_a_superseded_version_leaves_nothing_of_what_it_carried() -> None:
    """Both versions are adopted between the same two steps; the values of the first were never there."""
    logic = after_an_offer(carry=True)
    assert logic.on_commit(commit(1, 2, merged=(entry("n1"),))).carry
    logic.on_commit(commit(2, 2))
    assert logic.on_commit(commit(3, 2)) == Adoption(3, 0, carry=False)
    assert logic.fates()[0] == Fates(processed=24, merged=16, overwritten=8)
    logic.on_called(5)
    assert [o.seq for o in logic.offers()] == [], "no step since either fragment was adopted"


def test_other_fragments_are_left_alone_by_an_adoption() -> None:
    logic = after_an_offer(carry=True)
    logic.on_commit(commit(1, 2))
    assert logic.fates()[1] == Fates(processed=24, fresh=24)


def test_a_commit_out_of_order_is_refused() -> None:
    logic = learner(2)
    with pytest.raises(ValueError, match="commit 2 does not follow 0"):
        logic.on_commit(commit(2, 2))


def test_a_bad_delta_costs_what_was_learned_since_the_anchor() -> None:
    logic = learner(2, sync_every=2)
    steps(logic, 2)
    logic.on_bad_delta(0)
    assert logic.fates() == (Fates(processed=16, overwritten=16), Fates(processed=16, fresh=16))
    assert [o.seq for o in logic.last_offers()] == [2]


# ---- how many merges may be open ------------------------------------------------------------------------------------


def test_in_flight_follows_the_measured_commit_time() -> None:
    """Period 4 steps; a commit that takes c steps needs c / 4 merges open, and half a one for jitter."""
    for commit_steps, expected in [(0, 1), (1, 1), (2, 1), (3, 2), (6, 2), (7, 3), (12, 4), (40, 6)]:
        logic = learner(6, sync_every=24)
        assert logic.in_flight == 2
        steps(logic, 4)
        logic.on_called(1)
        make(logic, logic.offers())
        steps(logic, commit_steps)
        logic.on_commit(commit(1, 6, merged=(entry("n1"),)))
        assert logic.in_flight == expected, commit_steps


def test_an_early_offer_does_not_tell_how_long_a_commit_takes() -> None:
    logic = learner(6, sync_every=24)
    logic.on_step(8)
    assert make(logic, logic.offers(early_steps=3.0)) == [1]
    steps(logic, 100)
    logic.on_commit(commit(1, 6, merged=(entry("n1"),)))
    assert logic.in_flight == 2


def test_the_configured_number_stands() -> None:
    assert learner(6, sync_every=24, in_flight=5).in_flight == 5
    assert learner(1).in_flight == 1


# ---- the end --------------------------------------------------------------------------------------------------------


def test_a_drain_takes_offers_to_its_final_merges_and_no_calls() -> None:
    logic = learner(3, head=1, sync_every=3)
    steps(logic, 5)
    logic.on_commit(commit(2, 3, phase="drain", drain_left=3))
    assert logic.call() is None
    assert [o.seq for o in logic.offers()] == [3, 4], "fragment 1 was adopted with the commit that starts the drain"
    steps(logic, 5)
    assert [o.seq for o in logic.offers()] == [3, 4, 5] and logic.call() is None
    make(logic, logic.offers())
    for seq, left in [(3, 2), (4, 1)]:
        logic.on_commit(commit(seq, 3, phase="drain", drain_left=left, merged=(entry(f"n{seq}"),)))
        logic.on_step(8)
        assert logic.offers() == [] == logic.last_offers(), "nothing is merged beyond the final merges"
    logic.on_commit(commit(5, 3, phase="final", merged=(entry("n5"),)))
    assert (logic.phase, logic.offers(), logic.last_offers(), logic.call()) == ("final", [], [], None)


def test_a_life_that_starts_during_the_drain_offers_nothing_beyond_it() -> None:
    drain = commit(5, 3, phase="drain", drain_left=1)
    logic = LearnerLogic(config(fragments=3), table(10, 10, 10), drain)
    logic.on_step(8)
    assert [o.seq for o in logic.last_offers()] == [6]


def test_a_reopened_run_goes_on_with_its_new_budget() -> None:
    final = commit(5, 3, phase="final", credited_total=30_000)
    logic = LearnerLogic(config(fragments=3, sync_every=3), table(10, 10, 10), final, reopened=2000)
    assert (logic.phase, logic.budget, logic.update_progress()) == ("run", 2000, 0.5)
    logic.on_step(8)
    assert logic.call() == 6
    logic.on_called(6)
    assert [o.seq for o in logic.offers()] == [6]


def test_leaving_offers_everything_that_is_not_on_its_way() -> None:
    logic = learner(3, sync_every=30)
    steps(logic, 2)
    logic.on_called(1)
    make(logic, logic.offers())
    logic.on_step(8)
    assert logic.last_offers() == [Offer(2, 1, 0, 3, 24), Offer(3, 2, 0, 3, 24)]


# ---- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_credited_tokens_plus_every_live_islands_unmerged_ones() -> None:
    """Sizes 30 and 10; a commit of fragment f credits tokens x its size, and all of it counts once in 40."""
    logic = LearnerLogic(config(tokens=100, fragments=2, sync_every=2), table(30, 10), commit(0, 2, budget=100))
    assert logic.update_progress() == 0.0
    turn(logic)
    assert logic.update_progress() == pytest.approx(8 / 100)
    logic.on_step(4)
    assert logic.update_progress() == pytest.approx(12 / 100), "what is offered counts until it is merged"
    both = (entry("n1"), entry("x", "oregon"))
    logic.on_commit(commit(1, 2, budget=100, merged=both, credited_total=2 * 8 * 30))
    own = 4 * 30 + 12 * 10
    assert logic.live_islands() == 2
    assert logic.update_progress() == pytest.approx((480 + 2 * own) / 40 / 100)


def test_islands_are_counted_over_the_newest_p_commits() -> None:
    logic = learner(2, min_quorum=4)
    assert logic.live_islands() == 4, "the quorum before anybody was merged"
    for seq, names in enumerate([["a", "b"], ["b", "c"], ["c"], []], start=1):
        logic.on_commit(commit(seq, 2, merged=tuple(entry(f"{n}{seq}", n) for n in names)))
    assert logic.live_islands() == 1
    logic.on_commit(commit(5, 2))
    assert logic.live_islands() == 4


def test_progress_never_falls_and_ends_at_one() -> None:
    logic = learner(2, tokens=100, sync_every=2)
    seen = [logic.update_progress()]
    for seq in range(1, 5):
        steps(logic, 3)
        seen.append(logic.update_progress())
        # Nothing of this learner is merged: its unmerged tokens are lost, and progress must not fall with them.
        logic.on_commit(commit(seq, 2, budget=100, credited_total=10 * seq))
        seen.append(logic.update_progress())
    steps(logic, 1000)
    seen.append(logic.update_progress())
    assert all(a <= b for a, b in pairwise(seen)) and seen[0] == 0.0 and seen[1] > 0.0 and seen[-1] == 1.0


def test_a_raised_budget_lets_progress_stand_rather_than_fall() -> None:
    logic = learner(2, tokens=100, sync_every=2)
    steps(logic, 5, tokens=10)
    assert logic.update_progress() == 0.5
    logic.on_commit(commit(1, 2, budget=1000, credited_total=0))
    assert (logic.budget, logic.update_progress()) == (1000, 0.5)
