"""Explore: thousands of simulated runs with faults, each made from a seed; every one replays exactly.

    python -m tests.sim.explore --schedules 10000 --jobs 2
    python -m tests.sim.explore --replay 4711

A failure prints its seed, the fewest of its faults that still make it fail, and the last events before it.
"""

from __future__ import annotations

import argparse
import collections
import functools
import hashlib
import logging
import multiprocessing
import random
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from diloco_cli.simulation.run import RUN_ID, Simulation, Site
from diloco_cli.spec import ProviderTable
from diloco_runtime.audit import read_audit
from diloco_runtime.config import RunConfig
from diloco_runtime.purge import purge_run
from tests.sim.faults import KINDS, Fault, Scene, inject
from tests.sim.invariants import Watch
from tests.support.tasks import TinyTask

SETTLE_SECONDS = 400.0
"""Virtual seconds within which a run must end once nothing goes wrong any more."""

LEAST_COMMITS = 20

BEATS = (0.3, 0.3, 0.3, 1.0)
"""Seconds between heartbeats, to which steps, faults and patience are in proportion. Short ones are cheap to simulate:
the program polls a few times per merge then, at its fastest, and not ten or twenty times."""

PURGED_SHARE = 0.08
"""Of the schedules: their runs do not end, they are purged under their living islands."""

PURGE = "purge the run under its islands"
TAPE_END = 30


@dataclass(frozen=True)
class Schedule:
    """One run with its faults."""

    seed: int
    config: RunConfig
    sites: dict[str, Site]
    faults: tuple[Fault, ...]
    purged: bool = False
    """The run does not end: it is purged under its living islands."""


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


def make_config(chance: random.Random, islands: int, beat: float) -> RunConfig:
    """Return settings for a short run of at least `LEAST_COMMITS` commits; `beat`: seconds between heartbeats."""
    fragments = chance.choice((1, 2, 2, 3))
    every = fragments * chance.choice((1, 1, 1, 2))
    preset = chance.choice(("decoupled",) * 4 + ("streaming", "diloco"))
    if preset == "diloco":
        fragments, every = 1, chance.choice((1, 2))
    sync = {
        "preset": preset,
        "fragments": fragments,
        "sync_every": every,
        "min_quorum": islands if preset != "decoupled" else chance.randint(1, islands),
        "heartbeat_every": beat,
        "dead_after_reads": 3,
        "takeover_after": 2.0 * beat,
        "checkpoint_every": chance.choice((2.0, 5.0)) * beat,
        "drain_timeout": 2.0 * beat,
        "snapshot_every": chance.choice((5, 50)),
        "compression": chance.choice(("fp32", "bf16")),
    }
    tokens = (LEAST_COMMITS + 3) * islands * TinyTask.BATCH * every // fragments
    optimizer = chance.choice(("sgd", "sgd", "adamw"))
    inner = {"lr": 0.01, "batch_size": TinyTask.BATCH, "optimizer": optimizer, "grad_clip": 0.0}
    model = {"kind": "tests.support.tasks:tiny"}
    return RunConfig.model_validate({"name": "chaos", "tokens": tokens, "model": model, "inner": inner, "sync": sync})


