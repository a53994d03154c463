"""Reads numbers and paths of the command line; shared by its commands. torch is not imported here."""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import typer

from reconbound._internal.checks import InputError, number, rounded_up
from reconbound.bounds.data_space import DataSpace


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


class Told(int):
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
    """T = epochs / q, rounded up: one step more lowers a floor, one too few would raise it.

    >>> epochs_as_steps(10, 0.01), epochs_as_steps(1.1, 0.1), epochs_as_steps(10, 256 / 50000)
    (1000, 11, 1954)
    """
    rate = number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    return rounded_up(Fraction(number("epochs", epochs, above=0.0, at_most=1e15)) / Fraction(rate))


def within_range(target_mse: float | None, target_error: float | None, data: DataSpace) -> None:
    """Refuse a target beyond the range: whoever guesses within it errs by less, so the range was forgotten."""
    width = data.widest
    if target_mse is None or not (width > 0 and target_mse > width**2 * (1 + 1e-9)):
        return
    name, most, given = ("target_error", width, target_error)
    if target_error is None:
        name, most, given = ("target_mse", width**2, target_mse)
    which = "the range" if target_error is not None else "the square of the range"
    options = "--low and --high" if data.ball is None else "--data-norm, --low and --high"
    raise InputError(
        name,
        f"must be at most {most:g}, {which} of the data ({data.described()}), by which any guess within it is off at "
        f"most: give the range by {options}",
        given,
    )


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
        raise typer.Exit(Told(STOPPED)) from None
    except (InputError, BrokenPipeError):
        raise  # cli.run says them
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
            said = f"{type(reason).__name__}: {reason}"[:200]
            fail(f"{received} is damaged, or reconbound did not write it ({said})")
        raise


@contextmanager
def noted() -> Iterator[None]:
    """Prints warnings as notes of one line."""

    def shown(message: Any, *_: Any, **__: Any) -> None:
        print(f"Note: {one_line(str(message))}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = shown
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


#: Said of a line that quotes the data.
SHOWS_DATA = "this line shows data: keep it as secret as they are"


def confidential_note() -> None:
    print("reconbound: what follows is about single records: keep it as secret as the data", file=sys.stderr)
