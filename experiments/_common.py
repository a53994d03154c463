"""What the experiments share: data folder, results folder, tables."""

from __future__ import annotations

import csv
import gzip
import io
import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from reconbound.data import data_folder, mnist

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "experiments" / "results"

plt.rcParams.update({"figure.dpi": 110, "savefig.dpi": 160, "font.size": 10, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False, "pdf.fonttype": 42})
BLUE, RED, GREY, GREEN = "#2b6ca3", "#c8352b", "#777777", "#3a8f4d"


def folder() -> Path:
    """RECONBOUND_DATA, or shared/data beside the repository."""
    return data_folder(os.environ.get("RECONBOUND_DATA") or ROOT / ".." / "shared" / "data")


def digits(*, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """MNIST's 0 and 1: pixels in [0, 1], (N, 784), and labels as numbers."""
    x, y = mnist(folder(), train=train)
    keep = y < 2
    return x[keep].reshape(-1, 784) / 255.0, y[keep].astype(float)


def save(figure: Figure, name: str) -> None:
    """PNG and PDF under experiments/results."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    figure.savefig(RESULTS / f"{name}.png", bbox_inches="tight")
    figure.savefig(RESULTS / f"{name}.pdf", bbox_inches="tight", metadata={"CreationDate": None})
    plt.close(figure)


def write(
    name: str, columns: dict[str, Sequence[object] | np.ndarray], *, digits: int = 5, compress: bool = False
) -> None:
    """Columns to a CSV file under experiments/results, or .csv.gz, which NumPy and pandas read as it is."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.{digits}g}" if isinstance(v, float | np.floating) else v for v in row])
    raw = text.getvalue().encode()
    if compress:
        (RESULTS / f"{name}.csv.gz").write_bytes(gzip.compress(raw, mtime=0))
    else:
        (RESULTS / f"{name}.csv").write_bytes(raw)


def table(name: str, title: str, rows: list[tuple[str, str, str]]) -> None:
    """ "what | paper | ours", printed and kept as CSV."""
    print(f"\n{title}\n\n| | paper | ours |\n| --- | --- | --- |")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    write(f"{name}_table", {k: [row[i] for row in rows] for i, k in enumerate(("what", "paper", "ours"))})
