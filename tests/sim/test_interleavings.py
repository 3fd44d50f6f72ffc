"""Every interleaving of two syncers and a learner, within bounds; and that the search finds bugs that are put in."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sim.interleave.processes import Memory
from tests.sim.interleave.search import Search
from tests.sim.interleave.trio import SCENES
from tests.sim.interleave.world import Move
from tests.sim.mutants import MUTANTS, RUNTIME, Mutant, apply


@pytest.mark.parametrize("scene", SCENES)
def test_no_interleaving_breaks_anything(scene: str) -> None:
    found = Search(dataclasses.replace(SCENES[scene], commits=2).world()).run()
    assert found.whole
    assert found.states > 3_000
    assert len(found.ends) > 10


@pytest.mark.parametrize("scene", ["standby", "rivals"])
def test_no_single_fault_breaks_anything(scene: str) -> None:
    world = dataclasses.replace(SCENES[scene], commits=1).world()
    found = Search(world, dict.fromkeys("lab", "-+?~")).run()
    assert found.whole
    assert found.states > 10_000
    assert len(found.ends) > 20


@pytest.mark.parametrize("scene", ["rivals", "standby-end"])
def test_what_is_remembered_of_a_process_is_what_its_code_does(scene: str) -> None:
    """States are told apart by what processes remember: a schedule that is simply run must lead to the same end."""
    rng, world = random.Random(scene), SCENES[scene].world()
    memories = [Memory(lives) for lives in world.lives]
    for _ in range(15):
        state, moves = world.begin([memory.root() for memory in memories], 1), list[Move]()
        while able := state.able():
            move = Move(rng.choice(able))
            if state.faults and rng.random() < 0.05:
                move = rng.choice(list(world.mishaps(state, move.process, "-+?~")))
            state = world.play(state, move)
            moves.append(move)
        tape = world.tape(moves)
        assert list(world.moves(tape)) == moves
        assert world.replay(tape).objects == state.contents.objects


ONE_TRY = (RUNTIME + "blackboard.py", "CREATE_ATTEMPTS = 4\n", "CREATE_ATTEMPTS = 1\n")
"""Only that a create is tried again at once hides, from schedules with a single fault, what its caller makes of an
unknown outcome."""

RACE = ("--commits", "2", "--scene", "standby")
FAULT = ("--commits", "1", "--scene", "standby", "--faults", "dies-after", "answer-lost", "late")

KNOWN = {mutant.name: mutant for mutant in MUTANTS}

SOUGHT = [
    (KNOWN["skip the read-back"], RACE, "another record is there"),
    (KNOWN["merge an offer twice"], RACE, "offers fragment 0 to merge 2"),
    (KNOWN["cache listings"], RACE, "do not come to their end"),
    (KNOWN["build a commit on an unread parent"], FAULT, "another record is there"),
    (
        Mutant(
            "take an absent commit for lost and build another",
            RUNTIME + "merging.py",
            "        standing = self._board.create(self._board.keys.log(draft.record.seq), draft.record)\n",
            "        from diloco_runtime.errors import StoreUnavailable\n"
            "        try:\n"
            "            standing = self._board.create(self._board.keys.log(draft.record.seq), draft.record)\n"
            "        except StoreUnavailable:\n"
            "            for ref in payloads_of(draft.record):\n"
            "                self._board.delete_payload(ref)\n"
            "            raise\n",
            more=(
                ONE_TRY,
                (
                    RUNTIME + "syncer.py",
                    "        standing = self._merging.create(draft)\n        self._draft = None\n",
                    "        self._draft = None\n        standing = self._merging.create(draft)\n",
                ),
            ),
        ),
        FAULT,
        "is not there",
    ),
    (
        Mutant(
            "delete the winner's payloads",
            RUNTIME + "merging.py",
            "            for ref in payloads_of(draft.record):\n",
            "            for ref in payloads_of(standing):\n",
        ),
        RACE,
        "is deleted, but",
    ),
]
"""Bugs, where to look for them, and what the search says of each."""


@pytest.mark.parametrize(("mutant", "options", "says"), SOUGHT, ids=[mutant.name for mutant, _, _ in SOUGHT])
def test_a_bug_is_found_and_its_schedule_shows_it(
    mutant: Mutant, options: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    apply(mutant, tmp_path)
    found = _search(tmp_path, *options)
    assert found.returncode == 1, found.stdout + found.stderr
    assert says in found.stdout
    schedule = re.search(r"^schedule: (.+)$", found.stdout, re.M)
    assert schedule is not None, found.stdout
    scene = dataclasses.replace(SCENES["standby"], commits=int(options[1]))
    scene.world().replay(schedule[1])  # without the bug nothing breaks


def _search(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{folder / 'runtime'}", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "tests.sim.interleave", *options]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
