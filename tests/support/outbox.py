"""A learner's outbox without a learner: jobs to publish, and a store that notes what is written."""

from __future__ import annotations

import itertools

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.learner_logic import Offer
from diloco_runtime.publisher import CheckpointJob, OfferJob, Publisher
from diloco_runtime.records import CheckpointRecord, ClaimRecord, Fates, Position
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import run_record
from tests.support.run_records import PAYLOAD, RUN_ID, table

_numbers = itertools.count()
TABLE = table(4, 4)
FROM, TO = Position(), Position(unit_index=3, offset=5)


class Journal(Wrapped):
    """Remembers every write, and fails the puts while `broken`."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.broken = False
        self.tried: list[tuple[str, str, bytes]] = []
        """Verb, key and body of every write that was tried."""
        self.deleted: list[str] = []

    def create(self, key: str, data: bytes) -> None:
        self.tried.append(("create", key, data))
        self.inner.create(key, data)

    def put(self, key: str, data: bytes) -> None:
        self.tried.append(("put", key, data))
        if self.broken:
            raise StoreUnavailable(f"no answer for {key}")
        self.inner.put(key, data)

    def delete(self, key: str) -> None:
        self.deleted.append(key)
        self.inner.delete(key)

    def kinds(self) -> list[str]:
        """Return what was written: "call 1", "delta 1", "offer 1", "inner 1" or "marker 1" with seq or number."""
        names = {"calls": "call", "blobs": "delta", "offers": "offer"}
        found = []
        for _, key, _ in self.tried:
            parts = key.split("/")
            if parts[1] == "islands":
                found.append(f"{'inner' if parts[-1].startswith('inner') else 'marker'} {int(parts[-2])}")
            else:
                found.append(f"{names[parts[1]]} {int(parts[2].removesuffix('.json'))}")
        return found


class Outbox:
    """A publisher of island iowa's first life over a journal, and jobs for it."""

    def __init__(self, clock, nonces, store: ObjectStore | None = None, codec: str = "fp32") -> None:
        inner = MemoryStore(f"unit/publisher-{next(_numbers)}")
        Blackboard(inner, "", clock, nonces).create_run(run_record(RUN_ID))
        self.inner = inner
        self.store = Journal(inner) if store is None else store
        self.board = Blackboard(self.store, RUN_ID, clock, nonces)
        self.publisher = Publisher(self.board, clock, "iowa", 1, codec)

    def over(self, kind: type[Wrapped], clock, nonces) -> Wrapped:
        """Put another faulty store in between; return it."""
        store = kind(self.store)
        self.board = Blackboard(store, RUN_ID, clock, nonces)
        self.publisher = Publisher(self.board, clock, "iowa", 1, "fp32")
        return store

    def run(self) -> None:
        """Do everything that is queued, calls and offers first."""
        while self.publisher.publish_once() or self.publisher.checkpoint_once():
            pass


def offer_job(seq: int, size: int = 4, scale: float = 1.0) -> OfferJob:
    fragment = (seq - 1) % 2
    delta = {f"w{fragment}[0:{size}]": torch.arange(size) * scale + 1 / 3}
    fates = (Fates(processed=8, offered=8), Fates(processed=8, fresh=8))
    return OfferJob(Offer(seq, fragment, max(0, seq - 2), 2, 8), f"n{seq}", delta, fates, FROM, TO)


def checkpoint_job(number: int, size: int = 4) -> CheckpointJob:
    record = CheckpointRecord(
        run_id=RUN_ID, nonce=f"k{number}", island="iowa", incarnation=1, number=number, log_position=0, step=1,
        progress=0.0, position=TO, payload=PAYLOAD,
    )  # fmt: skip
    return CheckpointJob(record, {"w0|exp_avg": torch.arange(float(size))})


def claim(life: int) -> ClaimRecord:
    return ClaimRecord(
        run_id=RUN_ID, nonce="c", island="iowa", incarnation=life, agent="a", host="h", pid=1, started=0.0,
        claimed_wall=0.0,
    )  # fmt: skip
