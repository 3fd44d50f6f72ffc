"""One island's row of the status: its state as an onlooker can tell it, its progress, its tokens. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from diloco_cli.accounting import TokenFates, fates_of, goodput, merged_seen, traffic
from diloco_cli.island_watch import LEARNER_PATIENCE, SLOW_STEPS, State
from diloco_cli.looking import IslandLook, Look
from diloco_runtime.config import RunConfig
from diloco_runtime.records import HeartbeatRecord

STALE_PERIODS = 2.0
"""Heartbeat periods without change after which a look-on calls a counter still; one may just have been missed."""

Verdict = tuple[str, str]
"""A state and its reason."""


@dataclass(frozen=True)
class IslandReport:
    """One row of the table. Times in seconds, sizes in bytes; None where nothing is known yet."""

    name: str
    state: str
    reason: str = ""
    age_seconds: float | None = None
    """Since its agent's counter was last seen to move; None: not watched for long enough to tell."""
    host: str = ""
    pid: int | None = None
    lives: int = 0
    restarts: int = 0
    """Starts of its learner after the first."""
    step: int | None = None
    loss: float | None = None
    lr: float | None = None
    step_seconds: float | None = None
    longest_gap: float | None = None
    waited_seconds: float | None = None
    adopted: int | None = None
    merging: bool = False
    """Its syncer has the duty."""
    goodput: float | None = None
    fates: TokenFates = TokenFates()
    bytes_up: int = 0
    bytes_down: int = 0
    requests: int = 0
    cpu_seconds: Mapping[str, float] = field(default_factory=dict)
    skipped_steps: int = 0
    """Inner steps of all lives that were undone because loss or gradient was not finite."""
    reset_fragments: int = 0
    """Times that a fragment of it was not finite and was set back instead of offered."""
    reread_samples: int = 0
    """Samples that all lives read again because no further unit could be claimed."""
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Scene:
    """What every island of one report is judged against."""

    look: Look
    config: RunConfig
    host: str
    """The machine that looks."""

    @property
    def stale_after(self) -> float:
        """Seconds without change after which a counter stands still."""
        return STALE_PERIODS * self.config.sync.heartbeat_every

    def age(self, moved: float | None) -> float | None:
        """Return how long a counter has not moved, None when it was not watched for long enough to say."""
        if moved is not None:
            return self.look.at - moved
        watched = self.look.at - self.look.first_at
        return watched if watched >= self.stale_after else None


def trains(beat: HeartbeatRecord | None) -> bool:
    """Tell whether a learner is past its start and not at its end."""
    return beat is not None and beat.learner.state in ("training", "waiting", "draining")


def lives_of(island: IslandLook, scene: Scene) -> list[tuple[HeartbeatRecord, bool]]:
    """Pair every life with whether it may still offer something: only the newest, while it is there, in a live run."""
    newest = island.beat
    if newest is None:
        return []
    present = newest.host != scene.host or island.sight.present
    current = newest.incarnation == island.incarnation and newest.state in ("starting", "running", "leaving")
    return [(life, life is newest and current and present and not scene.look.over) for life in island.lives]


