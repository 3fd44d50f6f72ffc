"""How an island's processes start: their arguments, the run they open, and the exit code that each error gives."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco_runtime import __version__
from diloco_runtime.backoff import PAUSES
from diloco_runtime.clock import SystemClock
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import (
    ConfigError,
    CorruptObject,
    DilocoError,
    Fenced,
    IncompatibleModel,
    MissingPayload,
    RunMismatch,
    StoreUnavailable,
)
from diloco_runtime.keys import RUN
from diloco_runtime.launch import (
    Exit,
    Launch,
    exit_code,
    guarded,
    log,
    open_surroundings,
    parse_launch,
    patiently,
)
from diloco_runtime.records import RunRecord, encode
from diloco_runtime.store import open_store
from tests.support.run_records import RUN_ID, config

LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z learner (INFO|WARNING|ERROR) (.*)")


@pytest.fixture(autouse=True)
def _the_log_as_it_was() -> Iterator[None]:
    """A process configures its log once; this one goes on with other tests."""
    before = log.handlers[:], log.level, log.propagate
    log.propagate = True
    yield
    log.handlers[:], log.level, log.propagate = before[0], before[1], before[2]


# ---- exit codes -----------------------------------------------------------------------------------------------------

CODES = {
    ConfigError: 2,
    IncompatibleModel: 2,
    Fenced: 3,
    RunMismatch: 4,
    StoreUnavailable: 1,
    CorruptObject: 1,
    MissingPayload: 1,
}


def test_exit_codes_are_the_documented_ones() -> None:
    names = ["DONE", "CRASHED", "CONFIG", "FENCED", "RUN_GONE", "GAVE_UP", "LEFT"]
    assert {code.name: int(code) for code in Exit} == {name: number for number, name in enumerate(names)}
    ours = {kind for kind in DilocoError.__subclasses__() if kind.__module__ == DilocoError.__module__}
    assert set(CODES) == ours, "an error without a decision about its exit code"


@pytest.mark.parametrize(("kind", "code"), CODES.items())
def test_every_error_has_its_exit_code(kind: type[DilocoError], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Exit:
        raise kind("what is wrong, where, and what to do")

    assert exit_code(kind("x")) == code
    said: list[str] = []
    found = guarded("learner", body, said.append)
    assert found == code and type(found) is int and said == ["what is wrong, where, and what to do"]
    written = capsys.readouterr()
    (line,) = written.err.splitlines()
    match = LINE.fullmatch(line)
    assert match is not None and match.groups() == ("ERROR", "what is wrong, where, and what to do")
    assert written.out == ""


@pytest.mark.parametrize("code", list(Exit))
def test_what_a_body_returns_is_the_exit_code(code: Exit, capsys: pytest.CaptureFixture[str]) -> None:
    found = guarded("learner", lambda: code)
    assert found == code.value and type(found) is int and capsys.readouterr().err == ""


def test_what_nobody_raised_on_purpose_is_a_crash_with_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def body() -> Exit:
        raise ZeroDivisionError("division by zero")

    said: list[str] = []
    assert guarded("learner", body, said.append) == 1
    assert said == ["ZeroDivisionError, see the island's log"], "its text may hold a secret"
    first, *rest = capsys.readouterr().err.splitlines()
    match = LINE.fullmatch(first)
    assert match is not None and match.groups() == ("ERROR", "learner crashed")
    assert rest[0].startswith("Traceback") and rest[-1] == "ZeroDivisionError: division by zero"


def test_an_interruption_is_not_swallowed() -> None:
    def body() -> Exit:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        guarded("learner", body)


@pytest.fixture
def far_east() -> Iterator[None]:
    """The machine's local time is nine hours ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "JST-9")
        time.tzset()
        yield
    time.tzset()


