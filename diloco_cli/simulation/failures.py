"""Chips that fail: how much of their time becomes progress, for one lock-step group of chips and for several learners.

Pure and seeded. A group of chips trains in lock-step and is made of equal units (slices); a failing chip takes its unit
with it. Only chips that run fail, so the failures of a group are one Poisson process whose rate follows the number of
running chips: the time to the next one is drawn for all chips at once, and which unit it takes does not matter.
Decoupled learners are such groups of chips / learners each that never wait for one another.
"""

from __future__ import annotations

import bisect
import heapq
import math
import random  # noqa: TID251 - the model's own generators, seeded by the caller
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

YEAR = 365.25 * 86_400.0
"""Seconds."""

BATCHES = 16
"""Into how many equal parts a simulated time is cut to tell the error of its mean."""

SLOWEST_SPEED = 0.05
"""No unit is slower than this, however wide the spread (the tails of a normal distribution reach below zero)."""


@dataclass(frozen=True)
class Chips:
    """A group of chips that trains in lock-step."""

    count: float
    per_unit: float = 256.0
    """Chips of one scaling unit: what one failing chip takes down, and what comes back together."""
    mean_life: float = YEAR
    """Mean seconds that a chip runs between two failures."""
    speed_spread: float = 0.0
    """Standard deviation of the speed of a unit, over its mean. The slowest unit sets the pace of the group."""

    def __post_init__(self) -> None:
        if min(self.count, self.per_unit, self.mean_life) <= 0 or self.speed_spread < 0:
            raise ValueError(f"{self}: only speed_spread may be 0, and nothing may be below")

    @property
    def units(self) -> int:
        """Whole units: the size of a unit gives way, the number of chips does not."""
        return max(1, round(self.count / self.per_unit))

    @property
    def failure_rate(self) -> float:
        """Failures per second while all chips run."""
        return self.count / self.mean_life


@dataclass(frozen=True)
class Recovery:
    """What follows a failure. Seconds; while anything but `chip_return` lasts, the whole group stands still."""

    elastic: bool
    """Go on without the unit and take it in when it is back; otherwise stand still until it is back."""
    detect: float = 0.0
    """From the failure until it is noticed."""
    down_scale: float = 0.0
    """Elastic: to go on without the unit."""
    up_scale: float = 0.0
    """Elastic: to take in what has come back. What comes back while the group stands still anyway joins at no cost."""
    restart: float = 0.0
    """Not elastic: to start again when the unit is back."""
    chip_return: float = 0.0
    """Mean of the exponentially distributed time from noticing a failure until the unit is back."""
    checkpoint_every: float = 0.0
    """Running seconds between two checkpoints: a failure loses what came after the last one. 0: nothing is lost."""

    def __post_init__(self) -> None:
        if min(getattr(self, part.name) for part in fields(self)) < 0:
            raise ValueError(f"{self}: no time may be below 0")


class Change(NamedTuple):
    """From a moment on, a group of chips makes progress at another rate."""

    at: float
    """Seconds since the start."""
    rate: float
    """Relative speed until the next change: 1 when all chips run at their mean speed, 0 while all stand still."""
    healthy: float
    """Share of the chips that the group has, running or standing still."""
    lost: float = 0.0
    """Progress undone at this moment, in seconds at rate 1."""


def changes(chips: Chips, recovery: Recovery, seed: int, learner: int = 0) -> Iterator[Change]:
    """Yield what happens to one group, for ever; equal arguments give equal changes."""
    chance = random.Random(f"{seed}/{learner}")
    units = healthy = chips.units
    away: list[float] = []
    now = 0.0
    while True:
        rate = healthy / units * _slowest(healthy, chips.speed_spread, chance)
        yield Change(now, rate, healthy / units)
        failure = now + chance.expovariate(chips.failure_rate * healthy / units)
        if away and away[0] <= failure:
            yield Change(away[0], 0.0, healthy / units)
            now = away[0] + recovery.up_scale
        else:
            lost = math.fmod(failure - now, recovery.checkpoint_every) * rate if recovery.checkpoint_every else 0.0
            healthy -= 1
            yield Change(failure, 0.0, healthy / units, lost)
            noticed = failure + recovery.detect
            mean = recovery.chip_return
            heapq.heappush(away, noticed + (chance.expovariate(1.0 / mean) if mean else 0.0))
            if not recovery.elastic:
                now = away[0] + recovery.restart
            elif healthy:
                now = noticed + recovery.down_scale
            else:
                now = max(noticed + recovery.down_scale, away[0]) + recovery.up_scale
        while away and away[0] <= now:
            heapq.heappop(away)
            healthy += 1


def _slowest(units: int, spread: float, chance: random.Random) -> float:
    """Draw the speed of the slowest of some units (drawn anew whenever the group changes)."""
    if not spread:
        return 1.0
    share = -math.expm1(math.log1p(-chance.random()) / units)
    return max(SLOWEST_SPEED, statistics.NormalDist(1.0, spread).inv_cdf(min(max(share, 1e-300), 1.0 - 1e-16)))