def island_report(island: IslandLook, scene: Scene, verdict: Verdict | None) -> IslandReport:
    """Build an island's row; `verdict` is what its supervisor says, when that is the one who asks."""
    beat, table = island.beat, scene.look.table
    state, reason = verdict or judge(island, scene)
    if beat is None:
        return IslandReport(island.name, state, reason, pid=island.sight.pid, lives=island.incarnation)
    sent, learner = traffic(island.lives), beat.learner
    skipped = sum(life.learner.skipped_steps for life in island.lives)
    resets = sum(life.learner.reset_fragments for life in island.lives)
    reread = sum(life.learner.reread_samples for life in island.lives)
    now = (learner.problem, beat.syncer.problem, _syncer_stillness(beat))
    return IslandReport(
        name=island.name,
        state=state,
        reason=reason,
        age_seconds=scene.age(island.moved),
        host=beat.host,
        pid=island.sight.pid if beat.host == scene.host else beat.pid,
        lives=island.incarnation,
        restarts=max(0, island.incarnation - 1),
        step=learner.step,
        loss=learner.loss,
        lr=learner.lr,
        step_seconds=learner.step_seconds,
        longest_gap=learner.longest_gap,
        waited_seconds=learner.waited_seconds,
        adopted=learner.adopted,
        merging=beat.syncer.duty and state == State.RUNNING,
        goodput=goodput([island.lives], table),
        fates=fates_of(lives_of(island, scene), table, merged_seen(island.lives, table)),
        bytes_up=sent.bytes_up,
        bytes_down=sent.bytes_down,
        requests=sent.requests,
        cpu_seconds=dict(beat.cpu_seconds),
        skipped_steps=skipped,
        reset_fragments=resets,
        reread_samples=reread,
        problems=tuple(filter(None, (*now, *lasting_problems(skipped, resets, reread)))),
    )


def lasting_problems(skipped_steps: int, reset_fragments: int, reread_samples: int) -> tuple[str, ...]:
    """Put into words what stays worth knowing when it is over."""
    found = []
    if skipped_steps:
        steps = "1 inner step" if skipped_steps == 1 else f"{skipped_steps} inner steps"
        found.append(f"{steps} undone because loss or gradient was not finite")
    if reset_fragments:
        times = "once" if reset_fragments == 1 else f"{reset_fragments} times"
        found.append(f"a fragment that was not finite was set back {times} instead of offered")
    if reread_samples:
        samples = "1 sample" if reread_samples == 1 else f"{reread_samples} samples"
        found.append(f"{samples} read again because no further unit could be claimed")
    return tuple(found)


def judge(island: IslandLook, scene: Scene) -> Verdict:
    """Say what an onlooker can say about an island: from its processes if it runs here, else from its counters."""
    beat, sight = island.beat, island.sight
    here = beat is None or beat.host == scene.host
    if not sight.present and (here or (beat is not None and beat.state in ("stopped", "failed"))):
        return _judge_absent(island, scene)
    if sight.held:
        return State.STALE, "its process is held by SIGSTOP"
    other_life = sight.present and beat is not None and beat.launch != sight.launch
    if beat is None or other_life or "starting" in (beat.state, beat.learner.state):
        return State.STARTING, ""
    age = scene.age(island.moved)
    # The agent has watched its learner for longer than somebody who looks only once.
    learner_age = max(scene.age(island.learner_moved) or 0.0, beat.still.get("learner", 0.0))
    if age is not None and age >= scene.stale_after:
        return State.STALE, f"no progress for {age:.0f} s"
    slow = max(scene.stale_after, LEARNER_PATIENCE, SLOW_STEPS * (beat.learner.step_seconds or 0.0))
    if learner_age >= slow and trains(beat):
        return State.STALE, f"its learner made no progress for {learner_age:.0f} s"
    return State.RUNNING, "" if age is not None else "age unknown"


def _syncer_stillness(beat: HeartbeatRecord) -> str:
    still = beat.still.get("syncer", 0.0)
    return f"its syncer made no progress for {still:.0f} s" if still >= LEARNER_PATIENCE else ""


def _judge_absent(island: IslandLook, scene: Scene) -> Verdict:
    beat, look = island.beat, scene.look
    given_up = look.supervisor is not None and island.name in look.supervisor.given_up
    if given_up or (beat is not None and beat.state == "failed"):
        return State.FAILED, (beat.reason if beat is not None else "") or "given up; `diloco logs` says why"
    if beat is None:
        return State.PENDING, "not started yet"
    finished = beat.learner.state == "finished"
    if look.over or (finished and look.head is not None and look.head.phase != "run"):
        return State.DONE, "finished" if finished else "was gone before the end"
    if look.supervisor is not None and not look.supervisor.ended and not look.stop_requested:
        return State.RESTARTING, "no process; its supervisor launches it again"
    return State.DOWN, "no process"
