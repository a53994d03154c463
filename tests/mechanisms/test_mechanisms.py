"""Every answer of every mechanism, against an independent computation."""

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy.optimize import minimize, minimize_scalar
from scipy.special import expit
from scipy.stats import norm

from reconbound.mechanisms import (
    DP,
    PLD,
    OutputPerturbation,
    RenyiDP,
    SampledGaussian,
    privacy_loss,
)
from reconbound.mechanisms.guarantee import floor

REPLACE, ADD = "replace-one", "add/remove"
KAPPAS = np.array([1e-6, 1e-3, 0.1, 0.5])


# --- what divergences of plain lists of probabilities are -----------------------------------


def chi2(p, q):
    return float(np.sum((p - q) ** 2 / q))


def kl(p, q):
    return float(np.sum(p * np.log(p / q)))


def overlap(p, q):
    return float(np.sum(2 * p * q / (p + q)))


def total_variation(p, q):
    return float(np.sum(np.abs(p - q))) / 2


def delta(p, q, epsilon):
    return float(max(np.sum(np.maximum(a - math.exp(epsilon) * b, 0)) for a, b in ((p, q), (q, p))))


def power(p, q, kappa):
    """The best chance of an event under p whose chance under q is κ (Neyman–Pearson, randomised)."""
    order = np.argsort(-p / q)
    return np.interp(kappa, np.concatenate([[0], np.cumsum(q[order])]), np.concatenate([[0], np.cumsum(p[order])]))


def response(epsilon):
    """Randomised response: the two neighbours' distributions over its two answers."""
    truth = expit(epsilon)
    return np.array([truth, 1 - truth]), np.array([1 - truth, truth])


def check_sound(mechanism, p, q):
    """No answer of the mechanism is more optimistic than this pair of neighbouring releases allows."""
    slack = 1e-9
    for a, b in ((p, q), (q, p)):
        assert math.log1p(chi2(a, b)) <= mechanism.order2() * (1 + slack) + slack
        assert kl(a, b) <= mechanism.kl() * (1 + slack) + slack
        assert np.all(power(a, b, KAPPAS) <= mechanism.rero(KAPPAS) * (1 + slack) + slack)
    assert overlap(p, q) >= mechanism.overlap() * (1 - slack) - slack
    assert total_variation(p, q) <= mechanism.membership_advantage() * (1 + slack) + slack
    for target in (1e-6, 1e-2, 0.3):
        epsilon = mechanism.epsilon_at(target)
        assert epsilon is None or delta(p, q, epsilon) <= target * (1 + 1e-6) + slack


# --- pure and approximate DP -----------------------------------


@pytest.mark.parametrize("epsilon", [1e-6, 0.1, 1.0, 3.0, 12.0])
def test_pure_dp_is_tight_for_randomised_response(epsilon):
    p, q = response(epsilon)
    m = DP(epsilon)
    check_sound(m, p, q)
    assert m.order2() == pytest.approx(math.log1p(chi2(p, q)), rel=1e-9)
    assert m.kl() == pytest.approx(kl(p, q), rel=1e-9)
    assert m.overlap() == pytest.approx(overlap(p, q), rel=1e-9)
    assert m.membership_advantage() == pytest.approx(total_variation(p, q), rel=1e-9)
    small = 0.5 * min(q)  # where the likelier answer alone decides
    assert m.rero(small) == pytest.approx(float(power(p, q, small)), rel=1e-9)
    assert m.epsilon_at(1e-9) == epsilon
    assert m.order2_paper() == epsilon


