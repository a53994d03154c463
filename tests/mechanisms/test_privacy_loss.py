"""Privacy loss distributions of Gaussian steps: against integrals, exact curves, finer grids and tilted FFTs."""

import math
import time

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from scipy.optimize import brentq
from scipy.signal import fftconvolve
from scipy.special import logsumexp
from scipy.stats import norm

from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.epsilons import fixed_size_epsilon, gaussian_epsilon
from reconbound.mechanisms.privacy_loss import gaussian_step

pytestmark = pytest.mark.slow

REPLACE, ADD = "replace-one", "add/remove"


def densities(m, q, adjacency, points=200_001):
    """P and Q of one step on a grid, with its width."""
    x = np.linspace(-m - 13, m + 13, points)
    p = q * norm.pdf(x - m) + (1 - q) * norm.pdf(x)
    other = q * norm.pdf(x + m) + (1 - q) * norm.pdf(x) if adjacency == REPLACE else norm.pdf(x)
    return p, other, x[1] - x[0]


def integrated_delta(m, q, adjacency, epsilon):
    """The hockey-stick divergence of one step in its worse direction."""
    p, other, dx = densities(m, q, adjacency)
    e = math.exp(epsilon)
    return max(np.sum(np.maximum(a - e * b, 0)) for a, b in ((p, other), (other, p))) * dx


def gaussian_delta(shift, epsilon):
    """δ(ε) of N(0,1) against N(shift,1)."""
    return norm.cdf(shift / 2 - epsilon / shift) - np.exp(epsilon + norm.logcdf(-shift / 2 - epsilon / shift))


CASES = [(1.0, 0.01), (0.3, 0.2), (3.0, 0.05), (1.0, 1.0), (5.0, 1e-3)]


@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
@pytest.mark.parametrize(("m", "q"), CASES)
def test_one_step_agrees_with_the_integral(m, q, adjacency):
    pld = privacy_loss.gaussian(m, q, 1, adjacency)
    for eps in (0.0, 0.01, 0.5, 2.0):
        truth = integrated_delta(m, q, adjacency, eps)
        assert truth - 1e-8 <= privacy_loss.delta(pld, eps) <= truth * (1 + 1e-3) + 1e-7
    for target in (1e-2, 1e-4):
        eps = privacy_loss.epsilon(pld, target)
        assert eps >= 0
        assert integrated_delta(m, q, adjacency, eps) <= target + 1e-8
        if eps > 1e-3:
            assert integrated_delta(m, q, adjacency, eps * (1 - 2e-3)) > target - 1e-7


@pytest.mark.parametrize(("m", "q"), CASES)
def test_one_step_reconstruction_is_the_neyman_pearson_curve(m, q):
    """min_ε e^ε κ + δ(ε) = the power of the best test of size κ, computed by sorting likelihood ratios."""
    p, other, dx = densities(m, q, ADD)
    pld = privacy_loss.gaussian(m, q, 1, ADD)
    kappas = np.array([1e-4, 1e-2, 0.1, 0.5])
    best = np.zeros_like(kappas)
    for a, b in ((p, other), (other, p)):  # either side may be the release with the record
        order = np.argsort(-a / np.maximum(b, 1e-300))
        best = np.maximum(best, np.interp(kappas, np.cumsum(b[order]) * dx, np.cumsum(a[order]) * dx))
    found = privacy_loss.trade_off(pld).tpr(kappas)
    assert np.all(found >= best - 1e-6)
    np.testing.assert_allclose(found, best, rtol=2e-3)
    assert isinstance(privacy_loss.trade_off(pld).tpr(0.1), float)
    assert privacy_loss.trade_off(pld).tpr(0.1) == found[2]
    assert privacy_loss.trade_off(pld).tpr(0.0) <= 1e-9
    assert privacy_loss.trade_off(pld).tpr(1.0) == 1.0


