"""reconbound calibrate: the smallest noise for a floor or an epsilon."""

import re

import pytest

from calling import NAMES, check_refused, floors
from reconbound.mechanisms import OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import calibrate
from reconbound.mechanisms.guarantee import floor


@pytest.mark.parametrize("name", NAMES)
def test_calibrate_private_sgd(answer, run, name):
    options = ["--target-mse", 0.1, "--bound", name, "--sample-rate", 0.01, "--steps", 1000, "--dim", 3]
    found = answer("calibrate", *options)
    same = calibrate(SampledGaussian(1.0, 0.01, 1000), 0.1, bound=name, dim=3)
    assert found["noise_multiplier"] == same.noise
    assert found["mse"] == found["bound"]["mse"] == same.bound.value >= 0.1
    assert found["bound"]["name"] == name
    assert found["mechanism"]["noise_multiplier"] == found["noise_multiplier"]
    assert found["target_mse"] == 0.1
    assert found["epsilon"] > 0
    status, out, err = run("calibrate", *options)
    assert (status, err) == (0, "")
    assert f"{same.noise:.7g}" in out


def test_target_in_data_units(answer):
    options = ["--sample-rate", 0.01, "--steps", 100, "--bound", "lecam"]
    assert answer("calibrate", "--target-error", 0.25, *options) == answer(
        "calibrate", "--target-mse", 0.0625, *options
    )


def test_no_noise_is_advised_if_none_is_needed(answer, run):
    options = ["--target-error", 0.4, "--bound", "lecam", "--sample-rate", 0.005, "--steps", 50, "--dim", 784]
    status, out, _ = run("calibrate", *options)
    assert status == 0
    assert "met without noise: with chance 78% a record is never drawn" in " ".join(out.split())
    assert "1e-06" not in out
    assert "ε" not in out
    found = answer("calibrate", *options)
    assert found["met_without_noise"] is True
    assert found["never_drawn"] == pytest.approx(0.995**50)
    assert found["noise_multiplier"] is found["epsilon"] is found["mechanism"]["noise_multiplier"] is None


def test_calibrate_output_perturbation(answer):
    found = answer(
        "calibrate",
        "--target-mse",
        0.1,
        "--low",
        -1,
        "--high",
        1,
        "--output-perturbation",
        "--loss",
        "logistic",
        "--records",
        12665,
        "--l2",
        0.01,
        "--bound",
        "theorem1",
    )
    assert (
        found["noise_std"]
        == calibrate(OutputPerturbation(12665, 0.01, 1.0), 0.1, bound="theorem1", low=-1, high=1).noise
    )
    assert "noise_multiplier" not in found


def test_bound_confirms_calibrate(answer):
    sgd = ["--sample-rate", 0.02, "--steps", 500, "--sampler", "fixed", "--clip", "hard"]
    noise = answer("calibrate", "--target-mse", 0.2, "--bound", "lecam", *sgd)["noise_multiplier"]
    assert floors(answer("bound", "--noise-multiplier", repr(noise), *sgd))["lecam"]["mse"] >= 0.2


def test_calibrate_names_conditions_and_other_floors(run, answer):
    options = ["--target-error", 5, "--high", 120, "--units", "years", "--sample-rate", "32/240", "--steps", 112]
    names = ("theorem1", "corners", "lecam_unbiased", "lecam", "rate_distortion")
    alone = {name: answer("calibrate", *options, "--bound", name)["noise_multiplier"] for name in names}
    for name in names:
        reported = run("calibrate", *options, "--bound", name)[1].splitlines()
        reported = reported[1:] if reported[0].startswith("No meaningful guarantee") else reported
        assert ("on some conceivable record of the box, not on each" in reported[1]) == (
            name in ("lecam", "rate_distortion")
        )
        assert reported[5].startswith(
            f"{name} binds {'any' if name in ('lecam', 'rate_distortion') else 'unbiased'} att"
        )
        others = {line.split()[0]: float(line.split()[-1]) for line in reported[6:10]}
        assert set(others) == {*names} - {name}
        for other, noise in others.items():
            assert noise == pytest.approx(alone[other], rel=1e-3)
        assert reported[10].endswith("Records lie in [0, 120] years.")
    beyond = run("calibrate", "--target-error", 0.6, "--bound", "theorem1", "--sample-rate", 0.1, "--steps", 10)[1]
    assert "lecam (any attacker, on some record of the box): no noise is enough" in beyond


