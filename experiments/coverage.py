"""Do the upper confidence limits cover? Thousands of private trainings of small models, in groups of ten.

Each group of ten trainings has a ledger of its own for each budget and asks for its limits. The truth, each record's
expected information, is the average over all trainings with every record measured at every step. All groups train at
once, as one batch of models: the training and the measurement are written out here in closed form, the ledger is the
library's, in which every record of every group is a record of its own. The probes are Gaussian ones in parameter space,
which vary more than those that the learner takes where no diagonal is kept.

python experiments/coverage.py [--problems iris wine] [--groups 400] [--seed 0]     a minute or two for each problem
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _small_models import Measured, measured, shapes, start
from sklearn.datasets import (
    load_breast_cancer,
    load_diabetes,
    load_digits,
    load_iris,
    load_wine,
    make_blobs,
    make_circles,
    make_friedman1,
    make_moons,
)
from torch import Tensor

from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Blocks
from reconbound.accounting.spec import Account
from reconbound.fisher import StepInformation
from reconbound.fisher.worlds import REMOVED

RUNS = 10
BUDGETS: dict[str, Any] = {
    "every": "every",
    "steps 0.5": ("steps", 0.5),
    "blocks 0.15": 0.15,
    "blocks 0.5": 0.5,
    "blocks 1": 1.0,
}
RESULTS = Path(__file__).parent / "results" / "coverage.csv"


@dataclass(frozen=True)
class Trial:
    """A small training problem. hidden: tanh units of the one hidden layer, 0 for a linear model."""

    data: str
    records: int
    hidden: int
    rate: float
    steps: int
    noise: float
    clip: float
    lr: float
    momentum: float = 0.0


TRIALS = {
    "iris": Trial("iris", 100, 0, rate=0.1, steps=60, noise=1.0, clip=1.0, lr=0.5),
    "wine": Trial("wine", 100, 4, rate=0.05, steps=100, noise=0.7, clip=2.0, lr=0.5, momentum=0.5),
    "cancer": Trial("cancer", 80, 3, rate=0.08, steps=60, noise=2.0, clip=0.5, lr=0.2, momentum=0.5),
    "outliers": Trial("outliers", 80, 5, rate=0.1, steps=80, noise=1.0, clip=4.0, lr=0.2),
    "moons": Trial("moons", 60, 6, rate=0.15, steps=50, noise=1.0, clip=1.0, lr=0.3),
    "digits": Trial("digits", 60, 0, rate=0.2, steps=40, noise=0.5, clip=1.0, lr=0.3),
    # longer, with steps small enough that the noise does not drive the model about: limits are given
    "iris long": Trial("iris", 100, 0, rate=0.1, steps=300, noise=1.0, clip=1.0, lr=0.5),
    "wine long": Trial("wine", 100, 4, rate=0.1, steps=300, noise=0.7, clip=2.0, lr=0.03, momentum=0.5),
    "cancer long": Trial("cancer", 80, 3, rate=0.08, steps=300, noise=2.0, clip=0.5, lr=0.05, momentum=0.5),
    "outliers long": Trial("outliers", 80, 5, rate=0.1, steps=300, noise=1.0, clip=4.0, lr=0.05),
    "moons long": Trial("moons", 60, 6, rate=0.15, steps=250, noise=1.0, clip=1.0, lr=0.3),
    "digits long": Trial("digits", 60, 0, rate=0.2, steps=200, noise=0.5, clip=1.0, lr=0.3),
    # not looked at before the rule was frozen
    "diabetes": Trial("diabetes", 100, 4, rate=0.1, steps=300, noise=1.0, clip=1.0, lr=0.1),
    "circles": Trial("circles", 80, 8, rate=0.1, steps=300, noise=1.0, clip=1.0, lr=0.2, momentum=0.5),
    "imbalanced": Trial("imbalanced", 100, 5, rate=0.1, steps=400, noise=1.0, clip=2.0, lr=0.1),
    "wine linear": Trial("wine", 100, 0, rate=0.1, steps=400, noise=0.7, clip=1.0, lr=0.1),
    # nor these before it was frozen for the second time
    "friedman": Trial("friedman", 80, 3, rate=0.1, steps=300, noise=1.0, clip=1.0, lr=0.1, momentum=0.5),
    "blobs": Trial("blobs", 100, 0, rate=0.1, steps=300, noise=1.5, clip=0.5, lr=0.3),
}
#: Half the squared error of one output, where the others have cross-entropy.
SQUARED = ("diabetes", "friedman")


def load(trial: Trial) -> tuple[Tensor, Tensor]:
    """Standardised features and one-hot classes (or numbers), the first records of a fixed shuffle.

    outliers, imbalanced: heavy tails; in the latter one record in ten is of the second class."""
    rng = np.random.default_rng(1)
    if trial.data in ("outliers", "imbalanced"):
        x = rng.standard_t(3, (400, 5))
        score = x.sum(1) + rng.standard_normal(400)
        y = (score > (0 if trial.data == "outliers" else np.quantile(score, 0.9))).astype(int)
    elif trial.data in MADE:
        x, y = MADE[trial.data]()
    else:
        x, y = LOADERS[trial.data](return_X_y=True)
    if trial.data == "digits":  # 0 and 1, average pixels of 2 × 2 blocks
        x, y = x[y < 2].reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16), y[y < 2]
        x = x[:, x.std(0) > 0.5]
    x, order = (x - x.mean(0)) / x.std(0), rng.permutation(len(x))[: trial.records]
    y = ((y - y.mean()) / y.std())[:, None] if trial.data in SQUARED else np.eye(y.max() + 1)[y]
    return torch.from_numpy(x[order]), torch.from_numpy(y[order])


LOADERS: dict[str, Any] = {
    "iris": load_iris,
    "wine": load_wine,
    "cancer": load_breast_cancer,
    "digits": load_digits,
    "diabetes": load_diabetes,
}
MADE: dict[str, Any] = {
    "moons": lambda: make_moons(200, noise=0.2, random_state=1),
    "circles": lambda: make_circles(200, noise=0.15, factor=0.5, random_state=1),
    "blobs": lambda: make_blobs(200, n_features=3, centers=4, cluster_std=3.0, random_state=1),
    "friedman": lambda: make_friedman1(200, noise=1.0, random_state=1),
}


# --- training: many models at once ---------------------------------------------------------------


def information(seen: Measured, trial: Trial) -> tuple[StepInformation, Tensor]:
    """A step's information about every record of every model, flattened to (M·N,), and the clip factors, (M, N)."""
    n, (h, pulled) = seen.norm, seen.pulled
    a = n / trial.clip - 1
    slope = torch.special.ndtr(a) + a * torch.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    c = 1 / (torch.nn.functional.gelu(a) + 1)
    radial = c - n * slope / trial.clip * c.square()  # d(cn)/dn
    r = pulled - (seen.probe / n)[:, None] * h
    scale = 1 / (trial.noise * trial.clip)
    along, across = (radial * scale).square() * h.square().sum(1), (c * scale).square() * r.square().sum(1)
    flat = [t.flatten() for t in (n, n, c, c * n, along, across, math.sqrt(2) * across)]
    return StepInformation(*flat, {}, h.shape[1], 1), c


