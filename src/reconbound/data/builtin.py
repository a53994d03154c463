"""The small real data sets inside scikit-learn's wheel, with public ranges: no file, no network.

The ranges are round constants set by hand, from what the quantity is or around the extremes that scikit-learn's own
description publishes. They are the same whoever's records are in the set, so they count as declared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from reconbound.data.dataset import FOR_TABLES, DataOptions, Dataset, Feature, Pixels
from reconbound.data.tables import Column, check_column_options, make_table

# name in scikit-learn: (name, unit, lowest, highest)
_DIABETES: dict[str, tuple[str, str, float, float]] = {
    "age": ("age", "years", 0, 100),
    "sex": ("sex", "", 1, 2),
    "bmi": ("body mass index", "kg/m²", 10, 60),
    "bp": ("blood pressure", "mmHg", 40, 160),
    "s1": ("total cholesterol", "mg/dl", 50, 400),
    "s2": ("LDL cholesterol", "mg/dl", 0, 300),
    "s3": ("HDL cholesterol", "mg/dl", 0, 150),
    "s4": ("cholesterol / HDL", "", 1, 15),
    "s5": ("log triglycerides", "", 2, 8),
    "s6": ("blood sugar", "mg/dl", 40, 200),
}
_PROGRESSION = ("disease progression", "", 0, 400)
_WINE: dict[str, tuple[str, str, float, float]] = {
    "alcohol": ("alcohol", "% vol", 8, 18),
    "malic_acid": ("malic acid", "g/l", 0, 10),
    "ash": ("ash", "g/l", 0, 5),
    "alcalinity_of_ash": ("alcalinity of ash", "", 0, 40),
    "magnesium": ("magnesium", "mg/l", 0, 200),
    "total_phenols": ("total phenols", "", 0, 6),
    "flavanoids": ("flavanoids", "", 0, 6),
    "nonflavanoid_phenols": ("nonflavanoid phenols", "", 0, 1),
    "proanthocyanins": ("proanthocyanins", "", 0, 5),
    "color_intensity": ("colour intensity", "", 0, 20),
    "hue": ("hue", "", 0, 2),
    "od280/od315_of_diluted_wines": ("OD280/OD315 of diluted wine", "", 0, 5),
    "proline": ("proline", "mg/l", 0, 2000),
}
# the ten measures of a cell nucleus: highest mean, highest standard error, highest "worst"; each at least 0
_NUCLEUS = {
    "radius": (40, 5, 50),
    "texture": (60, 8, 80),
    "perimeter": (250, 30, 300),
    "area": (4000, 800, 6000),
    "smoothness": (0.3, 0.05, 0.4),
    "compactness": (0.6, 0.2, 1.5),
    "concavity": (0.6, 0.5, 1.5),
    "concave points": (0.4, 0.1, 0.5),
    "symmetry": (0.5, 0.1, 1),
    "fractal dimension": (0.15, 0.05, 0.3),
}
NAMES = ("digits", "breast_cancer", "diabetes", "wine")


def load_builtin(name: str, options: DataOptions) -> Dataset:
    """Returns a data set of scikit-learn's: digits (8×8 images), breast_cancer, wine (classes), diabetes (a number)."""
    if name == "digits":
        options.refuse(FOR_TABLES, "private", "ranges", "units")
        return _load_digits(options)
    from sklearn import datasets

    bunch = getattr(datasets, f"load_{name}")(**({"scaled": False} if name == "diabetes" else {}))
    own: Mapping[str, tuple[str, str, float, float]]
    own = {"breast_cancer": _nucleus_columns(), "diabetes": _DIABETES, "wine": _WINE}[name]
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
    names = {form.format(k): tops[i] for k, tops in _NUCLEUS.items() for i, form in enumerate(spelled)}
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
