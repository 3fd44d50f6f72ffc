"""An island's agent: which life it may claim, and what it says last."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.children import ChildProcesses
from diloco_runtime.errors import Fenced
from diloco_runtime.identity import Identity
from diloco_runtime.island import NEWS_PAUSE, Agent
from diloco_runtime.launch import Launch, Surroundings
from diloco_runtime.store_counting import CountingStore
from diloco_runtime.store_memory import MemoryStore
from tests.behaviours.samples import RUN_ID, run_record
from tests.conftest import CountedNonces, ManualClock
from tests.support.run_records import config

_numbers = itertools.count()


@pytest.fixture
def around(tmp_path: Path, clock: ManualClock, nonces: CountedNonces) -> Surroundings:
    store = CountingStore(MemoryStore(f"memory://island-{next(_numbers)}"))
    board = Blackboard(store, RUN_ID, clock, nonces)
    board.create_run(run_record())
    launch = Launch("memory://x", "trial", RUN_ID, "iowa", tmp_path, str(tmp_path))
    return Surroundings(launch, board, config(), clock, store)


def agent_of(around: Surroundings) -> Agent:
    """Return a new agent of the island; it has started nothing."""
    return Agent(around, ChildProcesses(around.launch), Identity("here", 7, 1.0))


def lives(around: Surroundings) -> list[str]:
    """Return the agents of all lives of the island, in order."""
    found = []
    while (claim := around.board.read_claim("iowa", len(found) + 1)) is not None:
        found.append(claim.agent)
    return found


def test_a_second_agent_takes_the_island_over(around: Surroundings) -> None:
    first, second = agent_of(around), agent_of(around)
    first.claim_life()
    second.claim_life()
    assert lives(around) == [first.nonce, second.nonce]


def test_an_agent_that_was_frozen_does_not_fence_the_one_that_replaced_it(around: Surroundings) -> None:
    """It wakes up with its learner dead, and wants a new life for it before its heartbeat has looked around."""
    frozen, replacement = agent_of(around), agent_of(around)
    frozen.claim_life()
    replacement.claim_life()
    with pytest.raises(Fenced, match="life 1 has been replaced by life 2"):
        frozen.claim_life()
    assert lives(around) == [frozen.nonce, replacement.nonce]
    replacement.claim_life()
    assert lives(around)[-1] == replacement.nonce, "and the replacement goes on"


def test_the_last_heartbeat_keeps_its_distance(around: Surroundings, clock: ManualClock) -> None:
    """GCS refuses a second write of one name within a second, and with it the word that the island stopped."""
    agent = agent_of(around)
    agent.claim_life()
    agent.beat()
    before = clock.now
    agent.state = "stopped"
    agent.last_beat()
    assert clock.now - before >= NEWS_PAUSE
    beat = around.board.read_heartbeat("iowa", 1)
    assert beat is not None and beat.state == "stopped" and beat.counter == 2
