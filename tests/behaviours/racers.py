"""What spawned processes do in races; imports as little as possible, since each of them starts anew."""

from __future__ import annotations

import os
import sys
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from diloco_runtime.store import AlreadyExists, ObjectStore, open_store


def race(store: ObjectStore, rounds: int, racer: int, barrier: Barrier) -> list[int]:
    """Create the same keys as everybody else, each at the same moment; return the rounds won."""
    won = []
    for number in range(rounds):
        barrier.wait()
        try:
            store.create(f"race/{number}", body(racer))
            won.append(number)
        except AlreadyExists:
            pass
    return won


def body(racer: int) -> bytes:
    """Return what this racer writes: long enough to be seen half done, if that were possible."""
    return f"{racer};".encode() * 20_000


def race_in_process(url: str, rounds: int, racer: int, barrier: Barrier, results: Queue[tuple[int, list[int]]]) -> None:
    results.put((racer, race(open_store(url, "trial"), rounds, racer, barrier)))


def write_for_ever(url: str, life: str) -> None:
    """Create and replace objects until killed. Each body is its own length, spelled out."""
    store = open_store(url, "trial")
    number = 0
    while True:
        number += 1
        size = 200_000 + 1000 * (number % 50)
        store.create(f"kill/{life}-{number}", spelled(size))
        store.put("kill/replaced", spelled(size))


def spelled(size: int) -> bytes:
    return f"{size:016d}".encode() + bytes(size - 16)


if __name__ == "__main__":
    os.nice(5)
    write_for_ever(sys.argv[1], sys.argv[2])
