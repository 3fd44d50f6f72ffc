"""The command line from outside: help, exit codes, messages, `init`."""

import os
import re
import resource
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from diloco_cli.__main__ import main
from diloco_cli.app import app
from diloco_cli.errors import AnotherSupervisor, NothingThere, SpecError, TeardownFailed
from diloco_cli.exit_codes import MEANINGS, ExitCode, code_for
from diloco_cli.resources import find
from diloco_cli.spec import load_spec
from diloco_runtime import __version__, errors

ROOT = Path(__file__).resolve().parents[2]


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


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"diloco {__version__}\n"


def test_the_help_of_every_command_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    helped = {}
    for command in typer.main.get_command(app).commands:  # type: ignore[attr-defined]
        assert main([command, "--help"]) == 0
        helped[command] = capsys.readouterr().out
        assert "[[" not in helped[command] and "]]" not in helped[command], command
        assert not re.search(r"\[default: *\]", helped[command].replace("\n", "")), command
    assert "diloco init [OPTIONS] [DIR|FILE]" in helped["init"]
    assert "diloco logs [OPTIONS] [SPEC] [ISLAND]" in helped["logs"]
    assert "a newline" in helped["sample"]
    assert "--yes" in helped["up"] and "--yes" not in helped["train"], "train never asks in this version"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError(), 2),
        (errors.StoreUnavailable(), 3),
        (errors.RunMismatch(), 4),
        (errors.MissingPayload(), 4),
        (errors.IncompatibleModel(), 4),
        (NothingThere(), 4),
        (AnotherSupervisor(), 7),
        (SpecError([]), 2),
        (errors.CorruptObject(), 1),
        (TeardownFailed(), 1),
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
