"""Machines of the world: an island's real agent with its real learner and syncer.

The processes of `diloco_runtime`, each started as the program starts it, over virtual time. What
this module brings along is only what an operating system would: children, exit codes, signals, local status files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.storage import Link, Memory
from diloco_cli.simulation.world import Process, World
from diloco_runtime.agent_logic import Child
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import DilocoError
from diloco_runtime.fragments import table_of
from diloco_runtime.identity import Identity
from diloco_runtime.island import Agent, keep_beating, look_after, say_goodbye
from diloco_runtime.launch import Exit, Launch, Surroundings, exit_code, patiently
from diloco_runtime.learner import Life
from diloco_runtime.learner_main import turn
from diloco_runtime.life import Birth, Engine
from diloco_runtime.records import LearnerStatus, SyncerStatus
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_counting import CountingStore
from diloco_runtime.syncer import Syncer
from diloco_runtime.syncer_main import serve, wait_for_start
from diloco_runtime.task import Task

if TYPE_CHECKING:
    import torch

HOST = "laptop"
"""Where every process runs, for the supervisor: it sees its islands' processes, and knows their heartbeats by host and
pid, as with `provider.kind = "local"`."""


class TimedTask:
    """A task whose every inner step takes virtual time."""

    def __init__(self, inner: Task, machine: Machine) -> None:
        self.inner = inner
        self.model = inner.model
        self._machine = machine
        self.num_units, self.unit_samples, self.batch = inner.num_units, inner.unit_samples, inner.batch
        self.batch_tokens, self.held_out_loss = inner.batch_tokens, inner.held_out_loss

    def loss(self, batch: object) -> torch.Tensor:
        machine = self._machine
        machine.clock.sleep(machine.step_seconds())
        loss = self.inner.loss(batch)
        return loss * float("inf") if machine.spoilt else loss


@dataclass
class Setting:
    """What all machines of a run have in common."""

    world: World
    run_id: str
    config: RunConfig
    build: Callable[[], Task]
    """Builds the task of one learner life."""
    memory: Memory = field(default_factory=Memory)
    start_seconds: float = 1.0
    """How long a child needs from its start until it looks at the blackboard."""

    def board(self, store: ObjectStore, clock: WorldClock) -> Blackboard:
        """Return a way to the blackboard for one thread of control."""
        return Blackboard(store, self.run_id, clock, WorldNonces(self.world), self.memory.parse)


class Background:
    """Threads beside a main loop of the world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._failure: BaseException | None = None

    def start(self, name: str, body: Callable[[], None]) -> None:
        def guard() -> None:
            try:
                body()
            except Exception as error:
                self._failure = error

        self._world.thread(guard)

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


