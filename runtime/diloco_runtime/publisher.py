"""The learner's outbox: calls, offers and checkpoints on their way to the blackboard, never in the learner's way.

One job at a time, calls first, then offers by seq; checkpoints, which may be large, go beside them. A job whose outcome
is unknown stays at the front and tries the very same bytes again (PROTOCOL.md section 6).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch

from diloco_runtime.backoff import pause_after
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.checkpoint import LIVES_SEARCHED
from diloco_runtime.clock import Clock, Signal
from diloco_runtime.codec import encode_fragment
from diloco_runtime.errors import Fenced, StoreUnavailable
from diloco_runtime.learner_logic import Offer, smooth
from diloco_runtime.records import CallRecord, CheckpointRecord, Fates, OfferRecord, PayloadRef, Position, Record


@dataclass
class Outgoing:
    """A payload and the record that points to it; the record is created after its payload is complete."""

    key: str
    """Key of the payload; carries the nonce."""
    data: bytes | None = None
    ref: PayloadRef | None = None
    record: Record | None = None


@dataclass
class OfferJob:
    """An offer with its delta (fp32 CPU tensors by piece key) and what its record says."""

    offer: Offer
    nonce: str
    delta: Mapping[str, torch.Tensor]
    fates: tuple[Fates, ...]
    data_from: Position
    data_to: Position
    out: Outgoing | None = None
    seconds: float = 0.0


@dataclass
class CheckpointJob:
    """Copied inner state (CPU tensors by name) and the marker that will make it complete."""

    record: CheckpointRecord
    """Marker whose payload reference is still a placeholder."""
    tensors: Mapping[str, torch.Tensor]
    out: Outgoing | None = None


@dataclass
class _Box:
    calls: list[CallRecord] = field(default_factory=list)
    offers: list[OfferJob] = field(default_factory=list)
    checkpoint: CheckpointJob | None = None


class Publisher:
    """Publishes what one learner life queued. `publish_once` does one call or offer, `checkpoint_once` a checkpoint;
    `run_publisher` and `run_checkpointer` are the threads around them."""

    def __init__(self, board: Blackboard, clock: Clock, island: str, incarnation: int, codec: str) -> None:
        self._board = board
        self._clock = clock
        self._island = island
        self._incarnation = incarnation
        self._codec = codec
        self._lock = threading.Lock()
        self._box = _Box()
        self.wake, self.checkpoint_wake = clock.signal(), clock.signal()
        self.head = -1
        """Newest commit that the follower has seen: an offer to it or to one before it is too late."""
        self.problems: dict[str, str] = {}
        """What is wrong right now with offers, with checkpoints; one sentence each."""
        self.publish_seconds: float | None = None
        self.bandwidth: float | None = None
        self.checkpoint_done = 0
        """Number of the newest complete checkpoint of this life."""
        self.checkpoint_seconds = 0.0
        """How long the newest checkpoint was on its way."""

    @property
    def problem(self) -> str:
        """What is wrong right now, in one sentence; empty when nothing is."""
        return next(iter(self.problems.values()), "")

    # ---- called by the learner --------------------------------------------------------------------------------

    def call(self, seq: int) -> None:
        """Queue the call of merge `seq`."""
        record = CallRecord(
            run_id=self._board.run_id,
            nonce=self._board.new_nonce(),
            seq=seq,
            island=self._island,
            incarnation=self._incarnation,
        )
        with self._lock:
            self._box.calls.append(record)
        self.wake.set()

    def offer(self, job: OfferJob) -> None:
        """Queue an offer."""
        with self._lock:
            self._box.offers.append(job)
            self._box.offers.sort(key=lambda j: j.offer.seq)
        self.wake.set()

    def checkpoint(self, job: CheckpointJob) -> bool:
        """Queue a checkpoint; refuse (False) while an earlier one is still on its way."""
        with self._lock:
            if self._box.checkpoint is not None:
                return False
            self._box.checkpoint = job
        self.checkpoint_wake.set()
        return True

    def busy(self) -> bool:
        """Tell whether anything is still on its way."""
        with self._lock:
            return bool(self._box.calls or self._box.offers or self._box.checkpoint)

    def offers_waiting(self) -> bool:
        """Tell whether an offer is still on its way."""
        with self._lock:
            return bool(self._box.offers)

    # ---- the work -----------------------------------------------------------------------------------------------

    def publish_once(self) -> bool:
        """Publish one call or offer, or try to; return whether there was any.

        Raises `StoreUnavailable` (the job stays), `Fenced` and `RunMismatch` (this life is over).
        """
        with self._lock:
            call = self._box.calls[0] if self._box.calls else None
            offer = self._box.offers[0] if self._box.offers else None
        if call is not None:
            if call.seq > self.head:
                self._board.create(self._board.keys.call(call.seq), call)
            with self._lock:
                self._box.calls.remove(call)
        elif offer is not None:
            self._publish_offer(offer)
            with self._lock:
                self._box.offers.remove(offer)
        else:
            return False
        return True

    def checkpoint_once(self) -> bool:
        """Publish the queued checkpoint, or try to; return whether there was one. Raises like `publish_once`."""
        with self._lock:
            job = self._box.checkpoint
        if job is None:
            return False
        started = self._clock.monotonic()
        self._publish_checkpoint(job)
        self.checkpoint_seconds = self._clock.monotonic() - started
        with self._lock:
            self._box.checkpoint = None
        return True

    def _publish_offer(self, job: OfferJob) -> None:
        offer, keys = job.offer, self._board.keys
        started = self._clock.monotonic()
        if offer.seq <= self.head:
            self._withdraw(job)
            return
        if job.out is None:
            job.out = Outgoing(keys.blob(offer.seq, "delta", offer.fragment, job.nonce))
            job.out.data = encode_fragment(job.delta, self._codec)
        out = job.out
        if out.ref is None:
            assert out.data is not None
            out.ref = self._board.put_payload(out.key, out.data)
            self._measure(len(out.data), self._clock.monotonic() - started)
            out.data = None
        self.check_fence()
        if offer.seq <= self.head:
            self._withdraw(job)
            return
        if out.record is None:
            out.record = self._offer_record(job, out.ref)
        self._board.create(keys.offer(offer.seq, self._island, self._incarnation), out.record)
        self.publish_seconds = smooth(self.publish_seconds, self._clock.monotonic() - started)

    def _offer_record(self, job: OfferJob, ref: PayloadRef) -> OfferRecord:
        return OfferRecord(
            run_id=self._board.run_id,
            nonce=job.nonce,
            seq=job.offer.seq,
            fragment=job.offer.fragment,
            island=self._island,
            incarnation=self._incarnation,
            anchor=job.offer.anchor,
            inner_steps=job.offer.inner_steps,
            tokens=job.offer.tokens,
            codec=self._codec,
            payload=ref,
            data_from=job.data_from,
            data_to=job.data_to,
            fates=job.fates,
        )

    def _withdraw(self, job: OfferJob) -> None:
        """The merge was committed before the record could be created: the log makes the offer late."""
        out = job.out
        if out is None or out.record is not None:
            return
        if out.ref is not None:
            self._board.delete_payload(out.ref)
        elif out.data is not None:  # an upload that failed may have taken effect
            self._board.take_back(out.key, len(out.data))

    def _publish_checkpoint(self, job: CheckpointJob) -> None:
        record, keys = job.record, self._board.keys
        self.check_fence()
        if job.out is None:
            job.out = Outgoing(keys.checkpoint(self._island, self._incarnation, record.number, "inner.safetensors"))
        if job.out.ref is None:
            job.out.data = job.out.data or safetensors.torch.save(dict(job.tensors))
            job.out.ref = self._board.put_payload(job.out.key, job.out.data)
        if job.out.record is None:
            job.out.record = record.model_copy(update={"payload": job.out.ref})
        marker = keys.checkpoint(self._island, self._incarnation, record.number, "checkpoint.json")
        self._board.create(marker, job.out.record)
        self.checkpoint_done = record.number
        # The newest complete checkpoint is never deleted, and the one before it stays as well.
        if record.number > 2:
            self._delete_checkpoint(self._incarnation, record.number - 2)
        elif record.number == 2:
            self._delete_earlier_lives()

    def _delete_checkpoint(self, life: int, number: int) -> None:
        """Marker first: a checkpoint that is complete by its marker has its payload."""
        keys, store = self._board.keys, self._board.store
        store.delete(keys.checkpoint(self._island, life, number, "checkpoint.json"))
        store.delete_tree(f"{keys.checkpoints(self._island, life)}{number:06d}/")

    def _delete_earlier_lives(self) -> None:
        """Two checkpoints of this life are complete: nobody will resume from one of its predecessors'."""
        for life in range(max(1, self._incarnation - LIVES_SEARCHED), self._incarnation):
            folders = self._board.store.list_folders(self._board.keys.checkpoints(self._island, life))
            for number in folders:
                if number.isdigit():
                    self._delete_checkpoint(life, int(number))

    def check_fence(self) -> None:
        """Raise `Fenced` when a newer life of this island has been claimed."""
        if self._board.read_claim(self._island, self._incarnation + 1) is not None:
            raise Fenced(
                f"island {self._island}: life {self._incarnation} has been replaced by a newer one; this one ends"
            )

    def _measure(self, size: int, seconds: float) -> None:
        if seconds > 0.0:
            self.bandwidth = smooth(self.bandwidth, size / seconds)


def run_publisher(publisher: Publisher, clock: Clock, stopped: Signal) -> None:
    """Publish calls and offers until told to stop; keeps trying through an outage of any length."""
    _keep_publishing("offers", publisher.publish_once, publisher.wake, publisher.problems, clock, stopped)


def run_checkpointer(publisher: Publisher, clock: Clock, stopped: Signal) -> None:
    """Publish checkpoints until told to stop, beside the offers, which must not wait for them."""
    wake = publisher.checkpoint_wake
    _keep_publishing("checkpoints", publisher.checkpoint_once, wake, publisher.problems, clock, stopped)


def _keep_publishing(
    what: str,
    once: Callable[[], bool],
    wake: Signal,
    problems: dict[str, str],
    clock: Clock,
    stopped: Signal,
) -> None:
    failures = 0
    while not stopped.is_set():
        wake.clear()
        try:
            worked = once()
            failures = 0
            problems.pop(what, None)
        except StoreUnavailable as error:
            failures += 1
            problems[what] = str(error)
            clock.sleep(pause_after(failures))
            continue
        if not worked:
            wake.wait(1.0)
