"""Accuracy against every floor over a grid of trainings: rows with floors, the table "paper | ours", the picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from _common import BLUE, GREEN, GREY, RED, plt, save, table

from reconbound._internal.files import write_whole
from reconbound.bounds import theorem1
from reconbound.divergences import order2_paper, sensitivity
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.guarantee import FLOORS, floor

ORANGE, PURPLE = "#d98324", "#7b4fa3"
#: series: title in the table, column, whether the column is a dFIL (whose floor is its inverse)
SERIES = {
    "theorem1_paper": ("Theorem 1, add/remove as in the paper (RDP)", "theorem1_paper", False),
    "dfil_paper_max": ("largest dFIL, the paper's κ", "dfil_paper_max", True),
    "dfil_paper_cross": ("the same, one run's maximum looked up in the other", "dfil_paper_cross", True),
    "dfil_paper_p99": ("99 % of records, the paper's κ", "dfil_paper_p99", True),
    "dfil_paper_median": ("median record, the paper's κ", "dfil_paper_median", True),
    "theorem1": ("Theorem 1, sound (replace-one)", "theorem1", False),
    "corners": ("all corners (replace-one)", "corners", False),
    "dfil_own_max": ("largest dFIL, exact factor", "dfil_own_max", True),
    "dfil_own_cross": ("the same, one run's maximum looked up in the other", "dfil_own_cross", True),
    "dfil_own_p99": ("99 % of records, exact factor", "dfil_own_p99", True),
    "dfil_own_median": ("median record, exact factor", "dfil_own_median", True),
}
LOW = ("dfil_own_max", "dfil_paper_max", "dfil_own_cross", "dfil_paper_cross")  # where the floor 0.1 is of interest too
ANY = {"lecam": "Le Cam, any attacker", "rate_distortion": "rate–distortion, any attacker"}


@cache
def _floors(noise: float, rate: float, steps: int, sampler: str, dim: int) -> dict[str, float]:
    mechanism = SampledGaussian(noise, rate, steps, "smooth", sampler)
    found = {name: floor(name, mechanism, dim=dim) for name in FLOORS}
    return {name: 0.0 if bound is None else float(np.max(bound.value)) for name, bound in found.items()}


def completed(path: Path, rate: float, dim: int) -> list[dict[str, str]]:
    """The rows, with the calculator's floors of each setting put in; the file is rewritten with them."""
    rows = list(csv.DictReader(path.read_text().splitlines()))
    for row in rows:
        row["accuracy"] = f"{float(row['accuracy']):.5f}"
        found = _floors(float(row["noise_multiplier"]), rate, int(row["steps"]), row["sampler"], dim)
        row.update({name: f"{value:.6g}" for name, value in found.items()})
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(path, text.getvalue().encode(), mode=0o644)
    return rows


