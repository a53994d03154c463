"""Columns of a table as what a model sees: numbers by their range, categories as ones and zeros.

With every range declared, a row's numbers depend only on that row; ranges read off the data are marked as such.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import DataError, DataShown, InputError, number, parse_number
from reconbound._internal.formatting import format_number
from reconbound.data.dataset import DataOptions, Dataset, Feature, clean

MOST_CATEGORIES = 100
ENOUGH = 50  # values of a column, from which on a few can be called outliers
MOST_CLASS_NUMBERS = 20  # a target of at most so many different whole numbers is taken as classes
MISSING = "(missing)"
#: Widths of a range for which floors in its unit, and their squares, are numbers.
NARROWEST, WIDEST = 1e-100, 1e100


@dataclass(frozen=True)
class Column:
    """A column as read. Numbers: float64 with NaN where missing. Categories: objects of str, "" where missing."""

    name: str
    values: np.ndarray

    @property
    def numeric(self) -> bool:
        return self.values.dtype.kind == "f"


@dataclass(frozen=True)
class ColumnOptions:
    """The user's options for columns: ranges and units by name, and which are private (None: every number)."""

    ranges: Mapping[str, tuple[float, float]]
    units: Mapping[str, str]
    private: tuple[str, ...] | None


def check_column_options(names: Sequence[str], options: DataOptions, target: str | None = None) -> ColumnOptions:
    """Returns the options for columns, checked against the columns that there are.

    Args:
        names: of the columns.
        options: with private columns, ranges and units.
        target: the column to predict, which cannot be private.
    """
    asked = None if options.private is None else split_names(options.private, names)
    if asked == ():
        raise InputError("private", "must name at least one column (without it, every one of numbers is)", "no name")
    if asked is not None and target in asked:
        raise InputError("private", "must not name the target, which the attacker is taken to know", target)
    ranges = {clean(str(name)): _check_range(name, pair) for name, pair in (options.ranges or {}).items()}
    units = {clean(str(name)): clean(str(unit)) for name, unit in (options.units or {}).items()}
    for option, given in (("private", asked or ()), ("range", ranges), ("unit", units)):
        check_names_exist(option, given, names, "the table")
    return ColumnOptions(ranges, units, asked)


def check_names_exist(option: str, given: Iterable[str], names: Sequence[str], table: str) -> None:
    """Refuses an option that names a column which the table does not have.

    Args:
        option: the option's name.
        given: the columns that it names.
        names: of the columns that there are.
        table: what the message calls the table.
    """
    for name in given:
        if name not in names:
            must = f"must name columns of {table} ({format_names(names)}){suggest_name(name, names)}"
            raise InputError(option, must, name)


def split_names(given: Sequence[str] | str, names: Sequence[str]) -> tuple[str, ...]:
    """Returns names that were given as a list or separated by commas; a column whose own name has commas comes first.

    >>> split_names("age, hours, week,pay", ["age", "hours, week", "pay"])
    ('age', 'hours, week', 'pay')
    """
    found: list[str] = []
    for text in [given] if isinstance(given, str) else given:
        parts = str(text).split(",")
        while parts:
            ends = [k for k in range(len(parts), 0, -1) if clean(",".join(parts[:k])) in names]
            taken = ends[0] if ends else 1
            found.append(clean(",".join(parts[:taken])))
            parts = parts[taken:]
    return tuple(dict.fromkeys(name for name in found if name))


def format_names(names: Sequence[str]) -> str:
    """Returns the first names, separated by commas."""
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")


def suggest_name(name: str, names: Sequence[str]) -> str:
    """Returns a question with the column that may have been meant; empty where none is near.

    >>> suggest_name("hours", ["age", "hours per week"])
    "; did you mean 'hours per week'?"
    """
    from difflib import get_close_matches

    lower = {known.lower(): known for known in names}
    text = name.lower()
    near = [known for known in lower if text and (text in known or (len(known) > 2 and known in text))]
    near = near or get_close_matches(text, list(lower), n=1)
    return f"; did you mean {lower[near[0]]!r}?" if near else ""


