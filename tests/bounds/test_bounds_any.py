"""Floors for any attacker, against exact Bayes risks, numerical optimisation and random mechanisms."""

from __future__ import annotations

import math
from itertools import product

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import norm

from approximate import DIMS, TENS, close
from reconbound import divergences as renyi
from reconbound._internal.checks import InputError
from reconbound.bounds import (
    box_minimax,
    corners_floor,
    gaussian_floor,
    lecam,
    overlap_from_losses,
    overlap_from_order2,
    overlap_from_pure,
    overlap_from_renyi,
    rate_distortion,
    theorem1,
    uniform_floor,
    van_trees,
    van_trees_trace,
)


def bayes_error(points, releases, prior=None):
    """E‖ẑ − z‖²/d of the posterior mean: the smallest of all attackers."""
    prior = np.full(len(points), 1 / len(points)) if prior is None else prior
    joint = prior[:, None] * releases
    mass = joint.sum(0)
    mean = joint.T @ points / np.where(mass > 0, mass, 1)[:, None]
    spread = joint.T @ np.sum(points**2, axis=1) - mass * np.sum(mean**2, axis=1)
    return float(spread.sum()) / points.shape[1]


def random_releases(rng, count, outcomes):
    base = rng.dirichlet(np.full(outcomes, rng.choice([0.5, 2.0, 20.0])))
    mix = 10 ** rng.uniform(-2, 0)
    releases = (1 - mix) * base + mix * rng.dirichlet(np.full(outcomes, rng.choice([0.1, 1.0, 5.0])), count) + 1e-12
    return releases / releases.sum(1, keepdims=True)


def kl(p, q):
    keep = p > 0
    return float(np.sum(p[keep] * np.log(p[keep] / q[keep])))


def random_covariance(rng, d):
    a = rng.normal(size=(d, d))
    return a @ a.T * 10 ** rng.uniform(-1, 1) + 1e-3 * np.eye(d)


# --- van Trees -----------------------------------


def test_van_trees_is_the_posterior_covariance_of_the_linear_gaussian_model():
    rng = np.random.default_rng(0)
    for _ in range(200):
        d = int(rng.integers(1, 6))
        j, s = rng.normal(size=(d + 1, d)), 10 ** rng.uniform(-1, 1)
        prior = random_covariance(rng, d)
        if d > 1 and rng.random() < 0.3:  # a direction that is known beforehand
            v = rng.normal(size=(d, 1))
            prior = prior - prior @ v @ v.T @ prior / (v.T @ prior @ v)
        gain = prior @ j.T @ np.linalg.inv(j @ prior @ j.T + s**2 * np.eye(d + 1))
        posterior = prior - gain @ j @ prior
        floor = van_trees(j.T @ j / s**2, prior)
        assert floor.value == close(np.trace(posterior) / d, rel=1e-7, abs=1e-12)
        assert floor.guess == close(np.trace(prior) / d, rel=1e-9)
        trace = van_trees_trace(float(np.trace(j.T @ j)) / s**2, np.clip(np.linalg.eigvalsh(prior), 0, None))
        assert trace.value <= floor.value * (1 + 1e-7) + 1e-12