@pytest.mark.parametrize(("m", "steps"), [(0.01, 1), (0.5, 1), (3.0, 1), (0.01, 100), (0.5, 100), (0.01, 10**6)])
def test_unsampled_steps_follow_the_exact_gaussian_curve(m, steps):
    shift = m * math.sqrt(steps)
    for adjacency, factor in ((REPLACE, 2), (ADD, 1)):
        pld = privacy_loss.gaussian(m, 1.0, steps, adjacency)
        assert privacy_loss.delta(pld, 0.0) == pytest.approx(2 * norm.cdf(factor * shift / 2) - 1, rel=1e-4)
        for target in (1e-2, 1e-5, 1e-9):
            exact = gaussian_epsilon(factor * shift, target)
            assert exact * (1 - 1e-6) <= privacy_loss.epsilon(pld, target) <= exact * (1 + 1e-3) + 1e-6
        kappa = 0.01
        assert privacy_loss.trade_off(pld).tpr(kappa) == pytest.approx(
            norm.cdf(norm.ppf(kappa) + factor * shift), rel=1e-3
        )


@pytest.mark.parametrize("shift", [1e-6, 1e-2, 1.0, 30.0, 999.0, 1001.0, 1e6])
@pytest.mark.parametrize("target", [1e-12, 1e-5, 0.3])
def test_gaussian_epsilon_is_sound_and_tight(shift, target):
    eps = gaussian_epsilon(shift, target)
    z = norm.isf(target)
    log_first = norm.logcdf(shift / 2 - eps / shift)
    assert log_first <= math.log(target) + 1e-6 or gaussian_delta(shift, eps) <= target * (1 + 1e-6)
    if shift <= 1e3 and eps > 0:
        assert gaussian_delta(shift, eps * (1 - 1e-6)) >= target * (1 - 1e-5)
    if shift > 1e3:
        assert eps <= shift**2 / 2 + shift * (z + 2)


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.01, 1000), (0.5, 0.1, 300), (2.0, 0.001, 10**4)])
@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
def test_composition_agrees_with_a_finer_grid(m, q, steps, adjacency):
    relation = dp.NeighboringRelation.REPLACE_ONE if adjacency == REPLACE else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    pld = privacy_loss.gaussian(m, q, steps, adjacency)
    coarse = privacy_loss.directions(pld)[0][0][0]
    with privacy_loss.without_overflow_warnings():
        fine = privacy_loss_distribution.from_gaussian_mechanism(
            1 / m,
            value_discretization_interval=float(coarse[1] - coarse[0]) / 6,
            sampling_prob=q,
            neighboring_relation=relation,
        ).self_compose(steps)
    pairs = [(privacy_loss.epsilon(pld, target), privacy_loss.epsilon(fine, target)) for target in (1e-3, 1e-6)]
    pairs += [
        (privacy_loss.delta(pld, 0.0), privacy_loss.delta(fine, 0.0)),
        (privacy_loss.trade_off(pld).tpr(0.01), privacy_loss.trade_off(fine).tpr(0.01)),
    ]
    for found, finer in pairs:  # a coarser grid is never the more optimistic one
        assert finer * (1 - 1e-5) <= found <= finer * (1 + 2e-3)


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.01, 1000), (0.05, 0.3, 10**6), (3.0, 0.1, 2), (1.0, 0.01, 99)])
@pytest.mark.parametrize("relation", [dp.NeighboringRelation.REPLACE_ONE, dp.NeighboringRelation.ADD_OR_REMOVE_ONE])
def test_our_self_composition_is_dp_accountings(m, q, steps, relation):
    with privacy_loss.without_overflow_warnings():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / m, value_discretization_interval=1e-2, sampling_prob=q, neighboring_relation=relation
        )
        theirs = privacy_loss.directions(one.self_compose(steps))[0]
    ours = privacy_loss.directions(privacy_loss.composed([(one, steps)]))[0]
    assert len(ours) == len(theirs)
    for (losses, mass, infinite), (losses_2, mass_2, infinite_2) in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(losses, losses_2, atol=1e-12)
        np.testing.assert_allclose(mass, mass_2, atol=1e-9 * mass.max())
        assert infinite == pytest.approx(infinite_2)


