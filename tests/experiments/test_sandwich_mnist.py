"""The MNIST sandwich in small: it runs, and one that was cut off goes on with the records that have no row."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import sandwich_mnist as sandwich


def run(monkeypatch, folder: Path) -> list[dict[str, str]]:
    words = ["sandwich_mnist.py", "--train", "--small", "--rebuild", "2", "--steps", "2", "--out", str(folder)]
    monkeypatch.setattr(sys, "argv", words)
    sandwich.main()
    return list(csv.DictReader((folder / sandwich.NAME).read_text().splitlines()))


def test_script_runs_in_small_and_goes_on_where_it_was_cut_off(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sandwich, "SMALL", sandwich.SMALL | {"limit": 60})
    monkeypatch.setattr(sandwich, "RUNS", 2)
    first = run(monkeypatch, tmp_path)
    assert [r["group"] for r in first] == list(sandwich.GROUPS)
    assert len({r["record"] for r in first}) == 3
    assert all(not r["faults"] and float(r["floor"]) > 0 for r in first)
    path = tmp_path / sandwich.NAME
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1], lines[3]]) + "\n")
    capsys.readouterr()
    assert [r["record"] for r in run(monkeypatch, tmp_path)] == [r["record"] for r in first]
    assert capsys.readouterr().out.count("of 3 records") == 1
    assert path.read_text().splitlines()[1] == lines[1]
    path.write_text(path.read_text().replace(",0.35,", ",0.4,"))  # rows of other settings are not kept
    capsys.readouterr()
    run(monkeypatch, tmp_path)
    assert capsys.readouterr().out.count("of 3 records") == 3


def test_small_results_do_not_replace_those_of_the_repository(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, sandwich.ROWS)
    assert "give another folder by --out" in capsys.readouterr().err
