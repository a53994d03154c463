"""Trade-off curves, against brute force on small distributions, closed forms and mpmath."""

import itertools
import math

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from reconbound._internal.checks import InputError
from reconbound.bounds.divergence_success import ChiSquareTradeOff, RenyiTradeOff
from reconbound.bounds.trade_off import DPTradeOff, GaussianTradeOff, Least, ProfileTradeOff, Worst

FPRS = np.concatenate([10.0 ** -np.arange(1.0, 11.0), np.linspace(0, 1, 41)])
EPSILONS = np.concatenate([np.linspace(-8, 8, 65), [-30.0, 30.0]])


def exact_delta(p, q, epsilon):
    """Returns Σ (p − e^ε q)₊, the definition."""
    return math.fsum(max(a - math.exp(epsilon) * b, 0.0) for a, b in zip(p, q, strict=True))


def exact_tpr(p, q, fpr):
    """Returns the power of the best randomised test of q against p, by Neyman and Pearson."""
    total, left = 0.0, fpr
    for a, b in sorted(zip(p, q, strict=True), key=lambda ab: -ab[0] / ab[1] if ab[1] else -math.inf):
        share = 1.0 if b <= left else left / b
        total, left = total + share * a, left - share * b
        if left <= 0:
            break
    return min(total, 1.0)


def profile(p, q):
    """Returns the curve of exact points of the privacy profile: at every corner, and between."""
    corners = [math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0 and b > 0]
    epsilons = np.unique(np.round(np.concatenate([corners, np.linspace(-5, 5, 40)]), 12))
    return ProfileTradeOff(epsilons, [exact_delta(p, q, e) + 1e-11 for e in epsilons])


def random_distributions(seed, count=2, outcomes=7, zeros=True):
    rng = np.random.default_rng(seed)
    found = rng.dirichlet(np.full(outcomes, 0.7), size=count) + 1e-9
    if zeros:
        found[0, 0] = found[1, 1] = 0.0
    return found / found.sum(axis=1, keepdims=True)


def check_upper(curve, p, q, slack=1e-12):
    """Checks that no test of p against q beats the curve."""
    for rate in FPRS:
        assert curve.tpr(rate) >= exact_tpr(p, q, rate) - slack
    for epsilon in EPSILONS:
        assert curve.delta(epsilon) >= exact_delta(p, q, epsilon) - slack


@pytest.mark.parametrize("seed", range(12))
def test_profile_is_the_exact_curve_of_a_small_mechanism(seed):
    p, q = random_distributions(seed)
    curve = profile(p, q)
    check_upper(curve, p, q)
    np.testing.assert_allclose(curve.tpr(FPRS), [exact_tpr(p, q, a) for a in FPRS], atol=1e-9)
    inside = np.abs(EPSILONS) < 5
    np.testing.assert_allclose(curve.delta(EPSILONS[inside]),
                               [exact_delta(p, q, e) for e in EPSILONS[inside]], atol=0.02)  # fmt: skip
    check_upper(curve.mirrored(), q, p)
    both = Least((profile(q, p), curve.mirrored()))
    np.testing.assert_allclose(both.tpr(FPRS), [exact_tpr(q, p, a) for a in FPRS], atol=1e-9)


def test_mirrored_keeps_small_chances_of_a_wrong_answer():
    """At FPR 1/2 and μ = 5 the false-negative rate is 2.9e-7: lost where δ is near 1 and known to 1e-5 only."""
    epsilons = np.linspace(-40, 40, 8001)
    noisy = ProfileTradeOff(epsilons, GaussianTradeOff(5.0).delta(epsilons) + 1e-5 * (epsilons < 0))
    assert noisy.fnr(0.5) == 0
    assert Least((noisy, noisy.mirrored())).fnr(0.5) == pytest.approx(norm.sf(5.0), rel=1e-3)


