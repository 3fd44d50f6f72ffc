"""What is built can be installed and used without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import diloco_runtime

ROOT = Path(__file__).resolve().parents[2]


def run(*command: str | Path, cwd: Path) -> str:
    """Run a program without any help from this checkout's paths; return its output, fail with all it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} exited {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def pip(*arguments: str | Path, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, cwd=cwd)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build both distributions; return the folder with the wheels."""
    folder = tmp_path_factory.mktemp("wheels")
    offline = ("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder)
    pip(*offline, ROOT, ROOT / "runtime", cwd=folder)
    return folder


def wheel(wheels: Path, name: str) -> Path:
    (found,) = wheels.glob(f"{name}-{diloco_runtime.__version__}-*.whl")
    return found


def environment_with(package: Path, folder: Path) -> Path:
    """Make a virtual environment with one wheel, whose dependencies are those of this interpreter; return its bin."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path file in there is not followed further, so an editable installation of this checkout is not seen.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip("--python", folder / "bin" / "python", "install", "--no-deps", "--no-index", package, cwd=folder)
    return folder / "bin"


@pytest.fixture(scope="module")
def installed(wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the command line's wheel; return the bin folder of its environment."""
    return environment_with(wheel(wheels, "diloco"), tmp_path_factory.mktemp("cli") / "venv")


def test_both_wheels_hold_what_they_should(wheels: Path) -> None:
    cli = zipfile.ZipFile(wheel(wheels, "diloco")).namelist()
    runtime = zipfile.ZipFile(wheel(wheels, "diloco_runtime")).namelist()
    assert {name.partition("/")[0] for name in cli} == {
        "diloco_cli", "diloco_runtime", f"diloco-{diloco_runtime.__version__}.dist-info",
    }  # fmt: skip
    assert {name.partition("/")[0] for name in runtime} == {
        "diloco_runtime", f"diloco_runtime-{diloco_runtime.__version__}.dist-info",
    }  # fmt: skip
    modules = {f"diloco_runtime/{file.name}" for file in (ROOT / "runtime/diloco_runtime").glob("*.py")}
    for names in (cli, runtime):
        assert modules < set(names)
        assert "diloco_runtime/py.typed" in names
    assert any(name.endswith("/licenses/LICENSE") for name in cli)


def test_shipped_files_are_found_in_an_installation(installed: Path, tmp_path: Path) -> None:
    templates = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "templates").rglob("*") if path.is_file())
    assert templates, "templates/ is empty"
    for name in (*templates, "runtime/pyproject.toml"):
        found = run(
            installed / "python", "-c", f"from diloco_cli.resources import find; print(find({name!r}))", cwd=tmp_path
        ).strip()
        assert Path(found).is_relative_to(installed.parent)
        assert Path(found).read_bytes() == (ROOT / name).read_bytes()


def test_the_runtime_comes_with_the_command_line(installed: Path, tmp_path: Path) -> None:
    code = "import diloco_runtime as r; print(r.__version__, r.__file__)"
    version, file = run(installed / "python", "-c", code, cwd=tmp_path).split()
    assert version == diloco_runtime.__version__
    assert Path(file).is_relative_to(installed.parent)


def test_the_runtime_wheel_works_alone(wheels: Path, tmp_path: Path) -> None:
    bin_folder = environment_with(wheel(wheels, "diloco_runtime"), tmp_path / "venv")
    code = (
        "import sys, diloco_runtime.blackboard, diloco_runtime.store as s\n"
        f"store = s.open_store('file://{tmp_path}/blackboard', 'trial'); store.create('a', b'x')\n"
        "print(store.get('a'), s.__file__, [m for m in sys.modules if m.startswith('diloco_cli')])"
    )
    body, file, modules = run(bin_folder / "python", "-c", code, cwd=tmp_path).split()
    assert (body, modules) == ("b'x'", "[]")
    assert Path(file).is_relative_to(bin_folder.parent)


@pytest.mark.parametrize("module", ["diloco_cli", "diloco_cli.resources", "diloco_cli.__main__"])
def test_the_command_line_starts_without_heavy_modules(installed: Path, tmp_path: Path, module: str) -> None:
    code = f"import sys, {module}; print(sorted({{'torch', 'sky', 'psutil', 'numpy'}} & set(sys.modules)))"
    assert run(installed / "python", "-c", code, cwd=tmp_path) == "[]\n"


def test_the_command_is_installed(installed: Path, tmp_path: Path) -> None:
    output = run(installed / "diloco", "--help", cwd=tmp_path)
    assert "train" in output
