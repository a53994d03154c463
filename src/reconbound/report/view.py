"""A run and its leakage, read once: the numbers on the page, with their units."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reconbound.data.tables import MISSING
from reconbound.mechanisms.base import Protection, read_protection
from reconbound.report.folder import Leakage, Run, floors, line, record_names
from reconbound.report.formats import clean, pixel_scale
from reconbound.report.success import Success

#: A floor at a smaller share of the range says nothing in practice.
NEGLIGIBLE = 1e-3
#: Why a record may have no useful confidence limit (View.upper_floor).
NO_LIMIT = "too few measurements (raise --budget) or too few runs (raise --runs)"


def quantile(values: np.ndarray, share: float) -> float:
    """Returns a quantile that some record has; 0 where there are none."""
    return float(np.quantile(values, share, method="lower")) if len(values) else 0.0


@dataclass(frozen=True)
class View:
    """The numbers of a run and its leakage that the page shows.

    Errors are roots of squared errors, ± per feature: for images in pixel values, for tables as shares of a column's
    range, for one column (and for whole records that have only one) in its own unit.
    """

    run: Run
    leakage: Leakage

    # --- what the data are -------------------------------------------------------------

    @property
    def facts(self) -> Mapping[str, Any]:
        return self.leakage.facts

    @property
    def image(self) -> bool:
        return self.run.data.get("kind") == "image" and self.leakage.kept_inputs.ndim == 4

    @property
    def noun(self) -> str:
        return "image" if self.image else "record"

    @property
    def part(self) -> str:
        """Returns the name of one private number of a record."""
        return "pixel" if self.image else "column"

    @property
    def private_parts(self) -> str:
        """Returns the name of all private numbers of a record."""
        return "pixels" if self.image else "private columns" if self.features > 1 else "private column"

    @property
    def single(self) -> bool:
        """Returns whether a record of a table has only one private column: its floor is the record's."""
        return not self.image and self.features == 1

    @cached_property
    def scale(self) -> np.ndarray:
        """Returns the size of one input unit in the data's own, (d,)."""
        return np.broadcast_to(np.asarray(self.facts.get("scale", 1.0), dtype=np.float64), (self.features,))

    @cached_property
    def offset(self) -> np.ndarray:
        return np.broadcast_to(np.asarray(self.facts.get("offset", 0.0), dtype=np.float64), (self.features,))

    @property
    def features(self) -> int:
        return self.leakage.guess.numel()

    @property
    def unit(self) -> float:
        """Returns the unit of errors of whole records, in input units.

        It is the range of the pixels, or of the one private column; 1 for tables with more.
        """
        return float(self.scale[0]) if self.unbiased and (self.image or self.single) else 1.0

    @property
    def of_range(self) -> str:
        """Returns the unit of errors of whole records, in words."""
        if self.single:
            return self.feature_unit(0) or f"in units of {self.feature_name(0)}"
        if not self.image:
            return "of a column’s range"
        low, high = float(self.offset[0]), float(self.offset[0] + self.scale[0])
        return pixel_scale(low, high)

    @cached_property
    def private(self) -> np.ndarray | None:
        columns = self.facts.get("private")
        return None if columns is None else np.asarray(columns, dtype=np.int64)

    def feature_name(self, j: int) -> str:
        names = self.facts.get("feature_names") or ()
        return clean(names[j]) if j < len(names) else f"{self.part} {j}"

    def feature_unit(self, j: int) -> str:
        """Returns the column's unit; nothing where it has none and runs from 0 to 1."""
        units = self.facts.get("units") or ()
        unit = units if isinstance(units, str) else units[j] if j < len(units) else ""
        return clean(unit or "", 40)

    @cached_property
    def names(self) -> list[str]:
        """Returns the names of all records as the page prints them; empty where they have none of their own."""
        return [clean(name, 80) for name in record_names(self.leakage.names)]

    def record_name(self, record: int) -> str:
        """Returns the record's own name ("row 18", a file's), or "record 17"."""
        names = self.names
        return (names[record] if record < len(names) else "") or f"record {record:,}"

    def target(self, record: int) -> str:
        """Returns the name of the record's class, or its number."""
        given = float(self.leakage.targets[record])
        if self.classes:
            return self.class_name(int(given))
        low, width = float(self.facts.get("target_offset", 0.0)), float(self.facts.get("target_scale", 1.0))
        unit = clean(self.facts.get("target_unit") or "", 40)
        return f"{low + width * given:.4g}{f' {unit}' if unit else ''}"

    @property
    def classes(self) -> bool:
        """Returns whether the model predicts classes, and not a number."""
        return bool(self.facts.get("task", "classes") == "classes")

    @property
    def accuracy(self) -> float | None:
        """Returns the test accuracy (R² for a number) at the end of the run; None where it was not measured."""
        last = float(self.leakage.accuracy[-1]) if self.leakage.accuracy.numel() else math.nan
        return last if math.isfinite(last) else None

    @property
    def baseline_name(self) -> str:
        """Returns the name of a prediction that needs no model."""
        return "majority class" if self.classes else "predicting the mean"

    def format_accuracy(self, accuracy: float) -> str:
        return f"{100 * accuracy:.1f} %" if self.classes else f"{accuracy:.3f}"

    def class_name(self, k: int) -> str:
        names = self.facts.get("class_names") or ()
        return clean(names[k]) if 0 <= k < len(names) else str(k)

    @property
    def target_name(self) -> str:
        return clean(self.facts.get("target_name") or "class", 60)

    @property
    def unbiased(self) -> bool:
        """Returns whether Fisher information was measured, and so floors for unbiased attackers."""
        return len(self.leakage.dfil) > 0

    @cached_property
    def success(self) -> Success:
        """Returns the largest chances of success against each record."""
        return Success(self.run, self.leakage)

    # --- whole records -----------------------------------------------------------------

    @cached_property
    def measured(self) -> np.ndarray:
        """Returns which records have floors for unbiased attackers."""
        return (self.leakage.measured.numpy() > 0) & self.unbiased

    @cached_property
    def floor(self) -> np.ndarray:
        """Returns the ± floor of each record, (N,), under the first rule; 0 where nothing is known."""
        if not self.unbiased:
            return np.zeros(len(self.measured))
        return np.asarray(self.unit * np.sqrt(np.nan_to_num(floors(self.leakage).double().numpy(), nan=0.0)))

    @cached_property
    def upper_floor(self) -> np.ndarray | None:
        """Returns the ± floor of each record at the upper confidence limit of its leakage, (N,).

        It is 0 where there is no limit, or only a useless one: below a thousandth of the range and a hundredth of a
        guess, as most limits from two runs are.
        """
        if self.leakage.upper is None:
            return None
        upper = np.nan_to_num(self.leakage.upper[0].double().numpy(), nan=np.inf, posinf=np.inf)
        with np.errstate(divide="ignore"):
            found = self.unit / np.sqrt(np.maximum(upper, np.finfo(float).tiny))
        least = min(NEGLIGIBLE * self.unit, 0.01 * self.guess)
        return np.where(np.isfinite(upper) & self.measured & (found >= least), found, 0.0)

    @cached_property
    def shown(self) -> np.ndarray:
        """Returns the ± floor of each record as it is shown first, (N,).

        It is the lower confidence limit where there is one, otherwise the estimate; 0 where nothing is known.
        """
        return self.floor if self.upper_floor is None else np.where(self.upper_floor > 0, self.upper_floor, self.floor)

    def limited(self, record: int) -> bool:
        """Returns whether a record's floor has a lower confidence limit."""
        return self.upper_floor is not None and bool(self.upper_floor[record] > 0)

    @property
    def level(self) -> str:
        """Returns the confidence of the limits, in words."""
        return f"{100 * float(self.facts.get('confidence', 0.95)):g} %"

    @property
    def basis(self) -> str:
        """Says, as part of a sentence, what `shown` is for the records that were measured."""
        if self.upper_floor is None or not (self.upper_floor > 0).any():
            return "by estimates"
        return f"at {self.level} confidence{', or by an estimate where there is no limit' if self.unlimited else ''}"

    @cached_property
    def protection(self) -> Protection:
        """Returns what the mechanism itself guarantees, and whether that is meaningful."""
        return read_protection(self.run.guarantee)

    @property
    def unlimited(self) -> int:
        """Returns the number of measured records without a useful upper limit; 0 after one run, when none has one."""
        return 0 if self.upper_floor is None else int((self.measured & ~(self.upper_floor > 0)).sum())

    @cached_property
    def relative_error(self) -> np.ndarray:
        """Returns the standard error of each record's dFIL over its dFIL, (N,); infinite where nothing is known."""
        if not self.unbiased:
            return np.full(len(self.measured), np.inf)
        dfil, error = (t[0].double().numpy() for t in (self.leakage.dfil, self.leakage.error))
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(dfil > 0, error / dfil, np.inf)
        return np.where(self.measured & np.isfinite(share), share, np.inf)

    def floor_error(self, record: int) -> float | None:
        """Returns the standard error of a record's ± floor; None beyond 100 %.

        By the delta method it is half the relative error of dFIL.
        """
        share = float(self.relative_error[record])
        return 0.5 * share * float(self.floor[record]) if share <= 1 else None

    @property
    def records(self) -> int:
        return len(self.floor)

    @property
    def unknown(self) -> int:
        """Returns the number of records of which nothing is known: never measured."""
        return int((~self.measured).sum())

    @cached_property
    def worst(self) -> int | None:
        """Returns the most exposed record among those measured."""
        if not self.measured.any():
            return None
        return int(np.argmin(np.where(self.measured, self.floor, np.inf)))

    @cached_property
    def lowest(self) -> float:
        """Returns the ± floor that no record is below, as it is shown first.

        It is the lowest lower confidence limit where the record most exposed by the estimates has one, otherwise that
        record's estimate.
        """
        if self.worst is None:
            return 0.0
        limits = self.upper_floor
        if limits is None or not limits[self.worst] > 0:
            return float(self.floor[self.worst])
        return float(limits[limits > 0].min())

    @cached_property
    def guess(self) -> float:
        """Returns the ± error of guessing the average record, mean square over the features."""
        known = np.nan_to_num(self.leakage.guess.double().numpy())
        return self.unit * float(np.sqrt(known.mean())) if known.size else 0.0

    def below(self, threshold: float) -> int:
        """Returns the number of records with a lower floor, as `shown`; those never measured count."""
        return int((self.shown < threshold).sum())

    def quantile(self, share: float) -> float:
        """Returns a quantile of the floors of the records measured, as `shown`."""
        return quantile(self.shown[self.measured], share)

    def group_floor(self, rows: list[int]) -> float:
        """Returns the ± floor of somebody who has these rows, as it is shown first: 1/√(k Σ dFIL).

        See FisherAccountant.group_floor. It is 0 where one of them was never measured.
        """
        own = self.shown[rows] / self.unit
        return 0.0 if not (own > 0).all() else self.unit / float(np.sqrt(len(rows) * (1 / own**2).sum()))

    # --- features of the records kept whole ----------------------------------------------

    @cached_property
    def places(self) -> dict[int, int]:
        """Returns the position of each record among those kept whole."""
        return {int(record): place for place, record in enumerate(self.leakage.kept.tolist())}

    @cached_property
    def guess_each(self) -> np.ndarray:
        """Returns the ± error of guessing each feature's average, (d,), in the feature's own unit."""
        return np.asarray(self.scale * np.sqrt(np.nan_to_num(self.leakage.guess.double().numpy())))

    @cached_property
    def column_information(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the records whose single features are known, (n,), and their information, (n, d).

        It is NaN where a value is missing. The closer measurement is used where there was one.
        """
        rows: dict[int, np.ndarray] = {}
        if self.leakage.diagonal is not None:
            each, of = self.leakage.diagonal.double().numpy(), self.leakage.diagonal_of
            rows = dict(zip(range(len(each)) if of is None else of.tolist(), each, strict=True))
        closer = self.leakage.kept_diagonal
        for place, record in enumerate([] if closer is None else self.leakage.kept.tolist()):
            rows[record] = closer[place].double().numpy().copy()  # type: ignore[index]
            if self.facts.get("public_names"):
                rows[record][np.isnan(self.values(place))] = np.nan
        information = np.stack(list(rows.values())) if rows else np.empty((0, self.features))
        return np.fromiter(rows, dtype=np.int64, count=len(rows)), information

    @cached_property
    def measured_rows(self) -> dict[int, int]:
        """Returns the row of each record in `column_information`."""
        return {int(record): row for row, record in enumerate(self.column_information[0])}

    def feature_floors(self, record: int | None) -> np.ndarray | None:
        """Returns the ± floor of each feature, (d,), in its own unit, for a record or (None) for the average one.

        It is NaN where the value is missing. Returns None where it is not known.
        """
        if record is None:
            average = self.leakage.average_diagonal
            return None if average is None else self._errors(np.nan_to_num(average.flatten().double().numpy()))
        row = self.measured_rows.get(record)
        return None if row is None else self._errors(self.column_information[1][row])

    def _errors(self, information: np.ndarray) -> np.ndarray:
        return np.asarray(self.scale * np.sqrt(1 / np.maximum(information, np.finfo(float).tiny)))

    def parts_below_guess(self) -> int:
        """Counts the features of the most exposed image whose floor is below the error of guessing their average.

        For tables all records are counted (`columns`).
        """
        floors = None if self.worst is None else self.feature_floors(self.worst)
        return 0 if floors is None else int((floors < self.guess_each).sum())

    def values(self, place: int) -> np.ndarray:
        """Returns the private numbers of a record kept whole, (d,), in their own units.

        A number is NaN where a public mark says that the value is missing.
        """
        flat = self.leakage.kept_inputs[place].double().flatten().numpy()
        found = np.array(self.offset + self.scale * (flat if self.private is None else flat[self.private]))
        marks, names = self.marks(place), self.facts.get("feature_names") or ()
        found[[j for j, name in enumerate(names) if f"{name} {MISSING}" in marks]] = np.nan
        return found

    def marks(self, place: int) -> list[str]:
        """Returns the public columns that are 1 for a record kept whole: its categories, and what is missing."""
        names = self.facts.get("public_names") or ()
        if self.private is None:
            return []
        flat = self.leakage.kept_inputs[place].double().flatten().numpy()
        public = np.setdiff1d(np.arange(flat.size), self.private)
        if len(names) != len(public):
            return []
        return [name for name, x in zip(names, flat[public], strict=True) if name and x == 1.0]

    # --- columns of a table --------------------------------------------------------------

    @cached_property
    def columns(self) -> list[dict[str, Any]]:
        """Returns for each private column how many records have a floor below a guess.

        Each dictionary has "below", the number of records with a floor below the error of guessing the average; "of",
        the number of measured records that have a value; "missing", the number without one; "lowest", the lowest floor,
        with "record" and "record_name" of its record; "constant", and name, unit, width of the range and guess. Empty
        for images, and where no single columns were measured.
        """
        records, information = self.column_information
        if self.image or len(records) == 0:
            return []
        missing = np.isnan(information)
        below = self._below_guess().sum(0)
        most = np.where(missing, -1.0, information).argmax(0)
        found = []
        for j in range(self.features):
            row, known = int(most[j]), not missing[:, j].all()
            found.append({
                "name": self.feature_name(j),
                "unit": self.feature_unit(j),
                "width": float(self.scale[j]),
                "guess": float(self.guess_each[j]),
                "constant": self.constant(j),
                "below": int(below[j]),
                "of": int((~missing[:, j]).sum()),
                "missing": int(missing[:, j].sum()),
                "lowest": float(self._errors(information[row])[j]) if known else None,
                "record": int(records[row]) if known else None,
                "record_name": self.record_name(int(records[row])) if known else None,
            })  # fmt: skip
        return found

    def constant(self, j: int) -> bool:
        """Returns whether a column has one value in all records; 1e-12 allows for rounding in float64."""
        return bool(self.guess_each[j] <= 1e-12 * self.scale[j])

    def _below_guess(self) -> np.ndarray:
        """Returns whether the floor of a record's column is below a guess, (n, d), for `column_information`."""
        return np.asarray(self._errors(self.column_information[1]) < self.guess_each)

    @cached_property
    def exposed_in_some_column(self) -> tuple[int, int] | None:
        """Returns how many records have a column below a guess, and of how many; None where columns are unknown."""
        if self.image or len(self.column_information[0]) == 0:
            return None
        return int(self._below_guess().any(1).sum()), len(self.column_information[0])

    @property
    def lowest_by_column(self) -> np.ndarray | None:
        """Returns the lowest floor of each column over all records, (d,), in its own unit; NaN without any value."""
        found = [np.nan if c["lowest"] is None else c["lowest"] for c in self.columns]
        return np.array(found) if found else None

    def most_exposed_columns(self, floors: np.ndarray) -> list[int]:
        """Returns all columns, those first whose floor is lowest relative to the error of a guess."""
        with np.errstate(over="ignore"):  # a constant column has guess 0: no floor is low relative to it
            ratio = floors / np.maximum(self.guess_each, np.finfo(float).tiny)
        return [int(j) for j in np.argsort(ratio, kind="stable")]

    # --- the mechanism -------------------------------------------------------------------

    def line(self, name: str) -> float | None:
        """Returns the ± error of one of the calculator's floors, in this page's unit; None where there is none."""
        return line(self.run, name, self.unit)
