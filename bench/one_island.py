"""Three islands against one: the same inner steps per island on the same text, through the real command line.

First the demo's three islands train on a small budget, then one of them alone on a third of it, or on a little more if
it takes that to make as many inner steps as the most eager of the three. Printed are the held-out losses of the two
global models. Exits with 1 unless the three end lower.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _results import Lines, parse_arguments, print_table
from _workplace import DEMO, workplace

from diloco_cli.spec import load_spec

DILOCO = (sys.executable, "-m", "diloco_cli")
LIMIT_SECONDS = 600.0
"""For one training run on a machine that is busy with other things."""


@dataclass(frozen=True)
class Outcome:
    """What one training run came to."""

    islands: int
    budget: int
    steps: dict[str, int]
    """Inner steps by island."""
    tokens: float
    """Merged into the global model."""
    offers_per_commit: float
    loss: float
    """Held out, of the global model at the end."""
    seconds: float


def diloco(folder: Path, *arguments: str) -> str:
    """Run one command on the spec in `folder` and return what it printed; end the bench when it fails."""
    command = [*DILOCO, arguments[0], "run.toml", *arguments[1:]]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=LIMIT_SECONDS)
    if done.returncode != 0:
        raise SystemExit(f"`diloco {' '.join(arguments)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def write_spec(folder: Path, islands: int, tokens: int) -> None:
    """Write the demo's spec with its first islands only and another budget."""
    folder.mkdir()
    settings, *tables = re.split(r"^(?=\[islands\.)", DEMO.read_text(), flags=re.MULTILINE)
    settings, found = re.subn(r"^tokens = .*$", f"tokens = {tokens}", settings, flags=re.MULTILINE)
    if found != 1 or len(tables) < islands:
        raise SystemExit(f"{DEMO} is not the spec that this bench was written for")
    (folder / "run.toml").write_text(settings + "".join(tables[:islands]))
    (folder / "data").symlink_to(DEMO.parent / "data", target_is_directory=True)


@contextlib.contextmanager
def taken_down(folder: Path) -> Iterator[None]:
    """End every process of the run in `folder` when the block was left by an error or Ctrl-C."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(SystemExit):
            diloco(folder, "down", "--now", "--yes")
        raise


def train(folder: Path, islands: int, tokens: int) -> Outcome:
    """Train a run of its own from start to end."""
    write_spec(folder, islands, tokens)
    started = time.monotonic()
    with taken_down(folder):
        diloco(folder, "train", "--yes")
        seconds = time.monotonic() - started
        status: dict[str, Any] = json.loads(diloco(folder, "status", "--json"))
        return Outcome(
            islands=islands,
            budget=tokens,
            steps={island["name"]: int(island["step"]) for island in status["islands"]},
            tokens=float(status["tokens"]),
            offers_per_commit=float(status["offers_per_commit"]),
            loss=float(json.loads(diloco(folder, "eval", "--json"))["held_out_loss"]),
            seconds=seconds,
        )


def main() -> int:
    """Train both, print both."""
    arguments = parse_arguments(str(__doc__))
    lines = Lines("one_island", arguments)
    tokens = 200_000 if arguments.quick else 450_000
    subprocess.run([sys.executable, str(DEMO.with_name("get_corpus.py"))], check=True, stdout=subprocess.DEVNULL)
    with workplace() as folder:
        three = train(folder / "three", 3, tokens)
        inner = load_spec(folder / "three" / "run.toml").config.inner
        same_steps = max(three.steps.values()) * inner.batch_size * inner.sequence_length
        one = train(folder / "one", 1, max(tokens // 3, same_steps))
    rows = []
    for done in (three, one):
        steps = ", ".join(str(count) for count in done.steps.values())
        rows.append([f"{done.islands}", done.budget, steps, done.offers_per_commit, f"{done.loss:.4f}", done.seconds])
        lines.add("training", **vars(done))
    headers = ("islands", "token budget", "inner steps", "offers / commit", "held-out loss", "seconds")
    print_table("The global model at the end, held-out loss in nats per byte", headers, rows)
    ratio = three.loss / one.loss
    print(f"\nthe three together end at {ratio:.3f} of the loss of the one alone ({three.loss - one.loss:+.4f} nats)")
    lines.add("three_over_one", ratio=ratio, difference=three.loss - one.loss)
    lines.finish()
    return 0 if three.loss < one.loss else 1


if __name__ == "__main__":
    sys.exit(main())
