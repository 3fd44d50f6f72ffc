"""Operating-system facts about processes: dying with the parent, start times, CPU seconds, status files."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import TypeVar

import psutil
from pydantic import BaseModel, ValidationError

M = TypeVar("M", bound=BaseModel)

_PR_SET_PDEATHSIG = 1

AGENT_PID = "DILOCO_AGENT_PID"
"""Environment variable in which an agent tells its children who it is."""


def die_with_agent() -> None:
    """Ask for SIGTERM when the agent that started this process dies (Linux); exit at once if it is already gone."""
    agent = int(os.environ.get(AGENT_PID, os.getppid()))
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != agent:
        raise SystemExit(0)


def start_time(pid: int | None = None) -> float:
    """Return when a process started (seconds since 1970): with its pid, who it is."""
    return float(psutil.Process(pid).create_time())


def cpu_seconds(pid: int) -> float:
    """Return user plus system CPU seconds of a process, 0 when it is gone."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def spare_cpu() -> float:
    """Return a rough share of this machine's CPU that is not wanted by anybody, in (0, 1]."""
    return 1.0 / (1.0 + os.getloadavg()[0] / (os.cpu_count() or 1))


def write_status(path: Path, status: BaseModel) -> None:
    """Replace a status file whole. A full disk is no reason to stop training: the reader sees an old file then."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(status.model_dump_json())
        os.replace(temporary, path)
    except OSError:
        return


def read_status(path: Path, kind: type[M]) -> M | None:
    """Read a status file; None when there is none yet."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
