"""Forecasts against cases that can be worked out by hand, and against the parts of the runtime that they stand for."""

from __future__ import annotations

from typing import Any

import pytest

from diloco_cli import accounting
from diloco_cli.assumptions import IslandAssumptions
from diloco_cli.island_watch import Limits
from diloco_cli.simulation.forecast import Forecast, Outcome, Window
from diloco_cli.simulation.forecast_failures import Loss, RandomLosses, RecordedLosses
from diloco_cli.simulation.forecast_result import Prices, at_budget, goodput, result
from diloco_cli.simulation.forecast_scene import Case, Place, Sizes, even_table
from diloco_runtime.config import RunConfig
from diloco_runtime.records import Fates, HeartbeatRecord, LearnerStatus, SyncerStatus

TOKENS = 2048
PARAMETERS = 1_200_000
NEVER = 10**15


def case(
    *steps: float,
    sync: dict[str, Any] | None = None,
    budget: int = NEVER,
    relaunch: float = 2.0,
    checkpoint: float = 0.0,
    seed: int = 1,
    **assumed: Any,
) -> Case:
    """Return islands a, b, ... with the given seconds per inner step."""
    settings = {"name": "x", "tokens": budget, "model": {"kind": "no:model"}, "sync": sync or {}}
    config = RunConfig.model_validate(settings)
    parts = config.sync.fragments
    part = 4.0 * PARAMETERS / parts
    sizes = Sizes(even_table(PARAMETERS, parts), part, part, part, checkpoint)
    values = {"step_spread": 0.0, "latency": 0.01, "start_seconds": 20.0, "recovery_seconds": 0.0, **assumed}
    places = tuple(
        Place("abcdefgh"[i], TOKENS, IslandAssumptions(step_seconds=seconds, **values))
        for i, seconds in enumerate(steps)
    )
    limits = Limits(config.sync.heartbeat_every, config.sync.dead_after_reads, 5, relaunch, 120.0, 3600.0)
    return Case(config, sizes, places, limits, seed)


def run(of: Case, *kills: Loss, mtbf: float = 0.0, **window: Any) -> Outcome:
    losses = RecordedLosses(kills) if kills else RandomLosses({p.name: mtbf for p in of.places}, of.seed)
    return Forecast(of, losses).run(Window(**window))


def goodput_of(outcome: Outcome, of: Case) -> float:
    found = goodput([outcome.end.islands[place.name] for place in of.places], of)
    assert found is not None
    return found


# ---- one island -----------------------------------------------------------------------------------------------------


def test_one_island_without_losses_loses_its_start_and_what_is_in_flight() -> None:
    alone = case(1.0)
    outcome = run(alone, seconds=1020.0, skip=False)
    account = outcome.end.islands["a"]
    assert account.alive == pytest.approx(1020.0, abs=1.0)
    assert account.busy == account.steps == pytest.approx(1000.0, abs=2.0), "no step waits for the store"
    # A merge is in flight for 1 step, and a fragment is offered every 24: half of that is fresh on average.
    pending = 1.0 - account.merged / (account.steps * TOKENS * PARAMETERS)
    assert pending == pytest.approx((12 + 2) / 1000.0, abs=0.004)
    assert goodput_of(outcome, alone) == pytest.approx(1000.0 / 1020.0 * (1.0 - pending), abs=0.003)


def test_an_outer_step_every_fragment_period_and_all_of_it_credited() -> None:
    alone = case(1.0)
    outcome = run(alone, seconds=1020.0, skip=False)
    assert outcome.end.commits == pytest.approx(1000.0 / 4.0, abs=2.0), "24 steps, 6 fragments"
    assert outcome.end.credited >= outcome.end.islands["a"].merged
    in_one_commit = 24 * TOKENS * PARAMETERS / 6
    assert outcome.end.credited - outcome.end.islands["a"].merged <= 2 * in_one_commit


def test_a_budget_ends_the_run_and_the_time_is_tokens_over_rate() -> None:
    alone = case(1.0, budget=1000 * TOKENS)
    outcome = run(alone, skip=False)
    assert outcome.why == "budget"
    assert outcome.end.seconds == pytest.approx(20.0 + 1000.0 + 12.0, abs=8.0)


def test_a_window_of_few_commits_is_extrapolated_to_the_budget() -> None:
    alone = case(1.0, budget=1000 * TOKENS)
    short = at_budget(run(alone, commits=60, skip=False), alone)
    assert short.seconds == pytest.approx(run(alone, skip=False).end.seconds, rel=0.01)
    assert short.credited == pytest.approx(1000.0 * TOKENS * PARAMETERS)


