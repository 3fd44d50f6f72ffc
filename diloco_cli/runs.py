"""A run on its blackboard as the commands need it: find it, create it once, compare it with a spec, ask it to go on.

`run.json` holds the training identity; the budget may be raised later by a control record, everything else may not
change. A person's wishes are control records, numbered; the newest one counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

import diloco_runtime
from diloco_cli.errors import NothingThere
from diloco_cli.spec import Spec
from diloco_runtime.blackboard import Blackboard
from diloco_runtime.clock import Clock, SystemClock, SystemNonces
from diloco_runtime.config import RunConfig
from diloco_runtime.errors import ConfigError, RunMismatch
from diloco_runtime.records import ControlRecord, RunRecord
from diloco_runtime.store import open_store


@dataclass(frozen=True)
class Run:
    """A run that exists."""

    spec: Spec
    record: RunRecord
    board: Blackboard
    clock: Clock

    @property
    def id(self) -> str:
        return self.record.run_id

    @property
    def name(self) -> str:
        return self.record.name

    @property
    def config(self) -> RunConfig:
        """The run's settings; raises `RunMismatch` when another version wrote some that this one does not know."""
        try:
            return RunConfig.model_validate(self.record.config)
        except ValidationError as error:
            raise RunMismatch(
                f"the settings of run {self.name} cannot be read: version {self.record.code_version} of diloco wrote "
                f"them, this is version {diloco_runtime.__version__}; use that version for this run"
            ) from error

    def another_board(self) -> Blackboard:
        """Return a blackboard for another thread."""
        return Blackboard(open_store(self.spec.store, self.spec.name), self.id, self.clock, SystemNonces())


def place(spec: Spec) -> str:
    """Return the run's folder as a URL."""
    return f"{spec.place}/{spec.name}"


def find_run(spec: Spec) -> Run | None:
    """Return the run that the spec's folder holds now, or None."""
    clock, nonces = SystemClock(), SystemNonces()
    store = open_store(spec.store, spec.name)
    record = Blackboard(store, "", clock, nonces).read_run()
    return None if record is None else Run(spec, record, Blackboard(store, record.run_id, clock, nonces), clock)


def require_run(spec: Spec) -> Run:
    """Return the spec's run; raise `RunMismatch` with what to do when there is none."""
    run = find_run(spec)
    if run is None:
        raise RunMismatch(f"there is no run {spec.name} in {spec.place}; `diloco train {spec.path.name}` starts it")
    return run


def require_position(run: Run, at: int | None) -> None:
    """Raise `NothingThere` unless the run has a model, and one at log position `at` if that is given."""
    head = run.board.head()
    if head is None:
        raise NothingThere(
            f"run {run.name} has no model yet: no island has initialised it; `diloco train {run.spec.path.name}` "
            "starts its islands"
        )
    if at is not None and at > head.seq:
        raise NothingThere(f"run {run.name} has no log position {at} yet; the newest is {head.seq}")


def create_run(spec: Spec) -> tuple[Run, bool]:
    """Create the spec's run unless it exists; return what is there and whether it is new.

    Of many that try at once one succeeds, and all get the same run.
    """
    clock, nonces = SystemClock(), SystemNonces()
    store = open_store(spec.store, spec.name)
    record = RunRecord(
        run_id=nonces.new(),
        nonce=nonces.new(),
        name=spec.name,
        code_version=diloco_runtime.__version__,
        config=spec.config.model_dump(mode="json"),
        created_wall=clock.wall(),
    )
    standing = Blackboard(store, "", clock, nonces).create_run(record)
    board = Blackboard(store, standing.run_id, clock, nonces)
    return Run(spec, standing, board, clock), standing.nonce == record.nonce


# ---- identity -------------------------------------------------------------------------------------------------------


