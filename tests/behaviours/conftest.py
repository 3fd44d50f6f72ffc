"""One suite of behaviours over every kind of store."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from diloco_runtime.blackboard import Blackboard
from diloco_runtime.store import ObjectStore, open_store
from tests.behaviours.clouds import Cloud
from tests.behaviours.samples import RUN_ID, run_record
from tests.support import buckets
from tests.support.proxy import Proxy

# A new kind of store: name it here and give its URL below.
KINDS = ["memory", "file", "s3", "gs"]
_numbers = itertools.count()


@pytest.fixture(params=KINDS)
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of an empty place."""
    name, kind = f"behaviours-{next(_numbers)}", request.param
    if kind == "s3":
        return buckets.s3_url(request.getfixturevalue("s3_server").url, name)
    if kind == "gs":
        return buckets.gs_url(request.getfixturevalue("gs_server").url, name)
    return {"memory": f"memory://{name}", "file": f"file://{tmp_path}/blackboard"}[kind]


@pytest.fixture
def store(store_url: str) -> ObjectStore:
    return open_store(store_url, "trial")


@pytest.fixture(params=["s3", "gs"])
def cloud(request: pytest.FixtureRequest) -> Iterator[Cloud]:
    """Yield an empty folder of a bucket behind a proxy that does nothing yet."""
    kind, folder = request.param, f"clouds-{next(_numbers)}"
    server = request.getfixturevalue(f"{kind}_server")
    url = buckets.s3_url if kind == "s3" else buckets.gs_url
    with Proxy(server.port, "s3" if kind == "s3" else "gcs") as proxy:
        yield Cloud(kind, folder, open_store(url(server.url, folder), "trial"), proxy)


@pytest.fixture
def board(store: ObjectStore, clock, nonces) -> Blackboard:
    """Return the blackboard of a run that has just been created."""
    board = Blackboard(store, RUN_ID, clock, nonces)
    board.create_run(run_record())
    return board
