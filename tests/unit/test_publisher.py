"""The learner's outbox: what is written in which order, what an outage does to it, and that nobody waits for it."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock
from diloco_runtime.codec import decode_fragment, roundtrip
from diloco_runtime.errors import Fenced, RunMismatch, StoreUnavailable
from diloco_runtime.keys import RUN
from diloco_runtime.learner_logic import Offer
from diloco_runtime.publisher import CheckpointJob, OfferJob, Publisher, run_checkpointer, run_publisher
from diloco_runtime.records import CheckpointRecord, ClaimRecord, Fates, Position, encode
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.faults import LateWrite, Unwritable, Wrapped
from tests.behaviours.samples import call_record, run_record
from tests.support.run_records import PAYLOAD, RUN_ID, table
from tests.support.world import DictStore, LatentStore, World, WorldClock, WorldNonces

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


@pytest.fixture
def box(clock, nonces) -> Outbox:
    return Outbox(clock, nonces)


# ---- what is written ------------------------------------------------------------------------------------------------


def test_the_payload_is_complete_before_the_record_that_points_to_it(box: Outbox) -> None:
    job = offer_job(1)
    box.publisher.offer(job)
    assert box.publisher.busy() and box.publisher.offers_waiting()
    assert box.publisher.publish_once() and not box.publisher.busy() and not box.publisher.publish_once()
    assert [(verb, key) for verb, key, _ in box.store.tried] == [
        ("put", box.board.keys.blob(1, "delta", 0, "n1")),
        ("create", box.board.keys.offer(1, "iowa", 1)),
    ]
    record = box.board.read_offer(1, "iowa", 1)
    assert record is not None
    said = (record.nonce, record.fragment, record.anchor, record.inner_steps, record.tokens, record.codec)
    assert said == ("n1", 0, 0, 2, 8, "fp32")
    assert (record.data_from, record.data_to, record.fates) == (FROM, TO, job.fates)
    found = decode_fragment(box.board.get_payload(record.payload), TABLE[0], "fp32", "x")
    assert torch.equal(found["w0[0:4]"], job.delta["w0[0:4]"])


def test_what_is_sent_is_what_the_codec_makes_of_it(clock, nonces) -> None:
    box, job = Outbox(clock, nonces, codec="bf16"), offer_job(1)
    box.publisher.offer(job)
    box.run()
    record = box.board.read_offer(1, "iowa", 1)
    assert record is not None and record.codec == "bf16"
    found = decode_fragment(box.board.get_payload(record.payload), TABLE[0], "bf16", "x")
    assert torch.equal(found["w0[0:4]"], roundtrip(job.delta, "bf16")["w0[0:4]"])
    assert not torch.equal(found["w0[0:4]"], job.delta["w0[0:4]"])


def test_calls_go_first_then_offers_by_seq(box: Outbox) -> None:
    for seq in (3, 2):
        box.publisher.offer(offer_job(seq))
    box.publisher.call(2)
    assert box.publisher.publish_once()
    box.publisher.call(3)
    box.publisher.offer(offer_job(1))
    box.run()
    written = ["call 2", "call 3", "delta 1", "offer 1", "delta 2", "offer 2", "delta 3", "offer 3"]
    assert box.store.kinds() == written


def test_a_checkpoint_is_a_queue_of_its_own(box: Outbox) -> None:
    assert box.publisher.checkpoint(checkpoint_job(1)) and box.publisher.busy()
    assert not box.publisher.publish_once()
    box.publisher.call(1)
    assert box.publisher.checkpoint_once() and not box.publisher.checkpoint_once()
    assert box.store.kinds() == ["inner 1", "marker 1"] and box.publisher.busy()


def test_a_second_checkpoint_is_refused_while_the_first_is_on_its_way(box: Outbox) -> None:
    assert box.publisher.checkpoint(checkpoint_job(1)) and not box.publisher.checkpoint(checkpoint_job(2))
    assert box.publisher.checkpoint_done == 0
    box.run()
    assert box.publisher.checkpoint_done == 1
    assert box.publisher.checkpoint(checkpoint_job(2))


def test_a_call_that_another_island_was_first_to_make_is_made(box: Outbox) -> None:
    box.inner.create(box.board.keys.call(1), encode(call_record(1, "theirs", RUN_ID)))
    box.publisher.call(1)
    assert box.publisher.publish_once() and not box.publisher.busy()
    standing = box.board.read_call(1)
    assert standing is not None and standing.nonce == "theirs"


# ---- too late -------------------------------------------------------------------------------------------------------


def test_what_was_committed_meanwhile_is_neither_called_nor_offered(box: Outbox) -> None:
    box.publisher.call(2)
    box.publisher.offer(offer_job(2))
    box.publisher.offer(offer_job(3))
    box.publisher.head = 2
    box.run()
    assert box.store.kinds() == ["delta 3", "offer 3"] and not box.publisher.busy()


def test_a_commit_during_the_upload_leaves_the_record_out_and_removes_the_payload(box: Outbox, clock, nonces) -> None:
    class Committing(Wrapped):
        def put(self, key: str, data: bytes) -> None:
            self.inner.put(key, data)
            box.publisher.head = 1

    box.over(Committing, clock, nonces)
    box.publisher.offer(offer_job(1))
    assert box.publisher.publish_once() and not box.publisher.busy()
    assert box.store.kinds() == ["delta 1"] and box.board.read_offer(1, "iowa", 1) is None
    assert box.store.deleted == [box.board.keys.blob(1, "delta", 0, "n1")]


def test_the_payload_of_an_offer_whose_upload_failed_and_that_came_too_late_is_removed(box: Outbox) -> None:
    """The failed upload may have taken effect."""
    box.store.broken = True
    box.publisher.offer(offer_job(1))
    with pytest.raises(StoreUnavailable):
        box.publisher.publish_once()
    box.publisher.head, box.store.broken = 1, False
    box.run()
    assert box.store.deleted == [box.board.keys.blob(1, "delta", 0, "n1")] and not box.publisher.busy()
    assert box.store.kinds() == ["delta 1"]


def test_the_payload_of_an_offer_that_may_have_been_recorded_stays(box: Outbox, clock, nonces) -> None:
    store = box.over(Unwritable, clock, nonces)
    box.publisher.offer(offer_job(1))
    with pytest.raises(StoreUnavailable):
        box.publisher.publish_once()
    box.publisher.head, store.broken = 1, False
    box.run()
    assert box.store.deleted == [] and not box.publisher.busy()
    assert box.inner.get(box.board.keys.blob(1, "delta", 0, "n1")) is not None


# ---- unknown outcomes -----------------------------------------------------------------------------------------------


def test_a_failed_upload_is_tried_again_with_the_same_bytes_under_the_same_key(box: Outbox) -> None:
    box.store.broken = True
    job = offer_job(1)
    box.publisher.offer(job)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            box.publisher.publish_once()
        assert box.publisher.offers_waiting()
        job.delta["w0[0:4]"].add_(1.0)  # whatever becomes of the tensors
    box.store.broken = False
    box.run()
    puts = {(key, data) for verb, key, data in box.store.tried if verb == "put"}
    assert len(puts) == 1 and len(box.store.tried) == 5
    record = box.board.read_offer(1, "iowa", 1)
    assert record is not None and box.board.get_payload(record.payload) == next(iter(puts))[1]


@pytest.mark.parametrize("what", ["call", "offer", "checkpoint"])
def test_a_record_of_unknown_outcome_is_tried_again_byte_for_byte(box: Outbox, clock, nonces, what: str) -> None:
    store = box.over(Unwritable, clock, nonces)
    jobs = {
        "call": (lambda: box.publisher.call(1), box.publisher.publish_once),
        "offer": (lambda: box.publisher.offer(offer_job(1)), box.publisher.publish_once),
        "checkpoint": (lambda: box.publisher.checkpoint(checkpoint_job(1)), box.publisher.checkpoint_once),
    }
    queue, once = jobs[what]
    queue()
    for _ in range(3):
        with pytest.raises(StoreUnavailable, match="outcome unknown"):
            once()
        assert box.publisher.busy()
        clock.now += 60.0
    store.broken = False
    box.run()
    assert len(store.bodies) > 3 and len(set(store.bodies)) == 1 and not box.publisher.busy()
    puts = [key for verb, key, _ in box.store.tried if verb == "put"]
    assert len(puts) == (0 if what == "call" else 1), "a complete payload is not sent again"


def test_a_record_that_takes_effect_after_it_was_read_back_absent_is_mine(box: Outbox, clock, nonces) -> None:
    store = box.over(LateWrite, clock, nonces)
    box.publisher.offer(offer_job(1))
    box.run()
    record = box.board.read_offer(1, "iowa", 1)
    assert record is not None and store.bodies == [encode(record)] * 2


def test_a_job_that_cannot_be_done_keeps_those_behind_it_in_order(box: Outbox) -> None:
    box.store.broken = True
    for seq in (1, 2):
        box.publisher.offer(offer_job(seq))
    for _ in range(4):
        with pytest.raises(StoreUnavailable):
            box.publisher.publish_once()
    assert set(box.store.kinds()) == {"delta 1"}
    box.store.broken = False
    box.run()
    assert box.store.kinds()[-4:] == ["delta 1", "offer 1", "delta 2", "offer 2"]


# ---- a life that is over --------------------------------------------------------------------------------------------


def test_a_replaced_life_offers_nothing_and_checkpoints_nothing(box: Outbox) -> None:
    box.board.create(box.board.keys.claim("iowa", 1), claim(1))
    box.publisher.offer(offer_job(1))
    box.run()
    box.board.create(box.board.keys.claim("iowa", 2), claim(2))
    box.publisher.offer(offer_job(2))
    with pytest.raises(Fenced, match="island iowa: life 1 has been replaced by a newer one"):
        box.publisher.publish_once()
    assert box.board.read_offer(1, "iowa", 1) is not None and box.board.read_offer(2, "iowa", 1) is None

    other = Publisher(box.board, SystemClock(), "iowa", 1, "fp32")
    other.checkpoint(checkpoint_job(1))
    with pytest.raises(Fenced):
        other.checkpoint_once()
    assert box.inner.list(box.board.keys.checkpoints("iowa", 1)) == []


@pytest.mark.parametrize("other", [None, "fedcba9876543210"])
def test_nothing_is_written_for_a_run_that_is_gone(box: Outbox, clock, other: str | None) -> None:
    box.publisher.call(1)
    box.run()
    box.inner.delete(RUN)
    if other:
        box.inner.create(RUN, encode(run_record(other)))
    clock.now += 10.0
    before = len(box.store.tried)
    box.publisher.checkpoint(checkpoint_job(1))
    with pytest.raises(RunMismatch):
        box.publisher.checkpoint_once()
    for queue in (lambda: box.publisher.offer(offer_job(1)), lambda: box.publisher.call(2)):
        queue()
        with pytest.raises(RunMismatch):
            box.publisher.publish_once()
    assert len(box.store.tried) == before


# ---- the thread -----------------------------------------------------------------------------------------------------


class Gate(Wrapped):
    """Uploads of one kind wait at a gate; counts how many are in it at the same time."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.kind = ""
        self.open, self.entered = threading.Event(), threading.Event()
        self.lock = threading.Lock()
        self.inside = self.most = 0

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        if self.kind in key:
            self.entered.set()
            assert self.open.wait(20)
        self.inner.put(key, data)
        with self.lock:
            self.inside -= 1