def approximate_response(epsilon, d):
    """With chance δ the record itself comes out: the extreme (ε, δ)-DP pair."""
    p, q = response(epsilon)
    return np.array([d, 1e-300, *((1 - d) * p)]), np.array([1e-300, d, *((1 - d) * q)])


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("d", [1e-6, 0.05, 0.5])
def test_approximate_dp_against_its_extreme_pair(epsilon, d):
    p, q = approximate_response(epsilon, d)
    m = DP(epsilon, d)
    assert (m.order2(), m.kl(), m.order2_paper()) == (math.inf, math.inf, None)
    assert m.overlap() == pytest.approx(overlap(p, q), rel=1e-9)
    assert m.membership_advantage() == pytest.approx(total_variation(p, q), rel=1e-9)
    assert np.all(power(p, q, KAPPAS) <= m.rero(KAPPAS) + 1e-12)
    assert m.rero(1e-6) == pytest.approx(float(power(p, q, 1e-6)), rel=1e-6)
    assert delta(p, q, epsilon) == pytest.approx(d)
    assert m.epsilon_at(d) == epsilon
    assert m.epsilon_at(d / 2) is None
    assert m.epsilon_at(d, ADD) is None


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_add_remove_doubles_by_group_privacy(epsilon):
    """Releases p and q of two records and r of neither: ratios e^ε from r, e^{2ε} between p and q."""
    side = math.exp(-epsilon) / 2
    p, q = np.array([1 - side, side]), np.array([side, 1 - side])
    p, q, r = p / p.sum(), q / q.sum(), np.array([0.5, 0.5])
    known = float(np.max(np.abs(np.log(np.concatenate([p / r, q / r])))))
    m = DP(known, adjacency=ADD)
    check = DP(2 * known)
    assert np.max(np.abs(np.log(p / q))) <= 2 * known
    for a, b in ((p, q), (q, p)):
        assert math.log1p(chi2(a, b)) <= m.order2()
    assert overlap(p, q) >= m.overlap()
    assert total_variation(p, q) <= m.membership_advantage()
    for a in (p, q):  # towards the release without the record, undoubled
        assert kl(a, r) <= m.kl() + 1e-15
        assert np.all(power(a, r, KAPPAS) <= m.rero(KAPPAS) + 1e-15)
    assert (m.order2(), m.overlap()) == (check.order2(), check.overlap())
    assert m.epsilon_at(1e-5) == 2 * known
    assert m.epsilon_at(1e-5, ADD) == known


def test_add_remove_delta_grows_too():
    m = DP(1.0, 1e-5, ADD)
    grown = 1e-5 * (1 + math.e)
    assert m.overlap() == DP(2.0, grown).overlap()
    assert m.membership_advantage() == DP(2.0, grown).membership_advantage()
    assert m.epsilon_at(1e-5, ADD) == 1.0
    assert m.epsilon_at(1e-5, REPLACE) is None  # not at this δ
    assert m.epsilon_at(4e-5, REPLACE) == 2.0
    assert DP(1e9, 1e-5, ADD).membership_advantage() == 1.0
    assert DP(1e9, 1e-5, ADD).overlap() == 0.0


def test_labels_follow_the_neighbours_that_were_given():
    """A number from add/remove neighbours is never called replace-one."""
    assert floor("theorem1_paper", DP(1.0, adjacency=ADD)).adjacency == ADD
    assert floor("rate_distortion", DP(1.0, adjacency=ADD)).adjacency == ADD
    assert floor("theorem1", DP(1.0, adjacency=ADD)).value == floor("theorem1", DP(2.0)).value
    assert floor("theorem1_paper", DP(1.0)).adjacency == REPLACE
    assert floor("theorem1_paper", SampledGaussian(1.0)).adjacency == ADD
    assert floor("rate_distortion", SampledGaussian(1.0)).adjacency == "add/remove"
    assert floor("rate_distortion", SampledGaussian(1.0, sampler="fixed")).adjacency == "zero-out"
    assert floor("rate_distortion", PLD(privacy_loss.gaussian(1.0, 1.0, 1, ADD))).adjacency == ADD


# --- from an order-2 divergence alone -----------------------------------


def extreme(size, value, worth):
    """The largest `worth(p, q)` over pairs of events with (p − q)²/(q(1 − q)) ≤ χ² = size: p is then on the edge."""

    def negative(q):
        p = min(q + math.sqrt(size * q * (1 - q)), 1.0)
        return -worth(p, q)

    grid = -np.geomspace(1e-9, 50, 400)  # ln q
    start = int(np.argmin([negative(math.exp(x)) for x in grid]))
    found = minimize_scalar(
        lambda x: negative(math.exp(x)),
        bounds=(grid[min(start + 1, 399)], grid[max(start - 1, 0)]),
        method="bounded",
        options={"xatol": 1e-12},
    )
    best = -found.fun
    assert best <= value * (1 + 1e-9)
    return best


def largest_gap(size):
    """The largest p − q over pairs of events with χ² ≤ size both ways, by brute force over q and bisection in p."""
    q = np.concatenate([np.geomspace(1e-6, 0.01, 20_001), np.linspace(0.01, 0.999, 200_001)])
    low, high = q.copy(), np.ones_like(q)
    for _ in range(60):
        p = (low + high) / 2
        fits = (p - q) ** 2 <= size * np.minimum(q * (1 - q), p * (1 - p))
        low, high = np.where(fits, p, low), np.where(fits, high, p)
    return float((low - q).max())


