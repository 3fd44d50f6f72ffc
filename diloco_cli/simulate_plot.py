"""`diloco simulate --plot`: the forecast as a picture. The only module that imports matplotlib, and only when asked."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from diloco_cli.simulate import Report, Row
from diloco_runtime.errors import ConfigError

POINTS = 400
"""Points of the timeline at most; each is the mean of equally many outer steps."""


def check_plot(place: str) -> None:
    """Raise `ConfigError` when no picture can be drawn there: found out before minutes of simulation."""
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib; install it with: pip install 'diloco[plot]'")
    path = Path(place).expanduser()
    if path.suffix != ".png":
        raise ConfigError(f"--plot {place}: name a file that ends in .png")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {place}: there is no folder {path.parent}")


def draw(report: Report, place: str) -> None:
    """Write the picture: goodput and bandwidth over `sync_every`, islands per outer step over time.

    Raises `ConfigError` when the file cannot be written.
    """
    # Without pyplot there is no display to ask for and nothing global to leave behind.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 7.0), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1)
    _draw_settings(report, above)
    _draw_timeline(report, below)
    figure.suptitle(f"{report.run}: forecast, seed {report.seed}")
    try:
        figure.savefig(Path(place).expanduser(), dpi=120)
    except OSError as error:
        raise ConfigError(f"--plot {place}: cannot be written ({error.strerror or error})") from error


def _draw_settings(report: Report, axes: Any) -> None:
    """Goodput of every number of fragments, and the bandwidth of the spec's, over `sync_every`."""
    own = report.setting
    same = [
        row for row in report.rows if (row.setting.min_quorum, row.setting.min_grace) == (own.min_quorum, own.min_grace)
    ]
    for fragments in sorted({row.setting.fragments for row in same}):
        rows = _by_period(same, fragments)
        goodput = [100.0 * (row.result.goodput or 0.0) for row in rows]
        axes.plot([row.setting.sync_every for row in rows], goodput, "o-", label=f"goodput, {fragments} fragments")
    axes.set_xlabel("sync_every (inner steps)")
    axes.set_ylabel("goodput (%)")
    other = axes.twinx()
    rows = _by_period(same, own.fragments)
    rates = [8e-6 * row.result.up_bytes_per_second for row in rows]
    other.plot([row.setting.sync_every for row in rows], rates, "k--", label="up, all islands")
    other.set_ylabel("Mbit/s")
    other.set_ylim(bottom=0.0)
    if same:
        axes.set_xscale("log", base=2)
        periods = sorted({row.setting.sync_every for row in same})
        axes.set_xticks(periods, [str(period) for period in periods])
        axes.legend(loc="lower left", fontsize="small")
        other.legend(loc="upper right", fontsize="small")


def _by_period(rows: list[Row], fragments: int) -> list[Row]:
    found = [row for row in rows if row.setting.fragments == fragments]
    return sorted(found, key=lambda row: row.setting.sync_every)


def _draw_timeline(report: Report, axes: Any) -> None:
    """Islands per outer step as simulated; losses as vertical lines."""
    trace = report.outcome.trace
    width = max(1, len(trace) // POINTS)
    parts = [trace[i : i + width] for i in range(0, len(trace), width)]
    hours = [part[-1].at / 3600.0 for part in parts]
    axes.step(hours, [sum(c.offers for c in part) / len(part) for part in parts], label="in an outer step")
    axes.step(hours, [sum(c.present for c in part) / len(part) for part in parts], alpha=0.6, label="training")
    for loss in report.outcome.losses:
        axes.axvline(loss.at / 3600.0, color="red", alpha=0.25, linewidth=0.8)
    axes.set_xlabel("hours (red: an island is lost; calm stretches have no points)")
    axes.set_ylabel("islands")
    axes.set_ylim(0.0, len(report.assumed) + 0.5)
    axes.legend(loc="lower left", fontsize="small")
