"""Rate-distortion: the floor of any attacker from a divergence."""

from __future__ import annotations

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import minimize
from test_bounds_any import bayes_error, kl, random_releases

from approximate import close
from reconbound import divergences
from reconbound.bounds import (
    corners_floor,
    gaussian_floor,
    rate_distortion,
    theorem1,
    uniform_floor,
)

# --- rate–distortion -----------------------------------


def best_reference(releases):
    """min over references R of max over records KL(P‖R): the channel's capacity, by Blahut and Arimoto from above."""
    prior = np.full(len(releases), 1 / len(releases))
    for _ in range(60):
        mean = prior @ releases
        gaps = np.sum(releases * np.log(releases / mean), axis=1)
        prior = prior * np.exp(gaps - gaps.max())
        prior /= prior.sum()
    mean = prior @ releases
    return max(kl(p, mean) for p in releases)


@pytest.mark.slow
def test_no_attacker_beats_rate_distortion():
    """600 random mechanisms on the corners of {0,w}^d; the exact Bayes risk at the exact mutual information."""
    rng = np.random.default_rng(4)
    largest = 0.0
    for k in range(600):
        d = int(rng.integers(1, 5))
        widths = np.ones(d) if k % 2 else 10 ** rng.uniform(-0.5, 0.5, d)
        bits = np.array(list(product([0, 1], repeat=d)))
        if k % 4 < 2:
            releases = random_releases(rng, 2**d, int(rng.integers(2, 20)))
        else:  # randomised response, bit by bit: the equality case for equal odds and sides
            odds = np.full(d, rng.uniform(0, 4)) if k % 3 else rng.uniform(0, 4, d)
            keep = 1 / (1 + np.exp(-odds))
            releases = np.where(bits[:, None] == bits[None], keep, 1 - keep).prod(axis=2)
        mean = releases.mean(0)
        information = float(np.mean(np.sum(releases * np.log(releases / mean), axis=1)))
        risk = bayes_error(bits * widths, releases)
        floor = corners_floor(information, widths=widths).value
        assert floor <= risk * (1 + 1e-8) + 1e-13, (d, information)
        largest = max(largest, floor / risk)
        if k % 5 == 0:
            assert corners_floor(best_reference(releases), widths=widths).value <= risk * (1 + 1e-8) + 1e-13
    assert largest > 1 - 1e-8


def test_corners_floor_against_mpmath():
    with mp.workdps(40):
        for share in (1e-25, 1e-12, 1e-9, 3e-8, 1e-6, 1e-4, 0.01, 0.3, 0.6, 0.9, 0.999, 1 - 1e-9):
            budget = float(mp.log(2) * share)

            def gap(eta, budget=budget):
                return mp.log(2) + eta * mp.log(eta) + (1 - eta) * mp.log(1 - eta) - mp.mpf(budget)

            low, high = mp.mpf(10) ** -30, mp.mpf("0.5")
            for _ in range(160):
                middle = (low + high) / 2
                low, high = (middle, high) if gap(middle) > 0 else (low, middle)
            truth = float(low * (1 - low))
            for d in (1, 784, 10**7):
                value = corners_floor(budget * d, dim=d).value
                assert value == close(truth, rel=1e-7)
                assert value <= truth * (1 + 1e-12) + 1e-16


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")  # SLSQP of older SciPy
def test_unequal_sides_by_numerical_optimisation():
    """Minimise Σ wᵢ² ηᵢ(1 − ηᵢ) subject to Σ (ln 2 − h(ηᵢ)) = KL."""
    rng = np.random.default_rng(5)
    for _ in range(25):
        d = int(rng.integers(2, 5))
        widths = 10 ** rng.uniform(-0.5, 0.5, d)
        nats = float(rng.uniform(0.02, 0.95)) * d * math.log(2)

        def spent(eta):
            return float(np.sum(math.log(2) + eta * np.log(eta) + (1 - eta) * np.log1p(-eta)))

        found = math.inf
        for _start in range(3):
            result = minimize(
                lambda eta, w=widths: float(w**2 @ (eta * (1 - eta))) / len(w),
                rng.uniform(0.1, 0.45, d),
                bounds=[(1e-9, 0.5)] * d,
                constraints={"type": "ineq", "fun": lambda eta, n=nats: n - spent(eta)},
                method="SLSQP",
                options={"ftol": 1e-13, "maxiter": 500},
            )
            if spent(result.x) <= nats + 1e-7:
                found = min(found, result.fun)
        floor = corners_floor(nats, widths=widths).value
        assert floor <= found * (1 + 1e-5)
        assert floor == close(found, rel=1e-3)


