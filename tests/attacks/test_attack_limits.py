"""Limits of what attacks reached: against exact chances, and covered as often as they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from reconbound._internal.checks import InputError
from reconbound.attacks.limits import (
    THRESHOLDS,
    binary_kl,
    chance_limits,
    distinguish,
    mean_limits,
    reconstruction_of,
)


@pytest.mark.parametrize(("count", "trials"), [(0, 7), (1, 10), (5, 10), (37, 40), (40, 40)])
def test_chance_limits_solve_the_binomial_tails(count: int, trials: int) -> None:
    low, high = chance_limits(count, trials, 0.9)
    if count:
        assert binom.sf(count - 1, trials, low) == pytest.approx(0.05, rel=1e-9)
    if count < trials:
        assert binom.cdf(count, trials, high) == pytest.approx(0.05, rel=1e-9)
    assert low <= count / trials <= high


@pytest.mark.parametrize("p", [0.002, 0.05, 0.4, 0.5])
def test_chance_limits_cover_exactly_enough(p: float) -> None:
    """The exact chance that both limits hold, summed over all counts."""
    trials = 60
    held = [chance_limits(k, trials)[0] <= p <= chance_limits(k, trials)[1] for k in range(trials + 1)]
    assert binom.pmf(np.flatnonzero(held), trials, p).sum() >= 0.95


@pytest.mark.parametrize("a", [0.05, 0.4, 3.0])
def test_mean_limits_cover(a: float) -> None:
    """2,000 sets of beta-distributed trials: 95 % within four standard errors, and more, for the limits are wide."""
    rng, mean = np.random.default_rng(4), a / (a + 2)
    held = 0
    for _ in range(2000):
        low, high = mean_limits(rng.beta(a, 2.0, 30))
        held += low <= mean <= high
    assert held / 2000 >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / 2000)


def test_mean_limits_are_where_kl_says() -> None:
    low, high = mean_limits([0.25, 0.35], 0.9)
    for end in (low, high):
        assert binary_kl(0.3, end) * 2 == pytest.approx(math.log(20), rel=1e-9)
    assert mean_limits([0.0] * 9)[0] == 0
    assert mean_limits([1.0] * 9)[1] == 1


def test_binary_kl_at_the_ends() -> None:
    assert binary_kl(0.0, 0.0) == binary_kl(1.0, 1.0) == 0
    assert binary_kl(0.5, 0.0) == binary_kl(0.5, 1.0) == math.inf
    assert binary_kl(0.3, 0.1) == pytest.approx(0.3 * math.log(3) + 0.7 * math.log(0.7 / 0.9))
    assert binary_kl(0.0, 0.5) == pytest.approx(math.log(2))


@pytest.mark.parametrize("mu", [0.0, 0.7, 2.0])
def test_what_two_worlds_prove_is_true_as_often_as_said(mu: float) -> None:
    """Gaussians μ apart: KL is μ²/2, ε(δ) solves the Gaussian curve. All limits hold in at least 95 % of 600 audits."""
    rng, delta = np.random.default_rng(7), 0.01
    grid = np.linspace(0, 12, 12001)
    curve = norm.cdf(mu / 2 - grid / max(mu, 1e-9)) - np.exp(grid) * norm.cdf(-mu / 2 - grid / max(mu, 1e-9))
    epsilon = float(grid[np.argmax(curve <= delta)]) if mu else 0.0
    held, seen = 0, []
    for _ in range(600):
        real, other = mu * rng.standard_normal((2, 300)) + np.array([[mu**2 / 2], [-(mu**2) / 2]])
        found = distinguish(real, other, delta=delta)
        held += found.nats <= mu**2 / 2 and found.mu <= mu and found.epsilon <= epsilon
        seen.append((found.nats, found.mu, found.epsilon))
    assert held / 600 >= 0.95 - 4 * math.sqrt(0.05 * 0.95 / 600)
    if mu == 2.0:  # and they say something
        nats, found_mu, found_epsilon = np.median(seen, axis=0)
        assert nats > 0.6
        assert found_mu > 1.4
        assert found_epsilon > 1.5


def test_distinguish_counts_and_learns() -> None:
    rng = np.random.default_rng(1)
    real, other = rng.normal(0.5, 1, 400), rng.normal(-0.5, 1, 400)
    found = distinguish(real, other)
    assert found.hits == np.mean(real > 0)
    assert found.false_hits == np.mean(other > 0)
    assert found.hits_low < found.hits
    assert found.false_high > found.false_hits
    assert found.learned == pytest.approx(real.mean())
    assert found.learned_error == pytest.approx(real.std(ddof=1) / 20)
    assert THRESHOLDS.count(0.0) == 1
    each = 1 - 0.05 / len(THRESHOLDS)
    assert found.hits_low == chance_limits(int((real > 0).sum()), 400, each)[0]


def test_reconstruction_separates_bias_and_variance() -> None:
    rng, truth = np.random.default_rng(2), np.array([0.2, 0.7, 0.4])
    away = np.array([0.3, -0.1, 0.0])
    found = reconstruction_of(truth + away + 0.2 * rng.standard_normal((4000, 3)), truth)
    assert found.variance == pytest.approx(0.04, abs=4 * found.variance_error)
    assert found.bias == pytest.approx(0.1 / 3, abs=4 * 2 * math.sqrt(0.1 / 3 * 0.04 / 3 / 4000) + 1e-5)
    assert found.mse == pytest.approx(found.variance * 3999 / 4000 + found.bias + found.variance / 4000, rel=1e-12)
    assert found.biased
    assert not reconstruction_of(truth + 0.2 * rng.standard_normal((50, 3)), truth).biased


def test_wrong_values_are_refused() -> None:
    for wrong in (lambda: chance_limits(5, 4), lambda: mean_limits([1.2]), lambda: distinguish([1.0], [math.nan])):
        with pytest.raises(InputError):
            wrong()
    with pytest.raises(InputError, match=r"answers must have shape \(M, 2\)"):
        reconstruction_of(np.zeros((3, 4)), [0.0, 1.0])
