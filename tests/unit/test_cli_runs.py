"""A run between commands: wishes and budgets, who may supervise, logs; without any process."""

import os
import threading
from pathlib import Path

import pytest

from diloco_cli import places
from diloco_cli.claim import Claim
from diloco_cli.errors import AnotherSupervisor, NothingThere
from diloco_cli.formats import count, duration, size
from diloco_cli.logs import LogFile, in_order, log_files, new_lines, newest_lines, show
from diloco_cli.runs import Run, budget_of, create_run, ready_to_train, request_stop
from diloco_cli.spec import Spec, load_spec
from diloco_cli.store_check import preflight
from diloco_cli.teardown import take_down
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import SystemNonces
from diloco_runtime.errors import ConfigError
from diloco_runtime.identity import Identity
from diloco_runtime.records import ControlRecord, SupervisorHeartbeat
from diloco_runtime.store import ObjectStore, open_store
from tests.support.cli_records import commit


def write_spec(folder: Path, tokens: int = 1000) -> Spec:
    (folder / "demo.toml").write_text(
        f'[run]\nname = "demo"\nstore = "file://./bb"\ntokens = {tokens}\n[model]\nkind = "mine:task"\n'
        "[islands.a]\n[islands.b]\n"
    )
    return load_spec(folder / "demo.toml")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create_run(write_spec(tmp_path))[0]


def with_tokens(run: Run, tokens: int) -> Run:
    return Run(write_spec(run.spec.root, tokens), run.record, run.board, run.clock)


def head(run: Run, phase: str, reason: str = "", control: int = 0, budget: int = 1000) -> None:
    newest = run.board.head()
    seq = 0 if newest is None else newest.seq + 1
    record = commit(seq, run_id=run.id, phase=phase, reason=reason, control=control, budget=budget)
    run.board.create(run.board.keys.log(seq), record)


# ---- wishes ---------------------------------------------------------------------------------------------------------


