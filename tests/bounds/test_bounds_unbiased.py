"""Floors for unbiased attackers, against attackers whose error is known exactly or simulated."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from approximate import DIMS, TENS, close
from reconbound._internal.checks import InputError
from reconbound.bounds import (
    by_position,
    corners,
    from_spectral_norm,
    from_trace,
    per_feature,
    per_group,
    theorem1,
    theorem2,
)


def chi2(p, q):
    return float(np.sum((p - q) ** 2 / q))


def best_unbiased(points, releases, at):
    """Smallest E‖ẑ − z‖²/d at point `at` of any estimator that is unbiased at all points: a least-norm problem.

    Minimise Σ_y P(y) h(y)² subject to Σ_y P_k(y) h(y) = z_k − z, coordinate by coordinate. Infinite if none exists."""
    weight = np.sqrt(releases[at])
    constraints = releases / weight  # acts on √P h
    target = points - points[at]
    h, *_ = np.linalg.lstsq(constraints, target, rcond=1e-12)
    if not np.allclose(constraints @ h, target, atol=1e-7):
        return math.inf
    return float(np.sum(h**2)) / points.shape[1]


def random_releases(rng, count, outcomes):
    """`count` distributions on `outcomes` outcomes, from nearly equal to very different."""
    base = rng.dirichlet(np.full(outcomes, rng.choice([0.5, 2.0, 20.0])))
    base = (base + 1e-4) / (1 + 1e-4 * outcomes)
    mix = 10 ** rng.uniform(-2, 0)
    return (1 - mix) * base + mix * rng.dirichlet(np.full(outcomes, rng.choice([0.3, 1.0, 5.0])), count) + 1e-9


# --- Theorem 1 -----------------------------------


def test_theorem1_gives_the_papers_age_example():
    bound = theorem1(2.0, widths=100.0)
    assert bound.value == pytest.approx(391.3, abs=0.05)
    assert bound.rmse == pytest.approx(19.8, abs=0.05)
    assert bound.guess == 2500.0


def test_theorem1_gives_the_papers_output_perturbation_example():
    eps = (2 / (12665 * 1e-2 * 1e-2)) ** 2
    assert theorem1(eps, dim=784).value == pytest.approx(0.0226, abs=1e-4)
    assert corners(eps, dim=784).value == close(784 * theorem1(eps, dim=784).value, rel=1e-9)


def test_theorem1_tightness_example_with_a_simulated_attacker():
    """z + N(0, σ²) on [0, M] is (2, M²/σ²)-Rényi private; the attacker who believes it errs by σ²; M → 0 gives σ²/4."""
    rng = np.random.default_rng(0)
    sigma, count = 1.3, 200_000
    for m in (3.0, 1.0, 0.1, 1e-3, 1e-6):
        floor = theorem1(m**2 / sigma**2, widths=m).value
        for z in (0.0, m / 2, m):
            errors = (z + sigma * rng.standard_normal(count) - z) ** 2
            assert errors.mean() + 4 * errors.std() / math.sqrt(count) >= floor
    assert floor == close(sigma**2 / 4, rel=1e-9)
    assert errors.mean() / floor == pytest.approx(4, abs=4 * 4 * math.sqrt(2 / count))


def test_theorem1_for_biased_attacker_of_gaussian_release():
    """x = z + N(0, s²), ẑ = ax + b: mean az + b, so γ = |a|, and the mean squared error is known exactly."""
    rng = np.random.default_rng(1)
    for _ in range(500):
        width, s = 10 ** rng.uniform(-1, 1, 2)
        a, b, z = rng.uniform(-2, 2), rng.uniform(-2, 2), width * rng.random()
        bias = (a * z + b - z) ** 2
        floor = theorem1(width**2 / s**2, widths=width, sensitivities=abs(a), squared_bias=bias)
        assert floor.value <= (a * s) ** 2 + bias + 1e-12
        assert floor.value >= bias


def test_theorem1_in_full_on_random_discrete_mechanisms():
    """A 3 × 3 grid of records, any releases, any estimator; γ, the bias and ε as they are."""
    rng = np.random.default_rng(2)
    largest = 0.0
    for _ in range(300):
        widths = 10 ** rng.uniform(-1, 1, 2)
        points = np.array(list(product([0, 0.5, 1], repeat=2))) * widths
        releases = random_releases(rng, 9, 6)
        releases /= releases.sum(1, keepdims=True)
        estimate = rng.normal(size=(6, 2)) * widths * 10 ** rng.uniform(-1, 1)
        mean = releases @ estimate
        eps = max(math.log1p(chi2(p, q)) for p in releases for q in releases)
        gamma = [
            min(
                abs(mean[i, c] - mean[j, c]) / abs(points[i, c] - points[j, c])
                for i in range(9)
                for j in range(9)
                if points[i, c] != points[j, c] and points[i, 1 - c] == points[j, 1 - c]
            )
            for c in range(2)
        ]
        for k in range(9):
            error = float(np.sum(releases[k][:, None] * (estimate - points[k]) ** 2)) / 2
            bias = float(np.sum((mean[k] - points[k]) ** 2)) / 2
            floor = theorem1(eps, widths=widths, sensitivities=gamma, squared_bias=bias).value
            assert floor <= error * (1 + 1e-9)
            largest = max(largest, (floor - bias) / (error - bias))
    assert largest > 0.001


def test_theorem1_sums_over_coordinates():
    widths, gamma = [1.0, 2.0, 5.0], [0.5, 1.0, 2.0]
    by_hand = sum((g * w) ** 2 for g, w in zip(gamma, widths, strict=True)) / (4 * 3) / (math.e - 1) + 0.7
    assert theorem1(1.0, widths=widths, sensitivities=gamma, squared_bias=0.7).value == close(by_hand)
    assert theorem1(1.0, widths=[3.0, 3.0], sensitivities=[1.0, 2.0]).value == close(9 * 5 / 8 / (math.e - 1))


# --- by position, corners -----------------------------------


def test_by_position_is_attained_by_randomised_response():
    """Two records 0 and 1, randomised response: the only unbiased estimator has variance 1/χ² exactly."""
    for eps in (0.1, 1.0, 4.0):
        p = math.exp(eps) / (1 + math.exp(eps))
        estimate = np.array([(0 - (1 - p)), (1 - (1 - p))]) / (2 * p - 1)
        release = np.array([p, 1 - p])  # of record 0
        assert float(release @ estimate) == pytest.approx(0, abs=1e-12)
        variance = float(release @ estimate**2)
        order2 = math.log1p(chi2(release[::-1], release))
        assert by_position(order2, [0.0]).value == close(variance, rel=1e-9)


def test_no_unbiased_attacker_beats_floors():
    """1,000 random mechanisms on the corners of a box in 1 to 3 dimensions and a point inside; optimal attackers.

    ε is taken to the record only, as the proof does: less than the guarantee asks for, so the test is harder."""
    rng = np.random.default_rng(3)
    tried, largest = 0, {"corners": 0.0, "by_position": 0.0}
    while tried < 1000:
        d = int(rng.integers(1, 4))
        widths = 10 ** rng.uniform(-0.5, 0.5, d)
        cube = np.array(list(product([0.0, 1.0], repeat=d)))
        inside = rng.random(d) if rng.random() < 0.7 else np.full(d, 0.5)
        points = np.vstack([cube, inside]) * widths
        releases = random_releases(rng, len(points), len(points) + int(rng.integers(0, 8)))
        if rng.random() < 0.5:  # around the inside point, corner by corner: what the proof's worst case looks like
            outcomes = 2 * d
            signs = (2 * cube - 1) * 10 ** rng.uniform(-1, -0.05) * rng.uniform(0.7, 1.0, d)
            tilted = np.concatenate([1 + signs, 1 - signs], axis=1) / outcomes
            middle = np.concatenate([1 + 0 * inside, 1 + 0 * inside]) / outcomes
            releases, points = np.vstack([tilted, middle]), np.vstack([cube, np.full(d, 0.5)]) * widths
        releases /= releases.sum(1, keepdims=True)
        at = len(points) - 1 if rng.random() < 0.7 else int(rng.integers(len(points)))
        truth = best_unbiased(points, releases, at)
        if not math.isfinite(truth):
            continue
        tried += 1
        eps = math.log1p(max(chi2(p, releases[at]) for p in releases))
        floors = {
            "corners": corners(eps, widths=widths).value,
            "by_position": by_position(eps, points[at], low=0.0, high=widths).value,
        }
        for name, value in floors.items():
            if name == "by_position" and at == len(points) - 1:
                continue  # its neighbour across the box in one coordinate is not among the points
            assert value <= truth * (1 + 1e-7), (name, d, widths)
            largest[name] = max(largest[name], value / truth)
    assert largest["corners"] > 0.95  # attained or nearly so: the constant is not slack
    assert largest["by_position"] > 0.3


@pytest.mark.parametrize("d", [1, 2, 3, 4])
def test_corners_is_attained_at_the_centre(d):
    """Release one random coordinate's sign through randomised response: X is the worst case of the proof."""
    t = 0.3
    cube = np.array(list(product([0.0, 1.0], repeat=d)))
    signs = t * (2 * cube - 1)
    releases = np.vstack([np.concatenate([1 + signs, 1 - signs], axis=1), np.ones((1, 2 * d))]) / (2 * d)
    points = np.vstack([cube, np.full(d, 0.5)])
    order2 = math.log1p(chi2(releases[0], releases[-1]))
    assert corners(order2, dim=d).value == close(best_unbiased(points, releases, -1 % len(points)), rel=1e-9)


