"""Upper limits cover, on real private trainings: a small version of experiments/coverage.py."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import t as student
from torch import Tensor, nn
from torch.func import grad, jacrev, vmap

from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.confidence import FEWEST, WIDEST
from reconbound.fisher import dense_information

PATH = Path(__file__).resolve().parents[2] / "experiments" / "coverage.py"
sys.path.insert(0, str(PATH.parent))  # for its own imports
SPEC = importlib.util.spec_from_file_location("coverage_of_limits", PATH)
assert SPEC is not None
coverage = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = coverage
assert SPEC.loader is not None
SPEC.loader.exec_module(coverage)
sys.path.remove(str(PATH.parent))

SMALL = replace(coverage.TRIALS["moons"], records=30, steps=60, rate=0.2, lr=0.2)
BUDGETS = {"every": "every", "steps": ("steps", 0.8), "blocks": 0.7, "few": 0.15}
GROUPS = 150


@pytest.fixture(scope="module")
def found() -> tuple:
    return coverage.simulate(SMALL, GROUPS, seed=21, budgets=BUDGETS)


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("hidden", [0, 3])
def test_closed_form_of_the_experiment_is_autograd(hidden: int, squared: bool) -> None:
    """Norm, ⟨g, u⟩, both pullbacks and a weighted sum of gradients, of every record under every model."""
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (4, 3))
    y = y if squared else torch.eye(3, dtype=torch.float64)[y.argmax(1)]
    layers = coverage.shapes(4, 3, hidden)
    w = 2 * coverage.start(layers, 6, generator)
    u = torch.randn(w.shape, generator=generator, dtype=torch.float64)

    def loss(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        for k, (out, into) in enumerate(layers):
            weight, bias, w = w[: out * into].reshape(out, into), w[out * into :][:out], w[out * into + out :]
            x = weight @ x + bias if k + 1 == len(layers) else (weight @ x + bias).tanh()
        return (x - y).square().sum() / 2 if squared else x.logsumexp(0) - x @ y

    def two(x: Tensor, w: Tensor, u: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        g = grad(loss)(w, x, y)
        both = torch.stack([g.square().sum().sqrt(), g @ u])
        return both, (both, g)

    each = vmap(vmap(jacrev(two, has_aux=True), in_dims=(0, None, None, 0)), in_dims=(None, 0, 0, None))
    pulled, (both, g) = each(x, w, u, y)
    seen = coverage.measured(w, u, x, y, layers, squared=squared)
    torch.testing.assert_close(torch.stack([seen.norm, seen.probe], dim=2), both)
    for k in (0, 1):
        torch.testing.assert_close(seen.pulled[k].mT, pulled[:, :, k])
    factor = torch.rand(6, 5, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(seen.total(factor), torch.einsum("mn,mnp->mp", factor, g))


@pytest.mark.parametrize("hidden", [0, 3])
def test_the_measurement_of_the_experiment_is_the_librarys(hidden: int) -> None:
    """Written out in the experiment, against dense Jacobians: along exactly, across on average over probes."""
    trial = replace(SMALL, hidden=hidden, records=6, clip=0.4)
    x, y = coverage.load(trial)
    layers = coverage.shapes(x.shape[1], y.shape[1], hidden)
    generator = torch.Generator().manual_seed(0)
    w = coverage.start(layers, 1, generator).expand(4000, -1)
    u = torch.randn(w.shape, generator=generator, dtype=torch.float64)
    step, factor = coverage.information(coverage.measured(w, u, x, y, layers), trial)
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


def plain(truth: Tensor, ledger: FisherAccountant, quantile: float) -> float:
    """Returns the share of cases that mean + t·error would have covered."""
    limit = ledger.dfil() + float(student.ppf(quantile, ledger.runs - 1)) * ledger.standard_error()
    return float((limit.reshape(GROUPS, -1) >= truth).double().mean())


@pytest.mark.parametrize("name", ["every", "steps", "blocks", "all"])
def test_limits_of_ten_trainings_cover(found: tuple, name: str) -> None:
    """At least 95 %, to two standard errors over groups, where the plain 95 % quantile is far from it; the least
    covered record too, to its own error; and the largest limit covers the largest."""
    truth, error, ledgers = found
    result = coverage.covered(truth, ledgers[name])
    assert float((error / truth).max()) < 0.05
    assert plain(truth, ledgers[name], 0.95) < 0.93  # the trial is a hard one
    assert result["given"] > 0.8  # not for free
    assert result["coverage_where_given"] - 2 * result["coverage_error"] >= 0.95, result
    assert result["coverage_error"] < 0.01
    assert result["least_covered_record"] >= 0.95 - 3 * (0.95 * 0.05 / GROUPS) ** 0.5
    assert result["maximum_coverage"] >= 0.95
    assert result["limit_over_truth"] < 5


def test_too_few_measurements_have_no_limit(found: tuple) -> None:
    truth, _, ledgers = found
    few = ledgers["few"]
    assert int(few.measured().max()) == 10 < FEWEST
    assert coverage.covered(truth, few)["given"] == 0.0
    assert plain(truth, few, 0.999) < 0.95  # the old limit would not have covered


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
