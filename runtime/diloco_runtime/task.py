"""The one protocol between the runtime and what it trains.

A task is a model, a loss, and samples that can be read at random by (pass, unit, offset). That is all the runtime needs
to train, to share the data among islands that come and go, and to resume anywhere.
"""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from diloco_runtime.config import RunConfig
from diloco_runtime.errors import ConfigError


@dataclass(frozen=True)
class TaskContext:
    """What a task is built from."""

    config: RunConfig
    device: torch.device
    root: str
    """Directory that relative file names of the spec start from."""
    options: dict[str, Any] = field(default_factory=dict)
    """`[model.options]` of the spec, as they stand."""


class Task(Protocol):
    """A model, its loss and its data. Deterministic: the same context gives the same model and the same samples.

    A task may also have `fingerprint() -> str`, a hash of its data: see `fingerprint_of`.
    """

    model: torch.nn.Module
    """Initialised from `context.config.seed`; every floating-point parameter that requires a gradient is trained."""

    def num_units(self) -> int:
        """Return how many units a pass over the data is cut into (>= 1)."""

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        """Return the number of samples in the unit that is handed out `unit_index`-th in this pass (>= 1)."""

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> Any:
        """Return samples `[start, start + count)` of that unit, on `context.device`."""

    def batch_tokens(self, batch: Any) -> int:
        """Return how many tokens (or samples, if the task has no tokens) the batch holds."""

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of the batch, a scalar with a gradient."""

    def held_out_loss(self) -> float:
        """Return the loss of the model as it stands on data that `batch` never yields; restores train mode."""


def fingerprint_of(task: Task) -> str:
    """Return the hash of the task's data, or "" when the task has none to give.

    Islands share units by number, so islands with other data under the same numbers would read some tokens twice and
    others never; two fingerprints that differ show it. Asked for at every start, so it must not take long.
    """
    method = getattr(task, "fingerprint", None)
    return str(method()) if callable(method) else ""


def load_task(context: TaskContext) -> Task:
    """Build the task that `model.kind` names; raise `ConfigError` with the remedy when it cannot be."""
    kind = context.config.model.kind
    if kind == "gpt":
        from diloco_runtime.gpt_task import build_gpt_task

        return build_gpt_task(context)
    module_name, _, function_name = kind.partition(":")
    if context.root not in sys.path:
        sys.path.insert(0, os.path.abspath(context.root))
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f'model.kind = "{kind}": cannot import {module_name} from {context.root} ({error}); '
            "put the module beside the spec or install it"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f'model.kind = "{kind}": {module_name} has no function {function_name}')
    task: Task = function(context)
    missing = [
        name
        for name in ("model", "num_units", "unit_samples", "batch", "batch_tokens", "loss", "held_out_loss")
        if not hasattr(task, name)
    ]
    if missing:
        raise ConfigError(f'model.kind = "{kind}": the task it returned lacks {", ".join(missing)}')
    return task
