"""A mistake on the command line gives one line that names the option and the value."""

import re

import pytest

from calling import OUTPUT, SGD, check_refused

WRONG = [
    (["bound", "--noise-multiplier", "-1", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "-1"),
    (["bound", "--noise-multiplier", "0", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "0"),
    (["bound", "--noise-multiplier", "nan", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "nan"),
    (["bound", "--noise-multiplier", "inf", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "inf"),
    (["bound", "--noise-multiplier", "1e-200", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "1e-200"),
    (["bound", "--noise-multiplier", "abc", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "abc"),
    (["bound", "--noise-multiplier=xyz", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier", "xyz"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "1.5", "--steps", "3"], "--sample-rate", "1.5"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0", "--steps", "3"], "--sample-rate", "0"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "0"], "--steps", "0"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "1.5"], "--steps", "1.5"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "9" * 400], "--steps", "9" * 400),
    (["bound", *SGD, "--clip", "soft"], "--clip", "soft"),
    (["bound", *SGD, "--sampler", "shuffled"], "--sampler", "shuffled"),
    (["bound", *SGD, "--dim", "0"], "--dim", "0"),
    (["bound", *SGD, "--dim", "3x"], "--dim", "3x"),
    (["bound", *SGD, "--dim", "1e-3"], "--dim", "1e-3"),
    (["bound", *SGD, "--dim", "0x3"], "--dim", "0"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "1/0", "--steps", "3"], "--sample-rate", "1/0"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "1%", "--steps", "3"], "--sample-rate", "1%"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "nan"], "--steps", "nan"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1", "--steps", "1e99999999"], "--steps", "1e99999999"),
    (["bound", *SGD, "--low", "2", "--high", "1"], "--low", "2"),
    (["bound", *SGD, "--low", "1", "--high", "1"], "--low", "1"),
    (["bound", *SGD, "--low", "nan"], "--low", "nan"),
    (["bound", *SGD, "--high", "inf"], "--high", "inf"),
    (["bound", *SGD, "--high", "1e200"], "--high", "1e+200"),
    (["bound", *SGD, "--delta", "0"], "--delta", "0"),
    (["bound", *SGD, "--delta", "1"], "--delta", "1"),
    (["bound", *SGD, "--delta", "nan"], "--delta", "nan"),
    (["bound", *SGD, "--baseline", "-1"], "--baseline", "-1"),
    (["bound", "--epsilon", "-1"], "--epsilon", "-1"),
    (["bound", "--epsilon", "nan"], "--epsilon", "nan"),
    (["bound", "--epsilon", "1", "--delta", "2"], "--delta", "2"),
    (["bound", "--epsilon", "1", "--adjacency", "swap"], "--adjacency", "swap"),
    (["bound", "--rdp2", "-1"], "--rdp2", "-1"),
    (
        ["bound", "--output-perturbation", "--loss", "logistic", "--records", "0", "--l2", "1", "--noise-std", "1"],
        "--records",
        "0",
    ),
    (
        ["bound", "--output-perturbation", "--loss", "logistic", "--records", "1", "--l2", "-1", "--noise-std", "1"],
        "--l2",
        "-1",
    ),
    (
        ["bound", "--output-perturbation", "--loss", "logistic", "--records", "1", "--l2", "1", "--noise-std", "0"],
        "--noise-std",
        "0",
    ),
    (["bound", *OUTPUT, "--data-norm", "0"], "--data-norm", "0"),
    (
        [
            "bound",
            "--output-perturbation",
            "--loss",
            "logistic",
            "--records",
            "1",
            "--l2",
            "1e-200",
            "--noise-std",
            "1e-200",
        ],
        "--noise-std",
        "1e-200",
    ),
    (["calibrate", "--target-mse", "nan", "--sample-rate", "0.1", "--steps", "3"], "--target-mse", "nan"),
    (["calibrate", "--target-error", "-1", "--sample-rate", "0.1", "--steps", "3"], "--target-error", "-1"),
    (["calibrate", "--target-error", "1e300", "--sample-rate", "0.1", "--steps", "3"], "--target-error", "1e+300"),
    (["calibrate", "--target-mse", "0", "--sample-rate", "0.1", "--steps", "3"], "--target-mse", "0"),
    (
        ["calibrate", "--target-mse", "0.25", "--bound", "lecam", "--sample-rate", "0.1", "--steps", "3"],
        "--target-mse",
        "0.25",
    ),
    (["calibrate", "--target-mse", "1e300", "--sample-rate", "0.1", "--steps", "3"], "--target-mse", "1e+300"),
    (["calibrate", "--target-mse", "1", "--bound", "dfil", "--sample-rate", "0.1", "--steps", "3"], "--bound", "dfil"),
    (["calibrate", "--target-mse", "1", "--epsilon", "1"], "--epsilon", "1"),
    (["calibrate", "--target-mse", "1", "--rdp2", "1"], "--rdp2", "1"),
    (["calibrate", "--target-mse", "1", *SGD], "--noise-multiplier", "1"),
    (["calibrate", "--target-mse", "1", "--sample-rate", "2", "--steps", "3"], "--sample-rate", "2"),
]


MISSING = [
    (["bound", "--noise-multiplier", "1", "--steps", "3"], "--sample-rate"),
    (["bound", "--noise-multiplier", "1", "--sample-rate", "0.1"], "--steps"),
    (["bound", "--sample-rate", "0.1", "--steps", "3"], "--noise-multiplier"),
    (["bound", "--clip", "hard"], "--noise-multiplier"),
    (["bound", "--output-perturbation", "--loss", "logistic", "--l2", "1", "--noise-std", "1"], "--records"),
    (["bound", "--output-perturbation", "--loss", "logistic", "--records", "1", "--noise-std", "1"], "--l2"),
    (["bound", "--output-perturbation", "--loss", "logistic", "--records", "1", "--l2", "1"], "--noise-std"),
    (["bound", "--records", "1"], "--records"),
    (["bound", "--epsilon", "1", "--steps", "3"], "--steps"),
    (["bound", "--epsilon", "1", "--rdp2", "3"], "--rdp2"),
    (["bound", "--noise-multiplier", "1", "--adjacency", "add/remove"], "--adjacency"),
    (["bound", *OUTPUT, "--noise-multiplier", "1"], "--noise-multiplier"),
    (["bound", "--noise-multiplier"], "--noise-multiplier"),
    (["bound", "--speed", "1"], "--speed"),
    (["bound", "extra"], "extra"),
    (["calibrate", "--sample-rate", "0.1", "--steps", "3"], "--target-mse"),
    (
        ["calibrate", "--target-mse", "1", "--target-error", "1", "--sample-rate", "0.1", "--steps", "3"],
        "--target-error",
    ),
    (["bound", *SGD, "--epochs", "10"], "--epochs does not go with --steps"),
    (["bound", "--noise-multiplier", "1", "--epochs", "10"], "--sample-rate is missing"),
    (["bound", "--epsilon", "1", "--epochs", "10"], "--epochs does not go with --epsilon"),
    (["calibrate", "--target-epsilon", "1", "--target-mse", "1"], "--target-epsilon does not go with --target-mse"),
    (["calibrate", "--target-mse", "1", "--adjacency", "add/remove"], "--adjacency goes with --target-epsilon"),
    (["calibrate", "--epsilon", "3", "--sample-rate", "0.1", "--steps", "3"], "--target-epsilon"),
    (["bound", *SGD, "--batch-size", "10"], "--batch-size"),
    (["bound", *SGD, "--max-grad-norm", "1"], "--max-grad-norm"),
    (["calibrate", "--target-rmse", "1"], "--target-mse"),
    (["calibrate", "--target-mse", "0.1", "--steps", "3"], "--sample-rate"),
    (["calibrate", "--target-error", "5"], "--sample-rate is missing: private SGD needs it (or give --output-pert"),
    (["calibrate", "--target-mse", "0.1", "--output-perturbation", "--loss", "logistic", "--l2", "1"], "--records"),
    (["calibrate", "--target-mse", "0.1", "--sample-rate", "0.1", "--steps", "3", "--noise-std", "1"], "--noise-std"),
    (["calibrat"], "calibrat"),
    (["--version-of-nothing"], "--version-of-nothing"),
]


@pytest.mark.parametrize(("arguments", "option", "value"), WRONG, ids=lambda x: str(x)[:60])
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_wrong_values_are_one_line(run, arguments, option, value, form):
    status, out, err = run(*arguments, *form)
    check_refused(status, out, err)
    assert re.search(rf"{option}\b", err)
    assert value in err


@pytest.mark.parametrize(("arguments", "option"), MISSING, ids=lambda x: str(x)[:60])
def test_missing_and_needless_options_are_one_line(run, arguments, option):
    status, out, err = run(*arguments)
    check_refused(status, out, err)
    assert option in err


def test_internal_faults_are_raised(run, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("reconbound.cli.bound.guarantee", broken)
    with pytest.raises(ZeroDivisionError):
        run("bound")
