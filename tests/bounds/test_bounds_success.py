"""Success probabilities against the best tests and guesses there are: Neyman–Pearson, exact Bayes, Monte Carlo."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from approximate import TENS, close
from reconbound._internal.checks import InputError
from reconbound.bounds import (
    layer_cake,
    membership_from_gdp,
    membership_from_pure,
    prior_from_records,
    rero_from_curve,
    rero_from_gdp,
    rero_from_order2,
    rero_from_pure,
)

KAPPAS = st.floats(-320, 0).map(lambda x: min(10.0**x, 1.0))


def random_pair(rng, size):
    base = rng.dirichlet(np.full(size, rng.choice([0.5, 3.0])))
    mix = 10 ** rng.uniform(-1.5, 0)
    p, q = (1 - mix) * base + mix * rng.dirichlet(np.ones(size), 2) + 1e-9
    return p / p.sum(), q / q.sum()


def hockey_stick(p, q, eps):
    return float(np.sum(np.maximum(p - np.exp(eps) * q, 0)))


def most_powerful(p, q, kappa):
    """Neyman–Pearson: the largest P(S) over randomised S with Q(S) = κ, by filling up the likelihood ratios."""
    order = np.argsort(-p / q)
    reached_q, reached_p = np.concatenate([[0], np.cumsum(q[order])]), np.concatenate([[0], np.cumsum(p[order])])
    return float(np.interp(kappa, reached_q, reached_p))


# --- membership -----------------------------------


def test_membership_gives_the_papers_53_percent():
    right = (1 + membership_from_pure(0.1)) / 2
    assert right == close(math.exp(0.1) / (1 + math.exp(0.1)))  # the best guess of a randomised response
    assert right == close(0.525, rel=0, abs=5e-4)
    assert f"{right:.0%}" in ("52%", "53%")


def test_membership_bounds_the_total_variation():
    rng = np.random.default_rng(0)
    for _ in range(500):
        p, q = random_pair(rng, int(rng.integers(2, 8)))
        advantage = 0.5 * float(np.sum(np.abs(p - q)))
        top = float(np.abs(np.log(p / q)).max())
        assert advantage <= membership_from_pure(top) + 1e-12
        eps = float(rng.uniform(0, top))
        delta = max(hockey_stick(p, q, eps), hockey_stick(q, p, eps))
        assert advantage <= membership_from_pure(eps, delta) + 1e-12


def test_membership_is_attained():
    for eps, delta in ((0.1, 0.0), (1.0, 0.05), (5.0, 1e-5), (0.0, 0.3)):
        keep = math.exp(eps) / (1 + math.exp(eps))
        p = np.array([delta, (1 - delta) * keep, (1 - delta) * (1 - keep), 0.0])
        advantage = 0.5 * float(np.sum(np.abs(p - p[::-1])))
        assert membership_from_pure(eps, delta) == close(advantage)
    x = np.linspace(-20, 20, 400_001)
    for mu in (0.01, 0.5, 1.0, 4.0):
        gap = 0.5 * float(np.sum(np.abs(norm.pdf(x) - norm.pdf(x - mu)))) * (x[1] - x[0])
        assert membership_from_gdp(mu) == close(gap, rel=1e-6)


# --- reconstruction robustness -----------------------------------


def test_rero_bounds_the_most_powerful_test():
    rng = np.random.default_rng(1)
    closest = {"curve": 0.0, "order2": 0.0, "pure": 0.0}
    for _ in range(400):
        p, q = random_pair(rng, int(rng.integers(2, 8)))
        kappa = float(10 ** rng.uniform(-4, 0))
        best = most_powerful(p, q, kappa)
        loss = np.log(p / q)
        curve = [hockey_stick(p, q, eps) for eps in loss]
        found = {
            "curve": rero_from_curve(kappa, loss, curve),
            "order2": rero_from_order2(kappa, max(math.log(float(np.sum(p**2 / q))), 0.0)),
            "pure": rero_from_pure(kappa, float(np.abs(loss).max())),
        }
        eps = float(rng.uniform(0, 2))
        assert best <= rero_from_pure(kappa, eps, min(hockey_stick(p, q, eps), 1.0)) + 1e-12
        assert best <= rero_from_curve(kappa, [eps, eps / 2], [hockey_stick(p, q, e) for e in (eps, eps / 2)]) + 1e-12
        for name, value in found.items():
            assert best <= value + 1e-12, name
            closest[name] = max(closest[name], best / value)
        assert found["curve"] == close(best, rel=1e-9)  # with every breakpoint of the curve it is the test itself
    assert all(ratio > 0.99 for ratio in closest.values())


def test_rero_bounds_a_reconstruction_game():
    """n records, uniform prior, any release and any reference: the best guess after the release, exactly."""
    rng = np.random.default_rng(2)
    for _ in range(300):
        n, size = int(rng.integers(2, 9)), int(rng.integers(2, 7))
        releases = rng.dirichlet(np.ones(size), n) + 1e-6
        releases /= releases.sum(1, keepdims=True)
        reference = rng.dirichlet(np.ones(size)) * 0.5 + releases.mean(0) * 0.5
        success = float(np.sum(releases.max(axis=0))) / n
        kappa = 1 / n
        order2 = max(math.log(float(np.sum(p**2 / reference))) for p in releases)
        assert success <= rero_from_order2(kappa, order2) + 1e-12
        eps = max(float(np.log(p / reference).max()) for p in releases)
        assert success <= rero_from_pure(kappa, eps) + 1e-12
        grid = np.linspace(-3, 3, 61)
        deltas = [max(hockey_stick(p, reference, e) for p in releases) for e in grid]
        assert success <= rero_from_curve(kappa, grid, deltas) + 1e-12


def test_rero_from_gdp_is_the_gaussian_test():
    """The best test between N(0,1) and N(μ,1) rejects above a threshold; the curve of its δ(ε) says the same."""
    for mu in (0.1, 1.0, 3.0):
        eps = np.linspace(-8, 12, 20_001)
        deltas = norm.cdf(mu / 2 - eps / mu) - np.exp(eps) * norm.cdf(-mu / 2 - eps / mu)
        for kappa in (1e-6, 1e-3, 0.1, 0.5, 0.9):
            threshold = norm.isf(kappa)
            truth = norm.sf(threshold - mu)
            assert rero_from_gdp(kappa, mu) == close(truth, rel=1e-9)
            assert truth - 1e-12 <= rero_from_curve(kappa, eps, deltas) <= truth * (1 + 1e-5)
            assert truth <= rero_from_order2(kappa, mu**2)


@given(KAPPAS, TENS, st.floats(0, 3), st.floats(0, 1))
@settings(max_examples=300, deadline=None)
def test_success_is_a_probability_that_grows(kappa, eps, more, delta):
    larger = eps * 10**more
    for success in (rero_from_pure, rero_from_order2):
        assert kappa * (1 - 1e-12) <= success(kappa, eps) <= success(kappa, larger) * (1 + 1e-12) <= 1 + 1e-12
        assert success(kappa, math.inf) == 1.0
        assert success(0.0, math.inf) == 1.0  # infinity: the release need not have the reference's support
        assert success(1.0, eps) == 1.0
        assert success(kappa, 0.0) == close(kappa, rel=1e-9)
    # never above √(κe^ε), nor above 1
    assert rero_from_order2(kappa, eps) <= math.exp(min((math.log(kappa) + eps) / 2, 0.0)) * (1 + 1e-9) + 1e-300
    assert rero_from_pure(kappa, eps, delta) <= 1
    assert rero_from_curve(kappa, [eps], [delta]) == close(rero_from_pure(kappa, eps, delta), rel=1e-9)
    assert kappa * (1 - 1e-9) <= rero_from_gdp(kappa, eps) <= 1
    for advantage in (membership_from_pure, membership_from_gdp):
        assert 0 <= advantage(eps) <= advantage(larger) <= 1
    assert membership_from_pure(eps) <= membership_from_pure(eps, delta) * (1 + 1e-12) <= 1 + 1e-12
    assert membership_from_pure(math.inf) == 1.0


def test_order2_success_for_a_hopeless_divergence():
    """κ far below e^(−700) and ε far above: nothing is protected, and the bound must say so."""
    for kappa in (1e-6, 1e-300, 1e-320):
        assert rero_from_order2(kappa, 1e9) == 1.0
        assert rero_from_curve(kappa, [1e9], [0.0]) == 1.0
        assert rero_from_pure(kappa, 1e9) == 1.0


def test_arrays_of_kappa():
    kappa = np.array([[0.0, 0.1], [0.5, 1.0]])
    for values in (
        rero_from_pure(kappa, 0.5),
        rero_from_order2(kappa, 0.5),
        rero_from_gdp(kappa, 0.5),
        rero_from_curve(kappa, [0.5, 0.1], [0.0, 0.2]),
    ):
        assert values.shape == (2, 2)
        assert np.all(values >= kappa - 1e-12)
    assert rero_from_pure(0.0, 2.0, 0.25) == 0.25


# --- the layer cake -----------------------------------


def uniform_prior(t):
    """κ(t) of a uniform record in [0, 1]: the longest interval of half-width √t."""
    return np.minimum(2 * np.sqrt(t), 1.0)


def test_layer_cake_without_release_equals_best_guess():
    bound = layer_cake(lambda k: k, uniform_prior, largest_error=0.25, points=20_000)
    assert bound.value == close(1 / 12, rel=1e-3)
    assert bound.value <= 1 / 12
    assert layer_cake(lambda k: np.ones_like(k), uniform_prior, largest_error=0.25).value == 0.0
    coarse = [layer_cake(lambda k: k, uniform_prior, largest_error=0.25, points=n).value for n in (1, 4, 40, 400)]
    assert coarse == sorted(coarse)


@pytest.mark.parametrize("s", [0.1, 0.3, 1.0, 3.0])
def test_layer_cake_lies_below_the_exact_bayes_error(s):
    """z uniform on [0, 1], x = z + N(0, s²) released: the posterior mean's error by quadrature, and by simulation.

    The reference release is that of z = 1/2: μ = 1/(2s), χ² = e^{1/(4s²)} − 1."""
    z, x = np.linspace(0, 1, 401), np.linspace(-8 * s, 1 + 8 * s, 2001)
    weight = np.full(401, 1 / 400)
    weight[[0, -1]] /= 2
    joint = weight[:, None] * norm.pdf((x - z[:, None]) / s) / s
    mean = z @ joint / joint.sum(0)
    bayes = float(np.sum((z[:, None] - mean) ** 2 * joint)) * (x[1] - x[0])
    rng = np.random.default_rng(3)
    record = rng.random(100_000)
    guess = np.interp(record + s * rng.standard_normal(100_000), x, mean)
    errors = (guess - record) ** 2
    assert errors.mean() == close(bayes, rel=0, abs=4.5 * errors.std() / math.sqrt(100_000) + 1e-6)
    mu = 0.5 / s
    curves = {
        "gdp": lambda k: rero_from_gdp(k, mu),
        "order2": lambda k: rero_from_order2(k, mu**2),
    }
    values = {name: layer_cake(c, uniform_prior, largest_error=0.25).value for name, c in curves.items()}
    assert 0 <= values["order2"] <= values["gdp"] * (1 + 1e-9) <= bayes
    if s >= 3:
        assert values["gdp"] > 0.6 * bayes


def test_layer_cake_on_random_mechanisms_and_records():
    """A proxy data set as the prior, random releases: the exact Bayes error, reference the mean release."""
    rng = np.random.default_rng(4)
    for _ in range(60):
        n, d, size = int(rng.integers(2, 12)), int(rng.integers(1, 4)), int(rng.integers(2, 6))
        records = rng.normal(size=(n, d))
        mix = rng.random()
        releases = (1 - mix) * rng.dirichlet(np.ones(size)) + mix * rng.dirichlet(np.ones(size), n) + 1e-6
        releases /= releases.sum(1, keepdims=True)
        joint = releases / n
        mean = joint.T @ records / joint.sum(0)[:, None]
        bayes = float(np.sum(joint * ((records[:, None] - mean) ** 2).sum(2))) / d
        order2 = max(math.log(float(np.sum(p**2 / releases.mean(0)))) for p in releases)
        prior, largest = prior_from_records(records)
        floor = layer_cake(lambda k, e=order2: rero_from_order2(k, max(e, 0.0)), prior, largest_error=largest)
        assert floor.value <= bayes * (1 + 1e-9)
        blind = layer_cake(lambda k: k, prior, largest_error=largest).value
        assert floor.value <= blind * (1 + 1e-9) <= float(np.var(records, axis=0).mean()) * (1 + 1e-9)


def test_prior_from_records_bounds_every_guess():
    rng = np.random.default_rng(5)
    for n, d in ((2, 1), (30, 1), (40, 3), (25, 20)):
        records = rng.normal(size=(n, d)) * 10 ** rng.uniform(-3, 3)
        if n > 10:
            records[:5] = records[0]  # copies
        prior, largest = prior_from_records(records + 7)
        pairs = (records[:, None] + records) / 2
        guesses = np.concatenate([records, pairs.reshape(-1, d), records.mean(0) + 0 * records[:1]])
        errors = ((records - guesses[:, None]) ** 2).mean(axis=2)
        for t in np.concatenate([[0.0], np.quantile(errors, np.linspace(0, 1, 30)), [largest]]):
            best = float(np.max(np.mean(errors <= t, axis=1)))
            assert prior(np.array(t * (1 + 1e-12))) >= best - 1e-12
        assert prior(np.array(0.0)) == close((5 if n > 10 else 1) / n)
        assert prior(np.array(largest)) == 1.0
        ts = np.linspace(0, largest, 100)
        assert np.all(np.diff(prior(ts)) >= 0)


def test_prior_from_records_keeps_copies_together():
    """The expanded square of a million coordinates is wrong by hundreds of ulps: copies must still be at distance 0."""
    for value in (0.1, 0.3, 1 / 3):
        records = np.full((2, 2_000_000), value) * [[1], [-1]]
        assert prior_from_records(records, bins=1 << 23)[0](np.array(0.0)) >= 0.5


def test_prior_from_records_equals_count():
    """κ(t) = maxᵢ #{j : ‖zᵢ − zⱼ‖²/d ≤ 4t}/n, up to the histogram's resolution, which only raises it."""
    rng = np.random.default_rng(6)
    records = rng.random((50, 2, 2))
    flat = records.reshape(50, 4)
    distance = ((flat[:, None] - flat) ** 2).mean(2)
    prior, largest = prior_from_records(records, bins=1 << 16)
    for t in np.linspace(0, largest, 50):
        counted = float(np.max(np.mean(distance <= 4 * t, axis=1)))
        slightly_more = float(np.max(np.mean(distance <= 4 * t * 1.001 + 1e-6, axis=1)))
        assert counted <= prior(np.array(t)) <= slightly_more


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: membership_from_pure(-1.0), "epsilon", "-1.0"),
        (lambda: membership_from_pure(1.0, -0.1), "delta", "-0.1"),
        (lambda: membership_from_gdp(math.nan), "mu", "nan"),
        (lambda: rero_from_pure(1.5, 1.0), "kappa", "1.5"),
        (lambda: rero_from_pure([0.1, 1.5], 1.0), "kappa", "1.5"),
        (lambda: rero_from_pure(0.1, 1.0, 2.0), "delta", "2.0"),
        (lambda: rero_from_order2(-0.1, 1.0), "kappa", "-0.1"),
        (lambda: rero_from_order2(0.1, math.nan), "epsilon", "nan"),
        (lambda: rero_from_gdp(0.1, -1.0), "mu", "-1.0"),
        (lambda: rero_from_curve(0.1, [0.0, 1.0], [0.1]), "deltas", "1"),
        (lambda: rero_from_curve(0.1, [math.nan], [0.1]), "epsilons[0]", "nan"),
        (lambda: layer_cake(lambda k: k, uniform_prior, largest_error=0.0), "largest_error", "0.0"),
        (lambda: layer_cake(lambda k: k, uniform_prior, largest_error=1.0, points=0), "points", "0"),
        (lambda: layer_cake(lambda k: k, lambda t: t * math.nan, largest_error=1.0), "prior(t)[0]", "nan"),
        (lambda: layer_cake(lambda k: k * math.nan, uniform_prior, largest_error=1.0), "success(kappa)[0]", "nan"),
        (lambda: prior_from_records([[1.0]]), "records", "1"),
        (lambda: prior_from_records([]), "records", "[]"),
        (lambda: prior_from_records(3.0), "records", "3.0"),
        (lambda: prior_from_records([[1.0], [math.inf]]), "records[1, 0]", "inf"),
        (lambda: prior_from_records([[1.0], [1e200]]), "records", "1e+200"),
        (lambda: prior_from_records([[1.0], [2.0]], bins=0), "bins", "0"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.name == name
    assert value in str(caught.value)
