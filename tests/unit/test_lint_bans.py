"""The rules that lint is to enforce really fire, and fire only where they should."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOGIC = ("diloco_cli/some_module.py", "runtime/diloco_runtime/some_module.py")


def lint(file: str, source: str) -> set[str]:
    """Return the codes that the project's own rules report for `source`, were it the contents of `file`."""
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--output-format=concise",
        "--stdin-filename",
        file,
        "-",
    ]
    done = subprocess.run(command, cwd=ROOT, input=source, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    return {line.split()[1] for line in done.stdout.splitlines() if line.startswith(f"{file}:")}


CLOCK_AND_CHANCE = [
    "import time\n\nprint(time.time())\n",
    "import time\n\nprint(time.time_ns())\n",
    "import time\n\nprint(time.monotonic())\n",
    "import time\n\nprint(time.perf_counter())\n",
    "import time\n\ntime.sleep(1)\n",
    "from time import sleep\n\nsleep(1)\n",
    "import time as clock\n\nclock.sleep(1)\n",
    "import datetime\n\nprint(datetime.datetime.now())\n",
    "from datetime import datetime\n\nprint(datetime.now())\n",
    "from datetime import datetime\n\nprint(datetime.utcnow())\n",
    "from datetime import date\n\nprint(date.today())\n",
    "import random\n\nprint(random.random())\n",
    "from random import Random\n\nprint(Random(0))\n",
    "import secrets\n\nprint(secrets.token_hex())\n",
    "import uuid\n\nprint(uuid.uuid4())\n",
    "import os\n\nprint(os.urandom(8))\n",
    "def late() -> float:\n    import time\n\n    return time.time()\n",
]
LIBRARIES = [
    "import fsspec\n\nprint(fsspec)\n",
    "from fsspec.implementations.memory import MemoryFileSystem\n\nprint(MemoryFileSystem)\n",
    "import rich\n\nprint(rich)\n",
    "from rich.table import Table\n\nprint(Table)\n",
    "def late() -> None:\n    import sky\n\n    print(sky)\n",
]


@pytest.mark.parametrize("file", LOGIC)
@pytest.mark.parametrize("source", CLOCK_AND_CHANCE + LIBRARIES)
def test_bans_fire(file: str, source: str) -> None:
    assert lint(file, source) == {"TID251"}


@pytest.mark.parametrize("module", ["torch", "psutil", "torch.nn"])
def test_heavy_modules_are_not_imported_at_the_top_of_the_command_line(module: str) -> None:
    at_the_top = f"import {module}\n\nprint({module})\n"
    inside = f"def late() -> None:\n    import {module}\n\n    print({module})\n"
    assert lint("diloco_cli/some_module.py", at_the_top) == {"TID253"}
    assert lint("diloco_cli/some_module.py", inside) == set()
    assert lint("runtime/diloco_runtime/some_module.py", at_the_top) == set()


def test_skypilot_is_not_imported_at_the_top_of_the_command_line() -> None:
    assert lint("diloco_cli/some_module.py", "import sky\n\nprint(sky)\n") == {"TID251", "TID253"}


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/diloco_runtime/clock.py", CLOCK_AND_CHANCE[0]),
        ("runtime/diloco_runtime/store_memory.py", LIBRARIES[0]),
        ("diloco_cli/views.py", LIBRARIES[3]),
        ("tests/unit/test_something.py", CLOCK_AND_CHANCE[0]),
        ("bench/bench_something.py", CLOCK_AND_CHANCE[3]),
        ("examples/thing/demo.py", CLOCK_AND_CHANCE[4]),
        *((file, "import time\n\nprint(time.strftime('%H'), time.process_time())\n") for file in LOGIC),
    ],
)
def test_bans_spare_their_homes(file: str, source: str) -> None:
    assert lint(file, source) == set()


def test_the_runtime_is_checked_for_an_older_python() -> None:
    source = "def f() -> None:\n    try:\n        pass\n    except* ValueError:\n        pass\n"
    assert lint("runtime/diloco_runtime/some_module.py", source) == {"invalid-syntax:"}
    assert lint("diloco_cli/some_module.py", source) == set()


@pytest.mark.parametrize("file", sorted((ROOT / "runtime/diloco_runtime").rglob("*.py")), ids=lambda file: file.name)
def test_the_runtime_knows_nothing_of_the_command_line(file: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: write the import out"
            imported.add((node.module or "").partition(".")[0])
    assert not imported & {"diloco_cli", "typer", "rich", "sky", "click"}
