"""divergences: every one against mpmath, direct quadrature, random mechanisms, Monte Carlo or dp-accounting."""

from __future__ import annotations

import math
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from approximate import close
from reconbound import SampledGaussian, divergences, floor
from reconbound.bounds import theorem1

RATES = st.floats(-9, 0).map(lambda x: min(10.0**x, 1.0))
SHIFTS = st.floats(-6, 6.1).map(lambda x: 10.0**x)  # σ from 1e-6 to 1e6, hard or smooth clip


# --- independent computations -----------------------------------


def mp_integral(f, centres, reach=13):
    """∫ f in panels of width 1 around each centre."""
    points = sorted({mp.mpf(round(c) + k) for c in centres for k in range(-reach, reach + 1)})
    panels = [(a, b) for a, b in pairwise(points) if b - a <= 1]
    return mp.fsum(mp.quad(f, panel, maxdegree=4, method="gauss-legendre") for panel in panels)


def mp_phi(x, mean):
    return mp.exp(-((x - mean) ** 2) / 2) / mp.sqrt(2 * mp.pi)


def mp_chi2_poisson(m, q):
    """∫ (P − Q)²/Q of the antipodal pair, straight from the densities."""
    m, q = mp.mpf(m), mp.mpf(q)

    def f(x):
        with_other = (1 - q) * mp_phi(x, 0) + q * mp_phi(x, -m)
        with_record = (1 - q) * mp_phi(x, 0) + q * mp_phi(x, m)
        return (with_other - with_record) ** 2 / with_record

    return mp_integral(f, [-3 * m, -2 * m, 0, m, 2 * m])


def plane(step, reach):
    """An even grid of the plane, for the trapezoid rule (exponentially exact for Gaussian mixtures)."""
    axis = np.arange(-reach, reach + step / 2, step)
    return np.meshgrid(axis, axis, indexing="ij"), step * step


def density(grid, centre):
    x, y = grid
    return np.exp(-((x - centre[0]) ** 2 + (y - centre[1]) ** 2) / 2) / (2 * np.pi)


def in_ball(rng, count, dim, radius):
    """Points in the ball; two thirds of them on its surface, where the suprema are."""
    v = rng.normal(size=(count, dim))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    r = np.where(rng.random(count) < 2 / 3, 1.0, rng.random(count) ** (1 / dim))
    return radius * r[:, None] * v


def in_plane(*points):
    """The first point at 0, the second on the x axis, the third in the plane: the same distances in two dimensions."""
    base = points[0]
    u, v = points[1] - base, points[2] - base
    length = np.linalg.norm(u)
    e = u / length if length > 0 else np.eye(len(u))[0]
    along = float(v @ e)
    return np.zeros(2), np.array([length, 0.0]), np.array([along, np.linalg.norm(v - along * e)])


DIVERGENCES = {  # name: f(p, q) to integrate, larger for more different pairs
    "chi2": lambda p, q: q * (p / q - 1) ** 2,
    "kl": lambda p, q: p * np.log(p / q),
    "hellinger": lambda p, q: (np.sqrt(p) - np.sqrt(q)) ** 2,
    "le cam": lambda p, q: (p - q) ** 2 / (2 * (p + q)),
    "order 4": lambda p, q: p * (p / q) ** 3,
    "soft hockey stick 1.05": lambda p, q: q * np.hypot(p / q - 1.05, 0.02),
    "soft hockey stick 0.9": lambda p, q: q * np.hypot(p / q - 0.9, 0.02),
    "soft hockey stick 3": lambda p, q: q * np.hypot(p / q - 3, 0.02),
}
HOCKEY_STICKS = {
    f"hockey stick {g}": lambda p, q, g=g: np.maximum(p - g * q, 0) - max(1 - g, 0) * q for g in (1, 1.05, 0.9, 3)
}


