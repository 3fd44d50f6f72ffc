"""Everything that can go wrong with a simulated run: faults by kind, and schedules of them made from one seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_cli.simulation.machines import Machine
from diloco_cli.simulation.run import Simulation
from diloco_cli.simulation.storage import ALL_VERBS, CALM, READ_VERBS, WRITE_VERBS, Link, Trouble
from diloco_cli.simulation.world import Process


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong."""

    kind: str
    at: float
    """Seconds from the start of the run."""
    seconds: float
    """How long it lasts, where that means something."""
    island: str
    """Whom it hits, where that means something."""
    pick: int
    """Seed of whatever else is left to chance."""

    def __str__(self) -> str:
        return f"{self.at:.2f} {self.kind} {self.island} for {self.seconds:.2f} s ({self.pick})"


@dataclass
class Scene:
    """What faults act upon."""

    simulation: Simulation
    rivals: list[Machine] = field(default_factory=list)
    """Second machines of an island that another one has, too."""
    fired: list[Fault] = field(default_factory=list)
    usual: dict[str, Any] = field(default_factory=dict)
    """What things were like before a fault changed them: faults may overlap, the last one to end mends everything."""
    tell: Callable[[str], None] = lambda _: None
    disturb: Callable[[str, float], None] = lambda island, until: None
    """Told until when an island has an excuse for standing still."""

    def at(self, seconds: float, action: Callable[[], object]) -> None:
        """Do something later."""
        world = self.simulation.world
        world.at(world.now + seconds, action)

    def machine(self, fault: Fault) -> Machine:
        return self.simulation.machines[fault.island]

    def links(self) -> list[Link]:
        """Return every link to the store."""
        machines = [*self.simulation.machines.values(), *self.rivals]
        return [machine.link for machine in machines] + [self.simulation.laptop.link]


Injection = Callable[[Scene, Fault], None]
KINDS: dict[str, Injection] = {}


def kind(name: str, injection: Injection) -> None:
    """Register a kind of fault."""
    KINDS[name] = injection


# ---- processes ------------------------------------------------------------------------------------------------------


def _merging(scene: Scene) -> Machine:
    """Return the machine whose syncer wrote the newest commit."""
    head = scene.simulation.observer().head()
    machines = scene.simulation.machines
    return machines[head.author] if head is not None else next(iter(machines.values()))


def _parts(scene: Scene, fault: Fault, part: str) -> list[Process]:
    if part == "supervisor":
        process = scene.simulation.laptop.process
        return [process] if process is not None and process.alive else []
    machine = _merging(scene) if part == "merging syncer" else scene.machine(fault)
    alive = machine.processes()
    if part == "island":
        return list(alive.values())
    role = part.rpartition(" ")[2]
    return [alive[role]] if role in alive else []


def _kill(part: str) -> Injection:
    def inject(scene: Scene, fault: Fault) -> None:
        for process in _parts(scene, fault, part):
            process.kill()
        if part == "supervisor":
            scene.at(fault.seconds, scene.simulation.train)

    return inject


def _freeze(part: str) -> Injection:
    def inject(scene: Scene, fault: Fault) -> None:
        processes = _parts(scene, fault, part)
        for process in processes:
            process.freeze()
        scene.at(fault.seconds, lambda: [process.thaw() for process in processes])

    return inject


def _kill_everything(scene: Scene, fault: Fault) -> None:
    laptop = scene.simulation.laptop.process
    victims = [p for machine in scene.simulation.machines.values() for p in machine.processes().values()]
    for process in victims + ([laptop] if laptop is not None else []):
        process.kill()
    scene.at(min(fault.seconds, 2.0), scene.simulation.train)


def _terminate(scene: Scene, fault: Fault) -> None:
    """The notice that clouds give before they take a machine away; the machine goes whether the island left or not."""
    processes = _parts(scene, fault, "island")
    for process in processes[:1]:
        process.terminate()
    scene.at(fault.seconds, lambda: [process.kill() for process in processes])


def _rival(scene: Scene, fault: Fault) -> None:
    """Somebody starts another agent of an island whose agent is there."""
    machine = scene.machine(fault)
    link = replace(machine.link, trouble=CALM, trap=None)
    rival = Machine(machine.setting, machine.name, link, machine.clock, machine.step_seconds, machine.batch_size)
    rival.on_birth = machine.on_birth
    scene.rivals.append(rival)
    rival.start()


for _part in ("learner", "syncer", "agent", "island", "merging syncer", "supervisor"):
    kind(f"kill the {_part}", _kill(_part))
    kind(f"freeze the {_part}", _freeze(_part))


def _hang(scene: Scene, fault: Fault) -> None:
    """Freeze a syncer for so long that everybody has to deal with it."""
    _freeze("syncer")(scene, replace(fault, seconds=12.0 * fault.seconds))


kind("hang the syncer", _hang)
kind("kill everything", _kill_everything)
kind("preempt the island", _terminate)
kind("start a rival agent", _rival)
kind("start a second supervisor", lambda scene, fault: scene.simulation.train())


# ---- at one operation -----------------------------------------------------------------------------------------------

PLACES = ("/log/", "/offers/", "/calls/", "/blobs/", "/claim.json", "/checkpoints/", "/data/", "heartbeat.json", "/")
"""Where in the run an operation is: the moments between two of them are what a crash can fall into."""


