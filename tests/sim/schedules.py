"""Schedules: a run's settings, its machines and its faults, all made from one seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.simulation.run import Site
from diloco_runtime.config import RunConfig
from tests.sim.faults import KINDS, Fault
from tests.support.tasks import TinyTask

LEAST_COMMITS = 20

BEATS = (0.2, 0.2, 0.2, 0.2, 0.2, 0.5)
"""Seconds between heartbeats, to which steps, faults and patience are in proportion. Short ones are cheap to simulate:
the program polls a few times per merge then, at its fastest, and not ten or twenty times."""

PURGED_SHARE = 0.08
"""Of the schedules: their runs do not end, they are purged under their living islands."""

PURGE = "purge the run under its islands"


@dataclass(frozen=True)
class Schedule:
    """One run with its faults."""

    seed: int
    config: RunConfig
    sites: dict[str, Site]
    faults: tuple[Fault, ...]
    purged: bool = False
    """The run does not end: it is purged under its living islands."""


def make_config(chance: random.Random, islands: int, beat: float) -> RunConfig:
    """Return settings for a short run of at least `LEAST_COMMITS` commits; `beat`: seconds between heartbeats."""
    fragments = chance.choice((1, 2, 2, 2, 3, 3, 3, 3, 3, 3))
    every = fragments * chance.choice((1,) * 8 + (2,))
    preset = chance.choice(("decoupled",) * 6 + ("streaming", "streaming", "diloco"))
    if preset == "diloco":
        fragments, every = 1, chance.choice((1, 2))
    sync = {
        "preset": preset,
        "fragments": fragments,
        "sync_every": every,
        "min_quorum": islands if preset != "decoupled" else chance.randint(1, islands),
        "heartbeat_every": beat,
        "dead_after_reads": 3,
        "takeover_after": chance.choice((2.0, 2.0, 2.0, 6.0)) * beat,
        "checkpoint_every": chance.choice((2.0, 8.0, 8.0)) * beat,
        "drain_timeout": 2.0 * beat,
        "min_grace": chance.choice((0.0, 0.01, 0.05)),
        "snapshot_every": chance.choice((5, 50)),
        "compression": chance.choice(("fp32", "bf16")),
    }
    tokens = (LEAST_COMMITS + 1) * islands * TinyTask.BATCH * every // fragments
    optimizer = chance.choice(("sgd",) * 5 + ("adamw",))
    inner = {"lr": 0.01, "batch_size": TinyTask.BATCH, "optimizer": optimizer, "grad_clip": 0.0}
    return RunConfig.model_validate(
        {
            "name": "chaos",
            "tokens": tokens,
            "model": {"kind": "tests.support.tasks:tiny"},
            "inner": inner,
            "outer": {"momentum": chance.choice((0.0, 0.0, 0.5))},
            "sync": sync,
        }
    )


def make_schedule(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Schedule:
    """Return the schedule of a seed; `kinds`: of which its faults are."""
    chance = random.Random(seed)
    names = ("a", "b", "c")[: chance.choice((2,) * 19 + (3,))]
    beat = chance.choice(BEATS)
    config = make_config(chance, len(names), beat)
    pace = beat * chance.uniform(0.25, 0.5)
    sites = {
        name: Site(
            step_seconds=pace * chance.choice((1.0, 1.0, 1.0, 1.2, 1.2, 2.0)),
            latency=chance.choice((0.002, 0.01, 0.01, 0.01, 0.05)) * beat,
            up=chance.choice((float("inf"), float("inf"), 50_000.0 / beat)),
            clock_offset=chance.uniform(-100.0, 100.0),
            clock_rate=chance.uniform(0.97, 1.03),
            give_up_after=2.0 * beat,
        )
        for name in names
    }
    length = 2.0 * beat + 1.0 + LEAST_COMMITS * pace
    faults = [
        Fault(
            kind=chance.choice(kinds),
            at=chance.uniform(0.2, length),
            seconds=chance.choice((0.5, 1.5, 3.0)) * chance.uniform(0.5, 1.5) * beat,
            island=chance.choice(names),
            pick=chance.getrandbits(30),
        )
        for _ in range(chance.randint(3, 5))
    ]
    purged = chance.random() < PURGED_SHARE
    return Schedule(seed, config, sites, tuple(sorted(faults, key=lambda fault: fault.at)), purged)
