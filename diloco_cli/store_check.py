"""Tries a store out before a run relies on it: `diloco check`, and the first part of it in `up` and `train`.

Everything happens in a folder beside `run.json`, which is gone afterwards. What a run cannot do without is proved, not
assumed: above all that a key can be created only once, also when many try at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from threading import Barrier
from typing import Any

from diloco_cli.runs import place
from diloco_cli.spec import Spec
from diloco_cli.store_prices import egress
from diloco_runtime.clock import Clock, SystemClock, SystemNonces
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, ObjectStore, open_store

PREFLIGHT = "preflight/"
"""Folder beside `run.json` in which the store is tried out; it is there only meanwhile."""

PREFLIGHT_SECONDS = 600
"""Age from which a probe in it was left by a process that died, on clocks that agree to minutes: none takes so long."""

RACERS, ROUNDS = 8, 2
"""Threads that create one key at the same moment, and keys. A store that only looks before it writes fails the first
round nearly always."""
LOOKS = 9
"""Requests whose median is the latency."""
SMALLEST, LARGEST = 1 << 20, 32 << 20
"""Bytes of the first and of the largest transfer that measures bandwidth; it doubles until one takes a second."""
LONG_ENOUGH = 1.0
CLOCK_TOLERANCE = 60.0
"""Seconds that a clock may be off. S3 refuses everything from 15 minutes on."""


@dataclass(frozen=True)
class StoreReport:
    """What a check found. Raised errors say what was not there."""

    place: str
    proved: tuple[str, ...]
    """What works, in words."""
    read_seconds: float
    create_seconds: float
    """Median time of a small request."""
    upload_rate: float
    download_rate: float
    """Bytes per second of one transfer."""
    clock_offset: float | None
    """Seconds by which this machine's clock is ahead of the store's; None: the store tells no time."""
    region: str
    """Where the bucket is; empty: not known."""
    egress: str
    """What reading it from elsewhere costs, in words."""
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, ready for `json.dumps`."""
        return {"schema_version": 1, **asdict(self)}


def preflight(spec: Spec) -> None:
    """Prove that the spec's store can hold a run; raise `StoreUnavailable` naming what it cannot do."""
    with _probe_folder(spec) as (store, folder):
        prove(store, folder)


def check(spec: Spec) -> StoreReport:
    """Prove that the spec's store can hold a run, and measure what it is like from here."""
    clock = SystemClock()
    with _probe_folder(spec) as (store, folder):
        proved = prove(store, folder)
        read, create = _latency(store, folder, clock)
        up, down = _bandwidth(store, folder, clock)
        offset = _clock_offset(store, clock)
        region, keeps = _bucket_facts(store)
    warnings = tuple(filter(None, (_clock_warning(offset), keeps)))
    return StoreReport(place(spec), proved, read, create, up, down, offset, region, egress(spec.store), warnings)


# ---- proofs ---------------------------------------------------------------------------------------------------------


def prove(store: ObjectStore, folder: str) -> tuple[str, ...]:
    """Write, read, list and delete a small object, and create keys in a race; return what works, in words.

    Raises `StoreUnavailable` naming the verb that does not do what it should. `folder` is empty and ends in a slash.
    """
    key, data = f"{folder}probe.txt", SystemNonces().new().encode()
    if not _create(store, key, data):
        raise StoreUnavailable(f"{store.url}: a new object was refused as if it existed; this store cannot hold a run")
    if _create(store, key, b"second"):
        raise _not_conditional(store)
    if store.get(key) != data:
        raise StoreUnavailable(f"{store.url}: an object that was just written reads back differently")
    if store.list(folder) != [key]:
        raise StoreUnavailable(f"{store.url}: an object that was just written is not listed")
    store.delete(key)
    if store.get(key) is not None:
        raise StoreUnavailable(f"{store.url}: an object that was deleted is still there")
    for number in range(ROUNDS):
        _race(store, f"{folder}race-{number}.txt")
    return (
        "write, read, list, delete",
        f"create only if absent: one winner in each of {ROUNDS} races of {RACERS}",
    )


def _create(store: ObjectStore, key: str, data: bytes) -> bool:
    """Create an object; tell whether it is this one that stands there now."""
    try:
        store.create(key, data)
    except AlreadyExists:
        # A client that repeats by itself can lose to its own first write.
        return store.get(key) == data
    return True