def random_pure_pair(rng, size, eps):
    """Two distributions on `size` outcomes whose probability ratios lie within e^±eps, some at the ends."""
    ratio = np.exp(eps * np.where(rng.random(size) < 0.7, rng.choice([-1, 1], size), rng.uniform(-1, 1, size)))
    low, high = ratio < 1, ratio >= 1
    if not (low.any() and high.any()):
        ratio[0], ratio[-1] = math.exp(-eps), math.exp(eps)
        low, high = ratio < 1, ratio >= 1
    q = rng.dirichlet(np.ones(size))
    # weigh the two halves so that Σ q ratio = 1
    gain, loss = np.sum((q * (ratio - 1))[high]), np.sum((q * (1 - ratio))[low])
    if gain == 0:
        return q, q
    q = np.where(high, q * loss / gain, q)
    q /= q.sum()
    return q * ratio, q


# --- the constants -----------------------------------


def test_smooth_clip_sensitivity_is_the_supremum_rounded_up():
    n = np.linspace(0, 50, 2_000_001)
    v = n - 1
    erf_gelu = v * norm.cdf(v)
    tanh_gelu = v / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    for gelu in (erf_gelu, tanh_gelu):
        top = float((n / (gelu + 1)).max())
        assert top < divergences.sensitivity("smooth") < top + 2e-4
    assert divergences.sensitivity("hard") == 1.0


# --- order 2 -----------------------------------


@mp.workdps(400)
def test_order2_pure_is_tight_at_randomised_response():
    for eps in (1e-6, 0.01, 0.1, 1, 3, 10, 25, 40, 200):
        p = mp.exp(eps) / (1 + mp.exp(eps))
        chi2 = (2 * p - 1) ** 2 / (1 - p) + (1 - 2 * p) ** 2 / p
        assert divergences.order2_pure(eps) == close(float(mp.log1p(chi2)), rel=1e-13)


def test_pure_dp_formulas_are_never_exceeded_by_random_mechanisms():
    rng = np.random.default_rng(0)
    largest = np.zeros(2)
    for _ in range(1000):
        eps = float(10 ** rng.uniform(-2, 1))
        p, q = random_pure_pair(rng, int(rng.integers(2, 7)), eps)
        assert np.all(np.abs(np.log(p / q)) <= eps * (1 + 1e-9))
        order2 = math.log(float(np.sum(p**2 / q)))
        kl = float(np.sum(p * np.log(p / q)))
        ratios = np.array([order2 / divergences.order2_pure(eps), kl / divergences.kl_pure(eps)])
        assert np.all(ratios <= 1 + 1e-9)
        largest = np.maximum(largest, ratios)
    assert np.all(largest > 0.95)  # and the search came close: the constants are not slack either


def test_order2_gaussian_by_quadrature():
    for m in (1e-3, 0.3, 1.0, 2.0):
        with mp.workdps(30):
            chi2 = mp_integral(lambda x: (mp_phi(x, m) - mp_phi(x, -m)) ** 2 / mp_phi(x, -m), [3 * m, 0, -m])  # noqa: B023
        assert divergences.order2_gaussian(m) == close(float(mp.log1p(chi2)), rel=1e-12)


@pytest.mark.parametrize("q", [1e-9, 1e-4, 0.01, 0.3, 0.9, 0.999])
@pytest.mark.slow
def test_order2_poisson_against_mpmath(q):
    with mp.workdps(40):
        for m in (1e-6, 0.5, 2.2306, 30.0):
            truth = float(mp.log1p(mp_chi2_poisson(m, q)))
            exact = divergences.order2_poisson(m, q)
            assert exact == close(truth, rel=2e-12), m
            assert truth <= divergences.order2_poisson(m, q, method="closed") * (1 + 1e-12)
            assert exact <= divergences.order2_gaussian(m)


def test_order2_poisson_reference_value():
    assert divergences.order2_poisson(1.0, 0.01) == close(4.57554e-4, abs=5e-10)


def test_order2_poisson_far_out():
    """Beyond any quadrature: the χ² of N(−m) against (1−q)N(0) alone is all that is left, ln(q²e^{m²}/(1−q))."""
    for m in (1e2, 1e4, 1e6, 1e8, 1e10, 1e12, 1e100, 1e150):
        for q in (1e-9, 0.01, 0.5):
            left = m * m + 2 * math.log(q) - math.log1p(-q)
            assert divergences.order2_poisson(m, q) == close(left, rel=1e-12, abs=1.0)
            assert divergences.order2_poisson(m, q) >= left * (1 - 1e-14)