def test_tokens_are_conserved() -> None:
    three = case(1.0, 1.2, 1.5, checkpoint=1e6)
    forecast = Forecast(three, RandomLosses({place.name: 0.2 for place in three.places}, 1))
    outcome = forecast.run(Window(seconds=4000.0, skip=False))
    assert len(outcome.losses) > 5
    processed = sum(account.steps for account in outcome.end.islands.values()) * TOKENS * PARAMETERS
    seen = sum(account.merged for account in outcome.end.islands.values())
    assert seen <= outcome.end.credited <= processed * 1.02, "heartbeats may not have told of the last steps of a life"
    for island in forecast.islands.values():
        for fates in () if island.learner is None else island.learner.logic.fates():
            others = fates.merged + fates.refused + fates.late + fates.overwritten + fates.offered + fates.fresh
            assert fates.processed == island.learner.work.steps * TOKENS == others  # type: ignore[union-attr]
        if island.learner is not None:
            merged = sum(f.merged * n for f, n in zip(island.learner.logic.fates(), three.sizes.numel, strict=True))
            assert merged == island.learner.work.merged


# ---- the link -------------------------------------------------------------------------------------------------------


def test_a_full_uplink_limits_the_commits_to_its_bandwidth_over_their_bytes() -> None:
    thin = case(0.1, up_gbits=0.004, down_gbits=10.0)
    outcome = run(thin, seconds=4000.0, skip=False)
    per_commit = 3 * 4.0 * PARAMETERS / 6  # an offer, parameters, momentum
    bandwidth = 0.004e9 / 8.0
    assert outcome.end.commits / 4000.0 <= 1.02 * bandwidth / per_commit
    assert outcome.end.commits / 4000.0 == pytest.approx(bandwidth / per_commit, rel=0.25)
    assert outcome.end.islands["a"].busy > 0.9 * outcome.end.seconds, "and the learner goes on all the same"


def test_checkpoints_share_the_uplink_with_offers() -> None:
    light, heavy = case(1.0, up_gbits=0.01), case(1.0, up_gbits=0.01, checkpoint=20e6)
    first, second = (run(one, seconds=2000.0, skip=False).end.islands["a"] for one in (light, heavy))
    assert second.up - first.up >= 3 * 20e6
    assert second.delay_steps / second.delays > first.delay_steps / first.delays


# ---- quorum and barrier ---------------------------------------------------------------------------------------------


def test_a_barrier_with_a_quorum_of_all_goes_at_the_pace_of_the_slowest() -> None:
    sync = {"preset": "diloco", "sync_every": 20, "min_quorum": 2}
    slow = case(1.0, 2.0, sync=sync)
    outcome = run(slow, seconds=4000.0, skip=False)
    a, b = (outcome.end.islands[name] for name in "ab")
    assert a.steps == pytest.approx(b.steps, abs=21), "each makes its 20 steps, then waits for the other"
    assert a.busy / a.alive == pytest.approx(0.5, abs=0.03)
    assert outcome.end.offers == 2 * outcome.end.commits
    assert outcome.end.commits == pytest.approx(3980.0 / (20 * 2.0 + 0.8), rel=0.03)


def test_without_a_barrier_nobody_waits_for_the_slowest() -> None:
    mixed = case(1.0, 2.0)
    outcome = run(mixed, seconds=4000.0, skip=False)
    assert all(account.busy > 0.98 * (account.alive - 21.0) for account in outcome.end.islands.values())
    assert outcome.end.commits == pytest.approx(3980.0 / 4.0, rel=0.02), "the fastest calls"
    assert outcome.end.offers > 1.95 * outcome.end.commits, "the grace window takes the slow one along"


def test_a_pause_per_offer_and_adoption_is_time_without_steps() -> None:
    plain, handled = case(1.0), case(1.0, pause_seconds=0.25)
    first, second = (run(one, seconds=2020.0, skip=False).end.islands["a"] for one in (plain, handled))
    # 4 steps, one offer and one adoption per fragment period.
    assert second.busy / first.busy == pytest.approx(4.0 / 4.5, abs=0.01)


# ---- losses ---------------------------------------------------------------------------------------------------------


def test_a_kill_costs_a_start_and_what_was_not_merged() -> None:
    alone = case(1.0)
    outcome = run(alone, Loss(500.0, "a"), seconds=1000.0, skip=False)
    account = outcome.end.islands["a"]
    # Not counted: what the last heartbeat did not tell (0 to 5 s), and the 2 s until the relaunch.
    assert account.losses == 1 and 1000.0 - account.alive == pytest.approx(2.25 + 2.5, abs=2.8)
    assert account.training == pytest.approx(account.alive - 2 * 20.0, abs=2.0)
    lost = (account.steps * TOKENS - account.merged / PARAMETERS) / TOKENS
    assert lost == pytest.approx(2 * 14, abs=6), "the steps of two lives without a commit"


def test_deaths_in_a_row_are_relaunched_ever_later_as_by_the_supervisor() -> None:
    alone = case(1.0, relaunch=4.0)
    kills = [Loss(100.0 * i, "a") for i in range(1, 5)]
    account = run(alone, *kills, seconds=500.0, skip=False).end.islands["a"]
    away = 500.0 - account.rented
    assert away == pytest.approx(4 + 8 + 16 + 32, abs=1.5)


