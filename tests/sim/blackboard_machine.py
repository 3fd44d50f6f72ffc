"""Participants of runs that follow each other under one name, driven by steps and faults in any order.

Who has the duty is left to chance, since safety must not depend on it.
"""

from __future__ import annotations

from functools import partial

import torch
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import MissingPayload
from diloco_runtime.garbage import collect
from diloco_runtime.keys import RUN, fragment_of, version_before
from diloco_runtime.learner_logic import Offer
from diloco_runtime.merging import Decision, OfferBook
from diloco_runtime.publisher import OfferJob
from diloco_runtime.purge import purge_run
from diloco_runtime.records import Position, RunRecord
from tests.sim.blackboard_picture import KEEP, SNAPSHOT, Connection, Fault, P
from tests.sim.blackboard_scene import KEY, MOST, Faults, Participant, Scene

WRITE_FAULTS = st.sampled_from([Fault.LOST, Fault.UNANSWERED, Fault.LATE, Fault.TWICE, Fault.OVERTAKEN])
READ_FAULTS = st.sampled_from([Fault.LOST, Fault.UNANSWERED, Fault.CUT, Fault.OVERTAKEN])
RACES: list[Faults] = [
    {"create": [Fault.UNANSWERED]},
    {"create": [Fault.UNANSWERED], "get": [Fault.LOST]},
    {"create": [Fault.TWICE]},
    {"create": [Fault.LATE], "get": [Fault.LOST]},
    {"create": [Fault.LATE] * 4},
    {"create": [Fault.LATE, Fault.OVERTAKEN]},
    {"create": [Fault.OVERTAKEN]},
    {"create": [Fault.LOST] * 4},
]
"""What makes the outcome of a create hard to tell."""

ANYTHING = st.fixed_dictionaries(
    {},
    optional={
        "create": st.lists(WRITE_FAULTS, min_size=1, max_size=4),
        "get": st.lists(READ_FAULTS, min_size=1, max_size=2),
        "put": st.lists(WRITE_FAULTS, min_size=1, max_size=1),
        "list": st.lists(READ_FAULTS, min_size=1, max_size=1),
        "delete": st.lists(st.sampled_from([Fault.LOST, Fault.UNANSWERED]), min_size=1, max_size=1),
    },
)
FAULTS: st.SearchStrategy[Faults] = st.one_of(st.just({}), st.sampled_from(RACES), ANYTHING)
WHO = st.integers(0, MOST - 1)
DELTA = st.integers(-4, 4)
ISLAND = st.sampled_from(["iowa", "oregon"])


