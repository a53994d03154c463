"""Do the upper confidence limits of divergences cover? Thousands of private trainings of small models, in groups.

As experiments/coverage.py, for the divergence ledger: of the record left out, and of one column at its average, with
batches of all three kinds. The truth, each record's D and their mean, is the average over all trainings with every
record measured at every step it could have been in. All groups train at once, as one batch of models in closed form;
the ledger is the library's. The limit of the mean is the mean of the records' limits.

python experiments/coverage_divergence.py [--cases NAME ...] [--groups 200] [--seed 0]     about four minutes
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from _small_models import parts, shapes, start
from coverage import RESULTS, SQUARED, TRIALS, Budgeted, Trial, alone, load, write
from torch import Tensor

from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.confidence import upper_limit
from reconbound.fisher.clipping import clipping
from reconbound.fisher.worlds import REMOVED, StepDistances

CONFIDENCE = 0.95
COLUMN = "column"
BUDGETS: dict[str, Any] = {"every": "every", "steps 0.5": ("steps", 0.5), "blocks 0.5": 0.5, "blocks 1": 1.0}


@dataclass(frozen=True)
class Case:
    """A trial with a kind of batches, a clip and a world."""

    trial: Trial
    sampler: str
    world: str
    clip: str = "smooth"
    runs: int = 10

    @property
    def budgets(self) -> dict[str, Any]:
        """Blocks need parameters that do not depend on who was seen before."""
        return {name: b for name, b in BUDGETS.items() if self.sampler != "shuffle" or not isinstance(b, float)}


def smaller(name: str, records: int, steps: int, **changes: Any) -> Trial:
    return replace(TRIALS[name], records=records, steps=steps, **changes)


CASES = {
    "iris, removed": Case(smaller("iris long", 60, 200), "poisson", REMOVED),
    "moons, removed, hard clip": Case(smaller("moons long", 60, 150), "poisson", REMOVED, "hard"),
    "outliers, removed": Case(smaller("outliers long", 60, 150), "poisson", REMOVED),
    "imbalanced, removed": Case(smaller("imbalanced", 60, 200), "poisson", REMOVED),
    # rarely drawn; little noise, so that a few steps carry most of D; steps so large that the noise drives the model
    "imbalanced, removed, rare": Case(smaller("imbalanced", 60, 300, rate=0.02), "poisson", REMOVED),
    "digits, removed, little noise": Case(smaller("digits long", 60, 150, rate=0.05, noise=0.35), "poisson", REMOVED),
    "outliers, removed, wild": Case(smaller("outliers", 60, 150, lr=0.3), "poisson", REMOVED),
    "friedman, removed, 3 runs": Case(smaller("friedman", 60, 200), "poisson", REMOVED, runs=3),
    "moons, column": Case(smaller("moons long", 15, 80), "poisson", COLUMN),
    "imbalanced, column": Case(smaller("imbalanced", 15, 80), "poisson", COLUMN, "hard"),
    "wine, fixed, column": Case(smaller("wine long", 60, 150), "fixed", COLUMN),
    "circles, fixed, column": Case(smaller("circles", 60, 150), "fixed", COLUMN, "hard"),
    "imbalanced, shuffle, column": Case(smaller("imbalanced", 60, 150), "shuffle", COLUMN),
    "blobs, shuffle, column": Case(smaller("blobs", 60, 150), "shuffle", COLUMN, "hard"),
    "cancer, shuffle, column, 3 runs": Case(smaller("cancer long", 60, 150), "shuffle", COLUMN, runs=3),
}


# --- gradients ------------------------------------------------------------------------------------


@dataclass
class Gradients:
    """Every record's gradient under every model as outer products: (M, outputs, N) and (M or 1, inputs, N)."""

    sides: list[tuple[Tensor, Tensor]]

    def inner(self, other: Gradients) -> Tensor:
        """⟨g, g'⟩, (M, N); a bias is the weight of an input of 1."""
        pairs = zip(self.sides, other.sides, strict=True)
        return sum(((o * p).sum(1) * ((i * j).sum(1) + 1) for (o, i), (p, j) in pairs), torch.zeros(()))

    def total(self, factor: Tensor) -> Tensor:
        """Σ factor · g over records, (M, p), with factors (M, N)."""
        found = []
        for out, into in self.sides:
            scaled = factor[:, None] * out
            found += [(scaled @ into.mT).flatten(1), scaled.sum(2)]
        return torch.cat(found, dim=1)


