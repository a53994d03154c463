"""Checks of arguments at the public interface. Every message names the argument and the value that was given."""

from __future__ import annotations

import math
import os
import sys
import warnings
from fractions import Fraction
from typing import Any

import numpy as np

_INSIDE = ("reconbound", "sklearn", "torch", "functools", "contextlib")
LARGEST = float(np.finfo(np.float64).max)


def warn_user(message: str | Warning, category: type[Warning] | None = None) -> None:
    """Issues a warning that points to the caller's line outside this package, however deep the call is.

    Args:
        message: the text, or a warning.
        category: the class of the warning, for a text.
    """
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class InputError(ValueError):
    """A value that cannot be used; the message names the argument, the requirement and the value."""

    def __init__(self, name: str, requirement: str, value: object) -> None:
        try:
            text = repr(value)
        except (RecursionError, ValueError):  # lists within each other, and whole numbers of thousands of digits
            value = text = f"a {type(value).__name__}"
        self.name, self.requirement, self.value = name, requirement, value
        super().__init__(f"{name} {requirement}, got {text}")


class DataError(InputError):
    """A file or folder of data that cannot be used; the message says where (file, row, column) and why, in one line."""

    def __init__(self, message: str) -> None:
        self.name, self.requirement, self.value = "data", message, None
        ValueError.__init__(self, message)


class DataShown(DataError):
    """A DataError whose message shows values of the data: it is as secret as they are."""


class DataMissing(DataError, FileNotFoundError):
    """Data that was not found where it was expected."""


def number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """Returns a finite float within the limits, or raises an InputError that names the limit that was missed.

    Text is refused: see `parse_number`.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
        above: the value must be larger than this.
        at_least: the value must not be smaller than this.
        at_most: the value must not be larger than this.
        below: the value must be smaller than this.
    """
    if isinstance(value, str | bytes | bool | np.bool_):  # float() would accept it, and a mistake would not be noticed
        raise InputError(name, "must be a number", _shown(value))
    try:
        x = float(value)
    except (TypeError, ValueError):
        raise InputError(name, "must be a number", _shown(value)) from None
    except OverflowError:  # a whole number too large for a float
        raise InputError(name, "must be at most 1e308", value) from None
    if not math.isfinite(x):
        raise InputError(name, "must be a finite number", value)
    if above is not None and not x > above:
        raise InputError(name, f"must be greater than {above:g}", value)
    if at_least is not None and not x >= at_least:
        raise InputError(name, f"must be at least {at_least:g}", value)
    if at_most is not None and not x <= at_most:
        raise InputError(name, f"must be at most {at_most:g}", value)
    if below is not None and not x < below:
        raise InputError(name, f"must be less than {below:g}", value)
    return x


def parse_number(text: Any) -> Any:
    """Returns the number in a word of a command line; returns other text unchanged, for `number` to refuse.

    >>> parse_number("0.5"), parse_number("fast"), parse_number(2)
    (0.5, 'fast', 2)
    """
    if not isinstance(text, str):
        return text
    try:
        return float(text)
    except ValueError:
        return text


def whole(name: str, value: Any, *, at_least: int = 1) -> int:
    """Returns a whole number that is at least `at_least`; refuses any other value.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
        at_least: the smallest number that is accepted.
    """
    x = number(name, value, at_least=at_least)
    if x != int(x):
        raise InputError(name, "must be a whole number", value)
    return int(x)


def rounded_up(x: Fraction | float) -> int:
    """Returns the next whole number, at least 1.

    A value just above a whole number, such as 1/(1/3), counts as that number.

    "Just above" means four parts in 10¹⁶, which rounding a quotient of two floats can add.

    >>> rounded_up(2.5), rounded_up(Fraction(10) / Fraction(1 / 3)), rounded_up(0.1)
    (3, 30, 1)
    """
    return max(1, math.ceil(Fraction(x) * (1 - Fraction(1, 2**51))))


