"""Several audits side by side."""

from __future__ import annotations

import html
import json
import math
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pages import Elements, certainty_text, meaningful, view_of
from reconbound import report
from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor
from reconbound.cli import app as cli
from reconbound.report import comparison
from reconbound.report.folder import prepare, read_leakage, read_run, write_leakage, write_run
from run_folders import RANGES, digits_folder


def test_caveats_name_their_audits(people: Path, tmp_path: Path, capsys) -> None:
    kinked = shutil.copytree(people, tmp_path / "kinked")
    message = "The floors of single records are not proved for this model: it has kinks, in <b>ReLU</b>"
    write_run(kinked, replace(read_run(people), caveats={"kinks": message}))
    page = tmp_path / "page.html"
    comparison.compare([people, kinked], page)
    reported = page.read_text()
    assert "<b>ReLU" not in reported
    assert f"<strong>kinked: {html.escape(message)}</strong>" in reported[: reported.index('id="floors"')]
    found = comparison.comparison_facts([people, kinked])
    weak = view_of(people).protection.warning()
    assert found["caveats"] == [f"people, kinked: {weak}", f"kinked: {message}"]
    assert [a["caveats"] for a in found["audits"]] == [{}, {"kinks": message}]
    other = shutil.copytree(kinked, tmp_path / "other")
    assert comparison.comparison_facts([kinked, other])["caveats"] == [
        f"kinked, other: {weak}",
        f"kinked, other: {message}",
    ]  # once
    assert cli.run(["report", str(people), str(kinked), "--out", str(page)]) == 0
    assert f"kinked: {message}" in " ".join(capsys.readouterr().out.split())
    sound = shutil.copytree(people, tmp_path / "sound")
    write_run(sound, meaningful(read_run(people)))
    comparison.compare([sound, sound], page)
    assert 'id="caveats"' not in page.read_text()


def test_long_paths_give_different_names(people: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20) / ("longer" * 10)
    folders = [shutil.copytree(people, deep / part / "audit") for part in ("january", "june")]
    first = read_run(people)
    write_run(folders[1], replace(first, data={**first.data, "name": "others"}))
    views, names = comparison.read_audits(folders)
    assert len(set(names)) == 2
    reported = comparison.differences(views, names, folders)
    assert [d["values"] for d in reported if d["what"] == "data set"] == [{names[0]: "people", names[1]: "others"}]
    assert len(comparison.common_columns(views, names)) == views[0].features


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("runs") / "digits", runs=5, steps=20, records=200, noise=0.1)