def test_of_many_that_create_a_run_at_once_one_does(tmp_path: Path) -> None:
    spec = write_spec(tmp_path)
    found: list[tuple[Run, bool]] = []
    threads = [threading.Thread(target=lambda: found.append(create_run(spec))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({run.id for run, _ in found}) == 1
    assert [new for _, new in found].count(True) == 1


def test_a_fresh_or_running_run_is_ready(run: Run) -> None:
    assert ready_to_train(run, None) == "ready"
    head(run, "run")
    assert ready_to_train(run, None) == "ready"
    assert run.board.newest_control() is None, "nothing was written"


def test_a_stopped_run_is_reopened_above_the_stop(run: Run) -> None:
    stop = request_stop(run, "diloco down")
    head(run, "run")
    assert ready_to_train(run, stop) == "reopened"
    newest = run.board.newest_control()
    assert newest is not None and (newest.number, newest.action, newest.tokens) == (2, "run", 1000)
    assert ready_to_train(run, newest) == "ready", "and stays open"
    head(run, "final", "diloco down", control=1)
    assert ready_to_train(run, newest) == "ready", "the request is newer than what the final commit knew"


def test_a_stop_that_came_after_train_began_is_obeyed(run: Run) -> None:
    first = request_stop(run, "yesterday")
    second = request_stop(run, "just now")
    assert (first.number, second.number) == (1, 2)
    assert ready_to_train(run, first) == "stopped"
    newest = run.board.newest_control()
    assert newest is not None and newest.reason == "just now"


def test_a_run_that_reached_its_budget_is_finished_until_it_is_raised(run: Run) -> None:
    head(run, "final", "budget")
    assert ready_to_train(run, None) == "finished"
    stop = request_stop(run, "diloco down")
    assert ready_to_train(run, stop) == "finished", "taking a finished run down changes nothing"
    richer = with_tokens(run, 3000)
    assert ready_to_train(richer, stop) == "raised"
    assert budget_of(run) == 3000
    newest = run.board.newest_control()
    assert ready_to_train(richer, newest) == "ready"
    head(run, "final", "budget", control=2, budget=3000)
    assert ready_to_train(richer, newest) == "finished"


def test_the_budget_of_a_live_run_can_be_raised_but_not_lowered(run: Run) -> None:
    head(run, "run")
    assert ready_to_train(with_tokens(run, 2000), None) == "raised"
    request_stop(run, "pause")
    assert budget_of(run) == 2000, "a stop request does not touch the budget"
    with pytest.raises(ConfigError, match=r"\[run\] tokens = 1500: the run's budget is 2000 already"):
        ready_to_train(with_tokens(run, 1500), run.board.newest_control())


def test_stop_requests_of_two_people_get_two_numbers(run: Run) -> None:
    threads = [threading.Thread(target=request_stop, args=(run, "enough")) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    newest = run.board.newest_control()
    assert newest is not None and newest.action == "stop" and 1 <= newest.number <= 4


def test_the_preflight_leaves_nothing(tmp_path: Path) -> None:
    preflight(write_spec(tmp_path))
    assert [path for path in (tmp_path / "bb").rglob("*") if path.is_file()] == []


class DyingStore:
    """A store in which the process dies at a chosen verb: everything after it fails, clearing up included."""

    def __init__(self, inner: ObjectStore, verb: str) -> None:
        self.inner, self.url, self.verb, self.dead = inner, inner.url, verb, False

    def __getattr__(self, name: str) -> object:
        if self.dead or name == self.verb:
            self.dead = True
            raise KeyboardInterrupt
        return getattr(self.inner, name)


def everything_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def test_what_a_killed_preflight_left_goes_with_a_later_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, now = write_spec(tmp_path), [1_700_000_000.0]
    monkeypatch.setattr("diloco_cli.store_check.SystemClock.wall", lambda clock: now[0])
    for verb in ("get", "list", "delete"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("diloco_cli.store_check.open_store", lambda *place: DyingStore(open_store(*place), verb))  # noqa: B023
            preflight(spec)
    store = open_store(spec.store, spec.name)
    assert len(store.list("")) == 3
    now[0] += 60.0
    preflight(spec)
    assert len(store.list("")) == 3, "somebody may be at work there"
    now[0] += 600.0
    preflight(spec)
    assert everything_in(tmp_path / "bb") == []


def test_a_purge_removes_what_killed_preflights_left(tmp_path: Path) -> None:
    run, _ = create_run(write_spec(tmp_path))
    run.board.store.create("preflight/1-x/probe.txt", b"x")
    hidden = tmp_path / "bb/demo/preflight/.tmp/half-written"
    hidden.parent.mkdir(exist_ok=True)
    hidden.write_text("x")
    lines: list[str] = []
    take_down(run.spec, True, True, lines.append)
    assert everything_in(tmp_path / "bb") == [] and lines[-1].startswith("deleted 3 objects")


# ---- claim ----------------------------------------------------------------------------------------------------------

HERE, THERE = Identity("here", 999_999, 5.0), Identity("there", 7, 5.0)


def claim_by(run: Run, clock, me: Identity, period: float = 5.0) -> Claim:  # type: ignore[no-untyped-def]
    board = Blackboard(run.board.store, run.id, clock, SystemNonces())
    return Claim(board, board, clock, me, period)


def test_a_silent_supervisor_elsewhere_is_replaced_after_three_periods(run: Run, clock) -> None:  # type: ignore[no-untyped-def]
    first = claim_by(run, clock, THERE, period=3600.0)
    first.take(("a", "b"))
    began = clock.now
    second = claim_by(run, clock, HERE)
    second.take(("a", "b"))
    assert 15.0 <= clock.now - began < 17.0
    assert second.number == 2
    with pytest.raises(AnotherSupervisor, match="process 999999 on here supervises this run now"):
        first.write(("a", "b"))
    with pytest.raises(AnotherSupervisor):
        first.check()
    second.check()
    first.release(("a", "b"))
    newest = run.board.newest_supervisor()
    assert newest is not None and newest.pid == HERE.pid and not newest.ended, "a loser's farewell changes nothing"
    second.release(("a", "b"))


def test_a_living_supervisor_elsewhere_is_left_alone(run: Run, clock) -> None:  # type: ignore[no-untyped-def]
    claim_by(run, clock, THERE, period=3600.0).take(("a",))
    beats = iter(range(10, 20))

    class Beating:
        """The clock of the onlooker; the other supervisor beats while it sleeps."""

        def __getattr__(self, name: str) -> object:
            return getattr(clock, name)

        def sleep(self, seconds: float) -> None:
            clock.sleep(seconds)
            run.board.write_supervisor_heartbeat(
                SupervisorHeartbeat(run_id=run.id, nonce="n", number=1, supervisor="s", counter=next(beats))
            )

    with pytest.raises(AnotherSupervisor, match="process 7 on there"):
        claim_by(run, Beating(), HERE).take(("a",))


def test_who_released_can_be_followed_at_once(run: Run, clock) -> None:  # type: ignore[no-untyped-def]
    first = claim_by(run, clock, THERE, period=0.01)
    first.take(("a",))
    first.release(("a",))
    began = clock.now
    claim_by(run, clock, HERE).take(("a",))
    assert clock.now == began


# ---- logs -----------------------------------------------------------------------------------------------------------


def test_newest_and_new_lines_of_a_log(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    file = LogFile("x", path)
    assert newest_lines(file, 5) == [] and new_lines(file) == []
    path.write_text("".join(f"{n} {'x' * 5000}\n" for n in range(100)) + "half")
    assert [line.split()[0] for line in newest_lines(file, 30)] == [str(n) for n in range(70, 100)]
    assert new_lines(file) == [], "a line that is not whole yet waits"
    with path.open("a") as stream:
        stream.write(" done\nnext")
    assert new_lines(file) == ["half done"]
    assert new_lines(file) == []
    path.write_text("anew\n")
    assert new_lines(file) == ["anew"]
    assert newest_lines(file, 0) == []


def test_lines_of_several_islands_are_ordered_by_time_and_tracebacks_stay_whole() -> None:
    a, b = LogFile("a", Path("a")), LogFile("b", Path("b"))
    lines = [(a, "2026-01-01T00:00:01 one"), (a, "Traceback"), (a, "2026-01-01T00:00:05 five"), (b, "start"),
             (b, "2026-01-01T00:00:03 three")]  # fmt: skip
    assert [line for _, line in in_order(lines)] == [
        "start", "2026-01-01T00:00:01 one", "Traceback", "2026-01-01T00:00:03 three", "2026-01-01T00:00:05 five"
    ]  # fmt: skip


def test_logs_of_one_all_and_wrong_islands(run: Run) -> None:
    here = places.run_dir("demo", run.id)
    assert [file.label for file in log_files(run.spec, here, None, False)] == ["a", "b"]
    assert log_files(run.spec, here, None, True)[0].path == places.supervisor_log("demo", run.id)
    with pytest.raises(ConfigError, match="run demo has no island c; its islands are a, b"):
        log_files(run.spec, here, "c", False)
    with pytest.raises(NothingThere, match="no log on this machine yet"):
        show(log_files(run.spec, here, "a", False), 5, False, run.clock, print)
    for name in ("a", "left"):
        path = places.island_log("demo", run.id, name)
        path.parent.mkdir(parents=True)
        path.write_text(f"hello of {name}\n")
    shown: list[str] = []
    show(log_files(run.spec, here, None, False), 5, False, run.clock, shown.append)
    assert shown == ["a    | hello of a", "left | hello of left"]
    show(log_files(run.spec, here, "left", False), 5, False, run.clock, shown.append)
    assert shown[-1] == "hello of left"


def test_the_newest_local_run_of_a_name(tmp_path: Path) -> None:
    assert places.newest_run_dir("demo") is None
    for age, name in enumerate(("demo-0123456789abcdef", "demo-fedcba9876543210", "demo-2-0123456789abcdef")):
        log = places.home() / "runs" / name / "a" / "island.log"
        log.parent.mkdir(parents=True)
        log.write_text("x\n")
        os.utime(log, (1000 + age, 1000 + age))
    (places.home() / "runs" / "demo-00000000deadbeef").mkdir()
    assert places.newest_run_dir("demo") == places.home() / "runs" / "demo-fedcba9876543210"
    older = places.home() / "runs" / "demo-0123456789abcdef"
    (older / "supervisor.log").write_text("newer than all\n")
    assert places.newest_run_dir("demo") == older
    assert places.newest_run_dir("other") is None


# ---- numbers --------------------------------------------------------------------------------------------------------


def test_numbers_are_short() -> None:
    assert [size(v) for v in (0, 999, 1234, 5_670_000, None)] == ["0 B", "999 B", "1.23 kB", "5.67 MB", "-"]
    assert [count(v) for v in (12, 1500, 2_000_000_000)] == ["12", "1.50 k", "2 G"]
    assert [duration(v) for v in (0.05, 2.5, 45, 100, 200_000)] == ["50 ms", "2.5 s", "45 s", "1.7 min", "2.3 d"]


def test_controls_are_read_newest_first(run: Run) -> None:
    for number, tokens in ((1, 1500), (2, None), (3, None)):
        record = ControlRecord(run_id=run.id, nonce=f"n{number}", number=number, action="run", tokens=tokens)
        run.board.create(run.board.keys.control(number), record)
    assert budget_of(run) == 1500
