"""What `diloco` tells a script: the one table of exit codes, and the one mapping from kinds of error to it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every command."""

    OK = 0
    UNEXPECTED = 1
    """Nothing that another code names; also no to a question, and what `down` could not end."""
    BAD_INPUT = 2
    STORE_UNAVAILABLE = 3
    NO_SUCH_RUN = 4
    """No run, another run, or a run that has not (yet, or any longer) what was asked for."""
    RUN_STOPPED = 5
    ISLANDS_MISSING = 6
    SUPERVISED = 7
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.OK: "done",
    ExitCode.UNEXPECTED: "an unexpected error, a damaged object, processes that `down` cannot end, or an answer of no",
    ExitCode.BAD_INPUT: "the spec, a file it names, your model's code or the command line is wrong",
    ExitCode.STORE_UNAVAILABLE: "the store did not answer or refused",
    ExitCode.NO_SUCH_RUN: "no such run, another one (settings, version, model), or one that lacks what is asked for",
    ExitCode.RUN_STOPPED: "the run ended short of its budget: stopped, or every island was given up",
    ExitCode.ISLANDS_MISSING: "the run reached its budget, but some islands were given up on the way",
    ExitCode.SUPERVISED: "another `diloco train` supervises this run",
    ExitCode.INTERRUPTED: "Ctrl-C",
}
"""What each code means; shown by `diloco --help`."""


def code_for(error: BaseException) -> ExitCode:
    """Return the exit code of an error that ended a command; `TeardownFailed`, `CorruptObject` and whatever is not
    named here are `UNEXPECTED`."""
    from diloco_cli.errors import AnotherSupervisor, NothingThere
    from diloco_runtime import errors

    kinds: tuple[tuple[type[BaseException], ExitCode], ...] = (
        (AnotherSupervisor, ExitCode.SUPERVISED),
        (errors.ConfigError, ExitCode.BAD_INPUT),
        (errors.StoreUnavailable, ExitCode.STORE_UNAVAILABLE),
        (errors.RunMismatch, ExitCode.NO_SUCH_RUN),
        (NothingThere, ExitCode.NO_SUCH_RUN),
        (errors.IncompatibleModel, ExitCode.NO_SUCH_RUN),
        (errors.MissingPayload, ExitCode.NO_SUCH_RUN),
        (KeyboardInterrupt, ExitCode.INTERRUPTED),
    )
    return next((code for kind, code in kinds if isinstance(error, kind)), ExitCode.UNEXPECTED)
