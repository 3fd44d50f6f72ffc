"""Where a learner is in the data, and claiming the units that it reads next.

A pass over the data is cut in units; `data/<pass>/<unit>.json`, created once, says which island reads a unit. Units are
claimed lowest first, two ahead, in the background, so that a learner neither waits for the store nor hoards data.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.records import Position, UnitRecord

AHEAD = 2
"""Units claimed beyond the one being read: one may be used up while the store is slow to grant the next."""

LOOK_BACK = 32
"""Without any known position, how many of the newest claims a restarted island searches for its own."""


@dataclass(frozen=True)
class Slice:
    """Samples `[start, start + count)` of a unit."""

    data_pass: int
    unit_index: int
    start: int
    count: int
    reread: bool
    """Read before, because no further unit could be claimed."""


class DataCursor:
    """The units that an island owns and how far it has read; shared by the learner's thread and the claiming one."""

    def __init__(self, samples_of: Callable[[int, int], int], start: Position) -> None:
        self._samples_of = samples_of
        self._lock = threading.Lock()
        self._units: deque[tuple[int, int]] = deque()
        self._position = start
        self._recovered = False
        self._reread_at = 0

    @property
    def position(self) -> Position:
        with self._lock:
            return self._position

    def wanted(self) -> int:
        """Return how many more units should be claimed now."""
        with self._lock:
            return max(0, 1 + AHEAD - len(self._units))

    def ready(self) -> bool:
        """Tell whether there is anything to read: false only at the start, before the first unit is there.

        A restart knows its position before it has found the rest of that unit: reading again would train what is
        merged a second time.
        """
        with self._lock:
            return bool(self._units) or (self._recovered and self._position.unit_index >= 0)

    def recovered(self) -> None:
        """All units that earlier lives had claimed have been added."""
        with self._lock:
            self._recovered = True

    def claimed(self, data_pass: int, unit_index: int) -> None:
        """Add a unit of this island's; units at or before the position read so far are ignored."""
        with self._lock:
            here = (self._position.data_pass, self._position.unit_index)
            if (data_pass, unit_index) < here or (data_pass, unit_index) in self._units:
                return
            if (data_pass, unit_index) == here and self._position.offset >= self._samples_of(data_pass, unit_index):
                return
            self._units.append((data_pass, unit_index))

    def take(self, count: int) -> Slice:
        """Return the next samples, at most `count`, and move on; read the newest unit again when none is left."""
        with self._lock:
            if not self._units:
                return self._again(count)
            data_pass, unit_index = self._units[0]
            same = (data_pass, unit_index) == (self._position.data_pass, self._position.unit_index)
            start = self._position.offset if same else 0
            size = self._samples_of(data_pass, unit_index)
            found = Slice(data_pass, unit_index, start, min(count, size - start), False)
            self._position = Position(data_pass=data_pass, unit_index=unit_index, offset=start + found.count)
            if self._position.offset >= size:
                self._units.popleft()
                self._reread_at = 0
            return found

    def _again(self, count: int) -> Slice:
        data_pass, unit_index = self._position.data_pass, self._position.unit_index
        if unit_index < 0:
            raise RuntimeError("nothing was claimed yet; ask ready() first")
        size = self._samples_of(data_pass, unit_index)
        start = self._reread_at % size
        found = Slice(data_pass, unit_index, start, min(count, size - start), True)
        self._reread_at = start + found.count
        return found


class UnitClaimer:
    """Claims units for a cursor, one create per call; what it has to create survives an unknown outcome."""

    def __init__(
        self, board: Blackboard, cursor: DataCursor, island: str, incarnation: int, num_units: int, start: Position
    ) -> None:
        self._board = board
        self._cursor = cursor
        self._island = island
        self._incarnation = incarnation
        self._num_units = num_units
        self._next = (start.data_pass, max(0, start.unit_index))
        self._known = start.unit_index >= 0
        self._recovered = False
        self._pending: UnitRecord | None = None

    def claim_once(self) -> bool:
        """Recover what earlier lives of this island own, then claim one unit; return whether anything was done.

        Raises `StoreUnavailable`; the next call goes on with the same record.
        """
        if not self._recovered:
            self._recover()
            return True
        if self._cursor.wanted() == 0:
            return False
        if self._pending is None:
            data_pass, unit_index = self._look_ahead()
            self._pending = UnitRecord(
                run_id=self._board.run_id,
                nonce=self._board.new_nonce(),
                data_pass=data_pass,
                unit_index=unit_index,
                island=self._island,
                incarnation=self._incarnation,
            )
        mine = self._pending
        standing = self._board.create(self._board.keys.unit(mine.data_pass, mine.unit_index), mine)
        self._pending = None
        self._advance()
        if standing.island == self._island:
            self._cursor.claimed(mine.data_pass, mine.unit_index)
        return True

    def _look_ahead(self) -> tuple[int, int]:
        """Return the lowest free unit: a few reads cost a tenth of the create that they keep from being lost."""
        data_pass, unit_index = self._next
        free = self._board.first_free_unit(data_pass, unit_index)
        self._next = (data_pass, free) if free < self._num_units else (data_pass + 1, 0)
        return self._next

    def _recover(self) -> None:
        """Find the units that earlier lives of this island claimed and did not finish, and the first free one."""
        data_pass, unit_index = self._next
        while True:
            free = self._board.first_free_unit(data_pass, unit_index)
            first = unit_index if self._known else max(unit_index, min(free, self._num_units) - LOOK_BACK)
            for index in range(first, min(free, self._num_units)):
                record = self._board.read_unit(data_pass, index)
                if record is not None and record.island == self._island:
                    self._cursor.claimed(data_pass, index)
            if free < self._num_units:
                break
            data_pass, unit_index = data_pass + 1, 0
        self._next = (data_pass, free)
        self._recovered = True
        self._cursor.recovered()

    def _advance(self) -> None:
        data_pass, unit_index = self._next
        self._next = (data_pass, unit_index + 1) if unit_index + 1 < self._num_units else (data_pass + 1, 0)
