"""The committed rows of the sandwich on digits: what the page says of them, and that the page has their tables."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import numpy as np
import pytest

from reconbound.attacks.limits import chance_limits
from reconbound.bounds import success_from_kl

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import sandwich_digits as sandwich

ROOT = Path(__file__).resolve().parents[2]


def rows(part: str) -> list[dict[str, str]]:
    return list(csv.DictReader(sandwich.path_of(part, sandwich.RESULTS).read_text().splitlines()))


def test_tables_of_the_rows_stand_on_the_page(capsys) -> None:
    sandwich.tables(sandwich.RESULTS)
    page = (ROOT / "docs" / "results" / "attacks.md").read_text()
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(printed) > 40
    assert [line for line in printed if line not in page] == []


@pytest.mark.parametrize(("part", "participation", "near"), [("full", "known", 10), ("coarse", "hidden", 5)])
def test_likelihood_attack_is_near_its_floor_and_not_below(part: str, participation: str, near: int) -> None:
    found = [r for r in rows(part) if r["participation"] == participation]
    assert len(found) == sandwich.CHOSEN
    assert all(int(r["trials"]) >= 200 for r in found)
    ratio, error = (
        np.array([float(r[n]) / float(r["cramer_rao"]) for r in found]) for n in ("variance", "variance_error")
    )
    assert (ratio < 1.25).sum() == near
    assert (ratio + 3 * error > 1).all()


def test_nobody_beats_a_floor_for_any_attacker_and_map_beats_an_unbiased_one() -> None:
    found = rows("map")
    assert len(found) == sandwich.CHOSEN * len(sandwich.MAP_LEVELS)
    assert all(not r["faults"] for r in found)
    assert all(float(r["close_low"]) <= float(r["p_max"]) for r in found)
    assert all(float(r["both_high"]) >= float(r["two_point"]) for r in found)
    assert all(float(r["nats_low"]) <= float(r["nats"]) for r in found)
    for noise in sandwich.MAP_LEVELS:
        least = [r for r in found if float(r["noise"]) == noise][-3:]  # the least exposed
        assert all(float(r["mse"]) + 4 * float(r["standard_error"]) < float(r["ledger"]) for r in least)


def test_one_of_k_stays_below_p_max() -> None:
    found = rows("one-of-k")
    assert {(int(r["k"]), float(r["noise"])) for r in found} == {
        (k, noise) for k in sandwich.SECRETS for noise in sandwich.LEVELS
    }
    for r in found:
        k, trials, success = int(r["k"]), int(r["trials"]), float(r["success"])
        best = min(float(r["removed"]), float(r["average"]))
        assert float(r["p_max"]) == pytest.approx(success_from_kl(1 / k, best), rel=1e-4)
        assert success < float(r["p_max"])
        low, high = chance_limits(round(success * trials), trials)
        assert (low, high) == pytest.approx((float(r["low"]), float(r["high"])), rel=1e-4)
    assert min(float(r["p_max"]) / float(r["success"]) for r in found if float(r["noise"]) == 2) < 1.1


def test_script_runs_in_small(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sandwich, "CHOSEN", 2)
    monkeypatch.setattr(sandwich, "LEVELS", (1.0,))
    monkeypatch.setattr(sandwich, "SECRETS", {2: 4})
    sandwich.train(["one-of-k"], tmp_path, 1.0)
    sandwich.tables(tmp_path)
    assert "one of 2, noise 1.0" in capsys.readouterr().out