@pytest.mark.parametrize("seed", range(6))
def test_bayes_risk_and_advantage_by_brute_force(seed):
    """All 2⁷ tests, with every answer for each outcome."""
    p, q = random_distributions(seed)
    curve = profile(p, q)
    tests = np.array(list(itertools.product([0, 1], repeat=len(p))))
    for prior in (0.5, 0.1, 0.9, 0.003):
        best = np.min(prior * (1 - tests @ p) + (1 - prior) * (tests @ q))
        assert curve.bayes_risk(prior) <= best + 1e-12
        assert curve.bayes_risk(prior) == pytest.approx(best, abs=0.01)
    assert curve.advantage == pytest.approx(np.max(tests @ p - tests @ q), abs=0.01)
    assert curve.advantage >= np.max(tests @ p - tests @ q) - 1e-12
    assert (curve.bayes_risk(0.0), curve.bayes_risk(1.0)) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("epsilon", "delta"), [(0.0, 0.0), (0.0, 0.2), (1.0, 0.0), (1.0, 1e-3), (3.897, 1e-5), (0.1, 0.5)]
)
def test_dp_is_the_curve_of_its_worst_mechanism(epsilon, delta):
    """Four outcomes reach (ε, δ) with equality (Kairouz, Oh and Viswanath)."""
    high, low = math.exp(epsilon) / (1 + math.exp(epsilon)), 1 / (1 + math.exp(epsilon))
    p = [delta, (1 - delta) * high, (1 - delta) * low, 0.0]
    q = [0.0, (1 - delta) * low, (1 - delta) * high, delta]
    curve = DPTradeOff(epsilon, delta)
    for rate in FPRS:
        assert curve.tpr(rate) == pytest.approx(exact_tpr(p, q, rate), rel=1e-12, abs=1e-15)
    for at in EPSILONS:
        assert curve.delta(at) == pytest.approx(exact_delta(p, q, at), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_chi_square_bounds_every_test(seed):
    p, q = random_distributions(seed, zeros=False)
    order2 = math.log(max(np.sum(p**2 / q), np.sum(q**2 / p)))
    check_upper(ChiSquareTradeOff(order2), p, q)
    check_upper(ChiSquareTradeOff(order2), q, p)


def test_chi_square_is_reached():
    """Two outcomes reach it: (κ, 1 − κ) against (κ + √(κ(1 − κ)χ²), …)."""
    kappa, chi2 = 0.2, 0.3
    tpr = kappa + math.sqrt(kappa * (1 - kappa) * chi2)
    assert np.isclose((tpr - kappa) ** 2 / kappa + (tpr - kappa) ** 2 / (1 - kappa), chi2)
    assert ChiSquareTradeOff(math.log1p(chi2)).tpr(kappa) == pytest.approx(tpr, rel=1e-12)
    for epsilon in (0.2, 0.5, 1.5):  # from e^ε = 1 + χ²/2 on one direction decides
        a = 1 - math.exp(epsilon)
        alphas = np.linspace(0, 1, 200001)
        best = np.max(a * alphas + np.sqrt(alphas * (1 - alphas) * chi2))
        assert ChiSquareTradeOff(math.log1p(chi2)).delta(epsilon) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize("chi2", [1e-12, 1e-3, 0.3, 5.0, 1e6, 1e300])
def test_chi_square_is_one_curve(chi2):
    """δ is the largest tpr − e^ε α, tpr rises and is concave, both are their own mirror images."""
    curve = ChiSquareTradeOff(math.log1p(chi2))
    alphas = np.unique(np.concatenate([np.linspace(0, 1, 20001), 10.0 ** np.linspace(-15, 0, 5001)]))
    rates = curve.tpr(alphas)
    assert np.all(np.diff(rates) >= 0)
    assert np.all(rates >= alphas)
    slopes = np.diff(rates) / np.diff(alphas)
    assert np.all(np.diff(slopes) <= 1e-6 * slopes[:-1] + 1e-4)
    epsilons = np.linspace(-8, 8, 161)
    deltas = curve.delta(epsilons)
    assert np.all(np.diff(deltas) <= 0)
    best = np.array([np.max(rates - math.exp(e) * alphas) for e in epsilons])
    assert np.all(deltas >= best - 1e-15)
    np.testing.assert_allclose(deltas, best, atol=1e-6, rtol=1e-3)
    inside = (rates < 1 - 1e-9) & (alphas > 1e-9)
    if inside.any():
        np.testing.assert_allclose(curve.tpr(1 - rates[inside]), 1 - alphas[inside], atol=1e-6)


@pytest.mark.parametrize("mu", [1e-6, 0.05, 1.0, 3.0, 30.0])
def test_gaussian_against_mpmath(mu):
    mpmath.mp.dps = 40
    curve = GaussianTradeOff(mu)
    for rate in (0.5, 1e-2, 1e-6, 1e-10):
        start = -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(rate))
        assert curve.tpr(rate) == pytest.approx(float(mpmath.ncdf(start + mu)), rel=1e-9)
    for epsilon in (-3.0, -0.1, 0.0, 0.1, 1.0, 20.0):
        first = mpmath.ncdf(mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu)
        exact = first - mpmath.exp(epsilon) * mpmath.ncdf(-mpmath.mpf(mu) / 2 - mpmath.mpf(epsilon) / mu)
        assert (
            exact * (1 - 1e-12) - 1e-300
            <= curve.delta(epsilon)
            <= exact + 1e-14 * (5 + (epsilon / mu) ** 2 + mu**2) * first + 1e-300
        )
    mpmath.mp.dps = 15


