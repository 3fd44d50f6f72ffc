"""The smallest run that races: one learner and two syncers on three islands' worth of records, and what must hold.

Real code throughout: `Birth`, `Learner.step`, `Follower.follow_once`, `Publisher.publish_once`, `Syncer.tick`. The
model has two numbers, each a fragment; the loss is linear in them.
"""

from __future__ import annotations

import functools
from typing import TypeVar

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.fragments import table_of
from diloco_runtime.keys import Keys
from diloco_runtime.learner import Life
from diloco_runtime.life import Birth
from diloco_runtime.records import (
    ClaimRecord,
    CommitRecord,
    HeartbeatRecord,
    LearnerStatus,
    Record,
    RunRecord,
    SupervisorRecord,
    SyncerStatus,
)
from diloco_runtime.syncer import Syncer, SyncerLife
from tests.support.explored import Contents, Port, Request
from tests.support.history_checks import HistoryChecks
from tests.support.interleavings import World
from tests.support.traces import EPOCH, trace
from tests.support.world import DictStore

RUN_ID = "00000000feedbeef"
KEYS = Keys(RUN_ID)
"""The run's keys."""
SYNCERS = "ab"
COMMITS = 3

R = TypeVar("R", bound=Record)


class TwoNumbers:
    """Two parameters of one number each, and a loss with a constant gradient."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.register_parameter("x", torch.nn.Parameter(torch.tensor([1.0])))
        self.model.register_parameter("y", torch.nn.Parameter(torch.tensor([2.0])))

    def num_units(self) -> int:
        return 100

    def unit_samples(self, data_pass: int, unit_index: int) -> int:
        return 1000

    def batch(self, data_pass: int, unit_index: int, start: int, count: int) -> int:
        return count

    def batch_tokens(self, batch: int) -> int:
        return batch

    def loss(self, batch: int) -> torch.Tensor:
        x, y = self.model.parameters()
        return (0.25 * x - 0.5 * y).sum()

    def held_out_loss(self) -> float:
        return 0.0


class OwnClock:
    """A process's own time: it passes in its own sleeps."""

    def __init__(self) -> None:
        self.now = EPOCH

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def signal(self) -> OwnSignal:
        return OwnSignal(self)


class OwnSignal:
    """An event that nobody else sets: whoever waits for it waits its time."""

    def __init__(self, clock: OwnClock) -> None:
        self._clock, self._set = clock, False

    def set(self) -> None:
        self._set = True

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            assert timeout is not None, "nobody would wake it"
            self._clock.sleep(timeout)
        return self._set


class OwnNonces:
    """Nonces of one process, in order."""

    def __init__(self, owner: str) -> None:
        self._owner, self._count = owner, 0

    def new(self) -> str:
        self._count += 1
        return f"{ord(self._owner):04x}{self._count:012x}"


class TellingBoard(Blackboard):
    """Tells the port what each create reported."""

    def __init__(self, port: Port, clock: OwnClock, owner: str) -> None:
        super().__init__(port, RUN_ID, clock, OwnNonces(owner))
        self._port = port
        self.draining = False
        """Whether the newest commit that was read or created is one of the drain."""

    def create(self, key: str, record: R) -> R:
        standing = super().create(key, record)
        self._port.told[key] = standing.nonce
        self._look(standing)
        return standing

    def read_commit(self, seq: int) -> CommitRecord | None:
        commit = super().read_commit(seq)
        self._look(commit)
        return commit

    def _look(self, record: Record | None) -> None:
        if isinstance(record, CommitRecord):
            self.draining = record.phase == "drain"


def config(tokens: int = 1_000_000) -> RunConfig:
    """Merges are due at every inner step, and a learner waits for an answer after one step more: so its steps are
    finite. Times are such that sums of them are exact, and a standby takes over at its second look at an open merge."""
    return RunConfig.model_validate(
        {
            "name": "trio",
            "tokens": tokens,
            "model": {"kind": "tests.support.trio:TwoNumbers"},
            "inner": {"optimizer": "sgd", "lr": 0.5, "schedule": "constant", "batch_size": 4, "grad_clip": 0},
            "sync": {
                "fragments": 2, "sync_every": 2, "in_flight": 2, "overlap_steps": 1, "heartbeat_every": 1000.0,
                "checkpoint_every": 1e6, "takeover_after": 1.0, "min_grace": 0.0, "drain_timeout": 0.5,
            },
        }
    )  # fmt: skip


UNIMPORTANT = frozenset(
    {
        *("_life", "_config", "_sync", "_table", "_port", "keys"),  # never change
        *("_board", "_task", "_optimizer"),  # the board is shown once, parameters too, plain SGD remembers nothing
        *("progress", "ticks", "commits", "waited_seconds", "busy_seconds", "longest_gap"),  # are only reported
        *("_identity_seen", "_peers_looked", "_looked", "first_looked"),  # when it looked at what never changes
        *("_last_opened", "_period"),  # the learner has reported a longer period, and the longest is used
        "_calm",  # counts to 20 commits
    }
)
"""Attributes that decide nothing here; without them, a turn in which nothing happened leaves no trace."""


