"""Entry point of the syncer process: stand by, merge when it is this island's turn, leave last when the run ends."""

from __future__ import annotations

from collections.abc import Callable

from diloco_runtime.backoff import pause_after
from diloco_runtime.clock import Clock, Signal
from diloco_runtime.errors import CorruptObject, MissingPayload, StoreUnavailable
from diloco_runtime.history import read_table
from diloco_runtime.launch import (
    Exit,
    Launch,
    Surroundings,
    leaving_on_sigterm,
    log,
    open_surroundings,
    patiently,
    run_process,
)
from diloco_runtime.processes import die_with_agent, read_status, spare_cpu, write_status
from diloco_runtime.records import LearnerStatus, SyncerStatus
from diloco_runtime.syncer import Syncer, SyncerLife

START_POLL = 0.2
"""Seconds between looks whether the run has been initialised."""

LEAVE_SECONDS = 10.0
"""How long a syncer on duty that is told to leave tries to hand the duty over with one more commit."""


def wait_for_start(around: Surroundings, score: Callable[[], float], report: Callable[[SyncerStatus], None]) -> Syncer:
    """Return this island's syncer as soon as some island has initialised the run.

    `score`: this island's fitness to merge; `report`: receives the status after every turn.
    """
    board, clock, launch = around.board, around.clock, around.launch
    progress = 0
    while True:
        table = patiently(clock, lambda: read_table(board))
        head = patiently(clock, board.head) if table is not None else None
        if table is not None and head is not None:
            life = SyncerLife(around.config, table, launch.island, launch.incarnation)
            return Syncer(life, board, clock, head, score, report)
        progress += 1
        report(SyncerStatus(progress=progress))
        clock.sleep(START_POLL)


def score(launch: Launch) -> float:
    """Return this island's fitness to merge: bytes per second to the store, times the spare share of the CPU."""
    learner = read_status(launch.learner_status(), LearnerStatus)
    return 0.0 if learner is None else learner.bandwidth * spare_cpu()


def report(around: Surroundings, status: SyncerStatus) -> None:
    """Tell the agent."""
    counts = around.counter
    update = {"bytes_up": counts.bytes_up, "bytes_down": counts.bytes_down, "requests": sum(counts.requests.values())}
    write_status(around.launch.syncer_status(), status.model_copy(update=update))


def serve(syncer: Syncer, clock: Clock, leaving: Signal) -> Exit:
    """Turn the syncer until the run has ended (DONE) or this island leaves (LEFT)."""
    failures = 0
    deadline: float | None = None
    while not syncer.ended:
        if leaving.is_set():
            syncer.leave()
            deadline = deadline if deadline is not None else clock.monotonic() + LEAVE_SECONDS
            if not syncer.on_duty() or clock.monotonic() > deadline:
                return Exit.LEFT
        try:
            wait = syncer.tick()
            failures = 0
        except (StoreUnavailable, CorruptObject, MissingPayload) as error:
            failures += 1
            log.warning("%s", error)
            wait = pause_after(failures)
        leaving.wait(wait) if deadline is None else clock.sleep(wait)
    return Exit.LEFT if leaving.is_set() else Exit.DONE


def stand_by(launch: Launch) -> Exit:
    """Serve this island until the end."""
    die_with_agent()
    around = open_surroundings(launch)
    syncer = wait_for_start(around, lambda: score(launch), lambda status: report(around, status))
    return serve(syncer, around.clock, leaving_on_sigterm(around.clock))


if __name__ == "__main__":
    run_process("syncer", "diloco_runtime.syncer_main", stand_by)
