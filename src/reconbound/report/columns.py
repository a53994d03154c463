"""Columns of a table over all its records: for how many the floor of a single one lies below a guess. Confidential."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .figures import count, plus_minus
from .view import View


def counts(view: View) -> list[dict[str, Any]]:
    """For each private column: "below", how many records have a floor on it below the error of guessing its average,
    "of" how many that were looked at and have a value, "missing" of those looked at; name, unit and guess beside.

    Empty for images, and where no single columns were measured."""
    records, information = view.looked_at
    if view.image or len(records) == 0:
        return []
    guess = np.nan_to_num(view.leakage.guess.double().numpy())
    missing = np.isnan(information)
    with np.errstate(over="ignore"):  # floor² = 1/I < guess² as I · guess² > 1
        below = (np.where(missing, 0.0, information) * guess > 1).sum(0)
    return [
        {
            "name": view.feature_name(j),
            "unit": view.feature_unit(j),
            "guess": float(view.guess_each[j]),
            "below": int(below[j]),
            "of": int((~missing[:, j]).sum()),
            "missing": int(missing[:, j].sum()),
        }
        for j in range(view.features)
    ]


def which(view: View) -> str:
    """Of which records single columns are known, in words."""
    records, n = view.looked_at[0], view.records
    if len(records) == n:
        return "all records"
    if view.leakage.diagonal_of is None:
        return f"only the {count(len(records), 'record')} looked at closely (the most and the least exposed) of {n:,}"
    return f"{len(records):,} of {n:,} records: {len(view.leakage.diagonal_of):,} drawn at random, and those kept whole"


def sentence(found: dict[str, Any]) -> str:
    """One column's count.

    >>> sentence({"name": "age", "unit": "years", "guess": 9.6, "below": 31, "of": 240, "missing": 0})
    'age: 31 of 240 records are below a guess (±9.6 years)'
    >>> sentence({"name": "pay", "unit": "", "guess": 5.0, "below": 1, "of": 20, "missing": 3})
    'pay: 1 of the 20 records that have a value is below a guess (±5)'
    """
    of = count(found["of"], "record")
    of = f"the {of} that {'has' if found['of'] == 1 else 'have'} a value" if found["missing"] else of
    verb = "is" if found["below"] == 1 else "are"
    guess = plus_minus(found["guess"], found["unit"])
    return f"{found['name']}: {found['below']:,} of {of} {verb} below a guess ({guess})"


def note(view: View) -> str:
    """What the counts rest on, and how exact their parts are."""
    if not counts(view):
        return ""
    probes = view.facts.get("diagonal_probes")
    said = (
        f"“Below a guess”: of {which(view)}, those whose floor on the column is lower than the error of guessing its "
    )
    said += "average; by estimates, so those close to the line may fall on either side."
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
