"""Batches of fixed size: the pair that dominates a step, its loss distribution, and what follows for many steps."""

from __future__ import annotations

import math
from itertools import combinations, product

import mpmath as mp
import numpy as np
import pytest
from scipy.stats import norm
from test_order2 import density, in_ball, in_plane, plane

from approximate import close
from reconbound import divergences, floor
from reconbound._internal.checks import InputError
from reconbound.bounds import overlap_from_losses
from reconbound.divergences import fixed_size_delta
from reconbound.divergences.overlap import _overlap_fused
from reconbound.mechanisms import Composition, SampledGaussian, fixed_size_loss, privacy_loss
from reconbound.mechanisms.epsilons import fixed_size_epsilon

EPSILONS = np.array([-4.0, -1.0, -0.2, -0.03, 0.0, 0.01, 0.1, 0.5, 1.5, 4.0])


def hockey_sticks(p, r, cell):
    return np.array([np.maximum(p - math.exp(eps) * r, 0).sum() * cell for eps in EPSILONS])


def test_pair_dominates_random_triples():
    """(g, g', c) random in the ball: (1−q)N(c) + qN(g) against (1−q)N(c) + qN(g'), at orders above and below 1."""
    rng = np.random.default_rng(1)
    for m in (0.3, 1.0, 2.0):
        grid, cell = plane(0.1, 3 * m + 6)
        for g, other, c in zip(*(in_ball(rng, 12, 3, m) for _ in range(3)), strict=True):
            q = float(rng.uniform(0.02, 0.98))
            c2, g2, other2 = in_plane(c, g, other)
            p, r = ((1 - q) * density(grid, c2) + q * density(grid, z) for z in (g2, other2))
            assert np.all(hockey_sticks(p, r, cell) <= fixed_size_delta(m, q, EPSILONS) + 2e-4 * cell)
        # attained above order 1: c = g' = −g; below order 1: c = g = −g'
        q, low, high = 0.2, density(grid, (-m, 0)), density(grid, (m, 0))
        above = hockey_sticks((1 - q) * low + q * high, low, cell)[4:]
        below = hockey_sticks(low, (1 - q) * low + q * high, cell)[:5]
        known = fixed_size_delta(m, q, EPSILONS)
        assert np.allclose(above, known[4:], atol=2e-3 * cell, rtol=4e-3)
        assert np.allclose(below, known[:5], atol=2e-3 * cell, rtol=4e-3)


def test_pair_dominates_two_gaussians_on_one_batch():
    """All batches of a small data set, and two noisy sums of each, of which the second depends on the first."""
    rng = np.random.default_rng(2)
    x = np.arange(-13, 13, 0.1)
    for k in range(25):
        first, second = rng.uniform(0.2, 1.2, 2)
        size, batch = 4, int(rng.integers(1, 4))
        others = rng.choice([-1, 1, 0.3], size - 1)
        turn = np.where(x > rng.normal(), 1.0, rng.choice([-1.0, 0.2, 1.0]))[:, None]  # chosen by the first result

        def release(z, others=others, batch=batch, size=size, first=first, second=second, turn=turn):
            data = np.append(others, z)
            sums = [sum(data[list(i)]) for i in combinations(range(size), batch)]
            return np.mean(
                [norm.pdf(x - first * s)[:, None] * norm.pdf(x[None] - second * s * turn) for s in sums], axis=0
            )

        values = rng.choice([-1.0, 1.0, 0.0], 2, replace=False) if k % 3 else (-1.0, 1.0)
        p, r = (release(z) for z in values)
        limit = fixed_size_delta(math.hypot(first, second), batch / size, EPSILONS)
        assert np.all(hockey_sticks(p, r, 0.01) <= limit + 1e-4)