def _at_operation(strike: Callable[[Scene, Fault, Process], None]) -> Injection:
    """Strike a process just before or just after the effect of its next operation on some kind of object."""

    def inject(scene: Scene, fault: Fault) -> None:
        machine, chance = scene.machine(fault), random.Random(fault.pick)
        moment, place = chance.choice(("before", "after")), chance.choice(PLACES)
        writes, skip = chance.random() < 0.8, chance.randrange(3)
        link = machine.link
        left = [skip]

        def trap(when: str, verb: str, key: str) -> None:
            if when != moment or place not in key or (writes and verb not in WRITE_VERBS):
                return
            left[0] -= 1
            if left[0] < 0:
                link.trap = None
                victim = machine.setting.world.current()
                scene.tell(f"{fault.kind}: {victim.name} {when} {verb} {key}")
                strike(scene, fault, victim)
                machine.clock.sleep(0.0)

        link.trap = trap
        scene.at(max(fault.seconds, 3.0), lambda: setattr(link, "trap", None))

    return inject


def _freeze_for(scene: Scene, fault: Fault, victim: Process) -> None:
    victim.freeze()
    scene.at(fault.seconds, victim.thaw)


def _kill_family(scene: Scene, fault: Fault, victim: Process) -> None:
    for process in _parts(scene, fault, "island"):
        process.kill()


kind("kill at an operation", _at_operation(lambda scene, fault, victim: victim.kill()))
kind("kill the island at an operation", _at_operation(_kill_family))
kind("freeze at an operation", _at_operation(_freeze_for))


# ---- the way to the store -------------------------------------------------------------------------------------------


def _trouble(everywhere: bool = False, **what: object) -> Injection:
    def inject(scene: Scene, fault: Fault) -> None:
        links = scene.links() if everywhere else [scene.machine(fault).link]
        for link in links:
            link.trouble = replace(link.trouble, **what)  # type: ignore[arg-type]

        def mend() -> None:
            for link in links:
                link.trouble = CALM

        scene.at(fault.seconds, mend)

    return inject


def _laptop_offline(scene: Scene, fault: Fault) -> None:
    link = scene.simulation.laptop.link
    link.trouble = Trouble(verbs=ALL_VERBS)
    scene.at(4.0 * fault.seconds, lambda: setattr(link, "trouble", CALM))


def _slow_link(latency: float, bandwidth: float) -> Injection:
    def inject(scene: Scene, fault: Fault) -> None:
        link = scene.machine(fault).link
        usual = scene.usual.setdefault(f"link of {fault.island}", (link.latency, link.up.bandwidth))
        link.latency, link.up.bandwidth = usual[0] + latency, bandwidth
        link.unwell_until = max(link.unwell_until, scene.simulation.world.now + fault.seconds + usual[0] + latency)

        def mend() -> None:
            link.latency, link.up.bandwidth = usual
            # What was sent meanwhile still arrives at the slow link's pace, and who sends it does nothing else.
            link.unwell_until = max(link.unwell_until, link.up.free_at)

        scene.at(fault.seconds, mend)

    return inject


kind("cut the island off", _trouble(verbs=ALL_VERBS))
kind("cut the island off from reading", _trouble(verbs=READ_VERBS))
kind("cut the island off from writing", _trouble(verbs=WRITE_VERBS))
kind("cut everybody off", _trouble(everywhere=True, verbs=ALL_VERBS))
kind("cut the laptop off", _laptop_offline)
kind("lose requests", _trouble(lost_requests=0.3))
kind("lose answers", _trouble(lost_answers=0.3))
kind("lose answers everywhere", _trouble(everywhere=True, lost_answers=0.15))
kind("let writes fail and take effect later", _trouble(late_writes=0.4))
kind("send writes twice", _trouble(everywhere=True, twice=0.5))
kind("cut downloads short", _trouble(cut_reads=0.1))
kind("slow the uplink", _slow_link(0.0, 400.0))
kind("raise the latency", _slow_link(0.7, float("inf")))


# ---- people and machines --------------------------------------------------------------------------------------------


def _stop_and_go(scene: Scene, fault: Fault) -> None:
    simulation = scene.simulation
    simulation.control("stop")

    def go() -> None:
        simulation.control("run", simulation.config.tokens)
        simulation.train()

    scene.at(fault.seconds, go)


def _slow_steps(scene: Scene, fault: Fault) -> None:
    machine = scene.machine(fault)
    usual = scene.usual.setdefault(f"steps of {fault.island}", machine.step_seconds)
    machine.step_seconds = lambda: 5.0 * usual()
    scene.at(fault.seconds, lambda: setattr(machine, "step_seconds", usual))


def _spoil(scene: Scene, fault: Fault) -> None:
    machine = scene.machine(fault)
    machine.spoilt = True
    scene.at(fault.seconds, lambda: setattr(machine, "spoilt", False))


kind("stop the run and let it go on", _stop_and_go)
kind("slow the island's steps", _slow_steps)
kind("spoil the island's arithmetic", _spoil)


HARMLESS = frozenset(
    {"cut the laptop off", "kill the supervisor", "freeze the supervisor", "start a second supervisor"}
)
"""Faults that are no reason for any island to stand still."""

EVERYBODY = frozenset(name for name in KINDS if "every" in name or "merging" in name or "stop the run" in name)
EXCUSED_SECONDS = 30.0


def inject(scene: Scene, fault: Fault) -> None:
    """Let a fault happen now."""
    scene.fired.append(fault)
    if fault.kind not in HARMLESS:
        everybody = scene.simulation.machines if fault.kind in EVERYBODY else (fault.island,)
        for island in everybody:
            scene.disturb(island, scene.simulation.world.now + fault.seconds + EXCUSED_SECONDS)
    scene.tell(f"fault: {fault}")
    KINDS[fault.kind](scene, fault)
