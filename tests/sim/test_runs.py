"""Whole runs in virtual time: phases, speeds, kills, frozen processes, outages, slow links. Real code throughout."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from diloco_cli.simulation.run import Simulation, Site
from diloco_cli.simulation.storage import ALL_VERBS, CALM, Trouble
from diloco_cli.spec import ProviderTable
from diloco_runtime.audit import read_audit
from diloco_runtime.config import RunConfig
from diloco_runtime.liveness import Peers
from diloco_runtime.records import CommitRecord
from tests.support.simulated import finished
from tests.support.tasks import LinearTask

STEP = 1.0
SETTLED = 10
"""Commits after which islands have started and averages mean something."""


def config(tokens: int = 12_000, **sync: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "runs",
            "tokens": tokens,
            "model": {"kind": "tests.support.tasks:linear"},
            "inner": {"lr": 0.01, "batch_size": 16},
            "sync": {"heartbeat_every": 2.0, "checkpoint_every": 20.0, "takeover_after": 30.0, **sync},
        }
    )


def simulation(
    settings: RunConfig, steps: dict[str, float], seed: int = 0, provider: ProviderTable | None = None
) -> Simulation:
    """Make a run with one island per entry of `steps`, its seconds per inner step, and start `diloco train`."""
    made = Simulation(settings, LinearTask, {name: Site(seconds) for name, seconds in steps.items()}, seed, provider)
    made.train()
    return made


def begin_late(run: Simulation, offsets: dict[str, float]) -> None:
    """Let the processes of some islands need longer to start, in seconds."""
    for name, seconds in offsets.items():
        machine = run.machines[name]
        machine.setting = replace(machine.setting, start_seconds=machine.setting.start_seconds + seconds)


def kill(run: Simulation, name: str) -> None:
    """SIGKILL to all processes of an island."""
    for process in run.machines[name].processes().values():
        process.kill()


def offers_per_commit(log: list[CommitRecord]) -> float:
    merges = [commit for commit in log[1:] if commit.phase == "run"]
    return sum(len(commit.merged) for commit in merges) / len(merges)


def lives(log: list[CommitRecord]) -> set[tuple[str, int]]:
    """Return the lives that something was merged of, as island and incarnation."""
    return {(entry.island, entry.incarnation) for commit in log for entry in commit.merged}


@pytest.mark.parametrize("offsets", [{}, {"b": 1.0, "c": 2.0, "d": 3.0}, {"b": 0.3, "c": 2.6, "d": 7.9}])
def test_islands_out_of_phase_merge_together(offsets: dict[str, float]) -> None:
    run = simulation(config(), dict.fromkeys("abcd", STEP))
    begin_late(run, offsets)
    assert offers_per_commit(finished(run)) >= 0.9 * 4


@pytest.mark.parametrize("speeds", [{"a": STEP, "b": 4 * STEP}, {"a": 4 * STEP, "b": STEP}])
@pytest.mark.parametrize("offset", [0.0, 1.7])
def test_a_slow_island_contributes_and_slows_nobody(speeds: dict[str, float], offset: float) -> None:
    run = simulation(config(), speeds)
    begin_late(run, {"b": offset})
    log = finished(run)
    assert offers_per_commit(log) >= 0.9 * 2
    fast = run.machines[min(speeds, key=speeds.__getitem__)].learner_status
    assert fast.longest_gap < 1.5 * STEP
    assert fast.busy_seconds >= 0.95 * (run.world.now - 10 * STEP)
    board = run.observer()
    for commit in log[1:]:
        assert commit.phase != "run" or commit.seq == 1 or commit.merged, "a called merge was committed without anybody"
    assert board.read_call(log[-1].seq + 1) is None


@pytest.mark.parametrize(("step", "slow"), [(1.0, 4.05), (0.25, 3.96), (0.25, 3.9)])
def test_a_slow_island_contributes_in_every_phase(step: float, slow: float) -> None:
    """Speeds that are no multiples of each other: calls drift through the slow one's step, and it misses no stretch."""
    log = finished(simulation(config(24_000), {"a": step, "b": slow * step}))
    assert lives(log) == {("a", 1), ("b", 1)}
    merged = [len(commit.merged) for commit in log[SETTLED:] if commit.phase == "run"]
    assert len(merged) > 200
    stretches = [sum(merged[first : first + 25]) / 25 for first in range(len(merged) - 25)]
    assert min(stretches) >= 0.9 * 2


