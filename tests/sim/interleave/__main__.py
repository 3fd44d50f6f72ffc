"""Search every interleaving of two syncers and a learner, operation by operation.

Without options: every scene over three commits without a fault, and over one commit with one fault at any operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Iterator, Sequence

from tests.sim.interleave.processes import Request
from tests.sim.interleave.search import Broken, Search
from tests.sim.interleave.trio import COMMITS, SCENES, Setting
from tests.sim.interleave.world import FATES

LETTERS = "lab"

KINDS = {"dies-before": "-", "dies-after": "+", "dies-meanwhile": "!", "answer-lost": "?", "late": "~"}
"""Fates of a request that are faults, by name."""

USUAL = "".join(fate for fate in KINDS.values() if fate != "!")
"""Faults of the usual search."""

Leg = tuple[str, int, str, str]
"""Scene, commits, fates, processes that they befall."""


def main(argv: Sequence[str] | None = None) -> int:
    """Search what the options say; return 1 when something did not hold."""
    options = _parser().parse_args(argv)
    if options.replay is not None:
        return _replay(options)
    begun, whole = time.monotonic(), True
    for scene, commits, fates, processes in _legs(options):
        leg = f"{scene}, {commits} commits, " + (f"one fault of {fates} of {processes}" if fates else "no fault")
        since = time.monotonic()
        try:
            found = Search(_setting(scene, commits, fates).world(), dict.fromkeys(processes, fates), options.most).run()
        except Broken as broken:
            again = f"python -m tests.sim.interleave --scene {scene} --commits {commits} --replay '{broken.tape}'"
            print(f"{leg}: BROKEN: {broken}\nreplay: {again}")
            return 1
        whole = whole and found.whole
        print(f"{leg}: {found}; {time.monotonic() - since:.1f} s", flush=True)
    print(f"nothing broke; {'exhaustive' if whole else 'NOT exhaustive'}; {time.monotonic() - begun:.0f} s in all")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.sim.interleave", description=str(__doc__))
    parser.add_argument("--scene", action="append", choices=SCENES, dest="scenes", help="only this one (repeatable)")
    parser.add_argument("--commits", type=int, help="commits until everything ends")
    spelled = "; ".join(f"{name}: {FATES[fate]}" for name, fate in KINDS.items())
    parser.add_argument(
        "--faults", nargs="*", choices=KINDS, metavar="KIND", help=f"one fault in each schedule, of these: {spelled}"
    )
    parser.add_argument("--of", default=LETTERS, help="processes that faults befall: l learner, a and b syncers")
    parser.add_argument("--most", type=int, help="states after which each search stops early")
    parser.add_argument("--replay", metavar="SCHEDULE", help="print what one schedule does instead")
    return parser


def _legs(options: argparse.Namespace) -> Iterator[Leg]:
    """Yield what is to be searched: without options everything that takes little time."""
    scenes = options.scenes or list(SCENES)
    if options.faults is not None or options.commits is not None:
        for scene in scenes:
            fates = "".join(KINDS[name] for name in options.faults or ())
            yield scene, options.commits or COMMITS, fates, options.of if fates else ""
        return
    for scene in scenes:
        yield scene, COMMITS, "", ""
    for scene in scenes:
        if not SCENES[scene].ending:  # within one commit there is no difference
            yield scene, 1, USUAL, options.of


def _setting(scene: str, commits: int, fates: str) -> Setting:
    return dataclasses.replace(SCENES[scene], commits=commits, read_once="!" not in fates)


def _replay(options: argparse.Namespace) -> int:
    setting = _setting(options.scenes[0] if options.scenes else "standby", options.commits or COMMITS, "")

    def tell(who: str, request: Request, answer: str) -> None:
        print(f"{who} {request.verb:6} {request.key} -> {answer}")

    try:
        dataclasses.replace(setting.world(), tell=tell).replay(options.replay)
    except AssertionError as error:
        print(f"BROKEN: {error}")
        return 1
    print("nothing broke")
    return 0


if __name__ == "__main__":
    sys.exit(main())
