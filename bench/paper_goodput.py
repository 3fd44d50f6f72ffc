"""The goodput table of Decoupled DiLoCo (arXiv 2604.21428), and its experiment with learners of unequal speed.

Chips fail once a year of running. Two numbers that the paper does not give are fitted on its two data-parallel rows:
how long a group of chips stands still for one reconfiguration, and after how long a failed chip is back on average.
With them the rows of 2 to 16 decoupled learners are predicted. Every cell that misses by more than 3 points is marked.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from _mixed_speeds import Rule, Trial, Waits
from _results import Cell, Lines, parse_arguments, print_table

from diloco_cli.simulation.failures import Chips, Outcome, Recovery, simulate
from diloco_cli.simulation.steady_goodput import steady_goodput

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID, ELASTIC = (72, 57, 38, 27, 18), (88, 80, 69, 58, 40)
DECOUPLED = {
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
"""The paper's goodput in percent, by number of learners."""

MISS = 3.0
"""Points."""

UNIT = 256
"""Chips that one failing chip takes down. Not fitted: no row tells it (the bench tries others)."""

OTHER_UNITS = (64, 4096)
SEED = 1


class Fit(NamedTuple):
    """The free parameters, in seconds."""

    reconfigure: float
    """Standing still to go on without a unit, to take one in, or to start again: one number for all three."""
    chip_return: float
    """Mean of an exponential distribution."""

    def recovery(self, elastic: bool) -> Recovery:
        """Return what follows a failure."""
        own = self.reconfigure
        return Recovery(elastic, down_scale=own, up_scale=own, restart=own, chip_return=self.chip_return)


STARTS = (Fit(30.0, 600.0), Fit(5.0, 5.0))
"""The search begins at what the Gemini 2.5 report says of a real cluster (tens of seconds lost per interruption with
elasticity, ten minutes until machines are rescheduled), and once more at the other end."""

FIRST_STEPS, LAST_STEP = Fit(8.0, 128.0), 0.01


def outcome(chips: float, fit: Fit, elastic: bool, learners: int, failures: int, unit: float = UNIT) -> Outcome:
    """Simulate for as long as so many failures take if all chips run."""
    group = Chips(chips, unit)
    return simulate(group, fit.recovery(elastic), learners, failures / group.failure_rate, SEED)


def goodput(chips: float, fit: Fit, elastic: bool) -> float:
    """Return the goodput of one group in the long run, in percent."""
    return 100.0 * steady_goodput(Chips(chips, UNIT), fit.recovery(elastic))


# ---- the fit --------------------------------------------------------------------------------------------------------


def residuals(fit: Fit) -> list[float]:
    """Return ours minus the paper's for the ten data-parallel cells, in points."""
    rows = ((False, RIGID), (True, ELASTIC))
    return [goodput(n, fit, way) - paper for way, row in rows for n, paper in zip(CHIPS, row, strict=True)]


def rms(values: Sequence[float]) -> float:
    """Return the root of the mean square."""
    return math.sqrt(statistics.fmean(value * value for value in values))


def error(fit: Fit) -> float:
    """Return by how many points the two rows are missed."""
    return rms(residuals(fit))


def least_squares(start: Fit) -> Fit:
    """Return a minimum: move one parameter at a time while that helps, then halve the steps."""
    best, least, steps = start, error(start), FIRST_STEPS
    while max(steps) >= LAST_STEP:
        moved = False
        for name in Fit._fields:
            for sign in (1.0, -1.0):
                there = best._replace(**{name: max(0.5, getattr(best, name) + sign * getattr(steps, name))})
                if (found := error(there)) < least:
                    best, least, moved = there, found, True
        if not moved:
            steps = Fit(*(step / 2.0 for step in steps))
    return best


def fit_rows(lines: Lines) -> Fit:
    """Fit the free parameters on the two data-parallel rows; print how well they are determined."""
    found = sorted((least_squares(start) for start in STARTS), key=error)
    best = found[0]
    rows: list[list[Cell]] = [["best", *best, error(best)]]
    rows += [["from another start", *other, error(other)] for other in found[1:]]
    for name in Fit._fields:
        for factor in (0.8, 1.25):
            near = best._replace(**{name: factor * getattr(best, name)})
            rows.append([f"{name} x {factor}", *near, error(near)])
    print_table("Fit on the two data-parallel rows", ("", "reconfigure s", "chip return s", "rms points"), rows)
    lines.add("fit", **best._asdict(), rms_points=error(best), others=[other._asdict() for other in found[1:]])
    return best


