"""Processes as functions: what the real code of one asks of the store next, given where it is and what is answered.

A process touches nothing but the store, its own clock and its own nonces. So the code runs as a greenlet that stops at
each request, and what came after which answers is remembered (`Memory`, `Point`): the code is begun again only to learn
what follows an answer that has not been given there before. At the end of each turn of its loop a process shows all
that it remembers; two histories that leave the same trace are one point from there on, so that loops that poll in vain
are circles and not endless paths. `Live` runs the same code without any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import greenlet

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.store import AlreadyExists, Names

READS = frozenset({"get", "list"})


class Request(NamedTuple):
    """What a process asks of the store."""

    verb: str
    key: str
    data: bytes = b""


@dataclass(frozen=True)
class Pause:
    """The end of a turn; `trace`: all that the process remembers."""

    trace: Hashable = None


@dataclass(frozen=True)
class Crash:
    """A process ended with an error."""

    error: BaseException


Event = Request | Pause | Crash | None
"""What a process does next; None: it has ended."""

Answer = tuple[str, Any]
"""("ok", value), ("exists", None) or ("lost", None)."""

GO_ON: Answer = ("ok", None)
LOST: Answer = ("lost", None)


class Contents:
    """What lies in the store. Never changed, only succeeded by other contents."""

    __slots__ = ("digest", "objects")

    def __init__(self, objects: Mapping[str, bytes], digest: int | None = None) -> None:
        if digest is None:
            digest = 0
            for item in objects.items():
                digest ^= hash(item)
        self.objects = objects
        self.digest = digest

    def answer(self, request: Request) -> tuple[Answer, Contents]:
        """Return the answer to a request and what lies there afterwards."""
        verb, key, data = request
        if verb == "get":
            return ("ok", self.objects.get(key)), self
        if verb == "list":
            return ("ok", tuple(sorted(name for name in self.objects if name.startswith(key)))), self
        if verb == "create" and key in self.objects:
            return ("exists", None), self
        changed, digest = dict(self.objects), self.digest
        if key in changed:
            digest ^= hash((key, changed.pop(key)))
        if verb != "delete":
            changed[key] = data
            digest ^= hash((key, data))
        return GO_ON, Contents(changed, digest)


class Port:
    """A process's way out: an `ObjectStore` whose every verb is a request to the scheduler, and the end of a turn."""

    url = "explored://run"

    def __init__(self) -> None:
        self.told: dict[str, str] = {}
        """What creates reported since the last event: key to the nonce that is said to stand there."""

    def _ask(self, verb: str, key: str, data: bytes = b"") -> Any:
        kind, value = greenlet.getcurrent().parent.switch(Request(verb, key, data))
        if kind == "exists":
            raise AlreadyExists(key)
        if kind == "lost":
            raise StoreUnavailable(f"no answer for {key}")
        return value

    def pause(self, trace: Hashable) -> None:
        """End a turn; `trace`: all that the process remembers."""
        greenlet.getcurrent().parent.switch(Pause(trace))

    def get(self, key: str) -> bytes | None:
        found: bytes | None = self._ask("get", key)
        return found

    def create(self, key: str, data: bytes) -> None:
        self._ask("create", key, data)

    def put(self, key: str, data: bytes) -> None:
        self._ask("put", key, data)

    def list(self, prefix: str) -> Names:
        return [*self._ask("list", prefix)]

    def list_folders(self, prefix: str) -> Names:
        below = (key[len(prefix) :] for key in self.list(prefix))
        return sorted({name.partition("/")[0] for name in below if "/" in name})

    def delete(self, key: str) -> None:
        self._ask("delete", key)

    def delete_tree(self, prefix: str) -> int:
        raise AssertionError("a running process purges nothing")


Program = Callable[[Port], None]
"""A process's code: boots, pauses, and then turns its loop with a pause after each turn."""


class Run:
    """The real code of a process on its way."""

    def __init__(self, program: Program) -> None:
        self._port = Port()
        self._greenlet = greenlet.greenlet(lambda *_: program(self._port))

    def go_on(self, answer: Answer) -> tuple[Event, dict[str, str]]:
        """Hand over an answer; return what comes next, and what creates have reported until then."""
        event: Event
        try:
            event = self._greenlet.switch(answer)
        except Exception as error:
            event = Crash(error)
        told, self._port.told = self._port.told, {}
        return event, told

    def end(self) -> None:
        """Unwind the code where it stands."""
        self._greenlet.throw(greenlet.GreenletExit)


class Memory:
    """All that is known of one process: a tree of points."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.points = 0
        self.pauses: dict[Hashable, Point] = {}
        """Ends of turns by trace."""
        self.runs = 0
        """How often the code was begun."""

    def root(self) -> Point:
        """Return the point before anything has happened."""
        return self.point(None, GO_ON, Pause(), {})

    def point(self, above: Point | None, answer: Answer, event: Event, told: dict[str, str]) -> Point:
        self.points += 1
        return Point(self, self.points, above, answer, event, told)

    def run_to(self, point: Point) -> Run:
        """Run the code from its beginning to a point."""
        self.runs += 1
        run, answers = Run(self._program), []
        while point.above is not None:
            answers.append(point.answer)
            point = point.above
        for answer in reversed(answers):
            run.go_on(answer)
        return run


class Point:
    """Where a process is: the answers that it got so far, and what it does next."""

    __slots__ = ("_after", "_memory", "_run", "above", "answer", "event", "number", "told", "turn")

    def __init__(
        self, memory: Memory, number: int, above: Point | None, answer: Answer, event: Event, told: dict[str, str]
    ) -> None:
        self._memory, self.number, self.above, self.answer, self.event = memory, number, above, answer, event
        self.told = told
        self.turn: Point = self if above is None or isinstance(event, Pause) else above.turn
        """The point at which the present turn began."""
        self._after: dict[Answer, Point] = {}
        self._run: Run | None = None

    def after(self, answer: Answer) -> Point:
        """Return where the process is once it has got this answer."""
        found = self._after.get(answer)
        if found is None:
            found = self._after[answer] = self._find(answer)
        return found

    def _find(self, answer: Answer) -> Point:
        run, self._run = self._run or self._memory.run_to(self), None
        event, told = run.go_on(answer)
        if isinstance(event, Pause) and event.trace in self._memory.pauses:
            run.end()
            return self._memory.pauses[event.trace]
        found = self._memory.point(self, answer, event, told)
        if isinstance(event, Pause):
            self._memory.pauses[event.trace] = found
        found._run = run
        return found


class Live:
    """A process that is simply run: like a `Point`, but without memory."""

    number, turn = 0, None

    def __init__(self, program: Program) -> None:
        self._run = Run(program)
        self.event: Event = Pause()
        self.told: dict[str, str] = {}

    def after(self, answer: Answer) -> Live:
        self.event, self.told = self._run.go_on(answer)
        return self
