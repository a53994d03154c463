"""Floors of unbiased attackers from both ends of a range: the factor 4, and the overlap of the two releases."""

from __future__ import annotations

import math

import numpy as np
import pytest

from reconbound import floor, guarantee
from reconbound._internal.checks import InputError
from reconbound.bounds import corners, lecam_unbiased, theorem1
from reconbound.mechanisms import DP, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.group import group_of


def hard(noise, rate=1.0, steps=1, sampler="poisson"):
    return SampledGaussian(noise, rate, steps, clip="hard", sampler=sampler)


def releases(rng, count, outcomes):
    found = rng.dirichlet(np.full(outcomes, 1.5), size=count) + 1e-6
    return found / found.sum(axis=1, keepdims=True)


# --- the overlap ----------------------------------------------------------------------------------------------------


def test_lecam_unbiased_is_attained_by_the_best_of_two_unbiased_guesses():
    """ẑ = c + λ(p − q)/(p + q) is unbiased at both ends, and its mean variance is the floor; no other one is better."""
    rng = np.random.default_rng(5)
    for _ in range(300):
        p, q = releases(rng, 2, int(rng.integers(2, 7)))
        low, width = rng.normal(), rng.uniform(0.1, 9)
        lc = float(np.sum((p - q) ** 2 / (p + q))) / 2
        best = low + width / 2 + width / (2 * lc) * (p - q) / (p + q)
        assert [best @ q, best @ p] == pytest.approx([low, low + width], abs=1e-8)
        value = lecam_unbiased(1 - lc, widths=width).value
        mean = (p @ (best - low - width) ** 2 + q @ (best - low) ** 2) / 2
        assert value == pytest.approx(mean, rel=1e-6)
        assert value <= mean * (1 + 1e-12)
        # any other guess that is unbiased at both ends
        away = np.linalg.svd(np.stack([p, q]))[2][2:]
        other = best + (rng.normal(size=len(away)) @ away if len(away) else 0.0)
        assert value <= (p @ (other - low - width) ** 2 + q @ (other - low) ** 2) / 2 + 1e-12


def test_known_values_of_lecam_unbiased():
    """The design's: q = 0.01, T = 1,000, smooth clip, beside theorem1."""
    for noise, value, other in ((1.0, 1.63, 0.298), (0.55, 0.159, 1e-4)):
        found = guarantee(SampledGaussian(noise, 0.01, 1000))
        assert found["lecam_unbiased"].value == pytest.approx(value, rel=4e-3)
        assert found["theorem1"].value == pytest.approx(other, rel=3e-2)
        assert (found["lecam_unbiased"].attacker, found["lecam_unbiased"].coordinates) == ("unbiased", "each")
        assert "on average over the corners of the box" in str(found["lecam_unbiased"])


@pytest.mark.parametrize("rate", [1.0, 0.3, 1e-3])
def test_lecam_unbiased_never_exceeds_the_best_attacker_at_any_noise(rate):
    """One step, gradient ±1 at the ends: ẑ = sum/(2q) is unbiased. Up to noise at which 1 − LC rounds to 1."""
    for noise in (0.05, 0.3, 1.0, 30.0, 1e3, 1e5, 1e6, 1e7, 1e9, 1e12):
        value = floor("lecam_unbiased", hard(noise, rate)).value
        variance = (noise**2 + rate * (1 - rate)) / (4 * rate**2)
        assert value <= variance * (1 + 1e-9)
        if noise >= 30 and rate == 1:
            assert value >= variance * (0.49 if noise > 1e4 else 0.99)


def test_lecam_unbiased_at_its_ends():
    assert lecam_unbiased(0.0).value == 0
    assert lecam_unbiased(0.0, order2=math.inf).vacuous
    assert lecam_unbiased(1.0).value == pytest.approx(0.25e6, rel=1e-5)  # digits of 1 − LC are lost beyond
    assert lecam_unbiased(1.0, order2=0.0).value > 1e300
    assert lecam_unbiased(0.5, widths=[1.0, 3.0]).value == pytest.approx(10 / 8)
    assert lecam_unbiased(0.5, widths=[1.0, 3.0]).coordinates == "average"
    with pytest.raises(InputError, match="overlap must be at most 1"):
        lecam_unbiased(1.5)
    assert floor("lecam_unbiased", DP(1.0, 1e-5)).value > 0 == floor("theorem1", DP(1.0, 1e-5)).value


# --- the factor 4 ---------------------------------------------------------------------------------------------------