def test_log_odds_spend_at_least_the_budget():
    """An attacker credited with less than its nats would make the floor too high."""
    from reconbound.bounds.rate_distortion import _entropy_gap, _inverse_entropy_gap

    for budget in (1e-300, 1e-12, 1e-9, 9.9e-9, 1e-8, 1e-6, 1e-5, 1e-3, 0.1, 0.69):
        assert float(_entropy_gap(np.array(_inverse_entropy_gap(budget)))) >= budget


def test_unequal_sides_meet_equal_ones():
    for nats in (1e-30, 1e-20, 1e-12, 1e-3, 0.4, 1.2):
        equal = corners_floor(nats, widths=[0.7, 0.7]).value
        unequal = corners_floor(nats, widths=[0.7, 0.7 * (1 + 1e-12)]).value
        assert unequal == close(equal, rel=1e-6)
    for scale in (1e-170, 1e-100, 1.0, 1e50, 1e99):
        for nats in (1e-25, 1e-16, 0.5, 1.3):
            value = corners_floor(nats, widths=[0.1 * scale, 0.7 * scale, 0.3 * scale]).value
            assert value == close(corners_floor(nats, widths=[0.1, 0.7, 0.3]).value * scale**2, rel=1e-9, abs=1e-300)
    # one side dwarfs the other: almost all nats go there, and none is left for it beyond ln 2
    assert corners_floor(0.3, widths=[1e-6, 1.0]).value == close(corners_floor(0.3).value / 2, rel=1e-6)
    assert corners_floor(0.3 + math.log(2), widths=[1e-6, 1.0]).value <= corners_floor(0.3).value * 1e-12 / 2 * (
        1 + 1e-6
    )
    assert corners_floor(0.3 + math.log(2), widths=[1e-3, 1e10]).value >= 0


def test_uniform_floor_on_releases_of_a_uniform_record():
    """A uniform record, rounded into k cells and sent through randomised response: exact information and error."""
    for k in (1, 2, 3, 10, 100):
        cells = (np.arange(k) + 0.5) / k
        for keep in (1.0, 0.9, 0.5):
            releases = keep * np.eye(k) + (1 - keep) / k
            information = float(np.mean([kl(p, releases.mean(0)) for p in releases]))
            risk = bayes_error(cells[:, None], releases) + 1 / (12 * k**2)
            for d in (1, 3):
                assert uniform_floor(d * information, dim=d).value <= risk * (1 + 1e-12)
                assert rate_distortion(d * information, dim=d).value <= 0.25
    # no attacker errs less than rounding to e^R cells does, and the floor is within 12/(2πe) = 0.70 of it
    assert uniform_floor(math.log(100)).value == close(12 / (2 * math.pi * math.e) / (12 * 100**2), rel=1e-9)


def test_gaussian_floor_is_met_by_the_linear_gaussian_channel():
    """Reverse water-filling: add noise sᵢθ/(sᵢ − θ) to coordinate i; the information is ½ Σ ln(1 + s/noise)."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        d = int(rng.integers(1, 6))
        s = 10 ** rng.uniform(-1, 1, d)
        theta = float(rng.uniform(0.01, 1) * s.max())
        noise = np.where(s > theta, s * theta / np.where(s > theta, s - theta, 1), np.inf)
        information = float(np.sum(np.log1p(s / noise))) / 2
        posterior = 1 / (1 / s + 1 / noise)
        assert gaussian_floor(information, s).value == close(float(np.mean(posterior)), rel=1e-9)
        noise = 10 ** rng.uniform(-1, 1, d)  # any other channel does worse
        information = float(np.sum(np.log1p(s / noise))) / 2
        assert gaussian_floor(information, s).value <= float(np.mean(1 / (1 / s + 1 / noise))) * (1 + 1e-9)
        order = rng.permutation(d)
        assert gaussian_floor(information, s[order]).value == close(gaussian_floor(information, s).value, rel=1e-9)
    assert gaussian_floor(0.0, [1.0, 4.0]).value == close(2.5)
    assert gaussian_floor(math.inf, [1.0, 4.0]).value == 0.0
    assert uniform_floor(0.7, widths=[1.0, 3.0]).value == close(
        gaussian_floor(0.7, np.array([1.0, 9.0]) / (2 * math.pi * math.e)).value
    )


def test_the_design_example():
    """d = 784, q = .01, σ = .5 with the smooth clip, T = 5000."""
    m = 1.1153 / 0.5
    assert rate_distortion(5000 * divergences.poisson_kl(m, 0.01), dim=784).value == close(0.243, rel=0, abs=5e-4)
    assert 1e-38 < theorem1(5000 * divergences.order2_poisson(m, 0.01), dim=784).value < 1e-36
