"""Chances of success in sweeps: those of audits with the same seed, the frontier by them, and where it is shown."""

from __future__ import annotations

import csv
import html
import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_sweep import digits, trainer  # noqa: F401
from test_sweep_together import together

import sweep_stub
from reconbound._internal.checks import DataError, InputError
from reconbound._internal.formatting import format_percent
from reconbound.accounting.divergence_ledger import DivergenceLedger
from reconbound.accounting.spec import Account
from reconbound.auditing.options import default_options, make_learner
from reconbound.auditing.run import audit
from reconbound.bounds import success_from_kl
from reconbound.cli import app as cli
from reconbound.report.folder import read_audit
from reconbound.report.success import PLACES, Success
from reconbound.sweep import Sweep, best, pareto, sweep
from reconbound.sweep.chances import CHANCES, NOT_MEASURED, chances_in, chances_of, checked_chance, format_chance
from reconbound.sweep.frontier import columns_of, floors_in, sealed_rows, table
from reconbound.sweep.page import frontier_page, run_page, verdict
from reconbound.sweep.queue import seal_of
from reconbound.sweep.space import seed_of

SETTING = {"noise_multiplier": 3.0, "max_grad_norm": 30.0, "lr": 0.2, "sample_rate": 0.8}


def ledger_of(nats, times, runs: int = 3, **changes) -> DivergenceLedger:
    """A ledger of runs with these sums of "removed", (R, N), and these measurements in each."""
    about = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1, "steps": 500, "features": 2}
    sums = torch.as_tensor(nats, dtype=torch.float64)[:, None]
    account = Account(**{**about, "records": sums.shape[-1], **changes})
    counts = torch.as_tensor(times, dtype=torch.int64).expand(len(sums), 1, -1)
    return DivergenceLedger.of_runs(account, ["removed"], sums, counts)


# --- values ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_rows_have_the_chances_of_an_audit_with_the_same_seed(digits, tmp_path) -> None:  # noqa: F811
    """Five runs with 32 measurements of each record give limits."""
    (row,) = trainer(digits, (40,), runs=5)(SETTING, tmp_path / "trial")
    options = default_options(digits, model="linear", rules=None, **SETTING)
    audit(digits, options=options.with_changes(runs=5, steps=40, seed=seed_of(7, SETTING)), out=tmp_path / "audit")
    found = Success(*read_audit(tmp_path / "audit"))
    wanted = next(world for world in found.worlds if world.name == "removed").row(0.1)
    assert 0.1 < wanted["median"] < wanted["p99"] <= wanted["max"] < found.worlds[0].divergences.mechanism_success(0.1)
    assert (wanted["basis"], wanted["estimates"]) == ("upper limits", [])
    for place in PLACES:
        assert row[f"success_removed_{place}"] == pytest.approx(wanted[place], rel=1e-12)
        assert row[f"success_removed_{place}_estimate"] is False


@pytest.mark.usefixtures("same_noise")
def test_rows_have_the_chances_of_the_learner_itself(digits, tmp_path) -> None:  # noqa: F811
    """Of one run, at every step count: estimates, from a training that ends there."""
    for row in trainer(digits, (6, 14), runs=1)(SETTING, tmp_path):
        plan = default_options(digits, model="linear", runs=1, **SETTING, seed=seed_of(7, SETTING))
        ledger = make_learner(digits, plan, worlds={}, progress=False).repeat(1, row["steps"]).accountant
        chances = np.sort(ledger.max_success(0.1).value)
        assert 0.1 < chances[0] < chances[-1]
        for place, k in (("max", len(chances) - 1), ("median", math.ceil(len(chances) / 2) - 1)):
            assert row[f"success_removed_{place}"] == pytest.approx(chances[k], rel=1e-12)
        assert row["success_removed_median_estimate"] is True


@pytest.mark.slow
def test_a_fleet_finds_the_same_in_the_mean(digits, tmp_path) -> None:  # noqa: F811
    """Other batches and noise, the same distribution: the chances agree to a few per cent over 30 runs."""
    options = {"counts": (10,), "runs": 30}
    (one,), (other,) = (make(digits, **options)(SETTING, tmp_path / make.__name__) for make in (trainer, together))
    assert chances_in([one]) == chances_in([other]) == list(CHANCES)
    for name in CHANCES:
        assert other[name] == pytest.approx(one[name], rel=0.1)
        assert other[f"{name}_estimate"] is one[f"{name}_estimate"]


