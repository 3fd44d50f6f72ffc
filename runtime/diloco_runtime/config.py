"""The training identity of a run: what `run.json` holds and every island obeys.

Written by hand it is part of a TOML run spec (`diloco_cli.spec`), resolved it is JSON. Imports neither torch nor a
store. Field docs stand under the fields; cross-field errors name both fields and the remedy.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

_CUSTOM = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

LONG_PERIOD = 100
"""From this `sync_every` on, momentum 0.9 is the default; with shorter periods it does harm (README, "Defaults")."""


class Settings(BaseModel):
    """Base of every table: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class ModelConfig(Settings):
    """What to train."""

    kind: str = "gpt"
    """"gpt" (built in) or your own task as "package.module:function"."""
    layers: int = Field(4, ge=1)
    """gpt: number of transformer blocks."""
    heads: int = Field(4, ge=1)
    """gpt: attention heads per block; must divide `width`."""
    width: int = Field(256, ge=8)
    """gpt: size of the residual stream."""
    tied_embeddings: bool = True
    """gpt: use the token embedding as the output projection too."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Custom tasks: passed to the function as it stands."""

    @model_validator(mode="after")
    def _check(self) -> ModelConfig:
        if self.kind == "gpt":
            if self.width % self.heads:
                raise ValueError(f"width = {self.width} is not a multiple of heads = {self.heads}; change one of them")
            if self.options:
                raise ValueError('options belongs to custom tasks; with kind = "gpt" remove it')
        elif _CUSTOM.fullmatch(self.kind) is None:
            raise ValueError(f'kind = "{self.kind}" is neither "gpt" nor of the form "package.module:function"')
        else:
            # Compared with the defaults, not with what is present: the resolved form in run.json spells them all out.
            for name in ("layers", "heads", "width", "tied_embeddings"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f'{name} belongs to kind = "gpt"; put what your task needs into [model.options]')
        return self


class DataConfig(Settings):
    """What to train on."""

    files: tuple[str, ...] = ()
    """gpt: text files, glob patterns allowed, relative to the directory of the spec."""
    held_out_files: tuple[str, ...] = ()
    """gpt: text files for the held-out loss; empty: the last `held_out_fraction` of every training file."""
    held_out_fraction: float = Field(0.05, gt=0, lt=0.5)
    """gpt: share of every file kept from training when `held_out_files` is empty."""
    unit_tokens: int = Field(65_536, ge=1)
    """Size of the units that a pass over the data is cut in and that islands claim."""


class InnerConfig(Settings):
    """What every learner does between two merges."""

    optimizer: Literal["adamw", "sgd"] = "adamw"
    lr: float = Field(3e-3, gt=0)
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Final learning rate over peak."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """Shape after the warm-up, as a function of the run's progress in tokens (not of an island's own steps)."""
    warmup: float = Field(0.03, ge=0, lt=1)
    """Share of the token budget in which the learning rate rises linearly."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.1, ge=0)
    """Applied to tensors of two or more dimensions."""
    grad_clip: float = Field(1.0, ge=0)
    """Largest global norm of the gradient; 0 turns clipping off."""
    batch_size: int = Field(16, ge=1)
    """Samples per inner step of one island (an island may override it in its own table)."""
    sequence_length: int = Field(128, ge=2)
    """gpt: tokens per sample."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Autocast dtype of forward and backward; parameters and moments stay fp32."""
    threads: int = Field(1, ge=1)
    """CPU threads of the learner's tensor operations when it has no accelerator."""


class OuterConfig(Settings):
    """The optimizer of the global parameters: SGD with Nesterov momentum on the merged outer delta."""

    lr: float = Field(0.7, gt=0)
    momentum: float = Field(0.9, ge=0, lt=1)
    """Default: 0.9 when `sync_every` is at least 100, else 0.5."""
    merge: Literal["rda", "mean"] = "rda"
    """Radial-directional averaging (Decoupled DiLoCo) or the weighted mean (embeddings always use the mean)."""
    weight: Literal["paper", "tokens"] = "paper"
    """Weight of an offer: tokens * (tokens / inner steps), or tokens."""


