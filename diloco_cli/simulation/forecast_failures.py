"""When islands are lost in a forecast: drawn at random, or recorded. Pure.

Times are the calendar's: a forecast that skips a calm stretch comes nearer to the next loss.
"""

from __future__ import annotations

import heapq
import math
import random  # noqa: TID251 - one generator per island, seeded by the caller
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

HOUR = 3600.0


class Loss(NamedTuple):
    """An island, or its learner alone, is killed."""

    at: float
    """Seconds since the forecast's begin."""
    island: str
    what: Literal["island", "learner"] = "island"


class Losses(Protocol):
    """Where losses come from."""

    def started(self, island: str, now: float) -> None:
        """The island's processes start (calendar time)."""

    def next_time(self) -> float:
        """Return when the next loss is due; infinity when none is."""

    def pop(self) -> Loss:
        """Take the next loss."""


class RandomLosses:
    """Each island lives an exponentially distributed time from each of its starts.

    An island's lives are drawn from a generator of its own: other settings of a run meet the same luck.
    """

    def __init__(self, mean_hours: dict[str, float], seed: int) -> None:
        """`mean_hours`: by island; 0: never lost."""
        self._mean_hours = mean_hours
        self._chance = {name: random.Random(f"{seed}/{name}/losses") for name in mean_hours}
        self._due: list[Loss] = []

    def started(self, island: str, now: float) -> None:
        mean = self._mean_hours[island] * HOUR
        if mean > 0.0:
            heapq.heappush(self._due, Loss(now + self._chance[island].expovariate(1.0 / mean), island))

    def next_time(self) -> float:
        return self._due[0].at if self._due else math.inf

    def pop(self) -> Loss:
        return heapq.heappop(self._due)


class RecordedLosses:
    """A tape of kills; one that finds nothing to kill does nothing."""

    def __init__(self, tape: Iterable[Loss]) -> None:
        self._due = sorted(tape)

    def started(self, island: str, now: float) -> None:
        """Nothing depends on it."""

    def next_time(self) -> float:
        return self._due[0].at if self._due else math.inf

    def pop(self) -> Loss:
        return self._due.pop(0)
