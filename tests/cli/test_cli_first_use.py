"""First use of the command line on an own table."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from calling import QUICK, SGD, check_refused, write_people
from reconbound._internal.formatting import format_limit
from reconbound.auditing.options import AuditOptions
from reconbound.auditing.run import data_facts
from reconbound.cli.app import run
from reconbound.cli.audit import describe_audit, describe_columns
from reconbound.data import DataWarning, load_dataset
from reconbound.report.folder import PLAN, PUBLIC_REPORT, REPORT, RUN, read_run
from reconbound.report.text import column_sentence


def write_staff(path: Path, records: int = 60) -> Path:
    """An identifier, a number, a constant, dates, categories; columns in that order."""
    rng = np.random.default_rng(0)
    lines = ["person_id,age,country_code,born,sex,income"]
    for i in range(records):
        age = int(rng.integers(18, 90))
        born = f"19{30 + i % 40}-0{1 + i % 9}-1{i % 10}"
        lines.append(f"{1000 + i},{age},49,{born},{rng.choice(['f', 'm'])},{'high' if age > 50 else 'low'}")
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def staff(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("staff")
    table = write_staff(root / "people.csv")
    assert run(["audit", str(table), "--target", "income", *QUICK, "--out", str(root / "out"), "--quiet"]) == 0
    return root


def notes_of(path: Path, **options) -> list[str]:
    with pytest.warns(DataWarning):
        return list(load_dataset(path, target="income", **options).notes)


# --- 1: public columns ------------------------------------------------------------------


def test_public_columns_are_named(staff, tmp_path) -> None:
    message = "taken as known to the attacker: born, sex"
    with pytest.warns(DataWarning):
        dataset = load_dataset(staff / "people.csv", target="income")
    plan = AuditOptions().with_changes(model="linear", steps=4, runs=2, sample_rate=0.1)
    assert f"Public, {message}." in describe_audit(dataset, plan, tmp_path, False)
    assert read_run(staff / "out").data["public"] == ["born", "sex"]
    shown = (staff / "out" / PUBLIC_REPORT).read_text()
    assert "<th>Public, taken as known to the attacker</th><td>born, sex</td>" in shown
    assert "Taken as known to the attacker: born, sex." in (staff / "out" / REPORT).read_text()
    assert "1968" not in shown  # names, no values


def test_public_numbers_are_named(tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{'' if i == 3 else i / 2},{i % 7},{'ab'[i % 2]}" for i in range(30)]
    path.write_text("x,z,income\n" + "\n".join(rows))
    with pytest.warns(DataWarning):
        assert data_facts(load_dataset(path, target="income", private="x"))["public"] == ["z"]


def test_no_public_columns_no_line(tmp_path) -> None:
    dataset = load_dataset("breast_cancer")
    lines = describe_audit(
        dataset, AuditOptions().with_changes(model="linear", steps=4, runs=1, sample_rate=0.1), tmp_path, False
    )
    assert not any("known to the attacker" in line for line in lines)


@pytest.mark.parametrize("form", ["1968-01-{:02d}", "{:02d}.01.1968", "1/{}/68", "1968/1/{} 10:00"])
def test_dates_get_a_note(form, tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{i},{form.format(1 + i % 20)},{'ab'[i % 2]}" for i in range(30)]
    path.write_text("x,born,income\n" + "\n".join(rows))
    (note,) = [n for n in notes_of(path) if n.startswith("born")]
    assert "looks like dates" in note
    assert "public" in note
    assert "--drop 'born'" in note
    assert not any("dates" in n for n in notes_of(path, drop="born"))


def test_too_many_dates_are_left_out_with_advice(tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{i},{1900 + i}-01-02,{'ab'[i % 2]}" for i in range(120)]
    path.write_text("x,born,income\n" + "\n".join(rows))
    notes = [n for n in notes_of(path) if n.startswith("born")]
    assert any("left out" in n for n in notes)
    assert any("to use and protect it write it as a number" in n for n in notes)


def test_range_stretched_by_outliers_gets_a_note(tmp_path) -> None:
    path = tmp_path / "a.csv"
    incomes = [20000 + 300 * i for i in range(200)]
    for values, stretched in ((incomes, False), ([*incomes[:-1], 2175880.5], True), ([0] * 199 + [9], False)):
        rows = [f"{x},{'ab'[i % 2]}" for i, x in enumerate(values)]
        path.write_text("wage,income\n" + "\n".join(rows))
        note = next(n for n in notes_of(path) if n.startswith("wage: no range"))
        assert ("a few values stretch it" in note) == stretched
    path.write_text("wage,income\n" + "\n".join(f"{x},{'ab'[i % 2]}" for i, x in enumerate([*incomes, 2175880.5])))
    assert any("so 20,000 to 2,175,880.5 was read off" in n for n in notes_of(path))


@pytest.mark.parametrize(("others", "odd"), [(3, True), (4, False)])
def test_dates_may_have_a_tenth_of_other_text(others, odd, tmp_path) -> None:
    path = tmp_path / "a.csv"
    rows = [f"{i}.5,{'unknown' if i < others else f'1968-01-{1 + i % 9}'},{'ab'[i % 2]}" for i in range(30)]
    path.write_text("x,born,income\n" + "\n".join(rows))
    assert any("dates" in note for note in notes_of(path)) == odd


def test_other_text_is_not_taken_for_dates(tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("x,code,income\n" + "\n".join(f"{i}.5,1-{i % 5}-b,{'ab'[i % 2]}" for i in range(30)))
    assert not any("dates" in note for note in notes_of(path))


# --- 2: identifiers ---------------------------------------------------------------------


def test_identifier_gets_a_note(staff) -> None:
    (note,) = [n for n in notes_of(staff / "people.csv") if "identifier" in n]
    assert note.startswith("person_id: 60 whole numbers, all different and without a gap")
    assert "--drop 'person_id'" in note
    assert read_run(staff / "out").data["private"] == ["person_id", "age", "country_code"]


@pytest.mark.parametrize(
    ("name", "values", "odd"),
    [
        ("x", range(30), True),  # counts on
        ("x", [3 * i for i in range(30)], False),
        ("x", [0, *range(2, 31)], False),  # a gap
        ("customer_ID", [3 * i for i in range(30)], True),
        ("nr", [3 * i for i in range(30)], True),
        ("userid", [i // 2 for i in range(30)], False),  # twice each
        ("userid", [i + 0.5 for i in range(30)], False),
        ("id", range(5), False),  # too few to tell
    ],
)
def test_identifier_detection(name, values, odd, tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text(f"{name},income\n" + "\n".join(f"{v},{'ab'[i % 2]}" for i, v in enumerate(values)))
    assert any("identifier" in note for note in notes_of(path)) == odd
    assert not any("identifier" in note for note in notes_of(path, private=name))  # asked for by name


# --- 3: constant columns ----------------------------------------------------------------


def test_constant_column_is_last(staff, capsys) -> None:
    assert run(["show", str(staff / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in found["columns"] if c["constant"]] == ["country_code"]
    *others, last = describe_columns(found)
    assert last == "  country_code: constant in all records, so there is nothing to reconstruct"
    first = next(sentence for sentence in found["verdict"] if sentence.startswith("Suppose"))
    assert "knows the column ranges that were taken from the data" in first  # this one's too
    assert not any("country_code" in line for line in (*others, *found["verdict"][1:]))
    assert "country_code: constant" in (staff / "out" / REPORT).read_text()


def test_narrow_column_is_not_constant(tmp_path, capsys) -> None:
    """Debts up to 1,500 in a range of a billion; and one value or none in a column with gaps."""
    path = tmp_path / "a.csv"
    rows = [f"{17 * i % 1500},{'' if i % 4 == 0 else 7},{i % 50},{'ab'[i % 2]}" for i in range(60)]
    path.write_text("debt,flat,age,income\n" + "\n".join(rows))
    wide = ["--range", "debt=0:1e9", "--range", "flat=0:10", "--range", "age=0:120"]
    words = ["audit", str(path), "--target", "income", *wide, *QUICK, "--out", str(tmp_path / "out"), "--quiet"]
    assert run(words) == 0
    capsys.readouterr()
    assert run(["show", str(tmp_path / "out"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [c["name"] for c in found["columns"] if c["constant"]] == ["flat"]
    message = "flat: constant in all records with a value, so there is nothing to reconstruct"
    assert describe_columns(found)[-1] == f"  {message}"


def test_column_without_values_is_not_constant() -> None:
    none = {"name": "x", "unit": "", "guess": 0.0, "constant": True, "below": 0, "of": 0, "missing": 3, "lowest": None}
    assert column_sentence(none) == "x: no measured record has a value"


# --- 4 to 7: errors ---------------------------------------------------------------------


def test_missing_file_is_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--target", "b"]):
        status = run(["audit", "people", *options])
        out, err = capsys.readouterr()
        check_refused(status, out, err)
        assert err.startswith("reconbound: people does not exist")
    write_people(tmp_path / "people.csv")
    assert run(["audit", "people", "--target", "b"]) == 2
    assert "did you mean people.csv?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["show", "report"])
def test_interrupted_audit_names_the_next_command(command, staff, tmp_path, capsys) -> None:
    (tmp_path / PLAN).write_bytes((staff / "out" / PLAN).read_bytes())
    status = run([command, str(tmp_path)])
    out, err = capsys.readouterr()
    check_refused(status, out, err)
    assert "holds an audit of people.csv that was begun and is not finished" in err
    assert f"--out {tmp_path}, to go on" in err
    (tmp_path / PLAN).unlink()
    assert run([command, str(tmp_path)]) == 2
    assert f"{tmp_path / RUN} does not exist: {tmp_path} holds no finished audit" in capsys.readouterr().err


def test_failed_audit_leaves_no_empty_folder(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["audit", "digits", "--model", "nosuch.mod:f"]) == 2
    assert "nosuch" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "own").mkdir()
    assert run(["audit", "digits", "--model", "nosuch.mod:f", "--out", "own"]) == 2
    assert (tmp_path / "own").is_dir()  # it was the user's


@pytest.mark.parametrize("options", [{}, {"target": "income"}])
def test_file_without_column_names_suggests_header(options, tmp_path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("39,13,low\n50,14,high\n")
    with pytest.raises(ValueError, match=r"39, 13, low; row 1 names them; if it holds values, .* --header A,B"):
        load_dataset(path, **options)
    path.write_text("39,39,low\n50,14,high\n")
    with pytest.raises(ValueError, match=r"row 1: columns 1 and 2 are both named '39' \(.* --header A,B"):
        load_dataset(path, **options)
    with pytest.raises(ValueError, match=r"--header: columns 1 and 2 are both named 'a'$"):
        load_dataset(path, header=["a", "a", "b"], **options)


# --- 8: calibrate -----------------------------------------------------------------------


def test_calibrate_json_matches_the_text(capsys) -> None:
    command = ["calibrate", "--target-error", "0.2", "--bound", "theorem1", *SGD[2:]]
    assert run(command) == 0
    text = capsys.readouterr().out
    assert run([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert f"ε = {format_limit(found['epsilon'], 4)} (replace-one)" in text
    assert f"ε = {format_limit(found['epsilon_add_remove'], 4)} (add/remove" in text
    assert list(found["other_bounds"]) == ["corners", "lecam_unbiased", "lecam", "rate_distortion"]
    for name, other in found["other_bounds"].items():
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {name} (")]
        assert line.endswith(f": {format_limit(other['noise_multiplier'], 4)}")  # a smallest noise is rounded up


def test_calibrate_json_has_unreachable_floors(capsys) -> None:
    assert run(["calibrate", "--target-error", "0.9", "--bound", "theorem1", *SGD[2:], "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["other_bounds"]["lecam"]
    assert other["noise_multiplier"] is None
    assert other["highest_mse"] == pytest.approx(0.25)


def test_calibrate_json_has_targets_met_without_noise(capsys) -> None:
    """A record is never drawn with chance 0.99¹⁰⁰: so much any attacker errs without noise."""
    command = ["calibrate", "--target-mse", "1e-9", "--bound", "theorem1", "--sample-rate", "0.01", "--steps", "100"]
    assert run([*command, "--json"]) == 0
    other = json.loads(capsys.readouterr().out)["other_bounds"]["lecam"]
    assert other == {"noise_multiplier": None, "met_without_noise": True}
    assert run(command) == 0
    assert "  lecam (any attacker, on some record of the box): met without noise\n" in capsys.readouterr().out
