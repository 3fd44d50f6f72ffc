"""The built-in task: next-byte prediction with the GPT on text files."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from diloco_runtime.gpt import VOCABULARY, build_gpt
from diloco_runtime.task import Task, TaskContext
from diloco_runtime.text_data import TextData

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, both int64 `(samples, sequence length)`: targets are the inputs one byte later."""

HELD_OUT_TOKENS = 65_536
"""Most tokens that one held-out loss looks at: a few seconds on one CPU core for a model of a million parameters."""

HELD_OUT_BATCH = 32


class GptTask:
    """Model, loss and data of a run with `model.kind = "gpt"`."""

    def __init__(self, context: TaskContext) -> None:
        config = context.config
        self._device = context.device
        self._autocast = config.inner.precision == "bf16"
        self._data = TextData(context.root, config.data, config.inner.sequence_length, config.seed)
        self._held_out: npt.NDArray[np.uint8] | None = None
        self.model: torch.nn.Module = build_gpt(config.model, config.inner.sequence_length, config.seed)
        self.model.to(context.device)

    def num_units(self) -> int:
        return self._data.num_units()

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return self._data.unit_samples(data_pass, unit_index)

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> Batch:
        return self._to_batch(self._data.samples(data_pass, unit_index, start, count))

    def batch_tokens(self, batch: Batch) -> int:
        return batch[1].numel()

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy in nats per byte, fp32."""
        inputs, targets = batch
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._autocast):
            logits = self.model(inputs)
        return F.cross_entropy(logits.float().view(-1, VOCABULARY), targets.reshape(-1))

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Return nats per byte over a fixed, evenly spread part of the held-out text."""
        if self._held_out is None:
            self._held_out = self._data.held_out(HELD_OUT_TOKENS)
        was_training = self.model.training
        self.model.eval()
        try:
            total = 0.0
            for start in range(0, len(self._held_out), HELD_OUT_BATCH):
                rows = self._held_out[start : start + HELD_OUT_BATCH]
                total += float(self.loss(self._to_batch(rows))) * len(rows)
            return total / len(self._held_out)
        finally:
            self.model.train(was_training)

    def fingerprint(self) -> str:
        return self._data.fingerprint()

    def _to_batch(self, rows: npt.NDArray[np.uint8]) -> Batch:
        tokens = torch.from_numpy(rows.astype(np.int64)).to(self._device)
        return tokens[:, :-1], tokens[:, 1:]


def build_gpt_task(context: TaskContext) -> Task:
    """Build the task; raise `ConfigError` when the files or sizes in the spec cannot be used."""
    return GptTask(context)
