"""The scripts of figure 5: trained rows are kept and not trained again, and the frontier is read off them rightly."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import _grid


def tiny(trainings: int) -> Any:
    def load(train: bool) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(train)
        return rng.integers(0, 256, (20, 4, 4), dtype=np.uint8), rng.integers(0, 3, 20)

    make = lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3))  # noqa: E731
    settings = _grid.combinations("poisson", (0.5, 1.0), (1.0, 2.0), (0.1,))
    return _grid.Grid(make, load, 0.2, 0.5, (2, 5), (1.0, 1.0), settings[:trainings], 2)


def trained(grid: Any, path: Path, *more: str) -> list[dict[str, str]]:
    asked = _grid.options("", runs=2, rows=path).parse_args(["--train", "--device", "cpu", *more])
    _grid.train(grid, asked)
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def test_stopped_grid_resumes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert trained(tiny(4), path, "--seconds", "0") == []
    before = trained(tiny(2), path)
    assert len(before) == 2 * 2 * 3  # trainings, step counts, runs and their mean
    after = trained(tiny(4), path)
    assert after[: len(before)] == before
    assert len(after) == 2 * len(before)
    assert trained(tiny(4), path) == after
    assert len(_grid.finished([path], (2, 5))) == 4
    assert not _grid.finished([path], (2, 5, 9))
    separate = trained(replace(tiny(4), fleet=1), tmp_path / "other.csv")
    key = lambda row: (*(row[k] for k in _grid.KEY), row["steps"], row["run"])  # noqa: E731
    assert {key(row) for row in separate} == {key(row) for row in after}


def test_means_and_the_crossed_maximum(tmp_path: Path) -> None:
    """Accuracies are averaged; a maximum of the mean is at most the mean of maxima, and so is the crossed one."""
    rows = trained(tiny(2), tmp_path / "rows.csv")
    for mean in (row for row in rows if row["run"] == "mean"):
        same = [r for r in rows if r["run"] != "mean" and all(r[k] == mean[k] for k in (*_grid.KEY, "steps"))]
        assert np.isclose(float(mean["accuracy"]), np.mean([float(r["accuracy"]) for r in same]))
        highest = np.mean([float(r["dfil_own_max"]) for r in same])
        assert float(mean["dfil_own_cross"]) <= highest * (1 + 1e-5)
        assert float(mean["dfil_own_median"]) <= float(mean["dfil_own_max"]) <= highest * (1 + 1e-5)
        assert float(mean["dfil_own_max"]) <= float(mean["dfil_paper_max"])


def test_frontier_is_the_best_floor_at_each_accuracy() -> None:
    pytest.importorskip("matplotlib")
    import _frontier

    accuracy, floors = np.array([0.9, 0.95, 0.8, 0.97]), np.array([2.0, 1.0, 0.5, 0.1])
    assert _frontier.best(accuracy, floors, 1.0) == 0.95
    assert _frontier.best(accuracy, floors, 3.0) is None
    x, y = _frontier.front(accuracy, floors)
    assert x.tolist() == [0.97, 0.95, 0.9, 0.8]
    assert y.tolist() == [0.1, 1.0, 2.0, 2.0]


def test_a_mean_takes_the_place_of_its_settings_single_run() -> None:
    pytest.importorskip("matplotlib")
    import _frontier

    def row(clip: str, run: str, accuracy: str, sampler: str = "poisson") -> dict[str, str]:
        setting = {"sampler": sampler, "noise_multiplier": "2.0", "max_grad_norm": clip, "lr": "0.1", "steps": "9"}
        return setting | {"run": run, "accuracy": accuracy}

    single = [row("1.0", "0", "0.9"), row("2.0", "0", "0.8"), row("1.0", "mean", "0.99", "fixed")]
    twice = [row("1", "0", "0.7"), row("1", "1", "0.5"), row("1", "mean", "0.6")]
    found = _frontier.settled([twice + single, [row("1.0", "0", "0.3")]])
    assert sorted(r["accuracy"] for r in found) == ["0.3", "0.6", "0.8"]  # another group's run stands by itself


def test_scouted_rows_have_only_accuracies(tmp_path: Path) -> None:
    rows = trained(tiny(2), tmp_path / "rows.csv", "--scout", "--runs", "1")
    assert len(rows) == 2 * 2
    assert all(0 <= float(row["accuracy"]) <= 1 for row in rows)
    assert not [name for name in rows[0] if name.startswith("dfil")]
    with pytest.raises(SystemExit, match="rows of the other kind"):  # which would pass for trained
        trained(tiny(2), tmp_path / "rows.csv", "--runs", "1")
    trained(tiny(2), tmp_path / "whole.csv", "--runs", "1")
    with pytest.raises(SystemExit, match="rows of the other kind"):
        trained(tiny(3), tmp_path / "whole.csv", "--scout", "--runs", "1")


def test_crossing_of_theorem_1_in_the_units_of_a_pixel() -> None:
    pytest.importorskip("matplotlib")
    import figure5_accountings as script

    rows = [{"noise_multiplier": "1", "steps": str(t), "accuracy": f"0.{t}"} for t in (1, 2, 3)]
    each = float(np.log1p(0.25 / 1.5))  # a floor of 1.5 after one step, about 0.7 after two, 0.43 after three
    assert script.crossing(rows, lambda noise: each * noise) == "10.0 %"
    assert script.crossing(rows, lambda noise: each * noise, 2.0) == "30.0 %"
    assert script.crossing(rows, lambda noise: 2 * each) == "never: 0.69 at most, at 10.0 %"


def test_short_trainings_do_not_go_into_the_committed_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    committed = _grid.RESULTS / "rows.csv"
    for words in (["--short", "100"], ["--scout"], ["--scout", "--rows", "."]):
        with pytest.raises(SystemExit):
            _grid.given(_grid.options("", runs=1, rows=committed), ["--train", *words])
        assert f"{words[0]} would add to the full-size results" in capsys.readouterr().err
        elsewhere = ["--train", *words[: 2 - (words[0] == "--scout")], "--rows", str(tmp_path / "rows.csv")]
        assert _grid.given(_grid.options("", runs=1, rows=committed), elsewhere).train
    assert _grid.given(_grid.options("", runs=1, rows=committed), ["--train"]).rows == str(committed)
