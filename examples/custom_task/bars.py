"""A task of your own: which way does the bar in a noisy little picture lean? See README.md for the protocol."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from diloco_runtime.errors import ConfigError
from diloco_runtime.task import TaskContext

SIDE = 12  # pixels
DIRECTIONS = 4  # 0, 45, 90 and 135 degrees
UNITS = 1024
HELD_OUT = 2048  # pictures

Batch = tuple[torch.Tensor, torch.Tensor]  # pictures (n, 1, SIDE, SIDE) float32, directions (n,) int64


class BarsTask:
    """A convolutional classifier and an endless supply of pictures, every one a function of its number."""

    def __init__(self, context: TaskContext, channels: int, noise: float) -> None:
        self.model = build_model(channels, context.config.seed).to(context.device)
        self._device = context.device
        self._seed = context.config.seed
        self._noise = noise
        # One picture counts as one token, so the size of a unit is the spec's.
        self._unit_samples = context.config.data.unit_tokens
        self._unit: tuple[int, int, Batch] | None = None

    def num_units(self) -> int:
        return UNITS

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return self._unit_samples

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> Batch:
        if self._unit is None or self._unit[:2] != (data_pass, unit_index):
            drawn = draw(f"train {self._seed} {data_pass} {unit_index}", self._unit_samples, self._noise)
            self._unit = (data_pass, unit_index, drawn)
        pictures, directions = self._unit[2]
        return pictures[start : start + count].to(self._device), directions[start : start + count].to(self._device)

    def batch_tokens(self, batch: Batch) -> int:
        return len(batch[1])

    def loss(self, batch: Batch) -> torch.Tensor:
        pictures, directions = batch
        return F.cross_entropy(self.model(pictures), directions)

    @torch.no_grad()
    def held_out_loss(self) -> float:
        pictures, directions = draw(f"held out {self._seed}", HELD_OUT, self._noise)
        was_training = self.model.training
        self.model.eval()
        loss = float(self.loss((pictures.to(self._device), directions.to(self._device))))
        self.model.train(was_training)
        return loss


def build_model(channels: int, seed: int) -> nn.Module:
    """Return the classifier, initialised from `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, channels, 3, stride=2),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * channels * 3 * 3, DIRECTIONS),
        )


def draw(key: str, count: int, noise: float) -> Batch:
    """Draw `count` pictures that depend on `key` alone: a bar in one of four directions, somewhere, under noise."""
    seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.PCG64(seed))
    directions = random.integers(0, DIRECTIONS, count)
    angles = directions * (np.pi / DIRECTIONS) + random.normal(0.0, 0.1, count)
    centres = random.uniform(3.0, SIDE - 4.0, (2, count, 1, 1))
    y, x = np.mgrid[:SIDE, :SIDE]
    dx, dy = x - centres[0], y - centres[1]
    cos, sin = np.cos(angles)[:, None, None], np.sin(angles)[:, None, None]
    along, across = dx * cos + dy * sin, dy * cos - dx * sin
    pictures = np.exp(-(across**2)) * (np.abs(along) < 4.0) + random.normal(0.0, noise, (count, SIDE, SIDE))
    return torch.from_numpy(pictures[:, None].astype(np.float32)), torch.from_numpy(directions.astype(np.int64))


def build(context: TaskContext) -> BarsTask:
    """Build the task from `[model.options]`: `channels` (default 8) and `noise` (default 0.5)."""
    options = {"channels": 8, "noise": 0.5, **context.options}
    if unknown := sorted(options.keys() - {"channels", "noise"}):
        raise ConfigError(f"[model.options] {unknown[0]}: the bars task knows channels and noise only")
    return BarsTask(context, int(options["channels"]), float(options["noise"]))