class SyncConfig(Settings):
    """When and how islands exchange outer deltas."""

    preset: Literal["decoupled", "streaming", "diloco"] = "decoupled"
    """Defaults for the keys below: never wait / quorum of all, bounded overlap / one fragment and a barrier."""
    sync_every: int = Field(24, ge=1)
    """Inner steps between two merges of one fragment (H in the papers)."""
    fragments: int = Field(6, ge=1)
    """Number of fragments (P in the papers)."""
    in_flight: int | None = Field(None, ge=1)
    """Merges that may be open beyond the head, at most `fragments`; absent: measured (commit time over fragment
    period)."""
    min_quorum: int | Literal["all"] = 1
    """Fewest islands a merge waits for (never more than are alive)."""
    min_grace: float = Field(0.05, ge=0)
    """Seconds a merge waits at least for islands that are late."""
    pace: Literal["fastest", "each"] = "fastest"
    """"fastest": the first island for which a merge is due calls it and the others join; "each": every island offers
    after its own `sync_every` steps."""
    overlap_steps: int | None = Field(None, ge=0)
    """Inner steps a learner may run past an unanswered offer; 0 is a barrier; absent: it never waits."""
    carry: bool = True
    """Keep the progress made while an offer travelled, when the offer was merged."""
    compression: Literal["fp32", "bf16"] = "fp32"
    """Encoding of the offered deltas."""
    heartbeat_every: float = Field(5.0, ge=0.2)
    """Seconds between heartbeats; GCS and R2 refuse more than one write per second on one name."""
    dead_after_reads: int = Field(6, ge=3)
    """An island is failed after this many successful reads of its heartbeat, one heartbeat period apart, without
    change."""
    takeover_after: float = Field(30.0, gt=0)
    """Seconds a mergeable commit may be missing before a standby syncer takes over."""
    drain_timeout: float = Field(60.0, gt=0)
    """Seconds each final merge waits for islands that are alive."""
    checkpoint_every: float = Field(60.0, gt=0)
    """Seconds between inner checkpoints of a learner."""
    keep_versions: int = Field(3, ge=2)
    """Versions per fragment whose payloads are kept."""
    snapshot_every: int = Field(120, ge=1)
    """Log positions at multiples of this many commits stay exportable for ever."""

    @model_validator(mode="before")
    @classmethod
    def _apply_preset(cls, values: Any) -> Any:
        """Fill what the user left open from the preset; what the user wrote stands."""
        if not isinstance(values, dict):
            return values
        presets: dict[Any, dict[str, Any]] = {
            "streaming": {"min_quorum": "all", "pace": "each", "carry": False, "sync_every": 100},
            "diloco": {
                "min_quorum": "all",
                "pace": "each",
                "carry": False,
                "fragments": 1,
                "overlap_steps": 0,
                "sync_every": 500,
            },
        }
        filled = {**presets.get(values.get("preset"), {}), **values}
        if filled.get("preset") == "streaming" and "overlap_steps" not in filled:
            # One fragment period: the commit of a fragment is adopted before the next fragment is offered.
            every, parts = filled.get("sync_every"), filled.get("fragments", 6)
            if isinstance(every, int) and isinstance(parts, int) and parts > 0:
                filled["overlap_steps"] = max(1, every // parts)
        return filled

    @model_validator(mode="after")
    def _check(self) -> SyncConfig:
        if self.in_flight is not None and self.in_flight > self.fragments:
            raise ValueError(
                f"in_flight = {self.in_flight} is more than fragments = {self.fragments}: a fragment cannot be "
                "merged twice at once; lower in_flight or raise fragments"
            )
        return self


class RunConfig(Settings):
    """The training identity: equal on all islands, written once into `run.json`."""

    name: str
    tokens: int = Field(gt=0)
    """The budget: tokens merged into the global model, whoever trained them."""
    seed: int = Field(0, ge=0)
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    inner: InnerConfig = InnerConfig()
    outer: OuterConfig = OuterConfig()
    sync: SyncConfig = SyncConfig()

    @model_validator(mode="before")
    @classmethod
    def _outer_defaults(cls, values: Any) -> Any:
        """Outer defaults follow `sync.preset` and `sync.sync_every`."""
        if not isinstance(values, dict):
            return values
        sync = values.get("sync") or {}
        outer = values.get("outer") or {}
        if isinstance(sync, SyncConfig):
            sync = sync.model_dump()
        if not isinstance(sync, dict) or not isinstance(outer, dict):
            return values
        preset = sync.get("preset", "decoupled")
        every = sync.get("sync_every", {"diloco": 500, "streaming": 100}.get(preset, 24))
        defaults = {
            "momentum": 0.9 if isinstance(every, int) and every >= LONG_PERIOD else 0.5,
            "merge": "rda" if preset == "decoupled" else "mean",
        }
        return {**values, "outer": {**defaults, **outer}}

    @model_validator(mode="after")
    def _check(self) -> RunConfig:
        if self.model.kind == "gpt" and not self.data.files:
            raise ValueError('data.files is empty; a "gpt" model needs text files to train on')
        return self