def test_other_samplers_have_no_chance_without_the_record(digits, tmp_path) -> None:  # noqa: F811
    for make in (trainer, together):
        for row in make(digits)({"sampler": "fixed"}, tmp_path / make.__name__):
            assert chances_in([row]) == []
            assert not [name for name in row if name.startswith("success_removed")]


# --- places and estimates -----------------------------------------------------------------------


def test_chances_at_places_over_the_records() -> None:
    """From one run: estimates at the record that so many do not exceed, never above the mechanism's."""
    nats = np.linspace(0.0, 0.05, 200)
    found = chances_of(ledger_of(np.random.default_rng(0).permutation(nats)[None], [40]))
    for name, k in (("max", 199), ("p99", 197), ("median", 99)):  # 198 of 200 are 99 %
        assert found[f"success_removed_{name}"] == pytest.approx(success_from_kl(0.1, nats[k]), rel=1e-9)
        assert found[f"success_removed_{name}_estimate"] is True
    assert found.keys() == {f"success_removed_{place}{more}" for place in PLACES for more in ("", "_estimate")}


def test_limits_take_the_place_of_estimates() -> None:
    """The two most exposed records of 200 were measured too seldom: the largest chance is an estimate, no other."""
    rng = np.random.default_rng(1)
    nats = np.linspace(0.01, 0.02, 200) * rng.normal(1, 0.02, (3, 200))
    nats[:, 198:] = 0.5
    times = np.full(200, 40)
    limited = chances_of(ledger_of(nats, times))
    assert not any(limited[f"success_removed_{place}_estimate"] for place in PLACES)
    mean = chances_of(ledger_of(nats.mean(0)[None], times))
    assert all(limited[f"success_removed_{place}"] > mean[f"success_removed_{place}"] for place in PLACES)
    times[198:] = 8  # 24 over three runs
    some = chances_of(ledger_of(nats, times))
    assert [some[f"success_removed_{place}_estimate"] for place in PLACES] == [False, False, True]
    assert some["success_removed_median"] == limited["success_removed_median"]
    times[3] = 8  # 197 of 200 have a limit: not 99 in 100
    some = chances_of(ledger_of(nats, times))
    assert [some[f"success_removed_{place}_estimate"] for place in PLACES] == [False, True, True]


def test_the_mechanisms_chance_is_no_estimate_and_a_record_not_measured_has_it() -> None:
    ledger = ledger_of([[1e-6, 1e-6, 50.0]], [[40, 0, 40]])
    best = ledger.towards().mechanism_success(0.1)
    found = chances_of(ledger)
    assert found["success_removed_max"] == best
    assert found["success_removed_max_estimate"] is False
    assert found["success_removed_median"] == best  # of the three, one was never measured and one is at the cap
    assert chances_of(ledger_of([[math.nan, 0.0]], [[40, 40]]))["success_removed_max"] == best


# --- the frontier by them -----------------------------------------------------------------------

FACTS = {"data": "<b>digits</b>", "runs": 2, "trials": 3, "finished": 3, "failed": 0}


def row_of(trial: int, accuracy: float, chance: float, **more) -> dict:
    own = {f"success_removed_{place}": chance * share for place, share in (("max", 1), ("p99", 0.9), ("median", 0.5))}
    own |= {f"{name}_estimate": False for name in own}
    return {
        "trial": trial,
        "lr": 1.0,
        "steps": 5,
        "accuracy": accuracy,
        "epsilon": 1.0,
        **own,
        "exact_max": 2.0,
        **more,
    }


ROWS = [
    row_of(0, 0.9, 0.6, success_removed_max_estimate=True),
    row_of(1, 0.8, 0.3, exact_max=1.0),
    row_of(2, 0.7, 0.4),
]
OLD = [{name: value for name, value in row.items() if not name.startswith("success")} for row in ROWS]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=12), st.integers(1, 6))
def test_the_front_is_of_rows_that_no_other_beats(points, most) -> None:
    rows = [{"trial": i, "accuracy": a / 5, "success_removed_max": p / 6} for i, (a, p) in enumerate(points)]
    front = pareto(rows, "success_removed_max")

    def beaten(a: float, p: float) -> bool:
        return any(x >= a and y <= p and (x, y) != (a, p) for x, y in points)

    pairs = [(row["accuracy"], row["success_removed_max"]) for row in front]
    assert pairs == sorted({(a / 5, p / 6) for a, p in points if not beaten(a, p)}, reverse=True)
    found, few = best(rows, "success_removed_max", most / 6), [(a, -p) for a, p in points if p <= most]
    assert (found is None) == (not few)
    if found is not None:
        a, p = max(few)
        assert (found["accuracy"], found["success_removed_max"]) == (a / 5, -p / 6)


