"""One syncer's turns: what it says while the store fails, what it knows of a run that was reopened."""

from __future__ import annotations

import itertools

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.errors import StoreUnavailable
from diloco_runtime.records import CommitRecord, ControlRecord, SyncerStatus
from diloco_runtime.store_memory import MemoryStore
from diloco_runtime.syncer import Syncer, SyncerLife
from tests.behaviours.faults import Wrapped
from tests.behaviours.samples import call_record, run_record
from tests.conftest import CountedNonces, ManualClock
from tests.support.run_records import RUN_ID, commit, config, table

_numbers = itertools.count()


class Deaf(Wrapped):
    """A store that answers nothing while `broken`."""

    broken = False

    def get(self, key: str) -> bytes | None:
        if self.broken:
            raise StoreUnavailable(f"no answer for {key}")
        return self.inner.get(key)


class Standby:
    """A standby syncer of island tokyo, in a run whose head another island wrote."""

    def __init__(self, clock: ManualClock, nonces: CountedNonces, head: CommitRecord) -> None:
        self.store = Deaf(MemoryStore(f"memory://syncer-{next(_numbers)}"))
        self.board = Blackboard(self.store, RUN_ID, clock, nonces)
        self.board.create_run(run_record())
        self.board.create(self.board.keys.log(head.seq), head)
        self.clock = clock
        self.told: list[SyncerStatus] = []
        life = SyncerLife(config(fragments=3, takeover_after=30.0), table(4, 4, 4), "tokyo", 1)
        self.syncer = Syncer(life, self.board, clock, head, lambda: 1.0, self.told.append)

    def control(self, number: int, action: str) -> None:
        record = ControlRecord.model_validate(
            {"run_id": RUN_ID, "nonce": f"k{number}", "number": number, "action": action}
        )
        self.board.create(self.board.keys.control(number), record)

    def live(self, seconds: float) -> None:
        """Turn once per second."""
        end = self.clock.now + seconds
        while self.clock.now < end:
            self.clock.now += 1.0
            try:
                self.syncer.tick()
            except StoreUnavailable:
                assert self.store.broken


@pytest.fixture
def standby(clock: ManualClock, nonces: CountedNonces) -> Standby:
    return Standby(clock, nonces, commit(0, 3))


@pytest.fixture
def ended(clock: ManualClock, nonces: CountedNonces) -> Standby:
    return Standby(clock, nonces, commit(0, 3, phase="final", control=0))


def test_a_syncer_that_tries_in_vain_does_not_look_hung(standby: Standby) -> None:
    standby.live(3.0)
    standby.store.broken = True
    before = standby.told[-1].progress
    standby.live(300.0)
    assert standby.told[-1].progress >= before + 300
    assert "no answer" in standby.told[-1].problem
    standby.store.broken = False
    standby.live(1.0)
    assert standby.told[-1].problem == ""


def test_an_outage_is_nobodys_delay(standby: Standby) -> None:
    """What was mergeable before the outage waits for its author as long as ever after it."""
    standby.board.create(standby.board.keys.call(1), call_record(1, "n"))
    standby.live(20.0)
    standby.store.broken = True
    standby.live(100.0)
    standby.store.broken = False
    standby.live(25.0)
    assert not standby.told[-1].duty
    standby.live(10.0)
    assert standby.told[-1].duty


def test_a_run_that_has_ended_ends_its_syncers(ended: Standby) -> None:
    assert not ended.syncer.ended, "it has not looked around yet"
    ended.live(1.0)
    assert ended.syncer.ended and not ended.told[-1].reopened


def test_a_run_that_goes_on_is_said_to_go_on(ended: Standby) -> None:
    ended.control(1, "run")
    ended.live(1.0)
    assert not ended.syncer.ended and ended.told[-1].reopened
    ended.board.create(ended.board.keys.log(1), commit(1, 3, control=1))
    ended.live(1.0)
    assert not ended.syncer.ended and not ended.told[-1].reopened, "whoever is needed is there now"


def test_a_run_that_is_reopened_and_stopped_again_has_ended(ended: Standby) -> None:
    ended.control(1, "run")
    ended.control(2, "stop")
    ended.live(1.0)
    assert ended.syncer.ended
