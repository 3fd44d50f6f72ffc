"""When an open merge is committed: quorum, grace, and the final merges."""

from __future__ import annotations

import pytest

from diloco_runtime.quorum import FALL, GRACE_FACTOR, RISE, UNKNOWN_PERIOD, OpenMerge, QuorumPolicy

ALL = frozenset({"iowa", "oregon", "tokyo", "paris"})


def merge(
    arrivals: dict[str, float],
    opened: float = 100.0,
    refused: frozenset[str] = frozenset(),
    alive: frozenset[str] = ALL,
    training: frozenset[str] = ALL,
) -> OpenMerge:
    return OpenMerge(opened, arrivals, refused, alive, training)


def policy(min_quorum: int = 1, min_grace: float = 0.5, period: float = 8.0) -> QuorumPolicy:
    """Return a policy that has seen merges being opened every `period` seconds; half of it is its longest grace."""
    made = QuorumPolicy(min_quorum, min_grace, drain_timeout=60.0)
    made.on_opened(100.0 - period)
    made.on_opened(100.0)
    return made


# ---- quorum ---------------------------------------------------------------------------------------------------------


def test_nothing_is_committed_before_anybody_offered() -> None:
    assert policy().decide(merge({}), 1e9, in_flight=1) == "wait"
    assert policy().decide(merge({}, training=frozenset()), 1e9, in_flight=1) == "wait"


def test_all_that_are_expected_are_committed_at_once() -> None:
    arrivals = dict.fromkeys(sorted(ALL), 100.0)
    assert policy(min_quorum=4).decide(merge(arrivals), 100.0, in_flight=1) == "commit"
    del arrivals["tokyo"]
    assert policy(min_quorum=3).decide(merge(arrivals), 100.0, in_flight=1) == "wait"


@pytest.mark.parametrize(("min_quorum", "offered"), [(2, 1), (3, 2), (4, 3), (1_000_000, 3)])
def test_below_the_quorum_no_time_is_too_long(min_quorum: int, offered: int) -> None:
    arrivals = dict.fromkeys(sorted(ALL)[:offered], 100.0)
    assert policy(min_quorum).decide(merge(arrivals), 1e9, in_flight=1) == "wait"


def test_the_quorum_is_never_more_than_are_alive() -> None:
    two = frozenset({"iowa", "oregon"})
    everybody = policy(min_quorum=1_000_000)
    arrivals = {"iowa": 100.0, "oregon": 101.0}
    assert everybody.decide(merge(arrivals), 1e9, in_flight=1) == "wait"
    assert everybody.decide(merge(arrivals, alive=two, training=two), 101.0, in_flight=1) == "commit"


def test_an_island_that_is_starting_counts_for_the_quorum_and_not_among_those_to_be_expected() -> None:
    trained = ALL - {"paris"}
    arrivals = dict.fromkeys(sorted(trained), 100.0)
    assert policy(min_quorum=4).decide(merge(arrivals, training=trained), 1e9, in_flight=1) == "wait"
    assert policy(min_quorum=3).decide(merge(arrivals, training=trained), 100.0, in_flight=1) == "commit"


def test_an_offer_of_an_island_that_has_failed_since_counts() -> None:
    alive = frozenset({"oregon"})
    assert policy(2).decide(merge({"iowa": 100.0}, alive=alive, training=alive), 100.0, in_flight=1) == "wait"
    assert policy(2).decide(merge({"iowa": 100.0}, alive=alive, training=alive), 104.0, in_flight=1) == "commit"


def test_a_refused_island_has_answered() -> None:
    rest = ALL - {"iowa"}
    arrivals = dict.fromkeys(sorted(rest), 100.0)
    assert policy(4).decide(merge(arrivals, refused=frozenset({"iowa"})), 100.0, in_flight=1) == "commit"
    assert policy(4).decide(merge({}, refused=ALL), 100.0, in_flight=1) == "commit", "an empty commit: the log goes on"
    assert policy(1).decide(merge({}, refused=frozenset({"iowa"})), 1e9, in_flight=1) == "wait"


# ---- grace ----------------------------------------------------------------------------------------------------------


def test_late_ones_are_waited_for_until_the_window_is_over() -> None:
    made = policy(min_quorum=2)
    arrivals = {"iowa": 101.0, "oregon": 103.5}
    assert made.window(in_flight=1) == 4.0, "nothing is known of arrivals: half of a period of 8"
    assert made.decide(merge(arrivals), 104.9, in_flight=1) == "wait"
    assert made.decide(merge(arrivals), 105.0, in_flight=1) == "commit"
    assert made.decide(merge({**arrivals, "tokyo": 104.0}), 104.9, in_flight=1) == "wait"


def test_while_nobody_is_known_to_train_a_first_offer_waits_for_the_window() -> None:
    made = policy()
    assert made.decide(merge({"iowa": 101.0}, training=frozenset()), 104.9, in_flight=1) == "wait"
    assert made.decide(merge({"iowa": 101.0}, training=frozenset()), 105.0, in_flight=1) == "commit"


