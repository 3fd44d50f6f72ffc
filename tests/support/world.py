"""A virtual world: the real learner, syncer and their loops as coroutines over virtual time and an in-memory store.

Each process or thread of the real program is a greenlet. Time moves only when all of them wait; every sleep and every
store operation is a point at which another one may run. Nothing of the program is replaced except the clock, the
nonces and the store's latency, so what holds here is what the program does. One seed, repeatable.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

import greenlet

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, Names, ObjectStore


class Killed(greenlet.GreenletExit):
    """Raised inside a process that the world kills, at the point where it waits."""


class World:
    """The scheduler: runs greenlets in order of their wake-up times."""

    def __init__(self, seed: int = 0) -> None:
        self.now = 0.0
        self.random = random.Random(seed)
        self._queue: list[tuple[float, int, greenlet.greenlet]] = []
        self._due: dict[greenlet.greenlet, int] = {}
        """Per process the number of its valid queue entry: an earlier wake-up makes the older entry stale."""
        self._order = itertools.count()
        self._hub = greenlet.getcurrent()
        self._frozen: dict[greenlet.greenlet, list[float]] = {}
        self._doomed: list[greenlet.greenlet] = []
        self.failures: list[BaseException] = []

    def spawn(self, body: Callable[[], object]) -> greenlet.greenlet:
        """Start a process at the present time."""

        def guard() -> None:
            try:
                body()
            except (Killed, greenlet.GreenletExit):
                pass
            except BaseException as error:
                self.failures.append(error)

        process = greenlet.greenlet(guard, parent=self._hub)
        self._push(self.now, process)
        return process

    def _push(self, at: float, process: greenlet.greenlet) -> None:
        number = next(self._order)
        self._due[process] = number
        heapq.heappush(self._queue, (at, number, process))

    def wake(self, process: greenlet.greenlet) -> None:
        """End the wait of a process now."""
        if process in self._due:
            self._push(self.now, process)

    def sleep(self, seconds: float) -> None:
        """Let time pass for the calling process."""
        process = greenlet.getcurrent()
        assert process is not self._hub, "only processes of the world wait"
        self._push(self.now + max(0.0, seconds), process)
        self._hub.switch()

    def freeze(self, process: greenlet.greenlet) -> None:
        """SIGSTOP: the process does not run until `thaw`."""
        self._frozen.setdefault(process, [])

    def thaw(self, process: greenlet.greenlet) -> None:
        """SIGCONT."""
        if self._frozen.pop(process, None):
            self._push(self.now, process)

    def kill(self, process: greenlet.greenlet) -> None:
        """SIGKILL at the point where the process waits now."""
        self._frozen.pop(process, None)
        self._due.pop(process, None)
        self._doomed.append(process)
        if greenlet.getcurrent() is self._hub:
            self._bury()

    def _bury(self) -> None:
        """Unwind killed processes; only from the hub, to which a process returns when it dies."""
        while self._doomed:
            process = self._doomed.pop()
            if not process.dead:
                process.throw(Killed)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        """Run until a time, until `done`, or until nobody is left; raise the first failure of a process."""
        while self._queue and not done():
            at, number, process = self._queue[0]
            if self._due.get(process) != number:
                heapq.heappop(self._queue)
                continue
            if at > until:
                self.now = until
                break
            heapq.heappop(self._queue)
            del self._due[process]
            self.now = max(self.now, at)
            if process in self._frozen:
                self._frozen[process].append(at)
            elif not process.dead:
                process.switch()
            self._bury()
            if self.failures:
                raise self.failures[0]


class WorldClock:
    """The world's time as a `Clock`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return self._world.now

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds)

    def signal(self) -> WorldSignal:
        return WorldSignal(self._world)


class WorldSignal:
    """An event: whoever waits for it is woken when it is set, or when its time is up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._set = False
        self._waiting: list[greenlet.greenlet] = []

    def set(self) -> None:
        self._set = True
        for process in self._waiting:
            self._world.wake(process)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            process = greenlet.getcurrent()
            self._waiting.append(process)
            self._world.sleep(timeout if timeout is not None else float("inf"))
            if process in self._waiting:
                self._waiting.remove(process)
        return self._set


class WorldNonces:
    """Repeatable nonces."""

    def __init__(self, world: World) -> None:
        self._world = world

    def new(self) -> str:
        return f"{self._world.random.getrandbits(64):016x}"


class DictStore:
    """A store in a dictionary: atomic because one process of the world runs at a time, listed by folder."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._objects: dict[str, bytes] = {}
        self._folders: dict[str, set[str]] = {}

    @staticmethod
    def _above(key: str) -> list[str]:
        parts = key.split("/")
        return ["/".join(parts[:depth]) + "/" for depth in range(1, len(parts))]

    def get(self, key: str) -> bytes | None:
        return self._objects.get(key)

    def create(self, key: str, data: bytes) -> None:
        if key in self._objects:
            raise AlreadyExists(key)
        self.put(key, data)

    def put(self, key: str, data: bytes) -> None:
        self._objects[key] = data
        for folder in self._above(key):
            self._folders.setdefault(folder, set()).add(key)

    def list(self, prefix: str) -> Names:
        return sorted(self._folders.get(prefix, ()) if prefix else self._objects)

    def list_folders(self, prefix: str) -> Names:
        below = (key[len(prefix) :] for key in self.list(prefix))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, key: str) -> None:
        if self._objects.pop(key, None) is not None:
            for folder in self._above(key):
                self._folders[folder].discard(key)

    def delete_tree(self, prefix: str) -> int:
        keys = self.list(prefix)
        for key in keys:
            self.delete(key)
        return len(keys)


class LatentStore:
    """A store seen from an island: each operation takes a round trip plus its bytes over the island's bandwidth."""

    def __init__(self, inner: ObjectStore, world: World, latency: float = 0.0, bandwidth: float = float("inf")) -> None:
        self.url = inner.url
        self._inner = inner
        self._world = world
        self.latency = latency
        self.bandwidth = bandwidth
        self.broken = False
        self.lost_answers = 0.0
        """Share of the operations that take effect but whose answer never arrives."""

    def _travel(self, size: int) -> None:
        self._world.sleep(self.latency / 2 + size / self.bandwidth)
        if self.broken:
            raise StoreUnavailable(f"{self.url} does not answer")

    def _answer(self, size: int) -> None:
        self._travel(size)
        if self.lost_answers and self._world.random.random() < self.lost_answers:
            raise StoreUnavailable(f"the answer of {self.url} was lost")

    def get(self, key: str) -> bytes | None:
        self._travel(0)
        data = self._inner.get(key)
        self._answer(len(data or b""))
        return data

    def create(self, key: str, data: bytes) -> None:
        self._travel(len(data))
        self._inner.create(key, data)
        self._answer(0)

    def put(self, key: str, data: bytes) -> None:
        self._travel(len(data))
        self._inner.put(key, data)
        self._answer(0)

    def list(self, prefix: str) -> Names:
        self._travel(0)
        keys = self._inner.list(prefix)
        self._answer(0)
        return keys

    def list_folders(self, prefix: str) -> Names:
        self._travel(0)
        names = self._inner.list_folders(prefix)
        self._answer(0)
        return names

    def delete(self, key: str) -> None:
        self._travel(0)
        self._inner.delete(key)
        self._answer(0)

    def delete_tree(self, prefix: str) -> int:
        self._travel(0)
        return self._inner.delete_tree(prefix)
