"""The smallest run that races: one learner and two syncers on two islands' worth of records.

Real code throughout: `Birth`, `Learner.step`, `Follower.follow_once`, `Publisher.publish_once`, `Syncer.tick`. The
model has two numbers, each a fragment; the loss is linear in them.

Not searched: the three threads of a learner against each other (here they turn in order, and share one fate), clocks
that leap while a process is frozen, heartbeats that come and go, and faults before a first life's second turn.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from diloco_cli.simulation.storage import Bucket, Memory
from diloco_runtime.blackboard import Blackboard, Parse
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.fragments import table_of
from diloco_runtime.learner import Life
from diloco_runtime.life import Birth, Engine
from diloco_runtime.records import (
    ClaimRecord,
    HeartbeatRecord,
    LearnerStatus,
    RunRecord,
    SupervisorRecord,
    SyncerStatus,
)
from diloco_runtime.syncer import Syncer, SyncerLife
from tests.sim.interleave.history import HistoryChecks, plain
from tests.sim.interleave.parts import KEYS, RUN_ID, OwnClock, OwnNonces, TellingBoard, TwoNumbers
from tests.sim.interleave.processes import Books, Holds, Port, Request, Said, Told
from tests.sim.interleave.traces import trace
from tests.sim.interleave.world import Contents, World

ISLANDS = "ab"

COMMITS = 3
"""Commits of the usual search: one more than fragments, so that one fragment is merged twice."""


def config(tokens: int = 1_000_000) -> RunConfig:
    """Merges are due at every inner step, and a learner waits for an answer after one step more: so its steps are
    finite. Times are such that sums of them are exact, and a standby takes over at its second look at an open merge."""
    return RunConfig.model_validate(
        {
            "name": "trio",
            "tokens": tokens,
            "model": {"kind": "tests.sim.interleave.parts:TwoNumbers"},
            "inner": {"optimizer": "sgd", "lr": 0.5, "schedule": "constant", "batch_size": 4, "grad_clip": 0},
            "sync": {
                "fragments": 2, "sync_every": 2, "in_flight": 2, "overlap_steps": 1, "heartbeat_every": 1000.0,
                "checkpoint_every": 1e6, "takeover_after": 1.0, "min_grace": 0.0, "drain_timeout": 0.5,
            },
        }
    )  # fmt: skip


UNIMPORTANT = frozenset(
    {
        *("_life", "_config", "_sync", "_table", "store", "_port", "keys"),  # never change, or are this search
        *("_board", "_task", "_optimizer"),  # the board is shown once, parameters too, plain SGD remembers nothing
        *("progress", "ticks", "commits", "_turns"),  # are only reported
        *("waited_seconds", "busy_seconds", "longest_gap"),  # so are these
        *("_identity_seen", "_peers_looked", "_looked", "first_looked"),  # when it looked at what never changes
        *("_last_opened", "_period", "_committed"),  # the learner has reported a longer period, and the longest is used
        *("commit_seconds", "_commit_seen", "period"),  # the pace of a thread that turns here in order
        "_calm",  # counts to 20 commits
    }
)
"""Attributes that decide nothing here; without them, a turn in which nothing happened leaves no trace."""


# ---- processes --------------------------------------------------------------------------------------------------


def learn(setting: Setting, parse: Parse, life: int, port: Port) -> None:
    """A life of the learner of island "a": its three loops turn in order, until it has adopted the last commit."""
    clock, settings = OwnClock(), setting.config
    board, task = TellingBoard(port, clock, "lm"[life], parse), TwoNumbers()
    if life:
        _claim(board, "a", life + 1)
    who = Life(settings, "a", life + 1, settings.inner.batch_size, table_of(task.model, settings.sync.fragments))
    engine = Birth(who, board, clock, task, lambda status: None).begin()
    if engine is None:
        return  # the run ended before this life began
    while engine.follower.follow_once():
        pass
    running = True
    while running and engine.learner._logic.head < setting.commits:
        port.pause(trace((engine, board), None, UNIMPORTANT))
        try:
            engine.follower.follow_once()
            running = engine.learner.step()
            while engine.follower.head.seq < setting.commits and engine.publisher.publish_once():
                pass
        except StoreUnavailable:
            pass  # the loops try again
        port.said += _account(engine)


def _account(engine: Engine) -> list[Said]:
    """Tell what a learner has read, what it holds, and where its tokens went."""
    logic, anchors, head = engine.learner._logic, engine.learner._anchors, engine.follower.head
    holds = [Holds(f, part.version, plain(anchors[f])) for f, part in enumerate(logic._fragments)]
    life = engine.learner._life
    return [
        Told(KEYS.log(head.seq), head.nonce),
        *holds,
        Books(life.island, life.incarnation, logic.head, logic.fates()),
    ]


def serve(setting: Setting, parse: Parse, island: str, name: str, port: Port) -> None:
    """The syncer of an island, until it has seen the last commit."""
    clock = OwnClock()
    board, statuses = TellingBoard(port, clock, name, parse), [SyncerStatus()]
    head = board.read_commit(0)
    assert head is not None
    life = SyncerLife(setting.config, head.fragments, island, 1)
    syncer = Syncer(life, board, clock, head, lambda: 1.0, statuses.append)
    syncer.tick()
    clock.sleep(1.0)
    while statuses[-1].head < setting.commits and not syncer.ended:
        port.pause(trace((syncer, board), clock.now, UNIMPORTANT))
        try:
            syncer.tick()
        except StoreUnavailable:
            pass  # the loop tries again
        port.said += _copies(syncer)
        # Any time might pass here. On duty it only matters to the time limit of the drain, which ends one merge late.
        if board.draining or not statuses[-1].duty:
            clock.sleep(1.0 if not statuses[-1].duty else 0.5)


def _copies(syncer: Syncer) -> list[Said]:
    """Tell what a syncer has read and what it holds."""
    held = {} if syncer._merging is None else syncer._merging._state
    holds = [Holds(fragment, version, plain(params)) for fragment, (version, params, _) in held.items()]
    return [Told(KEYS.log(syncer._head.seq), syncer._head.nonce), *holds]


# ---- the run before anything happens ----------------------------------------------------------------------------


def _claim(board: Blackboard, island: str, life: int) -> None:
    record = ClaimRecord(
        run_id=RUN_ID, nonce=board.new_nonce(), island=island, incarnation=life, agent=f"agent-{island}", host="h",
        pid=1, started=0.0, claimed_wall=0.0,
    )  # fmt: skip
    board.create(KEYS.claim(island, life), record)


def initial(settings: RunConfig) -> Contents:
    """Return a blackboard on which two islands have claimed a life and said that they are there."""
    store = Bucket()
    board = Blackboard(store, RUN_ID, OwnClock(), OwnNonces("s"))
    said = {"run_id": RUN_ID, "host": "h", "pid": 1, "started": 0.0}
    board.create_run(
        RunRecord(
            run_id=RUN_ID, nonce="0" * 16, name=settings.name, code_version="0", created_wall=0.0,
            config=settings.model_dump(mode="json"),
        )
    )  # fmt: skip
    record = SupervisorRecord(nonce="1" * 16, number=1, supervisor="s", islands=tuple(ISLANDS), **said)
    board.create(KEYS.supervisor(1), record)
    for name in ISLANDS:
        _claim(board, name, 1)
        learner = LearnerStatus(state="training" if name == "a" else "finished", step_seconds=20.0)
        beat = HeartbeatRecord(
            nonce=board.new_nonce(), counter=1, state="running", learner=learner, syncer=SyncerStatus(score=1.0),
            island=name, incarnation=1, agent=f"agent-{name}", **said,
        )  # fmt: skip
        board.write_heartbeat(beat)
    task = TwoNumbers()
    life = Life(settings, "a", 1, 4, table_of(task.model, settings.sync.fragments))
    Birth(life, board, OwnClock(), task, lambda status: None).begin()
    return Contents(store.objects)


@dataclass(frozen=True)
class Setting:
    """Which trio."""

    second: str
    """Island of the second syncer: "b", which stands by, or "a", as if a syncer that was given up had come back: then
    both have the duty."""
    ending: bool
    """Whether the first commit already reaches the budget: then the last one is final."""
    commits: int = COMMITS
    """With which commit the processes end."""
    read_once: bool = True
    """Whether no data may be merged twice. It may be when the offer of a dead life arrives after the next life has
    looked where to go on: no look before a write keeps that from happening."""

    @property
    def config(self) -> RunConfig:
        return config(tokens=4 if self.ending else 1_000_000)

    def world(self) -> World:
        """Return the world of one learner `l`, which may die once, and two syncers `a` and `b`."""
        parse = Memory().parse
        lives = (
            (functools.partial(learn, self, parse, 0), functools.partial(learn, self, parse, 1)),
            (functools.partial(serve, self, parse, "a", "a"),),
            (functools.partial(serve, self, parse, self.second, "b"),),
        )
        checks = HistoryChecks(self.config, KEYS, self.commits, self.read_once)
        return World("lab", lives, initial(self.config), self._private, checks)

    def _private(self, name: str, request: Request) -> bool:
        """Tell whether a request commutes with all requests of others.

        Claims, heartbeats, supervisors and controls only stand there. Data units are the one learner's, and so are
        calls, as far as it looks at them itself. Payloads have names of their own, which others learn from a record
        that is created when the payload is there (checked), and none that a record names is ever deleted (checked).
        What a process sees beyond the last commit, it no longer acts upon.
        """
        kind = request.key.split("/")[1] if "/" in request.key else request.key
        if kind == "calls":
            return (name == "l" and request.verb == "get") or request.key > KEYS.call(self.commits)
        own = ("run.json", "data", "islands", "supervisor", "control", "blobs")
        return kind in own or request.key == KEYS.log(self.commits + 1)


SCENES = {
    "standby": Setting("b", ending=False),
    "rivals": Setting("a", ending=False),
    "standby-end": Setting("b", ending=True),
    "rivals-end": Setting("a", ending=True),
}
"""The trios that are searched, by name."""
