"""Limits of divergences cover, per record and on average: a small version of experiments/coverage_divergence.py."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn

from reconbound.fisher.worlds import REMOVED, Replacement, step_distances

PATH = Path(__file__).resolve().parents[2] / "experiments" / "coverage_divergence.py"
sys.path.insert(0, str(PATH.parent))  # for its own imports
SPEC = importlib.util.spec_from_file_location("coverage_of_divergences", PATH)
assert SPEC is not None
coverage = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = coverage
assert SPEC.loader is not None
SPEC.loader.exec_module(coverage)
sys.path.remove(str(PATH.parent))

GROUPS = 60
SMALL = coverage.smaller("moons long", 16, 40)
CASES = {
    "poisson, removed": coverage.Case(replace(SMALL, records=24, lr=1.0), "poisson", REMOVED),
    "poisson, column": coverage.Case(replace(SMALL, records=6, steps=24, rate=0.3), "poisson", "column", "hard"),
    "fixed, column": coverage.Case(coverage.smaller("imbalanced", 24, 60), "fixed", "column"),
    "shuffle, column": coverage.Case(coverage.smaller("circles", 24, 60), "shuffle", "column", "hard"),
}


@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("hidden", [0, 3])
def test_distances_of_the_experiment_are_the_librarys(hidden: int, clip: str) -> None:
    case = coverage.Case(replace(SMALL, hidden=hidden, records=6, clip=0.5), "poisson", "column", clip)
    x, y = coverage.load(case.trial)
    layers = coverage.shapes(x.shape[1], y.shape[1], hidden)
    w = coverage.start(layers, 1, torch.Generator().manual_seed(0))
    far = x.clone()
    far[:, 0] = 0.0
    real, other = (coverage.gradients(w, z, y, layers, False) for z in (x, far))
    own, factor = coverage.distances(real, other, case)
    linear = [nn.Linear(into, out).double() for out, into in layers]
    model = linear[0] if hidden == 0 else nn.Sequential(linear[0], nn.Tanh(), linear[1])
    nn.utils.vector_to_parameters(w[0].clone(), model.parameters())

    def loss(out: Tensor, target: Tensor) -> Tensor:
        return -(target * out.log_softmax(1)).sum(1)

    found = step_distances(model, loss, x, y, {"column": Replacement([0.0], [0])}, max_grad_norm=0.5, clip=clip)
    torch.testing.assert_close(own.clipped_norm, found.clipped_norm)
    torch.testing.assert_close(own.other_norm["column"], found.other_norm["column"])
    torch.testing.assert_close(own.squared_distance["column"], found.squared_distance["column"])
    model.zero_grad()
    (loss(model(x), y) * factor[0]).sum().backward()
    total = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(real.total(factor)[0], total)


@pytest.fixture(scope="module", params=CASES)
def found(request: pytest.FixtureRequest) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
    case = CASES[request.param]
    return case, *coverage.simulate(case, GROUPS, seed=11)


def plain(truth: Tensor, world: str, ledger: Any, quantile: float) -> float:
    """Returns the share of cases that mean + t·error would have covered."""
    own = ledger.divergences.estimates(world)
    limit = own.mean + float(student.ppf(quantile, ledger.runs - 1)) * own.error
    return float((limit.reshape(GROUPS, -1) >= truth).double().mean())


@pytest.mark.filterwarnings("ignore:a run was")
def test_limits_of_ten_trainings_cover(found: tuple[Any, Tensor, Tensor, dict[str, Any]]) -> None:
    """At least 95 %, to two standard errors over groups; the least covered record and the mean to their own errors."""
    case, truth, error, ledgers = found
    assert float((error / truth).max()) < 0.1
    for budget, ledger in ledgers.items():
        result = coverage.covered(truth, case.world, ledger)
        if budget in ("every", "blocks 1"):
            assert result["given"] > 0.8, (budget, result)  # not for free
        if result["given"] == 0:
            continue
        assert result["coverage_where_given"] >= 0.95 - 2 * max(result["coverage_error"], 0.005), (budget, result)
        if not math.isnan(result["least_covered_record"]):
            assert result["least_covered_record"] >= 0.95 - 3 * (0.95 * 0.05 / GROUPS) ** 0.5, (budget, result)
        if not math.isnan(result["mean_coverage"]):
            assert result["mean_coverage"] >= 0.95 - 2 * (0.95 * 0.05 / GROUPS) ** 0.5, (budget, result)
        assert result["limit_over_truth"] < 6
    assert plain(truth, case.world, ledgers["every"], 0.95) < 0.945  # the usual limit would not have covered
    small = coverage.covered(4 * truth, case.world, ledgers["every"])  # a ledger that is too small by a factor of 4
    assert small["coverage_where_given"] < 0.7
    assert small["mean_coverage"] < 0.7