@pytest.mark.parametrize("m", [1e-2, 0.3, 1.0, 20.0, 59.0])
@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.01, 0.5, 1 - 1e-12, 1.0])
@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
def test_one_step_is_dp_accountings(m, q, adjacency):
    """Ours is on whole arrays. Probabilities are second differences of δ, which cancel on a fine grid; δ itself is
    what must agree."""
    relation = dp.NeighboringRelation.REPLACE_ONE if adjacency == REPLACE else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    grid = privacy_loss.loss_scale(m, q, adjacency == REPLACE)[2] / 300
    with privacy_loss.without_overflow_warnings():
        theirs = privacy_loss_distribution.from_gaussian_mechanism(
            1 / m, value_discretization_interval=grid, sampling_prob=q, neighboring_relation=relation
        )
        ours = gaussian_step(m, q, adjacency == REPLACE, grid)
    pairs = list(zip(privacy_loss.directions(ours)[0], privacy_loss.directions(theirs)[0], strict=True))
    assert len(pairs) == (1 if adjacency == REPLACE or q == 1 else 2)
    for (losses, mass, infinite), (losses_2, mass_2, infinite_2) in pairs:
        np.testing.assert_array_equal(losses, losses_2)
        mine, other = privacy_loss._deltas(losses, mass, infinite), privacy_loss._deltas(losses_2, mass_2, infinite_2)
        np.testing.assert_allclose(mine, other, rtol=0, atol=1e-12)
        assert infinite == pytest.approx(infinite_2, rel=1e-9, abs=1e-30)
    privacy_loss.check_pessimistic(ours)


def some_plds():
    p = privacy_loss_distribution
    far = {0: 0.9, 800: 0.05, 90_000: 0.04}  # e^−900 is 0 in float64
    with privacy_loss.without_overflow_warnings():
        yield from (privacy_loss.gaussian(m, q, t, a) for m, q, t in CASES_OF_STEPS for a in (REPLACE, ADD))
        yield from (p.from_laplace_mechanism(b, value_discretization_interval=0.01) for b in (0.3, 0.02))
        yield p.identity()
        yield p.from_randomized_response(0.2, 5)
        wide = {"value_discretization_interval": 1e-2}
        yield p.from_gaussian_mechanism(1.0, **wide).compose(p.from_laplace_mechanism(1.0, **wide))
        yield p.PrivacyLossDistribution(pld_pmf.SparsePLDPmf(far, 1e-2, 0.01, True))


CASES_OF_STEPS = [(1.0, 0.01, 1000), (0.3, 0.2, 1), (0.1, 1.0, 50)]


def test_epsilon_is_dp_accountings():
    """Ours is on whole arrays; theirs is a loop over the losses from the largest on."""
    seen = 0
    for pld in some_plds():
        for target in (1e-12, 1e-9, 1e-5, 1e-3, 0.05, 0.1, 0.5):
            sure = target - privacy_loss.directions(pld)[1]
            if sure <= 0:
                assert privacy_loss.epsilon(pld, target) is None
                continue
            theirs, found = float(pld.get_epsilon_for_delta(sure)), privacy_loss.epsilon(pld, target)
            if math.isinf(theirs):
                assert found is None
            else:
                assert found == pytest.approx(theirs, rel=1e-8, abs=1e-12)
                assert privacy_loss.delta(pld, found) <= target * (1 + 1e-9) + 1e-15
                seen += found > 0
    assert seen > 30


def test_losses_whose_exponential_overflows():
    """dp-accounting raises OverflowError at a loss of −900."""
    for mass, target, wanted in (({-90_000: 1.0}, 1e-5, 0.0), ({-90_000: 0.96, 90_000: 0.04}, 1e-5, 900.0),
                                 ({-90_000: 0.96, 90_000: 0.04}, 0.05, 0.0)):  # fmt: skip
        pmf = pld_pmf.SparsePLDPmf(mass, 1e-2, 0.0, True)
        assert privacy_loss.epsilon(privacy_loss_distribution.PrivacyLossDistribution(pmf), target) == wanted


