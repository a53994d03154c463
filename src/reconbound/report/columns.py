"""Columns of a table over all records: for how many the floor of one column is below a guess. Confidential."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reconbound.report.figures import beyond, count, guess_error, plus_minus
from reconbound.report.view import View

#: What is said of a floor that is wider than the column's range.
BEYOND = "more than the whole range"


def counts(view: View) -> list[dict[str, Any]]:
    """Counts for each private column the records whose floor on it is below a guess.

    Returns:
        One dictionary per column: "below", the number of records with a floor below the error of guessing its average;
        "of", the number of records in `View.looked_at` that have a value; "missing", the number without one; "lowest",
        the lowest floor, with "record" and "record_name" of its record; and name, unit, width of the range and guess.
        Empty for images, and where no single columns were measured.
    """
    records, information = view.looked_at
    if view.image or len(records) == 0:
        return []
    missing = np.isnan(information)
    below = _below(view).sum(0)
    most = np.where(missing, -1.0, information).argmax(0)
    found = []
    for j in range(view.features):
        row, known = int(most[j]), not missing[:, j].all()
        found.append({
            "name": view.feature_name(j),
            "unit": view.feature_unit(j),
            "width": float(view.scale[j]),
            "guess": float(view.guess_each[j]),
            "constant": constant(view, j),
            "below": int(below[j]),
            "of": int((~missing[:, j]).sum()),
            "missing": int(missing[:, j].sum()),
            "lowest": float(view._errors(information[row])[j]) if known else None,
            "record": int(records[row]) if known else None,
            "record_name": view.record_name(int(records[row])) if known else None,
        })  # fmt: skip
    return found


def constant(view: View, j: int) -> bool:
    """Returns whether a column has one value in all records that have one: there is nothing to reconstruct.

    Only the rounding of a variance in float64 is allowed for: values may be narrow in the range that was declared for
    them.

    Args:
        view: the audit.
        j: the position of the column.
    """
    return bool(view.guess_each[j] <= 1e-12 * view.scale[j])


def _below(view: View) -> np.ndarray:
    """Returns whether a column's floor is below a guess, (n, d), for the records of `View.looked_at`."""
    return np.asarray(view._errors(view.looked_at[1]) < view.guess_each)


def anyone(view: View) -> tuple[int, int] | None:
    """Counts the records of a table with at least one column below a guess.

    Returns:
        The count, and the number of records in `View.looked_at`; None where single columns were not measured.
    """
    if view.image or len(view.looked_at[0]) == 0:
        return None
    return int(_below(view).any(1).sum()), len(view.looked_at[0])


def lowest(view: View) -> np.ndarray | None:
    """Returns the lowest floor on each column over all records, (d,), in its own unit; NaN where all are missing."""
    found = [np.nan if c["lowest"] is None else c["lowest"] for c in counts(view)]
    return np.array(found) if found else None


def most_exposed(view: View, floors: np.ndarray, most: int) -> list[int]:
    """Returns the columns whose floor is lowest relative to the error of a guess.

    Args:
        view: the audit.
        floors: the floor of each column, (d,).
        most: the number of columns to return.
    """
    with np.errstate(over="ignore"):  # a constant column has guess 0: no floor is low relative to it
        ratio = floors / np.maximum(view.guess_each, np.finfo(float).tiny)
    return [int(j) for j in np.argsort(ratio, kind="stable")[:most]]


def which(view: View) -> str:
    """Says for which records single columns are known."""
    records, n = view.looked_at[0], view.records
    if len(records) == n:
        return "all records"
    if view.leakage.diagonal_of is None:
        return f"only the {count(len(records), 'record')} looked at closely (the most and the least exposed) of {n:,}"
    return f"{len(records):,} of {n:,} records: {len(view.leakage.diagonal_of):,} drawn at random, and those kept whole"


def sentence(found: dict[str, Any]) -> str:
    """Formats the count of one column.

    >>> sentence({"name": "age", "unit": "years", "guess": 9.6, "below": 31, "of": 240, "missing": 0})
    'age: 31 of 240 records are below a guess (±9.6 years)'
    >>> sentence({"name": "pay", "unit": "", "guess": 5.0, "below": 1, "of": 20, "missing": 3, "lowest": 4.0,
    ...           "width": 10.0, "record_name": "row 18"})
    'pay: 1 of the 20 records that have a value is below a guess (±5); lowest ±4 (row 18)'
    """
    if found["of"] == 0:
        return f"{found['name']}: no record that was looked at has a value"
    if found.get("constant"):
        whose = "all records that have one" if found["missing"] else "all records"
        return f"{found['name']}: constant, one value in {whose}, so there is nothing to reconstruct"
    of = count(found["of"], "record")
    of = f"the {of} that {'has' if found['of'] == 1 else 'have'} a value" if found["missing"] else of
    verb = "is" if found["below"] == 1 else "are"
    guess = guess_error(found["guess"], found["unit"])
    low = ""
    if found.get("lowest") is not None:
        low = f"; lowest {plus_minus(found['lowest'], found['unit'], found['width'])} ({found['record_name']})"
        low += f", {BEYOND}" if beyond(found["lowest"], found["width"]) else ""
    return f"{found['name']}: {found['below']:,} of {of} {verb} below a guess ({guess}){low}"


def note(view: View) -> str:
    """Explains what the counts are based on, and how exact their parts are."""
    if not counts(view):
        return ""
    probes = view.facts.get("diagonal_probes")
    said = (
        f"“Below a guess”: of {which(view)}, those whose floor on the column is lower than the error of guessing its "
    )
    said += (
        "average; by estimates, so those close to the line may fall on either side. “Lowest”: the floor of the record "
    )
    said += "that is most exposed in that column, which need not be the one most exposed over all columns."
    if probes:
        times = int(view.facts["diagonal_measured"])
        error = 0.5 * math.sqrt(2 / (times * int(probes)))
        said += (
            f" Each record’s columns were measured {times:,} times over all runs"
            f"{f' with {int(probes)} probes' if int(probes) > 1 else ''} (the most and the least exposed more "
            f"closely): random probing alone makes a floor uncertain by up to about {error:.0%}, and that it was done "
            "at a few moments of the training adds to it."
        )
    if any(c["missing"] for c in counts(view)):
        said += " Missing values are not counted."
    return said
