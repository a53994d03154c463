"""Data of every kind as one small type: `load("digits")`, `load("people.csv", target="income")`, a folder of images."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reconbound._internal.checks import DataError, DataMissing, InputError, warn_user
from reconbound.data import builtin, official
from reconbound.data import csv as text
from reconbound.data import images as pictures
from reconbound.data import npz as arrays
from reconbound.data.dataset import Dataset, DataWarning, Feature, Pixels
from reconbound.data.official import cifar10, data_folder, mnist, read_idx
from reconbound.data.split import Division
from reconbound.data.tables import only_for_tables, read_ranges, read_units

__all__ = [
    "NAMES",
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
    "read_ranges",
    "read_units",
]

NAMES = (*builtin.NAMES, *official.NAMES)


def load(
    name_or_path: str | os.PathLike[str] = "digits",
    *,
    folder: str | os.PathLike[str] | None = None,
    target: str | None = None,
    private: Sequence[str] | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    drop: Sequence[str] | str | None = None,
    header: Sequence[str] | None = None,
    categories: Sequence[str] | str | None = None,
    size: int | None = None,
    seed: int = 0,
    test_share: float = 0.2,
    limit: int | None = None,
) -> Dataset:
    """A data set by its name, or from a file or folder.

    Args:
        name_or_path: "digits", "breast_cancer", "diabetes", "wine" (inside scikit-learn), "mnist", "cifar10" (from a
            folder or the network), a .csv, .csv.gz or .npz file, or a folder of images by class.
        folder: where mnist/ or cifar10/ lies; else RECONBOUND_DATA, else the user's cache.
        target: the column of a CSV file to predict. Text, or at most 20 different whole numbers, make classes; a range
            given for it makes it a number.
        private: columns to protect, a list or parted by commas (a name with commas of its own is found); None for every
            column of numbers. Images: all pixels.
        ranges: {column: (lowest, highest)} in the data's units. A declared range makes a row's numbers depend on that
            row alone; others are read off the data, which tells about it. {"pixel": ...} for images in an .npz file.
        units: {column: "years"}.
        drop: columns of a CSV file to leave out. header: names of its columns where it lacks a first row of them.
        categories: columns of a CSV file to take as categories, whatever they hold.
        size: longest side, in pixels, to bring the images of a folder to.
        seed: decides which records are held out, and which are kept under a limit.
        test_share: share of the records held out for testing, class by class, where the data has no test set.
        limit: train on at most so many records, class by class; the test records stay the same.

    Warns:
        DataWarning: for each of the set's notes.
    """
    name, division = os.fspath(name_or_path), Division(seed, test_share, limit)
    columns: dict[str, Any] = {"private": private, "ranges": ranges, "units": units}
    lower = name.lower()
    if size is not None and (name in NAMES or not Path(name).is_dir()):
        raise InputError("size", "is for folders of images", size)
    if lower.endswith(text.ENDINGS):
        own: dict[str, Any] = {"target": target, "drop": drop, "header": header, "categories": categories}
        found = text.load_csv(name, division=division, **own, **columns)
    else:
        there = name in NAMES or lower.endswith(".npz") or Path(name).exists()
        for said, given in (("target", target), ("drop", drop), ("header", header), ("category", categories)):
            if given is not None and there:
                raise InputError(said, "is for CSV files", given)
        if name in builtin.NAMES:
            found = builtin.load_builtin(name, division=division, **columns)
        elif name in official.NAMES:
            only_for_tables(**columns)
            found = official.load_official(name, folder, division)
        elif lower.endswith(".npz"):
            found = arrays.load_npz(name, division=division, **columns)
        elif Path(name).is_dir():
            only_for_tables(**columns)
            found = pictures.load_pictures(name, size=size, division=division)
        elif Path(name).exists():
            raise InputError("the data", "must be a .csv, .csv.gz or .npz file, or a folder of images by class", name)
        else:
            near = next((name + ending for ending in (*text.ENDINGS, ".npz") if Path(name + ending).exists()), None)
            meant = f"; did you mean {near}?" if near else ""
            known = ", ".join(NAMES)
            raise DataMissing(f"{name} does not exist: name one of {known}, or a file or folder that exists{meant}")
    for note in found.notes:
        warn_user(f"{found.name}: {note}", DataWarning)
    return found
