"""Tensors to payload bytes and back, trusting nothing that was read.

A payload is a safetensors file (no pickle anywhere) whose names are piece keys. A codec is how values are encoded in
it: "fp32" as they are, "bf16" rounded to nearest even (relative error at most 2^-8, half the bytes). Further codecs
are further rows of `_DTYPES` or, when they need side data such as scales, further branches of the two functions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import safetensors
import safetensors.torch
import torch

from diloco_runtime.errors import CorruptObject
from diloco_runtime.records import Fragment

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def encode_fragment(values: Mapping[str, torch.Tensor], codec: str) -> bytes:
    """Encode fp32 CPU tensors by piece key as payload bytes."""
    dtype = _DTYPES[codec]
    return safetensors.torch.save({key: tensor.to(dtype).contiguous() for key, tensor in values.items()})


def decode_fragment(data: bytes, fragment: Fragment, codec: str, source: str) -> dict[str, torch.Tensor]:
    """Decode payload bytes to fp32 CPU tensors by piece key.

    Raises `CorruptObject` naming `source` unless names, dtypes and shapes are exactly the fragment's and every value
    is finite.
    """
    try:
        found = safetensors.torch.load(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CorruptObject(f"{source} is not a safetensors payload: {error}") from error
    expected = {piece.key: piece.shape for piece in fragment.pieces}
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())[0]
        raise CorruptObject(f"{source} does not hold the tensors of its fragment (first difference: {odd})")
    values = {}
    for key, tensor in found.items():
        if tensor.dtype != _DTYPES[codec]:
            raise CorruptObject(f"{source}: {key} has dtype {tensor.dtype}, its record says {codec}")
        if tuple(tensor.shape) != expected[key]:
            raise CorruptObject(f"{source}: {key} has shape {tuple(tensor.shape)}, the run's is {expected[key]}")
        values[key] = tensor.to(torch.float32)
    if not all_finite(values):
        raise CorruptObject(f"{source} holds values that are not finite")
    return values


def roundtrip(values: Mapping[str, torch.Tensor], codec: str) -> Mapping[str, torch.Tensor]:
    """Return what a reader will decode from `encode_fragment(values, codec)`; the argument itself when lossless."""
    if codec == "fp32":
        return values
    return {key: tensor.to(_DTYPES[codec]).to(torch.float32) for key, tensor in values.items()}


def all_finite(values: Mapping[str, torch.Tensor]) -> bool:
    """Tell whether no value is NaN or infinite."""
    return all(_is_finite(tensor) for tensor in values.values())


def _is_finite(tensor: torch.Tensor) -> bool:
    # One value that is not finite makes the sum so, and a sum takes a third of the time and no memory; large values may
    # overflow it, so only then each is looked at.
    return math.isfinite(float(tensor.sum())) or bool(torch.isfinite(tensor).all())
