"""A store behind many connections that fail on request, and beside it a plain picture of what it must hold.

The picture learns of every effect when it happens, whoever caused it, and fails at once when one is against the
protocol. It shares nothing with the runtime but the records and the names of keys.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum

import safetensors.torch

from diloco_runtime.blackboard import IDENTITY_TRUSTED_SECONDS
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.keys import RUN, Keys
from diloco_runtime.records import CommitRecord, OfferRecord, RunRecord, decode
from diloco_runtime.store import AlreadyExists, Names, ObjectStore
from tests.conftest import ManualClock
from tests.support.run_records import config

P, KEEP, SNAPSHOT = 2, 2, 6
"""Fragments of the run (one number each), how many versions of each are kept, and every which position is."""

CONFIG = config(1_000_000, fragments=P, keep_versions=KEEP, snapshot_every=SNAPSHOT)
FOR_EVER = re.compile(r"/(log|offers)/|/claim\.json$")
"""Names that are never deleted as long as the run is there."""


class Fault(Enum):
    """What may happen to one operation."""

    LOST = "fails without effect"
    UNANSWERED = "takes effect and fails"
    LATE = "a write fails, and takes effect later"
    TWICE = "a write is sent twice below the client"
    CUT = "only half of a download arrives"
    OVERTAKEN = "the oldest late write takes effect just before it"


@dataclass(frozen=True)
class Write:
    """A create or a put on its way."""

    verb: str
    key: str
    data: bytes
    run_id: str
    """The run that the writer belongs to; empty: a person who creates a run."""
    sent_at: float


@dataclass
class Picture:
    """What the store must hold, and what that means."""

    objects: dict[str, bytes] = field(default_factory=dict)
    current: str = ""
    """Run id in `run.json`; empty when there is none."""
    ended: dict[str, float] = field(default_factory=dict)
    """When a run was purged."""
    touched: set[str] = field(default_factory=set)
    """Keys whose object may have changed since the store was compared with this."""
    log: list[CommitRecord] = field(default_factory=list)
    """Of the current run, as are the following."""
    history: list[bytes] = field(default_factory=list)
    """Bytes of its commits as they were created."""
    offers: dict[str, OfferRecord] = field(default_factory=dict)
    """By key."""
    judged: set[str] = field(default_factory=set)
    """Nonces of offers that a commit merged or refused."""
    deltas: dict[str, float] = field(default_factory=dict)
    """Per nonce what was offered."""
    state: list[tuple[float, float | None]] = field(default_factory=list)
    """Per fragment its parameter and its momentum buffer."""

    def on_write(self, write: Write) -> None:
        key, root = write.key, write.key.partition("/")[0]
        assert write.verb == "put" or key not in self.objects, f"{key} was created twice"
        if key == RUN:
            self._on_run(decode(RunRecord, write.data, key))
        else:
            assert root == write.run_id, f"a writer of run {write.run_id} wrote {key}"
            self._on_record(write, root)
        self.objects[key] = write.data
        self.touched.add(key)

    def _on_run(self, record: RunRecord) -> None:
        assert record.run_id not in self.ended, "a purged run is back"
        self.current = record.run_id
        self.log, self.history, self.offers, self.judged, self.state = [], [], {}, set(), []

    def _on_record(self, write: Write, root: str) -> None:
        key, data = write.key, write.data
        if root != self.current:
            late = write.sent_at - self.ended[root]
            assert late < IDENTITY_TRUSTED_SECONDS, f"{key} was sent {late} s after run {root} was purged"
            return
        if write.verb == "put":
            assert "/blobs/" in key, f"{key} was put without a condition"
            assert self.objects.get(key, data) == data, f"{key} was replaced"
        elif "/log/" in key:
            self._on_commit(key, decode(CommitRecord, data, key))
            self.history.append(data)
        elif "/offers/" in key:
            offer = self.offers[key] = decode(OfferRecord, data, key)
            assert offer.nonce in self.deltas, f"{key} is an offer that nobody made"
            assert offer.payload.key in self.objects, f"{key} was written before its payload"

    def on_delete(self, key: str) -> None:
        """An object goes; absent is fine."""
        root = key.partition("/")[0]
        if key == RUN and self.current:
            self.current = ""
        elif root == self.current:
            assert not FOR_EVER.search(key), f"{key} was deleted"
            assert key not in self._needed(), f"{key} was deleted, which is still needed"
        self.objects.pop(key, None)
        self.touched.add(key)

    def _needed(self) -> set[str]:
        """Return the payloads of the newest versions, of the pinned initialisation and of offers to open merges."""
        kept = {
            ref.key
            for commit in self.log
            if commit.seq > len(self.log) - 1 - KEEP * P
            or commit.seq == 0
            or any(position % SNAPSHOT == 0 for position in range(commit.seq, commit.seq + P))
            for ref in commit.params
        }
        kept |= {commit.momentum.key for commit in self.log[-P:] if commit.momentum is not None}
        return kept | {offer.payload.key for offer in self.offers.values() if offer.seq >= len(self.log)}

    # ---- the log ----------------------------------------------------------------------------------------------------

    def _on_commit(self, key: str, commit: CommitRecord) -> None:
        assert key == Keys(self.current).log(commit.seq) and commit.seq == len(self.log), f"{key} is out of turn"
        assert commit.parent == (self.log[-1].nonce if self.log else ""), f"{key} has another parent"
        self.log.append(commit)
        if commit.seq == 0:
            self.state = [(self._number(ref.key), None) for ref in commit.params]
            return
        for entry in (*commit.merged, *commit.refused):
            offer = self.offers.get(Keys(self.current).offer(commit.seq, entry.island, entry.incarnation))
            assert offer is not None and offer.nonce == entry.nonce, f"{key} judges an offer that was not made to it"
            assert entry.nonce not in self.judged, f"{key} judges offer {entry.nonce} again"
            self.judged.add(entry.nonce)
        self._step(key, commit)

    def _step(self, key: str, commit: CommitRecord) -> None:
        """Make the outer step in plain arithmetic and compare it with what was committed."""
        value, buffer = self.state[commit.fragment]
        if commit.merged:
            # All offers are of as many tokens and steps: their weights are equal.
            delta = sum(self.deltas[entry.nonce] for entry in commit.merged) / len(commit.merged)
            buffer = delta if buffer is None else CONFIG.outer.momentum * buffer + delta
            value -= CONFIG.outer.lr * (delta + CONFIG.outer.momentum * buffer)
        assert abs(self._number(commit.params[0].key) - value) < 1e-3, f"{key} is not built on the log"
        assert (buffer is None) == (commit.momentum is None)
        if buffer is not None and commit.momentum is not None:
            assert abs(self._number(commit.momentum.key) - buffer) < 1e-3, f"{key} has another momentum"
        self.state[commit.fragment] = (value, buffer)

    def _number(self, key: str) -> float:
        assert key in self.objects, f"a commit was written before its payload {key}"
        (tensor,) = safetensors.torch.load(self.objects[key]).values()
        return float(tensor)


class World:
    """The store, what is on its way to it, and the time."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.picture = Picture()
        self.clock = ManualClock()
        self.late: list[Write] = []

    def take_effect(self, write: Write) -> None:
        """Let a write happen. Raises `AlreadyExists` exactly when the picture says so."""
        if write.verb == "create" and write.key in self.picture.objects:
            self.store.create(write.key, write.data)
            raise AssertionError(f"{write.key} was created again")
        self.picture.on_write(write)
        if write.verb == "create":
            self.store.create(write.key, write.data)
        else:
            self.store.put(write.key, write.data)

    def land(self, number: int = 0) -> None:
        """Let a late write take effect, if there is any; nobody hears of it."""
        if self.late:
            try:
                self.take_effect(self.late.pop(number % len(self.late)))
            except AlreadyExists:
                pass

    def delete(self, key: str) -> None:
        if key == RUN and self.picture.current:
            self.picture.ended[self.picture.current] = self.clock.now
        self.picture.on_delete(key)
        self.store.delete(key)

    def delete_tree(self, prefix: str) -> int:
        for key in [key for key in self.picture.objects if key.startswith(prefix)]:
            self.picture.on_delete(key)
        return self.store.delete_tree(prefix)

    def check(self) -> None:
        """The store holds what the picture shows, to the byte, and names what it holds."""
        objects, touched = self.picture.objects, self.picture.touched
        assert self.store.list("") == sorted(objects)
        assert {key: self.store.get(key) for key in touched} == {key: objects.get(key) for key in touched}
        touched.clear()