def test_every_message_is_one_line_with_utc_time_process_and_level(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, far_east: None
) -> None:
    def body() -> Exit:
        log.debug("not shown")
        log.info("life %d starts", 3)
        log.warning("slow")
        return Exit.DONE

    for _ in range(2):  # configuring twice does not write twice
        guarded("learner", body)
        found = [LINE.fullmatch(line) for line in capsys.readouterr().err.splitlines()]
        assert [match and match.groups() for match in found] == [("INFO", "life 3 starts"), ("WARNING", "slow")]
    assert caplog.records == [], "nobody else's handlers write it once more"
    formatter = log.handlers[0].formatter
    assert formatter is not None
    record = logging.makeLogRecord({"created": 1_700_000_000.0, "msecs": 250.0, "levelname": "INFO", "msg": "x"})
    assert formatter.format(record) == "2023-11-14T22:13:20.250Z learner INFO x"


# ---- arguments ------------------------------------------------------------------------------------------------------

LAUNCH = Launch("file:///somewhere", "trial", RUN_ID, "iowa", Path("/state"), "/root")


@pytest.mark.parametrize("batch_size", [None, 32])
@pytest.mark.parametrize("threads", [None, 4])
def test_a_child_is_started_with_what_its_agent_was_started_with(batch_size: int | None, threads: int | None) -> None:
    launch = Launch("memory://x", "trial", RUN_ID, "iowa", Path("/st ate"), ".", batch_size, threads)
    child = parse_launch("diloco_runtime.learner_main", launch.arguments(7))
    assert child == Launch("memory://x", "trial", RUN_ID, "iowa", Path("/st ate"), ".", batch_size, threads, 7)


def test_an_agent_needs_no_incarnation() -> None:
    arguments = LAUNCH.arguments(0)
    cut = arguments.index("--incarnation")
    assert parse_launch("diloco_runtime.island", arguments[:cut]) == LAUNCH


@pytest.mark.parametrize("name", ["store", "run", "run-id", "island", "state-dir", "root"])
def test_a_missing_argument_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = LAUNCH.arguments(1)
    at = arguments.index(f"--{name}")
    with pytest.raises(SystemExit) as caught:
        parse_launch("diloco_runtime.island", arguments[:at] + arguments[at + 2 :])
    assert caught.value.code == Exit.CONFIG
    said = capsys.readouterr().err
    assert f"--{name}" in said.splitlines()[-1] and "python -m diloco_runtime.island" in said


def test_learner_and_syncer_report_to_different_files_of_the_state_directory() -> None:
    files = [LAUNCH.learner_status(), LAUNCH.syncer_status()]
    assert len(set(files)) == 2 and {file.parent for file in files} == {LAUNCH.state_dir}


# ---- opening the run ------------------------------------------------------------------------------------------------


def run_record(settings: RunConfig, run_id: str = RUN_ID, version: str = __version__) -> RunRecord:
    return RunRecord(
        run_id=run_id, nonce="first", name="trial", code_version=version, config=settings.model_dump(mode="json"),
        created_wall=0.0,
    )  # fmt: skip


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(f"file://{tmp_path}/blackboard", "trial", RUN_ID, "iowa", tmp_path / "state", str(tmp_path))


def test_the_run_is_opened_with_its_settings_and_its_transfers_are_counted(launch: Launch) -> None:
    settings = config(12_345, fragments=3)
    open_store(launch.store, launch.run).create(RUN, encode(run_record(settings)))
    around = open_surroundings(launch)
    assert around.config == settings and around.launch is launch and around.board.run_id == RUN_ID
    before = around.counter.requests["get"]
    assert around.board.read_commit(0) is None and around.counter.requests["get"] == before + 1
    assert around.counter.bytes_down > 0


def test_without_a_run_nothing_is_opened_and_nothing_written(launch: Launch) -> None:
    with pytest.raises(RunMismatch, match=r"holds no run any more \(run.json is gone\)"):
        open_surroundings(launch)
    assert open_store(launch.store, launch.run).list("") == []


def test_another_run_of_the_same_name_is_not_ours(launch: Launch) -> None:
    other = "fedcba9876543210"
    open_store(launch.store, launch.run).create(RUN, encode(run_record(config(), other)))
    with pytest.raises(RunMismatch, match=f"now holds run {other}, not {RUN_ID}"):
        open_surroundings(launch)


def test_another_version_of_the_code_is_refused(launch: Launch) -> None:
    open_store(launch.store, launch.run).create(RUN, encode(run_record(config(), version="0.0.1")))
    says = f"run trial was made by version 0.0.1 of diloco-runtime, island iowa has {re.escape(__version__)}; install"
    with pytest.raises(ConfigError, match=says):
        open_surroundings(launch)


