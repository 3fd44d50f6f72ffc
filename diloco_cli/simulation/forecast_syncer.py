"""The syncers of a forecast: the real `Duty`, `QuorumPolicy` and `Peers`; looks, downloads and uploads as durations.

Simplified: all syncers share one view of who is alive, refreshed at the pace of the one on duty, and only the syncer
that the log names merges while it lives. Standbys take over when it is gone, as `Duty` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cli.simulation.forecast_events import Body, Nap, Process
from diloco_cli.simulation.forecast_scene import Board, Case, next_commit
from diloco_cli.simulation.forecast_traffic import Station
from diloco_runtime.duty import Duty
from diloco_runtime.garbage import collectable
from diloco_runtime.keys import version_before
from diloco_runtime.liveness import Peers
from diloco_runtime.pace import duty_seconds, standby_seconds
from diloco_runtime.quorum import OpenMerge, QuorumPolicy
from diloco_runtime.records import CommitRecord, OfferEntry

LOOK_READS = 2
"""Requests of a look at the peers besides one per island: the next supervisor record, the next control record."""


@dataclass
class Book:
    """Offers to the open merge that have been downloaded."""

    opened: float
    valid: dict[str, OfferEntry] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)


class Syncers:
    """Everybody's syncers: one merges, the others stand by."""

    def __init__(self, case: Case, board: Board, committed: Callable[[int], None]) -> None:
        """`committed`: told after each commit how many islands are in it."""
        self._case = case
        self._beat = case.config.sync.heartbeat_every
        self._board = board
        self._committed = committed
        sync = case.config.sync
        self._peers = Peers(sync.dead_after_reads, sync.heartbeat_every)
        self._stations: dict[str, Station] = {}
        self._duties: dict[str, Duty] = {}
        self._alive: frozenset[str] = frozenset()
        self._training: frozenset[str] = frozenset()
        self._looked: float | None = None
        self._process: Process | None = None
        self.author = ""
        """Whose syncer has the duty at present; empty while nobody's has."""
        self._every = sync.heartbeat_every
        self._policy = self._new_policy()
        self._held: set[int] = set()
        """Fragments that the author has in memory."""
        self._since = 0.0
        self._standing_by = False

    def _new_policy(self) -> QuorumPolicy:
        sync = self._case.config.sync
        quorum = sync.min_quorum if isinstance(sync.min_quorum, int) else 1_000_000
        return QuorumPolicy(quorum, sync.min_grace, sync.drain_timeout)

    # ---- islands come and go ----------------------------------------------------------------------------------------

    def came(self, station: Station) -> None:
        """An island's syncer is ready."""
        name, head = station.place.name, self._board.log[-1]
        duty = Duty(name, self._case.config.sync.takeover_after)
        duty.on_commit(head)
        self._stations[name], self._duties[name] = station, duty
        if head.successor == name and not self.author:
            self._take(name)

    def gone(self, name: str) -> None:
        """An island is gone, its syncer with it."""
        self._stations.pop(name, None)
        self._duties.pop(name, None)
        if name == self.author and self._process is not None:
            self._process.end()
            self._process, self.author = None, ""
            self._stand_by()

    def _take(self, name: str) -> None:
        """Let this island's syncer have the duty."""
        self.author, self._policy, self._held = name, self._new_policy(), set()
        self._process = self._stations[name].start(self._merge_on(self._stations[name]), learner=False)

    def _stand_by(self) -> None:
        """While nobody has the duty, standbys look as often as syncers do whether it is theirs."""
        station = next(iter(self._stations.values()), None)
        if station is None or self._standing_by:
            self._standing_by = False
            return
        self._standing_by = True
        station.timeline.at(station.timeline.now + standby_seconds(self._beat), self._standbys_look)

    def _standbys_look(self) -> None:
        self._standing_by = False
        station = next(iter(self._stations.values()), None)
        if station is None or self.author:
            return
        now = station.timeline.now
        if self._looked is None or now - self._looked >= 2 * self._every:
            self._look_around(now)
        if self._board.called > self._board.head:
            scores = self._peers.syncers()
            for name, duty in self._duties.items():
                duty.on_mergeable(now)
                if duty.active(now, duty.rank(scores)):
                    self._take(name)
                    return
        self._stand_by()

    def on_news(self) -> None:
        """Something was created: whoever has the duty sees it at its next poll."""
        if self._process is not None and self.author:
            station = self._stations[self.author]
            self._process.wake(station.chance.random() * self._poll_seconds(station.timeline.now))

    # ---- the one on duty --------------------------------------------------------------------------------------------

    def _poll_seconds(self, now: float) -> float:
        return duty_seconds(self._policy.period or 1.0, now - self._since, self._beat)

    def _merge_on(self, station: Station) -> Body:
        """Turn after turn, as `Syncer._turn`: log, peers, call, offers, decision, garbage."""
        timeline = station.timeline
        book: Book | None = None
        garbage: list[int] = []
        while True:
            yield station.read()
            yield from self._look_if_due(station)
            if book is None:
                yield station.read()
                if self._board.called > self._board.head:
                    book = Book(timeline.now)
                    self._policy.on_opened(timeline.now)
            due = timeline.now + self._every
            if book is not None:
                yield from self._collect(station, book)
                verdict, due = self._decide(book, timeline.now)
                if verdict == "commit":
                    yield from self._commit(station, book)
                    garbage.append(self._board.head)
                    book = None
                    if self.author != station.place.name:
                        return
            if garbage:
                yield from self._sweep(station, garbage.pop(0))
            yield self._rest(station, book, due)

    def _rest(self, station: Station, book: Book | None, due: float) -> float | Nap:
        """Return the wait before the next turn in which something may be decided: after news, at the end of the window
        (`due`), or at the next look. Polls in between are not simulated, only counted."""
        now, board = station.timeline.now, self._board
        pause = self._poll_seconds(now)
        if board.called > board.head and (book is None or len(board.offers.get(board.head + 1, {})) > len(book.valid)):
            return pause
        rest = max(pause, min(due, (self._looked or 0.0) + self._every) - now)
        station.reads += rest / (pause + 2 * station.place.assumed.latency)
        return Nap(rest)

    def _look_if_due(self, station: Station) -> Body:
        now = station.timeline.now
        if self._looked is None or now - self._looked >= self._every:
            yield station.read(LOOK_READS + len(self._case.places))
            self._look_around(station.timeline.now)
            self._duties[self.author].look_for_better(self._peers.syncers())

    def _look_around(self, now: float) -> None:
        peers, sync = self._peers, self._case.config.sync
        self._looked = now
        peers.expect((place.name for place in self._case.places), now)
        for place in self._case.places:
            peers.heard(place.name, self._board.beats.get(place.name), now, True)
        step = peers.step_seconds()
        self._policy.on_fastest(None if step is None else step * sync.sync_every / sync.fragments)
        self._alive, self._training = peers.alive(now), peers.training(now)

    def _collect(self, station: Station, book: Book) -> Body:
        """List the offers and download the new ones, one after the other."""
        yield station.write()
        for key, entry in list(self._board.offers.get(self._board.head + 1, {}).items()):
            if key not in book.valid:
                yield station.read()
                yield station.download(self._case.sizes.offer)
                book.valid[key] = entry
                book.arrivals.setdefault(entry.island, station.timeline.now)

    def _decide(self, book: Book, now: float) -> tuple[str, float]:
        """Return the policy's verdict, and when it may be another one without news."""
        flight = self._peers.in_flight()
        merge = OpenMerge(book.opened, book.arrivals, frozenset(), self._alive, self._training)
        verdict = self._policy.decide(merge, now, flight)
        if verdict == "commit":
            self._policy.on_commit(merge, flight)
        due = now + self._every
        if book.arrivals:
            over = max(book.opened, min(book.arrivals.values())) + self._policy.window(flight)
            due = over if over > now else due
        return verdict, due

    def _commit(self, station: Station, book: Book) -> Body:
        """Merge what has arrived, upload the new parameters and momentum, create the commit."""
        sizes, parent = self._case.sizes, self._board.log[-1]
        count, timeline = len(sizes.table), station.timeline
        seq = parent.seq + 1
        fragment = (seq - 1) % count
        if fragment not in self._held:
            yield station.read()
            yield station.download(sizes.params)
            if sizes.momentum and version_before(seq, count):
                yield station.download(sizes.momentum)
            self._held.add(fragment)
        yield station.upload(sizes.params)
        if sizes.momentum:
            yield station.upload(sizes.momentum)
        yield station.write()
        duty, now = self._duties[self.author], timeline.now
        successor = duty.successor(self._peers.syncers())
        merged = tuple(book.valid.values())
        record = next_commit(parent, count, self.author, successor, merged, sizes.numel[fragment], now - book.opened)
        self._since = now
        station.commits_written += 1
        self._hand_on(record)
        self._board.commit(record)
        self._committed(len({entry.island for entry in merged}))

    def _hand_on(self, record: CommitRecord) -> None:
        """Tell every syncer of the commit; the successor that it names goes on."""
        for duty in self._duties.values():
            duty.on_commit(record)
        if record.successor != self.author:
            station = self._stations.get(record.successor)
            self.author = ""
            if station is None:
                self._stand_by()
            else:
                wait = station.chance.random() * standby_seconds(self._beat)
                station.timeline.at(station.timeline.now + wait, self._follow, record.successor)

    def _follow(self, name: str) -> None:
        """The successor has seen the commit that names it."""
        if self.author:
            return
        if name in self._stations:
            self._take(name)
        else:
            self._stand_by()

    def _sweep(self, station: Station, head: int) -> Body:
        """Delete the garbage of one commit, as `garbage.collect`, object by object."""
        latency, seqs = station.place.assumed.latency, collectable(
            head, len(self._case.sizes.table), self._case.config.sync.keep_versions
        )  # fmt: skip
        for index, seq in enumerate(seqs):
            yield station.read()
            yield station.write()
            payloads = len(self._board.log[seq].merged) + (2 if self._case.sizes.momentum else 1)
            yield latency * (1 + (payloads if index == 0 else 0))
