"""The syncer's work on tensors: check offers, merge them, make the outer step, write the commit.

Imported only when a syncer has the duty: a standby needs no torch. Nothing here decides when.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock
from diloco_runtime.codec import all_finite, decode_fragment, encode_fragment
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import CorruptObject, MissingPayload
from diloco_runtime.history import read_version
from diloco_runtime.keys import fragment_of, version_before
from diloco_runtime.outer import length, merge, merge_weights, outer_step
from diloco_runtime.records import CommitRecord, Fragment, OfferEntry, OfferRecord, PayloadRef, Position
from diloco_runtime.snapshot import fetch_params

Tensors = Mapping[str, torch.Tensor]
T = TypeVar("T")


@dataclass
class OfferBook:
    """Offers to one open merge, checked as they arrive."""

    seq: int
    valid: dict[str, tuple[OfferRecord, Tensors]] = field(default_factory=dict)
    """By record key, with the decoded delta."""
    refused: dict[str, OfferEntry] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    """When each island's first valid offer was seen."""
    unreadable: dict[str, str] = field(default_factory=dict)
    """Keys whose record itself cannot be read, and why."""

    def refuse(self, key: str, reason: str) -> None:
        """Refuse an offer that had passed as valid."""
        record, _ = self.valid.pop(key)
        self.refused[key] = _entry(record, reason=reason)

    def refused_islands(self) -> frozenset[str]:
        """Return islands of which only invalid offers were seen."""
        return frozenset(entry.island for entry in self.refused.values()) - self.arrivals.keys()


@dataclass
class Draft:
    """A commit on its way: once its bytes are fixed they are tried until the outcome is known."""

    record: CommitRecord
    params: dict[str, torch.Tensor]
    momentum: dict[str, torch.Tensor] | None


@dataclass(frozen=True)
class _Step:
    """An outer step, and of which offers with which shares it was made."""

    offers: list[OfferRecord]
    weights: list[float]
    params: Tensors
    buffer: Tensors | None


@dataclass(frozen=True)
class Decision:
    """What the syncer decided about the commit that `Merging.draft` is to write."""

    phase: str
    drain_left: int
    reason: str
    control: int
    budget: int
    successor: str
    waited: float


def _read_twice(read: Callable[[], T]) -> T:
    """Return what `read` returns. A download may break off without an error: what seems damaged is read once more
    before an island's work is thrown away for it."""
    try:
        return read()
    except CorruptObject:
        return read()


