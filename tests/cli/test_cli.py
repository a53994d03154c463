"""The command line: its JSON, its tables, its errors."""

import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from calling import NAMES, OUTPUT, SGD, check_refused, floors
from reconbound import __version__
from reconbound._internal.formatting import format_floor
from reconbound.cli.bound import NO_DELTA, NO_SAMPLER
from reconbound.mechanisms import DP, OutputPerturbation, RenyiDP, SampledGaussian
from reconbound.mechanisms.guarantee import floor, guarantee

VENDOR = ["--epsilon", "3", "--delta", "1e-6", "--adjacency", "add/remove"]


def process(*arguments, **environment):
    """The same in a process of its own, as a user would."""
    return subprocess.run(
        [sys.executable, "-m", "reconbound", *arguments],
        capture_output=True,
        text=True,
        encoding=environment.get("PYTHONIOENCODING", "utf-8"),
        env={**os.environ, "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", **environment},
        timeout=120,
    )


# --- what comes out -----------------------------------


@pytest.mark.parametrize(
    ("options", "mechanism", "space"),
    [
        ([], SampledGaussian(1.0, 0.01, 1000), {}),
        (SGD, SampledGaussian(1.0, 0.01, 1000), {}),
        (
            [*SGD, "--clip", "hard", "--sampler", "fixed", "--dim", 784, "--low", -1, "--high", 3, "--delta", 1e-6],
            SampledGaussian(1.0, 0.01, 1000, "hard", "fixed"),
            {"dim": 784, "low": -1.0, "high": 3.0, "delta": 1e-6},
        ),
        (["--epsilon", 2, "--high", 100, "--units", "years"], DP(2.0), {"high": 100.0, "units": "years"}),
        (["--epsilon", 2, "--delta", 1e-7], DP(2.0, 1e-7), {"delta": 1e-7}),
        (["--epsilon", 2, "--adjacency", "add/remove"], DP(2.0, 0.0, "add/remove"), {}),
        (["--epsilon", 2, "--delta", 0], DP(2.0), {}),
        (["--rdp2", 2, "--baseline", 0.05], RenyiDP(2.0), {"baseline": 0.05}),
        ([*OUTPUT, "--dim", 784], OutputPerturbation(12665, 0.01, 0.01), {"dim": 784}),
        ([*OUTPUT, "--data-norm", 28], OutputPerturbation(12665, 0.01, 0.01, 28.0), {}),
    ],
)
def test_bound_matches_the_library(answer, run, options, mechanism, space):
    found = answer("bound", *options)
    reported = json.loads(json.dumps(guarantee(mechanism, **space).to_dict()))
    if isinstance(mechanism, SampledGaussian) and "--sampler" not in options:
        reported["notes"].insert(0, NO_SAMPLER)
    if "--epsilon" in options and "--delta" not in options:
        reported["notes"].insert(0, NO_DELTA)
    assert set(found.pop("risks")) >= {"replace-one"}  # tests/cli/test_cli_risk.py
    assert found == reported
    status, table, err = run("bound", *options)
    assert (status, err) == (0, "")
    for bound in found["bounds"]:
        assert bound["name"] in table


def test_json_keys(answer):
    found = answer("bound", *SGD)
    assert {"mechanism", "bounds", "membership_advantage", "rero", "epsilon", "delta"} <= set(found)
    assert [bound["name"] for bound in found["bounds"]] == NAMES
    for bound in found["bounds"]:
        assert {"name", "mse", "rmse", "attacker", "adjacency", "vacuous"} <= set(bound)
        assert type(bound["mse"]) is float
        assert bound["rmse"] == pytest.approx(math.sqrt(bound["mse"]))
        assert bound["attacker"] in ("unbiased", "any")
        assert type(bound["vacuous"]) is bool
        assert type(bound["adjacency"]) is str
    assert found["mechanism"] == {
        "type": "SampledGaussian",
        "noise_multiplier": 1.0,
        "sample_rate": 0.01,
        "steps": 1000,
        "clip": "smooth",
        "sampler": "poisson",
    }
    assert all(0 < pair["kappa"] <= pair["success"] <= 1 for pair in found["rero"])
    assert 0 < found["membership_advantage"] < 1
    assert found["epsilon"] > found["epsilon_add_remove"] > 0
    assert found["delta"] == 1e-5


