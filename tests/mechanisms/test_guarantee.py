"""All floors at once, over the whole range of mechanisms and data: finite, never negative, silent, and monotone."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconbound._internal.checks import InputError
from reconbound.bounds import theorem1, theorem2
from reconbound.mechanisms import DP, PLD, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.mechanisms.guarantee import FLOORS, KAPPAS, Guarantee, floor, guarantee

EXAMPLES = int(os.environ.get("RECONBOUND_EXAMPLES", "40"))  # 2000 to hunt for faults


def powers(low, high):
    """10^x, its ends included."""
    inner = st.floats(low, high).map(lambda x: 10.0**x)
    return st.one_of(st.sampled_from([10.0**low, 10.0**high, 1.0 if low <= 0 <= high else 10.0**low]), inner)


noises, rates, epsilons = powers(-6, 6), powers(-9, 0), powers(-12, 9)
steps = powers(0, 6).map(round)
dims = powers(0, 7).map(round)
clips, samplers = st.sampled_from(["smooth", "hard"]), st.sampled_from(["poisson", "fixed"])
sgd = st.builds(SampledGaussian, noises, rates, steps, clips, samplers)
output = st.builds(OutputPerturbation, powers(0, 7).map(round), powers(-6, 3), noises, powers(-3, 3))
deltas = st.one_of(st.just(0.0), powers(-15, -0.01))
known = st.one_of(
    st.builds(DP, epsilons, deltas, st.sampled_from(["replace-one", "add/remove"])),
    st.builds(RenyiDP, epsilons, st.floats(0.5, 10)),
)
boxes = st.tuples(st.floats(-1e6, 1e6), powers(-6, 6)).map(lambda t: (t[0], t[0] + t[1]))


def check(found: Guarantee) -> None:
    """Nothing in it is NaN, infinite or negative, and everything is what it says it is."""
    content = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    for bound in content["bounds"]:
        assert bound["mse"] >= 0
        assert bound["rmse"] == pytest.approx(math.sqrt(bound["mse"]))
        assert bound["attacker"] in ("unbiased", "any")
        assert isinstance(bound["vacuous"], bool)
        if bound["attacker"] == "any":  # guessing the middle of the box is an attacker too
            assert bound["mse"] <= bound["guess_mse"] * (1 + 1e-12)
    assert 0 <= content["membership_advantage"] <= 1
    successes = [pair["success"] for pair in content["rero"]]
    assert [pair["kappa"] for pair in content["rero"]] == list(KAPPAS)
    assert all(kappa * (1 - 1e-9) <= success <= 1 for kappa, success in zip(KAPPAS, successes, strict=True))
    assert successes == sorted(successes)
    for name in ("epsilon", "epsilon_add_remove"):
        assert content[name] is None or content[name] >= 0
    names = [bound["name"] for bound in content["bounds"]]
    assert names == [name for name in FLOORS if name in names]
    assert set(FLOORS) - set(names) <= {"theorem1_paper"}
    by_name = {bound["name"]: bound["mse"] for bound in content["bounds"]}
    assert by_name["corners"] >= by_name["theorem1"] * (1 - 1e-9)
    epsilon = found.epsilon is not None or found.epsilon_add_remove is not None
    lines = len(names) + epsilon + 2 + len(found.notes)  # the box, the mechanism, and how often a record is rebuilt
    assert str(found).count("\n") == lines
    assert "nan" not in str(found)


@settings(max_examples=EXAMPLES)
@given(st.one_of(sgd, output, known), dims, boxes, powers(-12, -0.01))
def test_every_answer_is_finite_and_without_warnings(mechanism, dim, box, delta):
    low, high = box
    if high > low:
        check(guarantee(mechanism, dim=dim, low=low, high=high, radius=math.inf, delta=delta))
        check(guarantee(mechanism, dim=dim, delta=delta))


def values(mechanism, dim):
    return {name: bound.value for name in FLOORS if (bound := floor(name, mechanism, dim=dim)) is not None}


def check_ordered(better, worse):
    """Every floor of the first is at least that of the second, up to rounding."""
    for name, value in worse.items():
        assert better[name] >= value * (1 - 1e-8) - 1e-300, name  # near a guess: two formulas, each rounded down


@settings(max_examples=2 * EXAMPLES)
@given(noises, rates, steps, clips, samplers, dims, st.floats(1, 100), st.sampled_from(["noise", "rate", "steps"]))
def test_floors_fall_with_less_noise_higher_rates_and_more_steps(noise, rate, count, clip, sampler, dim, factor, which):
    before = values(SampledGaussian(noise, rate, count, clip, sampler), dim)
    if which == "noise":
        noise = max(noise / factor, 1e-6)
    elif which == "rate":
        rate = min(rate * factor, 1.0)
    else:
        count = min(math.ceil(count * factor), 10**6)
    check_ordered(before, values(SampledGaussian(noise, rate, count, clip, sampler), dim))


@settings(max_examples=2 * EXAMPLES)
@given(noises, rates, steps, clips, samplers, st.floats(1e-8, 1e-3), st.sampled_from(["noise", "rate"]))
def test_floors_are_monotone_in_small_steps_too(noise, rate, count, clip, sampler, little, which):
    """Where one formula takes over from another, and at the last digit of every integral."""
    before = values(SampledGaussian(noise, rate, count, clip, sampler), 100)
    noise = noise * (1 - little) if which == "noise" else noise
    rate = min(rate * (1 + little), 1.0) if which == "rate" else rate
    check_ordered(before, values(SampledGaussian(noise, rate, count, clip, sampler), 100))


@settings(max_examples=2 * EXAMPLES)
@given(epsilons, st.floats(1, 100), deltas, st.sampled_from(["replace-one", "add/remove"]), dims)
def test_floors_fall_with_epsilon(epsilon, factor, delta, adjacency, dim):
    larger = epsilon * factor
    check_ordered(values(DP(epsilon, delta, adjacency), dim), values(DP(larger, delta, adjacency), dim))
    check_ordered(values(DP(epsilon, 0.0), dim), values(DP(epsilon, delta), dim))
    check_ordered(values(RenyiDP(epsilon), dim), values(RenyiDP(larger), dim))
    assert DP(epsilon, delta).membership_advantage() <= DP(larger, delta).membership_advantage()
    assert np.all(DP(epsilon, delta).rero(KAPPAS) <= DP(larger, delta).rero(KAPPAS))


@settings(max_examples=EXAMPLES)
@given(output, st.floats(1, 100))
def test_output_perturbation_is_monotone(mechanism, factor):
    worse = OutputPerturbation(mechanism.records, mechanism.l2, mechanism.noise_std / factor, mechanism.data_norm)
    check_ordered(values(mechanism, 784), values(worse, 784))
    assert mechanism.membership_advantage() <= worse.membership_advantage()
    assert mechanism.epsilon_at(1e-5) <= worse.epsilon_at(1e-5) * (1 + 1e-9)


@settings(max_examples=EXAMPLES)
@given(st.builds(SampledGaussian, noises, rates, steps, clips, samplers), st.floats(1, 10))
def test_successes_fall_with_noise(mechanism, factor):
    """Up to the three digits of the distribution's grid, and the edge where order 2 takes over from it."""
    better = SampledGaussian(
        mechanism.noise_multiplier * factor * 1.5,
        mechanism.sample_rate,
        mechanism.steps,
        mechanism.clip,
        mechanism.sampler,
    )
    allowed = 1.05 if mechanism.m > 1e-4 else math.inf
    if allowed < math.inf:
        assert better.membership_advantage() <= mechanism.membership_advantage() * allowed + 1e-6
        assert np.all(better.rero(KAPPAS) <= mechanism.rero(KAPPAS) * allowed + 1e-6)


