"""What the command line says of an error, in one line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import typer

from reconbound._internal.checks import DataError, DataShown, InputError
from reconbound.cli.guesses import said_of
from reconbound.cli.options import SHOWS_DATA, option


def said_of_value(error: InputError, app: typer.Typer) -> str:
    """Of a value that the library refused: the option it came from, what it must be, and the value."""
    if isinstance(error, DataError):
        return f"{error} ({SHOWS_DATA})" if isinstance(error, DataShown) else str(error)
    name = option(error.name) if option(error.name) in options_of(app) else error.name
    message = f"{name} {error.requirement}" + ("" if error.value is None else f", got {error.value}")
    if name == "--clip" and _is_number(error.value):
        message += " (it says how to clip; the clip norm is --max-grad-norm, which only audit and sweep need)"
    return message


def said_of_usage(error: Any, words: Sequence[str], app: typer.Typer) -> str:
    """Of an error of click's, in our words where it has none that help."""
    context, param = getattr(error, "ctx", None), getattr(error, "param", None)
    if getattr(error, "option_name", None) and hasattr(error, "possibilities"):
        command = "" if context is None or context.parent is None else str(context.info_name)
        known = options_of(app, command) if command else {"--version", "--help"}
        return said_of(str(error.option_name), command, known)
    if type(error).__name__ == "MissingParameter" and param is not None and not param.opts[0].startswith("-"):
        what = str(param.metavar or param.name).upper()
        return f"{what} is missing: {context.command_path} {what}" if context is not None else f"{what} is missing"
    if context is not None and str(getattr(error, "message", "")).startswith("Got unexpected extra argument"):
        extra = error.message.partition("(s) (")[2].rstrip(")") or error.message.partition(" (")[2].rstrip(")")
        return f"{extra} is more than {context.command_path} takes: see {context.command_path} --help"
    hint = getattr(error, "param_hint", None) or _own(error)
    message = f"{hint} {error.message}" if hint and hasattr(error, "message") else str(error.format_message())
    if "--seed" in getattr(param, "opts", ()):  # not shown: it may be one mistyped, and is as secret as the data
        return "--seed must be a whole number"
    value = _value(words, getattr(param, "opts", ()))
    return message if value is None or value in message else f"{message}, got {value}"


@cache
def command_of(app: typer.Typer) -> Any:
    """Returns the parser of the command line, which takes typer some 50 ms to make."""
    return typer.main.get_command(app)


def options_of(app: typer.Typer, command: str = "") -> set[str]:
    """The options of a command, or of all."""
    commands: dict[str, Any] = command_of(app).commands
    chosen = [commands[command]] if command in commands else list(commands.values())
    return {name for one in chosen for param in one.params for name in param.opts if name.startswith("-")} | {"--help"}


def _is_number(value: object) -> bool:
    try:
        float(str(value))
    except ValueError:
        return False
    return True


def _own(error: Any) -> str | None:
    """The option's name where one of our own parsers refused its value."""
    options = getattr(getattr(error, "param", None), "opts", ())
    return str(options[0]) if options and str(getattr(error, "message", "")).startswith("must be") else None


def _value(words: Sequence[str], options: Sequence[str]) -> str | None:
    """What was given for an option that could not be read."""
    for word, following in zip(reversed(words), [None, *reversed(words)], strict=False):
        name, equals, rest = word.partition("=")
        if name in options:
            return rest if equals else following
    return None
