"""Payload bytes: what goes in comes out, bit for bit or to the stated error, and nothing else is believed."""

from __future__ import annotations

import itertools
import json
import random
import struct
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.codec import all_finite, decode_fragment, encode_fragment, roundtrip
from diloco_runtime.errors import CorruptObject, MissingPayload
from diloco_runtime.records import Fragment, PayloadRef, TensorPiece
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import OTHER_RUN_ID, RUN_ID, run_record

_numbers = itertools.count()
usual = settings(max_examples=30, deadline=None, derandomize=True, database=None)


def fragment_of_shapes(*shapes: tuple[int, ...]) -> Fragment:
    """Return a fragment of whole tensors `w0`, `w1` and so on."""
    return Fragment(
        pieces=tuple(
            TensorPiece(name=f"w{i}", shape=shape, start=0, stop=shape[0] if shape else 1, merge="rda")
            for i, shape in enumerate(shapes)
        )
    )


def random_values(fragment: Fragment, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {piece.key: torch.randn(piece.shape, generator=generator) for piece in fragment.pieces}


FRAGMENT = fragment_of_shapes((3, 2), ())
VALUES = random_values(FRAGMENT)
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


def payload(**tensors: torch.Tensor) -> bytes:
    """Return a payload of FRAGMENT in which some tensors are other ones (by name, `w0` or `w1`)."""
    keys = {piece.name: piece.key for piece in FRAGMENT.pieces}
    return safetensors.torch.save({**VALUES, **{keys[name]: tensor for name, tensor in tensors.items()}})


# ---- there and back -------------------------------------------------------------------------------------------------


@usual
@given(shapes=st.lists(st.lists(st.integers(0, 5), max_size=3).map(tuple), min_size=1, max_size=5))
@pytest.mark.parametrize("codec", ["fp32", "bf16"])
def test_names_and_shapes_come_back(codec: str, shapes: list[tuple[int, ...]]) -> None:
    fragment = fragment_of_shapes(*shapes)
    values = random_values(fragment)
    found = decode_fragment(encode_fragment(values, codec), fragment, codec, "x")
    expected = roundtrip(values, codec)
    assert {key: tuple(v.shape) for key, v in found.items()} == {p.key: p.shape for p in fragment.pieces}
    assert all(v.dtype == torch.float32 and torch.equal(v, expected[key]) for key, v in found.items())


@usual
@given(numbers=st.lists(FLOATS, min_size=1, max_size=20))
def test_fp32_is_exact_to_the_last_bit(numbers: list[float]) -> None:
    fragment = fragment_of_shapes((len(numbers),))
    values = {fragment.pieces[0].key: torch.tensor(numbers, dtype=torch.float32)}
    (found,) = decode_fragment(encode_fragment(values, "fp32"), fragment, "fp32", "x").values()
    # As integers: -0.0 and subnormal numbers count too.
    assert torch.equal(found.view(torch.int32), next(iter(values.values())).view(torch.int32))
    assert roundtrip(values, "fp32") is values


@usual
@given(numbers=st.lists(FLOATS.filter(lambda x: 1e-37 < abs(x) < 3e38), min_size=1, max_size=20))
def test_bf16_is_within_one_part_in_256(numbers: list[float]) -> None:
    value = torch.tensor(numbers, dtype=torch.float32)
    error = (roundtrip({"w": value}, "bf16")["w"].double() - value.double()).abs()
    assert bool((error <= value.double().abs() * 2.0**-8).all())


def test_bf16_rounds_to_nearest_and_ties_to_even() -> None:
    step = 2.0**-7  # between 1 and 2, bf16 has 7 bits after the point
    numbers = [1 + step / 2, 1 + 1.5 * step, 1 + 0.51 * step, 1 + 0.49 * step, -1 - step / 2]
    expected = [1.0, 1 + 2 * step, 1 + step, 1.0, -1.0]
    assert roundtrip({"w": torch.tensor(numbers)}, "bf16")["w"].tolist() == expected


def test_bf16_takes_half_the_bytes() -> None:
    fragment = fragment_of_shapes((1000,))
    sizes = {codec: len(encode_fragment(random_values(fragment), codec)) for codec in ("fp32", "bf16")}
    assert sizes["fp32"] - sizes["bf16"] == 2000


def test_what_is_encoded_need_not_be_contiguous_and_is_left_alone() -> None:
    fragment = fragment_of_shapes((3, 2))
    (key,) = (piece.key for piece in fragment.pieces)
    transposed = torch.arange(6.0).reshape(2, 3).T
    found = decode_fragment(encode_fragment({key: transposed}, "fp32"), fragment, "fp32", "x")[key]
    assert found.tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    found.zero_()
    assert transposed.sum() == 15.0


def test_the_same_values_give_the_same_bytes_in_any_order() -> None:
    turned = dict(reversed(list(VALUES.items())))
    assert encode_fragment(VALUES, "bf16") == encode_fragment(turned, "bf16")


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        ({"w0": torch.zeros(2, 3)}, r"w0\[0:3\] has shape \(2, 3\), the run's is \(3, 2\)"),
        ({"w0": torch.zeros(6)}, r"w0\[0:3\] has shape \(6,\)"),
        ({"w0": torch.zeros(4, 2)}, r"w0\[0:3\] has shape \(4, 2\)"),
        ({"w1": torch.zeros(1)}, r"w1\[0:1\] has shape \(1,\), the run's is \(\)"),
        ({"w0": torch.zeros(3, 2, dtype=torch.bfloat16)}, r"dtype torch.bfloat16, its record says fp32"),
        ({"w0": torch.zeros(3, 2, dtype=torch.float64)}, r"dtype torch.float64, its record says fp32"),
        ({"w1": torch.tensor(1)}, r"w1\[0:1\] has dtype torch.int64"),
    ],
)
def test_another_shape_or_dtype_is_refused(tensors: dict[str, torch.Tensor], says: str) -> None:
    with pytest.raises(CorruptObject, match=f"^some/key: .*{says}"):
        decode_fragment(payload(**tensors), FRAGMENT, "fp32", "some/key")