def read_ranges(words: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Reads ranges as a command line spells them.

    >>> read_ranges(["age=0:120", "balance=-1e4:1e6"])
    {'age': (0.0, 120.0), 'balance': (-10000.0, 1000000.0)}
    """
    pairs = _read_assignments("range", "COLUMN=LOWEST:HIGHEST", words)
    return {name: _check_range(name, [parse_number(part) for part in pair.split(":")]) for name, pair in pairs}


def read_units(words: Sequence[str]) -> dict[str, str]:
    """Reads units as a command line spells them.

    >>> read_units(["age=years"])
    {'age': 'years'}
    """
    return {name: clean(unit) for name, unit in _read_assignments("unit", "COLUMN=UNIT", words)}


def _read_assignments(option: str, form: str, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, value = word.rpartition("=")
        if not name or (":" in form and value.count(":") != 1):
            raise InputError(option, f"must be {form}", word)
        yield clean(name), value


def _check_range(name: str, pair: Any) -> tuple[float, float]:
    try:
        low, high = pair
    except (TypeError, ValueError):
        raise InputError("range", f"must give a lowest and a highest value of {name}", pair) from None
    low, high = number(f"the lowest {name}", low), number(f"the highest {name}", high)
    if not low < high:
        raise InputError("range", f"must run from a lower to a higher value of {name}", f"{low:g}:{high:g}")
    if not NARROWEST <= high - low <= WIDEST:
        raise InputError("range", f"must be {NARROWEST:g} to {WIDEST:g} wide, of {name}", f"{low:g}:{high:g}")
    return low, high


def make_table(
    source: str,
    columns: Sequence[Column],
    target: Column,
    settings: ColumnOptions,
    options: DataOptions,
    *,
    held: np.ndarray | None = None,
    record_names: Sequence[str] | None = None,
    notes: Sequence[str] = (),
) -> Dataset:
    """Returns a Dataset of the columns and the target. Private are all columns of numbers, unless others are named.

    Args:
        source: what messages call the table, such as a path; its last part names the data set.
        columns: all but the target.
        target: the column to predict.
        settings: ranges, units and private columns.
        options: decide which records are held out.
        held: (N,) of bool, the test records where the data have their own.
        record_names: of all records.
        notes: what the owner should know.
    """
    notes = list(notes)
    parts: list[np.ndarray] = []
    features: list[Feature] = []
    for column in columns:
        asked = settings.private is not None and column.name in settings.private
        if column.numeric:
            private = asked or settings.private is None
            values, own = scale_numbers(source, column, settings, private=private, notes=notes)
        else:
            values, own = encode_categories(source, column, notes, private=asked)
        parts.append(values)
        features.extend(own)
    if not any(feature.private for feature in features):
        raise DataError(f"{source}: no column of numbers to protect; name the categories to protect by --private")
    inputs = np.concatenate(parts, axis=1).astype(np.float32)
    targets, class_names, aim = _read_target(source, target, settings, notes)
    task = "classes" if class_names else "number"
    train, test = options.choose_rows(targets, task, held)
    names = None if record_names is None else tuple(record_names[k] for k in train)
    facts: dict[str, Any] = {"class_names": class_names, "target": aim, "record_names": names, "notes": tuple(notes)}
    both = (inputs[train], targets[train], inputs[test], targets[test])
    return Dataset(clean(Path(source).name), "table", *both, tuple(features), task, **facts)


def scale_numbers(
    table: str, column: Column, settings: ColumnOptions, *, private: bool, notes: list[str]
) -> tuple[np.ndarray, list[Feature]]:
    """Returns (value - low)/(high - low), (N, 1); where some are missing (N, 2): the middle, and a public mark."""
    values, missing = column.values, np.isnan(column.values)
    feature = number_feature(table, column.name, values[~missing], settings, private, notes)
    if private and np.sum(~missing) > 9 and len(np.unique(values[~missing])) < 3:
        notes.append(describe_two_values(column.name, settings))
    outside = int(np.sum((values < feature.low) | (values > feature.high)))
    if outside:
        notes.append(describe_outside(feature, outside, len(values)))
    marked = bool(missing.any())
    return scaled(values, feature, marked), [feature, missing_mark(column.name)] if marked else [feature]


def scaled(values: np.ndarray, feature: Feature, marked: bool) -> np.ndarray:
    """Returns (value - low)/(high - low), (N, 1); with a mark (N, 2): the middle where missing, and the mark.

    Args:
        values: numbers, NaN where missing.
        feature: with the range.
        marked: whether some are missing.
    """
    missing = np.isnan(values)
    filled = np.where(missing, feature.low / 2 + feature.high / 2, values)
    found = (np.clip(filled, feature.low, feature.high) - feature.low) / (feature.high - feature.low)
    return np.stack([found, missing.astype(np.float64)], axis=1) if marked else found[:, None]


def missing_mark(name: str) -> Feature:
    """Returns the public feature that says where a column's values are missing."""
    return Feature(f"{name} {MISSING}", private=False, column=name)


def describe_two_values(name: str, settings: ColumnOptions) -> str:
    """Returns a note on a private column of numbers with at most two different values."""
    what = "taken as a continuous number, but holds at most two different values, which no floor on its error hides"
    kind = "public" if settings.private is None else "private"
    return f"{name}: {what}; --category {name!r} makes it a {kind} category"


def describe_outside(feature: Feature, outside: int, count: int) -> str:
    """Returns a note on values outside a declared range.

    Args:
        feature: with the range.
        outside: how many values.
        count: of all.
    """
    ends = _format_range(feature.low, feature.high)
    return f"{feature.name}: {outside:,} of {count:,} values lie outside {ends} and were moved to its ends"


def number_feature(
    table: str, name: str, known: np.ndarray, settings: ColumnOptions, private: bool, notes: list[str]
) -> Feature:
    """Returns the feature of a column of numbers; notes a range that is read off the data.

    Args:
        table: what messages call the table.
        name: of the column.
        known: its values.
        settings: ranges and units.
        private: whether the audit protects it.
        notes: gets what the owner should know.
    """
    unit = settings.units.get(name, "")
    if name in settings.ranges:
        low, high = settings.ranges[name]
        return Feature(name, unit, low, high, True, private)
    if known.size == 0:
        raise DataError(f"{table}, column {name!r}: every value is missing; leave the column out or give its range")
    low, high = float(known.min()), float(known.max())
    if low == high:
        notes.append(f"{name}: every value is {low:g}")
        low, high = low - max(0.5, abs(low) / 2), high + max(0.5, abs(high) / 2)
    if not NARROWEST <= high - low <= WIDEST:
        raise DataShown(f"{table}, column {name!r}: values from {low:g} to {high:g} span no usable range; give one")
    source = f"no range was given, so {_format_range(low, high)} was read off the data, which tells about its records"
    notes.append(f"{name}: {source}{_describe_outliers(known)}")
    return Feature(name, unit, low, high, False, private)


def _format_range(low: float, high: float) -> str:
    """Formats the ends of a range.

    >>> _format_range(5130, 2175880.5), _format_range(0, 0.25)
    ('5,130 to 2,175,880.5', '0 to 0.25')
    """
    return f"{low:,.10g} to {high:,.10g}"


def _describe_outliers(known: np.ndarray) -> str:
    """Says that a few values make a range ten times as wide as 98 % of them need; empty where they do not."""
    low, high = (float(x) for x in np.quantile(known, (0.01, 0.99)))
    width = float(known.max()) - float(known.min())
    if len(known) < ENOUGH or not 0 < high - low < 0.1 * width:
        return ""
    most = f"{format_number(low)} to {format_number(high)}, {(high - low) / width:.1%} of it"
    return f"; a few values stretch it: 98 % of them lie in {most}. Declare a range: values beyond it move to its ends"


def encode_categories(
    table: str, column: Column, notes: list[str], *, private: bool = False
) -> tuple[np.ndarray, list[Feature]]:
    """Returns a column of ones and zeros for each category, (N, k); missing is a category of its own.

    Too many categories for a model to see, an identifier or free text: none, and a note; a private column is refused.
    """
    found, codes = _sorted_codes(column.values)
    if len(found) > MOST_CATEGORIES:
        many = f"{len(found):,} different texts, more than {MOST_CATEGORIES}"
        if private:
            raise DataError(f"{table}, column {column.name!r}: {many}: too many for a private category")
        notes.append(f"{column.name}: {many}, so it is taken for an identifier or free text and left out")
        return np.zeros((len(codes), 0)), []
    if len(found) == 1:
        notes.append(f"{column.name}: every value is {str(found[0]) or MISSING!r}")
    own = category_features(column.name, [str(text) for text in found], private)
    return (codes.reshape(-1, 1) == np.arange(len(found))).astype(np.float64), own


def category_features(name: str, texts: Sequence[str], private: bool) -> list[Feature]:
    """Returns the feature of each category of a column.

    Args:
        name: of the column.
        texts: the categories, "" for missing.
        private: whether the audit protects the column.
    """
    names = [f"{name} = {text or MISSING}" for text in texts]
    return [Feature(one, private=private, column=name, category=True) for one in names]


def _sorted_codes(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the different values in order, and the place of each value among them; compares each text only once."""
    if values.dtype != object:
        return np.unique(values, return_inverse=True)
    found = sorted(set(values))
    places = {text: k for k, text in enumerate(found)}
    return np.array(found, dtype=object), np.array([places[text] for text in values], dtype=np.int64)


def _read_target(
    table: str, column: Column, settings: ColumnOptions, notes: list[str]
) -> tuple[np.ndarray, tuple[str, ...], Feature]:
    """Returns classes for text or few whole numbers, otherwise a number in [0, 1]; a range makes it a number."""
    values, name = column.values, column.name
    if not column.numeric and name in settings.ranges:
        raise DataError(f"{table}, column {name!r}: a range was given, but it holds text")
    found, codes = _sorted_codes(values)
    if len(found) < 2:
        raise DataShown(f"{table}, column {name!r}: the target is {found[0]!s} in every row: there is nothing to learn")
    few = column.numeric and len(found) <= MOST_CLASS_NUMBERS and bool(np.all(found == np.round(found)))
    if not column.numeric or (few and name not in settings.ranges):
        if len(found) > MOST_CATEGORIES:
            raise DataError(f"{table}, column {name!r}: a target of {len(found):,} classes, at most {MOST_CATEGORIES}")
        names = tuple(f"{v:.0f}" if column.numeric else str(v) for v in found)
        return codes.reshape(-1).astype(np.int64), names, Feature(name, settings.units.get(name, ""), private=False)
    scaled, (feature, *_) = scale_numbers(table, column, settings, private=False, notes=notes)
    return scaled[:, 0].astype(np.float32), (), feature
