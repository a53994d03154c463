"""Floors for any attacker, against exact Bayes risks, numerical optimisation and random mechanisms."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import norm

from approximate import DIMS, TENS, close
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


def test_van_trees_equals_gaussian_posterior_covariance():
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
