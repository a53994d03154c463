"""Parts of a release: what is left when its most telling outcomes are given away, and the floors that follow."""

from __future__ import annotations

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
from scipy.special import gammaln
from test_bounds_any import bayes_error, random_releases

from approximate import close
from reconbound import floor, guarantee
from reconbound._internal.checks import InputError
from reconbound.bounds import corners_floor, rate_distortion
from reconbound.bounds.parts import both_directions, parts_by_draws, parts_from_dp, parts_from_losses, parts_gaussian
from reconbound.mechanisms import DP, PLD, OutputPerturbation, SampledGaussian, privacy_loss

ADD = "add/remove"
OPACUS = DP(3.897, 1e-5, ADD)


def corners_of(d):
    return np.array(list(product([0.0, 1.0], repeat=d)))


def direct(share, p, q):
    """The mass and the nats of min(P, cQ) with the mass nearest to `share` from below, by bisection in c."""
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = math.sqrt(max(low, 1e-12) * high)
        low, high = (middle, high) if np.minimum(p, middle * q).sum() <= share else (low, middle)
    s = np.minimum(p, low * q)
    there = s > 0
    mass = s.sum()
    return mass, float(np.sum(s[there] / mass * np.log(s[there] / mass / q[there])))


# --- (ε, δ) -----------------------------------------------------------------------------------------------------


def test_epsilon_3_897_gives_the_known_floors():
    """From one direction only (D∞ ≤ ε + ln 1/(1−δ)): ±4.59, ±7.51 and ±7.96; from both directions a little more."""
    eps, delta = OPACUS.epsilon, OPACUS.delta
    for dim, one, both in ((10, 4.59, 4.74), (64, 7.51, 7.53), (784, 7.96, 7.96)):
        nats = eps - math.log1p(-delta)
        simple = (1 - delta) * rate_distortion(nats, widths=16.0, dim=dim).value
        assert math.sqrt(simple) == close(one, rel=0, abs=0.005)
        found = floor("rate_distortion", OPACUS, dim=dim, high=16.0)
        assert found.rmse == close(both, rel=0, abs=0.005)
        assert found.value >= simple
        assert found.adjacency == ADD
        assert (found.coordinates, found.attacker) == ("average", "any")
    assert floor("lecam", OPACUS, dim=10, high=16.0).rmse < 0.33


@pytest.mark.parametrize("d", [1, 2, 3])
def test_no_attacker_beats_the_floor_of_epsilon_and_delta(d):
    """Random mechanisms on the corners, with the δ that they have at random ε, in both directions, to Q."""
    rng = np.random.default_rng(d)
    best = 0.0
    for k in range(36):
        n = int(rng.integers(2, 12))
        releases = random_releases(rng, 2**d, n)
        q = releases.mean(0)
        if k % 3 == 0:  # nothing, or everything with a small chance
            share = rng.uniform(0.01, 0.3)
            releases = np.hstack([(1 - share) * np.ones((2**d, 1)), share * np.eye(2**d)])
            q = np.append(1.0, np.zeros(2**d)) if k % 2 else releases.mean(0)
        risk = bayes_error(corners_of(d), releases)
        for eps in (0.0, 0.3, 1.5):
            up = np.maximum(releases - math.exp(eps) * q, 0).sum(1).max()
            down = np.maximum(q - math.exp(eps) * releases, 0).sum(1).max()
            delta = min(max(up, down) + 1e-15, 1.0)
            value = parts_from_dp(eps, delta, ADD).best(lambda nats: corners_floor(nats, dim=d)).value
            assert value <= risk * (1 + 1e-8) + 1e-12, (k, eps, delta)
            best = max(best, value / risk if risk > 1e-3 else 0.0)
    assert best > 0.75  # "nothing, or everything": (1−δ) of the guess is left, and ln 1/(1−δ) nats are spent


def test_parts_of_epsilon_and_delta_are_those_of_the_worst_pair():
    """Randomised response that tells everything with chance δ, to many digits."""
    for eps, delta in ((0.0, 0.1), (0.3, 0.0), (1.0, 1e-5), (3.897, 1e-5), (3.0, 0.4), (25.0, 0.01), (1e6, 1e-3)):
        parts = parts_from_dp(eps, delta, ADD)
        assert np.all(np.diff(parts.shares) >= 0)
        assert np.all(np.diff(parts.nats) >= -1e-12 * (1 + eps))
        with mp.workdps(60):
            e, d = mp.mpf(eps), mp.mpf(delta)
            up, down = (1 - d) / (1 + mp.exp(-e)), (1 - d) * mp.exp(-e) / (1 + mp.exp(-e))
            for share, nats in zip(parts.shares, parts.nats, strict=True):
                first = mp.mpf(float(share)) - down  # the part has all of the unlikely outcome
                if first <= 0:
                    continue
                s = min(first, up)
                mass = s + down
                truth = (s * mp.log(s / mass / down) + down * mp.log(down / mass / up)) / mass
                assert nats >= truth - mp.mpf(1e-25)
                assert nats <= truth + 1e-11 * (1 + eps)
        assert parts.shares[-1] <= 1 - delta
        assert parts.shares[-1] == close(1 - delta, rel=1e-14)