def test_a_dead_learner_is_started_again_by_its_agent_which_lives_on() -> None:
    alone = case(1.0)
    account = run(alone, Loss(500.0, "a", "learner"), seconds=1000.0, skip=False).end.islands["a"]
    assert account.alive == pytest.approx(1000.0, abs=1.0) and account.losses == 0
    assert account.training == pytest.approx(1000.0 - 2 * 20.0 - 1.0, abs=6.0), "one second of back-off"


def test_another_island_merges_when_the_author_is_lost_for_good() -> None:
    sync = {"takeover_after": 30.0, "heartbeat_every": 5.0}
    two = case(1.0, 1.0, sync=sync, recovery_seconds=1e6)
    outcome = run(two, Loss(500.0, "a"), Loss(500.0, "b"), seconds=400.0, skip=False)
    author = max("ab", key=lambda name: outcome.end.islands[name].commits)
    outcome = run(two, Loss(500.0, author), seconds=1500.0, skip=False)
    other = "b" if author == "a" else "a"
    after = [commit.at for commit in outcome.trace if commit.at > 500.0]
    assert 530.0 <= after[0] <= 540.0, "takeover_after, and a look"
    assert outcome.end.islands[other].commits == pytest.approx(970.0 / 4.0, rel=0.03)


def test_the_goodput_is_that_of_accounting() -> None:
    two = case(1.0, 1.3)
    outcome = run(two, Loss(300.0, "b"), seconds=900.0, skip=False)
    table = two.sizes.table
    islands = []
    for place in two.places:
        account = outcome.end.islands[place.name]
        fates = Fates(processed=int(account.steps) * TOKENS, merged=round(account.merged / PARAMETERS))
        learner = LearnerStatus(busy_seconds=account.busy, fates=(fates,) * len(table))
        beat = HeartbeatRecord(
            run_id="0" * 16, nonce="n", island=place.name, incarnation=1, agent="x", counter=1, state="running",
            learner=learner, syncer=SyncerStatus(), uptime=account.alive, host="h", pid=1, started=0.0,
        )  # fmt: skip
        islands.append([beat])
    assert goodput_of(outcome, two) == pytest.approx(accounting.goodput(islands, table), abs=1e-6)


def test_nobody_lives_long_enough_to_train_and_the_forecast_ends() -> None:
    outcome = run(case(1.0, start_seconds=600.0), mtbf=0.01)
    assert outcome.why == "stalled" and outcome.end.credited == 0.0
    found = result(outcome.end, case(1.0), Prices(), reached=False)
    assert found.eta_seconds is None and found.cost is None


# ---- calm stretches, chance -----------------------------------------------------------------------------------------


def test_skipping_changes_goodput_by_less_than_a_point() -> None:
    three = case(1.0, 1.1, 1.0, step_spread=0.05, recovery_seconds=120.0)
    whole = run(three, mtbf=1.0, seconds=20_000.0, skip=False)
    skipped = run(three, mtbf=1.0, seconds=20_000.0, skip=True)
    assert skipped.skipped_seconds > 5000.0 and skipped.simulated_commits < 0.75 * whole.simulated_commits
    assert [loss.island for loss in whole.losses] == [loss.island for loss in skipped.losses]
    assert [loss.at for loss in whole.losses] == pytest.approx([loss.at for loss in skipped.losses], abs=20.0)
    assert goodput_of(skipped, three) == pytest.approx(goodput_of(whole, three), abs=0.01)
    assert skipped.end.commits == pytest.approx(whole.end.commits, rel=0.02)
    assert skipped.end.credited == pytest.approx(whole.end.credited, rel=0.02)
    up = [sum(account.up for account in outcome.end.islands.values()) for outcome in (whole, skipped)]
    assert up[1] == pytest.approx(up[0], rel=0.02), "who merges is chance, what is sent is not"


def test_the_same_seed_gives_the_same_and_another_one_other_losses() -> None:
    first, again = (run(case(1.0, 1.2), mtbf=0.3, seconds=3000.0) for _ in range(2))
    other = run(case(1.0, 1.2, seed=2), mtbf=0.3, seconds=3000.0)
    assert first == again
    assert first.losses != other.losses


def test_losses_are_the_same_whatever_else_is_set() -> None:
    one = run(case(1.0, 1.0), mtbf=0.5, seconds=2000.0).losses
    other = run(case(1.0, 1.0, sync={"sync_every": 96}), mtbf=0.5, seconds=2000.0).losses
    assert one[0] == other[0]


def test_inner_steps_are_a_limit_where_links_are_so_full_that_outer_steps_are_rare() -> None:
    thin = case(0.1, up_gbits=0.004, down_gbits=10.0)
    outcome = run(thin, commits=1_000_000, steps=20_000, skip=False)
    assert outcome.why == "steps"
    assert outcome.end.islands["a"].steps == pytest.approx(20_000, rel=0.05)