def gradients(w: Tensor, x: Tensor, y: Tensor, layers: list[tuple[int, int]], squared: bool) -> Gradients:
    """Of cross-entropy, or half the squared error; tests/accounting/test_coverage_divergence.py has autograd beside."""
    weights, biases = parts(w, layers)
    intos = [x.T[None]]
    if len(layers) == 2:
        intos.append((weights[0] @ x.T + biases[0]).tanh())
    output = weights[-1] @ intos[-1] + biases[-1]
    outs = [(output if squared else output.softmax(1)) - y.T]
    if len(layers) == 2:
        outs.insert(0, (weights[1].mT @ outs[0]) * (1 - intos[1].square()))
    return Gradients(list(zip(outs, intos, strict=True)))


def distances(real: Gradients, other: Gradients | None, case: Case) -> tuple[StepDistances, Tensor]:
    """Norms and distances of clipped gradients, flattened to (M·N,), and the clip factors, (M, N)."""
    bound = case.trial.clip
    norm = real.inner(real).sqrt()
    factor = clipping(norm, bound, case.clip).factor
    clipped, zero = (factor * norm).flatten(), torch.zeros(norm.numel())
    if other is None:
        return StepDistances(zero, clipped, {}, {}, bound, case.clip), factor
    norm_there = other.inner(other).sqrt()
    there = clipping(norm_there, bound, case.clip).factor
    d2 = (factor * norm).square() + (there * norm_there).square() - 2 * factor * there * real.inner(other)
    other_norm = {COLUMN: (there * norm_there).flatten()}
    found = StepDistances(zero, clipped, other_norm, {COLUMN: d2.flatten().clamp(min=0)}, bound, case.clip)
    return found, factor


# --- trainings and ledgers ------------------------------------------------------------------------


class Batches:
    """Who takes part in each step, (M, N): all trainings at once."""

    def __init__(self, case: Case, groups: int, generator: torch.Generator) -> None:
        self.case, self.shape, self.generator = case, (groups, case.trial.records), generator
        self.size = round(case.trial.rate * case.trial.records)
        self.per_epoch = math.ceil(case.trial.records / self.size)

    def at(self, step: int) -> Tensor:
        if self.case.sampler == "poisson":
            return torch.rand(self.shape, generator=self.generator, dtype=torch.float64) < self.case.trial.rate
        place = step % self.per_epoch if self.case.sampler == "shuffle" else 0
        if place == 0:
            self.rank = torch.rand(self.shape, generator=self.generator).argsort(1).argsort(1)
        return (self.rank >= place * self.size) & (self.rank < (place + 1) * self.size)


