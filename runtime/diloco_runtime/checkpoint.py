"""Inner checkpoints: the optimizer's moments, the data position and the random state of one learner life.

Parameters are not in it: a life starts from the newest committed version of every fragment. A checkpoint belongs to an
island, not to a life, so a later life resumes from it; payload first, marker last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import CorruptObject, MissingPayload
from diloco_runtime.records import CheckpointRecord, CommitRecord, Position

_RNG, _CUDA_RNG = "rng", "rng-cuda"

LIVES_SEARCHED = 8
"""How many earlier lives are searched for a checkpoint: one that crashes before its first has none."""


@torch.no_grad()
def capture(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the optimizer's state to CPU tensors named `<parameter>|<slot>`, and the random states."""
    tensors = {_RNG: torch.get_rng_state().clone()}
    if torch.cuda.is_available():
        tensors[_CUDA_RNG] = torch.cuda.get_rng_state()
    for name, parameter in parameters.items():
        for slot, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{name}|{slot}"] = value.detach().to("cpu", copy=True).contiguous()
            elif isinstance(value, int | float):
                tensors[f"{name}|{slot}"] = torch.tensor(float(value), dtype=torch.float64)
    return tensors


@torch.no_grad()
def restore(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Put a captured state back. Raises `CorruptObject` when a moment has another shape than its parameter."""
    for key, value in tensors.items():
        name, _, slot = key.partition("|")
        if key == _RNG:
            torch.set_rng_state(value)
        elif key == _CUDA_RNG:
            if torch.cuda.is_available():
                torch.cuda.set_rng_state(value)
        elif name in parameters:
            parameter = parameters[name]
            if value.dim() and value.shape != parameter.shape:
                raise CorruptObject(f"checkpoint: {key} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            # The step counter stays on the CPU, where the optimizer keeps it; moments live beside their parameter.
            optimizer.state[parameter][slot] = value.clone() if slot == "step" else value.to(parameter.device)


@dataclass(frozen=True)
class Resume:
    """Where a new life of an island continues."""

    position: Position
    checkpoint: CheckpointRecord | None
    tensors: dict[str, torch.Tensor]

    def describe(self) -> str:
        """Say in one line, for the log, what this life continues from."""
        where = f"data position {self.position.data_pass}/{self.position.unit_index}/{self.position.offset}"
        if self.checkpoint is None:
            return f"{where}, no inner checkpoint"
        number = f"{self.checkpoint.incarnation}/{self.checkpoint.number}"
        return f"{where}, inner checkpoint {number} of step {self.checkpoint.step}"


def find_resume(board: Blackboard, island: str, incarnation: int, head: CommitRecord, fragments: int) -> Resume:
    """Return the newest usable checkpoint of earlier lives, and the data position from which nothing is trained
    twice (but for an offer of a dead life that is still on its way: PROTOCOL 12.3).

    The position is the latest of the checkpoint's, that of the newest merged offer, and those of offers of earlier
    lives that may still be merged: without the others, samples whose effect is in the global model would be trained
    again.
    """
    checkpoint, tensors = None, dict[str, torch.Tensor]()
    lives = range(incarnation - 1, max(0, incarnation - 1 - LIVES_SEARCHED), -1)
    for life in lives:
        found = _newest_in_life(board, island, life)
        if found is not None:
            checkpoint, tensors = found
            break
    positions = [
        offer.data_to
        for seq in range(head.seq + 1, head.seq + fragments + 1)
        for life in lives
        if (offer := board.read_offer(seq, island, life)) is not None
    ]
    if island in head.positions:
        positions.append(head.positions[island])
    if checkpoint is not None:
        positions.append(checkpoint.position)
    return Resume(max(positions, key=Position.order, default=Position()), checkpoint, tensors)


def _newest_in_life(
    board: Blackboard, island: str, life: int
) -> tuple[CheckpointRecord, dict[str, torch.Tensor]] | None:
    numbers = {key.split("/")[-2] for key in board.store.list(board.keys.checkpoints(island, life))}
    for number in sorted((int(n) for n in numbers if n.isdigit()), reverse=True):
        try:
            record = board.read_checkpoint(island, life, number)
            if record is None:
                continue
            return record, safetensors.torch.load(board.get_payload(record.payload))
        except (CorruptObject, MissingPayload, safetensors.SafetensorError):
            # An older complete one is better than none; the moments are a head start, not the model.
            continue
    return None
