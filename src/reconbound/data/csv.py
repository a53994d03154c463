"""CSV files: a header, columns of numbers or of categories, missing values. What is wrong is said by file, row, column.

Rows are counted as a spreadsheet counts them: the header is row 1."""

from __future__ import annotations

import csv
import gzip
import io
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from reconbound._internal.checks import DataError, DataMissing, DataShown, InputError
from reconbound.data.column_hints import tell_tale, undressed
from reconbound.data.dataset import Dataset, clean
from reconbound.data.split import Division
from reconbound.data.tables import CATEGORY_IS_PUBLIC, MOST_CLASS_NUMBERS, Column, like, listed, shown, table, wishes


@dataclass(frozen=True)
class Cells:
    """A CSV file's names of columns, cells of rows, numbers of rows as a spreadsheet counts, and decimal mark."""

    names: list[str]
    rows: list[list[str]]
    places: list[int]
    point: str = "."


#: From this share of numbers on, the other cells of a column are taken for mistakes.
MOSTLY = 0.9
ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
MISSING = frozenset({"", "?", "na", "n/a", "#n/a", "nan", "null"})  # whatever their case
UNNAMED = "row 1 names them; if it holds values, name the columns by --header A,B,..."
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE | re.ASCII)
#: Bytes that a packed file may unpack to: a few kilobytes can be made to hold far more than any memory.
MOST_UNPACKED = 2**30


def load_csv(
    path: str | os.PathLike[str],
    *,
    target: str | None,
    private: Sequence[str] | str | None = None,
    ranges: Mapping[str, Any] | None = None,
    units: Mapping[str, str] | None = None,
    drop: Sequence[str] | str | None = None,
    header: Sequence[str] | None = None,
    categories: Sequence[str] | str | None = None,
    division: Division | None = None,
) -> Dataset:
    """A table from a CSV file, plain or .gz; cells are parted by comma, semicolon or tab.

    A column is one of numbers if all its values are, or missing; else one of categories, but where nine of ten values
    are numbers the others are an error, unless it is asked for as one of categories. What was asked as private, or
    given a range, must be numbers.

    Args:
        target: the column to predict. private: columns to protect, or None for every one of numbers.
        ranges: {column: (lowest, highest)}. units: {column: "years"}. drop: columns to leave out.
        header: names of the columns of a file without a first row of names.
        categories: columns to take as categories whatever they hold."""
    file = os.fspath(path)
    cells = read_cells(path, header)
    names = cells.names
    left_out, texts = listed(drop or (), names), listed(categories or (), names)
    unnamed = "" if header is not None else f"; {UNNAMED}"
    if target is None:
        odd = unnamed if any(number_or_none(name) is not None for name in names) else ""
        raise InputError("target", f"must name the column of {file} to predict ({shown(names)}{odd})", target)
    target = clean(target)
    if target not in names:
        near = like(target, names)
        raise InputError("target", f"must be a column of {file} ({shown(names)}{unnamed}){near}", target)
    wish = wishes(names, private=private, ranges=ranges, units=units, target=target)
    for option, given in (("drop", left_out), ("category", texts)):
        for name in given:
            if name not in names:
                raise InputError(option, f"must name columns of {file} ({shown(names)}){like(name, names)}", name)
    notes: list[str] = []
    columns, aim = [], None
    asked = {**dict.fromkeys(wish.ranges, "has a range"), **dict.fromkeys(wish.private or (), "is private")}
    for k, name in enumerate(names):
        if name in left_out:
            if name in asked or name == target:
                raise InputError("drop", "must not name the target, a private column or one with a range", name)
            continue
        if name in texts:
            if name in asked:
                raise InputError("category", "must not name a private column or one with a range", name)
            column: Column | None = Column(name, np.array(_texts(cells, k), dtype=object))
        else:
            column = _column(file, cells, k, asked.get(name), notes, aimed=name == target)
        if name == target:
            _complete(file, cells, k)
            aim = column
        elif column is not None:
            columns.append(column)
            if name not in asked and (said_of_it := tell_tale(column)):
                notes.append(said_of_it)
    if aim is None:
        raise DataError(f"{file}, column {target!r}: every value of the target is missing")
    said = [f"row {place}" for place in cells.places]
    return table(
        clean(Path(file).name),
        columns,
        aim,
        wish,
        division or Division(),
        source=file,
        record_names=said,
        notes=notes,
    )