# ---- the table ------------------------------------------------------------------------------------------------------


def compared(ours: float, paper: float) -> str:
    """Return the text of a cell: ours, the paper's, and MISS where they are too far apart."""
    return f"{'MISS ' if abs(ours - paper) > MISS else ''}{ours:.1f} / {paper:g}"


def goodput_table(fit: Fit, failures: int, lines: Lines) -> dict[int, list[Outcome]]:
    """Print all cells, ours beside the paper's; return the elastic rows as simulated, by number of learners."""
    rows: list[list[Cell]] = []
    found: dict[int, list[Outcome]] = {}
    off = []
    cases = [("fitted: DP, not elastic", False, 1, RIGID), ("fitted: DP, elastic", True, 1, ELASTIC)]
    cases += [(f"predicted: M = {learners}", True, learners, row) for learners, row in DECOUPLED.items()]
    for title, elastic, learners, paper in cases:
        ours = [goodput(chips / learners, fit, elastic) for chips in CHIPS]
        done = [outcome(chips, fit, elastic, learners, failures) for chips in CHIPS]
        rows.append([title, *(compared(o, p) for o, p in zip(ours, paper, strict=True))])
        off += [(100.0 * cell.goodput - own) / (100.0 * cell.error) for cell, own in zip(done, ours, strict=True)]
        for chips, own, theirs, cell in zip(CHIPS, ours, paper, done, strict=True):
            measured = {"simulated": 100.0 * cell.goodput, "error": 100.0 * cell.error, "uptime": 100.0 * cell.uptime}
            miss = abs(own - theirs) > MISS
            lines.add("goodput", row=title, chips=chips, ours=own, paper=theirs, miss=miss, **measured)
        if elastic:
            found[learners] = done
    headers = ("ours / paper", *(f"{chips // 1000}k chips" for chips in CHIPS))
    print_table("Goodput in percent", headers, rows)
    most = max(100.0 * cell.error for row in found.values() for cell in row)
    print(f"  Computed. Simulated (standard errors of {most:.2f} points and less) the cells differ from this by")
    print(f"  {rms(off):.2f} standard errors (root mean square), the farthest by {max(map(abs, off)):.1f}.")
    uptime = [[f"M = {m}", *(f"{100.0 * cell.uptime:.1f}" for cell in row)] for m, row in found.items()]
    print_table("Uptime in percent: somebody trains (the paper: about 100 from M = 4 on)", ("", *headers[1:]), uptime)
    return found


def rigid_reasons(fit: Fit) -> list[str]:
    """Return why cells of the row without elasticity miss."""
    cost = [(100.0 / paper - 1.0) / Chips(chips).failure_rate for chips, paper in zip(CHIPS, RIGID, strict=True)]
    seconds = ", ".join(f"{one:.0f}" for one in cost)
    return [
        f"DP, not elastic, {chips // 1000}k: {miss:+.1f}, a residual of the fit. A fixed cost per failure gives 1 / (1 "
        f"+ rate x cost), and the paper's row asks for {seconds} s from left to right: failures close together seem to "
        "share an outage in its simulation, as they do where time goes in whole steps."
        for chips, paper in zip(CHIPS, RIGID, strict=True)
        if abs(miss := goodput(chips, fit, False) - paper) > MISS
    ]


def elastic_reasons(fit: Fit) -> list[str]:
    """Return why cells of the elastic rows miss, told by the paper's own cells with learners of the same size."""
    paper = {1: ELASTIC, **DECOUPLED}
    reasons = []
    for learners, row in paper.items():
        for chips, theirs in zip(CHIPS, row, strict=True):
            size = chips / learners
            ours = goodput(size, fit, True)
            if abs(ours - theirs) <= MISS:
                continue
            same = {m: line[CHIPS.index(round(size * m))] for m, line in paper.items() if round(size * m) in CHIPS}
            listed = ", ".join(f"{value} (M = {m})" for m, value in same.items())
            text = f"M = {learners}, {chips // 1000}k: {ours - theirs:+.1f}. "
            text += (
                f"With learners of {size / 1000:g}k chips the paper has {listed}; here all are one number, {ours:.1f}. "
            )
            if learners > 1 and 1 in same:
                text += f"{ours - same[1]:+.1f} of the miss is the residual of the fit at M = 1, "
                text += f"{same[1] - theirs:+d} the paper's own step from M = 1 to M = {learners}. "
            reasons.append(text + _likely(theirs, learners, list(same.values())))
    return reasons