def test_a_call_is_answered_at_the_next_step_boundary() -> None:
    """Also one that came in the middle of a step that is as long as a whole period of the one that calls."""
    slow = 4.05 * STEP
    run = simulation(config(), {"a": STEP, "b": slow})
    written: dict[str, float] = {}
    run.bucket.watchers.append(lambda verb, key, before, after: written.setdefault(key, run.world.now))
    finished(run)
    keys = run.observer().keys
    waits = [
        offered - written[keys.call(seq)]
        for seq in range(SETTLED, 100)
        if (offered := written.get(keys.offer(seq, "b", 1))) and keys.call(seq) in written
    ]
    assert len(waits) > 50
    assert max(waits) < slow + 0.6 * STEP, "one poll and the way of the offer come on top"
    assert min(waits) < 0.2 * slow, "and phases drift through the whole step"


def test_killed_islands_cost_only_their_own_work() -> None:
    provider = ProviderTable(relaunch_after=12.0)
    run = simulation(config(16_000), dict.fromkeys("abc", STEP), seed=5, provider=provider)
    for moment, name in ((40.0, "b"), (90.0, "a"), (130.0, "c"), (150.0, "b")):
        run.world.at(moment, functools.partial(kill, run, name))
    log = finished(run)
    for machine in run.machines.values():
        assert machine.learner_status.longest_gap < 1.5 * STEP
    assert {("a", 2), ("b", 3), ("c", 2)} <= lives(log)


def test_nothing_is_trained_twice_after_a_kill() -> None:
    run = simulation(config(16_000), dict.fromkeys("ab", STEP), seed=6, provider=ProviderTable(relaunch_after=8.0))
    for moment in (45.0, 110.0, 160.0):
        run.world.at(moment, functools.partial(kill, run, "b"))
    log = finished(run)
    audit = read_audit(run.observer())
    merged = {entry.nonce for commit in log for entry in commit.merged}
    for fragment in range(6):
        ranges = sorted(
            (offer.data_from.order(), offer.data_to.order())
            for offer in audit.offers
            if offer.island == "b" and offer.fragment == fragment and offer.nonce in merged
        )
        assert len(ranges) > 10
        for (_, end), (begin, _) in zip(ranges[:-1], ranges[1:], strict=True):
            assert begin >= end, "samples whose effect was merged were trained again"


@pytest.mark.parametrize("frozen", ["syncer", "everything"])
def test_a_frozen_merging_syncer_is_replaced_and_wakes_harmlessly(frozen: str) -> None:
    run = simulation(config(takeover_after=10.0), dict.fromkeys("abc", STEP), seed=7)
    run.run_for(60.0)
    before = run.log()
    author = before[-1].author
    processes = run.machines[author].processes()
    parts = [processes["syncer"]] if frozen == "syncer" else list(processes.values())
    for part in parts:
        part.freeze()
    run.run_for(60.0)
    during = run.log()
    assert during[len(before) - 1] == before[-1]
    assert len(during) > len(before) + 5, "nobody took over"
    assert during[-1].author != author
    for part in parts:
        assert part.frozen, "it was replaced before it could wake"
        part.thaw()
    log = finished(run)
    assert log[: len(during)] == during
    for name, machine in run.machines.items():
        if name != author:
            assert machine.learner_status.longest_gap < 1.5 * STEP


