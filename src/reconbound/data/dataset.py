"""`Dataset`, which every loader returns, and `DataOptions`, which every loader takes.

A `Dataset` holds what the model sees, and the way back to the data's own units. The options also decide which records
are held out, and which are kept when only some are wanted: by seed, class by class. `find_copies` finds several rows of
one person, and so what they mean for floors (docs/theory/accounting.md).
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from reconbound._internal.checks import DataError, InputError, choice, number, whole

# control characters, lone surrogates, line separators, and the marks that turn the direction of writing
_UNSEEN = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")


#: Why options about columns are refused where the data are images or tokens.
FOR_TABLES = "is for tables; of an image every pixel is private, all of one range, and of a text every token"


class DataWarning(UserWarning):
    """Something about the data that its owner should know; the same words are in Dataset.notes."""


def clean(text: str) -> str:
    """Removes characters that steer a terminal or are invisible; HTML stays (pages escape it)."""
    return (text if text.isprintable() else _UNSEEN.sub("", text)).strip()


@dataclass(frozen=True)
class Feature:
    """One number of a record, as its owner knows it.

    Attributes:
        name: any text, HTML included: whoever shows it escapes it.
        unit: "years"; "" for none.
        low, high: its range in data units; the model sees (value - low)/(high - low).
        declared: False where the range was read off the data, so that it must not be published.
        private: whether the audit protects it; marks of missing values are public, and categories unless asked for.
        column: of the file that it was made from, where that has another name (a category's, a mark's); "" else.
        category: whether it is the one or zero of a category, and no number.
    """

    name: str
    unit: str = ""
    low: float = 0.0
    high: float = 1.0
    declared: bool = True
    private: bool = True
    column: str = ""
    category: bool = False

    @property
    def source(self) -> str:
        """Returns the name of its column, which says no category."""
        return self.column or (self.name.partition(" = ")[0] if self.category else self.name)


class Pixels(Sequence[Feature]):
    """The features of images of one shape, made when asked for: "pixel (row, column)", with the plane where several."""

    def __init__(
        self, shape: tuple[int, ...], high: float = 255.0, unit: str = "grey levels", low: float = 0.0
    ) -> None:
        self.shape, self.low, self.high, self.unit = shape, low, high, unit
        self._planes = {1: ("",), 3: (" red", " green", " blue")}.get(shape[0])

    def __len__(self) -> int:
        return int(np.prod(self.shape))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[k] for k in range(*index.indices(len(self)))]
        flat = index + len(self) if index < 0 else index
        if not 0 <= flat < len(self):
            raise IndexError(index)
        plane, row, column = (int(k) for k in np.unravel_index(flat, self.shape))
        colour = self._planes[plane] if self._planes else f" plane {plane}"
        return Feature(f"pixel ({row}, {column}){colour}", self.unit, self.low, self.high)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Records for training and for testing, with names, units and ranges.

    Attributes:
        name: "digits", or the file's name.
        kind: "image", "table" or "tokens".
        inputs: float32, what the model sees: images (N, C, H, W) in [0, 1]; tables (N, columns), numbers in [0, 1]. Of
            tokens int64, (N, length), from 0 to vocabulary − 1.
        targets: (N,), int64 classes, or float32 numbers scaled to [0, 1] by the target's range.
        test_inputs, test_targets: held out, of the same form; may be empty.
        features: of every flat column of a record's input.
        task: "classes" or "number".
        class_names: of the classes 0, 1, ...; empty for a number.
        target: name, unit and range of what is predicted.
        record_names: of the N training records (a file's name, "row 18"), or None: "record 17" then.
        notes: what the owner should know, in sentences; they may depend on the data, so not for public pages.
        vocabulary: of tokens, how many different ones there may be; None: the largest one and those below it.
    """

    name: str
    kind: str
    inputs: np.ndarray
    targets: np.ndarray
    test_inputs: np.ndarray
    test_targets: np.ndarray
    features: Sequence[Feature]
    task: str = "classes"
    class_names: tuple[str, ...] = ()
    target: Feature | None = None
    record_names: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    vocabulary: int | None = None

    def __post_init__(self) -> None:
        choice("kind", self.kind, ("image", "table", "tokens"))
        choice("task", self.task, ("classes", "number"))
        rank, number = (4 if self.kind == "image" else 2), np.float32 if self.task == "number" else np.int64
        for part, targets in (("inputs", "targets"), ("test_inputs", "test_targets")):
            x, y = getattr(self, part), getattr(self, targets)
            kind = np.int64 if self.kind == "tokens" else np.float32
            if x.dtype != kind or x.ndim != rank or x.shape[1:] != self.inputs.shape[1:]:
                raise InputError(part, f"must be {kind.__name__} with {rank} axes", f"{x.dtype} of shape {x.shape}")
            if y.dtype != number or y.shape != x.shape[:1]:
                raise InputError(targets, f"must be {len(x)} of {number.__name__}", f"{y.dtype} of shape {y.shape}")
        if len(self.features) != int(np.prod(self.shape)):
            raise InputError("features", f"must be {int(np.prod(self.shape))}, one a column", len(self.features))
        if self.record_names is not None and len(self.record_names) != len(self.inputs):
            raise InputError("record_names", f"must be {len(self.inputs)}, one a record", len(self.record_names))
        if self.kind != "tokens":
            if self.vocabulary is not None:
                raise InputError("vocabulary", f"must be None for kind {self.kind!r}", self.vocabulary)
            return
        if not all(feature.category for feature in self.features):
            raise InputError("features", "must be categories (category=True) for tokens", self.kind)
        known = [x for x in (self.inputs, self.test_inputs) if x.size]
        least, most = min((int(x.min()) for x in known), default=0), max((int(x.max()) for x in known), default=0)
        if least < 0:
            raise InputError("inputs", "must be tokens from 0 on", least)
        if self.vocabulary is None:
            object.__setattr__(self, "vocabulary", most + 1)
        whole("vocabulary", self.vocabulary, at_least=most + 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of one record's input."""
        return tuple(int(k) for k in self.inputs.shape[1:])

    @cached_property
    def private(self) -> np.ndarray | None:
        """Returns the flat columns of private numbers, (d,), or None where all are; private categories are none."""
        marks = np.array([f.private and not f.category for f in self.features])
        return None if marks.all() else np.flatnonzero(marks)

    @cached_property
    def scale(self) -> np.ndarray:
        """Returns the widths of the private numbers' ranges, (d,): data value = offset + scale · input."""
        return np.array([f.high - f.low for f in self.private_features], dtype=np.float64)

    @cached_property
    def offset(self) -> np.ndarray:
        """Returns the lower ends of the private numbers' ranges, (d,)."""
        return np.array([f.low for f in self.private_features], dtype=np.float64)

    @cached_property
    def private_features(self) -> tuple[Feature, ...]:
        """Returns the private numbers, in the order of `scale` and `offset`."""
        return tuple(f for f in self.features if f.private and not f.category)

    @cached_property
    def private_columns(self) -> dict[str, np.ndarray]:
        """Returns the flat columns of each private column, of numbers or of categories, by its name."""
        found: dict[str, list[int]] = {}
        for k, feature in enumerate(self.features):
            if feature.private:
                found.setdefault(feature.source, []).append(k)
        return {name: np.array(places) for name, places in found.items()}

    @property
    def columns(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the names of a table's private and public columns, without the target.

        A column of categories is one, whatever the model sees of it.
        """
        private = tuple(self.private_columns)
        public = dict.fromkeys(f.source for f in self.features if not f.private)
        return private, tuple(name for name in public if name not in private)

    @property
    def inferred_ranges(self) -> bool:
        """Returns whether a range, of a feature or the target, was read off the data."""
        own = self.target is not None and self.task == "number" and not self.target.declared
        return own or not all(f.declared for f in self.features)

    def summary(self) -> str:
        """Returns one readable line."""
        count = f"{len(self.inputs):,} records to train on, {len(self.test_inputs):,} to test"
        if self.kind == "image":
            planes, height, width = self.shape
            what = f"images of {height}×{width}" + (f" in {planes} planes" if planes > 1 else "")
        elif self.kind == "tokens":
            what = f"texts of {self.shape[0]:,} tokens, out of {self.vocabulary:,}"
        else:
            private, public = self.columns
            both = len(private) + len(public)
            what = f"a table of {both:,} column{'s' if both > 1 else ''} beside the target "
            what += f"({len(private):,} private, {len(public):,} public)"
        aim = f"{len(self.class_names)} classes" if self.task == "classes" else "a number"
        return f"{self.name}: {what}; {count}; predicts {self.target.name if self.target else 'the class'} ({aim})"


@dataclass(frozen=True)
class DataOptions:
    """Says how a data set is read; every field has a default.

    Attributes:
        target: column to predict. Text, or at most 20 different whole numbers, make classes; a range makes a number.
        private: columns to protect, of numbers or of categories, a list or separated by commas; None for every column
            of numbers.
        ranges: {column: (lowest, highest)} in the data's units; {"pixel": ...} for images in an .npz file. With a
            declared range a row's numbers depend only on that row; other ranges are read off the data.
        units: {column: "years"}.
        drop: columns to leave out.
        header: names of the columns of a CSV file that has no first row of names.
        categories: columns to take as categories, whatever they hold.
        folder: holds mnist/ or cifar10/; otherwise RECONBOUND_DATA, otherwise the user's cache.
        size: longest side, in pixels, to bring the images of a folder to.
        seed: decides which records are held out, and which are kept under a limit.
        test_share: share of the records held out for testing, class by class, where the data have no test set.
        limit: largest number of records to train on, class by class; the test records stay the same.
    """

    target: str | None = None
    private: Sequence[str] | str | None = None
    ranges: Mapping[str, Any] | None = None
    units: Mapping[str, str] | None = None
    drop: Sequence[str] | str | None = None
    header: Sequence[str] | None = None
    categories: Sequence[str] | str | None = None
    folder: str | os.PathLike[str] | None = None
    size: int | None = None
    seed: int = 0
    test_share: float = 0.2
    limit: int | None = None

    def __post_init__(self) -> None:
        if self.target is not None and not isinstance(self.target, str):
            raise InputError("target", "must be the name of a column", f"{self.target!r}"[:200])
        for name in ("private", "drop", "header", "categories"):
            given = getattr(self, name)
            several = isinstance(given, Sequence | set | frozenset) and all(isinstance(one, str) for one in given)
            if given is not None and not several:
                raise InputError(name, "must be a list of names of columns", f"{given!r}"[:200])
        for name in ("ranges", "units"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise InputError(name, "must be a dictionary by the names of columns", f"{given!r}"[:200])

    def refuse(self, must: str, *names: str) -> None:
        """Refuses options that do not fit the data.

        Args:
            must: says which data they are for.
            names: of the fields.
        """
        for name in names:
            if (given := getattr(self, name)) not in (None, {}, [], ()):
                raise InputError("category" if name == "categories" else name, must, given)

    def choose_rows(
        self, targets: np.ndarray, task: str, held: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows to train on and rows to test on, each in ascending order.

        Where the data have no test records of their own, of every class its share is held out, rounded to the nearest
        whole record; at least one record of each stays for training. Which ones depends on the classes and the seed,
        never on the inputs.

        Args:
            targets: (N,), of all records.
            task: "classes" or "number".
            held: (N,) of bool, the test records where the data have their own.
        """
        if held is None:
            share = number("test_share", self.test_share, at_least=0.0, below=1.0)
            rng = np.random.default_rng(whole("seed", self.seed, at_least=0))
            held = np.zeros(len(targets), dtype=bool)
            for rows in _groups(targets, task):
                held[rng.permutation(rows)[: min(math.floor(share * len(rows) + 0.5), len(rows) - 1)]] = True
        train, test = np.flatnonzero(~held), np.flatnonzero(held)
        return train[keep(targets[train], self.limit, seed=self.seed, task=task)], test


def keep(targets: np.ndarray, limit: int | None, *, seed: int, task: str) -> np.ndarray:
    """Returns at most `limit` rows, ascending: of every class its share (largest remainders), drawn by the seed."""
    count = len(targets)
    if limit is None or whole("limit", limit) >= count:
        return np.arange(count)
    groups = _groups(targets, task)
    if limit < len(groups):
        raise InputError("limit", f"must be at least {len(groups)}, one record a class", limit)
    exact = np.array([limit * len(rows) / count for rows in groups])
    sizes = np.maximum(np.floor(exact), 1).astype(int)
    while sizes.sum() < limit:
        room = np.array([size < len(rows) for size, rows in zip(sizes, groups, strict=True)])
        sizes[np.argmax(np.where(room, exact - sizes, -np.inf))] += 1
    while sizes.sum() > limit:  # classes with less than one record's share took theirs from the largest
        sizes[np.argmax(np.where(sizes > 1, sizes - exact, -np.inf))] -= 1
    rng = np.random.default_rng((whole("seed", seed, at_least=0), 1))
    return np.sort(np.concatenate([rng.permutation(rows)[:k] for rows, k in zip(groups, sizes, strict=True)]))


def _groups(targets: np.ndarray, task: str) -> list[np.ndarray]:
    if len(targets) == 0:
        raise DataError("the data set holds no records")
    if task == "number":
        return [np.arange(len(targets))]
    return [np.flatnonzero(targets == k) for k in np.unique(targets)]


class Copies(NamedTuple):
    """Records that are equal to others: how many, and the largest group of equal ones, in order; (k,)."""

    records: int
    largest: np.ndarray


#: Records whose digests are computed at a time.
_AT_ONCE = 2**16


def find_copies(*parts: Any) -> Copies:
    """Finds the records that are equal in all parts, by digests of 64 bits.

    Two different records have one digest with a chance of 2⁻⁶⁴; they would count as copies.

    Args:
        parts: arrays or tensors with one row per record, or tuples and dictionaries of such; others are left out.

    >>> find_copies(np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    Copies(records=2, largest=array([0, 2]))
    """
    from torch import Tensor
    from torch.utils._pytree import tree_leaves

    leaves = [leaf for part in parts for leaf in tree_leaves(part) if isinstance(leaf, (Tensor, np.ndarray))]
    arrays = [leaf for leaf in leaves if leaf.ndim and len(leaf)]
    count = len(arrays[0]) if arrays else 0
    digests = np.empty(count, dtype=np.uint64)
    for at in range(0, count, _AT_ONCE):
        digests[at : at + _AT_ONCE] = record_digests([array[at : at + _AT_ONCE] for array in arrays])
    return copies_among(digests)


def copies_among(digests: np.ndarray) -> Copies:
    """Finds the records that have the digest of another.

    Args:
        digests: of each record, (N,), uint64.
    """
    order = np.sort(digests)
    places = np.flatnonzero(order[1:] == order[:-1])  # where one is followed by its equal
    if not len(places):
        return Copies(0, places)
    breaks = np.flatnonzero(np.diff(places) != 1)
    starts, ends = places[np.append(0, breaks + 1)], places[np.append(breaks, len(places) - 1)]
    sizes = ends - starts + 2
    first = int(np.flatnonzero(np.isin(digests, order[starts[sizes == sizes.max()]]))[0])  # of equal groups the first
    return Copies(int(sizes.sum()), np.flatnonzero(digests == digests[first]))


def record_digests(leaves: Sequence[Any]) -> np.ndarray:
    """Returns a digest of 64 bits of each record: BLAKE2b of its bytes, in which 0 and −0 are alike.

    Args:
        leaves: arrays or tensors with one row per record.
    """
    parts = []
    for leaf in leaves:
        if not isinstance(leaf, np.ndarray):
            small = leaf.is_floating_point() and leaf.itemsize < 4
            leaf = (leaf.float() if small else leaf).numpy(force=True)
        flat = leaf.reshape(len(leaf), -1)
        plain = flat + 0 if np.issubdtype(flat.dtype, np.floating) else flat
        parts.append(np.ascontiguousarray(plain).view(np.uint8).reshape(len(leaf), -1))
    found = (hashlib.blake2b(row, digest_size=8).digest() for row in np.concatenate(parts, axis=1))
    return np.frombuffer(b"".join(found), dtype=np.uint64)


def describe_copies(copies: Copies, records: int) -> tuple[str, ...]:
    """Returns what floors must say of a data set with copies: one sentence, or nothing.

    >>> describe_copies(Copies(5, np.array([0, 2, 5])), 10)
    ('5 of 10 records have exact copies (at most 3 of one): floors are for one row; for somebody with k of them see
    group_floor',)
    """
    if not copies.records:
        return ()
    some = f"{copies.records:,} of {records:,} records have exact copies (at most {len(copies.largest):,} of one)"
    return (f"{some}: floors are for one row; for somebody with k of them see group_floor",)


def checked_rows(rows: Any, records: int) -> list[int]:
    """Returns the rows of a group as a list, or raises an InputError: one or more different records."""
    try:
        found = [int(row) for row in rows]
        whole = all(row == given for row, given in zip(found, rows, strict=True))
    except (TypeError, ValueError):
        found, whole = [], False
    inside = all(0 <= row < records for row in found)
    if not (whole and found and inside and len(set(found)) == len(found)):
        raise InputError("rows", f"must be different records from 0 to {records - 1}, one or more", rows)
    return found
