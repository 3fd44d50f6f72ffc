"""Errors that only the command line raises; the others are in `diloco_runtime.errors`."""

from __future__ import annotations

from diloco_runtime.errors import ConfigError, DilocoError


class SpecError(ConfigError):
    """Raised when a run spec cannot be used as written; the message has one line per problem."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class AnotherSupervisor(DilocoError):
    """Raised when another `diloco train` supervises the run: leave it alone."""


class NothingThere(DilocoError):
    """Raised when a run exists, but not what was asked for: no log, no model, no such log position."""


class TeardownFailed(DilocoError):
    """Raised when something that `diloco down` had to remove is still there."""
