"""KL divergences and overlaps of sampled Gaussian steps."""

from __future__ import annotations

import math
import warnings

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import norm
from test_order2 import density, in_ball, in_plane, mp_integral, mp_phi, plane

from approximate import close
from reconbound import divergences

# --- KL -----------------------------------


@mp.workdps(900)
def test_kl_pure_is_tight_at_randomised_response():
    for eps in (1e-6, 0.1, 1, 5, 30, 800):
        p = mp.exp(eps) / (1 + mp.exp(eps))
        kl = p * mp.log(p / (1 - p)) + (1 - p) * mp.log((1 - p) / p)
        assert divergences.kl_pure(eps) == close(float(kl), rel=1e-12)


def mp_poisson_kl(m, q):
    m, q = mp.mpf(m), mp.mpf(q)

    def f(x):
        r = 1 - q + q * mp.exp(m * x - m * m / 2)
        return mp_phi(x, 0) * (r * mp.log(r) - r + 1)

    return float(mp_integral(f, [0, m / 2, m, 2 * m]))


@pytest.mark.parametrize("q", [1e-30, 1e-9, 1e-4, 0.01, 0.5, 0.999])
@pytest.mark.slow
def test_poisson_kl_against_mpmath(q):
    with mp.workdps(90):
        for m in (1e-6, 1.0, 2.2306, 25.0):
            assert divergences.poisson_kl(m, q) == close(mp_poisson_kl(m, q), rel=1e-11), m


@pytest.mark.parametrize(("m", "q"), [(12.0, 1e-100), (13.0, 1e-120), (15.0, 1e-200)])
def test_poisson_kl_at_rates_so_small_that_all_of_it_lies_near_2m(m, q):
    """There KL ≈ χ²/2, whose integrand P₁²/P₀ peaks at 2m: an integral that stops before is no upper bound."""
    with mp.workdps(450):
        assert divergences.poisson_kl(m, q) == close(mp_poisson_kl(m, q), rel=1e-11)
    assert divergences.poisson_kl(m, 1e-310) == 1e-310 * m * m / 2


def test_poisson_kl_bounds_records_and_mutual_information():
    """KL rises with the norm, does not see the direction, and bounds what a step tells about a random record."""
    x = np.linspace(-25, 25, 5001)
    h = x[1] - x[0]
    rng = np.random.default_rng(8)
    for _ in range(50):
        m, q = float(rng.uniform(0.1, 3)), float(rng.uniform(0.01, 1))
        shifts = m * rng.uniform(-1, 1, 4)
        releases = [(1 - q) * norm.pdf(x) + q * norm.pdf(x - s) for s in shifts]
        mean = np.mean(releases, axis=0)
        information = np.mean([np.sum(p * np.log(p / mean)) * h for p in releases])
        worst = max(np.sum(p * np.log(p / norm.pdf(x))) * h for p in releases)
        assert information <= worst + 1e-12 <= divergences.poisson_kl(m, q) + 2e-12


def test_kl_fixed_bounds_random_triples():
    rng = np.random.default_rng(9)
    largest = 0.0
    for m in (0.1, 0.5, 1.0, 2.0):
        grid, cell = plane(0.2, 4 * m + 7)
        for g, c in zip(in_ball(rng, 60, 3, m), in_ball(rng, 60, 3, m), strict=True):
            q = float(10 ** rng.uniform(-2, 0))
            c2, g2, zero2 = in_plane(c, g, np.zeros(3))
            p, r = ((1 - q) * density(grid, c2) + q * density(grid, z) for z in (g2, zero2))
            keep = (p > 0) & (r > 0)
            value = float(np.sum(p[keep] * np.log(p[keep] / r[keep])) * cell)
            assert value <= divergences.kl_fixed(m, q) * (1 + 1e-9) + 1e-13
            largest = max(largest, value / divergences.kl_fixed(m, q))
    assert largest > 0.5
    assert divergences.kl_fixed(0.7, 1.0) == close(0.245, rel=1e-12)


def test_kl_fixed_formula_against_mpmath():
    """The χ² that its second term integrates, from the densities: ∫(G − G₀)²/(C^{1−q} G₀^q), c = −g = −m."""
    with mp.workdps(40):
        for m, q in ((1e-3, 0.01), (0.3, 0.2), (0.8, 0.5), (0.2, 0.9)):

            def f(x, m=m, q=q):
                mixed = mp_phi(x, -m) ** (1 - q) * mp_phi(x, 0) ** q
                return (mp_phi(x, m) - mp_phi(x, 0)) ** 2 / mixed

            chi2 = mp.mpf(q) ** 2 * mp_integral(f, [3 * m, 0])
            expected = min(float(mp.log1p(chi2)), q * m * m / 2)
            assert divergences.kl_fixed(m, q) == close(expected, rel=1e-11)


# --- the overlap -----------------------------------


def poisson_pair(m, q):
    return (
        lambda x: (1 - q) * norm.pdf(x) + q * norm.pdf(x - m),
        lambda x: (1 - q) * norm.pdf(x) + q * norm.pdf(x + m),
    )


def direct_overlap(m, q):
    p, r = poisson_pair(m, q)
    x = np.arange(-m - 16, m + 16, 0.002)
    return float(np.sum(2 * p(x) * r(x) / (p(x) + r(x)))) * 0.002


