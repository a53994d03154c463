"""Data of every kind as one small type: `load_dataset("digits")`, `load_dataset("people.csv", target="income")`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reconbound._internal.checks import DataError, DataMissing, InputError, file_path, warn_user
from reconbound.data import csv, downloads, images, npz
from reconbound.data.dataset import FOR_TABLES, DataOptions, Dataset, DataWarning, Feature, Pixels
from reconbound.data.downloads import cifar10, data_folder, mnist, read_idx
from reconbound.data.tables import Column, check_column_options, make_table, read_ranges, read_units

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

#: The small real data sets inside scikit-learn's wheel.
BUILTIN = ("digits", "breast_cancer", "diabetes", "wine")
NAMES = (*BUILTIN, *downloads.NAMES)
ENDINGS = (*csv.ENDINGS, ".parquet")
FOR_FOLDERS = "is for folders of images"
#: Their ranges are round constants set by hand, from what the quantity is or around the extremes that scikit-learn's
#: own description publishes. They are the same whoever's records are in the set, so they count as declared.
#: Of each set, by the names in scikit-learn: name, unit, lowest, highest. Of breast_cancer, by the ten measures of a
#: cell nucleus: the highest mean, standard error and "worst"; each is at least 0.
_RANGES: dict[str, Any] = json.loads((files("reconbound.data") / "ranges.json").read_text(encoding="utf-8"))
_PROGRESSION = ("disease progression", "", 0, 400)


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
    if name in BUILTIN:
        return load_builtin(name, options)
    if lower.endswith(".npz") and name not in NAMES:
        return npz.load_npz(name, options)
    if name not in NAMES and not path.is_dir():
        must = "must be a .csv, .csv.gz, .parquet or .npz file, or a folder of images by class"
        raise InputError("the data", must, name)
    options.refuse(FOR_TABLES, "private", "ranges", "units")
    return downloads.load_official(name, options) if name in NAMES else images.load_images(name, options)


def load_builtin(name: str, options: DataOptions) -> Dataset:
    """Returns a data set of scikit-learn's: digits (8×8 images), breast_cancer, wine (classes), diabetes (a number)."""
    from sklearn import datasets

    if name == "digits":
        options.refuse(FOR_TABLES, "private", "ranges", "units")
        bunch = datasets.load_digits()
        inputs, targets = (bunch.images[:, None] / 16.0).astype(np.float32), bunch.target.astype(np.int64)
        train, test = options.choose_rows(targets, "classes")
        parts = (inputs[train], targets[train], inputs[test], targets[test])
        facts: dict[str, Any] = {"class_names": tuple("0123456789"), "target": Feature("digit", private=False)}
        return Dataset(name, "image", *parts, Pixels((1, 8, 8), 16.0), **facts)
    bunch = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    own = _nucleus_columns() if name == "breast_cancer" else _RANGES[name]
    columns, public = [], list(own.values())
    for values, spelled in zip(bunch.data.T.astype(np.float64), bunch.feature_names, strict=True):
        column = own[str(spelled)][0]
        text = np.array([f"{v:.0f}" for v in values], dtype=object) if column == "sex" else values
        columns.append(Column(column, text))
    if name == "diabetes":
        target = Column(_PROGRESSION[0], bunch.target.astype(np.float64))
        public.append(_PROGRESSION)
    else:
        classes = np.array([str(t) for t in bunch.target_names], dtype=object)
        target = Column({"breast_cancer": "diagnosis", "wine": "grower"}[name], classes[bunch.target])
    ranges = {**{k: (low, high) for k, _, low, high in public if k != "sex"}, **(options.ranges or {})}
    units = {**{k: unit for k, unit, *_ in public}, **(options.units or {})}
    names = [*(column.name for column in columns), target.name]
    settings = check_column_options(names, replace(options, ranges=ranges, units=units), target.name)
    return make_table(name, columns, target, settings, options)


def _nucleus_columns() -> dict[str, tuple[str, str, float, float]]:
    spelled = ("mean {}", "{} error", "worst {}")
    names = {form.format(k): tops[i] for k, tops in _RANGES["breast_cancer"].items() for i, form in enumerate(spelled)}
    return {name: (name, "", 0.0, top) for name, top in names.items()}
