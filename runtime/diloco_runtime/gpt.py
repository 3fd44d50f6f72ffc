"""The built-in model: a decoder-only transformer over bytes. Knows nothing of data, loss or training.

Pre-norm blocks with RMSNorm, rotary positions, squared ReLU and no biases: the choice that learned most per second on a
CPU at a few million parameters (squared ReLU beat GELU and SwiGLU, rotary positions beat learned ones by far).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from diloco_runtime.config import ModelConfig
from diloco_runtime.errors import ConfigError

VOCABULARY = 256
"""Tokens are bytes."""

MLP_RATIO = 4
ROTARY_BASE = 10_000.0

INIT_GAIN = 0.7
"""Standard deviation of the initial weights times the root of their fan-in. With tied embeddings it keeps the first
logits near 0.7 in size, so that training starts close to ln 256 = 5.55 nats per byte."""


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map `(batch, time, width)` to the same shape; `cos` and `sin` are `(time, head width / 2)`."""
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return projected


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.attention = Attention(width, heads)
        self.mlp_norm = nn.RMSNorm(width, eps=1e-6)
        self.up = nn.Linear(width, MLP_RATIO * width, bias=False)
        self.down = nn.Linear(MLP_RATIO * width, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Map the residual stream `(batch, time, width)` to the same shape."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        hidden = F.relu(self.up(self.mlp_norm(x))).square()
        output: torch.Tensor = x + self.down(hidden)
        return output


class Gpt(nn.Module):
    """The whole model; make one with `build_gpt`, which also initialises it."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: ModelConfig, context: int) -> None:
        super().__init__()
        self.context = context
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config.width, config.heads) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        # Tied: no module of its own, so that the shared tensor has one name.
        self.head = None if config.tied_embeddings else nn.Linear(config.width, VOCABULARY, bias=False)
        half = config.width // config.heads // 2
        self.register_buffer("cos", torch.empty(context, half), persistent=False)
        self.register_buffer("sin", torch.empty(context, half), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 tokens `(batch, time)`, `time <= context`, to next-token logits `(batch, time, 256)`."""
        time = tokens.shape[1]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.cos[:time], self.sin[:time])
        output = self.embedding if self.head is None else self.head
        return F.linear(self.norm(x), output.weight)

    @torch.no_grad()
    def initialise(self, generator: torch.Generator) -> None:
        """Set every parameter and buffer, drawing from `generator` (on the CPU) alone."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                parameter.fill_(1.0)
                continue
            std = INIT_GAIN * parameter.shape[1] ** -0.5
            if name.endswith(("attention.out.weight", "down.weight")):
                # Two additions to the residual stream per block: keep its size independent of the depth.
                std *= (2 * len(self.blocks)) ** -0.5
            parameter.normal_(0.0, std, generator=generator)
        half = self.cos.shape[1]
        frequencies = ROTARY_BASE ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.outer(torch.arange(self.context, dtype=torch.float32), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair (i, i + half) of `(..., time, 2 * half)` by its position's angle; keeps the dtype of `x`."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


def build_gpt(config: ModelConfig, context: int, seed: int) -> Gpt:
    """Return a model for sequences up to `context` tokens on the CPU, the same for the same seed.

    Neither reads nor moves torch's global random state. Raises `ConfigError` for a head width that is odd.
    """
    if (config.width // config.heads) % 2:
        raise ConfigError(
            f"[model] width = {config.width} over heads = {config.heads} gives heads of odd width "
            f"{config.width // config.heads}; rotary positions need an even one: change width or heads"
        )
    # On the meta device constructors allocate and draw nothing.
    with torch.device("meta"):
        model = Gpt(config, context)
    model.to_empty(device="cpu")
    model.initialise(torch.Generator().manual_seed(seed))
    return model
