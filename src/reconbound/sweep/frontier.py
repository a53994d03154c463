"""The frontier of a sweep: the accuracy that a model can reach for each chance of an attack, and for each floor."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pandas import DataFrame

from reconbound._internal.checks import DataError, InputError
from reconbound._internal.files import CONFIDENTIAL, printable, write_whole
from reconbound.accounting.confidence import describe_one_run
from reconbound.bounds.bound import NOT_PROVED
from reconbound.mechanisms.base import Protection
from reconbound.mechanisms.guarantee import FLOORS as MECHANISM_FLOORS
from reconbound.sweep import chances, space
from reconbound.sweep.queue import Slot, seal_of
from reconbound.sweep.space import Row

#: Floors by the information of the records (rule, and where over the records), then those of the mechanism alone.
FLOORS = (
    *(f"{rule}_{place}" for rule in ("exact", "fixed", "none", "paper") for place in ("max", "q99", "median")),
    *MECHANISM_FLOORS,
)
TABLE = "sweep.csv"
FLOOR_WORDS = {
    "max": "most exposed record (estimate)",
    "q99": "record at the 99 % quantile (estimate)",
    "median": "median record (estimate)",
    "crossed": "crossed",
    "exact": "exact factor",
    "fixed": "fixed-size factor",
    "none": "no amplification",
    "paper": "the paper's κ (not proved, no guarantee)",
    "theorem1": "Theorem 1",
    "theorem1_paper": "Theorem 1 as in the paper (not proved, no guarantee)",
    "corners": "all corners",
    "lecam_unbiased": "Le Cam, unbiased",
    "lecam": "any attacker, Le Cam",
    "rate_distortion": "any attacker, rate-distortion",
}
#: What the two numbers of the most exposed record mean.
CROSSED = (
    "The floor of the most exposed record comes from the largest of many noisy dFIL, which is too large on average, so "
    "it leans low; “crossed”, what each run says of the record that the other runs find most exposed, has a dFIL that "
    "is too small on average, so its floor leans high: on average the largest dFIL lies between the two."
)


def crossed_of(floor: str) -> str | None:
    """Returns the column beside a floor of the most exposed record, with the numbers of `ledgers.crossed`.

    >>> crossed_of("exact_max"), crossed_of("exact_q99"), crossed_of("lecam")
    ('exact_crossed', None, None)
    """
    return f"{floor.removesuffix('_max')}_crossed" if floor.endswith("_max") else None


def rows_of(slots: Iterable[Slot]) -> list[Row]:
    """Returns every row of the finished settings: number and setting, then the results.

    A setting that a search chose twice counts once.
    """
    seen: set[str] = set()
    rows: list[Row] = []
    for slot in slots:
        if slot.complete is None:
            continue
        found = sealed_rows(slot)
        if space.key(slot.setting or {}) not in seen:
            seen.add(space.key(slot.setting or {}))
            rows += [{"trial": slot.number, **printable(slot.setting), **row} for row in found]
    return rows


def sealed_rows(slot: Slot) -> list[Row]:
    """Returns a finished setting's rows as they were stored. Raises a DataError if they were changed."""
    which = f"setting {slot.number} of the storage"
    stored = {} if slot.complete is None else slot.complete.user_attrs
    found: Any = stored.get("rows")
    setting = stored.get("setting")
    listed: list[Any] = [setting, *found] if isinstance(found, list) else [None]
    if not all(isinstance(row, dict) for row in listed) or not all({"steps", "accuracy"} <= set(row) for row in found):
        raise DataError(f"{which} is damaged: it is finished, and its rows, with steps and accuracy, are not there")
    if stored.get("sha256") != seal_of(slot.number, setting, found):
        raise DataError(f"{which} was changed or damaged, or is of an earlier version: its rows have another digest")
    for name, value in (item for row in listed for item in row.items()):
        text = isinstance(value, str) and name in space.PARAMETERS
        if not text and not isinstance(value, int | float | None):
            raise DataError(f"{which} is not reconbound's: {name!r} is no number")
    if not all(map(chances.are_whole, found)):
        raise DataError(f"{which} is not reconbound's: a row lacks some of its chances, or one is not from 0 to 1")
    rows: list[Row] = printable(found)
    return rows


