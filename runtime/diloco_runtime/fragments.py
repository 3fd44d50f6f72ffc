"""Which parameters are synchronised together: the fragment table, and reading and writing fragments of a model.

Pure apart from the tensors it is given. Names are clean: wrappers such as `torch.compile` or DDP leave no trace in a
key, and a parameter that is used twice (tied embeddings) appears once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from diloco_runtime.errors import ConfigError, IncompatibleModel
from diloco_runtime.records import Fragment, TensorPiece

_WRAPPERS = ("_orig_mod", "module")


def clean_name(name: str) -> str:
    """Return a parameter's name without the prefixes that wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def trained_parameters(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Return the floating-point parameters that require a gradient, by clean name, tied ones once.

    Raises `ConfigError` when there are none, or when two of them have the same clean name.
    """
    found: dict[str, torch.nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not (parameter.requires_grad and parameter.is_floating_point()):
            continue
        clean = clean_name(name)
        if clean in found:
            raise ConfigError(f"two parameters of the model are both called {clean}; rename one of them")
        found[clean] = parameter
    if not found:
        raise ConfigError("the model has no floating-point parameter that requires a gradient; nothing to train")
    return found


def embedding_names(model: torch.nn.Module) -> frozenset[str]:
    """Return the clean names of embedding weights: their rows are touched by few samples, so they merge by the mean."""
    identities = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag)}
    return frozenset(clean_name(name) for name, p in model.named_parameters() if id(p) in identities)


def build_table(
    shapes: Mapping[str, tuple[int, ...]], count: int, mean_names: frozenset[str] = frozenset()
) -> tuple[Fragment, ...]:
    """Cut tensors of the given shapes into `count` fragments of about equal size.

    Greedy bin packing, largest piece first, ties by name; a tensor larger than total / `count` is cut into row blocks
    first. The same input gives the same table everywhere. Raises `ConfigError` when there are fewer pieces than
    fragments.
    """
    total = sum(math.prod(shape) for shape in shapes.values())
    pieces = [
        piece
        for name in sorted(shapes)
        for piece in _cut(name, shapes[name], total / count, "mean" if name in mean_names else "rda")
    ]
    if len(pieces) < count:
        raise ConfigError(
            f"sync.fragments = {count}, but the model can be cut into {len(pieces)} pieces at most; lower it"
        )
    pieces.sort(key=lambda piece: (-piece.numel, piece.name, piece.start))
    bins: list[list[TensorPiece]] = [[] for _ in range(count)]
    sizes = [0] * count
    for piece in pieces:
        # Length breaks ties, so that pieces without elements cannot leave a bin empty.
        target = min(range(count), key=lambda i: (sizes[i], len(bins[i]), i))
        bins[target].append(piece)
        sizes[target] += piece.numel
    return tuple(Fragment(pieces=tuple(sorted(b, key=lambda p: (p.name, p.start)))) for b in bins)


def _cut(name: str, shape: tuple[int, ...], limit: float, merge: str) -> list[TensorPiece]:
    if not shape:
        return [TensorPiece(name=name, shape=(), start=0, stop=1, merge=merge)]
    rows, blocks = shape[0], max(1, math.ceil(math.prod(shape) / max(limit, 1.0)))
    blocks = min(blocks, max(rows, 1))
    edges = [rows * i // blocks for i in range(blocks + 1)]
    return [
        TensorPiece(name=name, shape=(stop - start, *shape[1:]), start=start, stop=stop, merge=merge)
        for start, stop in zip(edges[:-1], edges[1:], strict=True)
    ]


def table_of(model: torch.nn.Module, count: int) -> tuple[Fragment, ...]:
    """Return the fragment table of a model; see `build_table`."""
    shapes = {name: tuple(p.shape) for name, p in trained_parameters(model).items()}
    return build_table(shapes, count, embedding_names(model))


def check_table(mine: tuple[Fragment, ...], recorded: tuple[Fragment, ...], island: str) -> None:
    """Raise `IncompatibleModel`, naming the first difference, when this island's table is not the run's."""
    if mine == recorded:
        return
    ours = {piece.key: piece for fragment in mine for piece in fragment.pieces}
    theirs = {piece.key: piece for fragment in recorded for piece in fragment.pieces}
    for key in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(key), theirs.get(key)
        if a != b:
            here = f"shape {a.shape}, merge {a.merge}" if a else "absent"
            there = f"shape {b.shape}, merge {b.merge}" if b else "absent"
            raise IncompatibleModel(
                f"the model of island {island} is not the run's: {key} is {here} here and {there} in the run; "
                "make the code and versions on this island equal to those of the others"
            )
    raise IncompatibleModel(f"island {island} cuts the same tensors into other fragments than the run (code version?)")


def piece_view(parameters: Mapping[str, torch.Tensor], piece: TensorPiece) -> torch.Tensor:
    """Return the view of a parameter that a piece stands for, shape `piece.shape`."""
    tensor = parameters[piece.name]
    return tensor if not piece.shape else tensor[piece.start : piece.stop]


@torch.no_grad()
def read_fragment(parameters: Mapping[str, torch.Tensor], fragment: Fragment) -> dict[str, torch.Tensor]:
    """Copy a fragment out of the parameters: fp32 tensors on the CPU by piece key."""
    return {
        piece.key: piece_view(parameters, piece).detach().to("cpu", torch.float32, copy=True)
        for piece in fragment.pieces
    }


@torch.no_grad()
def write_fragment(
    parameters: Mapping[str, torch.Tensor], fragment: Fragment, values: Mapping[str, torch.Tensor]
) -> None:
    """Write fp32 values by piece key into the parameters, in place."""
    for piece in fragment.pieces:
        piece_view(parameters, piece).copy_(values[piece.key])


def assemble(
    table: tuple[Fragment, ...], fragments: Mapping[int, Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Join the pieces of all fragments into whole tensors by clean name, fp32."""
    rows: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for index, fragment in enumerate(table):
        for piece in fragment.pieces:
            rows.setdefault(piece.name, []).append((piece.start, fragments[index][piece.key]))
    joined = {}
    for name, parts in rows.items():
        parts.sort(key=lambda part: part[0])
        joined[name] = parts[0][1] if len(parts) == 1 else torch.cat([tensor for _, tensor in parts])
    return joined
