"""What a look at the place where an island runs shows, and how what ran there ended. Pure.

A place is this machine, or a rented cluster. Whatever is started there carries the id of its launch, which its
heartbeats repeat: that is how a supervisor tells the heartbeat of what it sees from that of an earlier life.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Literal

from diloco_runtime.launch import Exit

PREEMPTIONS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
"""Signals by which others end a process; any other is the process's own fault and counts as a crash."""


@dataclass(frozen=True)
class Sight:
    """What a look at an island's place shows."""

    launch: str | None = None
    """Id of the launch whose agent is there; None: no agent is."""
    others: int = 0
    """What else of the island is there: processes without their agent."""
    held: bool = False
    """The agent is there but held by SIGSTOP."""
    pid: int | None = None
    """The agent's, when it is a process of this machine."""

    @property
    def present(self) -> bool:
        """Tell whether an agent is there."""
        return self.launch is not None


@dataclass(frozen=True)
class Ending:
    """How a launch ended."""

    kind: Literal["finished", "configuration", "run gone", "fenced", "preempted", "crashed"]
    words: str = ""


def ending_of(status: int) -> Ending:
    """Return what an agent's exit status means (negative: a signal)."""
    if status == Exit.DONE:
        return Ending("finished", "finished")
    if status == Exit.CONFIG:
        return Ending("configuration")
    if status == Exit.RUN_GONE:
        return Ending("run gone")
    if status == Exit.FENCED:
        return Ending("fenced", "replaced by a newer life")
    if status == Exit.LEFT:
        return Ending("preempted", "preempted")
    if status >= 0:
        return Ending("crashed", f"crashed with exit status {status}")
    name = signal.Signals(-status).name
    return (
        Ending("preempted", f"preempted by {name}")
        if -status in PREEMPTIONS
        else Ending("crashed", f"crashed by {name}")
    )
