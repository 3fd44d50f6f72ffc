"""The built-in task: batches on text, a loss in nats per byte, and that it learns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from diloco_runtime.config import InnerConfig, RunConfig
from diloco_runtime.gpt_task import HELD_OUT_TOKENS, GptTask
from diloco_runtime.inner import build_optimizer, learning_rate, take_step
from diloco_runtime.task import TaskContext, fingerprint_of, load_task

CPU = torch.device("cpu")
TEXT = b"".join(b"%d bottles of beer on the wall, %d bottles of beer. " % (n, n) for n in range(99, 0, -1)) * 3


def make_task(root: Path, **inner: object) -> GptTask:
    (root / "song.txt").write_bytes(TEXT)
    config = RunConfig.model_validate(
        {
            "name": "song",
            "tokens": 10_000,
            "model": {"layers": 2, "heads": 2, "width": 32},
            "data": {"files": ["*.txt"], "unit_tokens": 1024},
            "inner": {"sequence_length": 32, "batch_size": 8, **inner},
        }
    )
    task = load_task(TaskContext(config, CPU, str(root)))
    assert isinstance(task, GptTask)
    return task


def test_targets_are_the_inputs_one_byte_later(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    inputs, targets = batch = task.batch(0, 1, 4, 8)
    assert inputs.shape == targets.shape == (8, 32)
    assert inputs.dtype == targets.dtype == torch.int64
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert all(bytes(row.tolist()) in TEXT for row in torch.cat((inputs, targets[:, -1:]), dim=1))
    assert task.batch_tokens(batch) == 8 * 32


def test_loss_is_the_mean_negative_log_probability_of_the_next_byte(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    inputs, targets = batch = task.batch(0, 0, 0, 3)
    logits = task.model(inputs).detach().double().numpy()
    odds = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.take_along_axis(odds, targets.numpy()[..., None], -1)
    assert task.loss(batch).item() == pytest.approx(-np.log(picked).mean(), abs=1e-5)


def test_held_out_loss_is_repeatable_and_restores_the_mode(tmp_path: Path) -> None:
    task = make_task(tmp_path)
    first = task.held_out_loss()
    assert task.model.training and first == task.held_out_loss()
    assert math.log(256) - 0.1 < first < math.log(256) + 0.7
    task.model.eval()
    task.held_out_loss()
    assert not task.model.training
    assert all(p.grad is None for p in task.model.parameters())


def test_held_out_loss_counts_every_held_out_byte_once(tmp_path: Path) -> None:
    """Here all held-out text fits: the loss is that of its samples taken one by one, the last batch being smaller."""
    task = make_task(tmp_path)
    held = TEXT[len(TEXT) - int(len(TEXT) * 0.05) :]
    assert len(held) < HELD_OUT_TOKENS
    rows = [held[i * 32 : (i + 1) * 32 + 1] for i in range((len(held) - 1) // 32)]
    assert len(rows) % 32 != 0
    losses = []
    for row in rows:
        tokens = torch.tensor([list(row)])
        losses.append(task.loss((tokens[:, :-1], tokens[:, 1:])).item())
    assert task.held_out_loss() == pytest.approx(np.mean(losses), abs=1e-5)


def test_bf16_changes_the_arithmetic_and_not_the_parameters(tmp_path: Path) -> None:
    exact, rough = make_task(tmp_path), make_task(tmp_path, precision="bf16")
    batch = exact.batch(0, 0, 0, 8)
    a, b = exact.loss(batch), rough.loss(batch)
    assert a.dtype == b.dtype == torch.float32
    assert a.item() != b.item() and a.item() == pytest.approx(b.item(), abs=0.03)
    b.backward()
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in rough.model.parameters() if p.grad is not None)


def batches(task: GptTask, count: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Read on from the first sample as a learner does, pass after pass, `count` batches of at most 8."""
    places = (
        (data_pass, unit, start)
        for data_pass in itertools.count()
        for unit in range(task.num_units())
        for start in range(0, task.unit_samples(data_pass, unit), 8)
    )
    for data_pass, unit, start in itertools.islice(places, count):
        yield task.batch(data_pass, unit, start, min(8, task.unit_samples(data_pass, unit) - start))


def test_a_hundred_steps_learn_the_song(tmp_path: Path) -> None:
    task, inner = make_task(tmp_path), InnerConfig(lr=1e-2, warmup=0.1)
    optimizer = build_optimizer(task.model, inner)
    before = task.held_out_loss()
    for step, batch in enumerate(batches(task, 100)):
        assert take_step(task, optimizer, batch, learning_rate(step / 100, inner), 1.0).finite
    assert task.held_out_loss() < before - 3.0


def test_two_islands_with_the_same_files_agree_on_model_data_and_fingerprint(tmp_path: Path) -> None:
    one, two = make_task(tmp_path), make_task(tmp_path)
    assert torch.equal(one.batch(3, 2, 1, 5)[0], two.batch(3, 2, 1, 5)[0])
    assert one.loss(one.batch(0, 0, 0, 2)).item() == two.loss(two.batch(0, 0, 0, 2)).item()
    assert fingerprint_of(one) == fingerprint_of(two) != ""


def test_a_task_without_fingerprint_has_an_empty_one() -> None:
    assert fingerprint_of(object()) == ""  # type: ignore[arg-type]
