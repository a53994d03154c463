"""Risks on the command line: reconbound bound's table, JSON and curve; reconbound calibrate's targets."""

import json
import re
import subprocess
import sys

import pytest

from calling import check_refused
from reconbound.mechanisms import OutputPerturbation, SampledGaussian
from reconbound.mechanisms.group import group_of
from reconbound.mechanisms.risk import risks

SGD = ["--sample-rate", 0.01, "--steps", 1000, "--clip", "hard", "--sampler", "poisson"]
ADD, REPLACE = "add/remove", "replace-one"


def test_bound_prints_and_lists_the_risks(answer, run):
    mechanism = SampledGaussian(1.0, 0.01, 1000, clip="hard")
    found = answer("bound", "--noise-multiplier", 1, *SGD)["risks"]
    assert list(found) == [ADD, REPLACE]
    for adjacency, facts in found.items():
        same = risks(mechanism, adjacency)
        assert {name: value for name, value in facts.items() if name != "curve"} == same.to_dict()
        assert facts["curve"]["fpr"][0] == 1e-10
        assert len(facts["curve"]["tpr"]) == 101
        assert facts["tpr"][-1]["fpr"] == 1e-10
    status, out, err = run("bound", "--noise-multiplier", 1, *SGD)
    assert (status, err) == (0, "")
    text = " ".join(re.sub("[│┃]", " ", out).split())
    assert "The most that any attacker can reach, by neighbours" in text
    assert "advantage of a test 16.2% 26.5%" in text  # 0.16102 and 0.26437, rounded up
    assert "TPR at FPR 1% 2.92% 4.96%" in text
    assert "0.475 (0.014) 0.688 (0.0024)" in text


def test_bound_takes_a_rate_a_chance_and_a_group(answer, run):
    options = ["--noise-multiplier", 1, *SGD, "--fpr", "1/1000", "--blind-chance", "1/50257", "--group", 2]
    mechanism = group_of(SampledGaussian(1.0, 0.01, 1000, clip="hard"), 2)
    found = answer("bound", *options)
    assert found["mechanism"]["group"] == 2
    assert found["epsilon"] == mechanism.epsilon_at(1e-5)
    success = found["risks"][ADD]["success"][-1]
    assert success == {"baseline": 1 / 50257, "success": mechanism.trade_off(ADD).tpr(1 / 50257)}
    out = run("bound", *options)[1]
    assert "for 2 rows of one person" in " ".join(out.split())
    assert "TPR at FPR 0.1%" in " ".join(re.sub("[│┃]", " ", out).split())
    assert "rebuilt, blindly 0.00199%" in out


@pytest.mark.parametrize("option", ["--fpr", "--blind-chance"])
@pytest.mark.parametrize("wrong", [2, -0.1, "nan", "some"])
def test_wrong_rates_name_their_option(run, option, wrong):
    status, out, err = run("bound", "--noise-multiplier", 2, *SGD, option, wrong)
    check_refused(status, out, err)
    assert option in err


def test_only_known_neighbours_have_a_column(answer, run):
    assert list(answer("bound", "--noise-multiplier", 1, *SGD[:-1], "fixed")["risks"]) == [REPLACE]
    assert list(answer("bound", "--epsilon", 1, "--adjacency", ADD)["risks"]) == [ADD, REPLACE]
    assert list(answer("bound", "--epsilon", 1, "--adjacency", REPLACE)["risks"]) == [REPLACE]
    shown = run("bound", "--epsilon", 900, "--adjacency", REPLACE)[1]
    assert re.search(r"μ of Gaussian DP.* none", shown)


def test_curve_is_a_page_that_needs_no_network(run, tmp_path):
    page = tmp_path / "curve.html"
    status, out, err = run("bound", "--noise-multiplier", 1, *SGD, "--curve", page)
    assert (status, err) == (0, "")
    assert str(page) in out.replace("\n", "")
    text = page.read_text()
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="https?:', text)
    figure = json.loads(re.search(r'"curve",\s*(\[\{.*?\}\]),\s*\{"', text, re.DOTALL)[1])
    assert [line["name"].partition(":")[0] for line in figure] == [ADD, REPLACE, "a guess"]
    curve = SampledGaussian(1.0, 0.01, 1000, clip="hard").trade_off(ADD)
    assert figure[0]["x"][0] == 1e-10
    assert figure[0]["y"] == pytest.approx([curve.tpr(x) for x in figure[0]["x"]])
    assert run("bound", "--noise-multiplier", 2, *SGD, "--curve", page)[0] == 0  # its own page is written anew
    page.write_text("notes")
    check_refused(*run("bound", "--noise-multiplier", 1, *SGD, "--curve", page))
    assert page.read_text() == "notes"
    check_refused(*run("bound", "--noise-multiplier", 1, *SGD, "--curve", tmp_path))