@pytest.mark.parametrize("m", [0.3, 1.0, 2.0])
def test_antipodal_pair_is_the_supremum_for_every_divergence_tried(m):
    """Random records in a ball of any dimension: with the origin they span a plane."""
    rng = np.random.default_rng(1)
    grid, cell = plane(0.1, 4 * m + 7)
    zero = density(grid, (0, 0))

    def all_divergences(a, b, q):
        p, r = (1 - q) * zero + q * density(grid, a), (1 - q) * zero + q * density(grid, b)
        return {name: float(np.sum(f(p, r)) * cell) for name, f in DIVERGENCES.items()}

    for q in (0.01, 0.3, 0.8):
        worst = all_divergences((m, 0), (-m, 0), q)
        assert math.log1p(worst["chi2"]) == close(divergences.order2_poisson(m, q), rel=1e-9)
        for a, b in zip(in_ball(rng, 12, 5, m), in_ball(rng, 12, 5, m), strict=True):
            _, a2, b2 = in_plane(np.zeros(5), a, b)
            for name, value in all_divergences(a2, b2, q).items():
                assert value <= worst[name] * (1 + 1e-9), (name, q, a2, b2)


def test_antipodal_pair_is_the_supremum_on_the_line():
    rng = np.random.default_rng(2)
    x = np.linspace(-25, 25, 5001)
    for _ in range(300):
        m, q = float(rng.uniform(0.05, 3)), float(rng.uniform(0.001, 0.999))
        a, b = m * rng.uniform(-1, 1, 2) if rng.random() < 0.5 else m * rng.choice([-1, 1], 2) * [1, rng.random()]
        p, r, w, v = ((1 - q) * norm.pdf(x) + q * norm.pdf(x - c) for c in (a, b, m, -m))
        for name, f in (DIVERGENCES | HOCKEY_STICKS).items():
            value, worst = (float(np.sum(f(*pair)) * (x[1] - x[0])) for pair in ((p, r), (w, v)))
            kink = 1e-4 * q * m if name in HOCKEY_STICKS else 0.0  # the trapezoid rule's error there
            assert value <= worst * (1 + 1e-9) + kink, (name, m, q, a, b)


def test_attacker_who_does_not_know_the_others_learns_less():
    """The other records' random sum mixes the shift: by quadrature, χ² and KL do not exceed the known-others values."""
    rng = np.random.default_rng(3)
    x = np.linspace(-25, 25, 5001)
    h = x[1] - x[0]
    for _ in range(40):
        m, q = float(rng.uniform(0.3, 2)), float(rng.uniform(0.05, 0.9))
        others = m * rng.uniform(-1, 1, 3)
        sums, weight = np.array([0.0]), np.array([1.0])
        for o in others:
            sums, weight = np.concatenate([sums, sums + o]), np.concatenate([weight * (1 - q), weight * q])

        def mix(shift, sums=sums, weight=weight):
            return norm.pdf(x[:, None] - sums - shift) @ weight

        p, r = (1 - q) * mix(0) + q * mix(m), (1 - q) * mix(0) + q * mix(-m)
        assert math.log1p(np.sum((p - r) ** 2 / r) * h) <= divergences.order2_poisson(m, q) * (1 + 1e-9)
        assert np.sum(p * np.log(p / mix(0))) * h <= divergences.poisson_kl(m, q) * (1 + 1e-9)
        assert np.sum(2 * p * r / (p + r)) * h >= divergences.overlap_poisson(m, q) * (1 - 1e-9)


