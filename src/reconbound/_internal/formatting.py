"""Formats numbers as text, rounded to the safe side. Every number that is shown as a guarantee is formatted here.

A lower bound (a floor, the least error of an attacker) is rounded down. An upper bound (ε, δ, the chance of an attack,
an advantage, the error of a guess) and a smallest noise are rounded up. Everything else is rounded to the nearest.
"Down" and "up" are exact: a text that is read back with float() is never on the wrong side of the number.

The progress bar of a terminal is here too.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from decimal import ROUND_CEILING, ROUND_FLOOR, ROUND_HALF_EVEN, Context, Decimal
from typing import Literal

Side = Literal["down", "near", "up"]
_MODES = {"down": ROUND_FLOOR, "near": ROUND_HALF_EVEN, "up": ROUND_CEILING}


def round_to(x: float, digits: int, side: Side, *, power: int = 0) -> float:
    """Rounds a number to `digits` significant digits, to the given side.

    Args:
        x: the number.
        digits: significant digits that are kept.
        side: "down", "near" or "up".
        power: of ten, by which the number is multiplied first.

    >>> round_to(1.372062, 4, "up"), round_to(1.372062, 4, "down"), round_to(0.0005, 3, "up")
    (1.373, 1.372, 0.0005)
    """
    exact = Decimal(repr(float(x)))  # the shortest that is read back as x: 0.1 and not the 55 digits of its double
    return float(Context(prec=digits, rounding=_MODES[side]).create_decimal(exact.scaleb(power)))


def format_number(x: float, digits: int = 3, side: Side = "near") -> str:
    """Formats a number for people: 24,800 where `g` would give 2.48e+04.

    Args:
        x: the number.
        digits: significant digits that are shown.
        side: "down", "near" or "up".

    >>> format_number(0.31622), format_number(24836.0), format_number(2.5e12), format_number(24836.0, 4)
    ('0.316', '24,800', '2.5e+12', '24,840')
    """
    short = round_to(x, digits, side)
    if 1e3 <= abs(short) < 1e8:
        text = f"{short:,.{max(digits - 1 - math.floor(math.log10(abs(short))), 0)}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    text = f"{short:.{digits}g}"
    return "0" if text == "-0" else text


def format_floor(x: float, digits: int = 3) -> str:
    """Formats a lower bound: rounded down.

    Args:
        x: the bound.
        digits: significant digits that are shown.

    >>> format_floor(19.781), format_floor(0.25), format_floor(2999.9)
    ('19.7', '0.25', '2,990')
    """
    return format_number(x, digits, "down")


def format_limit(x: float, digits: int = 3) -> str:
    """Formats an upper bound, such as ε or δ, or a smallest noise: rounded up.

    Args:
        x: the bound.
        digits: significant digits that are shown.

    >>> format_limit(8.8001), format_limit(1e-5), format_limit(1054.2)
    ('8.81', '1e-05', '1,060')
    """
    return format_number(x, digits, "up")


def format_noise(x: float, digits: int = 7) -> str:
    """Formats a smallest noise, to be typed into a command: rounded up, without thousands separators.

    Args:
        x: the noise.
        digits: significant digits that are shown.

    >>> format_noise(1.23456712), format_noise(13467.7401)
    ('1.234568', '13467.75')
    """
    return f"{round_to(x, digits, 'up'):.{digits}g}"


def format_percent(x: float, digits: int = 3, side: Side = "up") -> str:
    """Formats a chance in percent; rounded up by default, as the chance of an attack must be.

    Args:
        x: the chance, from 0 to 1.
        digits: significant digits that are shown.
        side: "down", "near" or "up".

    >>> format_percent(1e-6), format_percent(0.03551), format_percent(0.99991), format_percent(0.99991, side="down")
    ('0.0001%', '3.56%', '100%', '99.9%')
    """
    if not math.isfinite(x):
        return f"{x}%"
    return f"{round_to(x, digits, side, power=2):.{digits}g}%"


def format_duration(seconds: float) -> str:
    """Formats a duration in one unit.

    >>> format_duration(0.2), format_duration(300), format_duration(7200)
    ('1 s', '5 min', '2.0 h')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextmanager
def progress_bar(total: int, done: int, wanted: bool, what: str) -> Iterator[Callable[[int], None]]:
    """Provides a function to call at every step; it draws only if wanted, and only on a terminal.

    Args:
        total: the number of steps.
        done: the number of steps done already.
        wanted: whether to draw.
        what: the label of the bar.
    """
    if not wanted or not sys.stderr.isatty():
        yield lambda n: None
        return
    from reconbound._internal.rng import random_states_kept

    with random_states_kept():  # loading rich draws from Python's generator
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total, completed=done)
        yield lambda n: progress.advance(task, n)
