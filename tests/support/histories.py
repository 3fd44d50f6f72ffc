"""Histories of a run, made by the real learner logic: commits and offers as they would stand on a blackboard."""

from __future__ import annotations

from typing import Any

from diloco_runtime.audit import Audit
from diloco_runtime.keys import fragment_of
from diloco_runtime.learner_logic import LearnerLogic, Offer
from diloco_runtime.records import OfferEntry, OfferRecord, Position
from tests.support.run_records import PAYLOAD, RUN_ID, commit, config, entry, table

TABLE = table(10, 30)
FRAGMENTS = len(TABLE)


class Life:
    """A learner's life: the real logic, and the offers it recorded."""

    def __init__(self, history: History, island: str, incarnation: int = 1) -> None:
        self.history, self.island, self.incarnation = history, island, incarnation
        self.logic = LearnerLogic(config(fragments=FRAGMENTS, carry=history.carry), TABLE, history.commits[-1])
        history.lives.append(self)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.logic.on_step(8)

    def offer(self, seq: int, recorded: bool = True) -> str:
        """Make the offer to merge `seq`; return its nonce. Not recorded: withdrawn before its record was created."""
        (offer,) = [offer for offer in self.logic.last_offers() if offer.seq == seq]
        nonce = f"{self.island}-{self.incarnation}-{seq}"
        self.logic.offered(offer, nonce)
        if recorded:
            self.history.offers.append(self._record(offer, nonce))
        return nonce

    def _record(self, offer: Offer, nonce: str) -> OfferRecord:
        return OfferRecord(
            run_id=RUN_ID, nonce=nonce, seq=offer.seq, fragment=offer.fragment, island=self.island,
            incarnation=self.incarnation, anchor=offer.anchor, inner_steps=offer.inner_steps, tokens=offer.tokens,
            codec="fp32", payload=PAYLOAD, data_from=Position(), data_to=Position(), fates=self.logic.fates(),
        )  # fmt: skip


class History:
    """A run's log and its lives, growing commit by commit."""

    def __init__(self, carry: bool = True) -> None:
        self.carry = carry
        self.commits = [commit(0, FRAGMENTS).model_copy(update={"fragments": TABLE})]
        self.offers: list[OfferRecord] = []
        self.lives: list[Life] = []

    def _entry(self, nonce: str) -> OfferEntry:
        (offer,) = [offer for offer in self.offers if offer.nonce == nonce]
        return entry(nonce, offer.island, incarnation=offer.incarnation, anchor=offer.anchor, tokens=offer.tokens,
                     inner_steps=offer.inner_steps, data_to=offer.data_to)  # fmt: skip

    def commit(self, merged: tuple[str, ...] = (), refused: tuple[str, ...] = ()) -> None:
        """Append the next commit and let every life adopt it."""
        before = self.commits[-1]
        shares = {"weight": 1.0 / max(1, len(merged))}
        entries = tuple(self._entry(nonce).model_copy(update=shares) for nonce in merged)
        credited = sum(e.tokens for e in entries) * TABLE[fragment_of(before.seq + 1, FRAGMENTS)].numel
        record = commit(
            before.seq + 1, FRAGMENTS, merged=entries, refused=tuple(self._entry(nonce) for nonce in refused),
            credited=credited, credited_total=before.credited_total + credited,
        )  # fmt: skip
        self.commits.append(record)
        for life in self.lives:
            life.logic.on_commit(record)

    def audit(self) -> Audit:
        return Audit(list(self.commits), list(self.offers))

    # ---- breaking it ------------------------------------------------------------------------------------------------

    def change(self, seq: int, **fields: Any) -> None:
        self.commits[seq] = self.commits[seq].model_copy(update=fields)

    def change_offer(self, nonce: str, **fields: Any) -> None:
        (at,) = [i for i, offer in enumerate(self.offers) if offer.nonce == nonce]
        self.offers[at] = self.offers[at].model_copy(update=fields)

    def change_fates(self, nonce: str, **fields: int) -> None:
        """Change what an offer says of its own fragment."""
        (offer,) = [offer for offer in self.offers if offer.nonce == nonce]
        fates = list(offer.fates)
        fates[offer.fragment] = fates[offer.fragment].model_copy(update=fields)
        self.change_offer(nonce, fates=tuple(fates))


def usual_history(carry: bool = True) -> History:
    """Two islands, every kind of fate, a life that follows another, and an offer that is pending at the end."""
    history = History(carry)
    iowa, oregon = Life(history, "iowa"), Life(history, "oregon")
    iowa.steps(2)
    oregon.steps(1)
    first = (iowa.offer(1), oregon.offer(1))
    iowa.steps(1)
    history.commit(merged=first)
    oregon.steps(3)
    second = (iowa.offer(2), oregon.offer(2))
    oregon.steps(1)
    history.commit(merged=second[:1], refused=second[1:])
    iowa.steps(2)
    oregon.offer(3, recorded=False)
    history.commit(merged=(iowa.offer(3),))
    iowa.steps(1)
    oregon.steps(2)
    oregon.offer(4)
    history.commit(merged=(iowa.offer(4),))
    iowa.steps(2)
    oregon.steps(2)
    history.commit(merged=(iowa.offer(5), oregon.offer(5)))
    history.lives.remove(oregon)
    again = Life(history, "oregon", 2)
    again.steps(4)
    iowa.steps(1)
    history.commit(merged=(again.offer(6), iowa.offer(6)))
    iowa.steps(1)
    iowa.offer(7)
    return history
