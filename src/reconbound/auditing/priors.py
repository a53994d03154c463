"""Facts of the data that need no model: copies, names and ranges, guesses, what a regression leaves, categories."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from scipy.special import xlogy

from reconbound.auditing.worlds import MOST_WORLDS, world_names, worlds_of
from reconbound.data import Dataset
from reconbound.data.dataset import describe_copies, find_copies
from reconbound.data.tables import MISSING
from reconbound.fisher.worlds import REMOVED

#: Inputs of a record above which no regression is made.
MOST_INPUTS = 4096
#: Records for each input of a record that a regression needs.
ENOUGH = 5
#: Of the regression, in units of a standardised column's variance.
_RIDGE = 1e-6
#: Records whose products are summed in one go.
_CHUNK = 2**14


def missing_of(dataset: Dataset) -> dict[int, np.ndarray]:
    """Returns for each private feature, by its position, which records lack it: (N,) of bool.

    Only features that some record lacks are included (a public mark says so).
    """
    if dataset.private is None:
        return {}
    marks = {f.name: k for k, f in enumerate(dataset.features) if f.name.endswith(MISSING) and not f.private}
    names = [f"{f.name} {MISSING}" for f in dataset.private_features]
    return {j: flat_inputs(dataset)[:, marks[name]] == 1 for j, name in enumerate(names) if name in marks}


def guess_of(dataset: Dataset) -> np.ndarray:
    """Returns the mean square error of guessing each private feature's average, (d,), over records that have one."""
    flat, private = flat_inputs(dataset), dataset.private
    missing = {} if private is None else missing_of(dataset)
    columns = [flat] if private is None else [flat[:, column] for column in private]
    found = []
    for j, column in enumerate(columns):
        values = column[~missing[j]] if j in missing else column
        mean = values.mean(axis=0, dtype=np.float64) if len(values) else 0.0
        parts = (values[at : at + _CHUNK] - mean for at in range(0, len(values), _CHUNK))  # no copy in float64
        found.append(np.asarray(sum(np.square(part).sum(0) for part in parts) / max(1, len(values))))
    return found[0] if private is None else np.array(found)


def prior_variance(dataset: Dataset) -> list[float] | None:
    """Returns how well each private number is known from everything else: the variance that a regression leaves, (d,).

    The regression is linear, on all other inputs and the target (a one for each class), with a constant and a small
    ridge, over the records that have the number. With a Gaussian prior that is 1/J of somebody who knows the other
    columns. None for records of more than MOST_INPUTS inputs, and for fewer than ENOUGH records for each input, whose
    residuals would be too small.

        β of a column and its residual come from P = (Σ + λI)⁻¹, Σ the correlations:  residual_j = (X P)_j/P_jj

    Args:
        dataset: the data of the audit.
    """
    if len(dataset.scale) == 0:
        return []
    flat, missing = flat_inputs(dataset), missing_of(dataset)
    if flat.shape[1] > MOST_INPUTS or len(flat) < ENOUGH * flat.shape[1]:
        return None
    columns = np.arange(flat.shape[1]) if dataset.private is None else dataset.private
    found = _residual_variance(dataset, np.ones(len(flat), dtype=bool))[columns]
    for j, lacking in missing.items():
        found[j] = _residual_variance(dataset, ~lacking)[columns[j]]
    return [float(v) for v in found]


