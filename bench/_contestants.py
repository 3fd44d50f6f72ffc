"""The two that `overhead.py` lets run in turn: a real island, and a learner that does nothing but inner steps.

Each is a process group. While one runs the other is held by SIGSTOP, so that both see the same machine, the same
neighbours and, a few seconds apart, the same load.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from _plain_learner import COUNT

from diloco_cli import places
from diloco_cli.provider_local import THREAD_VARIABLES, LocalProvider
from diloco_cli.runs import create_run
from diloco_cli.spec import Spec

START_SECONDS = 120.0
"""Longest time to the first inner steps: imports of torch on a machine that is busy."""

LEARNER_THREADS = ("learner: inner steps", "learner: follower", "learner: publisher", "learner: checkpointer")
"""A learner's threads in the order in which it starts them: its main thread and the three in the background."""


@dataclass(frozen=True)
class Contestant:
    """One of the two, as a process group with a step counter."""

    group: int
    steps: Callable[[], tuple[int, float]]
    """Returns (inner steps so far, when the newest of them had been counted)."""
    cpu: Callable[[], dict[str, float]]
    """Returns CPU seconds so far by role; the first role makes the inner steps."""

    def freeze(self) -> None:
        os.killpg(self.group, signal.SIGSTOP)

    def thaw(self) -> None:
        os.killpg(self.group, signal.SIGCONT)


def wait_for(what: str, ready: Callable[[], bool], limit: float) -> None:
    """Wait for a condition; raise `SystemExit` naming it when it does not come within `limit` seconds."""
    deadline = time.monotonic() + limit
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what} did not come within {limit:.0f} s")
        time.sleep(0.02)  # the interval of a poll with a deadline


def thread_seconds(pid: int, thread: int) -> float:
    """Return CPU seconds of one thread, in nanoseconds' resolution where the kernel counts so."""
    task = Path(f"/proc/{pid}/task/{thread}")
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except FileNotFoundError:
        user, system = (task / "stat").read_text().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def process_seconds(pid: int) -> float:
    """Return CPU seconds of the living threads of a process."""
    return sum(thread_seconds(pid, int(name)) for name in os.listdir(f"/proc/{pid}/task"))


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Confine what is started meanwhile to these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def killed_at_the_end(group: int) -> Iterator[None]:
    """Kill a process group that was started here, frozen or not, and wait until all of it is gone."""
    leader = psutil.Process(group)
    try:
        yield
    finally:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            members = [leader, *leader.children(recursive=True)]
            os.killpg(group, signal.SIGKILL)
            psutil.wait_procs(members, timeout=10.0)


@contextmanager
def island(spec: Spec, cores: set[int]) -> Iterator[Contestant]:
    """Start the spec's first island as `diloco train` does: agent, learner, syncer."""
    run, _ = create_run(spec)
    name = spec.islands[0].name
    with on_cores(cores):
        group = LocalProvider(spec, run.id, run.clock).start(spec.islands[0])
    status = places.island_dir(spec.name, run.id, name) / "learner-status.json"

    def reported() -> tuple[dict[str, Any], float]:
        # The file is replaced whole, right after an inner step: its time is that of the step.
        with status.open("rb") as file:
            return json.load(file), os.fstat(file.fileno()).st_mtime

    def steps() -> tuple[int, float]:
        said, when = reported()
        return int(said["step"]), when

    def merges() -> bool:
        # The first merge makes the syncer import torch: that is part of a start, not of the cost of going on.
        return status.exists() and int(reported()[0]["adopted"]) >= spec.config.sync.fragments

    def cpu() -> dict[str, float]:
        children = {child.cmdline()[2].rpartition(".")[2]: child.pid for child in psutil.Process(group).children()}
        learner = children["learner_main"]
        threads = sorted(int(thread) for thread in os.listdir(f"/proc/{learner}/task"))
        if len(threads) < len(LEARNER_THREADS):
            raise SystemExit(f"the learner has {len(threads)} threads; this bench expects {LEARNER_THREADS}")
        used = [thread_seconds(learner, thread) for thread in threads]
        found = dict(zip(LEARNER_THREADS, used, strict=False))
        found["learner: others"] = sum(used[len(LEARNER_THREADS) :])
        return {**found, "agent": process_seconds(group), "syncer": process_seconds(children["syncer_main"])}

    with killed_at_the_end(group):
        wait_for("the island's first merge of every fragment", merges, START_SECONDS)
        yield Contestant(group, steps, cpu)


@contextmanager
def plain(spec: Spec, cores: set[int]) -> Iterator[Contestant]:
    """Start a learner of the same spec that makes inner steps and nothing else."""
    config, count = spec.root / "config.json", spec.root / "count"
    config.write_text(spec.config.model_dump_json())
    count.write_bytes(COUNT.pack(0, 0.0))
    script = Path(__file__).with_name("_plain_learner.py")
    command = [sys.executable, str(script), "--config", str(config), "--root", str(spec.root), "--count", str(count)]
    threads = dict.fromkeys(THREAD_VARIABLES, str(spec.islands[0].threads))
    with on_cores(cores):
        process = subprocess.Popen(command, env={**os.environ, **threads}, start_new_session=True)

    def steps() -> tuple[int, float]:
        done, when = COUNT.unpack(count.read_bytes())
        return int(done), float(when)

    with killed_at_the_end(process.pid):
        wait_for("the plain learner's first steps", lambda: steps()[0] > 2, START_SECONDS)
        yield Contestant(process.pid, steps, lambda: {"inner steps": process_seconds(process.pid)})
