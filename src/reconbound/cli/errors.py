"""Errors of the command line as one line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from reconbound._internal.checks import DataError, DataShown, InputError
from reconbound.cli.options import SHOWS_DATA, option


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
