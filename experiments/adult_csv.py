"""Adult (1994 census) as a CSV file with a header, from the file that UCI distributes, ready for `reconbound audit`.

    python experiments/adult_csv.py adult.csv

The file is looked for in RECONBOUND_DATA/adult, plain or .gz. Ranges are round public constants (the file caps ages at
90, hours at 99 and gains at 99,999), so that nothing about the preparation depends on who is in it."""

import argparse
import csv
import gzip
import io
import os
import shlex
import sys
from pathlib import Path

from reconbound._internal.checks import DataError, DataMissing
from reconbound._internal.files import PUBLIC, write_whole
from reconbound.data import data_folder

COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education-num",
    "marital-status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital-gain",
    "capital-loss",
    "hours-per-week",
    "native-country",
    "income",
)
# the six columns of numbers: unit, lowest, highest
NUMBERS = {
    "age": ("years", 0, 100),
    "fnlwgt": ("people", 0, 1_500_000),  # how many people of the census this row stands for
    "education-num": ("steps", 1, 16),
    "capital-gain": ("dollars", 0, 100_000),
    "capital-loss": ("dollars", 0, 5_000),
    "hours-per-week": ("hours", 0, 100),
}
TARGET = "income"


def rows(folder: Path, name: str = "adult.data") -> list[list[str]]:
    """The people of one of UCI's two files, a list of 15 texts each; blank lines and the comment are left out."""
    plain = folder / name
    opener, path = (open, plain) if plain.exists() else (gzip.open, folder / f"{name}.gz")
    if not path.exists():
        raise DataMissing(f"{plain} (or .gz) does not exist")
    with opener(path, "rt") as file:
        people = [line.rstrip().rstrip(".").split(", ") for line in file if line.count(",") == len(COLUMNS) - 1]
    if not people:
        raise DataError(f"{path}: no row of {len(COLUMNS)} cells")
    return people


def options() -> list[str]:
    """Of `reconbound audit` and for all six columns of numbers as private."""
    words = ["--target", TARGET, "--private", ",".join(NUMBERS)]
    for name, (unit, low, high) in NUMBERS.items():
        words += ["--range", f"{name}={low}:{high}", "--unit", f"{name}={unit}"]
    return words


def write(out: str | os.PathLike[str], folder: Path) -> int:
    """Write the CSV file, whole or not at all; how many people it holds."""
    people, text = rows(folder), io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([COLUMNS, *people])
    write_whole(out, text.getvalue().encode(), mode=PUBLIC)
    return len(people)


def main() -> None:
    about, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=about, epilog=rest.rpartition("\n\n")[2])
    parser.add_argument("out", nargs="?", default="adult.csv", help="the file to write (default: adult.csv)")
    out = parser.parse_args().out
    try:
        count = write(out, data_folder() / "adult")
    except DataError as problem:
        sys.exit(f"adult_csv.py: {problem}")
    print(f"{out}: {count:,} people. To audit it:\n\nreconbound audit {shlex.quote(out)} {shlex.join(options())}")


if __name__ == "__main__":
    main()
