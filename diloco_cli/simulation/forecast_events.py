"""Virtual time for a forecast: an event heap, and processes written as generators that say what they wait for."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Generator
from typing import Any

Call = Callable[..., None]


class Timeline:
    """Events in order of time, equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        """Inner steps so far, counted by the learners."""
        self._due: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._order = itertools.count()

    def at(self, time: float, call: Call, *arguments: Any) -> None:
        """Have `call(*arguments)` done at `time`."""
        heapq.heappush(self._due, (time, next(self._order), call, arguments))

    def next_time(self) -> float:
        """Return when the next event is due; infinity when there is none."""
        return self._due[0][0] if self._due else math.inf

    def step(self) -> None:
        """Go to the next event and carry it out."""
        self.now, _, call, arguments = heapq.heappop(self._due)
        call(*arguments)


class Nap:
    """A wait that `Process.wake` may end early."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Transfer:
    """A payload on its way: a request's latency and its share of a link."""

    def __init__(self, link: Link, size: float, latency: float) -> None:
        self.link = link
        self.size = size
        self.latency = latency


Body = Generator["float | Nap | Transfer", None, None]


class Process:
    """Runs a generator that yields seconds to sleep, a `Nap`, or a `Transfer` whose end it waits for."""

    def __init__(self, timeline: Timeline, body: Body) -> None:
        self._timeline = timeline
        self._body = body
        self._turn = 0
        self._napping = False
        self.alive = True
        self._resume(0)

    def _resume(self, turn: int) -> None:
        if turn != self._turn or not self.alive:
            return
        self._turn, self._napping = turn + 1, False
        try:
            wait = next(self._body)
        except StopIteration:
            self.alive = False
            return
        if isinstance(wait, Transfer):
            wait.link.start(wait.size, self._arrived, turn + 1, wait.latency)
            return
        self._napping = isinstance(wait, Nap)
        seconds = wait.seconds if isinstance(wait, Nap) else wait
        self._timeline.at(self._timeline.now + seconds, self._resume, turn + 1)

    def _arrived(self, turn: int, latency: float) -> None:
        self._timeline.at(self._timeline.now + latency, self._resume, turn)

    def wake(self, after: float) -> None:
        """End a nap `after` seconds from now; do nothing to a process that waits for something else."""
        if self._napping:
            self._napping = False
            self._turn += 1
            self._timeline.at(self._timeline.now + after, self._resume, self._turn)

    def end(self) -> None:
        """Kill it."""
        self.alive = False
        self._turn = -1


class Link:
    """One direction of an island's line to the store: transfers at the same time share it equally."""

    def __init__(self, timeline: Timeline, bytes_per_second: float) -> None:
        self._timeline = timeline
        self.rate = bytes_per_second
        self.moved = 0.0
        """Bytes of all transfers that were begun."""
        self._served = 0.0
        """Bytes that a transfer would have received had it been open since the beginning."""
        self._at = 0.0
        self._open: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._order = itertools.count()
        self._version = 0

    def start(self, size: float, done: Call, *arguments: Any) -> None:
        """Begin a transfer; `done(*arguments)` is called at its end."""
        self._advance()
        self.moved += size
        heapq.heappush(self._open, (self._served + size, next(self._order), done, arguments))
        self._schedule()

    def clear(self) -> None:
        """Drop what is on its way: the island is gone."""
        self._open.clear()
        self._version += 1

    def _advance(self) -> None:
        now = self._timeline.now
        if self._open:
            self._served += (now - self._at) * self.rate / len(self._open)
        self._at = now

    def _schedule(self) -> None:
        self._version += 1
        if self._open:
            left = max(0.0, self._open[0][0] - self._served) * len(self._open) / self.rate
            self._timeline.at(self._timeline.now + left, self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        # The first is done, whatever rounding says; others that end with it follow in events of their own.
        self._served = max(self._served, self._open[0][0])
        _, _, done, arguments = heapq.heappop(self._open)
        self._schedule()
        done(*arguments)
