"""Where this machine keeps what a run leaves on it: logs and the islands' state, below `$DILOCO_HOME`."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    """Return `$DILOCO_HOME`, by default `~/.diloco`."""
    return Path(os.environ.get("DILOCO_HOME") or Path.home() / ".diloco").expanduser().absolute()


def run_dir(run: str, run_id: str) -> Path:
    """Return the folder of one run on this machine."""
    return home() / "runs" / f"{run}-{run_id}"


def island_dir(run: str, run_id: str, island: str) -> Path:
    """Return the state directory of an island."""
    return run_dir(run, run_id) / island


def island_log(run: str, run_id: str, island: str) -> Path:
    """Return the file that the agent of an island and its children write to."""
    return island_dir(run, run_id, island) / "island.log"


def supervisor_log(run: str, run_id: str) -> Path:
    """Return the file that a detached supervisor writes to."""
    return run_dir(run, run_id) / "supervisor.log"
