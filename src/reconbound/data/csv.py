"""CSV files as frames of text.

Python's own reader splits the cells because it is the only strict one: pandas' C reader fills short rows up, and
pyarrow's reads on to the end of the file where a quotation mark is not closed, both without a word.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconbound._internal.checks import DataError, DataMissing
from reconbound.data.dataset import clean

if TYPE_CHECKING:
    from pandas import DataFrame

ENDINGS = (".csv", ".csv.gz", ".tsv", ".tsv.gz")
UNNAMED = "row 1 names them; if it holds values, name the columns by --header A,B,..."
#: Bytes that a compressed file may hold: a few kilobytes can be made to hold more than any memory.
MOST_UNPACKED = 2**30


def read_csv(path: Path, header: Sequence[str] | None = None) -> tuple[DataFrame, str]:
    """Reads a CSV file, plain or .gz, whose cells are separated by commas, semicolons or tabs.

    Args:
        path: of the file.
        header: names of the columns of a file without a first row of names.

    Returns:
        The cells as text, by column; the index counts rows as a spreadsheet does, the header being row 1.
        The decimal mark: a comma where semicolons separate the cells.

    Raises:
        DataError: with the row of what is wrong.
    """
    from pandas import DataFrame

    text = _read_text(path)
    first = re.sub(r'"[^"]*"', "", next((line for line in text.splitlines() if line.strip()), ""))
    mark = max(",;\t", key=first.count)  # the most frequent in the first line that is not blank, outside quotes
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=mark, skipinitialspace=True, strict=True)
    names = None if header is None else check_names(str(path), list(header), "--header")
    rows: dict[int, list[str]] = {}
    place = 0
    try:
        for place, row in enumerate(reader, 1):
            if len(row) < 2 and not "".join(row).strip():
                continue
            if names is None:
                names = check_names(str(path), row)
            elif len(row) != len(names):
                line = "" if reader.line_num == place else f" (line {reader.line_num})"
                raise DataError(f"{path}, row {place}{line}: {len(row)} cells, but there are {len(names)} columns")
            else:
                rows[place] = row
    except csv.Error as reason:
        raise DataError(f"{path}, row {place + 1} (line {reader.line_num}): not CSV ({reason})") from None
    if names is None:
        raise DataError(f"{path}: empty")
    frame = DataFrame(list(rows.values()), index=list(rows), columns=names, dtype=object)
    return frame, "," if mark == ";" else "."


def _read_text(path: Path) -> str:
    try:
        raw = _unpack(path) if path.name.lower().endswith(".gz") else path.read_bytes()
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


def _unpack(path: Path) -> bytes:
    with gzip.open(path) as file:
        raw = file.read(MOST_UNPACKED + 1)
    if len(raw) > MOST_UNPACKED:
        raise DataError(f"{path}: unpacks to more than {MOST_UNPACKED >> 20:,} MB; unpack it first if that is right")
    return raw


def check_names(source: str, row: Sequence[Any], place: str = "row 1") -> list[str]:
    """Returns the names of columns as clean text, "column 3" for an empty one.

    Args:
        source: what messages call the table.
        row: the names as they stand there.
        place: where they stand.

    Raises:
        DataError: where two columns have one name.
    """
    names = [clean(str(cell)) or f"column {k + 1}" for k, cell in enumerate(row)]
    places: dict[str, int] = {}
    for k, name in enumerate(names):
        if places.setdefault(name, k) != k:
            first = places[name] + 1
            hint = f" ({UNNAMED})" if place == "row 1" else ""
            at = f", {place}" if place else ""
            raise DataError(f"{source}{at}: columns {first} and {k + 1} are both named {name!r}{hint}")
    return names