class Connection:
    """The store as one participant reaches it. `faults`: per verb what happens to its next operations, in order."""

    def __init__(self, world: World, run_id: str) -> None:
        self.url = world.store.url
        self._world = world
        self._run_id = run_id
        self.faults: dict[str, list[Fault]] = {}
        self.met: set[Fault] = set()
        """Faults that happened since somebody looked."""

    def is_stale(self) -> bool:
        """Tell whether the run of whoever uses this is not there any more."""
        return self._run_id not in ("", self._world.picture.current)

    def _fault(self, verb: str) -> Fault | None:
        waiting = self.faults.get(verb)
        if not waiting:
            return None
        fault = waiting.pop(0)
        self.met.add(fault)
        if fault is Fault.OVERTAKEN:
            self._world.land()
        if fault is Fault.LOST:
            raise StoreUnavailable(f"{verb} got lost")
        return fault

    def _answer(self, fault: Fault | None, verb: str) -> None:
        if fault is Fault.UNANSWERED:
            raise StoreUnavailable(f"the answer to {verb} got lost")

    def _write(self, verb: str, key: str, data: bytes) -> None:
        fault = self._fault(verb)
        write = Write(verb, key, data, self._run_id, self._world.clock.now)
        if fault is Fault.LATE:
            self._world.late.append(write)
            raise StoreUnavailable(f"{verb} got stuck")
        try:
            self._world.take_effect(write)
            if fault is Fault.TWICE:
                self._world.take_effect(write)
        except AlreadyExists:
            self._answer(fault, verb)
            raise
        self._answer(fault, verb)

    def get(self, key: str) -> bytes | None:
        fault = self._fault("get")
        data = self._world.store.get(key)
        assert data == self._world.picture.objects.get(key), f"{key} reads as something that was not written"
        self._answer(fault, "get")
        return data[: len(data) // 2] if data and fault is Fault.CUT else data

    def create(self, key: str, data: bytes) -> None:
        self._write("create", key, data)

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data)

    def list(self, prefix: str) -> Names:
        fault = self._fault("list")
        keys = self._world.store.list(prefix)
        self._answer(fault, "list")
        return keys

    def list_folders(self, prefix: str) -> Names:
        fault = self._fault("list")
        names = self._world.store.list_folders(prefix)
        self._answer(fault, "list")
        return names

    def delete(self, key: str) -> None:
        fault = self._fault("delete")
        self._world.delete(key)
        self._answer(fault, "delete")

    def delete_tree(self, prefix: str) -> int:
        fault = self._fault("delete")
        deleted = self._world.delete_tree(prefix)
        self._answer(fault, "delete")
        return deleted
