"""What processes of a virtual world tell the time by, wait for, and name things with: the runtime's protocols."""

from __future__ import annotations

from diloco_cli.simulation.world import Thread, World


class WorldClock:
    """One machine's clocks: they may be off, and run fast or slow."""

    def __init__(self, world: World, offset: float = 0.0, rate: float = 1.0) -> None:
        """`offset`: seconds by which its wall clock is ahead; `rate`: its seconds per second of the world."""
        self._world = world
        self._offset = offset
        self._rate = rate

    def monotonic(self) -> float:
        return self._world.now * self._rate

    def wall(self) -> float:
        return self._world.now * self._rate + self._offset

    def sleep(self, seconds: float) -> None:
        self._world.sleep(seconds / self._rate)

    def signal(self) -> WorldSignal:
        return WorldSignal(self._world, self._rate)


class WorldSignal:
    """An event: whoever waits for it is woken when it is set, or when its time is up."""

    def __init__(self, world: World, rate: float = 1.0) -> None:
        self._world = world
        self._rate = rate
        self._set = False
        self._waiting: list[Thread] = []

    def set(self) -> None:
        self._set = True
        for thread in self._waiting:
            self._world.wake(thread)
        self._waiting.clear()

    def clear(self) -> None:
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            thread = self._world.me()
            self._waiting.append(thread)
            self._world.sleep(timeout / self._rate if timeout is not None else float("inf"))
            if thread in self._waiting:
                self._waiting.remove(thread)
        return self._set


class WorldNonces:
    """Repeatable nonces."""

    def __init__(self, world: World) -> None:
        self._world = world

    def new(self) -> str:
        return f"{self._world.random.getrandbits(64):016x}"
