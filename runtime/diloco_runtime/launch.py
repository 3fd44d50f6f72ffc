"""What an island's three processes (agent, learner, syncer) are started with, and what their exit codes mean."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NoReturn, TypeVar

from diloco_runtime.backoff import pause_after
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock, Signal, SystemClock, SystemNonces
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import (
    ConfigError,
    DilocoError,
    Fenced,
    IncompatibleModel,
    RunMismatch,
    StoreUnavailable,
)
from diloco_runtime.store import open_store
from diloco_runtime.store_counting import CountingStore

T = TypeVar("T")
log = logging.getLogger("diloco")


class Exit(IntEnum):
    """Exit codes of agent, learner and syncer."""

    DONE = 0
    CRASHED = 1
    CONFIG = 2
    FENCED = 3
    RUN_GONE = 4
    GAVE_UP = 5
    LEFT = 6


@dataclass(frozen=True)
class Launch:
    """Command-line arguments of an island's processes."""

    store: str
    run: str
    run_id: str
    island: str
    state_dir: Path
    root: str
    batch_size: int | None = None
    threads: int | None = None
    incarnation: int = 0
    launch: str = ""
    """Id of the launch, for the agent alone."""

    def arguments(self, incarnation: int) -> list[str]:
        """Return the arguments for a child of the agent."""
        found = ["--store", self.store, "--run", self.run, "--run-id", self.run_id, "--island", self.island]
        found += ["--state-dir", str(self.state_dir), "--root", self.root]
        found += ["--incarnation", str(incarnation)]
        if self.batch_size is not None:
            found += ["--batch-size", str(self.batch_size)]
        if self.threads is not None:
            found += ["--threads", str(self.threads)]
        return found

    def learner_status(self) -> Path:
        """Return where the learner reports to its agent."""
        return self.state_dir / "learner-status.json"

    def syncer_status(self) -> Path:
        """Return where the syncer reports to its agent."""
        return self.state_dir / "syncer-status.json"

    def last_words(self, role: str) -> Path:
        """Return where a learner or syncer that fails tells its agent why."""
        return self.state_dir / f"{role}-last-words.txt"


def parse_launch(program: str, argv: Sequence[str]) -> Launch:
    """Parse the arguments of one of the three processes."""
    parser = argparse.ArgumentParser(prog=f"python -m {program}")
    for name in ("store", "run", "run-id", "island", "state-dir", "root"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--launch", default="")
    values = vars(parser.parse_args(argv))
    return Launch(**{**values, "state_dir": Path(values["state_dir"])})


@dataclass(frozen=True)
class Surroundings:
    """What a process works with: the run's blackboard, the settings, the clock, the transfer counters."""

    launch: Launch
    board: Blackboard
    config: RunConfig
    clock: Clock
    counter: CountingStore


def open_surroundings(launch: Launch) -> Surroundings:
    """Open the blackboard and read the run's settings, waiting through outages.

    Raises `RunMismatch` when the run is gone, `ConfigError` when it was made by another version of this code.
    """
    from diloco_runtime import __version__

    clock = SystemClock()
    counter = CountingStore(open_store(launch.store, launch.run))
    board = Blackboard(counter, launch.run_id, clock, SystemNonces())
    patiently(clock, board.check_identity)
    run = patiently(clock, board.read_run)
    if run is None:
        raise RunMismatch(f"{counter.url} holds no run any more")
    if run.code_version != __version__:
        raise ConfigError(
            f"run {run.name} was made by version {run.code_version} of diloco-runtime, island {launch.island} has "
            f"{__version__}; install the same version on every island"
        )
    return Surroundings(launch, board, RunConfig.model_validate(run.config), clock, counter)


def patiently(clock: Clock, action: Callable[[], T]) -> T:
    """Return what `action` returns, trying again while the store does not answer."""
    failures = 0
    while True:
        try:
            return action()
        except StoreUnavailable as error:
            failures += 1
            log.warning("the store does not answer, trying again: %s", error)
            clock.sleep(pause_after(failures))


def exit_code(error: DilocoError) -> Exit:
    """Return the exit code for an error that ends a process."""
    if isinstance(error, Fenced):
        return Exit.FENCED
    if isinstance(error, RunMismatch):
        return Exit.RUN_GONE
    if isinstance(error, ConfigError | IncompatibleModel):
        return Exit.CONFIG
    return Exit.CRASHED


def configure_logging(process: str) -> None:
    """Write one line per message to stderr: ISO time (UTC), process, level, message."""
    handler = logging.StreamHandler(sys.stderr)
    formatter = logging.Formatter(f"%(asctime)s.%(msecs)03dZ {process} %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S")
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    log.propagate = False


def guarded(process: str, body: Callable[[], Exit], say: Callable[[str], None] = lambda words: None) -> int:
    """Run a process body; turn errors that were raised on purpose into one log line and an exit code.

    `say` is told in one sentence why a body failed.
    """
    configure_logging(process)
    try:
        return int(body())
    except DilocoError as error:
        code = exit_code(error)
        log.error("%s", error)
        say(str(error))
        return int(code)
    except Exception as error:
        log.exception("%s crashed", process)
        say(f"{type(error).__name__}, see the island's log")  # its text may hold anything, and this leaves the machine
        return int(Exit.CRASHED)


def leaving_on_sigterm(clock: Clock) -> Signal:
    """Return a signal that SIGTERM sets from now on.

    Until then SIGTERM just ends the process: while it starts, which takes its time, there is nothing to save.
    """
    leaving = clock.signal()
    signal.signal(signal.SIGTERM, lambda *_: leaving.set())
    return leaving


def run_process(role: str, program: str, body: Callable[[Launch], Exit]) -> NoReturn:
    """Be one of the three processes: do what `body` says with the command line's arguments, and end with its code.

    Ctrl-C in a terminal is meant for the command, not for its islands.
    """
    launch = parse_launch(program, sys.argv[1:])
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def say(words: str) -> None:
        with suppress(OSError):  # a full disk must not change the exit code
            launch.last_words(role).write_text(words)

    end_process(guarded(role, lambda: body(launch), say))


def end_process(code: int) -> NoReturn:
    """End this process at once with its background threads, whatever they do.

    The interpreter's own way out unwinds daemon threads, and aborts the process when one of them is in native code
    (torch, a parser in Rust): a learner that had finished its work would look like one that crashed.
    """
    with suppress(OSError):  # a full disk takes no last words, and must not change the code
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
