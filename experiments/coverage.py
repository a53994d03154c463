"""Do the upper confidence limits cover? Thousands of private trainings of small models, in groups of ten.

Each group of ten trainings has a ledger of its own for each budget and asks for its limits. The truth, each record's
expected information, is the average over all trainings with every record measured at every step. All groups train at
once, as one batch of models (torch.func): the training and the measurement are written out here, the ledger is the
library's, in which every record of every group is a record of its own. The probes are Gaussian ones in parameter space,
which vary more than those that the learner takes where no diagonal is kept.

python experiments/coverage.py [--problems iris wine] [--groups 400] [--seed 0]     minutes for each problem
"""

from __future__ import annotations

import argparse
import csv
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_iris, load_wine, make_moons
from torch import Tensor
from torch.func import grad, jacrev, vmap

from reconbound.account import Account
from reconbound.accountant import FisherAccountant
from reconbound.budget import Blocks
from reconbound.fisher import StepInformation

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
}


def load(trial: Trial) -> tuple[Tensor, Tensor]:
    """Standardised features and one-hot classes, the first records of a fixed shuffle. outliers: heavy tails."""
    rng = np.random.default_rng(1)
    if trial.data == "outliers":
        x = rng.standard_t(3, (400, 5))
        y = (x.sum(1) + rng.standard_normal(400) > 0).astype(int)
    elif trial.data == "moons":
        x, y = make_moons(200, noise=0.2, random_state=1)
    else:
        loaders = {"iris": load_iris, "wine": load_wine, "cancer": load_breast_cancer, "digits": load_digits}
        x, y = loaders[trial.data](return_X_y=True)
    if trial.data == "digits":  # 0 and 1, average pixels of 2 × 2 blocks
        x, y = x[y < 2].reshape(-1, 4, 2, 4, 2).mean((2, 4)).reshape(-1, 16), y[y < 2]
        x = x[:, x.std(0) > 0.5]
    x, order = (x - x.mean(0)) / x.std(0), rng.permutation(len(x))[: trial.records]
    return torch.from_numpy(x[order]), torch.from_numpy(np.eye(y.max() + 1)[y[order]])


# --- training: many models at once ---------------------------------------------------------------


def shapes(features: int, classes: int, hidden: int) -> list[tuple[int, int]]:
    return [(classes, features)] if hidden == 0 else [(hidden, features), (classes, hidden)]


def start(layers: list[tuple[int, int]], copies: int, generator: torch.Generator) -> Tensor:
    """Weights and biases of each model, (copies, p), uniform within 1/√(inputs) as torch's own."""
    parts = []
    for out, into in layers:
        u = torch.rand(copies, out * into + out, generator=generator, dtype=torch.float64)
        parts.append((2 * u - 1) / math.sqrt(into))
    return torch.cat(parts, dim=1)


def loss(w: Tensor, x: Tensor, y: Tensor, layers: list[tuple[int, int]]) -> Tensor:
    """Cross-entropy of one record, y its class as a vector, under one model."""
    for k, (out, into) in enumerate(layers):
        weight, bias, w = w[: out * into].reshape(out, into), w[out * into : out * into + out], w[out * into + out :]
        x = weight @ x + bias
        x = x.tanh() if k + 1 < len(layers) else x
    return x.logsumexp(0) - x @ y


