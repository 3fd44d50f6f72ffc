"""The global model at a log position as a task: to measure it, or to use it."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import IncompatibleModel
from diloco_runtime.fragments import trained_parameters
from diloco_runtime.records import CommitRecord
from diloco_runtime.snapshot import load_state
from diloco_runtime.task import Task, TaskContext, load_task

CPU = torch.device("cpu")


@torch.no_grad()
def fill_parameters(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor], source: str) -> None:
    """Copy tensors by clean name into a model's trained parameters.

    Raises `IncompatibleModel`, naming the first difference and `source`, unless names and shapes are the same.
    """
    parameters = trained_parameters(model)
    for name in sorted(parameters.keys() | tensors.keys()):
        here = tuple(parameters[name].shape) if name in parameters else "absent"
        there = tuple(tensors[name].shape) if name in tensors else "absent"
        if here != there:
            raise IncompatibleModel(
                f"the model built here is not that of {source}: {name} is {here} here and {there} there; "
                "use the spec and the code that the run was started with"
            )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def load_model(
    board: Blackboard, config: RunConfig, root: str, seq: int | None = None, device: torch.device = CPU
) -> tuple[CommitRecord, Task]:
    """Build the run's task with the global parameters at log position `seq` (None: the newest) in its model.

    `root` is the directory of the spec: the task looks for its data there. Raises `ConfigError` when the task cannot be
    built, `IncompatibleModel` when its model is another one, `MissingPayload` when the position is not retained.
    """
    task = load_task(TaskContext(config, device, root, dict(config.model.options)))
    commit, tensors = load_state(board, seq)
    fill_parameters(task.model, tensors, f"run {board.run_id}")
    return commit, task