@pytest.mark.parametrize("epsilon", [1e-3, 0.1, 0.6, 0.8, 2.0, 6.0])
def test_conversions_from_order_2_are_sound_and_tight(epsilon):
    m, size = RenyiDP(epsilon), math.expm1(epsilon)
    advantage = m.membership_advantage()
    assert advantage * (1 - 1e-5) <= largest_gap(size) <= advantage * (1 + 1e-9)
    for target in (1e-6, 1e-3, 0.05):
        e = m.epsilon_at(target)
        best = extreme(size, target, lambda p, q: p - math.exp(e) * q)  # noqa: B023
        if e > 0 and size / (4 * target) > size + 1:  # the edge p ≤ 1 does not bind
            assert best == pytest.approx(target, rel=1e-6)
    for kappa in KAPPAS:
        best = min(kappa + math.sqrt(size * kappa * (1 - kappa)), 1.0)
        assert m.rero(kappa) == pytest.approx(best, rel=1e-12)
    assert m.overlap() <= 2 / (1 + math.exp(epsilon)) * (1 + 1e-12) or m.overlap() == pytest.approx(math.exp(-epsilon))


@pytest.mark.parametrize(("rate", "steps"), [(1e-17, 3), (1e-9, 1), (3e-12, 1000), (0.01, 5), (0.5, 2)])
def test_the_chance_to_be_drawn_is_never_rounded_down(rate, steps):
    """Where the noise hides nothing, the advantage and the success of an attacker are the chance to be drawn."""
    drawn = 1 - (1 - Fraction(rate)) ** steps
    for sampler in ("fixed", "poisson"):
        m = SampledGaussian(1e-3, rate, steps, sampler=sampler)
        assert m.membership_advantage() == pytest.approx(float(drawn), rel=1e-12, abs=0)
        assert m.rero(1e-20) == pytest.approx(float(drawn) + 1e-20, rel=1e-12, abs=0)
        assert m.never_drawn == pytest.approx(float(1 - drawn), rel=1e-12, abs=0)


def test_conversions_from_order_2_hold_for_random_pairs():
    rng = np.random.default_rng(1)
    for _ in range(200):
        size = rng.integers(2, 6)
        p, q = (rng.dirichlet(np.full(size, rng.choice([0.3, 1.0, 10.0]))) + 1e-6 for _ in range(2))
        p, q = p / p.sum(), q / q.sum()
        check_sound(RenyiDP(math.log1p(max(chi2(p, q), chi2(q, p)))), p, q)


@pytest.mark.parametrize("order", [0.5, 0.9, 1.0, 1.5, 2.0, 8.0])
def test_renyi_dp_of_other_orders(order):
    rng = np.random.default_rng(2)
    for _ in range(50):
        p, q = rng.dirichlet(np.ones(4), size=2) + 1e-4
        p, q = p / p.sum(), q / q.sum()

        def divergence(a, b):
            return kl(a, b) if order == 1 else math.log(np.sum(a**order * b ** (1 - order))) / (order - 1)

        m = RenyiDP(max(divergence(p, q), divergence(q, p), 0.0), order=order)
        check_sound(m, p, q)
        assert (m.order2() == math.inf) == (order < 2)
        assert (m.kl() == math.inf) == (order < 1)


# --- Gaussian steps -----------------------------------


def step(m, q, adjacency=REPLACE, points=4001):
    """One Poisson-sampled step between antipodal records (or with and without one), on a fine grid."""
    x = np.linspace(-m - 9, m + 9, points)
    p = q * norm.pdf(x - m) + (1 - q) * norm.pdf(x)
    other = q * norm.pdf(x + m) + (1 - q) * norm.pdf(x) if adjacency == REPLACE else norm.pdf(x)
    return p / p.sum(), other / other.sum()


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (0.4, 0.3), (3.0, 0.5), (1.0, 1.0)])
@pytest.mark.parametrize("clip", ["hard", "smooth"])
def test_one_poisson_step(sigma, q, clip):
    mechanism = SampledGaussian(sigma, q, clip=clip)
    m = (1.0 if clip == "hard" else 1.1153) / sigma
    assert mechanism.m == pytest.approx(m)
    p, other = step(m, q)
    assert mechanism.order2() == pytest.approx(math.log1p(max(chi2(p, other), chi2(other, p))), rel=1e-6)
    assert mechanism.overlap() == pytest.approx(overlap(p, other), rel=1e-6)
    assert mechanism.membership_advantage() == pytest.approx(total_variation(p, other), rel=1e-3)
    assert delta(p, other, mechanism.epsilon_at(1e-4)) == pytest.approx(1e-4, rel=2e-2)
    p, without = step(m, q, ADD)
    assert mechanism.kl() == pytest.approx(kl(p, without), rel=1e-6)
    best = np.maximum(power(p, without, KAPPAS), power(without, p, KAPPAS))
    assert np.all(mechanism.rero(KAPPAS) >= best * (1 - 2e-5))  # the grid's own error
    np.testing.assert_allclose(mechanism.rero(KAPPAS[1:]), best[1:], rtol=2e-2)
    assert mechanism.order2_paper() == pytest.approx(math.log1p(chi2(p, without)), rel=1e-6)
    assert delta(p, without, mechanism.epsilon_at(1e-4, ADD)) == pytest.approx(1e-4, rel=2e-2)


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_steps_compose(sampler):
    one, many = (SampledGaussian(2.0, 0.05, steps, sampler=sampler) for steps in (1, 700))
    assert many.order2() == pytest.approx(700 * one.order2())
    assert many.kl() == pytest.approx(700 * one.kl())
    assert many.order2_paper() == pytest.approx(700 * one.order2_paper())
    assert many.overlap() < one.overlap()
    assert many.epsilon_at(1e-5) > one.epsilon_at(1e-5)
    assert many.membership_advantage() > one.membership_advantage()


