"""Tables from CSV files, Parquet files and pandas DataFrames: columns of numbers or of categories, missing values.

What is wrong is reported by table, row and column; a row is named by the label of its index.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from reconbound._internal.checks import DataError, DataMissing, DataShown, InputError
from reconbound.data import csv, tables
from reconbound.data.dataset import DataOptions, Dataset, clean

if TYPE_CHECKING:
    from pandas import DataFrame, Series


#: Fewer values than this tell nothing of a column.
FEWEST = 10
_DATE = re.compile(r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/.])\d{1,2}\3(\d{4}|\d{2}))([T ]\d.*)?", re.ASCII)
#: How a date becomes a number.
AS_NUMBER = "a year, days since a day"
_IDENTIFIER = ("id", "index", "nr", "number")
_MONEY = r"(?:[$€£¥₹]|USD|EUR|GBP|CHF|JPY)"
_DRESSED = re.compile(
    rf"(?P<minus>[-−(])?\s?{_MONEY}?\s?(?P<sign>[+-])?(?P<whole>\d{{1,3}}(?:[,.' _\u00a0\u202f]\d{{3}})+|\d+)"
    rf"(?P<rest>[.,]\d+)?\s?(?:{_MONEY}|%)?\s?\)?",
    re.IGNORECASE | re.ASCII,
)
_MEASURE = re.compile(r"[+-]?\d+(?:[.,]\d+)?\s?([^\W\d_]{1,12})\.?")


def describe_column(column: tables.Column, *, asked: bool = False) -> str | None:
    """Returns what the owner should know of a column; None where nothing is odd.

    Whole numbers that may be an identifier; dates in text; numbers with the same word after them, few enough to be
    taken as categories.

    Args:
        column: as read.
        asked: whether it was asked for by name, as private or with a range.
    """
    if column.numeric:
        return None if asked else _describe_identifier(column)
    known, kinds = Counter(text for text in column.values if text), len(set(column.values))
    if known and sum(n for text, n in known.items() if _DATE.fullmatch(text)) >= MOSTLY * known.total():
        values, advice = "text that looks like dates", f"write it as a number ({AS_NUMBER})"
        if kinds > tables.MOST_CATEGORIES and not asked:
            return f"{column.name}: {values}; to use and protect it {advice}"
    else:
        if known.total() < FEWEST or not FEWEST < kinds <= tables.MOST_CATEGORIES:
            return None
        words: Counter[str] = Counter()
        for text, count in known.items():
            if found := _MEASURE.fullmatch(text):
                words[found[1]] += count
        word, often = words.most_common(1)[0] if words else ("", 0)
        if often < MOSTLY * known.total():
            return None
        values, advice = f"numbers with {word!r} after them", f"leave the word away (--unit {column.name}={word})"
    if asked:
        return f"{column.name}: {values}, protected as a category. To protect it as a number {advice}"
    taken = f"{values}, taken as categories, which are public: the attacker is taken to know them"
    return f"{column.name}: {taken}. To protect it {advice}, or leave it out by --drop {column.name!r}"


def strip_signs(text: str) -> str | None:
    """Returns the number in a cell with a sign of money, a percent sign or marks of thousands; None for others.

    >>> strip_signs("$45,887.48"), strip_signs("12 %"), strip_signs("(3,000)"), strip_signs("1-2")
    ('45887.48', '12', '-3000', None)
    """
    found = _DRESSED.fullmatch(text)
    if found is None:
        return None
    minus = "-" if found["minus"] or found["sign"] == "-" else ""
    return minus + re.sub(r"\D", "", found["whole"]) + (found["rest"] or "").replace(",", ".")


def _describe_identifier(column: tables.Column) -> str | None:
    """Describes whole numbers, all different, that have no gap or a name like an identifier."""
    known = np.sort(column.values[~np.isnan(column.values)])
    if len(known) < FEWEST or not np.all(known == np.round(known)) or np.any(known[1:] == known[:-1]):
        return None
    consecutive = bool(np.all(np.diff(known) == 1))
    if not consecutive and not column.name.lower().endswith(_IDENTIFIER):
        return None
    which = "all different and without a gap" if consecutive else "all different"
    return (
        f"{column.name}: {len(known):,} whole numbers, {which}: an identifier? Leave it out by --drop {column.name!r}"
    )


PARQUET = ".parquet"
#: Why a column was asked for by name.
PRIVATE = "is private"
#: From this share of numbers on, the other cells of a column are taken for mistakes; of dates, for dates.
MOSTLY = 0.9
MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null"})  # whatever their case
#: Characters of a cell; the same limit as that of Python's reader of CSV files.
LONGEST = 131_072
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE | re.ASCII)
_CELL = (str, int, float, Decimal, date, time, np.generic)


@dataclass(frozen=True)
class Table:
    """Holds a frame while its columns are read.

    Attributes:
        source: what messages call it: a path, or "table".
        frame: the cells; columns have clean and different names.
        decimal: the decimal mark of numbers in text.
        hint: what messages add to the list of columns.
    """

    source: str
    frame: DataFrame
    decimal: str = "."
    hint: str = ""

    def place(self, row: int, name: str) -> str:
        """Returns where a cell is."""
        return f"{self.source}, {self.row_name(row)}, column {name!r}"

    def row_name(self, row: int) -> str:
        """Returns the name of a row, by its position."""
        return f"row {clean(str(self.frame.index[row]))[:60]}"


def load_file(path: str | os.PathLike[str], options: DataOptions) -> Dataset:
    """Returns the data set in a CSV or Parquet file."""
    file, place = os.fspath(path), Path(path)
    if file.lower().endswith(PARQUET):
        from reconbound.data import streaming

        options.refuse("is for CSV files", "header")
        if streaming.is_large(place):
            return streaming.load_large_parquet(place, options)
        table = Table(file, read_parquet(place, options.drop or ()))
    else:
        frame, decimal = csv.read_csv(place, options.header)
        table = Table(file, frame, decimal, "" if options.header is not None else f"; {csv.UNNAMED}")
    return _make_dataset(table, options)


def read_parquet(path: Path, dropped: Sequence[str] | str = ()) -> DataFrame:
    """Reads a Parquet file; columns of text come as text, columns of a dictionary type as categories.

    Columns that are left out are not read. So those of lists, structures or bytes are never read: a file of a kilobyte
    can be made to hold billions of numbers in one row.

    Args:
        path: of the file.
        dropped: columns to leave out.

    Raises:
        DataError: where the file is damaged, or holds more than 1 GB, or a column of another type.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if not path.exists():
            raise DataMissing(f"{path} does not exist")
        facts, schema = pq.read_metadata(path), pq.read_schema(path)
        stored = sum(facts.row_group(k).total_byte_size for k in range(facts.num_row_groups))
        if max(stored, 8 * facts.num_rows * facts.num_columns) > csv.MOST_UNPACKED:
            raise DataError(f"{path}: holds more than {csv.MOST_UNPACKED >> 20:,} MB; leave columns or rows out")
        names = csv.check_names(str(path), schema.names, "")
        left_out = tables.split_names(dropped, names)
        kept = [one for one, name in zip(schema, names, strict=True) if name not in left_out]
        for one in kept:
            if not (pa.types.is_primitive(one.type) or _is_text(one.type)):
                raise DataError(f"{path}, column {clean(one.name)!r}: {one.type} is neither a number nor text")
        texts = [f.name for f in kept if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        with pq.ParquetFile(path, read_dictionary=texts) as file:  # equal texts are kept once, however often they come
            frame: DataFrame = file.read([one.name for one in kept], use_threads=False).to_pandas(ignore_metadata=True)
            return frame.astype(dict.fromkeys(texts, object)).reindex(columns=schema.names)
    except (DataError, MemoryError):
        raise
    except Exception as reason:  # pyarrow has many ways to say that a file is damaged
        words = " ".join(str(reason).split())
        raise DataError(f"{path}: damaged or not a Parquet file ({words[:160]})") from None


def _is_text(kind: Any) -> bool:
    """Returns whether a Parquet column holds text, each once, or nothing at all, or numbers of more digits."""
    from pyarrow import types

    if types.is_dictionary(kind):
        return bool(types.is_primitive(kind.value_type) or _is_text(kind.value_type))
    known = (types.is_string, types.is_large_string, types.is_null, types.is_decimal)
    return any(test(kind) for test in known)


def load_frame(frame: DataFrame, options: DataOptions) -> Dataset:
    """Returns the data set in a DataFrame, which is left as it is."""
    options.refuse("is for CSV files", "header")
    names = csv.check_names("table", list(frame.columns), "")
    return _make_dataset(Table("table", frame.set_axis(names, axis=1)), options)


def _make_dataset(table: Table, options: DataOptions) -> Dataset:
    """Reads every column as numbers or categories; what has a range must be numbers."""
    source, names = table.source, list(table.frame.columns)
    if not len(table.frame):
        raise DataError(f"{source}: names {len(names)} columns, but holds no rows")
    target, settings, asked, dropped, as_text = check_options(table, options)
    notes: list[str] = []
    columns, aim = [], None
    for k, one in enumerate(names):
        if one in dropped:
            continue
        column = _read_column(table, table.frame.iloc[:, k], asked.get(one), notes, one in as_text, one == target)
        if one == target:
            aim = column
        elif column is not None:
            columns.append(column)
            if hint := describe_column(column, asked=one in asked):
                notes.append(hint)
    assert aim is not None  # a target without values is refused above
    rows = [table.row_name(row) for row in range(len(table.frame))]
    return tables.make_table(source, columns, aim, settings, options, record_names=rows, notes=notes)


class Asked(NamedTuple):
    """Options for a table's columns, checked.

    Attributes:
        target: the column to predict.
        settings: ranges, units and private columns.
        asked: why a column was asked for by name, by its name.
        dropped: columns to leave out.
        as_text: columns to take as categories.
    """

    target: str
    settings: tables.ColumnOptions
    asked: dict[str, str]
    dropped: tuple[str, ...]
    as_text: tuple[str, ...]


def check_options(table: Table, options: DataOptions) -> Asked:
    """Returns the options for a table's columns, checked against its names.

    Args:
        table: with the names; its cells are not read.
        options: as they were given.
    """
    source, names = table.source, list(table.frame.columns)
    target = _check_target(table, options.target)
    settings = tables.check_column_options(names, options, target)
    dropped, as_text = (tables.split_names(given or (), names) for given in (options.drop, options.categories))
    tables.check_names_exist("drop", dropped, names, source)
    tables.check_names_exist("category", as_text, names, source)
    asked = {**dict.fromkeys(settings.private or (), PRIVATE), **dict.fromkeys(settings.ranges, "has a range")}
    if refused := next((one for one in dropped if one in asked or one == target), None):
        raise InputError("drop", "must not name the target, a private column or one with a range", refused)
    if refused := next((one for one in as_text if one in settings.ranges), None):
        raise InputError("category", "must not name a column with a range", refused)
    return Asked(target, settings, asked, dropped, as_text)


def _check_target(table: Table, target: str | None) -> str:
    names = list(table.frame.columns)
    if target is None:
        hint = table.hint if any(parse_number(name) is not None for name in names) else ""
        must = f"must name the column of {table.source} to predict ({tables.format_names(names)}{hint})"
        raise InputError("target", must, None)
    if clean(target) not in names:
        near = tables.suggest_name(clean(target), names)
        what = f"must be a column of {table.source} ({tables.format_names(names)}{table.hint}){near}"
        raise InputError("target", what, clean(target))
    return clean(target)


def _read_column(
    table: Table, cells: Series, asked: str | None, notes: list[str], as_text: bool, is_target: bool
) -> tables.Column | None:
    """Returns numbers, or categories, or nothing where every value is missing.

    A few words among numbers are refused, as the column would become public or missing; not so in a target of few
    classes.

    Args:
        table: that the column is of.
        cells: of the column.
        asked: why words among its numbers are mistakes: "is private", or "has a range", which only numbers can have;
            None where it was not asked for.
        notes: gets what the owner should know.
        as_text: takes the column as categories, whatever it holds.
        is_target: refuses missing values.
    """
    from pandas import CategoricalDtype

    name = str(cells.name)
    values = None if as_text else _typed_numbers(cells)
    texts = read_texts(table, cells) if values is None else []
    missing = np.array([not text for text in texts]) if values is None else np.isnan(values)
    if is_target and missing.any():
        place = table.place(int(missing.argmax()), name)
        raise DataError(f"{place}: the target is missing; fill it in or leave the row out")
    if missing.all() and not as_text:
        if asked:
            raise DataError(f"{table.source}, column {name!r}: every value is missing")
        notes.append(f"{name}: every value is missing, so it is left out")
        return None
    if values is None and not as_text and isinstance(cells.dtype, CategoricalDtype):
        as_text = True
        if asked and asked != PRIVATE:
            raise DataError(f"{table.source}, column {name!r}: is of type category, and {asked}; make it numbers first")
    if values is None and not as_text:
        numbers = {text: parse_number(text, table.decimal) for text in set(texts)}
        if None in numbers.values():
            few_classes = is_target and len(numbers) <= tables.MOST_CLASS_NUMBERS
            words = {text for text, value in numbers.items() if value is None}
            _check_words(table, name, texts, words, asked, notes, few_classes)
        else:
            values = np.array([numbers[text] for text in texts], dtype=np.float64)
    if values is None:
        return tables.Column(name, np.array(texts, dtype=object))
    if np.isinf(values).any():
        row = int(np.isinf(values).argmax())
        raise DataShown(f"{table.place(row, name)}: {_shorten(str(cells.iloc[row]))} is not a finite number")
    return tables.Column(name, values)


def _typed_numbers(cells: Series) -> np.ndarray | None:
    """Returns the numbers of a column whose type is numeric, NaN where missing; None for other types."""
    from pandas.api.types import is_bool_dtype, is_complex_dtype, is_numeric_dtype

    kind = cells.dtype
    if not is_numeric_dtype(kind) or is_bool_dtype(kind) or is_complex_dtype(kind):
        return None
    return cells.to_numpy(dtype=np.float64, na_value=np.nan)


def read_texts(table: Table, cells: Series) -> list[str]:
    """Returns the cells of a column as clean text, "" where missing."""
    from pandas.api.types import is_datetime64_any_dtype

    if is_datetime64_any_dtype(cells.dtype):
        cells = cells.astype(str).where(cells.notna())  # without a time of day where there is none
    texts: list[str] = []
    known: dict[tuple[type, object], str] = {}  # in a small Parquet file one long text may be in millions of rows
    for row, (cell, missing) in enumerate(zip(cells.astype(object), cells.isna(), strict=True)):
        if missing:
            texts.append("")
            continue
        if not isinstance(cell, _CELL):
            kind = type(cell).__name__
            raise DataError(f"{table.place(row, str(cells.name))}: a {kind} is neither a number nor text")
        if (text := known.get((type(cell), cell))) is None:
            text = clean(str(cell))
            if len(text) > LONGEST:
                raise DataError(f"{table.place(row, str(cells.name))}: a text of more than {LONGEST:,} characters")
            text = known[type(cell), cell] = "" if text.lower() in MISSING else text
        texts.append(text)
    return texts


def _check_words(
    table: Table, name: str, texts: list[str], words: set[str], asked: str | None, notes: list[str], few_classes: bool
) -> None:
    """Refuses a column with words among numbers, or notes that it is taken as categories.

    So it refuses numbers with signs of money, percent signs or marks of thousands: as text they would be a category,
    which is public, or be left out, and neither is what their owner means.
    """
    wrong = [row for row, text in enumerate(texts) if text in words]
    known = sum(1 for text in texts if text)
    first, good = wrong[0], known - len(wrong)
    plain_of = {word: strip_signs(word) for word in words}
    meant = {row: plain for row in wrong if (plain := plain_of[texts[row]])}
    if meant and len(meant) + good >= MOSTLY * known and not few_classes:
        row, plain = next(iter(meant.items()))
        sign = f"{_shorten(texts[row])} has a sign of money, a percent sign or a mark of thousands"
        mend = f"write it as {plain}, and so {len(meant):,} cells of the column, or say {_options(name)}"
        raise DataShown(f"{table.place(row, name)}: {sign}, and would be taken as text: {mend}")
    if asked == PRIVATE and 2 * good <= known:
        return
    word = _shorten(texts[first])
    if asked:
        mend = f": mend the cell, or say --category {name!r}" if asked == PRIVATE else ""
        raise DataShown(f"{table.place(first, name)}: {word} is not a number, and the column {asked}{mend}")
    if good >= MOSTLY * known and not few_classes:
        numbers = f"{word} is not a number, but {good:,} of {known:,} values are"
        raise DataShown(f"{table.place(first, name)}: {numbers}: mend the cell, or say {_options(name)}")
    if 2 * good > known:
        reason = f"{table.row_name(first)} holds {word}, though {good:,} of {known:,} values are numbers"
        notes.append(f"{name}: taken as categories, since {reason}")


def _options(name: str) -> str:
    return f"--category {name!r} or --drop {name!r}"


def parse_number(text: str, decimal: str = ".") -> float | None:
    """Returns the number that a cell spells, NaN where it is empty, None where it is no number."""
    if not text:
        return math.nan
    if decimal != "." and "." not in text:
        text = text.replace(decimal, ".", 1)
    return float(text) if _NUMBER.fullmatch(text) else None


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
