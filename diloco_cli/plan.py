"""What a command is about to create, and what the run will cost the network: computed before anything is done. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_cli.spec import Spec
from diloco_runtime.config import ModelConfig, RunConfig
from diloco_runtime.records import Fragment

FP32_BYTES = 4
CODEC_BYTES = {"fp32": 4, "bf16": 2}
BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class IslandPlan:
    """One island and what is started for it."""

    name: str
    batch_size: int
    threads: int
    processes: tuple[str, ...]
    state_dir: str | None
    """Where its log and local state go; None while the run has no id yet."""
    exists: bool
    """Its processes are there already."""


@dataclass(frozen=True)
class Estimate:
    """Sizes and requests of one outer step, that is of one commit of one fragment, all islands taking part."""

    parameters: int
    measured: bool
    """From the run's own fragment table rather than from the settings."""
    fragments: int
    offer_bytes: int
    """One island's delta of one fragment (the mean over fragments)."""
    commit_bytes: int
    """New parameters and outer momentum of one fragment, fp32."""
    up_bytes: int
    """Everybody's uploads per outer step: an offer per island and the commit."""
    down_bytes: int
    """Everybody's downloads per outer step: every offer by the syncer, the new parameters by every island, and the
    syncer's own reading of the fragment and its momentum."""
    requests: int
    """Object-store requests per outer step, polling not included."""
    inner_steps: float
    """Inner steps of the fastest island between two outer steps."""
    tokens: int | None
    """Tokens that all islands together train on per outer step, if they are equally fast; None for custom tasks."""


@dataclass(frozen=True)
class Existing:
    """What is there before anything is done."""

    run_id: str | None = None
    log_position: int | None = None
    phase: str = ""
    table: tuple[Fragment, ...] = ()
    islands: tuple[str, ...] = ()
    """Islands with living processes on this machine."""


@dataclass(frozen=True)
class Plan:
    """Everything that `up` and `train` will do for a spec."""

    run: str
    store: str
    provider: str
    run_id: str | None
    log_position: int | None
    phase: str
    budget: int
    islands: tuple[IslandPlan, ...]
    estimate: Estimate | None
    """None while the size of a custom task is unknown: no island has built it yet."""
    creates: tuple[str, ...]
    """What will be created, in words."""
    price_per_hour: float
    """What is rented costs this much; local processes cost nothing."""

    @property
    def rents(self) -> bool:
        """Tell whether carrying the plan out costs money."""
        return self.price_per_hour > 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the plan as plain values, ready for `json.dumps`."""
        return {"schema_version": 1, **asdict(self)}


def make_plan(spec: Spec, existing: Existing, run_home: Path | None) -> Plan:
    """Return the plan for a spec, given what exists; `run_home`: this machine's folder of the run once it has an id."""
    islands = tuple(
        IslandPlan(
            name=island.name,
            batch_size=island.batch_size,
            threads=island.threads,
            processes=("agent", "learner", "syncer"),
            state_dir=None if run_home is None else str(run_home / island.name),
            exists=island.name in existing.islands,
        )
        for island in spec.islands
    )
    return Plan(
        run=spec.name,
        store=spec.store,
        provider=spec.provider.kind,
        run_id=existing.run_id,
        log_position=existing.log_position,
        phase=existing.phase,
        budget=spec.config.tokens,
        islands=islands,
        estimate=_estimate(spec, existing.table),
        creates=_creates(spec, existing),
        price_per_hour=0.0,
    )


def _creates(spec: Spec, existing: Existing) -> tuple[str, ...]:
    found = [] if existing.run_id is not None else [f"{spec.store}/{spec.name}/run.json (the run's identity)"]
    missing = [island.name for island in spec.islands if island.name not in existing.islands]
    if missing:
        count = f"{len(missing)} island{'s' if len(missing) > 1 else ''}"
        found.append(f"{count} of 3 processes each on this machine when `diloco train` runs: {', '.join(missing)}")
    return tuple(found)


def gpt_parameters(model: ModelConfig) -> int:
    """Return the number of trained parameters of the built-in model: per block 12 width^2 and two norms."""
    embeddings = BYTE_VOCABULARY * model.width * (1 if model.tied_embeddings else 2)
    return embeddings + model.layers * (12 * model.width**2 + 2 * model.width) + model.width


def _estimate(spec: Spec, table: Sequence[Fragment]) -> Estimate | None:
    config, islands = spec.config, len(spec.islands)
    if table:
        total, parts = sum(fragment.numel for fragment in table), len(table)
    elif config.model.kind == "gpt":
        total, parts = gpt_parameters(config.model), config.sync.fragments
    else:
        return None
    params = FP32_BYTES * total // parts
    offer = CODEC_BYTES[config.sync.compression] * total // parts
    return Estimate(
        parameters=total,
        measured=bool(table),
        fragments=parts,
        offer_bytes=offer,
        commit_bytes=2 * params,
        up_bytes=islands * offer + 2 * params,
        down_bytes=islands * offer + islands * params + 2 * params,
        requests=_requests(islands),
        inner_steps=config.sync.sync_every / parts,
        tokens=_tokens(spec, config, parts),
    )


def _requests(islands: int) -> int:
    """Count one outer step: a call; per island an offer (payload, record) and an adoption (commit, call, payload); the
    syncer's list, its reads of every offer (record, payload) and of fragment and momentum, and its three writes."""
    return 1 + islands * 5 + (1 + 2 * islands + 2 + 3)


def _tokens(spec: Spec, config: RunConfig, parts: int) -> int | None:
    if config.model.kind != "gpt":
        return None
    samples = sum(island.batch_size for island in spec.islands)
    return round(samples * config.inner.sequence_length * config.sync.sync_every / parts)