@pytest.mark.parametrize("bound", ["theorem1", "lecam"])
def test_target_beyond_the_range_names_the_range_options(run, bound):
    rest = ["--sample-rate", "0.1", "--steps", "3", "--bound", bound]
    for options in (
        ["--target-error", 5, "--units", "years"],
        ["--target-mse", 25],
        ["--target-error", 5, "--high", 4],
    ):
        status, out, err = run("calibrate", *options, *rest)
        check_refused(status, out, err)
        assert "--low and --high" in err
        assert options[0] in err
    assert run("calibrate", "--target-error", 5, "--high", 120, *rest)[0] == 0


def test_printed_noise_of_other_floors_is_enough(run):
    """1.372062 shown as 1.372 would miss the target."""
    for error in (0.41, 0.42, 0.43):
        options = ["--target-error", error, "--bound", "lecam", "--sample-rate", "1/23", "--steps", 184]
        shown = dict(re.findall(r"^  (\w+) \(.*\): ([0-9.]+)$", run("calibrate", *options)[1], re.MULTILINE))
        assert set(shown) == {"theorem1", "corners", "lecam_unbiased", "rate_distortion"}
        for name, noise in shown.items():
            assert floor(name, SampledGaussian(float(noise), 1 / 23, 184)).rmse >= error


BALL = ["--output-perturbation", "--records", 1000, "--l2", 0.01, "--loss", "logistic", "--dim", 20, "--data-norm", 1]


@pytest.mark.parametrize(
    ("ends", "place"), [((), "the ball"), (("--low", 0, "--high", 1), "the range within the ball")]
)
@pytest.mark.parametrize("bound", ["theorem1", "corners", "lecam", "rate_distortion"])
def test_ball_is_not_called_a_box(run, answer, bound, ends, place):
    """The box inside the ball is named as what it is, in text and in JSON; nothing speaks of "the box" as the space."""
    options = ["--bound", bound, *BALL, *ends]
    for target in (["--target-error", 0.1], ["--target-epsilon", 1]):
        text = run("calibrate", *target, *options)[1]
        assert not re.search(r"(?:of|over) the box(?! \[| inside)", text), text
        assert "Note: Records lie in the ball of radius 1 around 0" in text
        assert f"some conceivable record of {place}, not on each" in text or bound in ("theorem1", "corners")
        found = answer("calibrate", *target, *options)
        assert not re.search(r"(?:of|over) the box(?! \[| inside)", str(found)), found
        assert found["data"]["space"].endswith("the ball of radius 1 around 0")
        assert any("in the ball of radius 1 around 0" in note for note in found["notes"])
    text = run("bound", "--noise-std", 0.05, *BALL, *ends)[1]
    assert not re.search(r"(?:of|over|in) the box(?! \[| inside)", " ".join(text.split())), text
    assert f"some record in {place}" in " ".join(text.split())


def test_unreachable_target_in_a_ball_names_its_radius(run):
    """The box inside the ball goes to 0.2236, and records of one coordinate other than 0 go to 1."""
    for ends, most in (((), "0.447214"), (("--low", 0, "--high", 1), "0.447214")):
        check = run("calibrate", "--target-error", 3, "--bound", "theorem1", *BALL, *ends)[2]
        assert f"must be at most {most}" in check
        assert "the ball of radius 1 around 0" in check
        for bound, highest in (("lecam", ("0.223607", "0.111803")), ("rate_distortion", ("0.223607", "0.111803"))):
            beyond = run("calibrate", "--target-error", 3, "--bound", bound, *BALL, *ends)[2]
            assert f"must be below {highest[bool(ends)]}" in beyond
            assert "the ball of radius 1 around 0" in beyond
            assert "on data from" not in beyond
    beside = run("calibrate", "--target-error", 0.15, "--bound", "theorem1", *BALL, "--low", 0, "--high", 1)[1]
    assert "lecam (any attacker, on some record of the range within the ball): no noise is enough, it ends at" in beside
    assert "±0.112 at most" not in beside  # a guess of 0 errs by ±0.223 at worst