# --- loss distributions -----------------------------------------------------------------------------------------


def test_parts_from_losses_are_those_of_the_pair():
    """Random pairs, with outcomes that only one of them has: shares and nats by direct search over min(P, cQ); and no
    other part of the same mass has fewer nats."""
    rng = np.random.default_rng(7)
    for k in range(60):
        n = int(rng.integers(2, 9))
        p, q = rng.dirichlet(np.ones(n) * 0.7), rng.dirichlet(np.ones(n) * 0.7)
        p, q = np.append(p * 0.9, [0.1 * (k % 2), 0.0]), np.append(q * 0.8, [0.0, 0.2])
        p /= p.sum()
        q /= q.sum()
        both = (p > 0) & (q > 0)
        losses = np.log(p[both] / q[both])
        parts = parts_from_losses(losses, p[both], float(p[q == 0].sum()), ADD)
        for share, nats in zip(parts.shares, parts.nats, strict=True):
            mass, least = direct(share + 1e-13, p, q)
            assert nats >= least - 1e-9 * (1 + least)
            if abs(mass - share) < 1e-9:
                assert nats <= least + 1e-7
        s = p * rng.uniform(0, 1, len(p)) * (q > 0)
        mass, there = s.sum(), s > 0
        nats = float(np.sum(s[there] / mass * np.log(s[there] / mass / q[there])))
        assert direct(mass, p, q)[1] <= nats + 1e-9


def quadrature(m, a):
    """Mass and nats of min(P, e^x Q), P = N(m, 1), Q = N(0, 1), which meet at m + a."""
    x, y = m * a + m**2 / 2, a + m
    above, below = lambda t: mp.npdf(t - m), lambda t: mp.exp(x) * mp.npdf(t)
    left, right = [-mp.inf, min(m, y) - 6, y], [y, y + 6, mp.inf]
    mass = mp.quad(above, left) + mp.quad(below, right)
    total = mp.quad(lambda t: above(t) * (m * t - m**2 / 2), left) + x * mp.quad(below, right)
    return mass, total / mass - mp.log(mass)


def test_gaussian_parts_against_quadrature():
    for m in (0.05, 1.0, 3.0, 12.0):
        parts = parts_gaussian(m, ADD)
        assert (parts.shares[-1], parts.nats[-1]) == (1.0, m * m / 2)
        with mp.workdps(30):
            for i in (20, 60, 100):
                mass, truth = quadrature(mp.mpf(m), mp.mpf(-4) + mp.mpf(12) * i / 158)
                assert float(parts.shares[i]) <= mass
                assert float(parts.shares[i]) == close(float(mass), rel=1e-7, abs=1e-13)
                assert truth <= float(parts.nats[i]) <= truth + 1e-12 * (1 + m * m) / mass
    assert parts_gaussian(0.0, ADD).nats.tolist() == [0.0]
    assert parts_gaussian(1e160, ADD).nats.tolist() == [math.inf]


def test_loss_distributions_of_gaussians_have_nearly_the_parts_of_gaussians():
    """dp-accounting's pessimistic distribution: floors a little lower than the exact ones, never higher."""
    for m, dim in ((0.5, 1), (2.0, 3), (5.0, 20)):
        pld = privacy_loss.gaussian(m, 1.0, 1, ADD)
        (with_record, *_), missing = privacy_loss.directions(pld)
        parts = parts_from_losses(*with_record, ADD, rounding=missing)
        found = parts.best(lambda nats, d=dim: rate_distortion(nats, dim=d)).value
        exact = parts_gaussian(m, ADD).best(lambda nats, d=dim: rate_distortion(nats, dim=d)).value
        assert found <= exact * (1 + 1e-3)  # both try some parts only
        assert found >= exact * (1 - 1e-3)
        assert floor("rate_distortion", PLD(pld), dim=dim).value == close(found)