def simulate(case: Case, groups: int, seed: int) -> tuple[Tensor, Tensor, dict[str, FisherAccountant]]:
    """Each record's D and its standard error, (N,), and for each budget the ledger of all groups."""
    trial, generator = case.trial, torch.Generator().manual_seed(seed)
    (x, y), squared = load(trial), trial.data in SQUARED
    layers, removed = shapes(x.shape[1], y.shape[1], trial.hidden), case.world == REMOVED
    batches = Batches(case, groups, generator)
    rate = trial.rate if case.sampler == "poisson" else batches.size / trial.records
    own = {"sampler": case.sampler, "clip": case.clip, "rules": None, "worlds": () if removed else (COLUMN,)}
    if case.sampler == "shuffle":
        own["batches_per_epoch"] = batches.per_epoch
    used = replace(trial, rate=rate)
    kept = {name: Budgeted(b, used, groups, x.shape[1], **own) for name, b in case.budgets.items()}
    everything = Budgeted("every", used, groups, x.shape[1], **own)
    far = x.clone()
    far[:, 0] = 0.0  # the average

    def add(ledger: FisherAccountant, index: Tensor, found: StepDistances, **how: Any) -> None:
        if removed:
            ledger.add_norms(index, found.clipped_norm[index], **how)
            return
        parts_of = ({n: v[index] for n, v in d.items()} for d in (found.other_norm, found.squared_distance))
        one = StepDistances(found.loss[index], found.clipped_norm[index], *parts_of, found.max_grad_norm, found.clip)
        ledger.add_distances(index, one, **how)

    for _ in range(case.runs):
        w = start(layers, groups, generator)
        velocity = torch.zeros_like(w)
        for step in range(trial.steps):
            real = gradients(w, x, y, layers, squared)
            found, factor = distances(real, None if removed else gradients(w, far, y, layers, squared), case)
            drawn = batches.at(step)
            for one in kept.values():
                index, how = one.chosen(step, drawn, generator)
                add(one.ledger, index, found, **how)
            if case.sampler == "shuffle":  # parameters depend on who was seen before
                add(everything.ledger, torch.nonzero(drawn.flatten()).flatten(), found, weight=1.0)
            else:
                everyone = torch.arange(groups * trial.records)
                add(everything.ledger, everyone, found, weight=rate, stratified=True)
            noise = trial.noise * trial.clip * torch.randn(w.shape, generator=generator, dtype=torch.float64)
            velocity = trial.momentum * velocity + (real.total(drawn * factor) + noise) / (rate * trial.records)
            w = w - trial.lr * velocity
        for one in (everything, *kept.values()):
            one.ledger.finish_run()
    means = everything.ledger.divergences.estimates(case.world).mean.reshape(groups, trial.records)
    return means.mean(0), means.std(0) / groups**0.5, {name: one.ledger for name, one in kept.items()}


# --- coverage -------------------------------------------------------------------------------------


def covered(truth: Tensor, world: str, ledger: FisherAccountant) -> dict[str, float]:
    """Coverage of the limits over groups and records where they are given, with its error over groups, which are
    independent; the least covered record; the coverage of the mean's limit where every record has one."""
    answers = []
    for group in alone(ledger, len(truth)):
        own = group.divergences
        limit = upper_limit(own.estimates(world), CONFIDENCE)
        answers.append((limit, float(own.towards(world, CONFIDENCE).mean()[0])))
    limits = torch.stack([limit for limit, _ in answers])
    means = np.array([mean for _, mean in answers])
    given, over = torch.isfinite(limits), limits >= truth
    known, often, whole = given.any(1), given.sum(0) >= 50, given.all(1).numpy()
    each = [float(o[g].double().mean()) for o, g in zip(over[known], given[known], strict=True)]
    record = (over & given).sum(0)[often] / given.sum(0)[often]
    exact = float(truth.mean())
    return {
        "measured": float(ledger.divergences.times(world).double().mean()),
        "given": float(given.double().mean()),
        "coverage_where_given": float(over[given].double().mean()) if each else math.nan,
        "coverage_error": float(np.std(each)) / math.sqrt(len(each)) if each else math.nan,
        "least_covered_record": float(record.min()) if len(record) else math.nan,
        "limit_over_truth": float((limits / truth)[given].median()) if each else math.nan,
        "coverage": float(over.double().mean()),
        "mean_given": float(whole.mean()),
        "mean_coverage": float((means >= exact)[whole].mean()) if whole.any() else math.nan,
        "mean_over_truth": float(np.median(means[whole]) / exact) if whole.any() else math.nan,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", default=str(RESULTS.with_name("coverage_divergence.csv")))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    lines: list[dict[str, Any]] = []
    for name in asked.cases:
        began, case = time.perf_counter(), CASES[name]
        truth, error, ledgers = simulate(case, asked.groups, asked.seed)
        worst = float((error / truth).max())
        print(f"{name}: {case.runs * asked.groups} trainings, {time.perf_counter() - began:.0f} s, ", end="")
        print(f"relative error of the truth at most {worst:.2%}")
        about = {"case": name, "groups": asked.groups, "runs": case.runs, "seed": asked.seed}
        for budget, ledger in ledgers.items():
            found = covered(truth, case.world, ledger)
            lines.append({**about, "budget": budget, "truth_error": worst, **found})
            print(budget, {k: round(v, 3) for k, v in found.items()}, flush=True)
        write(asked.out, lines)


if __name__ == "__main__":
    main()
