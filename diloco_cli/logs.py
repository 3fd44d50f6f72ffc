"""`diloco logs`: the newest lines of the islands' logs on this machine, and what is written to them from then on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from diloco_cli import places
from diloco_cli.errors import NothingThere
from diloco_cli.runs import require_run
from diloco_cli.spec import Spec
from diloco_runtime.clock import Clock
from diloco_runtime.errors import ConfigError, RunMismatch, StoreUnavailable

_STAMP = re.compile(r"\d{4}-\d\d-\d\dT")

FOLLOW_SECONDS = 0.3
"""Seconds between looks at files that are followed."""

BLOCK = 1 << 16
"""Bytes read at a time, backwards, to find the newest lines."""


@dataclass
class LogFile:
    """One log and how far it has been shown."""

    label: str
    path: Path
    offset: int = 0


def find_logs(spec: Spec, say: Callable[[str], None]) -> Path:
    """Return the folder of the run's logs on this machine.

    When the blackboard holds no such run (any more) or does not answer, that is the folder of the run of this name
    which logged last here, and `say` is told so; without one, what is wrong with the blackboard is raised.
    """
    try:
        run = require_run(spec)
    except (RunMismatch, StoreUnavailable) as error:
        folder = places.newest_run_dir(spec.name)
        if folder is None:
            raise
        say(f"note: {error}\nshowing the newest logs that a run of this name left on this machine, in {folder}")
        return folder
    return places.run_dir(run.name, run.id)


def log_files(spec: Spec, here: Path, island: str | None, supervisor: bool) -> list[LogFile]:
    """Return the logs to show, of those in folder `here`: of one island, of all, or of the detached supervisor.

    Raises `ConfigError` naming the islands when there is no such one.
    """
    if supervisor:
        return [LogFile("supervisor", here / places.SUPERVISOR_LOG)]
    left = [path.parent.name for path in here.glob(f"*/{places.ISLAND_LOG}")] if here.exists() else []
    names = list(dict.fromkeys([*spec.island_names, *sorted(left)]))
    if island is not None and island not in names:
        raise ConfigError(f"run {spec.name} has no island {island}; its islands are {', '.join(names)}")
    chosen = names if island is None else [island]
    return [LogFile(name, here / name / places.ISLAND_LOG) for name in chosen]


def newest_lines(file: LogFile, count: int) -> list[str]:
    """Return the last `count` whole lines of a log and remember where they end; nothing when there is no log."""
    data = b""
    try:
        with file.path.open("rb") as stream:
            position = end = stream.seek(0, 2)
            while position > 0 and data.count(b"\n") <= count:
                step = min(BLOCK, position)
                position -= step
                stream.seek(position)
                data = stream.read(step) + data
    except FileNotFoundError:
        return []
    whole, _, rest = data.rpartition(b"\n")
    file.offset = end - len(rest)
    lines = whole.decode(errors="replace").splitlines()
    return lines[max(0, len(lines) - count) :]


def new_lines(file: LogFile) -> list[str]:
    """Return whole lines that came since the last look; a file that became shorter is read from its beginning."""
    try:
        with file.path.open("rb") as stream:
            if stream.seek(0, 2) < file.offset:
                file.offset = 0
            stream.seek(file.offset)
            whole, newline, _ = stream.read().rpartition(b"\n")
    except FileNotFoundError:
        return []
    file.offset += len(whole) + len(newline)
    return (whole + newline).decode(errors="replace").splitlines()


def follow(files: list[LogFile], clock: Clock) -> Iterator[tuple[LogFile, str]]:
    """Yield new lines as they come, for ever."""
    while True:
        for file in files:
            for line in new_lines(file):
                yield file, line
        clock.sleep(FOLLOW_SECONDS)


def in_order(lines: list[tuple[LogFile, str]]) -> list[tuple[LogFile, str]]:
    """Sort lines of several logs by the time they begin with; a line without one stays behind the line before it."""
    stamped, newest = [], ""
    for place, (file, line) in enumerate(lines):
        if place and lines[place - 1][0] is not file:
            newest = ""
        newest = line.split(" ", 1)[0] if _STAMP.match(line) else newest
        stamped.append((newest, place, (file, line)))
    return [item for _, _, item in sorted(stamped, key=lambda entry: entry[:2])]


def show(files: list[LogFile], count: int, followed: bool, clock: Clock, write: Callable[[str], None]) -> None:
    """Write the newest lines of every log, then go on with new ones if asked; several logs get a label in front.

    Raises `NothingThere` when there is no line to show and new ones are not asked for.
    """
    width = max((len(file.label) for file in files), default=0)
    newest = [(file, line) for file in files for line in newest_lines(file, count)]
    if not (newest or followed):
        raise NothingThere(f"no log on this machine yet: {', '.join(str(file.path) for file in files)}")
    for file, line in chain(in_order(newest), follow(files, clock) if followed else ()):
        write(line if len(files) == 1 else f"{file.label:{width}} | {line}")
