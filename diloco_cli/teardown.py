"""`diloco down`: ask the run to end, wait for its last commits, then make sure that no process of it is left here.

The order matters. The stop request is written first: from then on no supervisor launches anything. Supervisors are
ended before islands: a process between fork and exec cannot be recognised, and once its starter is gone there is no new
one. Whatever a store that does not answer prevents, processes are ended all the same.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from diloco_cli import places
from diloco_cli.claim import is_gone
from diloco_cli.errors import TeardownFailed
from diloco_cli.provider_local import IslandProcesses, end, find_islands, find_run_ids, find_trains, is_alive
from diloco_cli.runs import Run, find_run, request_stop
from diloco_cli.spec import Spec
from diloco_cli.store_check import PREFLIGHT
from diloco_cli.supervision import LEAVE_WAIT
from diloco_runtime.clock import Clock, SystemClock
from diloco_runtime.errors import CorruptObject, DilocoError, StoreUnavailable
from diloco_runtime.identity import own_identity
from diloco_runtime.purge import leftover_runs, purge_run
from diloco_runtime.store import open_store

if TYPE_CHECKING:
    import psutil

POLL = 0.2
"""Seconds between looks at what is left."""

QUIET_LOOKS = 4
"""Looks in a row that must find nothing: a process that was just being started has shown itself by then."""

DRAIN_MARGIN = 15.0
"""Seconds on top of `sync.drain_timeout` without any new commit after which the drain is not waited for any longer."""

CLOSING_WAIT = 5.0
"""Seconds a supervisor gets to see the end by itself and say its closing words, once the islands have left."""

SUPERVISOR_WAIT = 10.0
"""Seconds a supervisor gets to leave after SIGTERM."""

LEAVE_NOW_WAIT = 5.0
"""Seconds islands get to leave after SIGTERM with `--now`; `LEAVE_WAIT` without."""

KILL_WAIT = 15.0
"""Seconds after SIGKILL in which the kernel must have removed a process."""

Say = Callable[[str], None]


def take_down(spec: Spec, now: bool, purge: bool, say: Say) -> None:
    """Carry out `diloco down`. Raises `TeardownFailed` for processes that stayed, `StoreUnavailable` when only the
    store's part could not be done."""
    teardown = Teardown(spec, SystemClock(), now, say)
    try:
        run = teardown.carry_out()
    except KeyboardInterrupt:
        say("interrupted: what is left goes on; `diloco down` again ends it")
        raise
    if teardown.outage is not None:
        raise StoreUnavailable(
            f"every process on this machine is ended, but the store could not be asked ({teardown.outage}); run "
            "`diloco down` again when it answers"
        )
    say(f"run {run.name} is down" if run is not None else f"there is no run {spec.name} in {spec.place}")
    if purge:
        say(_purge(spec, run))


def _purge(spec: Spec, run: Run | None) -> str:
    """Delete the run, and what interrupted purges and preflights left of earlier ones; say what went."""
    store = open_store(spec.store, spec.name)
    ids = ([run.id] if run is not None else []) + leftover_runs(store)
    objects = sum(purge_run(store, run_id) for run_id in ids) + store.delete_tree(PREFLIGHT)
    kept = "" if run is None else f"; logs stay in {places.run_dir(run.name, run.id)}"
    return f"deleted {objects} objects{kept}"


