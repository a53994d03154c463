"""The smallest noise that meets a floor: it meets it, and no less noise does."""

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import round_to
from reconbound.mechanisms import DP, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.mechanisms.calibrate import LARGEST_NOISE, SMALLEST_NOISE, calibrate
from reconbound.mechanisms.guarantee import FLOORS, floor

MECHANISMS = [
    SampledGaussian(1.0, 0.01, 1000),
    SampledGaussian(1.0, 0.01, 1000, clip="hard"),
    SampledGaussian(1.0, 0.01, 1000, sampler="fixed"),
    SampledGaussian(1.0, 1.0, 1),
    SampledGaussian(1.0, 1e-6, 10**6),
    OutputPerturbation(12665, 1e-2, 1.0),
    OutputPerturbation(12665, 1e-2, 1.0, 28.0),
]


def with_noise(mechanism, noise):
    return dataclasses.replace(mechanism, **{mechanism.noise_field: noise})


def check(mechanism, target, name, **space):
    space = {"radius": math.inf, **space}  # the box as it stands, also for rows that are clipped to a ball
    found = calibrate(mechanism, target, bound=name, **space)
    assert getattr(found.mechanism, mechanism.noise_field) == found.noise
    assert found.target == target
    assert found.bound.value >= target
    assert found.bound == floor(name, found.mechanism, **space)
    rough = name == "rate_distortion" and isinstance(mechanism, SampledGaussian)  # loss distributions are on a grid
    less = found.noise * (1 - (0.011 if rough else 3e-6))
    if found.noise > SMALLEST_NOISE:
        assert floor(name, with_noise(mechanism, less), **space).value < target
    return found


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("name", list(FLOORS))
def test_the_target_is_met_and_just_met(mechanism, name):
    for target in (1e-3, 0.1, 0.24):
        check(mechanism, target, name, dim=3)
    check(mechanism, 100.0, name, dim=3, low=-50.0, high=50.0)


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=str)
@pytest.mark.parametrize("name", ["theorem1", "theorem1_paper", "corners"])
def test_unbiased_floors_go_above_a_guess(mechanism, name):
    found = check(mechanism, 1e4, name)
    assert found.bound.above_guess


def test_a_calibration_in_words():
    reported = str(calibrate(SampledGaussian(1.0, 0.01, 100), 0.16, bound="lecam"))
    assert reported.startswith("noise_multiplier 0.3553304: lecam: any attacker errs by at least ±0.4 (MSE 0.16)")


def test_the_noise_already_there_is_ignored():
    found = [calibrate(SampledGaussian(noise, 0.01, 100), 0.1).noise for noise in (1e-3, 1.0, 1e3)]
    assert found[0] == found[1] == found[2]


def test_closed_forms():
    """One unsampled release: theorem 1 from both ends at 4m² = ε₂ with 1/(e^ε₂ − 1) = target."""
    for target in (1e-3, 0.1, 10.0):
        epsilon = math.log1p(1 / target)
        sgd = calibrate(SampledGaussian(1.0, clip="hard"), target, bound="theorem1")
        assert sgd.noise == pytest.approx(2 / math.sqrt(epsilon), rel=2e-6)
        out = calibrate(OutputPerturbation(100, 0.1, 1.0), target, bound="theorem1", radius=math.inf)
        assert out.noise == pytest.approx(2 / (10 * math.sqrt(epsilon)), rel=2e-6)


@pytest.mark.parametrize("mechanism", [MECHANISMS[0], MECHANISMS[2], MECHANISMS[5]], ids=str)
@pytest.mark.parametrize("name", ["lecam", "rate_distortion"])
def test_no_noise_beats_a_plain_guess(mechanism, name):
    for target in (0.25, 0.2500001, 1.0, 1e300):
        with pytest.raises(InputError, match=r"target_mse must be below 0\.25") as caught:
            calibrate(mechanism, target, bound=name, radius=math.inf)
        assert caught.value.name == "target_mse"


