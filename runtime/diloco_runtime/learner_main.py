"""Entry point of the learner process: build the task, start where the run is now, train until the run is over."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import torch

from diloco_runtime.clock import Signal
from diloco_runtime.follower import run_follower
from diloco_runtime.fragments import table_of
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
from diloco_runtime.learner import Life
from diloco_runtime.life import Birth, Engine
from diloco_runtime.processes import die_with_agent, write_status
from diloco_runtime.publisher import run_checkpointer, run_publisher
from diloco_runtime.records import LearnerStatus
from diloco_runtime.task import TaskContext, load_task

LEAVE_SECONDS = 20.0
"""Time for the last uploads after SIGTERM; clouds give 30 s before they cut the power."""


class Background(Protocol):
    """What runs beside the main loop, and the first error that ended some of it."""

    def start(self, name: str, body: Callable[[], None]) -> None:
        """Run `body` beside the caller."""

    def check(self) -> None:
        """Raise the error that ended one of them, in the caller's."""


class Threads:
    """Daemon threads of this process."""

    def __init__(self) -> None:
        self._failure: BaseException | None = None

    def start(self, name: str, body: Callable[[], None]) -> None:
        def guard() -> None:
            try:
                body()
            except BaseException as error:
                self._failure = error

        threading.Thread(target=guard, name=name, daemon=True).start()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure


def birth(around: Surroundings) -> Birth:
    """Build the task and everything else that a life begins with."""
    launch, config = around.launch, around.config
    torch.set_num_threads(launch.threads or config.inner.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    task = load_task(TaskContext(config, device, launch.root, dict(config.model.options)))
    table = table_of(task.model, config.sync.fragments)
    life = Life(config, launch.island, launch.incarnation, launch.batch_size or config.inner.batch_size, table)

    def report(status: LearnerStatus) -> None:
        moved = {"bytes_up": around.counter.bytes_up, "bytes_down": around.counter.bytes_down}
        requests = sum(around.counter.requests.values())
        write_status(launch.learner_status(), status.model_copy(update={**moved, "requests": requests}))

    return Birth(life, around.board, around.clock, task, report)


def train(launch: Launch) -> Exit:
    """Train until the run is over (DONE) or this island is told to leave (LEFT, by SIGTERM)."""
    die_with_agent()
    write_status(launch.learner_status(), LearnerStatus(state="starting"))
    around = open_surroundings(launch)
    engine = patiently(around.clock, birth(around).begin)
    if engine is None:
        return Exit.DONE
    return turn(engine, around, leaving_on_sigterm(around.clock), Threads())


def turn(engine: Engine, around: Surroundings, leaving: Signal, background: Background) -> Exit:
    """Turn the main loop until the end."""
    clock, stopped, publisher = around.clock, around.clock.signal(), engine.publisher
    where = f"log position {engine.head.seq}, {engine.resume.describe()}"
    log.info("life %d starts at %s", around.launch.incarnation, where)
    background.start("follower", lambda: run_follower(engine.follower, clock, stopped))
    background.start("publisher", lambda: run_publisher(publisher, clock, stopped))
    background.start("checkpointer", lambda: run_checkpointer(publisher, clock, stopped))
    while not leaving.is_set() and engine.learner.step():
        background.check()
    done = engine.learner.leave(clock.monotonic() + LEAVE_SECONDS)
    stopped.set()
    background.check()
    log.info("leaving at step %d%s", engine.learner.status.step, "" if done else "; the last uploads did not finish")
    return Exit.LEFT if leaving.is_set() else Exit.DONE


if __name__ == "__main__":
    run_process("learner", "diloco_runtime.learner_main", train)
