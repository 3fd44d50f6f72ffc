"""Islands as real processes: started, found by their marks, told apart, ended; supervised and taken down."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from diloco_cli import places
from diloco_cli.claim import Claim
from diloco_cli.errors import AnotherSupervisor
from diloco_cli.provider_local import LocalProvider, _trains, end, find_islands, find_run_ids, find_trains
from diloco_cli.runs import Run, create_run, request_stop
from diloco_cli.sights import Ending, Sight
from diloco_cli.spec import Spec, load_spec
from diloco_cli.supervision import End
from diloco_cli.supervisor import Supervisor
from diloco_cli.teardown import take_down
from diloco_runtime.errors import RunMismatch
from diloco_runtime.identity import own_identity
from diloco_runtime.purge import purge_run

AGENT = (sys.executable, str(Path(__file__).parents[1] / "support" / "stand_in_agent.py"))


NewProvider = Callable[[], LocalProvider]


@pytest.fixture
def spec(tmp_path: Path) -> Spec:
    (tmp_path / "demo.toml").write_text(
        '[run]\nname = "demo"\nstore = "file://./bb"\ntokens = 1000\n[model]\nkind = "mine:task"\n'
        "[sync]\nheartbeat_every = 0.2\n[provider]\nrelaunch_after = 0.1\nmax_restarts = 1\n"
        "[islands.a]\nthreads = 3\n[islands.b]\n"
    )
    return load_spec(tmp_path / "demo.toml")


@pytest.fixture
def run(spec: Spec) -> Run:
    return create_run(spec)[0]


@pytest.fixture
def new_provider(run: Run) -> Iterator[NewProvider]:
    """Make providers; whatever they started is ended and waited for after the test."""
    made: list[LocalProvider] = []

    def new() -> LocalProvider:
        made.append(LocalProvider(run.spec, run.id, run.clock, AGENT))
        return made[-1]

    yield new
    until(lambda: [end(island, force=True) for island in find_islands(run.id).values()] == [])
    for _, child in [started for provider in made for started in provider._children.values()]:
        child.wait(10)


def until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def pid_of(run: Run, name: str) -> int:
    """Return the pid of an island's agent."""
    agent = find_islands(run.id)[name].agent
    assert agent is not None
    return int(agent.pid)


def whole(run: Run, *names: str) -> None:
    """Wait until these islands have agent and child, and have set up their signal handlers."""
    until(lambda: all(
        (island := find_islands(run.id).get(name)) and island.agent and island.others
        and (places.island_dir(run.name, run.id, name) / "up").exists()
        for name in names
    ))  # fmt: skip


# ---- provider -------------------------------------------------------------------------------------------------------


def test_an_island_is_started_detached_marked_and_logged(spec: Spec, run: Run, new_provider: NewProvider) -> None:
    provider = new_provider()
    where = provider.start(spec.islands[0], "l1")
    whole(run, "a")
    pid = pid_of(run, "a")
    agent = psutil.Process(pid)
    assert where == f"process {pid}"
    marks = agent.environ()
    assert (marks["DILOCO_RUN_ID"], marks["DILOCO_ISLAND"], marks["OMP_NUM_THREADS"]) == (run.id, "a", "3")
    assert os.getsid(pid) == pid != os.getsid(0)
    assert agent.cwd() == str(spec.root)
    seen = provider.sights()
    assert seen == {"a": Sight("l1", 1, False, pid)}
    until(lambda: "stand-in for a with 3 threads" in places.island_log("demo", run.id, "a").read_text())
    assert find_islands("0" * 16) == {}
    assert find_run_ids(spec.store, "demo") == {run.id} and find_run_ids(spec.store, "demo2") == set()


def test_a_stopped_island_is_seen_and_a_killed_agent_leaves_a_child(
    spec: Spec, run: Run, new_provider: NewProvider
) -> None:
    provider = new_provider()
    provider.start(spec.islands[0], "l1")
    whole(run, "a")
    pid = pid_of(run, "a")
    os.kill(pid, signal.SIGSTOP)
    until(lambda: provider.sights()["a"].held)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not provider.sights()["a"].present)
    assert provider.sights()["a"].others == 1
    assert provider.ending("a", "l1") == Ending("preempted", "preempted by SIGKILL")
    assert provider.ending("a", "l0") is None, "another launch's end is not known"
    provider.end("a", force=True)
    until(lambda: provider.sights() == {})


def test_asking_ends_the_agent_and_its_child(spec: Spec, run: Run, new_provider: NewProvider) -> None:
    provider = new_provider()
    provider.start(spec.islands[0], "l1")
    whole(run, "a")
    provider.end("a", force=False)
    until(lambda: provider.observe() == {})
    assert provider.ending("a", "l1") == Ending("preempted", "preempted")


