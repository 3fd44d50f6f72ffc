"""When an open merge is committed: quorum, adaptive grace window, and the end of a run. Pure; times are passed in.

Learners do not stall while the syncer waits, so waiting is cheap, and a quorum of one without grace is a trap
(Decoupled DiLoCo, arXiv 2604.21428, measured 37.0 against 25.7 on vision).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from diloco_runtime.learner_logic import smooth

GRACE_FACTOR = 1.5
"""Grace over the moving average of first-to-last arrival."""

RISE, FALL = 0.5, 0.05
"""Weights of the newest first-to-last arrival in its moving average when it is longer and when it is shorter."""

UNKNOWN_PERIOD = 4.0
"""Fragment period in seconds that is assumed before anybody has reported one: the first merges wait rather long."""

MISSED_FACTOR = 1.5
"""An island that was expected and missed the window would have come later than its end: the average moves towards
this multiple of the window, or a window once too short would stay so for ever (nobody late is ever measured)."""


@dataclass(frozen=True)
class OpenMerge:
    """What is known of the merge at head + 1."""

    opened: float
    """When its call was seen, monotonic seconds."""
    arrivals: Mapping[str, float]
    """When each island's first valid offer was seen."""
    refused: frozenset[str]
    """Islands of which only invalid offers were seen."""
    alive: frozenset[str]
    """Islands that have not failed, those about to start included."""
    training: frozenset[str]
    """Islands from which an offer is to be expected."""


class QuorumPolicy:
    """Decides on commits and learns the grace window from arrivals."""

    def __init__(self, min_quorum: int, min_grace: float, drain_timeout: float) -> None:
        self._min_quorum = min_quorum
        self._min_grace = min_grace
        self._drain_timeout = drain_timeout
        self._spread: float | None = None
        self._period: float | None = None
        self._fastest: float | None = None
        self._last_opened: float | None = None

    @property
    def period(self) -> float | None:
        """The fragment period in seconds: what the fastest learner reports, or how often merges are opened."""
        known = [seconds for seconds in (self._period, self._fastest) if seconds is not None]
        return max(known) if known else None

    def on_fastest(self, seconds: float | None) -> None:
        """The fastest learner needs so long for one fragment period, as far as anybody has said."""
        self._fastest = seconds

    def on_opened(self, now: float) -> None:
        """A merge was seen to be open for the first time."""
        if self._last_opened is not None:
            self._period = smooth(self._period, now - self._last_opened)
        self._last_opened = now

    def window(self, in_flight: int) -> float:
        """Return the grace window in seconds: within [min_grace, half of in_flight x fragment period]."""
        cap = max(self._min_grace, 0.5 * in_flight * (self.period or UNKNOWN_PERIOD))
        wanted = cap if self._spread is None else GRACE_FACTOR * self._spread
        return min(cap, max(self._min_grace, wanted))

    def on_commit(self, merge: OpenMerge, in_flight: int) -> None:
        """A merge was committed: learn from who came when and who was missed."""
        if not merge.arrivals or len(merge.arrivals.keys() | merge.training) < 2:
            return  # an island that is alone says nothing of how late others are
        base = max(merge.opened, min(merge.arrivals.values()))
        spread = max(0.0, max(merge.arrivals.values()) - base)
        if merge.training - merge.arrivals.keys() - merge.refused:
            spread = max(spread, MISSED_FACTOR * self.window(in_flight))
        self._spread = spread if self._spread is None else self._towards(self._spread, spread)

    @staticmethod
    def _towards(average: float, spread: float) -> float:
        """Follow longer spreads fast and shorter ones slowly: an island with long steps comes at once in one merge and
        a whole step late in the next, and the plain mean of the two would miss it every other time."""
        return average + (RISE if spread > average else FALL) * (spread - average)

    def decide(self, merge: OpenMerge, now: float, in_flight: int) -> Literal["commit", "wait"]:
        """Return whether an open merge of the running phase is to be committed now."""
        answered = merge.arrivals.keys() | merge.refused
        need = max(1, min(self._min_quorum, len(merge.alive)))
        if len(answered) < need:
            return "wait"
        if merge.training and merge.training <= answered:
            return "commit"
        if not merge.arrivals:
            return "wait"
        base = max(merge.opened, min(merge.arrivals.values()))
        return "commit" if now >= base + self.window(in_flight) else "wait"

    def decide_final(self, merge: OpenMerge, now: float) -> Literal["commit", "wait"]:
        """Return whether a final merge is to be committed now: whoever offers in time, nobody is waited for twice."""
        answered = merge.arrivals.keys() | merge.refused
        if merge.training <= answered or now >= merge.opened + self._drain_timeout:
            return "commit"
        return "wait"