def floors_in(rows: Iterable[Row]) -> list[str]:
    """Returns the floors that the rows have, in a fixed order."""
    there = {name for row in rows for name, value in row.items() if value is not None}
    return [name for name in FLOORS if name in there]


def checked_floor(rows: Sequence[Row], floor: str | None = None) -> str:
    """Returns the floor of this name, or the one that is proved, at the most exposed record.

    An error lists the floors that exist.

    Args:
        rows: of the finished trials.
        floor: the name of a floor; None for the proved one.
    """
    floors = floors_in(rows)
    if floor is None and floors:
        return floors[0]
    if floor not in floors:
        raise InputError("floor", f"must be one of {', '.join(floors) or 'those of the rows, which have none'}", floor)
    return floor


def pareto(rows: Sequence[Row], floor: str) -> list[Row]:
    """Returns the rows that no other beats: none is as accurate with a higher floor, or more accurate with one as high.

    From the most accurate row to the best protected one; of rows that are equal in both, the first.

    Args:
        rows: of the finished trials.
        floor: the name of the floor, or of a chance, of which the lower one is better.

    >>> rows = [{"accuracy": a, "exact_max": f} for a, f in ((0.9, 1.0), (0.8, 2.0), (0.7, 1.5))]
    >>> [row["accuracy"] for row in pareto(rows, "exact_max")]
    [0.9, 0.8]
    >>> rows = [{"accuracy": a, "success_removed_max": p} for a, p in ((0.9, 0.4), (0.8, 0.2), (0.7, 0.3))]
    >>> [row["accuracy"] for row in pareto(rows, "success_removed_max")]
    [0.9, 0.8]
    """
    better = -1 if floor in chances.CHANCES else 1
    usable = [row for row in rows if row.get(floor) is not None and row.get("accuracy") is not None]
    front: list[Row] = []
    for row in sorted(usable, key=lambda row: (better * row[floor], row["accuracy"]), reverse=True):
        if not front or row["accuracy"] > front[-1]["accuracy"]:
            front.append(row)
    return front[::-1]


def best(rows: Sequence[Row], floor: str, limit: float) -> Row | None:
    """Returns the most accurate row whose floor is at least `limit`; None if there is none.

    Of equally accurate rows it returns the best protected one.

    Args:
        rows: of the finished trials.
        floor: the name of the floor, or of a chance.
        limit: the smallest floor, or the largest chance, that is accepted.
    """
    better = -1 if floor in chances.CHANCES else 1
    front = [row for row in pareto(rows, floor) if better * row[floor] >= better * limit]
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
    """Returns the table's columns: trial, settings, steps, accuracy, chances, floors, ε."""
    there = {name for row in rows for name in row}
    first = ["trial", *space.PARAMETERS, "steps", "accuracy", "accuracy_sd"]
    last = ["epsilon", "epsilon_add_remove", "delta", "success_at_1_percent", "never_drawn", "measured_median",
            "never_measured", "zero_information"]  # fmt: skip
    success = (name + ending for name in chances.chances_in(rows) for ending in ("", chances.ESTIMATE))
    floors = (name for floor in FLOORS for name in (floor, crossed_of(floor)) if name is not None)
    return [name for name in (*first, *success, *floors, *last) if name in there]


def table(rows: Sequence[Row]) -> str:
    """Formats all rows as CSV, with the fronts on which each lies. No cell is a spreadsheet's formula."""
    columns, names = columns_of(rows), (*chances.chances_in(rows), *floors_in(rows))
    fronts = {name: {id(row) for row in pareto(rows, name)} for name in names}
    cells = [
        [
            *(_no_formula(row.get(name)) for name in columns),
            " ".join(n for n, front in fronts.items() if id(row) in front),
        ]
        for row in rows
    ]
    return str(DataFrame(cells, columns=[*columns, "front"], dtype=object).to_csv(index=False, lineterminator="\n"))