def read_cells(path: str | os.PathLike[str], header: Sequence[str] | None = None) -> Cells:
    """All cells of a CSV file, or what is wrong with it and where."""
    file, text = os.fspath(path), _text(Path(path))
    mark = _delimiter(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True, strict=True)
    names = None if header is None else _names(file, list(header), "--header")
    rows: list[list[str]] = []
    places: list[int] = []
    place = 0
    while True:
        place += 1
        try:
            row = next(reader)
        except StopIteration:
            break
        except csv.Error as reason:
            raise DataError(f"{file}, row {place} (line {reader.line_num}): not CSV ({reason})") from None
        if not any(cell.strip() for cell in row) and len(row) < 2:
            continue
        if names is None:
            names = _names(file, row)
        elif len(row) != len(names):
            line = "" if reader.line_num == place else f" (line {reader.line_num})"
            raise DataError(f"{file}, row {place}{line}: {len(row)} cells, but there are {len(names)} columns")
        else:
            rows.append([clean(cell) for cell in row])
            places.append(place)
    if names is None:
        raise DataError(f"{file}: empty")
    if not rows:
        raise DataError(f"{file}: names {len(names)} columns, but holds no rows")
    return Cells(names, rows, places, "," if mark == ";" else ".")


def _text(path: Path) -> str:
    try:
        raw = _unpacked(path) if path.name.lower().endswith(".gz") else path.read_bytes()
    except FileNotFoundError:
        raise DataMissing(f"{path} does not exist") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as reason:
        raise DataError(f"{path}: damaged or cut off ({reason})") from None
    except OSError as reason:
        raise DataError(f"{path}: cannot be read ({reason.strerror})") from None
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path}: written as UTF-16; save it as UTF-8")
    if (at := raw.find(0)) >= 0:
        raise DataError(f"{path}, line {raw.count(10, 0, at) + 1}: a NUL byte, so this is not a text file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as reason:
        line = raw.count(10, 0, reason.start) + 1
        raise DataError(f"{path}, line {line}: byte {raw[reason.start]:#04x} is not UTF-8; save it as UTF-8") from None


def _unpacked(path: Path) -> bytes:
    with gzip.open(path) as file:
        raw = file.read(MOST_UNPACKED + 1)
    if len(raw) > MOST_UNPACKED:
        raise DataError(
            f"{path}: unpacks to more than {MOST_UNPACKED >> 20:,} MB; unpack it first if it really holds that"
        )
    return raw


def _delimiter(text: str) -> str:
    """Comma, semicolon or tab: what stands most often in the first line that is not blank, outside quotes."""
    first = re.sub(r'"[^"]*"', "", next((line for line in text.splitlines() if line.strip()), ""))
    return max(",;\t", key=first.count)


def _names(file: str, row: Sequence[Any], place: str = "row 1") -> list[str]:
    """The header, with a name for nameless columns; no name may come twice."""
    names = [clean(str(cell)) or f"column {k + 1}" for k, cell in enumerate(row)]
    places: dict[str, int] = {}
    for k, name in enumerate(names):
        if places.setdefault(name, k) != k:
            first = places[name] + 1
            hint = f" ({UNNAMED})" if place == "row 1" else ""
            raise DataError(f"{file}, {place}: columns {first} and {k + 1} are both named {name!r}{hint}")
    return names


def _texts(cells: Cells, k: int) -> list[str]:
    """The cells of a column, "" where missing."""
    return ["" if row[k].lower() in MISSING else row[k] for row in cells.rows]


def _column(
    file: str, cells: Cells, k: int, asked: str | None, notes: list[str], *, aimed: bool = False
) -> Column | None:
    """Numbers, or categories, or nothing where every value is missing; numbers alone where the user asked for it so.

    A few words among numbers are refused, as the column would go public or missing; not so a target of few classes."""
    name, places = cells.names[k], cells.places
    texts = _texts(cells, k)
    known = sum(1 for text in texts if text)
    if not known:
        if asked:
            raise DataError(f"{file}, column {name!r}: every value is missing")
        notes.append(f"{name}: every value is missing, so it is left out")
        return None
    numeric = [number_or_none(text, cells.point) for text in texts]
    wrong = next((i for i, value in enumerate(numeric) if value is None), None)
    if wrong is not None:
        good = sum(1 for text, value in zip(texts, numeric, strict=True) if text and value is not None)
        few_classes = aimed and len(set(texts)) <= MOST_CLASS_NUMBERS
        if not few_classes:
            _dressed(file, cells, k, texts, numeric)
        if asked == "is private" and 2 * good <= known:
            raise DataError(f"{file}, column {name!r}: {CATEGORY_IS_PUBLIC}")
        if asked:
            place = f"{file}, row {places[wrong]}, column {name!r}"
            raise DataShown(f"{place}: {_short(texts[wrong])} is not a number, and the column {asked}")
        if good >= MOSTLY * known and not few_classes:
            place = f"{file}, row {places[wrong]}, column {name!r}"
            raise DataShown(
                f"{place}: {_short(texts[wrong])} is not a number, but {good:,} of {known:,} values are: mend "
                f"the cell or empty it, or say --category {name!r} or --drop {name!r}"
            )
        if 2 * good > known:
            notes.append(
                f"{name}: taken as categories, since row {places[wrong]} holds {_short(texts[wrong])}, "
                f"though {good:,} of {known:,} values are numbers"
            )
        return Column(name, np.array(texts, dtype=object))
    values = np.array(numeric, dtype=np.float64)
    if np.isinf(values).any():
        at = int(np.flatnonzero(np.isinf(values))[0])
        raise DataShown(f"{file}, row {places[at]}, column {name!r}: {_short(texts[at])} is not a finite number")
    return Column(name, values)


def _dressed(file: str, cells: Cells, k: int, texts: list[str], numeric: list[float | None]) -> None:
    """Refuse a column of numbers with signs of money, percent signs or marks of thousands.

    As text it would be a category, which is public, or be left out: neither is what its owner means."""
    meant = {i: plain for i, value in enumerate(numeric) if value is None and (plain := undressed(texts[i]))}
    known = sum(1 for text in texts if text)
    count = len(meant) + sum(1 for text, value in zip(texts, numeric, strict=True) if text and value is not None)
    if not meant or count < MOSTLY * known:
        return
    at, plain = next(iter(meant.items()))
    name = cells.names[k]
    raise DataShown(
        f"{file}, row {cells.places[at]}, column {name!r}: {_short(texts[at])} has a sign of money, a percent sign or "
        f"a mark of thousands, and would be taken as text: write it as {plain}, and so {len(meant):,} cells of the "
        f"column, or say --category {name!r} or --drop {name!r}"
    )


def number_or_none(text: str, point: str = ".") -> float | None:
    """The number that a cell spells, NaN where it is empty, None where it is no number."""
    if not text:
        return math.nan
    if point != "." and "." not in text:  # semicolons between cells go with commas within numbers
        text = text.replace(point, ".", 1)
    return float(text) if _NUMBER.fullmatch(text) else None


def _complete(file: str, cells: Cells, k: int) -> None:
    for row, place in zip(cells.rows, cells.places, strict=True):
        if row[k].lower() in MISSING:
            raise DataError(
                f"{file}, row {place}, column {cells.names[k]!r}: the target is missing; fill it in or "
                "leave the row out"
            )


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "...")