@pytest.mark.parametrize("dim", [2, 3])
def test_order2_fixed_is_the_supremum_over_triples(dim):
    """(g, g', c) random in the ball: mixtures (1−q)N(c) + qN(g) against (1−q)N(c) + qN(g'), by quadrature."""
    rng = np.random.default_rng(4)
    largest = 0.0
    for m in (0.2, 0.6, 1.0):
        grid, cell = plane(0.2, 6 * m + 7)
        for g, other, c in zip(*(in_ball(rng, 60, dim, m) for _ in range(3)), strict=True):
            q = float(rng.uniform(0.02, 0.98))
            c2, g2, other2 = in_plane(c, g, other)
            p, r = ((1 - q) * density(grid, c2) + q * density(grid, z) for z in (g2, other2))
            value = math.log1p(float(np.sum((p - r) ** 2 / r) * cell))
            assert value <= divergences.order2_fixed(m, q, method="convexity") * (1 + 1e-9)
            largest = max(largest, value / divergences.order2_fixed(m, q, method="convexity"))
        # attained: c = g', g = −g'
        q = 0.1
        p = (1 - q) * density(grid, (m, 0)) + q * density(grid, (-m, 0))
        r = density(grid, (m, 0))
        value = math.log1p(float(np.sum((p - r) ** 2 / r) * cell))
        assert value == close(divergences.order2_fixed(m, q, method="convexity"), rel=1e-9)
    assert largest > 0.3


def test_order2_fixed_on_real_batches():
    """A small data set, all batches enumerated: the whole mixture's χ² under replace-one."""
    rng = np.random.default_rng(5)
    from itertools import combinations

    x = np.linspace(-30, 30, 6001)
    h = x[1] - x[0]
    for _ in range(30):
        m, size, batch = float(rng.uniform(0.2, 1.2)), 5, int(rng.integers(1, 5))
        others = m * rng.choice([-1, 1, 0.3], size - 1)

        def release(z, others=others, batch=batch, size=size):
            data = np.append(others, z)
            sums = [sum(data[list(i)]) for i in combinations(range(size), batch)]
            return np.mean([norm.pdf(x - s) for s in sums], axis=0)

        q = batch / size
        p, r, zero = release(m), release(-m), release(0.0)
        value = math.log1p(float(np.sum((p - r) ** 2 / r) * h))
        assert value <= divergences.order2_fixed(m, q, method="convexity") * (1 + 1e-9)
        assert value <= divergences.order2_fixed(m, q, method="wang")
        assert float(np.sum(p * np.log(p / zero)) * h) <= divergences.kl_fixed(m, q) * (1 + 1e-9)
        overlap = float(np.sum(2 * p * r / (p + r)) * h)
        assert overlap >= divergences.overlap_fixed(m, q, order2=divergences.order2_fixed(m, q)) * (1 - 1e-9)


def test_known_floors_of_fixed_size_batches():
    """theorem1 of 1,000 steps, q = 0.01, hard clip."""
    for sigma, wang, ours in ((4.0, 1.44, 2.95), (1.0, 0.0022, 0.035)):
        for method, known in (("wang", wang), ("convexity", ours)):
            value = theorem1(1000 * divergences.order2_fixed(1 / sigma, 0.01, method=method)).rmse
            assert value == close(known, rel=0.02)
        assert floor("theorem1", SampledGaussian(sigma, 0.01, 1000, "hard", "fixed")).rmse == close(ours, rel=0.02)


def test_triangle_inequality_behind_the_fixed_size_form():
    """e^{|u|²} + e^{|v|²} − 2e^{u·v} ≤ e^{4m²} − 1 for u = g − c, v = g' − c in any dimension."""
    rng = np.random.default_rng(6)
    largest = 0.0
    for dim in (1, 2, 3, 10, 100):
        for m in (0.01, 0.3, 1.0, 3.0):
            g, other, c = (in_ball(rng, 5000, dim, m) for _ in range(3))
            c = np.where(rng.random((5000, 1)) < 0.2, other * rng.choice([1, 0.999], (5000, 1)), c)
            g = np.where(rng.random((5000, 1)) < 0.3, -other, g)
            u, v = g - c, other - c
            # expm1 keeps the small m honest: |u|² + |v|² − 2u·v = |u − v|²
            left = np.expm1((u * u).sum(1)) + np.expm1((v * v).sum(1)) - 2 * np.expm1((u * v).sum(1))
            share = left / math.expm1(4 * m * m)
            assert share.max() <= 1 + 1e-9
            largest = max(largest, float(share.max()))
    assert largest > 1 - 1e-9


