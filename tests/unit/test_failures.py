"""Chips that fail: closed forms against the simulation, where the time goes, and what a learner's trace says."""

from __future__ import annotations

import itertools
import math

import pytest

from diloco_cli.simulation.failures import (
    YEAR,
    Change,
    Chips,
    LearnerTrace,
    Ledger,
    Outcome,
    Recovery,
    changes,
    simulate,
)
from diloco_cli.simulation.steady_goodput import steady_goodput

RIGID = Recovery(elastic=False, detect=5.0, restart=10.0, chip_return=60.0)
ELASTIC = Recovery(elastic=True, down_scale=15.0, up_scale=12.0, chip_return=60.0)
FAILURES = 4000
SIZES = [150e3, 600e3, 2.4e6]


def outcome(chips: Chips, recovery: Recovery, learners: int = 1, seed: int = 1, failures: int = FAILURES) -> Outcome:
    """Simulate as long as so many failures would take if all chips ran all the time."""
    return simulate(chips, recovery, learners, failures / chips.failure_rate, seed)


def agree(found: Outcome, expected: float) -> bool:
    """Tell whether a simulated goodput is within four standard errors of the expected one."""
    return abs(found.goodput - expected) < 4.0 * found.error + 1e-9


# ---- closed forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", SIZES)
def test_standing_still_for_every_failure_is_a_renewal_process(count: float) -> None:
    chips = Chips(count)
    found = outcome(chips, RIGID)
    assert steady_goodput(chips, RIGID) == pytest.approx(1.0 / (1.0 + count / YEAR * 75.0))
    assert agree(found, steady_goodput(chips, RIGID))
    assert 0.0 < found.error < 0.02


@pytest.mark.parametrize("every", [5.0, 30.0, 600.0])
def test_progress_since_the_last_checkpoint_is_lost(every: float) -> None:
    chips, recovery = Chips(600e3), Recovery(elastic=False, restart=20.0, checkpoint_every=every)
    found = outcome(chips, recovery)
    assert agree(found, steady_goodput(chips, recovery))
    assert found.ledger.lost > 0.0
    assert found.goodput < steady_goodput(chips, Recovery(elastic=False, restart=20.0))


@pytest.mark.parametrize("count", SIZES)
def test_elastic_with_returns_at_no_cost_is_a_renewal_process(count: float) -> None:
    chips, recovery = Chips(count, per_unit=1.0), Recovery(elastic=True, detect=4.0, down_scale=16.0, chip_return=60.0)
    assert steady_goodput(chips, recovery) == pytest.approx(1.0 / (1.0 + count / YEAR * 20.0), abs=1e-5)
    assert agree(outcome(chips, recovery), steady_goodput(chips, recovery))


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize(("detect", "down", "up", "mean_return"), [(0, 15, 12, 60), (5, 10, 30, 20), (3, 4, 5, 2000)])
def test_elastic_is_a_markov_renewal_process(
    count: float, detect: float, down: float, up: float, mean_return: float
) -> None:
    chips = Chips(count)
    recovery = Recovery(elastic=True, detect=detect, down_scale=down, up_scale=up, chip_return=mean_return)
    found = outcome(chips, recovery, seed=11, failures=max(FAILURES, round(200 * mean_return * chips.failure_rate)))
    assert agree(found, steady_goodput(chips, recovery))


def test_elastic_with_long_absences_tends_to_the_roots_of_a_square() -> None:
    # Returns find the group running or not as any moment would: running = 1 / (1 + down + up x running), in failures.
    chips = Chips(600e3, per_unit=1.0)
    recovery = Recovery(elastic=True, down_scale=15.0, up_scale=12.0, chip_return=5000.0)
    down, up = chips.failure_rate * 15.0, chips.failure_rate * 12.0
    running = 2.0 / (1.0 + down + math.sqrt((1.0 + down) ** 2 + 4.0 * up))
    assert steady_goodput(chips, recovery) == pytest.approx(running, abs=0.002)


@pytest.mark.parametrize("mean_return", [200.0, 5000.0])
def test_without_stalls_every_unit_is_there_as_often_as_a_single_one(mean_return: float) -> None:
    chips = Chips(10_000.0, per_unit=1000.0)
    unit_life = YEAR / 1000.0
    found = outcome(chips, Recovery(elastic=True, chip_return=mean_return), failures=40_000)
    assert agree(found, unit_life / (unit_life + mean_return))
    assert found.ledger.stalled == 0.0


def test_a_group_of_one_unit_stands_still_when_it_fails() -> None:
    chips, recovery = Chips(256.0, mean_life=25_600.0), Recovery(elastic=True, up_scale=20.0, chip_return=50.0)
    found = outcome(chips, recovery)
    assert agree(found, 100.0 / (100.0 + 50.0 + 20.0))
    assert found.uptime == pytest.approx(found.goodput)


