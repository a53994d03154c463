"""The frontier of a sweep: the accuracy that a model can reach for each height of a floor."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reconbound._internal.checks import DataError, InputError
from reconbound._internal.files import CONFIDENTIAL, printable, write_whole
from reconbound.mechanisms.base import Protection
from reconbound.mechanisms.guarantee import FLOORS as MECHANISM_FLOORS
from reconbound.sweep import space
from reconbound.sweep.store import seal_of
from reconbound.sweep.worker import Row

#: Floors by the information of the records (rule, and where over the records), then those of the mechanism alone.
FLOORS = (
    *(f"{rule}_{place}" for rule in ("exact", "fixed", "none", "paper") for place in ("max", "q99", "median")),
    *MECHANISM_FLOORS,
)
TABLE = "sweep.csv"


def crossed_of(floor: str) -> str | None:
    """Returns the column beside a floor of the most exposed record, with the numbers of `ledgers.crossed`.

    >>> crossed_of("exact_max"), crossed_of("exact_q99"), crossed_of("lecam")
    ('exact_crossed', None, None)
    """
    return f"{floor.removesuffix('_max')}_crossed" if floor.endswith("_max") else None


def rows_of(store: Any) -> list[Row]:
    """Returns every row of the finished trials: number and setting of the trial, then its results.

    A setting counts once.
    """
    seen: set[str] = set()
    rows: list[Row] = []
    trials = store.trials()
    if [trial.number for trial in trials] != list(range(len(trials))):
        raise DataError(f"{store.shown} is damaged: the numbers of its trials have gaps")
    for trial in trials:
        if trial.state.name != "COMPLETE":
            continue
        found, setting = sealed_rows(trial), trial.user_attrs["setting"]
        if space.key(setting) in seen:
            continue
        seen.add(space.key(setting))
        rows += [{"trial": trial.number, **printable(setting), **row} for row in found]
    return rows


def sealed_rows(trial: Any) -> list[Row]:
    """Returns a finished trial's rows as they were stored. Raises a DataError if they, or its setting, were changed."""
    found, setting = trial.user_attrs.get("rows"), trial.user_attrs.get("setting")
    if not isinstance(found, list) or not isinstance(setting, dict) or not all(isinstance(row, dict) for row in found):
        raise DataError(f"trial {trial.number} of the storage is damaged: it is finished, and its rows are not there")
    if trial.user_attrs.get("sha256") != seal_of(trial.number, setting, found):
        raise DataError(f"trial {trial.number} of the storage was changed or damaged, or is of an earlier version: its "
                        "rows have another digest")  # fmt: skip
    for row in [setting, *found]:
        for name, value in row.items():
            if name not in space.PARAMETERS and not isinstance(value, int | float | None):
                raise DataError(f"trial {trial.number} of the storage is not reconbound's: {name!r} is no number")
    if not {"steps", "accuracy"} <= set.intersection(*(set(row) for row in found), {"steps", "accuracy"}):
        raise DataError(f"trial {trial.number} of the storage is not reconbound's: a row has no steps or accuracy")
    rows: list[Row] = printable(found)
    return rows


def floors_in(rows: Iterable[Row]) -> list[str]:
    """Returns the floors that the rows have, in a fixed order."""
    there = {name for row in rows for name, value in row.items() if value is not None}
    return [name for name in FLOORS if name in there]


def default_floor(rows: Sequence[Row]) -> str:
    """Returns the name of the floor that is proved, at the most exposed record."""
    found = floors_in(rows)
    if not found:
        raise InputError("rows", "must have a floor", "none")
    return found[0]


def checked_floor(rows: Sequence[Row], floor: str | None) -> str:
    """Returns the floor of this name, or the default. An error lists the floors that exist.

    Args:
        rows: of the finished trials.
        floor: the name of a floor; None for the default.
    """
    if floor is None:
        return default_floor(rows)
    found = floors_in(rows)
    if floor not in found:
        raise InputError("floor", f"must be one of {', '.join(found)}", floor)
    return floor


