"""A learner's inbox without a learner: a log that grows, and a store that notes what is read."""

from __future__ import annotations

import itertools

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.codec import encode_fragment
from diloco_runtime.data_cursor import DataCursor, UnitClaimer
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.follower import Follower, Ready
from diloco_runtime.records import CommitRecord, Position
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import call_record, run_record
from tests.support.run_records import RUN_ID, commit, table

_numbers = itertools.count()
SIZE = 3


class Selective(Wrapped):
    """Gets of keys that contain a word in `broken` fail; remembers what was read."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.broken: set[str] = set()
        self.read: list[str] = []

    def get(self, key: str) -> bytes | None:
        if any(word in key for word in self.broken):
            raise StoreUnavailable(f"no answer for {key}")
        self.read.append(key)
        return self.inner.get(key)

    def payloads(self) -> list[int]:
        """Return the seqs of the payloads that were read, and forget what was read."""
        found = [int(key.split("/")[2]) for key in self.read if "/blobs/" in key]
        self.read.clear()
        return found


class Log:
    """A run's log as a syncer grows it: commit s sets every number of its fragment to s."""

    def __init__(self, store: ObjectStore, fragments: int, clock, nonces) -> None:
        self.fragments, self.table = fragments, table(*[SIZE] * fragments)
        self.board = Blackboard(store, RUN_ID, clock, nonces)
        self.board.create_run(run_record(RUN_ID))
        self.head = self._write(commit(0, fragments))

    def payload_key(self, seq: int) -> str:
        return self.board.keys.blob(seq, "params", (seq - 1) % self.fragments, "c")

    def _write(self, record: CommitRecord) -> CommitRecord:
        return self.board.create(self.board.keys.log(record.seq), record)

    def grow(self, count: int = 1, **fields: object) -> None:
        for _ in range(count):
            seq = self.head.seq + 1
            pieces = self.table[(seq - 1) % self.fragments].pieces
            values = {piece.key: torch.full(piece.shape, float(seq)) for piece in pieces}
            ref = self.board.put_payload(self.payload_key(seq), encode_fragment(values, "fp32"))
            self.head = self._write(commit(seq, self.fragments, params=(ref,), **fields))

    def collect(self, *seqs: int) -> None:
        """Do what the garbage collector does to old versions."""
        for seq in seqs:
            self.board.store.delete(self.payload_key(seq))

    def call(self, *seqs: int) -> None:
        for seq in seqs:
            self.board.create(self.board.keys.call(seq), call_record(seq, f"n{seq}", RUN_ID))


class Inbox:
    """A log, and a follower that reads it through a store of its own."""

    def __init__(self, clock, nonces, fragments: int = 3, store: ObjectStore | None = None) -> None:
        inner = MemoryStore(f"unit/follower-{next(_numbers)}")
        self.log = Log(inner, fragments, clock, nonces)
        self.store = Selective(inner) if store is None else store
        self.follower, self.cursor = follower_of(self.log, self.store, clock, nonces)

    def settle(self) -> None:
        """Follow until there is nothing new; data units are claimed as well."""
        while self.follower.follow_once():
            pass

    def take(self) -> list[tuple[int, float | None]]:
        """Take what is ready: seq, and the number that all values of it are (None: superseded)."""
        return [described(ready) for ready in self.follower.take()]


def follower_of(log: Log, store: ObjectStore, clock, nonces) -> tuple[Follower, DataCursor]:
    board, cursor = Blackboard(store, RUN_ID, clock, nonces), DataCursor(lambda p, u: 10, Position())
    claimer = UnitClaimer(board, cursor, "iowa", 1, 100, Position())
    return Follower(board, clock, log.table, log.head, claimer), cursor


def described(ready: Ready) -> tuple[int, float | None]:
    if ready.values is None:
        return ready.commit.seq, None
    (values,) = ready.values.values()
    assert values.shape == (SIZE,) and len(set(values.tolist())) == 1
    return ready.commit.seq, float(values[0])
