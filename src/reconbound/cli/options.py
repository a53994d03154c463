"""Reads options of the command line and describes its errors in one line. torch is not imported here."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from reconbound._internal.checks import DataError, DataShown, InputError, number, parse_number
from reconbound._internal.files import printable

if TYPE_CHECKING:
    from rich.console import Console


def option(name: str) -> str:
    """Returns an argument of ours as the command line spells it.

    >>> option("noise_multiplier")
    '--noise-multiplier'
    """
    return "--" + name.replace("_", "-")


#: Variables for what other users of the machine would see on a command line.
SEED, STORAGE = "RECONBOUND_SEED", "RECONBOUND_STORAGE"

HIDE = "Other users of the machine see a command line, not the variable."

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
    from reconbound.mechanisms.schedules import steps_of_epochs  # late: the command line starts at once

    rate = number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    return steps_of_epochs(number("epochs", epochs, above=0.0, at_most=1e15), rate)


# --- options that commands share -------------------------------------------------

#: Options by name: type, help, and settings of typer's ("names": how it is spelled) where there are any.
Options = Mapping[str, tuple[Any, ...]]
PARSERS: dict[Any, tuple[type, str]] = {ratio: (float, "<float>"), count: (int, "<int>")}

#: How data are read: fields of `DataOptions`.
DATA: Options = {
    "target": (str, "The column to predict."),
    "private": (
        list[str],
        "Private columns, of numbers or categories (default: all of numbers). Repeatable.",
        {"metavar": "A,B"},
    ),
    "range": (list[str], "Range of a column, known without the data. Repeatable.", {"metavar": "age=0:120"}),
    "unit": (list[str], "Unit of a column. Repeatable.", {"metavar": "age=years", "names": ("--unit", "--units")}),
    "data_folder": (Path, "Folder with mnist/ or cifar10/ (default: the variable RECONBOUND_DATA)."),
    "drop": (str, "Columns of a table to leave out.", {"metavar": "A,B"}),
    "category": (list[str], "A column to take as categories, whatever it holds. Repeatable.", {"metavar": "A"}),
    "header": (str, "Names of a CSV file's columns, where it has no first row of them.", {"metavar": "A,B"}),
    "size": (count, "Longest side, in pixels, to bring a folder's images to."),
    "test_share": (float, "Share of the records held out for testing (0.2), where there is no test set."),
    "limit": (count, "Train on at most so many records."),
}


def takes(**groups: Options) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Gives a command groups of options; it receives those that the user gave as one dictionary for each group.

    Args:
        **groups: the options, by the command's parameter for the dictionary.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            for group, options in groups.items():
                own = {name: values.pop(name) for name in options}
                values[group] = {k: v for k, v in own.items() if v is not None and v is not False and v != []}
            command(**values)

        run.__doc__ = command.__doc__
        parameters: list[inspect.Parameter] = []
        for one in inspect.signature(command, eval_str=True).parameters.values():
            options = groups.get(one.name, {})
            parameters += [_parameter(name, *entry) for name, entry in options.items()]
            parameters += [] if options else [one.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in parameters}
        return run

    return decorate


def _parameter(name: str, kind: Any, text: str, more: Mapping[str, Any] = MappingProxyType({})) -> inspect.Parameter:
    """Returns an option as typer reads it from a command's signature."""
    settings: dict[str, Any] = {"help": text, **more}
    names = settings.pop("names", (option(name),))  # a flag without --no-...
    if kind in PARSERS:
        settings |= {"parser": kind, "metavar": PARSERS[kind][1]}
    typed = bool if kind is bool else PARSERS.get(kind, (kind,))[0] | None
    annotation: Any = Annotated[typed, typer.Option(*names, **settings)]
    default = False if kind is bool else None
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def reading_options(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of DATA as `load_dataset` takes them."""
    from reconbound.data.tables import read_ranges, read_units

    names = {"range": "ranges", "unit": "units", "category": "categories", "data_folder": "folder"}
    read: dict[str, Any] = {"range": read_ranges, "unit": read_units, "header": lambda text: text.split(",")}
    return {names.get(name, name): read[name](value) if name in read else value for name, value in given.items()}


def parse_budget(given: str) -> float | str:
    """Returns "every" or a number."""
    try:
        return given if given == "every" else number("budget", parse_number(given), above=0.0)
    except InputError:
        raise InputError("budget", "must be a number greater than 0, or every", given) from None


# --- what is printed -------------------------------------------------------------


def print_json(content: Mapping[str, Any]) -> None:
    print(json.dumps(content, indent=2, allow_nan=False))


def print_line(line: object, *, error: bool = False) -> None:
    """Prints one line, of which nothing (a name, a path) steers the terminal or begins another line.

    Args:
        line: what to print.
        error: whether it goes to standard error.
    """
    print(printable(str(line)).replace("\n", "?"), file=sys.stderr if error else sys.stdout, flush=True)


def terminal() -> Console:
    """Returns a console that shows all text literally, and nothing that steers the terminal."""
    from rich.console import Console

    class Literal(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            super().print(*map(printable, objects), **options)

    return Literal(highlight=False, markup=False, emoji=False)


def print_table(
    console: Console, title: str, names: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()
) -> None:
    """Prints a table.

    Args:
        console: from `terminal`.
        title: of the table.
        names: of its columns.
        rows: its cells.
        left: columns that hold text; the others hold numbers.
    """
    from rich.table import Table

    table = Table(title=printable(title), title_justify="left")
    for name in names:
        table.add_column(printable(name), justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)


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
        own = type(reason).__module__.startswith("reconbound.")
        if own or (isinstance(reason, ValueError) and not received):  # a received folder is named, see below
            fail(str(reason))
        if type(reason).__module__.partition(".")[0] in ("sqlalchemy", "optuna"):
            fail(f"the database: {' '.join(str(reason).split())[:300]}")
        if received and not hasattr(reason, "format_message") and not isinstance(reason, typer.Exit):
            fail(f"{received} is damaged, or reconbound did not write it ({type(reason).__name__}: {reason})"[:600])
        raise


@contextmanager
def print_warnings(*, quiet: bool = False) -> Iterator[None]:
    """Prints warnings as notes of one line, unless quiet; kinks are reported elsewhere."""
    from reconbound.data import DataWarning
    from reconbound.validate import KinkWarning

    noted = quiet

    def show(message: Any, category: type[Warning] = UserWarning, *_: Any, **__: Any) -> None:
        nonlocal noted
        if not noted and issubclass(category, DataWarning):
            confidential_note()  # they quote ranges and cells
            noted = True
        if not quiet:
            print_line(f"Note: {one_line(str(message))}", error=True)

    with warnings.catch_warnings():
        warnings.simplefilter("default", UserWarning)
        warnings.simplefilter("once", DataWarning)
        warnings.simplefilter("ignore", KinkWarning)
        warnings.showwarning = show
        yield


#: Characters of an error or a note: names from a file may be of any length and number.
LONGEST = 2000


def one_line(message: str) -> str:
    r"""Returns the message on one line, with nothing in it (a file's name, a cell) that steers the terminal.

    >>> one_line("no\x1b[31m.csv\n does not exist")
    'no?[31m.csv does not exist'
    """
    shown = "".join(c if c.isprintable() else "?" for c in " ".join(message.split()))
    return shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}..."


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