def pareto(rows: Sequence[Row], floor: str) -> list[Row]:
    """Returns the rows that no other beats: none is as accurate with a higher floor, or more accurate with one as high.

    From the lowest floor to the highest; of rows that are equal in both, the first.

    Args:
        rows: of the finished trials.
        floor: the name of the floor.

    >>> rows = [{"accuracy": a, "exact_max": f} for a, f in ((0.9, 1.0), (0.8, 2.0), (0.7, 1.5))]
    >>> [row["accuracy"] for row in pareto(rows, "exact_max")]
    [0.9, 0.8]
    """
    usable = [row for row in rows if row.get(floor) is not None and row.get("accuracy") is not None]
    front: list[Row] = []
    for row in sorted(usable, key=lambda row: (row[floor], row["accuracy"]), reverse=True):
        if not front or row["accuracy"] > front[-1]["accuracy"]:
            front.append(row)
    return front[::-1]


def best(rows: Sequence[Row], floor: str, at_least: float) -> Row | None:
    """Returns the most accurate row whose floor is at least `at_least`; None if there is none.

    Of equally accurate rows it returns the one with the highest floor.

    Args:
        rows: of the finished trials.
        floor: the name of the floor.
        at_least: the smallest floor that is accepted.
    """
    front = [row for row in pareto(rows, floor) if row[floor] >= at_least]
    return front[0] if front else None


def score_of(rows: Sequence[Row], floor: str, at_least: float) -> float:
    """Returns the number that a search for the best accuracy maximises.

    It is the best accuracy with the floor, or less than -1 by how far (in powers of ten) the floor was missed.

    Args:
        rows: of one trial.
        floor: the name of the floor.
        at_least: the smallest floor that is accepted.
    """
    found = best(rows, floor, at_least)
    if found is not None:
        return max(-1.0, float(found["accuracy"]))
    nearest = max((float(row.get(floor) or 0.0) for row in rows), default=0.0)
    return -1.0 + min(0.0, space.log10(nearest) - space.log10(at_least))


def protection_of(row: Row) -> Protection:
    """Returns what the mechanism of a row guarantees by itself. For rows from before this was kept nothing is known."""
    known = row.get("success_at_1_percent"), float(row.get("never_drawn") or 0.0)
    return Protection(*known, row.get("epsilon"), float(row.get("delta") or 1e-5))


def columns_of(rows: Sequence[Row]) -> list[str]:
    """Returns the table's columns: trial, settings, steps, accuracy, floors, ε."""
    there = {name for row in rows for name in row}
    first = ["trial", *space.PARAMETERS, "steps", "accuracy", "accuracy_sd"]
    last = ["epsilon", "epsilon_add_remove", "delta", "success_at_1_percent", "never_drawn", "measured_median",
            "never_measured", "told_nothing"]  # fmt: skip
    floors = (name for floor in FLOORS for name in (floor, crossed_of(floor)) if name is not None)
    return [name for name in (*first, *floors, *last) if name in there]


def table(rows: Sequence[Row]) -> str:
    """Formats all rows as CSV, with the floors on whose front each lies."""
    text, columns = io.StringIO(), columns_of(rows)
    on: dict[int, list[str]] = {id(row): [] for row in rows}
    for floor in floors_in(rows):
        for row in pareto(rows, floor):
            on[id(row)].append(floor)
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*columns, "front"])
    for row in rows:
        values = ["" if row.get(name) is None else row[name] for name in columns]
        writer.writerow([*values, " ".join(on[id(row)])])
    return text.getvalue()


def write_table(folder: str | os.PathLike[str], rows: Sequence[Row]) -> Path:
    """Writes sweep.csv into the folder: figures of the data, so for its owner only (mode 0600).

    Args:
        folder: the sweep's.
        rows: of the finished trials.
    """
    path = Path(folder) / TABLE
    write_whole(path, table(rows).encode(), mode=CONFIDENTIAL)
    return path