def flatten(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def differences(spec: Spec, record: RunRecord) -> list[str]:
    """Name every setting in which the spec is not the run, as `key: run has x, spec has y`; the budget may differ."""
    theirs, ours = flatten(record.config), flatten(spec.config.model_dump(mode="json"))
    absent = object()
    found = []
    for key in sorted({*theirs, *ours} - {"tokens"}):
        old, new = theirs.get(key, absent), ours.get(key, absent)
        if old != new:
            said = ["nothing" if value is absent else repr(value) for value in (old, new)]
            found.append(f"{key}: the run has {said[0]}, the spec has {said[1]}")
    return found


def check_same(run: Run) -> None:
    """Raise `RunMismatch` unless the spec describes the run that is there and this code can continue it."""
    if wrong := differences(run.spec, run.record):
        raise RunMismatch(
            f"{place(run.spec)} holds a run with other settings ({'; '.join(wrong)}); set them back, give this spec "
            f"another run.name, or remove the run with `diloco down {run.spec.path.name} --purge`"
        )
    if run.record.code_version != diloco_runtime.__version__:
        raise RunMismatch(
            f"run {run.name} was made by version {run.record.code_version} of diloco and this is version "
            f"{diloco_runtime.__version__}; install that version, or start a run of another name"
        )


def check_budget(run: Run) -> int:
    """Return the run's budget; raise `ConfigError` when the spec would lower it."""
    budget, wanted = budget_of(run), run.spec.config.tokens
    if wanted < budget:
        raise ConfigError(
            f"{run.spec.path.name}: [run] tokens = {wanted}: the run's budget is {budget} already and can only be "
            "raised; set it back, or stop the run early with `diloco down`"
        )
    return budget


def check_data(spec: Spec) -> None:
    """Raise `ConfigError` when a file pattern of the spec matches nothing: islands would fail on it one by one."""
    if spec.config.model.kind != "gpt":
        return
    from diloco_runtime.text_data import find_files

    find_files(str(spec.root), spec.config.data.files, "files")
    find_files(str(spec.root), spec.config.data.held_out_files, "held_out_files")


def check_usable(spec: Spec, run: Run | None) -> None:
    """Raise what `up` and `train` refuse a spec for, given the run that is there: before anything is shown or made."""
    if run is not None:
        check_same(run)
        check_budget(run)
    check_data(spec)


# ---- wishes ---------------------------------------------------------------------------------------------------------


def _control(run: Run, number: int, action: Literal["stop", "run"], tokens: int | None, reason: str) -> ControlRecord:
    record = ControlRecord(
        run_id=run.id, nonce=run.board.new_nonce(), number=number, action=action, tokens=tokens, reason=reason
    )
    return run.board.create(run.board.keys.control(number), record)


def request_stop(run: Run, reason: str) -> ControlRecord:
    """Write a stop request as the newest wish; return it.

    A new one is written even if the newest is a stop already: a `diloco train` that is about to take the older one
    back would otherwise not notice that a person wanted the run stopped meanwhile.
    """
    while True:
        newest = run.board.newest_control()
        number = 1 if newest is None else newest.number + 1
        standing = _control(run, number, "stop", None, reason)
        if standing.action == "stop" and standing.reason == reason:
            return standing


def budget_of(run: Run) -> int:
    """Return the tokens that the run is to merge, after every control record so far."""
    newest = run.board.newest_control()
    number = 0 if newest is None else newest.number
    while number > 0:
        record = run.board.read_control(number)
        if record is not None and record.tokens is not None:
            return record.tokens
        number -= 1
    return run.config.tokens


Readiness = Literal["ready", "reopened", "raised", "finished", "stopped"]


def ready_to_train(run: Run, seen: ControlRecord | None) -> Readiness:
    """Make sure that the run may go on, as `diloco train` promises; say what that took.

    `seen`: the newest wish when the command began. A stop request that came later is obeyed ("stopped"), never taken
    back: its author could not know of this command. Raises `ConfigError` when the spec would lower the budget.
    """
    head, budget, wanted = run.board.head(), check_budget(run), run.spec.config.tokens
    over = head is not None and head.phase == "final" and not _reopens(seen, head.control)
    if over and head is not None and head.reason == "budget" and wanted <= budget:
        return "finished"
    stopped = seen is not None and seen.action == "stop"
    if not (over or stopped or wanted > budget):
        return "ready"
    number = 1 if seen is None else seen.number + 1
    standing = _control(run, number, "run", wanted, "diloco train")
    if standing.action == "stop":
        return "stopped"
    return "raised" if wanted > budget else "reopened"


def _reopens(control: ControlRecord | None, known: int) -> bool:
    return control is not None and control.action == "run" and control.number > known
