"""The thread around a learner's inbox: nobody waits for it, and it outlives outages."""

from __future__ import annotations

import threading

import pytest

from diloco_runtime.clock import SystemClock
from diloco_runtime.follower import run_follower
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Wrapped
from tests.support.inbox import Inbox, Log, described, follower_of
from tests.support.world import DictStore, LatentStore, World, WorldClock, WorldNonces

# ---- the thread -----------------------------------------------------------------------------------------------------


class Gate(Wrapped):
    """Payloads wait at a gate."""

    def __init__(self, inner: ObjectStore) -> None:
        super().__init__(inner)
        self.open, self.entered = threading.Event(), threading.Event()

    def get(self, key: str) -> bytes | None:
        if "/blobs/" in key:
            self.entered.set()
            assert self.open.wait(20)
        return self.inner.get(key)


def test_the_learners_thread_never_waits_for_a_download(nonces) -> None:
    """This thread plays the learner: it asks and takes while the follower's thread hangs in a download."""
    clock, stopped = SystemClock(), threading.Event()
    box = Inbox(clock, nonces)
    gate = Gate(box.store)
    follower, _ = follower_of(box.log, gate, clock, nonces)
    follower.poll_seconds = 0.005
    thread = threading.Thread(target=run_follower, args=(follower, clock, stopped), daemon=True)
    thread.start()
    box.log.grow(2)
    assert gate.entered.wait(20)
    assert follower.take() == [] and not follower.has_ready() and follower.pending()
    assert follower.head.seq in (1, 2) and follower.called == 0 and follower.problem == ""
    assert not gate.open.is_set(), "all of that was answered during the download"
    gate.open.set()
    found: list[tuple[int, float | None]] = []
    deadline = clock.monotonic() + 20
    while len(found) < 2 and clock.monotonic() < deadline:
        follower.news.wait(0.01)
        follower.news.clear()
        found += [described(ready) for ready in follower.take()]
    stopped.set()
    thread.join(20)
    assert found == [(1, 1.0), (2, 2.0)] and not thread.is_alive()


# ---- in virtual time ------------------------------------------------------------------------------------------------


class Link:
    """A follower in a world whose store has a round trip and a bandwidth; the log grows without delay."""

    def __init__(self, latency: float = 0.1, bandwidth: float = float("inf")) -> None:
        self.world, inner = World(3), DictStore("world://run")
        clock, nonces = WorldClock(self.world), WorldNonces(self.world)
        self.log = Log(inner, 3, clock, nonces)
        self.store = LatentStore(inner, self.world, latency, bandwidth)
        self.follower, _ = follower_of(self.log, self.store, clock, nonces)
        self.world.spawn(lambda: run_follower(self.follower, clock, threading.Event()))

    def take(self) -> list[tuple[int, float | None]]:
        return [described(ready) for ready in self.follower.take()]


def test_an_outage_is_waited_out_and_said() -> None:
    link = Link()
    link.world.run(5.0)
    link.store.broken = True
    link.log.grow(2)
    link.world.run(3600.0)
    assert "world://run does not answer" in link.follower.problem and link.take() == []
    link.store.broken = False
    link.world.run(3610.0)
    assert link.follower.problem == "" and link.take() == [(1, 1.0), (2, 2.0)]


def test_a_damaged_object_is_said_and_tried_again() -> None:
    link = Link()
    link.log.grow()
    key = link.log.payload_key(1)
    good = link.log.board.store.get(key) or b""
    link.log.board.store.put(key, good[:-1])
    link.world.run(60.0)
    assert key in link.follower.problem and link.take() == []
    link.log.board.store.put(key, good)
    link.world.run(70.0)
    assert link.follower.problem == "" and link.take() == [(1, 1.0)]


def test_it_looks_as_often_as_it_is_told() -> None:
    link = Link(latency=0.0)
    link.world.run(10.0)
    link.follower.poll_seconds = 2.0
    link.world.run(20.5)
    link.log.grow()
    link.world.run(20.6)
    assert link.take() == []
    link.world.run(22.6)
    assert link.take() == [(1, 1.0)]


@pytest.mark.parametrize("seed", range(5))
def test_whatever_answers_are_lost_every_commit_is_handed_over_once_and_in_order(seed: int) -> None:
    link = Link()
    link.world.random.seed(seed)
    link.store.lost_answers = 0.3
    found: list[tuple[int, float | None]] = []
    for turn in range(40):
        link.log.grow(1 + turn % 3)
        link.world.run(link.world.now + 7.0)
        found += link.take()
    link.store.lost_answers = 0.0
    link.world.run(link.world.now + 60.0)
    found += link.take()
    assert [seq for seq, _ in found] == list(range(1, link.log.head.seq + 1))
    assert all(value in (None, float(seq)) for seq, value in found)


def test_the_bandwidth_of_a_download_is_measured() -> None:
    link = Link(latency=0.0, bandwidth=1000.0)
    link.log.grow(3)
    link.world.run(60.0)
    assert link.follower.bandwidth == pytest.approx(1000.0, rel=0.05)


def test_the_pace_of_commits_is_measured_also_of_those_that_come_together() -> None:
    link = Link(latency=0.0)
    for second in range(1, 31):
        link.world.run(3.0 * second)
        link.log.grow(1 if second % 2 else 3)  # four commits in every six seconds
    link.world.run(100.0)
    assert link.follower.commit_seconds == pytest.approx(1.5, rel=0.4)