@pytest.fixture
def gated(nonces) -> Iterator[tuple[Outbox, Gate]]:
    box, stopped, clock = Outbox(SystemClock(), nonces), threading.Event(), SystemClock()
    gate = box.over(Gate, clock, nonces)
    threads = [
        threading.Thread(target=body, args=(box.publisher, clock, stopped), daemon=True)
        for body in (run_publisher, run_checkpointer)
    ]
    for thread in threads:
        thread.start()
    yield box, gate
    gate.open.set()
    stopped.set()
    box.publisher.wake.set()
    box.publisher.checkpoint_wake.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline, pause = SystemClock().monotonic() + 20, threading.Event()
    while not condition():
        assert SystemClock().monotonic() < deadline, "the publisher does not finish"
        pause.wait(0.002)


def test_queueing_never_waits_for_an_upload_and_one_offer_goes_at_a_time(gated: tuple[Outbox, Gate]) -> None:
    """This thread plays the learner: while the first upload hangs, everything can be queued and asked."""
    box, gate = gated
    gate.kind = "delta"
    box.publisher.offer(offer_job(1))
    assert gate.entered.wait(20)
    for seq in (2, 3):
        box.publisher.call(seq)
        box.publisher.offer(offer_job(seq))
    assert box.publisher.busy() and box.publisher.offers_waiting() and box.store.tried == []
    gate.open.set()
    wait_until(lambda: not box.publisher.busy())
    written = ["delta 1", "offer 1", "call 2", "call 3", "delta 2", "offer 2", "delta 3", "offer 3"]
    assert box.store.kinds() == written and gate.most == 1


