"""A run and its leakage, read once: the numbers on the page, with their units."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from reconbound.data.tables import MISSING
from reconbound.mechanisms.base import read_protection
from reconbound.report.folder import Leakage, Run, floors, record_names
from reconbound.report.formats import clean, pixel_scale
from reconbound.report.success import Success

#: A floor at a smaller share of the range says nothing in practice.
NEGLIGIBLE = 1e-3
#: Why a record may have no useful confidence limit (View.upper_floor).
NO_LIMIT = "too few measurements (raise --budget) or too few runs (raise --runs)"


def quantile(values: np.ndarray, share: float) -> float:
    """Returns a quantile that some record has; 0 where there are none."""
    return float(np.quantile(values, share, method="lower")) if len(values) else 0.0


class View:
    """The numbers of a run and its leakage that the page shows.

    Errors are roots of squared errors, ± per feature: for images in pixel values, for tables as shares of a column's
    range, for one column (and for whole records that have only one) in its own unit.

    Args:
        run: of the folder.
        leakage: of its records.

    Attributes:
        run: of the folder.
        leakage: of its records.
        facts: about the data, as the leakage has them.
        success: the largest chances of success against each record.
        protection: what the mechanism itself guarantees, and whether that is meaningful.
        image: whether records are images that can be drawn.
        features: d, the number of private numbers of a record.
        single: whether a record of a table has only one private column: its floor is the record's.
        noun: the name of a record.
        part: the name of one private number of a record.
        private_parts: the name of all of them.
        scale: the size of one input unit in the data's own, (d,).
        offset: the data's values at the input 0, (d,).
        guess_each: the ± error of guessing each feature's average, (d,), in the feature's own unit.
        of_range: the unit of errors of whole records, in words.
        private: the places of the private numbers among a record's inputs; None for all.
        names: of all records as the page prints them; empty where they have none of their own.
        classes: whether the model predicts classes, and not a number.
        target_name: the name of what is predicted.
        accuracy: the test accuracy (R² for a number) at the end of the run; None where it was not measured.
        baseline_name: the name of a prediction that needs no model.
        unbiased: whether Fisher information was measured, and so floors for unbiased attackers.
        unit: the unit of errors of whole records, in input units: the range of the pixels, or of the one private
            column; 1 for tables with more.
        guess: the ± error of guessing the average record, mean square over the features.
        measured: which records have floors for unbiased attackers, (N,).
        records: N, the number of records that are shown: of very many some, and the most exposed ones.
        all_records: the number of training records.
        unknown: the number of records of which nothing is known: never measured.
        floor: the ± floor of each record, (N,), under the first rule; 0 where nothing is known.
        upper_floor: the same at the upper confidence limit of its leakage, (N,); None without limits. It is 0 where
            there is no limit, or only a useless one: below a thousandth of the range and a hundredth of a guess, as
            most limits from two runs are.
        shown: the ± floor of each record as it is shown first, (N,): the lower confidence limit where there is one,
            otherwise the estimate; 0 where nothing is known.
        limited: which records' floors have such a lower confidence limit, (N,).
        unlimited: the number of measured records without a useful upper limit; 0 after one run, when none has one.
        worst: the most exposed record among those measured, or None.
        lowest: the ± floor that no record is below, as it is shown first: the lowest lower confidence limit where the
            record most exposed by the estimates has one, otherwise that record's estimate.
        places: the position of each record among those kept whole.
    """

    def __init__(self, run: Run, leakage: Leakage) -> None:
        self.run, self.leakage, self.facts = run, leakage, leakage.facts
        self.success, self.protection = Success(run, leakage), read_protection(run.guarantee)
        self._describe_data()
        self._compute_floors()

    # --- what the data are -------------------------------------------------------------

    def _describe_data(self) -> None:
        facts, leakage = self.facts, self.leakage
        self.image = self.run.data.get("kind") == "image" and leakage.kept_inputs.ndim == 4
        self.features: int = leakage.guess.numel()
        self.single = not self.image and self.features == 1
        self.noun, self.part = ("image", "pixel") if self.image else ("record", "column")
        self.private_parts = "pixels" if self.image else "private columns" if self.features > 1 else "private column"
        self.scale, self.offset = (
            np.broadcast_to(np.asarray(facts.get(name, one), dtype=np.float64), self.features)
            if self.features  # otherwise Fisher information was not measured
            else np.empty(0)
            for name, one in (("scale", 1.0), ("offset", 0.0))
        )
        self.guess_each = np.asarray(self.scale * np.sqrt(np.nan_to_num(leakage.guess.double().numpy())))
        if self.single:
            self.of_range = self.feature_unit(0) or f"in units of {self.feature_name(0)}"
        elif self.image and self.features:
            self.of_range = pixel_scale(float(self.offset[0]), float(self.offset[0] + self.scale[0]))
        else:
            self.of_range = "of a column’s range"
        columns = facts.get("private")
        self.private = None if columns is None else np.asarray(columns, dtype=np.int64)
        self.names = [clean(name, 80) for name in record_names(leakage.names)]
        self.classes = bool(facts.get("task", "classes") == "classes")
        self.target_name = clean(facts.get("target_name") or "class", 60)
        self.baseline_name = "majority class" if self.classes else "predicting the mean"
        last = float(leakage.accuracy[-1]) if leakage.accuracy.numel() else math.nan
        self.accuracy = last if math.isfinite(last) else None
        self.places = {int(record): place for place, record in enumerate(leakage.kept.tolist())}

    def feature_name(self, j: int) -> str:
        names = self.facts.get("feature_names") or ()
        return clean(names[j]) if j < len(names) else f"{self.part} {j}"

    def feature_unit(self, j: int) -> str:
        """Returns the column's unit; nothing where it has none and runs from 0 to 1."""
        units = self.facts.get("units") or ()
        unit = units if isinstance(units, str) else units[j] if j < len(units) else ""
        return clean(unit or "", 40)

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

    def format_accuracy(self, accuracy: float) -> str:
        return f"{100 * accuracy:.1f} %" if self.classes else f"{accuracy:.3f}"

    def class_name(self, k: int) -> str:
        names = self.facts.get("class_names") or ()
        return clean(names[k]) if 0 <= k < len(names) else str(k)

    # --- whole records -----------------------------------------------------------------

    def _compute_floors(self) -> None:
        leakage, tiny = self.leakage, np.finfo(float).tiny
        self.unbiased = len(leakage.dfil) > 0
        self.unit = float(self.scale[0]) if self.unbiased and (self.image or self.single) else 1.0
        known = np.nan_to_num(leakage.guess.double().numpy())
        self.guess = self.unit * float(np.sqrt(known.mean())) if known.size else 0.0
        self.measured: np.ndarray = (leakage.measured.numpy() > 0) & self.unbiased
        self.all_records = int(leakage.facts.get("shown_of", len(self.measured)))
        self.records, self.unknown = len(self.measured), int((~self.measured).sum())
        self.floor = np.zeros(self.records)
        if self.unbiased:
            self.floor = np.asarray(self.unit * np.sqrt(np.nan_to_num(floors(leakage).double().numpy(), nan=0.0)))
        self.upper_floor, self.shown, self.unlimited = None, self.floor, 0
        self.limited = np.zeros(self.records, dtype=bool)
        if leakage.upper is not None:
            upper = np.nan_to_num(leakage.upper[0].double().numpy(), nan=np.inf, posinf=np.inf)
            with np.errstate(divide="ignore"):
                found = self.unit / np.sqrt(np.maximum(upper, tiny))
            useful = found >= min(NEGLIGIBLE * self.unit, 0.01 * self.guess)
            self.upper_floor = np.where(np.isfinite(upper) & self.measured & useful, found, 0.0)
            self.limited = self.upper_floor > 0
            self.shown = np.where(self.limited, self.upper_floor, self.floor)
            self.unlimited = int((self.measured & ~self.limited).sum())
        self.worst, self.lowest = None, 0.0
        if self.measured.any():
            self.worst = int(np.argmin(np.where(self.measured, self.floor, np.inf)))
            self.lowest = float(self.floor[self.worst])
            if self.limited[self.worst]:
                self.lowest = float(self.shown[self.limited].min())

    @property
    def level(self) -> str:
        """Returns the confidence of the limits, in words."""
        return f"{100 * float(self.facts.get('confidence', 0.95)):g} %"

    @property
    def basis(self) -> str:
        """Says, as part of a sentence, what `shown` is for the records that were measured."""
        if not self.limited.any():
            return "by estimates"
        return f"at {self.level} confidence{', or by an estimate where there is no limit' if self.unlimited else ''}"

    def floor_error(self, record: int) -> float | None:
        """Returns the standard error of a record's ± floor; None beyond 100 %.

        By the delta method it is half the relative error of dFIL.
        """
        if not self.measured[record]:
            return None
        dfil, error = float(self.leakage.dfil[0, record]), float(self.leakage.error[0, record])
        return 0.5 * (error / dfil) * float(self.floor[record]) if error <= dfil > 0 and math.isfinite(error) else None

    def below(self, threshold: float) -> int:
        """Returns the number of records with a lower floor, as `shown`; those never measured count."""
        return int((self.shown < threshold).sum())

    def group_floor(self, rows: list[int]) -> float:
        """Returns the ± floor of somebody who has these rows, as it is shown first: 1/√(k Σ dFIL).

        See FisherAccountant.group_floor. It is 0 where one of them was never measured.
        """
        own = self.shown[rows] / self.unit
        return 0.0 if not (own > 0).all() else self.unit / float(np.sqrt(len(rows) * (1 / own**2).sum()))

    # --- features of the records kept whole ----------------------------------------------

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

    def feature_floors(self, record: int | None) -> np.ndarray | None:
        """Returns the ± floor of each feature, (d,), in its own unit, for a record or (None) for the average one.

        It is NaN where the value is missing. Returns None where it is not known.
        """
        if record is None:
            average = self.leakage.average_diagonal
            return None if average is None else self._errors(np.nan_to_num(average.flatten().double().numpy()))
        records, information = self.column_information
        rows = np.flatnonzero(records == record)
        return self._errors(information[rows[0]]) if len(rows) else None

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
