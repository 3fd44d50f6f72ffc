"""Machines of the world: an island's real agent with its real learner and syncer, and the real supervisor.

The processes of `diloco_runtime` and of `diloco train`, each started as the program starts it, over virtual time. What
this module brings along is only what an operating system would: children, exit codes, signals, local status files.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.claim import Body, Claim
from diloco_cli.errors import AnotherSupervisor
from diloco_cli.looking import ProcessSight
from diloco_cli.runs import Run
from diloco_cli.simulation.storage import Link, Memory
from diloco_cli.simulation.world import Process, World, WorldClock, WorldNonces
from diloco_cli.spec import Island as IslandSpec
from diloco_cli.spec import Spec
from diloco_cli.supervision import End
from diloco_cli.supervisor import TICK, Supervisor
from diloco_runtime.agent_logic import Child
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import DilocoError, StoreUnavailable
from diloco_runtime.fragments import table_of
from diloco_runtime.identity import Identity
from diloco_runtime.island import Agent, keep_beating, look_after, say_goodbye
from diloco_runtime.launch import Exit, Launch, Surroundings, exit_code, patiently
from diloco_runtime.learner import Life
from diloco_runtime.learner_main import turn
from diloco_runtime.life import Birth, Engine
from diloco_runtime.records import LearnerStatus, RunRecord, SupervisorRecord, SyncerStatus
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
            "world://", self.setting.config.name, self.setting.run_id, self.name, Path("/"), "/", incarnation=life
        )
        return Surroundings(launch, board, self.setting.config, self.clock, counter), board

    # ---- processes --------------------------------------------------------------------------------------------------

    def start(self) -> Process:
        """Start the island's agent."""
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


class Provider:
    """Islands on machines of the world, as a supervisor starts and sees them."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._machines = machines

    def sights(self) -> Mapping[str, ProcessSight]:
        found = {}
        for name, machine in self._machines.items():
            alive = machine.processes()
            agent = alive.pop("agent", None)
            if agent is not None or alive:
                found[name] = ProcessSight(agent.pid if agent is not None else None, len(alive))
        return found

    def exit_status(self, name: str, pid: int | None) -> int | None:
        agent = self._machines[name].agent
        return agent.exit_code if agent is not None and agent.pid == pid else None

    def start(self, island: IslandSpec) -> int:
        return self._machines[island.name].start().pid

    def end(self, name: str, force: bool) -> None:
        alive = self._machines[name].processes()
        if force:
            for process in alive.values():
                process.kill()
        elif "agent" in alive:
            alive["agent"].terminate()
        else:
            for process in alive.values():
                process.terminate()


@dataclass
class Laptop:
    """Where the supervisor runs."""

    setting: Setting
    spec: Spec
    record: RunRecord
    link: Link
    clock: WorldClock
    machines: Mapping[str, Machine]
    process: Process | None = None
    earlier: list[Process] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    """What supervisors told people, each line with its time."""
    ends: list[End] = field(default_factory=list)
    """How supervisions of this run came to their end."""

    def board(self) -> Blackboard:
        """Return a way to the blackboard of its own."""
        return self.setting.board(self.link, self.clock)

    def train(self) -> Process:
        """Start `diloco train`; an earlier one may still be there."""
        if self.process is not None:
            self.earlier.append(self.process)
        self.process = self.setting.world.process("train", self._supervise)
        return self.process

    def _gone(self, record: SupervisorRecord, me: Identity) -> bool:
        others = (*self.earlier, *([self.process] if self.process is not None else []))
        return record.ended or not any(other.alive for other in others if other.pid == record.pid)

    def _supervise(self) -> int:
        world, period = self.setting.world, self.setting.config.sync.heartbeat_every
        me = world.current()
        identity = Identity(HOST, me.pid, me.started)
        leaving = self.clock.signal()
        me.on_terminate = leaving.set
        run = Run(self.spec, self.record, self.board(), self.clock)
        claim = Claim(run.board, self.board(), self.clock, identity, period, self._gone, self._beside)
        supervisor = Supervisor(run, Provider(self.machines), claim, identity, self._say)
        try:
            supervisor.start()
            end: End | None = None
            while end is None and not leaving.is_set():
                end = supervisor.tick()
                if end is None:
                    leaving.wait(TICK)
            if end is not None:
                self.ends.append(end)
        except AnotherSupervisor as error:
            self._say(str(error))
            return 7
        except (StoreUnavailable, DilocoError) as error:
            self._say(f"supervision ended: {error}")
            return 1
        finally:
            if me.alive:
                supervisor.close()
        return 0

    def _beside(self, body: Body) -> Callable[[float], None]:
        self.setting.world.thread(body)
        return lambda _: None

    def _say(self, line: str) -> None:
        self.said.append(f"{self.setting.world.now:.1f} {line}")
