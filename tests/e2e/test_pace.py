"""Islands out of phase, and islands of unequal speed: real processes whose inner steps take a set time."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from diloco_runtime.records import HeartbeatRecord
from tests.e2e.live import LiveRun

pytestmark = pytest.mark.e2e

TASK = Path(__file__).parents[1] / "support" / "timed_task.py"
STEP = 0.25
"""Seconds of one inner step of an ordinary island: 4 samples."""

PERIOD = 4 * STEP
"""Seconds from one merge to the next: sync_every / fragments inner steps."""

SPEC = """
[run]
name = "live"
store = "file://./blackboard"
tokens = 50_000_000

[model]
kind = "timed_task:build"

[model.options]
sample_seconds = {sample}
build = {build}
first = {first}

[inner]
lr = 1e-3
batch_size = 4

[sync]
sync_every = 24
fragments = 6
heartbeat_every = 0.5

{islands}
"""


def table(values: dict[str, float]) -> str:
    return "{ " + ", ".join(f"{name} = {value}" for name, value in values.items()) + " }" if values else "{}"


def prepare(run: LiveRun, batches: dict[str, int], build: dict[str, float], first: dict[str, float]) -> LiveRun:
    """Give a run the timed task: samples per inner step and delays, by island."""
    islands = "\n".join(f"[islands.{name}]\nbatch_size = {size}" for name, size in batches.items())
    spec = SPEC.format(sample=STEP / 4, build=table(build), first=table(first), islands=islands)
    (run.folder / "run.toml").write_text(spec)
    shutil.copy(TASK, run.folder)
    return run


def pace(run: LiveRun, islands: tuple[str, ...], commits: int) -> dict[str, float]:
    """Let a run make so many commits once all islands are merged; return by island the share of the time that it spent
    in inner steps meanwhile, on its own clock."""
    supervisor = run.train()
    run.wait(lambda: all_merged(run, islands), 120.0, "a commit with offers of every island")
    run.wait_for_commits(6)  # averages settle
    before, begun = beats(run), run.head()
    run.wait_for_commits(commits, 300.0)
    after = beats(run)
    check_commits(run, len(islands), begun, run.head())
    run.end()
    assert supervisor.poll() is not None
    check_calls(run)
    run.check_books()
    return {name: share(before[name], after[name]) for name in islands}


def all_merged(run: LiveRun, islands: tuple[str, ...]) -> bool:
    return run.head() > 0 and len({entry.island for entry in run.log()[-1].merged}) == len(islands)


def beats(run: LiveRun) -> dict[str, HeartbeatRecord]:
    return {beat.island: beat for beat in run.heartbeats()}


def share(before: HeartbeatRecord, after: HeartbeatRecord) -> float:
    """Return the share of the time between two heartbeats of one life that went into inner steps."""
    return (after.learner.busy_seconds - before.learner.busy_seconds) / (after.uptime - before.uptime)


def check_commits(run: LiveRun, live: int, begun: int, ended: int) -> None:
    """Assert that nearly all living islands are in each commit on average, and that none was called for nobody."""
    merged = [len(commit.merged) for commit in run.log()[begun + 1 : ended + 1]]
    assert min(merged) >= 1
    assert sum(merged) / len(merged) >= 0.9 * live, merged


def check_calls(run: LiveRun) -> None:
    """Assert that every merge that was called was committed."""
    board = run.board()
    called = [int(key.rpartition("/")[2][:12]) for key in board.store.list(f"{board.keys.root}/calls/")]
    assert max(called) <= run.head()


@pytest.mark.timeout(400)
@pytest.mark.parametrize("apart", [PERIOD / 4, pytest.param(6 * PERIOD / 4, marks=pytest.mark.long)])
def test_islands_a_quarter_of_a_period_apart_merge_together(live: Callable[..., LiveRun], apart: float) -> None:
    """Once a quarter of the time between two merges, once a quarter of the time between two of the same fragment."""
    names = ("a", "b", "c", "d")
    run = live(islands=names)
    first = {name: index * apart for index, name in enumerate(names)}
    shares = pace(prepare(run, dict.fromkeys(names, 4), {}, first), names, 25)
    assert min(shares.values()) >= 0.95, shares


@pytest.mark.timeout(400)
@pytest.mark.parametrize("merging", [pytest.param("fast", marks=pytest.mark.long), "slow"])
def test_an_island_four_times_slower_slows_nobody(live: Callable[..., LiveRun], merging: str) -> None:
    """Whoever initialises the run has the duty first: the other one's model is built later."""
    batches = {"fast": 4, "slow": 16}
    late = "slow" if merging == "fast" else "fast"
    run = live(islands=tuple(batches))
    shares = pace(prepare(run, batches, {late: 6.0}, {}), tuple(batches), 25)
    assert shares["fast"] >= 0.95, shares
    authors = [commit.author for commit in run.log()[1:]]
    assert authors.count(merging) > len(authors) / 2, authors
