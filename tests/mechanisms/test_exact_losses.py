"""Loss distributions, curves and ε against δ(ε) without any grid, for mechanisms from a seed."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import norm

from exact_losses import Step, exact_delta
from reconbound.mechanisms import Composition, SampledGaussian
from reconbound.mechanisms.calibrate_risk import RiskTarget, calibrate_risk
from reconbound.mechanisms.group import group_of

ADD, REPLACE = "add/remove", "replace-one"
KINDS = {ADD: ("remove", "add"), REPLACE: ("replace",)}


def hard(noise, rate=1.0, steps=1):
    return SampledGaussian(noise, rate, steps, clip="hard")


def worst(stretches, epsilon, adjacency, rows=1):
    """Returns the larger δ(ε) of both directions."""
    steps = [[(Step(1 / s, q, kind, rows), t) for s, q, t in stretches] for kind in KINDS[adjacency]]
    return max(exact_delta(one, epsilon) for one in steps)


@pytest.mark.parametrize(
    ("mu", "steps", "epsilon"), [(1.0, 1, 1.0), (0.1, 100, 3.0), (0.05, 400, 0.2), (0.02, 900, 9.0)]
)
@pytest.mark.parametrize("kind", ["remove", "add"])
def test_the_reference_is_exact_for_gaussians(mu, steps, epsilon, kind):
    total = mu * math.sqrt(steps)
    exact = norm.cdf(total / 2 - epsilon / total) - math.exp(epsilon) * norm.cdf(-total / 2 - epsilon / total)
    assert exact_delta([(Step(mu, 1.0, kind), steps)], epsilon) == pytest.approx(exact, rel=1e-9)


def check(mechanism, stretches, rows=1, loose=1.1):
    """Checks that ε, advantage and curve are not below the exact ones, nor far above them for one row."""
    for adjacency in (ADD, REPLACE):
        curve = mechanism.trade_off(adjacency)
        for delta in (1e-2, 1e-5, None):
            epsilon = 0.0 if delta is None else mechanism.epsilon_at(delta, adjacency)
            if epsilon is None or epsilon > 100:
                continue
            exact, claimed = worst(stretches, epsilon, adjacency, rows), float(curve.delta(epsilon))
            if math.isnan(exact):
                continue
            assert exact <= claimed * (1 + 1e-7) + 1e-13
            if delta is not None:
                assert exact <= delta * (1 + 1e-7) + 1e-13
            if rows == 1 and epsilon > 0:
                assert claimed <= exact * loose + 1e-8


@pytest.mark.parametrize("seed", range(6))
def test_sampled_steps(seed):
    rng = np.random.default_rng(seed)
    noise, rate = 10 ** rng.uniform(-0.3, 1.3), 10 ** rng.uniform(-3, -0.3)
    steps = round(10 ** rng.uniform(2, 5.5))
    check(hard(noise, rate, steps), [(noise, rate, steps)])


@pytest.mark.parametrize("seed", range(3))
def test_schedules(seed):
    rng = np.random.default_rng(100 + seed)
    stretches = [
        (10 ** rng.uniform(-0.2, 1), 10 ** rng.uniform(-3, -0.5), round(10 ** rng.uniform(2, 4))) for _ in range(3)
    ]
    check(Composition([hard(*one) for one in stretches]), stretches)


@pytest.mark.parametrize(
    ("rows", "noise", "rate", "steps"), [(2, 1.0, 0.01, 1000), (5, 4.0, 0.05, 500), (10, 8.0, 0.02, 3000)]
)
def test_no_group_of_equal_rows_is_above_its_curve(rows, noise, rate, steps):
    check(group_of(hard(noise, rate, steps), rows), [(noise, rate, steps)], rows)


def test_known_values_without_a_grid():
    """The design's: ε = 6.7688; the noise for an advantage of 0.1, 1.0251 by riskcal; a TPR from 0.0104 to 0.0135."""
    exact = brentq(lambda e: math.log(worst([(1.5, 0.04, 2250)], e, ADD) / 1e-5), 6, 7)
    assert exact == pytest.approx(6.76878, abs=2e-5)
    assert exact <= hard(1.5, 0.04, 2250).epsilon_at(1e-5, ADD) <= exact * (1 + 1e-4)
    noise = brentq(lambda s: worst([(s, 0.002, 10_000)], 0.0, ADD) - 0.1, 1.0, 1.05)
    assert noise == pytest.approx(1.02486, abs=1e-5)
    ours = calibrate_risk(hard(1.0, 0.002, 10_000), RiskTarget("advantage", 0.1, adjacency=ADD)).noise_multiplier
    assert noise <= ours <= noise * (1 + 3e-4)
    epsilons = np.linspace(3.0, 4.9, 39)
    rate = min(math.exp(e) * 1e-4 + worst([(0.5, 0.002, 10_000)], e, ADD) for e in epsilons)
    assert rate == pytest.approx(0.01347, abs=1e-5)
    assert hard(0.5, 0.002, 10_000).trade_off(ADD).tpr(1e-4) == pytest.approx(rate, rel=1e-3)


if __name__ == "__main__":  # python tests/mechanisms/test_exact_losses.py 0 200
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        test_sampled_steps(number)
        test_schedules(number)