def test_curves_from_distributions_are_never_below_a_guess():
    """Transforms leave sums of chances a little off 1: the rate of 1 was 1 − 1e-12."""
    curve = ProfileTradeOff([-1.0, 0.0, 1.0], [1 - math.exp(-1.0) - 1e-9, 1e-9, 0.0])
    assert curve.tpr(1.0) == 1
    assert curve.delta(-1.0) == 1 - math.exp(-1.0)
    alphas = np.linspace(0, 1, 101)
    assert np.all(curve.tpr(alphas) >= alphas)


def test_gaussian_gives_the_values_of_dp_accountings_tests():
    found = GaussianTradeOff(1.0).tpr(np.array([1e-4, 1e-6, 1e-10]))
    np.testing.assert_allclose(found, [0.003274, 8.7218e-5, 4.1303e-8], rtol=2e-4)


def gaussian_profile(mu, points=4001):
    epsilons = np.linspace(-8 * mu - mu**2 / 2, 8 * mu + mu**2 / 2, points)
    return ProfileTradeOff(epsilons, GaussianTradeOff(mu).delta(epsilons))


@pytest.mark.parametrize("mu", [0.2, 1.0, 2.5])
def test_mu_of_a_gaussian_profile_is_its_own(mu):
    found = gaussian_profile(mu).gdp()
    assert mu <= found.mu <= mu + 3e-4
    assert found.regret < 1e-4
    assert GaussianTradeOff(mu).gdp() == type(found)(mu, 0.0, 1e-6)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("least", [1e-6, 1e-3])
def test_mu_is_enough_and_no_smaller_one_is(seed, least):
    p, q = random_distributions(seed, zeros=seed % 2 == 0)
    curve = Worst((profile(p, q), profile(q, p)))
    found = curve.gdp(least)
    if found.mu == math.inf:
        assert curve.tpr(least) > 1 - least
        return
    z = np.linspace(norm.ppf(least), -norm.ppf(least), 20001)
    tpr = np.maximum([exact_tpr(p, q, a) for a in norm.cdf(z)], [exact_tpr(q, p, a) for a in norm.cdf(z)])
    there = tpr <= 1 - least
    assert np.all(tpr[there] <= norm.cdf(z[there] + found.mu) + 1e-12)
    assert np.any(curve.tpr(norm.cdf(z))[there] > norm.cdf(z[there] + found.mu - 2e-3))
    priors = np.linspace(0.001, 0.999, 1999)
    difference = np.max(curve.bayes_risk(priors) - GaussianTradeOff(found.mu).bayes_risk(priors))
    assert found.regret == pytest.approx(difference, abs=2e-4)


