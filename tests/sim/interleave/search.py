"""A search through every interleaving of a world: over states, since many schedules lead to the same state, and what
can follow it does not depend on which of them did. Breadth first, so that what is found is found with few moves."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.sim.interleave.processes import Memory
from tests.sim.interleave.world import Move, State, World


class Broken(AssertionError):
    """Something did not hold; the message ends with the schedule."""

    def __init__(self, what: str, tape: str) -> None:
        super().__init__(f"{what}\nschedule: {tape}")
        self.what, self.tape = what, tape


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    moves: int = 0
    schedules: int = 0
    """Different whole schedules, leaving out those with a turn in vain."""
    ends: dict[int, str] = field(default_factory=dict)
    """Final contents by digest, with a schedule each that leads to them."""
    points: int = 0
    """Different histories of single processes."""
    runs: int = 0
    """How often the real code of a process was begun."""
    whole: bool = True
    """Whether there was nothing more to search."""

    def __str__(self) -> str:
        return (
            f"{'every interleaving' if self.whole else 'NOT exhaustive'}: {self.states} states, {self.moves} moves, "
            f"{self.schedules:.3g} schedules, {len(self.ends)} different ends; "
            f"{self.points} histories of single processes, from {self.runs} runs of their code"
        )


class Search:
    """A search through all schedules of a world with at most one of the given faults."""

    def __init__(self, world: World, faults: Mapping[str, str] | None = None, most: int | None = None) -> None:
        """`faults`: which fates (see `Move`) may befall processes, by their letters, one in each schedule.
        `most`: the number of states after which the search stops early."""
        self._world = world
        self._faults = {world.names.index(name): fates for name, fates in (faults or {}).items()}
        self._most = most
        self._memories = [Memory(lives) for lives in world.lives]
        self._numbers: dict[tuple[object, ...], int] = {}
        self._came = array("q")
        """Per state, the state from which it was first reached."""
        self._by: list[Move] = []
        """Per state, the move by which it was first reached."""
        self._ways: list[array[int]] = []
        """Per state, the states that follow it; inverted where a turn in vain ends."""
        self._open: deque[tuple[int, State]] = deque()
        self._found = Found()
        self._over: list[int] = []

    def run(self) -> Found:
        """Search; raise `Broken` with the schedule when something does not hold on the way."""
        found = self._found
        start = self._world.begin([memory.root() for memory in self._memories], int(bool(self._faults)))
        self._reach(start, 0, Move(0))
        while self._open and (self._most is None or len(self._ways) < self._most):
            self._expand(*self._open.popleft())
        found.whole = not self._open
        found.states, found.moves = len(self._ways), sum(len(ways) for ways in self._ways)
        found.points = sum(memory.points for memory in self._memories)
        found.runs = sum(memory.runs for memory in self._memories)
        if found.whole:
            self._check_that_all_can_end()
            found.schedules = self._count()
        return found

    def _reach(self, state: State, came: int, by: Move) -> int:
        key = state.key()
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._ways)
            self._came.append(came)
            self._by.append(by)
            self._ways.append(array("q"))
            self._open.append((number, state))
        return number

    def _expand(self, number: int, state: State) -> None:
        able = state.able()
        if not able:
            self._over.append(number)
            if state.contents.digest not in self._found.ends:
                self._found.ends[state.contents.digest] = self._tape(number)
                self._checked(number, [], partial(self._world.checks.end, state.contents))
        for move in self._moves(state, able):
            after = self._checked(number, [move], partial(self._world.play, state, move))
            follower = self._reach(after, number, move)
            self._ways[number].append(~follower if _is_in_vain(state, after, move) else follower)

    def _moves(self, state: State, able: list[int]) -> Iterator[Move]:
        for index in able:
            yield Move(index)
        if state.late:
            yield Move(len(state.places))
        for index in able if state.faults else ():
            yield from self._world.mishaps(state, index, self._faults.get(index, ""))

    def _checked(self, number: int, moves: list[Move], action: Callable[[], Any]) -> Any:
        try:
            return action()
        except AssertionError as error:
            raise Broken(str(error), self._tape(number, moves)) from error

    def _tape(self, number: int, more: list[Move] | None = None) -> str:
        moves = [*(more or [])]
        while number:
            moves.append(self._by[number])
            number = self._came[number]
        return self._world.tape([*reversed(moves[len(more or ()) :]), *(more or ())])

    def _check_that_all_can_end(self) -> None:
        """Whatever has happened, the processes can still come to their end (turns in vain change nothing, so whoever
        cannot end stands still for ever)."""
        before = [array("q") for _ in self._ways]
        for number, ways in enumerate(self._ways):
            for follower in ways:
                before[max(follower, ~follower)].append(number)
        can, open_ = bytearray(len(self._ways)), list(self._over)
        while open_:
            number = open_.pop()
            if not can[number]:
                can[number] = 1
                open_ += before[number]
        if 0 in can:
            raise Broken("the processes do not come to their end from here", self._tape(can.index(0)))

    def _count(self) -> int:
        """Count the ways from the start to an end, from the ends backwards."""
        counts = [0] * len(self._ways)
        for number in self._over:
            counts[number] = 1
        for number in reversed(self._order()):
            counts[number] += sum(counts[follower] for follower in self._ways[number] if follower >= 0)
        return counts[0]

    def _order(self) -> list[int]:
        """Return the states so that each stands before those that follow it; turns in vain, which lead back, aside."""
        waits = array("q", bytes(8 * len(self._ways)))
        for ways in self._ways:
            for follower in ways:
                if follower >= 0:
                    waits[follower] += 1
        order = [number for number, count in enumerate(waits) if not count]
        for number in order:
            for follower in self._ways[number]:
                if follower >= 0:
                    waits[follower] -= 1
                    if not waits[follower]:
                        order.append(follower)
        assert len(order) == len(self._ways), "there are circles that are no turns in vain"
        return order


def _is_in_vain(state: State, after: State, move: Move) -> bool:
    """Tell whether a move led a process back to the beginning of the turn that it was in."""
    if move.process == len(state.places) or move.fate:
        return False
    before, now = state.places[move.process], after.places[move.process]
    return now is not None and now.event is not None and now.turn is before.turn and now.number <= before.number
