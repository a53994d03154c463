"""A sweep's pages and terminal output: units of the figures, and their caveats."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

import sweep_stub
from reconbound._internal.formatting import format_floor
from reconbound.cli import app as cli
from reconbound.sweep import Sweep, floors_in, parse_grid, run, sweep
from reconbound.sweep.frontier import describe_floor, table
from reconbound.sweep.page import cautions, frontier_page, run_page, verdict
from reconbound.sweep.run import stored
from reconbound.sweep.space import settings_of

FACTS = {"data": "people", "runs": 1, "trials": 1, "finished": 1, "failed": 0}
ROWS = [{"trial": 0, "lr": 1.0, "steps": 5, "accuracy": 0.5, "exact_max": 2.0, "lecam": 0.1, "epsilon": 1.0}]
KINKS = "The floors of single records are not proved for this model: it has kinks, in module '2' (ReLU)"
FACTORIES = """
from torch import nn
def relu(shape, outputs):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 4), nn.ReLU(), nn.Linear(4, outputs))
"""


def test_kinks_are_named_everywhere(mine, capsys, recwarn) -> None:
    words = ["sweep", "digits", "--limit", "60", "--grid", "lr=0.5,1", "--steps", "3", "--out", "s"]
    assert cli.run([*words, "--model", "mine:relu"]) == 0
    out, err = capsys.readouterr()
    assert err.count(KINKS) == 1  # before training, once for all settings
    assert KINKS in out
    assert not recwarn.list
    for page in (Path("s/frontier.html"), Path("s/trials/00000/index.html"), Path("s/trials/00001/index.html")):
        assert KINKS in html.unescape(page.read_text())
    front = html.unescape(Path("s/frontier.html").read_text())
    assert KINKS in front[: front.index('id="frontier"')]
    assert f"<dt>Model</dt><dd>{KINKS}" in front
    for more in ([], ["--at-least", "0.1"]):
        assert cli.run(["frontier", "s", *more]) == 0
        message = capsys.readouterr()
        assert KINKS in " ".join(message.out.split())
        assert "keep it as secret as the data" in message.err
    assert cli.run([*words, "--model", "mine:relu", "--quiet"]) == 0
    assert capsys.readouterr().err.startswith(f"Note: {KINKS}")


def test_bad_factory_is_refused_before_any_trial(mine, capsys) -> None:
    words = ["sweep", "digits", "--limit", "60", "--grid", "lr=1", "--steps", "3", "--out", "s", "--quiet"]
    assert cli.run([*words, "--model", "mine:missing"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        "reconbound: --model must name a factory to be called as factory(shape, outputs) (Attribute"
    )
    assert error.endswith("got mine:missing\n")
    assert not Path("s/sweep.json").exists()
    assert cli.run([*words, "--model", "linear"]) == 0  # the folder is free for another model
    assert "found no kinks" in Path("s/frontier.html").read_text()


def test_only_models_of_the_grid_are_checked(mine, capsys) -> None:
    words = ["sweep", "digits", "--limit", "60", "--model", "mine:relu", "--steps", "3", "--out", "s", "--quiet"]
    assert cli.run([*words, "--grid", "model=linear"]) == 0  # in place of the one with kinks
    assert capsys.readouterr().err == ""
    assert "found no kinks" in Path("s/frontier.html").read_text()


def test_sweep_without_model_checks_claims_nothing() -> None:
    assert "does not say whether the model was checked" in frontier_page(ROWS, FACTS).decode()
    assert "found no kinks" in frontier_page(ROWS, {**FACTS, "caveats": {}}).decode()


def test_of_a_number_the_measure_is_r2_and_no_percentage(tmp_path, capsys) -> None:
    words = ["sweep", "diabetes", "--limit", "60", "--grid", "lr=0.1", "--steps", "3", "--model", "linear"]
    assert cli.run([*words, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    rows, facts = stored(tmp_path)
    assert f"The most accurate setting reaches R² {rows[0]['accuracy']:.3f}. Whoever could reconstruct a record" in out
    assert "reaches R² " in out
    assert "accuracy" not in out
    page = (tmp_path / "frontier.html").read_text()
    assert "<h2>R² against each floor</h2>" in page
    chart = json.loads(page.split('id="data">')[1].split("</script>")[0])["charts"]["chart-frontier"]
    assert "R² on test data" in chart["layout"]["xaxis"]["title"]["text"]
    assert chart["data"][0]["x"] == [pytest.approx(rows[0]["accuracy"])]  # not times 100
    assert "accuracy (%)" not in page
    assert "<th>R²</th>" in run_page(rows, facts).decode()
    assert cli.run(["frontier", str(tmp_path)]) == 0
    assert "R²" in capsys.readouterr().out
    assert cli.run(["frontier", str(tmp_path), "--at-least", "1e-9"]) == 0
    assert f"R² {rows[0]['accuracy']:.4f}, floor" in capsys.readouterr().out


def test_most_accurate_setting_is_global_or_marked() -> None:
    """Settings of another sampler have another floor: a better one of them is not passed over in silence."""
    other = {**ROWS[0], "trial": 1, "accuracy": 0.9, "none_max": 1.0}
    del other["exact_max"]
    assert verdict(ROWS, "exact_max")[0].startswith("The most accurate setting reaches 50.0 %")
    message = verdict([*ROWS, other], "exact_max")
    assert message[0].startswith("The most accurate setting that has this floor reaches 50.0 %")


def test_zero_information_records_are_reported() -> None:
    """A record whose outputs are saturated has dFIL 0 and the floor 1e300, which no page may give without a word."""
    message = "In 1 training, all measurements of up to 7 records were zero"
    rows = [ROWS[0], {**ROWS[0], "trial": 1, "zero_information": 3}, {**ROWS[0], "trial": 1, "zero_information": 7}]
    assert [line for line in cautions(rows, {}) if message in line and "1e300" in line]
    assert not cautions([ROWS[0], {**ROWS[0], "zero_information": 0}], {})
    assert "zero_information" in table(rows).splitlines()[0].split(",")


def test_unmeasured_records_are_counted_without_claim(tmp_path) -> None:
    rows = [
        {**ROWS[0], "accuracy": 0.9, "exact_max": 0.01, "never_measured": 0},
        {**ROWS[0], "accuracy": 0.7, "exact_max": 0.5, "never_measured": 7},
    ]
    message = verdict(rows, "exact_max", {"error": 0.2})
    assert message[1].endswith("(±0.2 of the range), for the records that were measured, reaches 70.0 %.")
    warnings = cautions(rows, FACTS)
    assert len(warnings) == 1
    assert warnings[0].startswith("Up to 7 records of a training were never measured, and the floors leave them out.")
    assert warnings[0] in frontier_page(rows, FACTS).decode()
    assert cautions(rows[:1], FACTS) == []
    assert "that were measured" not in verdict([{**row, "never_measured": 0} for row in rows], "exact_max")[1]


@pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
def test_undeclared_ranges_are_listed(tmp_path, capsys) -> None:
    message = "Some columns’ ranges were read off the data before training."
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["age,y", *(f"{k % 50},{'ab'[k % 2]}" for k in range(40))]) + "\n")
    words = ["sweep", str(table), "--target", "y", "--grid", "lr=1", "--steps", "2", "--model", "linear"]
    for more, there in (([], True), (["--range", "age=0:60"], False)):
        out = tmp_path / str(there)
        assert cli.run([*words, *more, "--out", str(out)]) == 0
        assert (message in capsys.readouterr().out) == there
        assert (message in (out / "frontier.html").read_text()) == there
        assert cli.run(["frontier", str(out)]) == 0
        assert (message in " ".join(capsys.readouterr().out.split())) == there


def test_page_without_test_records(tmp_path, capsys) -> None:
    words = ["sweep", "digits", "--limit", "40", "--test-share", "0", "--grid", "lr=1", "--steps", "2"]
    assert cli.run([*words, "--model", "linear", "--out", str(tmp_path)]) == 0
    assert "There were no test records: no setting has an accuracy." in capsys.readouterr().out
    assert cli.run(["frontier", str(tmp_path), "--at-least", "0.001"]) == 1
    assert "no setting has an accuracy to choose by" in capsys.readouterr().out
    assert verdict([], "exact_max") == ["No setting has been trained yet."]


def test_missing_database_is_reported_not_recreated(tmp_path, capsys) -> None:
    sweep(Sweep("stub", tmp_path, {"noise_multiplier": [1.0], "lr": [0.1]}, (5,), seed=1),
          make_train=sweep_stub.make, show=False)  # fmt: skip
    (tmp_path / "sweep.db").unlink()
    assert cli.run(["frontier", str(tmp_path)]) == 2
    assert (
        capsys.readouterr().err == f"reconbound: {tmp_path / 'sweep.db'} does not exist: it held what the sweep found\n"
    )
    assert not (tmp_path / "sweep.db").exists()


def test_a_sweep_of_which_every_trial_failed_names_no_page(tmp_path, capsys, monkeypatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("the model\x1b[31m has\nexploded")

    monkeypatch.setattr("reconbound.sweep.trial.Trainer.__call__", fails)
    words = ["sweep", "digits", "--limit", "60", "--grid", "lr=1", "--steps", "3", "--model", "linear"]
    assert cli.run([*words, "--out", str(tmp_path), "--quiet"]) == 1
    assert capsys.readouterr().out == ""
    assert cli.run([*words, "--out", str(tmp_path)]) == 1
    message = capsys.readouterr()
    assert "the first failure: RuntimeError: the model?[31m has exploded\n" in message.err


def test_verdict_uses_guess_and_states_majority_class() -> None:
    rows = [
        {"accuracy": 0.9, "exact_max": 0.01},
        {"accuracy": 0.8, "exact_max": 0.05},
        {"accuracy": 0.7, "exact_max": 0.5},
    ]
    message = verdict(rows, "exact_max", {"accuracy": 0.45, "error": 0.2})  # 0.2² = 0.04
    best = "The most accurate setting whose floor is at least the error of guessing the"
    assert message[1] == f"{best} average (±0.2 of the range) reaches 80.0 %."
    assert message[2] == "Majority class: 45.0 %."
    message = verdict(rows, "exact_max")  # not known: a guess of the middle, ±0.5 at worst
    assert message[1] == f"{best} middle, at worst (±0.5 of the range) reaches 70.0 %."
    assert len(message) == 2
    none = verdict(rows, "exact_max", {"error": 0.9})[1]
    assert none == "No setting has a floor as high as the error of guessing the average (±0.9 of the range)."


def test_the_verdict_names_its_attacker() -> None:
    rows = [{"accuracy": 0.9, "exact_max": 0.01, "lecam": 0.04}]
    message = verdict(rows, "exact_max", {})[0]
    assert (
        "an unbiased attacker errs by at least ±0.1 of a feature's range on the most exposed record by an estimate."
        in message
    )
    assert (
        "any attacker errs by at least ±0.2 of a feature's range on some conceivable record, not on each"
        in verdict(rows, "lecam", {})[0]
    )
    page = html.unescape(frontier_page([{**ROWS[0], **rows[0]}], FACTS).decode())
    assert message in page
    assert "least mean squared error of an attacker of the kind named below" in page


def test_command_and_page_state_attacker_and_neighbours(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    words = ["sweep", "digits", "--limit", "60", "--steps", "3", "--model", "linear", "--grid", "lr=1", "--quiet"]
    assert cli.run([*words, "--out", str(tmp_path)]) == 0
    capsys.readouterr()
    floors = ("exact_max", "paper_max", "theorem1", "lecam")
    assert cli.run(["frontier", str(tmp_path), *(word for floor in floors for word in ("--floor", floor))]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "exact factor, most exposed record (estimate) (exact_max), for unbiased attackers: no setting beats these"
        in out
    )
    paper = "the paper's κ (not proved, no guarantee), most exposed record (estimate) (paper_max)"
    assert f"{paper}: no setting beats these" in out
    assert "Theorem 1 (theorem1), for unbiased attackers: no" in out
    assert "any attacker, Le Cam (lecam): no setting beats these" in out
    assert "ε is for replace-one neighbours at δ = 1e-05." in out
    page = (tmp_path / "trials" / "00000" / "index.html").read_text()
    assert "epsilon is for replace-one neighbours, epsilon add remove for adding or removing a record" in page
    assert "frontier.html#assumptions" in page
    front = (tmp_path / "frontier.html").read_text()
    assert "lecam by replace-one neighbours, rate_distortion by leaving the record out (add/remove, or zeroed)" in front
    assert "all for the sampler of the setting" in front


def test_pages_escape_and_show_every_floor(tmp_path) -> None:
    rows = [{"trial": 0, "lr": 1.0, "steps": 5, "accuracy": 0.5, "exact_max": 2.0, "lecam": 0.1, "epsilon": 1.0}]
    facts = {"data": "<script>alert(1)</script>", "runs": 1, "trials": 1, "finished": 1, "failed": 0}
    page = frontier_page(rows, facts).decode()
    assert "<script>alert(1)" not in page
    for floor in floors_in(rows):
        assert f"front-{floor}" in page
    assert (
        describe_floor("paper_q99")
        == "the paper's κ (not proved, no guarantee), record at the 99 % quantile (estimate)"
    )


def test_guide_commands_parse(tmp_path, monkeypatch, capsys) -> None:
    """Every sweep of docs/guides/sweep.md, up to the training."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "guides" / "sweep.md").read_text()
    lines = re.sub(r" \\\n\s+", " ", text).splitlines()
    commands = [line.split()[1:] for line in lines if line.startswith("    reconbound sweep ") and "..." not in line]
    asked = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("reconbound.sweep.sweep", lambda config, **options: asked.append(config) or [{}])
    monkeypatch.setattr(run, "publish", lambda *_: {"page": "page"})
    for command in commands:
        assert cli.run([*command, "--quiet"]) == 0, capsys.readouterr().err
    assert [config.search for config in asked] == ["grid", "tpe"]
    assert len(settings_of(asked[0].space)) == 6
    assert str(asked[0].out) == "sweep-twice"


