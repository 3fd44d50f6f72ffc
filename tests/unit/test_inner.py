"""The inner loop's arithmetic: schedule, decay, clipping, and steps that do not happen."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diloco_runtime.config import InnerConfig
from diloco_runtime.errors import ConfigError
from diloco_runtime.inner import WARMUP_START, build_optimizer, learning_rate, take_step


class SmallTask:
    """`batch` is multiplied into the loss of a small network; only what `take_step` touches is here."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        generator = torch.Generator().manual_seed(0)
        for parameter in self.model.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)
        self.inputs = torch.randn(6, 3, generator=generator)

    def loss(self, batch: float) -> torch.Tensor:
        return (self.model(self.inputs) * batch).square().mean()

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"take_step must not touch {name}")


def state_of(task: SmallTask, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"parameters": task.model.state_dict(), "optimizer": optimizer.state_dict()})


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


# ---- schedule -------------------------------------------------------------------------------------------------------


@given(
    progress=st.floats(0, 1),
    warmup=st.floats(0, 0.99),
    ratio=st.floats(0, 1),
    schedule=st.sampled_from(["cosine", "constant"]),
)
def test_learning_rate_stays_between_its_limits(progress: float, warmup: float, ratio: float, schedule: Any) -> None:
    rate = learning_rate(progress, InnerConfig(lr=2.0, warmup=warmup, min_lr_ratio=ratio, schedule=schedule))
    least = min(WARMUP_START, ratio) if warmup > 0 else ratio
    assert 2.0 * least - 1e-9 <= rate <= 2.0 + 1e-9


def test_learning_rate_at_its_corners() -> None:
    inner = InnerConfig(lr=1.0, warmup=0.2, min_lr_ratio=0.1)
    assert learning_rate(0.0, inner) == pytest.approx(WARMUP_START) and WARMUP_START > 0
    assert learning_rate(0.1, inner) == pytest.approx((1 + WARMUP_START) / 2)
    assert learning_rate(0.2, inner) == 1.0
    assert learning_rate(0.6, inner) == pytest.approx(0.55)
    assert learning_rate(1.0, inner) == pytest.approx(0.1)
    assert learning_rate(1.7, inner) == learning_rate(1.0, inner)
    assert learning_rate(-0.3, inner) == learning_rate(0.0, inner)


def test_learning_rate_without_warmup_or_decay() -> None:
    assert learning_rate(0.0, InnerConfig(lr=0.5, warmup=0.0)) == 0.5
    constant = InnerConfig(lr=0.5, schedule="constant", min_lr_ratio=0.0, warmup=0.1)
    assert [learning_rate(p, constant) for p in (0.1, 0.5, 1.0)] == [0.5, 0.5, 0.5]


def test_learning_rate_rises_then_falls_without_a_jump() -> None:
    inner = InnerConfig(lr=1.0, warmup=0.05)
    rates = [learning_rate(i / 2000, inner) for i in range(2001)]
    assert rates[:101] == sorted(rates[:101])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert max(abs(a - b) for a, b in zip(rates[:-1], rates[1:], strict=True)) < 0.011


# ---- optimizer ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_tensors_of_two_or_more_dimensions_decay(name: Any) -> None:
    task = SmallTask()
    optimizer = build_optimizer(task.model, InnerConfig(optimizer=name, lr=0.1, weight_decay=0.5))
    before = copy.deepcopy(task.model.state_dict())
    take_step(task, optimizer, 0.0, 0.1, 0.0)  # a loss of zero: what moves is moved by decay
    after = task.model.state_dict()
    assert torch.equal(after["0.bias"], before["0.bias"]) and torch.equal(after["2.bias"], before["2.bias"])
    assert torch.allclose(after["0.weight"], before["0.weight"] * 0.95)


def test_frozen_parameters_and_models_of_vectors_only_are_fine() -> None:
    model = torch.nn.Linear(3, 3)
    model.weight.requires_grad_(False)
    optimizer = build_optimizer(model, InnerConfig())
    assert [p is model.bias for group in optimizer.param_groups for p in group["params"]] == [True]


def test_adamw_is_adamw() -> None:
    """Three steps against the update rule written out (Loshchilov & Hutter, arXiv 1711.05101)."""
    task = SmallTask()
    inner = InnerConfig(betas=(0.8, 0.9), weight_decay=0.2)
    optimizer = build_optimizer(task.model, inner)
    parameter = task.model[0].weight
    value = parameter.detach().double().clone()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step in (1, 2, 3):
        gradient = torch.autograd.grad(task.loss(1.0), parameter)[0].double()
        take_step(task, optimizer, 1.0, 0.01 * step, 0.0)
        first, second = 0.8 * first + 0.2 * gradient, 0.9 * second + 0.1 * gradient**2
        scaled = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-8)
        value = value * (1 - 0.01 * step * 0.2) - 0.01 * step * scaled
        assert torch.allclose(parameter.double(), value, atol=1e-6)