def series(rows: list[dict[str, str]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies and floors of those rows that have this one."""
    column, inverse = (name, False) if name in ANY else SERIES[name][1:]
    kept = [row for row in rows if row[column]]
    values = np.array([float(row[column]) for row in kept])
    with np.errstate(divide="ignore"):
        return np.array([float(row["accuracy"]) for row in kept]), 1 / values if inverse else values


def doubled(rows: list[dict[str, str]], rate: float) -> tuple[np.ndarray, np.ndarray]:
    """Accuracies, and Theorem 1 with the paper's add/remove divergence where a record's sensitivity is taken as 2C."""
    noise = np.array([float(row["noise_multiplier"]) for row in rows])
    steps = np.array([int(row["steps"]) for row in rows])
    step = {sigma: order2_paper(2 * sensitivity("smooth") / sigma, rate) for sigma in set(noise.tolist())}
    floors = [float(theorem1(t * step[sigma]).value) for sigma, t in zip(noise.tolist(), steps.tolist(), strict=True)]
    return np.array([float(row["accuracy"]) for row in rows]), np.array(floors)


def best(accuracy: np.ndarray, floors: np.ndarray, level: float) -> float | None:
    """The highest accuracy among settings whose floor is at least the level: where the frontier crosses it."""
    kept = accuracy[floors >= level]
    return float(kept.max()) if len(kept) else None


def front(accuracy: np.ndarray, floors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The Pareto front as a staircase from the highest accuracy down."""
    order = np.argsort(-accuracy)
    return accuracy[order], np.maximum.accumulate(floors[order])


def settled(groups: Sequence[list[dict[str, str]]]) -> list[dict[str, str]]:
    """A row for each setting of each group: the mean over runs where there is one, else its single run."""
    kept: dict[tuple[object, ...], dict[str, str]] = {}
    for i, group in enumerate(groups):
        for row in sorted(group, key=lambda row: row["run"] == "mean"):
            if row["sampler"] == "poisson" and row["run"] in ("0", "mean"):
                setting = (float(row[k]) for k in ("noise_multiplier", "max_grad_norm", "lr", "steps"))
                kept[(i, *setting)] = row
    return list(kept.values())


def report(
    groups: Sequence[Sequence[Path]],
    name: str,
    *,
    title: str,
    rate: float,
    dim: int,
    paper: dict[tuple[str, float], str],
    low: float,
    corner: str = "lower left",
    drawn: bool = True,
    more: Sequence[tuple[str, float, str]] = (),
) -> None:
    """The table and, if drawn, the picture of one data set's rows.

    groups: the files of each kind of training; a mean over runs stands in the place of a single run of its setting.
    paper: what it says of (series, level). more: further (series, level, what the level is)."""
    files = [[row for path in group for row in completed(path, rate, dim)] for group in groups]
    rows, whole = [row for group in files for row in group], settled(files)
    means = sum(row["run"] == "mean" for row in whole)
    runs = sorted({row["run"] for row in rows} - {"mean"}) if means == len(whole) else []
    counted = (
        f"{len(whole)}, {means} of them means of two runs"
        if 0 < means < len(whole)
        else f"{len(whole)}, {len(runs) or 1}"
    )
    lines = [("settings, runs of each", "", counted)]
    for key, (label, _, _) in SERIES.items():
        for level in (1.0, 0.1):
            said = paper.get((key, level), "")
            if level == 1.0 or said or key in LOW:
                lines.append(
                    (f"best accuracy with MSE floor ≥ {level:g}: {label}", said, _ours(rows, whole, runs, key, level))
                )
    for key, level, what in more:
        lines.append((f"best accuracy with {what}: {SERIES[key][0]}", "", _ours(rows, whole, runs, key, level)))
    lines.append(
        (
            "best accuracy with MSE floor ≥ 1: add/remove bound at sensitivity 2C",
            "",
            _percent(best(*doubled(whole, rate), 1.0)),
        )
    )
    for key, label in ANY.items():
        lines.append(
            (
                f"best accuracy with floor ≥ 0.1 (0.25 is a blind guess): {label}",
                "",
                _percent(best(*series(whole, key), 0.1)),
            )
        )
    lines += fixed_lines(rows)
    table(name, f"{title}: the accuracy at which the frontier crosses a floor", [r for r in lines if r[2]])
    if drawn:
        picture(whole, name, title, low=low, rate=rate, corner=corner)


def _ours(rows: list[dict[str, str]], whole: list[dict[str, str]], runs: list[str], key: str, level: float) -> str:
    """The crossing of the mean over runs, and those of each run alone."""
    accuracy, floors = series(whole, key)
    if not len(accuracy):
        return ""
    text = _percent(best(accuracy, floors, level))
    if runs and "cross" not in key and SERIES[key][2]:
        alone = [[r for r in rows if r["sampler"] == "poisson" and r["run"] == run] for run in runs]
        text += f" (single runs: {', '.join(_percent(best(*series(part, key), level)) for part in alone)})"
    return text


def fixed_lines(rows: list[dict[str, str]]) -> list[tuple[str, str, str]]:
    """Fixed-size batches, the paper's sampler, beside Poisson batches of the same settings."""
    key = lambda row: tuple(row[k] for k in ("noise_multiplier", "max_grad_norm", "lr", "steps"))  # noqa: E731
    means = [row for row in rows if row["run"] == "mean"]
    fixed = {key(row): row for row in means if row["sampler"] == "fixed"}
    pairs = [(fixed[key(row)], row) for row in means if row["sampler"] == "poisson" and key(row) in fixed]
    if not pairs:
        return []
    gap = np.array([float(f["accuracy"]) - float(p["accuracy"]) for f, p in pairs])
    lines = [
        (
            f"fixed-size minus Poisson accuracy, {len(pairs)} settings: mean, largest",
            "",
            f"{100 * gap.mean():+.2f}, {100 * np.abs(gap).max():.2f} points",
        )
    ]
    for q in ("median", "p99", "max"):
        ratio = np.log([float(f[f"dfil_paper_{q}"]) / float(p[f"dfil_paper_{q}"]) for f, p in pairs])
        lines.append(
            (
                f"fixed-size over Poisson dFIL by κ, {q} over records: geometric mean, range",
                "",
                f"{np.exp(ratio.mean()):.2f}, {np.exp(ratio.min()):.2f} to {np.exp(ratio.max()):.2f}",
            )
        )
    proved = np.log([float(f["dfil_own_max"]) / float(f["dfil_paper_max"]) for f, _ in pairs])
    lines.append(
        (
            "fixed-size batches: largest dFIL, the proved factor over κ: geometric mean",
            "",
            f"{np.exp(proved.mean()):.2f}",
        )
    )
    return lines


def _percent(value: float | None) -> str:
    return "never" if value is None else f"{100 * value:.2f} %"


def picture(rows: list[dict[str, str]], name: str, title: str, *, low: float, rate: float, corner: str) -> None:
    """Each setting a point, each Pareto front a line: the paper's accounting on the left, ours on the right."""
    left = {
        "theorem1_paper": (BLUE, "RDP: Theorem 1, add/remove, C"),
        "dfil_paper_max": (RED, "largest dFIL, κ"),
        "dfil_paper_median": (ORANGE, "median dFIL, κ"),
    }
    right = {
        "theorem1": (BLUE, "Theorem 1, sound"),
        "corners": (PURPLE, "all corners, sound"),
        "dfil_own_max": (RED, "largest dFIL, exact"),
        "dfil_own_median": (ORANGE, "median dFIL, exact"),
        "rate_distortion": (GREEN, "any attacker (rate–distortion)"),
    }
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True)
    for axis, kinds, head in (
        (axes[0], left, "as the paper accounts"),
        (axes[1], right, "ours: sound, with the exact factor"),
    ):
        for key, (colour, label) in kinds.items():
            accuracy, floors = series(rows, key)
            kept = (accuracy >= low) & (floors > 0)
            axis.scatter(100 * accuracy[kept], floors[kept], s=7, color=colour, alpha=0.3, linewidths=0)
            x, y = front(accuracy, floors)
            kept = (x >= low) & (y > 0)
            axis.step(100 * x[kept], y[kept], where="post", color=colour, linewidth=1.6, label=label)
        if kinds is left:
            x, y = front(*doubled(rows, rate))
            kept = (x >= low) & (y > 0)
            label = "RDP at sensitivity 2C"
            axis.step(100 * x[kept], y[kept], ":", where="post", color=BLUE, linewidth=1.6, label=label)
        axis.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
        axis.set(yscale="log", xlabel="test accuracy, %", ylim=(1e-3, 1e5))
        axis.set_title(head, fontsize=10, loc="left")
        axis.legend(fontsize=8, loc=corner)
    axes[0].set_ylabel("floor under MSE per pixel")
    figure.suptitle(title, fontsize=10)
    save(figure, name)
