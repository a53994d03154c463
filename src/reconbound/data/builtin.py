"""The small real data sets inside scikit-learn's wheel, with public ranges: no file, no network.

The ranges are round constants set by hand, from what the quantity is or around the extremes that scikit-learn's own
description publishes. They are the same whoever's records are in the set, so they count as declared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import numpy as np

from reconbound.data.dataset import FOR_TABLES, DataOptions, Dataset, Feature, Pixels
from reconbound.data.tables import Column, check_column_options, make_table

#: Of each set, by the names in scikit-learn: name, unit, lowest, highest. Of breast_cancer, by the ten measures of a
#: cell nucleus: the highest mean, standard error and "worst"; each is at least 0.
_RANGES: dict[str, Any] = json.loads((files("reconbound.data") / "ranges.json").read_text(encoding="utf-8"))
_PROGRESSION = ("disease progression", "", 0, 400)
NAMES = ("digits", "breast_cancer", "diabetes", "wine")


def load_builtin(name: str, options: DataOptions) -> Dataset:
    """Returns a data set of scikit-learn's: digits (8×8 images), breast_cancer, wine (classes), diabetes (a number)."""
    if name == "digits":
        options.refuse(FOR_TABLES, "private", "ranges", "units")
        return _load_digits(options)
    from sklearn import datasets

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


def _load_digits(options: DataOptions) -> Dataset:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    inputs = (bunch.images[:, None] / 16.0).astype(np.float32)
    targets = bunch.target.astype(np.int64)
    train, test = options.choose_rows(targets, "classes")
    parts = (inputs[train], targets[train], inputs[test], targets[test])
    digit = Feature("digit", private=False)
    return Dataset("digits", "image", *parts, Pixels((1, 8, 8), 16.0), class_names=tuple("0123456789"), target=digit)