def test_paper_numbers(answer):
    age = floors(answer("bound", "--rdp2", 2, "--low", 0, "--high", 100))
    assert age["theorem1"]["mse"] == pytest.approx(391, abs=1)
    assert age["theorem1"]["rmse"] == pytest.approx(19.8, abs=0.1)
    assert floors(answer("bound", "--epsilon", 2, "--high", 100))["theorem1_paper"]["mse"] == pytest.approx(391, abs=1)
    assert (1 + answer("bound", "--epsilon", 0.1)["membership_advantage"]) / 2 == pytest.approx(0.525, abs=1e-3)
    digits = floors(answer("bound", *OUTPUT, "--data-norm", 1, "--dim", 784))  # the ball: the paper has [0, 1]^784
    assert digits["theorem1_paper"]["mse"] == pytest.approx(0.0225 * 4 / 784, rel=2e-3)
    assert digits["theorem1"]["mse"] == pytest.approx(4 * digits["theorem1_paper"]["mse"])  # one Gaussian release
    assert digits["corners"]["mse"] == pytest.approx(784 * digits["theorem1"]["mse"])


def test_membership_line_rounds_as_in_the_paper(run):
    assert "right at most 52.5% of the time" in run("bound", "--epsilon", 0.1)[1]


@pytest.mark.parametrize(
    "options",
    [
        ["--epsilon", 1e9],
        ["--epsilon", 1e-12],
        ["--rdp2", 1e9],
        ["--noise-multiplier", 1e-6, "--sample-rate", 1, "--steps", 10**6],
        ["--noise-multiplier", 1e6, "--sample-rate", 1e-9, "--steps", 1],
        ["--epsilon", 1, "--dim", 10**7],
    ],
)
def test_extremes_print(answer, run, options):
    found = answer("bound", *options)
    assert all(bound["mse"] >= 0 for bound in found["bounds"])
    status, table, err = run("bound", *options)
    assert (status, err) == (0, "")
    assert not re.search(r"\b(nan|inf)\b", table)


@pytest.mark.parametrize(
    "options",
    [
        SGD,
        [*OUTPUT, "--dim", "784"],
        ["--epsilon", "1e-12"],
        ["--epsilon", "1e9"],
        [*SGD, "--units", "kilometres per hour", "--high", "1e6"],
    ],
)
def test_tables_fit_80_columns(run, options):
    status, table, _ = run("bound", *options)
    assert status == 0
    assert max(len(line) for line in table.splitlines()) <= 80
    assert "…" not in table
    assert all(line[-1] in "┓┃┩│┘" for line in table.splitlines() if line[0] in "┏┃┡│└")
    table, risks = table.partition("The most that any attacker")[::2]
    assert "advantage of a test" in risks
    rows = [line for line in table.splitlines() if line.startswith("│")]
    found = [cells[1].strip() for cells in (row.split("│") for row in rows) if cells[1].strip()]
    assert found == NAMES
    for row in rows:
        cells = [cell.strip() for cell in row.split("│")[1:-1]]
        if cells[0]:
            assert float(cells[1].replace(",", "")) >= 0
            assert float(cells[2].replace(",", "")) >= 0
            assert cells[3] in ("unbiased", "any")


def test_units_are_printed_as_given(run):
    table = run("bound", *SGD, "--units", "[m]")[1]
    assert "in [0, 1] [m]." in table
    assert "per coordinate, in [m]" in table


