"""One island in a forecast: processes, lives, heartbeats, and what all of it came to.

The real `IslandWatch` says when a lost island is launched again, the real `AgentLogic` when a dead learner is started
again. A new life starts as `diloco_runtime.life` does: it downloads the newest parameters of all fragments and the
checkpoint of its moments. What an earlier life had neither offered nor seen merged is lost.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from diloco_cli.island_watch import IslandWatch
from diloco_cli.sights import Sight, ending_of
from diloco_cli.simulation.forecast_events import Body
from diloco_cli.simulation.forecast_learner import LearnerLife
from diloco_cli.simulation.forecast_scene import RUN_ID, first_commit
from diloco_cli.simulation.forecast_syncer import LOOK_READS, Syncers
from diloco_cli.simulation.forecast_traffic import Station, keep_checkpointing
from diloco_cli.supervisor import TICK
from diloco_runtime.agent_logic import AgentLogic
from diloco_runtime.island import TURN
from diloco_runtime.pace import standby_seconds
from diloco_runtime.records import HeartbeatRecord, LearnerStatus, SyncerStatus

IDENTITY_EVERY = 5.0
"""Seconds between two readings of `run.json` by each process that writes."""


@dataclass
class Account:
    """What an island came to; all but `rented` and `elapsed` as far as heartbeats told."""

    alive: float = 0.0
    """Seconds that its agents lived."""
    busy: float = 0.0
    """Seconds in inner steps."""
    steps: float = 0.0
    merged: float = 0.0
    """Token-parameters that its lives saw merged."""
    pending: float = 0.0
    """Token-parameters of the present life that are offered, or to be offered: no loss yet."""
    delays: float = 0.0
    delay_steps: float = 0.0
    training: float = 0.0
    """Seconds from the first step of a life to its end."""
    rented: float = 0.0
    """Seconds for which the machines are paid: from launch to loss."""
    losses: float = 0.0
    up: float = 0.0
    down: float = 0.0
    writes: float = 0.0
    reads: float = 0.0
    commits: float = 0.0
    """Outer steps that its syncer wrote."""

    def plus(self, other: Account, factor: float = 1.0) -> Account:
        """Return the sum, the other one's numbers times `factor`."""
        return Account(*(getattr(self, f.name) + factor * getattr(other, f.name) for f in fields(self)))

    def settled(self) -> Account:
        """Return the account of a stretch, what became pending in it taken as merged: it will be later."""
        return replace(self, merged=self.merged + self.pending, pending=0.0)


