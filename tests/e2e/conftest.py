"""Real runs that leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.live import LiveRun


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., LiveRun]]:
    """Return a maker of runs in this test's own folder; all their processes are killed afterwards."""
    made: list[LiveRun] = []

    def make(**settings: Any) -> LiveRun:
        folder = tmp_path / f"run{len(made)}"
        folder.mkdir()
        made.append(LiveRun(folder, **settings))
        return made[-1]

    yield make
    for run in made:
        run.kill_everything()
        assert not run.processes()