def _race(store: ObjectStore, key: str) -> None:
    """Let many create one key at the same moment; raise `StoreUnavailable` unless exactly one has done it."""
    start = Barrier(RACERS)
    bodies = [f"racer {racer} {SystemNonces().new()}".encode() for racer in range(RACERS)]

    def run(body: bytes) -> bool:
        start.wait()
        return _create(store, key, body)

    with ThreadPoolExecutor(RACERS) as racers:
        won = [body for body, winner in zip(bodies, racers.map(run, bodies), strict=True) if winner]
    if len(won) != 1 or store.get(key) != won[0]:
        raise _not_conditional(store)


def _not_conditional(store: ObjectStore) -> StoreUnavailable:
    return StoreUnavailable(
        f"{store.url}: an existing object was created again; this store ignores the condition that a run's history "
        "rests on (If-None-Match, ifGenerationMatch) and cannot hold a run: use another one"
    )


@contextmanager
def _probe_folder(spec: Spec) -> Iterator[tuple[ObjectStore, str]]:
    """Yield the store and an empty folder in it, which is removed afterwards."""
    store, now = open_store(spec.store, spec.name), int(SystemClock().wall())
    folder = f"{PREFLIGHT}{now}-{SystemNonces().new()}/"
    _remove_old_probes(store, now)
    try:
        yield store, folder
    finally:
        store.delete_tree(folder)


def _remove_old_probes(store: ObjectStore, now: int) -> None:
    """Remove what processes that died meanwhile left; one that is at work right now keeps its probe."""
    for name in store.list_folders(PREFLIGHT):
        began, _, _ = name.partition("-")
        if not began.isdecimal() or now - int(began) > PREFLIGHT_SECONDS:
            store.delete_tree(f"{PREFLIGHT}{name}/")


# ---- measurements ---------------------------------------------------------------------------------------------------


def _seconds(clock: Clock, action: Callable[[], object]) -> float:
    began = clock.monotonic()
    action()
    return clock.monotonic() - began


def _latency(store: ObjectStore, folder: str, clock: Clock) -> tuple[float, float]:
    """Return the median seconds of a small read and of a small create."""
    keys = [f"{folder}look-{number}.txt" for number in range(LOOKS)]
    created = [_seconds(clock, lambda key=key: _create(store, key, b"small")) for key in keys]  # type: ignore[misc]
    read = [_seconds(clock, lambda key=key: store.get(key)) for key in keys]  # type: ignore[misc]
    return median(read), median(created)


def _bandwidth(store: ObjectStore, folder: str, clock: Clock) -> tuple[float, float]:
    """Return bytes per second of one upload and of one download, of an object large enough to tell."""
    key, size = f"{folder}large.bin", SMALLEST
    while True:
        body = SystemNonces().new().encode() * (size // 16)
        up = _seconds(clock, lambda body=body: store.put(key, body))  # type: ignore[misc]
        if up >= LONG_ENOUGH or size >= LARGEST:
            down = _seconds(clock, lambda: store.get(key))
            return len(body) / up, len(body) / down
        size *= 2


def _clock_offset(store: ObjectStore, clock: Clock) -> float | None:
    """Return by how many seconds this clock is ahead of the store's; both ends of the request share the error."""
    ask = getattr(store, "server_time", None)
    if ask is None:
        return None
    before = clock.wall()
    there = ask()
    # The answer is a whole second, cut off.
    return None if there is None else (before + clock.wall()) / 2 - (there + 0.5)


def _clock_warning(offset: float | None) -> str:
    if offset is None or abs(offset) <= CLOCK_TOLERANCE:
        return ""
    direction = "ahead of" if offset > 0 else "behind"
    return f"this machine's clock is {abs(offset):.0f} s {direction} the store's; set it: S3 refuses 15 minutes"


def _bucket_facts(store: ObjectStore) -> tuple[str, str]:
    """Return the bucket's region, and a warning when deleted objects go on costing money; empty: not known."""
    ask = getattr(store, "bucket_facts", None)
    if ask is None:
        return "", ""
    facts = ask()
    return facts.region, facts.keeps_deleted
