"""A world of islands for the supervisor's state machine: processes, heartbeats and a log that a test moves by hand."""

from __future__ import annotations

import signal

from diloco_cli.island_watch import Limits, State
from diloco_cli.sights import Sight, ending_of
from diloco_cli.supervision import Launch, Signal, Supervision
from diloco_runtime.records import (
    CommitRecord,
    ControlRecord,
    HeartbeatRecord,
    LearnerStatus,
    OfferEntry,
    Position,
    SyncerStatus,
)

RUN = "0123456789abcdef"
PERIOD = 5.0
LIMITS = Limits(
    heartbeat_every=PERIOD,
    dead_after_reads=3,
    max_restarts=2,
    relaunch_after=2.0,
    replace_frozen_after=60.0,
    stalled_after=1000.0,
)


def log_commit(seq: int, phase: str = "run", merged: tuple[str, ...] = (), **more: object) -> CommitRecord:
    """Return a commit that merged offers of these islands."""
    entries = tuple(
        OfferEntry(island=i, incarnation=1, nonce="n", anchor=0, inner_steps=1, tokens=1, data_to=Position())
        for i in merged
    )
    fields = {
        "run_id": RUN,
        "nonce": f"c{seq}",
        "parent": "",
        "fragment": 0,
        "author": "a",
        "author_incarnation": 1,
        "successor": "a",
        "params": (),
        **more,
    }
    return CommitRecord.model_validate({**fields, "seq": seq, "phase": phase, "merged": entries})


def control(number: int, action: str) -> ControlRecord:
    """Return a control record."""
    return ControlRecord.model_validate({"run_id": RUN, "nonce": "k", "number": number, "action": action})


class World:
    """Two islands, their processes and heartbeats, and the machine that watches them."""

    def __init__(self, *names: str) -> None:
        self.now = 1000.0
        self.names = names or ("a", "b")
        self.machine = Supervision(self.names, LIMITS, "here", self.now)
        self.launches: dict[str, str | None] = dict.fromkeys(self.names)
        self.others: dict[str, int] = dict.fromkeys(self.names, 0)
        self.status: dict[str, int | None] = dict.fromkeys(self.names)
        self.frozen: set[str] = set()
        self.frozen_learners: set[str] = set()
        self.silent: set[str] = set()
        self.host: dict[str, str] = dict.fromkeys(self.names, "here")
        self.ticks: dict[str, int] = dict.fromkeys(self.names, 0)
        self.steps: dict[str, int] = dict.fromkeys(self.names, 0)
        self.lives: dict[str, int] = dict.fromkeys(self.names, 0)
        self.step_seconds = 0.1
        self.writes = True
        self.reads = True
        self.seq = 0
        self.news: list[CommitRecord] = []
        self.auto_launch = True
        self.log: list[object] = []

    def state(self, name: str) -> State:
        """Return an island's state."""
        return self.machine.islands[name].state

    def reason(self, name: str) -> str:
        """Return the reason of an island's state."""
        return self.machine.islands[name].reason

    def beat(self, name: str) -> HeartbeatRecord | None:
        """Return an island's newest heartbeat; it moves on unless the island is frozen."""
        if not self.lives[name] or name in self.silent:
            return None
        if self.launches[name] is not None and name not in self.frozen:
            self.ticks[name] += 1
            self.steps[name] += name not in self.frozen_learners
        return HeartbeatRecord(
            run_id=RUN, nonce="h", island=name, incarnation=self.lives[name], agent=f"{name}{self.lives[name]}",
            counter=self.ticks[name], state="running", host=self.host[name], pid=7, started=1.0,
            learner=LearnerStatus(state="training", ticks=self.steps[name], step_seconds=self.step_seconds),
            syncer=SyncerStatus(), launch=f"{name}{self.lives[name]}",
        )  # fmt: skip

    def turn(self, seconds: float = PERIOD) -> list[object]:
        """Let time pass, look once, carry the launches out; return what was decided."""
        self.now += seconds
        for name in self.names:
            status = self.status[name]
            sight = Sight(self.launches[name], self.others[name])
            self.machine.saw_place(name, self.now, sight, None if status is None else ending_of(status))
            if self.reads:
                self.machine.saw_heartbeat(name, self.now, self.beat(name), self.writes)
        if self.reads:
            self.machine.saw_log(self.now, self.news, self.writes)
            self.news = []
        else:
            self.machine.read_failed()
        actions = list(self.machine.decide(self.now))
        for action in actions:
            if isinstance(action, Launch) and self.auto_launch:
                self.launch(action.island)
            if isinstance(action, Signal) and action.force:
                self.die(action.island, -signal.SIGKILL)
        self.log += actions
        return actions

    def launch(self, name: str) -> None:
        """Start an island's next life."""
        self.lives[name] += 1
        launch = f"{name}{self.lives[name]}"
        self.launches[name], self.status[name] = launch, None
        self.machine.launched(name, self.now, launch)

    def die(self, name: str, status: int | None) -> None:
        """End an island's processes; `status` as the operating system gives it."""
        self.launches[name], self.others[name], self.status[name] = None, 0, status
        self.frozen.discard(name)

    def commit(self, *merged: str, phase: str = "run", **more: object) -> None:
        """Add a commit to the log."""
        self.seq += 1
        self.news.append(log_commit(self.seq, phase, merged, **more))

    def turns(self, seconds: float, step: float = PERIOD) -> list[object]:
        """Make turns for that many seconds; return all decisions."""
        found: list[object] = []
        for _ in range(round(seconds / step)):
            found += self.turn(step)
        return found

    def running(self) -> None:
        """Bring every island up."""
        self.turn()
        self.turn()
        assert {self.state(name) for name in self.names} == {State.RUNNING}
        self.log.clear()
