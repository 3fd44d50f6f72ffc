"""What a supervisor decides: which island to launch, kill or give up, and when the run is over. Pure.

Events come in as method calls that carry the supervisor's own monotonic time (a look at processes, a heartbeat that was
read, a commit, a control record), `decide` returns actions. It starts nothing, reads nothing and knows no clock.

The rules, in one place:
* dead (no process): launched again after a back-off. Signals such as SIGKILL and SIGTERM are preemptions and have no
  limit, crashes count against `max_restarts`, a wrong configuration is given up at once;
* frozen (its agent's counter stands still though the process is there): shown as STALE after `dead_after_reads`
  spaced successful reads, killed and launched again after `replace_frozen_after`;
* a frozen learner is shown as STALE; its own agent replaces it;
* nobody is launched after a stop request, nor once the log drains, unless no island is left to finish the drain;
* reads that fail, and times in which the supervisor's own heartbeat does not arrive, count against nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from diloco_cli.island_watch import IslandWatch, Limits, State
from diloco_cli.sights import Ending, Sight
from diloco_runtime.records import CommitRecord, ControlRecord, HeartbeatRecord

END_WAIT = 45.0
"""Seconds that islands get to leave by themselves after the final commit was read; an agent takes up to 30 s."""

LEAVE_WAIT = 35.0
"""Seconds between SIGTERM, which an agent obeys within 30 s, and SIGKILL."""

LEFTOVER_WAIT = 10.0
"""Seconds that children of a dead agent get to offer and checkpoint before they are killed for the next launch."""

REOPEN_WAIT = 10.0
"""Seconds after an island's own end for which a log that is not final may just be an old look."""


@dataclass(frozen=True)
class Launch:
    """Start this island's agent."""

    island: str
    reason: str


@dataclass(frozen=True)
class Signal:
    """End this island's processes: ask (SIGTERM to the agent) or force (SIGKILL to all of them)."""

    island: str
    force: bool
    reason: str


@dataclass(frozen=True)
class StopRun:
    """Write a stop request: the run makes no progress."""

    reason: str


@dataclass(frozen=True)
class End:
    """Supervision is over."""

    outcome: Literal["budget", "stopped", "given up"]
    reason: str


Action = Launch | Signal | StopRun | End