def test_van_trees_trace_is_the_least_favourable_split():
    """Against a numerical search over informations diag(t) with Σt given, and random full ones of that trace."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        d = int(rng.integers(1, 6))
        s = 10 ** rng.uniform(-1.5, 1.5, d)
        trace = 10 ** rng.uniform(-1, 2)
        floor = van_trees_trace(trace, s).value

        def risk(x, s=s, trace=trace):
            share = np.exp(x - x.max())
            return float(np.mean(1 / (trace * share / share.sum() + 1 / s)))

        starts = [rng.normal(size=d), np.log(s), np.zeros(d)]
        found = min(minimize(risk, x, method="BFGS", options={"gtol": 1e-10}).fun for x in starts)
        assert floor <= found * (1 + 1e-9)
        assert floor == close(found, rel=1e-3)
        full = random_covariance(rng, d)
        full *= trace / np.trace(full)
        rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
        assert floor <= van_trees(full, rotation @ np.diag(s) @ rotation.T).value * (1 + 1e-9)


def test_van_trees_trace_without_information_is_the_prior():
    for trace in (0.0, 1e-300, 1e-20, 1e-12):
        assert van_trees_trace(trace, 2.0, dim=5).value == close(2.0, rel=1e-10)
        assert van_trees_trace(trace, [1.0, 4.0, 0.0]).value == close(5 / 3, rel=1e-10)
    assert van_trees_trace(3.0, [0.0, 0.0]).value == 0.0
    assert van_trees_trace(6.0, [1.0, 1.0]).value == close(van_trees_trace(6.0, 1.0, dim=2).value)
    assert van_trees([[0.0]], [[2.0]]).value == close(2.0)


# --- the box -----------------------------------


def test_box_minimax_reference_values():
    for information, value in ((0.1, 0.2438), (1.0, 0.1925), (10.0, 0.0315), (100.0, 0.00717)):
        assert box_minimax(information).value == close(value, rel=0, abs=10 ** -round(3 - math.log10(value) / 3))
    assert box_minimax(0.0).value == 0.25
    assert box_minimax(0.0, each_coordinate=False).value == close(1 / (4 * math.pi**2))


def test_box_minimax_two_point_maximum_by_search():
    for information in (0.01, 0.5, 2.96, 3.0, 10.0, 40.0):
        for width in (0.2, 1.0, 7.0):
            delta = np.linspace(0, min(width, math.pi / math.sqrt(information)), 200_001)
            two = float(((delta / 2) ** 2 * np.cos(delta * math.sqrt(information) / 2) ** 2).max())
            cosine = 1 / (information + 4 * math.pi**2 / width**2)
            assert box_minimax(information, width=width).value == close(max(two, cosine), rel=1e-8)


def test_information_of_the_cosine_prior_by_quadrature():
    """J(π) = ∫ π'²/π of π = (2/w) cos²(πx/w) on [−w/2, w/2]."""
    for w in (0.3, 1.0, 5.0):
        x = np.linspace(-w / 2, w / 2, 20_001)
        slope = -4 / w * np.cos(np.pi * x / w) * np.sin(np.pi * x / w) * np.pi / w
        with np.errstate(invalid="ignore", divide="ignore"):
            integrand = np.nan_to_num(slope**2 / (2 / w * np.cos(np.pi * x / w) ** 2), posinf=0.0)
        information = float(np.sum(integrand) * (x[1] - x[0]))
        assert box_minimax(0.0, width=w, each_coordinate=False).value == close(1 / information, rel=1e-2)


def gaussian_bayes_risk(points, prior, s):
    """Bayes risk of a prior on points when x = z + N(0, s²) is released."""
    x = np.linspace(points.min() - 9 * s, points.max() + 9 * s, 3001)
    joint = prior[:, None] * norm.pdf((x - points[:, None]) / s) / s
    mass = joint.sum(0)
    mean = points @ joint / np.maximum(mass, 1e-300)
    return float(np.sum((points[:, None] - mean) ** 2 * joint)) * (x[1] - x[0])


@pytest.mark.parametrize("information", [0.1, 1.0, 10.0, 100.0])
def test_box_minimax_lies_below_the_least_favourable_bayes_risk(information):
    """Gaussian location on [0, 1], information 1/s² everywhere: maximise the Bayes risk over priors on a grid."""
    s = 1 / math.sqrt(information)
    points = np.linspace(0, 1, 41)
    priors = [np.where((points == 0) | (points == 1), 0.5, 0.0), np.full(41, 1 / 41)]
    cosine = np.cos(np.pi * (points - 0.5)) ** 2
    priors.append(cosine / cosine.sum())
    half = np.zeros(41)
    for gap in (0.3, 0.5, 0.7, 0.9):
        half = np.exp(-np.abs(np.abs(points - 0.5) - gap / 2) * 30)
        priors.append(half / half.sum())
    worst = max(gaussian_bayes_risk(points, p, s) for p in priors)
    assert box_minimax(information).value <= worst * (1 + 1e-6)
    assert box_minimax(information).value >= 0.3 * worst
    # the van Trees part is a statement about its own prior
    assert gaussian_bayes_risk(points, priors[2], s) >= 0.99 * box_minimax(information, each_coordinate=False).value


