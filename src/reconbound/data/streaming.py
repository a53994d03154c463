"""Large Parquet tables, read in batches of rows and never whole: the same Dataset, with arrays in a file on disk.

The first pass finds what the columns are (ranges, categories, what is missing), the second reads the target, by which
rows are held out, and the third writes the model's inputs to a temporary file. That file has no name, so that nothing
is left behind even by a killed process. Its arrays are mapped into memory: the system keeps of them what there is room
for.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from reconbound._internal.checks import DataError, DataShown, InputError
from reconbound.data import csv, frames, tables
from reconbound.data.dataset import DataOptions, Dataset, Feature, clean

if TYPE_CHECKING:
    from pandas import DataFrame, Series

#: Cells above which a Parquet table is read in batches; smaller ones as one frame.
MOST_CELLS = 2**25
#: Rows of a batch.
BATCH = 2**18
#: Numbers of a column, of evenly spread rows, from which is said how far a few values stretch it.
SAMPLE = 2**20
_FEW = tables.MOST_CLASS_NUMBERS


class RowNames(Sequence[str]):
    """The names of rows, made when asked for: "row 17".

    Args:
        rows: their places in the table, from 0.
    """

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [f"row {row}" for row in self.rows[index].tolist()]
        return f"row {int(self.rows[index])}"


@dataclass
class _Found:
    """Facts of a column that the first pass finds.

    Attributes:
        name: of the column.
        numeric: whether it holds numbers.
        missing: how many rows have no value.
        outside: how many numbers lie outside the declared range.
        low, high: of the numbers.
        whole: whether all numbers are whole.
        few: the different numbers; None where there are more than _FEW.
        sample: numbers of evenly spread rows.
        texts: how often each text comes; None where there are more than MOST_CATEGORIES.
        first: the column in the first batch.
    """

    name: str
    numeric: bool
    missing: int = 0
    outside: int = 0
    low: float = np.inf
    high: float = -np.inf
    whole: bool = True
    few: set[float] | None = field(default_factory=set)
    sample: list[np.ndarray] = field(default_factory=list)
    texts: Counter[str] | None = field(default_factory=Counter)
    first: tables.Column | None = None

    def add_numbers(self, values: np.ndarray, every: int, ends: tuple[float, float] | None) -> None:
        """Adds the numbers of a batch, NaN where missing.

        Args:
            values: the numbers.
            every: every so many of them are in the sample.
            ends: of the declared range.
        """
        known = values[~np.isnan(values)]
        self.first = self.first or tables.Column(self.name, values)
        self.sample.append(values[::every])
        self.missing += len(values) - len(known)
        if ends is not None:
            self.outside += int(((known < ends[0]) | (known > ends[1])).sum())
        if len(known):
            self.low, self.high = min(self.low, float(known.min())), max(self.high, float(known.max()))
            self.whole = self.whole and bool(np.all(known == np.round(known)))
        if self.few is not None:
            self.few |= set(np.unique(known)[: _FEW + 1].tolist())
            self.few = self.few if len(self.few) <= _FEW else None

    def add_texts(self, texts: Sequence[str], counts: Sequence[int]) -> None:
        """Adds the texts of a batch, "" where missing, and how often each comes; one may be there twice."""
        found: Counter[str] = Counter()
        for text, count in zip(texts, counts, strict=True):
            if count:
                found[text] += count
        self.missing += found[""]
        if self.first is None:
            self.first = tables.Column(self.name, np.array(list(found.elements()), dtype=object))
        if self.texts is not None:
            self.texts += found
            self.texts = self.texts if len(self.texts) <= tables.MOST_CATEGORIES else None


def is_large(path: Path) -> bool:
    """Returns whether a Parquet file has so many cells that it is read in batches; False where it cannot be read."""
    import pyarrow.parquet as pq

    try:
        facts = pq.read_metadata(path)
    except Exception:  # the reader of small ones says what is wrong
        return False
    return bool(facts.num_rows * facts.num_columns > MOST_CELLS)


def load_large_parquet(path: Path, options: DataOptions) -> Dataset:
    """Returns the data set in a large Parquet file. Memory grows with its rows, some 60 bytes each, not its columns.

    Columns must be of numbers, text, or true and false. Numbers that are written as text are refused.

    Args:
        path: of the file.
        options: as for other tables.
    """
    try:
        return _Reader(path, options).dataset()
    except (DataError, InputError, MemoryError):
        raise
    except Exception as reason:  # pyarrow has many ways to say that a file is damaged
        if getattr(reason, "errno", None) == errno.ENOSPC:
            raise DataError(f"{path}: the disk of {tempfile.gettempdir()} is full; name another by TMPDIR") from None
        words = " ".join(str(reason).split())
        raise DataError(f"{path}: damaged or not a Parquet file ({words[:160]})") from None


class _Reader:
    """Reads a large table.

    Args:
        path: of the file.
        options: how to read it.
    """

    def __init__(self, path: Path, options: DataOptions) -> None:
        import pyarrow.parquet as pq
        from pandas import DataFrame
        from pyarrow import types

        self.path, self.source, self.options, self.notes = path, str(path), options, list[str]()
        schema, self.count = pq.read_schema(path), pq.read_metadata(path).num_rows
        names = csv.check_names(self.source, schema.names, "")
        if not self.count:
            raise DataError(f"{path}: names {len(names)} columns, but holds no rows")
        asked = frames.check_options(frames.Table(self.source, DataFrame(columns=names)), options)
        self.target, self.settings, self.asked, self.as_text = asked.target, asked.settings, asked.asked, asked.as_text
        self.columns: dict[str, str] = {}  # as they are called here → as the file calls them
        self.numeric: dict[str, bool] = {}
        for name, one in zip(names, schema, strict=True):
            kind = one.type.value_type if types.is_dictionary(one.type) else one.type
            number = types.is_integer(kind) or types.is_floating(kind)
            if name in asked.dropped:
                continue
            if not (number or types.is_string(kind) or types.is_large_string(kind) or types.is_boolean(kind)):
                what = f"of {one.type}: a table of so many cells must have numbers, text, or true and false"
                raise DataError(f"{path}, column {name!r}: {what}; convert it, or leave it out by --drop {name!r}")
            self.columns[name] = one.name
            self.numeric[name] = number and name not in self.as_text and not types.is_dictionary(one.type)

        self._check_room(4 * self.count)  # of one input: a small file can claim any number of rows

    def _check_room(self, needed: int) -> None:
        """Refuses a table whose inputs, of this many bytes at least, do not fit on the disk."""
        folder = tempfile.gettempdir()
        if needed > (free := shutil.disk_usage(folder).free):
            what = f"needs {needed / 1e9:.1f} GB in {folder}, where {free / 1e9:.1f} GB are free"
            raise DataError(f"{self.source}: {what}; name another folder by the environment variable TMPDIR")

    # --- batches -------------------------------------------------------------------------

    def _batches(self, names: Sequence[str]) -> Iterator[tuple[int, DataFrame]]:
        """Yields the place of the first row and the frame of each batch, with these columns only."""
        import pyarrow.parquet as pq

        own = [self.columns[name] for name in names]
        texts, at = [self.columns[name] for name in names if not self.numeric[name]], 0
        with pq.ParquetFile(self.path, read_dictionary=texts, pre_buffer=False) as file:
            for batch in file.iter_batches(BATCH, columns=own, use_threads=False):
                frame = batch.to_pandas(ignore_metadata=True)[own].set_axis(list(names), axis=1)
                yield at, frame
                at += len(frame)
        if at != self.count:
            raise DataError(f"{self.path}: holds {at:,} rows, but names {self.count:,}")

    def _place(self, name: str, row: int) -> str:
        return f"{self.source}, row {row}, column {name!r}"

    def _numbers(self, cells: Series, at: int) -> np.ndarray:
        """Returns the numbers of a batch's column, NaN where missing; refuses infinite ones."""
        values = np.asarray(cells.to_numpy(dtype=np.float64, na_value=np.nan))
        if np.isinf(values).any():
            row = int(np.isinf(values).argmax())
            raise DataShown(f"{self._place(str(cells.name), at + row)}: {values[row]} is not a finite number")
        return values

    def _texts(self, cells: Series) -> tuple[list[str], np.ndarray]:
        """Returns the different texts of a batch's column, "" the last, and the place of each cell among them."""
        from pandas import Series as Values
        from pandas.api.types import is_float_dtype

        different = cells.astype("category").cat
        known = Values(different.categories, name=str(cells.name))
        if is_float_dtype(known.dtype) and bool(cells.isna().any()):
            what = "a column of numbers with missing values cannot be a category here: write it as text"
            raise DataError(f"{self.source}, column {cells.name!r}: {what}")
        texts = frames.read_texts(frames.Table(self.source, known.to_frame()), known)
        return [*texts, ""], different.codes.to_numpy()  # −1, missing, is the last

    # --- what the columns are ------------------------------------------------------------

    def _read_facts(self) -> dict[str, _Found]:
        found = {name: _Found(name, numeric) for name, numeric in self.numeric.items()}
        every = max(1, self.count // SAMPLE)
        for at, frame in self._batches(list(self.columns)):
            for name, column in found.items():
                before = column.missing
                if column.numeric:
                    column.add_numbers(self._numbers(frame[name], at), every, self.settings.ranges.get(name))
                elif column.texts is not None:
                    texts, codes = self._texts(frame[name])
                    column.add_texts(texts, np.bincount(codes % len(texts), minlength=len(texts)).tolist())
                if name == self.target and column.missing > before:
                    gone = frame[name].isna() if column.numeric else np.array(texts, dtype=object)[codes] == ""
                    place = self._place(name, at + int(np.argmax(np.asarray(gone))))
                    raise DataError(f"{place}: the target is missing; fill it in or leave the row out")
        return found

    def _check(self, column: _Found) -> bool:
        """Returns whether a column is used; notes what its owner should know, and refuses mistakes."""
        name, asked = column.name, self.asked.get(column.name)
        where = f"{self.source}, column {name!r}"
        if column.missing == self.count and name not in self.as_text:
            if asked:
                raise DataError(f"{where}: every value is missing")
            self.notes.append(f"{name}: every value is missing, so it is left out")
            return False
        assert column.first is not None
        if not column.numeric:
            self._check_texts(column, where, asked)
        hint = None if name == self.target else frames.describe_column(column.first, asked=asked is not None)
        if hint:
            self.notes.append(f"{hint} (in the first {min(BATCH, self.count):,} rows)")
        if column.numeric or column.texts is not None:
            return True
        many = f"more than {tables.MOST_CATEGORIES} different texts"
        if asked or name == self.target:
            raise DataError(f"{where}: {many}: too many for a private category or a target")
        self.notes.append(f"{name}: {many}, so it is taken for an identifier or free text and left out")
        return False

    def _check_texts(self, column: _Found, where: str, asked: str | None) -> None:
        """Refuses numbers that are written as text, which would become public or be left out."""
        if column.name in self.as_text:
            return
        if asked and asked != frames.PRIVATE:
            raise DataError(f"{where}: is text, and {asked}; make it numbers first")
        assert column.first is not None
        texts = Counter(column.first.values.tolist()) if column.texts is None else column.texts
        known = sum(count for text, count in texts.items() if text)
        numbers = sum(n for text, n in texts.items() if text and frames.parse_number(text) is not None)
        meant = numbers + sum(
            n for text, n in texts.items() if text and not frames.parse_number(text) and frames.strip_signs(text)
        )
        if known and meant >= frames.MOSTLY * known:
            mend = f"write them as numbers, or say --category {column.name!r} or --drop {column.name!r}"
            raise DataError(
                f"{where}: numbers that are written as text are not read from a table of so many cells: {mend}"
            )
        if 2 * numbers > known:
            self.notes.append(f"{column.name}: taken as categories, though {numbers:,} of {known:,} values are numbers")

    # --- the data set --------------------------------------------------------------------

    def dataset(self) -> Dataset:
        """Returns the data set."""
        facts = self._read_facts()
        used = {name: column for name, column in facts.items() if self._check(column)}
        encoders: list[Callable[[DataFrame, int], np.ndarray]] = []
        features: list[Feature] = []
        for name, column in used.items():
            if name != self.target:
                encode, own = self._number(column) if column.numeric else self._category(column)
                encoders.append(encode)
                features.extend(own)
        if not any(feature.private for feature in features):
            raise DataError(
                f"{self.source}: no column of numbers to protect; name the categories to protect by --private"
            )
        read_target, class_names, aim = self._target_reader(used[self.target])
        task = "classes" if class_names else "number"
        targets = np.concatenate([read_target(frame, at) for at, frame in self._batches([self.target])])
        train, test = self.options.choose_rows(targets, task)
        use = np.zeros(self.count, dtype=np.int8)
        use[train], use[test] = 1, 2
        both = self._write([name for name in used if name != self.target], encoders, len(features), use)
        shared: dict[str, Any] = {"class_names": class_names, "target": aim, "notes": tuple(self.notes)}
        shared["record_names"] = RowNames(train.astype(np.int32 if self.count < 2**31 else np.int64))
        parts = (both[0], targets[train], both[1], targets[test])
        return Dataset(clean(self.path.name), "table", *parts, tuple(features), task, **shared)

    def _number(self, column: _Found) -> tuple[Callable[[DataFrame, int], np.ndarray], list[Feature]]:
        """Returns what encodes a column of numbers, as `tables.scale_numbers` does, and its features."""
        name = column.name
        asked = self.settings.private is not None and name in self.settings.private
        private = asked or self.settings.private is None
        sample = np.concatenate(column.sample)
        known = sample[~np.isnan(sample)]
        if self.count > SAMPLE:  # the ends are of all numbers
            known = np.append(known, [column.low, column.high] if column.low <= column.high else [])
        feature = tables.number_feature(self.source, name, known, self.settings, private, self.notes)
        present = self.count - column.missing
        if private and present > 9 and column.few is not None and len(column.few) < 3:
            self.notes.append(tables.describe_two_values(name, self.settings))
        if column.outside:
            self.notes.append(tables.describe_outside(feature, column.outside, self.count))
        marked = column.missing > 0
        features = [feature, tables.missing_mark(name)] if marked else [feature]
        return lambda frame, at: tables.scaled(self._numbers(frame[name], at), feature, marked), features

    def _category(self, column: _Found) -> tuple[Callable[[DataFrame, int], np.ndarray], list[Feature]]:
        """Returns what encodes a column of categories, as `tables.encode_categories` does, and its features."""
        assert column.texts is not None
        found = sorted(column.texts)
        private = self.settings.private is not None and column.name in self.settings.private
        if len(found) == 1:
            self.notes.append(f"{column.name}: every value is {found[0] or tables.MISSING!r}")
        places = {text: k for k, text in enumerate(found)}

        def encode(frame: DataFrame, at: int) -> np.ndarray:
            texts, codes = self._texts(frame[column.name])
            to = np.array([places.get(text, -1) for text in texts])
            ones: np.ndarray = to[codes].reshape(-1, 1) == np.arange(len(found))
            return ones

        return encode, tables.category_features(column.name, found, private)

    def _target_reader(self, column: _Found) -> tuple[Callable[[DataFrame, int], np.ndarray], tuple[str, ...], Feature]:
        """Returns what reads the target of a batch, the names of the classes (none for a number), and its feature."""
        name, unit = column.name, self.settings.units.get(column.name, "")
        public = Feature(name, unit, private=False)
        found: list[Any] = sorted(column.texts or ()) if not column.numeric else sorted(column.few or ())
        if found and len(found) < 2:
            what = f"the target is {found[0]!s} in every row: there is nothing to learn"
            raise DataShown(f"{self.source}, column {name!r}: {what}")
        if not column.numeric:
            places = {text: k for k, text in enumerate(found)}

            def of_texts(frame: DataFrame, at: int) -> np.ndarray:
                texts, codes = self._texts(frame[name])
                to = np.array([places.get(text, -1) for text in texts], dtype=np.int64)
                return np.asarray(to[codes])

            return of_texts, tuple(found), public
        if found and column.whole and name not in self.settings.ranges:
            numbers = np.array(found)
            return (
                lambda frame, at: np.searchsorted(numbers, self._numbers(frame[name], at)).astype(np.int64),
                tuple(f"{v:.0f}" for v in found),
                public,
            )
        before, self.settings = self.settings, tables.ColumnOptions(self.settings.ranges, self.settings.units, ())
        encode, (feature, *_) = self._number(column)
        self.settings = before
        return lambda frame, at: encode(frame, at)[:, 0].astype(np.float32), (), feature

    def _write(
        self, names: Sequence[str], encoders: Sequence[Callable[[DataFrame, int], np.ndarray]], width: int,
        use: np.ndarray,
    ) -> list[np.ndarray]:  # fmt: skip
        """Returns the inputs of the rows to train on and to test on, float32, mapped from files without a name."""
        self._check_room(4 * width * int((use > 0).sum()))
        files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115 - of mode 0600, and removed already
        for at, frame in self._batches(names):
            inputs = np.concatenate([encode(frame, at) for encode in encoders], axis=1, dtype=np.float32)
            own = use[at : at + len(frame)]
            for kind, file in enumerate(files, 1):
                file.write(inputs[own == kind].data)
        found = []
        for kind, file in enumerate(files, 1):
            file.flush()
            shape = (int((use == kind).sum()), width)
            found.append(np.memmap(file, np.float32, "r+", shape=shape) if shape[0] else np.zeros(shape, np.float32))
            file.close()
        return found
