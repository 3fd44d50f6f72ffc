"""One life of a learner in a forecast: the real `LearnerLogic` at every step boundary, inner steps as durations."""

from __future__ import annotations

from dataclasses import dataclass

from diloco_cli.simulation.forecast_traffic import Follower, Publisher, Station
from diloco_runtime.keys import fragment_of
from diloco_runtime.learner_logic import LearnerLogic, smooth
from diloco_runtime.records import CommitRecord

SLOWEST, FASTEST = 5.0, 0.2
"""No inner step takes more, or less, than so many times the mean, whatever the spread."""


@dataclass
class Work:
    """What a learner life has done."""

    busy: float = 0.0
    """Seconds in inner steps."""
    steps: int = 0
    merged: float = 0.0
    """Token-parameters that it has seen merged."""
    delays: int = 0
    """Merged offers, ..."""
    delay_steps: float = 0.0
    """... and the inner steps between their snapshots and the adoption of their commits."""


class LearnerLife:
    """Steps, calls, offers, adopts, waits, after `diloco_runtime.learner.Learner.step`."""

    def __init__(self, station: Station, life: int, head: CommitRecord) -> None:
        self._station = station
        self._timeline = station.timeline
        self._life = life
        case = station.case
        self.logic = LearnerLogic(case.config, case.sizes.table, head)
        self._sizes = case.sizes.numel
        self.work = Work()
        self.follower = Follower(station, head.seq, self._on_news)
        self.publisher = Publisher(station, life, self.follower, self._on_news)
        self.step_seconds: float | None = None
        self._each = case.config.sync.pace == "each"
        self._sent: dict[str, tuple[int, int]] = {}
        """Tokens and step of every offer without an adopted commit, by nonce."""
        self._alive = True
        self._look = True
        """Whether there may be something to offer at the next boundary."""
        self.waiting = False
        self._turn(0)

    def end(self) -> None:
        """The learner is killed."""
        self._alive = False

    def ticks(self) -> int:
        """Return a counter that moves while the main loop turns, as the heartbeat's."""
        return self.work.steps + (round(4 * (self._timeline.now + 1)) if self.waiting else 0)

    def _on_news(self) -> None:
        self._look = True
        if self.waiting and self._alive and self.follower.ready:
            self._turn(0)

    def _turn(self, handled: int) -> None:
        """Adopt what is here; then begin an inner step, or wait. `handled`: offers made just now."""
        logic, follower = self.logic, self.follower
        if follower.ready:
            for commit in follower.ready:
                self._adopt(commit)
            handled += len(follower.ready)
            follower.ready.clear()
        if follower.called > logic.called:
            logic.on_called(follower.called)
        self.waiting = logic.must_wait()
        if self.waiting:
            return
        assumed = self._station.place.assumed
        seconds = assumed.step_seconds
        if assumed.step_spread:
            drawn = self._station.chance.gauss(1.0, assumed.step_spread)
            seconds *= min(SLOWEST, max(FASTEST, drawn))
        pause = handled * assumed.pause_seconds
        self._timeline.at(self._timeline.now + pause + seconds, self._stepped, seconds)

    def _stepped(self, seconds: float) -> None:
        if not self._alive:
            return
        work, logic = self.work, self.logic
        work.busy += seconds
        work.steps += 1
        self._timeline.steps += 1
        self.step_seconds = self.follower.step_seconds = smooth(self.step_seconds, seconds)
        logic.on_step(self._station.place.tokens)
        if self.follower.called > logic.called:
            logic.on_called(self.follower.called)
        self._turn(self._decide())

    def _decide(self) -> int:
        """Call and offer, after `Learner._decide`; return how many offers were made."""
        logic, publisher = self.logic, self.publisher
        seq = logic.call()
        if seq is not None:
            publisher.call(seq)
            logic.on_called(seq)
            self._look = True
        early = 0.0
        if not publisher.offers_waiting():
            early = logic.early_steps(publisher.publish_seconds, self.step_seconds)
        # Without news nothing can have become due, except by own steps.
        if not (self._look or early or self._each):
            return 0
        self._look = False
        if logic.called <= logic.head and not early:
            return 0
        offers = logic.offers(early)
        for offer in offers:
            nonce = f"{self._station.place.name}-{self._life}-{offer.seq}"
            logic.offered(offer, nonce)
            self._sent[nonce] = (offer.tokens, logic.step)
            publisher.offer(offer, nonce)
        return len(offers)

    def _adopt(self, commit: CommitRecord) -> None:
        nonce = self.logic.outstanding(fragment_of(commit.seq, len(self._sizes)))
        self.logic.on_commit(commit)
        self._look = True
        if nonce is None or not nonce.endswith(f"-{commit.seq}"):
            return
        tokens, step = self._sent.pop(nonce)
        if any(entry.nonce == nonce for entry in commit.merged):
            self.work.merged += tokens * self._sizes[commit.fragment]
            self.work.delays += 1
            self.work.delay_steps += self.logic.step - step