@dataclass
class Step:
    """What one step of all the trainings shows: who took part, (M, N), and the information about all."""

    number: int
    drawn: Tensor
    found: StepInformation


def trainings(trial: Trial, copies: int, generator: torch.Generator) -> Iterator[Step]:
    """One training of each of so many models by private SGD: Poisson batches, smooth clip, noise on the sum, qN."""
    x, y = load(trial)
    layers = shapes(x.shape[1], y.shape[1], trial.hidden)
    w = start(layers, copies, generator)
    velocity = torch.zeros_like(w)
    for t in range(trial.steps):
        u = torch.randn(w.shape, generator=generator, dtype=torch.float64)
        seen = measured(w, u, x, y, layers, squared=trial.data in SQUARED)
        found, c = information(seen, trial)
        drawn = torch.rand(copies, len(x), generator=generator, dtype=torch.float64) < trial.rate
        yield Step(t, drawn, found)
        noise = trial.noise * trial.clip * torch.randn(w.shape, generator=generator, dtype=torch.float64)
        released = (seen.total(drawn * c) + noise) / (trial.rate * len(x))
        velocity = trial.momentum * velocity + released
        w = w - trial.lr * velocity


# --- ledgers --------------------------------------------------------------------------------------


class Budgeted:
    """A ledger of all groups' records, filled with what its budget would have measured.

    Further arguments are those of the account."""

    def __init__(
        self, budget: Any, trial: Trial, groups: int, features: int, *, worlds: Sequence[str] = (), **changes: Any
    ) -> None:
        self.budget, self.records, self.groups = budget, trial.records, groups
        account = Account(
            trial.noise, trial.clip, trial.rate,
            records=groups * trial.records, features=features, steps=trial.steps, **changes,
        )  # fmt: skip
        self.ledger = FisherAccountant(account, worlds=worlds)
        self.plan = Blocks(trial.records, trial.rate, trial.steps, budget if isinstance(budget, float) else 1.0, 1)

    def chosen(self, number: int, drawn: Tensor, generator: torch.Generator) -> tuple[Tensor, dict[str, Any]]:
        """The records that are measured at a step in which these took part, (M, N), and how they count."""
        stratified = isinstance(self.budget, float)
        if stratified:
            _, first, length = self.plan.block(number)
            if number == first:  # each record's own step of the block
                self.at = first + torch.randint(0, length, (self.groups * self.records,), generator=generator)
            rows, weight = self.at == number, self.plan.weight(number)
        elif self.budget == "every":
            rows, weight = drawn.flatten(), 1.0
        else:
            coin = torch.rand(self.groups, 1, generator=generator) < self.budget[1]
            rows, weight = (drawn & coin).flatten(), 1 / self.budget[1]
        return torch.nonzero(rows).flatten(), {"weight": weight, "stratified": stratified}

    def add(self, step: Step, generator: torch.Generator) -> None:
        index, how = self.chosen(step.number, step.drawn, generator)
        self.ledger.add(index, rows_of(step.found, index), **how)


