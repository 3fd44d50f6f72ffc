"""A run's object-store prefix as typed records: the only way in which islands, supervisors and people meet.

What this module guarantees (PROTOCOL.md, sections 1, 2, 6 and 9):
* a create that failed in any way is settled by reading back: mine, another's, or still unknown (then the same bytes are
  tried again);
* nothing is written for a run whose `run.json` is absent or names another run id;
* nothing read is trusted: every record is parsed, and its run id and its own key are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from diloco_runtime import payloads
from diloco_runtime.clock import Clock, Nonces
from diloco_runtime.errors import CorruptObject, RunMismatch, StoreUnavailable
from diloco_runtime.keys import RUN, Keys
from diloco_runtime.records import (
    CallRecord,
    CheckpointRecord,
    ClaimRecord,
    CommitRecord,
    ControlRecord,
    HeartbeatRecord,
    OfferRecord,
    PayloadRef,
    Record,
    RunRecord,
    SupervisorHeartbeat,
    SupervisorRecord,
    UnitRecord,
    decode,
    encode,
)
from diloco_runtime.store import AlreadyExists, ObjectStore, is_key

R = TypeVar("R", bound=Record)

IDENTITY_TRUSTED_SECONDS = 5.0
"""`run.json` is read again before a write when the last look is older than this on the writer's own clock: a process
that was frozen finds out before its first write, a busy one pays one GET per 5 s."""

CREATE_ATTEMPTS = 4
"""Immediate tries of one create before its outcome is left unknown and the caller tries the same bytes later."""


class Parse(Protocol):
    """`records.decode` or something that does the same."""

    def __call__(self, kind: type[R], data: bytes, key: str) -> R: ...


class Blackboard:
    """Typed access to one run. `run_id` is empty only for a caller that is about to create or look up the run."""

    def __init__(
        self,
        store: ObjectStore,
        run_id: str,
        clock: Clock,
        nonces: Nonces,
        parse: Parse = decode,
        shard_bytes: int = payloads.SHARD_BYTES,
    ) -> None:
        """`parse`: turns stored bytes into a record; a simulation, which reads the same bytes often, remembers them.
        `shard_bytes`: payloads above this size are cut into shards."""
        self.store = store
        self._uploader = payloads.Uploader(store, shard_bytes)
        self._parse = parse
        self.run_id = run_id
        self.keys = Keys(run_id or "00000000")
        self._clock = clock
        self._nonces = nonces
        self._identity_seen: float | None = None
        self._highest: dict[str, int] = {}
        self._newest_seen: dict[str, Record] = {}

    def new_nonce(self) -> str:
        return self._nonces.new()

    # ---- identity -----------------------------------------------------------------------------------------------

    def read_run(self) -> RunRecord | None:
        """Return the run that this folder holds now, or None."""
        data = self.store.get(RUN)
        return None if data is None else self._parse(RunRecord, data, RUN)

    def create_run(self, record: RunRecord) -> RunRecord:
        """Create `run.json` unless it exists; return what is there afterwards (maybe another's)."""
        return self._settle(RUN, record, encode(record), RunRecord)

    def check_identity(self, trusted_seconds: float = 0.0) -> None:
        """Raise `RunMismatch` unless `run.json` still names this run; skip when checked within `trusted_seconds`."""
        now = self._clock.monotonic()
        if self._identity_seen is not None and now - self._identity_seen < trusted_seconds:
            return
        run = self.read_run()
        if run is None:
            raise RunMismatch(f"{self.store.url} holds no run any more (run.json is gone); run {self.run_id} is over")
        if run.run_id != self.run_id:
            raise RunMismatch(f"{self.store.url} now holds run {run.run_id}, not {self.run_id}; this one was purged")
        self._identity_seen = now

    # ---- records ------------------------------------------------------------------------------------------------

    def create(self, key: str, record: R) -> R:
        """Create `record` at `key` unless the key is taken; return the record that stands there afterwards.

        The caller won if the returned nonce is its own. Raises `StoreUnavailable` when the outcome stays unknown: the
        caller must call again with the same record, never with another one.
        """
        self.check_identity(IDENTITY_TRUSTED_SECONDS)
        return self._settle(key, record, encode(record), type(record))

    def _settle(self, key: str, record: Record, data: bytes, kind: type[R]) -> R:
        problem: Exception | None = None
        for _ in range(CREATE_ATTEMPTS):
            try:
                self.store.create(key, data)
                return self._parse(kind, data, key)
            except AlreadyExists as error:
                problem = error
            except StoreUnavailable as error:
                problem = error
            # "Exists" may be our own first write whose answer was lost, and an error may have been a success.
            found = self.store.get(key)
            if found is not None:
                return self._parse(kind, found, key)
            # Absent is not "lost": the write may still be on its way. Try the very same bytes again.
        raise StoreUnavailable(f"creating {key} in {self.store.url}: outcome unknown ({problem})")

    def _read(self, key: str, kind: type[R]) -> R | None:
        data = self.store.get(key)
        if data is None:
            return None
        record = self._parse(kind, data, key)
        if record.run_id != self.run_id:
            raise CorruptObject(f"{key} belongs to run {record.run_id}, not to {self.run_id}")
        return record

    def read_commit(self, seq: int) -> CommitRecord | None:
        record = self._read(self.keys.log(seq), CommitRecord)
        if record is not None and record.seq != seq:
            raise CorruptObject(f"{self.keys.log(seq)} says it is commit {record.seq}")
        return record

    def read_call(self, seq: int) -> CallRecord | None:
        return self._read(self.keys.call(seq), CallRecord)

    def is_called(self, seq: int) -> bool:
        """Tell whether a merge is called. Being there is all that a call says: one that cannot be read counts too."""
        return self.store.get(self.keys.call(seq)) is not None

    def read_offer(self, seq: int, island: str, incarnation: int) -> OfferRecord | None:
        return self._read(self.keys.offer(seq, island, incarnation), OfferRecord)

    def read_offer_at(self, key: str) -> OfferRecord | None:
        """Read an offer found by listing; refuse one that lies under another key than its own contents say."""
        record = self._read(key, OfferRecord)
        if record is not None and self.keys.offer(record.seq, record.island, record.incarnation) != key:
            raise CorruptObject(f"{key} holds the offer of {record.island}-{record.incarnation} to {record.seq}")
        return record

    def list_offers(self, seq: int) -> list[str]:
        return [key for key in self.store.list(self.keys.offers(seq)) if key.endswith(".json")]

    def read_claim(self, island: str, incarnation: int) -> ClaimRecord | None:
        return self._read(self.keys.claim(island, incarnation), ClaimRecord)

    def read_heartbeat(self, island: str, incarnation: int) -> HeartbeatRecord | None:
        return self._read(self.keys.heartbeat(island, incarnation), HeartbeatRecord)

    def write_heartbeat(self, record: HeartbeatRecord) -> None:
        self.check_identity(IDENTITY_TRUSTED_SECONDS)
        self.store.put(self.keys.heartbeat(record.island, record.incarnation), encode(record))

    def read_unit(self, data_pass: int, unit_index: int) -> UnitRecord | None:
        return self._read(self.keys.unit(data_pass, unit_index), UnitRecord)

    def read_supervisor(self, number: int) -> SupervisorRecord | None:
        return self._read(self.keys.supervisor(number), SupervisorRecord)

    def read_supervisor_heartbeat(self, number: int) -> SupervisorHeartbeat | None:
        return self._read(self.keys.supervisor_heartbeat(number), SupervisorHeartbeat)

    def write_supervisor_heartbeat(self, record: SupervisorHeartbeat) -> None:
        self.check_identity(IDENTITY_TRUSTED_SECONDS)
        self.store.put(self.keys.supervisor_heartbeat(record.number), encode(record))

    def read_control(self, number: int) -> ControlRecord | None:
        return self._read(self.keys.control(number), ControlRecord)

    def read_checkpoint(self, island: str, incarnation: int, number: int) -> CheckpointRecord | None:
        return self._read(self.keys.checkpoint(island, incarnation, number, "checkpoint.json"), CheckpointRecord)

    def list_islands(self) -> list[str]:
        """Return the names of all islands that ever claimed a life in this run."""
        return self.store.list_folders(self.keys.islands())

    # ---- newest of a numbered series ----------------------------------------------------------------------------

    def head(self, hint: int = -1) -> CommitRecord | None:
        """Return the newest commit, or None when the run is not initialised. `hint`: a position known to exist."""
        seen: dict[int, CommitRecord] = {}

        def exists(seq: int) -> bool:
            commit = self.read_commit(seq)
            if commit is not None:
                seen[seq] = commit
            return commit is not None

        seq = self._gallop("log", exists, max(hint, 0))
        if seq < 0:
            return None
        return seen.get(seq) or self.read_commit(seq)

    def newest_claim(self, island: str) -> ClaimRecord | None:
        """Return the newest claim of an island, or None. Incarnations count from 1, without gaps."""
        return self._newest(f"claim {island}", lambda number: self.read_claim(island, number))

    def first_free_unit(self, data_pass: int, hint: int = 0) -> int:
        """Return the lowest unit of a pass that nobody has claimed; units below `hint` are known to be claimed."""
        return self._gallop(f"units {data_pass}", lambda n: self.read_unit(data_pass, n) is not None, hint) + 1

    def newest_supervisor(self) -> SupervisorRecord | None:
        return self._newest("supervisor", self.read_supervisor)

    def newest_control(self) -> ControlRecord | None:
        return self._newest("control", self.read_control)

    def _newest(self, series: str, read: Callable[[int], R | None]) -> R | None:
        """Return the newest record of a series that counts from 1 without gaps; one request when nothing is new."""
        seen: dict[int, R] = {}

        def exists(n: int) -> bool:
            record = read(n + 1)
            if record is not None:
                seen[n] = record
            return record is not None

        newest = self._gallop(series, exists, 0)
        if newest in seen:
            self._newest_seen[series] = seen[newest]  # records never change
        known: R | None = self._newest_seen.get(series)  # type: ignore[assignment]
        return known if newest >= 0 else None

    def _gallop(self, series: str, exists: Callable[[int], bool], hint: int) -> int:
        """Return the greatest n >= 0 with `exists(n)`, or -1, for a series without gaps; remembers where it was."""
        low = max(self._highest.get(series, -1), hint - 1)
        step = 1
        while exists(low + step):
            low += step
            step *= 2
        # Now low exists (or is -1) and low + step does not: bisect in between.
        high = low + step
        while high - low > 1:
            middle = (low + high) // 2
            if exists(middle):
                low = middle
            else:
                high = middle
        self._highest[series] = low
        return low

    # ---- payloads -----------------------------------------------------------------------------------------------

    def put_payload(self, key: str, data: bytes) -> PayloadRef:
        """Write payload bytes under a key that carries a fresh nonce; return what a record needs to point at them."""
        self.check_identity(IDENTITY_TRUSTED_SECONDS)
        return self._uploader.put(key, data)

    def get_payload(self, ref: PayloadRef) -> bytes:
        """Read payload bytes; raise `MissingPayload` when gone, `CorruptObject` when size or hash differ."""
        if not ref.key.startswith(self.keys.root + "/") or not is_key(ref.key):
            raise CorruptObject(f"payload key {ref.key!r} leaves the run's prefix")
        return payloads.read(self.store, ref)

    def take_back(self, key: str, size: int) -> None:
        """Delete whatever an upload of `size` bytes that failed may have left under `key`."""
        self._uploader.take_back(key, size)

    def delete_payload(self, ref: PayloadRef) -> None:
        """Delete the objects of a payload that no record names, or will name."""
        for key in payloads.object_keys(ref):
            self.store.delete(key)
