"""Where this machine keeps what a run leaves on it: logs and the islands' state, below `$DILOCO_HOME`."""

from __future__ import annotations

import os
import re
from pathlib import Path

ISLAND_LOG, SUPERVISOR_LOG = "island.log", "supervisor.log"
_RUN_ID = re.compile(r"[0-9a-f]{8,32}")


def home() -> Path:
    """Return `$DILOCO_HOME`, by default `~/.diloco`."""
    return Path(os.environ.get("DILOCO_HOME") or Path.home() / ".diloco").expanduser().absolute()


def run_dir(run: str, run_id: str) -> Path:
    """Return the folder of one run on this machine."""
    return home() / "runs" / f"{run}-{run_id}"


def newest_run_dir(run: str) -> Path | None:
    """Return the folder of the run of this name that logged last on this machine, wherever its blackboard is or was."""
    logged: dict[Path, int] = {}
    for folder in (home() / "runs").glob(f"{run}-*"):
        if _RUN_ID.fullmatch(folder.name.removeprefix(f"{run}-")) is None:
            continue  # of a run whose longer name begins like this one
        for log in (*folder.glob(f"*/{ISLAND_LOG}"), *folder.glob(SUPERVISOR_LOG)):
            logged[folder] = max(logged.get(folder, 0), log.stat().st_mtime_ns)
    return max(logged, key=logged.__getitem__, default=None)


def island_dir(run: str, run_id: str, island: str) -> Path:
    """Return the state directory of an island."""
    return run_dir(run, run_id) / island


def island_log(run: str, run_id: str, island: str) -> Path:
    """Return the file that the agent of an island and its children write to."""
    return island_dir(run, run_id, island) / ISLAND_LOG


def supervisor_log(run: str, run_id: str) -> Path:
    """Return the file that a detached supervisor writes to."""
    return run_dir(run, run_id) / SUPERVISOR_LOG
