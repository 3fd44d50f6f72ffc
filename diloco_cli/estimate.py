"""What a run will ask of the network: sizes and requests of one outer step, and what goes on all the time. Pure.

The formulas are those of runtime/PROTOCOL.md, section 11, for one commit instead of one cycle; claims of data units are
left out. A plan cannot know how long an inner step takes: where that matters, one second is assumed, and said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.spec import Spec
from diloco_runtime.config import ModelConfig, RunConfig, SyncConfig
from diloco_runtime.pace import LEARNER_POLL, duty_seconds, standby_seconds
from diloco_runtime.payloads import objects
from diloco_runtime.records import Fragment

FP32_BYTES = 4
CODEC_BYTES = {"fp32": 4, "bf16": 2}
MOMENTS_BYTES = {"adamw": 8, "sgd": 0}
"""What a checkpoint holds per parameter: two fp32 moments, or nothing."""

BYTE_VOCABULARY = 256

STEP_SECONDS = 1.0
"""Length of an inner step where a rate is wanted."""

LINK_GBITS = 2.0
"""Gbit/s between clouds beyond which one connection to a store cannot be counted on."""


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
    """New parameters and, unless it is 0, outer momentum of one fragment, fp32."""
    up_bytes: int
    """Everybody's uploads per outer step: an offer per island and the commit."""
    down_bytes: int
    """Everybody's downloads per outer step: every offer by the syncer, the new parameters by every island."""
    writes: int
    """Creates, puts and listings per outer step; stores bill these as class A."""
    reads: int
    """Other requests per outer step (class B)."""
    background_per_second: float
    """Requests per second, mostly reads, that polls, heartbeats, checkpoints and a supervisor make besides, all
    islands together, at one second per inner step."""
    syncer_down_gbits: float
    """Gbit/s that the island whose syncer merges has to download, at one second per inner step: every offer."""
    syncer_up_gbits: float
    """Gbit/s that it has to upload: the commits."""
    checkpoint_bytes: int
    """One checkpoint of one island's inner state."""
    checkpoint_every: float
    """Seconds between two of them."""
    inner_steps: float
    """Inner steps of the fastest island between two outer steps."""
    tokens: int | None
    """Tokens that all islands together train on per outer step, if they are equally fast; None for custom tasks."""
    warnings: tuple[str, ...]
    """What will not work well, in words, with the remedy."""


def gpt_parameters(model: ModelConfig) -> int:
    """Return the number of trained parameters of the built-in model: per block 12 width^2 and two norms."""
    embeddings = BYTE_VOCABULARY * model.width * (1 if model.tied_embeddings else 2)
    return embeddings + model.layers * (12 * model.width**2 + 2 * model.width) + model.width


def make_estimate(spec: Spec, table: Sequence[Fragment]) -> Estimate | None:
    """Return the estimate for a spec, from the run's fragment table if there is one; None: the size is not known."""
    config, islands = spec.config, len(spec.islands)
    if table:
        total, parts = sum(fragment.numel for fragment in table), len(table)
    elif config.model.kind == "gpt":
        total, parts = gpt_parameters(config.model), config.sync.fragments
    else:
        return None
    params = FP32_BYTES * total // parts
    offer = CODEC_BYTES[config.sync.compression] * total // parts
    commit = params * (2 if config.outer.momentum else 1)
    moments = MOMENTS_BYTES[config.inner.optimizer] * total
    period = STEP_SECONDS * config.sync.sync_every / parts
    down, up = (8 * size / period / 1e9 for size in (islands * offer, commit))
    background = _background(islands, period, objects(moments), config.sync)
    return Estimate(
        parameters=total,
        measured=bool(table),
        fragments=parts,
        offer_bytes=offer,
        commit_bytes=commit,
        up_bytes=islands * offer + commit,
        down_bytes=islands * offer + islands * params,
        writes=_writes(islands, objects(offer), objects(params) * (commit // params)),
        reads=_reads(islands, objects(offer), objects(params)),
        background_per_second=background + supervision(islands, config.sync),
        syncer_down_gbits=down,
        syncer_up_gbits=up,
        checkpoint_bytes=moments,
        checkpoint_every=config.sync.checkpoint_every,
        inner_steps=config.sync.sync_every / parts,
        tokens=_tokens(spec, config, parts),
        warnings=_warnings(max(down, up), config.sync),
    )


def _writes(islands: int, offer: int, commit: int) -> int:
    """Count an offer (payload, record) per island, the call, the commit (payloads, record), two listings for garbage.
    `offer`, `commit`: objects that the payloads are."""
    return islands * (offer + 1) + 1 + (commit + 1) + 2


def _reads(islands: int, offer: int, params: int) -> int:
    """Count per island an adoption (commit, call, parameters), a look for a newer life and the syncer's reading of its
    offer (record, payload); the commit by every standby; two old commits for garbage."""
    return islands * (2 + params + 1 + 1 + offer) + (islands - 1) + 2


def _background(islands: int, period: float, checkpoint: int, sync: SyncConfig) -> float:
    """Return the requests per second of islands that do not belong to a merge; `period`: seconds between merges,
    `checkpoint`: objects that the payload of one is."""
    beat, standbys = sync.heartbeat_every, islands - 1
    learners = 2 * islands / LEARNER_POLL.seconds(period)
    syncers = 2 / duty_seconds(period, 0.0, beat) + 2 * standbys / standby_seconds(beat)
    peers = (2 + islands) / beat * (1 + standbys / 2) + (1 + standbys / 2) / (10 * beat)
    agents = 3 * islands / beat + (islands + 1) / 5
    checkpoints = (2 + checkpoint) * islands / sync.checkpoint_every
    return learners + syncers + peers + agents + checkpoints


def supervision(islands: int, sync: SyncConfig) -> float:
    """Return the requests per second of a supervisor: its looks, a listing in every twentieth, its heartbeat."""
    look = min(1.0, sync.heartbeat_every / 2)
    return (6 + 2 * islands + 0.05) / look + 1 / sync.heartbeat_every


def _tokens(spec: Spec, config: RunConfig, parts: int) -> int | None:
    if config.model.kind != "gpt":
        return None
    samples = sum(island.batch_size for island in spec.islands)
    return round(samples * config.inner.sequence_length * config.sync.sync_every / parts)


def _warnings(gbits: float, sync: SyncConfig) -> tuple[str, ...]:
    if gbits <= LINK_GBITS:
        return ()
    lighter = "" if sync.compression == "bf16" else ', or set sync.compression = "bf16"'
    return (
        f"between clouds {gbits:.1f} Gbit/s are more than a syncer can count on: merges will lag behind unless inner "
        f"steps take longer than {STEP_SECONDS:g} s; raise sync.sync_every (now {sync.sync_every}){lighter}",
    )
