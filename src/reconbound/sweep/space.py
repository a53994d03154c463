"""The space of a sweep: settings of a training, by name, and the values that each may take."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from reconbound._internal.checks import InputError, choice, number, parse_number, whole
from reconbound._internal.rng import derive

Setting: TypeAlias = dict[str, Any]  # a value for each name
Row: TypeAlias = dict[str, Any]  # what a training of a setting gives at one step count

WORDS = {"clip": ("smooth", "hard"), "sampler": ("poisson", "fixed", "shuffle"), "model": ("linear", "mlp", "cnn")}
#: What can be searched, by the names of AuditOptions and Settings, and how a value is checked.
PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "noise_multiplier": lambda v: number("noise_multiplier", parse_number(v), above=0.0),
    "max_grad_norm": lambda v: number("max_grad_norm", parse_number(v), above=0.0),
    "sample_rate": lambda v: number("sample_rate", parse_number(_ratio(v)), above=0.0, at_most=1.0),
    "lr": lambda v: number("lr", parse_number(v), above=0.0, at_most=1e30),
    "momentum": lambda v: number("momentum", parse_number(v), at_least=0.0, below=1.0),
    **{name: partial(choice, name, options=options) for name, options in WORDS.items()},
}


@dataclass(frozen=True)
class Choices:
    """A list of values."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Range:
    """All numbers from low to high.

    Attributes:
        low: the smallest number.
        high: the largest number.
        log: whether the logarithm is drawn uniformly.
    """

    low: float
    high: float
    log: bool = False

    def __str__(self) -> str:
        return f"{self.low:g}:{self.high:g}{':log' if self.log else ''}"


Space: TypeAlias = dict[str, Choices | Range]


def parse_grid(options: Sequence[str]) -> Space:
    """Parses words such as "lr=0.1,0.5" or "lr=0.01:1:log" into a space.

    Args:
        options: one word for each setting.

    >>> parse_grid(["lr=0.1,0.5", "noise_multiplier=0.2:5:log"])
    {'lr': Choices(values=(0.1, 0.5)), 'noise_multiplier': Range(low=0.2, high=5.0, log=True)}
    """
    texts: dict[str, str] = {}
    for option in options:
        name, equals, text = (part.strip() for part in option.partition("="))
        check_name(name)
        if not equals or not text.strip(" ,"):
            raise InputError("grid", f"must give {name} values, such as {name}=1,2 or {name}=1:2", option)
        if name in texts:
            raise InputError("grid", f"must name {name} once, with all its values", option)
        texts[name] = text
    return checked_space({name: _range(name, t) if ":" in t else t.split(",") for name, t in texts.items()})


def checked_space(given: Mapping[str, Any]) -> Space:
    """Returns the space of a mapping from names to lists of values, Choices or Ranges."""
    if not given:
        raise InputError("grid", "must name at least one setting with its values, such as lr=0.1,0.5", "none")
    space: Space = {}
    for name, values in given.items():
        check_name(name)
        listed = values.values if isinstance(values, Choices) else values
        if isinstance(listed, str) or not isinstance(listed, Iterable):
            listed = [listed]
        if isinstance(values, Range):
            space[name] = values
            continue
        texts = (word.strip() if isinstance(word, str) else word for word in listed)
        found = Choices(tuple(dict.fromkeys(_checked(name, text) for text in texts if text != "")))
        space[name] = found
        if not found.values:
            raise InputError("grid", f"must give {name} at least one value", "none")
    return space


def parse_steps(text: str) -> tuple[int, ...]:
    """Parses step counts, and returns them ascending and distinct.

    >>> parse_steps("2000,1000")
    (1000, 2000)
    """
    return checked_steps([parse_number(word) for word in text.split(",") if word.strip()])


def checked_steps(steps: Iterable[Any]) -> tuple[int, ...]:
    """Returns step counts, ascending and distinct; refuses an empty list."""
    counts = tuple(sorted({whole("steps", count) for count in steps}))
    if not counts:
        raise InputError("steps", "must name at least one step count", "none")
    return counts


def check_name(name: str) -> None:
    """Raises an error that lists what can be searched, if this name cannot."""
    if name not in PARAMETERS:
        raise InputError("grid", f"must name one of {', '.join(PARAMETERS)}", name or "no name")


def settings_of(space: Space) -> list[Setting]:
    """Returns every combination of the values, in order; the last name changes fastest.

    >>> settings_of(parse_grid(["lr=0.1,0.5", "momentum=0,0.5"]))[1]
    {'lr': 0.1, 'momentum': 0.5}
    """
    for name, values in space.items():
        if isinstance(values, Range):
            what = f"must list the values of {name}: a range is for --search tpe"
            raise InputError("grid", what, str(values))
    lists = [values.values for values in space.values() if isinstance(values, Choices)]
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*lists)]


def key(setting: Mapping[str, Any]) -> str:
    """Returns one line that is the same for equal settings, whatever their order.

    >>> key({"lr": 0.5, "clip": "hard"}) == key({"clip": "hard", "lr": 0.5})
    True
    """
    return json.dumps(dict(setting), sort_keys=True, separators=(",", ":"))


def seed_of(seed: int, setting: Mapping[str, Any]) -> int:
    """Returns the seed of a setting's training: a function of the sweep's seed and the setting only.

    Args:
        seed: the sweep's.
        setting: a value for each name.
    """
    place = int.from_bytes(hashlib.sha256(key(setting).encode()).digest()[:8], "little")
    return derive(seed, "sweep", place)


def describe_space(space: Space) -> dict[str, Any]:
    """Returns the space as JSON."""
    return {name: list(v.values) if isinstance(v, Choices) else str(v) for name, v in space.items()}


def _range(name: str, text: str) -> Range:
    low, high, *more = (part.strip() for part in text.split(":"))
    if name in WORDS or more not in ([], ["log"]):
        own = "; a model of your own is for all settings, by --model" if name == "model" else ""
        other = own if name in WORDS else " or low:high[:log]"
        raise InputError("grid", f"must give {name} a list of values{other}", text)
    ends = [_checked(name, part) for part in (low, high)]
    if not ends[0] < ends[1] or (more and ends[0] <= 0):
        raise InputError("grid", f"must give {name} a range from a smaller number to a larger", text)
    return Range(ends[0], ends[1], log=bool(more))


def _ratio(value: Any) -> Any:
    """Parses a number, also from a fraction: 0.01, 256/50000."""
    over, slash, under = str(value).partition("/")
    try:
        return float(over) / float(under) if slash else value
    except (ValueError, ZeroDivisionError):
        return value


def _checked(name: str, value: Any) -> Any:
    """Returns the value, checked. An error names the grid's option."""
    try:
        return PARAMETERS[name](value)
    except InputError as reason:
        raise InputError("grid", f"{name} {reason.requirement}", reason.value) from None


def log10(floor: float) -> float:
    """Returns log₁₀ of a floor, finite for 0 and ∞ too, as a search needs it."""
    return math.log10(min(max(floor, 1e-300), 1e300))


def format_setting(setting: Mapping[str, Any], names: Iterable[str]) -> str:
    """Formats a setting in one line, with six digits of numbers that Optuna chose.

    Args:
        setting: a value for each name.
        names: the names to show, in order.

    >>> format_setting({"lr": 0.3763947732035219, "clip": "hard"}, ("lr", "clip", "model"))
    'lr 0.376395, clip hard'
    """
    return ", ".join(f"{name} {format_value(setting[name])}" for name in names if name in setting)


def format_value(value: Any) -> str:
    """Formats a value of a setting."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
