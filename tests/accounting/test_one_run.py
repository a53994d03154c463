"""Floors after one run are called estimates, and are too high as often as the text beside them states."""

from __future__ import annotations

import csv
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from reconbound._internal.checks import InputError
from reconbound.accounting.confidence import OFTEN, ONE_RUN, describe_one_run

FOLDER = Path(__file__).resolve().parents[2] / "experiments"
sys.path.insert(0, str(FOLDER))  # for its own imports
SPEC = importlib.util.spec_from_file_location("floors_of_one_run", FOLDER / "one_run.py")
assert SPEC is not None
one_run = importlib.util.module_from_spec(SPEC)
assert SPEC.loader is not None
SPEC.loader.exec_module(one_run)
sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("problem", ["iris", "moons", "digits", "wine"])
def test_one_run_floors_exceed_truth_as_rarely_as_stated(problem: str) -> None:
    """The default budget, 1 and 4, 40 trainings of one run: more than half of the floors are too high, and those by
    more than 2 and 10 are within the shares that are said. Seeded; four standard errors over trainings are allowed."""
    trial = one_run.TRIALS[problem]
    trial = replace(trial, records=40, rate=min(1.0, trial.rate * trial.records / 40))
    for found in one_run.shares(trial, 40, seed=3):
        two, ten = (share / 100 for share in ONE_RUN[found["measurements"] >= OFTEN])
        assert found["above_1"] > 0.45, found  # no limit: an estimate is as often too high as not, or oftener
        assert found["above_2"] <= two + 4 * (two * (1 - two) / 40) ** 0.5, found
        assert found["above_10"] <= ten + 4 * (ten * (1 - ten) / 40) ** 0.5, found


def test_stated_shares_are_largest_counted() -> None:
    """All problems, 150 trainings: the experiment's file. 61 and 30 % were said, and wine has 85 and 73."""
    with open(one_run.RESULTS, newline="") as file:
        lines = list(csv.DictReader(file))
    assert {line["budget"] for line in lines} == set(one_run.BUDGETS)
    assert {line["problem"] for line in lines} == set(one_run.TRIALS)
    for often, (two, ten) in ONE_RUN.items():
        group = [line for line in lines if (float(line["measurements"]) >= OFTEN) == often]
        assert two - 1 <= 100 * max(float(line["above_2"]) for line in group) <= two
        assert ten - 1 <= 100 * max(float(line["above_10"]) for line in group) <= ten
        assert f"up to {two} %" in describe_one_run(OFTEN if often else OFTEN - 1)


def test_one_run_has_no_confidence_limit() -> None:
    trial = replace(one_run.TRIALS["moons"], records=20, steps=30)
    for ledger in one_run.simulate(trial, 2, seed=0, budgets=one_run.BUDGETS, runs=1)[2].values():
        for limit in (ledger.upper, ledger.lower_limit):
            with pytest.raises(InputError, match="at least 2 for a confidence limit"):
                limit()