class Merging:
    """Fragments as this syncer last saw them, and the operations on them."""

    def __init__(
        self,
        board: Blackboard,
        clock: Clock,
        config: RunConfig,
        table: tuple[Fragment, ...],
        island: str,
        incarnation: int,
    ) -> None:
        self._board = board
        self._clock = clock
        self._config = config
        self._table = table
        self._total = sum(fragment.numel for fragment in table)
        self._island = island
        self._incarnation = incarnation
        self._state: dict[int, tuple[int, Tensors, Tensors | None]] = {}
        """Per fragment: version, parameters, momentum buffer."""

    # ---- offers ---------------------------------------------------------------------------------------------------

    def collect(self, book: OfferBook) -> bool:
        """List the offers to the open merge and check the new ones; return whether there were any."""
        news = False
        for key in self._board.list_offers(book.seq):
            if key in book.valid or key in book.refused or key in book.unreadable:
                continue
            news = True
            try:
                record = _read_twice(functools.partial(self._board.read_offer_at, key))
            except CorruptObject as error:
                book.unreadable[key] = str(error)
                continue
            if record is None:
                continue
            try:
                delta = _read_twice(functools.partial(self._check, book.seq, record))
            except (CorruptObject, MissingPayload) as error:
                book.refused[key] = _entry(record, reason=str(error))
                continue
            book.valid[key] = (record, delta)
            book.arrivals.setdefault(record.island, self._clock.monotonic())
        return news

    def _check(self, seq: int, record: OfferRecord) -> Tensors:
        fragment, count = fragment_of(seq, len(self._table)), len(self._table)
        if record.fragment != fragment:
            raise CorruptObject(f"offers fragment {record.fragment} to merge {seq}, which merges {fragment}")
        if record.anchor != version_before(seq, count):
            raise CorruptObject(f"is anchored at {record.anchor} instead of {version_before(seq, count)}")
        data = self._board.get_payload(record.payload)
        return decode_fragment(data, self._table[fragment], record.codec, record.payload.key)

    # ---- commit ---------------------------------------------------------------------------------------------------

    def _load(self, fragment: int, version: int) -> tuple[Tensors, Tensors | None]:
        known = self._state.get(fragment)
        if known is not None and known[0] == version:
            return known[1], known[2]
        commit = read_version(self._board, fragment, version)
        params = fetch_params(self._board, commit, fragment, self._table)
        buffer = None
        if commit.momentum is not None:
            data = self._board.get_payload(commit.momentum)
            buffer = decode_fragment(data, self._table[fragment], "fp32", commit.momentum.key)
        self._state[fragment] = (version, params, buffer)
        return params, buffer

    def credited_by(self, book: OfferBook) -> int:
        """Return the token-parameters that committing the valid offers will credit."""
        size = self._table[fragment_of(book.seq, len(self._table))].numel
        return sum(record.tokens for record, _ in book.valid.values()) * size

    def budget_reached(self, credited_total: int, budget: int) -> bool:
        """Tell whether so many token-parameters are the whole budget of tokens."""
        return credited_total >= budget * self._total

    def draft(self, book: OfferBook, parent: CommitRecord, decision: Decision) -> Draft:
        """Merge, step, upload the payloads, and return the commit that is to be created."""
        seq, count = book.seq, len(self._table)
        fragment, outer = fragment_of(seq, count), self._config.outer
        started = self._clock.monotonic()
        params, buffer = self._load(fragment, version_before(seq, count))
        fetched = self._clock.monotonic()
        final = parent.phase == "drain" and decision.phase != "run"
        step = self._step(book, params, buffer, 0.0 if final else outer.momentum)
        offers, weights, params, buffer = step.offers, step.weights, step.params, step.buffer
        merged = self._clock.monotonic()
        nonce = self._board.new_nonce()
        refs = self._upload(seq, fragment, nonce, params, buffer)
        written = self._clock.monotonic()
        credited = self.credited_by(book)
        record = CommitRecord(
            run_id=self._board.run_id,
            nonce=nonce,
            seq=seq,
            parent=parent.nonce,
            fragment=fragment,
            author=self._island,
            author_incarnation=self._incarnation,
            successor=decision.successor,
            phase=decision.phase,
            drain_left=decision.drain_left,
            control=decision.control,
            reason=decision.reason,
            budget=decision.budget,
            merged=tuple(_entry(r, weight=w) for r, w in zip(offers, weights, strict=True)),
            refused=tuple(book.refused[key] for key in sorted(book.refused)),
            credited=credited,
            credited_total=parent.credited_total + credited,
            positions=_positions(parent, offers),
            params=(refs[0],),
            momentum=refs[1] if len(refs) > 1 else None,
            stages={
                "wait": decision.waited,
                "fetch": fetched - started,
                "merge": merged - fetched,
                "write": written - merged,
            },
        )
        return Draft(record, dict(params), None if buffer is None else dict(buffer))

    def _step(self, book: OfferBook, params: Tensors, buffer: Tensors | None, momentum: float) -> _Step:
        """Merge the valid offers and make the outer step.

        A commit is for ever, and one that nobody can load would end the run: while the result is not finite, the
        longest delta is refused and the others are merged without it.
        """
        outer, pieces = self._config.outer, self._table[fragment_of(book.seq, len(self._table))]
        while book.valid:
            # Ordered by content: names and arrival order must not decide rounding, and a replay must repeat it.
            offers = sorted(book.valid.values(), key=lambda offer: (offer[0].payload.sha256, offer[0].nonce))
            records = [record for record, _ in offers]
            weights = merge_weights([(r.tokens, r.inner_steps) for r in records], outer.weight)
            delta = merge(pieces, outer.merge, zip((d for _, d in offers), weights, strict=True))
            new_params, new_buffer = outer_step(params, buffer, delta, outer.lr, momentum)
            if all_finite(new_params) and (new_buffer is None or all_finite(new_buffer)):
                return _Step(records, weights, new_params, new_buffer)
            book.refuse(max(book.valid, key=lambda key: length(book.valid[key][1])), "too long for a finite outer step")
        return _Step([], [], params, buffer)

    def _upload(self, seq: int, fragment: int, nonce: str, params: Tensors, buffer: Tensors | None) -> list[PayloadRef]:
        """Upload parameters and momentum, also when unchanged: each commit owns its payloads, so that garbage is
        decided by seq alone."""
        kinds: list[tuple[str, Tensors]] = [("params", params)]
        if buffer is not None:
            kinds.append(("momentum", buffer))
        refs = []
        for kind, values in kinds:
            key = self._board.keys.blob(seq, kind, fragment, nonce)
            refs.append(self._board.put_payload(key, encode_fragment(values, "fp32")))
        return refs

    def create(self, draft: Draft) -> CommitRecord:
        """Create the commit or find another's in its place, whose author wins; return what stands in the log.

        Raises `StoreUnavailable` while the outcome is unknown: call again with the same draft.
        """
        standing = self._board.create(self._board.keys.log(draft.record.seq), draft.record)
        if standing.nonce == draft.record.nonce:
            self._state[draft.record.fragment] = (draft.record.seq, draft.params, draft.momentum)
        else:
            for ref in payloads_of(draft.record):
                self._board.delete_payload(ref)
        return standing


