"""The goodput of one lock-step group of failing chips in the long run, computed instead of simulated."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from diloco_cli.simulation.failures import Chips, Recovery

FEW_STATES, MOST_STATES = 32, 512
"""Units away at once that are looked at: so many at first, twice as many while that is not enough."""

NEGLIGIBLE = 1e-9
"""Probability of more than those, or of no unit being left, up to which the result counts as exact."""

Matrix = npt.NDArray[np.float64]


def steady_goodput(chips: Chips, recovery: Recovery) -> float:
    """Return the expected goodput of one group, exactly.

    Raises ValueError where there is no exact form: units of different speed, an elastic group that loses progress, or
    one so small that it is left without any unit now and then.
    """
    if chips.speed_spread or (recovery.elastic and recovery.checkpoint_every):
        raise ValueError("there is no closed form with a speed_spread, nor for an elastic group that loses progress")
    return _elastic(chips, recovery) if recovery.elastic else _rigid(chips, recovery)


def _rigid(chips: Chips, recovery: Recovery) -> float:
    """Renewal: run until the first failure, stand still until the group is whole again."""
    rate, every = chips.failure_rate, recovery.checkpoint_every
    # With checkpoints only whole intervals count; how many of them pass without a failure is geometric.
    useful = every / math.expm1(rate * every) if every else 1.0 / rate
    return useful / (1.0 / rate + recovery.detect + recovery.chip_return + recovery.restart)


def _elastic(chips: Chips, recovery: Recovery) -> float:
    """Markov renewal: the state is how many units are away whenever the group begins to run."""
    states = FEW_STATES
    while True:
        goodput, beyond = _elastic_up_to(min(states, chips.units), chips, recovery)
        if beyond <= NEGLIGIBLE:
            return goodput
        if states >= min(MOST_STATES, chips.units):
            break
        states *= 2
    raise ValueError(
        f"there is no closed form for {chips.units} units: with probability {beyond:.2g} none is left, or more than "
        f"{MOST_STATES} are away"
    )


def _elastic_up_to(states: int, chips: Chips, recovery: Recovery) -> tuple[float, float]:
    """Return the goodput with fewer than `states` units away, and the probability of being at that limit."""
    away = np.arange(states, dtype=np.float64)
    healthy = 1.0 - away / chips.units
    failing = chips.failure_rate * healthy
    returning = away / recovery.chip_return if recovery.chip_return else np.zeros_like(away)
    run = 1.0 / (failing + returning)
    fails, returns = run * failing, run * returning
    step = fails[:, None] * _after_failure(states, recovery) + returns[:, None] * _after_return(states, recovery)
    visits = _stationary(step)
    time = run + fails * (recovery.detect + recovery.down_scale) + returns * recovery.up_scale
    return float(visits @ (run * healthy) / (visits @ time)), float(visits[-1])


def _stay(seconds: float, recovery: Recovery) -> float:
    """Return the probability that a unit that is away is still away after so long."""
    if not recovery.chip_return:
        return 0.0
    return math.exp(-seconds / recovery.chip_return)


def _binomial(count: int, size: int, chance: float) -> Matrix:
    """Return the distribution of successes among `count` trials, as a vector of `size` > count."""
    found = np.zeros(size)
    found[: count + 1] = [math.comb(count, k) * chance**k * (1.0 - chance) ** (count - k) for k in range(count + 1)]
    return found


def _after_failure(size: int, recovery: Recovery) -> Matrix:
    """Return the chance of each number of units away after the stall that follows a failure, by the number before.
    What would leave the range stays at its end."""
    others, own = _stay(recovery.detect + recovery.down_scale, recovery), _stay(recovery.down_scale, recovery)
    rows = []
    for away in range(size):
        before = _binomial(away, size, others)
        row = (1.0 - own) * before
        row[1:] += own * before[:-1]
        row[-1] += own * before[-1]
        rows.append(row)
    return np.array(rows)


def _after_return(size: int, recovery: Recovery) -> Matrix:
    """Return the same for the stall in which a unit is taken in. The first row stands for nothing."""
    stays = _stay(recovery.up_scale, recovery)
    return np.array([_binomial(max(0, away - 1), size, stays) for away in range(size)])


def _stationary(step: Matrix) -> Matrix:
    """Return how often each state is visited in the long run."""
    size = len(step)
    equations = np.vstack([step.T - np.eye(size), np.ones(size)])
    found: Matrix = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)[0]
    return found
