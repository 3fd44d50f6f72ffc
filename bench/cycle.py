"""What one outer step costs: time and bytes by stage, and requests by process role and verb.

Three learners and a syncer do one call, publish, merge, commit, adopt after another, one at a time in this process,
over memory:// and file://, for the demo's model and for one of ten million parameters. Then the loops of one island run
at their own pace for a while and count what they ask the store, polls included.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from _live import live
from _results import Cell, Lines, parse_arguments, print_table
from _workplace import changed, demo_spec, workplace, write_text

from diloco_cli.runs import create_run
from diloco_cli.spec import Spec
from diloco_runtime import garbage
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemClock, SystemNonces
from diloco_runtime.fragments import table_of
from diloco_runtime.learner import Life
from diloco_runtime.life import Birth, Engine
from diloco_runtime.merging import Decision, Merging, OfferBook
from diloco_runtime.store import open_store
from diloco_runtime.store_counting import CountingStore
from diloco_runtime.task import TaskContext, load_task

ISLANDS = ("a", "b", "c")
MODELS: dict[str, dict[str, int]] = {"demo": {}, "10M": {"layers": 6, "heads": 6, "width": 384}}
TURN, SNAPSHOT, ADOPT = "plain turn (main thread)", "snapshot (main thread)", "adopt (main thread)"
"""What a turn of the learner's loop costs besides its inner step: alone, with an offer, with an adoption."""

CALL, PUBLISH, READ, MERGE, COMMIT, FETCH = (
    "call",
    "publish",
    "read offers",
    "merge and write",
    "commit",
    "fetch the commit",
)
ONE_CYCLE = (SNAPSHOT, CALL, PUBLISH, READ, MERGE, COMMIT, FETCH, ADOPT)
"""What lies between the moment a learner finds a merge due and the moment it trains on the result."""

MERGE_STAGES = ("fetch", "merge", "write")
"""Stages that the syncer times itself, in the record of each commit."""


@dataclass
class Stages:
    """Seconds, bytes and requests of every stage, one entry per time it was done."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    traffic: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)
    """Bytes up, bytes down, requests."""

    def add(self, stage: str, seconds: float, traffic: tuple[int, int, int] | None = None) -> None:
        self.seconds.setdefault(stage, []).append(seconds)
        if traffic is not None:
            self.traffic.setdefault(stage, []).append(traffic)

    def clear(self) -> None:
        self.seconds.clear()
        self.traffic.clear()


@dataclass(frozen=True)
class Member:
    """One island's learner, stepped by hand."""

    engine: Engine
    store: CountingStore
    stages: Stages

    def step(self, stage: str) -> None:
        """Make one turn of the learner's loop; what it did besides the inner step counts as `stage`."""
        learner = self.engine.learner
        self.engine.publisher.publish_seconds = None  # the turns are set: nobody is to start early on a slow link
        busy, started = learner.status.busy_seconds, time.perf_counter()
        learner.step()
        self.stages.add(stage, time.perf_counter() - started - (learner.status.busy_seconds - busy))

    def timed(self, stage: str, action: Callable[[], object]) -> None:
        """Do one thing of the background threads as `stage`."""
        timed(self.stages, stage, self.store, action)


def timed(stages: Stages, stage: str, store: CountingStore, action: Callable[[], object]) -> None:
    """Add the time and the traffic of `action`."""
    before = (store.bytes_up, store.bytes_down, sum(store.requests.values()))
    started = time.perf_counter()
    action()
    seconds = time.perf_counter() - started
    after = (store.bytes_up, store.bytes_down, sum(store.requests.values()))
    stages.add(stage, seconds, (after[0] - before[0], after[1] - before[1], after[2] - before[2]))