class Supervision:
    """The supervisor's state machine for one run."""

    def __init__(self, islands: Iterable[str], limits: Limits, host: str, now: float) -> None:
        self.islands = {name: IslandWatch(name, limits, host, now) for name in islands}
        self._limits = limits
        self._head: CommitRecord | None = None
        self._control: ControlRecord | None = None
        self._log_read: float | None = None
        """When the log was last read with success."""
        self._idle = 0.0
        """Seconds of healthy looks at the log since the last commit."""
        self._stop_sent = False
        self._final_since: float | None = None

    # ---- events ---------------------------------------------------------------------------------------------------

    def saw_place(self, name: str, now: float, sight: Sight, ending: Ending | None = None) -> None:
        """Looked at an island's place; `ending`: how the launch that was there last ended, if that is known."""
        self.islands[name].saw_place(now, sight, ending)

    def saw_heartbeat(self, name: str, now: float, beat: HeartbeatRecord | None, own_writes: bool) -> None:
        """Read an island's newest heartbeat (None: there is none yet); `own_writes`: ours reach the store."""
        self.islands[name].saw_heartbeat(now, beat, own_writes)

    def read_failed(self) -> None:
        """A look at the store failed: whatever stood still may only have been out of sight."""
        for island in self.islands.values():
            island.missed_heartbeat()

    def saw_log(self, now: float, news: Iterable[CommitRecord], healthy: bool) -> None:
        """Read the log: commits since the last look, oldest first; `healthy`: our own writes reach the store."""
        elapsed = 0.0 if self._log_read is None else now - self._log_read
        elapsed = min(elapsed, 3 * self._limits.heartbeat_every) if healthy else 0.0
        self._log_read = now
        self._idle += elapsed
        for island in self.islands.values():
            island.unmerged += elapsed
        for commit in news:
            self._head = commit
            self._idle = 0.0
            for entry in commit.merged:
                if entry.island in self.islands:
                    self.islands[entry.island].unmerged = 0.0

    def saw_control(self, control: ControlRecord | None) -> None:
        """Read the newest control record."""
        self._control = control

    def launched(self, name: str, now: float, launch: str) -> None:
        """An island's agent was started."""
        self.islands[name].launched(now, launch)

    def launch_failed(self, name: str, now: float, reason: str) -> None:
        """An island's agent could not be started."""
        self.islands[name].crashed(now, reason)

    # ---- what is known ----------------------------------------------------------------------------------------------

    @property
    def head(self) -> CommitRecord | None:
        return self._head

    @property
    def stop_requested(self) -> bool:
        return self._control is not None and self._control.action == "stop"

    @property
    def final(self) -> bool:
        """Tell whether the run is over: the final commit stands and no later request reopens the run."""
        head = self._head
        return head is not None and head.phase == "final" and not self._reopened()

    def _reopened(self) -> bool:
        control, head = self._control, self._head
        return control is not None and control.action == "run" and head is not None and control.number > head.control

    def given_up(self) -> tuple[str, ...]:
        """Return the islands that are launched no more."""
        return tuple(island.name for island in self.islands.values() if island.state is State.FAILED)

    # ---- decisions --------------------------------------------------------------------------------------------------

    def decide(self, now: float) -> list[Action]:
        """Return what to do now; an action that could not be carried out is returned again next time."""
        for island in self.islands.values():
            island.judge(now, self.stop_requested and not self.final)
        if end := self._end(now):
            return [end]
        if self.final:
            return self._usher_out(now)
        actions: list[Action] = []
        if stop := self._stalled_run():
            actions.append(stop)
        for island in self.islands.values():
            actions += self._tend(island, now)
        return actions + self._launches(now)

    def _end(self, now: float) -> End | None:
        if any(island.present for island in self.islands.values()):
            return None
        head = self._head
        if self.final and head is not None:
            budget = head.reason == "budget"
            return End("budget" if budget else "stopped", "the budget is reached" if budget else head.reason)
        if self.stop_requested and self._control is not None:
            return End("stopped", self._control.reason or "a stop was requested")
        if self.islands and all(island.state is State.FAILED for island in self.islands.values()):
            return End("given up", "; ".join(f"{island.name}: {island.reason}" for island in self.islands.values()))
        return None

    def _usher_out(self, now: float) -> list[Action]:
        """The run is over: whoever has not left after a while is asked, then forced."""
        if self._final_since is None:
            self._final_since = now
        late = now - self._final_since - END_WAIT
        reason = "still there after the final commit"
        return [
            Signal(island.name, late >= LEAVE_WAIT, reason)
            for island in self.islands.values()
            if island.present and late >= 0.0 and island.may_signal(now, late >= LEAVE_WAIT)
        ]

    def _stalled_run(self) -> StopRun | None:
        running = self._head is not None and self._head.phase == "run"
        if self._stop_sent or self.stop_requested or not running or self._idle < self._limits.stalled_after:
            return None
        return StopRun(f"no commit for {self._idle:.0f} s (provider.stalled_after)")

    def stop_sent(self) -> None:
        """The stop request of `StopRun` was written."""
        self._stop_sent = True

    def _tend(self, island: IslandWatch, now: float) -> list[Action]:
        """Deal with one island's processes: frozen, given up, or left over from a dead agent."""
        if island.state is State.STALE and island.replaceable:
            return [Signal(island.name, True, island.reason)] if island.may_signal(now, True) else []
        running = self._head is not None and self._head.phase == "run"
        behind = island.unmerged - self._idle  # for so long commits were made without it
        if island.launch is not None and running and behind >= self._limits.stalled_after:
            island.give_up(now, f"commits were made without it for {behind:.0f} s (provider.stalled_after)")
        if island.state is State.FAILED and island.present:
            force = now - island.since >= LEAVE_WAIT
            return [Signal(island.name, force, island.reason)] if island.may_signal(now, force) else []
        leftovers = island.launch is None and island.others > 0 and island.gone_since is not None
        if leftovers and now - (island.gone_since or now) >= LEFTOVER_WAIT and island.may_signal(now, True):
            return [Signal(island.name, True, "left over from an agent that died")]
        return []

    def _launches(self, now: float) -> list[Action]:
        if self.stop_requested:
            return []
        for island in self.islands.values():
            self._wake(island, now)
        ready = [island for island in self.islands.values() if island.may_launch(now)]
        if self._head is not None and self._head.phase == "drain":
            # Who left after the drain began has done its part. Only when nobody is left must one come back and finish.
            if any(island.present for island in self.islands.values()):
                return []
            successor = self._head.successor
            ready = sorted(ready, key=lambda island: island.name != successor)[:1]
        return [Launch(island.name, island.why) for island in ready]

    def _wake(self, island: IslandWatch, now: float) -> None:
        """An island that had ended is wanted again when the run goes on (a control record reopened it)."""
        fresh = self._log_read is not None and self._log_read > island.since + REOPEN_WAIT
        goes_on = self._head is not None and self._head.phase == "run" and fresh
        if island.state is State.DONE and (self._reopened() or goes_on):
            island.wanted_again(now, "the run was reopened")
        if island.state is State.DOWN:
            island.wanted_again(now, "the stop request was taken back")