def payloads_of(commit: CommitRecord) -> list[PayloadRef]:
    """Return the payloads that a commit made."""
    return [*commit.params, *([commit.momentum] if commit.momentum is not None else [])]


def _entry(record: OfferRecord, weight: float = 0.0, reason: str = "") -> OfferEntry:
    return OfferEntry(
        island=record.island,
        incarnation=record.incarnation,
        nonce=record.nonce,
        anchor=record.anchor,
        inner_steps=record.inner_steps,
        tokens=record.tokens,
        weight=weight,
        reason=reason,
        data_to=record.data_to,
        payload=record.payload,
    )


def _positions(parent: CommitRecord, merged: Iterable[OfferRecord]) -> dict[str, Position]:
    found = dict(parent.positions)
    for record in merged:
        found[record.island] = max(found.get(record.island, Position()), record.data_to, key=Position.order)
    return found


def initialise(
    board: Blackboard,
    config: RunConfig,
    table: tuple[Fragment, ...],
    values: list[dict[str, torch.Tensor]],
    island: str,
    incarnation: int,
    data: str,
) -> CommitRecord:
    """Create `log/0` from this island's initial parameters unless another was first; return what stands.

    `data`: the fingerprint of the task's data.
    """
    nonce = board.new_nonce()
    refs = [
        board.put_payload(board.keys.blob(0, "params", f, nonce), encode_fragment(v, "fp32"))
        for f, v in enumerate(values)
    ]
    record = CommitRecord(
        run_id=board.run_id,
        nonce=nonce,
        seq=0,
        parent="",
        fragment=-1,
        author=island,
        author_incarnation=incarnation,
        successor=island,
        budget=config.tokens,
        params=tuple(refs),
        fragments=table,
        data=data,
    )
    standing = board.create(board.keys.log(0), record)
    if standing.nonce != nonce:
        for ref in refs:
            board.delete_payload(ref)
    return standing
