"""An object store in memory and the links over which machines reach it: latency, bandwidth, and everything that the
contract of a real store allows to go wrong.

Allowed are: requests and answers that get lost, writes that fail and take effect later, writes that take effect twice,
refusals for too many requests, downloads that are cut short, outages. Never: a stale read or listing after an answered
write, or a conditional create with two winners (GCS, S3 and R2 rule both out, and a store that does not is refused).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cli.simulation.world import World
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import R, Record, decode
from diloco_runtime.store import AlreadyExists, Names

Watcher = Callable[[str, str, bytes | None, bytes | None], None]
"""Called after every effect: verb (create, put, delete), key, bytes before, bytes after."""


class Bucket:
    """The objects: what happens here happens at once and for everybody."""

    def __init__(self, url: str = "world://bucket") -> None:
        self.url = url
        self.objects: dict[str, bytes] = {}
        self.watchers: list[Watcher] = []
        self._folders: dict[str, dict[str, int]] = {}
        """Per folder its direct entries (names of folders end with a slash) and how many objects each stands for."""

    @staticmethod
    def _steps(key: str) -> list[tuple[str, str]]:
        """Return every folder above a key with the entry in it that leads there."""
        parts = key.split("/")
        folders = ["/".join(parts[:depth]) + "/" if depth else "" for depth in range(len(parts))]
        names = [f"{part}/" for part in parts[:-1]] + [parts[-1]]
        return list(zip(folders, names, strict=True))

    def _tell(self, verb: str, key: str, before: bytes | None, after: bytes | None) -> None:
        for watcher in self.watchers:
            watcher(verb, key, before, after)

    def get(self, key: str) -> bytes | None:
        return self.objects.get(key)

    def create(self, key: str, data: bytes) -> None:
        if key in self.objects:
            raise AlreadyExists(f"{key} exists in {self.url}")
        self._write("create", key, data)

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data)

    def _write(self, verb: str, key: str, data: bytes) -> None:
        before = self.objects.get(key)
        self.objects[key] = data
        if before is None:
            for folder, name in self._steps(key):
                entries = self._folders.setdefault(folder, {})
                entries[name] = entries.get(name, 0) + 1
        self._tell(verb, key, before, data)

    def list(self, prefix: str) -> Names:
        found: list[str] = []
        for name in self._folders.get(prefix, ()):
            if name.endswith("/"):
                found += self.list(prefix + name)
            else:
                found.append(prefix + name)
        return sorted(found)

    def list_folders(self, prefix: str) -> Names:
        return sorted(name[:-1] for name in self._folders.get(prefix, ()) if name.endswith("/"))

    def delete(self, key: str) -> None:
        before = self.objects.pop(key, None)
        if before is None:
            return
        for folder, name in self._steps(key):
            entries = self._folders[folder]
            entries[name] -= 1
            if not entries[name]:
                del entries[name]
        self._tell("delete", key, before, None)

    def delete_tree(self, prefix: str) -> int:
        keys = self.list(prefix)
        for key in keys:
            self.delete(key)
        return len(keys)


class Memory:
    """Parses records, each only once: many processes of one world read the same bytes, and records do not change."""

    def __init__(self) -> None:
        self._known: dict[tuple[type[Record], bytes], Record] = {}

    def parse(self, kind: type[R], data: bytes, key: str) -> R:
        """Do what `records.decode` does."""
        known = self._known.get((kind, data))
        if known is None:
            if len(self._known) >= MEMORY_SIZE:
                self._known.clear()
            known = self._known[kind, data] = decode(kind, data, key)
        return known  # type: ignore[return-value]


MEMORY_SIZE = 20_000


@dataclass(frozen=True)
class Trouble:
    """What is wrong with a link at present. Shares are probabilities per operation."""

    verbs: frozenset[str] = frozenset()
    """Operations that fail: the store does not answer them."""
    lost_requests: float = 0.0
    lost_answers: float = 0.0
    late_writes: float = 0.0
    """Writes that fail, and take effect later (`LATE` times as late as they fail at most) unless the name is taken."""
    twice: float = 0.0
    """Writes that are sent twice below the client: a create then answers that its name is taken, by itself."""
    cut_reads: float = 0.0
    """Reads of which only a part arrives."""


CALM = Trouble()
"""Nothing is wrong."""

ALL_VERBS = frozenset({"get", "create", "put", "list", "list_folders", "delete", "delete_tree"})
WRITE_VERBS = frozenset({"create", "put", "delete", "delete_tree"})
READ_VERBS = ALL_VERBS - WRITE_VERBS

LATE = 1.5
"""Longest time after which a write that failed may still take effect, over the time after which it fails."""


@dataclass
class Lane:
    """One direction of a link: transfers follow each other."""

    bandwidth: float
    """Bytes per second."""
    free_at: float = 0.0
    longest: float = 0.0
    """Most seconds that a transfer took, the ones before it included."""


Trap = Callable[[str, str, str], None]
"""Called before ("before") and after ("after") the effect of every operation with that moment, verb and key."""


@dataclass
class Link:
    """The store as a machine sees it: each operation takes a round trip plus its bytes over the machine's bandwidth."""

    bucket: Bucket
    world: World
    latency: float = 0.0
    """Seconds of a round trip."""
    up: Lane = field(default_factory=lambda: Lane(float("inf")))
    down: Lane = field(default_factory=lambda: Lane(float("inf")))
    give_up_after: float = 2.0
    """Seconds after which an operation that nobody answers fails."""
    trouble: Trouble = CALM
    trap: Trap | None = None
    unwell_until: float = float("-inf")
    """When an operation failed last, or until when the link is slower than usual."""

    def __post_init__(self) -> None:
        self.url = self.bucket.url

    # ---- the way there and back -------------------------------------------------------------------------------------

    def _transfer(self, lane: Lane, size: int) -> float:
        """Return how long these bytes occupy a lane, the ones before them included."""
        if not size or lane.bandwidth == float("inf"):
            return 0.0
        lane.free_at = max(lane.free_at, self.world.now) + size / lane.bandwidth
        seconds = lane.free_at - self.world.now
        lane.longest = max(lane.longest, seconds)
        return seconds

    def _failure(self, what: str) -> StoreUnavailable:
        self.unwell_until = max(self.unwell_until, self.world.now)
        return StoreUnavailable(what)

    def _chance(self, share: float) -> bool:
        return share > 0.0 and self.world.random.random() < share

    def _send(self, verb: str, key: str, size: int) -> float:
        """Let the request travel; return the seconds that are left for the answer.

        The effect falls on the beginning or on the end of a round trip: what others do in between then comes after it,
        or before it.
        """
        late = self.world.random.random() < 0.5
        seconds = self.latency if late else 0.0
        if size:
            seconds += self._transfer(self.up, size)
        if seconds:
            self.world.sleep(seconds)
        trouble = self.trouble
        if trouble is not CALM and (verb in trouble.verbs or self._chance(trouble.lost_requests)):
            self.world.sleep(self.give_up_after)
            raise self._failure(f"{self.url} does not answer")
        if self.trap is not None:
            self.trap("before", verb, key)
        return 0.0 if late else self.latency

    def _answer(self, verb: str, key: str, seconds: float, size: int = 0) -> None:
        """Let the answer travel."""
        if self.trap is not None:
            self.trap("after", verb, key)
        if self.trouble is not CALM and self._chance(self.trouble.lost_answers):
            self.world.sleep(self.give_up_after)
            raise self._failure(f"the answer of {self.url} was lost")
        if size:
            seconds += self._transfer(self.down, size)
        if seconds:
            self.world.sleep(seconds)

    def _write(self, verb: str, key: str, data: bytes, effect: Callable[[str, bytes], None]) -> None:
        rest = self._send(verb, key, len(data))
        if self._chance(self.trouble.late_writes):
            self._take_effect_later(key, data, effect)
            raise self._failure(f"{self.url} did not answer in time")
        effect(key, data)
        if self._chance(self.trouble.twice):
            effect(key, data)
        self._answer(verb, key, rest)

    def _take_effect_later(self, key: str, data: bytes, effect: Callable[[str, bytes], None]) -> None:
        def late() -> None:
            try:
                effect(key, data)
            except AlreadyExists:
                return

        self.world.at(self.world.now + self.world.random.uniform(0.0, LATE * self.give_up_after), late)

    # ---- the store --------------------------------------------------------------------------------------------------

    def get(self, key: str) -> bytes | None:
        rest = self._send("get", key, 0)
        data = self.bucket.get(key)
        self._answer("get", key, rest, len(data or b""))
        if data and self._chance(self.trouble.cut_reads):
            return data[: self.world.random.randrange(len(data))]
        return data

    def create(self, key: str, data: bytes) -> None:
        self._write("create", key, data, self.bucket.create)

    def put(self, key: str, data: bytes) -> None:
        self._write("put", key, data, self.bucket.put)

    def list(self, prefix: str) -> Names:
        rest = self._send("list", prefix, 0)
        keys = self.bucket.list(prefix)
        self._answer("list", prefix, rest)
        return keys

    def list_folders(self, prefix: str) -> Names:
        rest = self._send("list_folders", prefix, 0)
        names = self.bucket.list_folders(prefix)
        self._answer("list_folders", prefix, rest)
        return names

    def delete(self, key: str) -> None:
        rest = self._send("delete", key, 0)
        self.bucket.delete(key)
        self._answer("delete", key, rest)

    def delete_tree(self, prefix: str) -> int:
        rest = self._send("delete_tree", prefix, 0)
        deleted = self.bucket.delete_tree(prefix)
        self._answer("delete_tree", prefix, rest)
        return deleted
