"""Deliberate bugs of the protocol, each as a change of one place in the source: exploring must find every one.

    python -m tests.sim.mutants [NAME]

A mutant is a copy of the source with a few replacements, explored by a process of its own, with the seeds from 1 on
(and, where chance is slow to make the occasion, with the kinds of fault that make it).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = "runtime/diloco_runtime/"


@dataclass(frozen=True)
class Mutant:
    """One bug."""

    name: str
    file: str
    old: str
    new: str
    more: tuple[tuple[str, str, str], ...] = ()
    """Further replacements: file, old, new."""
    kinds: tuple[str, ...] = ()
    """Kinds of fault to explore with; none: all of them."""


RACES = ("freeze the merging syncer", "freeze at an operation", "hang the syncer", "raise the latency")
"""Faults after which two syncers write the same commit."""

MUTANTS = (
    Mutant(
        "merge an offer twice",
        RUNTIME + "merging.py",
        "        for key in self._board.list_offers(book.seq):\n",
        "        past = self._board.list_offers(max(1, book.seq - len(self._table)))\n"
        "        for key in (*self._board.list_offers(book.seq), *past):\n",
    ),
    Mutant(
        "skip the read-back",
        RUNTIME + "blackboard.py",
        "            except AlreadyExists as error:\n                problem = error\n",
        "            except AlreadyExists:\n                return self._parse(kind, data, key)\n",
        kinds=RACES,
    ),
    Mutant(
        "treat an absent record as lost and offer its tokens again",
        RUNTIME + "publisher.py",
        "        self._board.create(keys.offer(offer.seq, self._island, self._incarnation), out.record)\n",
        "        try:\n"
        "            self._board.create(keys.offer(offer.seq, self._island, self._incarnation), out.record)\n"
        "        except StoreUnavailable:\n"
        "            self.__dict__.setdefault('lost', []).append(offer)\n",
        more=(
            (
                RUNTIME + "learner.py",
                "        self._logic.on_called(self._follower.called)\n        if self._logic.phase",
                "        for offer in self._publisher.__dict__.pop('lost', []):\n"
                "            part = self._logic._fragments[offer.fragment]\n"
                "            if part.outstanding is not None and part.outstanding.seq == offer.seq:\n"
                "                part.outstanding = None\n"
                "                part.fates.fresh += offer.tokens\n"
                "                part.fates.offered -= offer.tokens\n"
                "        self._logic.on_called(self._follower.called)\n        if self._logic.phase",
            ),
        ),
        kinds=("let writes fail and take effect later", "lose answers", "kill the learner"),
    ),
    Mutant(
        "cache listings",
        RUNTIME + "blackboard.py",
        '        return [key for key in self.store.list(self.keys.offers(seq)) if key.endswith(".json")]\n',
        "        cache = self.__dict__.setdefault('cache', {})\n"
        "        found = self.store.list(self.keys.offers(seq))\n"
        "        return cache.setdefault(seq, [key for key in found if key.endswith('.json')])\n",
    ),
    Mutant(
        "adopt a wrong version",
        RUNTIME + "learner.py",
        "        self._anchors[adoption.fragment] = ready.values\n",
        "        if not adoption.carry:\n            self._anchors[adoption.fragment] = ready.values\n",
    ),
    Mutant(
        "reuse an incarnation",
        RUNTIME + "island.py",
        "        launch = self._around.launch\n        while True:\n",
        "        launch = self._around.launch\n        if self._claim is not None:\n            return\n"
        "        while True:\n",
    ),
    Mutant(
        "rewrite an offer after it was read",
        RUNTIME + "publisher.py",
        "        self._board.create(keys.offer(offer.seq, self._island, self._incarnation), out.record)\n",
        "        from diloco_runtime.records import encode\n"
        "        self._board.store.put(keys.offer(offer.seq, self._island, self._incarnation), encode(out.record))\n",
    ),
    Mutant(
        "offer on an old anchor",
        RUNTIME + "learner_logic.py",
        "            self.head < seq <= self.head + self._count\n",
        "            self.head < seq <= self.head + 2 * self._count\n",
        more=(
            (RUNTIME + "learner_logic.py", "            and part.version == version_before(seq, self._count)\n", ""),
            (
                RUNTIME + "learner_logic.py",
                "        for seq in range(self.head + 1, self.head + self._count + 1):\n            if self._can",
                "        for seq in range(self.head + 1, self.head + 2 * self._count + 1):\n            if self._can",
            ),
            (
                RUNTIME + "follower.py",
                "        while self.called < self._head.seq + len(self._table):\n",
                "        while self.called < self._head.seq + 2 * len(self._table):\n",
            ),
        ),
    ),
    Mutant(
        "build a commit on an unread parent",
        RUNTIME + "syncer.py",
        "        standing = self._merging.create(draft)\n",
        "        try:\n"
        "            standing = self._merging.create(draft)\n"
        "        except StoreUnavailable:\n"
        "            standing = draft.record\n",
        kinds=("lose requests", "cut the island off"),
    ),
    Mutant(
        "collect garbage two commits too early",
        RUNTIME + "garbage.py",
        "    window = keep_versions * fragments\n",
        "    window = keep_versions * fragments - 2\n",
    ),
    Mutant(
        "forget the fence",
        RUNTIME + "blackboard.py",
        "        return self._read(self.keys.claim(island, incarnation), ClaimRecord)\n",
        "        import inspect\n"
        "        if inspect.stack()[1].function in ('check_fence', 'beat', '_check_fence'):\n"
        "            return None\n"
        "        return self._read(self.keys.claim(island, incarnation), ClaimRecord)\n",
        kinds=("start a rival agent", "freeze the agent", "freeze the island", "cut the island off"),
    ),
    Mutant(
        "count failed reads as death",
        "diloco_cli/island_watch.py",
        "        self._agent.missed()\n",
        "        self._agent._unchanged += 1\n",
        kinds=("cut the laptop off", "freeze the supervisor", "lose answers"),
    ),
    Mutant(
        "a heartbeat that hides a hung syncer",
        RUNTIME + "island.py",
        '                syncer=self._with_last_words("syncer", self._children.syncer() or SyncerStatus()),\n',
        "                syncer=(self._children.syncer() or SyncerStatus()).model_copy(\n"
        "                    update={'progress': self._counter}\n"
        "                ),\n",
        kinds=("hang the syncer", "preempt the island"),
    ),
    Mutant(
        "ignore the run id",
        RUNTIME + "blackboard.py",
        "        now = self._clock.monotonic()\n        if self._identity_seen",
        "        return\n        now = self._clock.monotonic()\n        if self._identity_seen",
    ),
    Mutant(
        "no drain",
        RUNTIME + "syncer.py",
        '                phase, left, reason = "drain", len(self._life.table), "budget"\n',
        '                phase, left, reason = "final", 0, "budget"\n',
    ),
    Mutant(
        "a learning rate by credited tokens only",
        RUNTIME + "learner_logic.py",
        "        tokens = (self._credited + self.live_islands() * own) / self._total\n",
        "        tokens = (self._credited + 0 * own) / self._total\n",
    ),
)


def apply(mutant: Mutant, folder: Path) -> None:
    """Copy the source to a folder and put the bug in."""
    for name in ("diloco_cli", "runtime", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, text in changed(mutant, folder).items():
        (folder / file).write_text(text)


def changed(mutant: Mutant, folder: Path) -> dict[str, str]:
    """Return the files of the source in `folder` that a bug changes, with the bug in; raise `ValueError` when the place
    where it goes has changed since it was written."""
    texts: dict[str, str] = {}
    for file, old, new in ((mutant.file, mutant.old, mutant.new), *mutant.more):
        text = texts.get(file) or (folder / file).read_text()
        if text.count(old) != 1:
            raise ValueError(f"mutant {mutant.name!r}: its place in {file} is there {text.count(old)} times")
        texts[file] = text.replace(old, new)
    return texts


def find(mutant: Mutant, schedules: int) -> tuple[bool, str]:
    """Explore a mutant; return whether it was found, and what the search said last. A seed that fails without the bug
    as well has found something else, which is an error of the program or of the explorer."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        apply(mutant, folder)
        options = ["--schedules", str(schedules), "--jobs", "1", "--stop-after", "1", "--brief"]
        done = _explore(folder, mutant, *options)
    said = (done.stdout + done.stderr).strip().splitlines()
    seed = re.match(r"seed (\d+): ", said[-1]) if said else None
    if done.returncode != 1 or seed is None:
        return False, said[-1] if said else ""
    if _explore(ROOT, mutant, "--replay", seed[1]).returncode != 0:
        return False, f"{said[-1]}, and without the bug as well"
    return True, said[-1]


def _explore(folder: Path, mutant: Mutant, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.sim.explore", *options]
    command += ["--kinds", *mutant.kinds] if mutant.kinds else []
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'runtime'}", "PYTHONSAFEPATH": "1"}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Look for every mutant, or for those that are named."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.mutants", description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--schedules", type=int, default=400)
    arguments = parser.parse_args(argv)
    missed = 0
    for mutant in MUTANTS:
        if arguments.names and mutant.name not in arguments.names:
            continue
        begun = time.monotonic()
        found, said = find(mutant, arguments.schedules)
        missed += not found
        print(
            f"{'found' if found else 'MISSED'} in {time.monotonic() - begun:5.1f} s: {mutant.name}: {said}", flush=True
        )
    print(f"{missed} missed")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
