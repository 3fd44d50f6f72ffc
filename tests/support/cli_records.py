"""Records and looks for tests of the command line, with defaults for everything a test does not care about."""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.looking import IslandLook, Look
from diloco_cli.sights import Sight
from diloco_runtime.config import DataConfig, RunConfig
from diloco_runtime.records import (
    CommitRecord,
    Fragment,
    HeartbeatRecord,
    LearnerStatus,
    OfferEntry,
    Position,
    RunRecord,
    SupervisorRecord,
    SyncerStatus,
    TensorPiece,
)

RUN = "0123456789abcdef"
CONFIG = RunConfig(name="demo", tokens=1000, data=DataConfig(files=("a.txt",)))
RECORD = RunRecord(
    run_id=RUN, nonce="r", name="demo", code_version="0", config=CONFIG.model_dump(mode="json"), created_wall=0.0
)


def fragment(numel: int) -> Fragment:
    """Return a fragment of one tensor with that many parameters."""
    return Fragment(pieces=(TensorPiece(name="w", shape=(numel,), start=0, stop=numel, merge="rda"),))


TABLE = (fragment(30), fragment(10))


def commit(seq: int, credited_total: int = 0, merged: int = 0, **more: object) -> CommitRecord:
    """Return a commit; `merged`: how many offers it merged."""
    entries = tuple(
        OfferEntry(island=f"i{n}", incarnation=1, nonce="n", anchor=0, inner_steps=1, tokens=1, data_to=Position())
        for n in range(merged)
    )
    fields = {"run_id": RUN, "nonce": f"c{seq}", "parent": f"c{seq - 1}", "fragment": 0, "author": "a",
              "author_incarnation": 1, "successor": "a", "params": (), "budget": 1000, **more}  # fmt: skip
    return CommitRecord.model_validate({**fields, "seq": seq, "credited_total": credited_total, "merged": entries})


def beat(name: str = "a", incarnation: int = 1, counter: int = 1, **more: object) -> HeartbeatRecord:
    """Return a heartbeat of a training island whose counters all equal `counter`."""
    learner = more.pop("learner", LearnerStatus(state="training", ticks=counter, step=counter, step_seconds=0.1))
    fields = {"run_id": RUN, "nonce": "h", "island": name, "incarnation": incarnation, "agent": f"{name}0",
              "counter": counter, "state": "running", "syncer": SyncerStatus(), "host": "here", "pid": 7,
              "started": 1.0, "uptime": 100.0, "launch": "l1", **more}  # fmt: skip
    return HeartbeatRecord.model_validate({**fields, "learner": learner})


def seen(beats: tuple[HeartbeatRecord, ...] = (), **more: object) -> IslandLook:
    """Return an island that moved just now, with a living process, at a look at time 100."""
    incarnation = beats[-1].incarnation if beats else 0
    name = beats[-1].island if beats else "a"
    base = IslandLook(name, beats, incarnation, Sight("l1", pid=7), moved=100.0, learner_moved=100.0)
    return replace(base, **more)  # type: ignore[arg-type]


def look(*islands: IslandLook, **more: object) -> Look:
    """Return a look at time 100 of an observer that has looked since time 0."""
    base = Look(
        at=100.0, first_at=0.0, head=None, news=(), recent=(), table=TABLE, control=None, supervisor=None,
        supervisor_moved=None, islands={island.name: island for island in islands}, pace=None,
    )  # fmt: skip
    return replace(base, **more)  # type: ignore[arg-type]


def supervisor(**more: object) -> SupervisorRecord:
    """Return a supervisor's record."""
    fields = {"run_id": RUN, "nonce": "s", "number": 1, "supervisor": "s", "host": "here", "pid": 3, "started": 1.0,
              "islands": ("a",), **more}  # fmt: skip
    return SupervisorRecord.model_validate(fields)
