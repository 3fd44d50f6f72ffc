"""What a run will come to: the real decisions of learners, syncers and supervision over virtual time.

No tensors, no store and no threads: every inner step, request and transfer is a duration on an event heap. Goodput is
`diloco_cli.accounting.goodput`: over all islands, the seconds in inner steps times the share of the tokens that lives
saw merged, divided by the seconds that agents lived, all as far as heartbeats told.

Losses are rare compared with outer steps. A stretch in which every island trains undisturbed is therefore measured for
a few cycles and then skipped until shortly before the next loss: its rates, times the time skipped, are added to all
totals. What is simulated one by one goes on unchanged after it.
"""

from __future__ import annotations

import random  # noqa: TID251 - one generator per island, seeded by the caller
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diloco_cli.island_watch import IslandWatch
from diloco_cli.simulation.forecast_events import Link, Timeline
from diloco_cli.simulation.forecast_failures import Loss, Losses
from diloco_cli.simulation.forecast_island import Account, IslandModel
from diloco_cli.simulation.forecast_scene import Board, Case, Commit, Place
from diloco_cli.simulation.forecast_syncer import Syncers
from diloco_cli.simulation.forecast_traffic import Station

SETTLE_CYCLES, MEASURE_CYCLES, LEAST_MEASURED = 3, 10, 60
"""Cycles over all fragments without a disturbance before a calm stretch is measured, and for how many it is, in no
fewer commits."""

MARGIN_CYCLES = 2.0
"""After a skip so many cycles, half as many or half as many again, are simulated before the next loss: it must not
always come at the same moment of a cycle."""


@dataclass(frozen=True)
class Window:
    """How far a forecast goes; the first limit that is met ends it."""

    commits: int | None = None
    """Outer steps that are simulated one by one; those in skipped stretches do not count."""
    steps: int | None = None
    """Inner steps, of all islands together, that are simulated one by one."""
    seconds: float | None = None
    """Of the calendar, skipped stretches included."""
    skip: bool = True
    """Whether calm stretches are skipped."""


@dataclass(frozen=True)
class Totals:
    """What a run has come to at some moment."""

    seconds: float = 0.0
    commits: float = 0.0
    offers: float = 0.0
    """Islands in all commits."""
    present: float = 0.0
    """Islands that were training, summed over commits."""
    credited: float = 0.0
    """Token-parameters in the global model."""
    islands: Mapping[str, Account] = field(default_factory=dict)

    def plus(self, other: Totals, factor: float = 1.0) -> Totals:
        """Return the sum, the other one's numbers times `factor`."""
        return Totals(
            self.seconds + factor * other.seconds,
            self.commits + factor * other.commits,
            self.offers + factor * other.offers,
            self.present + factor * other.present,
            self.credited + factor * other.credited,
            {name: mine.plus(other.islands[name], factor) for name, mine in self.islands.items()},
        )

    def since(self, before: Totals) -> Totals:
        """Return what came to be since `before`, as a stretch that others like it follow."""
        stretch = self.plus(before, -1.0)
        return replace(stretch, islands={name: account.settled() for name, account in stretch.islands.items()})


@dataclass(frozen=True)
class Outcome:
    """A forecast that has ended."""

    why: str
    """"budget", "commits", "steps", "seconds", or "stalled": no commit for as long as a supervisor waits."""
    warm: Totals
    """When every island had trained and some cycles more were over; the begin when it did not come to that."""
    end: Totals
    simulated_commits: int
    skipped_seconds: float
    trace: tuple[Commit, ...]
    losses: tuple[Loss, ...]


