"""A task whose inner steps take a set time without using the CPU, so that many islands fit on a small machine.

Copied beside a run's spec. Options: seconds per sample; seconds that an island waits before its model is built, and
before its first inner step, by name.
"""

from __future__ import annotations

import os
import time

import torch

from diloco_runtime.task import TaskContext


class TimedTask:
    """Least squares on numbered samples."""

    def __init__(self, sample_seconds: float, before_first_step: float) -> None:
        self.model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(6)))
        for index, parameter in enumerate(self.model.parameters()):
            parameter.data = torch.sin(torch.arange(parameter.numel()) + index).reshape(parameter.shape)
        self._sample_seconds = sample_seconds
        self._wait = before_first_step

    def num_units(self) -> int:
        return 4096

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return 256

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> torch.Tensor:
        numbers = torch.arange(unit_index * 256 + start, unit_index * 256 + start + count)
        return torch.sin(numbers[:, None] * torch.arange(1, 5))

    def batch_tokens(self, batch: torch.Tensor) -> int:
        return len(batch)

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self._wait + self._sample_seconds * len(batch))  # stands for an accelerator at work
        self._wait = 0.0
        return ((self.model(batch) - batch) ** 2).mean()

    def held_out_loss(self) -> float:
        with torch.no_grad():
            batch = self.batch(0, 4095, 0, 256)
            return float(((self.model(batch) - batch) ** 2).mean())


def build(context: TaskContext) -> TimedTask:
    """Build the task for the island that this process works for."""
    island, options = os.environ.get("DILOCO_ISLAND", ""), context.options
    time.sleep(float(options["build"].get(island, 0.0)))  # this island is late on purpose
    return TimedTask(float(options["sample_seconds"]), float(options["first"].get(island, 0.0)))
