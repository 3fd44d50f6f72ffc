"""The syncer: watches the log, merges when it has the duty, stands by otherwise.

`Syncer.tick` is one turn; it returns how long to wait before the next. When to commit is in `quorum`, who merges in
`duty`, who is alive in `liveness`; the tensors are in `merging`, which is imported when the duty begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock
from diloco_runtime.config import RunConfig
from diloco_runtime.duty import Duty
from diloco_runtime.errors import CorruptObject, MissingPayload, StoreUnavailable
from diloco_runtime.garbage import collect
from diloco_runtime.liveness import Peers
from diloco_runtime.pace import duty_seconds, standby_seconds
from diloco_runtime.peers import PeerReader
from diloco_runtime.quorum import OpenMerge, QuorumPolicy
from diloco_runtime.records import CommitRecord, ControlRecord, Fragment, SyncerStatus

if TYPE_CHECKING:
    from diloco_runtime.merging import Decision, Draft, Merging, OfferBook

GARBAGE_BACKLOG = 4
"""Commits whose garbage may wait while the next commit is on its way."""


@dataclass(frozen=True)
class SyncerLife:
    """Who this syncer is."""

    config: RunConfig
    table: tuple[Fragment, ...]
    island: str
    incarnation: int


class Syncer:
    """One island's syncer."""

    def __init__(
        self,
        life: SyncerLife,
        board: Blackboard,
        clock: Clock,
        head: CommitRecord,
        score: Callable[[], float],
        report: Callable[[SyncerStatus], None],
    ) -> None:
        """`score`: this island's fitness for the duty; `report`: receives the status after every turn."""
        sync = life.config.sync
        self._life = life
        self._board = board
        self._clock = clock
        self._head = head
        self._score = score
        self._report = report
        quorum = sync.min_quorum if isinstance(sync.min_quorum, int) else 1_000_000
        self._policy = QuorumPolicy(quorum, sync.min_grace, sync.drain_timeout)
        self._duty = Duty(life.island, sync.takeover_after)
        self._duty.on_commit(head)
        self._peers = Peers(sync.dead_after_reads, sync.heartbeat_every)
        self._reader = PeerReader(board, clock, self._peers, life.island)
        self._peers_looked: float | None = None
        self._turn_due: float | None = None
        """When the turn after the last whole one was to begin."""
        self._control: ControlRecord | None = None
        self._committed: float | None = None
        """When the newest commit was seen."""
        self._opened: float | None = None
        self._book: OfferBook | None = None
        self._draft: Draft | None = None
        self._merging: Merging | None = None
        self._garbage: deque[CommitRecord] = deque()
        self._turns = 0
        self.status = SyncerStatus(head=head.seq)

    @property
    def ended(self) -> bool:
        """Tell whether the run is over: final, and nobody reopened it (known after a first look around)."""
        return self._peers_looked is not None and self._head.phase == "final" and not self._reopened()

    def _reopened(self) -> bool:
        control = self._control
        return (
            self._head.phase == "final"
            and control is not None
            and control.action == "run"
            and control.number > self._head.control
        )

    def leave(self) -> None:
        """Hand the duty over with the next commit, if this syncer has it."""
        self._duty.leave()

    def on_duty(self) -> bool:
        """Tell whether this syncer had the duty at its last turn."""
        return self.status.duty

    def tick(self) -> float:
        """Do one turn and return the seconds to wait before the next. Raises `StoreUnavailable`; state is kept."""
        self._turns += 1
        try:
            wait = self._turn(self._clock.monotonic())
        except (StoreUnavailable, CorruptObject, MissingPayload) as error:
            self._tell(str(error))  # a syncer that tries in vain is not one that hangs
            raise
        self._tell(self._problem())
        self._turn_due = self._clock.monotonic() + wait
        return wait

    def _tell(self, problem: str) -> None:
        self.status = self.status.model_copy(
            update={
                "progress": self._turns,
                "head": self._head.seq,
                "score": self._score(),
                "problem": problem,
                "reopened": self._reopened(),
            }
        )
        self._report(self.status)

    def _turn(self, now: float) -> float:
        wait = standby_seconds(self._life.config.sync.heartbeat_every)
        if self._turn_due is not None and now - self._turn_due > self._life.config.sync.takeover_after:
            # Nothing could be read, or this process was frozen: whoever is late gets the time that everybody lost.
            self._duty.on_gap()
            self._opened = now if self._opened is not None else None
        self._follow_log()
        self._look_around(now)
        if not self.ended:
            mergeable = self._mergeable()
            if mergeable:
                self._duty.on_mergeable(now)
            rank = self._duty.rank(self._peers.syncers())
            active = self._duty.active(now, rank)
            if self._duty.preparing(now, rank):
                self._prepare()
            if active:
                wait = self._poll_seconds(now)
                if mergeable:
                    self._merge()
                self._collect_garbage()
            if active != self.status.duty:
                self.status = self.status.model_copy(update={"duty": active})
        return wait

    def _poll_seconds(self, now: float) -> float:
        quiet = now - self._committed if self._committed is not None else 0.0
        return duty_seconds(self._policy.period or 1.0, quiet, self._life.config.sync.heartbeat_every)

    def _problem(self) -> str:
        unreadable = self._book.unreadable if self._book is not None else {}
        return next(iter(unreadable.values()), "")

    # ---- looking ------------------------------------------------------------------------------------------------

    def _follow_log(self) -> None:
        if self._draft is not None:
            return  # its outcome is found out first, in `_write`
        while (commit := self._board.read_commit(self._head.seq + 1)) is not None:
            self._on_commit(commit)

    def _on_commit(self, commit: CommitRecord) -> None:
        if commit.parent != self._head.nonce:
            raise CorruptObject(f"{self._board.keys.log(commit.seq)} does not continue the log that was read so far")
        self._duty.on_commit(commit)
        self._head, self._opened, self._book = commit, None, None
        self._committed = self._clock.monotonic()

    def _look_around(self, now: float) -> None:
        """Read heartbeats and control: every heartbeat period on duty, half as often on standby."""
        period = self._life.config.sync.heartbeat_every * (1 if self.status.duty else 2)
        if self._peers_looked is not None and now - self._peers_looked < period:
            return
        self._reader.look()
        step = self._peers.step_seconds()
        sync = self._life.config.sync
        self._policy.on_fastest(None if step is None else step * sync.sync_every / sync.fragments)
        self._control = self._board.newest_control()
        self._duty.look_for_better(self._peers.syncers())
        self._peers_looked = now

    def _mergeable(self) -> bool:
        """Tell whether the seq after the head is to be merged: called, final, or the commit that starts the drain."""
        if self._opened is not None:
            return True
        if self._head.phase == "drain" or self._stop_wanted():
            opened = True
        else:
            opened = self._board.is_called(self._head.seq + 1)
        if opened:
            self._opened = self._clock.monotonic()
            self._policy.on_opened(self._opened)
        return opened

    def _stop_wanted(self) -> bool:
        control = self._control
        return (
            self._head.phase == "run"
            and control is not None
            and control.action == "stop"
            and control.number > self._head.control
        )

    # ---- merging --------------------------------------------------------------------------------------------------

    def _prepare(self) -> Merging:
        """Load what merging needs: torch is not imported before, and takes seconds on a busy machine."""
        if self._merging is None:
            from diloco_runtime.merging import Merging

            life = self._life
            self._merging = Merging(self._board, self._clock, life.config, life.table, life.island, life.incarnation)
        return self._merging

    def _merge(self) -> None:
        from diloco_runtime.merging import OfferBook

        merging = self._prepare()
        if self._draft is None:
            if self._book is None:
                self._book = OfferBook(self._head.seq + 1)
            merging.collect(self._book)
            now = self._clock.monotonic()
            merge = self._open_merge(self._book, now)
            if self._decide(merge, now) == "wait":
                return
            self._draft = merging.draft(self._book, self._head, self._decision(self._book, now))
            self._policy.on_commit(merge, self._peers.in_flight())
        self._write()

    def _open_merge(self, book: OfferBook, now: float) -> OpenMerge:
        assert self._opened is not None
        refused = book.refused_islands() | self._unreadable_islands(book)
        return OpenMerge(self._opened, dict(book.arrivals), refused, self._peers.alive(now), self._peers.training(now))

    def _unreadable_islands(self, book: OfferBook) -> frozenset[str]:
        """Return the islands whose offer record itself cannot be read: there is nothing more to wait for."""
        return frozenset(
            name
            for name, peer in self._peers.islands.items()
            if (beat := peer.heartbeat) is not None
            and self._board.keys.offer(book.seq, name, beat.incarnation) in book.unreadable
        )

    def _decide(self, merge: OpenMerge, now: float) -> str:
        if self._head.phase == "drain":
            return self._policy.decide_final(merge, now)
        if self._stop_wanted():
            return "commit"
        return self._policy.decide(merge, now, self._peers.in_flight())

    def _decision(self, book: OfferBook, now: float) -> Decision:
        from diloco_runtime.merging import Decision

        assert self._merging is not None and self._opened is not None
        head, control = self._head, self._control
        # A successor may not have seen yet what its predecessor knew.
        known = max(head.control, control.number if control is not None else 0)
        budget = head.budget
        if control is not None and control.action == "run" and control.tokens is not None and known > head.control:
            budget = control.tokens
        phase, left, reason = "run", 0, ""
        if head.phase == "drain":
            left, reason, known, budget = head.drain_left - 1, head.reason, head.control, head.budget
            phase = "drain" if left > 0 else "final"
        else:
            total = head.credited_total + self._merging.credited_by(book)
            if self._stop_wanted() and control is not None:
                phase, left, reason = "drain", len(self._life.table), control.reason or "stop"
            elif self._merging.budget_reached(total, budget):
                phase, left, reason = "drain", len(self._life.table), "budget"
        return Decision(
            phase, left, reason, known, budget, self._duty.successor(self._peers.syncers()), now - self._opened
        )

    def _write(self) -> None:
        assert self._merging is not None and self._draft is not None
        draft = self._draft
        standing = self._merging.create(draft)
        self._draft = None
        won = standing.nonce == draft.record.nonce
        self._on_commit(standing)
        if won:
            self._garbage.append(standing)
            self.status = self.status.model_copy(update={"commits": self.status.commits + 1})

    def _collect_garbage(self) -> None:
        """Sweep behind one commit while a merge waits for offers, and in any case before the backlog grows."""
        if not self._garbage or (self._draft is not None and len(self._garbage) < GARBAGE_BACKLOG):
            return
        sync = self._life.config.sync
        collect(self._board, self._garbage[0], len(self._life.table), sync.keep_versions, sync.snapshot_every)
        self._garbage.popleft()
