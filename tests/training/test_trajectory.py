"""The ledger of a whole run against the covariance of the trajectory's score, by brute force.

Two parameters, three records, four steps. An attacker knows the other records and which of them took part; the
density of a step, given the past, is q N(S + g̃, s²I) + (1−q) N(S, s²I). The score of the trajectory is the sum over
steps of ∇_z of its logarithm at what was released, and its covariance is the run's information about z."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap

from reconbound.training.private_sgd import PrivateSGD, Settings

X = torch.tensor([[1.0, -0.4], [0.3, 0.8], [-0.7, 0.5]], dtype=torch.float64)
Y = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
START = torch.tensor([0.6, -0.9], dtype=torch.float64)
Q, SIGMA, CLIP, LR, STEPS = 0.4, 0.7, 1.0, 0.5, 4
TRAJECTORIES, RUNS = 120_000, 160


def clipped_gradient(z: Tensor, y: Tensor, w: Tensor) -> Tensor:
    """Returns the gradient of (w·z − y)²/2, clipped as in the paper: c = 1/(GELU(n/C − 1) + 1), without the library."""
    g = (w @ z - y) * z
    x = g.norm() / CLIP - 1
    return g / (x * (1 + torch.erf(x / math.sqrt(2))) / 2 + 1)


@cache
def trajectory_scores(momentum: float, seed: int = 0) -> Tensor:
    """Scores of simulated runs about each record, (runs, records, features)."""
    generator = torch.Generator().manual_seed(seed)
    s, m = SIGMA * CLIP, TRAJECTORIES
    w, velocity = START.expand(m, 2).clone(), torch.zeros(m, 2, dtype=torch.float64)
    score = torch.zeros(m, 3, 2, dtype=torch.float64)
    each_record = vmap(clipped_gradient, in_dims=(0, 0, None))
    each_jacobian = vmap(jacrev(clipped_gradient), in_dims=(0, 0, None))
    for t in range(STEPS):
        g = vmap(each_record, in_dims=(None, None, 0))(X, Y, w)  # (m, 3, p)
        jacobian = vmap(each_jacobian, in_dims=(None, None, 0))(X, Y, w)  # (m, 3, p, d)
        part = (torch.rand(m, 3, generator=generator, dtype=torch.float64) < Q).double()
        noise = s * torch.randn(m, 2, generator=generator, dtype=torch.float64)
        released = (part[:, :, None] * g).sum(1) + noise
        others = (part[:, :, None] * g).sum(1, keepdim=True) - part[:, :, None] * g
        left = released[:, None] - others  # what the attacker sees once the others are subtracted
        inside, outside = -(left - g).square().sum(2) / (2 * s * s), -left.square().sum(2) / (2 * s * s)
        responsibility = torch.sigmoid(inside - outside + math.log(Q / (1 - Q)))
        score += responsibility[:, :, None] * torch.einsum("mrpd,mrp->mrd", jacobian, left - g) / s**2
        step = released / (Q * len(X))
        velocity = step if t == 0 else momentum * velocity + step
        w = w - LR * velocity
    return score


@cache
def ledger(momentum: float, budget: object) -> PrivateSGD:
    """Trained with both rules, of which the first is meant where none is named."""
    model = nn.Linear(2, 1, bias=False).double()

    def start(model: nn.Module) -> None:
        with torch.no_grad():
            model.weight.copy_(START)

    chosen = {"momentum": momentum, "budget": budget, "rules": ("exact", "none"), "probes": 2}
    settings = Settings(SIGMA, CLIP, Q, lr=LR, seed=3, **chosen)  # type: ignore[arg-type]
    half_square = lambda out, target: (out[:, 0] - target).square() / 2  # noqa: E731
    learner = PrivateSGD(model, half_square, X, Y, settings, initialise=start, diagonal="all")
    return learner.repeat(RUNS, steps=STEPS)


@pytest.mark.parametrize(("momentum", "budget"), [(0.0, "every"), (0.5, "every"), (0.5, 1e6)])
def test_ledger_is_the_covariance_of_the_score_of_the_trajectory(momentum: float, budget: object) -> None:
    """1e6: every record at every step; "every": those drawn. Steps without the record count in either."""
    score = trajectory_scores(momentum)
    mean_error = score.std(0) / TRAJECTORIES**0.5
    assert bool((score.mean(0).abs() < 4.5 * mean_error).all())  # a score has mean zero: the simulation is consistent
    squares = score.square()
    found = ledger(momentum, budget).accountant
    assert found is not None
    trace, trace_error = squares.sum(2).mean(0), squares.sum(2).std(0) / TRAJECTORIES**0.5
    own_error = found.standard_error() * 2
    error = (trace_error.square() + own_error.square()).sqrt()
    assert bool((error / trace < (0.12 if budget == "every" else 0.05)).all()), error / trace  # sharp enough to tell
    assert bool(((found.trace() - trace).abs() < 4 * error).all()), (found.trace(), trace, error)
    diagonal, diagonal_error = squares.mean(0), squares.std(0) / TRAJECTORIES**0.5
    measured = 1 / torch.from_numpy(found.feature_floors().value)
    spread = own_error[:, None] * measured / measured.sum(1, keepdim=True) * 2
    assert bool(((measured - diagonal).abs() < 4 * (diagonal_error.square() + spread.square()).sqrt()).all())


def test_other_factors_fail_the_comparison() -> None:
    """The companion: without amplification the ledger is far from the score's covariance, and that is seen."""
    trace = trajectory_scores(0.5).square().sum(2).mean(0)
    found = ledger(0.5, 1e6).accountant
    assert found is not None
    assert bool((found.trace("none") > 1.2 * trace).all())
