"""Whose syncer merges: the one the head names, a standby after a wait, a better one by handover."""

from __future__ import annotations

import pytest

from diloco_runtime.duty import HANDOVER_LOOKS, MAX_DOUBLINGS, Duty
from diloco_runtime.records import CommitRecord
from tests.support.run_records import commit


def by(author: str, successor: str | None = None, seq: int = 1, took: float = 0.0) -> CommitRecord:
    stages = {"wait": 0.75 * took, "write": 0.25 * took} if took else {}
    return commit(seq, 3, author=author, successor=successor or author, stages=stages)


def standby(takeover_after: float = 30.0, author: str = "oregon") -> Duty:
    """Return iowa's duty while another island is the author of the head."""
    duty = Duty("iowa", takeover_after)
    duty.on_commit(by(author))
    return duty


# ---- who goes on ----------------------------------------------------------------------------------------------------


def test_the_successor_named_by_the_head_goes_on() -> None:
    duty = Duty("iowa", 30.0)
    assert not duty.active(0.0, rank=0), "nothing is known yet"
    duty.on_commit(by("iowa"))
    assert duty.active(0.0, rank=0)
    duty.on_commit(by("iowa", successor="oregon"))
    assert not duty.active(1.0, rank=0)
    duty.on_commit(by("oregon", successor="iowa"))
    assert duty.active(2.0, rank=0)


def test_a_syncer_that_loses_a_create_stands_down() -> None:
    duty = standby()
    duty.on_mergeable(10.0)
    assert duty.active(40.0, rank=0)
    duty.on_commit(by("oregon", seq=2))
    assert not duty.active(41.0, rank=0)


# ---- takeover -------------------------------------------------------------------------------------------------------


def test_a_standby_takes_over_after_the_wait_and_only_when_there_is_something_to_merge() -> None:
    duty = standby(takeover_after=30.0)
    assert not duty.active(1e6, rank=0), "nothing is mergeable: nobody is late"
    duty.on_mergeable(1000.0)
    duty.on_mergeable(1020.0)
    assert not duty.active(1029.9, rank=0)
    assert duty.active(1030.0, rank=0)
    assert duty.active(1030.1, rank=5), "and keeps the duty until there is a commit"


def test_a_lower_rank_waits_longer() -> None:
    assert [standby(takeover_after=30.0).takeover_wait(rank) for rank in (0, 1, 2)] == [30.0, 60.0, 90.0]


def test_a_run_whose_commits_take_long_waits_longer() -> None:
    duty = standby(takeover_after=30.0)
    for seq in range(2, 12):
        duty.on_commit(by("oregon", seq=seq, took=20.0))
    assert duty.takeover_wait(0) == pytest.approx(60.0)
    duty.on_mergeable(5000.0)
    assert not duty.active(5059.0, rank=0) and duty.active(5061.0, rank=0)


def test_one_slow_commit_makes_nobody_wait_longer() -> None:
    duty = standby(takeover_after=3.0)
    for seq, took in enumerate((90.0, 0.5, 0.5, 0.5, 90.0), start=2):
        duty.on_commit(by("oregon", seq=seq, took=took))
    assert duty.takeover_wait(0) == 3.0


def test_what_an_observer_saw_before_a_gap_does_not_count() -> None:
    duty = standby(takeover_after=30.0)
    duty.on_mergeable(10.0)
    duty.on_gap()
    assert not duty.active(100.0, rank=0)
    duty.on_mergeable(100.0)
    assert not duty.active(129.0, rank=0) and duty.active(130.0, rank=0)


def test_the_next_in_line_makes_ready_at_half_of_its_wait() -> None:
    duty = standby(takeover_after=30.0)
    assert not duty.preparing(1e6, rank=0), "nothing is mergeable"
    duty.on_mergeable(1000.0)
    assert not duty.preparing(1014.0, rank=0)
    assert duty.preparing(1015.0, rank=0) and not duty.preparing(1015.0, rank=1)
    duty.on_commit(by("oregon", successor="iowa"))
    assert duty.preparing(1016.0, rank=0), "who has the duty is ready before anything is mergeable"


def test_each_takeover_that_brings_no_commit_doubles_the_wait() -> None:
    duty, onlooker, doublings = standby(), standby(), []
    now = 0.0
    for seq in range(2, 2 + MAX_DOUBLINGS + 3):
        duty.on_mergeable(now)
        onlooker.on_mergeable(now)
        now += duty.takeover_wait(0)
        assert duty.active(now, rank=0)
        duty.on_commit(by("oregon", seq=seq))
        onlooker.on_commit(by("oregon", seq=seq))
        doublings.append(duty.takeover_wait(0) / onlooker.takeover_wait(0))
    assert doublings == [2.0**n for n in range(1, MAX_DOUBLINGS + 1)] + [2.0**MAX_DOUBLINGS] * 3


