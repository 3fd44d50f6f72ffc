"""Islands in a virtual world: agent, learner with its two threads, and syncer, from the program's own parts."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import greenlet
import torch

from diloco_runtime.backoff import pause_after
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.follower import run_follower
from diloco_runtime.fragments import table_of
from diloco_runtime.history import read_table
from diloco_runtime.launch import patiently
from diloco_runtime.learner import Life
from diloco_runtime.life import Birth, Engine
from diloco_runtime.publisher import run_checkpointer, run_publisher
from diloco_runtime.records import (
    ClaimRecord,
    CommitRecord,
    HeartbeatRecord,
    LearnerStatus,
    RunRecord,
    SupervisorRecord,
    SyncerStatus,
)
from diloco_runtime.syncer import Syncer, SyncerLife
from diloco_runtime.task import Task
from tests.support.world import DictStore, LatentStore, World, WorldClock, WorldNonces

RUN_ID = "00000000feedbeef"


class TimedTask:
    """A task whose every inner step takes virtual time."""

    def __init__(self, inner: Task, world: World, seconds: Callable[[], float]) -> None:
        self.inner = inner
        self.model = inner.model
        self._world = world
        self._seconds = seconds
        self.num_units, self.unit_samples, self.batch = inner.num_units, inner.unit_samples, inner.batch
        self.batch_tokens, self.held_out_loss = inner.batch_tokens, inner.held_out_loss

    def loss(self, batch: object) -> torch.Tensor:
        self._world.sleep(self._seconds())
        return self.inner.loss(batch)


@dataclass
class Island:
    """One island of the world."""

    world: World
    store: LatentStore
    config: RunConfig
    name: str
    build: Callable[[], Task]
    step_seconds: float = 1.0
    batch_size: int | None = None
    syncs: bool = True
    learner_status: LearnerStatus = field(default_factory=LearnerStatus)
    syncer_status: SyncerStatus = field(default_factory=SyncerStatus)
    engine: Engine | None = None
    syncer: Syncer | None = None
    processes: dict[str, greenlet.greenlet] = field(default_factory=dict)
    incarnation: int = 0
    task: Task | None = None
    """Task of the learner's present life."""

    def board(self) -> Blackboard:
        return Blackboard(self.store, RUN_ID, WorldClock(self.world), WorldNonces(self.world))

    def start(self) -> None:
        """Start agent, learner and syncer."""
        self.processes["agent"] = self.world.spawn(self._agent)

    def kill(self, *names: str) -> None:
        """SIGKILL some processes, all without names."""
        for name in names or tuple(self.processes):
            for part in [p for p in self.processes if p == name or p.startswith(name + "/")]:
                self.world.kill(self.processes.pop(part))

    # ---- processes ------------------------------------------------------------------------------------------------

    def _agent(self) -> None:
        board, clock = self.board(), WorldClock(self.world)
        newest = patiently(clock, lambda: board.newest_claim(self.name))
        self.incarnation = 1 if newest is None else newest.incarnation + 1
        agent = board.new_nonce()
        claim = ClaimRecord(
            run_id=RUN_ID, nonce=board.new_nonce(), island=self.name, incarnation=self.incarnation, agent=agent,
            host="h", pid=1, started=0.0, claimed_wall=0.0,
        )  # fmt: skip
        patiently(clock, lambda: board.create(board.keys.claim(self.name, self.incarnation), claim))
        self.start_learner()
        if self.syncs:
            self.processes["syncer"] = self.world.spawn(self._syncer)
        counter = 0
        while True:
            counter += 1
            try:
                board.write_heartbeat(
                    HeartbeatRecord(
                        run_id=RUN_ID, nonce=board.new_nonce(), island=self.name, incarnation=self.incarnation,
                        agent=agent, counter=counter, state="running", learner=self.learner_status,
                        syncer=self.syncer_status, host="h", pid=1, started=0.0, uptime=self.world.now,
                    )
                )  # fmt: skip
            except StoreUnavailable:
                pass
            clock.sleep(self.config.sync.heartbeat_every)

    def start_learner(self) -> None:
        self.processes["learner"] = self.world.spawn(self._learner)

    def _learner(self) -> None:
        clock = WorldClock(self.world)
        self.task = self.build()
        task = TimedTask(self.task, self.world, lambda: self.step_seconds)
        table = table_of(task.model, self.config.sync.fragments)
        size = self.batch_size or self.config.inner.batch_size
        life = Life(self.config, self.name, self.incarnation, size, table)

        def report(status: LearnerStatus) -> None:
            self.learner_status = status

        engine = patiently(clock, Birth(life, self.board(), clock, task, report).begin)
        if engine is None:
            return
        self.engine = engine
        stopped = threading.Event()
        self.processes["learner/follower"] = self.world.spawn(lambda: run_follower(engine.follower, clock, stopped))
        self.processes["learner/publisher"] = self.world.spawn(lambda: run_publisher(engine.publisher, clock, stopped))
        self.processes["learner/checkpointer"] = self.world.spawn(
            lambda: run_checkpointer(engine.publisher, clock, stopped)
        )
        while engine.learner.step():
            pass
        engine.learner.leave(self.world.now + 20.0)
        stopped.set()

    def _syncer(self) -> None:
        board, clock = self.board(), WorldClock(self.world)
        table = None
        while table is None:
            clock.sleep(0.2)
            table = patiently(clock, lambda: read_table(board))
        head = patiently(clock, board.head)
        assert head is not None
        life = SyncerLife(self.config, table, self.name, self.incarnation)

        def report(status: SyncerStatus) -> None:
            self.syncer_status = status

        self.syncer, failures = Syncer(life, board, clock, head, lambda: 1.0, report), 0
        while not self.syncer.ended:
            try:
                wait, failures = self.syncer.tick(), 0
            except StoreUnavailable:
                failures += 1
                wait = pause_after(failures)
            clock.sleep(wait)