def rows_of(found: StepInformation, index: Tensor) -> StepInformation:
    parts = (found.loss, found.norm, found.factor, found.clipped_norm, found.along, found.across, found.across_error)
    return StepInformation(*(part[index] for part in parts), {}, found.features, found.probes)


def simulate(
    trial: Trial, groups: int, seed: int, budgets: dict[str, Any] = BUDGETS, runs: int = RUNS
) -> tuple[Tensor, Tensor, dict[str, FisherAccountant]]:
    """The expected dFIL of each record and its standard error, (N,), and for each budget the ledger of all groups.

    One ledger more, "all", has every record measured at every step, drawn or not: the truth is its mean."""
    generator = torch.Generator().manual_seed(seed)
    features = load(trial)[0].shape[1]
    ledgers = {name: Budgeted(budget, trial, groups, features) for name, budget in budgets.items()}
    everything = FisherAccountant(next(iter(ledgers.values())).ledger.account)
    all_rows = torch.arange(groups * trial.records)
    for _ in range(runs):
        for step in trainings(trial, groups, generator):
            everything.add(all_rows, step.found, weight=trial.rate, stratified=True)
            for ledger in ledgers.values():
                ledger.add(step, generator)
        for one in (everything, *(ledger.ledger for ledger in ledgers.values())):
            one.finish_run()
    means = everything.dfil().reshape(groups, trial.records)
    found = {name: ledger.ledger for name, ledger in ledgers.items()}
    return means.mean(0), means.std(0) / groups**0.5, {**found, "all": everything}


def alone(ledger: FisherAccountant, records: int) -> Iterator[FisherAccountant]:
    """Each group's part of the ledger as a ledger of its own, as its owner has it; to be read before the next."""
    worlds = [world for world in ledger.divergences.worlds if world != REMOVED]
    state, own = ledger.state(), FisherAccountant(replace(ledger.account, records=records), worlds=worlds)
    for first in range(0, ledger.account.records, records):
        last = first + records
        whole = (
            "rare",
            "partial",
            "weights",
            "fingerprints",
            "nats_sampled",
            "nats_partial",
            "nats_weights",
        )  # what is not by records
        own.restore({n: v if n in whole else v[..., first:last] for n, v in state.items()}, ledger.runs)
        yield own


def covered(truth: Tensor, ledger: FisherAccountant) -> dict[str, float]:
    """Coverage of `upper` over groups and records where it is given, its error over groups, which are independent, and
    the record covered least of those with a limit in 50 groups; coverage of the maximum, refusals counted as covered.
    """
    answers = [(group.upper(warn=False), group.dfil()) for group in alone(ledger, len(truth))]
    limits, means = (torch.stack(part) for part in zip(*answers, strict=True))
    given, over, largest = torch.isfinite(limits), limits >= truth, limits.max(1).values
    whole = torch.isfinite(largest)
    known, often = given.any(1), given.sum(0) >= 50
    each = [float(o[g].double().mean()) for o, g in zip(over[known], given[known], strict=True)]
    record = (over & given).sum(0)[often] / given.sum(0)[often]
    return {
        "relative_spread_of_a_run": float((means.std(0) / truth).median()) * ledger.runs**0.5,
        "measured": float(ledger.measured().double().mean()),
        "given": float(given.double().mean()),
        "groups_given": len(each),
        "coverage_where_given": float(over[given].double().mean()) if each else math.nan,
        "coverage_error": float(np.std(each)) / math.sqrt(len(each)) if each else math.nan,
        "least_covered_record": float(record.min()) if len(record) else math.nan,
        "limit_over_truth": float((limits / truth)[given].median()) if each else math.nan,
        "coverage": float(over.double().mean()),
        "maximum_coverage": float((largest >= truth.max()).double().mean()),
        "maximum_over_truth": float((largest[whole] / truth.max()).median()) if bool(whole.any()) else math.nan,
        "maximum_given": float(torch.isfinite(largest).double().mean()),
    }


def write(path: str, lines: list[dict[str, Any]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()} for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for problem in asked.problems:
        began = time.perf_counter()
        truth, error, ledgers = simulate(TRIALS[problem], asked.groups, asked.seed, runs=asked.runs)
        worst = float((error / truth).max())
        print(f"{problem}: {asked.runs * asked.groups} trainings, {time.perf_counter() - began:.0f} s, ", end="")
        print(f"relative error of the truth at most {worst:.2%}")
        about = {"problem": problem, "groups": asked.groups, "runs": asked.runs, "seed": asked.seed}
        for name, ledger in ledgers.items():
            found = covered(truth, ledger)
            lines.append({**about, "budget": name, "truth_error": worst, **found})
            print(name, {k: round(v, 3) for k, v in found.items()}, flush=True)
        write(asked.out, lines)


if __name__ == "__main__":
    main()
