"""Every command that needs no island, from outside: what it does, refuses and says."""

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from diloco_cli import places
from diloco_cli.__main__ import main
from diloco_cli.runs import find_run
from diloco_cli.spec import load_spec
from tests.support.cli_records import commit

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("some text\n" * 400)
    path = tmp_path / "demo.toml"
    path.write_text(
        '[run]\nname = "demo"\nstore = "file://./bb"\ntokens = 1000\n[data]\nfiles = ["a.txt"]\n'
        "[model]\nlayers = 1\nheads = 1\nwidth = 8\n[sync]\nheartbeat_every = 0.2\n[islands.a]\n[islands.b]\n"
    )
    return path


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


# ---- plan, up, status, down -----------------------------------------------------------------------------------------


def test_plan_creates_nothing_and_json_is_one_document(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(spec), "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["run"] == "demo" and said.err == ""
    assert not (spec.parent / "bb").exists()


def test_up_creates_the_run_once(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    first = (spec.parent / "bb/demo/run.json").read_bytes()
    assert "run demo is up (run id" in capsys.readouterr().out
    edit(spec, "tokens = 1000", "tokens = 2000")
    assert main(["up", str(spec), "--yes"]) == 0, "a raised budget is the same run"
    said = capsys.readouterr().out
    assert "run demo is already up" in said
    assert "budget 2 k tokens (now 1 k; `diloco train` raises it)" in said
    assert (spec.parent / "bb/demo/run.json").read_bytes() == first
    visible = {path.name for path in (spec.parent / "bb/demo").iterdir() if not path.name.startswith(".")}
    assert visible == {"run.json", json.loads(first)["run_id"]}, "nothing of the store's check is left"


def test_up_refuses_another_identity_and_names_the_keys(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    edit(spec, "width = 8", "width = 16")
    edit(spec, "[islands.a]", "[inner]\nlr = 0.5\n[islands.a]")
    capsys.readouterr()
    for command in (["plan"], ["up", "--yes"], ["train"]):
        assert main([command[0], str(spec), *command[1:]]) == 4
        shown = capsys.readouterr()
        said = shown.err
        assert shown.out == "", "no plan for what is refused"
        assert "inner.lr: the run has 0.003, the spec has 0.5; model.width: the run has 8, the spec has 16" in said
        assert "run.name" in said and "diloco down demo.toml --purge" in said


def test_scripts_may_tell_train_not_to_ask(spec: Path) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    edit(spec, "tokens = 1000", "tokens = 500")
    assert main(["train", str(spec), "--yes"]) == main(["train", str(spec)]) == 2, "refused for its budget either way"


def test_a_lowered_budget_is_refused_alike_by_all_and_before_a_plan_is_shown(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    edit(spec, "tokens = 1000", "tokens = 500")
    capsys.readouterr()
    for command in (["plan"], ["plan", "--json"], ["up", "--yes"], ["train"]):
        assert main([command[0], str(spec), *command[1:]]) == 2, command
        said = capsys.readouterr()
        assert "demo.toml: [run] tokens = 500: the run's budget is 1000 already" in said.err
        assert said.out == ""


def test_up_refuses_another_version_of_the_code(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    record = spec.parent / "bb/demo/run.json"
    edit(record, '"code_version":"', '"code_version":"9')
    assert main(["train", str(spec)]) == 4
    assert "was made by version 9" in capsys.readouterr().err


def test_nothing_is_created_when_data_files_are_missing(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (spec.parent / "a.txt").unlink()
    for command in (["plan"], ["up", "--yes"], ["train"]):
        assert main([command[0], str(spec), *command[1:]]) == 2
        said = capsys.readouterr()
        assert '"a.txt" matches no file' in said.err and said.out == ""
    assert not (spec.parent / "bb").exists()


def test_a_store_that_cannot_be_written_is_3(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (spec.parent / "bb").write_text("a file where the folder should be")
    for command in (["up", "--yes"], ["train"], ["down"]):
        assert main([command[0], str(spec), *command[1:]]) == 3, command
        assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("command", ["status", "logs", "export", "eval", "sample"])
def test_commands_that_need_a_run_say_how_to_start_one(
    spec: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, str(spec)]) == 4
    assert "there is no run demo" in (said := capsys.readouterr().err) and "diloco train demo.toml" in said


def test_status_of_a_run_that_never_started(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    capsys.readouterr()
    assert main(["status", str(spec), "--json"]) == 0
    said = capsys.readouterr()
    report = json.loads(said.out)
    assert said.err == ""
    assert (report["state"], report["budget"], report["supervisor"]) == ("PENDING", 1000, "ENDED")
    assert [(island["name"], island["state"]) for island in report["islands"]] == [("a", "PENDING"), ("b", "PENDING")]
    assert main(["status", str(spec)]) == 0
    assert "PENDING" in capsys.readouterr().out


def test_what_is_not_there_yet_is_4(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    for command in (["export"], ["eval"], ["sample"], ["eval", "--at", "3"]):
        assert main([command[0], str(spec), *command[1:]]) == 4
        said = capsys.readouterr().err
        assert "run demo has no model yet" in said and "diloco train demo.toml" in said
    assert main(["logs", str(spec)]) == 4
    assert "no log on this machine yet" in capsys.readouterr().err
    run = find_run(load_spec(spec))
    assert run is not None
    run.board.create(run.board.keys.log(0), commit(0, run_id=run.id))
    for command in ("export", "eval", "sample"):
        assert main([command, str(spec), "--at", "3"]) == 4
        assert "run demo has no log position 3 yet; the newest is 0" in capsys.readouterr().err


def test_an_exported_file_has_no_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tmp_path / "model.safetensors"), "--at", "3"]) == 2
    assert "an exported file holds just one" in capsys.readouterr().err


def test_down_is_fine_at_any_time_and_twice(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", str(spec)]) == 0
    assert "there is no run demo" in capsys.readouterr().out
    assert main(["up", str(spec), "--yes"]) == 0
    assert main(["down", str(spec)]) == main(["down", str(spec)]) == 0
    assert main(["status", str(spec)]) == 0
    assert "demo STOPPED (diloco down)" in capsys.readouterr().out
    assert main(["down", str(spec), "--purge", "--yes"]) == main(["down", str(spec), "--purge", "--yes"]) == 0
    assert main(["status", str(spec)]) == 4
    assert not list((spec.parent / "bb").rglob("*.json"))


def test_logs_outlive_a_purge_and_an_outage(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    run = find_run(load_spec(spec))
    assert run is not None
    log = places.island_log(run.name, run.id, "b")
    log.parent.mkdir(parents=True)
    log.write_text("last words\n")
    assert main(["down", str(spec), "--purge", "--yes"]) == 0
    assert f"logs stay in {places.run_dir(run.name, run.id)}" in capsys.readouterr().out
    (spec.parent / "elsewhere").write_text("a file where the folder should be")
    for store, why in (("file://./bb", "there is no run demo"), ("file://./elsewhere", "cannot read run.json")):
        edit(spec, spec.read_text().split('store = "')[1].split('"')[0], store)
        assert main(["logs", str(spec)]) == 0
        said = capsys.readouterr()
        assert said.out == "b | last words\n"
        assert why in said.err and str(places.run_dir(run.name, run.id)) in said.err
    assert main(["up", str(spec), "--yes"]) == 3


def test_purge_asks_first(spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from io import StringIO

    assert main(["up", str(spec), "--yes"]) == 0
    monkeypatch.setattr(sys, "stdin", StringIO("n\n"))
    assert main(["down", str(spec), "--purge"]) == 1
    said = capsys.readouterr()
    assert "the model included?" in said.out and "nothing was done" in said.err
    monkeypatch.setattr(sys, "stdin", StringIO(""))
    assert main(["down", str(spec), "--purge"]) == 1, "the end of the input is no yes"
    assert (spec.parent / "bb/demo/run.json").exists()


def interrupt_at_the_question(question: bytes, *arguments: str) -> tuple[int, bytes]:
    """Run a command on a terminal of its own and send it SIGINT when it asks; return its exit code and output."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "diloco_cli", *arguments]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        said, deadline = b"", time.monotonic() + 50
        try:
            while question not in said:
                assert select.select([ours], [], [], deadline - time.monotonic())[0], said
                said += os.read(ours, 4096)
            # A signal between the question and the read would wait for a key, so wait for the read first.
            child, asleep = psutil.Process(process.pid), 0
            while asleep < 10:
                assert time.monotonic() < deadline, said
                asleep = asleep + 1 if child.status() == psutil.STATUS_SLEEPING else 0
                time.sleep(0.02)
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(OSError):  # a terminal that nobody holds any more reads as an error
                while more := os.read(ours, 4096):
                    said += more
            return process.wait(50), said
        finally:
            process.kill()
            os.close(ours)


def test_ctrl_c_at_a_question_is_130_and_nothing_is_done(spec: Path) -> None:
    code, said = interrupt_at_the_question(b"Go on?", "up", str(spec))
    assert code == 130 and b"nothing was done" in said, said
    assert not (spec.parent / "bb").exists()
    assert main(["up", str(spec), "--yes"]) == 0
    code, said = interrupt_at_the_question(b"the model included?", "down", str(spec), "--purge")
    assert code == 130 and b"nothing was done" in said, said
    assert (spec.parent / "bb/demo/run.json").exists()