class Forecast:
    """One run of a case."""

    def __init__(self, case: Case, losses: Losses) -> None:
        self._case = case
        self._losses = losses
        self._timeline = Timeline()
        self._board = Board(on_news=self._on_news)
        self._syncers = Syncers(case, self._board, self._on_commit)
        self._board.on_offer = self._syncers.on_news
        self.islands = {place.name: self._island(place) for place in case.places}
        self._skipped = Totals(islands={place.name: Account() for place in case.places})
        self._trace: list[Commit] = []
        self._lost: list[Loss] = []
        self._newest = 0.0
        """When the newest commit was made, without what was skipped."""
        self._offers = self._present = 0
        self._calm_since = self._judged = 0
        self._mark: Totals | None = None
        self._warming = 0
        self._warm: Totals | None = None
        self._window = Window()
        self._chance = random.Random(f"{case.seed}/skips")

    def _island(self, place: Place) -> IslandModel:
        timeline = self._timeline
        station = Station(
            self._case,
            place,
            timeline,
            self._board,
            random.Random(f"{self._case.seed}/{place.name}"),
            Link(timeline, place.up),
            Link(timeline, place.down),
        )
        watch = IslandWatch(place.name, self._case.limits, "host", 0.0)
        return IslandModel(station, watch, self._syncers, self._on_started, self._on_disturbed)

    # ---- events -----------------------------------------------------------------------------------------------------

    def _on_news(self) -> None:
        for island in self.islands.values():
            if island.learner is not None:
                island.learner.follower.hint()
        self._syncers.on_news()

    def _on_started(self, name: str) -> None:
        self._losses.started(name, self._now())

    def _on_disturbed(self) -> None:
        self._calm_since, self._mark = len(self._trace), None

    def _on_commit(self, offers: int) -> None:
        training = sum(island.learner is not None for island in self.islands.values())
        self._trace.append(Commit(self._now(), offers, training))
        self._newest = self._timeline.now
        self._offers += offers
        self._present += training
        cycle, commits = len(self._case.sizes.table), len(self._trace)
        if self._warm is None and all(island.trained for island in self.islands.values()):
            self._warming = self._warming or commits
            if commits >= self._warming + SETTLE_CYCLES * cycle:
                self._warm = self.totals()
        if training == len(self.islands):
            self._count_calm(commits - self._calm_since, cycle)

    def _count_calm(self, calm: int, cycle: int) -> None:
        """Mark the begin of a measurement after so many undisturbed commits, skip at its end."""
        if calm >= SETTLE_CYCLES * cycle and self._mark is None:
            self._mark = self.totals()
        elif calm >= SETTLE_CYCLES * cycle + max(LEAST_MEASURED, MEASURE_CYCLES * cycle):
            if self._window.skip:
                self._skip()
            self._on_disturbed()

    def _lose(self) -> None:
        loss = self._losses.pop()
        self._lost.append(loss)
        island = self.islands[loss.island]
        if loss.what == "learner":
            island.lose_learner()
        else:
            island.lose()

    # ---- calm stretches ---------------------------------------------------------------------------------------------

    def _now(self) -> float:
        return self._timeline.now + self._skipped.seconds

    def _skip(self) -> None:
        """Go to shortly before the next loss, or to the end, at the rates of the stretch since the mark."""
        assert self._mark is not None
        now = self.totals()
        measured = now.since(self._mark)
        cycle = len(self._case.sizes.table) * measured.seconds / measured.commits
        before = MARGIN_CYCLES * cycle * (0.5 + self._chance.random())
        goals = [self._losses.next_time() - before]
        if measured.credited > 0.0:
            goals.append(now.seconds + (self._budget() - now.credited) * measured.seconds / measured.credited)
        if self._window.seconds is not None:
            goals.append(self._window.seconds)
        length = min(goals) - now.seconds
        if length > measured.seconds:
            self._skipped = self._skipped.plus(measured, length / measured.seconds)
            for island in self.islands.values():
                island.skipped = self._skipped.seconds

    def _budget(self) -> float:
        """Return the budget in token-parameters."""
        return float(self._case.config.tokens) * self._case.sizes.parameters

    # ---- the run ----------------------------------------------------------------------------------------------------

    def totals(self) -> Totals:
        """Return what the run has come to by now, skipped stretches included."""
        credited = float(self._board.log[-1].credited_total) if self._board.log else 0.0
        accounts = {name: island.account() for name, island in self.islands.items()}
        seen = Totals(self._timeline.now, len(self._trace), self._offers, self._present, credited, accounts)
        return seen.plus(self._skipped)

    def run(self, window: Window) -> Outcome:
        """Go on until the budget is met or the window ends."""
        self._window, timeline = window, self._timeline
        for island in self.islands.values():
            island.launch(0.0)
        while not (why := self._over()):
            loss = self._losses.next_time() - self._skipped.seconds
            if loss <= timeline.next_time():
                timeline.now = max(timeline.now, loss)
                self._lose()
            else:
                timeline.step()
        end = self.totals()
        warm = self._warm or Totals(islands={name: Account() for name in self.islands})
        return Outcome(why, warm, end, len(self._trace), self._skipped.seconds, tuple(self._trace), tuple(self._lost))

    def _over(self) -> str:
        """Return what ends the forecast now; empty: nothing."""
        window, commits = self._window, len(self._trace)
        if window.seconds is not None and self._now() >= window.seconds:
            return "seconds"
        if commits > self._judged:
            self._judged = commits
            if self._board.log[-1].credited_total + self._skipped.credited >= self._budget():
                return "budget"
            if window.commits is not None and commits >= window.commits:
                return "commits"
            if window.steps is not None and self._timeline.steps >= window.steps:
                return "steps"
        return "stalled" if self._timeline.now - self._newest > self._case.limits.stalled_after else ""