def _likely(theirs: int, learners: int, same: Sequence[int]) -> str:
    if learners == 1:
        return "A residual of the fit: two numbers for ten cells."
    if max(same) - min(same) < 2:
        return "So the residual of the fit it is."
    if theirs == min(same):
        return "Perhaps a cost that grows with the number of learners (syncer, recovery from peers), left out here."
    return "Perhaps the noise of a finite run: no cost in this model could fall with M at an equal size."


def unit_table(fit: Fit, found: dict[int, list[Outcome]], failures: int, lines: Lines) -> None:
    """Print how far the predictions move with the number that is neither given nor fitted."""
    rows: list[list[Cell]] = []
    for unit in OTHER_UNITS:
        moves = {
            (m, chips): 100.0 * (outcome(chips, fit, True, m, failures, unit).goodput - cell.goodput)
            for m, row in found.items()
            for chips, cell in zip(CHIPS, row, strict=True)
        }
        (learners, chips), most = max(moves.items(), key=lambda item: abs(item[1]))
        rows.append([f"{unit}", f"{most:+.1f}", f"M = {learners}, {chips // 1000}k"])
        lines.add("unit", unit=unit, largest_move=most, learners=learners, chips=chips)
    print_table(f"Other units than {UNIT} chips", ("chips of a unit", "largest move, points", "of cell"), rows)


# ---- learners of unequal speed --------------------------------------------------------------------------------------

MIXED: tuple[tuple[str, Rule, float | None], ...] = (
    ("K = 8", Rule("streaming", 8, grace=True), 84.0),
    ("K = 1", Rule("decoupled", 1, grace=False), 100.0),
    ("K = 1 + grace", Rule("decoupled", 1, grace=True), 100.0),
    ("K = 8, 2 steps ahead", Rule("streaming", 8, grace=True, overlap_steps=2), None),
    ("K = 1, 2 steps ahead", Rule("decoupled", 1, grace=False, overlap_steps=2), None),
    ("K = 1 + grace, 2 steps ahead", Rule("decoupled", 1, grace=True, overlap_steps=2), None),
)
"""As our presets have it, beside the paper's numbers; and with every learner bound to the paper's overlap of two."""


MIXED_REASON = (
    "an overlap of a step evens out noise that is drawn anew. The paper's number is about what the fast ones get here, "
    "and what all get when the noise is drawn once per learner. Which of the two it means we do not know."
)


def mixed_table(quick: bool, lines: Lines) -> None:
    """Print the heterogeneous experiment for two readings of "10 % injected variance"."""
    for lasting, trials, steps in ((False, 2, 80 if quick else 300), (True, 3 if quick else 16, 40 if quick else 150)):
        rows: list[list[Cell]] = []
        for title, rule, paper in MIXED:
            waits = [Trial(rule, lasting, seed).run(steps) for seed in range(trials)]
            mean = Waits(*(statistics.fmean(column) for column in zip(*map(_numbers, waits), strict=True)))
            shown = f"{100.0 * mean.goodput:.1f}" if paper is None else compared(100.0 * mean.goodput, paper)
            spread = 100.0 * statistics.stdev(one.goodput for one in waits)
            rows.append([title, shown, 100.0 * mean.fast, 100.0 * mean.slow, spread, mean.offers])
            lines.add("mixed", case=title, lasting=lasting, paper=paper, spread=spread, **vars(mean))
        headers = ("ours / paper", "goodput", "fast ones", "slow ones", "spread of trials", "offers / commit")
        drawn = "once per learner" if lasting else "anew for every step"
        print_table(f"Four learners 18 % slower than four others; 10 % noise drawn {drawn}", headers, rows)
        for row in rows:
            if str(row[1]).startswith("MISS"):
                print(f"  {row[0]} misses: {MIXED_REASON}")


def _numbers(waits: Waits) -> tuple[float, ...]:
    return (waits.goodput, waits.fast, waits.slow, waits.offers)


def main() -> int:
    """Fit, predict, compare."""
    arguments = parse_arguments(str(__doc__))
    quick: bool = arguments.quick
    lines = Lines("paper_goodput", arguments)
    fit = fit_rows(lines)
    found = goodput_table(fit, 2_000 if quick else 20_000, lines)
    print("\nCells that miss by more than 3 points, and why")
    for reason in rigid_reasons(fit) + elastic_reasons(fit):
        print(f"  {reason}")
        lines.add("miss", reason=reason)
    unit_table(fit, found, 2_000 if quick else 20_000, lines)
    mixed_table(quick, lines)
    lines.finish()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
