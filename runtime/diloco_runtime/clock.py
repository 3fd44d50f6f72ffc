"""Time and chance, the only module that touches either.

Everything else receives a `Clock` and a `Nonces`, so that the same code runs under a virtual clock with seeded nonces.
"""

from __future__ import annotations

import secrets
import threading
import time
from typing import Protocol


class Signal(Protocol):
    """Wakes a waiting loop early; the subset of `threading.Event` that the runtime uses."""

    def set(self) -> None: ...

    def clear(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


class Clock(Protocol):
    """Monotonic time for every decision, wall time for display only (clocks of two machines are never compared)."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...

    def sleep(self, seconds: float) -> None: ...

    def signal(self) -> Signal: ...


class Nonces(Protocol):
    """A source of unique writer nonces (16 hex digits each)."""

    def new(self) -> str: ...


class SystemClock:
    """The machine's clocks. On Linux CLOCK_MONOTONIC stands still while the machine is suspended, as intended."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # what everybody else sleeps by

    def signal(self) -> Signal:
        return threading.Event()


class SystemNonces:
    """Nonces from the operating system's randomness: 64 bits, so a collision within a run is out of the question."""

    def new(self) -> str:
        return secrets.token_hex(8)
