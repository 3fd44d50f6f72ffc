"""Eight learners of unequal speed under the real quorum policy and the real learner logic; no tensors, no store.

Virtual time: an inner step of a fast learner takes a second on average.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from diloco_runtime.config import RunConfig
from diloco_runtime.keys import fragment_of
from diloco_runtime.learner_logic import LearnerLogic, smooth
from diloco_runtime.quorum import OpenMerge, QuorumPolicy
from diloco_runtime.records import CommitRecord, Fragment, OfferEntry, PayloadRef, Position, TensorPiece

FAST = SLOW = 4
GAP = 1.18
"""Step time of a slow learner over that of a fast one."""

NOISE = 0.1
"""Standard deviation of step times over their mean."""

TRAVEL = 0.1
"""Seconds until a call, an offer or a commit is seen by the others."""

FRAGMENTS = 24
BUDGET = 10**12
RUN_ID = "0" * 16
NAMES = tuple(f"fast{i}" for i in range(FAST)) + tuple(f"slow{i}" for i in range(SLOW))
TABLE = tuple(
    Fragment(pieces=(TensorPiece(name=f"w{i}", shape=(1,), start=0, stop=1, merge="rda"),)) for i in range(FRAGMENTS)
)


@dataclass(frozen=True)
class Rule:
    """When merges are committed and how far learners run ahead of them."""

    preset: str
    """Of `[sync]`; H = P = 24 as in the paper."""
    quorum: int
    grace: bool
    overlap_steps: int | None = None
    """Absent: the preset's own."""

    def config(self) -> RunConfig:
        """Return the settings of a run with this rule."""
        sync: dict[str, object] = {"preset": self.preset, "fragments": FRAGMENTS, "sync_every": FRAGMENTS}
        sync |= {"min_quorum": self.quorum}
        if self.overlap_steps is not None:
            sync["overlap_steps"] = self.overlap_steps
        if not self.grace:
            sync["min_grace"] = 0.0
        settings = {"name": "mixed", "tokens": BUDGET, "model": {"kind": "no:model"}, "sync": sync}
        return RunConfig.model_validate(settings)


@dataclass(frozen=True)
class Waits:
    """What a trial came to."""

    goodput: float
    """Share of all learners' time that was not spent waiting."""
    fast: float
    slow: float
    """The same of the fast ones and of the slow ones."""
    offers: float
    """Mean number of offers in a commit."""


@dataclass
class _Learner:
    name: str
    logic: LearnerLogic
    mean: float
    """Mean seconds of an inner step."""
    inbox: list[CommitRecord] = field(default_factory=list)
    waiting_since: float | None = None
    waited: float = 0.0
    steps: int = 0
    step_seconds: float | None = None