def test_a_record_that_names_another_codec_is_refused() -> None:
    with pytest.raises(CorruptObject, match="dtype torch.float32, its record says bf16"):
        decode_fragment(encode_fragment(VALUES, "fp32"), FRAGMENT, "bf16", "some/key")


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_single_value_that_is_not_finite_is_refused(codec: str, bad: float) -> None:
    values = {key: value.clone() for key, value in VALUES.items()}
    values["w0[0:3]"][2, 1] = bad
    assert not all_finite(values) and all_finite(VALUES)
    with pytest.raises(CorruptObject, match="some/key holds values that are not finite"):
        decode_fragment(encode_fragment(values, codec), FRAGMENT, codec, "some/key")


def test_what_overflows_in_bf16_shows_before_it_is_sent() -> None:
    largest = {"w": torch.tensor([torch.finfo(torch.float32).max])}
    assert all_finite(largest) and not all_finite(roundtrip(largest, "bf16"))


def test_missing_surplus_and_misnamed_tensors_are_refused() -> None:
    without = {key: value for key, value in VALUES.items() if key != "w1[0:1]"}
    for tensors, odd in [
        (without, "w1[0:1]"),
        ({**VALUES, "w2[0:1]": torch.zeros(1)}, "w2[0:1]"),
        ({**without, "w1[0:2]": VALUES["w1[0:1]"]}, "w1[0:1]"),
    ]:
        with pytest.raises(CorruptObject) as caught:
            decode_fragment(safetensors.torch.save(tensors), FRAGMENT, "fp32", "some/key")
        expected = f"some/key does not hold the tensors of its fragment (first difference: {odd})"
        assert str(caught.value) == expected


