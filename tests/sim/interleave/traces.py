"""What an object remembers, as a value: two processes whose traces are equal will do the same from here on."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from pydantic import BaseModel

EPOCH = float(2**20)
"""Where the clocks of traced processes start: a float of at least half of it is a moment, a smaller one a duration.
"""

_LOCK = type(threading.Lock())
_PLAIN = (str, bytes, int, type(None))


def trace(value: Any, now: float | None, without: frozenset[str]) -> Hashable:
    """Return everything reachable from `value` as nested tuples.

    `now`: moments count by how long ago they are; None: they decide nothing. `without`: names of attributes that do not
    either.
    """
    return _Tracer(now, without).of(value)


class _Tracer:
    def __init__(self, now: float | None, without: frozenset[str]) -> None:
        self._now = now
        self._without = without
        self._met: dict[int, int] = {}
        """Objects that were met before, numbered: they may refer to each other in circles."""

    def of(self, value: Any) -> Hashable:
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, float):
            moment = value >= EPOCH / 2
            return value if not moment else None if self._now is None else ("ago", self._now - value)
        if isinstance(value, BaseModel):
            return type(value).__name__, value.model_dump_json(exclude=set(self._without))
        if isinstance(value, torch.Tensor):
            return tuple(value.shape), tuple(value.flatten().tolist())
        if isinstance(value, torch.nn.Module | torch.optim.Optimizer):
            return self.of(value.state_dict())
        if isinstance(value, Mapping):
            return tuple(sorted(((repr(key), self.of(item)) for key, item in value.items()), key=lambda pair: pair[0]))
        if isinstance(value, Set):
            return tuple(sorted(map(repr, value)))
        if isinstance(value, list | tuple | deque):
            return tuple(self.of(item) for item in value)
        if isinstance(value, _LOCK) or callable(value):
            return None
        return self._object(value)

    def _object(self, value: Any) -> Hashable:
        if id(value) in self._met:
            return "met", self._met[id(value)]
        self._met[id(value)] = len(self._met)
        parts = dict(getattr(value, "__dict__", {}))
        for kind in type(value).__mro__:
            parts.update(
                {name: getattr(value, name) for name in getattr(kind, "__slots__", ()) if hasattr(value, name)}
            )
        kept = sorted(name for name in parts if name not in self._without)
        return type(value).__name__, tuple((name, self.of(parts[name])) for name in kept)


def most_varied(traces: Iterable[Hashable]) -> tuple[tuple[Any, ...], int]:
    """Return the path of the part that differs most often between traces, and how many values it has."""
    values: defaultdict[tuple[Any, ...], set[Hashable]] = defaultdict(set)
    for one in traces:
        for path, value in _leaves(one, ()):
            values[path].add(value)
    path = max(values, key=lambda path: len(values[path]))
    return path, len(values[path])


def _leaves(value: Hashable, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Hashable]]:
    if not isinstance(value, tuple):
        yield path, value
        return
    named = len(value) == 2 and isinstance(value[0], str)
    for index, item in enumerate(value[1:] if named else value):
        yield from _leaves(item, (*path, value[0] if named else index))
