"""Gaussian DP, zCDP, Laplace and discrete Gaussian noise, against closed forms, many digits and sums."""

import math

import mpmath
import numpy as np
import pytest
from scipy.stats import norm

from reconbound._internal.checks import InputError
from reconbound.mechanisms import DP, GDP, ZCDP, Composition, DiscreteGaussian, Laplace, SampledGaussian, as_mechanism
from reconbound.mechanisms.group import group_of
from reconbound.mechanisms.guarantee import guarantee

REPLACE, ADD = "replace-one", "add/remove"
KAPPAS = np.array([1e-6, 1e-3, 0.1, 0.5])


def gaussian_delta(mu, epsilon):
    """The exact δ(ε) of N(0, 1) and N(μ, 1), in fifty digits."""
    with mpmath.workdps(50):
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
def test_gdp_is_one_gaussian_release(mu):
    add, replace = GDP(mu, ADD), GDP(2 * mu, REPLACE)
    exact = SampledGaussian(1 / mu, clip="hard")
    for found in (add, replace):
        assert found.order2() == pytest.approx(exact.order2())
        assert found.overlap() == pytest.approx(exact.overlap())
        assert found.membership_advantage() == pytest.approx(math.erf(2 * mu / math.sqrt(8)))
        epsilon = found.epsilon_at(1e-6)
        assert float(gaussian_delta(2 * mu, epsilon)) == pytest.approx(1e-6, rel=1e-6)
        np.testing.assert_allclose(found.trade_off().tpr(KAPPAS), norm.cdf(norm.ppf(KAPPAS) + 2 * mu), rtol=1e-9)
    assert add.kl() == pytest.approx(exact.kl())
    assert float(gaussian_delta(mu, add.epsilon_at(1e-6, ADD))) == pytest.approx(1e-6, rel=1e-6)
    assert replace.epsilon_at(1e-6, ADD) is None
    np.testing.assert_allclose(add.rero(KAPPAS), norm.cdf(norm.ppf(KAPPAS) + mu))
    assert add.for_group(3) == GDP(3 * mu, ADD)
    assert GDP(mu).neighbours == REPLACE
    assert any("without its neighbours" in note for note in GDP(mu).notes())
    assert any("central limit" in note for note in add.notes())


def test_statements_of_nothing_and_of_everything():
    for found in (GDP(0.0, ADD), ZCDP(0.0, adjacency=ADD)):
        assert (found.order2(), found.kl(), found.overlap()) == (0.0, 0.0, 1.0)
        assert found.membership_advantage() == 0.0
        assert found.epsilon_at(1e-5) <= 1e-11
        assert found.rero(0.25) == pytest.approx(0.25)
    for found in (GDP(1e60, ADD), ZCDP(1e60, adjacency=ADD), GDP(300.0, ADD), ZCDP(1e5, 3.0)):
        facts = guarantee(found).to_dict()
        assert facts["membership_advantage"] == pytest.approx(1.0)
        assert all(math.isfinite(b["mse"]) and 0 <= b["mse"] < 1e-10 for b in facts["bounds"])


@pytest.mark.parametrize(("rho", "xi"), [(0.001, 0.0), (0.1, 0.05), (2.0, 1.0)])
@pytest.mark.parametrize("delta", [1e-10, 1e-5, 0.1])
def test_zcdp_epsilon_by_search_over_all_orders(rho, xi, delta):
    """Canonne, Kamath and Steinke's conversion, minimised in thirty digits: ours is never below it, and near it."""
    with mpmath.workdps(30):

        def at(t):
            a = 1 + mpmath.exp(t)
            return xi + rho * a + mpmath.log(1 - 1 / a) - (mpmath.log(delta) + mpmath.log(a)) / (a - 1)

        t = min(np.linspace(-9, 16, 4001), key=at)
        for width in (1e-2, 1e-4, 1e-6):
            t = min(np.linspace(t - width, t + width, 41), key=at)
        best = max(float(at(t)), 0.0)
    found = ZCDP(rho, xi, ADD).epsilon_at(delta, ADD)
    assert best <= found <= best * (1 + 1e-4) + 1e-9


@pytest.mark.parametrize("mu", [0.05, 1.0, 4.0])
def test_a_gaussian_is_zcdp_and_no_statement_is_optimistic(mu):
    """ρ = μ²/2. Everything that follows from ρ holds for the Gaussian, under both neighbours."""
    stated, exact = ZCDP(mu**2 / 2, adjacency=ADD), GDP(mu, ADD)
    assert stated.order2() == pytest.approx(exact.order2())
    assert stated.kl() == pytest.approx(exact.kl())
    assert stated.order2_paper() == pytest.approx(exact.order2_paper())
    assert stated.overlap() <= exact.overlap()
    assert stated.membership_advantage() >= exact.membership_advantage()
    assert np.all(stated.rero(KAPPAS) >= exact.rero(KAPPAS))
    assert np.all(stated.rero(KAPPAS) <= np.minimum(3 * exact.rero(KAPPAS), 1))
    for delta in (1e-8, 1e-3):
        for adjacency in (ADD, REPLACE):
            assert exact.epsilon_at(delta, adjacency) <= stated.epsilon_at(delta, adjacency)
    assert stated.for_group(2).order2_paper() == pytest.approx(2 * 4 * mu**2 / 2)