def make_schedule(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Schedule:
    """Return the schedule of a seed; `kinds`: of which its faults are."""
    chance = random.Random(seed)
    names = ("a", "b", "c")[: chance.choice((2, 2, 2, 2, 3))]
    beat = chance.choice(BEATS)
    config = make_config(chance, len(names), beat)
    pace = beat * chance.uniform(0.15, 0.35)
    sites = {
        name: Site(
            step_seconds=pace * chance.choice((1.0, 1.0, 1.2, 2.0)),
            latency=chance.choice((0.002, 0.01, 0.01, 0.05)) * beat,
            up=chance.choice((float("inf"), float("inf"), 50_000.0 / beat)),
            clock_offset=chance.uniform(-100.0, 100.0),
            clock_rate=chance.uniform(0.97, 1.03),
            give_up_after=2.0 * beat,
        )
        for name in names
    }
    length = 2.0 * beat + 1.0 + LEAST_COMMITS * pace
    faults = [
        Fault(
            kind=chance.choice(kinds),
            at=chance.uniform(0.2, length),
            seconds=chance.choice((0.5, 1.5, 3.0)) * chance.uniform(0.5, 1.5) * beat,
            island=chance.choice(names),
            pick=chance.getrandbits(30),
        )
        for _ in range(chance.randint(3, 5))
    ]
    purged = chance.random() < PURGED_SHARE
    return Schedule(seed, config, sites, tuple(sorted(faults, key=lambda fault: fault.at)), purged)


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
    simulation = Simulation(schedule.config, TinyTask, schedule.sites, schedule.seed, provider, start_seconds=0.3)
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
        if gone and log and log[-1].phase == "run" and control is not None and control.action == "stop":
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
        enough = head.seq >= LEAST_COMMITS - (len(log[0].fragments) if head.phase == "run" else 0)
        asked = control.action if control is not None and control.number > head.control else ""
        learners = [machine.processes().get("learner") for machine in self._simulation.machines.values()]
        if enough and head.phase == "run" and asked != "stop" and any(learners):
            self._simulation.control("stop")
        elif head.phase == "final" and not enough and asked != "run":
            size = sum(fragment.numel for fragment in log[0].fragments)
            self._simulation.control("run", head.credited_total // size + self._config.tokens // 2)
        return head.phase == "final" and enough and asked != "run"


# ---- many of them ---------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Make this process fit for exploring: one thread, no log lines."""
    torch.set_num_threads(1)
    logging.getLogger("diloco").setLevel(logging.CRITICAL)


def explore_one(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> Outcome:
    """Run the schedule of a seed."""
    return run_schedule(make_schedule(seed, kinds))


def explore(
    seeds: Iterable[int], jobs: int, on_outcome: Callable[[Outcome], None], kinds: Sequence[str] = tuple(KINDS)
) -> None:
    """Run many schedules, in several processes."""
    if jobs == 1:
        prepare()
        for seed in seeds:
            on_outcome(explore_one(seed, kinds))
        return
    with multiprocessing.get_context("spawn").Pool(jobs, prepare) as pool:
        for outcome in pool.imap_unordered(functools.partial(explore_one, kinds=kinds), seeds, chunksize=8):
            on_outcome(outcome)


def shrink(schedule: Schedule) -> Schedule:
    """Return the schedule with as few of its faults as still make it fail."""
    faults = list(schedule.faults)
    index = 0
    while index < len(faults):
        fewer = replace(schedule, faults=(*faults[:index], *faults[index + 1 :]))
        if run_schedule(fewer).violations:
            del faults[index]
        else:
            index += 1
    return replace(schedule, faults=tuple(faults))


def describe_failure(seed: int, kinds: Sequence[str] = tuple(KINDS)) -> str:
    """Return everything that somebody needs to understand a failing seed."""
    schedule = shrink(make_schedule(seed, kinds))
    outcome = run_schedule(schedule, keep=True)
    lines = [f"seed {seed} fails with {len(schedule.faults)} of its faults:"]
    lines += [f"  {fault}" for fault in schedule.faults]
    lines += [f"  settings {schedule.config.sync.model_dump(exclude_defaults=True)}"]
    lines += [f"  {name}: {site}" for name, site in schedule.sites.items()]
    lines += ["last events:", *(f"  {event}" for event in outcome.events[-TAPE_END:])]
    lines += ["violations:", *(f"  {violation}" for violation in outcome.violations[:5])]
    return "\n".join(lines)


@dataclass
class Tally:
    """Counts over many schedules."""

    schedules: int = 0
    commits: int = 0
    fewest_commits: int = 10**9
    fewest_faults: int = 10**9
    faults: collections.Counter[str] = field(default_factory=collections.Counter)
    states: set[str] = field(default_factory=set)
    failed: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Count one outcome."""
        self.schedules += 1
        self.commits += outcome.commits
        if not outcome.violations:
            self.fewest_commits = min(self.fewest_commits, outcome.commits)
            self.fewest_faults = min(self.fewest_faults, len(outcome.fired))
        self.faults.update(outcome.fired)
        self.states |= outcome.states
        if outcome.violations:
            self.failed.append(outcome)

    def lines(self) -> list[str]:
        """Return the counts for people."""
        found = [
            f"{self.schedules} schedules, {self.commits} commits (at least {self.fewest_commits} each), "
            f"{sum(self.faults.values())} faults (at least {self.fewest_faults} each) of {len(self.faults)} kinds, "
            f"{len(self.states)} states reached"
        ]
        found += [f"  {count:6d}  {name}" for name, count in self.faults.most_common()]
        return found


def main(argv: Sequence[str] | None = None) -> int:
    """Explore, or replay one seed."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.explore", description=str(__doc__).splitlines()[0])
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=1, help="first seed")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--stop-after", type=int, default=10, help="failures after which to stop")
    parser.add_argument("--replay", type=int, help="run this seed alone, print its tape")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=tuple(KINDS), help="faults of these kinds only")
    parser.add_argument("--brief", action="store_true", help="name failures and their violations, and no more")
    arguments = parser.parse_args(argv)
    prepare()
    if arguments.replay is not None:
        outcome = run_schedule(make_schedule(arguments.replay, arguments.kinds), keep=True)
        print("\n".join(outcome.events))
        print("\n".join(outcome.violations))
        print(f"tape {outcome.tape}")
        return bool(outcome.violations)
    tally, begun = Tally(), time.monotonic()
    seeds = iter(range(arguments.first, arguments.first + arguments.schedules))

    def enough() -> Iterable[int]:
        for seed in seeds:
            if len(tally.failed) >= arguments.stop_after:
                return
            yield seed

    explore(enough(), arguments.jobs, tally.add, arguments.kinds)
    for outcome in tally.failed[: arguments.stop_after]:
        brief = f"seed {outcome.seed}: {outcome.violations[0]}"
        print(brief if arguments.brief else describe_failure(outcome.seed, arguments.kinds))
    if arguments.brief:
        return bool(tally.failed)
    print("\n".join(tally.lines()))
    print(f"{len(tally.failed)} failed; {time.monotonic() - begun:.0f} s")
    return bool(tally.failed)


if __name__ == "__main__":
    sys.exit(main())
