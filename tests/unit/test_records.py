"""Records survive the way through bytes, and bytes that are no record are refused by name."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from pydantic import ValidationError

from diloco_runtime.errors import CorruptObject
from diloco_runtime.records import (
    CallRecord,
    CommitRecord,
    Fates,
    Fragment,
    OfferEntry,
    PayloadRef,
    Position,
    RunRecord,
    TensorPiece,
    decode,
    encode,
)

RUN_ID = "0123456789abcdef"
PAYLOAD = PayloadRef(key=f"{RUN_ID}/blobs/x", size=3, sha256="00")


def commit() -> CommitRecord:
    piece = TensorPiece(name="wte.weight", shape=(2, 3), start=4, stop=6, merge="mean")
    entry = OfferEntry(
        island="iowa", incarnation=1, nonce="n", anchor=0, inner_steps=4, tokens=10, weight=1.0,
        data_to=Position(data_pass=1, unit_index=2, offset=3), payload=PAYLOAD,
    )  # fmt: skip
    return CommitRecord(
        run_id=RUN_ID, nonce="c1", seq=1, parent="c0", fragment=0, author="iowa", author_incarnation=1,
        successor="iowa", merged=(entry,), params=(PAYLOAD,), fragments=(Fragment(pieces=(piece,)),),
        stages={"fetch": 0.1}, credited=10**18,
    )  # fmt: skip


def test_a_record_survives_the_way_through_bytes() -> None:
    record = commit()
    assert decode(CommitRecord, encode(record), "log/1") == record


def test_the_bytes_are_one_line_of_json_that_says_what_they_are() -> None:
    data = encode(CallRecord(run_id=RUN_ID, nonce="n", seq=3, island="iowa", incarnation=2))
    assert data.endswith(b"\n") and data.count(b"\n") == 1
    fields = {"schema_version": 1, "run_id": RUN_ID, "nonce": "n", "seq": 3, "island": "iowa", "incarnation": 2}
    assert json.loads(data) == fields


def changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(encode(commit())), **fields}).encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the whole object"),
        (b"{", "the whole object"),
        (b"\x80\x81", "the whole object"),
        (b"[1]", "the whole object"),
        (encode(commit())[:-20], "the whole object"),
        (changed(schema_version=2), "schema_version"),
        (changed(seq=-1), "seq"),
        (changed(seq="one"), "seq"),
        (changed(surprise=1), "surprise"),
        (changed(nonce=None), "nonce"),
        (changed(phase="over"), "phase"),
        (changed(params=[{"key": "k", "size": 0, "sha256": "0"}]), "params.0.size"),
    ],
)
def test_what_is_no_commit_is_refused_by_name(data: bytes, says: str) -> None:
    with pytest.raises(CorruptObject, match=rf"log/1 is not a valid CommitRecord: {says}"):
        decode(CommitRecord, data, "log/1")


def test_a_record_of_another_kind_is_refused() -> None:
    run = RunRecord(run_id=RUN_ID, nonce="n", name="trial", code_version="0", config={}, created_wall=0.0)
    with pytest.raises(CorruptObject, match="is not a valid CallRecord"):
        decode(CallRecord, encode(run), "calls/1")


def test_records_do_not_change() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        commit().seq = 2  # type: ignore[misc]


def test_later_positions_are_greater() -> None:
    ordered = [Position(), Position(unit_index=0), Position(unit_index=0, offset=5), Position(unit_index=1),
               Position(data_pass=1), Position(data_pass=1, unit_index=0)]  # fmt: skip
    assert all(earlier.order() < later.order() for earlier, later in pairwise(ordered))


def test_pieces_name_their_rows_and_count_their_numbers() -> None:
    rows = TensorPiece(name="w", shape=(2, 3), start=4, stop=6, merge="rda")
    scalar = TensorPiece(name="s", shape=(), start=0, stop=1, merge="mean")
    assert (rows.key, rows.numel) == ("w[4:6]", 6)
    assert (scalar.key, scalar.numel) == ("s[0:1]", 1)
    assert Fragment(pieces=(rows, scalar)).numel == 7


def test_fates_start_at_nothing() -> None:
    assert set(Fates().model_dump().values()) == {0}
