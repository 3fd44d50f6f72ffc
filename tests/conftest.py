"""What every test gets: a state directory of its own, and, on request, a clock that stands still until it is moved."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import buckets, servers

# Small tensors gain nothing from a second thread, and OpenMP's threads spin against whatever else the machine does.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts background jobs with Ctrl-C ignored, and children inherit that: those of the tests are to hear it.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _own_state_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test may leave anything in the home directory of the person who runs it."""
    monkeypatch.setenv("DILOCO_HOME", str(tmp_path / "diloco-home"))


class ManualClock:
    """Time that passes only when a test says so (`clock.now += 5`) or when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return 1_700_000_000.0 + self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def signal(self) -> threading.Event:
        return threading.Event()


class CountedNonces:
    """Nonces in order: 0000000000000001, 0000000000000002 and so on."""

    def __init__(self) -> None:
        self._numbers = self._count()

    @staticmethod
    def _count() -> Iterator[str]:
        number = 0
        while True:
            number += 1
            yield f"{number:016x}"

    def new(self) -> str:
        return next(self._numbers)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def nonces() -> CountedNonces:
    return CountedNonces()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.Server]:
    with servers.seaweedfs() as server:
        buckets.make_s3_bucket(server)
        yield server


@pytest.fixture(scope="session")
def gs_server() -> Iterator[servers.Server]:
    with servers.fake_gcs() as server:
        buckets.make_gs_bucket(server)
        yield server
