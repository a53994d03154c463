"""Upper limits cover, on real private trainings: a small version of experiments/coverage.py."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from reconbound.accountant import FEWEST, WIDEST
from reconbound.fisher import dense_information

PATH = Path(__file__).resolve().parents[1] / "experiments" / "coverage.py"
SPEC = importlib.util.spec_from_file_location("coverage_of_limits", PATH)
assert SPEC is not None
coverage = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = coverage
assert SPEC.loader is not None
SPEC.loader.exec_module(coverage)

SMALL = replace(coverage.TRIALS["digits"], records=30, steps=30)
BUDGETS = {"every": "every", "steps": ("steps", 0.9), "blocks": 0.5, "few": 0.15}
GROUPS = 60


@pytest.fixture(scope="module")
def found() -> tuple:
    return coverage.simulate(SMALL, GROUPS, seed=11, budgets=BUDGETS)


@pytest.mark.parametrize("hidden", [0, 3])
def test_the_measurement_of_the_experiment_is_the_librarys(hidden: int) -> None:
    """Written out in the experiment, against dense Jacobians: along exactly, across on average over probes."""
    trial = replace(SMALL, hidden=hidden, records=6, clip=0.4)
    x, y = coverage.load(trial)
    layers = coverage.shapes(x.shape[1], y.shape[1], hidden)
    generator = torch.Generator().manual_seed(0)
    w = coverage.start(layers, 1, generator).expand(4000, -1)
    u = torch.randn(w.shape, generator=generator, dtype=torch.float64)
    step, factor = coverage.information(*coverage.measured(w, u, x, y, layers), u, trial)
    linear = [nn.Linear(into, out).double() for out, into in layers]
    model = linear[0] if hidden == 0 else nn.Sequential(linear[0], nn.Tanh(), linear[1])
    nn.utils.vector_to_parameters(w[0].clone(), model.parameters())
    loss = lambda out, target: -(target * out.log_softmax(1)).sum(1)  # noqa: E731
    dense = dense_information(model, loss, x, y, max_grad_norm=trial.clip, noise_multiplier=trial.noise)
    norms = torch.stack([g.norm() for g in dense.gradient])
    torch.testing.assert_close(step.norm[: len(x)], norms)
    torch.testing.assert_close(factor[0], 1 / (nn.functional.gelu(norms / trial.clip - 1) + 1))
    trace = (step.along + step.across).reshape(-1, len(x))
    assert bool(((trace.mean(0) - dense.trace).abs() < 4.5 * trace.std(0) / len(trace) ** 0.5 + 1e-9).all())


@pytest.mark.parametrize("name", ["every", "steps", "blocks"])
def test_limits_of_ten_trainings_cover(found: tuple, name: str) -> None:
    """At least 95 %, to three standard errors over groups, which are independent; and the largest limit the largest."""
    truth, error, ledgers = found
    result = coverage.covered(truth, ledgers[name])
    assert float((error / truth).max()) < 0.05
    assert result["given"] > 0.5  # not for free
    assert result["coverage_where_given"] + 3 * result["coverage_error"] >= 0.95, result
    assert result["coverage_error"] < 0.012
    assert result["maximum_coverage"] >= 0.95 - 3 * (0.95 * 0.05 / GROUPS) ** 0.5


def test_too_few_measurements_have_no_limit(found: tuple) -> None:
    truth, _, ledgers = found
    few = ledgers["few"]
    assert int(few.measured().max()) == 10 < FEWEST
    result = coverage.covered(truth, few)
    assert result["given"] == 0.0
    means = few.dfil().reshape(GROUPS, -1)
    naive = means + 2.82 * few.standard_error().reshape(GROUPS, -1)  # t of 99 %
    assert float((naive >= truth).double().mean()) < 0.93  # it would not have covered


def test_wild_runs_have_no_limit() -> None:
    """Where the noise drives the model about, a run's information is a matter of luck, and the spread tells."""
    wild = replace(coverage.TRIALS["wine"], records=20, steps=30, rate=0.1, lr=1.0)
    truth, _, ledgers = coverage.simulate(wild, 10, seed=1, budgets={"every": "every"})
    ledger = ledgers["every"]
    error = (ledger.standard_error() / ledger.dfil()).reshape(10, -1).median(1).values
    given = torch.stack([torch.isfinite(g.upper()).any() for g in coverage.alone(ledger, wild.records)])
    assert not bool(given[error > WIDEST].any())
    assert float(given.double().mean()) < 0.5
    assert coverage.covered(truth, ledger)["coverage"] >= 0.95
