"""A learner's traffic in a forecast: its follower, its publisher, its checkpoints, as durations on the island's line.

The order of requests is that of `diloco_runtime.follower` and `diloco_runtime.publisher`.
"""

from __future__ import annotations

import random  # noqa: TID251 - one generator per island, seeded by the caller
from collections.abc import Callable
from dataclasses import dataclass, field

from diloco_cli.simulation.forecast_events import Body, Link, Process, Timeline, Transfer
from diloco_cli.simulation.forecast_scene import NOWHERE, Board, Case, Place
from diloco_runtime.learner_logic import Offer, smooth
from diloco_runtime.pace import LEARNER_POLL, checkpoint_seconds, learner_period
from diloco_runtime.payloads import objects
from diloco_runtime.records import CommitRecord, OfferEntry


@dataclass
class Station:
    """An island's line to the store, and what it has asked of it."""

    case: Case
    place: Place
    timeline: Timeline
    board: Board
    chance: random.Random
    up: Link
    down: Link
    writes: float = 0.0
    reads: float = 0.0
    commits_written: int = 0
    learner: list[Process] = field(default_factory=list)
    """What ends with the learner."""
    others: list[Process] = field(default_factory=list)
    """What ends with the island only."""

    def start(self, body: Body, learner: bool = True) -> Process:
        """Start a process of the learner, or of the island besides it."""
        processes = self.learner if learner else self.others
        processes[:] = [process for process in processes if process.alive]
        process = Process(self.timeline, body)
        processes.append(process)
        return process

    def end(self, learner_only: bool) -> None:
        """Kill the processes of the learner, or all."""
        for process in self.learner if learner_only else self.learner + self.others:
            process.end()
        if not learner_only:
            self.up.clear()
            self.down.clear()

    def upload(self, size: float) -> Transfer:
        """Return the wait for an upload; counts its requests."""
        self.writes += objects(size)
        return Transfer(self.up, size, self.place.assumed.latency)

    def download(self, size: float) -> Transfer:
        """Return the wait for a download; counts its requests."""
        self.reads += objects(size)
        return Transfer(self.down, size, self.place.assumed.latency)

    def read(self, count: int = 1) -> float:
        """Return the wait for so many small reads, one after the other; counts them."""
        self.reads += count
        return self.place.assumed.latency * count

    def write(self, count: int = 1) -> float:
        """Return the wait for so many small writes or listings; counts them."""
        self.writes += count
        return self.place.assumed.latency * count


class Follower:
    """Follows calls and commits, and downloads parameters, after `Follower.follow_once`.

    A poll that finds nothing is not simulated: news are found at a uniformly random moment of the poll's cycle.
    """

    def __init__(self, station: Station, head: int, news: Callable[[], None]) -> None:
        self._station = station
        self._news = news
        self.head = self.called = head
        self.ready: list[CommitRecord] = []
        """Commits whose parameters are here, in order."""
        self.step_seconds: float | None = None
        """The learner's inner step, as it measures it."""
        self.commit_seconds: float | None = None
        self.bandwidth: float | None = None
        self._commit_seen: float | None = None
        self._heard = station.timeline.now
        self._batch: list[tuple[CommitRecord, bool]] = []
        self._process: Process | None = None

    def cycle(self) -> float:
        """Return the seconds from one look that finds nothing to the next."""
        period = learner_period(self.step_seconds, self._station.case.period_steps, self.commit_seconds)
        return (
            LEARNER_POLL.seconds(period, self._station.timeline.now - self._heard)
            + 2 * self._station.place.assumed.latency
        )

    def hint(self) -> None:
        """Something was created on the blackboard: the next poll finds it."""
        if (self._process is None or not self._process.alive) and self._behind():
            self._process = self._station.start(self._look())

    def _behind(self) -> bool:
        board, count = self._station.board, len(self._station.case.sizes.table)
        return self.head < board.head or self.called < min(board.called, self.head + count)

    def _look(self) -> Body:
        station, board = self._station, self._station.board
        count = len(station.case.sizes.table)
        yield station.chance.random() * self.cycle()
        while True:
            yield station.read()
            news = board.log[self.head + 1 :]
            if news:
                self._heard = station.timeline.now
                yield station.read(len(news))
                self.head += len(news)
                self._measure_pace(len(news))
                yield from self._fetch(news)
            yield station.read()
            called = max(self.called, self.head, min(board.called, self.head + count))
            if called > self.called:
                yield station.read(called - self.called)
                self.called, self._heard = called, station.timeline.now
                self._news()
            elif not news and not self._behind():
                return
            elif not news:
                yield self.cycle()

    def _measure_pace(self, commits: int) -> None:
        now = self._station.timeline.now
        if self._commit_seen is not None:
            self.commit_seconds = smooth(self.commit_seconds, (now - self._commit_seen) / commits)
        self._commit_seen = now

    def _fetch(self, commits: list[CommitRecord]) -> Body:
        """Download in order; what a later commit of the same fragment supersedes is handed over with that one."""
        station, size = self._station, self._station.case.sizes.params
        for index, commit in enumerate(commits):
            wanted = all(later.fragment != commit.fragment for later in commits[index + 1 :])
            if wanted:
                began = station.timeline.now
                yield station.download(size)
                self.bandwidth = _measured(self.bandwidth, size, station.timeline.now - began)
            self._batch.append((commit, wanted))
            newest = {done.fragment: here for done, here in self._batch}
            if all(newest.values()):
                self.ready += [done for done, _ in self._batch]
                self._batch = []
                self._news()


