"""Whatever happens in whatever order, every token has one fate, and calls, offers and progress keep to their rules.

A state machine drives the logic with random steps, calls, offers, commits and a drain, beside plain bookkeeping.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from diloco_runtime.keys import fragment_of, version_at, version_before
from diloco_runtime.learner_logic import LearnerLogic, Offer
from diloco_runtime.records import Fates
from tests.support.run_records import commit, config, entry, table

BUDGET = 400
FATE = st.sampled_from(["merged", "merged", "refused", "late"])
OTHERS = st.sets(st.sampled_from(["oregon", "tokyo"]))
running = precondition(lambda self: self.phase == "run")
open_ended = precondition(lambda self: self.phase != "final")


class LearnerMachine(RuleBasedStateMachine):
    """One learner life and, beside it, what should have become of its tokens."""

    @initialize(
        sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
        head=st.integers(0, 9),
        every=st.integers(1, 8),
        carry=st.booleans(),
        each=st.booleans(),
        measured=st.booleans(),
    )
    def start(self, sizes: list[int], head: int, every: int, carry: bool, each: bool, measured: bool) -> None:
        count = self.count = len(sizes)
        sync = {"fragments": count, "sync_every": every, "carry": carry, "pace": "each" if each else "fastest"}
        if not measured:
            sync["in_flight"] = 1 + every % count
        self.logic = LearnerLogic(config(BUDGET, **sync), table(*sizes), commit(head, count, budget=BUDGET))
        self.sizes, self.carry, self.each = sizes, carry, each
        self.head, self.called, self.step = head, head, 0
        self.phase, self.left, self.credited, self.nonces = "run", 0, 0, 0
        self.fates = [Counter[str]() for _ in sizes]
        self.since = [0] * count
        self.waiting: dict[int, Offer] = {}
        """Offers without a commit yet, by seq."""
        self.offered_ever: set[int] = set()
        self.recent: list[set[str]] = []
        self.progress = 0.0

    # ---- events -----------------------------------------------------------------------------------------------------

    @running
    @rule(tokens=st.integers(0, 20), count=st.integers(1, 3))
    def turns(self, tokens: int, count: int) -> None:
        """The learner's main loop: a step, what is due is called, what is wanted is offered."""
        for _ in range(count):
            self.inner_step(tokens)
            self._call()
            self.make_offers(0.0)

    @open_ended
    @rule(tokens=st.integers(0, 20))
    def inner_step(self, tokens: int) -> None:
        self.logic.on_step(tokens)
        self.step += 1
        for fragment, fates in enumerate(self.fates):
            fates.update(processed=tokens, fresh=tokens)
            self.since[fragment] += 1

    def _call(self) -> None:
        seq = self.logic.call()
        if seq is not None:
            assert seq == self.called + 1
            assert seq <= self.head + self.logic.in_flight <= self.head + self.count
            assert self.since[fragment_of(seq, self.count)] >= 1 or seq in self.waiting
            self.called = seq
            self.logic.on_called(seq)
            assert self.logic.call() != seq

    @running
    @rule()
    def another_calls(self) -> None:
        if self.called < self.head + self.count:
            self.called += 1
            self.logic.on_called(self.called)

    @open_ended
    @rule(early=st.sampled_from([0.0, 2.0, 50.0]))
    def make_offers(self, early: float) -> None:
        possible = self._possible()
        found = self.logic.offers(early)
        for offer in found:
            wanted = offer.seq <= self.called or self.phase == "drain"
            assert wanted or (early > 0.0 and not self.each), "nobody called it, and it is not early"
            self._make(offer)
        must = {seq for seq in possible if self.phase == "drain" or (seq <= self.called and not self.each)}
        assert must <= {offer.seq for offer in found} <= possible

    @open_ended
    @precondition(lambda self: self.step > 12)
    @rule()
    def leave(self) -> None:
        possible = self._possible()
        for offer in self.logic.last_offers():
            self._make(offer)
        assert possible <= self.offered_ever and self._possible() == set()

    def _possible(self) -> set[int]:
        """Return the merges for which this learner has something: a step since its anchor, and no offer yet."""
        last = self.head + (self.count if self.phase == "run" else self.left)
        window = {self._next(f): self.since[f] for f in range(self.count)}
        return {seq for seq, since in window.items() if since >= 1 and seq not in self.waiting and seq <= last}

    def _next(self, fragment: int) -> int:
        return next(s for s in range(self.head + 1, self.head + 1 + self.count) if (s - 1) % self.count == fragment)

    def _make(self, offer: Offer) -> None:
        fragment = fragment_of(offer.seq, self.count)
        assert self.head < offer.seq <= self.head + self.count
        assert offer.seq not in self.offered_ever
        assert self.phase == "run" or offer.seq <= self.head + self.left, "beyond the final merges"
        assert (offer.fragment, offer.anchor) == (fragment, version_before(offer.seq, self.count))
        assert offer.anchor == version_at(fragment, self.head, self.count), "this version is not adopted"
        assert offer.inner_steps == self.since[fragment] >= 1
        assert offer.tokens == self.fates[fragment]["fresh"]
        self.logic.offered(offer, f"mine-{offer.seq}")
        assert self.logic.outstanding(fragment) == f"mine-{offer.seq}"
        self.offered_ever.add(offer.seq)
        self.waiting[offer.seq] = offer
        self.since[fragment] = 0
        self.fates[fragment].update(offered=offer.tokens, fresh=-offer.tokens)

    @running
    @rule(data=st.data())
    def a_delta_is_not_finite(self, data: st.DataObject) -> None:
        free = [f for f in range(self.count) if self._next(f) not in self.waiting]
        if free:
            fragment = data.draw(st.sampled_from(free))
            self.logic.on_bad_delta(fragment)
            self._drop(fragment)

    def _drop(self, fragment: int) -> None:
        fresh = self.fates[fragment]["fresh"]
        self.fates[fragment].update(overwritten=fresh, fresh=-fresh)
        self.since[fragment] = 0

    @open_ended
    @rule(fate=FATE, others=OTHERS, credit=st.integers(0, 40))
    def commit_is_adopted(self, fate: str, others: set[str], credit: int) -> None:
        if self.phase == "drain":
            self.left -= 1
            self.phase = "drain" if self.left else "final"
        self._commit(fate, others, credit)

    @running
    @precondition(lambda self: self.step > 15)
    @rule(fate=FATE, others=OTHERS)
    def the_drain_begins(self, fate: str, others: set[str]) -> None:
        self.phase, self.left = "drain", self.count
        self._commit(fate, others, 0)

    def _commit(self, fate: str, others: set[str], credit: int) -> None:
        seq = self.head + 1
        fragment, offer = fragment_of(seq, self.count), self.waiting.pop(seq, None)
        lists = {"merged": [entry(f"theirs-{name}", name) for name in sorted(others)], "refused": [], "late": []}
        lists[fate] += [entry(f"mine-{seq}")] if offer is not None else []
        self.credited += credit * self.sizes[fragment]
        adoption = self.logic.on_commit(
            commit(
                seq,
                self.count,
                merged=tuple(lists["merged"]),
                refused=tuple(lists["refused"]),
                phase=self.phase,
                drain_left=self.left,
                budget=BUDGET,
                credited_total=self.credited,
            )
        )
        if offer is not None:
            self.fates[fragment].update({"offered": -offer.tokens, fate: offer.tokens})
        carried = offer is not None and fate == "merged" and self.carry
        assert (adoption.seq, adoption.fragment, adoption.carry) == (seq, fragment, carried)
        if not carried:
            self._drop(fragment)
        self.head, self.called = seq, max(self.called, seq)
        self.recent = [*self.recent, {e.island for e in lists["merged"]}][-self.count :]

    @rule()
    def look_at_progress(self) -> None:
        live = len(set().union(*self.recent)) or 1
        own = sum((f["offered"] + f["fresh"]) * size for f, size in zip(self.fates, self.sizes, strict=True))
        now = min(1.0, (self.credited + live * own) / sum(self.sizes) / BUDGET)
        assert self.logic.live_islands() == live
        assert abs(self.logic.update_progress() - max(self.progress, now)) < 1e-12
        self.progress = max(self.progress, now)

    # ---- at every moment --------------------------------------------------------------------------------------------

    @invariant()
    def every_token_has_one_fate(self) -> None:
        for found, expected in zip(self.logic.fates(), self.fates, strict=True):
            counts = found.model_dump()
            assert counts == {name: expected[name] for name in Fates.model_fields}
            assert counts.pop("processed") == sum(counts.values())
            assert all(count >= 0 for count in counts.values())

    @invariant()
    def the_logic_stands_where_the_log_does(self) -> None:
        assert (self.logic.head, self.logic.phase, self.logic.called) == (self.head, self.phase, self.called)
        assert 1 <= self.logic.in_flight <= self.count
        answered = [self.logic.outstanding(f) for f in range(self.count)]
        assert {nonce for nonce in answered if nonce} == {f"mine-{seq}" for seq in self.waiting}

    @invariant()
    def nothing_is_called_or_offered_when_the_run_is_over(self) -> None:
        if self.phase != "run":
            assert self.logic.call() is None and not self.logic.must_wait()
        if self.phase == "final":
            assert self.logic.offers(50.0) == [] == self.logic.last_offers()


TestFates = LearnerMachine.TestCase
TestFates.settings = settings(
    max_examples=40,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate, Phase.shrink],  # explaining a failure takes longer than a test may
)
