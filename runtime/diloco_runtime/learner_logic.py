"""What a learner decides: when to call a merge, what to offer, how to adopt, what its learning rate is.

A pure state machine. Events come in as method calls between two inner steps (a step was made, a call or a commit was
seen, an offer turned out unpublishable), decisions go out as values. It holds no tensors, reads no clock, does no I/O.
Time enters only as measured durations. PROTOCOL.md sections 3, 4 and 8 give the reasons.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from diloco_runtime.config import RunConfig
from diloco_runtime.keys import fragment_of, version_at, version_before
from diloco_runtime.records import CommitRecord, Fates, Fragment

Fate = Literal["merged", "refused", "late"]

SMOOTHING = 0.2
"""Weight of the newest value in moving averages of durations: about the last ten values count."""

FLIGHT_MARGIN = 0.5
"""Added to commit time / fragment period before rounding up, so that jitter of half a period does not stall calls."""


def smooth(average: float | None, value: float) -> float:
    """Return the moving average after one more value."""
    return value if average is None else average + SMOOTHING * (value - average)


@dataclass(frozen=True)
class Offer:
    """An offer to make now: the fragment is to be snapshot before the next inner step."""

    seq: int
    fragment: int
    anchor: int
    inner_steps: int
    tokens: int


@dataclass(frozen=True)
class Adoption:
    """How to take a commit: `carry` keeps what was learned after the offer, otherwise the new values overwrite."""

    seq: int
    fragment: int
    carry: bool


@dataclass
class _Outstanding:
    seq: int
    nonce: str
    tokens: int
    step: int
    timed: bool
    """Made after its call: the way to its commit tells how long a commit takes."""


@dataclass(slots=True)
class _Tally:
    """`records.Fates`, while it is counted: every inner step counts on every fragment."""

    processed: int = 0
    merged: int = 0
    refused: int = 0
    late: int = 0
    overwritten: int = 0
    offered: int = 0
    fresh: int = 0

    def overwrite(self) -> None:
        """What was not offered is gone."""
        self.overwritten += self.fresh
        self.fresh = 0

    def record(self) -> Fates:
        return Fates(
            processed=self.processed,
            merged=self.merged,
            refused=self.refused,
            late=self.late,
            overwritten=self.overwritten,
            offered=self.offered,
            fresh=self.fresh,
        )


@dataclass
class _Fragment:
    version: int
    steps: int = 0
    """Inner steps since adoption or, when the outstanding offer will be carried, since its snapshot."""
    fates: _Tally = field(default_factory=_Tally)
    outstanding: _Outstanding | None = None


class LearnerLogic:
    """One learner life. `head` is the log position up to which everything was adopted."""

    def __init__(
        self, config: RunConfig, table: tuple[Fragment, ...], head: CommitRecord, reopened: int | None = None
    ) -> None:
        """Start at `head`; `reopened`: the token budget with which a run that had ended goes on."""
        count = len(table)
        self._sync = config.sync
        self._count = count
        self._sizes = [fragment.numel for fragment in table]
        self._total = sum(self._sizes)
        self._fragments = [_Fragment(version=version_at(f, head.seq, count)) for f in range(count)]
        self.head = head.seq
        self.phase: str = head.phase if reopened is None else "run"
        self.budget = head.budget if reopened is None else reopened
        self._last = self._last_merge(head) if reopened is None else None
        self.step = 0
        self.called = head.seq
        """Newest merge known to be called."""
        self._period = config.sync.sync_every / count
        self._due_seq = head.seq + 1
        self._due_at = self._period
        self._commit_steps: float | None = None
        self._credited = head.credited_total
        self._recent: list[frozenset[str]] = []
        self._quorum = config.sync.min_quorum if isinstance(config.sync.min_quorum, int) else 1
        self.progress = 0.0

    # ---- events -------------------------------------------------------------------------------------------------

    def on_step(self, tokens: int) -> None:
        """An inner step on `tokens` tokens was made."""
        self.step += 1
        for part in self._fragments:
            part.steps += 1
            part.fates.processed += tokens
            part.fates.fresh += tokens

    def on_called(self, seq: int) -> None:
        """Merge `seq` (and all before it) is called."""
        self.called = max(self.called, seq)
        self._advance_due()

    def on_commit(self, commit: CommitRecord) -> Adoption:
        """The next commit of the log is to be adopted now; accounts for it and says how its values are taken."""
        if commit.seq != self.head + 1:
            raise ValueError(f"commit {commit.seq} does not follow {self.head}")
        part = self._fragments[commit.fragment]
        fate = self._settle(part, commit)
        carry = fate == "merged" and self._sync.carry
        if not carry:
            part.fates.overwrite()
            part.steps = 0
        part.version = commit.seq
        self.head = commit.seq
        self.called = max(self.called, commit.seq)
        self.phase = commit.phase
        self._last = self._last_merge(commit)
        self.budget = commit.budget
        self._credited = commit.credited_total
        self._recent = [*self._recent, frozenset(entry.island for entry in commit.merged)][-self._count :]
        if self._due_seq <= commit.seq:
            # Adopted past a merge without an offer of its own: the next is due one period from here.
            self._due_seq, self._due_at = commit.seq + 1, self.step + self._period
        return Adoption(commit.seq, commit.fragment, carry)

    @staticmethod
    def _last_merge(commit: CommitRecord) -> int | None:
        """Return the seq of the final merge once the run drains: there is nothing to offer to beyond it."""
        return None if commit.phase == "run" else commit.seq + commit.drain_left

    def _settle(self, part: _Fragment, commit: CommitRecord) -> Fate | None:
        """Give the tokens of the outstanding offer to this commit their fate."""
        offer = part.outstanding
        if offer is None or offer.seq != commit.seq:
            return None
        part.outstanding = None
        fate: Fate = "late"
        if any(entry.nonce == offer.nonce for entry in commit.merged):
            fate = "merged"
        elif any(entry.nonce == offer.nonce for entry in commit.refused):
            fate = "refused"
        if offer.timed:
            self._commit_steps = smooth(self._commit_steps, self.step - offer.step)
        part.fates.offered -= offer.tokens
        setattr(part.fates, fate, getattr(part.fates, fate) + offer.tokens)
        return fate

    def on_bad_delta(self, fragment: int) -> None:
        """The fragment is not finite and was reset to its anchor: nothing of it can be offered."""
        part = self._fragments[fragment]
        part.fates.overwrite()
        part.steps = 0

    # ---- decisions ----------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """How many merges may be open beyond the head: configured, or commit time / fragment period, rounded up."""
        if self._sync.in_flight is not None:
            return self._sync.in_flight
        if self._commit_steps is None:
            return min(2, self._count)
        return max(1, min(self._count, math.ceil(self._commit_steps / self._period + FLIGHT_MARGIN)))

    def _can_offer(self, seq: int) -> bool:
        part = self._fragments[fragment_of(seq, self._count)]
        return (
            self.head < seq <= self.head + self._count
            and (self._last is None or seq <= self._last)
            and part.outstanding is None
            and part.version == version_before(seq, self._count)
            and part.steps >= 1
        )

    def _has_offered(self, seq: int) -> bool:
        offer = self._fragments[fragment_of(seq, self._count)].outstanding
        return offer is not None and offer.seq == seq

    def _due(self, seq: int) -> bool:
        return seq == self._due_seq and self.step >= self._due_at

    def call(self) -> int | None:
        """Return the merge to call now, or None. Its own offer follows in `offers`."""
        seq = self._due_seq
        if self.phase != "run" or seq <= self.called or not self._due(seq):
            return None
        if seq > self.head + self.in_flight or not (self._can_offer(seq) or self._has_offered(seq)):
            return None
        return seq

    def offers(self, early_steps: float = 0.0) -> list[Offer]:
        """Return the offers to make now, in order of seq, and count them as made once `offered` is called for each.

        `early_steps`: with a slow uplink, how many inner steps before its expected call an offer must start.
        """
        found = []
        for seq in range(self.head + 1, self.head + self._count + 1):
            if self._can_offer(seq) and (self._wanted(seq) or self._early(seq, early_steps)):
                part = self._fragments[fragment_of(seq, self._count)]
                found.append(Offer(seq, fragment_of(seq, self._count), part.version, part.steps, part.fates.fresh))
        return found

    def _wanted(self, seq: int) -> bool:
        if self.phase == "drain":
            return True
        if seq > self.called:
            return False
        return self._sync.pace == "fastest" or seq < self._due_seq or self._due(seq)

    def _early(self, seq: int, early_steps: float) -> bool:
        """One that nobody called yet, but whose upload would come too late if it started at the call."""
        if early_steps <= 0.0 or self.phase != "run" or self._sync.pace != "fastest" or seq <= self.called:
            return False
        expected = self._due_at + (seq - self._due_seq) * self._period
        return seq >= self._due_seq and self.step + early_steps >= expected

    def last_offers(self) -> list[Offer]:
        """Return every offer that can still be made by a learner that is about to leave (SIGTERM)."""
        seqs = [s for s in range(self.head + 1, self.head + self._count + 1) if self._can_offer(s)]
        return [
            Offer(s, f, self._fragments[f].version, self._fragments[f].steps, self._fragments[f].fates.fresh)
            for s in seqs
            for f in (fragment_of(s, self._count),)
        ]

    def offered(self, offer: Offer, nonce: str) -> None:
        """The fragment was snapshot for this offer: its tokens are on their way, counting starts anew."""
        part = self._fragments[offer.fragment]
        part.outstanding = _Outstanding(offer.seq, nonce, offer.tokens, self.step, offer.seq <= self.called)
        part.fates.offered += offer.tokens
        part.fates.fresh -= offer.tokens
        part.steps = 0
        self._advance_due()

    def _advance_due(self) -> None:
        """Move on from every called merge that has this learner's offer.

        Fractions accumulate: the next merge is due one period after this one *was* due when this learner was the first
        to find it due, one period from now when another was.
        """
        for part in sorted(self._fragments, key=lambda p: p.outstanding.seq if p.outstanding else 0):
            offer = part.outstanding
            if offer is not None and self._due_seq <= offer.seq <= self.called:
                base = self._due_at if self.step >= self._due_at else self.step
                self._due_seq, self._due_at = offer.seq + 1, max(base + self._period, float(self.step))

    def must_wait(self) -> bool:
        """Tell whether `overlap_steps` forbids another inner step before an outstanding offer is answered."""
        overlap = self._sync.overlap_steps
        if overlap is None or self.phase != "run":
            return False
        pending = [part.outstanding for part in self._fragments if part.outstanding is not None]
        return any(self.step - offer.step >= overlap for offer in pending)

    def early_steps(self, publish_seconds: float | None, step_seconds: float | None) -> float:
        """Return how many inner steps early an offer must start: 0 while an upload takes less than half a period."""
        if not publish_seconds or not step_seconds:
            return 0.0
        steps = publish_seconds / step_seconds
        return steps if steps > self._period / 2 else 0.0

    # ---- views --------------------------------------------------------------------------------------------------

    def outstanding(self, fragment: int) -> str | None:
        """Return the nonce of the unanswered offer of a fragment, or None."""
        offer = self._fragments[fragment].outstanding
        return None if offer is None else offer.nonce

    def fates(self) -> tuple[Fates, ...]:
        """Return the token fates of this life, one per fragment."""
        return tuple(part.fates.record() for part in self._fragments)

    def live_islands(self) -> int:
        """Return how many islands the newest P commits merged (the quorum before the first)."""
        names = frozenset().union(*self._recent) if self._recent else frozenset()
        return len(names) or self._quorum

    def update_progress(self) -> float:
        """Return progress through the token budget in [0, 1], never falling: what the learning rate follows.

        Credited tokens alone would be a staircase; the tokens that live islands have not merged yet are estimated by
        this learner's own.
        """
        own = sum((p.fates.offered + p.fates.fresh) * n for p, n in zip(self._fragments, self._sizes, strict=True))
        tokens = (self._credited + self.live_islands() * own) / self._total
        self.progress = max(self.progress, min(1.0, tokens / max(1, self.budget)))
        return self.progress
