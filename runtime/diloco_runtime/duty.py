"""Which island's syncer merges. Pure; safety never depends on it: two syncers that race cost bytes, not correctness.

The author of the head, or the successor that it named, goes on. A standby takes over when a mergeable seq stays
uncommitted for max(takeover_after, 3 x usual commit time) x its rank; the wait doubles with each takeover that brings
no commit, so that two blind syncers do not chase each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from diloco_runtime.records import CommitRecord

USUAL_FACTOR = 3.0
"""Multiple of the usual commit time before which nobody takes over."""

USUAL_COMMITS = 9
"""Commits whose median is the usual commit time: a mean would keep the first commit of a run, for which everybody
still loads, or one that fell into an outage, and nobody would take over for minutes."""

PREPARE_AT = 0.5
"""Share of the wait after which the standby that is next makes ready: what it has to load takes seconds."""

HANDOVER_FACTOR = 2.0
"""Another syncer gets the duty when its score is this many times the author's: smaller differences are noise."""

HANDOVER_LOOKS = 5
"""... at so many looks in a row."""

MAX_DOUBLINGS = 6

CALM_COMMITS = 20
"""Commits of others in a row, none of them fought over, after which fruitless takeovers are forgotten."""


class Duty:
    """Decides whether this island's syncer is the one to merge."""

    def __init__(self, island: str, takeover_after: float) -> None:
        self._island = island
        self._takeover_after = takeover_after
        self._successor = ""
        self._commit_times: deque[float] = deque(maxlen=USUAL_COMMITS)
        self._mergeable_since: float | None = None
        self._took_over = False
        self._fruitless = 0
        self._calm = 0
        self._better: dict[str, int] = {}
        """At how many looks in a row each of the others was better by `HANDOVER_FACTOR`."""
        self._leaving = False

    def leave(self) -> None:
        """This island is about to leave: the next commit names another."""
        self._leaving = True

    def on_commit(self, commit: CommitRecord) -> None:
        """A new head was seen."""
        if commit.stages:
            # As its author measured it: a standby looks too seldom to see any but the slow ones.
            self._commit_times.append(sum(commit.stages.values()))
        if commit.author == self._island:
            self._fruitless = 0
        elif self._took_over:
            self._fruitless, self._calm = min(MAX_DOUBLINGS, self._fruitless + 1), 0
        else:
            self._calm += 1
            self._fruitless = 0 if self._calm >= CALM_COMMITS else self._fruitless
        self._successor = commit.successor
        self._mergeable_since = None
        self._took_over = False

    def on_mergeable(self, now: float) -> None:
        """The seq after the head is called, or is one of the final merges."""
        if self._mergeable_since is None:
            self._mergeable_since = now

    def on_gap(self) -> None:
        """Nothing could be seen for a while (an outage, a frozen observer): what is mergeable waits from now on."""
        self._mergeable_since = None

    def takeover_wait(self, rank: int) -> float:
        """Return how long a mergeable seq must stay uncommitted before a standby of this rank (from 0) takes over."""
        usual = median(self._commit_times) if self._commit_times else 0.0
        wait: float = max(self._takeover_after, USUAL_FACTOR * usual) * (rank + 1) * 2**self._fruitless
        return wait

    def preparing(self, now: float, rank: int) -> bool:
        """Tell whether this syncer merges or is about to: it should have loaded what merging needs."""
        since = self._mergeable_since
        return self.active(now, rank) or (since is not None and now - since >= PREPARE_AT * self.takeover_wait(rank))

    def active(self, now: float, rank: int) -> bool:
        """Tell whether this syncer is to merge now; decides on a takeover when its time has come."""
        if self._successor == self._island or self._took_over:
            return True
        if self._mergeable_since is None or now - self._mergeable_since < self.takeover_wait(rank):
            return False
        self._took_over = True
        return True

    def rank(self, scores: Mapping[str, float]) -> int:
        """Return this island's place among the living standby syncers, best score first, ties by name."""
        standby = {name: score for name, score in scores.items() if name != self._successor}
        standby.setdefault(self._island, 0.0)
        order = sorted(standby, key=lambda name: (-standby[name], name))
        return order.index(self._island)

    def look_for_better(self, scores: Mapping[str, float]) -> None:
        """Compare the living syncers' scores with this one's (once per look at the peers)."""
        own = scores.get(self._island, 0.0)
        # Each of them by itself: of two that are equally good, now one is ahead and now the other.
        self._better = {
            name: self._better.get(name, 0) + 1
            for name, score in scores.items()
            if name != self._island and 0.0 < HANDOVER_FACTOR * own <= score
        }

    def successor(self, scores: Mapping[str, float]) -> str:
        """Return whom the next commit names as the author after it, given the living syncers' scores."""
        others = {name: score for name, score in scores.items() if name != self._island}
        if self._leaving and others:
            return max(sorted(others), key=lambda name: others[name])
        better = [name for name, looks in sorted(self._better.items()) if looks >= HANDOVER_LOOKS and name in others]
        if better:
            self._better = {}
            return max(better, key=lambda name: others[name])
        return self._island