# ---- processes --------------------------------------------------------------------------------------------------


def learn(settings: RunConfig, port: Port) -> None:
    """The learner of island "a": its three loops turn in order, until it has seen the last commit."""
    clock = OwnClock()
    board, task = TellingBoard(port, clock, "l"), TwoNumbers()
    life = Life(settings, "a", 1, settings.inner.batch_size, table_of(task.model, settings.sync.fragments))
    engine = Birth(life, board, clock, task, lambda status: None).begin()
    assert engine is not None
    while engine.follower.follow_once():
        pass
    running = True
    while running:
        port.pause(trace((engine, board), None, UNIMPORTANT))
        try:
            engine.follower.follow_once()
            if engine.follower.head.seq >= COMMITS:
                return
            running = engine.learner.step()
            while engine.publisher.publish_once():
                pass
        except StoreUnavailable:
            pass  # the loops try again


def serve(settings: RunConfig, island: str, name: str, port: Port) -> None:
    """The syncer of an island, until it has seen the last commit."""
    clock = OwnClock()
    board, statuses = TellingBoard(port, clock, name), [SyncerStatus()]
    head = board.read_commit(0)
    assert head is not None
    life = SyncerLife(settings, head.fragments, island, 1)
    syncer = Syncer(life, board, clock, head, lambda: 1.0, statuses.append)
    syncer.tick()
    clock.sleep(1.0)
    while statuses[-1].head < COMMITS and not syncer.ended:
        port.pause(trace((syncer, board), clock.now, UNIMPORTANT))
        try:
            wait = syncer.tick()
        except StoreUnavailable:
            wait = 0.5  # any time: the loop tries again
        if board.draining or not statuses[-1].duty:
            clock.sleep(wait)


# ---- the run before anything happens ----------------------------------------------------------------------------


def initial(settings: RunConfig) -> Contents:
    """Return a blackboard on which three islands have claimed a life and said that they are there."""
    store = DictStore(Port.url)
    board = Blackboard(store, RUN_ID, OwnClock(), OwnNonces("s"))
    said = {"run_id": RUN_ID, "host": "h", "pid": 1, "started": 0.0}
    board.create_run(
        RunRecord(
            run_id=RUN_ID, nonce="0" * 16, name=settings.name, code_version="0", created_wall=0.0,
            config=settings.model_dump(mode="json"),
        )
    )  # fmt: skip
    record = SupervisorRecord(nonce="1" * 16, number=1, supervisor="s", islands=tuple(SYNCERS), **said)
    board.create(KEYS.supervisor(1), record)
    for name in SYNCERS:
        life = {"island": name, "incarnation": 1, "agent": f"agent-{name}", **said}
        board.create(KEYS.claim(name, 1), ClaimRecord(nonce=board.new_nonce(), claimed_wall=0.0, **life))
        learner = LearnerStatus(state="training" if name == "a" else "finished", step_seconds=20.0)
        beat = HeartbeatRecord(
            nonce=board.new_nonce(), counter=1, state="running", learner=learner, syncer=SyncerStatus(score=1.0), **life
        )
        board.write_heartbeat(beat)
    task = TwoNumbers()
    life = Life(settings, "a", 1, 4, table_of(task.model, settings.sync.fragments))
    Birth(life, board, OwnClock(), task, lambda status: None).begin()
    return Contents(store._objects)


def trio(settings: RunConfig | None = None, second: str = "a") -> World:
    """Return the world of one learner `l` and two syncers `a` and `b`."""
    settings = settings or config()
    programs = (
        functools.partial(learn, settings),
        functools.partial(serve, settings, "a", "a"),
        functools.partial(serve, settings, second, "b"),
    )
    checks = HistoryChecks(settings, KEYS, COMMITS)
    return World("lab", programs, initial(settings), private, checks.write, checks.told, checks.end)


def private(name: str, request: Request) -> bool:
    """Tell whether a request commutes with all requests of others.

    Claims, heartbeats, supervisors and controls only stand there. Data units are the one learner's, and so are calls, as
    far as it looks at them itself. Payloads have names of their own, which others learn from a record that is created
    when the payload is there (checked), and none that a record names is ever deleted (checked). What a process sees
    beyond the last commit, it no longer acts upon.
    """
    kind = request.key.split("/")[1] if "/" in request.key else request.key
    if kind == "calls":
        return (name == "l" and request.verb == "get") or request.key > KEYS.call(COMMITS)
    return kind in ("run.json", "data", "islands", "supervisor", "control", "blobs") or request.key == KEYS.log(
        COMMITS + 1
    )
