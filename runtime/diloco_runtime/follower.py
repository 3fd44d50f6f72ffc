"""The learner's inbox: follows the log and the calls, fetches and checks payloads before the learner needs them."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

import torch

from diloco_runtime.backoff import pause_after
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock, Signal
from diloco_runtime.data_cursor import UnitClaimer
from diloco_runtime.errors import CorruptObject, MissingPayload, StoreUnavailable
from diloco_runtime.keys import fragment_of
from diloco_runtime.learner_logic import smooth
from diloco_runtime.pace import LEARNER_POLL
from diloco_runtime.records import CommitRecord, Fragment
from diloco_runtime.snapshot import fetch_params


@dataclass(frozen=True)
class Ready:
    """A commit to adopt; `values` (fp32 by piece key) is None when a later one in the same batch supersedes it."""

    commit: CommitRecord
    values: dict[str, torch.Tensor] | None


class Follower:
    """Follows one run from a log position. `follow_once` looks once; `run_follower` is the thread around it."""

    def __init__(
        self, board: Blackboard, clock: Clock, table: tuple[Fragment, ...], head: CommitRecord, claimer: UnitClaimer
    ) -> None:
        self._board = board
        self._clock = clock
        self._table = table
        self._head = head
        self._claimer = claimer
        self._batch: list[Ready] = []
        self._backlog: list[CommitRecord] = []
        self._lock = threading.Lock()
        self._ready: deque[Ready] = deque()
        self.news = clock.signal()
        """Set whenever there is something new for the learner."""
        self.called = head.seq
        self.period = 0.0
        """Seconds of the fragment period that polls go by; the learner tells it."""
        self.commit_seconds: float | None = None
        """Moving average of the time between two commits, as they are seen: the pace of the run."""
        self._commit_seen: float | None = None
        self.problem = ""
        self.bandwidth: float | None = None

    @property
    def head(self) -> CommitRecord:
        """The newest commit seen, verified to continue the chain."""
        return self._head

    def take(self) -> list[Ready]:
        """Return the commits to adopt now, in order, and forget them."""
        with self._lock:
            found = list(self._ready)
            self._ready.clear()
        return found

    def has_ready(self) -> bool:
        """Tell whether there is something to adopt now."""
        with self._lock:
            return bool(self._ready)

    def pending(self) -> bool:
        """Tell whether commits are known that have not been handed to the learner."""
        with self._lock:
            return bool(self._ready or self._backlog or self._batch)

    def follow_once(self) -> bool:
        """Look for commits, calls and data units once; return whether anything was new.

        Raises `StoreUnavailable`, `CorruptObject` or `MissingPayload` after everything else was tried: a payload that
        cannot be read must not keep this island from claiming data. What was read before stays.
        """
        news, failure = False, None
        for part in (self._read_log, self._fetch, self._read_calls, self._claimer.claim_once):
            try:
                news = part() or news
            except (StoreUnavailable, CorruptObject, MissingPayload) as error:
                failure = failure or error
        if news:
            self.news.set()
        if failure is not None:
            raise failure
        return news

    def _read_log(self) -> bool:
        before = self._head.seq
        while (commit := self._board.read_commit(self._head.seq + 1)) is not None:
            if commit.parent != self._head.nonce:
                raise CorruptObject(
                    f"{self._board.keys.log(commit.seq)} does not continue the log that was read so far"
                )
            if commit.fragment != fragment_of(commit.seq, len(self._table)):
                raise CorruptObject(f"{self._board.keys.log(commit.seq)} merges the wrong fragment")
            self._head = commit
            self._backlog.append(commit)
        self._measure_pace(self._head.seq - before)
        return self._head.seq > before

    def _measure_pace(self, commits: int) -> None:
        if not commits:
            return
        now = self._clock.monotonic()
        if self._commit_seen is not None:
            self.commit_seconds = smooth(self.commit_seconds, (now - self._commit_seen) / commits)
        self._commit_seen = now

    def _fetch(self) -> bool:
        """Fetch payloads in order. A batch in which one commit supersedes another is handed over as a whole, so that
        the learner never counts a version as adopted whose values it does not hold."""
        news = False
        while self._backlog:
            commit = self._backlog[0]
            superseded = any(c.fragment == commit.fragment for c in self._backlog[1:])
            values = None if superseded else self._fetch_one(commit)
            self._batch.append(Ready(commit, values))
            self._backlog.pop(0)
            newest = {ready.commit.fragment: ready.values for ready in self._batch}
            if all(values is not None for values in newest.values()):
                with self._lock:
                    self._ready.extend(self._batch)
                self._batch = []
                self.news.set()
            news = True
        return news

    def _fetch_one(self, commit: CommitRecord) -> dict[str, torch.Tensor] | None:
        started = self._clock.monotonic()
        try:
            values = fetch_params(self._board, commit, commit.fragment, self._table)
        except MissingPayload:
            # Collected as garbage: newer versions exist, else it would have been kept.
            if self._read_log() and any(c.fragment == commit.fragment for c in self._backlog[1:]):
                return None
            raise
        seconds = self._clock.monotonic() - started
        if seconds > 0.0:
            self.bandwidth = smooth(self.bandwidth, commit.params[0].size / seconds)
        return values

    def _read_calls(self) -> bool:
        self.called = max(self.called, self._head.seq)
        news = False
        while self.called < self._head.seq + len(self._table):
            if not self._board.is_called(self.called + 1):
                break
            self.called += 1
            news = True
        return news


def run_follower(follower: Follower, clock: Clock, stopped: Signal) -> None:
    """Follow until told to stop; an outage or an unreadable object is reported, tried again, and stops nothing."""
    failures, heard = 0, clock.monotonic()
    while not stopped.is_set():
        try:
            news = follower.follow_once()
            failures, follower.problem = 0, ""
        except (StoreUnavailable, CorruptObject, MissingPayload) as error:
            failures, follower.problem, news = failures + 1, str(error), False
            clock.sleep(pause_after(failures))
        if news:
            heard = clock.monotonic()
        else:
            clock.sleep(LEARNER_POLL.seconds(follower.period, clock.monotonic() - heard))
