"""A few hundred kinds of bad luck: the beginning of what `make sim` explores, and that a seed says all."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.sim.explore import Tally, describe_failure, explore
from tests.sim.faults import KINDS
from tests.sim.schedules import LEAST_COMMITS

SCHEDULES = 80


@pytest.mark.timeout(300)
def test_whatever_goes_wrong_the_invariants_hold_and_the_run_ends() -> None:
    tally = Tally()
    explore(range(1, SCHEDULES + 1), 1, tally.add)
    assert not tally.failed, describe_failure(tally.failed[0].seed)
    assert tally.schedules == SCHEDULES
    assert tally.fewest_commits >= LEAST_COMMITS and tally.fewest_faults >= 3
    assert len(tally.faults) >= len(KINDS) - 3, "some kinds of fault hardly ever happen"
    assert len(tally.states) > 5 * SCHEDULES


def test_a_seed_replays_exactly_in_another_process() -> None:
    tapes = []
    for hash_seed in ("1", "2"):
        command = [sys.executable, "-m", "tests.sim.explore", "--replay", "77"]
        env = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        tapes.append(done.stdout.splitlines())
    assert len(tapes[0]) > 200
    assert tapes[0] == tapes[1]
