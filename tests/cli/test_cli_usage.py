"""Typical input at the command line: mistyped names, both spellings, epochs, targets."""

import json
import math

import pytest

from reconbound.cli import app as cli
from reconbound.cli.options import epochs_as_steps, option_names
from reconbound.mechanisms import DP, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.calibrate import OutOfReach, calibrate, calibrate_epsilon


@pytest.fixture
def refused(capsys):
    """The one line that a command line is refused with."""

    def call(*words):
        assert cli.run([str(word) for word in words]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("reconbound: ")
        assert err.count("\n") == 1
        return err.removeprefix("reconbound: ").strip()

    return call


@pytest.fixture
def answer(capsys):
    def call(*words):
        assert cli.run([*(str(word) for word in words), "--json"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        return json.loads(out)

    return call


def test_mistyped_options_and_commands_get_a_suggestion(refused):
    assert "--noise-multiplier" in refused("audit", "--noise-multipler", "1").partition("--noise-multipler")[2]
    assert refused("audit", "--sample", "1").endswith("--sample-rate, --sampler)")
    assert refused("--versions") == "No such option: --versions (Possible options: --version)"
    assert refused("audi") == "No such command 'audi'. Did you mean 'audit'?"
    assert refused("--speed") == "No such option: --speed"


@pytest.mark.parametrize("command", ["show", "frontier", "report"])
def test_missing_folder_is_named(refused, command):
    assert refused(command) == "Missing argument 'FOLDER'."


def test_unit_and_units(answer):
    common = ["bound", "--epsilon", 1, "--adjacency", "replace-one"]
    assert answer(*common, "--unit", "years") == answer(*common, "--units", "years")
    for command in ("audit", "sweep"):
        assert {"--unit", "--units", "--out", "-o"} <= option_names(cli.app, command)


@pytest.mark.parametrize(
    ("epochs", "rate", "steps"), [(10, "0.01", 1000), (10, "256/50000", 1954), (0.001, "0.5", 1), (3, "1", 3)]
)
def test_epochs_are_steps_over_the_sample_rate_rounded_up(answer, epochs, rate, steps):
    common = ["--noise-multiplier", 1, "--sample-rate", rate]
    found = answer("bound", *common, "--epochs", epochs)
    assert found["mechanism"]["steps"] == steps
    assert found == answer("bound", *common, "--steps", steps)
    common = ["calibrate", "--target-mse", 0.01, "--sample-rate", rate]
    assert answer(*common, "--epochs", epochs) == answer(*common, "--steps", steps)


def test_epochs_never_give_fewer_steps_than_asked():
    for epochs in (0.1, 1, 1.1, 2.3, 7, 29, 100):
        for under in (1, 3, 7, 10, 49, 100, 1000):
            exact = epochs * under
            assert exact * (1 - 1e-9) <= epochs_as_steps(epochs, 1 / under) < exact + 1 + 1e-9


def test_wrong_epochs_are_named(refused):
    common = ["bound", "--noise-multiplier", "1", "--sample-rate", "0.1"]
    assert refused(*common, "--epochs", "0") == "--epochs must be greater than 0, got 0.0"
    assert "--epochs" in refused(*common, "--epochs", "x")


# --- targets -----------------------------------


def test_target_error_messages_use_its_name_and_unit(refused):
    common = ["calibrate", "--sample-rate", "0.1", "--steps", "3"]
    line = refused(*common, "--target-error", "3", "--bound", "lecam")
    assert line.startswith(
        "--target-error must be below 0.5, which no noise lifts lecam above on data in [0, 1] (--low"
    )
    assert line.endswith(", got 3.0")
    for value in ("0", "-1", "nan", "1e300", "1e-200"):
        line = refused(*common, "--target-error", value)
        assert line.startswith("--target-error must be")
        assert "target-mse" not in line
    assert "--target-mse must be below 0.25" in refused(*common, "--target-mse", "9", "--bound", "lecam")


def test_unreachable_floor_names_its_limit():
    with pytest.raises(OutOfReach, match=r"target_mse must be below 0\.25") as found:
        calibrate(SampledGaussian(1.0, 0.1, 3), 9.0, bound="lecam")
    assert found.value.highest == pytest.approx(0.25)


@pytest.mark.parametrize("adjacency", ["replace-one", "add/remove"])
@pytest.mark.parametrize("target", [0.5, 8.0])
def test_the_noise_for_an_epsilon(adjacency, target):
    """It reaches it, and a little less noise does not, by the mechanism's own ε."""
    plain = SampledGaussian(1.0, 0.02, 100, "hard")
    found = calibrate_epsilon(plain, target, delta=1e-6, adjacency=adjacency)
    assert found.epsilon_at(1e-6, adjacency) <= target
    less = SampledGaussian(found.noise_multiplier * 0.999, 0.02, 100, "hard")
    assert less.epsilon_at(1e-6, adjacency) > target


def test_the_noise_for_an_epsilon_of_one_gaussian_release():
    """Against the closed form δ = Φ(m/2 − ε/m) − e^ε Φ(−m/2 − ε/m) (Balle and Wang)."""
    from scipy.stats import norm

    found = calibrate_epsilon(OutputPerturbation(1000, 0.1, 1.0), 1.0)
    shift = 2 / (1000 * 0.1) / found.noise_std
    delta = norm.cdf(shift / 2 - 1 / shift) - math.e * norm.cdf(-shift / 2 - 1 / shift)
    assert delta == pytest.approx(1e-5, rel=5e-3)
    assert delta <= 1e-5


def test_calibrate_prints_the_noise_for_an_epsilon(answer, capsys):
    words = [
        "calibrate",
        "--target-epsilon",
        "3",
        "--output-perturbation",
        "--loss",
        "logistic",
        "--records",
        "1000",
        "--l2",
        "0.1",
    ]
    found = answer(*words, "--adjacency", "add/remove")
    assert found["epsilon_add_remove"] <= 3 < found["epsilon"]
    same = calibrate_epsilon(OutputPerturbation(1000, 0.1, 1.0), 3.0, adjacency="add/remove")
    assert found["noise_std"] == same.noise_std
    assert cli.run(words) == 0
    out = capsys.readouterr().out
    assert "with ε at most 3 (replace-one) at δ = 1e-05" in out
    assert "for their ε use --adjacency add/remove" in out


def test_epsilons_that_cannot_be_calibrated(refused):
    common = ["calibrate", "--sample-rate", "0.1", "--steps", "3"]
    assert "--target-epsilon" in refused(*common, "--target-epsilon", "0")
    assert "--adjacency" in refused(*common, "--target-epsilon", "1", "--sampler", "fixed", "--adjacency", "add/remove")
    with pytest.raises(ValueError, match="mechanism must have noise"):
        calibrate_epsilon(DP(1.0), 1.0)  # type: ignore[arg-type]


def test_huge_noise_is_accepted():
    assert SampledGaussian(1e12, 0.01, 10, sampler="fixed").epsilon_at(1e-5) < 1e-3


def test_help_lists_only_usable_options(capsys):
    assert cli.run(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "..." not in shown.split("Commands:")[1]  # no line is cut off
    assert "Start with reconbound audit" in shown
    assert cli.run(["calibrate", "--help"]) == 0
    shown = capsys.readouterr().out
    for refused_there in ("--noise-multiplier", "--noise-std", "--rdp2", "  --epsilon"):
        assert refused_there not in shown
    for command in ("audit", "sweep", "show", "report", "frontier"):
        assert cli.run([command, "--help"]) == 0
        usage = capsys.readouterr().out.splitlines()[0]
        assert ("DATA" in usage) == (command in ("audit", "sweep"))
        assert ("FOLDER" in usage) == (command not in ("audit", "sweep"))
        assert "[[" not in usage


def test_audit_and_sweep_read_data_by_the_same_options():
    """Audit and sweep have the same options for reading data, so that an audited file can be swept."""
    reads = {"--target", "--private", "--range", "--unit", "--units", "--data-folder", "--drop", "--header", "--size"}
    for command in ("audit", "sweep"):
        assert reads | {"--test-share", "--limit", "--out", "-o", "--seed"} <= option_names(cli.app, command)


def test_memory_errors_and_files_for_folders(refused, tmp_path):
    assert refused("bound", "3").endswith("unexpected extra argument(s) (3)")
    assert refused("audit", "digits", "more", "words").endswith("(more words)")
    file = tmp_path / "people.csv"
    file.write_text("age\n3\n")
    assert refused("show", file) == f"{file} is a file, not a folder"
    assert refused("report", file) == f"{file} is a file, not a folder"
    assert refused("audit", file).endswith("(age)")  # names the columns, and has no "got None"
