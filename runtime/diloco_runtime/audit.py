"""The token audit: where every token went, from the records alone, at any log position.

For each life of an island and each fragment, the newest offer record made for a merge at or before position h + P says
how many tokens were processed and overwritten until then; the log says which of the offers were merged, refused or too
late. So at every position

    processed = merged + refused + late + overwritten + pending

must hold exactly, and no offer may be merged twice. What a life processed after its newest offer is known from its last
heartbeat: lost when the life is over, fresh otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.keys import fragment_of, version_before
from diloco_runtime.records import CommitRecord, Fates, OfferEntry, OfferRecord

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
    """The log from commit 0 to its first gap."""
    offers: list[OfferRecord]
    stray: tuple[str, ...] = ()
    """Keys of the log that lie beyond a gap."""
    problems: list[str] = field(default_factory=list)

    def check(self) -> list[str]:
        """Return what is wrong anywhere in the history; empty when the books balance at every log position."""
        self.problems = [f"the log has a gap at {len(self.commits)}, but {key} is there" for key in self.stray]
        self._check_chain()
        self._check_entries()
        for position in range(len(self.commits)):
            for (life, fragment), ledger in self.ledgers(position).items():
                f = ledger.fates
                if ledger.problem:
                    self.problems.append(f"at {position}: life {life} fragment {fragment}: {ledger.problem}")
                if f.processed != f.merged + f.refused + f.late + f.overwritten + f.offered:
                    self.problems.append(f"at {position}: life {life} fragment {fragment} does not balance: {f}")
        return self.problems

    def _check_chain(self) -> None:
        total, parent = 0, ""
        for seq, commit in enumerate(self.commits):
            fragment = fragment_of(seq, len(self.commits[0].fragments)) if seq else -1
            if (commit.seq, commit.fragment) != (seq, fragment):
                self.problems.append(f"commit {seq} says it is {commit.seq}, of fragment {commit.fragment}")
                continue
            if commit.parent != parent:
                self.problems.append(f"commit {seq} does not name {seq - 1} as its parent")
            size = self.commits[0].fragments[fragment].numel if seq else 0
            credited = sum(entry.tokens for entry in commit.merged) * size
            total += commit.credited
            if commit.credited != credited or commit.credited_total != total:
                self.problems.append(f"commit {seq} adds up its credited tokens wrongly")
            if commit.merged and not math.isclose(sum(entry.weight for entry in commit.merged), 1.0, abs_tol=1e-6):
                self.problems.append(f"commit {seq} merges with weights that are not 1 together")
            parent = commit.nonce

    def _check_entries(self) -> None:
        """Every offer has at most one verdict in the log, on an offer that was made to that merge as it says."""
        known = {offer.nonce: offer for offer in self.offers}
        judged: set[str] = set()
        for commit in self.commits:
            for entry in (*commit.merged, *commit.refused):
                offer, verb = known.get(entry.nonce), "refuses" if entry.reason else "merges"
                if entry.nonce in judged:
                    self.problems.append(f"commit {commit.seq} {verb} offer {entry.nonce} again")
                judged.add(entry.nonce)
                if offer is None or offer.seq != commit.seq or _named(entry) != _named(offer):
                    self.problems.append(f"commit {commit.seq} {verb} an offer {entry.nonce} that was not made to it")
            anchor = version_before(commit.seq, len(self.commits[0].fragments)) if commit.seq else 0
            if any(entry.anchor != anchor for entry in commit.merged):
                self.problems.append(f"commit {commit.seq} merges an offer with another anchor than {anchor}")

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


def _named(offer: OfferEntry | OfferRecord) -> tuple[object, ...]:
    """Return what a commit repeats of an offer."""
    return offer.island, offer.incarnation, offer.anchor, offer.inner_steps, offer.tokens, offer.data_to


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
    names = board.store.list(board.keys.logs())
    return Audit(commits, offers, tuple(names[len(commits) :]))
