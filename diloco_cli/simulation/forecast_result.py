"""What a forecast means: goodput, shares, rates, money and the time until the budget. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from diloco_cli.simulation.forecast import Outcome, Totals
from diloco_cli.simulation.forecast_island import Account
from diloco_cli.simulation.forecast_scene import Case, Place

DAY, HOUR, GB, MILLION = 86_400.0, 3600.0, 1e9, 1e6


@dataclass(frozen=True)
class Prices:
    """Dollars per million requests."""

    writes: float = 0.0
    reads: float = 0.0


@dataclass(frozen=True)
class IslandResult:
    """What one island will come to."""

    name: str
    goodput: float | None
    """Share of its agents' time that was spent on tokens which it saw merged."""
    uptime: float
    """Share of the time that its agents live."""
    losses_per_day: float
    up_bytes_per_second: float
    down_bytes_per_second: float
    link_load: float
    """Of its two directions the one that is used more: bytes over what it could carry while the island is there."""
    merges: float
    """Share of the outer steps that its syncer writes."""


@dataclass(frozen=True)
class Result:
    """What a run will come to, from its begin to its budget."""

    goodput: float | None
    uptime: float
    participation: float
    """Islands in a commit over islands that train, mean over commits."""
    offers_per_commit: float
    delay_steps: float
    """Staleness: inner steps that an island makes between the snapshot for an offer and the adoption of the commit
    that merged it, mean over merged offers."""
    commit_seconds: float | None
    """Between two outer steps."""
    pace: float
    """Outer steps over those that `sync_every` asks for: one per fragment period of the fastest island, of the slowest
    where each keeps its own pace. Below 1 merges take longer than that, and islands run apart further."""
    tokens_per_second: float
    eta_seconds: float | None
    """Until the budget of tokens is merged; None: it will not be."""
    up_bytes_per_second: float
    down_bytes_per_second: float
    link_load: float
    """That of the island that uses its line most."""
    writes_per_second: float
    reads_per_second: float
    egress_per_day: float
    """Dollars, as all below."""
    requests_per_day: float
    machines_per_day: float
    cost: float | None
    """Everything until the budget is met."""
    losses_per_day: float
    islands: tuple[IslandResult, ...]


def at_budget(outcome: Outcome, case: Case) -> Totals:
    """Return the totals at the budget: what was not simulated goes on at the rates since the start was over.

    A forecast that makes no progress is returned as it ended.
    """
    usual = outcome.end.since(outcome.warm)
    missing = float(case.config.tokens) * case.sizes.parameters - outcome.end.credited
    if usual.credited <= 0.0 or missing <= 0.0:
        return outcome.end
    return outcome.end.plus(usual, missing / usual.credited)


def goodput(accounts: list[Account], case: Case) -> float | None:
    """Return `accounting.goodput` of islands in the order of the case's places."""
    useful = alive = 0.0
    for account, place in zip(accounts, case.places, strict=True):
        useful += _useful(account, place, case)
        alive += account.alive
    return useful / alive if alive else None


def _useful(account: Account, place: Place, case: Case) -> float:
    processed = account.steps * place.tokens * case.sizes.parameters
    return account.busy * min(1.0, account.merged / processed) if processed else 0.0


def result(totals: Totals, case: Case, prices: Prices, reached: bool, supervision: float = 0.0) -> Result:
    """Return what totals mean. `reached`: they are those at the budget; `supervision`: reads per second besides."""
    seconds, accounts = max(totals.seconds, 1e-9), [totals.islands[place.name] for place in case.places]
    days, every = seconds / DAY, reduce(Account.plus, accounts)
    islands = tuple(_island(account, place, case, totals) for account, place in zip(accounts, case.places, strict=True))
    writes, reads = every.writes, every.reads + supervision * seconds
    egress, machines = _egress(accounts, case), _machines(accounts, case)
    requests = (writes * prices.writes + reads * prices.reads) / MILLION
    return Result(
        goodput=goodput(accounts, case),
        uptime=every.alive / seconds / len(accounts),
        participation=min(1.0, totals.offers / totals.present) if totals.present else 0.0,
        offers_per_commit=totals.offers / totals.commits if totals.commits else 0.0,
        delay_steps=every.delay_steps / every.delays if every.delays else 0.0,
        commit_seconds=seconds / totals.commits if totals.commits else None,
        pace=totals.commits * wanted_period(case) / seconds,
        tokens_per_second=totals.credited / case.sizes.parameters / seconds,
        eta_seconds=seconds if reached else None,
        up_bytes_per_second=every.up / seconds,
        down_bytes_per_second=every.down / seconds,
        link_load=max(island.link_load for island in islands),
        writes_per_second=writes / seconds,
        reads_per_second=reads / seconds,
        egress_per_day=egress / days,
        requests_per_day=requests / days,
        machines_per_day=machines / days,
        cost=egress + requests + machines if reached else None,
        losses_per_day=every.losses / days,
        islands=islands,
    )


def wanted_period(case: Case) -> float:
    """Return the seconds between two outer steps if nothing ever takes time but inner steps."""
    steps = [place.assumed.step_seconds for place in case.places]
    return case.period_steps * (max(steps) if case.config.sync.pace == "each" else min(steps))


def _egress(accounts: list[Account], case: Case) -> float:
    pairs = zip(accounts, case.places, strict=True)
    return sum(a.up * p.assumed.egress_up + a.down * p.assumed.egress_down for a, p in pairs) / GB


def _machines(accounts: list[Account], case: Case) -> float:
    pairs = zip(accounts, case.places, strict=True)
    return sum(a.rented * p.assumed.price_per_hour for a, p in pairs) / HOUR


def _island(account: Account, place: Place, case: Case, totals: Totals) -> IslandResult:
    seconds, alive = max(totals.seconds, 1e-9), max(account.alive, 1e-9)
    return IslandResult(
        name=place.name,
        goodput=_useful(account, place, case) / account.alive if account.alive else None,
        uptime=account.alive / seconds,
        losses_per_day=account.losses * DAY / seconds,
        up_bytes_per_second=account.up / seconds,
        down_bytes_per_second=account.down / seconds,
        link_load=max(account.up / (alive * place.up), account.down / (alive * place.down)),
        merges=account.commits / totals.commits if totals.commits else 0.0,
    )
