"""One suite of behaviours over every kind of store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.store import ObjectStore, open_store
from tests.behaviours.samples import RUN_ID, run_record
from tests.support import buckets, servers

# A new kind of store: name it here and give its URL below.
KINDS = ["memory", "file", "s3", "gs"]
_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[servers.Server]:
    with servers.seaweedfs() as server:
        yield server


@pytest.fixture(scope="session")
def gs_server() -> Iterator[servers.Server]:
    with servers.fake_gcs() as server:
        yield server


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty place."""
    number = next(_numbers)
    kind = request.param
    if kind == "s3":
        return buckets.s3_bucket(request.getfixturevalue("s3_server"), f"behaviours-{number}")
    if kind == "gs":
        return buckets.gs_bucket(request.getfixturevalue("gs_server"), f"behaviours-{number}")
    return {"memory": f"memory://behaviours-{number}", "file": f"file://{tmp_path}/blackboard"}[kind]


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return open_store(store_url, "trial")


@pytest.fixture
def board(store: ObjectStore, clock, nonces) -> Blackboard:
    """Return the blackboard of a run that has just been created."""
    board = Blackboard(store, RUN_ID, clock, nonces)
    board.create_run(run_record())
    return board
