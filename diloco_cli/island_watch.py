"""One island as its supervisor sees it: its place, heartbeats, deaths, and what follows from them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from diloco_cli.sights import Ending, Sight
from diloco_runtime.liveness import Watch
from diloco_runtime.records import HeartbeatRecord

MAX_BACKOFF = 60.0
"""Longest wait before a launch, in seconds: doubling further would only keep a machine that came back idle."""

HEALTHY_SECONDS = 600.0
"""An island that trained this long without dying starts with a clean record: rare crashes must not add up."""

START_SECONDS = 300.0
"""An agent without a heartbeat of its own may take this long to start (a cold import of torch on a busy disk)."""

SLOW_STEPS = 10.0
"""A learner is called still only after this many of its own inner steps, however few heartbeats they take."""

LEARNER_PATIENCE = 15.0
"""... nor before this many seconds: first steps on a machine that starts several islands at once take that long."""

SIGNAL_EVERY = 5.0
"""Seconds between two equal signals to one island."""


class State(StrEnum):
    """What `status` shows of an island."""

    PENDING = "PENDING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    STALE = "STALE"
    RESTARTING = "RESTARTING"
    FAILED = "FAILED"
    DONE = "DONE"
    DOWN = "DOWN"


@dataclass(frozen=True)
class Limits:
    """How patient the supervisor is; seconds unless it says otherwise."""

    heartbeat_every: float
    dead_after_reads: int
    """Reads."""
    max_restarts: int
    """Crashes."""
    relaunch_after: float
    replace_frozen_after: float
    stalled_after: float


class IslandWatch:
    """Follows one island from event to event."""

    def __init__(self, name: str, limits: Limits, host: str, now: float) -> None:
        self.name = name
        self.state = State.PENDING
        self.reason = ""
        self.since = now
        """When `state` was entered."""
        self.why = "first start"
        """Why the next launch is made."""
        self.launch: str | None = None
        """Id of the launch whose agent is there; None: no agent is."""
        self.others = 0
        """What else of the island is there."""
        self.gone_since: float | None = None
        self.crashes = 0
        self.unmerged = 0.0
        """Seconds of healthy looks at the log since a commit merged an offer of this island, or since its launch."""
        self.beat: HeartbeatRecord | None = None
        self._last: str | None = None
        """Id of the launch that was there last."""
        self._limits = limits
        self._host = host
        self._agent = Watch(limits.dead_after_reads, limits.heartbeat_every)
        self._learner = Watch(limits.dead_after_reads, limits.heartbeat_every)
        self._looked: float | None = None
        self._unheard = 0.0
        """Seconds of healthy looks at the heartbeats in which a present agent had not written one."""
        self._deaths = 0
        self._not_before = now
        self._signalled: tuple[float, bool] | None = None

    # ---- events -----------------------------------------------------------------------------------------------------

    def saw_place(self, now: float, sight: Sight, ending: Ending | None) -> None:
        """Take in a look at the island's place."""
        self.others = sight.others
        if self.launch is not None and sight.launch != self.launch:
            self._last, self.launch = self.launch, None
            self.gone_since = now
            self._ended(now, ending)
        if sight.launch is not None and self.launch is None:
            self.launch = sight.launch
            self.gone_since = None
            if self.state is not State.STARTING:
                self._enter(State.STARTING, now, "found running")
            self.unmerged = 0.0

    def launched(self, now: float, launch: str) -> None:
        """Take in that the agent was started."""
        self.launch = launch
        self.gone_since = None
        self.unmerged = self._unheard = 0.0
        self._signalled = None
        self._enter(State.STARTING, now, self.why)

    def saw_heartbeat(self, now: float, beat: HeartbeatRecord | None, own_writes: bool) -> None:
        """Take in a successful read of the newest heartbeat."""
        elapsed = 0.0 if self._looked is None else min(now - self._looked, 3 * self._limits.heartbeat_every)
        self._looked = now
        self.beat = beat or self.beat
        unheard = self.launch is not None and not self._own_beat()
        self._unheard = self._unheard + (elapsed if own_writes else 0.0) if unheard else 0.0
        if beat is None:
            return
        life = (beat.incarnation, beat.agent)
        self._agent.look((life, beat.counter), now, own_writes)
        self._learner.look((life, beat.learner.ticks), now, own_writes)

    def missed_heartbeat(self) -> None:
        """Take in a failed read."""
        self._agent.missed()
        self._learner.missed()

    def crashed(self, now: float, reason: str) -> None:
        """Take in a death by the island's own fault."""
        self.crashes += 1
        if self.crashes > self._limits.max_restarts:
            self.give_up(
                now, f"{reason}; crashed {self.crashes} times, provider.max_restarts is {self._limits.max_restarts}"
            )
            return
        self._relaunch(now, f"{reason}, restart {self.crashes} of {self._limits.max_restarts}")

    def give_up(self, now: float, reason: str) -> None:
        """Launch this island no more."""
        if self.state is not State.FAILED:
            self._enter(State.FAILED, now, reason)

    def wanted_again(self, now: float, why: str) -> None:
        """An island that had ended on purpose is to run again."""
        self.why = why
        self._not_before = now
        self._enter(State.RESTARTING, now, why)

    def _ended(self, now: float, ending: Ending | None) -> None:
        """Judge the end of the agent; `ending` is None when nobody knows how it came."""
        if self.state is State.FAILED:
            return
        said = self.beat if self._own_beat() else None
        failed = said.reason if said is not None and said.state == "failed" else ""
        if ending is None and said is not None and said.learner.state == "finished":
            ending = Ending("finished", "finished")
        elif ending is None and said is not None and said.state == "failed":
            ending = Ending("crashed", "crashed")
        if ending is None:
            self._relaunch(now, "vanished")
        elif ending.kind == "finished":
            self._enter(State.DONE, now, ending.words)
        elif ending.kind == "configuration":
            self.give_up(now, f"its configuration cannot be used: {failed or '`diloco logs` says why'}")
        elif ending.kind == "run gone":
            self.give_up(now, "the run it was started for is gone from the store")
        elif ending.kind == "crashed":
            self.crashed(now, f"crashed: {failed}" if failed else ending.words)
        else:
            self._relaunch(now, ending.words)

    def _relaunch(self, now: float, why: str) -> None:
        self._not_before = now + min(MAX_BACKOFF, self._limits.relaunch_after * 2.0 ** min(self._deaths, 16))
        self._deaths += 1
        self.why = why
        self._enter(State.RESTARTING, now, why)

    # ---- judgement --------------------------------------------------------------------------------------------------

    @property
    def present(self) -> bool:
        """Tell whether anything of the island is there."""
        return self.launch is not None or self.others > 0

    @property
    def frozen_for(self) -> float:
        """Seconds for which the agent's counter stood still, counted in successful reads only."""
        return self._agent.unchanged * self._limits.heartbeat_every

    @property
    def replaceable(self) -> bool:
        """Tell whether an island that is STALE has stood still as a whole for long enough to be killed."""
        limit = self._limits.replace_frozen_after
        return self.frozen_for >= limit or self._unheard >= START_SECONDS + limit

    def judge(self, now: float, stopping: bool) -> None:
        """Settle the state from what was seen; `stopping`: a stop was requested and not yet carried out."""
        if self.launch is None:
            if stopping and self.state in (State.RESTARTING, State.PENDING) and not self.present:
                self._enter(State.DOWN, now, "stopped")
            return
        if self.state in (State.FAILED, State.DONE):
            return
        if not self._own_beat():
            if self._unheard >= START_SECONDS:
                self._enter(State.STALE, now, f"no heartbeat {self._unheard:.0f} s after its start")
            return
        still = self._stillness()
        if still:
            self._enter(State.STALE, now, still)
        elif self.beat is not None and self.beat.learner.state == "starting":
            self._enter(State.STARTING, now, self.reason if self.state is State.STARTING else "its learner starts")
        elif self.state is not State.RUNNING:
            self._enter(State.RUNNING, now, "")
        elif now - self.since >= HEALTHY_SECONDS:
            self.crashes = self._deaths = 0

    def _stillness(self) -> str:
        """Say what of a present island stands still; empty when nothing does."""
        if self._agent.failed:
            return f"no progress for {self.frozen_for:.0f} s"
        beat = self.beat
        if beat is None or beat.learner.state in ("starting", "finished", "failed") or not self._learner.failed:
            return ""
        still = self._learner.unchanged * self._limits.heartbeat_every
        if still < max(LEARNER_PATIENCE, SLOW_STEPS * (beat.learner.step_seconds or 0.0)):
            return ""
        return f"its learner made no progress for {still:.0f} s"

    def _own_beat(self) -> bool:
        """Tell whether the newest heartbeat is of the launch that is there, or was there last."""
        beat, launch = self.beat, self._last if self.launch is None else self.launch
        # Ids are unique; an agent that somebody started by hand has none.
        return beat is not None and beat.launch == launch and (launch != "" or beat.host == self._host)

    def may_launch(self, now: float) -> bool:
        """Tell whether the island waits for a launch and nothing speaks against it."""
        if self.state not in (State.PENDING, State.RESTARTING) or self.present or now < self._not_before:
            return False
        elsewhere = self.beat is not None and self.beat.host != self._host and not self._own_beat()
        if elsewhere and self.beat is not None and not self._gone_elsewhere():
            self.reason = f"waiting: it may still run on {self.beat.host}"
            return False
        return True

    def _gone_elsewhere(self) -> bool:
        beat = self.beat
        return beat is not None and (self._agent.failed or beat.state in ("stopped", "failed"))

    def may_signal(self, now: float, force: bool) -> bool:
        """Tell whether a signal is due (and count it as sent): the first, a harder one, or after `SIGNAL_EVERY`."""
        last = self._signalled
        if last is not None and last[1] >= force and now - last[0] < SIGNAL_EVERY:
            return False
        self._signalled = (now, force)
        return True

    def _enter(self, state: State, now: float, reason: str) -> None:
        if state is not self.state:
            self.state, self.since = state, now
        self.reason = reason
