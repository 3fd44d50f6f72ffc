"""Participants of a run for a state machine to drive: what each does not know yet, and what it believes.

A participant is the real blackboard, publisher and merging code on a connection of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from hypothesis.stateful import RuleBasedStateMachine, invariant

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import CorruptObject, Fenced, RunMismatch, StoreUnavailable
from diloco_runtime.keys import RUN, Keys
from diloco_runtime.merging import Draft, Merging, OfferBook, initialise
from diloco_runtime.publisher import Publisher
from diloco_runtime.records import ClaimRecord, CommitRecord, Record, RunRecord, encode
from diloco_runtime.store import ObjectStore
from diloco_runtime.store_memory import MemoryStore
from tests.conftest import CountedNonces
from tests.sim.blackboard_picture import CONFIG, Connection, Fault, P, World
from tests.support.run_records import table

TABLE = table(*[1] * P)
KEY = [fragment.pieces[0].key for fragment in TABLE]
INITIAL = [{key: torch.tensor([float(number)])} for number, key in enumerate(KEY)]
MOST = 4
"""Participants at a time."""

Faults = dict[str, list[Fault]]

_stores = itertools.count()


def memory() -> ObjectStore:
    return MemoryStore(f"machine-{next(_stores)}")


class Participant:
    """An island's process, with what it does not know yet."""

    def __init__(self, world: World, nonces: CountedNonces, run_id: str, island: str) -> None:
        self.island = island
        self.connection = Connection(world, run_id)
        self.board = Blackboard(self.connection, run_id, world.clock, nonces)
        self.clock = world.clock
        self.life = 0
        self.claiming: ClaimRecord | None = None
        self.head: CommitRecord | None = None
        self.draft: Draft | None = None
        self.book: OfferBook | None = None
        self.cut = False
        """A download for the book in hand was cut short."""
        self.offered: set[int] = set()

    def begin(self, life: int) -> None:
        self.life, self.claiming = life, None
        self.merging = Merging(self.board, self.clock, CONFIG, TABLE, self.island, life)
        self.publisher = Publisher(self.board, self.clock, self.island, life, "fp32")

    def see(self, head: CommitRecord) -> None:
        self.head, self.book, self.cut = head, None, False
        self.publisher.head = head.seq


class Scene(RuleBasedStateMachine):
    """Who is there, what is known and believed. Overriding `open_store` sets it over another kind of store."""

    open_store: Callable[[], ObjectStore] = staticmethod(memory)

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.open_store())
        self.picture = self.world.picture
        self.nonces = CountedNonces()
        self.people: list[Participant] = []
        self.creating: RunRecord | None = None
        """A `run.json` whose outcome is not known."""
        self.runs = 0
        self.won: dict[str, tuple[Record, str]] = {}
        """Per key the record whose writer believes to have created it, and its run."""
        self.lost: dict[str, set[bytes]] = {}
        """Per key what its writers believe not to stand there (what is left of a purged run is nobody's)."""
        self.person = Connection(self.world, "")

    def teardown(self) -> None:
        self.picture.touched.update(self.picture.objects)
        self.world.check()
        for key in self.picture.objects:
            self.world.store.delete(key)

    # ---- how it went ------------------------------------------------------------------------------------------------

    def attempt(self, connection: Connection, faults: Faults, action: Callable[[], Any]) -> Any:
        """Do something while the store misbehaves; return its result, or None when it failed for a good reason."""
        connection.faults = {verb: list(kinds) for verb, kinds in faults.items()}
        connection.met.clear()
        try:
            return action()
        except StoreUnavailable:
            assert connection.met & {Fault.LOST, Fault.UNANSWERED, Fault.LATE}, "nothing was wrong with the store"
        except CorruptObject:
            assert Fault.CUT in connection.met or connection.is_stale(), "nothing was damaged"
        finally:
            connection.faults = {}
        return None

    def act(self, who: Participant, faults: Faults, action: Callable[[], Any]) -> Any:
        """Do the same as a participant, who leaves when its run or its life is over."""
        try:
            return self.attempt(who.connection, faults, action)
        except RunMismatch:
            assert not self.is_current(who), "the run is there"
        except Fenced:
            assert self.is_replaced(who), "this is the newest life"
        self.people.remove(who)
        return None

    def is_current(self, who: Participant) -> bool:
        return who.board.run_id == self.picture.current

    def is_replaced(self, who: Participant) -> bool:
        return who.board.keys.claim(who.island, who.life + 1) in self.picture.objects

    def settle(self, run_id: str, key: str, mine: Record, standing: Record) -> bool:
        """Somebody knows who created `key`: note that, and return whether it believes to be the one."""
        won = standing.nonce == mine.nonce
        assert standing == mine or not won
        if run_id == self.picture.current:
            assert self.picture.objects.get(key) == encode(standing), f"{key} does not hold what its creator was told"
            assert not won or key not in self.won or self.won[key] == (mine, run_id), f"two winners of {key}"
            if won:
                self.won[key] = (mine, run_id)
        if not won:
            self.lost.setdefault(key, set()).add(encode(mine))
        return won

    def member(self, number: int) -> Participant | None:
        """Return one of the participants that take part."""
        fits = [who for who in self.people if who.head is not None]
        return fits[number % len(fits)] if fits else None

    # ---- what a participant does ---------------------------------------------------------------------------------

    def claim_life(self, who: Participant) -> ClaimRecord:
        if who.claiming is None:
            newest, nonce = who.board.newest_claim(who.island), self.nonces.new()
            who.claiming = ClaimRecord(
                run_id=who.board.run_id, nonce=nonce, island=who.island, agent=nonce, host="", pid=1, started=0.0,
                incarnation=1 if newest is None else newest.incarnation + 1, claimed_wall=0.0,
            )  # fmt: skip
        return who.board.create(who.board.keys.claim(who.island, who.claiming.incarnation), who.claiming)

    def head(self, who: Participant) -> CommitRecord:
        first = who.board.read_commit(0)
        if first is None:
            first = initialise(who.board, CONFIG, TABLE, INITIAL, who.island, who.life, "")
        assert not self.is_current(who) or first == self.picture.log[0], "this is not the first commit"
        return who.board.head() or first

    def follow(self, who: Participant) -> None:
        assert who.head is not None
        while (commit := who.board.read_commit(who.head.seq + 1)) is not None:
            # What is left of a purged run has holes.
            if self.is_current(who):
                assert commit.parent == who.head.nonce, "the log does not continue"
                assert commit == self.picture.log[commit.seq]
            who.see(commit)

    def behind(self, who: Participant) -> bool:
        """Tell whether others have moved on: what such a participant wants may have gone as garbage."""
        assert who.head is not None
        return not self.is_current(who) or who.head.seq < len(self.picture.log) - 1

    # ---- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def the_store_is_as_pictured(self) -> None:
        self.world.check()

    @invariant()
    def the_log_has_one_history(self) -> None:
        for seq, data in enumerate(self.picture.history if self.picture.current else ()):
            assert self.picture.objects[Keys(self.picture.current).log(seq)] == data

    @invariant()
    def who_believes_to_have_won_has_won(self) -> None:
        for key, (record, run_id) in self.won.items():
            if run_id == self.picture.current:
                assert self.picture.objects.get(key) == encode(record), f"{key} is not its winner's"
        for key, losers in self.lost.items():
            left = key != RUN and not key.startswith(f"{self.picture.current}/")
            assert left or self.picture.objects.get(key) not in losers, f"{key} is a loser's"
