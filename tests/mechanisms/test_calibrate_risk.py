"""The smallest noise for a risk: met, not by less, for every kind of risk and mechanism."""

import math

import pytest
from scipy.stats import norm
from test_mechanisms import ADD, REPLACE

from reconbound._internal.checks import InputError
from reconbound.mechanisms import DP, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import with_noise
from reconbound.mechanisms.calibrate_risk import RiskTarget, calibrate_risk
from reconbound.mechanisms.group import group_of

TARGETS = [
    RiskTarget("advantage", 0.2),
    RiskTarget("advantage", 0.2, adjacency=ADD),
    RiskTarget("tpr", 0.05, 0.01),
    RiskTarget("tpr", 1e-5, 1e-6, ADD),
    RiskTarget("success", 0.15, 0.1),
    RiskTarget("success", 0.15, 0.1, REPLACE),
    RiskTarget("success", 1e-3, 1 / 50257, ADD),
    RiskTarget("mu", 0.7),
]
MECHANISMS = [
    SampledGaussian(1.0, 0.01, 500, clip="hard"),
    SampledGaussian(1.0, 0.05, 100, sampler="fixed"),
    SampledGaussian.shuffled(1.0, 10, 45),
    OutputPerturbation(1000, 0.1, 1.0),
]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
def test_the_smallest_noise(mechanism, target):
    if mechanism.sampler in ("fixed", "shuffle") and target.adjacency == ADD:
        with pytest.raises(InputError, match="adjacency"):
            calibrate_risk(mechanism, target)
        return
    found = calibrate_risk(mechanism, target)
    noise = getattr(found, found.noise_field)
    assert target.reached(found) <= target.limit
    assert target.reached(with_noise(mechanism, noise * (1 - 5e-4))) > target.limit


def test_closed_forms_of_one_gaussian():
    one = SampledGaussian(1.0, clip="hard")
    for target, mu in (
        (RiskTarget("advantage", 0.1, adjacency=ADD), 2 * norm.ppf(0.55)),
        (RiskTarget("tpr", 0.05, 0.01, ADD), norm.ppf(0.05) - norm.ppf(0.01)),
        (RiskTarget("success", 0.15, 0.1, ADD), norm.ppf(0.15) - norm.ppf(0.1)),
        (RiskTarget("mu", 0.3, adjacency=ADD), 0.3),
    ):
        assert calibrate_risk(one, target).noise_multiplier == pytest.approx(1 / mu, rel=1e-4)
    replaced = calibrate_risk(one, RiskTarget("mu", 0.3))
    assert replaced.noise_multiplier == pytest.approx(2 / 0.3, rel=1e-4)
    three = calibrate_risk(one, RiskTarget("mu", 0.3, adjacency=ADD), group=3)
    assert three.noise_multiplier == pytest.approx(3 / 0.3, rel=5e-4)


def test_a_group_needs_more_noise():
    mechanism, target = SampledGaussian(1.0, 0.01, 200, clip="hard"), RiskTarget("tpr", 0.05, 0.01)
    alone, five = (calibrate_risk(mechanism, target, group=size) for size in (1, 5))
    assert five.noise_multiplier > 2 * alone.noise_multiplier
    assert target.reached(group_of(five, 5)) <= target.limit < target.reached(group_of(alone, 5))


def test_what_no_noise_reaches_and_what_needs_none():
    with pytest.raises(InputError, match="met without noise: a record is in no batch with a chance of 98"):
        calibrate_risk(SampledGaussian(1.0, 1e-3, 20), RiskTarget("advantage", 0.1))
    with pytest.raises(InputError, match="mechanism must have noise"):
        calibrate_risk(DP(1.0), RiskTarget("advantage", 0.1))


@pytest.mark.parametrize(
    ("values", "name"),
    [
        (("speed", 0.1), "measure"),
        (("advantage", 0.0), "target_advantage"),
        (("advantage", 1.0), "target_advantage"),
        (("advantage", 0.1, 0.1), "at"),
        (("mu", math.inf), "target_mu"),
        (("tpr", 0.1), "fpr"),
        (("tpr", 0.1, 0.1), "target_tpr"),
        (("tpr", 0.1, 0.0), "fpr"),
        (("success", 1.0, 0.1), "target_success"),
        (("success", 0.1, 1.5), "baseline"),
        (("mu", 0.1, None, "swap"), "adjacency"),
    ],
)
def test_wrong_targets_are_named(values, name):
    with pytest.raises(InputError, match=name):
        RiskTarget(*values)