def test_neither_offers_nor_the_learner_wait_for_a_checkpoint(gated: tuple[Outbox, Gate]) -> None:
    box, gate = gated
    gate.kind = "inner"
    assert box.publisher.checkpoint(checkpoint_job(1)) and gate.entered.wait(20)
    assert not box.publisher.checkpoint(checkpoint_job(2))
    box.publisher.call(1)
    box.publisher.offer(offer_job(1))
    wait_until(lambda: not box.publisher.offers_waiting())
    assert box.store.kinds() == ["call 1", "delta 1", "offer 1"] and box.publisher.busy()
    gate.open.set()
    wait_until(lambda: not box.publisher.busy())
    assert box.store.kinds()[3:] == ["inner 1", "marker 1"] and box.publisher.checkpoint_done == 1


# ---- in virtual time ------------------------------------------------------------------------------------------------


class Link:
    """A publisher in a world whose store has a round trip and a bandwidth."""

    def __init__(self, latency: float = 0.1, bandwidth: float = float("inf")) -> None:
        self.world, inner = World(3), DictStore("world://run")
        self.clock = WorldClock(self.world)
        self.observer = Blackboard(inner, RUN_ID, self.clock, WorldNonces(self.world))
        self.observer.create_run(run_record(RUN_ID))
        self.store = LatentStore(inner, self.world, latency, bandwidth)
        board = Blackboard(self.store, RUN_ID, self.clock, WorldNonces(self.world))
        self.publisher = Publisher(board, self.clock, "iowa", 1, "fp32")
        for body in (run_publisher, run_checkpointer):
            self.world.spawn(functools.partial(body, self.publisher, self.clock, threading.Event()))


