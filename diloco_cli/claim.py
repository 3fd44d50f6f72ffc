"""The right to supervise a run: claimed create-once, kept up by heartbeats, lost to whoever claims a later number.

`supervisor/<n>.json` is written before every launch. Two supervisors that race for one number find out here, before
either has launched anything; one that was replaced while it was frozen finds out at its next launch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from diloco_cli.errors import AnotherSupervisor
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock
from diloco_runtime.errors import CorruptObject, RunMismatch, StoreUnavailable
from diloco_runtime.identity import Identity
from diloco_runtime.records import LaunchIntent, SupervisorHeartbeat, SupervisorRecord

SILENT_PERIODS = 3.0
"""A supervisor whose counter stands still for so many of its heartbeat periods may be replaced."""

HEALTHY_PERIODS = 1.5
"""While the own newest heartbeat is younger than so many periods, the store takes writes."""

LOOK_SECONDS = 0.25
"""Pause between looks at another supervisor's counter."""


def is_gone(record: SupervisorRecord, me: Identity) -> bool:
    """Tell whether a supervisor is certainly dead: it ended on purpose, or its process on this machine is no more."""
    import psutil

    if record.ended:
        return True
    if record.host != me.host:
        return False
    try:
        started = float(psutil.Process(record.pid).create_time())
    except psutil.NoSuchProcess:
        return True
    except psutil.Error:
        return False
    return abs(started - record.started) > 2.0  # start times are kept in hundredths since boot, and boot time drifts


Body = Callable[[], None]


def in_a_thread(body: Body) -> Callable[[float], None]:
    """Run `body` beside the caller; return how to wait for its end, for so many seconds."""
    thread = threading.Thread(target=body, name="supervisor-heartbeat", daemon=True)
    thread.start()
    return thread.join