def test_two_poisson_steps_against_the_product():
    m, q = 1.0, 0.2
    p, other = step(m, q, points=701)
    both_p, both_q = np.outer(p, p).ravel(), np.outer(other, other).ravel()
    mechanism = SampledGaussian(1 / m, q, 2, clip="hard")
    assert mechanism.overlap() == pytest.approx(overlap(both_p, both_q), rel=1e-5)
    assert mechanism.order2() == pytest.approx(math.log1p(chi2(both_p, both_q)), rel=1e-5)
    assert mechanism.membership_advantage() == pytest.approx(total_variation(both_p, both_q), rel=2e-3)


@pytest.mark.parametrize(("sigma", "size", "n"), [(1.0, 1, 3), (2.0, 2, 4), (0.7, 2, 5)])
def test_fixed_size_steps_against_every_batch(sigma, size, n):
    """All batches of all data sets with gradients ±1 and 0, before and after one record is replaced."""
    from itertools import combinations, product

    mechanism = SampledGaussian(sigma, size / n, clip="hard", sampler="fixed")
    x = np.linspace(-size - 9 * sigma, size + 9 * sigma, 6001)

    def release(gradients):
        sums = [sum(batch) for batch in combinations(gradients, size)]
        p = sum(norm.pdf(x, s, sigma) for s in sums)
        return p / p.sum() + 1e-300

    order2, nats, floor_of_overlap = mechanism.order2(), mechanism.kl(), mechanism.overlap()
    advantage, successes = mechanism.membership_advantage(), mechanism.rero(KAPPAS)
    epsilons = [(target, mechanism.epsilon_at(target)) for target in (1e-5, 1e-2)]
    for others in product((-1, 0, 1), repeat=n - 1):
        p, other, zero = release((*others, 1)), release((*others, -1)), release((*others, 0))
        for a, b in ((p, other), (other, p)):
            assert math.log1p(chi2(a, b)) <= order2 + 1e-9
            assert kl(a, zero) <= nats + 1e-9
            assert np.all(power(a, zero, KAPPAS) <= successes + 1e-9)
        assert overlap(p, other) >= floor_of_overlap - 1e-9
        assert total_variation(p, other) <= advantage + 1e-6  # attained, up to the grid
        assert all(delta(p, other, epsilon) <= target * (1 + 1e-4) for target, epsilon in epsilons)  # attained
    assert mechanism.epsilon_at(1e-5, ADD) is None


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_whole_batches_need_no_sampler(sampler):
    mechanism = SampledGaussian(2.0, 1.0, 9, clip="hard", sampler=sampler)  # T steps at m are one at m√T
    m = 1.5
    assert mechanism.order2() == pytest.approx(4 * m * m)
    assert mechanism.kl() == pytest.approx(m * m / 2)
    p, other = step(m, 1.0)
    assert mechanism.overlap() <= overlap(p, other) * (1 + 1e-9)
    if sampler == "poisson":
        assert mechanism.overlap() == pytest.approx(overlap(p, other), rel=1e-9)


# --- output perturbation -----------------------------------


def test_output_perturbation_reproduces_the_paper():
    m = OutputPerturbation(12665, 1e-2, 1e-2)
    assert round(m.order2(), 2) == 2.49
    pixels = {"dim": 784, "low": 0.0, "high": 1.0, "radius": math.inf}  # its rows are longer than the clip
    assert floor("theorem1_paper", m, **pixels).value == pytest.approx(0.0225, abs=5e-5)
    assert floor("theorem1", m, **pixels).value == pytest.approx(4 * floor("theorem1_paper", m, **pixels).value)
    assert floor("corners", m, **pixels).value == pytest.approx(784 * floor("theorem1", m, **pixels).value)


