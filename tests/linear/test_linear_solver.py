"""The Newton solver, and what one record can move its answer."""

import mpmath
import numpy as np
import pytest
from scipy.special import erf
from scipy.stats import norm as normal
from sklearn.datasets import load_breast_cancer
from sklearn.linear_model import LogisticRegression, Ridge

from reconbound._internal.checks import InputError
from reconbound.linear import Logistic, NotConverged, Softmax, Squared, leakage, minimise
from reconbound.linear.base import Shape, choose_noise
from reconbound.linear.solver import gradient
from reconbound.mechanisms.output_perturbation import largest_curvature, largest_slope, largest_weights

LOSSES = {"logistic": Logistic(), "softmax": Softmax(), "squared": Squared()}


def targets(name, rng, n):
    if name == "squared":
        return rng.uniform(-1, 1, size=n)
    return rng.integers(0, 3, size=n) if name == "softmax" else rng.integers(0, 2, size=n).astype(float)


def test_agrees_with_scikit_learn():
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(axis=0)) / x.std(axis=0)
    n, l2 = len(x), 1e-2
    ours = minimise(x, y.astype(float), Logistic(), l2=l2, intercept=False)
    theirs = LogisticRegression(C=1 / (n * l2), fit_intercept=False, tol=1e-10, max_iter=10_000).fit(x, y)
    np.testing.assert_allclose(ours.weights, theirs.coef_, rtol=1e-5, atol=1e-7)
    bins = np.digitize(x[:, 0], [-0.5, 0.5])
    ours = minimise(x, bins, Softmax(), l2=l2, intercept=False, classes=3)
    theirs = LogisticRegression(C=1 / (n * l2), fit_intercept=False, tol=1e-10, max_iter=10_000).fit(x, bins)
    np.testing.assert_allclose(ours.weights, theirs.coef_, rtol=1e-4, atol=1e-6)
    ours = minimise(x, x[:, 0] + y, Squared(), l2=l2, intercept=False)
    theirs = Ridge(alpha=n * l2, fit_intercept=False).fit(x, x[:, 0] + y)
    np.testing.assert_allclose(ours.weights[0], theirs.coef_, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("l2", [1e-8, 1e-3, 10.0])
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_only_rounding(name, l2, intercept):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(50, 6)) * 10.0 ** rng.uniform(-2, 2, size=6), targets(name, rng, 50)
    o = minimise(x, y, LOSSES[name], l2=l2, intercept=intercept, classes=3)
    left = np.linalg.norm(gradient(o.rows, y, o.loss, o.penalty, o.weights))
    assert left == o.gradient_norm <= 1e-9
    again = minimise(x, y, LOSSES[name], l2=l2, intercept=intercept, classes=3, start=o.weights + 3.0)
    np.testing.assert_allclose(again.weights, o.weights, rtol=1e-5, atol=1e-6)


def test_many_equal_records_are_solved_too():
    """Sums of equal terms round alike: n eps of their size may be left, not a fixed number of eps."""
    x, y = np.full((20_000, 2), [np.sqrt(1e-3), 0.0]), np.ones(20_000)
    y[0] = -1
    for angle in np.linspace(0.1, 1.5, 30):
        x[0] = np.cos(angle), np.sin(angle)
        o = minimise(x, y, Squared(), l2=1e-3, intercept=False)
        assert o.gradient_norm < 1e-9 < 1e-8 * np.linalg.norm(o.penalty * o.weights)


def test_not_converged_is_an_error():
    x, y = np.random.default_rng(0).normal(size=(50, 6)), np.arange(50.0) % 2
    with pytest.raises(NotConverged, match="gradient norm"):
        minimise(x, y, Logistic(), l2=0.1, tolerance=1e-30)