def tilted_delta(m, q, steps, epsilon, tilt):
    """δ(ε) after `steps`, by an FFT of the losses tilted by e^{tilt·L}: exact where plain FFTs drown in rounding."""
    with privacy_loss.without_overflow_warnings():
        one = privacy_loss_distribution.from_gaussian_mechanism(
            1 / m,
            value_discretization_interval=2e-3,
            sampling_prob=q,
            neighboring_relation=dp.NeighboringRelation.REPLACE_ONE,
        )
    losses, mass, infinite = privacy_loss.directions(one)[0][0]
    h, low = losses[1] - losses[0], round(losses[0] / (losses[1] - losses[0]))
    log_norm = math.log(np.sum(mass * np.exp(tilt * losses)))
    tilted = mass * np.exp(tilt * losses - log_norm)
    result, offset, power, base, base_offset = np.array([1.0]), 0, steps, tilted, low
    while power:  # by squaring, each factor cut where nothing is left
        if power & 1:
            result, offset = fftconvolve(result, base), offset + base_offset
            result, offset = cut(result, offset)
        base, base_offset, power = fftconvolve(base, base), 2 * base_offset, power >> 1
        base, base_offset = cut(base, base_offset)
    grid = (np.arange(len(result)) + offset) * h
    above = grid > epsilon
    log_mass = np.log(np.maximum(result[above], 1e-300)) + steps * log_norm - tilt * grid[above]
    return float(np.sum(np.exp(log_mass) * -np.expm1(epsilon - grid[above]))) + steps * infinite


def cut(mass, offset):
    kept = np.nonzero(mass > 1e-17)[0]
    return np.maximum(mass[kept[0] : kept[-1] + 1], 0.0), offset + int(kept[0])


@pytest.mark.parametrize("target", [1e-5, 1e-8, 1e-9, 1e-10, 1e-12])
def test_small_delta_after_a_million_steps_is_sound(target):
    """Plain FFTs leave bins of −4e-15: without care ε at δ = 1e-12 came out as 366 instead of 378."""
    m, q, steps = 1.0, 0.01, 10**6
    found = privacy_loss.epsilon(privacy_loss.gaussian(m, q, steps, REPLACE), target)
    if found is None:  # it does not know, and says so
        assert target < 1e-9
        return
    tilt = norm.isf(target) / 20  # about (ε − mean)/variance of the total loss
    truth = tilted_delta(m, q, steps, found, tilt)
    assert truth <= target * (1 + 1e-2)
    assert target < 2e-9 or truth >= target * 0.5


def test_tilted_reference_is_right():
    exact = gaussian_delta(2.0, 12.0)
    assert tilted_delta(2.0 / 2 / math.sqrt(256), 1.0, 256, 12.0, 2.0) == pytest.approx(exact, rel=2e-2)


def test_deltas_against_the_plain_sum():
    rng = np.random.default_rng(0)
    for size in (1, 2, 7, 400):
        losses = 0.03 * (np.arange(size) - size // 3)
        mass = rng.dirichlet(np.ones(size)) * 0.99
        plain = [np.sum(mass[losses > e] * -np.expm1(e - losses[losses > e])) + 0.01 for e in losses]
        np.testing.assert_allclose(privacy_loss._deltas(losses, mass, 0.01), plain, atol=1e-14)


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.01, 1000), (3.0, 0.3, 1), (0.1, 1e-3, 10**5), (0.3, 1.0, 9)])
def test_many_kappas_agree_with_few(m, q, steps):
    """A layer-cake floor asks for thousands: by search, where a table would take gigabytes."""
    pld = privacy_loss.gaussian(m, q, steps, ADD)
    kappas = np.concatenate([[0.0, 1.0], np.geomspace(1e-9, 0.999, 198)]).reshape(2, 100)
    found = privacy_loss.trade_off(pld).tpr(kappas)
    one_by_one = np.vectorize(lambda k: privacy_loss.trade_off(pld).tpr(k))(kappas)
    assert found.shape == kappas.shape
    assert np.all(found >= one_by_one * (1 - 1e-12))
    np.testing.assert_allclose(found, one_by_one, rtol=1e-6, atol=1e-12)