def _no_formula(cell: Any) -> Any:
    """Returns a cell that a spreadsheet takes as text: the name of a received sweep's model may begin with =.

    >>> _no_formula("=1+1"), _no_formula("mlp"), _no_formula(-1.5)
    ("'=1+1", 'mlp', -1.5)
    """
    return f"'{cell}" if isinstance(cell, str) and cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else cell


def write_table(folder: str | os.PathLike[str], rows: Sequence[Row]) -> Path:
    """Writes sweep.csv into the folder: figures of the data, so for its owner only (mode 0600).

    Args:
        folder: the sweep's.
        rows: of the finished trials.
    """
    path = Path(folder) / TABLE
    write_whole(path, table(rows).encode(), mode=CONFIDENTIAL)
    return path


# --- in words -------------------------------------------------------------------------------


def describe_floor(name: str) -> str:
    """Returns a floor, a chance or another column in words.

    >>> describe_floor("exact_max"), describe_floor("lecam"), describe_floor("epsilon")
    ('exact factor, most exposed record (estimate)', 'any attacker, Le Cam', 'epsilon')
    >>> describe_floor("success_removed_max")
    'chance against the most exposed record'
    """
    if name in FLOOR_WORDS:
        return FLOOR_WORDS[name]
    if name in chances.CHANCES:
        return f"chance against {chances.CHANCES[name]}"
    rule, _, place = name.partition("_")
    known = rule in FLOOR_WORDS and place in FLOOR_WORDS
    return f"{FLOOR_WORDS[rule]}, {FLOOR_WORDS[place]}" if known else name.replace("_", " ")


def attacker_of(floor: str) -> tuple[str, str]:
    """Returns whom a floor binds, and where."""
    if floor in ("lecam", "rate_distortion"):
        return "any attacker", "on some conceivable record, not on each"
    if floor == "lecam_unbiased":
        return "an unbiased attacker", "on average over the ends of each range"
    place = floor.rpartition("_")[2]
    where = f"on the {FLOOR_WORDS.get(place, '').removesuffix(' (estimate)')}"
    return "an unbiased attacker", where if place in ("max", "q99", "median") else "on every record"


def is_proved(floor: str) -> bool:
    """Returns whether a floor is a guarantee at all.

    >>> is_proved("exact_max"), is_proved("paper_max"), is_proved("theorem1_paper")
    (True, False, False)
    """
    return NOT_PROVED not in describe_floor(floor)


def describe_binding(floor: str) -> str:
    """Returns whom a floor binds, to follow its name; "" where the name says it, or that there is no guarantee.

    >>> describe_binding("exact_max"), describe_binding("lecam"), describe_binding("paper_max")
    (', for unbiased attackers', '', '')
    """
    text = describe_floor(floor)
    return "" if "any attacker" in text or not is_proved(floor) else ", for unbiased attackers"


def describe_precision(floor: str, runs: int | None, measured: float | None = None) -> str:
    """Returns how exact a floor is, in words; "" for floors of the mechanism, which are computed, and where unknown.

    Args:
        floor: its name.
        runs: the number of runs over which it was averaged.
        measured: how often each record was measured over all runs (median), where it is known.

    >>> describe_precision("exact_max", 3), describe_precision("lecam", 1)
    ('mean of 3 runs: an estimate, more often too high than too low', '')
    """
    if runs is None or not floor.endswith(("_max", "_q99", "_median")):
        return ""
    if runs > 1:
        return f"mean of {runs:,} runs: an estimate, more often too high than too low"
    return f"from one run: an estimate; {describe_one_run(0.0 if measured is None else measured)}"


def describe_majority(guesses: Mapping[str, Any] | None) -> list[str]:
    """Returns a sentence on the accuracy that needs no model; empty where it is not known."""
    majority = (guesses or {}).get("accuracy")
    return [] if majority is None else [f"Majority class: {100 * majority:.1f} %."]
