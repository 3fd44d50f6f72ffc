"""Simulated runs of tests: from `diloco train` to the end of everything, judged from outside."""

from __future__ import annotations

from collections.abc import Iterable

from diloco_cli.simulation.run import Simulation
from diloco_cli.simulation.world import SIGKILL
from diloco_runtime.audit import read_audit
from diloco_runtime.launch import Exit
from diloco_runtime.records import CommitRecord


def finished(simulation: Simulation, until: float = 5_000.0, lost: Iterable[str] = ()) -> list[CommitRecord]:
    """Run until nothing is left of the run; return its log.

    The log must be final, the audit silent, and every island must have left by itself but for the `lost` ones.
    """
    over = simulation.run_until(simulation.over, until)
    log = simulation.log()
    assert over and log[-1].phase == "final", (
        f"not over at {simulation.world.now} s: commit {log[-1].seq} {log[-1].phase}"
    )
    codes = {name: machine.agent.exit_code for name, machine in simulation.machines.items() if machine.agent}
    assert codes == {**dict.fromkeys(simulation.machines, Exit.DONE), **dict.fromkeys(lost, SIGKILL)}
    assert read_audit(simulation.observer()).check() == []
    return log