def test_rounding_and_lost_probability_lower_the_floor():
    exact = parts_from_losses([-1.0, 1.0], [0.3, 0.7], 0.0, ADD)
    rough = parts_from_losses([-1.0, 1.0], [0.3, 0.7], 0.0, ADD, rounding=0.01)
    short = parts_from_losses([-1.0, 1.0], [0.25, 0.65], 0.0, ADD)
    assert rough.shares[-1] == close(exact.shares[-1] - 0.01)
    assert rough.nats[-1] > exact.nats[-1]
    assert short.shares[-1] == close(0.9, rel=1e-13)
    assert parts_from_losses([0.0], [0.0], 1.0, ADD).nats.tolist() == [math.inf]


def test_parts_by_draws():
    """The number of draws by exact fractions; and at k = 0 whatever the noise."""
    for q, steps in ((0.5, 1), (0.01, 7), (0.3, 40), (1e-6, 10**6), (0.9, 12)):
        parts = parts_by_draws(3.0, q, steps, ADD)
        top = min(steps, 60)
        with mp.workdps(40):
            p = mp.mpf(q)
            chances = [mp.binomial(steps, k) * p**k * (1 - p) ** (steps - k) for k in range(top + 1)]
            ends = np.array([float(mp.fsum(chances[: k + 1])) for k in range(top + 1)])
            means = [float(mp.fsum(k * c for k, c in enumerate(chances[: n + 1])) / ends[n]) for n in range(top + 1)]
        for share, nats in zip(parts.shares, parts.nats, strict=True):
            k = int(np.argmin(np.abs(ends - share)))
            assert ends[k] * (1 - 1e-8) <= share <= ends[k]
            assert means[k] * 4.5 <= nats <= means[k] * 4.5 * (1 + 1e-7)
        assert parts.nats[0] == 0
        assert parts_by_draws(1e200, q, steps, ADD).shares.tolist() == [parts.shares[0]]


def test_both_directions_take_the_worse():
    one = parts_from_losses([0.0, 2.0], [0.5, 0.5], 0.0, ADD)
    other = parts_from_losses([0.0, 3.0], [0.8, 0.1], 0.1, ADD)
    both = both_directions(one, other)
    assert both.shares[-1] == other.shares[-1]
    for share, nats in zip(both.shares, both.nats, strict=True):
        for curve in (one, other):
            lower = curve.nats[curve.shares <= share]
            assert lower.size == 0 or nats >= lower.max() - 1e-12


# --- mechanisms -------------------------------------------------------------------------------------------------


def test_never_above_the_exact_risk_of_two_antipodal_records():
    """d = 1: Le Cam's floor of Poisson steps is the Bayes risk of two records with antipodal gradients."""
    tight = 0.0
    for sigma, q, steps in ((0.1, 0.001, 100), (0.3, 0.01, 30), (0.5, 0.2, 3), (1.0, 0.01, 1000), (2.0, 1.0, 5)):
        mechanism = SampledGaussian(sigma, q, steps, "hard")
        risk = floor("lecam", mechanism).value
        values = [parts.best(corners_floor).value for parts in mechanism.parts()]
        assert max(values) <= risk * (1 + 1e-12)
        assert len(values) == (2 if q == 1 else 4)
        tight = max(tight, *(value / risk for value in values[1:]))
        assert floor("rate_distortion", mechanism).value >= max(values)
    assert tight > 0.95


def fixed_batches(q, gradients, others):
    """The release of steps on batches of fixed size with the record (gradient g) and with a zero gradient in its place,
    on a grid; c is the gradient of who takes its place in the batches without it."""
    h = 0.05
    x = np.arange(-9, 9, h)

    def step(g, c):
        return h * (q * np.exp(-((x - g) ** 2) / 2) + (1 - q) * np.exp(-((x - c) ** 2) / 2)) / math.sqrt(2 * math.pi)

    p, without = np.ones(1), np.ones(1)
    for g, c in zip(gradients, others, strict=True):
        p, without = np.outer(p, step(g, c)).ravel(), np.outer(without, step(0.0, c)).ravel()
    return p, without


@pytest.mark.parametrize("q", [0.3, 0.75, 0.99])
def test_parts_of_steps_with_every_record_hold_for_fixed_batches(q):
    """Among the parts of the release of one mass, the one with the fewest nats has no more than at rate 1."""
    for gradients, others in (([1.3], [1.3]), ([1.3], [-1.3]), ([1.3, -1.3], [-1.3, 0.4]), ([0.9, 1.3], [0.0, 1.3])):
        parts = parts_gaussian(1.3 * math.sqrt(len(gradients)), ADD)
        p, without = fixed_batches(q, gradients, others)
        for i in (30, 60, 90, 120):
            mass, least = direct(parts.shares[i], p, without)
            assert mass == close(parts.shares[i], rel=1e-6)
            assert least <= parts.nats[i] + 1e-6
    full, without = fixed_batches(1.0, [1.3, 1.3], [0.0, 0.0])
    assert direct(parts.shares[60], full, without)[1] == close(
        parts.nats[60], rel=0, abs=0.01
    )  # and it is that of them


