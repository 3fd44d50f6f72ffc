"""From a spec to a forecast: sizes, places, settings, and running it for `diloco simulate`. Torch is not imported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from diloco_cli.assumptions import IslandAssumptions
from diloco_cli.errors import SpecError
from diloco_cli.estimate import CODEC_BYTES, FP32_BYTES, MOMENTS_BYTES, gpt_parameters, supervision
from diloco_cli.simulation.forecast import Forecast, Outcome, Window
from diloco_cli.simulation.forecast_failures import Loss, RandomLosses, RecordedLosses
from diloco_cli.simulation.forecast_result import Prices, Result, at_budget, result
from diloco_cli.simulation.forecast_scene import Case, Place, Sizes, even_table
from diloco_cli.spec import Spec
from diloco_cli.store_prices import request_prices
from diloco_cli.supervisor import limits_of


@dataclass(frozen=True)
class Setting:
    """What may be chosen freely for a run."""

    sync_every: int
    fragments: int
    min_quorum: int
    min_grace: float


# ---- the case -------------------------------------------------------------------------------------------------------


def make_case(spec: Spec, seed: int, assumed: Mapping[str, IslandAssumptions] | None = None) -> Case:
    """Return the case of a spec; `assumed`: measured values instead of the spec's, by island.

    Raises `SpecError` when the size of the model is not known.
    """
    config = spec.config
    own, parameters = config.model.kind != "gpt", spec.simulate.parameters
    if parameters is None:
        if own:
            raise SpecError(
                [
                    f"{spec.path.name}: [simulate] parameters: missing; how large a model of your own is shows only "
                    "when an island builds it, so write its number of parameters there"
                ]
            )
        parameters = gpt_parameters(config.model)
    per_sample = spec.simulate.tokens_per_sample or (1 if own else config.inner.sequence_length)
    places = tuple(
        Place(island.name, island.batch_size * per_sample, (assumed or {}).get(island.name, island.assumed))
        for island in spec.islands
    )
    return Case(
        config, sizes_of(spec, parameters, config.sync.fragments), places, limits_of(spec.provider, config.sync), seed
    )


def sizes_of(spec: Spec, parameters: int, fragments: int) -> Sizes:
    """Return the bytes of what travels when a model is cut into so many fragments."""
    config, part = spec.config, parameters / fragments
    params = FP32_BYTES * part
    return Sizes(
        table=even_table(parameters, fragments),
        offer=CODEC_BYTES[config.sync.compression] * part,
        params=params,
        momentum=params if config.outer.momentum else 0.0,
        checkpoint=float(MOMENTS_BYTES[config.inner.optimizer] * parameters),
    )


def with_setting(spec: Spec, case: Case, setting: Setting) -> Case:
    """Return the case with another setting."""
    sync = case.config.sync
    update: dict[str, Any] = asdict(setting)
    if sync.preset == "streaming" and sync.overlap_steps == max(1, sync.sync_every // sync.fragments):
        update["overlap_steps"] = max(1, setting.sync_every // setting.fragments)  # as the preset fills it in
    if sync.in_flight is not None:
        update["in_flight"] = min(sync.in_flight, setting.fragments)
    config = case.config.model_copy(update={"sync": sync.model_copy(update=update)})
    sizes = sizes_of(spec, case.sizes.parameters, setting.fragments)
    return Case(config, sizes, case.places, case.limits, case.seed)


def setting_of(case: Case) -> Setting:
    """Return the setting of a case."""
    sync = case.config.sync
    assert isinstance(sync.min_quorum, int), "a spec's quorum is resolved"
    return Setting(sync.sync_every, sync.fragments, sync.min_quorum, sync.min_grace)


# ---- forecasts ------------------------------------------------------------------------------------------------------


def _losses(case: Case) -> RandomLosses:
    return RandomLosses({place.name: place.assumed.mtbf_hours for place in case.places}, case.seed)


def _prices(spec: Spec) -> Prices:
    usual, table = request_prices(spec.store), spec.simulate
    writes, reads = table.price_per_million_writes, table.price_per_million_reads
    return Prices(usual.writes if writes is None else writes, usual.reads if reads is None else reads)


def forecast(spec: Spec, case: Case, window: Window) -> tuple[Outcome, Result]:
    """Simulate a case within a window; the result is that of the whole run, extrapolated where need be."""
    outcome = Forecast(case, _losses(case)).run(window)
    totals = at_budget(outcome, case)
    reached = totals.credited >= 0.999 * float(case.config.tokens) * case.sizes.parameters
    watching = supervision(len(case.places), case.config.sync)
    return outcome, result(totals, case, _prices(spec), reached, watching)


def replay(
    spec: Spec,
    kills: Iterable[Loss],
    seconds: float,
    assumed: Mapping[str, IslandAssumptions] | None = None,
    seed: int = 0,
) -> tuple[Outcome, Result]:
    """Forecast so many seconds from the start of the islands' processes with recorded kills instead of random losses,
    and with measured step times if given; nothing is skipped or extrapolated."""
    case = make_case(spec, seed, assumed)
    outcome = Forecast(case, RecordedLosses(kills)).run(Window(seconds=seconds, skip=False))
    return outcome, result(outcome.end, case, _prices(spec), reached=outcome.why == "budget")