def test_there_is_no_closed_form_for_everything() -> None:
    with pytest.raises(ValueError, match="no closed form"):
        steady_goodput(Chips(1000.0, speed_spread=0.1), RIGID)
    with pytest.raises(ValueError, match="no closed form"):
        steady_goodput(Chips(1000.0), Recovery(elastic=True, checkpoint_every=1.0))
    with pytest.raises(ValueError, match="no closed form for 2 units"):
        steady_goodput(Chips(512.0), Recovery(elastic=True, chip_return=1e6))


# ---- seeds, order ---------------------------------------------------------------------------------------------------


def test_a_seed_repeats_exactly_and_another_does_not() -> None:
    chips = Chips(1.2e6, speed_spread=0.02)
    first = outcome(chips, ELASTIC, learners=4, seed=7)
    assert outcome(chips, ELASTIC, learners=4, seed=7) == first
    assert outcome(chips, ELASTIC, learners=4, seed=8) != first
    assert list(itertools.islice(changes(chips, ELASTIC, 7), 500)) == list(
        itertools.islice(changes(chips, ELASTIC, 7), 500)
    )


def test_learners_fail_independently() -> None:
    chips = Chips(300e3)
    one, two = (list(itertools.islice(changes(chips, ELASTIC, 7, learner), 50)) for learner in (0, 1))
    assert one[0] == two[0] == Change(0.0, 1.0, 1.0)
    assert one != two


@pytest.mark.parametrize("recovery", [RIGID, ELASTIC])
def test_one_learner_is_data_parallel(recovery: Recovery) -> None:
    chips, seconds = Chips(600e3), 50_000.0
    alone = LearnerTrace.record(chips, recovery, seconds, 3)
    found = simulate(chips, recovery, 1, seconds, 3)
    (ledger,) = alone.ledgers()
    assert found.goodput == pytest.approx(ledger.goodput)
    assert found.failures == alone.failures


@pytest.mark.parametrize("recovery", [RIGID, ELASTIC])
def test_learners_make_of_their_chips_what_a_smaller_group_would(recovery: Recovery) -> None:
    many, few = outcome(Chips(2.4e6), recovery, learners=4), outcome(Chips(600e3), recovery)
    assert many.goodput == pytest.approx(few.goodput, abs=4.0 * math.hypot(many.error, few.error))


@pytest.mark.parametrize("recovery", [RIGID, ELASTIC])
def test_goodput_falls_with_chips_and_grows_with_learners(recovery: Recovery) -> None:
    table = [[outcome(Chips(count), recovery, m).goodput for m in (1, 2, 4, 8, 16)] for count in SIZES]
    for row in table:
        assert row == sorted(row)
    for column in zip(*table, strict=True):
        assert list(column) == sorted(column, reverse=True)


def test_more_learners_are_more_often_not_all_down() -> None:
    found = [outcome(Chips(2.4e6), ELASTIC, m) for m in (1, 2, 4)]
    running = 1.0 - found[0].uptime
    assert found[0].uptime == pytest.approx(found[0].goodput, abs=0.01)
    assert running > 1.0 - found[1].uptime > 1.0 - found[2].uptime > 0.0
    # Independent learners: all down as often as the product says.
    down = 1.0 - outcome(Chips(600e3), ELASTIC, failures=40_000).uptime
    assert 1.0 - found[2].uptime == pytest.approx(down**4, rel=0.5)


# ---- where the time goes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recovery", [RIGID, ELASTIC])
@pytest.mark.parametrize("learners", [1, 3])
def test_no_time_is_made_or_lost(recovery: Recovery, learners: int) -> None:
    chips, seconds = Chips(600e3, per_unit=4096.0, speed_spread=0.03), 60_000.0
    found = simulate(chips, recovery, learners, seconds, 5)
    assert found.ledger.total == pytest.approx(learners * seconds)
    assert min(found.ledger.useful, found.ledger.slow, found.ledger.stalled, found.ledger.absent) > 0.0


def test_every_failure_and_every_return_is_paid_for_once() -> None:
    chips = Chips(1e5, per_unit=1.0)
    recovery = Recovery(elastic=True, detect=2.0, down_scale=3.0, up_scale=4.0, chip_return=300.0)
    trace = LearnerTrace.record(chips, recovery, 500_000.0, 5)
    stops = [end - start for start, end, change in trace.spans() if change.rate == 0.0][:-1]
    assert {round(stop, 6) for stop in stops} == {5.0, 4.0}
    returns = len(stops) - trace.failures
    # A return within the 5 s after its own failure is free; others meet a stall by chance only.
    assert 0.9 < returns / trace.failures < 1.0
    (ledger,) = trace.ledgers()
    assert ledger.stalled == pytest.approx(5.0 * trace.failures + 4.0 * returns, rel=0.001)
    assert ledger.absent == pytest.approx(trace.failures * (2.0 + 300.0 + 4.0) / 1e5, rel=0.1)


