"""Which process this is: a pid and a start time tell it from a later process with the same pid."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Identity:
    """A process of some machine."""

    host: str
    pid: int
    started: float
    """Seconds since 1970, as the operating system gives it."""


def own_identity() -> Identity:
    """Return the identity of this process."""
    import os
    import socket

    from diloco_runtime.processes import start_time

    return Identity(socket.gethostname(), os.getpid(), start_time())
