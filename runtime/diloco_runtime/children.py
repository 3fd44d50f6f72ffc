"""The agent's two children: started, waited for, signalled, measured, and asked for what they say of themselves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Protocol

from diloco_runtime.agent_logic import Child
from diloco_runtime.launch import Launch
from diloco_runtime.processes import AGENT_PID, cpu_seconds, read_status
from diloco_runtime.records import LearnerStatus, SyncerStatus

_MODULES: dict[Child, str] = {"learner": "diloco_runtime.learner_main", "syncer": "diloco_runtime.syncer_main"}


class Children(Protocol):
    """What an agent needs of its children."""

    def start(self, child: Child, incarnation: int) -> None:
        """Start a child; what an earlier one said of itself is forgotten."""

    def ended(self) -> list[tuple[Child, int]]:
        """Return the children that ended since the last call, with their exit codes (negative: by a signal)."""

    def last_words(self, child: Child) -> str:
        """Return why the last life of a child failed, in one sentence; empty when it did not say."""

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a child that is still there."""

    def cpu(self) -> dict[str, float]:
        """Return CPU seconds so far of the agent, and of learner and syncer over all their lives under it."""

    def learner(self) -> LearnerStatus | None:
        """Return what the learner says of itself; None before it has said anything."""

    def syncer(self) -> SyncerStatus | None:
        """Return what the syncer says of itself; None before it has said anything."""


@dataclass
class ChildProcesses:
    """Children that are processes of this machine."""

    launch: Launch
    running: dict[Child, subprocess.Popen[bytes]] = field(default_factory=dict)
    _cpu_before: dict[str, float] = field(default_factory=dict)
    """CPU seconds of lives that have ended, as last measured."""
    _cpu_now: dict[str, float] = field(default_factory=dict)

    def start(self, child: Child, incarnation: int) -> None:
        """Start a child from the calling thread, with whose end (the main thread's) the child is to end."""
        path = self.launch.learner_status() if child == "learner" else self.launch.syncer_status()
        for old in (path, self.launch.last_words(child)):
            old.unlink(missing_ok=True)
        self._cpu_before[child] = self._cpu_before.get(child, 0.0) + self._cpu_now.pop(child, 0.0)
        command = [sys.executable, "-m", _MODULES[child], *self.launch.arguments(incarnation)]
        environment = {**os.environ, AGENT_PID: str(os.getpid())}
        self.running[child] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL)

    def ended(self) -> list[tuple[Child, int]]:
        found = [(child, code) for child, process in self.running.items() if (code := process.poll()) is not None]
        for child, _ in found:
            del self.running[child]
        return found

    def last_words(self, child: Child) -> str:
        try:
            return self.launch.last_words(child).read_text(errors="replace")
        except OSError:
            return ""

    def signal(self, child: Child, number: signal.Signals) -> None:
        """Send a signal to a child that is still there (it stays ours to wait for, so its id cannot be reused)."""
        if child in self.running:
            self.running[child].send_signal(number)

    def cpu(self) -> dict[str, float]:
        for child, process in list(self.running.items()):
            # A process that has just ended shows 0: keep what was measured last.
            self._cpu_now[child] = max(self._cpu_now.get(child, 0.0), cpu_seconds(process.pid))
        found = {child: self._cpu_before.get(child, 0.0) + now for child, now in self._cpu_now.items()}
        return {"agent": cpu_seconds(os.getpid()), **found}

    def learner(self) -> LearnerStatus | None:
        return read_status(self.launch.learner_status(), LearnerStatus)

    def syncer(self) -> SyncerStatus | None:
        return read_status(self.launch.syncer_status(), SyncerStatus)
