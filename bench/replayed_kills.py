"""A real run whose islands are killed at random, and its forecast from the recorded kills.

Four islands of the demo train on this machine through the real command line; each is ended by SIGKILL after an
exponentially distributed life (mean 60 seconds from the start of its processes), and the supervisor starts it again.
What was recorded (kills, seconds per inner step and per start) is given to the forecast, and the goodput that it finds
is printed beside the real one. Exits with 1 when they differ by more than five points.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from _results import Lines, parse_arguments, print_table
from _workplace import DEMO, NO_END, workplace

from diloco_cli.assumptions import IslandAssumptions
from diloco_cli.places import island_log
from diloco_cli.runs import Run, require_run
from diloco_cli.simulate_case import replay
from diloco_cli.simulation.forecast_failures import Loss
from diloco_cli.spec import Spec, load_spec

ISLANDS = ("a", "b", "c", "d")
MTBF_SECONDS = 60.0
SECONDS, QUICK_SECONDS = 600.0, 120.0
MOST_POINTS = 0.05
"""Difference of the two goodputs above which the forecast has failed."""
LOOK_SECONDS = 0.1
START_LIMIT = 120.0
SEED = 20260421
DILOCO = (sys.executable, "-m", "diloco_cli")
STAMP = re.compile(r"(\S+)Z \S+ \S+ (?:island \S+ (begins) life \d+|life \d+ (starts) at )")


def write_spec(folder: Path) -> Spec:
    """Write the demo's spec with four islands and without an end."""
    settings = DEMO.read_text().partition("[islands.")[0]
    settings, found = re.subn(r"^tokens = .*$", f"tokens = {NO_END}", settings, flags=re.MULTILINE)
    if found != 1:
        raise SystemExit(f"{DEMO} is not the spec that this bench was written for")
    (folder / "run.toml").write_text(settings + "".join(f"[islands.{name}]\n" for name in ISLANDS))
    (folder / "data").symlink_to(DEMO.parent / "data", target_is_directory=True)
    return load_spec(folder / "run.toml")


@contextlib.contextmanager
def training(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `diloco train` until the block ends, then take everything down."""
    with (folder / "train.out").open("wb") as output:
        process = subprocess.Popen(
            [*DILOCO, "train", "run.toml", "--yes"], cwd=folder, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        subprocess.run([*DILOCO, "down", "run.toml", "--now", "--yes"], cwd=folder, capture_output=True, check=False)
        process.terminate()
        process.wait()


class Killer:
    """Ends islands at random and keeps the tape."""

    def __init__(self) -> None:
        self.tape: list[tuple[float, str]] = []
        """When (seconds since 1970) which island was ended."""
        self.began = float("inf")
        """When the first island's processes started, seconds since 1970."""
        self._chance = random.Random(SEED)
        self._agents: dict[str, psutil.Process] = {}
        self._due: dict[str, float] = {}

    def look(self) -> None:
        """Find islands that were started, end those whose time has come."""
        for process in self._new_agents():
            name, started = process.environ()["DILOCO_ISLAND"], process.create_time()
            self._agents[name] = process
            self._due[name] = started + self._chance.expovariate(1.0 / MTBF_SECONDS)
            self.began = min(self.began, started)
        for name, due in list(self._due.items()):
            if time.time() >= due:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._agents[name].pid, signal.SIGKILL)  # an agent leads its island's process group
                self.tape.append((time.time(), name))
                del self._due[name]

    def _new_agents(self) -> Iterator[psutil.Process]:
        home = os.environ["DILOCO_HOME"]
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process in self._agents.values() or "diloco_runtime.island" not in process.cmdline():
                    continue
                if process.environ().get("DILOCO_HOME") == home and process.status() != psutil.STATUS_ZOMBIE:
                    yield process


def live(folder: Path, spec: Spec, seconds: float) -> tuple[Killer, dict[str, Any], dict[str, IslandAssumptions]]:
    """Let the islands train and die for so many seconds; return the tape, the status then, and what was measured."""
    killer = Killer()
    with training(folder) as supervisor:
        limit = time.time() + START_LIMIT
        while time.time() < min(limit, killer.began + seconds):
            if supervisor.poll() is not None:
                break
            killer.look()
            limit = limit if killer.began == float("inf") else float("inf")
            time.sleep(LOOK_SECONDS)  # the interval of a poll with a deadline
        if supervisor.poll() is not None or killer.began == float("inf"):
            raise SystemExit(f"the run did not go on:\n{(folder / 'train.out').read_text()}")
        command = [*DILOCO, "status", "run.toml", "--json"]
        said = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
        assumed = {name: measured(spec, require_run(spec), name) for name in ISLANDS}
    return killer, json.loads(said), assumed


def measured(spec: Spec, run: Run, island: str) -> IslandAssumptions:
    """Return an island's mean seconds per inner step and per start."""
    inner = run.config.inner
    busy, steps, life = 0.0, 0.0, 1
    while run.board.read_claim(island, life) is not None:
        beat = run.board.read_heartbeat(island, life)
        if beat is not None and beat.learner.fates:
            busy += beat.learner.busy_seconds
            steps += beat.learner.fates[0].processed / (inner.batch_size * inner.sequence_length)
        life += 1
    return IslandAssumptions(
        step_seconds=busy / steps, start_seconds=statistics.mean(starts(spec, run, island)), latency=0.001,
        recovery_seconds=0.0, up_gbits=10.0, down_gbits=10.0, mtbf_hours=0.0,
    )  # fmt: skip


def starts(spec: Spec, run: Run, island: str) -> list[float]:
    """Return how long each start took that was not cut short, in seconds."""
    found, begun = [], None
    for line in island_log(spec.name, run.id, island).read_text().splitlines():
        stamp = STAMP.match(line)
        if stamp is None:
            continue
        at = datetime.fromisoformat(stamp[1]).timestamp()
        if stamp[2]:
            begun = at
        elif begun is not None:
            found.append(at - begun)
            begun = None
    return found


def main() -> int:
    """Train, forecast, compare."""
    arguments = parse_arguments(str(__doc__))
    lines = Lines("replayed_kills", arguments)
    seconds = QUICK_SECONDS if arguments.quick else SECONDS
    subprocess.run([sys.executable, str(DEMO.with_name("get_corpus.py"))], check=True, stdout=subprocess.DEVNULL)
    with workplace() as folder:
        spec = write_spec(folder)
        killer, status, assumed = live(folder, spec, seconds)
        kills = [Loss(at - killer.began, name) for at, name in killer.tape]
        outcome, found = replay(spec, kills, seconds, assumed)
    real, forecast = float(status["goodput"]), float(found.goodput or 0.0)
    rows = [
        ["goodput", f"{100 * real:.1f} %", f"{100 * forecast:.1f} %"],
        ["outer steps", int(status["commits"]), int(outcome.end.commits)],
    ]
    title = f"{len(ISLANDS)} islands, {seconds:.0f} s, {len(kills)} kills"
    print_table(title, ("", "real", "forecast"), rows)
    for name, island in assumed.items():
        print(f"  island {name}: {island.step_seconds:.3f} s per inner step, {island.start_seconds:.1f} s per start")
    print(f"\nthe forecast differs by {100 * (forecast - real):+.1f} points")
    lines.add("goodput", real=real, forecast=forecast, kills=[list(kill[:2]) for kill in kills], seconds=seconds)
    lines.add("assumed", **{name: island.model_dump() for name, island in assumed.items()})
    lines.finish()
    return 0 if abs(forecast - real) <= MOST_POINTS else 1


if __name__ == "__main__":
    sys.exit(main())
