"""Data of every kind as one small type: `load_dataset("digits")`, `load_dataset("people.csv", target="income")`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconbound._internal.checks import DataError, DataMissing, InputError, file_path, warn_user
from reconbound.data import builtin, csv, downloads, images, npz
from reconbound.data.dataset import FOR_TABLES, DataOptions, Dataset, DataWarning, Feature, Pixels
from reconbound.data.downloads import cifar10, data_folder, mnist, read_idx
from reconbound.data.tables import read_ranges, read_units

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = [
    "NAMES",
    "DataError",
    "DataMissing",
    "DataOptions",
    "DataWarning",
    "Dataset",
    "Feature",
    "Pixels",
    "cifar10",
    "data_folder",
    "load_dataset",
    "mnist",
    "read_idx",
    "read_ranges",
    "read_units",
]

NAMES = (*builtin.NAMES, *downloads.NAMES)
ENDINGS = (*csv.ENDINGS, ".parquet")
FOR_FOLDERS = "is for folders of images"


def load_dataset(
    data: str | os.PathLike[str] | DataFrame = "digits", options: DataOptions | None = None, **changes: Any
) -> Dataset:
    """Returns a data set by its name, from a file or folder, or from a DataFrame.

    Args:
        data: "digits", "breast_cancer", "diabetes", "wine" (inside scikit-learn), "mnist", "cifar10" (from a folder or
            the network), a .csv, .csv.gz, .parquet or .npz file, a folder of images by class, or a DataFrame.
        options: how to read it; defaults when None.
        changes: fields of `DataOptions` by name, such as target="income", private=["age"], limit=1000.

    Raises:
        DataError: names the file, row and column of what is wrong.

    Warns:
        DataWarning: for each of the set's notes.
    """
    if options is not None and not isinstance(options, DataOptions):
        raise InputError("options", "must be DataOptions", f"{options!r}"[:200])
    chosen = replace(DataOptions() if options is None else options, **changes)
    pandas = sys.modules.get("pandas")  # whoever has a DataFrame has imported it
    if pandas is not None and isinstance(data, pandas.DataFrame):
        from reconbound.data.frames import load_frame

        chosen.refuse(FOR_FOLDERS, "size")
        found = load_frame(data, chosen)
    else:
        found = _load_named(file_path("data", data), chosen)
    for note in found.notes:
        warn_user(f"{found.name}: {note}", DataWarning)
    return found


def _load_named(name: str, options: DataOptions) -> Dataset:
    """Returns a data set by its name, or from a file or folder."""
    lower, path = name.lower(), Path(name)
    if name in NAMES or not path.is_dir():
        options.refuse(FOR_FOLDERS, "size")
    if lower.endswith(ENDINGS):
        from reconbound.data.frames import load_file

        return load_file(name, options)
    if not (name in NAMES or lower.endswith(".npz") or path.exists()):
        near = next((name + ending for ending in (*ENDINGS, ".npz") if Path(name + ending).exists()), None)
        hint = f"; did you mean {near}?" if near else ""
        names = ", ".join(NAMES)
        raise DataMissing(f"{name} does not exist: name one of {names}, or a file or folder that exists{hint}")
    options.refuse("is for CSV and Parquet files", "target", "drop", "header", "categories")
    if name in builtin.NAMES:
        return builtin.load_builtin(name, options)
    if lower.endswith(".npz") and name not in NAMES:
        return npz.load_npz(name, options)
    if name not in NAMES and not path.is_dir():
        must = "must be a .csv, .csv.gz, .parquet or .npz file, or a folder of images by class"
        raise InputError("the data", must, name)
    options.refuse(FOR_TABLES, "private", "ranges", "units")
    return downloads.load_official(name, options) if name in NAMES else images.load_images(name, options)