@pytest.mark.parametrize(
    ("name", "message", "changes"),
    [
        ("logistic", "l2 must be greater than 0, got 0", {"l2": 0.0}),
        ("squared", "l2 must be greater than 0, got -1", {"l2": -1}),
        ("logistic", r"features must have shape \(N, d\), got 'shape \(4,\)'", {"features": np.ones(4)}),
        ("logistic", "features.* must be finite", {"features": np.full((4, 2), np.nan)}),
        ("logistic", r"y must have shape \(4,\)", {"y": np.zeros(3)}),
        ("logistic", r"y must have shape \(4,\)", {"y": np.zeros((4, 1))}),
        ("logistic", "y must hold whole numbers from 0 to 1 for logistic loss, got -1", {"y": [-1, 1, 1, -1]}),
        ("softmax", "y must hold whole numbers from 0 to 2 for softmax loss, got 3", {"y": [0, 1, 2, 3]}),
        ("softmax", "y must hold whole numbers from 0 to 2 for softmax loss, got 0.5", {"y": [0, 1, 2, 0.5]}),
        ("squared", "y.* must be finite", {"y": [0, 1, np.inf, 0]}),
    ],
)
def test_bad_input_to_the_solver(name, message, changes):
    given = {"features": np.arange(8.0).reshape(4, 2), "y": [0, 1, 1, 0], "l2": 0.1, **changes}
    with pytest.raises(InputError, match=message):
        minimise(given["features"], given["y"], LOSSES[name], l2=given["l2"], classes=3)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_one_record_moves_the_minimiser_by_no_more_than_claimed(name, intercept):
    """‖W*(D) − W*(D')‖ ≤ 2L/(nλ), less for squared loss, and Tr(I) ≤ worst_trace, with the worst records that a search
    over extremes finds."""
    rng = np.random.default_rng(0)
    closest = 0.0
    for l2, norm in ((1e-3, 1.0), (0.05, 3.0), (1.0, 0.5)):
        shape = Shape(LOSSES[name], 12, 3, 3, l2, intercept, norm, 1.0)
        for _ in range(20):
            x = rng.normal(size=(12, 3)) * rng.choice([0.1, 1.0])
            x *= np.minimum(1, norm / np.linalg.norm(x, axis=1))[:, None]
            y = targets(name, rng, 12)
            first, second = x.copy(), x.copy()
            direction = rng.normal(size=3)
            first[0] = norm * direction / np.linalg.norm(direction)
            second[0] = -first[0]
            other = y.copy()
            other[0] = {"squared": -np.sign(y[0]), "logistic": 1 - y[0], "softmax": (y[0] + 1) % 3}[name]
            kind = {"l2": l2, "intercept": intercept, "classes": 3}
            one = minimise(first, y, LOSSES[name], **kind)
            for moved in (minimise(second, y, LOSSES[name], **kind), minimise(second, other, LOSSES[name], **kind)):
                share = np.linalg.norm(one.weights - moved.weights) / (
                    shape.mechanism().gradient_difference / (12 * l2)
                )
                closest = max(closest, share)
            assert leakage(one, 1.0, diagonal=False, spectral=False).trace.max() <= shape.worst_trace(1.0)
    assert 0.02 < closest <= 1


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_the_largest_slope_and_curvature_are_suprema(name):
    """Never exceeded, and met by scores far out."""
    rng, loss = np.random.default_rng(0), LOSSES[name]
    k = 1 if name == "logistic" else 4
    scores = rng.normal(size=(4000, k)) * rng.choice([0.01, 1.0, 60.0], size=(4000, 1))
    scores[:2] = [0.0] * k if k == 1 else [0.0, 0.0, -60.0, -60.0]  # where the curvature is largest
    y = rng.integers(0, max(k, 2), size=4000)
    steep = np.linalg.norm(loss.slope(scores, y), axis=1).max()
    bend = np.linalg.eigvalsh(loss.curvature(scores, y).reshape(-1, k, k))[:, -1].max()
    assert largest_slope(loss.name, 1.0, 1.0) * (1 - 1e-6) < steep <= largest_slope(loss.name, 1.0, 1.0) * (1 + 1e-12)
    assert largest_curvature(loss.name) * (1 - 1e-6) < bend <= largest_curvature(loss.name) * (1 + 1e-12)
    assert largest_curvature("squared") == 1


@pytest.mark.parametrize("classes", [2, 3, 7])
@pytest.mark.parametrize("name", LOSSES)
def test_the_largest_weights_are_met_and_never_exceeded(name, classes):
    """Equal records of one class (or of the largest target) stretch the weights most, at the right distance from 0."""
    l2, loss, best = 0.3, LOSSES[name], 0.0
    for far in np.linspace(0.1, 4, 120):
        x = np.full((3, 1), far)
        y = np.full(3, 2.5) if name == "squared" else np.full(3, classes - 1 if name == "softmax" else 1)
        w = np.linalg.norm(minimise(x, y, loss, l2=l2, intercept=False, classes=classes).weights)
        share = w / largest_weights(loss.name, classes if name == "softmax" else 2, 100.0, l2, 2.5)
        best = max(best, share)
        assert w <= largest_weights(loss.name, classes if name == "softmax" else 2, far, l2, 2.5) * (1 + 1e-12)
    assert 0.999 < best <= 1 + 1e-12


def test_the_slope_of_squared_loss_at_a_minimiser_of_other_data():
    """|θ'·x − y| ≤ Y(1 + R/(2√λ)): met where θ' is longest and the record lies against it."""
    l2, bound = 0.04, 3.0
    x = np.full((5, 1), np.sqrt(l2))
    theta = minimise(x, np.full(5, bound), Squared(), l2=l2, intercept=False).weights[0, 0]
    for norm in (0.2, 1.0, 7.0):
        worst = abs(theta * norm + bound)
        np.testing.assert_allclose(worst, largest_slope("squared", norm, l2, bound), rtol=1e-12)