def with_header(header: dict[str, Any], body: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(body)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"x",
        b"\x80\x04K\x01.",
        struct.pack("<Q", 2**62) + b"{}",
        with_header({"w0[0:3]": {"dtype": "F4", "shape": [3, 2], "data_offsets": [0, 3]}}, 3),
        with_header({"w0[0:3]": {"dtype": "F32", "shape": [3, 2], "data_offsets": [0, 999]}}, 24),
        with_header({"w0[0:3]": {"dtype": "F32", "shape": [-3, 2], "data_offsets": [0, 24]}}, 24),
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptObject, match="some/key is not a safetensors payload: "):
        decode_fragment(data, FRAGMENT, "fp32", "some/key")


def test_damaged_bytes_give_a_fragment_or_a_refusal_and_nothing_else() -> None:
    """Without the hash: whatever bytes come, no other exception and no tensor of another shape gets through."""
    good, chance = encode_fragment(VALUES, "fp32"), random.Random(0)
    refused = 0
    for _ in range(3000):
        data = bytearray(good[: chance.randrange(len(good))] if chance.random() < 0.3 else good)
        for _ in range(chance.randrange(1, 4)):
            if data:
                data[chance.randrange(len(data))] = chance.randrange(256)
        try:
            found = decode_fragment(bytes(data), FRAGMENT, "fp32", "x")
        except CorruptObject:
            refused += 1
            continue
        assert {key: tuple(v.shape) for key, v in found.items()} == {p.key: p.shape for p in FRAGMENT.pieces}
        assert all_finite(found)
    assert 1000 < refused < 3000


# ---- through the blackboard: what a record promises ------------------------------------------------------------------


@pytest.fixture
def stored(clock, nonces) -> tuple[Blackboard, PayloadRef, bytes]:
    board = Blackboard(MemoryStore(f"unit/codec-{next(_numbers)}"), RUN_ID, clock, nonces)
    board.create_run(run_record())
    data = encode_fragment(VALUES, "fp32")
    return board, board.put_payload(board.keys.blob(1, "delta", 0, board.new_nonce()), data), data


def test_a_payload_comes_back_through_the_blackboard(stored: tuple[Blackboard, PayloadRef, bytes]) -> None:
    board, ref, data = stored
    found = decode_fragment(board.get_payload(ref), FRAGMENT, "fp32", ref.key)
    assert ref.size == len(data) and all(torch.equal(found[key], VALUES[key]) for key in VALUES)


def test_one_other_bit_is_another_hash(stored: tuple[Blackboard, PayloadRef, bytes]) -> None:
    """The lowest bit of a value: still a finite number of the right shape, only not the one that was sent."""
    board, ref, data = stored
    turned = bytearray(data)
    turned[-4] ^= 1
    decode_fragment(bytes(turned), FRAGMENT, "fp32", ref.key)
    board.store.put(ref.key, bytes(turned))
    with pytest.raises(CorruptObject, match=f"{ref.key} has another hash than its record says"):
        board.get_payload(ref)


def test_a_cut_payload_is_another_size(stored: tuple[Blackboard, PayloadRef, bytes]) -> None:
    board, ref, data = stored
    board.store.put(ref.key, data[:-1])
    with pytest.raises(CorruptObject, match=f"{ref.key} has {len(data) - 1} bytes, its record says {len(data)}"):
        board.get_payload(ref)


def test_an_absent_payload_is_missing_not_corrupt(stored: tuple[Blackboard, PayloadRef, bytes]) -> None:
    board, ref, _ = stored
    board.store.delete(ref.key)
    with pytest.raises(MissingPayload, match=f"{ref.key} is gone"):
        board.get_payload(ref)


@pytest.mark.parametrize("key", [f"{OTHER_RUN_ID}/blobs/x", f"{RUN_ID}/../{OTHER_RUN_ID}/x", f"{RUN_ID}//x", "/etc/x"])
def test_a_payload_outside_the_run_is_not_even_read(stored: tuple[Blackboard, PayloadRef, bytes], key: str) -> None:
    board, ref, _ = stored
    with pytest.raises(CorruptObject, match="leaves the run's prefix"):
        board.get_payload(ref.model_copy(update={"key": key}))
