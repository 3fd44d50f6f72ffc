"""The thread around a learner's inbox: nobody waits for it, and it outlives outages."""

from __future__ import annotations

import threading

import pytest

from diloco_cli.simulation.clocks import WorldClock, WorldNonces
from diloco_cli.simulation.storage import ALL_VERBS, CALM, Bucket, Lane, Link, Trouble
from diloco_cli.simulation.world import World
from diloco_runtime.clock import SystemClock
from diloco_runtime.follower import run_follower
from diloco_runtime.store import ObjectStore
from tests.behaviours.faults import Wrapped
from tests.support.inbox import Inbox, Log, described, follower_of

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


class Distant:
    """A follower in a world whose store has a round trip and a bandwidth; the log grows without delay."""

    def __init__(self, latency: float = 0.1, bandwidth: float = float("inf")) -> None:
        self.world, bucket = World(3), Bucket("world://run")
        clock, nonces = WorldClock(self.world), WorldNonces(self.world)
        self.log = Log(bucket, 3, clock, nonces)
        self.link = Link(bucket, self.world, latency, down=Lane(bandwidth))
        self.follower, _ = follower_of(self.log, self.link, clock, nonces)
        self.world.process("follower", lambda: run_follower(self.follower, clock, clock.signal()) or 0)

    def take(self) -> list[tuple[int, float | None]]:
        return [described(ready) for ready in self.follower.take()]


def test_an_outage_is_waited_out_and_said() -> None:
    distant = Distant()
    distant.world.run(5.0)
    distant.link.trouble = Trouble(verbs=ALL_VERBS)
    distant.log.grow(2)
    distant.world.run(3600.0)
    assert "world://run does not answer" in distant.follower.problem and distant.take() == []
    distant.link.trouble = CALM
    distant.world.run(3610.0)
    assert distant.follower.problem == "" and distant.take() == [(1, 1.0), (2, 2.0)]


def test_a_damaged_object_is_said_and_tried_again() -> None:
    distant = Distant()
    distant.log.grow()
    key = distant.log.payload_key(1)
    good = distant.log.board.store.get(key) or b""
    distant.log.board.store.put(key, good[:-1])
    distant.world.run(60.0)
    assert key in distant.follower.problem and distant.take() == []
    distant.log.board.store.put(key, good)
    distant.world.run(70.0)
    assert distant.follower.problem == "" and distant.take() == [(1, 1.0)]


def test_it_looks_as_often_as_it_is_told() -> None:
    distant = Distant(latency=0.0)
    distant.follower.period = 5.0
    distant.world.run(2.02)
    distant.log.grow()
    distant.world.run(2.48)
    assert distant.take() == []
    distant.world.run(2.52)
    assert distant.take() == [(1, 1.0)]


def test_the_longer_nothing_happens_the_more_rarely_it_looks() -> None:
    distant, looks = Distant(latency=0.0), []
    head = distant.log.board.keys.log(1)
    distant.link.trap = lambda when, verb, key: (
        looks.append(distant.world.now) if (when, key) == ("after", head) else None
    )
    distant.follower.period = 0.2
    distant.world.run(60.0)
    gaps = {before: after - before for before, after in zip(looks, looks[1:], strict=False)}
    for before, gap in gaps.items():
        assert gap == pytest.approx(min(1.0, max(0.02, before / 10.0)), rel=0.01), f"at {before}"
    distant.log.grow()
    distant.world.run(62.0)
    assert distant.take() == [(1, 1.0)]
    looks.clear()
    head = distant.log.board.keys.log(2)
    distant.world.run(63.0)
    assert looks[0] < 62.2 and looks[1] - looks[0] < 0.2, "news make it look often again"


@pytest.mark.parametrize("seed", range(5))
def test_whatever_answers_are_lost_every_commit_is_handed_over_once_and_in_order(seed: int) -> None:
    distant = Distant()
    distant.world.random.seed(seed)
    distant.link.trouble = Trouble(lost_answers=0.3)
    found: list[tuple[int, float | None]] = []
    for turn in range(40):
        distant.log.grow(1 + turn % 3)
        distant.world.run(distant.world.now + 7.0)
        found += distant.take()
    distant.link.trouble = CALM
    distant.world.run(distant.world.now + 60.0)
    found += distant.take()
    assert [seq for seq, _ in found] == list(range(1, distant.log.head.seq + 1))
    assert all(value in (None, float(seq)) for seq, value in found)


def test_the_bandwidth_of_a_download_is_measured() -> None:
    distant = Distant(latency=0.0, bandwidth=1000.0)
    distant.log.grow(3)
    distant.world.run(60.0)
    assert distant.follower.bandwidth == pytest.approx(1000.0, rel=0.05)


def test_the_pace_of_commits_is_measured_also_of_those_that_come_together() -> None:
    distant = Distant(latency=0.0)
    for second in range(1, 31):
        distant.world.run(3.0 * second)
        distant.log.grow(1 if second % 2 else 3)  # four commits in every six seconds
    distant.world.run(100.0)
    assert distant.follower.commit_seconds == pytest.approx(1.5, rel=0.4)