def test_floor_from_both_ends_on_random_mechanisms():
    """Var_z ≥ w²/∫(p₁ − p₀)²/p_z, and the best guess at z among those unbiased at both ends has that much or more."""
    rng = np.random.default_rng(8)
    for _ in range(300):
        p0, p1, pz = releases(rng, 3, int(rng.integers(3, 8)))
        k, width = float(np.sum((p1 - p0) ** 2 / pz)), rng.uniform(0.1, 9)
        value = theorem1(math.inf, widths=width, both_ends=math.log1p(k)).value
        tilt = (p1 - p0) / pz
        best = width / k * tilt  # its mean moves by w from end to end
        assert best @ (p1 - p0) == pytest.approx(width)
        variance = pz @ best**2 - (pz @ best) ** 2
        assert value == pytest.approx(variance, rel=1e-9)
        other = best + (
            rng.normal(size=len(pz)) @ (np.eye(len(pz)) - np.outer(p1 - p0, p1 - p0) / np.sum((p1 - p0) ** 2))
        )
        assert value <= (pz @ other**2 - (pz @ other) ** 2) * (1 + 1e-12)


def test_corners_from_both_ends_on_random_mechanisms():
    """Guesses in d = 2 that are unbiased at the corners and at z: the least variance at z, by linear algebra."""
    rng = np.random.default_rng(9)
    ends = np.array([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    for _ in range(200):
        sides = rng.uniform(0.3, 3, size=2)
        at, records = sides * ends, releases(rng, 5, 8)
        pz, p = records[0], records[1:]
        z = rng.uniform(size=2) * sides
        k = max(float(np.sum((a - b) ** 2 / pz)) for a in p for b in p)
        found = corners(math.inf, widths=sides, both_ends=math.log1p(k))
        x = (p - pz) @ np.diag(1 / pz) @ (p - pz).T
        least = (at - z).T @ np.linalg.solve(x, at - z)
        assert found.value <= np.trace(least) / 2 * (1 + 1e-9)
        assert found.value == pytest.approx(float(np.sum(sides)) ** 2 / (2 * k))


def test_one_gaussian_release_has_four_times_the_paper():
    """ẑ = (sum + 1)/2 has the variance σ²/4; the floor reaches it with much noise, and was a quarter of it."""
    for noise in (3.0, 10.0, 1000.0):
        values = [guarantee(hard(noise), dim=1)[name].value for name in ("theorem1", "corners")]
        truth = noise**2 / 4
        assert 0.75 * truth < values[0] <= truth
        assert values[1] == pytest.approx(values[0])
        assert values[0] == pytest.approx(4 * theorem1(hard(noise).order2()).value)
    assert hard(3.0, 1.0, 2).order2_both_ends() == math.inf  # adaptive steps: open
    output = guarantee(OutputPerturbation(100, 0.1, 10.0, 1.0), dim=7)
    assert output["theorem1"].value == pytest.approx(
        4 * theorem1(output.mechanism.order2(), widths=output.high - output.low).value
    )
    # the rows of one person are in several steps of an epoch
    assert SampledGaussian.shuffled(3.0, 10, 7, "hard").for_group(2).order2_both_ends() == math.inf
    assert group_of(hard(3.0), 2).order2_both_ends() == pytest.approx(hard(1.5).order2())


def test_three_gaussian_records_stay_below_the_claimed_divergence():
    """q N(g) + (1 − q) N(c) in the plane, g₀, g₁, g_z and c in the ball of radius m: by quadrature."""
    rng = np.random.default_rng(10)
    side = np.linspace(-9.0, 9.0, 181)
    plane = np.stack(np.meshgrid(side, side, indexing="ij"), -1).reshape(-1, 2)
    weight = (side[1] - side[0]) ** 2 / (2 * math.pi)

    def normal(at):
        return np.exp(-np.sum((plane - at) ** 2, axis=1) / 2)

    for _ in range(150):
        m, q = rng.uniform(0.2, 1.2), rng.choice([1.0, 0.5, 0.05])
        angles = rng.uniform(0, 2 * math.pi, 4)
        g = m * rng.choice([1.0, 0.7, 0.2], (4, 1)) * np.stack([np.cos(angles), np.sin(angles)], -1)
        low, high, there, rest = (normal(at) for at in g)
        k = float(np.sum((q * (high - low)) ** 2 / (q * there + (1 - q) * rest)) * weight)
        assert math.log1p(k) <= hard(1 / m, q).order2_both_ends() * (1 + 1e-6)


def test_three_minimisers_of_ridge_regression_can_be_worse_than_any_two():
    """Equal distances s: K = 2e^{s²} − 2e^{s²/2} is above e^{s²} − 1, and below what is claimed."""
    ridge = OutputPerturbation(500, 0.02, 15.0, 2.0, "squared", 5.0)
    s = ridge.replace_one_shift
    assert s < ridge.m * math.sqrt(3)
    k = 2 * math.exp(s * s) - 2 * math.exp(s * s / 2)
    assert k > math.expm1(ridge.order2())
    assert k <= math.expm1(ridge.order2_both_ends())
    found = guarantee(ridge)
    assert found["theorem1"].value > theorem1(ridge.order2(), widths=found.high - found.low).value
