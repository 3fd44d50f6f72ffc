"""One island's loops at their own pace, as threads of this process, each with a store that counts what it is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from _results import Cell, Lines, print_table
from _workplace import demo_spec

from diloco_cli.runs import Run
from diloco_cli.spec import Island, Spec
from diloco_cli.training import bring_up
from diloco_runtime import learner_main, syncer_main
from diloco_runtime.children import ChildProcesses
from diloco_runtime.errors import DilocoError
from diloco_runtime.identity import own_identity
from diloco_runtime.island import Agent, keep_beating
from diloco_runtime.launch import Launch, Surroundings, open_surroundings

START_SECONDS = 120.0

MOVED = ("bytes up", "bytes down")

Counts = dict[str, dict[str, int]]
"""By role: requests by verb, and bytes up and down."""


def serve(around: Surroundings, leaving: threading.Event) -> None:
    """Do what the syncer process does until it is told to leave."""
    launch = around.launch
    score, report = (lambda: syncer_main.score(launch)), (lambda status: syncer_main.report(around, status))
    syncer = syncer_main.wait_for_start(around, score, report)
    while not leaving.is_set():
        leaving.wait(syncer.tick())


def learn(around: Surroundings, leaving: threading.Event) -> None:
    """Do what the learner process does until it is told to leave."""
    engine = learner_main.birth(around).begin()
    assert engine is not None, "a new run is not over"
    learner_main.turn(engine, around, leaving, learner_main.Threads())


def beat(around: Surroundings, leaving: threading.Event) -> None:
    """Do what the agent process does for the blackboard until it is told to leave."""
    agent = Agent(around, ChildProcesses(around.launch), own_identity())
    agent.claim_life()  # `Agent.turn` does it before it starts processes; here they are threads
    keep_beating(agent, around.config.sync.heartbeat_every, leaving)


ROLES: dict[str, tuple[str, Callable[[Surroundings, threading.Event], None]]] = {
    "learner": ("a", learn),
    "syncer on duty": ("a", serve),
    "agent": ("a", beat),
    "standby syncer": ("b", serve),
    "agent of the standby": ("b", beat),
}
"""Island and body of every role: a whole island, and a second one that is there but has no learner."""


class Crew:
    """The roles at work in threads of their own."""

    def __init__(self, spec: Spec, run: Run, folder: Path) -> None:
        self._leaving = threading.Event()
        self.problems: list[str] = []
        self._around: dict[str, Surroundings] = {}
        for role, (island, _) in ROLES.items():
            state = folder / f"state-{island}"
            state.mkdir(exist_ok=True)
            launch = Launch(spec.store, spec.name, run.id, island, state, str(spec.root), incarnation=1)
            self._around[role] = open_surroundings(launch)
        self._threads = [threading.Thread(target=self._body, args=(role,), daemon=True) for role in ROLES]

    def _body(self, role: str) -> None:
        try:
            ROLES[role][1](self._around[role], self._leaving)
        except (DilocoError, OSError) as error:
            self.problems.append(f"{role}: {error}")

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Let everybody work until the block ends."""
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._leaving.set()
            for thread in self._threads:
                thread.join(30.0)

    def counts(self) -> Counts:
        """Return what every role has asked so far."""
        counters = {role: around.counter for role, around in self._around.items()}
        return {
            role: {**store.requests, **dict(zip(MOVED, (store.bytes_up, store.bytes_down), strict=True))}
            for role, store in counters.items()
        }


def live(folder: Path, seconds: float, lines: Lines) -> None:
    """Let an island and another one's standby syncer work for `seconds`; print requests per outer step."""
    # Memory is shared by the roles because they are threads here; requests do not depend on the kind of store.
    spec = demo_spec(folder)
    inner = spec.config.inner
    islands = tuple(Island(name, inner.batch_size, inner.threads) for name in ("a", "b"))
    spec = replace(spec, store="memory://live", islands=islands)
    run, _ = bring_up(spec)
    crew = Crew(spec, run, folder)

    def head() -> int:
        commit = run.board.head()
        return -1 if commit is None else commit.seq

    with crew.at_work():
        deadline = time.monotonic() + START_SECONDS
        while head() < run.config.sync.fragments and not crew.problems and time.monotonic() < deadline:
            time.sleep(0.1)  # the interval of a poll with a deadline
        before, since, start = crew.counts(), head(), time.monotonic()
        time.sleep(seconds)  # the span that is measured
        after, until, end = crew.counts(), head(), time.monotonic()
    if crew.problems or until <= since:
        raise SystemExit(f"the island did not work: {'; '.join(crew.problems) or 'no commit came'}")
    report(before, after, until - since, end - start, lines)


def report(before: Counts, after: Counts, commits: int, seconds: float, lines: Lines) -> None:
    """Print what every role asked per outer step."""
    made = {role: {verb: n - before[role].get(verb, 0) for verb, n in now.items()} for role, now in after.items()}
    verbs = sorted({verb for role in made.values() for verb in role} - set(MOVED))
    rows: list[list[Cell]] = []
    for role, found in made.items():
        requests = sum(found.get(verb, 0) for verb in verbs)
        per_step = [found.get(verb, 0) / commits for verb in verbs]
        rows.append([role, *per_step, requests / commits, requests / seconds, *(found[m] // commits for m in MOVED)])
    lines.add("requests", outer_steps=commits, seconds=seconds, by_role=made)
    title = f"Requests per outer step of a live island, {commits} outer steps of {seconds / commits:.2f} s each"
    print_table(title, ("role", *verbs, "all", "all / s", *MOVED), rows)
