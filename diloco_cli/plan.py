"""What a command is about to create, computed before anything is done. Pure."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diloco_cli.estimate import Estimate, make_estimate
from diloco_cli.spec import Spec
from diloco_runtime.records import Fragment


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
class Existing:
    """What is there before anything is done."""

    run_id: str | None = None
    budget: int | None = None
    """Tokens that the run is to merge at present."""
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
    budget_now: int | None
    """The run's budget as it is, which `train` raises to `budget`; None: there is no run yet."""
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
        store=spec.place,
        provider=spec.provider.kind,
        run_id=existing.run_id,
        log_position=existing.log_position,
        phase=existing.phase,
        budget=spec.config.tokens,
        budget_now=existing.budget,
        islands=islands,
        estimate=make_estimate(spec, existing.table),
        creates=_creates(spec, existing),
        price_per_hour=0.0,
    )


def _creates(spec: Spec, existing: Existing) -> tuple[str, ...]:
    found = [] if existing.run_id is not None else [f"{spec.place}/{spec.name}/run.json (the run's identity)"]
    missing = [island.name for island in spec.islands if island.name not in existing.islands]
    if missing:
        count = f"{len(missing)} island{'s' if len(missing) > 1 else ''}"
        found.append(f"{count} of 3 processes each on this machine when `diloco train` runs: {', '.join(missing)}")
    return tuple(found)
