"""From offers on the blackboard to a commit in the log."""

from __future__ import annotations

import itertools

import pytest
import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.codec import decode_fragment, encode_fragment
from diloco_runtime.errors import CorruptObject
from diloco_runtime.merging import Decision, Draft, Merging, OfferBook, initialise, payloads_of
from diloco_runtime.records import CommitRecord, OfferRecord, Position
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import run_record
from tests.conftest import CountedNonces, ManualClock
from tests.support.run_records import RUN_ID, config, table

_numbers = itertools.count()
TABLE = table(4, 4)
START = Position()
RUNNING = Decision("run", 0, "", 0, 1000, "iowa", 0.5)


class Merge:
    """One syncer's tensors around a run of two fragments that starts from zeros."""

    def __init__(self, clock: ManualClock, nonces: CountedNonces) -> None:
        self.board = Blackboard(MemoryStore(f"memory://merging-{next(_numbers)}"), RUN_ID, clock, nonces)
        self.board.create_run(run_record())
        self.config = config(fragments=2)
        zeros = [{piece.key: torch.zeros(4) for piece in fragment.pieces} for fragment in TABLE]
        self.head = initialise(self.board, self.config, TABLE, zeros, "iowa", 1, "")
        self.merging = Merging(self.board, clock, self.config, TABLE, "iowa", 1)

    def offer(self, island: str, delta: list[float], position: Position = START, **changes: object) -> None:
        """Put an offer to the next merge on the blackboard."""
        seq = self.head.seq + 1
        fragment = (seq - 1) % 2
        data = encode_fragment({TABLE[fragment].pieces[0].key: torch.tensor(delta)}, "fp32")
        nonce = self.board.new_nonce()
        ref = self.board.put_payload(self.board.keys.blob(seq, "delta", fragment, nonce), data)
        usual = {
            "run_id": RUN_ID, "nonce": nonce, "seq": seq, "fragment": fragment, "island": island, "incarnation": 1,
            "anchor": max(0, seq - 2), "inner_steps": 2, "tokens": 10, "codec": "fp32", "payload": ref,
            "data_from": Position(), "data_to": position, "fates": (),
        }  # fmt: skip
        record = OfferRecord.model_validate({**usual, **changes})
        self.board.create(self.board.keys.offer(seq, island, 1), record)

    def draft(self) -> tuple[OfferBook, Draft]:
        book = OfferBook(self.head.seq + 1)
        self.merging.collect(book)
        return book, self.merging.draft(book, self.head, RUNNING)

    def commit(self) -> CommitRecord:
        self.head = self.merging.create(self.draft()[1])
        return self.head

    def parameters(self) -> torch.Tensor:
        fragment = TABLE[self.head.fragment]
        data = self.board.get_payload(self.head.params[0])
        return decode_fragment(data, fragment, "fp32", "newest")[fragment.pieces[0].key]


@pytest.fixture
def merge(clock: ManualClock, nonces: CountedNonces) -> Merge:
    return Merge(clock, nonces)


def test_an_outer_step_that_is_not_finite_is_never_committed(merge: Merge) -> None:
    merge.offer("iowa", [3e38, 0.0, 0.0, 0.0])
    found = merge.commit()
    assert found.merged == () and found.credited == 0
    assert [entry.island for entry in found.refused] == ["iowa"] and "too long" in found.refused[0].reason
    assert torch.equal(merge.parameters(), torch.zeros(4))
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    assert len(merge.commit().merged) == 1, "the run goes on"


def test_who_spoils_an_outer_step_is_left_out_and_the_others_are_not(merge: Merge) -> None:
    for island, size, tokens in (("iowa", 1.0, 10), ("oregon", 3e38, 1000), ("tokyo", 2.0, 10), ("zurich", 3e38, 1000)):
        merge.offer(island, [size, 0.0, 0.0, 0.0], tokens=tokens)
    found = merge.commit()
    assert {entry.island for entry in found.merged} == {"iowa", "tokyo"} and found.credited == 20 * 4
    assert {entry.island for entry in found.refused} == {"oregon", "zurich"}
    assert sum(entry.weight for entry in found.merged) == pytest.approx(1.0)
    assert found.positions.keys() == {"iowa", "tokyo"}
    assert torch.isfinite(merge.parameters()).all() and merge.parameters()[0] < 0.0


def test_a_commit_says_how_far_every_island_has_read(merge: Merge) -> None:
    at = [Position(data_pass=0, unit_index=3, offset=n) for n in range(100)]
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0], at[10])
    merge.offer("oregon", [1.0, 0.0, 0.0, 0.0], at[20])
    assert merge.commit().positions == {"iowa": at[10], "oregon": at[20]}
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0], at[40])
    assert merge.commit().positions == {"iowa": at[40], "oregon": at[20]}, "who is not in it keeps its place"
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0], at[30])
    assert merge.commit().positions["iowa"] == at[40], "offers to neighbouring merges may have been made in any order"


@pytest.mark.parametrize(("field", "value"), [("anchor", 1), ("fragment", 1)])
def test_an_offer_that_does_not_fit_is_refused_with_its_reason(merge: Merge, field: str, value: int) -> None:
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    merge.offer("oregon", [1.0, 0.0, 0.0, 0.0], **{field: value})
    found = merge.commit()
    assert [entry.island for entry in found.merged] == ["iowa"]
    assert [entry.island for entry in found.refused] == ["oregon"]
    assert str(value) in found.refused[0].reason


def test_an_offer_with_damaged_bytes_is_refused(merge: Merge) -> None:
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    record = merge.board.read_offer(1, "iowa", 1)
    assert record is not None
    merge.board.store.put(record.payload.key, b"\0" * record.payload.size)
    found = merge.commit()
    assert found.merged == () and "another hash" in found.refused[0].reason


@pytest.mark.parametrize("what", ["/blobs/", "/offers/"])
def test_a_download_that_broke_off_once_costs_nobody_an_offer(
    merge: Merge, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    store, short = merge.board.store, [True]

    def get(key: str) -> bytes | None:
        data = MemoryStore.get(store, key)  # type: ignore[arg-type]
        if data is not None and what in key and short:
            short.pop()
            return data[: len(data) // 2]
        return data

    monkeypatch.setattr(store, "get", get)
    book, draft = merge.draft()
    assert not short and book.unreadable == {}
    assert [entry.island for entry in draft.record.merged] == ["iowa"]


def test_a_record_that_cannot_be_read_is_remembered_with_its_key(merge: Merge) -> None:
    key = merge.board.keys.offer(1, "iowa", 1)
    merge.board.store.put(key, b"{")
    book, draft = merge.draft()
    assert book.unreadable.keys() == {key} and draft.record.merged == draft.record.refused == ()


def test_who_loses_the_create_takes_back_its_payloads(merge: Merge) -> None:
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    _, mine = merge.draft()
    winner = mine.record.model_copy(update={"nonce": "other", "author": "oregon"})
    merge.board.create(merge.board.keys.log(1), winner)
    assert merge.merging.create(mine).author == "oregon"
    assert all(merge.board.store.get(ref.key) is None for ref in payloads_of(mine.record))


def test_a_payload_outside_of_the_run_is_not_read(merge: Merge) -> None:
    merge.offer("iowa", [1.0, 0.0, 0.0, 0.0])
    record = merge.board.read_offer(1, "iowa", 1)
    assert record is not None
    stray = record.payload.model_copy(update={"key": "fedcba9876543210/blobs/x"})
    with pytest.raises(CorruptObject, match="leaves the run's prefix"):
        merge.board.get_payload(stray)
