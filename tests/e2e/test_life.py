"""Living with it: frozen processes, an unwritable store, two commands at once, `down` at any phase, haunted names."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from diloco_cli.exit_codes import ExitCode
from tests.e2e.live import LiveRun

pytestmark = pytest.mark.e2e

AWAY = 8.0
"""Seconds that a process is stopped in the short tests: beyond death (4 heartbeats of 0.5 s) and takeover (3 s)."""

TAKEOVER = 25.0
"""Seconds within which somebody else merges: takeover_after x rank 2, loading torch on a busy machine, five commits."""

STILL_SHOWN = 45.0
"""Seconds within which `status` tells what stands still: 15 s of patience, and the command's own time."""


def others_kept_going(run: LiveRun, but: str) -> None:
    for beat in run.heartbeats():
        if beat.island != but:
            assert beat.learner.longest_gap < 1.0, f"{beat.island} stood still for {beat.learner.longest_gap} s"


SHOWN = {"": ("STALE", ""), "learner_main": ("STALE", "learner"), "syncer_main": ("RUNNING", "syncer")}
"""What `status` says of an island of which so much is stopped."""


def shows(run: LiveRun, island: str, part: str) -> bool:
    state, word = SHOWN[part]
    found = next(entry for entry in run.status()["islands"] if entry["name"] == island)
    said = found["reason"] + " ".join(found["problems"])
    return bool(found["state"] == state and word in said)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("away", [AWAY, pytest.param(60.0, marks=pytest.mark.long)])
@pytest.mark.parametrize("part", ["", pytest.param("learner_main", marks=pytest.mark.long), "syncer_main"])
def test_a_stopped_island_is_shown_and_wakes_harmlessly(live: Callable[..., LiveRun], part: str, away: float) -> None:
    run = live(tokens=5_000_000)
    supervisor = run.train()
    run.wait_for_commits(8)
    island = run.log()[-1].author
    run.signal(signal.SIGSTOP, part, island)
    stopped, before = time.monotonic(), run.log_bytes()
    run.wait(lambda: run.head() >= len(before) + 5, TAKEOVER, "the next commits")
    taken_over = time.monotonic() - stopped
    run.wait(lambda: shows(run, island, part), STILL_SHOWN - taken_over, f"island {island} shown as stopped")
    run.wait(lambda: time.monotonic() >= stopped + away, away + 5.0, "the time to wake up")
    run.signal(signal.SIGCONT, part, island)
    run.wait(lambda: island in newest_offerers(run), 30.0, "an offer of the island that woke up")
    assert run.diloco("down", "run.toml", "--yes").returncode == 0, run.output()
    assert run.finish(supervisor) == ExitCode.RUN_STOPPED, run.output()
    assert run.log_bytes()[: len(before)] == before
    run.check_books()
    others_kept_going(run, island)
    assert all(beat.incarnation == 1 for beat in run.heartbeats()), "somebody was relaunched"


def newest_offerers(run: LiveRun) -> set[str]:
    return {entry.island for commit in run.log()[-3:] for entry in commit.merged}


@pytest.mark.timeout(300)
def test_an_island_that_was_replaced_fences_itself(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=2_000_000)
    run.train()
    run.wait_for_commits(5)
    agent = next(iter(run.processes("island", "b")))
    run.signal(signal.SIGSTOP, "", "b")
    old = run.processes("", "b")
    replacement = start_agent_like(agent.cmdline(), agent.environ(), run.folder)
    try:
        run.wait(lambda: run.board().read_claim("b", 2) is not None, 60.0, "a newer life of island b")
        for process in old:
            process.send_signal(signal.SIGCONT)
        run.wait(lambda: not any(process.is_running() for process in old), 60.0, "the old life's end")
        assert replacement.poll() is None, "the newer life was harmed"
    finally:
        run.diloco("down", "run.toml", "--now", "--yes")
        replacement.wait(60.0)


def start_agent_like(command: list[str], marks: dict[str, str], folder: Path) -> subprocess.Popen[bytes]:
    """Start another agent of the same island, as a second machine would."""
    with (folder / "second.log").open("wb") as output:
        return subprocess.Popen(
            command, env=marks, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )


def lock_out(run: LiveRun) -> Path:
    """Make the store fail for everybody: a file lies where its folder was."""
    folder = run.folder / "blackboard"
    aside = run.folder / "aside"
    folder.rename(aside)
    folder.write_text("not a folder")
    return aside


