"""Identity, records found where they belong, the newest of a series, payloads that are what they are said to be."""

from __future__ import annotations

import pytest

from diloco_runtime.blackboard import IDENTITY_TRUSTED_SECONDS, Blackboard
from diloco_runtime.errors import CorruptObject, MissingPayload, RunMismatch
from diloco_runtime.keys import RUN, Keys
from diloco_runtime.purge import purge_run
from diloco_runtime.records import (
    ClaimRecord,
    ControlRecord,
    HeartbeatRecord,
    LearnerStatus,
    OfferRecord,
    PayloadRef,
    Position,
    SyncerStatus,
    encode,
)
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_counting import CountingStore
from tests.behaviours.samples import OTHER_RUN_ID, RUN_ID, call_record, commit_record, run_record


def heartbeat() -> HeartbeatRecord:
    return HeartbeatRecord(
        run_id=RUN_ID, nonce="h", island="iowa", incarnation=1, agent="a", counter=1, state="running",
        learner=LearnerStatus(), syncer=SyncerStatus(), host="h", pid=1, started=0.0,
    )  # fmt: skip


def every_write(board: Blackboard) -> None:
    """Try each kind of write; all of them have to end in `RunMismatch`."""
    for write in (
        lambda: board.create(board.keys.call(1), call_record(1, "x")),
        lambda: board.write_heartbeat(heartbeat()),
        lambda: board.put_payload(board.keys.blob(1, "delta", 0, "n"), b"x"),
    ):
        with pytest.raises(RunMismatch):
            write()


# ---- identity -------------------------------------------------------------------------------------------------------


def test_the_first_creator_of_a_run_wins(board: Blackboard) -> None:
    assert board.create_run(run_record(OTHER_RUN_ID, "second")) == run_record()
    assert board.read_run() == run_record()


def test_nothing_is_written_before_the_run_exists(store: ObjectStore, clock, nonces) -> None:
    every_write(Blackboard(store, RUN_ID, clock, nonces))
    assert store.list("") == []


def test_nothing_is_written_for_a_purged_run(board: Blackboard, store: ObjectStore, clock) -> None:
    board.create(board.keys.call(1), call_record(1, "mine"))
    purge_run(store, RUN_ID)
    clock.now += IDENTITY_TRUSTED_SECONDS
    every_write(board)
    assert store.list("") == []


def test_nothing_is_written_into_a_new_run_of_the_same_name(board: Blackboard, store: ObjectStore, clock) -> None:
    board.check_identity()
    purge_run(store, RUN_ID)
    new = run_record(OTHER_RUN_ID, "new")
    store.create(RUN, encode(new))
    clock.now += IDENTITY_TRUSTED_SECONDS
    with pytest.raises(RunMismatch, match=OTHER_RUN_ID):
        board.check_identity()
    every_write(board)
    assert store.list("") == [RUN]


def test_a_look_at_run_json_is_trusted_for_some_seconds(store: ObjectStore, clock, nonces) -> None:
    counting = CountingStore(store)
    board = Blackboard(counting, RUN_ID, clock, nonces)
    board.create_run(run_record())
    for seq in range(1, 6):
        board.create(board.keys.call(seq), call_record(seq, "x"))
        clock.now += 1.0
    assert counting.requests["get"] == 1
    board.create(board.keys.call(6), call_record(6, "x"))
    assert counting.requests["get"] == 2


def test_a_record_of_another_run_is_refused(board: Blackboard, store: ObjectStore) -> None:
    store.create(board.keys.call(1), encode(call_record(1, "x", OTHER_RUN_ID)))
    with pytest.raises(CorruptObject, match=f"belongs to run {OTHER_RUN_ID}"):
        board.read_call(1)


# ---- records in the wrong place -------------------------------------------------------------------------------------


def test_a_commit_under_another_number_is_refused(board: Blackboard, store: ObjectStore) -> None:
    store.create(board.keys.log(3), encode(commit_record(4)))
    with pytest.raises(CorruptObject, match="says it is commit 4"):
        board.read_commit(3)


@pytest.mark.parametrize("body", [b"{", b"[]", b"\xff\xfe", b'{"run_id": "0123456789abcdef"}', b"null"])
def test_what_is_no_record_is_refused(board: Blackboard, store: ObjectStore, body: bytes) -> None:
    store.create(board.keys.call(1), body)
    with pytest.raises(CorruptObject, match=board.keys.call(1)):
        board.read_call(1)


