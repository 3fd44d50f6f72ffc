"""The state of a run as one plain value: for the table, for `--json`, for the closing summary. Pure.

Whether something stands still is judged on the observer's own clock, from looks it made itself: a counter that did not
move for `STALE_PERIODS` heartbeats is STALE, one that was not watched for that long has an unknown age. Wall times in
records are for people only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco_cli.accounting import TokenFates, fates_of, goodput, parameters, tokens_credited
from diloco_cli.island_report import STALE_PERIODS, IslandReport, Scene, Verdict, island_report, lives_of, trains
from diloco_cli.island_watch import State
from diloco_cli.looking import Look
from diloco_runtime.config import RunConfig


@dataclass(frozen=True)
class StatusReport:
    """The whole run."""

    run: str
    run_id: str
    store: str
    state: str
    """PENDING, RUNNING, DRAINING, STOPPING, FINISHED, STOPPED or DOWN (no island lives)."""
    reason: str
    log_position: int | None
    phase: str
    tokens: float
    budget: int
    eta_seconds: float | None
    parameters: int
    commits: int
    offers_per_commit: float | None
    """Mean of the newest 20 commits."""
    goodput: float | None
    restarts: int
    fates: TokenFates
    bytes_up: int
    bytes_down: int
    requests: int
    supervisor: str
    """ACTIVE, SILENT, UNKNOWN (not watched for long enough), ENDED or NONE."""
    supervisor_host: str
    supervisor_pid: int | None
    problems: tuple[str, ...]
    islands: tuple[IslandReport, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, ready for `json.dumps`."""
        return {"schema_version": 1, **asdict(self)}


def build_report(run_id: str, store: str, scene: Scene, verdicts: Mapping[str, Verdict] | None = None) -> StatusReport:
    """Put one look into words. `verdicts`: what a supervisor in this very process decided about its islands."""
    look = scene.look
    islands = tuple(island_report(island, scene, (verdicts or {}).get(name)) for name, island in look.islands.items())
    head, tokens, budget = look.head, tokens_credited(look.head, look.table), current_budget(look, scene.config)
    lives = [life for island in look.islands.values() for life in lives_of(island, scene)]
    merges = [len(commit.merged) for commit in look.recent if commit.seq > 0 and commit.phase == "run"]
    state, reason = _run_state(look, islands)
    return StatusReport(
        run=scene.config.name,
        run_id=run_id,
        store=store,
        state=state,
        reason=reason,
        log_position=None if head is None else head.seq,
        phase="" if head is None else head.phase,
        tokens=tokens,
        budget=budget,
        eta_seconds=None if look.over or not look.pace else max(0.0, budget - tokens) / look.pace,
        parameters=parameters(look.table),
        commits=0 if head is None else head.seq,
        offers_per_commit=sum(merges) / len(merges) if merges else None,
        goodput=goodput([island.lives for island in look.islands.values()], look.table),
        restarts=sum(island.restarts for island in islands),
        fates=fates_of(lives, look.table, 0 if head is None else head.credited_total),
        bytes_up=sum(island.bytes_up for island in islands),
        bytes_down=sum(island.bytes_down for island in islands),
        requests=sum(island.requests for island in islands),
        supervisor=_supervisor_state(look, scene),
        supervisor_host=look.supervisor.host if look.supervisor is not None else "",
        supervisor_pid=look.supervisor.pid if look.supervisor is not None else None,
        problems=(*look.unreadable, *_problems(islands)),
        islands=islands,
    )


def current_budget(look: Look, config: RunConfig) -> int:
    """Return the tokens that the run is to merge: a control record may have raised the configured ones."""
    control = look.control
    if control is not None and control.action == "run" and control.tokens is not None:
        return control.tokens
    return look.head.budget if look.head is not None and look.head.budget else config.tokens


def settled(look: Look, config: RunConfig, host: str) -> bool:
    """Tell whether looking on would say nothing new: all that lives was seen to move, or was watched long enough."""
    if look.over or look.at - look.first_at >= STALE_PERIODS * config.sync.heartbeat_every:
        return True
    moving = [i for i in look.islands.values() if i.beat is not None and (i.sight.present or i.beat.host != host)]
    supervised = look.supervisor is None or look.supervisor.ended or look.supervisor_moved is not None
    return supervised and all(
        island.moved is not None and (island.learner_moved is not None or not trains(island.beat)) for island in moving
    )


def _run_state(look: Look, islands: tuple[IslandReport, ...]) -> Verdict:
    head, control = look.head, look.control
    if look.over and head is not None:
        return ("FINISHED", "the budget is reached") if head.reason == "budget" else ("STOPPED", head.reason)
    lively = any(island.state in (State.STARTING, State.RUNNING, State.STALE) for island in islands)
    if look.stop_requested and control is not None:
        return ("STOPPING" if lively else "STOPPED"), control.reason
    if head is not None and head.phase == "drain" and lively:
        return "DRAINING", f"{head.drain_left} merges left"
    if lively:
        return "RUNNING", ""
    if head is None and not any(island.lives for island in islands):
        return "PENDING", "no island has started yet"
    return "DOWN", "no island is running; `diloco train` goes on from the newest commit"


def _supervisor_state(look: Look, scene: Scene) -> str:
    if look.supervisor is None:
        return "NONE"
    if look.supervisor.ended:
        return "ENDED"
    age = scene.age(look.supervisor_moved)
    if age is None:
        return "UNKNOWN"
    return "ACTIVE" if age < scene.stale_after else "SILENT"


def _problems(islands: tuple[IslandReport, ...]) -> list[str]:
    found = [f"{island.name}: {problem}" for island in islands for problem in island.problems]
    found += [f"{i.name}: {i.state}, {i.reason}" for i in islands if i.state in (State.STALE, State.FAILED)]
    return found
