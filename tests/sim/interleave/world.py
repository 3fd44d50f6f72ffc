"""A few processes that meet in one store: what lies there, who is where, and the replay of one schedule.

A state is what lies in the store and where each process is (see `processes`). Before each request any process may go
on. (A switch between a request's effect and its answer is a switch before the next request: in between, a process meets
nobody.) Requests that commute with everything others can ever do are no place for a switch: reads of an object that is
there and can neither change nor go, creates of a name that is taken, and whatever lies under keys that one process has
for itself.

Clocks are each process's own and pass only in its own sleeps. No clock is compared between machines, so any other
process may do any amount of work, or none, while one of them sleeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tests.sim.interleave.processes import (
    GO_ON,
    LOST,
    READS,
    Answer,
    Crash,
    Live,
    Pause,
    Point,
    Program,
    Request,
    Said,
)

Place = Point | Live

NETWORK = "*"
"""Who delivers a late write, in a schedule."""


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


class Move(NamedTuple):
    """One step of a schedule: which process goes on, and how its request fares."""

    process: int
    """The number of processes: none of them, a late write takes effect."""
    fate: str = ""
    """"": answered. "-": the process dies before its request takes effect. "+": it dies after that, without an answer.
    "!": it dies, and its request takes effect later, or never. "?": the request takes effect, but the answer is lost.
    "~": the same error, but it takes effect later, or never."""
    skip: int = 0
    """How many requests, none but the first of which can matter to others, are answered before one meets its fate."""


class State(NamedTuple):
    """Where everything is."""

    contents: Contents
    places: tuple[Any, ...]
    """A `Place` per process; None: it was killed and does not come back."""
    late: tuple[Request, ...]
    """Writes that may still take effect."""
    faults: int
    """Faults still to be injected."""

    def key(self) -> tuple[object, ...]:
        return self.contents.digest, *(p.number if p else 0 for p in self.places), self.late, self.faults

    def able(self) -> list[int]:
        """Return the processes that can go on."""
        return [i for i, place in enumerate(self.places) if place is not None and place.event is not None]


class Checks(Protocol):
    """What must hold. Each raises `AssertionError`."""

    def write(self, request: Request, contents: Contents) -> None:
        """Look at a write that is about to take effect on these contents."""

    def said(self, said: tuple[Said, ...], contents: Contents) -> None:
        """Look at what a process says, on these contents."""

    def end(self, contents: Contents) -> None:
        """Look at what lies there when every process has ended."""


Tell = Callable[[str, Request, str], None]
"""Receives each request of a replay: who asks, what, and what becomes of it."""


@dataclass(frozen=True)
class World:
    """The processes, what each has for itself, and what must hold."""

    names: str
    """One letter per process."""
    lives: tuple[tuple[Program, ...], ...]
    """Per process, the code of its lives: the next begins when one is killed."""
    contents: Contents
    """What lies in the store before anything begins."""
    private: Callable[[str, Request], bool]
    """Tells whether a request of a process (by letter) commutes with all requests of others."""
    checks: Checks
    tell: Tell | None = None

    # ---- moving -------------------------------------------------------------------------------------------------

    def begin(self, places: list[Any], faults: int = 0) -> State:
        """Boot every process, one after the other, to the end of its first turn."""
        contents = self.contents
        for index, place in enumerate(places):
            place, _ = place.after(GO_ON)
            while not isinstance(place.event, Pause):
                contents, place = self._answered(index, contents, place)
            places[index] = place
        return self._settled(contents, [*places], range(len(places)), (), faults)

    def play(self, state: State, move: Move) -> State:
        """Return the state after a move."""
        contents, places, late, fate = state.contents, list(state.places), state.late, move.fate
        if move.process == len(places):
            contents, late = self._delivered(contents, late[0]), late[1:]
        else:
            place = places[move.process]
            assert place is not None and isinstance(place.event, Request), f"{self.names[move.process]} has ended"
            for _ in range(move.skip):
                contents, place = self._to_next(move.process, contents, place)
            if fate in LATE and place.event.verb not in READS:
                late = (*late, place.event)
            contents, places[move.process] = self._answered(move.process, contents, place, fate)
        concerned = (move.process,) if contents is state.contents and late == state.late else range(len(places))
        return self._settled(contents, places, concerned, late, state.faults - (fate != ""))

    def mishaps(self, state: State, index: int, fates: str) -> Iterator[Move]:
        """Return every fault that may befall a process from its present request to its next one that matters.

        A read that dies or fails after its effect is one that does so before it, and what dies between two requests
        that matter to nobody dies before the first or after the second.
        """
        contents, place, skip = state.contents, state.places[index], 0
        while True:
            for fate in fates:
                if place.event.verb not in READS or fate == "~" or (fate == "-" and not skip):
                    yield Move(index, fate, skip)
            contents, place = self._to_next(index, contents, place)
            skip += 1
            if place.event is None or self._matters(index, place.event, contents, state.late):
                return

    def _to_next(self, index: int, contents: Contents, place: Any) -> tuple[Contents, Any]:
        """Answer the request of a process, and let it go on to its next one."""
        contents, place = self._answered(index, contents, place)
        while type(place.event) is Pause:
            place, said = place.after(GO_ON)
            self.checks.said(said, contents)
        return contents, place

    def _answered(self, index: int, contents: Contents, place: Place, fate: str = "") -> tuple[Contents, Any]:
        """Carry out the request of a process; return what lies there then, and where the process is."""
        request = place.event
        if type(request) is Crash:
            raise AssertionError(f"{self.names[index]} failed: {request.error!r}") from request.error
        assert type(request) is Request
        answer: Answer = LOST
        if fate not in ("-", *LATE):
            if request.verb not in READS:
                self.checks.write(request, contents)
            answer, contents = contents.answer(request)
        if self.tell:
            self.tell(self.names[index], request, FATES.get(fate) or _spelled(request, answer))
        if fate in DEADLY:
            return contents, place.reborn()
        place, said = place.after(answer if fate == "" else LOST)
        if said:
            self.checks.said(said, contents)
        return contents, place

    def _delivered(self, contents: Contents, write: Request) -> Contents:
        self.checks.write(write, contents)
        answer, contents = contents.answer(write)
        if self.tell:
            self.tell(NETWORK, write, _spelled(write, answer))
        return contents

    def _settled(
        self, contents: Contents, places: list[Any], concerned: Iterable[int], late: tuple[Request, ...], faults: int
    ) -> State:
        """Let processes go on to their next requests that can matter to another one."""
        for index in concerned:
            place, turns = places[index], 0
            while place is not None and (event := place.event) is not None:
                if type(event) is Pause:
                    (place, said), turns = place.after(GO_ON), turns + 1
                    if said:
                        self.checks.said(said, contents)
                    assert turns < 100, f"{self.names[index]} turns without looking at anything that others write"
                elif type(event) is Request and self._matters(index, event, contents, late):
                    break
                else:
                    contents, place = self._answered(index, contents, place)
            places[index] = place
        return State(contents, tuple(places), late, faults)

    def _matters(self, index: int, request: Request, contents: Contents, late: tuple[Request, ...]) -> bool:
        if request.verb in ("get", "create") and request.key in contents.objects:
            return False  # it stands for ever
        return any(request.key == write.key for write in late) or not self.private(self.names[index], request)

    # ---- tapes --------------------------------------------------------------------------------------------------

    def tape(self, moves: list[Move]) -> str:
        """Spell a schedule: letters of processes, each with a count of moves, or with a fate and which of the requests
        from there on meets it."""
        words: list[tuple[str, int]] = []
        for move in moves:
            word = (self.names + NETWORK)[move.process] + move.fate
            same = words and words[-1][0] == word and not move.fate
            words = [*words[:-1], (word, words[-1][1] + 1)] if same else [*words, (word, move.skip + 1)]
        return " ".join(word + (str(count) if count > 1 else "") for word, count in words)

    def moves(self, tape: str) -> Iterator[Move]:
        """Read what `tape` spelled."""
        for name, fate, digits in re.findall(r"([a-z*])([-+!?~]?)(\d*)", tape):
            process, count = (self.names + NETWORK).index(name), int(digits or 1)
            yield from [Move(process, fate, count - 1)] if fate else [Move(process)] * count

    def replay(self, tape: str) -> Contents:
        """Run the real code of all processes through one schedule, checking everything on the way."""
        moves = list(self.moves(tape))
        state = self.begin([Live(lives) for lives in self.lives], sum(move.fate != "" for move in moves))
        for move in moves:
            state = self.play(state, move)
        if not state.able():
            self.checks.end(state.contents)
        return state.contents


DEADLY, LATE = ("-", "+", "!"), ("!", "~")
"""Fates by which a process dies; those after which its write may still take effect."""

FATES = {
    "-": "its sender dies before it takes effect",
    "+": "its sender dies after it took effect",
    "!": "its sender dies; it takes effect later, or never",
    "?": "takes effect, the answer is lost",
    "~": "no answer; it takes effect later, or never",
}


def _spelled(request: Request, answer: Answer) -> str:
    kind, value = answer
    if kind != "ok" or request.verb not in READS:
        return kind
    return "absent" if value is None else f"{len(value)} {'names' if isinstance(value, tuple) else 'bytes'}"
