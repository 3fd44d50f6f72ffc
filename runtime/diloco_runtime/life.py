"""How one life of a learner begins: where the run is, what this island may continue from, and the wiring.

Knows nothing of processes: the entry point of the learner process is `learner_main`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.checkpoint import Resume, find_resume
from diloco_runtime.clock import Clock
from diloco_runtime.data_cursor import DataCursor, UnitClaimer
from diloco_runtime.errors import IncompatibleModel
from diloco_runtime.follower import Follower
from diloco_runtime.fragments import check_table, read_fragment, trained_parameters
from diloco_runtime.learner import Learner, Life
from diloco_runtime.learner_logic import LearnerLogic
from diloco_runtime.merging import initialise
from diloco_runtime.publisher import Publisher
from diloco_runtime.records import CommitRecord, LearnerStatus
from diloco_runtime.snapshot import load_state
from diloco_runtime.task import Task, fingerprint_of


@dataclass(frozen=True)
class Engine:
    """A learner with its inbox and its outbox."""

    learner: Learner
    follower: Follower
    publisher: Publisher
    head: CommitRecord
    resume: Resume


@dataclass(frozen=True)
class Birth:
    """What a life begins with."""

    life: Life
    board: Blackboard
    clock: Clock
    task: Task
    report: Callable[[LearnerStatus], None]

    def begin(self) -> Engine | None:
        """Load the newest global parameters (initialising the run if nobody has) and wire a learner on top of them.

        Returns None when the run is over. Raises `StoreUnavailable` (begin again), `IncompatibleModel`.
        """
        life, board = self.life, self.board
        head = self._load_head()
        reopened = reopened_budget(board, head)
        if head.phase == "final" and reopened is None:
            self.report(LearnerStatus(state="finished", adopted=head.seq))
            return None
        resume = find_resume(board, life.island, life.incarnation, head, len(life.table))
        logic = LearnerLogic(life.config, life.table, head, reopened)
        cursor = DataCursor(self.task.unit_samples, resume.position)
        claimer = UnitClaimer(board, cursor, life.island, life.incarnation, self.task.num_units(), resume.position)
        publisher = Publisher(board, self.clock, life.island, life.incarnation, life.config.sync.compression)
        follower = Follower(board, self.clock, life.table, head, claimer)
        learner = Learner(life, board, self.clock, self.task, logic, cursor, publisher, follower, self.report)
        learner.resume(resume)
        return Engine(learner, follower, publisher, head, resume)

    def _load_head(self) -> CommitRecord:
        life, board, parameters = self.life, self.board, trained_parameters(self.task.model)
        data = fingerprint_of(self.task)
        first = board.read_commit(0)
        if first is None:
            values = [read_fragment(parameters, fragment) for fragment in life.table]
            first = initialise(board, life.config, life.table, values, life.island, life.incarnation, data)
        check_table(life.table, first.fragments, life.island)
        if data != first.data:
            raise IncompatibleModel(
                f"island {life.island} has other data than the run was begun with (data files differ or changed); "
                "units of data are shared by number, so put the same files on every island"
            )
        head, state = load_state(board)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(state[name])
        return head


def reopened_budget(board: Blackboard, head: CommitRecord) -> int | None:
    """Return the budget with which a run that had ended goes on, or None when it has not been reopened."""
    if head.phase != "final":
        return None
    control = board.newest_control()
    if control is None or control.action != "run" or control.number <= head.control:
        return None
    return control.tokens or head.budget
