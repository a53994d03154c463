"""Where Theorem 1 crosses MSE = 1 on both grids, by what the paper's words leave open: the bound on a step's order-2
divergence, the sensitivity of a record, and (CIFAR-10) the units of a pixel.

python experiments/figure5_accountings.py      from the rows of figure5_mnist.py and figure5_cifar10.py, in seconds"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from _frontier import best, series, settled
from cifar10_variants import ROWS as VARIANT_ROWS
from figure5_cifar10 import GRID as CIFAR10
from figure5_cifar10 import STANDARD_GROUPS
from figure5_mnist import GRID as MNIST
from figure5_mnist import ROWS

from reconbound.bounds import theorem1
from reconbound.divergences import order2_fixed, order2_paper, order2_poisson, sensitivity

#: (m, q) → ε₂ of a step, m being a clipped gradient's largest norm over the noise
BOUNDS: dict[str, Callable[[float, float], float]] = {
    "Poisson, add/remove, C": order2_paper,
    "Poisson, add/remove, 2C": lambda m, q: order2_paper(2 * m, q),
    "fixed size, Wang et al., C": lambda m, q: order2_fixed(m / 2, q, method="wang"),
    "fixed size, Wang et al., 2C": lambda m, q: order2_fixed(m, q, method="wang"),
    "Poisson, replace-one, sound": order2_poisson,
}
#: the width of a pixel's range: Theorem 1's diameter
UNITS = {"[0, 1]": 1.0, "[−1, 1]": 2.0, "standardised, width 4": 4.0}
Row = dict[str, str]


def read(groups: list[list[Path]]) -> list[Row]:
    """A row for each setting, as in the figure."""
    return settled([[r for path in of for r in csv.DictReader(path.read_text().splitlines())] for of in groups])


def crossing(rows: list[Row], step: Callable[[float], float], width: float = 1.0) -> str:
    """The best accuracy with a floor of 1 or more; if there is none, the largest floor and the accuracy there."""
    each = {noise: step(noise) for noise in {float(row["noise_multiplier"]) for row in rows}}
    found = [
        (
            float(theorem1(int(row["steps"]) * each[float(row["noise_multiplier"])], widths=width).value),
            float(row["accuracy"]),
        )
        for row in rows
    ]
    above = [accuracy for floor, accuracy in found if floor >= 1]
    if above:
        return f"{100 * max(above):.1f} %"
    floor, accuracy = max(found)
    return f"never: {floor:.2f} at most, at {100 * accuracy:.1f} %"


def by_floor(rows: list[Row], others: list[Row]) -> None:
    """The grid has no setting at MSE = 1: what it has around it, by Theorem 1 with the add/remove bound at C."""
    print("\nCIFAR-10, pixels in [0, 1], add/remove at C, hard clip: the settings around MSE = 1\n")
    print("| σ, T | floor | best accuracy in the figure | best with initial weights √(2/inputs), means over runs |")
    print("| --- | --- | --- | --- |")
    for noise, steps in ((2.0, 31250), (2.0, 37500), (1.0, 12500), (1.0, 18750), (1.0, 25000)):
        floor = float(theorem1(steps * order2_paper(1 / noise, CIFAR10.rate)).value)
        figure, found = ([r for r in of if (float(r["noise_multiplier"]), int(r["steps"])) == (noise, steps)]
                         for of in (rows, others))  # fmt: skip
        runs: dict[tuple[str, str], list[float]] = {}
        for row in found:
            if row["variant"] == "he, standard":
                runs.setdefault((row["max_grad_norm"], row["lr"]), []).append(float(row["accuracy"]))
        best_figure = max(float(row["accuracy"]) for row in figure)
        best_other = max((sum(v) / len(v) for v in runs.values()), default=None)
        shown = "" if best_other is None else f"{100 * best_other:.1f} %"
        print(f"| {noise:g}, {steps:,} | {floor:.2f} | {100 * best_figure:.1f} % | {shown} |")


def main() -> None:
    digits, photographs = read([[ROWS]]), read(STANDARD_GROUPS)
    columns = [("MNIST", MNIST.rate, digits, 1.0)]
    columns += [(f"CIFAR-10, pixels {name}", CIFAR10.rate, photographs, width) for name, width in UNITS.items()]
    print("Theorem 1: the best accuracy with a floor of MSE = 1 or more\n")
    print("| divergence of a step, sensitivity | clip |", " | ".join(name for name, *_ in columns), "|")
    print("| --- " * (2 + len(columns)) + "|")
    for name, bound in BOUNDS.items():
        for clip in ("hard", "smooth"):
            reach = sensitivity(clip)
            cells = [
                crossing(rows, lambda noise, rate=rate, bound=bound, reach=reach: bound(reach / noise, rate), width)
                for _, rate, rows, width in columns
            ]
            print(f"| {name} | {clip} | {' | '.join(cells)} |")
    print("\nThe largest dFIL by κ: the best accuracy with a floor of 1, of 0.1 (from above, then from below)\n")
    print("| data, units |", " | ".join(f"≥ {level:g}, {how}" for level in (1, 0.1) for how in ("max", "cross")), "|")
    print("| --- " * 5 + "|")
    for name, _, rows, width in columns:
        found = [
            best(*series(rows, f"dfil_paper_{how}"), level / width**2) for level in (1, 0.1) for how in ("max", "cross")
        ]
        print(f"| {name} |", " | ".join("never" if v is None else f"{100 * v:.1f} %" for v in found), "|")
    by_floor(photographs, list(csv.DictReader(VARIANT_ROWS.read_text().splitlines())))


if __name__ == "__main__":
    main()
