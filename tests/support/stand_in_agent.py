"""A process in an agent's place: has a child as an agent has, and ends as its folder tells it.

Files in the spec's folder (`--root`) decide: `stubborn` makes it ignore SIGTERM, `status-ISLAND` holds the exit status
with which it ends at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
root = Path(arguments["--root"])
if (ending := root / f"status-{arguments['--island']}").exists():
    sys.exit(int(ending.read_text()))
stubborn = (root / "stubborn").exists()
handling = "signal.SIG_IGN" if stubborn else "signal.SIG_DFL"
child = subprocess.Popen(
    [sys.executable, "-c", f"import signal, time; signal.signal(signal.SIGTERM, {handling}); time.sleep(120)"]
)


def leave(*_: object) -> None:
    """End as an agent does on SIGTERM."""
    child.terminate()
    child.wait()
    sys.exit(6)


signal.signal(signal.SIGTERM, signal.SIG_IGN if stubborn else leave)
print(f"stand-in for {arguments['--island']} with {arguments['--threads']} threads", flush=True)
(Path(arguments["--state-dir"]) / "up").touch()
time.sleep(120)