def test_corners_on_gaussian_releases():
    """x = Az + N(0, 1): optimal variance from the Gram matrix of the likelihood ratios, e^{u·v} − 1, and from AᵀA."""
    rng = np.random.default_rng(4)
    for _ in range(200):
        d = int(rng.integers(1, 5))
        a = rng.normal(size=(d + 1, d)) * 10 ** rng.uniform(-1, 0)
        cube = np.array(list(product([0.0, 1.0], repeat=d)))
        z = rng.random(d) if rng.random() < 0.5 else cube[0]
        moved = (cube - z) @ a.T
        eps = max(float(np.sum((a @ (p - q)) ** 2)) for p in cube for q in cube)
        floor = corners(eps, dim=d).value
        assert floor <= np.trace(np.linalg.inv(a.T @ a)) / d * (1 + 1e-9)
        gram = np.expm1(moved @ moved.T)
        best = np.trace((cube - z).T @ np.linalg.pinv(gram, rcond=1e-13, hermitian=True) @ (cube - z)) / d
        assert floor <= best * (1 + 1e-6)


def test_by_position_lies_between_one_and_four_times_theorem1():
    rng = np.random.default_rng(5)
    for z in rng.random((100, 3)):
        ratio = by_position(0.7, z * [1, 2, 3], low=0.0, high=[1, 2, 3]).value / theorem1(0.7, widths=[1, 2, 3]).value
        assert 1 <= ratio <= 4
    assert by_position(0.7, [2.5], low=2, high=3).value == close(theorem1(0.7).value)
    assert by_position(0.7, [3.0], low=2, high=3).value == close(4 * theorem1(0.7).value)