def test_no_terminal_prints_plan_and_training_lines(tmp_path, capsys) -> None:
    config = Sweep("stub", tmp_path / "s", parse_grid(["noise_multiplier=0.2,0.5", "lr=0.1,0.2"]), (5, 10), seed=1)
    sweep(config, make_train=sweep_stub.make)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    plan = [line for line in lines if " trained: " not in line]
    assert plan == [
        "4 settings: every combination of noise_multiplier 0.2, 0.5; lr 0.1, 0.2.",
        "Each is trained for 10 steps and evaluated after 5, 10; 1 worker here.",
        f"Writes in {tmp_path / 's'} (confidential).",
    ]  # fmt: skip
    reported = lines[len(plan) :]
    assert [line.split(" trained: ")[0] for line in reported] == [f"{k} of 4" for k in range(1, 5)]
    settings = {line.split(" trained: ")[1].split(";")[0] for line in reported}
    assert settings == {f"noise_multiplier {noise}, lr {lr}" for noise in (0.2, 0.5) for lr in (0.1, 0.2)}
    assert all(re.search(r"; about \d+ s left$", line) for line in reported[:3])
    assert "left" not in reported[-1]

    sweep(replace(config, space=parse_grid(["noise_multiplier=0.2,0.5,1", "lr=0.1,0.2"])), make_train=sweep_stub.make)
    again = capsys.readouterr().err
    assert "4 of them are trained already." in again
    assert again.count(" trained: ") == 2
    sweep(replace(config, space=parse_grid(["noise_multiplier=0.2,0.5,1", "lr=0.1,0.2"])), make_train=sweep_stub.make)
    assert " trained: " not in capsys.readouterr().err  # all were trained before
    sweep(config, make_train=sweep_stub.make, show=False)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("there", [True, False])