def test_zcdp_of_replaced_records_on_random_triples():
    """Q without the record, P and R with it: smallest ρ and ξ that hold for (P, Q), (Q, P), (R, Q), (Q, R); then the
    divergences of P from R must be below what the statement says of replace-one, at every order."""
    rng, orders = np.random.default_rng(5), np.concatenate([1 + np.geomspace(1e-3, 30, 60), [2.0]])

    def renyi(p, q):
        return np.array([np.log(np.sum(p**a * q ** (1 - a))) / (a - 1) for a in orders])

    tight = 0.0
    for _ in range(300):
        p, q, r = rng.dirichlet(np.full(4, rng.choice([1.0, 5.0, 50.0])), 3) + 1e-6
        p, q, r = p / p.sum(), q / q.sum(), r / r.sum()
        worst = np.max([renyi(*pair) for pair in ((p, q), (q, p), (r, q), (q, r))], axis=0)
        for xi in (0.0, 0.3 * worst[0]):
            # orders above 31 have D_α ≤ max ln p/q, which ρα covers there
            top = max(np.abs(np.log(p / q)).max(), np.abs(np.log(r / q)).max())
            rho = max(np.max((worst - xi) / orders), (top - xi) / 31, 0.0)
            stated = ZCDP(rho, xi, ADD)
            ratio = renyi(p, r) / stated._divergence(orders, True)
            assert np.all(ratio <= 1 + 1e-9)
            assert stated.order2() == pytest.approx(stated._divergence(2.0, True))
            tight = max(tight, ratio.max())
    assert tight > 0.3  # the test could fail


@pytest.mark.parametrize(
    "bad", [{"rho": -1.0}, {"rho": math.nan}, {"rho": 1.0, "xi": -1.0}, {"rho": 1.0, "adjacency": "x"}]
)
def test_wrong_statements_are_refused(bad):
    with pytest.raises(InputError):
        ZCDP(**bad)
    with pytest.raises(InputError):
        GDP(-1.0)


# --- Laplace and discrete Gaussian ------------------------------------------------


def test_laplace_is_the_event_and_its_own_closed_form():
    import dp_accounting as dp

    event = as_mechanism(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.LaplaceDpEvent(2.0)), 5))
    found = Laplace(2.0, 0.1, 5)
    assert found.releases() == event.releases()
    assert Laplace(0.5).membership_advantage() == pytest.approx(-math.expm1(-2.0), rel=1e-3)
    group = Laplace(2.0, 0.1, 5).for_group(3)
    assert (group.noise_multiplier, group.sample_rate) == (pytest.approx(2 / 3), pytest.approx(1 - 0.9**3))
    pure = DP(1.0, adjacency=REPLACE)  # b = 2: ε = 1 under replace-one
    assert Laplace(2.0).order2() <= pure.order2()
    assert Laplace(2.0).overlap() >= pure.overlap() * (1 - 1e-3)


@pytest.mark.parametrize(("sigma", "shift", "steps"), [(1.0, 1, 1), (0.4, 1, 3), (3.0, 2, 2)])
def test_discrete_gaussian_against_all_outcomes(sigma, shift, steps):
    found = DiscreteGaussian(sigma, shift, steps)
    x = np.arange(-60, 61)
    weights = [np.exp(-((x - s) ** 2) / (2 * sigma**2)) for s in (0, shift, 2 * shift)]
    base, one, two = (w / w.sum() for w in weights)
    inside = base > 1e-300
    there = inside & (two > 1e-300)
    assert found.order2() == pytest.approx(steps * math.log(np.sum(base[there] ** 2 / two[there])), rel=1e-6)
    assert found.kl() == pytest.approx(steps * np.sum(base[there] * np.log(base[there] / one[there])), rel=1e-6)
    p, q = base, two
    for _ in range(steps - 1):
        p, q = np.multiply.outer(p, base).ravel(), np.multiply.outer(q, two).ravel()
        keep = (p > 1e-18) | (q > 1e-18)
        p, q = p[keep], q[keep]
    for epsilon in (0.5, 2.0):
        delta = float(np.sum(np.maximum(p - math.exp(epsilon) * q, 0)))
        assert epsilon * (1 - 1e-6) <= found.epsilon_at(delta) <= epsilon * (1 + 1e-2)
    assert np.abs(p - q).sum() / 2 * (1 - 1e-6) <= found.membership_advantage()
    assert found.membership_advantage() <= np.abs(p - q).sum() / 2 * (1 + 1e-2)
    assert found.for_group(2) == DiscreteGaussian(sigma, 2 * shift, steps)


def test_different_mechanisms_are_composed():
    whole = Composition([SampledGaussian(2.0, 0.1, 10, clip="hard"), Laplace(5.0), DiscreteGaussian(4.0)])
    assert whole.order2() == pytest.approx(sum(m.order2() for m in whole.mechanisms))
    assert whole.epsilon_at(1e-5) > max(m.epsilon_at(1e-5) for m in whole.mechanisms)
    assert whole.epsilon_at(1e-5, ADD) < sum(m.epsilon_at(1e-5, ADD) for m in whole.mechanisms)


def test_noise_that_is_too_small_tells_everything():
    """dp-accounting's distribution then has no finite loss: this crashed."""
    mechanism = DiscreteGaussian(2.3157, 20, 3)
    assert mechanism.trade_off(REPLACE).tpr(1e-6) == pytest.approx(1.0)
    assert mechanism.membership_advantage() == pytest.approx(1.0)
    assert mechanism.overlap() < 1e-60
    assert group_of(DiscreteGaussian(2.3157, 2, 3), 10).trade_off(REPLACE).advantage == pytest.approx(1.0)