def test_grace_runs_from_the_opening_for_those_who_offered_before() -> None:
    made = policy()
    assert made.decide(merge({"iowa": 50.0}), 103.9, in_flight=1) == "wait"
    assert made.decide(merge({"iowa": 50.0}), 104.0, in_flight=1) == "commit"


def test_the_longest_grace_is_half_of_the_open_merges() -> None:
    assert [policy(period=8.0).window(n) for n in (1, 2, 3)] == [4.0, 8.0, 12.0]
    assert policy(min_grace=20.0).window(1) == 20.0
    assert QuorumPolicy(1, 0.5, 60.0).window(3) == 0.5 * 3 * UNKNOWN_PERIOD


def test_the_fastest_learner_tells_the_period_before_merges_do() -> None:
    made = QuorumPolicy(1, 0.5, 60.0)
    assert made.period is None
    made.on_fastest(10.0)
    assert (made.period, made.window(2)) == (10.0, 10.0)
    made.on_fastest(None)
    assert made.period is None


def test_grace_follows_the_spread_of_arrivals_up_fast_and_down_slowly() -> None:
    made = policy(min_grace=0.1, period=100.0)

    def committed(spread: float) -> float:
        made.on_commit(merge({name: 101.0 + spread * i / 3 for i, name in enumerate(sorted(ALL))}), in_flight=1)
        return made.window(in_flight=1)

    assert committed(2.0) == pytest.approx(GRACE_FACTOR * 2.0)
    assert committed(6.0) == pytest.approx(GRACE_FACTOR * (2.0 + RISE * 4.0))
    assert committed(0.0) == pytest.approx(GRACE_FACTOR * (4.0 - FALL * 4.0))
    for _ in range(200):
        committed(0.0)
    assert made.window(in_flight=1) == 0.1, "never below min_grace"
    for _ in range(20):
        committed(1000.0)
    assert made.window(in_flight=1) == 50.0, "never above half a period"


def test_a_window_that_misses_an_island_grows_until_it_does_not() -> None:
    """Tokyo offers 3 s after the others; nobody ever sees that while the window is shorter."""
    made = policy(min_grace=0.5, period=100.0)
    for _ in range(100):
        made.on_commit(merge(dict.fromkeys(sorted(ALL), 101.0)), in_flight=1)
    assert made.window(in_flight=1) == 0.5
    missed = 0
    while made.window(in_flight=1) < 3.0 and missed < 20:
        made.on_commit(merge(dict.fromkeys(sorted(ALL - {"tokyo"}), 101.0)), in_flight=1)
        missed += 1
    assert 1 < missed < 10


def test_who_was_refused_or_was_not_expected_was_not_missed() -> None:
    made = policy(min_grace=0.1, period=100.0)
    iowa = {"iowa": 101.0}
    made.on_commit(merge(iowa, training=frozenset({"iowa"})), in_flight=1)
    made.on_commit(merge(iowa, refused=ALL - {"iowa"}), in_flight=1)
    assert made.window(in_flight=1) == 0.1
    made.on_commit(merge(iowa), in_flight=1)
    assert made.window(in_flight=1) > 0.1


def test_an_island_that_was_alone_teaches_nothing_about_others() -> None:
    """Or whoever comes back would be late for a window that shrank meanwhile, merge after merge."""
    fresh, seasoned, alone = policy(), policy(), frozenset({"iowa"})
    seasoned.on_commit(merge({"iowa": 100.0, "tokyo": 102.0}, training=frozenset({"iowa", "tokyo"})), 1)
    for made in (fresh, seasoned):
        before = made.window(1)
        assert before > 0.5
        for _ in range(100):
            made.on_commit(merge({"iowa": 100.0}, training=alone), 1)
        assert made.window(1) == before


def test_an_empty_commit_teaches_nothing() -> None:
    made = policy(period=8.0)
    made.on_commit(merge({}), in_flight=1)
    assert made.window(in_flight=1) == 4.0


# ---- the final merges -----------------------------------------------------------------------------------------------


def test_final_merges_wait_for_whoever_trains_and_for_nobody_else() -> None:
    two = frozenset({"iowa", "oregon"})
    made = policy(min_quorum=4)
    assert made.decide_final(merge({"iowa": 100.0}, training=two), 100.0) == "wait"
    assert made.decide_final(merge({"iowa": 100.0, "oregon": 101.0}, training=two), 101.0) == "commit"
    assert made.decide_final(merge({"iowa": 100.0}, refused=frozenset({"oregon"}), training=two), 100.0) == "commit"
    assert made.decide_final(merge({}, training=frozenset()), 100.0) == "commit"


def test_final_merges_end_when_the_time_is_up() -> None:
    made = policy(min_quorum=4)
    assert made.decide_final(merge({}), 159.9) == "wait"
    assert made.decide_final(merge({}), 160.0) == "commit"