# --- Le Cam -----------------------------------


def test_le_cam_is_the_bayes_risk_of_two_records():
    """On two corners the floor is the exact Bayes risk; each conversion lies below, for random mechanisms."""
    rng = np.random.default_rng(2)
    for _ in range(1000):
        p, q = random_releases(rng, 2, int(rng.integers(2, 7)))
        w = 10 ** rng.uniform(-1, 1)
        risk = bayes_error(np.array([[0.0], [w]]), np.array([p, q]))
        loss = np.log(p / q)
        overlap = overlap_from_losses(loss, p)
        assert lecam(overlap, widths=w).value == close(risk, rel=1e-9)
        slack = 1 + 1e-9
        assert overlap_from_pure(np.abs(loss).max()) <= overlap * slack
        eps = float(rng.uniform(0, np.abs(loss).max()))
        delta = max(np.sum(np.maximum(a - math.exp(eps) * b, 0)) for a, b in ((p, q), (q, p)))
        assert overlap_from_pure(eps, min(delta, 1.0)) <= overlap * slack
        assert overlap_from_order2(max(math.log(np.sum(p**2 / q)), 0.0)) <= overlap * slack
        for order in (0.5, 0.75, 1.0, 1.5, 2.0, 8.0, 40.0):
            if order == 1:
                divergence = kl(p, q)
            else:
                divergence = float(np.logaddexp.reduce(order * np.log(p) + (1 - order) * np.log(q))) / (order - 1)
            assert overlap_from_renyi(max(divergence, 0.0), order) <= overlap * slack


def test_le_cam_conversions_are_tight():
    for eps in (1e-3, 0.5, 2.0, 8.0, 30.0):
        p = 1 / (1 + math.exp(-eps))
        tail = 1 / (1 + math.exp(eps))
        assert overlap_from_pure(eps) == close(4 * p * tail, rel=1e-9)  # randomised response
        assert overlap_from_losses([eps, -eps], [p, tail]) == close(overlap_from_pure(eps), rel=1e-9, abs=1e-15)
        # with δ: an outcome that only one of the two can give, and randomised response otherwise
        with_delta = overlap_from_losses([eps, -eps], [0.9 * p, 0.9 * tail], 0.1)
        assert with_delta == close(overlap_from_pure(eps, 0.1), rel=1e-9, abs=1e-15)
    assert overlap_from_losses([0.0], [1.0 + 1e-6]) == close(1 - 1e-6, rel=1e-9)  # an excess of mass is taken off


def test_le_cam_on_the_corners_of_a_box():
    """Random mechanisms on {0,w}^d: the exact Bayes risk of a uniform corner lies above the floor."""
    rng = np.random.default_rng(3)
    for _ in range(300):
        d = int(rng.integers(1, 4))
        widths = 10 ** rng.uniform(-0.5, 0.5, d)
        cube = np.array(list(product([0.0, 1.0], repeat=d))) * widths
        releases = random_releases(rng, 2**d, int(rng.integers(2, 12)))
        overlap = min(float(np.sum(2 * p * q / (p + q))) for p in releases for q in releases)
        assert lecam(overlap, widths=widths).value <= bayes_error(cube, releases) * (1 + 1e-9)


# --- rate–distortion -----------------------------------