def test_folder_names_are_escaped(digits: Path, people: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<img src=x onerror=alert(1)>"
    odd.symlink_to(digits)
    short = tmp_path / "b"
    short.symlink_to(people)
    report.compare([odd, short], tmp_path / "out.html")
    assert sum(tag == "img" for tag, _ in Elements((tmp_path / "out.html").read_text()).found) == 0


def test_comparison_page(digits: Path, people: Path, tmp_path: Path) -> None:
    path = report.compare([digits, people], tmp_path / "compare.html")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = Elements(path.read_text()).text
    for folder in (digits, people):
        assert f"±{format_floor(float(view_of(folder).floor.min()))}" in text
    assert "Not comparable as they stand: these audits differ in data set, kind of data" in text
    assert "Confidential." in text
    with pytest.raises(InputError, match="folders"):
        report.compare([digits], tmp_path / "one.html")


def test_differences_are_listed(people: Path, tmp_path: Path) -> None:
    """Ranges, units and columns by audit; nothing to say where only settings differ."""
    run, leakage = read_run(people), read_leakage(people)

    def other(name: str, data: dict | None = None, **facts: Any) -> Path:
        write_run(prepare(tmp_path / name), replace(run, data={**run.data, **(data or {})}))
        write_leakage(tmp_path / name, replace(leakage, facts={**leakage.facts, **facts}))
        return tmp_path / name

    same = other("same")
    found = comparison.comparison_facts([people, same])
    assert found["warning"] == ""
    assert found["differences"] == []
    assert 'id="differences"' not in report.compare([people, same], tmp_path / "c.html").read_text()
    scale, units = leakage.facts["scale"], leakage.facts["units"]
    ranges = {**run.data["ranges"], "age": [0.0, 100.0]}
    wider = other("wider", {"ranges": ranges}, scale=[100.0, *scale[1:]], units=["weeks", *units[1:]])
    off = other("off", {"ranges": {k: v for k, v in ranges.items() if k != "age"}}, scale=[100.0, *scale[1:]])
    found = comparison.comparison_facts([people, wider, off])
    assert found["differences"] == [
        {"what": "range of age",
         "values": {"people": "0 to 120", "wider": "0 to 100", "off": "0 to 100, read off the data"}},
        {"what": "unit of age", "values": {"people": "years", "wider": "weeks", "off": "years"}},
    ]  # fmt: skip
    assert found["warning"].startswith(
        "Not comparable as they stand: these audits differ in range of age, unit of age."
    )
    text = Elements(report.compare([people, wider, off], tmp_path / "c.html").read_text()).text
    assert found["warning"] in text
    assert "0 to 100 weeks" in text
    assert "0 to 100 years, read off the data" in text
    named = other("named", {"name": "others"})
    found = comparison.comparison_facts([people, named])
    assert found["warning"] == "Compare with care: these audits differ in data set."
    assert found["headline"][0].startswith("The most exposed record is equally protected in all audits: an unbiased")
    assert found["headline"][1:] == [found["warning"]]
    for folder, digest in ((people, "a" * 64), (same, "b" * 64)):
        (folder / "plan.json").write_text(json.dumps({"data": {"digest": digest}}))
    assert comparison.comparison_facts([people, same])["differences"][0]["what"] == "values of the data"
    (people / "plan.json").unlink()


def test_common_columns_are_in_their_own_units(people: Path, tmp_path: Path) -> None:
    """By name and unit; with a column in another unit left out."""
    run, leakage = read_run(people), read_leakage(people)
    facts = {**leakage.facts, "units": ["weeks", *leakage.facts["units"][1:]]}
    write_run(prepare(tmp_path / "other"), run)
    write_leakage(tmp_path / "other", replace(leakage, facts=facts, kept_diagonal=leakage.kept_diagonal / 4))
    found = comparison.comparison_facts([people, tmp_path / "other"])
    assert [c["name"] for c in found["columns"]] == leakage.facts["feature_names"][1:]
    for j, column in enumerate(found["columns"], start=1):
        low, high = RANGES[j]
        floor = (high - low) / math.sqrt(float(leakage.kept_diagonal[:, j].max()))
        own, other = column["audits"]["people"], column["audits"]["other"]
        assert (own["lowest"], other["lowest"]) == (pytest.approx(floor), pytest.approx(2 * floor))
        assert own["below"] == view_of(people).columns[j]["below"]
    text = Elements(report.compare([people, tmp_path / "other"], tmp_path / "c.html").read_text()).text
    assert f"±{format_floor(2 * floor)}" in text[text.index("Single columns, in their own units") :]
    assert found["audits"][0]["floors"]["lowest_lower_limit"] is None
    json.dumps(found, allow_nan=False)


def test_records_without_a_limit_are_counted(people: Path, tmp_path: Path, capsys) -> None:
    """The most exposed record was measured too rarely: the others' limit, though higher, is not its own."""
    other = shutil.copytree(people, tmp_path / "other")
    first, leakage = read_run(people), read_leakage(people)
    worst = int(leakage.dfil[0].argmax())
    upper = 1.2 * leakage.dfil
    upper[:, worst] = math.inf
    write_leakage(other, replace(leakage, upper=upper))
    write_run(other, replace(first, mechanism={**first.mechanism, "runs": 2}))
    view = view_of(other)
    assert view.unlimited == 1
    lowest = float(view.upper_floor[view.upper_floor > 0].min())
    page = tmp_path / "page.html"
    assert cli.run(["report", str(people), str(other), "--out", str(page)]) == 0
    message = f"±{format_floor(lowest / view.unit)}, 1 without"
    assert message in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert f'<td class="n">{message}</td>' in page.read_text()
    found = comparison.comparison_facts([people, other])["audits"]
    assert [audit["without_limit"] for audit in found] == [0, 1]
    assert found[1]["floors"]["lowest_lower_limit"] == pytest.approx(lowest / view.unit)
    upper[:, worst] = 1.2 * leakage.dfil[:, worst]
    upper[:, (worst + 1) % upper.shape[1]] = math.inf
    upper[:, (worst + 2) % upper.shape[1]] = 2 * upper[:, worst]  # the lowest limit is another record's
    write_leakage(other, replace(leakage, upper=upper))
    assert "The lowest limit of any record is" in certainty_text(view_of(other))
    measured = leakage.measured.clone()
    measured[(worst + 1) % len(measured)] = 0  # never measured: told as such, not among those without a limit
    write_leakage(other, replace(leakage, upper=upper, measured=measured))
    assert (view_of(other).unlimited, view_of(other).unknown) == (0, 1)
    assert "The lowest limit of any record is" in certainty_text(view_of(other))


def test_terminal_names_attacker_and_unmeasured_records(people: Path, tmp_path: Path, capsys) -> None:
    other = shutil.copytree(people, tmp_path / "other")
    leakage = read_leakage(people)
    measured = leakage.measured.clone()
    measured[:3] = 0
    write_leakage(other, replace(leakage, measured=measured))
    assert cli.run(["report", str(people), str(other), "--out", str(tmp_path / "page.html")]) == 0
    message = " ".join(capsys.readouterr().out.split())
    assert "Floors are for unbiased attackers who know every other record and see every noisy step" in message
    assert "lowest, median: estimates, more often too high than too low" in message
    assert "ε is for replace-one neighbours" in message
    assert "other: 3 records were never measured. They count as below a guess." in message
    assert "people: 3 records" not in message