# ---- one step -------------------------------------------------------------------------------------------------------


def test_sgd_step_moves_along_the_gradient_by_the_given_rate() -> None:
    task = SmallTask()
    optimizer = build_optimizer(task.model, InnerConfig(optimizer="sgd", lr=9.0, weight_decay=0.0))
    before = [p.detach().clone() for p in task.model.parameters()]
    gradients = torch.autograd.grad(task.loss(1.0), list(task.model.parameters()))
    result = take_step(task, optimizer, 1.0, 0.25, 0.0)
    assert result.finite and result.loss == pytest.approx(float(SmallTask().loss(1.0).detach()))
    for parameter, start, gradient in zip(task.model.parameters(), before, gradients, strict=True):
        assert torch.allclose(parameter, start - 0.25 * gradient)


def test_clipping_bounds_the_step_and_zero_turns_it_off() -> None:
    def moved(grad_clip: float) -> float:
        task = SmallTask()
        optimizer = build_optimizer(task.model, InnerConfig(optimizer="sgd", weight_decay=0.0))
        before = torch.cat([p.detach().flatten().clone() for p in task.model.parameters()])
        take_step(task, optimizer, 10.0, 1.0, grad_clip)
        return float((torch.cat([p.detach().flatten() for p in task.model.parameters()]) - before).norm())

    free = moved(0.0)
    assert free > 2.0
    assert moved(0.5) == pytest.approx(0.5, rel=1e-3)
    assert moved(10 * free) == pytest.approx(free, rel=1e-6)


def test_gradients_do_not_add_up_over_steps() -> None:
    once, twice = SmallTask(), SmallTask()
    for task in (once, twice):
        optimizer = build_optimizer(task.model, InnerConfig(optimizer="sgd", weight_decay=0.0))
        if task is twice:
            task.loss(5.0).backward()  # left over from something else
        take_step(task, optimizer, 1.0, 0.1, 0.0)
    assert same(once.model.state_dict(), twice.model.state_dict())


def poison_loss(task: SmallTask) -> float:
    return math.nan


def overflow_loss(task: SmallTask) -> float:
    return 1e30


def poison_one_gradient(task: SmallTask) -> float:
    """A finite loss whose gradient is not: the square root has no slope at zero."""
    weight = task.model[0].weight
    plain = task.loss
    task.__dict__["loss"] = lambda batch: plain(batch) + (weight[0, 0] - weight[0, 0].detach()).abs().sqrt()
    return 1.0


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("spoil", [poison_loss, overflow_loss, poison_one_gradient])
def test_a_step_that_is_not_finite_leaves_everything_bitwise_as_it_was(
    name: Any, spoil: Callable[[SmallTask], float]
) -> None:
    task = SmallTask()
    optimizer = build_optimizer(task.model, InnerConfig(optimizer=name))
    for _ in range(3):
        assert take_step(task, optimizer, 1.0, 0.01, 1.0).finite
    before = state_of(task, optimizer)
    plain, batch = task.loss, spoil(task)
    result = take_step(task, optimizer, batch, 0.02, 1.0)
    assert not result.finite
    assert same(state_of(task, optimizer), before)
    assert math.isfinite(result.loss) == (spoil is poison_one_gradient)
    # Nothing of it is left for the next step either.
    task.__dict__["loss"] = plain
    twin = SmallTask()
    twin_optimizer = build_optimizer(twin.model, InnerConfig(optimizer=name))
    for _ in range(3):
        take_step(twin, twin_optimizer, 1.0, 0.01, 1.0)
    for one, its in ((task, optimizer), (twin, twin_optimizer)):
        assert take_step(one, its, 1.0, 0.02, 1.0).finite
    assert same(state_of(task, optimizer), state_of(twin, twin_optimizer))


def test_the_same_steps_twice_are_bitwise_equal() -> None:
    runs = []
    for _ in range(2):
        task = SmallTask()
        optimizer = build_optimizer(task.model, InnerConfig())
        for step in range(5):
            take_step(task, optimizer, 1.0 + step, 0.01, 1.0)
        runs.append(state_of(task, optimizer))
    assert same(*runs)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda task: task.model(task.inputs), r"shape \(6, 1\); it must return a scalar"),
        (lambda task: task.model(task.inputs).mean().detach(), r"without a gradient; it must return a scalar"),
    ],
)
def test_a_task_whose_loss_is_no_loss_is_told_so(wrong: Callable[[SmallTask], torch.Tensor], says: str) -> None:
    task = SmallTask()
    task.__dict__["loss"] = lambda batch: wrong(task)
    with pytest.raises(ConfigError, match=says):
        take_step(task, build_optimizer(task.model, InnerConfig()), 1.0, 0.1, 1.0)
