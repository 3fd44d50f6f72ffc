"""What each process of the trio is made of: a task, time, nonces, and a blackboard that tells what it is told."""

from __future__ import annotations

from typing import TypeVar

import torch

from diloco_runtime.blackboard import Blackboard, Parse
from diloco_runtime.keys import Keys
from diloco_runtime.records import CommitRecord, Record
from tests.sim.interleave.processes import Port, Told
from tests.sim.interleave.traces import EPOCH

RUN_ID = "00000000feedbeef"
KEYS = Keys(RUN_ID)
"""The run's keys."""

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

    def __init__(self, port: Port, clock: OwnClock, owner: str, parse: Parse) -> None:
        super().__init__(port, RUN_ID, clock, OwnNonces(owner), parse)
        self._port = port
        self.draining = False
        """Whether the newest commit that was read or created is one of the drain."""

    def create(self, key: str, record: R) -> R:
        standing = super().create(key, record)
        self._port.said.append(Told(key, standing.nonce))
        self._look(standing)
        return standing

    def read_commit(self, seq: int) -> CommitRecord | None:
        commit = super().read_commit(seq)
        self._look(commit)
        return commit

    def _look(self, record: Record | None) -> None:
        if isinstance(record, CommitRecord):
            self.draining = record.phase == "drain"
