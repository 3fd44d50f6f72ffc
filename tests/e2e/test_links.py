"""Islands with links of their own: a slow uplink starts early, a slow syncer hands over.

Each agent is started by hand, since a run's own commands give all islands the same address. Each reaches the bucket
through a proxy of its own; the inner steps take a set time.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import diloco_runtime
from tests.e2e.live import LiveRun
from tests.support import buckets, servers
from tests.support.proxy import Faults, Head, Proxy

pytestmark = pytest.mark.e2e

TASK = Path(__file__).parents[1] / "support" / "timed_task.py"
STEP = 0.1
"""Seconds of an inner step."""
COMMITS = 30
PUBLISH_STEPS = 12
PERIOD_STEPS = 16
"""Inner steps between two merges: sync_every / fragments."""

SPEC = """
[run]
name = "live"
store = "{place}"
tokens = 50_000_000

[store]
{options}

[model]
kind = "timed_task:build"

[model.options]
sample_seconds = {sample}
build = {{}}
first = {{}}

[inner]
lr = 1e-3
batch_size = 4

[sync]
sync_every = {sync_every}
fragments = 6
takeover_after = 5.0

[islands.a]
[islands.b]
[islands.c]
"""


class Islands:
    """Islands of one run, each behind a proxy of its own."""

    def __init__(self, run: LiveRun, server: servers.Server, folder: str) -> None:
        self.run = run
        self.proxies: dict[str, Proxy] = {}
        self._server = server
        self._folder = folder
        place, _, options = buckets.gs_url(server.url, folder).partition("?")
        table = "\n".join('{} = "{}"'.format(*option.split("=", 1)) for option in options.split("&"))
        values = {"place": place, "options": table, "sample": STEP / 4, "sync_every": 6 * PERIOD_STEPS}
        (run.folder / "run.toml").write_text(SPEC.format(**values))
        shutil.copy(TASK, run.folder)
        done = run.diloco("up", "run.toml", "--yes")
        assert done.returncode == 0, done.stderr
        self._agents: list[subprocess.Popen[bytes]] = []

    def start(self, name: str) -> Proxy:
        """Start an island; return the proxy that is its link."""
        proxy = self.proxies[name] = Proxy(self._server.port, "gcs").__enter__()
        state = Path(os.environ["DILOCO_HOME"]) / "runs" / "by-hand" / name
        state.mkdir(parents=True)
        run_id = self.run.board().run_id
        source = str(Path(diloco_runtime.__file__).resolve().parent.parent)
        arguments = [
            *("--store", buckets.gs_url(proxy.url, self._folder), "--run", "live", "--run-id", run_id),
            *("--island", name, "--state-dir", str(state), "--root", str(self.run.folder)),
        ]
        with (state / "island.log").open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "diloco_runtime.island", *arguments],
                cwd=self.run.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "DILOCO_ISLAND": name, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
            )
        self._agents.append(agent)
        return proxy

    def close(self) -> None:
        self.run.kill_everything()
        for agent in self._agents:
            agent.kill()
            agent.wait()
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)

    def merged_in(self, name: str, since: int) -> float:
        """Return the share of the commits after `since` that an island is in."""
        commits = self.run.log()[since + 1 :]
        return sum(any(entry.island == name for entry in commit.merged) for commit in commits) / len(commits)


@pytest.fixture
def islands(live: Callable[..., LiveRun], gs_server: servers.Server, tmp_path: Path) -> Iterator[Islands]:
    found = Islands(live(), gs_server, f"links-{tmp_path.name}".lower().replace("_", "-"))
    yield found
    found.close()


def is_delta(head: Head) -> bool:
    return head.method == "POST" and float(head.get("content-length") or 0) > 0


@pytest.mark.timeout(300)
def test_a_learner_whose_publish_takes_twelve_steps_is_in_nine_commits_of_ten(islands: Islands) -> None:
    for name in ("a", "b", "c"):
        islands.start(name)
    run = islands.run
    run.wait(lambda: run.head() >= 0 and islands_merged(run) == {"a", "b", "c"}, 90.0, "a commit with all islands")
    # Payload and record of an offer travel one after the other.
    islands.proxies["c"].faults = Faults(latency=STEP * PUBLISH_STEPS / 2, only=is_delta)
    run.wait_for_commits(8)  # its learner measures what publishing takes now
    since = run.head()

    def taking_part() -> bool:
        """Look at the newest thirty: other programs on this machine may have held an island up for a while."""
        begin = max(since, run.head() - COMMITS)
        return run.head() >= begin + COMMITS and all(islands.merged_in(name, begin) >= 0.9 for name in ("a", "b", "c"))

    run.wait(taking_part, 180.0, f"{COMMITS} commits in a row of which every island is in nine of ten")
    (beat,) = [beat for beat in run.heartbeats() if beat.island == "c"]
    assert beat.learner.waited_seconds < 1.0, "it starts early; it does not wait"


def islands_merged(run: LiveRun) -> set[str]:
    return {entry.island for entry in run.log()[-1].merged}


@pytest.mark.timeout(240)
def test_a_syncer_on_a_slow_island_loses_the_duty_to_one_with_a_better_link(islands: Islands) -> None:
    """The slow island comes first and initialises the run; two equally good ones join."""
    islands.start("c").faults = Faults(latency=0.2)
    run = islands.run
    run.wait(lambda: run.head() >= 1, 90.0, "commits of the only island")
    assert {commit.author for commit in run.log()} == {"c"}
    islands.start("a")
    islands.start("b")
    run.wait(lambda: run.log()[-1].author in ("a", "b"), 120.0, "a commit of an island with a better link")
    run.wait_for_commits(6, 60.0)
    log = run.log()
    first = next(commit.seq for commit in log if commit.author != "c")
    assert log[first - 1].successor == log[first].author, "it was handed over, not taken"
    assert "c" not in {commit.author for commit in log[first:]}, "it does not come back"
