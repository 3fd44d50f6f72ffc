"""The threads around a learner's outbox: nobody waits for them, and they outlive outages."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.storage import ALL_VERBS, CALM, Bucket, Lane, Link, Trouble
from diloco_cli.simulation.world import World
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock
from diloco_runtime.codec import decode_fragment
from diloco_runtime.publisher import Publisher, run_checkpointer, run_publisher
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import run_record
from tests.support.outbox import TABLE, Outbox, checkpoint_job, offer_job
from tests.support.run_records import RUN_ID

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


class Distant:
    """A publisher in a world whose store has a round trip and a bandwidth."""

    def __init__(self, latency: float = 0.1, bandwidth: float = float("inf")) -> None:
        self.world, bucket = World(3), Bucket("world://run")
        self.clock = WorldClock(self.world)
        self.observer = Blackboard(bucket, RUN_ID, self.clock, WorldNonces(self.world))
        self.observer.create_run(run_record(RUN_ID))
        self.link = Link(bucket, self.world, latency, up=Lane(bandwidth))
        board = Blackboard(self.link, RUN_ID, self.clock, WorldNonces(self.world))
        self.publisher = Publisher(board, self.clock, "iowa", 1, "fp32")
        self.world.process("learner", self._publish)

    def _publish(self) -> int:
        stopped = self.clock.signal()
        self.world.thread(lambda: run_checkpointer(self.publisher, self.clock, stopped))
        run_publisher(self.publisher, self.clock, stopped)
        return 0


def test_an_outage_of_any_length_is_waited_out_and_said() -> None:
    distant = Distant()
    distant.link.trouble = Trouble(verbs=ALL_VERBS)
    distant.publisher.call(1)
    distant.publisher.offer(offer_job(1))
    distant.publisher.checkpoint(checkpoint_job(1))
    distant.world.run(3600.0)
    assert "world://run does not answer" in distant.publisher.problem and distant.publisher.busy()
    distant.link.trouble = CALM
    distant.world.run(3620.0)
    assert not distant.publisher.busy() and distant.publisher.problem == ""
    assert distant.observer.read_call(1) is not None and distant.observer.read_offer(1, "iowa", 1) is not None
    assert distant.observer.read_checkpoint("iowa", 1, 1) is not None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_answers_are_lost_everything_is_published_once_and_whole(seed: int) -> None:
    distant = Distant()
    distant.world.random.seed(seed)
    distant.link.trouble = Trouble(lost_answers=0.4)
    for seq in (1, 2, 3, 4):
        distant.publisher.call(seq)
        distant.publisher.offer(offer_job(seq))
    distant.publisher.checkpoint(checkpoint_job(1))
    distant.world.run(3000.0)
    assert not distant.publisher.busy() and distant.publisher.checkpoint_done == 1
    for seq in (1, 2, 3, 4):
        record = distant.observer.read_offer(seq, "iowa", 1)
        assert record is not None and record.nonce == f"n{seq}"
        decode_fragment(distant.observer.get_payload(record.payload), TABLE[(seq - 1) % 2], "fp32", "x")


@pytest.mark.parametrize("what", ["call", "checkpoint"])
def test_new_work_is_begun_at_once(what: str) -> None:
    distant = Distant(latency=0.1)
    distant.world.run(7.25)

    def learner() -> None:
        if what == "call":
            distant.publisher.call(1)
        else:
            distant.publisher.checkpoint(checkpoint_job(1))

    distant.world.at(7.25, learner)
    distant.world.run(7.8)
    assert not distant.publisher.busy(), "an idle publisher slept on"


def test_time_and_bandwidth_of_an_upload_are_measured() -> None:
    distant = Distant(latency=0.0, bandwidth=1000.0)
    distant.publisher.offer(offer_job(1, size=4000))
    distant.world.run(60.0)
    record = distant.observer.read_offer(1, "iowa", 1)
    assert record is not None and record.payload.size > 16_000
    assert distant.publisher.bandwidth == pytest.approx(1000.0, rel=0.05)
    assert distant.publisher.publish_seconds == pytest.approx(record.payload.size / 1000.0, rel=0.1)
    distant.publisher.checkpoint(checkpoint_job(1, size=4000))
    distant.world.run(120.0)
    assert distant.publisher.checkpoint_seconds == pytest.approx(16.0, rel=0.1)
