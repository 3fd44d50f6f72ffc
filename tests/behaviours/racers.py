"""What spawned processes do in races; imports as little as possible, since each of them starts anew."""

from __future__ import annotations

import os
import sys
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Barrier

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, ObjectStore, open_store


def race(store: ObjectStore, rounds: int, racer: int, barrier: Barrier) -> list[int]:
    """Create the same keys as everybody else, each at the same moment; return who won each, as this racer sees it."""
    winners = []
    for number in range(rounds):
        key = f"race/{number}"
        barrier.wait()
        try:
            store.create(key, body(racer))
            winners.append(racer)
        except (AlreadyExists, StoreUnavailable):
            # It may be this racer's own write that exists, and one that failed may have been made.
            found = store.get(key)
            winners.append(-1 if found is None else int(found.partition(b";")[0]))
    return winners


def body(racer: int) -> bytes:
    """Return what this racer writes: long enough to be seen half done, if that were possible."""
    return f"{racer};".encode() * 20_000


def race_in_process(url: str, rounds: int, racer: int, barrier: Barrier, results: Queue[list[int]]) -> None:
    results.put(race(open_store(url, "trial"), rounds, racer, barrier))


def write_for_ever(url: str, life: str, least: int) -> None:
    """Create and replace objects until killed. Each body is its own length, spelled out."""
    store = open_store(url, "trial")
    number = 0
    while True:
        number += 1
        size = least + 1000 * (number % 50)
        store.create(f"kill/{life}-{number}", spelled(size))
        store.put("kill/replaced", spelled(size))


def spelled(size: int) -> bytes:
    return f"{size:016d}".encode() + bytes(size - 16)


if __name__ == "__main__":
    os.nice(5)
    write_for_ever(sys.argv[1], sys.argv[2], int(sys.argv[3]))