def best_reference(releases):
    """min over references R of max over records KL(P‖R): the channel's capacity, by Blahut and Arimoto from above."""
    prior = np.full(len(releases), 1 / len(releases))
    for _ in range(60):
        mean = prior @ releases
        gaps = np.sum(releases * np.log(releases / mean), axis=1)
        prior = prior * np.exp(gaps - gaps.max())
        prior /= prior.sum()
    mean = prior @ releases
    return max(kl(p, mean) for p in releases)


@pytest.mark.slow
def test_no_attacker_beats_rate_distortion_on_random_mechanisms():
    """1,000 random mechanisms on the corners of {0,w}^d; the exact Bayes risk at the exact mutual information."""
    rng = np.random.default_rng(4)
    largest = 0.0
    for k in range(1000):
        d = int(rng.integers(1, 5))
        widths = np.ones(d) if k % 2 else 10 ** rng.uniform(-0.5, 0.5, d)
        bits = np.array(list(product([0, 1], repeat=d)))
        if k % 4 < 2:
            releases = random_releases(rng, 2**d, int(rng.integers(2, 20)))
        else:  # randomised response, bit by bit: the equality case for equal odds and sides
            odds = np.full(d, rng.uniform(0, 4)) if k % 3 else rng.uniform(0, 4, d)
            keep = 1 / (1 + np.exp(-odds))
            releases = np.where(bits[:, None] == bits[None], keep, 1 - keep).prod(axis=2)
        mean = releases.mean(0)
        information = float(np.mean(np.sum(releases * np.log(releases / mean), axis=1)))
        risk = bayes_error(bits * widths, releases)
        floor = corners_floor(information, widths=widths).value
        assert floor <= risk * (1 + 1e-8) + 1e-13, (d, information)
        largest = max(largest, floor / risk)
        if k % 5 == 0:
            assert corners_floor(best_reference(releases), widths=widths).value <= risk * (1 + 1e-8) + 1e-13
    assert largest > 1 - 1e-8


def test_corners_floor_against_mpmath():
    with mp.workdps(40):
        for share in (1e-25, 1e-12, 1e-9, 3e-8, 1e-6, 1e-4, 0.01, 0.3, 0.6, 0.9, 0.999, 1 - 1e-9):
            budget = float(mp.log(2) * share)

            def gap(eta, budget=budget):
                return mp.log(2) + eta * mp.log(eta) + (1 - eta) * mp.log(1 - eta) - mp.mpf(budget)

            low, high = mp.mpf(10) ** -30, mp.mpf("0.5")
            for _ in range(160):
                middle = (low + high) / 2
                low, high = (middle, high) if gap(middle) > 0 else (low, middle)
            truth = float(low * (1 - low))
            for d in (1, 784, 10**7):
                value = corners_floor(budget * d, dim=d).value
                assert value == close(truth, rel=1e-7)
                assert value <= truth * (1 + 1e-12) + 1e-16


@pytest.mark.filterwarnings("ignore:Values in x were outside bounds:RuntimeWarning")  # SLSQP of older SciPy
def test_unequal_sides_by_numerical_optimisation():
    """Minimise Σ wᵢ² ηᵢ(1 − ηᵢ) subject to Σ (ln 2 − h(ηᵢ)) = KL."""
    rng = np.random.default_rng(5)
    for _ in range(25):
        d = int(rng.integers(2, 5))
        widths = 10 ** rng.uniform(-0.5, 0.5, d)
        nats = float(rng.uniform(0.02, 0.95)) * d * math.log(2)

        def spent(eta):
            return float(np.sum(math.log(2) + eta * np.log(eta) + (1 - eta) * np.log1p(-eta)))

        found = math.inf
        for _start in range(3):
            result = minimize(
                lambda eta, w=widths: float(w**2 @ (eta * (1 - eta))) / len(w),
                rng.uniform(0.1, 0.45, d),
                bounds=[(1e-9, 0.5)] * d,
                constraints={"type": "ineq", "fun": lambda eta, n=nats: n - spent(eta)},
                method="SLSQP",
                options={"ftol": 1e-13, "maxiter": 500},
            )
            if spent(result.x) <= nats + 1e-7:
                found = min(found, result.fun)
        floor = corners_floor(nats, widths=widths).value
        assert floor <= found * (1 + 1e-5)
        assert floor == close(found, rel=1e-3)