@dataclass(frozen=True)
class Ledger:
    """Where the time of a group's chips went, in seconds of the whole group."""

    useful: float = 0.0
    lost: float = 0.0
    """Progress that was undone."""
    slow: float = 0.0
    """Running chips that waited for the slowest unit (below 0: even that one was faster than the mean)."""
    stalled: float = 0.0
    """Healthy chips that stood still."""
    absent: float = 0.0
    """Chips that had failed and were not back, or not yet taken in."""

    @property
    def total(self) -> float:
        return self.useful + self.lost + self.slow + self.stalled + self.absent

    @property
    def goodput(self) -> float:
        """Useful share of the time that all chips could have run at their mean speed."""
        return self.useful / self.total

    def __add__(self, other: Ledger) -> Ledger:
        return Ledger(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


@dataclass(frozen=True)
class LearnerTrace:
    """One learner's relative speed as a step function of time, and when it loses progress, from 0 to `until`."""

    changes: tuple[Change, ...]
    """The first one is at 0."""
    until: float

    @classmethod
    def record(cls, chips: Chips, recovery: Recovery, until: float, seed: int, learner: int = 0) -> LearnerTrace:
        """Let happen what happens to a learner of these chips until a time, in seconds."""
        if until <= 0:
            raise ValueError(f"until = {until} is not above 0: a trace needs some time")
        found = []
        for change in changes(chips, recovery, seed, learner):
            if change.at >= until:
                break
            found.append(change)
        return cls(tuple(found), until)

    def steps(self) -> Iterator[tuple[float, float]]:
        """Yield (time, rate): the relative speed from that time on."""
        return ((change.at, change.rate) for change in self.changes)

    def losses(self) -> Iterator[tuple[float, float]]:
        """Yield (time, progress): what is undone then, in seconds at rate 1. Every failure that loses something."""
        return ((change.at, change.lost) for change in self.changes if change.lost)

    @property
    def failures(self) -> int:
        """How many times a running learner lost a unit."""
        pairs = zip(self.changes, self.changes[1:], strict=False)
        return sum(1 for before, after in pairs if before.rate and after.healthy < before.healthy)

    def rate(self, at: float) -> float:
        """Return the relative speed at a time (of changes at the same time, the last one counts)."""
        return self.changes[self._index(at)].rate

    def _index(self, at: float) -> int:
        return bisect.bisect_right(self.changes, at, key=lambda change: change.at) - 1

    def done(self, start: float, work: float) -> float | None:
        """Return when work (seconds at rate 1) begun at `start` is done, None if not by `until`; losses are ignored."""
        for _, end, change in self.spans(self._index(start)):
            if change.rate * (end - start) >= work:
                return start + (work / change.rate if work else 0.0)
            work -= change.rate * (end - start)
            start = end
        return None

    def spans(self, first: int = 0) -> Iterator[tuple[float, float, Change]]:
        """Yield (start, end, change) for every time between two changes."""
        for index in range(first, len(self.changes) - 1):
            yield self.changes[index].at, self.changes[index + 1].at, self.changes[index]
        yield self.changes[-1].at, self.until, self.changes[-1]

    def ledgers(self, parts: int = 1) -> list[Ledger]:
        """Return where the time went, in equal parts of the trace."""
        books = [[0.0] * 5 for _ in range(parts)]
        edges = [*(self.until * part / parts for part in range(1, parts)), math.inf]
        part = 0
        for start, end, change in self.spans():
            while start >= edges[part]:
                part += 1
            books[part][0] -= change.lost
            books[part][1] += change.lost
            while end > edges[part]:
                self._enter(books[part], edges[part] - start, change)
                start, part = edges[part], part + 1
            self._enter(books[part], end - start, change)
        return [Ledger(*book) for book in books]

    @staticmethod
    def _enter(book: list[float], seconds: float, change: Change) -> None:
        book[0] += seconds * change.rate
        book[2 if change.rate else 3] += seconds * (change.healthy - change.rate)
        book[4] += seconds * (1.0 - change.healthy)


@dataclass(frozen=True)
class Outcome:
    """What a number of learners made of a time."""

    goodput: float
    error: float
    """Standard error of `goodput`."""
    uptime: float
    """Share of the time in which at least one learner ran."""
    failures: int
    ledger: Ledger
    """Of all learners together: `total` = learners x seconds."""


def simulate(chips: Chips, recovery: Recovery, learners: int, seconds: float, seed: int) -> Outcome:
    """Share the chips among learners that never wait for one another, and let time pass. One learner: data-parallel."""
    if learners < 1:
        raise ValueError(f"learners = {learners} is less than 1")
    own = replace(chips, count=chips.count / learners)
    parts: list[Ledger] = []
    stops: list[tuple[float, int]] = []
    failures = 0
    for learner in range(learners):
        trace = LearnerTrace.record(own, recovery, seconds, seed, learner)
        parts += trace.ledgers(BATCHES)
        failures += trace.failures
        for start, end, change in trace.spans():
            if not change.rate:
                stops += [(start, 1), (end, -1)]
    ledger = sum(parts, Ledger())
    error = statistics.stdev(part.goodput for part in parts) / math.sqrt(len(parts))
    return Outcome(ledger.goodput, error, 1.0 - _all_stopped(stops, learners) / seconds, failures, ledger)


def _all_stopped(stops: list[tuple[float, int]], learners: int) -> float:
    """Return for how many seconds every learner stood still at once."""
    stopped, since, seconds = 0, 0.0, 0.0
    for at, step in sorted(stops):
        if stopped == learners:
            seconds += at - since
        stopped, since = stopped + step, at
    return seconds