@pytest.mark.parametrize("store", ["gs://", "s3://bucket/a b", "ftp://host/x", "file://relative/folder", "memory://"])
def test_a_store_that_cannot_be_is_a_configuration_error(launch: Launch, store: str) -> None:
    changed = Launch(store, launch.run, RUN_ID, "iowa", launch.state_dir, launch.root)
    with pytest.raises(ConfigError, match=re.escape(store)):
        open_surroundings(changed)


def test_a_store_that_does_not_answer_is_waited_for(
    launch: Launch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file where the run's folder should be: the store fails until it is gone, which is while we wait."""
    blocked = tmp_path / "blackboard"
    blocked.write_bytes(b"in the way")
    waits: list[float] = []

    def mend(clock: SystemClock, seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            blocked.unlink()
            open_store(launch.store, launch.run).create(RUN, encode(run_record(config())))

    monkeypatch.setattr(SystemClock, "sleep", mend)
    assert open_surroundings(launch).config == config() and len(waits) == 2


# ---- patience -------------------------------------------------------------------------------------------------------


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Return an action that fails so many times and then answers."""
    left = [error] * times

    def action() -> str:
        if left:
            raise left.pop()
        return "answer"

    return action


def test_an_outage_is_waited_out_with_growing_pauses(clock, caplog: pytest.LogCaptureFixture) -> None:
    started, failures = clock.now, len(PAUSES) + 3
    with caplog.at_level(logging.WARNING, log.name):
        assert patiently(clock, failing(failures, StoreUnavailable("no route"))) == "answer"
    assert clock.now - started == pytest.approx(sum(PAUSES) + 3 * PAUSES[-1])
    assert [record.getMessage() for record in caplog.records] == [
        "the store does not answer, trying again: no route"
    ] * failures


def test_only_outages_are_waited_out(clock) -> None:
    for error in (RunMismatch("gone"), CorruptObject("broken"), ValueError("bug")):
        with pytest.raises(type(error)):
            patiently(clock, failing(1, error))
    assert clock.now == 1000.0


# ---- the way out ----------------------------------------------------------------------------------------------------


def run_python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run some code in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": ""}
    return subprocess.run([sys.executable, "-c", code], env=env, text=True, timeout=60, check=False, **options)


def test_a_process_ends_with_its_code_whatever_its_threads_do() -> None:
    """A thread in native code is no reason to abort: the agent would count a finished learner as crashed."""
    code = (
        "import sys, threading, torch\n"
        "from diloco_runtime.launch import Exit, end_process\n"
        "begun = threading.Barrier(5)\n"
        "def work():\n"
        "    begun.wait()\n"
        "    while True:\n"
        "        torch.rand(64, 64).sum()\n"
        "for _ in range(4):\n"
        "    threading.Thread(target=work, daemon=True).start()\n"
        "begun.wait()\n"
        "print('the last words')\n"
        "end_process(Exit.LEFT)\n"
    )
    done = run_python(code, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (Exit.LEFT, "the last words\n", "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_does_not_change_the_code() -> None:
    code = "from diloco_runtime.launch import Exit, end_process; print('words'); end_process(Exit.LEFT)"
    with open("/dev/full", "w") as full:
        assert run_python(code, stdout=full, stderr=full).returncode == Exit.LEFT


def test_sigterm_ends_a_process_that_starts_and_is_a_signal_for_one_that_works() -> None:
    code = (
        "import os, signal\n"
        "from diloco_runtime.clock import SystemClock\n"
        "from diloco_runtime.launch import leaving_on_sigterm\n"
        "{begin}"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(leaving.wait(5.0))\n"
    )
    starting = run_python(code.format(begin="leaving = SystemClock().signal()\n"), capture_output=True)
    assert (starting.returncode, starting.stdout) == (-signal.SIGTERM, "")
    working = run_python(code.format(begin="leaving = leaving_on_sigterm(SystemClock())\n"), capture_output=True)
    assert (working.returncode, working.stdout) == (0, "True\n")