@pytest.mark.parametrize("q", [0.5, 0.75, 0.9, 0.999, 1.0])
def test_floor_of_fixed_batches_is_below_the_exact_risk_and_not_below_that_of_every_record(q):
    """d = 1: two records with antipodal gradients, whoever takes their place; risks by quadrature."""
    for noise, steps in ((0.8, 1), (1.0, 1), (1.2, 2), (3.0, 2)):
        found = floor("rate_distortion", SampledGaussian(noise, q, steps, "hard", "fixed")).value
        assert found >= floor("rate_distortion", SampledGaussian(noise, 1.0, steps, "hard", "fixed")).value
        for place in (-1 / noise, 0.0, 0.5 / noise):
            one, _ = fixed_batches(q, [1 / noise] * steps, [place] * steps)
            other, _ = fixed_batches(q, [-1 / noise] * steps, [place] * steps)
            assert found <= float(np.sum(one * other / (one + other))) / 2 + 1e-9  # (1 − LC)/4


def test_rare_draws_with_little_noise():
    """A record is in a batch with chance 1 %, and is then read off: the release's nats say nothing, its parts do."""
    mechanism = SampledGaussian(0.02, 1e-4, 100, "hard")
    assert rate_distortion(mechanism.kl()).value < 1e-8
    assert floor("rate_distortion", mechanism).value > 0.95 * 0.25
    assert floor("rate_distortion", mechanism).value < (1 - 0.0099) * 0.25


def test_every_mechanism_has_the_whole_release_as_a_part():
    for mechanism in (SampledGaussian(1.0, 0.1, 10), SampledGaussian(1.0), OutputPerturbation(1000, 0.1, 0.01),
                      DP(1.0), SampledGaussian(1.0, 0.1, 3, sampler="fixed")):  # fmt: skip
        for dim in (1, 784):
            found = floor("rate_distortion", mechanism, dim=dim, radius=math.inf)
            assert found.value >= rate_distortion(mechanism.kl(), dim=dim).value * (1 - 1e-14)
    found = guarantee(OPACUS, dim=10, radius=8.0)["rate_distortion"]
    assert 0 < found.value <= 6.4
    assert found.assumes[0].startswith("worst case for the attacker over the ball")


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: parts_from_dp(-1.0, 0.1, ADD), "epsilon"),
        (lambda: parts_from_dp(1.0, 1.5, ADD), "delta"),
        (lambda: parts_gaussian(math.nan, ADD), "m"),
        (lambda: parts_from_losses([1.0], [0.5, 0.5], 0.0, ADD), "probabilities"),
        (lambda: parts_from_losses([1.0], [1.0], -0.1, ADD), "infinite"),
        (lambda: parts_from_losses([1.0], [1.0], 0.0, ADD, rounding=-1.0), "rounding"),
    ],
)
def test_wrong_values_are_named(call, name):
    with pytest.raises(InputError, match=name):
        call()


@pytest.mark.parametrize(
    ("dim", "floor_of_epsilon", "near"), [(10, 4.740, 1.32), (64, 7.527, 1.04), (784, 7.961, 1.005)]
)
def test_a_corner_that_is_released_up_to_some_flips_stays_above_the_floor(dim, floor_of_epsilon, near):
    """Mechanisms with ε = 3.897: a corner near the record is e^ε times as likely as without it, others less.

    The posterior of a coordinate is known exactly, so its error is that of the best attacker. The best radius shows how
    much the floor leaves.
    """
    flips = np.arange(dim + 1)
    log_count = gammaln(dim + 1) - gammaln(flips + 1) - gammaln(dim - flips + 1) - dim * math.log(2)
    count, up, down = np.exp(log_count), math.exp(3.897), math.exp(-3.897)
    errors = []
    for radius in range(dim):
        ball, rest = float(count[: radius + 1].sum()), float(count[radius + 1 :].sum())
        high = min(up, (1 - down * rest) / ball)
        low = down if high < up else (1 - high * ball) / rest
        chances = count * np.where(flips <= radius, high, low)
        assert chances.sum() == close(1.0, rel=1e-9)
        assert down * (1 - 1e-9) <= low <= high <= up
        flipped = float(chances @ flips) / dim
        errors.append(16 * math.sqrt(flipped * (1 - flipped)))
    found = floor("rate_distortion", DP(3.897, 1e-5, ADD), dim=dim, high=16.0).rmse
    assert found == close(floor_of_epsilon, rel=0, abs=1e-3)
    assert found <= min(errors) <= near * found
