"""The learner's outbox: what is written in which order, what an outage does to it."""

from __future__ import annotations

import pytest
import torch

from diloco_runtime.clock import SystemClock
from diloco_runtime.codec import decode_fragment, roundtrip
from diloco_runtime.errors import Fenced, RunMismatch, StoreUnavailable
from diloco_runtime.keys import RUN
from diloco_runtime.publisher import Publisher
from diloco_runtime.records import encode
from tests.behaviours.faults import LateWrite, Unwritable, Wrapped
from tests.behaviours.samples import call_record, run_record
from tests.support.outbox import FROM, TABLE, TO, Outbox, checkpoint_job, claim, offer_job
from tests.support.run_records import RUN_ID


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
