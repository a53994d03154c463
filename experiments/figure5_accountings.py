"""Where Theorem 1 crosses MSE = 1 on both grids, by the bound on a step's order-2 divergence that is put into it.

python experiments/figure5_accountings.py      from the rows of figure5_mnist.py and figure5_cifar10.py, in seconds"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

from figure5_cifar10 import GRID as CIFAR10
from figure5_cifar10 import LECUN_ROWS, STANDARD_ROWS
from figure5_mnist import GRID as MNIST
from figure5_mnist import ROWS

from reconbound.bounds import theorem1
from reconbound.renyi import order2_fixed, order2_paper, order2_poisson, sensitivity

#: (m, q) → ε₂ of a step, m being a clipped gradient's largest norm over the noise
BOUNDS: dict[str, Callable[[float, float], float]] = {
    "Poisson, add/remove, C (the paper's)": order2_paper,
    "Poisson, add/remove, 2C": lambda m, q: order2_paper(2 * m, q),
    "fixed size, Wang et al., C": lambda m, q: order2_fixed(m / 2, q),
    "fixed size, Wang et al., 2C": order2_fixed,
    "Poisson, replace-one, sound": order2_poisson,
}


def trained(paths: list[Path]) -> list[tuple[float, int, float]]:
    """Noise multiplier, steps and accuracy of each setting: the mean over runs where there are several."""
    rows = [row for path in paths for row in csv.DictReader(path.read_text().splitlines())]
    rows = [row for row in rows if row["sampler"] == "poisson"]
    wanted = "mean" if any(row["run"] == "mean" for row in rows) else "0"
    return [
        (float(r["noise_multiplier"]), int(r["steps"]), float(r["accuracy"])) for r in rows if r["run"] == wanted
    ]  # fmt: skip


def crossing(rows: list[tuple[float, int, float]], step: Callable[[float], float]) -> str:
    """The best accuracy with a floor of 1 or more; if there is none, the largest floor and the accuracy there."""
    each = {noise: step(noise) for noise in {noise for noise, _, _ in rows}}
    found = [(float(theorem1(steps * each[noise]).value), accuracy) for noise, steps, accuracy in rows]
    above = [accuracy for floor, accuracy in found if floor >= 1]
    if above:
        return f"{100 * max(above):.1f} %"
    floor, accuracy = max(found)
    return f"never: {floor:.2f} at most, at {100 * accuracy:.1f} %"


def main() -> None:
    grids = ((MNIST.rate, trained([ROWS])), (CIFAR10.rate, trained([STANDARD_ROWS, LECUN_ROWS])))
    print("| divergence of a step, sensitivity | clip | MNIST | CIFAR-10, pixels standardised |")
    print("| --- | --- | --- | --- |")
    for name, bound in BOUNDS.items():
        for clip in ("hard", "smooth"):
            reach = sensitivity(clip)
            cells = [
                crossing(rows, lambda noise, rate=rate, bound=bound, reach=reach: bound(reach / noise, rate))
                for rate, rows in grids
            ]
            print(f"| {name} | {clip} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
