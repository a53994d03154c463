"""Data of every kind as one small type: `load("digits")`, `load("people.csv", target="income")`, a folder of images."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .._check import DataError, DataMissing, InputError
from .builtin import NAMES, load_builtin
from .dataset import Dataset, DataWarning, Feature, Pixels
from .official import cifar10, data_folder, mnist, read_idx

__all__ = [
    "DataError",
    "DataMissing",
    "DataWarning",
    "Dataset",
    "Feature",
    "Pixels",
    "cifar10",
    "data_folder",
    "load",
    "mnist",
    "read_idx",
]


def load(
    name_or_path: str | os.PathLike[str] = "digits",
    *,
    folder: str | os.PathLike[str] | None = None,
    target: str | None = None,
    private: Sequence[str] | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    limit: int | None = None,
) -> Dataset:
    """A data set by its name, or from a file or folder.

    Args:
        name_or_path: "digits".
        seed: decides which records are held out, and which are kept under a limit.
        test_share: of the records, held out for testing, class by class.
        limit: train on at most so many records, class by class; the test records stay the same.

    Warns:
        DataWarning: for each of the set's notes.
    """
    name = os.fspath(name_or_path)
    options = {"seed": seed, "test_share": test_share, "limit": limit}
    if name in NAMES:
        found = load_builtin(
            name, private=private, ranges=ranges, units=units, seed=seed, test_share=test_share, limit=limit
        )
    else:
        raise InputError("data", "unknown", name)
    for note in found.notes:
        warnings.warn(f"{found.name}: {note}", DataWarning, stacklevel=2)
    return found