# --- Theorem 2 -----------------------------------


def random_information(rng, d):
    j = rng.normal(size=(d + 2, d)) * 10 ** rng.uniform(-1, 1, d)
    return j.T @ j


def test_least_squares_meets_theorem2():
    """x = Jz + N(0, s²): ẑ = Ax + b has covariance s²AAᵀ, mean Jacobian AJ; equality at least squares."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        d = int(rng.integers(1, 6))
        j, s = rng.normal(size=(d + 2, d)), 10 ** rng.uniform(-1, 1)
        z = rng.normal(size=d)
        a, b = np.linalg.pinv(j), np.zeros(d)
        information = j.T @ j / s**2
        assert theorem2(information).value == close(s**2 * np.sum(a**2) / d, rel=1e-8)
        a, b = a + 0.3 * rng.normal(size=a.shape), rng.normal(size=d)
        bias = a @ j @ z + b - z
        error = (s**2 * np.sum(a**2) + bias @ bias) / d
        assert theorem2(information, jacobian=a @ j, bias=bias).value <= error * (1 + 1e-9)
        shrunk = rng.random() * np.linalg.pinv(j)  # a multiple of least squares: equality again
        bias = shrunk @ j @ z - z
        error = (s**2 * np.sum(shrunk**2) + bias @ bias) / d
        assert theorem2(information, jacobian=shrunk @ j, bias=bias).value == close(error, rel=1e-8)


def test_theorem2_orders_its_cases():
    rng = np.random.default_rng(7)
    for _ in range(200):
        d = int(rng.integers(1, 7))
        fim = random_information(rng, d)
        inverse = np.linalg.inv(fim)
        full, trace, norm = (
            theorem2(fim).value,
            from_trace(np.trace(fim), d).value,
            from_spectral_norm(np.linalg.norm(fim, 2)).value,
        )
        assert full == close(np.trace(inverse) / d, rel=1e-6)
        assert norm <= trace * (1 + 1e-9) <= full * (1 + 1e-6)
        features = per_feature(np.diag(fim)).value
        assert np.all(features <= np.diag(inverse) * (1 + 1e-6))
        assert np.all(features >= norm * (1 - 1e-9))
        group = rng.permutation(d)[: int(rng.integers(1, d + 1))]
        value = per_group(fim, group).value
        assert value == close(np.trace(np.linalg.inv(fim[np.ix_(group, group)])) / len(group), rel=1e-6)
        assert value <= np.mean(np.diag(inverse)[group]) * (1 + 1e-6)
        assert value >= np.mean(features[group]) * (1 - 1e-6)


def test_theorem2_where_the_information_is_singular():
    blind = np.diag([4.0, 0.0])
    assert theorem2(blind).value > 1e14  # nothing is known about the second coordinate
    assert math.isfinite(theorem2(blind).value)
    # an attacker who does not follow that coordinate is bounded by the first alone
    assert theorem2(blind, jacobian=[[1.0, 0.0], [0.0, 0.0]]).value == pytest.approx(0.125, rel=1e-6)
    assert theorem2(blind, jacobian=np.zeros((2, 2)), bias=[3.0, 1.0]).value == close(5.0)
    assert theorem2(np.zeros((2, 2))).value > 1e300
    assert from_trace(0.0, 3).value > 1e300
    assert per_feature([0.0, 2.0]).value[1] == 0.5


def test_theorem2_is_sound_for_nearly_singular_information():
    """Tr(I⁻¹)/d is known exactly for a diagonal: rounding must not turn a small eigenvalue into none."""
    for small in 10.0 ** -np.arange(1, 40, 1.5):
        for scale in (1e-10, 1.0, 1e10):
            truth = (1 / scale + 1 / (scale * small)) / 2
            assert theorem2(np.diag([scale, scale * small])).value <= truth * (1 + 1e-9)
            assert per_group(np.diag([scale, scale * small]), [0, 1]).value <= truth * (1 + 1e-9)


# --- the whole range -----------------------------------


@given(TENS, st.floats(0, 3), DIMS, st.floats(-10, 10))
@settings(max_examples=200, deadline=None)
def test_floors_are_finite_and_fall_with_epsilon(eps, more, dim, log_width):
    width = 10**log_width
    for floor in (theorem1, corners):
        low, high = floor(eps * 10**more, widths=width, dim=dim), floor(eps, widths=width, dim=dim)
        assert 0 <= low.value <= high.value < math.inf
        assert math.isfinite(low.rmse)
        assert isinstance(low.vacuous, bool)
        assert str(high)
    one, all_corners = theorem1(eps, widths=width, dim=dim).value, corners(eps, widths=width, dim=dim).value
    assert all_corners == pytest.approx(dim * one, rel=1e-6, abs=1e-290)
    assert 0 <= by_position(eps, [width / 3], low=0.0, high=width).value < math.inf


@given(st.floats(0, 1.7e308), DIMS)
@settings(max_examples=200, deadline=None)
def test_information_floors_are_finite(information, dim):
    for bound in (from_trace(information, dim), from_spectral_norm(information), per_feature([information, 1.0])):
        assert np.all(np.isfinite(bound.value))
        assert np.all(np.asarray(bound.value) >= 0)
    assert np.isfinite(theorem2([[information]]).value)


def test_extremes():
    for eps in (1e6, 1e9, math.inf):
        assert theorem1(eps).value == corners(eps, dim=10**7).value == by_position(eps, [0.5]).value == 0.0
        assert theorem1(eps).vacuous
    assert 1e300 < theorem1(0.0).value < math.inf
    assert 1e300 < corners(0.0, widths=1e100, dim=10**7).value < math.inf
    assert theorem1(math.inf, squared_bias=2.0).value == 2.0
    assert 0 <= theorem1(1.0, widths=1e-200).value < 1e-300
    assert 1e300 < theorem1(1.0, sensitivities=1e200).value < math.inf
    assert 1e300 < theorem1(1.0, widths=[1e100], sensitivities=[1e200]).value < math.inf
    many = theorem1(1.0, widths=np.linspace(1, 2, 10**6))
    assert many.value == close(float(np.mean(np.linspace(1, 2, 10**6) ** 2)) / 4 / (math.e - 1), rel=1e-9)


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: theorem1(-1.0), "epsilon", "-1.0"),
        (lambda: theorem1(math.nan), "epsilon", "nan"),
        (lambda: theorem1("much"), "epsilon", "much"),
        (lambda: theorem1(10**400), "epsilon", "10"),
        (lambda: theorem1(1.0, widths=0.0), "widths", "0.0"),
        (lambda: theorem1(1.0, widths=[1.0, -2.0]), "widths[1]", "-2.0"),
        (lambda: theorem1(1.0, widths=[1.0, 2.0], dim=3), "dim", "3"),
        (lambda: theorem1(1.0, dim=0), "dim", "0"),
        (lambda: theorem1(1.0, dim=1.5), "dim", "1.5"),
        (lambda: theorem1(1.0, sensitivities=-0.5), "sensitivities", "-0.5"),
        (lambda: theorem1(1.0, dim=3, sensitivities=[1.0, 1.0]), "sensitivities", "2"),
        (lambda: theorem1(1.0, squared_bias=-1.0), "squared_bias", "-1.0"),
        (lambda: corners(math.nan), "epsilon", "nan"),
        (lambda: corners(1.0, widths=math.inf), "widths", "inf"),
        (lambda: by_position(1.0, [0.5, 2.0]), "record[1]", "2.0"),
        (lambda: by_position(1.0, [0.5], low=1.0, high=0.0), "low", "1.0"),
        (lambda: by_position(1.0, [0.0], low=-1e200, high=1e200), "high", "1e+200"),
        (lambda: theorem2([[1.0, 0.0]]), "information", "(1, 2)"),
        (lambda: theorem2([[1.0, 2.0], [0.0, 1.0]]), "information", "2"),
        (lambda: theorem2([[-1.0]]), "information", "-1"),
        (lambda: theorem2([[math.nan]]), "information[0, 0]", "nan"),
        (lambda: theorem2([[1.0]], jacobian=np.eye(2)), "jacobian", "(2, 2)"),
        (lambda: theorem2([[1.0]], bias=[1.0, 2.0]), "bias", "2"),
        (lambda: from_trace(-1.0, 2), "trace", "-1.0"),
        (lambda: from_trace(1.0, 0), "dim", "0"),
        (lambda: from_trace(1.0, 1.5), "dim", "1.5"),
        (lambda: from_spectral_norm(math.inf), "norm", "inf"),
        (lambda: per_feature([1.0, -2.0]), "diagonal[1]", "-2.0"),
        (lambda: per_feature([]), "diagonal", "[]"),
        (lambda: per_group(np.eye(2), [2]), "features", "[2]"),
        (lambda: per_group(np.eye(2), [0, 0]), "features", "[0, 0]"),
        (lambda: per_group(np.eye(2), [0.5]), "features", "[0.5]"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.name == name
    assert value in str(caught.value)
    assert "np.float64" not in str(caught.value)


# --- each coordinate, or their average -----------------------------------


def test_theorem1_per_coordinate_and_corners_on_average():
    """z + N(0, S) on [0, 1]²: the estimator h has variance sᵢ in coordinate i, D₂ = Σ 1/sᵢ between opposite corners."""
    variances = np.array([0.5, 40.0])
    eps = float(np.sum(1 / variances))
    each, average = theorem1(eps, dim=2), corners(eps, dim=2)
    assert (each.coordinates, average.coordinates) == ("each", "average")
    assert (variances >= each.value).all()
    assert variances.mean() >= average.value


def test_one_coordinate_may_fall_below_corners():
    variances = np.array([2.0, *[1e6] * 9])
    assert variances.min() < corners(float(np.sum(1 / variances)), dim=10).value <= variances.mean()


def test_which_floors_bind_each_coordinate():
    for dim, average in ((1, "each"), (2, "average")):
        assert corners(1.0, dim=dim).coordinates == average
        assert by_position(1.0, [0.5] * dim).coordinates == average
        assert theorem2(np.eye(dim)).coordinates == average
        assert from_trace(1.0, dim).coordinates == average
        assert theorem1(1.0, dim=dim, squared_bias=0.1).coordinates == average
    assert theorem1(1.0, widths=[1.0, 2.0]).coordinates == "average"
    assert from_spectral_norm([1.0, 2.0]).coordinates == per_feature([1.0, 2.0]).coordinates == "each"
    assert per_group(np.eye(3), [0, 2]).coordinates == "average"
    assert "on average" not in str(theorem1(1.0, dim=3))
    assert "on average over the coordinates; the median of 2 values" in str(from_trace([1.0, 2.0], 3))


def test_theorem1_does_not_bind_locally_unbiased_attacker():
    """h = m tanh(k(z − ½)) + N(0, 1) on [0, 1]: the floor at ½ is 1/(mk)², which an attacker unbiased there to first
    order reaches, however high Theorem 1 (at order 2, (2m)²) is: they ask different things, and the lower binds both.
    """
    m, k = 0.5, 40.0
    near = 1 / (m * k) ** 2  # Cramér–Rao at ½
    far = theorem1((2 * m) ** 2, widths=1.0, dim=1).value
    assert near < far / 10

    def mean(z: float) -> float:  # of ẑ = ½ + h/(mk)
        return 0.5 + math.tanh(k * (z - 0.5)) / k

    step = 1e-6
    assert mean(0.5) == 0.5
    assert (mean(0.5 + step) - mean(0.5 - step)) / (2 * step) == pytest.approx(1.0, abs=1e-6)
    assert abs(mean(1.0) - 1.0) > 0.4  # at the end of the range it is not unbiased: Theorem 1 does not bind it
    noise = np.random.default_rng(0).standard_normal(100_000) / (m * k)
    assert noise.var() == pytest.approx(near, rel=0.02)
