"""A real run for tests: the real command, real processes, real signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from diloco_cli import spec as specs
from diloco_cli.exit_codes import ExitCode
from diloco_runtime.audit import read_audit
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock, SystemNonces
from diloco_runtime.config import RunConfig
from diloco_runtime.records import CommitRecord, HeartbeatRecord
from diloco_runtime.store import open_store

SPEC = """
[run]
name = "live"
store = "{place}"
tokens = {tokens}

[store]
{options}

[model]
layers = 2
heads = 2
width = 32

[data]
files = ["text.txt"]
unit_tokens = 8192

[inner]
lr = 3e-3
batch_size = 4
sequence_length = 64

[sync]
sync_every = 24
fragments = 6
heartbeat_every = {heartbeat_every}
dead_after_reads = 4
takeover_after = 3.0
checkpoint_every = 3.0
drain_timeout = 10.0
{sync}

{islands}
"""

WORDS = (
    "the island learned what the others had not yet seen and offered it to the blackboard while the sea went on".split()
)


def text(characters: int) -> str:
    """Return deterministic prose with something to learn in it."""
    words, state = [], 12345
    size = 0
    while size < characters:
        state = (1103515245 * state + 12345) % 2**31
        words.append(WORDS[(state >> 16) % len(WORDS)])
        size += len(words[-1]) + 1
    return " ".join(words)


class LiveRun:
    """One run in a folder, driven through `python -m diloco_cli`."""

    def __init__(
        self,
        folder: Path,
        islands: tuple[str, ...] = ("a", "b", "c"),
        tokens: int = 400_000,
        sync: str = "",
        store: str = "file://./blackboard",
    ) -> None:
        """`store`: a bucket's URL has its options in it."""
        self.folder = folder
        self.islands = islands
        tables = "\n".join(f"[islands.{name}]" for name in islands)
        (folder / "text.txt").write_text(text(400_000))
        place, _, options = store.partition("?")
        values = {
            "place": place,
            "options": "\n".join('{} = "{}"'.format(*option.split("=", 1)) for option in options.split("&") if option),
            "heartbeat_every": 5.0 if options else 0.5,  # as rare as object stores want them
        }
        (folder / "run.toml").write_text(SPEC.format(tokens=tokens, sync=sync, islands=tables, **values))
        self.supervisors: list[subprocess.Popen[bytes]] = []

    # ---- commands -------------------------------------------------------------------------------------------------

    def diloco(self, *arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run one command to its end."""
        command = [sys.executable, "-m", "diloco_cli", *arguments]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=timeout, check=False)

    def train(self) -> subprocess.Popen[bytes]:
        """Start `diloco train` in the background of the test."""
        output = (self.folder / f"train-{len(self.supervisors)}.out").open("wb")
        command = [sys.executable, "-m", "diloco_cli", "train", "run.toml", "--yes"]
        process = subprocess.Popen(command, cwd=self.folder, stdout=output, stderr=subprocess.STDOUT)
        output.close()
        self.supervisors.append(process)
        return process

    def status(self) -> dict[str, Any]:
        """Return `diloco status --json`."""
        done = self.diloco("status", "run.toml", "--json")
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def held_out_loss(self, *arguments: str) -> float:
        """Return what `diloco eval` measures."""
        done = self.diloco("eval", "run.toml", "--json", *arguments)
        assert done.returncode == 0, done.stderr
        return float(json.loads(done.stdout)["held_out_loss"])

    def output(self) -> str:
        """Return what all supervisors printed, and the ends of the islands' logs: for failed assertions."""
        parts = [path.read_text() for path in sorted(self.folder.glob("train-*.out"))]
        home = Path(os.environ["DILOCO_HOME"])
        parts += [
            f"== {path.parent.name}\n{path.read_text()[-2000:]}" for path in sorted(home.glob("runs/*/*/island.log"))
        ]
        return "\n".join(parts)

    def island_log(self, island: str) -> str:
        """Return all that an island's processes logged."""
        (path,) = Path(os.environ["DILOCO_HOME"]).glob(f"runs/*/{island}/island.log")
        return path.read_text()

    # ---- the blackboard ---------------------------------------------------------------------------------------------

    def board(self) -> Blackboard:
        """Return the blackboard of the run that is there now."""
        store = open_store(specs.load_spec(self.folder / "run.toml").store, "live")
        board = Blackboard(store, "", SystemClock(), SystemNonces())
        run = board.read_run()
        assert run is not None, "no run yet"
        return Blackboard(store, run.run_id, SystemClock(), SystemNonces())

    def config(self) -> RunConfig:
        """Return the settings in the spec."""
        return specs.load_spec(self.folder / "run.toml").config

    def log_bytes(self) -> list[bytes]:
        """Return the log as it lies on the disk, from commit 0 to the first gap."""
        with contextlib.suppress(AssertionError):
            board, found = self.board(), []
            while (data := board.store.get(board.keys.log(len(found)))) is not None:
                found.append(data)
            return found
        return []

    def log(self) -> list[CommitRecord]:
        """Return the log."""
        board, found = self.board(), []
        while (commit := board.read_commit(len(found))) is not None:
            found.append(commit)
        return found

    def head(self) -> int:
        """Return the newest log position, -1 before the first."""
        return len(self.log_bytes()) - 1

    def heartbeats(self) -> Iterator[HeartbeatRecord]:
        """Return the last heartbeat of every life."""
        board = self.board()
        for name in board.list_islands():
            life = 1
            while board.read_claim(name, life) is not None:
                heartbeat = board.read_heartbeat(name, life)
                if heartbeat is not None:
                    yield heartbeat
                life += 1

    def check_books(self) -> None:
        """Assert that log and token accounts are sound at every position."""
        assert read_audit(self.board()).check() == []

    # ---- processes --------------------------------------------------------------------------------------------------

    def processes(self, kind: str = "", island: str = "") -> list[psutil.Process]:
        """Return living processes of the run: kind "island" (agents), "learner_main", "syncer_main" or all."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                marks, command = process.environ(), " ".join(process.cmdline())
                mine = str(self.folder) in command and "diloco_runtime." in command
                if (
                    mine
                    and f"diloco_runtime.{kind}" in command
                    and (not island or marks.get("DILOCO_ISLAND") == island)
                ):
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
        return found

    def signal(self, number: signal.Signals, kind: str = "", island: str = "") -> int:
        """Send a signal to processes of the run; return to how many."""
        count = 0
        for process in self.processes(kind, island):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)
                count += 1
        return count

    def kill_everything(self) -> None:
        """SIGKILL to supervisors and all islands."""
        for supervisor in self.supervisors:
            if supervisor.poll() is None:
                supervisor.kill()
                supervisor.wait()
        deadline = time.monotonic() + 30.0
        while self.processes() and time.monotonic() < deadline:
            self.signal(signal.SIGKILL)

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Poll a condition until it holds; fail with everything that was printed otherwise."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what}: not within {seconds} s\n{self.output()}"
            time.sleep(0.1)  # the interval of a poll with a deadline

    def wait_for_commits(self, count: int, seconds: float = 90.0) -> None:
        """Wait until the log is longer by so many commits."""
        target = self.head() + count
        self.wait(lambda: self.head() >= target or self.failed(), seconds, f"commit {target}")
        assert not self.failed(), self.output()

    def failed(self) -> bool:
        """Tell whether the newest `diloco train` could not even begin, so that nothing is worth waiting for."""
        return bool(self.supervisors) and self.supervisors[-1].poll() in (ExitCode.UNEXPECTED, ExitCode.BAD_INPUT)

    def finish(self, supervisor: subprocess.Popen[bytes], seconds: float = 180.0) -> int:
        """Wait for the end of a `diloco train`."""
        try:
            return supervisor.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"`diloco train` did not end in {seconds} s\n{self.output()}") from None

    def end(self) -> None:
        """Ask the run to end, and wait until its supervisor has seen it."""
        done = self.diloco("down", "run.toml", "--yes")
        assert done.returncode == 0, done.stderr + self.output()
        assert self.finish(self.supervisors[-1]) == ExitCode.RUN_STOPPED, self.output()
