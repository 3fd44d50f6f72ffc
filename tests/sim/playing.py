"""Playing a schedule: the simulated run from its start to its end, watched, and what became of it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from diloco_cli.simulation.run import RUN_ID, Simulation
from diloco_cli.spec import ProviderTable
from diloco_runtime.audit import read_audit
from diloco_runtime.purge import purge_run
from tests.sim.faults import Scene, inject
from tests.sim.invariants import Watch
from tests.sim.schedules import LEAST_COMMITS, PURGE, Schedule
from tests.support.tasks import TinyTask

SETTLE_SECONDS = 400.0
"""Virtual seconds within which a run must end once nothing goes wrong any more."""

STOP_LAG = 1
"""Commits that are usually made between the wish to stop and the drain; where fewer are, the run goes on after it."""


@dataclass
class Outcome:
    """What became of it."""

    seed: int
    commits: int = 0
    fired: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    tape: str = ""
    """Digest of the event tape."""
    states: set[str] = field(default_factory=set)
    seconds: float = 0.0
    """Virtual."""
    events: list[str] = field(default_factory=list)
    """The tape itself, when it was asked for."""


class Tape:
    """The events of a run, in order: a digest, and the text when it is wanted."""

    def __init__(self, simulation: Simulation, keep: bool) -> None:
        self._world = simulation.world
        self._digest = hashlib.sha256()
        self._keep = keep
        self.events: list[str] = []

    def tell(self, event: str) -> None:
        """Note an event."""
        line = f"{self._world.now:.6f} {event}"
        self._digest.update(line.encode())
        self._digest.update(b"\n")
        if self._keep:
            self.events.append(line)

    def digest(self) -> str:
        return self._digest.hexdigest()


def run_schedule(schedule: Schedule, keep: bool = False) -> Outcome:
    """Run one schedule to its end and judge it."""
    torch.manual_seed(schedule.seed)  # checkpoints hold the state of the generator
    patience = 5.0 * schedule.config.sync.heartbeat_every
    provider = ProviderTable(relaunch_after=0.2, replace_frozen_after=patience, max_restarts=1000)
    simulation = Simulation(
        schedule.config,
        TinyTask,
        schedule.sites,
        schedule.seed,
        provider,
        start_seconds=0.3,
        laptop_gives_up_after=2.0 * schedule.config.sync.heartbeat_every,
    )
    tape = Tape(simulation, keep)
    watch = Watch(simulation, tape.tell)
    scene = Scene(simulation, tell=tape.tell, disturb=watch.disturb)
    for machine in simulation.machines.values():
        machine.on_birth = watch.born
    outcome = Outcome(schedule.seed)
    try:
        _play(schedule, simulation, scene, watch, outcome)
    except Exception as error:
        outcome.violations.append(f"at {simulation.world.now:.3f}: {type(error).__name__}: {error}")
        tape.tell(f"error {error!r}")
    outcome.violations = watch.violations + outcome.violations
    outcome.commits, outcome.states = len(watch.log) - 1, watch.states
    outcome.fired = [fault.kind for fault in scene.fired] + [PURGE] * schedule.purged
    outcome.tape, outcome.events, outcome.seconds = tape.digest(), tape.events, simulation.world.now
    simulation.bucket.watchers.clear()
    simulation.close()
    return outcome


def _play(schedule: Schedule, simulation: Simulation, scene: Scene, watch: Watch, outcome: Outcome) -> None:
    world = simulation.world
    simulation.train()
    for fault in schedule.faults:
        world.at(fault.at, lambda fault=fault: inject(scene, fault))  # type: ignore[misc]
    calm = max((fault.at + fault.seconds for fault in schedule.faults), default=0.0) + 0.1
    world.run(calm)
    limit = calm + SETTLE_SECONDS

    ending = Ending(schedule, simulation, watch)

    def over() -> bool:
        if watch.violations:
            return True
        gone = simulation.over() and not any(rival.processes() for rival in scene.rivals)
        if ending.reached() and gone:
            return True
        if watch.purged_at is None and (simulation.laptop.process is None or not simulation.laptop.process.alive):
            ending.go_on()
        return False

    if not simulation.run_until(over, limit) and not watch.violations:
        head = watch.log[-1] if watch.log else None
        where = "no commit" if head is None else f"commit {head.seq}, {head.phase}"
        outcome.violations.append(f"not over {SETTLE_SECONDS:.0f} s after the last fault: {where}")
        return
    if watch.violations:
        return
    watch.check_supervisor()
    watch.check_stairs()
    if schedule.purged:
        return
    outcome.violations += read_audit(simulation.observer()).check()


class Ending:
    """The person behind the run: stops or purges it after enough commits, and asks for more when its budget gave too
    few."""

    def __init__(self, schedule: Schedule, simulation: Simulation, watch: Watch) -> None:
        self._schedule = schedule
        self._config = schedule.config
        self._simulation = simulation
        self._watch = watch

    def go_on(self) -> None:
        """Supervise the run again. As with `diloco train`, a stop that nobody was left to carry out is taken back."""
        log, control = self._watch.log, self._simulation.observer().newest_control()
        gone = not any(machine.processes() for machine in self._simulation.machines.values())
        if gone and log and log[-1].phase != "final" and control is not None and control.action == "stop":
            self._simulation.control("run", self._config.tokens * 2)
        self._simulation.train()

    def reached(self) -> bool:
        """Tell whether the run is over for good; else see to it that it will be."""
        log = self._watch.log
        if not log:
            return False
        if self._schedule.purged:
            if log[-1].seq >= LEAST_COMMITS and self._watch.purged_at is None:
                purge_run(self._simulation.bucket, RUN_ID)
            if self._watch.purged_at is not None or log[-1].seq >= LEAST_COMMITS:
                return True
        head, control = log[-1], self._simulation.observer().newest_control()
        least = LEAST_COMMITS - (len(log[0].fragments) + STOP_LAG if head.phase == "run" else 0)
        enough = head.seq >= least
        asked = control.action if control is not None and control.number > head.control else ""
        learners = [machine.processes().get("learner") for machine in self._simulation.machines.values()]
        if enough and head.phase == "run" and asked != "stop" and any(learners):
            self._simulation.control("stop")
        elif head.phase == "final" and not enough and asked != "run":
            size = sum(fragment.numel for fragment in log[0].fragments)
            self._simulation.control("run", head.credited_total // size + self._config.tokens // 2)
        return head.phase == "final" and enough and asked != "run"
