"""Payloads, in one object or in shards: what is written comes back, what is damaged or gone is named."""

from __future__ import annotations

import threading

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import CorruptObject, MissingPayload, StoreUnavailable
from diloco_runtime.payloads import PARALLEL, object_keys, objects
from diloco_runtime.records import PayloadRef, Shard
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import OTHER_RUN_ID, RUN_ID, run_record

SHARD = 1000
DATA = bytes(range(256)) * 21  # five whole shards and a piece


@pytest.fixture
def board(store: ObjectStore, clock, nonces) -> Blackboard:
    board = Blackboard(store, RUN_ID, clock, nonces, shard_bytes=SHARD)
    board.create_run(run_record())
    return board


def put(board: Blackboard, data: bytes = DATA) -> PayloadRef:
    return board.put_payload(board.keys.blob(1, "delta", 0, "n"), data)


@pytest.mark.parametrize(("size", "count"), [(1, 1), (SHARD, 1), (SHARD + 1, 2), (2 * SHARD, 2), (5376, 6)])
def test_payloads_come_back_from_as_many_objects_as_needed(board: Blackboard, size: int, count: int) -> None:
    data = (DATA * 2)[:size]
    ref = put(board, data)
    assert board.get_payload(ref) == data and ref.size == size
    assert sorted(object_keys(ref)) == board.store.list(board.keys.blobs(1)) and len(object_keys(ref)) == count
    assert objects(size, SHARD) == count, "what forecasts and plans count"
    board.delete_payload(ref)
    assert board.store.list(board.keys.blobs(1)) == []


def test_a_record_carries_its_shards(board: Blackboard) -> None:
    ref = put(board)
    assert PayloadRef.model_validate_json(ref.model_dump_json()) == ref
    assert board.get_payload(PayloadRef.model_validate_json(ref.model_dump_json())) == DATA


@pytest.mark.parametrize("size", [500, 5376])
def test_one_flipped_byte_is_named(board: Blackboard, size: int) -> None:
    ref = put(board, DATA[:size])
    for key in object_keys(ref):
        whole = board.store.get(key)
        assert whole is not None
        board.store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CorruptObject, match=f"{key} has another hash"):
            board.get_payload(ref)
        board.store.put(key, whole[:-1])
        with pytest.raises(CorruptObject, match=f"{key} has {len(whole) - 1} bytes"):
            board.get_payload(ref)
        board.store.delete(key)
        with pytest.raises(MissingPayload, match=f"{key} is gone"):
            board.get_payload(ref)
        board.store.put(key, whole)
    assert board.get_payload(ref) == DATA[:size]


def test_shards_in_another_order_are_refused(board: Blackboard) -> None:
    ref = put(board)
    swapped = ref.model_copy(update={"shards": (ref.shards[1], ref.shards[0], *ref.shards[2:])})
    with pytest.raises(CorruptObject, match="contradicts itself about its shards"):
        board.get_payload(swapped)


@pytest.mark.parametrize(
    "change", [{"size": 5000}, {"sha256": "0" * 64}, {"shards": (Shard(size=5376, sha256="0" * 64),)}]
)
def test_a_record_that_contradicts_itself_reads_nothing(board: Blackboard, change: dict[str, object]) -> None:
    ref = put(board).model_copy(update=change)
    for key in board.store.list(board.keys.blobs(1)):
        board.store.delete(key)
    with pytest.raises(CorruptObject, match="contradicts itself"):
        board.get_payload(ref)


def test_shards_cannot_leave_the_run(board: Blackboard) -> None:
    ref = put(board)
    with pytest.raises(CorruptObject, match="leaves the run's prefix"):
        board.get_payload(ref.model_copy(update={"key": f"{OTHER_RUN_ID}/blobs/x"}))


class Gate(Wrapped):
    """Lets nobody through until as many are waiting as may be in flight; then counts how many come at once."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.barrier = threading.Barrier(PARALLEL, timeout=20)
        self.waited = 0

    def put(self, key: str, data: bytes) -> None:
        self._wait(key)
        self.inner.put(key, data)

    def get(self, key: str) -> bytes | None:
        self._wait(key)
        return self.inner.get(key)

    def _wait(self, key: str) -> None:
        if "/blobs/" in key:
            self.barrier.wait()
            self.waited += 1


def test_shards_are_moved_side_by_side(store: ObjectStore, clock, nonces) -> None:
    gate = Gate(store)
    board = Blackboard(gate, RUN_ID, clock, nonces, shard_bytes=SHARD)
    board.create_run(run_record())
    data = DATA[: PARALLEL * SHARD]  # all of them at once, or the barrier breaks
    assert board.get_payload(put(board, data)) == data
    assert gate.waited == 2 * PARALLEL


class Failing(Wrapped):
    """Fails the writes of some shards as long as they are named; counts what is written."""

    def __init__(self, inner: ObjectStore, *broken: int) -> None:
        super().__init__(inner)
        self.broken = {f".{number:06d}" for number in broken}
        self.written: list[str] = []

    def put(self, key: str, data: bytes) -> None:
        if key[-7:] in self.broken:
            raise StoreUnavailable(f"no answer for {key}")
        self.inner.put(key, data)
        self.written.append(key[-7:])


def test_an_upload_that_failed_goes_on_where_it_was(store: ObjectStore, clock, nonces) -> None:
    failing = Failing(store, 2, 5)
    board = Blackboard(failing, RUN_ID, clock, nonces, shard_bytes=SHARD)
    board.create_run(run_record())
    with pytest.raises(StoreUnavailable, match="no answer"):
        put(board)
    failing.broken = {".000005"}
    with pytest.raises(StoreUnavailable, match="no answer"):
        put(board)
    failing.broken = set()
    assert board.get_payload(put(board)) == DATA
    assert sorted(failing.written) == [f".{number:06d}" for number in range(6)], "each shard once"


def test_what_a_failed_upload_left_can_be_taken_back(store: ObjectStore, clock, nonces) -> None:
    failing = Failing(store, 4)
    board = Blackboard(failing, RUN_ID, clock, nonces, shard_bytes=SHARD)
    board.create_run(run_record())
    with pytest.raises(StoreUnavailable):
        put(board)
    assert store.list(board.keys.blobs(1)) != []
    board.take_back(board.keys.blob(1, "delta", 0, "n"), len(DATA))
    assert store.list(board.keys.blobs(1)) == []


def test_other_bytes_under_the_same_name_are_written_anew(store: ObjectStore, clock, nonces) -> None:
    failing = Failing(store, 5)
    board = Blackboard(failing, RUN_ID, clock, nonces, shard_bytes=SHARD)
    board.create_run(run_record())
    with pytest.raises(StoreUnavailable):
        put(board)
    failing.broken = set()
    other = bytes(reversed(DATA))
    assert board.get_payload(put(board, other)) == other