class Trial:
    """One run: learners step, call, offer and wait; a syncer commits when the policy says so."""

    def __init__(self, rule: Rule, lasting: bool, seed: int) -> None:
        """`lasting`: the noise is drawn once per learner, not anew for every step."""
        self._chance = random.Random(seed)
        self._lasting = lasting
        self._rule = rule
        config = rule.config()
        first = _commit(0, ())
        means = [1.0] * FAST + [GAP] * SLOW
        if lasting:
            means = [self._noisy(mean) for mean in means]
        self._learners = [
            _Learner(name, LearnerLogic(config, TABLE, first), mean) for name, mean in zip(NAMES, means, strict=True)
        ]
        self._policy = QuorumPolicy(rule.quorum, config.sync.min_grace, config.sync.drain_timeout)
        self._order = itertools.count()
        self._due: list[tuple[float, int, str, tuple[object, ...]]] = []
        self._now = 0.0
        self._head = self._called = 0
        self._opened: float | None = None
        self._look_again: float | None = None
        self._offers: dict[int, dict[str, float]] = {}
        self._merged: list[int] = []

    def _noisy(self, mean: float) -> float:
        return mean * max(0.2, self._chance.gauss(1.0, NOISE))

    def run(self, steps: int) -> Waits:
        """Let every learner make so many steps at least."""
        for learner in self._learners:
            self._go_on(learner)
        while min(learner.steps for learner in self._learners) < steps:
            self._now, _, kind, data = heapq.heappop(self._due)
            getattr(self, f"_on_{kind}")(*data)
        for learner in self._learners:
            self._stop_waiting(learner)
        busy = [1.0 - learner.waited / self._now for learner in self._learners]
        fast, slow = statistics.fmean(busy[:FAST]), statistics.fmean(busy[FAST:])
        return Waits(statistics.fmean(busy), fast, slow, statistics.fmean(self._merged))

    def _push(self, after: float, kind: str, *data: object) -> None:
        heapq.heappush(self._due, (self._now + after, next(self._order), kind, data))

    # ---- learners ---------------------------------------------------------------------------------------------------

    def _go_on(self, learner: _Learner) -> None:
        """Adopt what is there; then begin a step, or wait for a commit."""
        for commit in learner.inbox:
            learner.logic.on_commit(commit)
        learner.inbox.clear()
        learner.logic.on_called(self._called)
        if learner.logic.must_wait():
            if learner.waiting_since is None:
                learner.waiting_since = self._now
            return
        self._stop_waiting(learner)
        seconds = learner.mean if self._lasting else self._noisy(learner.mean)
        learner.step_seconds = smooth(learner.step_seconds, seconds)
        self._push(seconds, "step", learner)

    def _stop_waiting(self, learner: _Learner) -> None:
        if learner.waiting_since is not None:
            learner.waited += self._now - learner.waiting_since
            learner.waiting_since = None

    def _on_step(self, learner: _Learner) -> None:
        learner.steps += 1
        learner.logic.on_step(1)
        seq = learner.logic.call()
        if seq is not None:
            learner.logic.on_called(seq)
            self._push(TRAVEL, "call", seq)
        for offer in learner.logic.offers():
            learner.logic.offered(offer, _nonce(learner.name, offer.seq))
            self._push(TRAVEL, "offer", learner.name, offer.seq)
        self._go_on(learner)

    def _on_news(self, learner: _Learner, commit: CommitRecord) -> None:
        learner.inbox.append(commit)
        if learner.waiting_since is not None:
            self._go_on(learner)

    # ---- the syncer -------------------------------------------------------------------------------------------------

    def _on_call(self, seq: int) -> None:
        self._called = max(self._called, seq)
        self._on_look()

    def _on_offer(self, name: str, seq: int) -> None:
        if seq > self._head:
            self._offers.setdefault(seq, {})[name] = self._now
        self._on_look()

    def _on_look(self) -> None:
        """Commit what is to be committed now, and look again when the grace window of the rest is over."""
        if self._look_again is not None and self._now >= self._look_again:
            self._look_again = None
        while self._called > self._head:
            if self._opened is None:
                self._opened = self._now
                self._policy.on_opened(self._now)
            known = [learner.step_seconds for learner in self._learners if learner.step_seconds is not None]
            self._policy.on_fastest(min(known))  # as many fragments as steps: one step is a fragment period
            # Without in-flight merges there is nothing to hide a wait behind: the window is 0.
            in_flight = max(learner.logic.in_flight for learner in self._learners) if self._rule.grace else 0
            everybody = frozenset(NAMES)
            arrivals = self._offers.get(self._head + 1, {})
            merge = OpenMerge(self._opened, arrivals, frozenset(), everybody, everybody)
            if self._policy.decide(merge, self._now, in_flight) == "wait":
                if arrivals and len(arrivals) >= self._rule.quorum and self._look_again is None:
                    over = max(self._opened, min(arrivals.values())) + self._policy.window(in_flight)
                    self._look_again = max(over, self._now + 1e-6)
                    self._push(self._look_again - self._now, "look")
                return
            self._policy.on_commit(merge, in_flight)
            self._write(arrivals)

    def _write(self, arrivals: dict[str, float]) -> None:
        self._head, self._opened = self._head + 1, None
        self._merged.append(len(arrivals))
        self._offers.pop(self._head, None)
        commit = _commit(self._head, tuple(arrivals))
        for learner in self._learners:
            self._push(TRAVEL, "news", learner, commit)


def _nonce(name: str, seq: int) -> str:
    return f"{name}-{seq}"


def _commit(seq: int, names: Sequence[str]) -> CommitRecord:
    here = Position()
    return CommitRecord(
        run_id=RUN_ID,
        nonce=f"c{seq}",
        seq=seq,
        parent=f"c{seq - 1}" if seq else "",
        fragment=fragment_of(seq, FRAGMENTS) if seq else -1,
        author=NAMES[0],
        author_incarnation=1,
        successor=NAMES[0],
        budget=BUDGET,
        params=(PayloadRef(key="none", size=1, sha256="00"),),
        merged=tuple(
            OfferEntry(
                island=name, incarnation=1, nonce=_nonce(name, seq), anchor=0, inner_steps=1, tokens=1, data_to=here
            )
            for name in names
        ),
    )
