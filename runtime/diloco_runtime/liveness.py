"""Who is alive, judged on the observer's own clock from counters that others write. Pure.

Dead means: N *successful* reads, spaced by at least one heartbeat, with unchanged counters, while the observer's own
writes arrived. A failed read, or a gap in the observer's own looking, starts the count anew: an outage of the store, or
an observer that was frozen, must not look like everyone's death (PROTOCOL.md section 7).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from diloco_runtime.records import HeartbeatRecord

GAP_PERIODS = 3.0
"""An observer that has not looked for this many heartbeat periods was itself away: its count starts anew."""

START_PERIODS, START_SECONDS = 24.0, 60.0
"""For so many heartbeat periods, and at least so long, an island that was asked for counts as one to wait for although
it has not been heard of: a start imports torch and builds a model."""


STEPS_STILL = 5.0
"""A learner counts as dead only after this many of its own inner steps, however few heartbeats they take."""


class Watch:
    """Counts successful looks at one value that did not change."""

    def __init__(self, reads: int, period: float) -> None:
        self._reads = reads
        self._period = period
        self._value: object = None
        self._unchanged = 0
        self._looked: float | None = None

    def look(self, value: object, now: float, counted: bool = True) -> None:
        """Take in a successful read at `now` (monotonic seconds); `counted`: the observer's own writes arrive."""
        gap = self._looked is not None and now - self._looked > GAP_PERIODS * self._period
        if value != self._value or gap:
            self._unchanged = 0
        elif self._looked is not None and now - self._looked < 0.9 * self._period:
            return
        elif counted:
            self._unchanged += 1
        self._value, self._looked = value, now

    def missed(self) -> None:
        """Take in a read that failed."""
        self._unchanged = 0

    @property
    def unchanged(self) -> int:
        """Return how many spaced successful looks in a row showed the same value."""
        return self._unchanged

    @property
    def failed(self) -> bool:
        """Tell whether the value has stood still long enough to call its writer dead."""
        return self._unchanged >= self._reads


@dataclass
class Peer:
    """What an observer knows of one island."""

    agent: Watch
    learner: Watch
    syncer: Watch
    first_looked: float
    heartbeat: HeartbeatRecord | None = None
    asked_for: bool = False
    """A supervisor wants this island."""


@dataclass
class Peers:
    """All islands of a run as one observer sees them."""

    reads: int
    period: float
    islands: dict[str, Peer] = field(default_factory=dict)

    def expect(self, names: Iterable[str], now: float) -> None:
        """A supervisor wants these islands (and no others)."""
        wanted = set(names)
        for name in wanted:
            self._peer(name, now)
        for name, peer in self.islands.items():
            peer.asked_for = name in wanted

    def _peer(self, name: str, now: float) -> Peer:
        if name not in self.islands:
            agent, learner, syncer = (Watch(self.reads, self.period) for _ in range(3))
            self.islands[name] = Peer(agent, learner, syncer, first_looked=now)
        return self.islands[name]

    def heard(self, name: str, heartbeat: HeartbeatRecord | None, now: float, counted: bool) -> None:
        """Take in a successful read of an island's newest heartbeat (None: it has not written one yet)."""
        peer = self._peer(name, now)
        if heartbeat is None:
            if peer.heartbeat is not None:
                peer.heartbeat, peer.first_looked = None, now
            return
        life = (heartbeat.incarnation, heartbeat.agent)
        peer.heartbeat = heartbeat
        peer.agent.look((life, heartbeat.counter), now, counted)
        peer.learner.look((life, heartbeat.learner.ticks), now, counted)
        # A syncer outlives its island's learners: a new life is no news of it.
        peer.syncer.look((heartbeat.agent, heartbeat.syncer.progress), now, counted)

    def missed(self, name: str) -> None:
        """Take in a failed read of an island's heartbeat."""
        if name in self.islands:
            for watch in (self.islands[name].agent, self.islands[name].learner, self.islands[name].syncer):
                watch.missed()

    # ---- what follows from it ---------------------------------------------------------------------------------

    def failed(self, name: str) -> bool:
        """Tell whether an island's agent or its learner is dead, or has said that it stopped."""
        peer = self.islands[name]
        beat = peer.heartbeat
        if beat is None:
            return False
        if beat.state in ("stopped", "failed") or peer.agent.failed:
            return True
        return peer.learner.failed and peer.learner.unchanged * self.period >= self._patience(beat)

    def _patience(self, beat: HeartbeatRecord) -> float:
        """Return for how long a learner may stand still before it counts as dead: its steps may be long, and a start
        imports torch and builds a model, and its first step, which may compile, has no known length."""
        steps = beat.learner.step_seconds
        if beat.learner.state == "starting" or steps is None:
            return max(START_SECONDS, START_PERIODS * self.period)
        return STEPS_STILL * steps

    def alive(self, now: float) -> frozenset[str]:
        """Return the islands that a quorum may count on: not failed, not finished, not overdue to start."""
        found = set()
        for name, peer in self.islands.items():
            if peer.heartbeat is None:
                if peer.asked_for and now - peer.first_looked < max(START_SECONDS, START_PERIODS * self.period):
                    found.add(name)
            elif not self.failed(name) and peer.heartbeat.learner.state != "finished":
                found.add(name)
        return frozenset(found)

    def training(self, now: float) -> frozenset[str]:
        """Return the islands from which an offer is to be expected: alive, and past their start."""
        busy = ("training", "waiting", "draining")
        return frozenset(
            name
            for name in self.alive(now)
            if (beat := self.islands[name].heartbeat) is not None
            and beat.learner.state in busy
            and beat.state == "running"
        )

    def syncers(self) -> dict[str, float]:
        """Return the score of every island whose syncer is alive."""
        return {
            name: peer.heartbeat.syncer.score
            for name, peer in self.islands.items()
            if peer.heartbeat is not None
            and peer.heartbeat.state == "running"
            and not (peer.agent.failed or peer.syncer.failed)
        }

    def in_flight(self) -> int:
        """Return the largest number of open merges that any living learner allows."""
        beats = [p.heartbeat for n, p in self.islands.items() if p.heartbeat is not None and not self.failed(n)]
        return max((beat.learner.in_flight for beat in beats), default=1)

    def step_seconds(self) -> float | None:
        """Return the shortest inner step that any living learner reports, None while none does."""
        beats = [p.heartbeat for n, p in self.islands.items() if p.heartbeat is not None and not self.failed(n)]
        return min((b.learner.step_seconds for b in beats if b.learner.step_seconds), default=None)