def measured(w: Tensor, u: Tensor, x: Tensor, y: Tensor, layers: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """Of every record under every model: gradient (M, N, p), and ∇_x‖g‖ and Jᵀu, (M, N, 2, d)."""

    def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return grad(loss)(w, x, y, layers)

    def two(x: Tensor, w: Tensor, u: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        g = gradient(w, x, y)
        return torch.stack([g.square().sum().sqrt(), g @ u]), g

    each = vmap(vmap(jacrev(two, has_aux=True), in_dims=(0, None, None, 0)), in_dims=(None, 0, 0, None))
    pulled, g = each(x, w, u, y)
    return g, pulled


def information(g: Tensor, pulled: Tensor, u: Tensor, trial: Trial) -> tuple[StepInformation, Tensor]:
    """A step's information about every record of every model, flattened to (M·N,), and the clip factors, (M, N)."""
    n = g.norm(dim=2)
    a = n / trial.clip - 1
    gelu, slope = (
        torch.nn.functional.gelu(a),
        torch.special.ndtr(a) + a * torch.exp(-a * a / 2) / math.sqrt(2 * math.pi),
    )
    c = 1 / (gelu + 1)
    radial = c - n * slope / trial.clip * c.square()  # d(cn)/dn
    h = pulled[:, :, 0]
    r = pulled[:, :, 1] - torch.einsum("mnp,mp->mn", g, u)[:, :, None] / n[:, :, None] * h
    scale = 1 / (trial.noise * trial.clip)
    along, across = (radial * scale).square() * h.square().sum(2), (c * scale).square() * r.square().sum(2)
    flat = [t.flatten() for t in (n, n, c, c * n, along, across, math.sqrt(2) * across)]
    return StepInformation(*flat, {}, h.shape[2], 1), c


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
        g, pulled = measured(w, u, x, y, layers)
        found, c = information(g, pulled, u, trial)
        drawn = torch.rand(copies, len(x), generator=generator, dtype=torch.float64) < trial.rate
        yield Step(t, drawn, found)
        noise = trial.noise * trial.clip * torch.randn(w.shape, generator=generator, dtype=torch.float64)
        released = (torch.einsum("mn,mnp->mp", drawn * c, g) + noise) / (trial.rate * len(x))
        velocity = trial.momentum * velocity + released
        w = w - trial.lr * velocity


# --- ledgers --------------------------------------------------------------------------------------


class Budgeted:
    """A ledger of all groups' records, filled with what its budget would have measured."""

    def __init__(self, budget: Any, trial: Trial, groups: int, features: int) -> None:
        self.budget, self.records, self.groups = budget, trial.records, groups
        account = Account(groups * trial.records, features, trial.steps, trial.noise, trial.clip, trial.rate)
        self.ledger = FisherAccountant(account)
        self.plan = Blocks(trial.records, trial.rate, trial.steps, budget if isinstance(budget, float) else 1.0, 1)

    def add(self, step: Step, generator: torch.Generator) -> None:
        stratified = isinstance(self.budget, float)
        if stratified:
            _, first, length = self.plan.block(step.number)
            if step.number == first:  # each record's own step of the block
                self.at = first + torch.randint(0, length, (self.groups * self.records,), generator=generator)
            rows, weight = self.at == step.number, self.plan.weight(step.number)
        elif self.budget == "every":
            rows, weight = step.drawn.flatten(), 1.0
        else:
            coin = torch.rand(self.groups, 1, generator=generator) < self.budget[1]
            rows, weight = (step.drawn & coin).flatten(), 1 / self.budget[1]
        index = torch.nonzero(rows).flatten()
        self.ledger.add(index, rows_of(step.found, index), weight=weight, stratified=stratified)


def rows_of(found: StepInformation, index: Tensor) -> StepInformation:
    parts = (found.loss, found.norm, found.factor, found.clipped_norm, found.along, found.across, found.across_error)
    return StepInformation(*(part[index] for part in parts), {}, found.features, found.probes)


def simulate(
    trial: Trial, groups: int, seed: int, budgets: dict[str, Any] = BUDGETS, runs: int = RUNS
) -> tuple[Tensor, Tensor, dict[str, FisherAccountant]]:
    """The expected dFIL of each record and its standard error, (N,), and for each budget the ledger of all groups."""
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
    return means.mean(0), means.std(0) / groups**0.5, {name: ledger.ledger for name, ledger in ledgers.items()}


def alone(ledger: FisherAccountant, records: int) -> Iterator[FisherAccountant]:
    """Each group's part of the ledger as a ledger of its own, as its owner has it; to be read before the next."""
    state, own = ledger.state(), FisherAccountant(replace(ledger.account, records=records))
    for first in range(0, ledger.account.records, records):
        last = first + records
        own.restore({n: v if n == "rare" else v[..., first:last] for n, v in state.items()}, ledger.runs)
        yield own


def covered(truth: Tensor, ledger: FisherAccountant) -> dict[str, float]:
    """Coverage of `upper` over groups and records, and of its maximum over records; shares that are finite."""
    answers = [(group.upper(), group.dfil()) for group in alone(ledger, len(truth))]
    limits, means = (torch.stack(part) for part in zip(*answers, strict=True))
    given, over, largest = torch.isfinite(limits), (limits >= truth).double(), limits.max(1).values
    some = bool(given.any())
    return {
        "relative_spread_of_a_run": float((means.std(0) / truth).median()) * ledger.runs**0.5,
        "measured": float(ledger.measured().double().mean()),
        "coverage": float(over.mean()),
        "coverage_error": float(over.mean(1).std()) / len(answers) ** 0.5,
        "least_covered_record": float(over.mean(0).min()),
        "given": float(given.double().mean()),
        "coverage_where_given": float(over[given].mean()) if some else math.nan,
        "limit_over_truth_where_given": float((limits / truth)[given].median()) if some else math.nan,
        "maximum_coverage": float((largest >= truth.max()).double().mean()),
        "maximum_given": float(torch.isfinite(largest).double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", nargs="+", choices=TRIALS, default=list(TRIALS))
    parser.add_argument("--groups", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines: list[dict[str, Any]] = []
    for problem in asked.problems:
        began = time.perf_counter()
        truth, error, ledgers = simulate(TRIALS[problem], asked.groups, asked.seed)
        print(f"{problem}: {RUNS * asked.groups} trainings, {time.perf_counter() - began:.0f} s, ", end="")
        print(f"relative error of the truth at most {float((error / truth).max()):.2%}")
        for name, ledger in ledgers.items():
            found = covered(truth, ledger)
            lines.append({"problem": problem, "budget": name, "groups": asked.groups, "seed": asked.seed, **found})
            print(name, {k: round(v, 3) for k, v in found.items()}, flush=True)
    with open(asked.out, "w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in line.items()} for line in lines)


if __name__ == "__main__":
    main()
