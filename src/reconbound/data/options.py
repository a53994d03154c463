"""Options for reading a data set."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reconbound._internal.checks import InputError
from reconbound.data.split import Division


@dataclass(frozen=True)
class DataOptions:
    """Says how a data set is read; every field has a default.

    Attributes:
        target: column to predict. Text, or at most 20 different whole numbers, make classes; a range makes a number.
        private: columns to protect, a list or separated by commas; None for every column of numbers.
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
            if given is not None and not isinstance(given, str):
                _check_names(name, given)
        for name in ("ranges", "units"):
            given = getattr(self, name)
            if given is not None and not isinstance(given, Mapping):
                raise InputError(name, "must be a dictionary by the names of columns", f"{given!r}"[:200])

    @property
    def division(self) -> Division:
        """Returns how records are divided into those for training and those for testing."""
        return Division(self.seed, self.test_share, self.limit)


def _check_names(name: str, given: Any) -> None:
    """Refuses what is no list of names of columns."""
    try:
        wrong = not isinstance(given, Sequence | set | frozenset) or not all(isinstance(one, str) for one in given)
    except TypeError:
        wrong = True
    if wrong:
        raise InputError(name, "must be a list of names of columns", f"{given!r}"[:200])