def test_delta_against_many_digits():
    with mp.workdps(50):
        for m, q in ((1e-3, 1e-4), (0.5, 0.01), (1.0, 1.0), (3.0, 0.3), (20.0, 1e-6)):
            for eps in (0.0, 1e-6, 0.01, 1.0, 5.0, 50.0, -1e-6, -0.3, -6.0):
                alpha = 1 + mp.expm1(abs(eps)) / mp.mpf(q)
                s = mp.log(alpha) / (2 * mp.mpf(m))
                truth = q * (mp.ncdf(m - s) - alpha * mp.ncdf(-m - s))
                if eps < 0:
                    truth = -mp.expm1(eps) + mp.exp(eps) * truth
                assert float(fixed_size_delta(m, q, eps)) == close(float(truth), rel=1e-9, abs=2e-16)
    assert np.all(fixed_size_delta(0.0, 0.5, [-1.0, 0.0, 2.0]) == [-math.expm1(-1.0), 0.0, 0.0])
    curve = fixed_size_delta(1.0, 0.1, np.linspace(-8, 8, 4001))
    slope = np.diff(curve) / np.diff(np.exp(np.linspace(-8, 8, 4001)))
    assert np.all(np.diff(slope) >= -1e-9)  # convex in e^ε, also where both halves meet


@pytest.mark.parametrize(("m", "q"), [(0.3, 0.1), (1.0, 0.01), (2.0, 0.5), (12.0, 1e-3)])
def test_loss_distribution_of_one_step(m, q):
    grid = 1e-3 if m < 5 else 1e-2
    pld = fixed_size_loss.fixed_size_step(m, q, grid)
    ((losses, mass, infinite),) = privacy_loss.directions(pld)[0]
    assert mass.sum() + infinite == close(1.0, rel=1e-12)
    assert mass.min() >= 0
    assert np.allclose(mass[::-1], mass * np.exp(-losses), rtol=1e-9, atol=1e-300)  # exchanging P and Q mirrors it
    points = np.concatenate([-np.geomspace(1e-3, 6, 40), np.geomspace(1e-3, 6, 40), [0.0]])
    found, exact = np.array([pld.get_delta_for_epsilon(e) for e in points]), fixed_size_delta(m, q, points)
    assert np.all(found >= exact - 1e-13)
    assert np.all(found <= exact + 2e-6)


def test_two_steps_with_all_batches():
    """Two adaptive steps on batches of one of three records: the second gradients depend on the first result."""
    x = np.arange(-9, 9, 0.05)
    for m, turn in ((0.5, 1.0), (1.0, -1.0), (1.5, 0.5)):

        def release(z, m=m, turn=turn):
            data = np.array([0.4, -1.0, z]) * m
            one = np.mean([norm.pdf(x - g) for g in data], axis=0)
            side = np.where(x > 0, 1.0, turn)[:, None]
            return one[:, None] * np.mean([norm.pdf(x[None] - g * side) for g in data], axis=0)

        pld = fixed_size_loss.fixed_size(m, 1 / 3, 2)
        limit = np.array([privacy_loss.delta(pld, eps) for eps in EPSILONS[4:]])
        for z, other in ((1.0, -1.0), (-1.0, 1.0), (0.0, 1.0)):
            assert np.all(hockey_sticks(release(z), release(other), 0.0025)[4:] <= limit + 1e-5)


def by_losses(m, q, steps):
    """1 − LC of T copies of the pair, from dots on a grid of losses and a plain convolution by FFT."""
    pld = fixed_size_loss.fixed_size_step(m, q, 2e-4).self_compose(steps)
    ((losses, mass, infinite),) = privacy_loss.directions(pld)[0]
    return overlap_from_losses(losses, mass, infinite)


@pytest.mark.parametrize(("m", "q", "steps"), [(1.0, 0.01, 100), (0.5, 0.3, 20), (2.0, 0.1, 3), (3.0, 0.05, 10)])
def test_overlap_is_that_of_the_composed_losses(m, q, steps):
    assert _overlap_fused(m, q, steps) == close(by_losses(m, q, steps), rel=2e-4)
    assert _overlap_fused(m, q, steps) >= by_losses(m, q, steps) * (1 - 1e-9)


def test_overlap_of_one_step_by_quadrature():
    """2PQ/(P + Q) over x > m, twice, and all of the loss 0."""
    with mp.workdps(30):
        for m, q in ((0.01, 0.5), (0.4, 0.01), (1.0, 0.3), (5.0, 0.9), (15.0, 0.1)):

            def harmonic(x, m=m, q=q):
                a, b = q * mp.npdf(x - 2 * m) + (1 - q) * mp.npdf(x), mp.npdf(x)
                return 2 * a * b / (a + b)

            inner = mp.quad(harmonic, [m, 2 * m, 2 * m + 3, 2 * m + 8, mp.inf])
            truth = 2 * inner + (1 - q) * (2 * mp.ncdf(m) - 1)
            assert _overlap_fused(m, q, 1) == close(float(truth), rel=1e-11)