def test_an_outage_of_any_length_is_waited_out_and_said() -> None:
    link = Link()
    link.store.broken = True
    link.publisher.call(1)
    link.publisher.offer(offer_job(1))
    link.publisher.checkpoint(checkpoint_job(1))
    link.world.run(3600.0)
    assert "world://run does not answer" in link.publisher.problem and link.publisher.busy()
    link.store.broken = False
    link.world.run(3620.0)
    assert not link.publisher.busy() and link.publisher.problem == ""
    assert link.observer.read_call(1) is not None and link.observer.read_offer(1, "iowa", 1) is not None
    assert link.observer.read_checkpoint("iowa", 1, 1) is not None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_answers_are_lost_everything_is_published_once_and_whole(seed: int) -> None:
    link = Link()
    link.world.random.seed(seed)
    link.store.lost_answers = 0.4
    for seq in (1, 2, 3, 4):
        link.publisher.call(seq)
        link.publisher.offer(offer_job(seq))
    link.publisher.checkpoint(checkpoint_job(1))
    link.world.run(3000.0)
    assert not link.publisher.busy() and link.publisher.checkpoint_done == 1
    for seq in (1, 2, 3, 4):
        record = link.observer.read_offer(seq, "iowa", 1)
        assert record is not None and record.nonce == f"n{seq}"
        decode_fragment(link.observer.get_payload(record.payload), TABLE[(seq - 1) % 2], "fp32", "x")


@pytest.mark.parametrize("what", ["call", "checkpoint"])
def test_new_work_is_begun_at_once(what: str) -> None:
    link = Link(latency=0.1)
    link.world.run(7.25)

    def learner() -> None:
        if what == "call":
            link.publisher.call(1)
        else:
            link.publisher.checkpoint(checkpoint_job(1))

    link.world.spawn(learner)
    link.world.run(7.8)
    assert not link.publisher.busy(), "an idle publisher slept on"


def test_time_and_bandwidth_of_an_upload_are_measured() -> None:
    link = Link(latency=0.0, bandwidth=1000.0)
    link.publisher.offer(offer_job(1, size=4000))
    link.world.run(60.0)
    record = link.observer.read_offer(1, "iowa", 1)
    assert record is not None and record.payload.size > 16_000
    assert link.publisher.bandwidth == pytest.approx(1000.0, rel=0.05)
    assert link.publisher.publish_seconds == pytest.approx(record.payload.size / 1000.0, rel=0.1)
    link.publisher.checkpoint(checkpoint_job(1, size=4000))
    link.world.run(120.0)
    assert link.publisher.checkpoint_seconds == pytest.approx(16.0, rel=0.1)
