"""The calculator beside other libraries on random mechanisms: riskcal, dp-accounting, and Opacus's accountants.

All of Poisson-sampled Gaussian steps under add/remove neighbours, which all of them count. The truth lies between
dp-accounting's optimistic and its pessimistic loss distribution. A number below the optimistic one promises too much.
Where a rate is between them and lower than ours, an inversion without any grid decides (tests/helpers/exact_losses.py).

    python benchmarks/peers.py [--count 50] [--seed 0] [--json results.json]

riskcal is left out, and the table says so, where it is not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution as distributions
from scipy.optimize import minimize_scalar

from reconbound.mechanisms import SampledGaussian

DELTA, RATES, GRID = 1e-5, (1e-4, 1e-2), 1e-4
ADD = "add/remove"
METRICS = ("ε at δ = 1e-5", "advantage", *(f"TPR at FPR {rate:g}" for rate in RATES))
HIGHEST = 60.0  # of ε: beyond it nobody needs a third digit, and grids are huge
SLACK = 1e-6  # what float64 and FFTs may take off a number
LOWER = 2e-4  # a rate that is lower than ours by this share is decided exactly


def random_mechanisms(count: int, seed: int) -> list[tuple[float, float, int]]:
    """Returns (noise multiplier, sample rate, steps), spread evenly in their logarithms; ε from 0.05 to HIGHEST."""
    rng, found = np.random.default_rng(seed), []
    while len(found) < count:
        noise, rate = math.exp(rng.uniform(math.log(0.5), math.log(8))), math.exp(rng.uniform(math.log(1e-3), 0.0))
        steps = round(math.exp(rng.uniform(0.0, math.log(2e4))))
        epsilon = SampledGaussian(noise, rate, steps, clip="hard").epsilon_at(DELTA, ADD)
        if epsilon is not None and 0.05 <= epsilon <= HIGHEST:
            found.append((round(noise, 3), float(f"{rate:.3g}"), steps))
    return found


def largest_tpr(pld: Any, fpr: float) -> float:
    """Returns the largest true-positive rate, by Neyman and Pearson on the losses of each direction."""
    worst = 0.0
    for pmf in (pld._pmf_remove, pld._pmf_add):
        dense = pmf.to_dense_pmf()
        losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization
        mass = np.clip(dense._probs, 0, None)[::-1]
        false = np.append(0.0, np.cumsum(mass * np.exp(-losses[::-1])))
        true = dense._infinity_mass + np.append(0.0, np.cumsum(mass))
        worst = max(worst, float(np.interp(fpr, false, true)))
    return min(worst, 1.0)


def from_pld(pld: Any) -> list[float]:
    """Returns all METRICS of a loss distribution."""
    rates = [largest_tpr(pld, rate) for rate in RATES]
    return [float(pld.get_epsilon_for_delta(DELTA)), float(pld.get_delta_for_epsilon(0.0)), *rates]


def dp_accounting(noise: float, rate: float, steps: int, pessimistic: bool) -> list[float]:
    one = distributions.from_gaussian_mechanism(
        noise,
        pessimistic_estimate=pessimistic,
        value_discretization_interval=GRID,
        sampling_prob=rate,
        use_connect_dots=pessimistic,
    )
    return from_pld(one.self_compose(steps))


def ours(noise: float, rate: float, steps: int) -> list[float]:
    found = SampledGaussian(noise, rate, steps, clip="hard")
    curve, epsilon = found.trade_off(ADD), found.epsilon_at(DELTA, ADD)
    assert curve is not None
    rates = [float(curve.tpr(fpr)) for fpr in RATES]
    return [math.inf if epsilon is None else epsilon, curve.advantage, *rates]


def riskcal(noise: float, rate: float, steps: int) -> list[float]:
    from riskcal.calibration.dpsgd import get_advantage_for_dpsgd, get_beta_for_dpsgd

    advantage = get_advantage_for_dpsgd(noise, rate, steps, grid_step=GRID)
    rates = [1 - float(get_beta_for_dpsgd(noise, rate, steps, alpha=fpr, grid_step=GRID)) for fpr in RATES]
    return [math.nan, float(advantage), *rates]


def opacus(kind: str) -> Callable[[float, float, int], list[float]]:
    def run(noise: float, rate: float, steps: int) -> list[float]:
        from opacus.accountants import create_accountant

        accountant = create_accountant(mechanism=kind)
        accountant.history = [(noise, rate, steps)]
        try:
            epsilon = float(accountant.get_epsilon(DELTA))
        except (ValueError, RuntimeError, OverflowError, MemoryError):  # PRV gives up on some
            epsilon = math.nan
        return [epsilon, *[math.nan] * (len(METRICS) - 1)]

    return run


def compare(mechanisms: list[tuple[float, float, int]]) -> dict[str, np.ndarray]:
    """Returns each library's METRICS, one row for each mechanism; NaN where it gives none."""
    libraries: dict[str, Callable[[float, float, int], list[float]]] = {
        "optimistic": lambda *m: dp_accounting(*m, pessimistic=False),
        "dp-accounting, pessimistic PLD": lambda *m: dp_accounting(*m, pessimistic=True),
        "reconbound": ours,
        "Opacus, PRV": opacus("prv"),
        "Opacus, RDP": opacus("rdp"),
        "Opacus, GDP": opacus("gdp"),
    }
    if importlib.util.find_spec("riskcal") is not None:
        libraries["riskcal"] = riskcal
    found: dict[str, list[list[float]]] = {name: [] for name in libraries}
    for mechanism in mechanisms:
        for name, run in libraries.items():
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                found[name].append(run(*mechanism))
    return {name: np.array(rows) for name, rows in found.items()}


