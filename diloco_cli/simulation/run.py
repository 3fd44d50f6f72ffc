"""A whole run in virtual time: machines, their links, the laptop, the bucket between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import diloco_runtime
from diloco_cli.runs import Run
from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.laptop import Laptop
from diloco_cli.simulation.machines import Machine, Setting
from diloco_cli.simulation.storage import Bucket, Lane, Link
from diloco_cli.simulation.world import World
from diloco_cli.spec import Island, ProviderTable, Spec
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.records import CommitRecord, ControlRecord, RunRecord
from diloco_runtime.task import Task

RUN_ID = "00000000feedbeef"


@dataclass(frozen=True)
class Site:
    """What is known of one island's machine."""

    step_seconds: float | Callable[[], float]
    """One inner step; a function is asked before each."""
    batch_size: int | None = None
    latency: float = 0.01
    """Round trip to the store, seconds."""
    up: float = float("inf")
    """Bytes per second."""
    down: float = float("inf")
    clock_offset: float = 0.0
    """Seconds by which its wall clock is ahead."""
    give_up_after: float = 2.0
    """Seconds after which a request that nobody answers fails."""
    clock_rate: float = 1.0
    """Seconds of its clocks per second of the world."""


class Simulation:
    """A run, created and supervised like any other; `train` starts the supervisor, which launches the islands."""

    def __init__(
        self,
        config: RunConfig,
        build: Callable[[], Task],
        sites: Mapping[str, Site],
        seed: int = 0,
        provider: ProviderTable | None = None,
        start_seconds: float = 1.0,
        laptop_gives_up_after: float = 2.0,
    ) -> None:
        """`build`: makes the task of one learner life; `laptop_gives_up_after`: seconds after which a request of the
        supervisor that nobody answers fails."""
        self.world = World(seed)
        self.bucket = Bucket()
        self.config = config
        setting = self._setting = Setting(self.world, RUN_ID, config, build, start_seconds=start_seconds)
        self.memory = setting.memory
        self.machines = {name: self._machine(setting, name, site) for name, site in sites.items()}
        islands = tuple(Island(name, machine.batch_size, 1) for name, machine in self.machines.items())
        spec = Spec(Path("/run.toml"), "world://", config, provider or ProviderTable(), islands)
        nonces = WorldNonces(self.world)
        record = RunRecord(
            run_id=RUN_ID,
            nonce=nonces.new(),
            name=config.name,
            code_version=diloco_runtime.__version__,
            config=config.model_dump(mode="json"),
            created_wall=0.0,
        )
        link = Link(self.bucket, self.world, 0.01, give_up_after=laptop_gives_up_after)
        self.laptop = Laptop(setting, spec, record, link, WorldClock(self.world), self.machines)
        self.observer().create_run(record)

    def _machine(self, setting: Setting, name: str, site: Site) -> Machine:
        seconds = site.step_seconds
        constant = (lambda: seconds) if not callable(seconds) else seconds
        clock = WorldClock(self.world, site.clock_offset, site.clock_rate)
        link = Link(self.bucket, self.world, site.latency, Lane(site.up), Lane(site.down), site.give_up_after)
        return Machine(setting, name, link, clock, constant, site.batch_size or setting.config.inner.batch_size)

    # ---- what a person does -----------------------------------------------------------------------------------------

    def train(self) -> None:
        """Start `diloco train`."""
        self.laptop.train()

    def control(self, action: str, tokens: int | None = None) -> None:
        """Ask the run to stop or to go on, as `down` and `train` do."""
        board = self.observer()
        newest = board.newest_control()
        number = 1 if newest is None else newest.number + 1
        record = ControlRecord.model_validate(
            {
                "run_id": RUN_ID,
                "nonce": board.new_nonce(),
                "number": number,
                "action": action,
                "tokens": tokens,
                "reason": action,
            }
        )
        board.create(board.keys.control(number), record)

    # ---- looking ----------------------------------------------------------------------------------------------------

    def observer(self) -> Blackboard:
        """Return a blackboard without latency, for looking from outside."""
        return self._setting.board(self.bucket, WorldClock(self.world))

    def log(self) -> list[CommitRecord]:
        """Return the whole log."""
        board = self.observer()
        commits: list[CommitRecord] = []
        while (commit := board.read_commit(len(commits))) is not None:
            commits.append(commit)
        return commits

    def over(self) -> bool:
        """Tell whether nothing of the run is left: neither a supervisor nor any process of an island."""
        laptop = self.laptop.process
        return (laptop is None or not laptop.alive) and not any(m.processes() for m in self.machines.values())

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        self.world.run(self.world.now + seconds)

    def run_until(self, done: Callable[[], bool], limit: float, look_every: float = 0.25) -> bool:
        """Let time pass until `done` or until a time; return whether it was done."""
        while not done():
            if self.world.now >= limit:
                return False
            self.world.run(min(limit, self.world.now + look_every))
        return True

    def run(self) -> Run:
        """Return the run as commands see it."""
        return Run(self.laptop.spec, self.laptop.record, self.observer(), WorldClock(self.world))

    def close(self) -> None:
        """End every process: what is left of the world can be looked at, not run on."""
        self.world.close()