def test_folder_without_sweep_gets_advice(there, tmp_path, capsys) -> None:
    folder = tmp_path / "nothing"
    if there:
        folder.mkdir()
    assert cli.run(["frontier", str(folder)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"reconbound: {folder} {'holds no sweep' if there else 'does not exist'}")
    assert f"make one by reconbound sweep DATA --grid ... --out {folder}" in message
    assert "--folder" not in message
    assert message.count("\n") == 1


def test_sweep_without_finished_training_is_reported(tmp_path, capsys) -> None:
    config = sweep_stub.config(tmp_path, None)
    queue = run.open_queue(config)
    run.begin(queue, config, sweep_stub.Stub())
    queue.dispose()
    assert cli.run(["frontier", str(tmp_path)]) == 2
    assert "no setting is trained yet: run reconbound sweep again" in capsys.readouterr().err


def test_record_floors_are_called_estimates(tmp_path, capsys) -> None:
    words = ["sweep", "digits", "--limit", "60", "--steps", "3", "--model", "linear", "--out", str(tmp_path)]
    search = ["--search", "tpe", "--trials", "1", "--grid", "lr=0.1:1:log", "--grid", "noise_multiplier=0.5:2:log"]
    assert cli.run([*words, *search]) == 0
    assert "on the most exposed record by an estimate." in capsys.readouterr().out
    assert "from one run: an estimate; in simulated trainings up to " in (tmp_path / "frontier.html").read_text()
    rows, _ = stored(tmp_path)
    for floor, message in (
        ("exact_max", " (from one run: an estimate; in simulated trainings up to 85 %"),
        ("lecam", ": run 0"),
    ):
        assert cli.run(["frontier", str(tmp_path), "--floor", floor, "--at-least", "1e-12"]) == 0
        reported, mse = capsys.readouterr().out, rows[0][floor]
        assert f", floor MSE {format_floor(mse, 4)}, ±{format_floor(mse**0.5)} of a range{message}" in reported
        assert str(rows[0]["lr"]) not in reported  # six digits of it do
    assert cli.run(["frontier", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    lr, noise = rows[0]["lr"], rows[0]["noise_multiplier"]
    assert len(str(lr)) > 8  # a search's numbers have many digits
    assert f" {lr:.4g} " in table
    assert f" {noise:.4g} " in table
    assert "…" not in table
    assert "mean of 3 runs: an estimate" in frontier_page(ROWS, {**FACTS, "runs": 3}).decode()
    assert "estimate" in verdict(ROWS, "exact_max")[0]
    assert "estimate" not in verdict(ROWS, "lecam")[0]


def test_the_most_exposed_record_has_one_colour_in_both_charts() -> None:
    rows = [{**ROWS[0], "exact_q99": 3.0, "exact_median": 4.0, "paper_max": 1.0}]
    page = frontier_page(rows, FACTS).decode()
    charts = json.loads(page.split('id="data">')[1].split("</script>")[0])["charts"]
    first, second = (charts[name]["data"] for name in ("chart-frontier", "chart-places"))
    assert first[0]["line"]["color"] == second[0]["line"]["color"] == second[1]["line"]["color"]
    assert len({trace["line"]["color"] for trace in first}) == len(first)
    assert page.count("<noscript>") == 1
    assert "The charts need JavaScript" in page
