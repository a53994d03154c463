"""The MNIST sandwich: its committed rows and what the page says of them; in small it runs, and goes on where it was
cut off."""

from __future__ import annotations

import csv
import math
import sys
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from reconbound import SampledGaussian
from reconbound.bounds import two_point_floor
from reconbound.data import load_dataset
from where import FOLDER, needs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import sandwich_mnist as sandwich

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results" / "attacks.md"


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
    monkeypatch.setattr(
        sys, "argv", ["sandwich_mnist.py", "--again", "--small", "--steps", "2", "--out", str(tmp_path)]
    )
    sandwich.main()
    again = list(csv.DictReader((tmp_path / sandwich.AGAIN).read_text().splitlines()))
    assert [r["record"] for r in again] == [r["record"] for r in first]
    for name in ("floor", "removed", "replaced"):  # estimates of the same, of other trainings
        assert all(0 < float(r[name]) != float(one[name]) for r, one in zip(again, first, strict=True))
    assert "another ledger: D is" in capsys.readouterr().out
    (tmp_path / sandwich.AGAIN).unlink()
    path.write_text("\n".join([lines[0], lines[1], lines[3]]) + "\n")
    capsys.readouterr()
    assert [r["record"] for r in run(monkeypatch, tmp_path)] == [r["record"] for r in first]
    assert capsys.readouterr().out.count("of 3 records") == 1
    assert path.read_text().splitlines()[1] == lines[1]
    path.write_text(path.read_text().replace(",0.35,", ",0.4,"))  # rows of other settings are not kept
    capsys.readouterr()
    run(monkeypatch, tmp_path)
    assert capsys.readouterr().out.count("of 3 records") == 3


def test_another_ledger_does_not_choose_the_same_exposures(rows) -> None:
    again = list(csv.DictReader((sandwich.ROWS / sandwich.AGAIN).read_text().splitlines()))
    assert [r["record"] for r in again] == [r["record"] for r in rows]
    assert min(float(r["floor"]) for r in again) > 1
    for name in ("removed", "replaced"):
        most = [(r, other) for r, other in zip(rows, again, strict=True) if r["group"] == "most-exposed"]
        chose, other = (
            np.mean([float(pair[k][name]) / float(pair[0][f"{name}_here"]) for pair in most]) for k in (0, 1)
        )
        assert chose > other  # the first ledger chose them


def test_small_results_do_not_replace_those_of_the_repository(monkeypatch, capsys) -> None:
    with pytest.raises(SystemExit):
        run(monkeypatch, sandwich.ROWS)
    assert "give another folder by --out" in capsys.readouterr().err


@pytest.fixture(scope="module")
def rows() -> list[dict[str, str]]:
    return list(csv.DictReader((sandwich.ROWS / sandwich.NAME).read_text().splitlines()))


def test_table_and_figures_of_the_rows_stand_on_the_page(capsys, rows) -> None:
    sandwich.table(sandwich.ROWS / sandwich.NAME)
    page, printed = PAGE.read_text(), capsys.readouterr().out.splitlines()
    assert sum(line.startswith("|") for line in printed) == 2 + 24
    assert [line for line in printed if line not in page] == []


def test_no_attack_on_mnist_beat_what_binds_it(rows) -> None:
    assert [sum(r["group"] == group for r in rows) for group in sandwich.GROUPS] == [8, 8, 8]
    assert len({r["record"] for r in rows}) == 24
    mechanism = SampledGaussian(
        noise_multiplier=sandwich.NOISE, sample_rate=sandwich.RATE, steps=sandwich.STEPS, clip="smooth"
    )
    epsilon = mechanism.epsilon_at(1e-5, "add/remove")
    assert epsilon is not None
    for r in rows:
        n = {name: float(value) for name, value in r.items() if name not in ("record", "group", "faults")}
        assert r["faults"] == ""
        assert abs(n["trials"] - 500) < 4 * math.sqrt(1500 * 2 / 9)  # each training draws one of three worlds
        assert n["removed_here"] <= mechanism.kl()
        assert n["nats"] <= n["removed_here"]
        assert n["epsilon"] <= epsilon
        assert n["both_low"] <= n["both"] <= n["both_high"]
        assert n["both_high"] >= max(n["two_point"], sandwich.floor_here(r))
        if r["group"] == "most-exposed":
            assert n["both_low"] > n["two_point"]


def test_the_likelihood_ratio_learns_the_divergence_of_the_trainings_on_mnist(rows) -> None:
    away = [sandwich.standard_errors_away(r) for r in rows]
    assert max(map(abs, away)) < 4
    assert abs(np.mean(away)) < 4 / math.sqrt(24)
    assert abs(np.square(away).mean() - 1) < 4 * math.sqrt(2 / 24)  # mean of 24 squares of standard normal numbers


def test_unbiased_floors_on_mnist_are_beyond_the_data_and_the_two_point_floors_are_not(rows) -> None:
    assert min(float(r["floor"]) for r in rows) > 1 > max(float(r["mse"]) for r in rows)
    most, least = (
        median(float(r["both"]) / sandwich.floor_here(r) for r in rows if r["group"] == group)
        for group in sandwich.GROUPS[:2]
    )
    assert 1 < least < 1.25 < 2 < most < 2.5


@needs("mnist")
def test_floor_here_is_that_of_the_record_and_its_divergence(rows) -> None:
    inputs = load_dataset("mnist", limit=sandwich.LIMIT, folder=FOLDER).inputs
    for r in rows:
        gap = math.sqrt(np.square(inputs[int(r["record"])].astype(np.float64) - 0.5).mean())
        expected = two_point_floor(gap, float(r["replaced_here"])).value
        assert sandwich.floor_here(r) == pytest.approx(expected, rel=2e-5)  # of numbers with six digits