@pytest.mark.parametrize("mechanism", [MECHANISMS[0], MECHANISMS[2], MECHANISMS[5]], ids=str)
@pytest.mark.parametrize("name", ["lecam", "rate_distortion"])
@pytest.mark.parametrize("short", [1e-6, 1e-9, 1e-12, 1e-15, 1e-16])
def test_just_below_a_plain_guess_it_is_met_or_refused(mechanism, name, short):
    """Rounding in the floor's last digit is no reason to fail."""
    target = 0.25 * (1 - short)
    if short > 1e-14 or floor(name, with_noise(mechanism, LARGEST_NOISE), radius=math.inf).value > target:
        assert calibrate(mechanism, target, bound=name, radius=math.inf).bound.value >= target
    else:
        with pytest.raises(InputError, match="target_mse"):
            calibrate(mechanism, target, bound=name, radius=math.inf)


@pytest.mark.parametrize("name", list(FLOORS))
def test_a_target_that_any_noise_meets(name):
    found = calibrate(SampledGaussian(1.0, 1e-9, 1), 1e-300, bound=name, dim=10**6)
    assert found.bound.value >= 1e-300
    assert found.noise >= SMALLEST_NOISE


def test_smallest_noise_is_returned_when_it_is_enough():
    found = calibrate(SampledGaussian(1.0, 1e-9, 1), 0.1, bound="lecam")
    assert found.noise == SMALLEST_NOISE


def test_target_met_without_noise_is_reported():
    """Floors of sampled steps for any attacker are at least (1 − q)ᵀ/4 whatever the noise; no others are."""
    never = 0.995**50
    found = calibrate(SampledGaussian(1.0, 0.005, 50), 0.16, bound="lecam")
    assert found.without_noise == pytest.approx(never)
    for name in ("lecam", "rate_distortion"):
        assert floor(name, SampledGaussian(1e-30, 0.005, 50)).value == pytest.approx(never / 4)
        assert calibrate(SampledGaussian(1.0, 0.005, 50), 0.16, bound=name).without_noise == found.without_noise
    assert calibrate(SampledGaussian(1.0, 0.005, 50), never / 4 + 1e-3, bound="lecam").without_noise is None
    assert calibrate(SampledGaussian(1.0, 0.005, 50), 0.1, bound="theorem1").without_noise is None
    assert calibrate(OutputPerturbation(10**9, 100.0, 1.0), 1e-9, bound="lecam").without_noise is None


def test_targets_beyond_every_noise_are_refused():
    with pytest.raises(InputError, match="which no noise lifts theorem1 above"):
        calibrate(SampledGaussian(1.0), 1e30, bound="theorem1")


@pytest.mark.parametrize("target", [0.0, -1.0, math.nan, math.inf, "much"])
def test_wrong_targets_are_named(target):
    with pytest.raises(InputError, match="target_mse"):
        calibrate(SampledGaussian(1.0), target)


def test_mechanisms_without_noise_and_unknown_floors_are_refused():
    for mechanism in (DP(1.0), RenyiDP(1.0), None):
        with pytest.raises(InputError, match="mechanism must have noise"):
            calibrate(mechanism, 0.1)
    with pytest.raises(InputError, match="bound must be one of"):
        calibrate(SampledGaussian(1.0), 0.1, bound="theorem2")


@settings(max_examples=25)
@given(
    st.sampled_from(list(FLOORS)),
    st.floats(-9, 0).map(lambda x: 10**x),
    st.floats(0, 6).map(lambda x: round(10**x)),
    st.floats(0, 5).map(lambda x: round(10**x)),
    st.floats(-6, -0.7).map(lambda x: 10**x),
    st.sampled_from(["poisson", "fixed"]),
)
def test_any_target_within_reach_is_met(name, rate, steps, dim, target, sampler):
    found = calibrate(SampledGaussian(1.0, rate, steps, sampler=sampler), target, bound=name, dim=dim)
    assert found.bound.value >= target
    assert SMALLEST_NOISE <= found.noise <= LARGEST_NOISE
    if found.noise > SMALLEST_NOISE:
        accuracy = 1.01e-2 if name == "rate_distortion" else 3e-6
        less = with_noise(found.mechanism, found.noise * (1 - accuracy))
        assert floor(name, less, dim=dim).value < target


@given(st.floats(-6, 12).map(lambda x: 10**x))
def test_rounding_is_upward_and_small(x):
    rounded = round_to(x, 7, "up")
    assert x * (1 - 1e-15) <= rounded <= x * (1 + 1.1e-6)
    assert float(f"{rounded:.7g}") == rounded
