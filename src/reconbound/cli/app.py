"""The command line: one command a file. torch is imported only when a command needs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from reconbound import __version__
from reconbound._internal.checks import InputError
from reconbound.cli import options
from reconbound.cli.attack import attack_command
from reconbound.cli.audit import audit_command
from reconbound.cli.bound import bound_command
from reconbound.cli.calibrate import calibrate_command
from reconbound.cli.report import report_command
from reconbound.cli.show import show_command
from reconbound.cli.sweep import frontier_command, sweep_command

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"reconbound {__version__}")
        raise typer.Exit


@app.callback()
def _group(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """State how well each training record is protected against reconstruction.

    Start with reconbound audit, which trains on small pictures and writes a report, or with reconbound bound, which
    needs no data. Each command has its own --help.
    """


app.command("bound", short_help="What a mechanism guarantees, before any data.")(bound_command)
app.command("calibrate", short_help="The smallest noise for a floor, or for an epsilon.")(calibrate_command)
app.command("audit", short_help="From your data to a report on every record.")(audit_command)
app.command("attack", short_help="Attack records of an audit: floors below, attacks above.")(attack_command)
app.command("report", short_help="Write an audit's pages anew, or compare audits.")(report_command)
app.command("show", short_help="An audit, or one of its records, in the terminal.")(show_command)
app.command("sweep", short_help="Train many settings: accuracy against floors.")(sweep_command)
app.command("frontier", short_help="The best settings of a sweep.")(frontier_command)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status. Every error is one line on standard error."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        parser = options.command_parser(app)
        status = parser(args=words or ["--help"], prog_name="reconbound", standalone_mode=False) or 0
        reported = status != options.STOPPED or isinstance(status, options.ReportedStatus)
        return int(status) if reported else _stopped()
    except InputError as error:
        message = options.describe_refused_value(error, app)
    except typer.Exit as stop:
        return int(stop.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return _stopped()
    except Exception as error:
        if not hasattr(error, "format_message"):  # not one of click's: a fault of ours
            raise
        message = options.describe_usage_error(error, words)
    print(f"reconbound: {options.one_line(message)}", file=sys.stderr)
    return 2


def _stopped() -> int:
    print("\nreconbound: stopped", file=sys.stderr)
    return options.STOPPED
