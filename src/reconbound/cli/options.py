"""Reads options of the command line and describes its errors in one line. torch is not imported here."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache
from typing import Any

import typer

from reconbound._internal.checks import DataError, DataShown, InputError, number, rounded_up


def option(name: str) -> str:
    """Returns an argument of ours as the command line spells it.

    >>> option("noise_multiplier")
    '--noise-multiplier'
    """
    return "--" + name.replace("_", "-")


#: Variables for what other users of the machine would see on a command line.
SEED, STORAGE = "RECONBOUND_SEED", "RECONBOUND_STORAGE"

#: Exit status of what was stopped from the keyboard.
STOPPED = 130


class ReportedStatus(int):
    """An exit status whose reason has been printed."""


def ratio(given: Any) -> float:
    """Reads a number, also as a fraction: 0.01, 256/50000."""
    text = str(given)  # typer passes defaults too
    try:
        over, slash, under = text.partition("/")
        return float(over) / float(under) if slash else float(text)
    except (ValueError, ZeroDivisionError):
        raise typer.BadParameter("must be a number or a fraction such as 256/50000") from None


def count(given: Any) -> int:
    """Reads a whole number, also as 1e6 or as a shape: 3x32x32."""
    try:
        parts = [float(part) if "e" in part else int(part) for part in str(given).lower().split("x")]
        whole = [int(part) for part in parts]
    except (ValueError, OverflowError):
        whole, parts = [], [math.nan]
    if whole != parts:
        raise typer.BadParameter("must be a whole number")
    return math.prod(whole)


def epochs_as_steps(epochs: Any, sample_rate: Any) -> int:
    """Returns T = epochs/q, rounded up: one step too few would raise a floor.

    >>> epochs_as_steps(10, 0.01), epochs_as_steps(1.1, 0.1), epochs_as_steps(10, 256 / 50000)
    (1000, 11, 1954)
    """
    rate = number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    return rounded_up(Fraction(number("epochs", epochs, above=0.0, at_most=1e15)) / Fraction(rate))


@contextmanager
def plain_errors(resume: str = "", received: str = "") -> Iterator[None]:
    """Turns errors of files, data and models, and a stop from the keyboard, into one line on standard error.

    Args:
        resume: what to do after a stop.
        received: the folder that is read, where it may come from anyone: whatever is wrong with it is one line too.
    """
    try:
        yield
    except KeyboardInterrupt:
        print(f"\nreconbound: stopped{resume}", file=sys.stderr)
        raise typer.Exit(ReportedStatus(STOPPED)) from None
    except (InputError, BrokenPipeError):
        raise  # cli.run prints them
    except MemoryError as reason:
        fail(f"the memory does not suffice{f' ({reason})' if str(reason) else ''}")
    except NotADirectoryError as reason:
        fail(f"{os.path.dirname(str(reason.filename))} is a file, not a folder")
    except OSError as reason:
        where = f"{reason.filename}: " if reason.filename else ""
        fail(f"{where}{reason.strerror or reason}")
    except Exception as reason:
        if type(reason).__module__.startswith("reconbound.") or isinstance(reason, ValueError):
            fail(str(reason))
        if type(reason).__module__.partition(".")[0] in ("sqlalchemy", "optuna"):
            fail(f"the database: {' '.join(str(reason).split())[:300]}")
        if received and not hasattr(reason, "format_message") and not isinstance(reason, typer.Exit):
            fail(f"{received} is damaged, or reconbound did not write it ({type(reason).__name__}: {reason})"[:600])
        raise


@contextmanager
def print_warnings() -> Iterator[None]:
    """Prints warnings as notes of one line."""

    def show(message: Any, *_: Any, **__: Any) -> None:
        print(f"Note: {one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = show
        yield


def one_line(message: str) -> str:
    r"""Returns the message on one line, with nothing in it (a file's name, a cell) that steers the terminal.

    >>> one_line("no\x1b[31m.csv\n does not exist")
    'no?[31m.csv does not exist'
    """
    return "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))


def fail(message: str) -> None:
    print(f"reconbound: {one_line(message)}", file=sys.stderr)
    raise typer.Exit(2)


#: Added to a line that quotes the data.
SHOWS_DATA = "this line shows data: keep it as secret as they are"


def confidential_note() -> None:
    print("reconbound: what follows is about single records: keep it as secret as the data", file=sys.stderr)


# --- errors --------------------------------------------------------------------


def describe_refused_value(error: InputError, app: typer.Typer) -> str:
    """Describes a value that the library refused: its option, what it must be, and the value."""
    if isinstance(error, DataError):
        return f"{error} ({SHOWS_DATA})" if isinstance(error, DataShown) else str(error)
    name = option(error.name) if option(error.name) in option_names(app) else error.name
    return f"{name} {error.requirement}" + ("" if error.value is None else f", got {error.value}")


def describe_usage_error(error: Any, words: Sequence[str]) -> str:
    """Returns typer's own message, with its suggestions, and the value that could not be read.

    Args:
        error: one of typer's.
        words: the command line. A mistyped seed is not shown: it is as secret as the data.
    """
    options = getattr(getattr(error, "param", None), "opts", ())
    if "--seed" in options:
        return "--seed must be a whole number"
    hint = getattr(error, "param_hint", None)
    message = f"{hint} {error.message}" if hint else str(error.format_message())
    value = _given_value(words, options)
    return message if value is None or value in message else f"{message}, got {value}"


def _given_value(words: Sequence[str], options: Sequence[str]) -> str | None:
    """Returns the last value that was given for an option."""
    for word, following in zip(reversed(words), [None, *reversed(words)], strict=False):
        name, equals, rest = word.partition("=")
        if name in options:
            return rest if equals else following
    return None


@cache
def command_parser(app: typer.Typer) -> Any:
    """Returns the parser of the command line, which takes typer some 50 ms to make."""
    return typer.main.get_command(app)


def option_names(app: typer.Typer, command: str = "") -> set[str]:
    """Returns the options of a command, or of all commands."""
    commands: dict[str, Any] = command_parser(app).commands
    chosen = [commands[command]] if command in commands else list(commands.values())
    return {name for one in chosen for param in one.params for name in param.opts if name.startswith("-")} | {"--help"}
