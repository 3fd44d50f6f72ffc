"""The arithmetic of a whole run against plain torch: real processes in virtual time, nothing of them replaced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from diloco_cli.simulation.run import Simulation, Site
from diloco_runtime.config import RunConfig
from diloco_runtime.snapshot import load_state
from diloco_runtime.task import Task
from tests.support.simulated import finished
from tests.support.tasks import ConstantGradientTask, LinearTask


def config(preset: str = "diloco", tokens: int = 400, **tables: Any) -> RunConfig:
    inner = {
        "optimizer": "sgd",
        "lr": 0.05,
        "schedule": "constant",
        "warmup": 0.0,
        "weight_decay": 0.0,
        "grad_clip": 0.0,
    }
    return RunConfig.model_validate(
        {
            "name": "numerics",
            "tokens": tokens,
            "model": {"kind": "tests.support.tasks:linear"},
            "inner": {**inner, "batch_size": 8, **tables.get("inner", {})},
            "outer": tables.get("outer", {}),
            "sync": {"preset": preset, "heartbeat_every": 1.0, "snapshot_every": 1, **tables.get("sync", {})},
        }
    )


def whole_run(settings: RunConfig, build: Callable[[], Task], steps: Mapping[str, float], seed: int = 0) -> Simulation:
    """Train from the beginning to the end; `steps`: seconds per inner step of every island."""
    run = Simulation(settings, build, {name: Site(seconds) for name, seconds in steps.items()}, seed)
    run.train()
    log = finished(run)
    assert {entry.incarnation for commit in log for entry in commit.merged} == {1}
    return run


def state(run: Simulation, seq: int) -> dict[str, torch.Tensor]:
    return load_state(run.observer(), seq)[1]


def batches(run: Simulation, name: str) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what an island trained on, in order."""
    task = run.machines[name].task
    assert isinstance(task, LinearTask)
    slices = list(task.read)
    return [task.batch(*part) for part in slices]


def local_step(weights: dict[str, torch.Tensor], batch: tuple[torch.Tensor, torch.Tensor], lr: float) -> dict[str, Any]:
    """One plain SGD step on a fresh model."""
    model = LinearTask().model
    model.load_state_dict(weights)
    loss = ((model(batch[0]) - batch[1]) ** 2).mean()
    loss.backward()
    return {name: (p - lr * p.grad).detach() for name, p in model.named_parameters() if p.grad is not None}


def test_the_global_model_is_the_mean_of_the_locals() -> None:
    settings = config(
        sync={"sync_every": 1, "min_quorum": 2, "fragments": 1}, outer={"lr": 1.0, "momentum": 0.0, "merge": "mean"}
    )
    run = whole_run(settings, LinearTask, {"a": 1.0, "b": 1.0})
    read = {name: batches(run, name) for name in run.machines}
    for seq in range(1, 6):
        before = state(run, seq - 1)
        locals_ = [local_step(before, read[name][seq - 1], 0.05) for name in read]
        for key, value in state(run, seq).items():
            torch.testing.assert_close(value, (locals_[0][key] + locals_[1][key]) / 2, atol=1e-6, rtol=0)


@pytest.mark.parametrize("merge", ["mean", "rda"])
@pytest.mark.parametrize("preset", ["diloco", "decoupled"])
def test_the_same_delta_from_more_islands_gives_the_same_global(merge: str, preset: str) -> None:
    found = []
    for count in (1, 2, 3):
        settings = config(
            preset,
            tokens=60 * count,
            sync={"sync_every": 4, "min_quorum": count, "fragments": 1, "overlap_steps": 0, "pace": "each"},
            outer={"lr": 0.7, "momentum": 0.5, "merge": merge},
        )
        run = whole_run(settings, ConstantGradientTask, {f"i{n}": 1.0 for n in range(count)})
        assert len(run.log()[1].merged) == count
        found.append(state(run, 1))
    for other in found[1:]:
        for key, value in other.items():
            torch.testing.assert_close(value, found[0][key], atol=1e-6, rtol=0)


def test_half_the_outer_rate_is_half_the_way() -> None:
    ways = []
    for lr in (0.8, 0.4):
        settings = config(sync={"sync_every": 4, "min_quorum": 2}, outer={"lr": lr, "momentum": 0.5})
        run = whole_run(settings, LinearTask, {"a": 1.0, "b": 1.0})
        start, end = state(run, 0), state(run, 1)
        ways.append({key: end[key] - start[key] for key in start})
    for key, value in ways[0].items():
        torch.testing.assert_close(ways[1][key], value / 2, atol=1e-6, rtol=1e-5)
        assert float(value.abs().max()) > 1e-4


def test_names_of_islands_do_not_matter() -> None:
    hashes = []
    for names in (("a", "b"), ("b", "a")):
        settings = config(sync={"sync_every": 4, "min_quorum": 2, "heartbeat_every": 1.0})
        run = whole_run(settings, LinearTask, dict.fromkeys(names, 1.0))
        hashes.append([commit.params[0].sha256 for commit in run.log()])
    assert hashes[0] == hashes[1]
    moved = hashes[0][:-1]  # after the drain nobody has stepped: the final merge is empty
    assert len(set(moved)) == len(moved)


def test_plain_diloco_is_reproduced() -> None:
    """AdamW inner, Nesterov 0.7/0.9 outer, two islands, five outer steps, against a plain loop."""
    steps, outer_steps = 10, 5
    settings = config(
        tokens=2 * 8 * steps * outer_steps,
        inner={"optimizer": "adamw", "lr": 0.01, "grad_clip": 1.0, "weight_decay": 0.1},
        sync={"sync_every": steps, "min_quorum": 2},
        outer={"lr": 0.7, "momentum": 0.9},
    )
    run = whole_run(settings, LinearTask, {"a": 1.0, "b": 1.0})
    read = {name: batches(run, name) for name in run.machines}
    models = {name: LinearTask().model for name in read}
    inner = {name: adamw(models[name]) for name in read}
    shared = [p.detach().clone().requires_grad_() for p in LinearTask().model.parameters()]
    outer = torch.optim.SGD(shared, lr=0.7, momentum=0.9, nesterov=True)
    for outer_step in range(outer_steps):
        for name, model in models.items():
            for x, y in read[name][outer_step * steps : (outer_step + 1) * steps]:
                inner[name].zero_grad()
                ((model(x) - y) ** 2).mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                inner[name].step()
        for index, parameter in enumerate(shared):
            deltas = [parameter.detach() - list(m.parameters())[index].detach() for m in models.values()]
            parameter.grad = torch.stack(deltas).mean(0)
        outer.step()
        for model in models.values():
            for mine, parameter in zip(model.parameters(), shared, strict=True):
                mine.data.copy_(parameter.data)
        ours = state(run, outer_step + 1)
        for (name, _), parameter in zip(LinearTask().model.named_parameters(), shared, strict=True):
            torch.testing.assert_close(ours[name], parameter.detach(), atol=1e-5, rtol=0)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    others = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))


def test_the_barrier_preset_is_repeatable() -> None:
    losses = []
    for _ in range(2):
        settings = config(tokens=800, sync={"sync_every": 5, "min_quorum": 3})
        run = whole_run(settings, LinearTask, {"a": 1.0, "b": 1.3, "c": 0.7})
        task = LinearTask()
        task.model.load_state_dict(load_state(run.observer())[1])
        losses.append(task.held_out_loss())
    assert losses[0] == losses[1]
    assert losses[0] < LinearTask().held_out_loss()