class Teardown:
    """One `diloco down` of one spec."""

    def __init__(self, spec: Spec, clock: Clock, now: bool, say: Say) -> None:
        """`now`: do not wait for the drain."""
        self._spec = spec
        self._clock = clock
        self._now = now
        self._say = say
        self.outage: DilocoError | None = None
        """Why the store could not be asked, if it could not."""

    def carry_out(self) -> Run | None:
        """Take everything down; return the run that was found, None when there is none.

        Raises `TeardownFailed` naming the processes that are still there.
        """
        run = self._find()
        if run is not None:
            self._stop(run)
        self._end_processes(run)
        if run is None and self.outage is None and (run := self._find()) is not None:
            self._stop(run)  # a `train` that was just beginning created it meanwhile
            self._end_processes(run)
        return run

    def _find(self) -> Run | None:
        try:
            return find_run(self._spec)
        except (StoreUnavailable, CorruptObject) as error:
            self.outage = error
            return None

    # ---- asking -----------------------------------------------------------------------------------------------------

    def _stop(self, run: Run) -> None:
        """Write the stop request and wait for the drain while islands live."""
        try:
            request_stop(run, "diloco down")
            self._end_trains(self._unclaimed(run))
            if not self._now and find_islands(run.id):
                self._wait_for_drain(run)
                self._wait_for_supervisors(run)
        except StoreUnavailable as error:
            self.outage = error
            self._say(f"the store does not answer ({error}); ending the processes all the same")

    def _wait_for_drain(self, run: Run) -> None:
        head = run.board.head()
        if head is None:
            self._say("no island has begun to train: there is nothing to wait for")
            return
        self._say("waiting for the last commits")
        limit = run.config.sync.drain_timeout + DRAIN_MARGIN
        seq, moved = head.seq, self._clock.monotonic()
        while find_islands(run.id):
            head, now = run.board.head(), self._clock.monotonic()
            if head is not None and head.seq != seq:
                seq, moved = head.seq, now
            if now - moved > limit:
                self._say(f"no commit for {now - moved:.0f} s; not waiting any longer")
                return
            self._clock.sleep(POLL)

    def _wait_for_supervisors(self, run: Run) -> None:
        deadline = self._clock.monotonic() + CLOSING_WAIT
        while not find_islands(run.id) and self._supervisors(run) and self._clock.monotonic() < deadline:
            self._clock.sleep(POLL)

    # ---- ending -----------------------------------------------------------------------------------------------------

    def _unclaimed(self, run: Run) -> list[psutil.Process]:
        """Return `train` processes on this spec that do not supervise the run yet: they must not begin to."""
        newest = run.board.newest_supervisor()
        claimed = newest.pid if newest is not None and newest.host == socket.gethostname() else None
        return [process for process in find_trains(self._spec.path) if process.pid != claimed]

    def _supervisors(self, run: Run | None) -> list[psutil.Process]:
        """Return every process here that supervises the run, or is about to."""
        import psutil

        found = {process.pid: process for process in find_trains(self._spec.path)}
        try:
            newest = None if run is None else run.board.newest_supervisor()
        except StoreUnavailable as error:
            self.outage, newest = error, None
        me = own_identity()
        if newest is not None and newest.host == me.host and newest.pid != os.getpid() and not is_gone(newest, me):
            found.setdefault(newest.pid, psutil.Process(newest.pid))
        return [process for process in found.values() if is_alive(process)]

    def _islands(self, run: Run | None) -> list[tuple[str, IslandProcesses]]:
        """Return every island here that works for this run, or for an earlier one of the same name and place."""
        ids = find_run_ids(self._spec.store, self._spec.name) | (set() if run is None else {run.id})
        return [island for run_id in sorted(ids) for island in sorted(find_islands(run_id).items())]

    def _end_processes(self, run: Run | None) -> None:
        self._end_trains(self._supervisors(run))
        wait = LEAVE_NOW_WAIT if self._now else LEAVE_WAIT
        if islands := self._islands(run):
            self._say(f"ending {', '.join(name for name, _ in islands)}")
        for force, seconds in ((False, wait), (True, KILL_WAIT)):
            if self._gone(run, force, seconds):
                return
        raise TeardownFailed(self._what_is_left(run))

    def _gone(self, run: Run | None, force: bool, seconds: float) -> bool:
        """Signal the run's processes until none is seen for a while; False when the time is over."""
        deadline = self._clock.monotonic() + seconds
        told: set[int] = set()
        quiet = 0
        while quiet < QUIET_LOOKS:
            trains, islands = find_trains(self._spec.path), self._islands(run)
            quiet = 0 if trains or islands else quiet + 1
            self._end_trains(trains)
            for _, island in islands:
                self._signal(island, force, told)
            if quiet == 0 and self._clock.monotonic() > deadline:
                return False
            self._clock.sleep(POLL)
        return True

    @staticmethod
    def _signal(island: IslandProcesses, force: bool, told: set[int]) -> None:
        """Ask each agent once (a second SIGTERM is no news); force whoever is there."""
        leader = island.agent or (island.others[0] if island.others else None)
        if leader is None or (not force and leader.pid in told):
            return
        told.add(leader.pid)
        end(island, force)

    def _end_trains(self, processes: list[psutil.Process]) -> None:
        import psutil

        for process in processes:
            self._say(f"ending the supervisor, process {process.pid}")
            try:
                process.terminate()
            except psutil.NoSuchProcess:
                continue
        _, stuck = psutil.wait_procs(processes, timeout=SUPERVISOR_WAIT)
        for process in stuck:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(stuck, timeout=KILL_WAIT)

    def _what_is_left(self, run: Run | None) -> str:
        left = [
            f"{name}: process {', '.join(str(p.pid) for p in (island.agent, *island.others) if p is not None)}"
            for name, island in self._islands(run)
        ]
        trains = [f"supervisor: process {process.pid}" for process in find_trains(self._spec.path)]
        return f"could not end {'; '.join(left + trains)}; run `diloco down` again, or end them by hand"
