"""The whole thing in a few minutes: three islands train one model on real text, one is killed, a model comes out.

Drives the `diloco` command exactly as a person would, in this directory. Ends by itself; Ctrl-C takes the run down.
Another spec beside run.toml may be named: `python demo.py run-s3.toml`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SPEC = "run.toml"
VICTIM = "b"
EXPORT = "shakespeare.safetensors"
DILOCO = (sys.executable, "-m", "diloco_cli")
LOOK_SECONDS = 2.0
LIMIT_SECONDS = 900.0


def diloco(*arguments: str) -> str:
    """Run one command and return what it printed; end the demo with its message when it fails."""
    done = subprocess.run([*DILOCO, *arguments], cwd=HERE, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"`diloco {' '.join(arguments)}` ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def show(command: str) -> None:
    """Print a command as a person would type it."""
    print(f"\n$ {command}", flush=True)


def status(spec: str) -> dict[str, Any] | None:
    """Return what `diloco status --json` says, or None while there is no run yet."""
    done = subprocess.run([*DILOCO, "status", spec, "--json"], cwd=HERE, capture_output=True, text=True, check=False)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return None
    return report


def island(report: dict[str, Any], name: str) -> dict[str, Any]:
    """Return one island's part of a status report."""
    found: dict[str, Any] = next(part for part in report["islands"] if part["name"] == name)
    return found


def kill_half_way(training: subprocess.Popen[bytes], spec: str) -> None:
    """Wait until half of the budget is merged, then end every process of one island with SIGKILL."""
    while training.poll() is None:
        report = status(spec)
        if report is not None and report["tokens"] >= report["budget"] / 2:
            pid = island(report, VICTIM)["pid"]
            if pid is not None:
                print(f"\n*** kill -9 of all processes of island {VICTIM} (process group {pid}) ***\n", flush=True)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(os.getpgid(pid), signal.SIGKILL)
                return
        with contextlib.suppress(subprocess.TimeoutExpired):
            training.wait(LOOK_SECONDS)


def train(spec: str) -> None:
    """Train to the end, with the kill half-way."""
    show(f"diloco train {spec}")
    training = subprocess.Popen([*DILOCO, "train", spec], cwd=HERE)
    killer = threading.Thread(target=kill_half_way, args=(training, spec), daemon=True)
    killer.start()
    try:
        code = training.wait(LIMIT_SECONDS)
    except (KeyboardInterrupt, subprocess.TimeoutExpired):
        diloco("down", spec, "--now", "--yes")
        raise SystemExit("the demo was stopped; its islands are down") from None
    if code != 0:
        raise SystemExit(f"`diloco train` ended with {code}; see `diloco logs {spec}`")


def main(spec: str = SPEC) -> None:
    """Fetch the corpus, train, and print what came out."""
    started = time.monotonic()
    subprocess.run([sys.executable, str(HERE / "get_corpus.py")], check=True)
    if status(spec) is not None:
        # An earlier demo's run: the same name again means a new run.
        diloco("down", spec, "--purge", "--yes")
    train(spec)
    report = status(spec)
    assert report is not None
    before, after = (
        float(json.loads(diloco("eval", spec, *at, "--json"))["held_out_loss"]) for at in (["--at", "0"], [])
    )
    exported = diloco("export", spec, "--force", "-o", EXPORT).strip()
    show(f"diloco sample {spec} --prompt 'HAMLET.' --length 300")
    print(diloco("sample", spec, "--prompt", "HAMLET.", "--length", "300").strip())
    fates = report["fates"]
    print(f"\nheld-out loss of the global model   {before:.3f} -> {after:.3f} nats per byte")
    print(f"tokens credited                     {report['tokens']:,.0f} (budget {report['budget']:,})")
    print("tokens processed                    " + f"{fates['processed']:,.0f} = "
          + " + ".join(f"{fates[name]:,.0f} {name}" for name in fates if name != "processed"))  # fmt: skip
    print(f"commits, offers per commit          {report['commits']}, {report['offers_per_commit']:.2f}")
    print(f"restarts                            {report['restarts']} (island {VICTIM} was killed half-way)")
    print(f"goodput                             {report['goodput']:.0%} of the islands' time, start and death included")
    print(f"exported                            {exported}")
    print(f"time                                {time.monotonic() - started:.0f} s")
    if report["restarts"] < 1 or after >= before:
        raise SystemExit("the demo did not show what it is for: no island was killed, or nothing was learned")


if __name__ == "__main__":
    main(*sys.argv[1:2])
