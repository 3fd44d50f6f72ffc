"""What `diloco simulate` says, as lines and rows of text. Pure."""

from __future__ import annotations

from diloco_cli.formats import bit_rate, count, duration, number, share
from diloco_cli.simulate import ON_TIME, ROOM, TAKING_PART, Report, Row

ISLAND_COLUMNS = ("ISLAND", "GOODPUT", "UPTIME", "LOSSES/DAY", "UP", "DOWN", "LINK", "MERGES")
SETTING_COLUMNS = (
    "SYNC_EVERY", "FRAGMENTS", "QUORUM", "GRACE",
    "TIME", "COST", "GOODPUT", "TAKE PART", "PACE", "STALE", "UP", "LINK", "FITS",
)  # fmt: skip


def opening(report: Report) -> list[str]:
    """Return what is asked: the run, the assumptions, how much was simulated."""
    outcome, setting = report.outcome, report.setting
    skipped = f", {duration(outcome.skipped_seconds)} of calm skipped" if outcome.skipped_seconds else ""
    return [
        f"run {report.run}, nothing is started: {len(report.assumed)} islands, {count(report.parameters)} parameters, "
        f"sync_every {setting.sync_every}, {setting.fragments} fragments, min_quorum {setting.min_quorum}, "
        f"min_grace {setting.min_grace:g} s, budget {count(report.budget)} tokens",
        _assumptions(report),
        f"simulated {outcome.simulated_commits} outer steps one by one in {duration(outcome.end.seconds)}{skipped}, "
        f"{len(outcome.losses)} losses, seed {report.seed}",
    ]


def _assumptions(report: Report) -> str:
    values = list(report.assumed.values())

    def spread(name: str, factor: float = 1.0) -> str:
        found = sorted({factor * getattr(value, name) for value in values})
        return f"{found[0]:g}" if len(found) == 1 else f"{found[0]:g} to {found[-1]:g}"

    said = "" if report.set_in_spec else " (not in the spec: measure it, it scales everything)"
    lost = "never lost" if not any(v.mtbf_hours for v in values) else f"lost every {spread('mtbf_hours')} h on average"
    return (
        f"assumed by [simulate]: {spread('step_seconds')} s per inner step{said}, {spread('latency', 1000)} ms per "
        f"request, {spread('up_gbits')} Gbit/s up and {spread('down_gbits')} down; islands are {lost}, back after "
        f"{spread('recovery_seconds')} s, train {spread('start_seconds')} s later"
    )


def outlook(report: Report) -> list[str]:
    """Return what the run will come to as a whole."""
    found = report.result
    lines = [
        f"goodput {share1(found.goodput)}, uptime {share1(found.uptime)}, {number(found.offers_per_commit, 2)} islands "
        f"per outer step, {share(found.participation)} of all that train; one every {duration(found.commit_seconds)}; "
        f"merged offers are adopted {number(found.delay_steps, 1)} inner steps after their snapshots",
        f"all islands: {rate(found.up_bytes_per_second)} up, {rate(found.down_bytes_per_second)} down, "
        f"{number(found.writes_per_second, 1)} writes and {number(found.reads_per_second, 1)} reads per second; "
        f"busiest link {share(found.link_load)} full",
        f"per day: egress {dollars(found.egress_per_day)}, requests {dollars(found.requests_per_day)}, "
        f"machines {dollars(found.machines_per_day)}",
    ]
    if found.eta_seconds is None:
        why = "no outer step within provider.stalled_after" if report.outcome.why == "stalled" else "no progress"
        return [*lines, f"! the budget is never met: {why}"]
    return [
        *lines,
        f"{count(report.budget)} tokens in {duration(found.eta_seconds)}, {dollars(found.cost)} until then "
        f"({count(found.tokens_per_second)} tokens per second)",
    ]


def closing(report: Report) -> list[str]:
    """Return which setting to take, by which rule, and what the table does not know."""
    if not report.rows:
        return []
    rule = (
        f"best (*; . is the spec's own): links at most {share(ROOM)} full, {share(ON_TIME)} of the outer steps that "
        f"sync_every asks for, {share(TAKING_PART)} of the training islands in each; the soonest of these, the "
        "cheapest of equally soon ones (1 %), of equally cheap ones (5 %) the smallest sync_every"
    )
    if report.best is None:
        what = "! no setting fits: raise sync_every further, compress deltas (sync.compression), or widen the links"
    else:
        taken = report.best.setting
        what = (
            f"best setting: sync_every = {taken.sync_every}, fragments = {taken.fragments}, "
            f"min_quorum = {taken.min_quorum}, min_grace = {taken.min_grace:g}"
        )
    loss = (
        "loss is not predicted: at equal tokens a larger sync_every, fewer islands per outer step, staleness cost some"
    )
    return [what, rule, loss]


def island_rows(report: Report) -> list[list[str]]:
    """Return one row per island for `ISLAND_COLUMNS`."""
    return [
        [
            island.name,
            share1(island.goodput),
            share1(island.uptime),
            number(island.losses_per_day, 1),
            rate(island.up_bytes_per_second),
            rate(island.down_bytes_per_second),
            share(island.link_load),
            share(island.merges),
        ]
        for island in report.result.islands
    ]


def setting_rows(report: Report) -> list[list[str]]:
    """Return one row per setting for `SETTING_COLUMNS`."""
    return [_setting_row(row, report) for row in report.rows]


def _setting_row(row: Row, report: Report) -> list[str]:
    setting, found = row.setting, row.result
    mark = " *" if row is report.best else " ." if setting == report.setting else ""
    return [
        str(setting.sync_every),
        str(setting.fragments),
        str(setting.min_quorum),
        f"{setting.min_grace:g}",
        duration(found.eta_seconds),
        dollars(found.cost),
        share1(found.goodput),
        share(found.participation),
        share(found.pace),
        number(found.delay_steps, 1),
        rate(found.up_bytes_per_second),
        share(found.link_load),
        ("yes" if row.fits else "no") + mark,
    ]


def share1(value: float | None) -> str:
    """Return a share as `87.3 %`."""
    return "-" if value is None else f"{100 * value:.1f} %"


def rate(bytes_per_second: float) -> str:
    """Return bytes per second as bits per second, as links are sold."""
    return bit_rate(8 * bytes_per_second / 1e9)


def dollars(value: float | None) -> str:
    """Return an amount of money."""
    return "-" if value is None else f"${value:,.2f}"
