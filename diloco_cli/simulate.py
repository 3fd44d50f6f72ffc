"""`diloco simulate`: what a run will come to on the assumptions of [simulate], and which settings would do better.

Nothing is started and no store is asked. Torch is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from json import dumps
from math import ceil
from typing import Any

from diloco_cli.assumptions import IslandAssumptions
from diloco_cli.simulate_case import Setting, forecast, make_case, setting_of, with_setting
from diloco_cli.simulation.forecast import Outcome, Window
from diloco_cli.simulation.forecast_result import Result
from diloco_cli.simulation.forecast_scene import Case
from diloco_cli.spec import Spec, load_spec

COMMITS = 1000
"""Outer steps of a forecast that are simulated one by one."""

STEPS = 2_000_000
"""Inner steps, all islands together, that are simulated one by one at most: half a minute, also where links are so full
that thousands of steps pass between two outer ones."""

STEPS_PER_ROW = 90_000
"""Inner steps, all islands together, after which one row of the table of settings is good enough."""

CYCLES_PER_ROW = 5.0
"""Cycles over all fragments that a row simulates at least, at the spec's settings."""

ROOM = 0.8
"""A setting may use this share of any island's line: what is above comes late as soon as anything is slow."""

ON_TIME = 0.8
"""At least this share of the outer steps that `sync_every` asks for has to come about."""

TAKING_PART = 0.9
"""In its commits at least this share of the islands that train has to be."""

EQUAL_TIME, EQUAL_COST = 0.01, 0.05
"""Settings whose times, and whose costs, differ by less than this share are equal: loss is not predicted, and a few per
cent are not worth a rarer synchronisation."""


@dataclass(frozen=True)
class Row:
    """One setting and what it would come to."""

    setting: Setting
    result: Result
    fits: bool
    """Links have room, merges keep pace and islands take part."""


@dataclass(frozen=True)
class Report:
    """Everything that `diloco simulate` tells."""

    run: str
    store: str
    seed: int
    budget: int
    parameters: int
    assumed: Mapping[str, IslandAssumptions]
    """By island."""
    set_in_spec: bool
    """Whether the spec gives the length of an inner step, or the default was taken."""
    setting: Setting
    outcome: Outcome
    result: Result
    rows: tuple[Row, ...]
    best: Row | None
    """None: no setting fits."""

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain values, ready for `json.dumps`."""
        return {
            "schema_version": 1,
            "run": self.run,
            "store": self.store,
            "seed": self.seed,
            "budget": self.budget,
            "parameters": self.parameters,
            "assumed": {name: values.model_dump() for name, values in self.assumed.items()},
            "step_seconds_assumed": not self.set_in_spec,
            "setting": asdict(self.setting),
            "ended_by": self.outcome.why,
            "simulated_commits": self.outcome.simulated_commits,
            "simulated_seconds": self.outcome.end.seconds,
            "skipped_seconds": self.outcome.skipped_seconds,
            "losses": len(self.outcome.losses),
            "result": asdict(self.result),
            "settings": [asdict(row) for row in self.rows],
            "best": None if self.best is None else asdict(self.best.setting),
        }


# ---- settings -------------------------------------------------------------------------------------------------------


def neighbours(setting: Setting, fixed_fragments: bool) -> list[Setting]:
    """Return settings around one in `sync_every` and `fragments`."""
    every, parts = setting.sync_every, setting.fragments
    cuts = {parts} if fixed_fragments else {max(1, parts // 2), parts, 2 * parts}
    return [
        Setting(e, p, setting.min_quorum, setting.min_grace)
        for e in sorted({max(1, every // 2), every, 2 * every, 4 * every})
        for p in sorted(cuts)
    ]


def patiences(setting: Setting, islands: int, period_seconds: float) -> list[Setting]:
    """Return settings that wait for fewer or more islands, and for longer."""
    return [
        Setting(setting.sync_every, setting.fragments, quorum, grace)
        for quorum in sorted({1, setting.min_quorum, ceil(islands / 2), islands})
        for grace in sorted({setting.min_grace, round(max(setting.min_grace, period_seconds / 2), 3)})
    ]


def best_of(rows: Iterable[Row], own: Setting) -> Row | None:
    """Return the setting to take: of those that fit and meet the budget the fastest; of equally fast ones the
    cheapest; of these the one that synchronises most often, for the model's sake, and is nearest to `own`, the
    spec's."""
    fit = [row for row in rows if row.fits and row.result.eta_seconds is not None]
    if not fit:
        return None
    soonest = min(row.result.eta_seconds or 0.0 for row in fit)
    fast = [row for row in fit if (row.result.eta_seconds or 0.0) <= (1 + EQUAL_TIME) * soonest]
    cheapest = min(row.result.cost or 0.0 for row in fast)
    cheap = [row for row in fast if (row.result.cost or 0.0) <= (1 + EQUAL_COST) * cheapest]
    mine = asdict(own)
    return min(
        cheap,
        key=lambda row: (
            row.setting.sync_every,
            sum(value != mine[name] for name, value in asdict(row.setting).items()),
            row.result.eta_seconds,
        ),
    )


