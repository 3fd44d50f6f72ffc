"""Text from a trained GPT: from a run's blackboard or from an exported file; no data files are needed."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import ConfigError
from diloco_runtime.evaluate import fill_parameters
from diloco_runtime.export import read_export
from diloco_runtime.gpt import Gpt, build_gpt
from diloco_runtime.snapshot import load_state


def gpt_from_tensors(config: RunConfig, tensors: Mapping[str, torch.Tensor], source: str) -> Gpt:
    """Return the GPT of a run with the given parameters; raise `ConfigError` when the run trains something else."""
    if config.model.kind != "gpt":
        raise ConfigError(
            f'{source} trains model.kind = "{config.model.kind}", which writes no text; only "gpt" can be sampled'
        )
    model = build_gpt(config.model, config.inner.sequence_length, config.seed)
    fill_parameters(model, tensors, source)
    return model.eval()


def gpt_from_board(board: Blackboard, config: RunConfig, seq: int | None = None) -> Gpt:
    """Return the run's GPT as it is at log position `seq` (None: the newest)."""
    return gpt_from_tensors(config, load_state(board, seq)[1], f"run {board.run_id}")


def gpt_from_export(path: str) -> Gpt:
    """Return the GPT in a file that `export_safetensors` wrote."""
    exported = read_export(path)
    return gpt_from_tensors(exported.config, exported.tensors, path)


@torch.no_grad()
def sample(model: Gpt, prompt: bytes, length: int, temperature: float, seed: int) -> str:
    """Return `prompt` and `length` further bytes as text (bytes that are no UTF-8 show as the replacement character).

    `temperature` 0 takes the likeliest byte each time; else probabilities are sharpened or flattened by it. The same
    arguments give the same text. The model sees the last `model.context` bytes; an empty prompt stands for a newline.
    Raises `ConfigError` for a negative length or temperature.
    """
    if length < 0 or temperature < 0:
        raise ConfigError(f"length = {length} and temperature = {temperature} must not be negative")
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    text = list(prompt)
    for _ in range(length):
        # The whole window again for each byte: at these sizes that costs milliseconds, and unlike a cache of keys and
        # values it stays exact when the window slides.
        window = text[-model.context :] or [ord("\n")]
        logits = model(torch.tensor([window], device=device))[0, -1].float().cpu()
        if temperature == 0:
            text.append(int(logits.argmax()))
        else:
            odds = torch.softmax((logits - logits.max()) / temperature, dim=0)
            text.append(int(torch.multinomial(odds, 1, generator=generator)))
    return bytes(text).decode("utf-8", errors="replace")