def test_the_shape_s_bounds_by_hand():
    """L = sup‖∂ℓ/∂s‖R with R = √(data_norm² + 1) with an intercept, shift 2L/(nλσ), or (R²‖θ‖ + 2YR)/(nλσ) for squared
    loss, Tr I ≤ (…)²/(nλσ)²."""
    for intercept, far in ((False, 3.0), (True, np.sqrt(10.0))):
        for name, slope, bend, most in (
            ("logistic", 1.0, 0.25, 0.2784645427610738),
            ("softmax", np.sqrt(2), 0.5, 0.46305551336554884),
            ("squared", 2 * (1 + far / (2 * 0.2)), 1.0, 1.0),
        ):
            shape = Shape(LOSSES[name], 50, 6, 3 if name == "softmax" else 2, 0.04, intercept, 3.0, 2.0)
            np.testing.assert_allclose(shape.mechanism().gradient_norm, slope * far)
            apart = far**2 * 2 / (2 * 0.2) + 2 * 2 * far if name == "squared" else 2 * slope * far
            mechanism = shape.mechanism(0.7)
            np.testing.assert_allclose(mechanism.order2(), (apart / (50 * 0.04 * 0.7)) ** 2)
            np.testing.assert_allclose(mechanism.membership_advantage(), erf(apart / (50 * 0.04 * 0.7) / np.sqrt(8)))
            np.testing.assert_allclose(mechanism.overlap(), overlap(apart / (50 * 0.04 * 0.7)), rtol=1e-6)
            np.testing.assert_allclose(mechanism.kl(), (slope * far / (50 * 0.04 * 0.7)) ** 2 / 2)  # one left out: L
            weights = min(np.sqrt(most / 0.04), slope * far / 0.04)
            worst = ((bend * far * weights + np.sqrt(6) * slope) / (50 * 0.04 * 0.7)) ** 2
            np.testing.assert_allclose(shape.worst_trace(0.7), worst)


def overlap(apart):
    """∫ 2pq/(p + q) of two normal densities so far apart, which is e^{−a²/8} E[1/cosh(ay/2)], y standard normal."""
    y = np.linspace(-12, 12, 40_001)
    return np.exp(-(apart**2) / 8) * np.sum(normal.pdf(y) / np.cosh(apart * y / 2)) * (y[1] - y[0])


def test_noise_meets_its_target():
    shape = Shape(Logistic(), 1000, 20, 2, 0.01, True, 1.0)
    for epsilon, delta in ((0.1, 1e-6), (1.0, 1e-5), (30.0, 1e-9)):
        noise = choose_noise(shape, None, None, epsilon, delta)
        assert shape.mechanism(noise).epsilon_at(delta) <= epsilon < shape.mechanism(noise * 0.999).epsilon_at(delta)
    noise = choose_noise(shape, None, 0.25, None, None)
    np.testing.assert_allclose(20 / shape.worst_trace(noise), 0.25)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_noise_for_epsilon_matches_analytic_gaussian(name, intercept):
    """δ = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ), μ = 2L/(nλσ), L by hand (for squared loss R²‖θ‖ + 2YR in the place of 2L),
    in 40 digits; ε far above 1 too."""
    far = np.sqrt(1.5**2 + intercept)
    apart = far * {"logistic": 2.0, "softmax": 2 * np.sqrt(2), "squared": far * 2 / (2 * 0.1) + 2 * 2}[name]
    shape = Shape(LOSSES[name], 1000, 20, 3 if name == "softmax" else 2, 0.01, intercept, 1.5, 2.0)
    for epsilon in (0.1, 1.0, 3.0, 10.0):
        for delta in (1e-5, 1e-9):
            noise = choose_noise(shape, None, None, epsilon, delta)
            reached = [gaussian_delta(epsilon, apart / (1000 * 0.01) / s) for s in (noise, noise * 0.9999)]
            assert reached[0] <= delta < reached[1]


def gaussian_delta(epsilon, apart):
    with mpmath.workdps(40):
        e, m = mpmath.mpf(epsilon), mpmath.mpf(apart)
        return mpmath.ncdf(m / 2 - e / m) - mpmath.exp(e) * mpmath.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize(
    ("name", "intercept"),
    [("logistic", False), ("logistic", True), ("softmax", False), ("softmax", True), ("squared", False)],
)
def test_neighbours_that_nearly_meet_the_sensitivity(name, intercept):
    """The bound is not loose: 2L/(nλ), or (R²‖θ‖ + 2YR)/(nλ) for squared loss, is met to a fifth, and never passed.

    One record is turned about an axis. The others, n − 1 equal ones along e₁, stretch the weights; the record, of the
    wrong label and at angle ±a to e₁, has nearly the largest slope on both sides, and no other record holds against
    its pull along e₂."""
    n, l2, far, loss, closest = 4000, 0.05, 10.0, LOSSES[name], 0.0
    if name == "squared":
        l2, far = 1e-3, 1.0
    shape = Shape(loss, n, 2, 3, l2, intercept, far, 1.0)
    x, y = np.zeros((n, 2)), np.zeros(n) if name == "softmax" else np.ones(n)
    x[:, 0] = np.sqrt(l2) if name == "squared" else far
    y[0] = {"logistic": 0, "softmax": 1, "squared": -1}[name]
    for angle in (0.8, 1.0):
        ends = []
        for sign in (1, -1):
            x[0] = far * np.cos(angle), far * sign * np.sin(angle)
            ends.append(minimise(x, y, loss, l2=l2, intercept=intercept, classes=3).weights)
        closest = max(closest, np.linalg.norm(ends[0] - ends[1]) / (shape.mechanism().gradient_difference / (n * l2)))
    assert 0.75 < closest <= 1