def test_offers_are_listed_and_checked_against_their_names(board: Blackboard, store: ObjectStore) -> None:
    payload = PayloadRef(key=f"{RUN_ID}/blobs/x", size=1, sha256="0")
    offer = OfferRecord(
        run_id=RUN_ID, nonce="o", seq=7, fragment=0, island="iowa", incarnation=2, anchor=1, inner_steps=3, tokens=9,
        codec="fp32", payload=payload, data_from=Position(), data_to=Position(), fates=(),
    )  # fmt: skip
    right, wrong = board.keys.offer(7, "iowa", 2), board.keys.offer(7, "oslo", 2)
    board.create(right, offer)
    assert board.list_offers(7) == [right]
    assert board.list_offers(6) == []
    assert board.read_offer_at(right) == board.read_offer(7, "iowa", 2) == offer
    store.create(wrong, encode(offer))
    with pytest.raises(CorruptObject, match="holds the offer of iowa-2 to 7"):
        board.read_offer_at(wrong)


# ---- the newest of a series -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 5, 7, 8, 9, 16, 31, 100, 257])
def test_the_head_is_found_in_a_few_requests(store: ObjectStore, clock, nonces, length: int) -> None:
    keys = Keys(RUN_ID)
    for seq in range(length):
        store.create(keys.log(seq), encode(commit_record(seq)))
    expected = commit_record(length - 1) if length else None
    for hint in {-1, 0, length // 2, length - 1}:
        counting = CountingStore(store)
        board = Blackboard(counting, RUN_ID, clock, nonces)
        assert board.head(hint) == expected
        assert counting.requests["get"] <= 2 * max(length, 1).bit_length() + 2
        # Once found, the next look costs one request for the next name and one for the head itself.
        counting.requests.clear()
        assert board.head() == expected
        assert counting.requests["get"] <= 2


def test_the_head_follows_a_growing_log(board: Blackboard) -> None:
    for seq in range(20):
        board.create(board.keys.log(seq), commit_record(seq))
        head = board.head()
        assert head is not None and head.seq == seq


def test_the_newest_claim_and_control_count_from_one(board: Blackboard) -> None:
    assert board.newest_claim("iowa") is None
    assert board.newest_control() is None
    for number in range(1, 7):
        claim = ClaimRecord(
            run_id=RUN_ID, nonce=f"n{number}", island="iowa", incarnation=number, agent="a", host="h", pid=1,
            started=0.0, claimed_wall=0.0,
        )  # fmt: skip
        board.create(board.keys.claim("iowa", number), claim)
        assert board.newest_claim("iowa") == claim
        control = ControlRecord(run_id=RUN_ID, nonce=f"n{number}", number=number, action="stop")
        board.create(board.keys.control(number), control)
        assert board.newest_control() == control
    assert board.newest_claim("oslo") is None
    assert board.list_islands() == ["iowa"]


# ---- payloads -------------------------------------------------------------------------------------------------------


def test_payloads_come_back_checked(board: Blackboard, store: ObjectStore) -> None:
    ref = board.put_payload(board.keys.blob(1, "delta", 0, "n"), b"payload")
    assert board.get_payload(ref) == b"payload"
    store.put(ref.key, b"paYload")
    with pytest.raises(CorruptObject, match="another hash"):
        board.get_payload(ref)
    store.put(ref.key, b"payloa")
    with pytest.raises(CorruptObject, match="6 bytes"):
        board.get_payload(ref)
    store.delete(ref.key)
    with pytest.raises(MissingPayload):
        board.get_payload(ref)


@pytest.mark.parametrize("key", ["run.json", f"{RUN_ID}/../run.json", f"{RUN_ID}", f"{OTHER_RUN_ID}/x", "/etc/passwd",
                                 f"{RUN_ID}/.tmp/x", f"{RUN_ID}/a b"])  # fmt: skip
def test_payload_names_cannot_leave_the_run(board: Blackboard, key: str) -> None:
    with pytest.raises(CorruptObject, match="leaves the run's prefix"):
        board.get_payload(PayloadRef(key=key, size=1, sha256="0"))