def exact_tpr(noise: float, rate: float, steps: int, fpr: float) -> float:
    """Returns the largest true-positive rate, min over ε of e^ε fpr + δ(ε), of the worse direction, without a grid."""
    from exact_losses import Step, exact_delta

    def line(epsilon: float, kind: str) -> float:
        return math.exp(epsilon) * fpr + exact_delta([(Step(1 / noise, rate, kind), steps)], epsilon)

    settings: dict[str, Any] = {"bounds": (0.0, -math.log(fpr)), "method": "bounded", "options": {"xatol": 1e-4}}
    return max(float(minimize_scalar(line, args=(kind,), **settings).fun) for kind in ("remove", "add"))


def least_sound(mechanisms: list[tuple[float, float, int]], found: dict[str, np.ndarray]) -> np.ndarray:
    """Returns the smallest METRICS that can be true: the optimistic ones, and exact rates where one is below ours."""
    least = found["optimistic"].copy()
    for row, mechanism in enumerate(mechanisms):
        for column, fpr in enumerate(RATES, len(METRICS) - len(RATES)):
            own = found["reconbound"][row, column]
            others = [values[row, column] for name, values in found.items() if name != "optimistic"]
            if any(least[row, column] <= other < own * (1 - LOWER) for other in others):
                least[row, column] = exact_tpr(*mechanism, fpr)
    return least


def summary(found: dict[str, np.ndarray], smallest: np.ndarray) -> list[list[str]]:
    """Returns the table: for each metric and library, how often it promises too much, and its ratio to ours.

    Args:
        found: each library's METRICS.
        smallest: the METRICS below which a number promises too much.
    """
    rows = []
    for i, metric in enumerate(METRICS):
        least, own = smallest[:, i], found["reconbound"][:, i]
        for name, values in found.items():
            given = ~np.isnan(values[:, i])
            if name == "optimistic" or not given.any():
                continue
            sound = values[:, i] >= least * (1 - SLACK) - 1e-12
            ratio = values[given & sound, i] / own[given & sound]
            span = f"{ratio.min():.5f} to {ratio.max():.5f}, median {np.median(ratio):.5f}" if ratio.size else ""
            rows.append([metric, name, str(int(given.sum())), str(int((given & ~sound).sum())), span])
    if "riskcal" not in found:
        rows.append(["", "riskcal", "not installed", "", ""])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=50, help="mechanisms")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write all numbers here")
    options = parser.parse_args()
    mechanisms = random_mechanisms(options.count, options.seed)
    found = compare(mechanisms)
    print("| metric | library | answers | too small | ratio to ours, where it is not too small |")
    print("| --- | --- | --- | --- | --- |")
    for row in summary(found, least_sound(mechanisms, found)):
        print(f"| {' | '.join(row)} |")
    if options.json:
        named = {
            name: [[None if math.isnan(x) else x for x in row] for row in rows.tolist()] for name, rows in found.items()
        }
        options.json.write_text(json.dumps({"metrics": METRICS, "mechanisms": mechanisms, "values": named}, indent=1))


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "helpers"))
    main()