@dataclass
class Archipelago:
    """A world with a run and its islands."""

    world: World
    config: RunConfig
    islands: dict[str, Island]
    store: DictStore

    def observer(self) -> Blackboard:
        """Return a blackboard without latency, for looking from outside."""
        return Blackboard(self.store, RUN_ID, WorldClock(self.world), WorldNonces(self.world))

    def log(self) -> list[CommitRecord]:
        """Return the whole log."""
        board, commits = self.observer(), []
        while (commit := board.read_commit(len(commits))) is not None:
            commits.append(commit)
        return commits

    def ended(self) -> bool:
        """Tell whether every island's processes other than the agent are gone."""
        return all(
            process.dead
            for island in self.islands.values()
            for name, process in island.processes.items()
            if name != "agent"
        ) and any(len(island.processes) > 1 for island in self.islands.values())

    def run(self, until: float) -> None:
        """Run to a time or to the end of the run."""
        self.world.run(until, self.ended)


def archipelago(
    config: RunConfig,
    build: Callable[[], Task],
    step_seconds: dict[str, float],
    seed: int = 0,
    latency: float = 0.01,
    bandwidth: float = float("inf"),
) -> Archipelago:
    """Make a run with one island per entry of `step_seconds`; nothing is started."""
    world = World(seed)
    store = DictStore("world://run")
    names = tuple(step_seconds)
    islands = {
        name: Island(world, LatentStore(store, world, latency, bandwidth), config, name, build, seconds)
        for name, seconds in step_seconds.items()
    }
    found = Archipelago(world, config, islands, store)
    board = found.observer()
    board.create_run(
        RunRecord(
            run_id=RUN_ID, nonce="0" * 16, name=config.name, code_version="0", config=config.model_dump(mode="json"),
            created_wall=0.0,
        )
    )  # fmt: skip
    board.create(
        board.keys.supervisor(1),
        SupervisorRecord(
            run_id=RUN_ID, nonce="1" * 16, number=1, supervisor="s", host="h", pid=1, started=0.0, islands=names
        ),
    )
    return found
