"""Write the global model at a log position to one safetensors file that says what it is, and read such a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import safetensors
import safetensors.torch
import torch
from pydantic import ValidationError

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import ConfigError, RunMismatch
from diloco_runtime.records import CommitRecord
from diloco_runtime.snapshot import load_state

FORMAT = "diloco-export-1"


@dataclass(frozen=True)
class ExportReport:
    """What an exported file holds."""

    path: str
    run: str
    run_id: str
    seq: int
    """Log position."""
    tokens: int
    """Tokens merged into the model at that position."""
    parameters: int


@dataclass(frozen=True)
class Exported:
    """An exported file, read."""

    report: ExportReport
    config: RunConfig
    tensors: dict[str, torch.Tensor]
    """fp32 by clean parameter name."""


def tokens_credited(commit: CommitRecord, parameters: int) -> int:
    """Return how many tokens are merged into a model of that many parameters at a commit."""
    return commit.credited_total // parameters


def export_safetensors(board: Blackboard, path: str, seq: int | None = None, force: bool = False) -> ExportReport:
    """Write the global parameters (fp32, by clean name) at log position `seq` (None: the newest) to `path`.

    The file appears whole or not at all. Raises `ConfigError` when `path` exists and `force` is off or when it cannot
    be written, `MissingPayload` when the position is not retained.
    """
    run = board.read_run()
    if run is None or run.run_id != board.run_id:
        raise RunMismatch(f"{board.store.url} does not hold run {board.run_id}")
    if os.path.exists(path) and not force:
        raise _exists(path)
    commit, tensors = load_state(board, seq)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    report = ExportReport(path, run.name, run.run_id, commit.seq, tokens_credited(commit, parameters), parameters)
    metadata = {
        "format": FORMAT,
        "run": report.run,
        "run_id": report.run_id,
        "seq": str(report.seq),
        "tokens": str(report.tokens),
        "code_version": run.code_version,
        "config": json.dumps(run.config),
    }
    _write(path, {name: tensor.contiguous() for name, tensor in tensors.items()}, metadata, force)
    return report


def read_export(path: str) -> Exported:
    """Read a file that `export_safetensors` wrote; raise `ConfigError` when it is not one."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, safetensors.SafetensorError) as error:
        raise ConfigError(f"cannot read {path} as a safetensors file ({error})") from error
    if metadata.get("format") != FORMAT:
        raise ConfigError(f"{path} was not written by `diloco export`: its metadata do not say {FORMAT}")
    try:
        config = RunConfig.model_validate_json(metadata["config"])
        seq, tokens = int(metadata["seq"]), int(metadata["tokens"])
        run, run_id = metadata["run"], metadata["run_id"]
    except (KeyError, ValueError, ValidationError) as error:
        raise ConfigError(f"{path}: its metadata are damaged or of another version of diloco ({error})") from error
    parameters = sum(tensor.numel() for tensor in tensors.values())
    return Exported(ExportReport(path, run, run_id, seq, tokens, parameters), config, tensors)


def _write(path: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str], force: bool) -> None:
    temporary = f"{path}.{os.getpid()}.tmp"
    try:
        try:
            # safetensors makes files that only their owner can read; give this one the mode of any new file.
            with open(temporary, "xb") as file:
                mode = os.stat(file.fileno()).st_mode
            safetensors.torch.save_file(tensors, temporary, metadata)
            os.chmod(temporary, mode)
            _move(temporary, path, force)
        except FileExistsError as error:
            raise _exists(path) from error
        except (OSError, safetensors.SafetensorError) as error:
            raise ConfigError(f"cannot write {path} ({error})") from error
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def _move(temporary: str, path: str, force: bool) -> None:
    if not force:
        try:
            # Unlike rename, link refuses a name that was taken in the meantime.
            os.link(temporary, path)
            return
        except FileExistsError:
            raise
        except OSError:
            pass  # a file system without hard links: rename has to do
    os.replace(temporary, path)


def _exists(path: str) -> ConfigError:
    return ConfigError(f"{path} exists already; choose another name or allow overwriting with --force")
