"""Explore: thousands of simulated runs with faults, each made from a seed; every one replays exactly.

    python -m tests.sim.explore --schedules 10000 --jobs 2
    python -m tests.sim.explore --replay 4711

A failure prints its seed, the fewest of its faults that still make it fail, and the last events before it.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import logging
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from tests.sim.faults import KINDS
from tests.sim.playing import Outcome, run_schedule
from tests.sim.schedules import Schedule, make_schedule

TAPE_END = 30
"""Events that the description of a failure shows."""


def prepare() -> None:
    """Make this process fit for exploring: one thread, no log lines."""
    torch.set_num_threads(1)
    logging.getLogger("diloco").setLevel(logging.CRITICAL)


def _prepare_worker() -> None:
    """Make a process fit that only explores: garbage is looked for seldom, and not among what is there now."""
    prepare()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


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
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare_worker) as pool:
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