@pytest.mark.parametrize("columns", ["40", "60", "72"])
def test_narrow_terminals_get_lines(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    status, out, _ = run("bound", *SGD, "--high", "1e5", "--units", "dollars")
    assert status == 0
    assert max(len(line) for line in out.splitlines()) <= int(columns)
    assert "…" not in out
    reported = " ".join(out.split())
    for bound in guarantee(SampledGaussian(1.0, 0.01, 1000), high=1e5, units="dollars").bounds:
        assert f"- {bound}" in reported or f"│ {bound.name} │" in reported


def test_large_figures_are_written_out(run):
    table = run("bound", *VENDOR, "--high", 500000, "--units", "dollars")[1]
    assert "in [0, 500,000] dollars." in table
    assert "errs by ±250,000 dollars." in table
    assert "│  24,800 │ 6.16e+08 │" in table


def test_each_coordinate_and_average_are_named(run, answer):
    assert "lecam hold for each coordinate by itself" in " ".join(run("bound", *SGD, "--dim", 2)[1].split())
    assert "by itself" not in run("bound", *SGD)[1]
    kinds = {name: bound["coordinates"] for name, bound in floors(answer("bound", *SGD, "--dim", 2)).items()}
    assert kinds == dict(zip(NAMES, ["each", "each", "average", "each", "each", "average"], strict=True))
    options = ["--target-mse", 0.1, "--sample-rate", 0.01, "--steps", 100, "--dim", 9]
    assert "on average over the coordinates" in run("calibrate", *options, "--bound", "rate_distortion")[1]
    assert "on average" not in run("calibrate", *options, "--bound", "lecam")[1].splitlines()[1]


def test_reported_epsilon_names_its_assumptions(run, answer):
    reported = " ".join(run("bound", "--epsilon", 3, "--delta", 1e-5)[1].split())
    assert "it was taken as replace-one" in reported
    assert "What Opacus, TF Privacy and most libraries for private SGD report is for add/remove: say so" in reported
    assert any("taken as replace-one" in note for note in answer("bound", "--epsilon", 3)["notes"])
    for adjacency in ("add/remove", "replace-one"):
        options = ["--epsilon", 3, "--delta", 1e-5, "--adjacency", adjacency]
        message = " ".join(run("bound", *options)[1].split())
        assert "taken as replace-one" not in message
        assert ("by group privacy: (6, 0.000211)" in message) == (adjacency == "add/remove")


def test_epsilon_without_delta_gets_a_note(run):
    """ε = 3.97 from Opacus, its δ forgotten: the floors of pure ε-DP are not those of the training."""
    reported = " ".join(run("bound", "--epsilon", 3.97, "--adjacency", "add/remove", "--dim", 64)[1].split())
    assert "Note: no δ was given with ε, so δ = 0 was assumed" in reported
    assert "you gave no δ" not in run("bound", "--epsilon", 3.97, "--delta", 1e-5)[1]
    assert "you gave no δ" not in run("bound", *SGD)[1]


def test_numbers_are_written_for_people(run):
    reported = " ".join(run("bound", "--noise-multiplier", 1, "--sample-rate", "1/23", "--steps", 10**6)[1].split())
    assert "noise multiplier 1, sample rate 0.04347826, steps 1,000,000," in reported
    assert "a blind guess gets right 0.0001% of the time is rebuilt" in reported


def test_add_remove_epsilon_gives_no_higher_floor(answer):
    """So saying add/remove is safe whichever it was, as the note says."""
    for options in (["--epsilon", 0.5], ["--epsilon", 3, "--delta", 1e-5], ["--epsilon", 8, "--delta", 1e-7]):
        ours, theirs = (answer("bound", *options, "--adjacency", a, "--dim", 5) for a in ("replace-one", "add/remove"))
        both = zip(floors(ours).values(), floors(theirs).values(), strict=True)
        assert all(b["mse"] <= a["mse"] for a, b in both)
        assert theirs["membership_advantage"] >= ours["membership_advantage"]
        assert all(b["success"] >= a["success"] for a, b in zip(ours["rero"], theirs["rero"], strict=True))


def test_missing_epsilon_is_explained(run, answer):
    options = ["--epsilon", 3, "--delta", 1e-6]
    assert "with chance δ everything is revealed" in " ".join(run("bound", *options)[1].split())
    assert len(answer("bound", *options, "--adjacency", "replace-one")["notes"]) == 1
    assert answer("bound", "--epsilon", 3, "--delta", 0, "--adjacency", "replace-one")["notes"] == []
    assert "theorem1_paper" not in run("bound", *options)[1]  # not in the table: not in the text


def test_only_hard_clipping_is_as_opacus_counts(run):
    assert "as Opacus counts" in run("bound", *SGD, "--clip", "hard")[1]
    smooth = " ".join(run("bound", *SGD)[1].split())
    assert "as Opacus counts" not in smooth
    assert "for Opacus' clipping use --clip hard" in smooth
    assert "Opacus" not in run("bound", *OUTPUT)[1]


def test_numbers_as_people_write_them(answer):
    plain = answer("bound", "--noise-multiplier", 1, "--sample-rate", 0.00512, "--steps", 1000000, "--dim", 3072)
    people = answer(
        "bound", "--noise-multiplier", 1, "--sample-rate", "256/50000", "--steps", "1e6", "--dim", "3x32x32"
    )
    assert plain == people


def test_version(run):
    assert run("--version") == (0, f"reconbound {__version__}\n", "")


def test_default_mechanism_is_named(run):
    assert "No mechanism was given" in run("bound")[1]
    assert "No mechanism was given" not in run("bound", *SGD)[1]


def test_help(run):
    for arguments in ([], ["--help"], ["bound", "--help"], ["calibrate", "--help"]):
        status, out, err = run(*arguments)
        assert (status, err) == (0, "")
        assert "Usage: reconbound" in out
    for option in (
        "--noise-multiplier",
        "--sample-rate",
        "--steps",
        "--clip",
        "--sampler",
        "--dim",
        "--low",
        "--high",
        "--delta",
        "--baseline",
        "--epsilon",
        "--rdp2",
        "--output-perturbation",
        "--records",
        "--l2",
        "--noise-std",
        "--data-norm",
        "--json",
    ):
        assert option in run("bound", "--help")[1]


def test_shuffled_epochs_count_without_sampling(answer, run):
    """Two epochs and a bit: three Gaussian releases, one for each epoch begun; nothing is said of add/remove."""
    options = ["--noise-multiplier", 3, "--sample-rate", 0.3, "--steps", 9, "--sampler", "shuffle"]
    found = answer("bound", *options)  # epochs of four batches
    same = guarantee(SampledGaussian(3.0, 1.0, 3))
    assert found["mechanism"]["sampler"] == "shuffle"
    assert found["mechanism"]["steps"] == 3
    for bound in found["bounds"]:
        assert bound["mse"] == same[bound["name"]].value
        assert bound["sampler"] == "shuffle"
        assert bound["adjacency"] in ("replace-one", "zero-out")
    assert found["epsilon"] == same.epsilon
    assert found["membership_advantage"] == same.membership_advantage
    assert found["epsilon_add_remove"] is None
    out = " ".join(run("bound", *options)[1].split())
    assert "sampling brings no protection" in out
    assert "poisson" not in out
    assert str(SampledGaussian.shuffled(3.0, 4, 9)) in out
    assert "shuffle batches" in str(floor("lecam", SampledGaussian.shuffled(3.0, 4, 9)))


@pytest.mark.parametrize("columns", ["80", "200", "40"])
def test_paper_line_is_marked_as_no_guarantee(run, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = run("bound", "--noise-multiplier", 1, "--sample-rate", 0.01, "--steps", 1000)[1]
    flat = " ".join(out.split())
    assert "no guarantee" in flat.partition("Telling two candidate")[0].replace("│ ", "")


def test_tiny_noise_leaves_the_chance_of_never_drawn(run):
    for noise in (0.1, 0.01, 1e-6):
        out = run("bound", "--noise-multiplier", noise, "--sample-rate", 0.005, "--steps", 50, "--dim", 784)[1]
        assert "right at most 61.1%" in " ".join(out.split())


def test_bound_begins_with_its_meaning_for_a_record(run):
    """The strongest floor that says something, by the floors themselves."""
    reported = " ".join(run("bound", "--epsilon", 3, "--delta", 1e-5)[1].split())
    lecam = guarantee(DP(3.0, 1e-5))["lecam"]
    first, second = reported.split(". ")[:2]
    assert first.startswith("Who can rebuild a record with a chance of 1% without the release")
    assert second.startswith("For every attacker, even one who knows every other record, there is some conceivable rec")
    least = f"±{format_floor(lecam.rmse)} (a plain guess: ±0.5)"
    assert f"in [0, 1] on which it errs by at least {least}; on others it may" in second
    several = guarantee(SampledGaussian(1.0, 0.01, 1000), dim=784)
    assert "on average over its coordinates" in several.in_short
    years = guarantee(RenyiDP(2.0), high=100.0, units="years")
    assert "±50 years" in years.in_short
    assert str(years).splitlines()[0] == "Records of 1 private coordinate in [0, 100] years:"
    silent = replace(years, bounds=tuple(replace(bound, value=0.0) for bound in years.bounds))
    assert silent.in_short.endswith("No error floor says anything here.")
    unbiased = replace(years, bounds=years.bounds[:2])
    assert " An attacker without bias, " in unbiased.in_short
    assert unbiased.in_short.endswith(
        "are not bound (corners)." if years.bounds[1].name == "corners" else "(theorem1)."
    )


# --- as a process -----------------------------------


@pytest.mark.slow
def test_as_a_process():
    done = process("bound", *SGD, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert [bound["name"] for bound in json.loads(done.stdout)["bounds"]] == NAMES
    failed = process("bound", "--epsilon", "-1")
    check_refused(failed.returncode, failed.stdout, failed.stderr)


@pytest.mark.parametrize(
    ("encoding", "command"),
    [
        ("ascii", ["bound", "--noise-multiplier", "1"]),
        ("latin-1", ["calibrate", "--target-mse", "0.1", "--bound", "theorem1"]),
    ],
)
@pytest.mark.slow
def test_ascii_terminal(encoding, command):
    done = process(*command, "--sample-rate", "0.1", "--steps", "3", PYTHONIOENCODING=encoding)
    assert (done.returncode, done.stderr) == (0, "")
    assert "theorem1" in done.stdout
    assert "At ? = 1e-05: ? = " in done.stdout


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("form", [[], ["--json"]], ids=["table", "json"])
def test_full_disk_is_one_line(form):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "reconbound", "bound", "--epsilon", "1", *form],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("reconbound: cannot write: ")
    assert done.stderr.count("\n") == 1


def test_torch_is_not_imported():
    script = (
        "import sys; from reconbound.cli.app import run; "
        f"status = run(['bound', *{SGD!r}, '--json']); "
        "heavy = ('torch', 'opacus', 'sklearn', 'pandas', 'pyarrow'); "
        "print([m for m in sys.modules if m.split('.')[0] in heavy], file=sys.stderr); "
        "sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(("rate", "batches"), [("0.3", 3), ("1/3", 3), ("0.1", 10), ("1", 1), ("64/1797", 28)])
def test_shuffled_epochs_have_as_many_batches_as_the_rate_needs(rate, batches, answer) -> None:
    """⌊N/B⌋, as of a loader that drops the last batch: no loader has fewer."""
    words = ["--noise-multiplier", "2", "--sample-rate", rate, "--steps", str(2 * batches), "--sampler", "shuffle"]
    found = answer("bound", *words)
    wanted = guarantee(SampledGaussian.shuffled(2.0, batches, 2 * batches), dim=1)
    assert found["epsilon"] == pytest.approx(wanted.epsilon)
    assert floors(found)["lecam"]["mse"] == pytest.approx(float(wanted["lecam"].value))
