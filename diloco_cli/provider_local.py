"""Islands as processes of this machine: start, find, end.

The state of record is the processes themselves: every process of an island carries `DILOCO_RUN_ID` and `DILOCO_ISLAND`
in its environment, which it passes on to its children and cannot lose. There is no pid file to go stale, and signals
are sent through process objects that know their start time, so that a reused pid is never hit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import diloco_runtime
from diloco_cli import places
from diloco_cli.sights import Ending, Sight, ending_of
from diloco_cli.spec import Island, Spec
from diloco_runtime.clock import Clock
from diloco_runtime.store import without_options

if TYPE_CHECKING:
    import psutil

RUN_MARK, ISLAND_MARK = "DILOCO_RUN_ID", "DILOCO_ISLAND"

AGENT = (sys.executable, "-m", "diloco_runtime.island")
"""What an island's agent is started with."""

SCAN_SECONDS = 2.0
"""Seconds between scans of all processes while every known agent is there; a scan costs milliseconds of CPU."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True)
class IslandProcesses:
    """The living processes of one island on this machine."""

    agent: psutil.Process | None = None
    others: tuple[psutil.Process, ...] = ()

    def __bool__(self) -> bool:
        return self.agent is not None or bool(self.others)


def find_islands(run_id: str) -> dict[str, IslandProcesses]:
    """Return every island of a run that has a living process here.

    A process between fork and exec still shows its parent's environment, so that a scan may miss an island that is
    being started at this instant: who must be sure that nobody is left scans again after the starter is gone.
    """
    import psutil

    found: dict[str, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        try:
            marks = process.environ()
            if marks.get(RUN_MARK) == run_id and ISLAND_MARK in marks and is_alive(process):
                found.setdefault(marks[ISLAND_MARK], []).append(process)
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's
    return {name: _sort(processes) for name, processes in found.items()}


def find_run_ids(store: str, run: str) -> set[str]:
    """Return the ids of the runs whose agents work here for this folder of a store, also of runs purged meanwhile."""
    import psutil

    wanted = (without_options(store), run)
    found = set()
    for process in psutil.process_iter():
        try:
            if _works_for(process.cmdline()) == wanted and (run_id := process.environ().get(RUN_MARK)):
                found.add(run_id)
        except (psutil.Error, OSError):
            continue
    return found


def _works_for(arguments: list[str]) -> tuple[str, str] | None:
    """Return the store and the name of the run that an island's process was started for."""
    given = _given(arguments)
    return (without_options(given["--store"]), given["--run"]) if {"--store", "--run"} <= given.keys() else None


def _given(arguments: list[str]) -> dict[str, str]:
    return dict(zip(arguments, arguments[1:], strict=False))


def _sort(processes: list[psutil.Process]) -> IslandProcesses:
    """Tell the agent, which leads its session, from its children."""
    agent = next((process for process in processes if _leads(process)), None)
    return IslandProcesses(agent, tuple(process for process in processes if process is not agent))


def _leads(process: psutil.Process) -> bool:
    try:
        return os.getsid(process.pid) == int(process.pid)
    except OSError:
        return False


def is_alive(process: psutil.Process) -> bool:
    """Tell whether this very process (not another one with its pid) exists and is no zombie."""
    import psutil

    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def sight(island: IslandProcesses) -> Sight:
    """Return what a look at an island's processes shows."""
    import psutil

    if island.agent is None:
        return Sight(others=len(island.others))
    try:
        held, launch = island.agent.status() == psutil.STATUS_STOPPED, _launch_of(island.agent.cmdline())
    except psutil.Error:
        held, launch = False, ""
    return Sight(launch, len(island.others), held, island.agent.pid)


def _launch_of(arguments: list[str]) -> str:
    return _given(arguments).get("--launch", "")


def end(island: IslandProcesses, force: bool) -> None:
    """Ask an island to leave (SIGTERM to its agent, which tells its children), or kill all of it, the agent first."""
    import psutil

    everybody = ([island.agent] if island.agent is not None else []) + list(island.others)
    for process in everybody if force or island.agent is None else everybody[:1]:
        try:
            if force:
                process.kill()
            else:
                process.terminate()
        except psutil.NoSuchProcess:
            continue


