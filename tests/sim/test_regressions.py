"""Faults of the program that exploring has found, each as the schedule that showed it, shrunk."""

from __future__ import annotations

import pytest

from diloco_cli.simulation.run import Site
from diloco_runtime.config import RunConfig
from tests.sim.faults import Fault
from tests.sim.playing import run_schedule
from tests.sim.schedules import LEAST_COMMITS, Schedule
from tests.support.tasks import TinyTask


def _config(**sync: object) -> RunConfig:
    settings = {"heartbeat_every": 0.3, "dead_after_reads": 3, "drain_timeout": 0.6, "checkpoint_every": 0.6, **sync}
    tokens = (LEAST_COMMITS + 3) * 3 * TinyTask.BATCH
    model, inner = {"kind": "tests.support.tasks:tiny"}, {"lr": 0.01, "batch_size": TinyTask.BATCH}
    return RunConfig.model_validate(
        {"name": "chaos", "tokens": tokens, "model": model, "inner": inner, "sync": settings}
    )


@pytest.mark.parametrize("at", [2.86, 2.9, 2.96, 3.0])
def test_standbys_whose_patience_is_shorter_than_their_polls_take_over(at: float) -> None:
    """A stop is asked for while the island on duty is dead, so that nobody starts it again. Standbys looked once per
    second, took every such pause for one in which they were frozen, and with `takeover_after` below that never took
    over (seed 20599)."""
    config = _config(sync_every=3, fragments=3, min_quorum=3, takeover_after=0.6)
    sites = {name: Site(step_seconds=0.09, latency=0.003, give_up_after=0.6) for name in "abc"}
    faults = tuple(Fault("kill the island", at, 0.15, name, 1) for name in "a")
    outcome = run_schedule(Schedule(20599, config, sites, faults))
    assert not outcome.violations
    assert outcome.commits >= LEAST_COMMITS


@pytest.mark.parametrize("at", [3.2, 3.25, 3.3, 3.35, 3.4])
def test_standbys_notice_a_hung_syncer_however_short_heartbeats_are(at: float) -> None:
    """A standby looked once per second, took each pause of more than three heartbeats for one in which it was away,
    and never noticed that the syncer on duty hung: it took the duty over, and handed it back (seed 3486)."""
    config = _config(sync_every=1, fragments=1, min_quorum=2, takeover_after=0.6)
    sites = {
        "a": Site(step_seconds=0.128, latency=0.003, up=166_667.0, give_up_after=0.6),
        "b": Site(step_seconds=0.064, latency=0.015, give_up_after=0.6),
    }
    outcome = run_schedule(Schedule(3486, config, sites, (Fault("hang the syncer", at, 1.108, "a", 1),)))
    assert not outcome.violations
    assert outcome.commits >= LEAST_COMMITS
