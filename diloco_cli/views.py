"""What people see: tables, the live view, plain lines. The only module that imports rich; it is handed plain values."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from datetime import datetime
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from diloco_cli import simulate_text
from diloco_cli.formats import bit_rate, count, duration, number, share, size
from diloco_cli.island_report import IslandReport, lasting_problems
from diloco_cli.plan import Plan
from diloco_cli.simulate import Report
from diloco_cli.status import StatusReport
from diloco_cli.store_check import StoreReport
from diloco_runtime.clock import Clock

PLAIN_WIDTH = 150
"""Columns assumed when the output is a file or a pipe."""

PLAIN_EVERY = 10.0
"""Seconds between two status lines when there is no terminal to draw on."""

EVENT_LINES = 8
"""Newest events shown below the table."""

STYLES = {
    "RUNNING": "green",
    "STARTING": "cyan",
    "PENDING": "dim",
    "STALE": "bold yellow",
    "RESTARTING": "yellow",
    "FAILED": "bold red",
    "DONE": "blue",
    "DOWN": "dim",
}


def _console() -> Console:
    terminal = sys.stdout.isatty()
    width = None if terminal else PLAIN_WIDTH
    return Console(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=not terminal)


def _table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=column != "NOTE")
    return table


# ---- plan -----------------------------------------------------------------------------------------------------------


def print_plan(plan: Plan) -> None:
    """Print what is about to be created and what it costs."""
    console = _console()
    there = "new" if plan.run_id is None else f"run id {plan.run_id}"
    if plan.log_position is not None:
        there += f", log position {plan.log_position}" + (" (final)" if plan.phase == "final" else "")
    raised = (
        "" if plan.budget_now in (None, plan.budget) else f" (now {count(plan.budget_now)}; `diloco train` raises it)"
    )
    console.print(f"run {plan.run} ({there}) in {plan.store}, budget {count(plan.budget)} tokens{raised}")
    table = _table("ISLAND", "PROVIDER", "BATCH", "THREADS", "PROCESSES", "NOW", right=("BATCH", "THREADS"))
    for island in plan.islands:
        now = "running" if island.exists else "absent"
        sizes = (str(island.batch_size), str(island.threads))
        table.add_row(island.name, plan.provider, *sizes, ", ".join(island.processes), now)
    console.print(table)
    for line in _estimate_lines(plan):
        console.print(line)
    for what in plan.creates or ("nothing: everything is there",):
        console.print(f"creates {what}")
    console.print("costs nothing: local processes" if not plan.rents else f"costs {plan.price_per_hour}/h")


def _estimate_lines(plan: Plan) -> list[str]:
    estimate = plan.estimate
    if estimate is None:
        return ["model size unknown until the first island has built it"]
    source = "" if estimate.measured else ", estimated"
    tokens = "" if estimate.tokens is None else f", about {count(estimate.tokens)} tokens"
    return [
        f"model {count(estimate.parameters)} parameters{source}, {estimate.fragments} fragments",
        f"outer step: every {estimate.inner_steps:g} inner steps{tokens}; an offer is {size(estimate.offer_bytes)}, "
        f"a commit {size(estimate.commit_bytes)}; up {size(estimate.up_bytes)}, down {size(estimate.down_bytes)}, "
        f"{estimate.writes} writes and {estimate.reads} reads",
        f"at 1 s per inner step: the merging syncer needs {bit_rate(estimate.syncer_down_gbits)} down and "
        f"{bit_rate(estimate.syncer_up_gbits)} up; polls, heartbeats and the like add about "
        f"{estimate.background_per_second:.0f} requests per second",
        f"checkpoints: {size(estimate.checkpoint_bytes)} per island every {estimate.checkpoint_every:g} s",
        *(f"! {warning}" for warning in estimate.warnings),
    ]


# ---- check ----------------------------------------------------------------------------------------------------------


def print_check(report: StoreReport) -> None:
    """Print what a store can do and what it is like from here."""
    console = _console()
    offset = "unknown" if report.clock_offset is None else f"{report.clock_offset:+.0f} s against the store's"
    rates = [bit_rate(rate * 8e-9) for rate in (report.upload_rate, report.download_rate)]
    console.print(f"{report.place} can hold a run")
    for line in (
        *(f"works: {what}" for what in report.proved),
        f"a small read takes {duration(report.read_seconds)}, a small create {duration(report.create_seconds)}",
        f"one transfer moves {rates[0]} up, {rates[1]} down",
        f"this machine's clock: {offset}",
        f"region: {report.region or 'unknown'}; reading from elsewhere costs: {report.egress}",
        *(f"! {warning}" for warning in report.warnings),
    ):
        console.print(line)


# ---- simulate -------------------------------------------------------------------------------------------------------


def print_simulation(report: Report) -> None:
    """Print what a run will come to, per island and as a whole, and how other settings compare."""
    console = _console()
    for line in simulate_text.opening(report):
        console.print(line)
    console.print(_filled(simulate_text.ISLAND_COLUMNS, simulate_text.island_rows(report)))
    for line in simulate_text.outlook(report):
        console.print(line)
    if report.rows:
        console.print(_filled(simulate_text.SETTING_COLUMNS, simulate_text.setting_rows(report)))
    for line in simulate_text.closing(report):
        console.print(line)


def _filled(columns: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = _table(*columns, right=columns[1:-1])
    for row in rows:
        table.add_row(*row)
    return table


# ---- status ---------------------------------------------------------------------------------------------------------


def headline(report: StatusReport) -> str:
    """Return a run's state in one line."""
    part = report.tokens / report.budget if report.budget else 0.0
    parts = [
        f"{report.run} {report.state}" + (f" ({report.reason})" if report.reason else ""),
        f"{count(report.tokens)} of {count(report.budget)} tokens ({share(part)})",
        f"commit {report.commits}",
    ]
    if report.offers_per_commit is not None:
        parts.append(f"{report.offers_per_commit:.1f} offers per commit")
    if report.goodput is not None:
        parts.append(f"goodput {share(report.goodput)}")
    if report.eta_seconds is not None:
        parts.append(f"ends in about {duration(report.eta_seconds)}")
    return ", ".join(parts)


