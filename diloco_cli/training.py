"""`diloco up` and `diloco train`: from a spec to a run that is supervised, in this process or in one of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import diloco_cli
import diloco_runtime
from diloco_cli import places
from diloco_cli.claim import Claim
from diloco_cli.exit_codes import ExitCode
from diloco_cli.island_watch import State
from diloco_cli.plan import Existing, Plan, make_plan
from diloco_cli.provider_local import LocalProvider, find_islands
from diloco_cli.runs import (
    Readiness,
    Run,
    check_data,
    check_usable,
    create_run,
    find_run,
    ready_to_train,
)
from diloco_cli.spec import Spec
from diloco_cli.status import StatusReport
from diloco_cli.store_check import preflight
from diloco_cli.supervision import End
from diloco_cli.supervisor import TICK, Supervisor
from diloco_cli.views import LiveView, summary_lines
from diloco_runtime.clock import Clock, Signal
from diloco_runtime.identity import own_identity
from diloco_runtime.records import ControlRecord, SupervisorRecord

CLAIM_WAIT = 60.0
"""Seconds within which a detached supervisor must have claimed the run, waiting for a silent predecessor included."""

LOG_TAIL = 10
"""Lines of its log that are shown when a detached supervisor ended at once."""


@dataclass(frozen=True)
class Ready:
    """A run that may be supervised now, or the reason why not."""

    run: Run
    created: bool
    readiness: Readiness
    seen: ControlRecord | None


def bring_up(spec: Spec) -> tuple[Run, bool]:
    """Create the spec's run unless it is there, and record its islands; return it and whether it is new."""
    check_data(spec)
    preflight(spec)
    run, created = create_run(spec)
    check_usable(spec, run)  # another person may have been faster, with another spec
    if run.board.newest_supervisor() is None:
        _record_islands(run)
    return run, created


def _record_islands(run: Run) -> None:
    """Write down which islands the run has, as a supervisor that has left: anyone may follow."""
    me = own_identity()
    record = SupervisorRecord(
        run_id=run.id,
        nonce=run.board.new_nonce(),
        number=1,
        supervisor=run.board.new_nonce(),
        host=me.host,
        pid=me.pid,
        started=me.started,
        islands=run.spec.island_names,
        ended=True,
    )
    run.board.create(run.board.keys.supervisor(1), record)  # if a supervisor was faster, its record says the same


def make_ready(spec: Spec, after_control: int | None, announce: Callable[[Plan], None]) -> Ready:
    """Find or create the run and let it go on. `after_control`: the newest wish that the person who began this knew of;
    `announce` is shown what will be created, and may refuse by raising.

    That wish is looked up before anything else, so that a later stop request is never mistaken for an earlier one.
    """
    run = find_run(spec)
    seen = None
    if run is not None:
        seen = run.board.newest_control() if after_control is None else run.board.read_control(after_control)
    check_usable(spec, run)
    created = False
    if run is None:
        announce(make_plan(spec, Existing(), None))
        run, created = bring_up(spec)
    return Ready(run, created, ready_to_train(run, seen), seen)


# ---- in this process ------------------------------------------------------------------------------------------------