def test_a_row_without_a_chance_is_on_no_front() -> None:
    assert [row["trial"] for row in pareto([*OLD, *ROWS], "success_removed_max")] == [0, 1]
    assert [row["trial"] for row in pareto(ROWS, "success_removed_median")] == [0, 1]
    assert chances_in(OLD) == []
    assert chances_in([*OLD, ROWS[0]]) == list(CHANCES)
    assert floors_in(ROWS) == ["exact_max"]  # a chance is no floor
    assert checked_chance(ROWS) == "success_removed_max"
    with pytest.raises(InputError, match="chance must be one of success_removed_max, success_removed_p99"):
        checked_chance(ROWS, "exact_max")
    for name in (None, "success_removed_max"):
        with pytest.raises(InputError, match="were not measured: an earlier version trained these settings"):
            checked_chance(OLD, name)


def test_an_estimate_says_so() -> None:
    assert format_chance(ROWS[0], "success_removed_max") == "60% (estimate)"
    assert format_chance(ROWS[0], "success_removed_median") == "30%"
    assert format_chance(OLD[0], "success_removed_median") == "–"


@pytest.mark.parametrize("value", [1.5, -0.1, math.nan, math.inf, 10**400, "0.5", None])
def test_a_stored_chance_that_is_none_is_refused(value) -> None:
    rows = [{**ROWS[0], "success_removed_max": value}]
    facts = {"setting": {"lr": 1.0}, "rows": rows, "sha256": seal_of(0, {"lr": 1.0}, rows)}
    slot = type("Stored", (), {"number": 0, "complete": type("Trial", (), {"user_attrs": facts})})
    with pytest.raises(DataError, match=r"setting 0 of the storage is not reconbound's: (a row lacks|'success_rem)"):
        sealed_rows(slot)


# --- where it is shown ----------------------------------------------------------------------------


def charts_of(page: str) -> dict:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])["charts"]


def test_the_page_leads_with_the_chances() -> None:
    page = frontier_page(ROWS, FACTS).decode()
    text = " ".join(html.unescape(page.split('id="data">')[0]).split())
    assert (
        "The most accurate setting reaches 90.0 %. Whoever could reconstruct a record with a chance of 10 % from a "
        "model trained without it can do so from this one with at most 60% (the most exposed, an estimate) and 30% "
        "(the better-protected half). The lowest chance of all settings is 30% (the most exposed), with 80.0 %. On the "
        "most accurate setting an unbiased attacker errs by at least"
    ) in text
    assert text.index('id="chances"') < text.index('id="frontier"')
    for name in CHANCES:
        assert f'id="front-{name}"' in page
    first = text[text.index('id="front-success_removed_max"') :].split("</details>")[0]
    for cell in ("60% (estimate)", "54%", "30%", "27%", "15%"):
        assert f'<td class="n">{cell}</td>' in first
    assert "36%" not in first  # the third setting is beaten
    traces = charts_of(page)["chart-chances"]["data"]
    assert [trace["y"] for trace in traces[:2]] == [[60.0, 30.0, 40.0], [60.0, 30.0]]
    assert traces[0]["x"] == [90.0, 80.0, 70.0]
    assert "chance against the most exposed record: 60% (estimate)" in traces[0]["text"][0]
    assert traces[0]["customdata"][1] == "trials/00001/index.html"
    assert "not-measured" not in page
    assert NOT_MEASURED not in text
    assert "<b>digits" not in page
    trial = html.unescape(run_page(ROWS[:1], FACTS).decode())
    assert '<th>chance against the most exposed record</th><td class="n">60% (estimate)</td>' in trial
    assert "max estimate" not in trial


def test_rows_of_earlier_versions_are_not_measured() -> None:
    page = html.unescape(frontier_page(OLD, FACTS).decode())
    assert f'id="not-measured">{NOT_MEASURED}<' in page
    assert "chart-chances" not in page
    assert "Whoever could" not in page
    assert verdict(OLD, "exact_max")[0].startswith("The most accurate setting reaches 90.0 %; an unbiased attacker")
    assert NOT_MEASURED in html.unescape(run_page(OLD[:1], FACTS).decode())
    mixed = html.unescape(frontier_page([*ROWS, {**OLD[0], "trial": 3, "accuracy": 0.95}], FACTS).decode())
    assert f"1 of 4 rows have no chance. {NOT_MEASURED}" in mixed
    assert "The most accurate setting whose chances were measured reaches 90.0 %." in mixed
    assert "The most accurate setting reaches 95.0 %; an unbiased attacker errs" in mixed