def test_log_odds_spend_at_least_the_budget():
    """An attacker credited with less than its nats would make the floor too high."""
    from reconbound.bounds.rate_distortion import _entropy_gap, _inverse_entropy_gap

    for budget in (1e-300, 1e-12, 1e-9, 9.9e-9, 1e-8, 1e-6, 1e-5, 1e-3, 0.1, 0.69):
        assert float(_entropy_gap(np.array(_inverse_entropy_gap(budget)))) >= budget


def test_unequal_sides_meet_equal_ones():
    for nats in (1e-30, 1e-20, 1e-12, 1e-3, 0.4, 1.2):
        equal = corners_floor(nats, widths=[0.7, 0.7]).value
        unequal = corners_floor(nats, widths=[0.7, 0.7 * (1 + 1e-12)]).value
        assert unequal == close(equal, rel=1e-6)
    for scale in (1e-170, 1e-100, 1.0, 1e50, 1e99):
        for nats in (1e-25, 1e-16, 0.5, 1.3):
            value = corners_floor(nats, widths=[0.1 * scale, 0.7 * scale, 0.3 * scale]).value
            assert value == close(corners_floor(nats, widths=[0.1, 0.7, 0.3]).value * scale**2, rel=1e-9, abs=1e-300)
    # one side dwarfs the other: almost all nats go there, and none is left for it beyond ln 2
    assert corners_floor(0.3, widths=[1e-6, 1.0]).value == close(corners_floor(0.3).value / 2, rel=1e-6)
    assert corners_floor(0.3 + math.log(2), widths=[1e-6, 1.0]).value <= corners_floor(0.3).value * 1e-12 / 2 * (
        1 + 1e-6
    )
    assert corners_floor(0.3 + math.log(2), widths=[1e-3, 1e10]).value >= 0


def test_uniform_floor_on_releases_of_a_uniform_record():
    """A uniform record, rounded into k cells and sent through randomised response: exact information and error."""
    for k in (1, 2, 3, 10, 100):
        cells = (np.arange(k) + 0.5) / k
        for keep in (1.0, 0.9, 0.5):
            releases = keep * np.eye(k) + (1 - keep) / k
            information = float(np.mean([kl(p, releases.mean(0)) for p in releases]))
            risk = bayes_error(cells[:, None], releases) + 1 / (12 * k**2)
            for d in (1, 3):
                assert uniform_floor(d * information, dim=d).value <= risk * (1 + 1e-12)
                assert rate_distortion(d * information, dim=d).value <= 0.25
    # no attacker errs less than rounding to e^R cells does, and the floor is within 12/(2πe) = 0.70 of it
    assert uniform_floor(math.log(100)).value == close(12 / (2 * math.pi * math.e) / (12 * 100**2), rel=1e-9)


def test_gaussian_floor_is_met_by_the_linear_gaussian_channel():
    """Reverse water-filling: add noise sᵢθ/(sᵢ − θ) to coordinate i; the information is ½ Σ ln(1 + s/noise)."""
    rng = np.random.default_rng(6)
    for _ in range(200):
        d = int(rng.integers(1, 6))
        s = 10 ** rng.uniform(-1, 1, d)
        theta = float(rng.uniform(0.01, 1) * s.max())
        noise = np.where(s > theta, s * theta / np.where(s > theta, s - theta, 1), np.inf)
        information = float(np.sum(np.log1p(s / noise))) / 2
        posterior = 1 / (1 / s + 1 / noise)
        assert gaussian_floor(information, s).value == close(float(np.mean(posterior)), rel=1e-9)
        noise = 10 ** rng.uniform(-1, 1, d)  # any other channel does worse
        information = float(np.sum(np.log1p(s / noise))) / 2
        assert gaussian_floor(information, s).value <= float(np.mean(1 / (1 / s + 1 / noise))) * (1 + 1e-9)
        order = rng.permutation(d)
        assert gaussian_floor(information, s[order]).value == close(gaussian_floor(information, s).value, rel=1e-9)
    assert gaussian_floor(0.0, [1.0, 4.0]).value == close(2.5)
    assert gaussian_floor(math.inf, [1.0, 4.0]).value == 0.0
    assert uniform_floor(0.7, widths=[1.0, 3.0]).value == close(
        gaussian_floor(0.7, np.array([1.0, 9.0]) / (2 * math.pi * math.e)).value
    )