def find_trains(spec_path: Path) -> list[psutil.Process]:
    """Return the other `diloco train` processes of this machine that were started on this very spec."""
    import psutil

    own = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and _trains(process.cmdline(), process.cwd(), spec_path) and is_alive(process):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def _trains(command: Sequence[str], cwd: str, spec_path: Path) -> bool:
    """Tell whether a command line is `diloco train` on this spec."""
    if "train" not in command or not Path(command[0]).name.startswith(("python", "diloco")):
        return False
    place = command.index("train")
    program = {Path(part).name for part in command[:place]} | {Path(part).parent.name for part in command[:place]}
    if not program & {"diloco", "diloco_cli", "diloco_cli.__main__"}:
        return False
    specs = [part for part in command[place + 1 :] if not part.startswith("-")] or ["run.toml"]
    return any(Path(cwd, part).expanduser().resolve() == spec_path.resolve() for part in specs)


class LocalProvider:
    """Starts, watches and ends the islands of one run on this machine."""

    def __init__(self, spec: Spec, run_id: str, clock: Clock, agent: Sequence[str] = AGENT) -> None:
        """`agent`: the command of an island's agent, without its arguments."""
        self._spec = spec
        self._clock = clock
        self._scanned: float | None = None
        self._run_id = run_id
        self._agent = tuple(agent)
        self._children: dict[str, tuple[str, subprocess.Popen[bytes]]] = {}
        """Agents that this very process started, and their launches."""
        self._known: dict[str, psutil.Process] = {}
        self._seen: dict[str, IslandProcesses] = {}

    def start(self, island: Island, launch: str) -> str:
        """Start an island's agent, detached from this process and its terminal; say where. Raises `OSError`."""
        import psutil

        log = places.island_log(self._spec.name, self._run_id, island.name)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            child = subprocess.Popen(
                [*self._agent, *self._arguments(island, log.parent, launch)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=self._spec.root,
                env=self._environment(island),
            )
        self._children[island.name] = (launch, child)
        self._known.pop(island.name, None)
        try:
            self._known[island.name] = psutil.Process(child.pid)
        except psutil.NoSuchProcess:
            pass  # ended at once: `observe` collects its exit status
        return f"process {child.pid}"

    def _arguments(self, island: Island, state_dir: Path, launch: str) -> list[str]:
        spec = self._spec
        return [
            *("--store", spec.store, "--run", spec.name, "--run-id", self._run_id, "--island", island.name),
            *("--state-dir", str(state_dir), "--root", str(spec.root)),
            *("--batch-size", str(island.batch_size), "--threads", str(island.threads)),
            *("--launch", launch),
        ]

    def _environment(self, island: Island) -> dict[str, str]:
        source = str(Path(diloco_runtime.__file__).resolve().parent.parent)
        path = [source, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        return {
            **os.environ,
            RUN_MARK: self._run_id,
            ISLAND_MARK: island.name,
            "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),  # the same source as here, whatever is installed
            "PYTHONSAFEPATH": "1",  # a file of the spec's folder must not shadow the standard library
            "PYTHONUNBUFFERED": "1",
            **dict.fromkeys(THREAD_VARIABLES, str(island.threads)),
        }

    def sights(self) -> dict[str, Sight]:
        """Return `observe` as plain values.

        A child of this very process is known by its launch: until it has replaced its image, its command line is ours.
        """
        found = {name: sight(island) for name, island in self.observe().items()}
        for name, (launch, child) in self._children.items():
            if name in found and found[name].pid == child.pid:
                found[name] = replace(found[name], launch=launch)
        return found

    def observe(self) -> dict[str, IslandProcesses]:
        """Return the islands that have living processes now.

        An agent that is known is asked for itself: that is cheap, and a scan can miss a process that is just replacing
        its image. All processes are scanned when an agent is gone, and now and then.
        """
        now = self._clock.monotonic()
        alive = {name: known for name, known in self._known.items() if is_alive(known)}
        recent = self._scanned is not None and now - self._scanned < SCAN_SECONDS
        if recent and alive.keys() == self._known.keys() == self._seen.keys():
            return self._seen
        found, self._scanned = find_islands(self._run_id), now
        for name, known in alive.items():
            rest = found.get(name, IslandProcesses())
            others = [p for p in (rest.agent, *rest.others) if p is not None and p.pid != known.pid]
            found[name] = IslandProcesses(known, tuple(others))
        self._known = {name: island.agent for name, island in found.items() if island.agent is not None}
        self._seen = found
        return found

    def ending(self, name: str, launch: str | None) -> Ending | None:
        """Return how a launch ended; None when it lives, or was not made by this very process: then nobody can know."""
        made, child = self._children.get(name, (None, None))
        status = child.poll() if child is not None and made == launch else None
        return None if status is None else ending_of(status)

    def end(self, name: str, force: bool) -> None:
        """Ask an island to leave, or kill all its processes."""
        end(find_islands(self._run_id).get(name, self._seen.get(name, IslandProcesses())), force)