class BlackboardMachine(Scene):
    """Who does what with the blackboard, in any order."""

    @initialize(second=ISLAND, rounds=st.integers(0, 7))
    def start(self, second: str, rounds: int) -> None:
        """Begin with a run in which nothing has gone wrong yet."""
        self.create_run({})
        for island in ("iowa", second):
            self.join(island, {})
        for number in range(rounds):
            self.calm_merge(0, number % 5 - 2)

    # ---- the run ----------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.picture.current)
    @rule(faults=FAULTS)
    def create_run(self, faults: Faults) -> None:
        """A person creates the run, or tries again to."""
        if self.creating is None:
            self.runs += 1
            self.creating = RunRecord(
                run_id=f"{self.runs:08x}", nonce=self.nonces.new(), name="trial", code_version="0", config={},
                created_wall=0.0,
            )  # fmt: skip
        mine, board = self.creating, Blackboard(self.person, "", self.world.clock, self.nonces)
        standing = self.attempt(self.person, faults, lambda: board.create_run(mine))
        if standing is not None:
            self.creating = None
            self.settle(standing.run_id, RUN, mine, standing)

    @precondition(lambda self: self.picture.current and self.creating is None and len(self.picture.log) > 2)
    @rule(faults=FAULTS, then=st.booleans())
    def purge(self, faults: Faults, then: bool) -> None:
        """A person purges the run, and maybe creates another at once."""
        # A late create of run.json would bring the purged run back: the protocol has nothing against that.
        self.world.late = [write for write in self.world.late if write.key != RUN]
        run_id = self.picture.current
        self.attempt(self.person, faults, lambda: purge_run(self.person, run_id))
        if not self.picture.current:
            self.won.pop(RUN, None)
            self.lost.pop(RUN, None)
            if then:
                self.create_run({})

    @rule(seconds=st.sampled_from([0.5, 4.9, 6.0]))
    def wait(self, seconds: float) -> None:
        self.world.clock.now += seconds

    @precondition(lambda self: self.world.late)
    @rule(number=st.integers(0, 9))
    def a_late_write_lands(self, number: int) -> None:
        self.world.land(number)

    # ---- participants -----------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.people) < MOST and self.picture.current)
    @rule(island=ISLAND, faults=FAULTS)
    def join(self, island: str, faults: Faults) -> None:
        """A process is started for the run that it finds, and begins a life."""
        connection = Connection(self.world, "")
        board = Blackboard(connection, "", self.world.clock, self.nonces)
        run = self.attempt(connection, faults, board.read_run)
        if run is not None:
            assert run.run_id == self.picture.current
            self.people.append(Participant(self.world, self.nonces, run.run_id, island))
            self.go_on(len(self.people) - 1, faults)

    @precondition(lambda self: any(who.head is None for who in self.people))
    @rule(number=WHO, faults=FAULTS)
    def go_on(self, number: int, faults: Faults) -> None:
        """A process that does not take part yet claims a life; then finds the head, or makes the first commit."""
        fits = [who for who in self.people if who.head is None]
        who = fits[number % len(fits)]
        if not who.life:
            standing = self.act(who, faults, lambda: self.claim_life(who))
            if standing is None:
                return
            mine, who.claiming = who.claiming, None
            assert mine is not None
            if not self.settle(who.board.run_id, who.board.keys.claim(who.island, mine.incarnation), mine, standing):
                return
            who.begin(mine.incarnation)
        head = self.act(who, faults, lambda: self.head(who))
        if head is not None:
            who.see(head)

    @rule(number=WHO, delta=DELTA, ahead=st.integers(1, P), faults=FAULTS)
    def offer(self, number: int, delta: int, ahead: int, faults: Faults) -> None:
        """A learner calls one of the next merges and offers to it; what is still on its way goes first."""
        who = self.member(number)
        if who is None or who.head is None:
            return
        seq = who.head.seq + ahead
        if seq not in who.offered:
            who.offered.add(seq)
            self._queue(who, seq, delta)
        replaced, before = self.is_replaced(who), self.picture.offers.keys() | set()

        def publish() -> None:
            while who.publisher.publish_once():
                pass

        self.act(who, faults, publish)
        mine = [o for key, o in self.picture.offers.items() if key not in before and o.incarnation == who.life]
        assert not replaced or all(o.island != who.island for o in mine), "a life that was replaced has offered"

    def _queue(self, who: Participant, seq: int, delta: int) -> None:
        nonce, fragment, at = self.nonces.new(), fragment_of(seq, P), Position(unit_index=0, offset=seq)
        self.picture.deltas[nonce] = float(delta)
        offer = Offer(seq, fragment, version_before(seq, P), inner_steps=1, tokens=1)
        who.publisher.call(seq)
        who.publisher.offer(OfferJob(offer, nonce, {KEY[fragment]: torch.tensor([float(delta)])}, (), at, at))

    # ---- syncers ----------------------------------------------------------------------------------------------------

    @rule(number=WHO, faults=FAULTS)
    def merge(self, number: int, faults: Faults) -> None:
        """A syncer without an open commit reads on in the log, and fixes what it wants to commit next."""
        who = self.member(number)
        if who is None or who.draft is not None:
            return
        self.act(who, faults, lambda: self.follow(who))
        if who in self.people and self._collect(who, faults):
            self._draft(who, faults)

    def _collect(self, who: Participant, faults: Faults) -> bool:
        assert who.head is not None
        book = who.book = who.book or OfferBook(who.head.seq + 1)
        there = {key for key, offer in self.picture.offers.items() if offer.seq == book.seq}
        done = self.act(who, faults, lambda: who.merging.collect(book)) is not None
        who.cut = who.cut or Fault.CUT in who.connection.met
        if done and self.is_current(who):
            known = book.valid.keys() | book.refused.keys() | book.unreadable.keys()
            assert there <= known <= self.picture.offers.keys(), "the listing is not what is there"
            assert who.cut or self.behind(who) or not (book.refused or book.unreadable), "a good offer is refused"
        return done

    def _draft(self, who: Participant, faults: Faults) -> None:
        assert who.head is not None and who.book is not None
        head, book = who.head, who.book
        decision = Decision("run", 0, "", 0, head.budget, who.island, 0.0)
        try:
            who.draft = self.act(who, faults, lambda: who.merging.draft(book, head, decision))
        except MissingPayload:
            assert self.behind(who), "a payload of the newest versions is gone"

    @precondition(lambda self: any(who.draft is not None for who in self.people))
    @rule(number=WHO, faults=FAULTS)
    def commit(self, number: int, faults: Faults) -> None:
        """A syncer creates its commit, or tries the same bytes again."""
        fits = [who for who in self.people if who.draft is not None]
        self._commit(fits[number % len(fits)], faults)

    def _commit(self, who: Participant, faults: Faults) -> None:
        draft = who.draft
        assert draft is not None and who.head is not None
        standing = self.act(who, faults, lambda: who.merging.create(draft))
        if standing is not None:
            who.draft = None
            assert standing.parent == who.head.nonce or not self.is_current(who), "the log does not continue"
            self.settle(who.board.run_id, who.board.keys.log(draft.record.seq), draft.record, standing)
            who.see(standing)

    @rule(first=FAULTS, second=FAULTS, delta=DELTA)
    def race(self, first: Faults, second: Faults, delta: int) -> None:
        """Two syncers fix a commit, of which the later one knows an offer more, and create them one after the other."""
        racers = [who for who in self.people if who.head is not None][:2]
        for number in range(len(racers)):
            self.merge(number, {})
            self.offer(number, delta, 1, {})
        for who, faults in zip(reversed(racers), (first, second), strict=False):
            if who in self.people and who.draft is not None:
                self._commit(who, faults)

    @rule(number=WHO, delta=DELTA)
    def calm_merge(self, number: int, delta: int) -> None:
        """Nothing goes wrong for once: a participant sees what it began through, offers, merges and commits."""
        who = self.member(number)
        for offers in (False, True):
            if offers:
                self.offer(number, delta, 1, {})
            if who in self.people and who is not None and who.draft is None:
                self.merge(number, {})
            if who in self.people and who is not None and who.draft is not None:
                self._commit(who, {})

    @rule(number=WHO, faults=FAULTS)
    def collect_garbage(self, number: int, faults: Faults) -> None:
        who = self.member(number)
        if who is not None and who.head is not None:
            head = who.head
            self.act(who, faults, lambda: collect(who.board, head, P, KEEP, SNAPSHOT))

    @rule(number=WHO, faults=FAULTS)
    def look(self, number: int, faults: Faults) -> None:
        """What a reader is told stands there, whole."""
        who = self.member(number)
        if who is None or not self.is_current(who):
            return
        length = len(self.picture.log)
        head = self.act(who, faults, who.board.head)
        assert head is None or head in self.picture.log[length - 1 :], "this is not the head"
        keys = self.act(who, faults, lambda: who.board.list_offers(length))
        there = sorted(key for key, offer in self.picture.offers.items() if offer.seq == length)
        assert keys is None or keys == there, "the listing is not what is there"
        for key in keys or ():
            offer = self.act(who, faults, partial(who.board.read_offer_at, key))
            assert offer is None or offer == self.picture.offers[key]