def test_the_design_example():
    """d = 784, q = .01, σ = .5 with the smooth clip, T = 5000."""
    m = 1.1153 / 0.5
    assert rate_distortion(5000 * renyi.kl_poisson(m, 0.01), dim=784).value == close(0.243, rel=0, abs=5e-4)
    assert 1e-38 < theorem1(5000 * renyi.order2_poisson(m, 0.01), dim=784).value < 1e-36


# --- the whole range -----------------------------------


@given(TENS, st.floats(0, 3), DIMS, st.floats(-10, 10))
@settings(max_examples=150, deadline=None)
def test_rate_distortion_is_finite_and_falls(nats, more, dim, log_width):
    width = 10**log_width
    for floor in (corners_floor, uniform_floor, rate_distortion):
        high, low = floor(nats, widths=width, dim=dim), floor(nats * 10**more, widths=width, dim=dim)
        assert 0 <= low.value <= high.value * (1 + 1e-9) <= width**2 / 4 * (1 + 2e-9)
        assert str(low)
    high, low = gaussian_floor(nats, width, dim=dim), gaussian_floor(nats * 10**more, width, dim=dim)
    assert 0 <= low.value <= high.value * (1 + 1e-9) <= width * (1 + 2e-9)


@given(TENS, st.floats(0, 3), st.lists(st.floats(-6, 6), min_size=2, max_size=6))
@settings(max_examples=60, deadline=None)
def test_unequal_sides_over_the_whole_range(nats, more, logs):
    widths = 10.0 ** np.array(logs)
    high, low = corners_floor(nats, widths=widths), corners_floor(nats * 10**more, widths=widths)
    assert 0 <= low.value <= high.value * (1 + 1e-9) <= float(np.mean(widths**2)) / 4 * (1 + 2e-9)
    high, low = van_trees_trace(nats, widths), van_trees_trace(nats * 10**more, widths)
    assert 0 <= low.value <= high.value * (1 + 1e-9) <= float(np.mean(widths)) * (1 + 2e-9)


@given(TENS, st.floats(0, 3), st.floats(0, 1))
@settings(max_examples=150, deadline=None)
def test_overlaps_and_box_are_finite_and_fall(eps, more, delta):
    larger = eps * 10**more
    for overlap in (overlap_from_pure, overlap_from_order2, overlap_from_renyi):
        assert 0 <= overlap(larger) <= overlap(eps) * (1 + 1e-15) <= 1 + 1e-15
        assert overlap(eps) <= 1
        assert overlap(math.inf) == 0.0
        assert overlap(0.0) == 1.0
    assert 0 <= overlap_from_pure(eps, delta) <= overlap_from_pure(eps)
    for each in (True, False):
        low, high = box_minimax(larger, each_coordinate=each).value, box_minimax(eps, each_coordinate=each).value
        assert 0 < low <= high * (1 + 1e-12) <= 0.25 * (1 + 1e-12)
        assert 0 <= box_minimax(eps, width=1e-200, each_coordinate=each).value < 1e-300
        assert math.isfinite(box_minimax(eps, width=1e100, each_coordinate=each).value)
    assert 0 <= van_trees_trace(larger, 1.0, dim=10**7).value <= van_trees_trace(eps, 1.0, dim=10**7).value <= 1


