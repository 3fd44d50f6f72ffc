"""Where the supervisor runs: `diloco train` as a process of the world, with machines of it for islands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from diloco_cli.claim import Body, Claim
from diloco_cli.exit_codes import code_for
from diloco_cli.runs import Run
from diloco_cli.sights import Ending, Sight, ending_of
from diloco_cli.simulation.clocks import WorldClock
from diloco_cli.simulation.machines import HOST, Machine, Setting
from diloco_cli.simulation.storage import Link
from diloco_cli.simulation.world import Process
from diloco_cli.spec import Island as IslandSpec
from diloco_cli.spec import Spec
from diloco_cli.supervision import End
from diloco_cli.supervisor import TICK, Supervisor
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import DilocoError
from diloco_runtime.identity import Identity
from diloco_runtime.records import RunRecord, SupervisorRecord


class Provider:
    """Islands on machines of the world, as a supervisor starts and sees them."""

    def __init__(self, machines: Mapping[str, Machine]) -> None:
        self._machines = machines

    def sights(self) -> Mapping[str, Sight]:
        found = {}
        for name, machine in self._machines.items():
            alive = machine.processes()
            agent = alive.pop("agent", None)
            if agent is not None or alive:
                found[name] = Sight(machine.launch if agent is not None else None, len(alive))
        return found

    def ending(self, name: str, launch: str | None) -> Ending | None:
        machine = self._machines[name]
        status = machine.agent.exit_code if machine.agent is not None and machine.launch == launch else None
        return None if status is None else ending_of(status)

    def start(self, island: IslandSpec, launch: str) -> str:
        return f"process {self._machines[island.name].start(launch).pid}"

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
        except DilocoError as error:
            self._say(f"supervision ended: {error}")
            return int(code_for(error))
        finally:
            if me.alive:
                supervisor.close()
        return 0

    def _beside(self, body: Body) -> Callable[[float], None]:
        self.setting.world.thread(body)
        return lambda _: None

    def _say(self, line: str) -> None:
        self.said.append(f"{self.setting.world.now:.1f} {line}")