def test_rounding_is_charged():
    class Pmf:
        size, _lower_loss, _discretization, _infinity_mass = 4, -1, 0.5, 5e-9
        _probs = np.array([0.2, 0.3, 0.5 + 1e-9, -1e-9])

        def to_dense_pmf(self):
            return self

    class Pld:
        _pmf_remove = _pmf_add = Pmf()

        def get_delta_for_epsilon(self, epsilon):
            return 0.1

    assert privacy_loss.directions(Pld())[1] == pytest.approx(4e-9)
    assert privacy_loss.delta(Pld(), 0.0) == pytest.approx(0.1 + 4e-9, abs=1e-12)
    assert [privacy_loss.epsilon(Pld(), d) for d in (3e-9, 8e-9)] == [
        None,
        None,
    ]  # P[L = ∞] is 5e-9, and 4e-9 are charged
    assert privacy_loss.epsilon(Pld(), 1e-8) == pytest.approx(0.5, abs=1e-7)


def test_directions_of_an_asymmetric_pld():
    pld = privacy_loss.gaussian(1.0, 0.1, 1, ADD)
    (first, p, _), (second, p2, _) = privacy_loss.directions(pld)[0]
    assert first.max() > 3
    assert second.max() < 0.2  # without the record the loss never exceeds −ln(1 − q)
    assert p.sum() == pytest.approx(1, abs=1e-6)
    assert p2.sum() == pytest.approx(1, abs=1e-6)
    assert len(privacy_loss.directions(privacy_loss.gaussian(1.0, 0.1, 1, REPLACE))[0]) == 1


@pytest.mark.parametrize(("m", "q"), [(1.0, 0.01), (0.01, 0.5), (20.0, 1e-6), (59.0, 1e-9), (1e-3, 1e-3)])
@pytest.mark.parametrize("adjacency", [REPLACE, ADD])
def test_a_million_steps_stay_small(m, q, adjacency):
    start = time.process_time()
    pld = privacy_loss.gaussian(m, q, 10**6, adjacency)
    assert time.process_time() - start < 20  # generous: a fault here costs minutes and gigabytes
    if pld is not None:
        assert all(len(losses) < 2_000_000 for losses, _, _ in privacy_loss.directions(pld)[0])
        assert 0 <= privacy_loss.delta(pld, 0.0) <= 1
        assert privacy_loss.epsilon(pld, 1e-5) >= 0


def test_enormous_and_negligible_losses_have_no_pld():
    assert privacy_loss.gaussian(61.0, 0.5, 1, REPLACE) is None
    assert privacy_loss.gaussian(1.0, 1.0, 10**4, REPLACE) is None
    assert privacy_loss.gaussian(10.0, 0.5, 10**6, REPLACE) is None
    assert privacy_loss.gaussian(1e-12, 1e-3, 1, REPLACE) is None


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.01, 1000), (0.2, 0.1, 100), (0.5, 1e-4, 10**6)])
def test_fixed_size_epsilon_is_at_least_the_convexity_bound(m, q, steps):
    """Wang's bound from orders up to 512; an ideal order-by-order convexity bound is never above it."""
    found = fixed_size_epsilon(m, q, steps, 1e-5)

    def rdp(a):
        """One step with antipodal records: (1−q)P + qN(2m) against P is dominated by mixing both."""
        x = np.linspace(-12, 2 * m + 2 * m * a + 12, 100_001)
        log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + 2 * m * x - 2 * m * m)
        log_sum = logsumexp(a * log_ratio - x * x / 2) + math.log((x[1] - x[0]) / math.sqrt(2 * math.pi))
        return float(log_sum) / (a - 1)

    best = min(
        steps * rdp(a) + math.log((a - 1) / a) - (math.log(1e-5) + math.log(a)) / (a - 1) for a in (2, 4, 8, 16, 32, 64)
    )
    assert found >= best * (1 - 1e-6)
    assert fixed_size_epsilon(31.0, q, steps, 1e-5) is None


def test_fixed_size_epsilon_at_rate_one_is_the_gaussian_one():
    """Without amplification only the conversion from Rényi orders is lost."""
    for m in (0.1, 1.0):
        exact = brentq(lambda e: gaussian_delta(2 * m, e) - 1e-5, 1e-6, 100)  # noqa: B023
        assert exact <= fixed_size_epsilon(m, 1.0, 1, 1e-5) <= 1.3 * exact