def _note(island: IslandReport) -> str:
    notes = [island.reason] if island.reason else []
    if island.merging:
        notes.append("merges")
    return "; ".join([*notes, *island.problems])


def _island_table(report: StatusReport) -> Table:
    right = ("STEP", "LOSS", "LR", "PER STEP", "GOODPUT", "RESTARTS", "AGE", "UP", "DOWN", "REQUESTS")
    table = _table("ISLAND", "STATE", *right, "NOTE", right=right)
    for island in report.islands:
        table.add_row(
            island.name,
            Text(island.state, style=STYLES.get(island.state, "")),
            "-" if island.step is None else str(island.step),
            number(island.loss),
            "-" if island.lr is None else f"{island.lr:.2g}",
            duration(island.step_seconds),
            share(island.goodput),
            str(island.restarts),
            duration(island.age_seconds),
            size(island.bytes_up),
            size(island.bytes_down),
            count(island.requests),
            Text(_note(island)),
        )
    return table


def fates_line(report: StatusReport) -> str:
    """Return what became of the tokens, in one line."""
    fates = report.fates
    parts = [f"{count(getattr(fates, name))} {name}" for name in
             ("merged", "refused", "late", "overwritten", "pending", "lost")]  # fmt: skip
    return f"tokens processed {count(fates.processed)}: {', '.join(parts)}"


def _supervisor_line(report: StatusReport) -> str:
    if report.supervisor in ("NONE", "ENDED"):
        return "supervisor: none; `diloco train` starts one"
    return f"supervisor: {report.supervisor}, process {report.supervisor_pid} on {report.supervisor_host}"


def _status_group(report: StatusReport) -> Group:
    return Group(
        Text(headline(report), style="bold"),
        _island_table(report),
        Text(fates_line(report)),
        Text(_supervisor_line(report)),
        *(Text(f"! {problem}", style="yellow") for problem in report.problems),
    )


def print_status(report: StatusReport) -> None:
    """Print a run's state as a table."""
    _console().print(_status_group(report))


def summary_lines(report: StatusReport, seconds: float, offers_per_commit: float | None) -> list[str]:
    """Return the closing words of a supervisor: what was trained, what it took."""
    offers = "" if offers_per_commit is None else f", {offers_per_commit:.2f} offers per commit"
    restarts = ", ".join(f"{island.name} {island.restarts}" for island in report.islands)
    tokens = f"{count(report.tokens)} of {count(report.budget)} tokens merged"
    return [
        f"{report.run}: {tokens}, {report.commits} commits{offers}",
        fates_line(report),
        f"restarts {report.restarts} ({restarts}), goodput {share(report.goodput)}, "
        f"{size(report.bytes_up)} up, {size(report.bytes_down)} down, {count(report.requests)} requests, "
        f"{duration(seconds)} of supervision",
        *(
            f"! {island.name}: {problem}"
            for island in report.islands
            for problem in lasting_problems(island.skipped_steps, island.reset_fragments, island.reread_samples)
        ),
    ]


# ---- live -----------------------------------------------------------------------------------------------------------


class LiveView:
    """Redraws the table on a terminal with the newest events below it; elsewhere prints events and, now and then, one
    status line and what is newly wrong. Use as a context manager."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._console = _console()
        self._events: deque[str] = deque(maxlen=EVENT_LINES)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        self._report: StatusReport | None = None
        self._printed: float | None = None
        self._problems: tuple[str, ...] = ()

    def __enter__(self) -> LiveView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, line: str) -> None:
        """Show one event."""
        stamped = f"{datetime.fromtimestamp(self._clock.wall()):%H:%M:%S} {line}"
        if self._live is None:
            print(stamped, flush=True)
            return
        self._events.append(stamped)
        self._draw()

    def show(self, report: StatusReport | None) -> None:
        """Show the newest state."""
        if report is None:
            return
        self._report = report
        if self._live is not None:
            self._draw()
            return
        now = self._clock.monotonic()
        if self._printed is None or now - self._printed >= PLAIN_EVERY:
            self._printed = now
            self.say(headline(report))
            for problem in report.problems:
                if problem not in self._problems:
                    self.say(f"! {problem}")
            self._problems = report.problems

    def _draw(self) -> None:
        assert self._live is not None
        parts: list[Group | Text] = [] if self._report is None else [_status_group(self._report)]
        self._live.update(Group(*parts, *(Text(event, style="dim") for event in self._events)), refresh=True)


def watch_status(pictures: Iterable[StatusReport | str], clock: Clock) -> None:
    """Show pictures of a run as they come; a line of text instead of one says why there is none."""
    with LiveView(clock) as view:
        for picture in pictures:
            if isinstance(picture, str):
                view.say(picture)
            else:
                view.show(picture)