@contextmanager
def leaving_on_signals(clock: Clock) -> Iterator[Signal]:
    """Yield what Ctrl-C and SIGTERM set, so that a turn is finished first; a second Ctrl-C interrupts at once."""
    leaving = clock.signal()

    def handle(number: int, frame: FrameType | None) -> None:
        if leaving.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        leaving.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield leaving
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def supervise(run: Run) -> ExitCode:
    """Supervise a run in this process until it is over or a signal comes; returns what to exit with.

    Raises `AnotherSupervisor` when the run is supervised already or another took over.
    """
    me, period = own_identity(), run.config.sync.heartbeat_every
    claim = Claim(run.board, run.another_board(), run.clock, me, period)
    with LiveView(run.clock) as view, leaving_on_signals(run.clock) as leaving:
        supervisor = Supervisor(run, LocalProvider(run.spec, run.id, run.clock), claim, me, view.say)
        supervisor.start()
        began = run.clock.monotonic()
        end: End | None = None
        try:
            while end is None and not leaving.is_set():
                end = supervisor.tick()
                view.show(supervisor.report())
                if end is None:
                    leaving.wait(TICK)
            if end is not None:
                supervisor.last_look()
        finally:
            supervisor.close()
    if end is None and supervisor.stop_requested():
        print(f"{run.name} is being stopped; supervision ended", flush=True)
        return ExitCode.RUN_STOPPED
    if end is None:
        print(_what_goes_on(run), flush=True)
        return ExitCode.INTERRUPTED
    report = supervisor.report()
    if report is not None:
        seconds = run.clock.monotonic() - began
        print("\n".join(summary_lines(report, seconds, supervisor.offers_per_commit())))
    print(f"{run.name} is over: {end.reason}", flush=True)
    return exit_code(end, report)


def exit_code(end: End, report: StatusReport | None) -> ExitCode:
    """Return what `train` exits with when supervision has come to its end."""
    if end.outcome != "budget":
        return ExitCode.RUN_STOPPED
    missing = report is not None and any(island.state == State.FAILED for island in report.islands)
    return ExitCode.ISLANDS_MISSING if missing else ExitCode.OK


def _what_goes_on(run: Run) -> str:
    islands, spec = sorted(find_islands(run.id)), run.spec.path.name
    if not islands:
        return f"supervision of {run.name} ended; no island is running. Go on with: diloco train {spec}"
    return (
        f"supervision of {run.name} ended; still training without it: {', '.join(islands)}.\n"
        "Nobody relaunches them until you supervise again.\n"
        f"  look:      diloco status {spec}\n"
        f"  supervise: diloco train {spec}\n"
        f"  stop:      diloco down {spec}"
    )


# ---- in a process of its own ----------------------------------------------------------------------------------------


def detach(ready: Ready) -> tuple[ExitCode, str]:
    """Start a supervisor in the background and wait until it has claimed the run; return exit code and message."""
    run = ready.run
    log = places.supervisor_log(run.name, run.id)
    log.parent.mkdir(parents=True, exist_ok=True)
    begin = log.stat().st_size if log.exists() else 0
    child = _start_supervisor(ready, log)
    deadline = run.clock.monotonic() + CLAIM_WAIT
    while child.poll() is None and run.clock.monotonic() < deadline:
        newest = run.board.newest_supervisor()
        if newest is not None and newest.pid == child.pid and not newest.ended:
            return ExitCode.OK, f"supervised by process {child.pid}, log {log}"
        run.clock.sleep(TICK)
    if child.poll() is None:
        return ExitCode.UNEXPECTED, f"process {child.pid} has not claimed the run after {CLAIM_WAIT:.0f} s; see {log}"
    said = log.read_bytes()[begin:].decode(errors="replace").splitlines()[-LOG_TAIL:]
    code = child.returncode if child.returncode in list(ExitCode) else ExitCode.UNEXPECTED
    return ExitCode(code), "\n".join(said)


def _start_supervisor(ready: Ready, log: Path) -> subprocess.Popen[bytes]:
    """Start `diloco train` on the same spec, detached from this process and its terminal."""
    run, newest = ready.run, ready.run.board.newest_control()
    # What this command itself wrote (to reopen the run) counts as seen; a stop request that came later does not.
    known = newest if newest is not None and newest.action == "run" else ready.seen
    after = ("--after-control", str(0 if known is None else known.number))
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "diloco_cli", "train", str(run.spec.path), *after],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": _source_path(), "PYTHONUNBUFFERED": "1"},
        )


def _source_path() -> str:
    """Return a PYTHONPATH with which a child runs this very source, installed or not."""
    sources = [str(Path(str(package.__file__)).resolve().parent.parent) for package in (diloco_cli, diloco_runtime)]
    path = [*sources, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return os.pathsep.join(dict.fromkeys(path))