def test_known_overlaps():
    """T = 1,000, q = 0.01, hard clip: 0.00038 and 0.73 by orders 2 and ½."""
    for sigma, simple, known in ((1.0, 0.00038, 0.43), (2.0, 0.73, 0.93)):
        m = 1 / sigma
        affinity = (1 - 0.01 * (1 - math.exp(-m * m / 2))) ** 2000
        order2 = divergences.order2_fixed(m, 0.01, method="wang")
        before = max(affinity, 2 / (1 + math.exp(1000 * order2)))
        assert before == close(simple, rel=0.02)
        value = divergences.overlap_fixed(m, 0.01, 1000, order2=1000 * divergences.order2_fixed(m, 0.01))
        assert value == close(known, rel=0.02)
        assert floor("lecam", SampledGaussian(sigma, 0.01, 1000, "hard", "fixed")).value == close(value / 4)


def test_many_steps_are_better_than_by_renyi_orders():
    for m, q, steps in ((1.0, 0.01, 1000), (0.5, 0.01, 1000), (0.2, 0.1, 300), (0.5, 1e-4, 10**6)):
        pld = fixed_size_loss.fixed_size(m, q, steps)
        better, wang = privacy_loss.epsilon(pld, 1e-5), fixed_size_epsilon(m, q, steps, 1e-5)
        assert better < wang
        mechanism = SampledGaussian(1 / m, q, steps, "hard", "fixed")
        assert mechanism.epsilon_at(1e-5) == better
        assert mechanism.epsilon_at(1e-5) > SampledGaussian(1 / m, q, steps, "hard").epsilon_at(1e-5)
        assert mechanism.membership_advantage() <= privacy_loss.delta(pld, 0.0)
        assert mechanism.rero(0.01) <= privacy_loss.trade_off(pld).tpr(0.01)
        one = SampledGaussian(1 / m, q, 1, "hard", "fixed")
        assert one.membership_advantage() == close(q * math.erf(m / math.sqrt(2)), rel=1e-3)


def test_extremes():
    assert fixed_size_loss.fixed_size(61.0, 0.5, 1) is None
    assert fixed_size_loss.fixed_size(1e-12, 0.5, 1) is None
    assert fixed_size_loss.fixed_size(50.0, 0.5, 10**6) is None
    assert fixed_size_loss.fixed_size(1.0, 1.0, 4) is privacy_loss.gaussian(1.0, 1.0, 4, "replace-one")
    for m, q, steps in product((1e-9, 1e-3, 1.0, 15.9, 16.1, 59.0), (1e-9, 0.5, 1 - 1e-12, 1.0), (1, 10**6)):
        value = divergences.overlap_fixed(m, q, steps, order2=steps * divergences.order2_fixed(m, q))
        assert 0 <= value <= 1
        assert value >= (1 - q) ** steps * (1 - 1e-9)
        pld = fixed_size_loss.fixed_size(m, q, steps)
        assert pld is None or 0 <= privacy_loss.delta(pld, 0.0) <= 1
    with pytest.raises(InputError, match="sample_rate"):
        fixed_size_delta(1.0, 0.0, 1.0)


def test_compositions_have_the_pair_too():
    whole = SampledGaussian(1.0, 0.01, 1000, "hard", "fixed")
    halves = Composition([SampledGaussian(1.0, 0.01, 500, "hard", "fixed")] * 2)
    assert halves.epsilon_at(1e-5) == close(whole.epsilon_at(1e-5), rel=1e-3)
    assert halves.overlap() == close(whole.overlap(), rel=1e-3)
    assert halves.overlap() <= whole.overlap()
    assert halves.rero(0.01) == close(whole.rero(0.01), rel=1e-3)
    assert floor("rate_distortion", halves).value == close(floor("rate_distortion", whole).value, rel=1e-2)
    both = Composition([whole, SampledGaussian(1.0, 1.0, 1, "hard", "fixed"), SampledGaussian(2.0, 0.1, 30, "hard")])
    assert both.epsilon_at(1e-5) > whole.epsilon_at(1e-5)
    assert both.epsilon_at(1e-5, "add/remove") is None
