"""The commands that train, report and show, one a file; what needs torch is imported when a command runs."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    from reconbound.cli.audit import audit_command
    from reconbound.cli.report import report_command, show_command
    from reconbound.cli.sweep import frontier_command, sweep_command

    app.command("audit", short_help="From your data to a report on every record.")(audit_command)
    app.command("report", short_help="Write an audit's pages anew, or compare audits.")(report_command)
    app.command("show", short_help="An audit, or one of its records, in the terminal.")(show_command)
    app.command("sweep", short_help="Train many settings: accuracy against floors.")(sweep_command)
    app.command("frontier", short_help="The best settings of a sweep.")(frontier_command)