class Claim:
    """One supervisor's hold on a run. `board` is for the caller's thread, `heart` for the heartbeat's own."""

    def __init__(
        self,
        board: Blackboard,
        heart: Blackboard,
        clock: Clock,
        me: Identity,
        period: float,
        gone: Callable[[SupervisorRecord, Identity], bool] = is_gone,
        beside: Callable[[Body], Callable[[float], None]] = in_a_thread,
    ) -> None:
        """`period`: seconds between heartbeats; `gone`: tells whether another supervisor is certainly dead;
        `beside`: runs the heartbeat beside the caller."""
        self._board = board
        self._heart = heart
        self._clock = clock
        self._me = me
        self._period = period
        self._life = board.new_nonce()
        self._unsettled: SupervisorRecord | None = None
        self._stopped = clock.signal()
        self._gone = gone
        self._beside = beside
        self._join: Callable[[float], None] | None = None
        self.number = 0
        self._writes = 0
        self._written: float | None = None
        self.gone = ""
        """Why the heartbeat stopped for good: the run was purged. Empty while all is well."""

    # ---- taking -----------------------------------------------------------------------------------------------------

    def take(self, islands: tuple[str, ...]) -> dict[str, int]:
        """Claim the run and start the heartbeat; return how often each island was launched so far.

        Raises `AnotherSupervisor` when one is at work.
        """
        while True:
            newest = self._board.newest_supervisor()
            if newest is not None and not self._gone(newest, self._me):
                self._watch(newest)
            self.number = newest.number if newest is not None else 0
            standing = self._create(self._record(islands))
            if standing.supervisor == self._life:
                break
        self._beat()  # before anybody can take the silence of a fresh claim for death
        self._join = self._beside(self._keep_beating)
        return self._launches_so_far(islands)

    def _watch(self, other: SupervisorRecord) -> None:
        """Return when another supervisor's counter stood still long enough; raise when it is alive."""
        board, clock = self._board, self._clock
        first = board.read_supervisor_heartbeat(other.number)
        deadline = clock.monotonic() + SILENT_PERIODS * self._period
        while clock.monotonic() < deadline:
            clock.sleep(min(LOOK_SECONDS, self._period / 4))
            beat = board.read_supervisor_heartbeat(other.number)
            newest = board.newest_supervisor() or other
            beats = beat is not None and (first is None or beat.counter > first.counter)
            if newest.ended or self._gone(newest, self._me):
                return
            if beats or newest.number > other.number:
                raise AnotherSupervisor(
                    f"another `diloco train` supervises this run: process {newest.pid} on {newest.host}; watch it with "
                    "`diloco status --watch`, end it with Ctrl-C there or `diloco down`"
                )

    def _record(
        self,
        islands: tuple[str, ...],
        launching: tuple[LaunchIntent, ...] = (),
        given_up: tuple[str, ...] = (),
        ended: bool = False,
    ) -> SupervisorRecord:
        return SupervisorRecord(
            run_id=self._board.run_id,
            nonce=self._board.new_nonce(),
            number=self.number + 1,
            supervisor=self._life,
            host=self._me.host,
            pid=self._me.pid,
            started=self._me.started,
            islands=islands,
            launching=launching,
            given_up=given_up,
            ended=ended,
        )

    def _create(self, record: SupervisorRecord) -> SupervisorRecord:
        """Create a record; one whose outcome stayed unknown is settled first, with the very same bytes."""
        if self._unsettled is not None:
            record, self._unsettled = self._unsettled, None
        try:
            standing = self._board.create(self._board.keys.supervisor(record.number), record)
        except StoreUnavailable:
            self._unsettled = record
            raise
        if standing.supervisor == self._life:
            self.number = standing.number
        return standing

    def _launches_so_far(self, islands: tuple[str, ...]) -> dict[str, int]:
        """Read the chain of supervisors backwards for the newest launch of every island."""
        found: dict[str, int] = {}
        number = self.number
        while number > 0 and len(found) < len(islands):
            record = self._board.read_supervisor(number)
            for intent in record.launching if record is not None else ():
                found.setdefault(intent.island, intent.launches)
            number -= 1
        return {island: found.get(island, 0) for island in islands}

    # ---- keeping ----------------------------------------------------------------------------------------------------

    def write(
        self,
        islands: tuple[str, ...],
        launching: tuple[LaunchIntent, ...] = (),
        given_up: tuple[str, ...] = (),
        ended: bool = False,
    ) -> None:
        """Write what is about to happen. Raises `AnotherSupervisor` when this one was replaced, `StoreUnavailable`
        when the outcome is unknown: then nothing may be launched, and calling again settles it."""
        while True:
            pending = self._unsettled is not None
            standing = self._create(self._record(islands, launching, given_up, ended))
            if standing.supervisor != self._life:
                raise self._replaced(standing)
            if not pending:
                return

    def check(self) -> None:
        """Raise `AnotherSupervisor` when a later claim stands, `RunMismatch` when the run is gone."""
        if self.gone:
            raise RunMismatch(self.gone)
        newest = self._board.newest_supervisor()
        if newest is not None and newest.supervisor != self._life:
            raise self._replaced(newest)

    @staticmethod
    def _replaced(by: SupervisorRecord) -> AnotherSupervisor:
        return AnotherSupervisor(
            f"process {by.pid} on {by.host} supervises this run now; this supervisor leaves, the islands go on"
        )

    def healthy(self) -> bool:
        """Tell whether this supervisor's own heartbeats reach the store at present."""
        return self._written is not None and self._clock.monotonic() - self._written <= HEALTHY_PERIODS * self._period

    def release(self, islands: tuple[str, ...], given_up: tuple[str, ...] = ()) -> None:
        """Stop the heartbeat and say that anyone may follow at once; a store that does not answer costs a follower
        a few seconds of waiting and nothing else."""
        self._stopped.set()
        if self._join is not None:
            self._join(self._period)
        try:
            self.write(islands, given_up=given_up, ended=True)
        except (StoreUnavailable, AnotherSupervisor, RunMismatch):
            return

    def _keep_beating(self) -> None:
        while not self._stopped.wait(self._period) and not self.gone:
            self._beat()

    def _beat(self) -> None:
        beat = SupervisorHeartbeat(
            run_id=self._heart.run_id,
            nonce=self._heart.new_nonce(),
            number=self.number,
            supervisor=self._life,
            counter=self._writes + 1,
        )
        try:
            self._heart.write_supervisor_heartbeat(beat)
        except RunMismatch as error:
            self.gone = str(error)
        except (StoreUnavailable, CorruptObject):
            return  # `healthy` will tell
        else:
            self._writes += 1
            self._written = self._clock.monotonic()