@dataclass
class Machine:
    """Where one island runs: its link to the store, its clocks, its speed. Outlives the island's processes."""

    setting: Setting
    name: str
    link: Link
    clock: WorldClock
    step_seconds: Callable[[], float]
    batch_size: int
    spoilt: bool = False
    """Its arithmetic yields infinities at present."""
    agent: Process | None = None
    launch: str = ""
    """Of the agent that lives now, or lived last."""
    engine: Engine | None = None
    """Of the learner that lives now, or lived last."""
    syncer: Syncer | None = None
    task: Task | None = None
    learner_status: LearnerStatus = field(default_factory=LearnerStatus)
    on_birth: Callable[[Machine, int, Engine], None] | None = None
    """Told of every learner life that begins: the machine, the incarnation, its parts."""

    def board(self, life: int = 0) -> tuple[Surroundings, Blackboard]:
        """Return a process's own way to the blackboard."""
        counter = CountingStore(self.link)
        board = self.setting.board(counter, self.clock)
        launch = Launch(
            "world://", self.setting.config.name, self.setting.run_id, self.name, Path("/"), "/",
            incarnation=life, launch=self.launch,
        )  # fmt: skip
        return Surroundings(launch, board, self.setting.config, self.clock, counter), board

    # ---- processes --------------------------------------------------------------------------------------------------

    def start(self, launch: str = "") -> Process:
        """Start the island's agent; `launch`: id of the launch."""
        self.launch = launch
        self.agent = self.setting.world.process(self.name, lambda: self._guarded(self._tend))
        return self.agent

    def processes(self) -> dict[str, Process]:
        """Return the living processes by role: "agent", "learner", "syncer"."""
        if self.agent is None:
            return {}
        found = {"agent": self.agent} if self.agent.alive else {}
        for child in self.agent.children:
            if child.alive:
                found[child.name.rpartition("/")[2]] = child
        return found

    @staticmethod
    def _guarded(body: Callable[[], int]) -> int:
        try:
            return int(body())
        except DilocoError as error:
            return int(exit_code(error))

    def _tend(self) -> int:
        world = self.setting.world
        me = world.current()
        around, board = self.board()
        patiently(self.clock, board.check_identity)
        children = Children(self, me)
        agent = Agent(around, children, Identity(HOST, me.pid, me.started))
        leaving, stopped = self.clock.signal(), self.clock.signal()
        me.on_terminate = leaving.set
        period = self.setting.config.sync.heartbeat_every
        world.thread(lambda: keep_beating(agent, period, stopped))
        code = look_after(agent, self.clock, leaving)
        stopped.set()
        agent.news.set()
        say_goodbye(agent)
        return code

    def learn(self, incarnation: int, report: Callable[[LearnerStatus], None]) -> int:
        """Do what the learner process does."""
        world, setting = self.setting.world, self.setting
        report(LearnerStatus(state="starting"))
        self.clock.sleep(setting.start_seconds)
        around, board = self.board(incarnation)
        patiently(self.clock, board.check_identity)
        task = TimedTask(setting.build(), self)
        table = table_of(task.model, setting.config.sync.fragments)
        life = Life(setting.config, self.name, incarnation, self.batch_size, table)
        birth = Birth(life, board, self.clock, task, report)
        engine = patiently(self.clock, birth.begin)
        if engine is None:
            return Exit.DONE
        self.engine, self.task = engine, task.inner
        if self.on_birth is not None:
            self.on_birth(self, incarnation, engine)
        leaving = self.clock.signal()
        world.current().on_terminate = leaving.set
        return turn(engine, around, leaving, Background(world))

    def merge(self, incarnation: int, report: Callable[[SyncerStatus], None]) -> int:
        """Do what the syncer process does."""
        self.clock.sleep(self.setting.start_seconds)
        around, board = self.board(incarnation)
        patiently(self.clock, board.check_identity)
        syncer = wait_for_start(around, lambda: self.learner_status.bandwidth, report)
        self.syncer = syncer
        leaving = self.clock.signal()
        self.setting.world.current().on_terminate = leaving.set
        return serve(syncer, self.clock, leaving)


class Children:
    """An agent's children as processes of the world."""

    def __init__(self, machine: Machine, agent: Process) -> None:
        self._machine = machine
        self._agent = agent
        self._running: dict[Child, Process] = {}
        self._learner: LearnerStatus | None = None
        self._syncer: SyncerStatus | None = None

    def start(self, child: Child, incarnation: int) -> None:
        machine = self._machine
        if child == "learner":
            self._learner = None
            body = lambda: machine.learn(incarnation, self._heard_learner)  # noqa: E731
        else:
            self._syncer = None
            body = lambda: machine.merge(incarnation, self._heard_syncer)  # noqa: E731
        name = f"{machine.name}/{child}"
        self._running[child] = machine.setting.world.process(name, lambda: machine._guarded(body), self._agent)

    def _heard_learner(self, status: LearnerStatus) -> None:
        self._learner = self._machine.learner_status = status

    def _heard_syncer(self, status: SyncerStatus) -> None:
        self._syncer = status

    def ended(self) -> list[tuple[Child, int]]:
        found = [(child, process.exit_code) for child, process in self._running.items() if not process.alive]
        for child, _ in found:
            del self._running[child]
        return [(child, code) for child, code in found if code is not None]

    def last_words(self, child: Child) -> str:
        return ""

    def signal(self, child: Child, number: signal.Signals) -> None:
        if child in self._running:
            process = self._running[child]
            process.kill() if number == signal.SIGKILL else process.terminate()

    def cpu(self) -> dict[str, float]:
        return {}

    def learner(self) -> LearnerStatus | None:
        return self._learner

    def syncer(self) -> SyncerStatus | None:
        return self._syncer
