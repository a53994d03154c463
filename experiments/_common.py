"""What the experiments share: data folder, results folder, tables."""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from reconbound._internal.checks import DataError, DataMissing
from reconbound.data import data_folder, mnist

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"

plt.rcParams.update({"figure.dpi": 110, "savefig.dpi": 160, "font.size": 10, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False, "pdf.fonttype": 42})
BLUE, RED, GREY, GREEN = "#2b6ca3", "#c8352b", "#777777", "#3a8f4d"


def folder() -> Path:
    """RECONBOUND_DATA, or shared/data beside the repository."""
    beside = ROOT.parent / "shared" / "data"
    if not os.environ.get("RECONBOUND_DATA") and not beside.is_dir():
        raise DataMissing("no data: set the variable RECONBOUND_DATA to a folder that holds mnist/ and adult/")
    return data_folder(os.environ.get("RECONBOUND_DATA") or beside)


def digits(*, train: bool = True, records: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """MNIST's 0 and 1, the first `records` of them or all: pixels in [0, 1], (N, 784), and labels as numbers."""
    x, y = mnist(folder(), train=train)
    keep = first(np.flatnonzero(y < 2), records)
    return x[keep].reshape(-1, 784) / 255.0, y[keep].astype(float)


def first(rows: np.ndarray, records: int | None) -> np.ndarray:
    """The first so many rows, all where no number is given; an error where there are not so many."""
    if records is not None and records > len(rows):
        raise DataError(f"--records {records}: there are {len(rows)}")
    return rows[:records]


def options(about: str) -> argparse.ArgumentParser:
    """A parser with --help, --out and --records: what the scripts of the linear models have in common."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument(
        "--out", type=Path, default=RESULTS, metavar="FOLDER", help="where to write (default: experiments/results)"
    )
    parser.add_argument(
        "--records",
        type=at_least(16),
        metavar="N",
        help="only the first N training records, at least 16 (default: all)",
    )
    return parser


def at_least(least: int) -> Callable[[str], int]:
    """A type for argparse: whole numbers from `least` on."""

    def whole_number(word: str) -> int:
        if not word.isdecimal() or int(word) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number of at least {least}, not {word!r}")
        return int(word)

    return whole_number


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str] | None, sizes: Sequence[str] = ("records",)
) -> argparse.Namespace:
    """The options given, the folder made. A run of another size does not go where the committed results are."""
    given = parser.parse_args(words)
    other = [f"--{name} {getattr(given, name)}" for name in sizes if getattr(given, name) != parser.get_default(name)]
    if other and given.out.resolve() == RESULTS.resolve():
        parser.error(f"{' '.join(other)} would overwrite the full-size results: give another folder by --out FOLDER")
    try:
        given.out.mkdir(parents=True, exist_ok=True)
    except OSError as reason:
        parser.error(f"--out {given.out}: {reason.strerror}")
    return given


def run(main: Callable[[], None]) -> None:
    """Call it; data that is missing or damaged ends it with one line."""
    try:
        main()
    except DataError as problem:
        sys.exit(f"{Path(sys.argv[0]).name}: {problem}")


def save(figure: Figure, name: str, out: Path = RESULTS) -> None:
    """PNG and PDF in the folder."""
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / f"{name}.png", bbox_inches="tight")
    figure.savefig(out / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})
    plt.close(figure)


def write(
    name: str,
    columns: dict[str, Sequence[object] | np.ndarray],
    out: Path = RESULTS,
    *,
    digits: int = 5,
    compress: bool = False,
) -> None:
    """Columns to a CSV file in the folder, or .csv.gz, which NumPy and pandas read as it is."""
    out.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.{digits}g}" if isinstance(v, float | np.floating) else v for v in row])
    raw = text.getvalue().encode()
    if compress:
        (out / f"{name}.csv.gz").write_bytes(gzip.compress(raw, mtime=0))
    else:
        (out / f"{name}.csv").write_bytes(raw)


def table(name: str, title: str, rows: list[tuple[str, str, str]], out: Path = RESULTS) -> None:
    """ "what | paper | ours", printed and kept as CSV."""
    print(f"\n{title}\n\n| | paper | ours |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    write(f"{name}_table", {k: [row[i] for row in rows] for i, k in enumerate(("what", "paper", "ours"))}, out)