@pytest.mark.parametrize("seconds", [5.0, 90.0])
def test_an_outage_of_the_store_stalls_and_fails_nobody(seconds: float) -> None:
    run = simulation(config(), dict.fromkeys("abc", STEP), seed=8)
    links = [run.laptop.link, *(machine.link for machine in run.machines.values())]

    def everywhere(trouble: Trouble) -> None:
        for link in links:
            link.trouble = trouble

    run.world.at(60.0, lambda: everywhere(Trouble(verbs=ALL_VERBS)))
    run.world.at(60.0 + seconds, lambda: everywhere(CALM))
    log = finished(run)
    for machine in run.machines.values():
        status = machine.learner_status
        assert status.longest_gap < 1.5 * STEP
        assert status.waited_seconds < 5.0
    assert offers_per_commit(log) > 2.5
    assert lives(log) == {("a", 1), ("b", 1), ("c", 1)}, "somebody was started again"


def test_lost_answers_change_nothing() -> None:
    run = simulation(config(), dict.fromkeys("abc", STEP), seed=9)
    for machine in run.machines.values():
        machine.link.trouble = Trouble(lost_answers=0.05)
    log = finished(run)
    assert offers_per_commit(log) > 2.5
    for machine in run.machines.values():
        assert machine.learner_status.longest_gap < 1.5 * STEP


def test_a_slow_uplink_starts_early_and_is_merged() -> None:
    run = simulation(config(), {"a": STEP, "b": STEP}, seed=10)
    run.machines["b"].link.latency = 0.8  # four operations per offer: most of a fragment period
    log = finished(run)
    share = sum(any(entry.island == "b" for entry in commit.merged) for commit in log[1:]) / (len(log) - 1)
    assert share > 0.5
    assert run.machines["b"].learner_status.longest_gap < 1.5 * STEP


def test_a_quorum_of_all_goes_on_without_a_dead_island() -> None:
    """Nobody replaces it either: the supervisor died before."""
    run = simulation(config(preset="streaming", sync_every=24, min_quorum=3), dict.fromkeys("abc", STEP), seed=11)
    run.run_for(90.0)
    run.laptop.process.kill()
    run.run_for(10.0)
    kill(run, "c")
    log = finished(run, lost="c")
    assert {len(commit.merged) for commit in log[5:10]} == {3}
    assert {len(commit.merged) for commit in log[-20:-7]} == {2}


def test_four_islands_start_together_on_an_empty_blackboard() -> None:
    for seed in range(5):
        run = simulation(config(4_000), dict.fromkeys("abcd", STEP), seed=seed)
        log = finished(run)
        keys = run.observer().keys
        first = [key for key in run.bucket.list(keys.blobs(0)) if "params" in key]
        assert len(first) == 6, "a loser of the initialisation left its payloads behind"
        assert [commit.seq for commit in log] == list(range(len(log)))


def test_a_stop_request_drains_and_a_later_run_request_goes_on() -> None:
    run = simulation(config(12_000), dict.fromkeys("ab", STEP), seed=12)
    run.world.at(60.0, lambda: run.control("stop"))
    stopped = finished(run)
    assert stopped[-1].reason == "stop"
    assert stopped[-1].credited_total < 12_000 * 216
    run.control("run")
    run.train()
    log = finished(run)
    assert log[: len(stopped)] == stopped
    assert log[-1].reason == "budget"
    assert [end.outcome for end in run.laptop.ends] == ["stopped", "budget"]


@pytest.mark.parametrize("beat", [0.2, 0.3, 0.6, 2.0])
@pytest.mark.parametrize("step", [0.05, 1.0])
def test_nobody_takes_a_living_process_for_a_dead_one(beat: float, step: float, monkeypatch: Any) -> None:
    """However short heartbeats are beside polls and steps, looking often is not seeing somebody stand still."""
    judged, heard = [], Peers.heard

    def and_judged(peers: Peers, name: str, *seen: Any) -> None:
        heard(peers, name, *seen)
        peer = peers.islands[name]
        if peer.heartbeat is not None and peer.heartbeat.state == "running":
            judged.append((name, peers.failed(name), peer.syncer.failed))

    monkeypatch.setattr(Peers, "heard", and_judged)
    run = simulation(
        config(heartbeat_every=beat, dead_after_reads=3, takeover_after=3 * beat), dict.fromkeys("abc", step)
    )
    assert len(finished(run)) > SETTLED
    assert len(judged) > 40
    assert [verdict for verdict in judged if verdict[1] or verdict[2]] == []