def test_islands_outlive_their_starter_and_are_found_again(spec: Spec, run: Run, new_provider: NewProvider) -> None:
    starter = (
        "import sys; from diloco_cli.spec import load_spec; from diloco_cli.provider_local import LocalProvider\n"
        "from diloco_runtime.clock import SystemClock\n"
        f"spec = load_spec({str(spec.path)!r})\n"
        f"LocalProvider(spec, {run.id!r}, SystemClock(), {AGENT!r}).start(spec.islands[1], 'l7')"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", starter], check=True, env=env, timeout=30)
    whole(run, "b")
    provider = new_provider()
    assert provider.sights()["b"].launch == "l7"
    provider.end("b", force=True)
    until(lambda: provider.observe() == {})
    assert provider.ending("b", "l7") is None


@pytest.mark.parametrize(
    ("command", "matches"),
    [
        (["/v/bin/python", "/v/bin/diloco", "train", "demo.toml"], True),
        (["python3.12", "-m", "diloco_cli", "train", "./demo.toml", "--detach"], True),
        (["python", "/src/diloco_cli/__main__.py", "train", "/w/demo.toml"], True),
        (["diloco", "train", "../w/demo.toml", "-y"], True),
        (["python", "/v/bin/diloco", "train"], False),
        (["python", "/v/bin/diloco", "train", "other.toml"], False),
        (["python", "/v/bin/diloco", "status", "demo.toml"], False),
        (["python", "train.py", "train", "demo.toml"], False),
        (["vim", "diloco", "train", "demo.toml"], False),
        (["bash", "-c", "diloco train demo.toml"], False),
    ],
)
def test_which_command_lines_are_a_train_on_this_spec(command: list[str], matches: bool) -> None:
    assert _trains(command, "/w", Path("/w/demo.toml")) is matches
    if command[-1] == "train":
        assert _trains(command, "/w", Path("/w/run.toml")), "the usual name"


# ---- supervisor -----------------------------------------------------------------------------------------------------


class Driven:
    """A supervisor over stand-in agents."""

    def __init__(self, run: Run, provider: LocalProvider) -> None:
        self.lines: list[str] = []
        self.run = run
        me = own_identity()
        self.claim = Claim(run.board, run.another_board(), run.clock, me, run.config.sync.heartbeat_every)
        self.supervisor = Supervisor(run, provider, self.claim, me, self.lines.append)

    def until(self, condition: Callable[[], object], seconds: float = 20.0) -> End | None:
        """Make turns until the condition holds or supervision ends."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, self.lines
            if (end := self.supervisor.tick()) is not None:
                return end
            time.sleep(0.02)
        return None

    def said(self, *parts: str) -> bool:
        return any(all(part in line for part in parts) for line in self.lines)


@pytest.fixture
def driven(run: Run, new_provider: NewProvider) -> Iterator[Driven]:
    found = Driven(run, new_provider())
    yield found
    found.supervisor.close()


def both_up(run: Run) -> bool:
    return {name for name, island in find_islands(run.id).items() if island.agent} == {"a", "b"}


def test_islands_are_launched_with_intents_and_relaunched_after_a_kill(run: Run, driven: Driven) -> None:
    driven.supervisor.start()
    driven.until(lambda: both_up(run))
    intents = [i for n in range(1, driven.claim.number + 1) for i in run.board.read_supervisor(n).launching]  # type: ignore[union-attr]
    assert {(i.island, i.launches, i.reason) for i in intents} == {("a", 1, "first start"), ("b", 1, "first start")}
    for process in (find_islands(run.id)["a"].agent, *find_islands(run.id)["a"].others):
        assert process is not None
        process.kill()
    driven.until(lambda: driven.said("island a: launched", "preempted by SIGKILL"))
    newest = run.board.newest_supervisor()
    assert newest is not None and newest.launching[0].launches == 2 and newest.islands == ("a", "b")
    assert both_up(run)


def test_a_second_supervisor_is_refused_and_a_follower_adopts(
    run: Run, driven: Driven, new_provider: NewProvider
) -> None:
    driven.supervisor.start()
    driven.until(lambda: both_up(run))
    pids = {name: island.agent.pid for name, island in find_islands(run.id).items() if island.agent}
    with pytest.raises(AnotherSupervisor, match=f"process {os.getpid()} on"):
        Driven(run, new_provider()).supervisor.start()
    driven.supervisor.close()
    follower = Driven(run, new_provider())
    follower.supervisor.start()
    until(lambda: follower.supervisor.tick() is None and follower.supervisor.report())
    assert {name: island.agent.pid for name, island in find_islands(run.id).items() if island.agent} == pids
    assert not follower.said("launched")
    assert follower.supervisor._launches == {"a": 1, "b": 1}
    with pytest.raises(AnotherSupervisor, match="supervises this run now"):
        driven.until(lambda: False)
    follower.supervisor.close()


def test_a_supervisor_whose_process_is_gone_is_followed_at_once(run: Run) -> None:
    code = (
        "import sys, os; from diloco_cli.spec import load_spec; from diloco_cli.runs import find_run\n"
        "from diloco_cli.claim import Claim\n"
        "from diloco_runtime.identity import own_identity\n"
        f"run = find_run(load_spec({str(run.spec.path)!r}))\n"
        "Claim(run.board, run.another_board(), run.clock, own_identity(), 60.0).take(('a', 'b'))\n"
        "os._exit(0)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, timeout=30)
    dead = run.board.newest_supervisor()
    assert dead is not None and not dead.ended
    began = time.monotonic()
    claim = Claim(run.board, run.another_board(), run.clock, own_identity(), 60.0)
    claim.take(("a", "b"))
    assert claim.number == dead.number + 1 and time.monotonic() - began < 20.0
    claim.release(("a", "b"))


def test_after_a_stop_request_nothing_is_launched(run: Run, driven: Driven) -> None:
    driven.supervisor.start()
    request_stop(run, "enough")
    end = driven.until(lambda: False)
    assert end == End("stopped", "enough")
    assert find_islands(run.id) == {} and not driven.said("launched")


def test_crashing_islands_are_given_up_and_that_ends_it(run: Run, driven: Driven) -> None:
    (run.spec.root / "status-a").write_text("1")
    (run.spec.root / "status-b").write_text("2")
    driven.supervisor.start()
    end = driven.until(lambda: False)
    assert end is not None and end.outcome == "given up"
    assert "a: crashed with exit status 1; crashed 2 times" in end.reason and "b: its configuration" in end.reason
    newest = run.board.newest_supervisor()
    assert newest is not None and "b" in newest.given_up


def test_an_island_that_left_the_spec_is_asked_to_leave(run: Run, driven: Driven, new_provider: NewProvider) -> None:
    driven.supervisor.start()
    driven.until(lambda: both_up(run))
    whole(run, "a", "b")
    driven.supervisor.close()
    path = run.spec.path
    path.write_text(path.read_text().replace("[islands.b]", ""))
    smaller = Driven(Run(load_spec(path), run.record, run.board, run.clock), new_provider())
    smaller.supervisor.start()
    smaller.until(lambda: set(find_islands(run.id)) == {"a"})
    assert smaller.said("island b is not in the spec any more")
    smaller.supervisor.close()


def test_a_purged_run_ends_its_supervisor(run: Run, driven: Driven) -> None:
    driven.supervisor.start()
    driven.until(lambda: both_up(run))
    purge_run(run.board.store, run.id)
    with pytest.raises(RunMismatch):
        driven.until(lambda: False)


# ---- teardown -------------------------------------------------------------------------------------------------------


def test_down_ends_islands_and_says_so(run: Run, new_provider: NewProvider) -> None:
    provider = new_provider()
    for island in run.spec.islands:
        provider.start(island, "l1")
    whole(run, "a", "b")
    lines: list[str] = []
    take_down(run.spec, True, False, lines.append)
    assert find_islands(run.id) == {}
    assert lines == ["ending a, b", "run demo is down"]
    control = run.board.newest_control()
    assert control is not None and control.action == "stop"


def test_down_kills_what_does_not_listen_and_what_is_frozen(run: Run, new_provider: NewProvider) -> None:
    provider = new_provider()
    (run.spec.root / "stubborn").touch()
    for island in run.spec.islands:
        provider.start(island, "l1")
    whole(run, "a", "b")
    frozen = find_islands(run.id)["b"].agent
    assert frozen is not None
    frozen.suspend()
    take_down(run.spec, True, False, lambda line: None)
    assert find_islands(run.id) == {}


def test_down_finds_islands_of_a_run_that_was_purged_under_them(run: Run, new_provider: NewProvider) -> None:
    provider = new_provider()
    provider.start(run.spec.islands[0], "l1")
    whole(run, "a")
    purge_run(run.board.store, run.id)
    lines: list[str] = []
    take_down(run.spec, True, False, lines.append)
    assert find_islands(run.id) == {}
    assert lines[-1].startswith("there is no run demo")


def test_down_ends_a_train_that_has_only_just_begun(spec: Spec) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    train = subprocess.Popen([sys.executable, "-m", "diloco_cli", "train", str(spec.path)], env=env)
    until(lambda: [process.pid for process in find_trains(spec.path)] == [train.pid])
    lines: list[str] = []
    take_down(spec, True, False, lines.append)
    train.wait(10)
    assert f"ending the supervisor, process {train.pid}" in lines
    assert find_trains(spec.path) == [] and find_run_ids(spec.store, spec.name) == set()