def _residual_variance(dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Returns the variance of each flat input that the others and the target leave, over some of the records."""
    inputs, targets, count = flat_inputs(dataset), np.asarray(dataset.targets), int(rows.sum())
    if not count:
        return np.zeros(inputs.shape[1])
    classes = np.unique(targets[rows]) if dataset.task == "classes" else None

    def parts() -> Iterator[np.ndarray]:
        for at in range(0, len(inputs), _CHUNK):
            own = rows[at : at + _CHUNK]
            aims = targets[at : at + _CHUNK][own][:, None]
            yield np.concatenate([inputs[at : at + _CHUNK][own], aims if classes is None else aims == classes], axis=1)

    mean = sum(part.sum(0, dtype=np.float64) for part in parts()) / count
    covariance = np.zeros((len(mean), len(mean)))
    for part in parts():
        covariance += (part - mean).T @ (part - mean) / count
    spread = np.sqrt(np.diag(covariance))
    spread[spread <= 1e-12 * np.abs(mean)] = 0.0  # what is left of a constant column is rounding
    scale = np.where(spread > 0, spread, np.inf)
    correlation = covariance / np.outer(scale, scale)
    precision = np.linalg.inv(correlation + _RIDGE * np.eye(len(mean)))
    left = ((precision @ correlation) * precision).sum(1) / np.diag(precision) ** 2
    return np.asarray((np.maximum(left, 0) * spread**2)[: inputs.shape[1]])


def flat_inputs(dataset: Dataset) -> np.ndarray:
    """Returns the inputs as one row of numbers for each record."""
    return dataset.inputs.reshape(len(dataset.inputs), -1)


def category_facts(dataset: Dataset) -> dict[str, Any]:
    """Returns what is known of a table's private categories without the model, by their worlds; nothing without any.

    "category_entropy": H of the shares of the categories, in nats; "category_columns": for each column the flat columns
    of its ones and zeros, and the names of its categories in that order.

    Args:
        dataset: the data of the audit.
    """
    columns, entropy, where = dataset.private_columns, {}, {}
    for column, name in world_names(columns).items():
        places = columns[column]
        if not dataset.features[places[0]].category:
            continue
        shares = flat_inputs(dataset)[:, places].mean(0, dtype=np.float64)
        entropy[name] = float(-xlogy(shares, shares).sum())
        names = [dataset.features[k].name.removeprefix(f"{column} = ") for k in places]
        where[name] = {"columns": places.tolist(), "names": names}
    return {"category_entropy": entropy, "category_columns": where} if entropy else {}


def baseline_of(dataset: Dataset) -> float | None:
    """Returns the test accuracy of always predicting the most frequent training class (R² of the mean target).

    Returns None where there are no test data (or one number only).
    """
    known, truth = np.asarray(dataset.targets), np.asarray(dataset.test_targets)
    if 0 in (len(known), len(truth)):
        return None
    if dataset.task == "classes":
        return float((truth == np.bincount(known).argmax()).mean())
    spread = float(truth.var(dtype=np.float64))
    return 1 - float(np.square(truth - known.mean(dtype=np.float64)).mean()) / spread if spread > 0 else None


def copies_of(dataset: Dataset) -> dict[str, Any]:
    """Counts the records that have exact copies among the others, and finds the size of the largest group.

    This is done for whole records, and ("private") for records that agree in the private features and the target only.
    """
    private = np.concatenate(list(dataset.private_columns.values()))
    whole = find_copies(dataset.inputs, dataset.targets)
    found: dict[str, Any] = {"records": whole.records, "largest": whole.largest.tolist()}
    if len(private) < len(dataset.features):
        agree = find_copies(flat_inputs(dataset)[:, private], dataset.targets)
        found["private"] = {"records": agree.records, "largest": agree.largest.tolist()}
    return found


def dataset_facts(dataset: Dataset, worlds: Sequence[str], *, whole: bool = True) -> dict[str, Any]:
    """Returns what a report says of the data: names, units, ranges, notes, copies, worlds, guesses without a model.

    Args:
        dataset: the data of the audit.
        worlds: names of the ledger's worlds, in its order.
        whole: whether the report is about all records; otherwise it does not name copies.
    """
    private, target = dataset.private_features, dataset.target
    kinds = {name: {"kind": one.kind, "reference": one.reference} for name, one in worlds_of(dataset).items()}
    removed = {"kind": REMOVED, "reference": ""}
    facts: dict[str, Any] = {
        "class_names": list(dataset.class_names),
        "feature_names": [f.name for f in private],
        "units": [f.unit for f in private],
        "scale": dataset.scale.tolist(),
        "offset": dataset.offset.tolist(),
        "private": None if dataset.private is None else dataset.private.tolist(),
        "target_name": "" if target is None else target.name,
        "target_unit": "" if target is None else target.unit,
        "task": dataset.task,
        "inferred_ranges": dataset.inferred_ranges,
        "notes": list(dataset.notes),
        "copies": copies_of(dataset) if whole else {},
        "worlds": [{"name": name, **kinds.get(name, removed)} for name in worlds],
        "prior_variance": prior_variance(dataset),
        **(category_facts(dataset) if dataset.kind == "table" else {}),
    }
    count = len(dataset.private_columns) if dataset.kind == "table" else 0
    if count > MOST_WORLDS:
        what = f"only the first {MOST_WORLDS} of {count} private columns have a world of their own"
        facts["notes"].append(f"{what}: the others are replaced together with all private columns only")
    if not whole:
        said = describe_copies(find_copies(dataset.inputs, dataset.targets), len(dataset.inputs))
        facts["notes"] += said or ("no record has an exact copy among the others; floors are for one row",)
    if dataset.private is not None:
        flat = flat_inputs(dataset)
        parts = (flat[at : at + _CHUNK] for at in range(0, len(flat), _CHUNK))
        marks = np.all(
            [((part == 0) | (part == 1)).all(0) for part in parts], axis=0
        )  # in a public number 1 is not yes
        pairs = zip(dataset.features, marks, strict=True)
        # of all that is no private number: a private category is not named
        facts["public_names"] = [
            f.name if mark and not f.private else "" for f, mark in pairs if not f.private or f.category
        ]
    baseline = baseline_of(dataset)
    if baseline is not None:
        facts["accuracy_baseline"] = baseline
    if dataset.task == "number" and target is not None:
        facts |= {"target_offset": target.low, "target_scale": target.high - target.low}
    return facts
