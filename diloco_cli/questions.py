"""Questions to a person, and what their answers mean for a script."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from diloco_cli.exit_codes import ExitCode

if TYPE_CHECKING:
    from diloco_cli.plan import Plan


def show_plan(plan: Plan, yes: bool) -> None:
    """Show the plan; ask when there is a person to ask."""
    from diloco_cli.views import print_plan

    print_plan(plan)
    if not yes and sys.stdin.isatty():
        ask("Go on?", default=True)


def ask(question: str, default: bool) -> None:
    """Ask a person; end the command unless the answer is yes, with Ctrl-C's own code when that was the answer."""
    code = ExitCode.UNEXPECTED
    try:
        if typer.confirm(question, default=default):
            return
    except typer.Abort as error:  # Ctrl-C, or the input ended
        typer.echo()
        if isinstance(error.__context__, KeyboardInterrupt):
            code = ExitCode.INTERRUPTED
    typer.echo("nothing was done", err=True)
    raise typer.Exit(code)
