"""Rules for upper limits compared on the trainings that the rule was chosen on (docs/theory/accounting.md); the
confirmation is coverage.py, on others.

python experiments/coverage_rules.py [--problems iris moons] [--steps 1]     a quarter of an hour for all
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from coverage import TRIALS, simulate
from scipy.stats import t as student

Rule = Callable[[np.ndarray, np.ndarray, float], np.ndarray]

#: Problem, seed, times its steps, groups.
SEEN = [("iris", 0, 1, 400), ("wine", 0, 1, 400), ("outliers", 2, 1, 400)] + [
    (name, 3, times, 200 if times == 8 and name in ("outliers", "cancer") else 400)
    for name in ("cancer", "moons", "digits", "iris", "outliers")
    for times in (1, 4, 8)
]
FEWEST = 25


def low(mean: np.ndarray) -> np.ndarray:
    return np.maximum(mean, np.quantile(mean, 0.25, axis=1, keepdims=True))


def wide(r: np.ndarray) -> np.ndarray:
    return np.maximum(r, np.median(r, axis=1, keepdims=True))


def tangent(r: np.ndarray, t: float) -> np.ndarray:
    middle = np.median(r, axis=1, keepdims=True)
    return np.exp(t * middle) * (1 + t * np.maximum(r - middle, 0))


#: Name: the limit from mean and relative error of each group's records, (G, N), and t; nominal level; widest r̃.
RULES: dict[str, tuple[Rule, float, float]] = {
    "mean + t sd/√R, 99.9 %, refused from 0.25": (lambda m, r, t: m * (1 + t * r), 0.999, 0.25),
    "the same, refused from 0.35": (lambda m, r, t: m * (1 + t * r), 0.999, 0.35),
    "mean · exp(t r), 99.75 %, refused from 0.35": (lambda m, r, t: m * np.exp(t * r), 0.9975, 0.35),
    "with max(r, r̃) for r": (lambda m, r, t: m * np.exp(t * wide(r)), 0.9975, 0.35),
    "with max(mean, m) for the mean": (lambda m, r, t: low(m) * np.exp(t * r), 0.9975, 0.35),
    "with both (the third rule)": (lambda m, r, t: low(m) * np.exp(t * wide(r)), 0.9975, 0.35),
    "with both, but 1 + t r for the exponential": (lambda m, r, t: low(m) * (1 + t * wide(r)), 0.9975, 0.35),
    "with both, 99.5 %": (lambda m, r, t: low(m) * np.exp(t * wide(r)), 0.995, 0.35),
    "with both, 99.9 %": (lambda m, r, t: low(m) * np.exp(t * wide(r)), 0.999, 0.35),
    "with both, the tangent beyond r̃ (the fourth, present rule)": (
        lambda m, r, t: low(m) * tangent(r, t),
        0.9975,
        0.35,
    ),
}


def judged(mean: np.ndarray, error: np.ndarray, measured: np.ndarray, truth: np.ndarray, name: str, runs: int):
    """Coverage where given, of the least covered record with 50 limits, median limit/truth; None below 20 groups."""
    rule, level, widest = RULES[name]
    r = error / mean
    limits = rule(mean, r, float(student.ppf(level, runs - 1)))
    given = (measured >= FEWEST) & (np.median(r, axis=1, keepdims=True) <= widest)
    if given.any(1).sum() < 20:
        return None
    over, often = (limits >= truth) & given, given.sum(0) >= 50
    record = over.sum(0)[often] / given.sum(0)[often]
    return over.sum() / given.sum(), record.min() if len(record) else 1.0, float(np.median((limits / truth)[given]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", default=sorted({name for name, *_ in SEEN}))
    parser.add_argument("--steps", nargs="+", type=int, default=[1, 4, 8])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in RULES}
    for problem, seed, times, groups in SEEN:
        if problem not in asked.problems or times not in asked.steps:
            continue
        trial = replace(TRIALS[problem], steps=times * TRIALS[problem].steps)
        truth, _, ledgers = simulate(trial, groups, seed)
        for budget in ledgers.keys() - {"all"}:
            ledger = ledgers[budget]
            parts = (ledger.dfil(), ledger.standard_error(), ledger.measured())
            group = [part.reshape(groups, -1).numpy() for part in parts]
            for name in RULES:
                cell = judged(*group, truth.numpy(), name, ledger.runs)
                found[name] += [cell] if cell else []
    print("| rule | cells with limits in 20 groups | below 95 % | worst cell | least covered record | limit/truth |")
    for name, cells in found.items():
        covered, least, ratio = np.array(cells or [[np.nan] * 3]).T
        worst = f"{100 * covered.min():.1f} % | {100 * least.min():.0f} % | {np.median(ratio):.1f}"
        print(f"| {name} | {len(cells)} | {int((covered < 0.95).sum())} | {worst} |")


if __name__ == "__main__":
    main()