def test_hostile_names_are_escaped() -> None:
    rows = [{**row, "model": '"><script>alert(1)</script>', "lr": "<i>1"} for row in ROWS]
    page = frontier_page(rows, FACTS).decode()
    for text in ("<script>alert", "<i>1"):
        assert text not in page
    (found, *_) = csv.DictReader(table([{**ROWS[0], "model": "=1+1"}]).splitlines())
    assert found["model"] == "'=1+1"


def test_the_table_has_every_chance() -> None:
    names = columns_of(ROWS)
    assert names.index("accuracy") < names.index("success_removed_max") < names.index("exact_max")
    found = list(csv.DictReader(table(ROWS).splitlines()))
    assert [row["success_removed_max"] for row in found] == ["0.6", "0.3", "0.4"]
    assert [row["success_removed_max_estimate"] for row in found] == ["True", "False", "False"]
    assert [row["front"] for row in found] == [
        "success_removed_max success_removed_p99 success_removed_median exact_max",
        "success_removed_max success_removed_p99 success_removed_median",
        "",
    ]


def test_the_commands(tmp_path, capsys, monkeypatch) -> None:
    """The rows, the frontier by chances, the best accuracy below one, and what is refused."""
    monkeypatch.setenv("COLUMNS", "200")
    words = ["sweep", "digits", "--limit", "60", "--model", "linear", "--grid", "noise_multiplier=2,6"]
    words += ["--grid", "sample_rate=0.2", "--steps", "6", "--out", str(tmp_path), "--json"]
    assert cli.run(words) == 0
    made = json.loads(capsys.readouterr().out)
    rows, lowest = made["rows"], min(row["success_removed_max"] for row in made["rows"])
    assert made["baseline"] == 0.1
    assert all(0.1 < row["success_removed_median"] <= row["success_removed_max"] < 1 for row in rows)
    folder = ["frontier", str(tmp_path)]
    assert cli.run([*folder, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown["fronts"])[:4] == [*CHANCES, "exact_max"]
    assert shown["fronts"]["success_removed_max"] == pareto(rows, "success_removed_max")
    assert cli.run(folder) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "chance against the most exposed record (success_removed_max), 10 % without the record, for any" in out
    assert f" {format_chance(pareto(rows, 'success_removed_max')[-1], 'success_removed_max')} " in out
    assert out.index("(success_removed_max)") < out.index("(exact_max)")
    assert cli.run([*folder, "--floor", "exact_max"]) == 0
    assert "success_removed" not in capsys.readouterr().out
    assert cli.run([*folder, "--chance", "success_removed_median"]) == 0
    out = capsys.readouterr().out
    assert "(success_removed_median)" in out
    assert "(exact_max)" not in out
    assert "(success_removed_max)" not in out
    assert cli.run([*folder, "--at-most", str(lowest), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["at_most"] == lowest
    assert found["best"]["success_removed_max"]["success_removed_max"] == lowest
    assert cli.run([*folder, "--at-most", "0.9999"]) == 0
    accuracy = max(row["accuracy"] for row in rows)
    assert f"success_removed_max at most 99.99%: accuracy {accuracy:.4f}, chance against" in capsys.readouterr().out
    assert cli.run([*folder, "--at-most", "0.05"]) == 1
    message = f"no setting has a chance of at most 5%; the lowest is {format_percent(lowest, 4)}"
    assert message in capsys.readouterr().out
    for wrong, text in (
        (["--chance", "magic"], "--chance must be one of success_removed_max, success_removed_p99"),
        (["--at-most", "15"], "--at-most must be at most 1"),
        (["--chance", "success_removed_max", "--at-least", "1"], "--at-most must be given too for a chance"),
        (["--floor", "exact_max", "--at-most", "0.5"], "--at-least must be given too for a floor"),
    ):
        assert cli.run([*folder, *wrong]) == 2
        assert text in capsys.readouterr().err


def test_a_sweep_without_chances_says_so_in_one_line(tmp_path, capsys) -> None:
    """What an earlier version stored: rows without chances."""
    config = Sweep("stub", tmp_path, {"noise_multiplier": [1.0], "lr": [0.1]}, (5,), seed=1)
    sweep(config, make_train=sweep_stub.make, show=False)
    assert cli.run(["frontier", str(tmp_path)]) == 0
    assert " ".join(capsys.readouterr().out.split()).startswith(NOT_MEASURED)
    assert cli.run(["frontier", str(tmp_path), "--at-most", "0.5"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("reconbound: --chance cannot be used. Chances of success were not measured: an earlier")
    assert message.count("\n") == 1