@given(SHIFTS, RATES)
@settings(max_examples=200, deadline=None)
def test_fixed_size_forms_are_ordered(m, q):
    convexity, wang, whole = (
        divergences.order2_fixed(m, q),
        divergences.order2_fixed(m, q, method="wang"),
        4 * m * m,
    )
    assert 0 <= convexity <= wang * (1 + 1e-12) <= whole * (1 + 1e-9)


@mp.workdps(30)
def test_wang_et_al_form():
    """Their Theorem 9 at order 2, written plainly, with nothing known about ε(∞)."""
    for m, q in ((0.1, 0.01), (0.4, 0.2), (0.8, 0.5), (1.5, 0.9)):
        d = mp.mpf(4) * mp.mpf(m) ** 2
        plain = mp.log(1 + mp.mpf(q) ** 2 * min(4 * (mp.exp(d) - 1), 2 * mp.exp(d)))
        convex = mp.log(1 + q * (mp.exp(d) - 1))
        assert divergences.order2_fixed(m, q, method="wang") == close(float(min(plain, convex)), rel=1e-12)
    for m in (1e-4, 0.5, 3.0, 40.0):
        assert divergences.order2_fixed(m, 1.0, method="wang") == close(4 * m * m, rel=1e-12)
        assert divergences.order2_fixed(m, 1.0, method="convexity") == close(4 * m * m, rel=1e-12)


def test_order2_paper_is_the_add_remove_line_of_dp_accounting():
    import dp_accounting as dp

    for m, q in ((1.0, 0.01), (0.5, 0.1), (2.2, 0.3), (0.7, 1.0)):
        accountant = dp.rdp.RdpAccountant([2.0], dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
        accountant.compose(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(1 / m)))
        assert divergences.order2_paper(m, q) == close(float(accountant._rdp[0]), rel=1e-9)
        assert divergences.order2_paper(m, q) < divergences.order2_poisson(
            m, q
        )  # why it does not guard against replacement


def test_order2_paper_by_quadrature():
    with mp.workdps(30):
        for m, q in ((0.1, 0.001), (1.0, 0.01), (2.2, 0.4)):
            chi2 = mp_integral(lambda x: (q * (mp_phi(x, m) - mp_phi(x, 0))) ** 2 / mp_phi(x, 0), [0, 2 * m])  # noqa: B023
            assert divergences.order2_paper(m, q) == close(float(mp.log1p(chi2)), rel=1e-12)


def test_output_perturbation_sensitivity_bounds_minimisers():
    """Ridge-regularised logistic regression, solved exactly: remove or replace one row of norm data_norm."""
    from scipy.optimize import minimize

    rng = np.random.default_rng(7)
    n, d, l2, noise, norm_bound = 12, 3, 1.0, 0.1, 1.7

    def solve(x, y):
        def loss(t):
            z = y * (x @ t)
            grad = -(x * (y / (1 + np.exp(z)))[:, None]).sum(0) + n * l2 * t
            return np.logaddexp(0, -z).sum() + n * l2 / 2 * t @ t, grad

        return minimize(loss, np.zeros(d), jac=True, method="BFGS", options={"gtol": 1e-9}).x

    m = divergences.output_perturbation_shift(n, l2, noise, norm_bound)
    assert m == close(norm_bound / (n * l2 * noise))
    moved = []
    for _ in range(25):
        x = in_ball(rng, n, d, norm_bound)
        y = rng.choice([-1.0, 1.0], n)
        x2, y2 = x.copy(), y.copy()
        x2[0], y2[0] = in_ball(rng, 1, d, norm_bound)[0], -y[0]
        base = solve(x, y)
        assert np.linalg.norm(base - solve(x[1:], y[1:])) / noise <= m + 1e-6
        moved.append(np.linalg.norm(base - solve(x2, y2)) / noise)
        assert moved[-1] <= 2 * m + 1e-6
    assert max(moved) > 0.3 * m
    assert divergences.order2_gaussian(divergences.output_perturbation_shift(12665, 1e-2, 1e-2)) == close(
        2.494, abs=1e-3
    )