def test_a_commit_of_ones_own_forgets_the_fruitless_takeovers() -> None:
    duty = standby()
    for seq in (2, 3):
        duty.on_mergeable(0.0)
        assert duty.active(1e6, rank=0)
        duty.on_commit(by("oregon", seq=seq))
    assert duty.takeover_wait(0) == 120.0
    duty.on_commit(by("iowa", successor="oregon", seq=4))
    assert duty.takeover_wait(0) == 30.0


def test_commits_of_others_without_a_takeover_of_ones_own_double_nothing() -> None:
    duty = standby()
    for seq in range(2, 6):
        duty.on_mergeable(0.0)
        duty.on_commit(by("tokyo", seq=seq))
    assert duty.takeover_wait(0) == 30.0


# ---- rank -----------------------------------------------------------------------------------------------------------


def test_the_best_standby_is_first_and_ties_go_by_name() -> None:
    duty = standby(author="oregon")
    assert duty.rank({"iowa": 5.0, "oregon": 99.0, "tokyo": 7.0}) == 1, "the author itself is no standby"
    assert duty.rank({"iowa": 5.0, "tokyo": 5.0, "ames": 5.0}) == 1
    assert duty.rank({"iowa": 9.0, "tokyo": 7.0}) == 0
    assert duty.rank({"tokyo": 7.0}) == 1, "unmeasured, it stands behind whoever is measured"
    assert duty.rank({}) == 0


# ---- handover -------------------------------------------------------------------------------------------------------


def on_duty(scores: dict[str, float], looks: int) -> Duty:
    duty = Duty("iowa", 30.0)
    duty.on_commit(by("iowa"))
    for _ in range(looks):
        duty.look_for_better(scores)
    return duty


def test_the_duty_goes_to_one_that_is_twice_as_good_for_long_enough() -> None:
    scores = {"iowa": 10.0, "oregon": 20.0, "tokyo": 19.0}
    assert on_duty(scores, HANDOVER_LOOKS - 1).successor(scores) == "iowa"
    assert on_duty(scores, HANDOVER_LOOKS).successor(scores) == "oregon"
    almost = {"iowa": 10.0, "oregon": 19.9}
    assert on_duty(almost, 100).successor(almost) == "iowa"


def test_one_that_has_not_measured_itself_hands_nothing_over() -> None:
    scores = {"iowa": 0.0, "oregon": 20.0}
    assert on_duty(scores, 100).successor(scores) == "iowa"
    assert on_duty({"oregon": 20.0}, 100).successor({"oregon": 20.0}) == "iowa"


def test_looks_must_be_in_a_row_and_of_the_same_island() -> None:
    good, bad = {"iowa": 10.0, "oregon": 30.0}, {"iowa": 10.0, "oregon": 11.0}
    duty = on_duty(good, HANDOVER_LOOKS - 1)
    duty.look_for_better(bad)
    duty.look_for_better(good)
    assert duty.successor(good) == "iowa"
    duty = on_duty(good, HANDOVER_LOOKS - 1)
    other = {"iowa": 10.0, "tokyo": 31.0}
    duty.look_for_better(other)
    assert duty.successor(other) == "iowa"


def test_two_that_are_better_by_turns_do_not_keep_each_other_from_the_duty() -> None:
    """Their scores are measured and differ by a little from look to look."""
    duty = on_duty({}, 0)
    for look in range(HANDOVER_LOOKS):
        assert duty.successor({"iowa": 10.0, "oregon": 30.0, "tokyo": 30.0}) == "iowa"
        duty.look_for_better({"iowa": 10.0, "oregon": 30.0 + look % 2, "tokyo": 31.0 - look % 2})
    assert duty.successor({"iowa": 10.0, "oregon": 30.0, "tokyo": 31.0}) == "tokyo"


def test_the_duty_goes_to_one_that_is_still_there() -> None:
    scores = {"iowa": 10.0, "oregon": 30.0, "tokyo": 20.0}
    duty = on_duty(scores, HANDOVER_LOOKS)
    assert duty.successor({"iowa": 10.0, "tokyo": 20.0}) == "tokyo"
    assert on_duty(scores, HANDOVER_LOOKS).successor({"iowa": 10.0}) == "iowa"


def test_a_handover_is_proposed_once() -> None:
    scores = {"iowa": 10.0, "oregon": 20.0}
    duty = on_duty(scores, HANDOVER_LOOKS)
    assert [duty.successor(scores), duty.successor(scores)] == ["oregon", "iowa"]


def test_who_leaves_names_the_best_of_the_others() -> None:
    duty = on_duty({}, 0)
    duty.leave()
    assert duty.successor({"iowa": 99.0, "oregon": 2.0, "tokyo": 3.0}) == "tokyo"
    assert duty.successor({"iowa": 99.0, "tokyo": 3.0, "oregon": 3.0}) == "oregon"
    assert duty.successor({"iowa": 99.0}) == "iowa", "there is nobody else"
