"""Lives of islands that read numbered samples, without training on them."""

from __future__ import annotations

import itertools

from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.world import World
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.data_cursor import AHEAD, DataCursor, Slice, UnitClaimer
from diloco_runtime.records import Position
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import run_record
from tests.support.run_records import RUN_ID

_numbers = itertools.count()
UNITS = 5
Sample = tuple[int, int, int]


def samples_of(data_pass: int, unit_index: int) -> int:
    """Return sizes that differ from unit to unit and from pass to pass: 3 to 6 samples."""
    return 3 + (data_pass + unit_index) % 4


def at(data_pass: int, unit_index: int, offset: int) -> Position:
    return Position(data_pass=data_pass, unit_index=unit_index, offset=offset)


def new_store() -> MemoryStore:
    store = MemoryStore(f"unit/cursor-{next(_numbers)}")
    Blackboard(store, "", WorldClock(World()), WorldNonces(World())).create_run(run_record(RUN_ID))
    return store


class Reader:
    """One life of an island: its cursor, its claimer, and what it has read for the first time."""

    def __init__(
        self, store: ObjectStore, name: str, life: int = 1, start: Position | None = None, units: int = UNITS
    ) -> None:
        world, start = World(life + 1000 * len(name)), start or Position()
        self.name, self.life = name, life
        self.board = Blackboard(store, RUN_ID, WorldClock(world), WorldNonces(world))
        self.cursor = DataCursor(samples_of, start)
        self.claimer = UnitClaimer(self.board, self.cursor, name, life, units, start)
        self.read: list[Sample] = []

    def claim(self) -> None:
        """Claim until nothing more is wanted."""
        while self.claimer.claim_once():
            pass

    def take(self, count: int) -> Slice:
        found = self.cursor.take(count)
        assert 1 <= found.count <= count
        assert found.start + found.count <= samples_of(found.data_pass, found.unit_index)
        if not found.reread:
            numbers = range(found.start, found.start + found.count)
            self.read += [(found.data_pass, found.unit_index, number) for number in numbers]
        return found

    def take_all(self) -> None:
        """Read everything that is claimed."""
        while self.cursor.ready() and self.cursor.wanted() < 1 + AHEAD:
            self.take(100)


def owner(board: Blackboard, data_pass: int, unit_index: int) -> str | None:
    record = board.read_unit(data_pass, unit_index)
    return None if record is None else record.island


def samples(data_pass: int, *units: int) -> list[Sample]:
    return [(data_pass, unit, number) for unit in units for number in range(samples_of(data_pass, unit))]