class Cycle:
    """A run whose islands take turns: `turn` is one outer step from call to adoption."""

    def __init__(self, spec: Spec) -> None:
        self._spec, self._clock, self.stages = spec, SystemClock(), Stages()
        self._run_id = create_run(spec)[0].id
        self.members = [self._member(name) for name in ISLANDS]
        self._syncer, self.store = self._board()
        self._merging = Merging(self._syncer, self._clock, spec.config, self._life.table, ISLANDS[0], 1)
        self._head = self.members[0].engine.head

    def _board(self) -> tuple[Blackboard, CountingStore]:
        store = CountingStore(open_store(self._spec.store, self._spec.name))
        return Blackboard(store, self._run_id, self._clock, SystemNonces()), store

    def _member(self, name: str) -> Member:
        board, store = self._board()
        task = load_task(TaskContext(self._spec.config, torch.device("cpu"), str(self._spec.root)))
        table = table_of(task.model, self._spec.config.sync.fragments)
        self._life = Life(self._spec.config, name, 1, self._spec.config.inner.batch_size, table)
        engine = Birth(self._life, board, self._clock, task, lambda status: None).begin()
        assert engine is not None, "a new run is not over"
        while engine.follower.follow_once():
            pass  # until its units of the data are claimed
        return Member(engine, store, self.stages)

    @property
    def parameters(self) -> int:
        return sum(fragment.numel for fragment in self._life.table)

    def turn(self) -> None:
        """Call, publish, merge, commit, adopt."""
        caller = self.members[0]
        for member in self.members:
            member.step(TURN)
        caller.step(SNAPSHOT)
        if not caller.engine.publisher.offers_waiting():
            raise SystemExit("the merge was not due when this bench expects it: sync_every / fragments is not 3")
        caller.timed(CALL, caller.engine.publisher.publish_once)
        caller.timed(PUBLISH, caller.engine.publisher.publish_once)
        for member in self.members[1:]:
            member.timed("see the call", member.engine.follower.follow_once)
            member.step(SNAPSHOT)
            member.timed(PUBLISH, member.engine.publisher.publish_once)
        self._merge()
        for member in self.members:
            member.timed(FETCH, member.engine.follower.follow_once)
            member.step(ADOPT)

    def _merge(self) -> None:
        book, stages, board = OfferBook(self._head.seq + 1), self.stages, self._syncer
        timed(stages, READ, self.store, lambda: self._merging.collect(book))
        if len(book.valid) != len(ISLANDS):
            raise SystemExit(f"{len(book.valid)} of {len(ISLANDS)} offers arrived: {book.refused or book.unreadable}")
        decision = Decision("run", 0, "", 0, self._head.budget, ISLANDS[0], 0.0)
        drafts = []
        timed(
            stages,
            MERGE,
            self.store,
            lambda: drafts.append(self._merging.draft(book, self._head, decision)),
        )
        for name in MERGE_STAGES:
            stages.add(f"  of which {name}", drafts[0].record.stages[name])
        timed(stages, COMMIT, self.store, lambda: self._merging.create(drafts[0]))
        self._head = drafts[0].record
        sync, count = self._spec.config.sync, len(self._life.table)
        timed(
            stages,
            "sweep",
            self.store,
            lambda: garbage.collect(board, self._head, count, sync.keep_versions, sync.snapshot_every),
        )

    def checkpoint(self) -> None:
        """Not part of an outer step, but of what a learner does beside its inner steps."""
        member = self.members[0]
        started = time.perf_counter()
        member.engine.learner.checkpoint()
        self.stages.add("checkpoint: copy (main thread)", time.perf_counter() - started)
        member.timed("checkpoint: write", member.engine.publisher.checkpoint_once)


def measure(spec: Spec, turns: int) -> Cycle:
    """Return a cycle after `turns` outer steps, warm-up not counted."""
    cycle, sync = Cycle(spec), spec.config.sync
    for member in cycle.members:
        member.step("start")
    # As many turns as it takes until payloads are old enough to be swept.
    for _ in range(sync.fragments * sync.keep_versions):
        cycle.turn()
    cycle.stages.clear()
    for _ in range(turns):
        cycle.turn()
    for _ in range(3):
        cycle.checkpoint()
    return cycle


def report(model: str, found: dict[str, Cycle], lines: Lines) -> None:
    """Print one model's stages over all stores side by side."""
    rows: list[list[Cell]] = []
    stages: dict[str, dict[str, object]] = {}
    first = next(iter(found.values()))
    steps = len(first.stages.seconds[COMMIT])
    totals = dict.fromkeys(found, 0.0)
    for stage, done in first.stages.seconds.items():
        medians = {kind: 1000 * statistics.median(cycle.stages.seconds[stage]) for kind, cycle in found.items()}
        if stage in ONE_CYCLE:
            totals = {kind: total + medians[kind] for kind, total in totals.items()}
        sizes = first.stages.traffic.get(stage)
        moved = [int(statistics.median(column)) for column in zip(*sizes, strict=True)] if sizes else [None] * 3
        rows.append([stage, f"x {len(done) // steps}" if len(done) >= steps else "", *medians.values(), *moved])
        traffic = dict(zip(("bytes_up", "bytes_down", "requests"), moved, strict=True))
        stages[stage.strip()] = {"milliseconds": medians, "times_per_outer_step": len(done) / steps, **traffic}
    rows.append(["one after the other, from snapshot to adoption", "", *totals.values(), None, None, None])
    lines.add("stages", model=model, parameters=first.parameters, outer_steps=steps, one_cycle=totals, stages=stages)
    headers = ("stage", "per step", *(f"ms {kind}" for kind in found), "bytes up", "bytes down", "requests")
    title = f"One outer step, {len(ISLANDS)} islands, {model} model ({first.parameters:,} parameters), medians"
    print_table(title, headers, rows)


def main() -> None:
    """Measure and print."""
    arguments = parse_arguments(str(__doc__))
    lines = Lines("cycle", arguments)
    torch.set_num_threads(1)
    with workplace() as folder:
        write_text(folder)
        for name, model in MODELS.items():
            # Inner steps are made as small as they can be; three of them make a fragment period.
            spec = demo_spec(folder, model=model, inner={"batch_size": 1, "sequence_length": 16})
            sync = {"in_flight": 1, "checkpoint_every": 3600.0, "sync_every": 3 * spec.config.sync.fragments}
            spec = replace(spec, config=changed(spec.config, sync=sync))
            urls = {"memory": f"memory://{name}", "file": f"file://{folder}/{name}"}
            turns = 6 if arguments.quick else 30
            report(name, {kind: measure(replace(spec, store=url), turns) for kind, url in urls.items()}, lines)
        live(folder, 10.0 if arguments.quick else 40.0, lines)
    lines.finish()


if __name__ == "__main__":
    main()
