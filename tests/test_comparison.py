"""Several audits side by side."""

from __future__ import annotations

import html
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from reconbound import cli
from reconbound.report import comparison
from reconbound.run_folder import read_run, write_run
from run_folders import people_folder


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return people_folder(tmp_path_factory.mktemp("runs") / "people", steps=20, records=200, noise=0.1)


def test_a_comparison_says_of_which_audits_floors_are_not_proved(people: Path, tmp_path: Path, capsys) -> None:
    kinked = shutil.copytree(people, tmp_path / "kinked")
    said = "The floors of single records are not proved for this model: it has kinks, in <b>ReLU</b>"
    write_run(kinked, replace(read_run(people), caveats={"kinks": said}))
    page = tmp_path / "page.html"
    comparison.compare([people, kinked], page)
    told = page.read_text()
    assert "<b>ReLU" not in told
    assert f"<strong>kinked: {html.escape(said)}</strong>" in told[: told.index('id="floors"')]
    found = comparison.facts([people, kinked])
    assert found["caveats"] == [f"kinked: {said}"]
    assert [a["caveats"] for a in found["audits"]] == [{}, {"kinks": said}]
    other = shutil.copytree(kinked, tmp_path / "other")
    assert comparison.facts([kinked, other])["caveats"] == [f"kinked, other: {said}"]  # once
    assert cli.run(["report", str(people), str(kinked), "--out", str(page)]) == 0
    assert f"kinked: {said}" in " ".join(capsys.readouterr().out.split())
    comparison.compare([people, people], page)
    assert 'id="caveats"' not in page.read_text()


def test_audits_are_told_apart_however_long_their_paths_are(people: Path, tmp_path: Path) -> None:
    deep = tmp_path / ("long" * 20) / ("longer" * 10)
    folders = [shutil.copytree(people, deep / part / "audit") for part in ("january", "june")]
    first = read_run(people)
    write_run(folders[1], replace(first, data={**first.data, "name": "others"}))
    views, names = comparison.opened(folders)
    assert len(set(names)) == 2
    told = comparison.differences(views, names, folders)
    assert [d["values"] for d in told if d["what"] == "data set"] == [{names[0]: "people", names[1]: "others"}]
    assert len(comparison.common(views, names)) == views[0].features
