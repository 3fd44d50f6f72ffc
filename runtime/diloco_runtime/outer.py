"""Merging outer deltas and the outer optimizer. Pure arithmetic on fp32 tensors by piece key; no I/O, no clock.

An outer delta is `anchor - local` (a pseudo-gradient: the outer optimizer descends along it). Formulas: Decoupled
DiLoCo, arXiv 2604.21428 (weights, radial-directional averaging); DiLoCo, arXiv 2311.08105 (Nesterov momentum).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from diloco_runtime.records import Fragment

Tensors = Mapping[str, torch.Tensor]

SHORT_DIRECTION = 0.1
"""RDA falls back to the mean when the mean unit vector is shorter than this over sqrt(M): the deltas point nowhere in
common (M random directions give 1/sqrt(M)), and a direction that is noise must not be given full length."""


def merge_weights(offers: Sequence[tuple[int, int]], scheme: str) -> list[float]:
    """Return each offer's share (summing to 1) from its (tokens, inner steps).

    "paper": tokens * (tokens / inner steps), which favours islands with large batches quadratically; "tokens": tokens.
    """
    raw = [float(tokens) * (tokens / steps if scheme == "paper" else 1.0) for tokens, steps in offers]
    total = math.fsum(raw)
    if total <= 0.0:
        return [1.0 / len(raw)] * len(raw)
    return [value / total for value in raw]


class Merger:
    """Combines deltas of one fragment as they are added; holds two sums, never the deltas.

    The result depends on the order of addition in the last bits, so callers add in an order that every replay repeats.
    """

    def __init__(self, fragment: Fragment, method: str) -> None:
        self._fragment = fragment
        self._radial = {
            piece.key for piece in fragment.pieces if method == "rda" and piece.merge == "rda" and piece.numel > 1
        }
        self._sums: dict[str, torch.Tensor] = {}
        self._units: dict[str, torch.Tensor] = {}
        self._norms: dict[str, float] = {}
        self._count = 0

    def add(self, delta: Tensors, weight: float) -> None:
        """Add one delta (fp32 by piece key) with its share."""
        self._count += 1
        for piece in self._fragment.pieces:
            key, value = piece.key, delta[piece.key]
            self._accumulate(self._sums, key, value, weight)
            if key in self._radial:
                norm = float(torch.linalg.vector_norm(value, dtype=torch.float64))
                self._norms[key] = self._norms.get(key, 0.0) + weight * norm
                # A vector this short has no direction in fp32, and its inverse no finite value.
                scale = weight / norm if norm >= torch.finfo(torch.float32).tiny else 0.0
                self._accumulate(self._units, key, value, scale)

    @staticmethod
    def _accumulate(into: dict[str, torch.Tensor], key: str, value: torch.Tensor, scale: float) -> None:
        if key in into:
            into[key].add_(value, alpha=scale)
        else:
            into[key] = value * scale

    def result(self) -> dict[str, torch.Tensor]:
        """Return the merged delta: per piece the weighted mean, or (mean norm) * unit(mean of unit deltas)."""
        merged = dict(self._sums)
        if self._count < 2:
            return merged
        for key in self._radial:
            length = float(torch.linalg.vector_norm(self._units[key], dtype=torch.float64))
            if length >= SHORT_DIRECTION / math.sqrt(self._count):
                merged[key] = self._units[key] * (self._norms[key] / length)
        return merged


def length(delta: Tensors) -> float:
    """Return the Euclidean norm of a delta as a whole, in double precision."""
    return math.hypot(*(float(torch.linalg.vector_norm(value, dtype=torch.float64)) for value in delta.values()))


def merge(fragment: Fragment, method: str, deltas: Iterable[tuple[Tensors, float]]) -> dict[str, torch.Tensor]:
    """Merge (delta, share) pairs of one fragment."""
    merger = Merger(fragment, method)
    for delta, weight in deltas:
        merger.add(delta, weight)
    return merger.result()


def outer_step(
    params: Tensors, buffer: Tensors | None, delta: Tensors, lr: float, momentum: float
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor] | None]:
    """Return new parameters and momentum buffer: `b = m*b + d; p = p - lr*(d + m*b)`, torch's Nesterov SGD.

    With `momentum` 0 it is `p - lr*d` and the buffer is returned as it was (the final merges of a run use that: a
    buffer built for a long run would push the last parameters beyond what the last deltas support).
    """
    if momentum == 0.0:
        kept = None if buffer is None else dict(buffer)
        return {key: params[key] - lr * delta[key] for key in params}, kept
    new_params, new_buffer = {}, {}
    for key, value in params.items():
        d = delta[key]
        b = d.clone() if buffer is None else buffer[key] * momentum + d
        new_buffer[key] = b
        new_params[key] = value - lr * (d + momentum * b)
    return new_params, new_buffer
