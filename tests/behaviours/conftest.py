"""One suite of behaviours over every kind of store."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.store import ObjectStore, open_store
from tests.behaviours.samples import RUN_ID, run_record

# A new kind of store: name it here and give its URL below.
KINDS = ["memory", "file"]
_numbers = itertools.count()


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty place."""
    urls = {
        "memory": f"memory://behaviours-{next(_numbers)}",
        "file": f"file://{tmp_path}/blackboard",
    }
    return urls[request.param]


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return open_store(store_url, "trial")


@pytest.fixture
def board(store: ObjectStore, clock, nonces) -> Blackboard:
    """Return the blackboard of a run that has just been created."""
    board = Blackboard(store, RUN_ID, clock, nonces)
    board.create_run(run_record())
    return board