def test_parts_add_up_to_the_whole() -> None:
    recovery = Recovery(elastic=False, detect=5.0, restart=10.0, chip_return=60.0, checkpoint_every=20.0)
    trace = LearnerTrace.record(Chips(300e3), recovery, 9000.0, 5)
    (whole,) = trace.ledgers()
    parts = trace.ledgers(7)
    assert all(part.total == pytest.approx(9000.0 / 7) for part in parts)
    assert sum(parts, Ledger()) == Ledger(*(pytest.approx(value) for value in vars(whole).values()))
    assert whole.lost == pytest.approx(sum(progress for _, progress in trace.losses()))


def test_only_running_chips_fail() -> None:
    chips = Chips(2.4e6)
    found = outcome(chips, ELASTIC, failures=20_000)
    running = found.ledger.useful * chips.failure_rate
    assert found.failures == pytest.approx(running, abs=5.0 * math.sqrt(running))


def test_the_slowest_unit_sets_the_pace() -> None:
    # With one unit it is the mean, with many it is far out in the tail: 100 units, 5 % spread, about 2.5 x 5 % below.
    recovery = Recovery(elastic=False)
    one = simulate(Chips(256.0, mean_life=100.0, speed_spread=0.05), recovery, 1, 20_000.0, 1)
    many = simulate(Chips(25_600.0, mean_life=25_600.0, speed_spread=0.05), recovery, 1, 20_000.0, 1)
    assert one.goodput == pytest.approx(1.0, abs=0.01)
    assert many.goodput == pytest.approx(1.0 - 2.508 * 0.05, abs=0.005)
    assert many.ledger.slow == pytest.approx((1.0 - many.goodput) * 20_000.0)


# ---- a learner's trace ----------------------------------------------------------------------------------------------


def test_a_trace_is_a_step_function() -> None:
    trace = LearnerTrace(
        (Change(0.0, 1.0, 1.0), Change(10.0, 0.0, 0.5, 4.0), Change(15.0, 0.5, 0.5), Change(30.0, 1.0, 1.0)), 40.0
    )
    assert [trace.rate(at) for at in (0.0, 9.9, 10.0, 15.0, 29.9, 35.0)] == [1.0, 1.0, 0.0, 0.5, 0.5, 1.0]
    assert list(trace.steps()) == [(0.0, 1.0), (10.0, 0.0), (15.0, 0.5), (30.0, 1.0)]
    assert list(trace.losses()) == [(10.0, 4.0)]
    (ledger,) = trace.ledgers()
    assert ledger == Ledger(useful=23.5, lost=4.0, slow=0.0, stalled=2.5, absent=10.0)
    assert trace.failures == 1


def test_work_takes_as_long_as_the_rate_says() -> None:
    trace = LearnerTrace(
        (Change(0.0, 1.0, 1.0), Change(10.0, 0.0, 0.5), Change(15.0, 0.5, 0.5), Change(30.0, 1.0, 1.0)), 40.0
    )
    assert trace.done(2.0, 3.0) == 5.0
    assert trace.done(8.0, 3.0) == 17.0
    assert trace.done(12.0, 7.5) == 30.0
    assert trace.done(12.0, 0.0) == 12.0
    assert trace.done(0.0, 27.5) == 40.0
    assert trace.done(0.0, 27.6) is None


def test_a_recorded_trace_is_in_order_and_ends() -> None:
    trace = LearnerTrace.record(Chips(2.4e6), ELASTIC, 10_000.0, 2)
    times = [at for at, _ in trace.steps()]
    assert times[0] == 0.0 and times == sorted(times) and times[-1] < 10_000.0
    assert {rate == 0.0 for _, rate in trace.steps()} == {True, False}
    assert trace.failures > 100


@pytest.mark.parametrize(
    "make",
    [
        lambda: Chips(0.0),
        lambda: Chips(1.0, speed_spread=-0.1),
        lambda: Recovery(elastic=True, detect=-1.0),
        lambda: simulate(Chips(1.0), RIGID, 0, 1.0, 1),
        lambda: LearnerTrace.record(Chips(1.0), RIGID, 0.0, 1),
    ],
)
def test_what_cannot_be_is_refused(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError):
        make()
