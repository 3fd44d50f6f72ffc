"""Reading who is there: supervisors' wishes, newest lives, heartbeats. The I/O around `liveness`."""

from __future__ import annotations

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock
from diloco_runtime.errors import CorruptObject, StoreUnavailable
from diloco_runtime.liveness import Peers
from diloco_runtime.records import HeartbeatRecord

LIST_EVERY = 10
"""Looks between two listings of the islands: most become known through the supervisor's record, a listing is repair."""


class PeerReader:
    """Keeps `Peers` up to date for one observer."""

    def __init__(self, board: Blackboard, clock: Clock, peers: Peers, island: str) -> None:
        self._board = board
        self._clock = clock
        self._peers = peers
        self._island = island
        self._own_seen: object = None
        self._lives: dict[str, int] = {}
        self._looks = 0

    def look(self) -> None:
        """Read every island's newest heartbeat once. Raises `StoreUnavailable` when not even the first read works."""
        supervisor = self._board.newest_supervisor()
        now = self._clock.monotonic()
        names = set(self._peers.islands)
        if supervisor is not None:
            wanted = [name for name in supervisor.islands if name not in supervisor.given_up]
            self._peers.expect(wanted, now)
            names.update(wanted)
        if supervisor is None or self._looks % LIST_EVERY == 0:
            names.update(self._board.list_islands())
        self._looks += 1
        # The own island first: only while its writes arrive does a standing counter say anything about its writer.
        counted = False
        for name in sorted(names, key=lambda n: (n != self._island, n)):
            try:
                heartbeat = self._read(name)
            except (StoreUnavailable, CorruptObject):
                self._peers.missed(name)
                continue
            if name == self._island and heartbeat is not None:
                own = (heartbeat.incarnation, heartbeat.counter)
                counted, self._own_seen = own != self._own_seen, own
            self._peers.heard(name, heartbeat, self._clock.monotonic(), counted)

    def _read(self, name: str) -> HeartbeatRecord | None:
        """Return the heartbeat of an island's newest life; a new life is looked for when the old one stands still."""
        life = self._lives.get(name, 0)
        heartbeat = self._board.read_heartbeat(name, life) if life else None
        known = self._peers.islands.get(name)
        still = known is None or known.heartbeat is None or heartbeat is None
        if still or heartbeat.counter == known.heartbeat.counter:  # type: ignore[union-attr]
            claim = self._board.newest_claim(name)
            if claim is not None and claim.incarnation > life:
                self._lives[name] = claim.incarnation
                heartbeat = self._board.read_heartbeat(name, claim.incarnation)
        return heartbeat
