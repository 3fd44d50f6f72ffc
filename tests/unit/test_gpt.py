"""The built-in model: causal, deterministic, named cleanly, alone with its random state."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from diloco_cli.estimate import gpt_parameters
from diloco_runtime.config import ModelConfig
from diloco_runtime.errors import ConfigError
from diloco_runtime.fragments import embedding_names, trained_parameters
from diloco_runtime.gpt import build_gpt, rotate

SMALL = ModelConfig(layers=2, heads=2, width=16)
UNTIED = ModelConfig(layers=2, heads=2, width=16, tied_embeddings=False)


def tokens(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(seed))


def test_same_seed_same_model_and_another_seed_another() -> None:
    first, again, other = (trained_parameters(build_gpt(SMALL, 8, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)


def test_building_neither_reads_nor_moves_the_global_random_state() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = build_gpt(SMALL, 8, seed=3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    second = build_gpt(SMALL, 8, seed=3)
    assert torch.equal(first.blocks[0].attention.qkv.weight, second.blocks[0].attention.qkv.weight)


@pytest.mark.parametrize("config", [SMALL, UNTIED, ModelConfig()])
def test_parameter_count_is_what_the_plan_says(config: ModelConfig) -> None:
    model = build_gpt(config, 8, seed=0)
    assert sum(p.numel() for p in model.parameters()) == gpt_parameters(config)


def test_default_model_has_about_three_million_parameters() -> None:
    assert 3_000_000 < gpt_parameters(ModelConfig()) < 3_500_000


def test_names_are_clean_and_a_tied_tensor_appears_once() -> None:
    tied, untied = (dict(build_gpt(config, 8, seed=0).named_parameters()) for config in (SMALL, UNTIED))
    assert set(untied) - set(tied) == {"head.weight"}
    assert {name for name, p in tied.items() if p.shape == (256, 16)} == {"embedding.weight"}
    assert "blocks.1.attention.qkv.weight" in tied
    assert embedding_names(build_gpt(UNTIED, 8, seed=0)) == {"embedding.weight"}
    # Positions are computed, not trained, and no part of the state.
    assert set(build_gpt(SMALL, 8, seed=0).state_dict()) == set(tied)


def test_logits_depend_on_earlier_tokens_and_on_no_later_one() -> None:
    model = build_gpt(SMALL, 12, seed=0)
    one = tokens(1, 12)
    other = one.clone()
    other[0, 7] = (other[0, 7] + 1) % 256
    with torch.no_grad():
        a, b = model(one), model(other)
    assert a.shape == (1, 12, 256)
    assert torch.equal(a[0, :7], b[0, :7])
    assert all(not torch.allclose(a[0, t], b[0, t], atol=1e-6) for t in range(7, 12))


def test_order_of_earlier_tokens_matters() -> None:
    model = build_gpt(SMALL, 8, seed=0)
    one = torch.tensor([[10, 20, 30, 40]])
    with torch.no_grad():
        a, b = model(one)[0, -1], model(one[:, [1, 0, 2, 3]])[0, -1]
    assert not torch.allclose(a, b, atol=1e-4)


def test_rotation_keeps_lengths_and_makes_scores_depend_on_distance_alone() -> None:
    model = build_gpt(SMALL, 32, seed=0)
    q, k = torch.randn(2, 1, 8, generator=torch.Generator().manual_seed(5)).expand(2, 32, 8).unbind(0)
    turned_q, turned_k = rotate(q, model.cos, model.sin), rotate(k, model.cos, model.sin)
    assert torch.allclose(turned_q.norm(dim=-1), q.norm(dim=-1), atol=1e-5)
    scores = turned_q @ turned_k.T
    assert torch.allclose(scores[5, 3], scores[30, 28], atol=1e-4)
    assert not torch.allclose(scores[5, 3], scores[5, 4], atol=1e-3)


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_training_starts_near_the_loss_of_guessing(config: ModelConfig) -> None:
    rows = tokens(16, 33)
    with torch.no_grad():
        logits = build_gpt(config, 32, seed=0)(rows[:, :-1])
    loss = F.cross_entropy(logits.reshape(-1, 256), rows[:, 1:].reshape(-1))
    assert math.log(256) - 0.05 < loss < math.log(256) + 0.6


@pytest.mark.parametrize("config", [SMALL, UNTIED])
def test_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = build_gpt(config, 8, seed=0)
    model(tokens(2, 8)).logsumexp(-1).mean().backward()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in model.parameters())


def test_heads_of_odd_width_are_refused_with_both_names() -> None:
    with pytest.raises(ConfigError, match=r"width = 20 over heads = 4 .* odd width 5.*change width or heads"):
        build_gpt(ModelConfig(width=20, heads=4), 8, seed=0)
