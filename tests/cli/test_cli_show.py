"""reconbound report and show: finished audits, as pages and in the terminal."""

from __future__ import annotations

import json
import os
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor, format_limit
from reconbound.cli.app import run
from reconbound.cli.audit import describe_columns
from reconbound.cli.show import find_record
from reconbound.report.folder import PUBLIC_REPORT, REPORT, RUN, packed_names, read_leakage, read_run, record_names
from reconbound.report.view import View

SHORT = ["--steps", "4", "--runs", "1", "--sample-rate", "0.1", "--lr", "0.5", "--model", "linear", "--quiet"]


@pytest.mark.parametrize("target", ["name", "record", "floor_estimate", "columns", "confidential"])
def test_target_named_like_a_fact_gets_a_suffix(target, tmp_path, capsys) -> None:
    table = tmp_path / "table.csv"
    table.write_text("\n".join([f"age,{target}", *(f"{k % 50},{'ab'[k % 2]}" for k in range(40))]) + "\n")
    words = ["audit", str(table), "--target", target, "--range", "age=0:60"]
    assert run([*words, *SHORT, "--out", str(tmp_path / "a")]) == 0
    capsys.readouterr()
    assert run(["show", str(tmp_path / "a"), "--record", "3", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["confidential"] is True
    assert facts["record"] == 3
    assert facts["name"].startswith("row ")
    assert isinstance(facts["floor_estimate"], float)
    assert facts[f"{target} (target)"] in ("a", "b")
    assert run(["show", str(tmp_path / "a"), "--record", facts["name"]]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["record", "3,", *facts["name"].split()]
    assert shown[2].split() == [*f"{target} (target)".split(), facts[f"{target} (target)"]]


@pytest.fixture(scope="module")
def wine(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wine") / "out"
    assert run(["audit", "wine", *SHORT, "--out", str(out)]) == 0
    return out


@pytest.mark.parametrize("given", ["--5", "²", "٣", "1-2", "-"])
def test_odd_numbers_are_no_record(given, wine, capsys) -> None:
    assert run(["show", str(wine), f"--record={given}"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("reconbound: --record must be ")
    assert text.endswith(f", got {given}\n")
    assert "int()" not in text


@pytest.mark.parametrize(("out", "why"), [("nowhere/x.html", "No such file or directory"), ("a", "Is a directory")])
def test_unwritable_comparison_names_its_file(out, why, wine, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").mkdir()
    assert run(["report", str(wine), str(wine), "--out", out]) == 2
    assert capsys.readouterr().err == f"reconbound: {out}: {why}\n"
    assert os.listdir() == ["a"]  # no part is left
    assert run(["report", str(wine), str(wine)]) == 0
    assert stat.S_IMODE(os.stat("comparison.html").st_mode) == 0o600


def test_comparison_replaces_only_a_comparison(wine, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["report", str(wine), str(wine)]
    assert run(words) == 0
    assert "replaced" not in capsys.readouterr().err
    assert run(words) == 0
    assert capsys.readouterr().err.endswith("reconbound: comparison.html was there, and was replaced\n")
    Path("people.csv").write_text("age\n40\n")
    for out in ("people.csv", os.devnull, str(wine / REPORT)):
        before = Path(out).read_bytes()
        assert run([*words, "--out", out]) == 2
        assert capsys.readouterr().err.startswith("reconbound: --out must be a new file, or a comparison to write anew")
        assert Path(out).read_bytes() == before


@pytest.mark.parametrize("command", [["audit", "digits"], ["sweep", "digits", "--grid", "lr=1"]])
def test_mistyped_seed_is_not_shown(command, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["--seed", "8675309O"], ["--seed=8675309.5"]):
        assert run([*command, *words]) == 2
        assert capsys.readouterr().err == "reconbound: --seed must be a whole number\n"


def test_stopped_audit_names_the_next_command(tmp_path, monkeypatch, capsys) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("reconbound.auditing.run.run_audit", stopped)
    words = ["audit", "wine", *SHORT, "--out", str(tmp_path / "a")]
    for more, how in (([], ""), (["--fresh"], ", without --fresh,")):
        assert run([*words, *more]) == 130
        assert capsys.readouterr().err.endswith(f"reconbound: stopped; run the same command again{how} to go on\n")


def test_report_rebuilds_and_compares(table_audit, digits_audit, tmp_path, capsys, monkeypatch) -> None:
    before = (digits_audit / REPORT).read_bytes()
    (digits_audit / REPORT).unlink()
    assert run(["report", str(digits_audit)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(digits_audit / REPORT)
    assert (digits_audit / REPORT).read_bytes() == before
    page = tmp_path / "both.html"
    assert run(["report", str(table_audit), str(digits_audit), "--out", str(page)]) == 0
    text = capsys.readouterr()
    assert text.out.splitlines()[-1] == str(page)
    reported = " ".join(text.out.split())
    assert "age 0 to 120 years; hours" in reported
    assert "read off the data" in reported
    assert "every pixel 0 to 16 grey levels" in reported
    assert "Not comparable as they stand: these audits differ in data set, kind of data" in reported
    assert "secret" in text.err
    assert run(["report", str(table_audit), str(digits_audit), "--out", str(page), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["comparison"] == str(page)
    assert found["audits"][0]["private"][0] == {
        "name": "age",
        "low": 0.0,
        "high": 120.0,
        "unit": "years",
        "declared": True,
    }
    assert found["columns"] == []  # a table and images have none in common
    shutil.copytree(table_audit, tmp_path / "again")
    assert run(["report", str(table_audit), str(tmp_path / "again"), "--out", str(page)]) == 0
    reported = " ".join(capsys.readouterr().out.split())
    assert "accuracy" in reported
    assert "limit" in reported
    assert "Single columns, in their own units" in reported
    assert run(["report", str(table_audit), str(tmp_path / "again"), "--out", str(page), "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in both["columns"]] == ["age", "hours"]
    age = both["columns"][0]["audits"]["again"]
    assert f"±{format_floor(age['lowest'])} years" in reported
    assert f"{age['below']} of 48" in reported
    assert both["audits"][0]["floors"].keys() == {"lowest_lower_limit", "lowest_estimate", "median_estimate"}
    assert found["audits"][0]["private"][1]["declared"] is False
    assert found["warning"].startswith("Not comparable")
    assert stat.S_IMODE(page.stat().st_mode) == 0o600
    assert run(["report", str(digits_audit), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"] == str(digits_audit / REPORT)
    for words in (["report", str(tmp_path)], ["report", str(digits_audit), "--out", "x"], ["show", str(tmp_path)]):
        assert run(words) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_show_an_audit_and_a_record(table_audit, digits_audit, capsys) -> None:
    leakage = read_leakage(table_audit)
    worst = int(leakage.kept[0])
    assert run(["show", str(table_audit), "--json"]) == 0
    text = capsys.readouterr()
    assert json.loads(text.out)["most_exposed"][0]["record"] == worst
    assert "secret" in text.err
    assert run(["show", str(table_audit)]) == 0
    assert "errs by at least" in " ".join(capsys.readouterr().out.split())
    assert run(["show", str(table_audit), "--record", str(worst)]) == 0
    text = capsys.readouterr().out
    assert "age" in text
    assert "years" in text
    kept = int(read_leakage(digits_audit).kept[0])
    assert run(["show", str(digits_audit), "--record", str(kept)]) == 0
    assert "where it is exposed" in capsys.readouterr().out
    assert run(["show", str(digits_audit), "--record", str(kept), "--json"]) == 0
    pixels = np.array(json.loads(capsys.readouterr().out)["pixel_floors"])
    np.testing.assert_allclose(
        pixels.flatten(), 16 / read_leakage(digits_audit).kept_diagonal[0].sqrt().numpy(), rtol=1e-5
    )
    assert run(["show", str(table_audit), "--record", "60"]) == 2
    assert "--record must be from 0 to " in capsys.readouterr().err


def test_record_is_found_by_its_name(table_audit, digits_audit, capsys) -> None:
    leakage = read_leakage(table_audit)
    names = record_names(leakage.names)
    assert len(names) == 48
    other = next(i for i in range(48) if i not in leakage.kept.tolist())
    assert run(["show", str(table_audit), "--record", names[other].upper(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["record"], found["name"]) == (other, names[other])
    expected = torch.tensor(leakage.facts["scale"]) / leakage.diagonal[other].sqrt()
    reported = {c["name"]: c["floor_estimate"] for c in found["columns"]}
    assert [reported["age"], reported["hours"]] == pytest.approx(expected.tolist(), rel=1e-6)
    assert run(["show", str(table_audit), "--record", names[other]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rougher, and its values are not kept" in text
    assert "│ value" not in text
    for wrong, near in (
        ("row 1", "like row"),
        ("rwo 22", "like row 22" if "row 22" in names else "like row"),
        ("?!", "such as row"),
    ):
        assert run(["show", str(table_audit), "--record", wrong]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert f"({near}" in error
        assert error.rstrip().endswith(f"got {wrong}")
    few = read_leakage(digits_audit)
    other = next(i for i in range(60) if i not in few.kept.tolist())
    assert run(["show", str(digits_audit), "--record", f"record {other}"]) == 0
    assert "Where it is exposed" in capsys.readouterr().out
    assert run(["show", str(digits_audit), "--record", "cat.png"]) == 2
    assert "these records have no names" in capsys.readouterr().err


def test_image_is_found_by_its_file_name(table_audit) -> None:
    run_, leakage = read_run(table_audit), read_leakage(table_audit)
    names = [f"{kind}/{k}.png" for kind in ("cat", "dog") for k in range(24)]
    names[24] = "dog/Rex.PNG"
    view = View(run_, replace(leakage, names=packed_names(names)))
    assert find_record(view, "rex.png") == 24
    assert find_record(view, "Dog/rex.png") == 24
    assert find_record(view, "cat/7.png") == 7
    with pytest.raises(InputError, match=r"there are 2: 7 \(cat/7.png\), 31 \(dog/7.png\), got '7.png'"):
        find_record(view, "7.png")


def test_column_counts_in_json_and_text(table_audit, capsys) -> None:
    leakage = read_leakage(table_audit)
    best = leakage.diagonal.double()
    best[leakage.kept] = leakage.kept_diagonal
    below = (best > 1 / leakage.guess).sum(0).tolist()
    assert run(["show", str(table_audit), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(c["name"], c["below"], c["of"]) for c in found["columns"]] == [
        ("age", below[0], 48),
        ("hours", below[1], 48),
    ]
    assert found["columns_of"] == "all records"
    assert run(["show", str(table_audit)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    guess = 120 * float(leakage.guess[0].sqrt())
    assert f"age: {below[0]} of 48 records are below a guess (±{format_limit(float(guess))} years)" in text
    exposed = int((best > 1 / leakage.guess).any(1).sum())
    assert found["below_guess_on_some_column"] == {"below": exposed, "of": 48}
    lowest = [int(best[:, j].argmax()) for j in range(2)]
    assert [c["record"] for c in found["columns"]] == lowest
    names = record_names(leakage.names)
    years = 120 / float(best[lowest[0], 0]) ** 0.5
    assert f"lowest ±{format_floor(float(years))} years ({names[lowest[0]]})" in text
    assert text.count("(majority class: ") == 1
    assert "below_guess" not in (table_audit / RUN).read_text()
    assert "below a guess" not in (table_audit / PUBLIC_REPORT).read_text()
    assert "majority class" not in (table_audit / PUBLIC_REPORT).read_text()
    [reported] = describe_columns({**found, "columns": found["columns"][:1]})[1:]
    assert reported.startswith("  age: ")
    assert describe_columns({**found, "columns": found["columns"] * 7})[-1] == "  and 2 more, in the report"