def test_nothing_is_lost_by_scaling_the_box():
    small, large = (guarantee(SampledGaussian(1.0, 0.01, 1000), dim=5, low=-w, high=w) for w in (1.0, 1000.0))
    for name in FLOORS:
        assert large[name].value == pytest.approx(1e6 * small[name].value, rel=1e-9)


def test_the_papers_age_example():
    found = guarantee(RenyiDP(2.0), low=0.0, high=100.0, units="years")
    assert found["theorem1"].value == pytest.approx(391, abs=1)
    assert 19 <= found["theorem1"].rmse < 20
    assert guarantee(DP(2.0), high=100.0)["theorem1_paper"].value == pytest.approx(391, abs=1)
    assert (1 + guarantee(DP(0.1)).membership_advantage) / 2 == pytest.approx(0.525, abs=1e-3)
    assert "years" in str(found)


def test_design_example_of_a_million_nats():
    m = SampledGaussian(0.5, 0.01, 5000)
    assert floor("rate_distortion", m, dim=784).value == pytest.approx(0.243, abs=1e-3)
    assert floor("theorem1", m, dim=784).vacuous
    assert guarantee(DP(1e9))["theorem1"].value == 0.0
    assert guarantee(DP(1e9))["theorem1"].vacuous


def test_floors_carry_what_they_rest_on():
    found = guarantee(SampledGaussian(1.0, 0.01, 10, sampler="fixed"), baseline=0.1, units="m")
    for bound in found.bounds:
        assert bound.sampler == "fixed"
        assert bound.guess == 0.1
        assert bound.units == "m"
        assert "smooth clipping, uniform batches of fixed size" in bound.assumes
    assert found["theorem1_paper"].adjacency == "add/remove"
    assert {found[name].adjacency for name in ("theorem1", "corners", "lecam")} == {"replace-one"}
    with pytest.raises(KeyError):
        found["theorem2"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dim": 0}, "dim"),
        ({"dim": 1.5}, "dim"),
        ({"dim": 10**400}, "dim"),
        ({"low": 1.0, "high": 1.0}, "low"),
        ({"low": 2.0, "high": 1.0}, "low"),
        ({"low": math.nan}, "low"),
        ({"high": math.inf}, "high"),
        ({"low": -1e308, "high": 1e308}, "high"),
        ({"high": 1e200}, "high"),
        ({"high": 1e-200}, "high"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"baseline": 0.0}, "baseline"),
        ({"baseline": -1.0}, "baseline"),
    ],
)
def test_wrong_settings_are_named(options, named):
    with pytest.raises(InputError) as caught:
        guarantee(DP(1.0), **options)
    assert caught.value.name == named