def let_in(run: LiveRun, aside: Path) -> None:
    (run.folder / "blackboard").unlink()
    aside.rename(run.folder / "blackboard")


@pytest.fixture(params=[5.0, pytest.param(90.0, marks=pytest.mark.long)])
def outage(request: pytest.FixtureRequest) -> Iterator[float]:
    yield float(request.param)


@pytest.mark.timeout(400)
def test_an_unwritable_store_stalls_nobody(live: Callable[..., LiveRun], outage: float) -> None:
    # The outage has to be a part of the run: learners go on meanwhile, and their tokens count when it is over. The
    # one large merge after it may set the model back, so enough of the run has to follow.
    tokens = 1_400_000 if outage < 60.0 else 6_000_000
    run = live(tokens=tokens)
    supervisor = run.train()
    run.wait_for_commits(8)
    agents = {process.pid for process in run.processes("island")}
    aside = lock_out(run)
    begun = time.monotonic()
    run.wait(lambda: time.monotonic() >= begun + outage, outage + 5.0, "the end of the outage")
    let_in(run, aside)
    run.wait_for_commits(3)
    assert {process.pid for process in run.processes("island")} == agents, "somebody was relaunched"
    assert run.finish(supervisor) == 0, run.output()
    run.check_books()
    others_kept_going(run, "")
    assert all(beat.incarnation == 1 for beat in run.heartbeats())
    undisturbed = live(tokens=tokens)
    assert undisturbed.finish(undisturbed.train()) == 0, undisturbed.output()
    assert run.held_out_loss() < undisturbed.held_out_loss() + 0.05


@pytest.mark.timeout(300)
def test_two_trains_at_once_make_one_run(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=200_000, islands=("a", "b"))
    first, second = run.train(), run.train()
    codes = sorted([run.finish(first), run.finish(second)])
    assert codes == [0, 7], run.output()
    log = run.log()
    assert log[-1].phase == "final"
    run.check_books()
    assert len({beat.island for beat in run.heartbeats()}) == 2
    assert all(beat.incarnation == 1 for beat in run.heartbeats())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seconds", [0.5, 3.0, 12.0])
def test_down_at_any_phase_leaves_nothing(live: Callable[..., LiveRun], seconds: float) -> None:
    run = live(tokens=5_000_000)
    supervisor = run.train()
    begun = time.monotonic()
    run.wait(lambda: time.monotonic() >= begun + seconds, seconds + 5.0, "the moment for down")
    done = run.diloco("down", "run.toml", "--yes")
    assert done.returncode == 0, done.stderr + run.output()
    assert not run.processes()
    run.wait(lambda: supervisor.poll() is not None, 30.0, "the end of `diloco train`")
    assert not run.processes()
    again = run.diloco("down", "run.toml", "--yes")
    assert again.returncode == 0, again.stderr


@pytest.mark.timeout(300)
def test_ctrl_c_says_what_goes_on_running(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=5_000_000)
    supervisor = run.train()
    run.wait_for_commits(2)
    supervisor.send_signal(signal.SIGINT)
    assert run.finish(supervisor, 30.0) == 130
    said = run.output()
    assert "diloco down" in said and "diloco status" in said and "diloco train" in said
    assert len(run.processes("island")) == 3
    run.wait_for_commits(2)
    assert run.diloco("down", "run.toml", "--now", "--yes").returncode == 0
    assert not run.processes()


@pytest.mark.timeout(300)
def test_a_purged_run_cannot_haunt_a_new_one_of_its_name(live: Callable[..., LiveRun]) -> None:
    run = live(tokens=5_000_000, islands=("a", "b"))
    run.train()
    run.wait_for_commits(4)
    old_id = run.board().run_id
    run.supervisors[-1].kill()
    run.supervisors[-1].wait()
    frozen = run.processes("", "b")
    run.signal(signal.SIGSTOP, "", "b")
    # The laptop forgets the frozen island: it is on another machine, as far as `down` can see.
    from diloco_runtime.purge import purge_run

    run.signal(signal.SIGKILL, "", "a")
    purge_run(run.board().store, old_id)
    assert run.diloco("up", "run.toml", "--yes").returncode == 0
    new = run.board()
    assert new.run_id != old_id
    before = sorted(new.store.list(f"{new.run_id}/"))
    for process in frozen:
        os.kill(process.pid, signal.SIGCONT)
    run.wait(lambda: not any(process.is_running() for process in frozen), 60.0, "the end of the old island")
    assert sorted(new.store.list(f"{new.run_id}/")) == before