def compare(spec: Spec, case: Case) -> tuple[Row, ...]:
    """Return a table of settings: first around the spec's `sync_every` and `fragments`, then, at the best of these,
    other quorums and graces. All meet the same losses."""
    own, fixed = setting_of(case), case.config.sync.preset == "diloco"
    window = Window(seconds=_row_seconds(case))
    rows = {setting: _row(spec, with_setting(spec, case, setting), window) for setting in neighbours(own, fixed)}
    best = best_of(rows.values(), own)
    at = own if best is None else best.setting
    step = min(place.assumed.step_seconds for place in case.places)
    for setting in patiences(at, len(case.places), step * at.sync_every / at.fragments):
        if setting not in rows:
            rows[setting] = _row(spec, with_setting(spec, case, setting), window)
    return tuple(rows.values())


def _row_seconds(case: Case) -> float:
    """Return for how long every row is simulated: equally long, so that all meet the same losses."""
    assumed = [place.assumed for place in case.places]
    start = max(values.start_seconds for values in assumed)
    step = sum(values.step_seconds for values in assumed) / len(assumed)
    cycle = 4 * case.config.sync.sync_every * max(values.step_seconds for values in assumed)
    return start + max(STEPS_PER_ROW * step / len(assumed), CYCLES_PER_ROW * cycle)


def _row(spec: Spec, case: Case, window: Window) -> Row:
    _, found = forecast(spec, case, window)
    fits = found.link_load <= ROOM and found.pace >= ON_TIME and found.participation >= TAKING_PART
    return Row(setting_of(case), found, fits)


def show(path: str, seed: int, commits: int, plot: str | None, json: bool) -> None:
    """Forecast the run of the spec at `path` and tell people or, with `json`, scripts; `plot`: draw it there too."""
    if plot is not None:
        from diloco_cli.simulate_plot import check_plot

        check_plot(plot)
    report = simulate(load_spec(path), seed, commits)
    if json:
        print(dumps(report.as_json(), indent=2))
    else:
        from diloco_cli.views import print_simulation

        print_simulation(report)
    if plot is not None:
        from diloco_cli.simulate_plot import draw

        draw(report, plot)


def simulate(spec: Spec, seed: int, commits: int = COMMITS) -> Report:
    """Forecast a spec's run. Raises `SpecError` when the size of its model is not known."""
    case = make_case(spec, seed)
    outcome, found = forecast(spec, case, Window(commits=commits, steps=STEPS))
    rows = compare(spec, case)
    return Report(
        run=spec.name,
        store=spec.place,
        seed=seed,
        budget=case.config.tokens,
        parameters=case.sizes.parameters,
        assumed={place.name: place.assumed for place in case.places},
        set_in_spec="step_seconds" in spec.simulate.model_fields_set,
        setting=setting_of(case),
        outcome=outcome,
        result=found,
        rows=rows,
        best=best_of(rows, setting_of(case)),
    )
