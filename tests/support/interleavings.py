"""All interleavings of a few processes that meet in one store: a search over states, and the replay of one schedule.

A state is what lies in the store and where each process is (see `explored`); many schedules lead to the same state, and
what can follow it does not depend on which of them did.

Switches. Before each request another process may go on. Doing so in the middle of a turn of a loop is a preemption and
counted; at the end of a turn, where the loop sleeps, it is free. (A switch between a request's effect and its answer is
a switch before the next request: in between, a process meets nobody.) Requests that commute with everything others can
ever do are no place for a switch: reads of an object that is there and can neither change nor go, and whatever lies
under keys that one process has for itself.

Clocks are each process's own and pass only in its own sleeps. No clock is compared between machines, so any other
process may do any amount of work, or none, while one of them sleeps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.support.explored import GO_ON, LOST, READS, Contents, Crash, Live, Memory, Pause, Point, Program, Request

Place = Point | Live


class Move(NamedTuple):
    """One step of a schedule: which process goes on, and how its request fares."""

    process: int
    fate: str = ""
    """"": answered. "-": the process dies before its request takes effect. "+": it dies after that, without an answer.
    "?": it takes effect, but the answer is lost. "!": it has no effect, and the error looks the same."""


class State(NamedTuple):
    """Where everything is."""

    contents: Contents
    places: tuple[Place | None, ...]
    """Per process; None: it was killed."""
    running: int
    """The process that is in the middle of a turn and could go on; -1: switching is free."""
    faults: int
    """Faults still to be injected."""

    def key(self) -> tuple[int, ...]:
        return self.contents.digest, *(p.number if p else 0 for p in self.places), self.running, self.faults

    def over(self) -> bool:
        """Tell whether every process has ended or is dead."""
        return all(place is None or place.event is None for place in self.places)


@dataclass(frozen=True)
class World:
    """The processes, what each has for itself, and what must hold. Checks raise `AssertionError`."""

    names: str
    """One letter per process."""
    programs: tuple[Program, ...]
    contents: Contents
    """What lies in the store before anything begins."""
    private: Callable[[str, Request], bool]
    """Tells whether a request of a process (by letter) commutes with all requests of others."""
    check_write: Callable[[Request, Contents], None]
    """Looks at a write that is about to be made on these contents."""
    check_told: Callable[[Mapping[str, str], Contents], None]
    """Looks at what creates have reported to a process."""
    check_end: Callable[[Contents], None]
    """Looks at what lies there when every process has ended."""

    # ---- moving -------------------------------------------------------------------------------------------------

    def begin(self, places: list[Place], faults: int = 0) -> State:
        """Boot every process, one after the other, to the end of its first turn."""
        contents = self.contents
        for index, place in enumerate(places):
            place = place.after(GO_ON)
            while not isinstance(place.event, Pause):
                contents, place = self._answered(contents, place)
            places[index] = place
        return self._settled(contents, [*places], range(len(places)), -1, faults)

    def play(self, state: State, move: Move) -> State:
        """Return the state after a move."""
        contents, places, fate = state.contents, list(state.places), move.fate
        place = places[move.process]
        assert place is not None and isinstance(place.event, Request), f"{self.names[move.process]} has ended"
        if fate in ("-", "!"):
            place = None if fate == "-" else place.after(LOST)
        else:
            contents, place = self._answered(contents, place, fate)
        places[move.process] = place
        concerned = (move.process,) if contents is state.contents else range(len(places))
        return self._settled(contents, places, concerned, move.process, state.faults - (fate != ""))

    def _answered(self, contents: Contents, place: Place, fate: str = "") -> tuple[Contents, Any]:
        """Carry out the request of a process; return what lies there then, and where the process is."""
        request = place.event
        if type(request) is Crash:
            raise AssertionError(f"a process failed: {request.error!r}") from request.error
        assert type(request) is Request
        if request.verb not in READS:
            self.check_write(request, contents)
        answer, contents = contents.answer(request)
        if fate == "+":
            return contents, None
        place = place.after(LOST if fate == "?" else answer)
        if place.told:
            self.check_told(place.told, contents)
        return contents, place

    def _settled(
        self, contents: Contents, places: list[Any], concerned: Iterable[int], running: int, faults: int
    ) -> State:
        """Let processes go on to their next requests that can matter to another one."""
        for index in concerned:
            place, turns = places[index], 0
            while place is not None and (event := place.event) is not None:
                if type(event) is Pause:
                    running = -1 if index == running else running
                    place, turns = place.after(GO_ON), turns + 1
                    assert turns < 100, f"{self.names[index]} turns without looking at anything that others write"
                elif type(event) is Request and self._matters(index, event, contents):
                    break
                else:
                    contents, place = self._answered(contents, place)
            places[index] = place
            running = -1 if index == running and (place is None or place.event is None) else running
        return State(contents, tuple(places), running, faults)

    def _matters(self, index: int, request: Request, contents: Contents) -> bool:
        if request.verb == "get" and request.key in contents.objects:
            return False  # it stands for ever
        return not self.private(self.names[index], request)

    # ---- tapes --------------------------------------------------------------------------------------------------

    def tape(self, moves: list[Move]) -> str:
        """Spell a schedule: letters of processes, each with a count of moves or the fate of one."""
        words: list[tuple[str, int]] = []
        for move in moves:
            word = self.names[move.process] + move.fate
            same = words and words[-1][0] == word and not move.fate
            words = [*words[:-1], (word, words[-1][1] + 1)] if same else [*words, (word, 1)]
        return " ".join(word + (str(count) if count > 1 else "") for word, count in words)

    def moves(self, tape: str) -> Iterator[Move]:
        """Read what `tape` spelled."""
        for name, fate, count in re.findall(r"(\w)([-+?!]?)(\d*)", tape):
            for _ in range(int(count or 1)):
                yield Move(self.names.index(name), fate)

    def replay(self, tape: str) -> Contents:
        """Run the real code of all processes through one schedule, checking everything on the way."""
        moves = list(self.moves(tape))
        state = self.begin([Live(program) for program in self.programs], sum(move.fate != "" for move in moves))
        for move in moves:
            state = self.play(state, move)
        if state.over():
            self.check_end(state.contents)
        return state.contents


class Broken(AssertionError):
    """Something did not hold; the message ends with the schedule."""


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    moves: int = 0
    schedules: int = 0
    """Different whole schedules within the bound, leaving out those with a turn in vain."""
    ends: dict[int, str] = field(default_factory=dict)
    """Final contents by digest, with a schedule each that leads to them."""
    points: int = 0
    """Different histories of single processes."""
    runs: int = 0
    """How often the real code of a process was begun."""

    def __str__(self) -> str:
        return (
            f"{self.schedules} schedules, {self.states} states, {self.moves} moves, {len(self.ends)} different ends; "
            f"{self.points} histories of processes from {self.runs} runs of their code"
        )


class Search:
    """A search through all schedules of a world with at most `bound` preemptions and one of the given faults."""

    def __init__(self, world: World, bound: int, faults: Mapping[str, str] | None = None) -> None:
        """`faults`: which fates (see `Move`) may befall the processes of which letters, one in each schedule."""
        self._world = world
        self._bound = bound
        self._faults = [(world.names.index(name), fate) for fate, names in (faults or {}).items() for name in names]
        self._memories = [Memory(program) for program in world.programs]
        self._numbers: dict[tuple[int, ...], int] = {}
        self._came: list[tuple[int, Move]] = []
        """Per state, the state and the move by which it was first reached."""
        self._ways: list[list[tuple[int, int, bool]]] = []
        """Per state, the states that follow it, with the preemptions that it takes, and whether a turn in vain ends."""
        self._used: list[int] = []
        """Per state, the fewest preemptions with which it was reached."""
        self._levels: list[list[tuple[int, State]]] = [[] for _ in range(bound + 1)]
        self._found = Found()
        self._over: list[int] = []

    def run(self) -> Found:
        """Search; raise `Broken` with the schedule when something does not hold on the way."""
        start = self._world.begin([memory.root() for memory in self._memories], int(bool(self._faults)))
        self._reach(start, 0, (0, Move(0)))
        for used, level in enumerate(self._levels):
            while level:
                number, state = level.pop()
                if not self._ways[number]:
                    self._expand(number, state, used)
        self._check_that_all_can_end()
        found = self._found
        found.states, found.moves = len(self._ways), sum(len(ways) for ways in self._ways)
        found.points = sum(memory.points for memory in self._memories)
        found.runs = sum(memory.runs for memory in self._memories)
        found.schedules = self._count()
        return found

    def _reach(self, state: State, used: int, came: tuple[int, Move]) -> int:
        key = state.key()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._ways)
            self._came.append(came)
            self._ways.append([])
            self._used.append(used)
            self._levels[used].append((number, state))
        elif used < self._used[number]:
            self._used[number] = used
            self._levels[used].append((number, state))
        return number

    def _expand(self, number: int, state: State, used: int) -> None:
        if state.over():
            self._over.append(number)
            if state.contents.digest not in self._found.ends:
                self._found.ends[state.contents.digest] = self._tape(number)
                self._checked(number, [], lambda: self._world.check_end(state.contents))
            return
        for cost, move in self._moves(state):
            if used + cost <= self._bound:
                after = self._checked(number, [move], lambda m=move: self._world.play(state, m))
                vain = after.running < 0 and _turn(after, move) is _turn(state, move)
                self._ways[number].append((self._reach(after, used + cost, (number, move)), cost, vain))

    def _moves(self, state: State) -> Iterator[tuple[int, Move]]:
        able = [i for i, place in enumerate(state.places) if place is not None and place.event is not None]
        for index in able:
            yield int(state.running not in (-1, index)), Move(index)
        for index, fate in self._faults if state.faults else ():
            cost = int(state.running not in (-1, index))
            # Whoever was preempted and dies might as well have died then, when it cost no switch.
            if index in able and not (fate == "-" and cost):
                yield cost, Move(index, fate)

    def _checked(self, number: int, moves: list[Move], action: Callable[[], Any]) -> Any:
        try:
            return action()
        except AssertionError as error:
            raise Broken(f"{error}\nschedule: {self._tape(number, moves)}") from error

    def _tape(self, number: int, more: list[Move] | None = None) -> str:
        moves = [*(more or [])]
        while number:
            number, move = self._came[number]
            moves.insert(0, move)
        return self._world.tape(moves)

    def _check_that_all_can_end(self) -> None:
        """Whatever has happened, the processes can still come to their end (turns in vain change nothing, so whoever
        cannot end stands still for ever)."""
        before: list[list[int]] = [[] for _ in self._ways]
        for number, ways in enumerate(self._ways):
            for follower, _, _ in ways:
                before[follower].append(number)
        can, open_ = set(self._over), list(self._over)
        while open_:
            for number in before[open_.pop()]:
                if number not in can:
                    can.add(number)
                    open_.append(number)
        for number in range(len(self._ways)):
            if number not in can:
                raise Broken(f"the processes do not come to their end from here\nschedule: {self._tape(number)}")

    def _count(self) -> int:
        """Count the ways from the start to an end, from the ends backwards."""
        over, order = set(self._over), self._order()
        counts = [[0] * (self._bound + 1) for _ in self._ways]
        for number in reversed(order):
            mine = counts[number] = [int(number in over)] * (self._bound + 1)
            for follower, cost, vain in self._ways[number]:
                for left in range(cost, 0 if vain else self._bound + 1):
                    mine[left] += counts[follower][left - cost]
        return counts[0][self._bound]

    def _order(self) -> list[int]:
        """Return the states so that each stands before those that follow it; turns in vain, which lead back, aside."""
        waits = [0] * len(self._ways)
        for ways in self._ways:
            for follower, _, vain in ways:
                waits[follower] += not vain
        order = [number for number, count in enumerate(waits) if not count]
        for number in order:
            for follower, _, vain in self._ways[number]:
                waits[follower] -= not vain
                if not vain and not waits[follower]:
                    order.append(follower)
        assert len(order) == len(self._ways), "there are circles that are no turns in vain"
        return order


def _turn(state: State, move: Move) -> Any:
    """Return the beginning of the turn in which the process of a move is; nothing is like a turn that has ended."""
    place = state.places[move.process]
    return object() if place is None or place.event is None else place.turn
