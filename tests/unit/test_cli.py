"""The command line from outside: help, exit codes, messages, and every command that needs no island."""

import json
import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from diloco_cli.__main__ import main
from diloco_cli.exit_codes import MEANINGS, ExitCode, code_for
from diloco_cli.resources import find
from diloco_cli.spec import load_spec
from diloco_runtime import errors

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


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "runtime")])}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, timeout=50)


# ---- help -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "sky", "psutil", "rich", "numpy", "fsspec")
    done = run_python(
        f"import sys\nfrom diloco_cli.__main__ import main\ncode = main({arguments!r})\n"
        f"print(code, [name for name in {heavy!r} if name in sys.modules])"
    )
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr


def test_help_takes_little_cpu_time() -> None:
    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run_python("from diloco_cli.__main__ import main; main(['--help'])").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    # The first run may have to compile; a busy machine inflates CPU time, so the best of a few counts.
    assert min(seconds() for _ in range(4)) < 0.4


def test_help_lists_commands_in_panels_and_every_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for panel in ("Run:", "Look:", "Use the model:", "Exit codes:"):
        assert panel in text
    for command in "init plan up train down status logs export eval sample".split():
        assert re.search(rf"^  {command} +\w[^.]*\.?$", text, re.MULTILINE), command
    for code, meaning in MEANINGS.items():
        assert re.search(rf"^ +{int(code)}  {re.escape(meaning)}$", text, re.MULTILINE)
    assert set(MEANINGS) == set(ExitCode)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError(), 2),
        (errors.StoreUnavailable(), 3),
        (errors.RunMismatch(), 4),
        (errors.MissingPayload(), 4),
        (errors.CorruptObject(), 1),
        (ValueError(), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_exit_codes(error: BaseException, code: int) -> None:
    assert code_for(error) == code


def test_wrong_usage_is_2_and_a_near_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
    assert main(["status", "--watch", "--json"]) == 2
    assert "take one of --watch and --json" in capsys.readouterr().err


def test_a_bad_spec_is_a_message_and_debug_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.toml"
    path.write_text('[run]\nname = "a"\ntokns = 3\n')
    for command in ("plan", "up", "train", "status", "down", "logs", "export", "eval", "sample"):
        assert main([command, str(path)]) == 2
        said = capsys.readouterr()
        assert "error: x.toml: [run] store: missing" in said.err and "did you mean tokens?" in said.err
        assert "Traceback" not in said.err and said.out == ""
    with pytest.raises(errors.ConfigError):
        main(["plan", str(path), "--debug"])


# ---- init -----------------------------------------------------------------------------------------------------------


def test_init_writes_a_spec_that_loads_and_is_named_after_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "bard")]) == 0
    assert f"next: diloco train {tmp_path}/bard/run.toml" in capsys.readouterr().out
    assert load_spec(tmp_path / "bard" / "run.toml").name == "bard"
    assert main(["plan", str(tmp_path / "bard" / "run.toml")]) == 0
    assert main(["init", str(tmp_path / "other.toml")]) == 0
    assert load_spec(tmp_path / "other.toml").name == "other"
    assert main(["init", str(tmp_path / "Not A Name")]) == 0
    assert load_spec(tmp_path / "Not A Name" / "run.toml").name == "my-run"


def test_init_replaces_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sonnets.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 0
    assert (tmp_path / "sonnets.txt").read_text() == "mine"
    (tmp_path / "run.toml").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "run.toml").read_text() == "mine"


def test_the_starters_comments_tell_the_true_defaults(tmp_path: Path) -> None:
    template = find("templates/local.toml").read_text()
    said = re.sub(r"^# (\w+ = )", r"\1", template, flags=re.MULTILINE)
    assert len(tomllib.loads(said)["sync"]) > len(tomllib.loads(template)["sync"])
    (tmp_path / "commented.toml").write_text(template)
    (tmp_path / "said.toml").write_text(said)
    commented, uncommented = load_spec(tmp_path / "commented.toml"), load_spec(tmp_path / "said.toml")
    assert uncommented.config == commented.config and uncommented.provider == commented.provider


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
    assert "run demo is already up" in capsys.readouterr().out
    assert (spec.parent / "bb/demo/run.json").read_bytes() == first
    visible = {path.name for path in (spec.parent / "bb/demo").iterdir() if not path.name.startswith(".")}
    assert visible == {"run.json", json.loads(first)["run_id"]}, "nothing of the store's check is left"


def test_up_refuses_another_identity_and_names_the_keys(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    edit(spec, "width = 8", "width = 16")
    edit(spec, "[islands.a]", "[inner]\nlr = 0.5\n[islands.a]")
    for command in (["up", "--yes"], ["train"]):
        assert main([command[0], str(spec), *command[1:]]) == 4
        said = capsys.readouterr().err
        assert "inner.lr: the run has 0.003, the spec has 0.5; model.width: the run has 8, the spec has 16" in said
        assert "run.name" in said and "diloco down demo.toml --purge" in said


def test_up_refuses_another_version_of_the_code(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    record = spec.parent / "bb/demo/run.json"
    edit(record, '"code_version":"', '"code_version":"9')
    assert main(["train", str(spec)]) == 4
    assert "was made by version 9" in capsys.readouterr().err


def test_nothing_is_created_when_data_files_are_missing(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (spec.parent / "a.txt").unlink()
    for command in ("up", "train"):
        assert main([command, str(spec), "--yes"]) == 2
        assert '"a.txt" matches no file' in capsys.readouterr().err
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


def test_using_a_model_that_is_not_there_yet(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", str(spec), "--yes"]) == 0
    for command in ("export", "eval", "sample"):
        assert main([command, str(spec)]) == 2
        assert "no island has initialised the run" in capsys.readouterr().err


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


def test_purge_asks_first(spec: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from io import StringIO

    assert main(["up", str(spec), "--yes"]) == 0
    monkeypatch.setattr(sys, "stdin", StringIO("n\n"))
    assert main(["down", str(spec), "--purge"]) == 1
    assert "the model included?" in capsys.readouterr().out
    assert (spec.parent / "bb/demo/run.json").exists()