@pytest.mark.parametrize("q", [1e-6, 0.01, 0.3, 0.97, 1.0])
def test_overlap_of_one_step_by_quadrature(q):
    for m in (1e-3, 0.3, 1.0, 2.2306, 6.0, 15.9, 16.1):
        assert divergences.overlap_poisson(m, q) == close(direct_overlap(m, q), rel=1e-9, abs=2e-13), m


def test_overlap_of_two_steps_in_the_plane():
    for m, q in ((0.5, 0.3), (1.0, 0.01), (2.0, 0.5), (4.0, 0.2), (3.0, 1.0)):
        x = np.arange(-m - 10, m + 10, 0.02)
        p, r = (f(x) for f in poisson_pair(m, q))
        p2, r2 = np.outer(p, p), np.outer(r, r)
        value = float(np.sum(2 * p2 * r2 / (p2 + r2))) * 0.02**2
        assert divergences.overlap_poisson(m, q, 2) == close(value, rel=1e-9)


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.3, 40), (0.3, 0.05, 2000), (3.0, 0.02, 60), (2.2306, 0.01, 300)])
def test_overlap_of_many_steps_by_monte_carlo(m, q, steps):
    """E_P[2/(1 + e^L)] with the loss of T steps sampled; tolerance from the standard error."""
    rng = np.random.default_rng(10)
    count = 4_000_000 // steps
    x = rng.standard_normal((count, steps)) + m * (rng.random((count, steps)) < q)
    loss = np.log1p(q * np.expm1(m * x - m * m / 2)) - np.log1p(q * np.expm1(-m * x - m * m / 2))
    sample = 2 / (1 + np.exp(loss.sum(axis=1)))
    error = sample.std() / math.sqrt(count)
    assert error < 0.02
    assert divergences.overlap_poisson(m, q, steps) == close(sample.mean(), abs=4.5 * error)


@pytest.mark.slow
def test_overlap_lies_between_dp_accountings_estimates():
    import dp_accounting as dp
    from dp_accounting.pld import privacy_loss_distribution as pld

    m, q, steps = 1.0, 0.01, 1000
    found = []
    for pessimistic in (True, False):
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            one = pld.from_gaussian_mechanism(
                1 / m,
                sampling_prob=q,
                value_discretization_interval=4e-5,
                pessimistic_estimate=pessimistic,
                use_connect_dots=False,
                neighboring_relation=dp.NeighboringRelation.REPLACE_ONE,
            ).self_compose(steps)
        pmf = one._pmf_remove.to_dense_pmf()
        losses = (np.arange(pmf.size) + pmf._lower_loss) * pmf._discretization
        found.append(float(np.sum(pmf._probs * 2 / (1 + np.exp(losses)))))
    low, high = found
    assert high - low < 0.04
    assert low - 1e-6 <= divergences.overlap_poisson(m, q, steps) <= high + 1e-6


def test_overlap_with_q_one_is_one_gaussian_release():
    for m, steps in ((0.1, 25), (0.5, 4), (1e-3, 10**6), (2.0, 9)):
        truth = direct_overlap(m * math.sqrt(steps), 1.0)
        assert divergences.overlap_poisson(m, 1.0, steps) == close(truth, rel=1e-9, abs=1e-14)


def test_overlap_fixed_is_a_lower_bound_on_random_triples():
    rng = np.random.default_rng(11)
    for m in (0.2, 0.7, 1.5, 3.0):
        grid, cell = plane(0.2, 3 * m + 7)
        for g, other, c in zip(*(in_ball(rng, 50, 3, m) for _ in range(3)), strict=True):
            q = float(rng.uniform(0.01, 1))
            c2, g2, other2 = in_plane(c, g, other)
            p, r = ((1 - q) * density(grid, c2) + q * density(grid, z) for z in (g2, other2))
            value = float(np.sum(2 * p * r / np.maximum(p + r, 1e-300)) * cell)
            for method in ("wang", "convexity"):
                floor = divergences.overlap_fixed(m, q, order2=divergences.order2_fixed(m, q, method=method))
                assert value >= floor * (1 - 1e-9)


def test_overlap_fixed_of_several_steps():
    """T steps: a product of T pairs, in the plane for T = 2."""
    x = np.arange(-16, 16, 0.04)
    for m, q in ((0.5, 0.3), (1.0, 0.1), (2.0, 0.5)):
        p, r = (1 - q) * norm.pdf(x + m) + q * norm.pdf(x - m), norm.pdf(x + m)
        p2, r2 = np.outer(p, p), np.outer(r, r)
        value = float(np.sum(2 * p2 * r2 / np.maximum(p2 + r2, 1e-300))) * 0.04**2
        assert value >= divergences.overlap_fixed(m, q, 2, order2=2 * divergences.order2_fixed(m, q))


def test_overlap_fixed_keeps_the_batches_without_the_record():
    """Three records far apart and next to no noise: only z's absence, (1 − q)ᵀ, is left of the overlap."""
    x = np.arange(-40, 40, 0.02)
    for q in (0.05, 0.5, 0.9):
        p, r = ((1 - q) * norm.pdf(x) + q * norm.pdf(x - g) for g in (20, -20))
        value = float(np.sum(2 * p * r / np.maximum(p + r, 1e-300))) * 0.02
        for steps in (1, 3, 40):  # the pair's losses are 0 and ±∞, so that the overlap of T steps is the T-th power
            assert divergences.overlap_fixed(20.0, q, steps, order2=math.inf) == close(value**steps, rel=1e-9)
