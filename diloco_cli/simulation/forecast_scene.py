"""What a forecast is made of: the case that is asked about, and the blackboard that its islands share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from diloco_cli.assumptions import IslandAssumptions
from diloco_cli.island_watch import Limits
from diloco_runtime.config import RunConfig
from diloco_runtime.keys import fragment_of
from diloco_runtime.records import (
    CommitRecord,
    Fragment,
    HeartbeatRecord,
    OfferEntry,
    PayloadRef,
    Position,
    TensorPiece,
)

GBIT = 1e9 / 8.0
"""Bytes."""

RUN_ID = "0" * 16
NO_PAYLOAD = PayloadRef(key="none", size=1, sha256="00")
NOWHERE = Position()


@dataclass(frozen=True)
class Place:
    """One island: what it does with a second and how it hangs on the store."""

    name: str
    tokens: int
    """Tokens of one inner step."""
    assumed: IslandAssumptions

    @property
    def up(self) -> float:
        """Bytes per second to the store."""
        return self.assumed.up_gbits * GBIT

    @property
    def down(self) -> float:
        """Bytes per second from the store."""
        return self.assumed.down_gbits * GBIT


@dataclass(frozen=True)
class Sizes:
    """Bytes of what travels."""

    table: tuple[Fragment, ...]
    offer: float
    """The delta of one fragment, encoded."""
    params: float
    """The parameters of one fragment."""
    momentum: float
    """The outer momentum of one fragment, 0 without."""
    checkpoint: float

    @cached_property
    def numel(self) -> tuple[int, ...]:
        """Parameters of each fragment."""
        return tuple(fragment.numel for fragment in self.table)

    @cached_property
    def parameters(self) -> int:
        return sum(self.numel)

    @property
    def model(self) -> float:
        """The parameters of all fragments."""
        return self.params * len(self.table)


def even_table(parameters: int, fragments: int) -> tuple[Fragment, ...]:
    """Return a table of fragments of about equal size; what tensors are in them plays no part here."""
    cuts = [parameters * i // fragments for i in range(fragments + 1)]
    counts = [max(1, stop - start) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]
    return tuple(
        Fragment(pieces=(TensorPiece(name=f"f{i}", shape=(count,), start=0, stop=count, merge="mean"),))
        for i, count in enumerate(counts)
    )


@dataclass(frozen=True)
class Case:
    """Everything that a forecast depends on, besides the losses."""

    config: RunConfig
    sizes: Sizes
    places: tuple[Place, ...]
    limits: Limits
    """How patient the supervisor is."""
    seed: int = 0

    @property
    def period_steps(self) -> float:
        """Inner steps of one fragment period."""
        return self.config.sync.sync_every / len(self.sizes.table)


@dataclass
class Commit:
    """What a forecast keeps of one outer step."""

    at: float
    """Seconds since the begin."""
    offers: int
    """Islands in it."""
    present: int
    """Islands that were training."""


@dataclass
class Board:
    """The blackboard: what has been created, visible at once to whoever asks the store."""

    log: list[CommitRecord] = field(default_factory=list)
    called: int = 0
    offers: dict[int, dict[str, OfferEntry]] = field(default_factory=dict)
    """Per merge, by island and life, in order of creation."""
    beats: dict[str, HeartbeatRecord] = field(default_factory=dict)
    """Each island's newest heartbeat."""
    checkpoints: set[str] = field(default_factory=set)
    """Islands that have a complete checkpoint."""
    on_news: Callable[[], None] = lambda: None
    """Told after every call and commit."""
    on_offer: Callable[[], None] = lambda: None
    """Told after every offer."""

    @property
    def head(self) -> int:
        """The position of the newest commit, -1 before the initialisation."""
        return len(self.log) - 1

    def call(self, seq: int) -> None:
        """Create the call of a merge."""
        if seq > self.called:
            self.called = seq
            self.on_news()

    def offer(self, seq: int, key: str, entry: OfferEntry) -> None:
        """Create an offer; one that comes after its commit changes nothing."""
        if seq > self.head:
            self.offers.setdefault(seq, {})[key] = entry
            self.on_offer()

    def commit(self, record: CommitRecord) -> None:
        """Create the next entry of the log."""
        self.log.append(record)
        self.offers.pop(record.seq, None)
        self.called = max(self.called, record.seq)
        self.on_news()


def first_commit(author: str, budget: int) -> CommitRecord:
    """Return the initialisation."""
    return CommitRecord.model_construct(
        run_id=RUN_ID, nonce="c0", seq=0, parent="", fragment=-1, author=author, author_incarnation=1,
        successor=author, phase="run", budget=budget, params=(NO_PAYLOAD,), merged=(), refused=(), stages={},
    )  # fmt: skip


def next_commit(
    parent: CommitRecord, fragments: int, author: str, successor: str, merged: tuple[OfferEntry, ...], size: int,
    seconds: float,
) -> CommitRecord:  # fmt: skip
    """Return the commit after `parent`; `size`: parameters of its fragment, `seconds`: how long it took its author."""
    seq = parent.seq + 1
    credited = sum(entry.tokens for entry in merged) * size
    return CommitRecord.model_construct(
        run_id=RUN_ID, nonce=f"c{seq}", seq=seq, parent=parent.nonce, fragment=fragment_of(seq, fragments),
        author=author, author_incarnation=1, successor=successor, phase="run", budget=parent.budget,
        params=(NO_PAYLOAD,), merged=merged, refused=(), credited=credited,
        credited_total=parent.credited_total + credited, stages={"all": seconds},
    )  # fmt: skip