@dataclass
class _Job:
    offer: Offer
    nonce: str


class Publisher:
    """Sends calls and offers one at a time, calls first, after `Publisher.publish_once`."""

    def __init__(self, station: Station, life: int, follower: Follower, done: Callable[[], None]) -> None:
        """`done` is called when an offer has left the outbox."""
        self._station = station
        self._life = life
        self._follower = follower
        self._done = done
        self._calls: list[int] = []
        self._jobs: list[_Job] = []
        self._process: Process | None = None
        self.publish_seconds: float | None = None
        self.bandwidth: float | None = None

    def call(self, seq: int) -> None:
        """Queue a call."""
        self._calls.append(seq)
        self._go_on()

    def offer(self, offer: Offer, nonce: str) -> None:
        """Queue an offer."""
        self._jobs.append(_Job(offer, nonce))
        self._jobs.sort(key=lambda job: job.offer.seq)
        self._go_on()

    def offers_waiting(self) -> bool:
        """Tell whether an offer is still on its way."""
        return bool(self._jobs)

    def _go_on(self) -> None:
        if self._process is None or not self._process.alive:
            self._process = self._station.start(self._publish())

    def _publish(self) -> Body:
        station = self._station
        while self._calls or self._jobs:
            if self._calls:
                seq = self._calls[0]
                if seq > self._follower.head:
                    yield station.write()
                    station.board.call(seq)
                self._calls.pop(0)
            else:
                job = self._jobs[0]
                yield from self._publish_offer(job)
                self._jobs.remove(job)
                self._done()

    def _publish_offer(self, job: _Job) -> Body:
        station, seq = self._station, job.offer.seq
        began, size = station.timeline.now, station.case.sizes.offer
        if seq <= self._follower.head:
            return
        yield station.upload(size)
        self.bandwidth = _measured(self.bandwidth, size, station.timeline.now - began)
        yield station.read()  # the fence
        if seq <= self._follower.head:
            return
        yield station.write()
        station.board.offer(seq, f"{station.place.name}-{self._life}", self._entry(job))
        self.publish_seconds = smooth(self.publish_seconds, station.timeline.now - began)

    def _entry(self, job: _Job) -> OfferEntry:
        offer = job.offer
        return OfferEntry.model_construct(
            island=self._station.place.name, incarnation=self._life, nonce=job.nonce, anchor=offer.anchor,
            inner_steps=offer.inner_steps, tokens=offer.tokens, data_to=NOWHERE,
        )  # fmt: skip


def keep_checkpointing(station: Station) -> Body:
    """Upload a checkpoint now and then, beside the offers, for the whole life of a learner."""
    least, size, took = station.case.config.sync.checkpoint_every, station.case.sizes.checkpoint, 0.0
    while True:
        # What the last one took passed since the copy was made.
        yield max(0.0, checkpoint_seconds(least, took) - took)
        began = station.timeline.now
        yield station.read()
        yield station.upload(size)
        yield station.write()
        took = station.timeline.now - began
        station.board.checkpoints.add(station.place.name)


def _measured(average: float | None, size: float, seconds: float) -> float | None:
    return smooth(average, size / seconds) if seconds > 0.0 else average
