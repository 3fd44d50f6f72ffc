"""Where the benches work: a temporary folder with a text, the demo's settings, and nothing left behind."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_cli.spec import Spec, load_spec
from diloco_runtime.config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "examples" / "shakespeare" / "run.toml"

TEXT_BYTES = 4_000_000
_WORDS = b"when forty winters shall besiege thy brow and dig deep trenches in thy beauty's field "

NO_END = 10**12
"""A token budget that no bench reaches."""


@contextmanager
def workplace() -> Iterator[Path]:
    """Yield a temporary folder that islands started here use for all their state; it vanishes at the end."""
    # Also when told to end: leave through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="diloco-bench-") as name:
        folder = Path(name).resolve()
        os.environ["DILOCO_HOME"] = str(folder / "home")
        sources = [str(ROOT), str(ROOT / "runtime"), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(sources)  # children run this very source, installed or not
        yield folder


def write_text(folder: Path) -> None:
    """Write some text to `folder`: speed does not depend on what it says."""
    (folder / "text.txt").write_bytes(_WORDS * (TEXT_BYTES // len(_WORDS)))


def changed(config: RunConfig, **tables: Mapping[str, Any] | int | str) -> RunConfig:
    """Return a config with other values: `sync={"fragments": 3}` changes that key and keeps the rest of the table."""
    dumped = config.model_dump()
    for name, value in tables.items():
        dumped[name] = {**dumped[name], **value} if isinstance(value, Mapping) else value
    return RunConfig.model_validate(dumped)


def demo_spec(folder: Path, **tables: Mapping[str, Any] | int | str) -> Spec:
    """Return the demo's spec for its first island alone, moved to `folder` and its text, without an end."""
    spec = load_spec(DEMO)
    data = {"files": ("text.txt",), "held_out_files": ()}
    config = changed(spec.config, **{"tokens": NO_END, "data": data, **tables})
    return replace(
        spec, path=folder / "run.toml", store=f"file://{folder}/blackboard", config=config, islands=spec.islands[:1]
    )
