"""Payload bytes as objects: small ones as one, large ones cut into shards that are moved in parallel.

Stores limit the size of one request (S3: 5 GB), one connection does not fill a fast link, and a broken upload of
gigabytes would begin anew; so what is larger than a shard travels in pieces. Each piece has its hash in the record that
points to the payload. Nothing finds a shard but that record; a sweep of its merge finds all.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from diloco_runtime.errors import CorruptObject, MissingPayload
from diloco_runtime.records import PayloadRef, Shard
from diloco_runtime.store import ObjectStore

T = TypeVar("T")

SHARD_BYTES = 32 << 20
PARALLEL = 4
"""Shards of one payload in flight."""
REMEMBERED = 8
"""Uploads that failed part of the way, and may go on."""


def objects(size: float, shard_bytes: int = SHARD_BYTES) -> int:
    """Return how many objects a payload of `size` bytes is, and so how many requests move it."""
    return max(1, math.ceil(size / shard_bytes))


def object_keys(ref: PayloadRef) -> tuple[str, ...]:
    """Return the keys of all objects of a payload."""
    return _keys(ref.key, len(ref.shards))


def _shard_key(key: str, number: int) -> str:
    return f"{key}.{number:06d}"


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _hash_of_shards(shards: tuple[Shard, ...]) -> str:
    """Hash what names every byte without reading each of them a second time."""
    return hashlib.sha256(b"".join(bytes.fromhex(shard.sha256) for shard in shards)).hexdigest()


def _keys(key: str, shards: int) -> tuple[str, ...]:
    return tuple(_shard_key(key, number) for number in range(shards)) or (key,)


class Uploader:
    """Writes payloads; one that failed goes on with the shards that are not there yet."""

    def __init__(self, store: ObjectStore, shard_bytes: int = SHARD_BYTES) -> None:
        self._store = store
        self._shard_bytes = shard_bytes
        self._begun: dict[str, dict[int, Shard]] = {}

    def put(self, key: str, data: bytes) -> PayloadRef:
        """Write a payload under a key that is its own; return what a record needs to point at it.

        Besides `data` it holds copies of at most `PARALLEL` shards. When a shard cannot be written, those that have
        not begun are given up and the error is raised; no record names what is there then.
        """
        if len(data) <= self._shard_bytes:
            self._store.put(key, data)
            return PayloadRef(key=key, size=len(data), sha256=_hash(data))
        count = objects(len(data), self._shard_bytes)
        there = self._begun.setdefault(key, {})
        while len(self._begun) > REMEMBERED:
            del self._begun[next(iter(self._begun))]

        def write(number: int) -> Shard:
            piece = data[number * self._shard_bytes : (number + 1) * self._shard_bytes]
            shard = Shard(size=len(piece), sha256=_hash(piece))
            if there.get(number) != shard:
                self._store.put(_shard_key(key, number), piece)
                there[number] = shard
            return shard

        shards = tuple(_in_parallel(write, count))
        self._begun.pop(key, None)
        return PayloadRef(key=key, size=len(data), sha256=_hash_of_shards(shards), shards=shards)

    def take_back(self, key: str, size: int) -> None:
        """Delete whatever an upload of `size` bytes that failed may have left."""
        self._begun.pop(key, None)
        count = objects(size, self._shard_bytes)
        for name in _keys(key, count if count > 1 else 0):
            self._store.delete(name)


def read(store: ObjectStore, ref: PayloadRef) -> bytes:
    """Read a payload; raise `MissingPayload` when an object of it is gone, `CorruptObject` when one differs from its
    record. A sharded payload is held twice for a moment, when its shards are joined."""
    if not ref.shards:
        return _read_object(store, ref.key, ref.size, ref.sha256)
    if sum(shard.size for shard in ref.shards) != ref.size or _hash_of_shards(ref.shards) != ref.sha256:
        raise CorruptObject(f"the record of {ref.key} contradicts itself about its shards")

    def fetch(number: int) -> bytes:
        shard = ref.shards[number]
        return _read_object(store, _shard_key(ref.key, number), shard.size, shard.sha256)

    return b"".join(_in_parallel(fetch, len(ref.shards)))


def _read_object(store: ObjectStore, key: str, size: int, sha256: str) -> bytes:
    data = store.get(key)
    if data is None:
        raise MissingPayload(f"{key} is gone")
    if len(data) != size:
        raise CorruptObject(f"{key} has {len(data)} bytes, its record says {size}")
    if _hash(data) != sha256:
        raise CorruptObject(f"{key} has another hash than its record says")
    return data


def _in_parallel(work: Callable[[int], T], count: int) -> list[T]:
    """Return `work(0)` to `work(count - 1)`, some at a time; the first error ends it all."""
    with ThreadPoolExecutor(min(PARALLEL, count), thread_name_prefix="shard") as pool:
        futures = [pool.submit(work, number) for number in range(count)]
        done, rest = wait(futures, return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
    return [future.result() for future in futures if not future.cancelled()]
