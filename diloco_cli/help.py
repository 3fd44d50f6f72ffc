"""`diloco --help` with its commands in panels and the exit codes below, in plain text: drawing it costs no rich."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class PanelGroup(TyperGroup):
    """A command group that lists its commands by `rich_help_panel`, in the order in which they were defined."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write one section per panel."""
        panels: dict[str, list[tuple[str, str]]] = {}
        commands = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        limit = formatter.width - 6 - max(map(len, commands), default=0)
        for name, command in commands.items():
            if command is None or command.hidden:
                continue
            panel = getattr(command, "rich_help_panel", None)
            heading = panel if isinstance(panel, str) else "Commands"
            panels.setdefault(heading, []).append((name, command.get_short_help_str(limit)))
        for heading, rows in panels.items():
            with formatter.section(heading):
                formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the exit codes as they stand, one a line."""
        if self.epilog:
            with formatter.section("Exit codes"):
                formatter.write("\n".join(self.epilog.splitlines()) + "\n")