def plain_number(name: str, value: Any, **limits: float | None) -> int | float:
    """Returns the result of `number` as Python's own int or float, whatever NumPy or torch type the value has.

    Args:
        name: of the argument.
        value: that was given.
        **limits: as `number` takes them.

    >>> plain_number("lr", np.float32(0.5)), plain_number("lr", np.int64(2)), plain_number("lr", 3, above=0.0)
    (0.5, 2, 3)
    """
    x = number(name, value, **limits)
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    return int(value) if hasattr(value, "__index__") and x == int(x) else x


def choice(name: str, value: Any, options: tuple[str, ...]) -> str:
    """Returns the value if it is one of the options; refuses any other value.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
        options: the texts that are accepted.
    """
    if not isinstance(value, str) or value not in options:
        raise InputError(name, f"must be one of {', '.join(options)}", _shown(value))
    return value


def flag(name: str, value: Any) -> bool:
    """Returns True or False as it was given.

    A value that only counts as one of them is refused, because it may be a mistake.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
    """
    if not isinstance(value, bool | np.bool_):
        raise InputError(name, "must be True or False", _shown(value))
    return bool(value)


def function(name: str, value: Any, takes: str) -> None:
    """Refuses a value that cannot be called.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
        takes: the function's arguments and result, in words.
    """
    if not callable(value):
        raise InputError(name, f"must be a function ({takes})", _shown(value))


def file_path(name: str, value: Any) -> str:
    """Returns a path as text; refuses a value that is no path, or an empty one.

    Args:
        name: the name of the argument, for the message.
        value: as it was given.
    """
    try:
        found = os.fspath(value)
    except TypeError:
        found = b""
    if not isinstance(found, str) or not found or "\0" in found:
        raise InputError(name, "must be a path", _shown(value))
    return found


def _shown(value: Any) -> Any:
    """Returns the value, or only its type where its text would fill the screen."""
    try:
        return value if len(repr(value)) <= 200 else f"a {type(value).__name__}"
    except (RecursionError, ValueError):
        return f"a {type(value).__name__}"


def numbers(name: str, values: Any, *, at_least: float | None = None, above: float | None = None) -> np.ndarray:
    """Returns a float64 array of finite numbers within the limits; the message names the first number that is not.

    Args:
        name: the name of the argument, for the message.
        values: as they were given.
        at_least: no number may be smaller than this.
        above: every number must be larger than this.
    """
    try:
        real = not np.iscomplexobj(values)  # NumPy would drop the imaginary part with only a warning
        array = np.asarray(values, dtype=np.float64) if real else np.empty(0)
    except (TypeError, ValueError, OverflowError):  # among them lists of different lengths
        raise InputError(name, "must be an array of numbers", _shown(values)) from None
    if not real:
        raise InputError(name, "must be an array of real numbers", "complex ones")
    if array.size == 0:
        raise InputError(name, "must not be empty", values)
    bad = ~np.isfinite(array)
    if at_least is not None:
        bad |= array < at_least
    if above is not None:
        bad |= array <= above
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        limit = f" at least {at_least:g}" if at_least is not None else f" above {above:g}" if above is not None else ""
        raise InputError(
            f"{name}{list(where) if where else ''}", f"must be finite and{limit or ' real'}", array[where].item()
        )
    return array


def matrix(name: str, values: Any, *, symmetric: bool = False) -> np.ndarray:
    """Returns a finite square matrix; with `symmetric`, it must be symmetric and positive semi-definite up to rounding.

    Args:
        name: the name of the argument, for the message.
        values: as they were given.
        symmetric: whether to check symmetry and definiteness.
    """
    array = numbers(name, values)
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise InputError(name, "must be a square matrix", f"an array of shape {array.shape}")
    if symmetric:
        scale = float(np.abs(array).max(initial=0.0))
        if not np.allclose(array, array.T, rtol=1e-8, atol=1e-10 * scale):
            raise InputError(name, "must be symmetric", f"a largest asymmetry of {np.abs(array - array.T).max():.3g}")
        smallest = float(np.linalg.eigvalsh(array / 2 + array.T / 2)[0])
        if smallest < -1e-8 * max(scale, np.finfo(float).tiny):
            raise InputError(name, "must be positive semi-definite", f"a smallest eigenvalue of {smallest:.3g}")
    return array