def test_a_million_steps_without_torch():
    """The loss distributions of a million steps, the table and JSON, without torch."""
    code = (
        "import sys; from reconbound.cli.app import run\n"
        "assert run(['bound', '--noise-multiplier', '20', '--sample-rate', '0.001', '--steps', '1e6']) == 0\n"
        "assert 'torch' not in sys.modules and 'plotly' not in sys.modules and 'pandas' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def value(facts, measure, adjacency, at=None):
    one = risks(mechanism_of(facts), adjacency, fprs=at or 0.1, baselines=at or 0.1)
    found = {"advantage": one.advantage, "mu": one.gdp.mu, "tpr": one.tpr[0][1], "success": one.success[0][1]}
    return found[measure]


def mechanism_of(facts):
    return SampledGaussian(facts["noise_multiplier"], 0.01, 1000, clip="hard")


@pytest.mark.parametrize(
    ("target", "measure", "limit", "at"),
    [
        (["--target-advantage", 0.1], "advantage", 0.1, None),
        (["--target-tpr", 0.05, "--fpr", 0.01], "tpr", 0.05, 0.01),
        (["--target-success", 0.15, "--baseline", 0.1], "success", 0.15, 0.1),
        (["--target-success", 0.001, "--baseline", "1/50257"], "success", 0.001, 1 / 50257),
        (["--target-mu", 0.5], "mu", 0.5, None),
    ],
)
@pytest.mark.parametrize("adjacency", [None, ADD, REPLACE])
def test_calibrate_to_a_risk(answer, run, target, measure, limit, at, adjacency):
    neighbours = [] if adjacency is None else ["--adjacency", adjacency]
    found = answer("calibrate", *target, *SGD, *neighbours)
    which = adjacency or (ADD if measure == "success" else REPLACE)
    assert value(found, measure, which, at) <= limit
    less = {**found, "noise_multiplier": found["noise_multiplier"] * (1 - 5e-4)}
    assert value(less, measure, which, at) > limit
    assert found["target"] == {"measure": measure, "limit": limit, "at": at, "adjacency": which}
    assert found["epsilon"] > found["epsilon_add_remove"] > 0
    assert found["risks"][ADD]["advantage"] < found["membership_advantage"] < 1
    assert found["success_at_1_percent"] > 0.01
    if adjacency is not None or measure == "mu":
        status, out, err = run("calibrate", *target, *SGD, *neighbours)
        assert (status, err) == (0, "")
        for part in ("The smallest noise multiplier with", f"({which})", "any attacker", "ε = ", "advantage of a test",
                     "with a chance of 1% without the release"):  # fmt: skip
            assert part in out, part


def test_known_noise_for_an_advantage(answer):
    """riskcal 1.5.1 says 1.0251 for add/remove."""
    found = answer("calibrate", "--target-advantage", 0.1, "--sample-rate", 0.002, "--steps", 10_000, "--clip", "hard",
                   "--adjacency", ADD)  # fmt: skip
    assert found["noise_multiplier"] == pytest.approx(1.0251, abs=1.5e-4)


def test_groups_and_output_perturbation(answer):
    found = answer("calibrate", "--target-advantage", 0.3, "--group", 3, *SGD, "--adjacency", ADD)
    assert risks(mechanism_of(found), ADD, group=3).advantage <= 0.3
    assert risks(mechanism_of(found), ADD, group=4).advantage > 0.3
    linear = ["--output-perturbation", "--loss", "logistic", "--records", 1000, "--l2", 0.1]
    found = answer("calibrate", "--target-mu", 0.5, *linear)
    assert OutputPerturbation(1000, 0.1, found["noise_std"]).replace_one_shift == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--target-tpr", 0.05], "--fpr"),
        (["--target-success", 0.05], "--baseline"),
        (["--target-advantage", 0.1, "--fpr", 0.1], "--fpr"),
        (["--target-mu", 1, "--baseline", 0.1], "--baseline"),
        (["--target-tpr", 0.05, "--fpr", 0.1], "--target-tpr"),
        (["--target-success", 1.5, "--baseline", 0.1], "--target-success"),
        (["--target-advantage", 0], "--target-advantage"),
        (["--target-mu", -1], "--target-mu"),
        (["--target-mu", 1, "--target-epsilon", 1], "--target-"),
        (["--target-error", 0.1, "--fpr", 0.1], "--fpr"),
        (["--target-advantage", 0.1, "--group", 0], "--group"),
        (["--target-advantage", 0.1, "--adjacency", "none"], "--adjacency"),
        (["--target-error", 0.1, "--group", 2], "--group"),
    ],
)
def test_wrong_targets_are_named(run, options, named):
    status, out, err = run("calibrate", *options, *SGD)
    check_refused(status, out, err)
    assert named in err


def test_targets_that_nothing_or_no_noise_reaches(run):
    few = ["--sample-rate", 0.001, "--steps", 20, "--clip", "hard"]
    check = run("calibrate", "--target-advantage", 0.1, *few)
    check_refused(*check)
    assert "met without noise" in check[2]
    check = run("calibrate", "--target-advantage", 0.1, *SGD[:-1], "fixed", "--adjacency", ADD)
    check_refused(*check)
    assert "--adjacency" in check[2]
