"""Where the tokens went and what the time was worth, from heartbeats and the head of the log. Pure.

Token-parameters (one token seen by one parameter) are what is summed; divided by the parameters of the model they are
tokens again. `merged` is exact: it is what the head of the log credits. The rest is as of the newest heartbeats, which
are up to one heartbeat old; what a life that is over had neither offered nor seen merged is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_runtime.records import CommitRecord, Fragment, HeartbeatRecord


@dataclass(frozen=True)
class TokenFates:
    """What became of every token that any life of any island has processed; in tokens, fractions included."""

    processed: float = 0.0
    merged: float = 0.0
    refused: float = 0.0
    late: float = 0.0
    overwritten: float = 0.0
    pending: float = 0.0
    lost: float = 0.0


def parameters(table: Sequence[Fragment]) -> int:
    """Return the number of parameters of the model, 0 while the run is not initialised."""
    return sum(fragment.numel for fragment in table)


def tokens_credited(head: CommitRecord | None, table: Sequence[Fragment]) -> float:
    """Return the tokens merged into the global model so far."""
    total = parameters(table)
    return head.credited_total / total if head is not None and total else 0.0


def merged_seen(lives: Iterable[HeartbeatRecord], table: Sequence[Fragment]) -> int:
    """Return the token-parameters of which these lives themselves saw that they were merged."""
    return sum(
        fates.merged * fragment.numel
        for beat in lives
        for fates, fragment in zip(beat.learner.fates, table, strict=False)
    )


def fates_of(lives: Iterable[tuple[HeartbeatRecord, bool]], table: Sequence[Fragment], merged: int) -> TokenFates:
    """Sum up the fates of lives, each given with whether it may still offer something; `merged`: token-parameters."""
    total = parameters(table)
    if not total:
        return TokenFates()
    sums = dict.fromkeys(("processed", "refused", "late", "overwritten", "pending"), 0)
    for beat, living in lives:
        for fates, fragment in zip(beat.learner.fates, table, strict=False):
            size = fragment.numel
            sums["processed"] += fates.processed * size
            sums["refused"] += fates.refused * size
            sums["late"] += fates.late * size
            sums["overwritten"] += fates.overwritten * size
            sums["pending"] += (fates.offered + fates.fresh) * size if living else 0
    known = merged + sums["refused"] + sums["late"] + sums["overwritten"] + sums["pending"]
    # A heartbeat is older than the head: it may not have counted yet what the log credits.
    processed = max(sums["processed"], merged)
    return TokenFates(
        processed=processed / total,
        merged=merged / total,
        refused=sums["refused"] / total,
        late=sums["late"] / total,
        overwritten=sums["overwritten"] / total,
        pending=sums["pending"] / total,
        lost=max(0, processed - known) / total,
    )


def agent_seconds(lives: Iterable[HeartbeatRecord]) -> float:
    """Return how long an island's agents lived, all together; lives of learners under one agent share its time."""
    uptime: dict[str, float] = {}
    for beat in lives:
        uptime[beat.agent] = max(uptime.get(beat.agent, 0.0), beat.uptime)
    return sum(uptime.values())


def useful_seconds(lives: Sequence[HeartbeatRecord], table: Sequence[Fragment]) -> float:
    """Return an island's time in inner steps, times the share of its tokens that was merged."""
    busy = sum(beat.learner.busy_seconds for beat in lives)
    processed = sum(
        fates.processed * fragment.numel
        for beat in lives
        for fates, fragment in zip(beat.learner.fates, table, strict=False)
    )
    return busy * merged_seen(lives, table) / processed if processed else 0.0


def goodput(islands: Iterable[Sequence[HeartbeatRecord]], table: Sequence[Fragment]) -> float | None:
    """Return the share of all islands' time that was spent on tokens which ended up in the global model.

    Per island: seconds in inner steps x merged / processed tokens, over the seconds its agents lived. None while no
    island has lived.
    """
    useful = alive = 0.0
    for lives in islands:
        useful += useful_seconds(lives, table)
        alive += agent_seconds(lives)
    return useful / alive if alive else None


@dataclass(frozen=True)
class Traffic:
    """What went to and from the store."""

    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0


def traffic(lives: Iterable[HeartbeatRecord]) -> Traffic:
    """Sum an island's traffic: one learner per life, one syncer per agent."""
    up = down = requests = 0
    syncers: dict[str, tuple[int, int, int]] = {}
    for beat in lives:
        up, down = up + beat.learner.bytes_up, down + beat.learner.bytes_down
        requests += beat.learner.requests
        counts = (beat.syncer.bytes_up, beat.syncer.bytes_down, beat.syncer.requests)
        syncers[beat.agent] = max(counts, syncers.get(beat.agent, (0, 0, 0)))
    for counts in syncers.values():
        up, down, requests = up + counts[0], down + counts[1], requests + counts[2]
    return Traffic(up, down, requests)