def test_unknown_floors_are_refused():
    with pytest.raises(InputError, match="bound must be one of theorem1, theorem1_paper, corners"):
        floor("theorem3", DP(1.0))
    assert floor("theorem1_paper", DP(1.0, 1e-5)) is None


# --- what new users get wrong -----------------------------------


@pytest.mark.parametrize(("wrong", "name"), [({"high": [1, 2]}, "high"), ({"dim": (1, 28, 28)}, "dim"),
                                                ({"dim": "x"}, "dim"), ({"low": "x"}, "low")])  # fmt: skip
def test_wrong_settings_name_themselves(wrong, name):
    with pytest.raises(InputError, match=f"^{name} must be a number, got "):
        guarantee(DP(1.0), **wrong)


def test_an_unknown_floor_names_the_known_ones():
    with pytest.raises(KeyError, match="rate-distortion: the floors here are theorem1, theorem1_paper, corners, lecam"):
        guarantee(DP(1.0))["rate-distortion"]


@pytest.mark.parametrize("wrong", ["x", 3, None])
def test_a_distribution_must_be_one(wrong):
    with pytest.raises(InputError, match=r"^pld must be a PrivacyLossDistribution of dp-accounting, got "):
        PLD(wrong)


def test_missing_floors_have_a_reason():
    from dp_accounting.pld import privacy_loss_distribution as pl

    assert guarantee(SampledGaussian(1.0)).notes == guarantee(DP(1.0, adjacency="replace-one")).notes == ()
    for mechanism in (
        DP(1.0, 1e-6, "replace-one"),
        PLD(pl.from_gaussian_mechanism(1.0)),
        PLD(pl.from_laplace_mechanism(1.0)),
    ):
        found = guarantee(mechanism)
        (note,) = found.notes
        silent = {bound.name for bound in found.bounds if bound.value == 0}
        assert silent
        assert all(name in note for name in silent)


def test_complex_and_endless_values_are_refused_in_one_line():
    with pytest.raises(InputError, match=r"^information must be an array of real numbers, got 'complex ones'$"):
        theorem2(np.eye(2) + 1j)
    with pytest.raises(InputError) as caught:
        theorem1(np.zeros((30, 30)))
    assert str(caught.value) == "epsilon must be a number, got 'a ndarray'"


def test_in_words_it_ends_with_epsilon_where_there_is_one():
    found = guarantee(SampledGaussian(1.0, 1 / 23, 184, clip="hard"), dim=64)
    *floors, success, last, mechanism = str(found).splitlines()
    assert success == found.protection.sentence()
    assert [line.split(":")[0] for line in floors[1:]] == [bound.name for bound in found.bounds]
    assert last == "At δ = 1e-05: ε = 5.802 (replace-one); ε = 3.965 (add/remove)."
    assert mechanism == (
        "SampledGaussian: noise multiplier 1, sample rate 0.04347826, steps 184, clip hard, sampler poisson. Mean "
        "errors and chances are over the noise of all steps and the draw of their batches."
    )
    assert "ε =" not in str(guarantee(DP(3.0, 1e-4), delta=1e-5))  # it holds at no δ so small