@pytest.mark.parametrize("norm_bound", [0.5, 1.0, 28.0])
def test_output_perturbation_scales_with_the_rows_norm(norm_bound):
    plain, scaled = OutputPerturbation(1000, 0.01, 0.1), OutputPerturbation(1000, 0.01, 0.1, norm_bound)
    assert scaled.order2() == pytest.approx(norm_bound**2 * plain.order2())
    assert scaled.kl() == pytest.approx(norm_bound**2 * plain.kl())
    assert scaled.order2_paper() == pytest.approx(plain.order2())


@pytest.mark.parametrize("noise", [0.05, 0.5, 5.0])
def test_output_perturbation_is_one_gaussian_release(noise):
    mechanism = OutputPerturbation(10, 0.1, noise)
    m = 1 / noise
    p, other = step(m, 1.0, points=40_001)
    if m < 5:
        assert mechanism.order2() == pytest.approx(math.log1p(chi2(p, other)), rel=1e-6)
    assert mechanism.overlap() == pytest.approx(overlap(p, other), rel=1e-6)
    assert mechanism.membership_advantage() == pytest.approx(total_variation(p, other), rel=1e-6)
    if m < 5:
        assert delta(p, other, mechanism.epsilon_at(1e-3)) == pytest.approx(1e-3, rel=1e-4)
    x = np.linspace(-9, m + 9, 40_001)
    p, without = norm.pdf(x - m), norm.pdf(x)
    p, without = p / p.sum(), without / without.sum()
    assert mechanism.kl() == pytest.approx(kl(p, without), rel=1e-6)
    np.testing.assert_allclose(mechanism.rero(KAPPAS), power(p, without, KAPPAS), rtol=1e-3)
    assert delta(p, without, mechanism.epsilon_at(1e-3, ADD)) <= 1e-3 * (1 + 1e-4)


def solve(x, y, ridge, bound):
    """The minimiser of Σ logistic loss + (ridge/2)‖θ‖², to machine precision."""
    x = x * np.minimum(1, bound / np.linalg.norm(x, axis=1))[:, None]

    def objective(theta):
        margin = y * (x @ theta)
        slope = -y * expit(-margin)
        return np.sum(np.logaddexp(0, -margin)) + ridge / 2 * theta @ theta, x.T @ slope + ridge * theta

    theta = minimize(objective, np.zeros(x.shape[1]), jac=True, method="BFGS", options={"gtol": 1e-10}).x
    for _ in range(5):  # Newton, to the last digit
        s = expit(y * (x @ theta))
        hessian = (x * (s * (1 - s))[:, None]).T @ x + ridge * np.eye(x.shape[1])
        theta = theta - np.linalg.solve(hessian, objective(theta)[1])
    return theta


@pytest.mark.parametrize("bound", [1.0, 3.0])
def test_a_real_minimiser_moves_as_little_as_claimed(bound):
    """Replace one row: at most 2L/(nλ); leave its loss out with nλ kept: at most L/(nλ); both nearly reached."""
    rng = np.random.default_rng(3)
    widest = {"replaced": 0.0, "removed": 0.0}
    for trial in range(40):
        n, d, l2 = int(rng.integers(2, 12)), int(rng.integers(1, 4)), 10 ** rng.uniform(-1, 3)
        x, y = 10 * rng.normal(size=(n, d)), rng.choice([-1.0, 1.0], size=n)
        mechanism = OutputPerturbation(n, l2, 0.7, bound)
        allowed = mechanism.m * 0.7  # L/(nλ)
        before = solve(x, y, n * l2, bound)
        other = x.copy()
        other[0] = -x[0] if trial % 2 else 10 * rng.normal(size=d)
        replaced = np.linalg.norm(solve(other, y, n * l2, bound) - before) / (2 * allowed)
        removed = np.linalg.norm(solve(x[1:], y[1:], n * l2, bound) - before) / allowed
        assert replaced <= 1 + 1e-9
        assert removed <= 1 + 1e-9
        widest = {"replaced": max(widest["replaced"], replaced), "removed": max(widest["removed"], removed)}
    assert min(widest.values()) > 0.45  # half: at θ ≈ 0 the slope of the logistic loss is 1/2


def test_removal_keeps_the_penalty():
    """With (n−1)λ in place of nλ the minimiser could move by more: `assumes` says that nλ is fixed."""
    assert any("nλ is fixed" in text for text in OutputPerturbation(5, 0.02, 1.0).assumes())
