"""Data of every kind as one small type: `load_dataset("digits")`, `load_dataset("people.csv", target="income")`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconbound._internal.checks import DataError, DataMissing, InputError, file_path, warn_user
from reconbound.data import builtin, csv, images, npz, official, parquet
from reconbound.data.dataset import Dataset, DataWarning, Feature, Pixels
from reconbound.data.official import cifar10, data_folder, mnist, read_idx
from reconbound.data.options import DataOptions
from reconbound.data.tables import read_ranges, read_units, refuse_for_images

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

NAMES = (*builtin.NAMES, *official.NAMES)


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
        found = _load_frame(data, chosen)
    else:
        found = _load_named(file_path("data", data), chosen)
    for note in found.notes:
        warn_user(f"{found.name}: {note}", DataWarning)
    return found


def _load_frame(frame: DataFrame, options: DataOptions) -> Dataset:
    from reconbound.data.frames import load_frame

    _refuse_size(options)
    return load_frame(frame, options)


def _load_named(name: str, options: DataOptions) -> Dataset:
    lower, path = name.lower(), Path(name)
    if name in NAMES or not path.is_dir():
        _refuse_size(options)
    if lower.endswith((*csv.ENDINGS, parquet.ENDING)):
        from reconbound.data.frames import load_file

        return load_file(name, options)
    if not (name in NAMES or lower.endswith(".npz") or path.exists()):
        endings = (*csv.ENDINGS, parquet.ENDING, ".npz")
        near = next((name + ending for ending in endings if Path(name + ending).exists()), None)
        hint = f"; did you mean {near}?" if near else ""
        known = ", ".join(NAMES)
        raise DataMissing(f"{name} does not exist: name one of {known}, or a file or folder that exists{hint}")
    for option, field in (("target",) * 2, ("drop",) * 2, ("header",) * 2, ("category", "categories")):
        if (given := getattr(options, field)) is not None:
            raise InputError(option, "is for CSV and Parquet files", given)
    if name in builtin.NAMES:
        return builtin.load_builtin(name, options)
    if lower.endswith(".npz") and name not in NAMES:
        return npz.load_npz(name, options)
    if name not in NAMES and not path.is_dir():
        what = "must be a .csv, .csv.gz, .parquet or .npz file, or a folder of images by class"
        raise InputError("the data", what, name)
    refuse_for_images(options, "private", "ranges", "units")
    return official.load_official(name, options) if name in NAMES else images.load_images(name, options)


def _refuse_size(options: DataOptions) -> None:
    if options.size is not None:
        raise InputError("size", "is for folders of images", options.size)
