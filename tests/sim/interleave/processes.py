"""Processes as functions: what the real code of one asks of the store next, given where it is and what is answered.

A process touches nothing but the store, its own clock and its own nonces. So the code runs as a greenlet that stops at
each request, and what came after which answers is remembered (`Memory`, `Point`): the code is begun again only to learn
what follows an answer that has not been given there before. At the end of each turn of its loop a process shows all
that it remembers; two histories that leave the same trace are one point from there on, so that loops that poll in vain
are circles and not endless paths. `Live` runs the same code without any memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import greenlet

from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import Fates
from diloco_runtime.store import AlreadyExists, Names
from tests.sim.interleave.traces import most_varied

READS = frozenset({"get", "list"})

MOST_TURNS = 50_000
"""Different ends of turns of one process after which a search gives up: its trace holds something that only grows."""


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


class Told(NamedTuple):
    """A process was told that the record with this nonce stands at a key."""

    key: str
    nonce: str


class Holds(NamedTuple):
    """A process holds these values as a version of a fragment."""

    fragment: int
    version: int
    values: tuple[tuple[str, tuple[float, ...]], ...]


class Books(NamedTuple):
    """Where a learner's tokens went, per fragment, with everything adopted up to a log position."""

    island: str
    incarnation: int
    adopted: int
    fates: tuple[Fates, ...]


Said = Told | Holds | Books
"""What a process says of itself, to be checked."""

Answer = tuple[str, Any]
"""("ok", value), ("exists", None) or ("lost", None)."""

GO_ON: Answer = ("ok", None)
LOST: Answer = ("lost", None)


def _out(event: Event) -> Any:
    """Stop a process at an event; return the answer once it goes on."""
    scheduler = greenlet.getcurrent().parent
    assert scheduler is not None
    return scheduler.switch(event)


class Port:
    """A process's way out: an `ObjectStore` whose every verb is a request to the scheduler, and the end of a turn."""

    url = "explored://run"

    def __init__(self) -> None:
        self.said: list[Said] = []

    def _ask(self, verb: str, key: str, data: bytes = b"") -> Any:
        kind, value = _out(Request(verb, key, data))
        if kind == "exists":
            raise AlreadyExists(key)
        if kind == "lost":
            raise StoreUnavailable(f"no answer for {key}")
        return value

    def pause(self, trace: Hashable) -> None:
        """End a turn; `trace`: all that the process remembers."""
        _out(Pause(trace))

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

    def go_on(self, answer: Answer) -> tuple[Event, tuple[Said, ...]]:
        """Hand over an answer; return what comes next, and what the process has said until then."""
        event: Event
        try:
            event = self._greenlet.switch(answer)
        except Exception as error:
            event = Crash(error)
        said, self._port.said = tuple(self._port.said), []
        return event, said

    def end(self) -> None:
        """Unwind the code where it stands."""
        self._greenlet.throw(greenlet.GreenletExit)


class Memory:
    """All that is known of one process: a tree of points for each of its lives."""

    def __init__(self, lives: Sequence[Program]) -> None:
        """`lives`: the code of its first life and of those that follow a crash, one each."""
        self._lives = lives
        self._roots: dict[int, Point] = {}
        self.points = 0
        self.pauses: dict[tuple[int, Hashable], Point] = {}
        """Ends of turns by life and trace."""
        self.runs = 0
        """How often the code was begun."""

    def root(self, life: int = 0) -> Point | None:
        """Return the point at which a life begins, or None when there is no such life."""
        if life not in self._roots and life < len(self._lives):
            self._roots[life] = self.point(None, life, GO_ON, Pause())
        return self._roots.get(life)

    def point(self, above: Point | None, life: int, answer: Answer, event: Event) -> Point:
        self.points += 1
        return Point(self, self.points, above, life, answer, event)

    def paused(self, point: Point, trace: Hashable) -> None:
        """Remember a new end of a turn."""
        self.pauses[point.life, trace] = point
        if len(self.pauses) > MOST_TURNS:
            where, values = most_varied(trace for _, trace in self.pauses)
            raise AssertionError(f"a process never forgets: {'.'.join(map(str, where))} has been {values} things")

    def run_to(self, point: Point) -> Run:
        """Run the code from its beginning to a point."""
        self.runs += 1
        run, answers = Run(self._lives[point.life]), []
        while point.above is not None:
            answers.append(point.answer)
            point = point.above
        for answer in reversed(answers):
            run.go_on(answer)
        return run


class Point:
    """Where a process is: the answers that it got so far, and what it does next."""

    __slots__ = ("_after", "_memory", "_run", "above", "answer", "event", "life", "number", "turn")

    def __init__(
        self, memory: Memory, number: int, above: Point | None, life: int, answer: Answer, event: Event
    ) -> None:
        self._memory, self.number, self.above, self.life = memory, number, above, life
        self.answer, self.event = answer, event
        self.turn: Point = self if above is None or isinstance(event, Pause) else above.turn
        """The point at which the present turn began."""
        self._after: dict[Answer, tuple[Point, tuple[Said, ...]]] = {}
        self._run: Run | None = None

    def after(self, answer: Answer) -> tuple[Point, tuple[Said, ...]]:
        """Return where the process is once it has got this answer, and what it has said on the way."""
        found = self._after.get(answer)
        if found is None:
            found = self._after[answer] = self._find(answer)
        return found

    def reborn(self) -> Point | None:
        """Return the beginning of the life after this one, or None when there is none."""
        return self._memory.root(self.life + 1)

    def _find(self, answer: Answer) -> tuple[Point, tuple[Said, ...]]:
        run, self._run = self._run or self._memory.run_to(self), None
        event, said = run.go_on(answer)
        if isinstance(event, Pause) and (self.life, event.trace) in self._memory.pauses:
            run.end()
            return self._memory.pauses[self.life, event.trace], said
        found = self._memory.point(self, self.life, answer, event)
        if isinstance(event, Pause):
            self._memory.paused(found, event.trace)
        found._run = run
        return found, said


class Live:
    """A process that is simply run: like a `Point`, but without memory."""

    number, turn = 0, None

    def __init__(self, lives: Sequence[Program]) -> None:
        self._lives = lives
        self._run = Run(lives[0])
        self.event: Event = Pause()

    def after(self, answer: Answer) -> tuple[Live, tuple[Said, ...]]:
        self.event, said = self._run.go_on(answer)
        return self, said

    def reborn(self) -> Live | None:
        self._run.end()
        return Live(self._lives[1:]) if len(self._lives) > 1 else None
