"""The token audit: where every token went, from the records alone, at any log position.

For each life of an island and each fragment, the newest offer record made for a merge at or before position h + P says
how many tokens were processed and overwritten until then; the log says which of the offers were merged, refused or too
late. So at every position

    processed = merged + refused + late + overwritten + pending

must hold exactly, and no offer may be merged twice. What a life processed after its newest offer is known from its last
heartbeat: lost when the life is over, fresh otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.records import CommitRecord, Fates, OfferRecord

LifeKey = tuple[str, int]


@dataclass
class Ledger:
    """Fates of the tokens of one life on one fragment at one log position."""

    fates: Fates
    problem: str
    """Where the life's own account differs from the log; empty when they agree."""


@dataclass
class Audit:
    """Everything needed to balance the books of a run."""

    commits: list[CommitRecord]
    offers: list[OfferRecord]
    problems: list[str] = field(default_factory=list)

    def check(self) -> list[str]:
        """Return what is wrong anywhere in the history; empty when the books balance at every log position."""
        self.problems = []
        self._check_chain()
        self._check_merged_once()
        for position in range(len(self.commits)):
            for (life, fragment), ledger in self.ledgers(position).items():
                f = ledger.fates
                if ledger.problem:
                    self.problems.append(f"at {position}: life {life} fragment {fragment}: {ledger.problem}")
                if f.processed != f.merged + f.refused + f.late + f.overwritten + f.offered:
                    self.problems.append(f"at {position}: life {life} fragment {fragment} does not balance: {f}")
        return self.problems

    def _check_chain(self) -> None:
        for before, commit in zip(self.commits[:-1], self.commits[1:], strict=True):
            if commit.parent != before.nonce:
                self.problems.append(f"commit {commit.seq} does not name {before.seq} as its parent")
            if commit.credited_total != before.credited_total + commit.credited:
                self.problems.append(f"commit {commit.seq} adds up its credited tokens wrongly")

    def _check_merged_once(self) -> None:
        known = {offer.nonce: offer for offer in self.offers}
        seen: set[str] = set()
        for commit in self.commits:
            for entry in commit.merged:
                offer = known.get(entry.nonce)
                if entry.nonce in seen:
                    self.problems.append(f"commit {commit.seq} merges offer {entry.nonce} again")
                if offer is None or offer.seq != commit.seq or offer.tokens != entry.tokens:
                    self.problems.append(f"commit {commit.seq} merges an offer {entry.nonce} that was not made to it")
                seen.add(entry.nonce)

    def ledgers(self, position: int) -> dict[tuple[LifeKey, int], Ledger]:
        """Return the fates per life and fragment at a log position, as the records tell them."""
        count = len(self.commits[0].fragments)
        verdicts = {
            entry.nonce: kind
            for commit in self.commits[: position + 1]
            for kind, entries in (("merged", commit.merged), ("refused", commit.refused))
            for entry in entries
        }
        grouped: dict[tuple[LifeKey, int], list[OfferRecord]] = {}
        for offer in self.offers:
            if offer.seq <= position + count and offer.anchor <= position:
                grouped.setdefault(((offer.island, offer.incarnation), offer.fragment), []).append(offer)
        return {key: _ledger(offers, verdicts, position) for key, offers in grouped.items()}


def _ledger(offers: Iterable[OfferRecord], verdicts: dict[str, str], position: int) -> Ledger:
    ordered = sorted(offers, key=lambda offer: offer.seq)
    sums = {"merged": 0, "refused": 0, "late": 0, "offered": 0}
    earlier = dict(sums)
    for index, offer in enumerate(ordered):
        fate = verdicts.get(offer.nonce) or ("late" if offer.seq <= position else "offered")
        sums[fate] += offer.tokens
        if index < len(ordered) - 1:
            earlier[fate] += offer.tokens
    last = ordered[-1].fates[ordered[-1].fragment]
    # An offer is made only after the one before it was answered, so the life knew those answers when it wrote `last`.
    # What it calls late beyond them are offers that it withdrew before their records were created.
    withdrawn = last.late - earlier["late"]
    said = (last.merged, last.refused, last.offered)
    log = (earlier["merged"], earlier["refused"], ordered[-1].tokens)
    problem = "" if said == log and withdrawn >= 0 else f"the life says merged, refused, offered {said}, the log {log}"
    sums["late"] += withdrawn
    return Ledger(Fates(processed=last.processed, overwritten=last.overwritten, **sums), problem)


def read_audit(board: Blackboard) -> Audit:
    """Read the whole log and every offer record."""
    commits: list[CommitRecord] = []
    while (commit := board.read_commit(len(commits))) is not None:
        commits.append(commit)
    count = len(commits[0].fragments) if commits else 0
    offers = [
        offer
        for seq in range(1, len(commits) + count)
        for key in board.list_offers(seq)
        if (offer := board.read_offer_at(key)) is not None
    ]
    return Audit(commits, offers)