class IslandModel:
    """An island that is lost and comes back."""

    def __init__(
        self,
        station: Station,
        watch: IslandWatch,
        syncers: Syncers,
        started: Callable[[str], None],
        disturbed: Callable[[], None],
    ) -> None:
        """`started`: told when the processes start; `disturbed`: when the island stops training or starts to."""
        self._station = station
        self._watch = watch
        self._syncers = syncers
        self._started = started
        self._disturbed = disturbed
        self.name = station.place.name
        self.learner: LearnerLife | None = None
        self.skipped = 0.0
        """Seconds that were skipped so far: supervision goes by the calendar."""
        self.trained = False
        """Whether any life has begun to train."""
        self._closed = Account()
        """All lives that are over."""
        self._agent = AgentLogic()
        self._up_since: float | None = None
        self._launched = 0.0
        self._training_since = 0.0
        self._life = 0
        self._agents = 0
        self._counter = 0
        self._told = Account()
        """The living processes as of the newest heartbeat."""

    @property
    def present(self) -> bool:
        """Tell whether its processes are there."""
        return self._up_since is not None

    # ---- processes --------------------------------------------------------------------------------------------------

    def launch(self, recovery: float) -> None:
        """The supervisor launches the island; its processes start `recovery` seconds later."""
        now = self._station.timeline.now
        self._launched = now
        self._watch.launched(now + self.skipped, str(self._agents + 1))
        self._station.timeline.at(now + recovery, self._boot)

    def _boot(self) -> None:
        now = self._station.timeline.now
        self._agents += 1
        self._up_since, self._agent = now, AgentLogic()
        self._agent.on_started("syncer", now)
        self._started(self.name)
        self._station.start(self._run_syncer(), learner=False)
        self._start_learner()
        self._beat_on(self._agents)

    def _start_learner(self) -> None:
        self._life += 1
        self._told = Account(alive=self._told.alive)
        self._agent.on_started("learner", self._station.timeline.now)
        self._station.start(self._begin_life(self._life))

    def _begin_life(self, life: int) -> Body:
        station, board, sizes = self._station, self._station.board, self._station.case.sizes
        yield station.place.assumed.start_seconds
        if not board.log:
            yield station.upload(sizes.model)
            if not board.log:
                board.log.append(first_commit(self.name, station.case.config.tokens))
        head = board.log[-1]
        yield station.read(len(sizes.table))
        yield station.download(sizes.model)
        if self.name in board.checkpoints:
            yield station.download(sizes.checkpoint)
        self._training_since, self.trained = station.timeline.now, True
        self.learner = LearnerLife(station, life, head)
        self.learner.follower.hint()
        station.start(keep_checkpointing(station))
        self._beat()  # news: the agent tells at once
        self._disturbed()

    def _run_syncer(self) -> Body:
        """A syncer is ready when its learner is: both load the same libraries."""
        yield self._station.place.assumed.start_seconds
        while not self._station.board.log:
            yield standby_seconds(self._station.case.config.sync.heartbeat_every)
        self._syncers.came(self._station)

    def lose(self) -> None:
        """Every process of the island is gone."""
        if not self.present:
            return
        now = self._station.timeline.now
        self._end_learner()
        self._closed.alive += self._told.alive
        self._closed.rented += now - self._launched
        self._closed.losses += 1
        self._up_since, self._told = None, Account()
        self._station.end(learner_only=False)
        self._syncers.gone(self.name)
        self._disturbed()
        self._station.timeline.at(now + self._station.chance.random() * TICK, self._supervise, True)

    def lose_learner(self) -> None:
        """The learner alone dies by a signal; its agent starts another."""
        if not self.present:
            return
        self._end_learner()
        self._station.end(learner_only=True)
        self._disturbed()
        self._agent.on_exit("learner", -signal.SIGKILL, self._station.timeline.now)
        self._agent_turns(self._agents)

    def _end_learner(self) -> None:
        """What the newest heartbeat told of the life is all that anybody will know of it."""
        if self.learner is not None:
            self.learner.end()
            self.learner = None
        self._closed = self._closed.plus(replace(self._told, alive=0.0))
        self._told = Account(alive=self._told.alive)

    def _agent_turns(self, agent: int) -> None:
        if agent != self._agents or not self.present:
            return
        now = self._station.timeline.now
        if any(act.kind == "start" and act.child == "learner" for act in self._agent.decide(now, None)):
            self._start_learner()
        else:
            self._station.timeline.at(now + TURN, self._agent_turns, agent)

    def _supervise(self, first: bool) -> None:
        """The supervisor looks at the processes of a lost island until it may launch it again."""
        now = self._station.timeline.now
        if first:
            self._watch.saw_place(now + self.skipped, Sight(), ending_of(-signal.SIGKILL))
        if self._watch.may_launch(now + self.skipped):
            self.launch(self._station.place.assumed.recovery_seconds)
        else:
            self._station.timeline.at(now + TICK, self._supervise, False)

    # ---- heartbeats -------------------------------------------------------------------------------------------------

    def _beat_on(self, agent: int) -> None:
        if agent == self._agents and self.present:
            self._beat()
            self._count_polls()
            timeline = self._station.timeline
            timeline.at(timeline.now + self._station.case.config.sync.heartbeat_every, self._beat_on, agent)

    def _beat(self) -> None:
        now, learner = self._station.timeline.now, self.learner
        self._told = self._living(now)
        self._counter += 1
        beat = _NOTHING.model_copy(
            update={
                "island": self.name,
                "incarnation": self._life,
                "agent": f"{self.name}-{self._agents}",
                "counter": self._counter,
                "learner": _STARTING if learner is None else _learner_status(learner),
                "syncer": _NOTHING.syncer.model_copy(
                    update={"progress": self._counter, "score": 0.0 if learner is None else _bandwidth(learner)}
                ),
                "launch": str(self._agents),
            }
        )
        self._station.board.beats[self.name] = beat
        self._watch.saw_heartbeat(now + self.skipped, beat, True)
        self._watch.judge(now + self.skipped, False)

    def _count_polls(self) -> None:
        """Count the requests of a heartbeat period that are not simulated one by one: polls and looks in vain."""
        station, sync = self._station, self._station.case.config.sync
        every, latency = sync.heartbeat_every, station.place.assumed.latency
        station.writes += 1
        station.reads += 1 + 3 * every / IDENTITY_EVERY
        if self.learner is not None:
            station.reads += 2 * every / self.learner.follower.cycle()
        if self._syncers.author != self.name:
            station.reads += 2 * every / (standby_seconds(every) + 2 * latency)
            station.reads += (LOOK_READS + len(station.case.places)) / 2

    # ---- what it came to --------------------------------------------------------------------------------------------

    def _living(self, now: float) -> Account:
        """Return what the present processes and the present life have come to by now."""
        account = Account(alive=0.0 if self._up_since is None else now - self._up_since)
        if self.learner is not None:
            work = self.learner.work
            account.busy, account.steps, account.merged = work.busy, work.steps, work.merged
            account.delays, account.delay_steps = work.delays, work.delay_steps
            account.training = now - self._training_since
        return account

    def account(self) -> Account:
        """Return everything that this island came to by now."""
        now, station = self._station.timeline.now, self._station
        total = self._closed.plus(self._living(now))
        total.rented += 0.0 if self._up_since is None else now - self._launched
        if self.learner is not None:
            fates = zip(self.learner.logic.fates(), station.case.sizes.numel, strict=True)
            total.pending = float(sum((part.offered + part.fresh) * size for part, size in fates))
        total.up, total.down = station.up.moved, station.down.moved
        total.writes, total.reads, total.commits = station.writes, station.reads, station.commits_written
        return total


_NOTHING = HeartbeatRecord(
    run_id=RUN_ID, nonce="n", island="", incarnation=1, agent="", counter=0, state="running",
    learner=LearnerStatus(), syncer=SyncerStatus(), host="host", pid=1, started=0.0,
)  # fmt: skip
_STARTING = LearnerStatus(state="starting")


def _learner_status(learner: LearnerLife) -> LearnerStatus:
    return _STARTING.model_copy(
        update={
            "state": "waiting" if learner.waiting else "training",
            "ticks": learner.ticks(),
            "step_seconds": learner.step_seconds,
            "in_flight": learner.logic.in_flight,
        }
    )


def _bandwidth(learner: LearnerLife) -> float:
    known = [rate for rate in (learner.publisher.bandwidth, learner.follower.bandwidth) if rate]
    return min(known, default=0.0)