def test_a_group_of_gaussians_is_a_gaussian():
    assert GaussianTradeOff(0.5).group(3) == GaussianTradeOff(1.5)
    found = gaussian_profile(0.5).group(3)
    np.testing.assert_allclose(found.tpr(FPRS), GaussianTradeOff(1.5).tpr(FPRS), rtol=2e-3, atol=1e-9)
    assert np.all(found.tpr(FPRS) >= GaussianTradeOff(1.5).tpr(FPRS) * (1 - 1e-9) - 1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_no_test_beats_the_curve_of_a_group(seed):
    """Three steps between four random distributions, each neighbour pair within one curve."""
    four = random_distributions(seed, count=4, zeros=False)
    steps = [profile(b, a) for a, b in itertools.pairwise(four)]
    one = Worst((*steps, *[profile(a, b) for a, b in itertools.pairwise(four)]))
    check_upper(one.group(3), four[3], four[0], slack=1e-10)
    check_upper(one.group(2), four[0], four[2], slack=1e-10)
    assert one.group(1) is one


def test_a_group_under_pure_dp_is_better_than_the_sum_of_epsilons():
    """(2ε, 0) holds, and so does the curve: at ε = 1 two steps have an advantage of 0.632, not tanh(1) = 0.762."""
    group = DPTradeOff(1.0).group(2)
    assert group.advantage == pytest.approx(1 - math.exp(-1), abs=2e-4)
    assert group.delta(2.0001) < 1e-9
    assert group.delta(1.9) > 1e-3
    check = group.tpr(FPRS)
    chained = DPTradeOff(1.0).tpr(DPTradeOff(1.0).tpr(FPRS))
    assert np.all(check >= chained - 1e-12)
    np.testing.assert_allclose(check, chained, rtol=1e-3)


def test_least_and_worst():
    one, other = DPTradeOff(1.0), DPTradeOff(0.0, 0.3)
    assert Least((one, other)).advantage == other.advantage
    assert Worst((one, other)).advantage == one.advantage
    np.testing.assert_array_equal(Least((one, other)).tpr(FPRS), np.minimum(one.tpr(FPRS), other.tpr(FPRS)))


@pytest.mark.parametrize(
    "curve",
    [GaussianTradeOff(0.0), GaussianTradeOff(1e6), DPTradeOff(math.inf), DPTradeOff(800.0, 1e-5),
     ChiSquareTradeOff(math.inf), ChiSquareTradeOff(0.0), ChiSquareTradeOff(900.0),
     ProfileTradeOff([0.0], [0.25]), ProfileTradeOff([-1e4, 0.0, 1e4], [1.0, 0.5, 0.0])],
)  # fmt: skip
def test_extremes_stay_between_zero_and_one_and_are_monotone(curve):
    rates, epsilons = np.sort(FPRS), np.sort(np.append(EPSILONS, [-1e5, -800.0, 800.0, 1e5]))
    tpr, delta = curve.tpr(rates), curve.delta(epsilons)
    assert np.all((tpr >= rates - 1e-15) & (tpr <= 1)), tpr
    assert np.all((delta >= -np.expm1(np.minimum(epsilons, 0)) - 1e-12) & (delta <= 1))
    assert np.all(np.diff(tpr) >= 0)
    assert np.all(np.diff(delta) <= 1e-12)
    assert 0 <= curve.bayes_risk(0.5) <= 0.5
    found = curve.gdp()
    assert found.mu >= 0
    assert 0 <= found.regret <= 0.5
    assert isinstance(curve.tpr(0.1), float)
    assert curve.fnr(0.1) == 1 - curve.tpr(0.1)


def test_wrong_values_are_named():
    curve = GaussianTradeOff(1.0)
    for call, name in (
        (lambda: curve.tpr(1.5), "fpr|kappa"),
        (lambda: curve.bayes_risk(-0.1), "prior"),
        (lambda: DPTradeOff(1.0).gdp(0.7), "least_rate"),
        (lambda: curve.group(0), "size"),
        (lambda: GaussianTradeOff(-1.0), "mu"),
        (lambda: DPTradeOff(1.0, 2.0), "delta"),
        (lambda: ProfileTradeOff([1.0, 0.0], [0.1, 0.2]), "epsilons"),
        (lambda: ProfileTradeOff([0.0, 1.0], [0.1]), "deltas"),
    ):
        with pytest.raises(InputError, match=name):
            call()


@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_epsilon_is_the_inverse_of_delta(mu):
    curve = GaussianTradeOff(mu)
    for delta in (1e-9, 1e-5, 0.01):
        epsilon = curve.epsilon(delta)
        assert curve.delta(epsilon) <= delta
        assert curve.delta(epsilon * (1 - 1e-6)) > delta
    assert curve.epsilon(0.9) == 0.0
    assert DPTradeOff(1.0, 0.01).epsilon(0.001) is None


@pytest.mark.parametrize("mu", [0.05, 0.7, 3.0])
def test_renyi_bounds_the_gaussian_that_attains_its_divergences(mu):
    """D_α = αμ²/2 is the Gaussian's; at its own best order Hölder's inequality is near."""
    orders = np.concatenate([1 + np.geomspace(1e-3, 1, 60), np.geomspace(2.01, 500, 80)])
    curve, exact = RenyiTradeOff(orders, orders * mu**2 / 2), GaussianTradeOff(mu)
    assert np.all(curve.tpr(FPRS) >= exact.tpr(FPRS) * (1 - 1e-12))
    assert np.all(curve.delta(EPSILONS) >= exact.delta(EPSILONS) - 1e-13)
    assert curve.tpr(1e-10) <= 4 * exact.tpr(1e-10)
    assert curve.epsilon(1e-6) <= 1.3 * exact.epsilon(1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_renyi_bounds_random_mechanisms(seed):
    p, q = random_distributions(seed, zeros=False)
    orders = np.array([1.1, 1.5, 2.0, 4.0, 32.0])
    both = [np.log(np.sum(a ** orders[:, None] * b ** (1 - orders[:, None]), axis=1)) for a, b in ((p, q), (q, p))]
    curve = RenyiTradeOff(orders, np.max(both, axis=0) / (orders - 1))
    check_upper(curve, p, q)
    check_upper(curve, q, p)


@pytest.mark.parametrize("size", [2, 5, 9])
def test_curve_of_a_group_is_convex(size):
    """The points that a finite search gives are not convex, and the lowest line was missed: tpr fell by 0.02."""
    curve = ProfileTradeOff([-2.0, -0.3, 0.0, 0.3, 2.0], [0.87, 0.3, 0.1, 0.05, 1e-6])
    alphas = np.concatenate([[0.0], 10.0 ** np.linspace(-9, -0.02, 300), [1.0]])
    group = Worst((curve, curve.mirrored())).group(size)
    rates, epsilons = group.tpr(alphas), np.linspace(-9, 9, 361)
    deltas = group.delta(epsilons)
    assert np.all(np.diff(rates) >= -1e-15)
    assert np.all(np.diff(np.diff(rates) / np.diff(alphas)) <= 1e-9 * (rates[1:-1] / alphas[1:-1]))
    assert np.all(np.diff(deltas) <= 0)
    assert np.all(np.diff(np.diff(deltas) / np.diff(np.exp(epsilons))) >= -1e-9)
    lines = np.min(np.exp(epsilons) * alphas[:, None] + deltas, axis=1)
    assert np.all(rates <= np.minimum(lines, 1.0) * (1 + 1e-9))
    assert np.all(rates >= curve.tpr(curve.tpr(alphas)) - 1e-9)