@pytest.mark.parametrize(
    ("call", "name", "value"),
    [
        (lambda: van_trees([[1.0]], np.eye(2)), "covariance", "(2, 2)"),
        (lambda: van_trees([[1.0, 2.0], [2.0, 1.0]], np.eye(2)), "information", "-1"),
        (lambda: van_trees([[1.0]], [[math.nan]]), "covariance[0, 0]", "nan"),
        (lambda: van_trees_trace(-1.0, 1.0), "trace", "-1.0"),
        (lambda: van_trees_trace(1.0, [1.0, -1.0]), "variances[1]", "-1.0"),
        (lambda: van_trees_trace(1.0, [1.0, 1.0], dim=3), "dim", "3"),
        (lambda: van_trees_trace(1.0, 1.0, dim=0), "dim", "0"),
        (lambda: van_trees_trace(1.0, 1.0, dim=2.5), "dim", "2.5"),
        (lambda: box_minimax(-1.0), "information", "-1.0"),
        (lambda: box_minimax(1.0, width=0.0), "width", "0.0"),
        (lambda: lecam(1.5), "overlap", "1.5"),
        (lambda: lecam(math.nan), "overlap", "nan"),
        (lambda: overlap_from_pure(-1.0), "epsilon", "-1.0"),
        (lambda: overlap_from_pure(1.0, 1.5), "delta", "1.5"),
        (lambda: overlap_from_order2(math.nan), "epsilon", "nan"),
        (lambda: overlap_from_renyi(1.0, 0.4), "order", "0.4"),
        (lambda: overlap_from_losses([0.0, math.inf], [0.5, 0.5]), "losses[1]", "inf"),
        (lambda: overlap_from_losses([0.0, 1.0, 2.0], [0.5]), "probabilities", "1"),
        (lambda: overlap_from_losses([0.0], [1.0], -0.1), "infinite", "-0.1"),
        (lambda: corners_floor(-1.0), "kl", "-1.0"),
        (lambda: uniform_floor(math.nan), "kl", "nan"),
        (lambda: rate_distortion(1.0, widths=[1.0, 0.0]), "widths[1]", "0.0"),
        (lambda: gaussian_floor(1.0, [-1.0]), "variances[0]", "-1.0"),
    ],
)
def test_bad_input_is_named(call, name, value):
    with pytest.raises(InputError) as caught:
        call()
    assert caught.value.name == name
    assert value in str(caught.value)


# --- each coordinate, or their average -----------------------------------


def test_le_cam_holds_for_each_coordinate_by_itself():
    """Randomised response on each bit of a corner, ε shared unequally: every bit's Bayes risk is above the floor."""
    shares = np.array([2.0, 0.5, 0.0])  # replace-one neighbours are at most 2.5 apart
    floor = lecam(overlap_from_pure(shares.sum()), dim=3)
    flip = 1 / (1 + np.exp(shares))
    assert floor.coordinates == "each"
    assert (flip * (1 - flip) >= floor.value).all()
    assert lecam(overlap_from_pure(2.0)).value == pytest.approx(
        flip[0] * (1 - flip[0])
    )  # tight where all of ε is one's


def test_rate_distortion_holds_for_the_average_only():
    """A release that gives one of two bits away carries ln 2: the average floor holds, that bit's error is zero."""
    floor = rate_distortion(math.log(2), dim=2)
    assert floor.coordinates == "average"
    assert 0 < floor.value <= (0.0 + 0.25) / 2
    assert "on average over the coordinates" in str(floor)


def test_which_floors_bind_each_coordinate():
    for dim, average in ((1, "each"), (2, "average")):
        assert rate_distortion(0.1, dim=dim).coordinates == average
        assert van_trees(np.eye(dim), np.eye(dim)).coordinates == average
        assert van_trees_trace(1.0, 1.0, dim=dim).coordinates == average
    assert lecam(0.5, widths=[1.0, 2.0]).coordinates == "average"
    assert box_minimax(1.0).coordinates == "each"
    assert box_minimax(1.0, each_coordinate=False).coordinates == "average"
