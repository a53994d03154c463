"""The commands that train, report and show, one a file; what needs torch is imported when a command runs."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    from .audit import audit_command
    from .report import report_command, show_command
    from .sweep import frontier_command, sweep_command

    app.command("audit")(audit_command)
    app.command("report")(report_command)
    app.command("show")(show_command)
    app.command("sweep")(sweep_command)
    app.command("frontier")(frontier_command)
