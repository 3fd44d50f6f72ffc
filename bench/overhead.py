"""Inner steps per second of one learner with syncing over without, and where the CPU seconds go.

A real island with the demo's settings (agent, learner, syncer, a merge every four inner steps) and a plain loop of the
same inner steps run in turn for a few seconds each, on all cores and then both on one core, where background work has
nowhere else to go. What counts is the ratio of neighbouring segments.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from _contestants import START_SECONDS, Contestant, island, plain, wait_for
from _results import Lines, parse_arguments, print_table, quartiles
from _workplace import demo_spec, workplace, write_text

from diloco_cli.spec import Spec

SETTLE_SECONDS = 0.5
"""Not counted after each change: caches warm up, the island catches up with what it missed."""


@dataclass(frozen=True)
class Segment:
    """What a contestant did in one of its turns."""

    steps: int
    seconds: float
    cpu: dict[str, float]
    """CPU seconds by role."""
    cpu_span: float
    """Seconds over which they were counted: unlike `seconds` not from the end of a step to that of another."""

    @property
    def rate(self) -> float:
        """Inner steps per second."""
        return self.steps / self.seconds

    @property
    def main_cpu(self) -> float:
        """CPU seconds per inner step of the thread that makes them."""
        return next(iter(self.cpu.values())) / self.cpu_span / self.rate


def segment(contestant: Contestant, seconds: float) -> Segment:
    """Let a contestant run alone for `seconds` after it has settled."""
    before = contestant.steps()
    contestant.thaw()
    time.sleep(SETTLE_SECONDS)  # a span that is not measured, see above
    wait_for("a first step of the segment", lambda: contestant.steps() > before, START_SECONDS)
    steps, since = contestant.steps()
    cpu, cpu_since = contestant.cpu(), time.monotonic()
    time.sleep(seconds)  # the span that is measured
    wait_for("a second step of the segment", lambda: contestant.steps()[0] > steps, START_SECONDS)
    steps_then, until = contestant.steps()
    cpu_then, cpu_until = contestant.cpu(), time.monotonic()
    contestant.freeze()
    used = {role: cpu_then[role] - cpu[role] for role in cpu}
    return Segment(steps_then - steps, until - since, used, cpu_until - cpu_since)


def compare(spec: Spec, cores: set[int], pairs: int, seconds: float) -> tuple[list[Segment], list[Segment]]:
    """Return `pairs` segments with syncing and as many without, made in turn (which is first changes each time)."""
    with island(spec, cores) as synced:
        synced.freeze()
        with plain(spec, cores) as alone:
            alone.freeze()
            found: dict[int, list[Segment]] = {0: [], 1: []}
            for pair in range(pairs):
                for which in (pair % 2, 1 - pair % 2):
                    found[which].append(segment((synced, alone)[which], seconds))
    return found[0], found[1]


def ratios(where: str, synced: list[Segment], alone: list[Segment], lines: Lines) -> list[list[str | float]]:
    """Return the table's rows on speed for one placement."""
    rows: list[list[str | float]] = []
    for what, key, values in (
        ("inner steps / s", "steps_per_second", ([s.rate for s in synced], [s.rate for s in alone])),
        (
            "main thread CPU s / step",
            "main_cpu_seconds_per_step",
            ([s.main_cpu for s in synced], [s.main_cpu for s in alone]),
        ),
    ):
        medians = [statistics.median(v) for v in values]
        low, _, high = quartiles([a / b for a, b in zip(*values, strict=True)])
        ratio = medians[0] / medians[1]
        rows.append([f"{where}: {what}", *medians, f"{ratio:.3f}", f"{low:.3f} to {high:.3f}"])
        found = {"synced": medians[0], "plain": medians[1], "ratio": ratio, "pair_quartiles": [low, high]}
        lines.add(key, placement=where, pairs=len(synced), **found)
    return rows


def shares(where: str, synced: list[Segment], lines: Lines) -> list[list[str | float]]:
    """Return the table's rows on CPU seconds for one placement."""
    seconds = sum(s.cpu_span for s in synced)
    steps = seconds * sum(s.steps for s in synced) / sum(s.seconds for s in synced)
    rows: list[list[str | float]] = []
    used = {role: sum(s.cpu[role] for s in synced) for role in synced[0].cpu}
    main = next(iter(used))
    used["all but inner steps"] = sum(cpu for role, cpu in used.items() if role != main)
    for role, cpu in used.items():
        rows.append([f"{where}: {role}", cpu, f"{cpu / seconds:.1%}", 1000 * cpu / steps])
    lines.add("cpu_seconds", placement=where, wall_seconds=seconds, steps=steps, cpu_seconds=used)
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(str(__doc__))
    pairs, seconds = (5, 2.0) if arguments.quick else (20, 2.0)
    lines = Lines("overhead", arguments)
    every = os.sched_getaffinity(0)
    speed, used = [], []
    with workplace() as folder:
        for where, cores in (("all cores", every), ("one core", {max(every)})):
            place = Path(tempfile.mkdtemp(dir=folder))
            write_text(place)
            synced, alone = compare(demo_spec(place), cores, pairs, seconds)
            speed += ratios(where, synced, alone, lines)
            used += shares(where, synced, lines)
    headers = ("medians of the segments", "synced", "plain", "ratio", "quartiles of pairs")
    print_table("One learner with syncing and without, in turn", headers, speed)
    print_table("CPU of the island while it ran", ("role", "CPU s", "of a core", "CPU ms / step"), used)
    lines.finish()


if __name__ == "__main__":
    main()
