"""Looking at a run from outside its supervisor: for `plan`, `status` and `down`. Reads, starts nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from diloco_cli import places
from diloco_cli.island_report import Scene
from diloco_cli.looking import Observer
from diloco_cli.plan import Existing, Plan, make_plan
from diloco_cli.provider_local import find_islands, sight
from diloco_cli.runs import Run, budget_of, check_usable, find_run, place
from diloco_cli.sights import Sight
from diloco_cli.spec import Spec
from diloco_cli.status import StatusReport, build_report, settled
from diloco_runtime.errors import StoreUnavailable

LOOKS_PER_PERIOD = 4.0
"""Looks per heartbeat period while ages are being found out: a moving counter is seen to move soon."""

WATCH_SECONDS = 1.0
"""Seconds between two pictures of `status --watch`."""


def sights(run_id: str) -> dict[str, Sight]:
    """Return what a look at this machine shows of a run's islands."""
    return {name: sight(island) for name, island in find_islands(run_id).items()}


def look_for_plan(spec: Spec) -> Plan:
    """Return the plan for a spec, given what exists on its blackboard and on this machine.

    Raises what `up` and `train` would refuse the spec for: nothing is planned that cannot be done.
    """
    run = find_run(spec)
    check_usable(spec, run)
    if run is None:
        return make_plan(spec, Existing(), None)
    head, first = run.board.head(), run.board.read_commit(0)
    existing = Existing(
        run_id=run.id,
        budget=budget_of(run),
        log_position=None if head is None else head.seq,
        phase="" if head is None else head.phase,
        table=() if first is None else first.fragments,
        islands=tuple(name for name, seen in sights(run.id).items() if seen.present),
    )
    return make_plan(spec, existing, places.run_dir(run.name, run.id))


class Onlooker:
    """Looks at one run again and again; ages become known as the looks go on."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._host = socket.gethostname()
        self._observer = Observer(run.board, run.clock, run.spec.island_names, lambda: sights(run.id))

    def look(self) -> tuple[StatusReport, bool]:
        """Look once; return what is seen and whether looking on would say nothing new about it."""
        run, look = self._run, self._observer.look()
        report = build_report(run.id, place(run.spec), Scene(look, run.config, self._host))
        return report, settled(look, run.config, self._host)


def settled_report(run: Run, patient: bool = True) -> StatusReport:
    """Return the run's state once every age is known: at the latest after two heartbeat periods.

    Not `patient`: the first look alone, in which ages are unknown.
    """
    onlooker, pause = Onlooker(run), run.config.sync.heartbeat_every / LOOKS_PER_PERIOD
    report, done = onlooker.look()
    while patient and not done:
        run.clock.sleep(pause)
        report, done = onlooker.look()
    return report


def pictures(run: Run) -> Iterator[StatusReport | str]:
    """Look on until the run is over; an outage of the store is reported in words and outlived."""
    onlooker = Onlooker(run)
    while True:
        try:
            report, _ = onlooker.look()
            yield report
            if report.state in ("FINISHED", "STOPPED"):
                return
            run.board.check_identity()
        except StoreUnavailable as error:
            yield str(error)
        run.clock.sleep(WATCH_SECONDS)
