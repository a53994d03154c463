"""What a KL divergence says of attacks: against many digits, random pairs of distributions and exact Bayes risks."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
from scipy.optimize import minimize_scalar
from scipy.stats import norm

from approximate import close
from reconbound import bounds
from reconbound._internal.checks import InputError


def mp_kl(p, k):
    p, k = mp.mpf(p), mp.mpf(k)
    first = p * mp.log(p / k) if p > 0 else 0
    return first + ((1 - p) * mp.log((1 - p) / (1 - k)) if p < 1 else 0)


@pytest.mark.parametrize("kappa", [1e-300, 1e-20, 1e-3, 0.1, 0.5, 0.999])
@pytest.mark.parametrize("nats", [1e-18, 1e-9, 1e-3, 0.2, 3.0, 100.0])
def test_success_is_the_inverse_of_the_binary_divergence_rounded_up(kappa, nats):
    found = bounds.success_from_kl(kappa, nats)
    with mp.workdps(60):
        if -mp.log(kappa) <= nats:
            assert found == 1.0
            return
        low, high = mp.mpf(kappa), mp.mpf(1)
        for _ in range(180):
            middle = (low + high) / 2 if low > kappa * 2 else mp.sqrt(low * high)
            low, high = (middle, high) if mp_kl(middle, kappa) <= nats else (low, middle)
        assert low <= found <= low * (1 + mp.mpf(10) ** -11)


def test_success_at_the_ends_and_in_arrays():
    table = bounds.success_from_kl(np.array([[0.0], [0.2], [1.0]]), np.array([0.0, 0.1, 1e6, math.inf]))
    assert table[0].tolist() == [0.0, 0.0, 0.0, 1.0]
    assert table[2].tolist() == [1.0] * 4
    assert table[1, 0] == 0.2
    assert table[1, 2] == table[1, 3] == 1.0
    grid = bounds.success_from_kl(np.linspace(0, 1, 101)[:, None], np.geomspace(1e-12, 1e3, 60))
    assert np.all(np.diff(grid, axis=0) >= -1e-12)
    assert np.all(np.diff(grid, axis=1) >= 0)


def test_no_event_of_random_distributions_beats_success_or_membership():
    rng = np.random.default_rng(4)
    closest = 0.0
    for _ in range(300):
        p, q = rng.dirichlet(np.full(6, rng.choice([0.2, 1.0, 5.0])), 2) + 1e-12
        p, q = p / p.sum(), q / q.sum()
        d = float(np.sum(p * np.log(p / q)))
        events = (np.arange(64)[:, None] >> np.arange(6)) & 1
        hit, kappa = np.clip(events @ p, 0, 1), np.clip(events @ q, 0, 1)
        limit = bounds.success_from_kl(kappa, d)
        assert np.all(hit <= limit + 1e-12)
        assert np.max(hit - kappa) <= bounds.membership_from_kl(d) + 1e-12
        loss = rng.random(6)  # any loss in [0, 1]
        assert loss @ p <= bounds.success_from_kl(float(loss @ q), d) + 1e-12
        closest = max(closest, float(np.max((hit - kappa) / np.maximum(limit - kappa, 1e-9))))
    assert closest > 0.9
    p, kappa = 0.37, 0.12  # two points attain it
    assert bounds.success_from_kl(kappa, float(mp_kl(p, kappa))) == close(p, rel=1e-11)


@pytest.mark.parametrize("nats", [1e-18, 1e-6, 0.02, 0.7, 4.0, 20.0])
def test_membership_is_the_largest_gain_over_all_baselines(nats):
    gain = lambda logit: -(bounds.success_from_kl(1 / (1 + math.exp(-logit)), nats) - 1 / (1 + math.exp(-logit)))  # noqa: E731
    best = -minimize_scalar(gain, bounds=(-25, 5), method="bounded", options={"xatol": 1e-9}).fun
    found = bounds.membership_from_kl(nats)
    slack = 1e-9 if nats > 1e-15 else 1e-6  # the search subtracts two nearly equal chances
    assert found == close(best, rel=slack)
    assert found <= min(math.sqrt(nats / 2), math.sqrt(-math.expm1(-nats)))


def test_membership_is_below_both_known_bounds_and_rises():
    nats = np.concatenate([[0.0, 1e-310], np.geomspace(1e-300, 1e3, 500), [math.inf]])
    found = bounds.membership_from_kl(nats)
    assert np.all(np.diff(found) >= 0)
    assert np.all(found[:-1] <= np.minimum(np.sqrt(nats[:-1] / 2), np.sqrt(-np.expm1(-nats[:-1]))))
    assert found[-1] == 1.0
    assert bounds.membership_from_kl(2.0) < 0.95 * math.sqrt(-math.expm1(-2.0))


def test_estimate_is_exact_for_gaussian_losses_and_below_the_bound():
    shift = 1.3  # N(0, 1) against N(shift, 1): D = shift²/2
    for kappa in (1e-3, 0.1, 0.5):
        power = norm.sf(norm.isf(kappa) - shift)
        assert bounds.success_estimate(kappa, shift**2 / 2) == close(power, rel=1e-12)
        assert power < bounds.success_from_kl(kappa, shift**2 / 2)
    assert bounds.success_estimate(0.3, 0.0) == 0.3
    assert bounds.success_estimate(0.3, math.inf) == 1.0


def test_two_point_floor_lies_below_the_bayes_risk_of_two_gaussians():
    x = np.linspace(-15, 25, 8001)
    for gap in (0.3, 1.0, 1.4, 3.0):
        p, q = norm.pdf(x), norm.pdf(x - gap)
        risk = gap**2 / 4 * np.sum(2 * p * q / (p + q)) * (x[1] - x[0])
        floor = bounds.two_point_floor(gap, gap**2 / 2).value
        assert floor <= risk
        assert floor >= 0.3 * risk or gap > 2
    gaps = np.linspace(0.1, 4, 400)
    assert np.max(bounds.two_point_floor(gaps, gaps**2 / 2).value) == close(0.5 / math.e, rel=1e-3)  # 0.184/I, I = 1


def test_entropy_power_floor_is_met_by_gaussians():
    """z ~ N(0, s), release z + N(0, v): the information is ½ ln(1 + s/v), the posterior variance sv/(s + v)."""
    for s, v in ((1.0, 0.1), (4.0, 3.0)):
        information = 0.5 * math.log1p(s / v)
        assert bounds.entropy_power_floor(s, information).value == close(s * v / (s + v), rel=1e-12)
        towards_mean = 0.5 * s / v  # E KL to the release of z = 0: a larger number, a lower floor
        assert bounds.entropy_power_floor(s, towards_mean).value < s * v / (s + v)
    assert bounds.entropy_power_floor(1.0, 3.0, dim=6).value == close(math.exp(-1), rel=1e-12)


def test_wrong_category_floor_holds_for_random_channels():
    rng = np.random.default_rng(7)
    for _ in range(200):
        k = int(rng.integers(2, 7))
        prior = rng.dirichlet(np.ones(k))
        channel = rng.dirichlet(np.full(8, rng.choice([0.3, 2.0])), k) + 1e-12
        channel /= channel.sum(1, keepdims=True)
        reference = rng.dirichlet(np.full(8, 5.0))
        nats = float(prior @ np.sum(channel * np.log(channel / reference), axis=1))
        wrong = 1 - float(np.sum(np.max(prior[:, None] * channel, axis=0)))
        floor = bounds.wrong_category_floor(float(-np.sum(prior * np.log(prior))), k, nats)
        assert 0 <= floor <= wrong + 1e-12
        # the average record: p_max of the mean divergence
        blind = float(np.max(prior))
        assert 1 - wrong <= bounds.success_from_kl(blind, nats) + 1e-12
    # met by the symmetric channel
    k, error = 5, 0.3
    information = math.log(k) + error * math.log(error / (k - 1)) + (1 - error) * math.log(1 - error)
    assert bounds.wrong_category_floor(math.log(k), k, information) == close(error, rel=1e-9)


def test_mean_van_trees_is_met_by_gaussians_of_equal_information():
    information, variance = np.array([0.5, 2.0]), np.array([4.0, 0.1])
    posterior = 1 / (information + 1 / variance)
    assert bounds.mean_van_trees(information, 1 / variance).value == close(posterior, rel=1e-12)
    many = np.array([0.1, 3.0, 8.0])  # unequal records: the mean of the posterior variances is larger
    assert bounds.mean_van_trees(float(many.mean()), 1.0).value < np.mean(1 / (many + 1))


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: bounds.success_from_kl(1.5, 1.0), "baseline"),
        (lambda: bounds.success_from_kl(0.5, -1.0), "nats"),
        (lambda: bounds.success_from_kl(0.5, [0.1, math.nan]), "nats"),
        (lambda: bounds.membership_from_kl(-1.0), "nats"),
        (lambda: bounds.two_point_floor(-1.0, 1.0), "gap"),
        (lambda: bounds.entropy_power_floor(1.0, 1.0, dim=0), "dim"),
        (lambda: bounds.wrong_category_floor(1.0, 2, 0.1), "entropy"),
        (lambda: bounds.mean_van_trees(1.0, 0.0), "prior_information"),
    ],
)
def test_errors_name_the_argument(call, name):
    with pytest.raises(InputError, match=f"^{name} "):
        call()
