"""The second number beside a sweep's floor of the most exposed record: what each run says of the others'."""

from __future__ import annotations

import csv
import html
import json

import numpy as np
import pytest
import torch

from reconbound._internal.formatting import format_floor
from reconbound.accounting.accountant import FisherAccountant
from reconbound.auditing.options import default_options, make_learner
from reconbound.cli import app as cli
from reconbound.data import load_dataset
from reconbound.sweep.frontier import CROSSED, columns_of, floors_in, table
from reconbound.sweep.page import frontier_page, run_page
from reconbound.sweep.space import seed_of
from reconbound.sweep.trial import Trainer, crossed, crossed_floor, floors_of

pytestmark = pytest.mark.slow

FACTS = {"data": "people", "runs": 2, "trials": 1, "finished": 1, "failed": 0}
ROW = {"trial": 0, "lr": 1.0, "steps": 5, "accuracy": 0.5, "exact_max": 2.0, "exact_crossed": 3.5,
       "exact_q99": 4.0, "lecam": 0.1, "epsilon": 1.0, "delta": 1e-5}  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", limit=60, test_share=0.3)


def test_by_hand() -> None:
    """Two runs: each is read at the other's largest. Three: at the largest of the mean of the other two."""
    two = torch.tensor([[1.0, 5.0, 2.0], [4.0, 3.0, 1.0]], dtype=torch.float64)
    assert crossed(two) == (1.0 + 3.0) / 2
    three = torch.tensor([[1.0, 5.0, 2.0], [4.0, 3.0, 1.0], [0.0, 0.0, 9.0]], dtype=torch.float64)
    # means of the others: (2, 1.5, 5), (.5, 2.5, 5.5) and (2.5, 4, 1.5), largest at 2, 2 and 1
    assert crossed(three) == (2.0 + 1.0 + 0.0) / 3


@pytest.mark.parametrize("runs", [2, 3, 5])
def test_the_largest_lies_between_the_two_on_average(runs) -> None:
    """Unbiased noisy estimates of known dFIL: the mean's maximum is too large on average, the crossed one too small."""
    rng = np.random.default_rng(runs)
    true = rng.uniform(0.5, 1.0, 40)
    above, below = [], []
    for _ in range(2000):
        noisy = torch.from_numpy(true * rng.gamma(4.0, 1 / 4.0, (runs, 40)))
        above.append(float(noisy.mean(0).max()))
        below.append(crossed(noisy))
    error = 4 * max(np.std(above), np.std(below)) / 2000**0.5
    assert np.mean(above) > true.max() + error
    assert np.mean(below) < true.max() - error


@pytest.fixture
def single_runs(monkeypatch):
    """The dFIL of every run, (rules, N) each, caught before it goes into the mean."""
    found, finish = [], FisherAccountant.finish_run

    def spy(ledger):
        found.append(ledger.state()["trace"].numpy() / ledger.account.features)
        finish(ledger)

    monkeypatch.setattr(FisherAccountant, "finish_run", spy)
    return found


def by_hand(each: list[np.ndarray]) -> float:
    message = []
    for k, mine in enumerate(each):
        others = np.mean([other for j, other in enumerate(each) if j != k], axis=0)
        message.append(mine[np.argmax(others)])
    return 1 / float(np.mean(message))


def test_floors_are_read_at_an_existing_record() -> None:
    """dFIL 1 to 10, of which the 10 was never measured: between two records, the more exposed."""
    dfil, measured = torch.arange(1.0, 11.0, dtype=torch.float64), torch.ones(10)
    assert floors_of(dfil, measured) == {"max": 1 / 10, "q99": 1 / 10, "median": 1 / 6}
    measured[9] = 0
    assert floors_of(dfil, measured) == {"max": 1 / 9, "q99": 1 / 9, "median": 1 / 5}
    assert floors_of(dfil, torch.zeros(10)) == {"max": 0.0, "q99": 0.0, "median": 0.0}


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("runs", [2, 3])
def test_trial_combines_its_runs(digits, tmp_path, single_runs, runs) -> None:
    """At every step count, the last one too, from plain trainings with the same seed that end there."""
    setting = {"noise_multiplier": 0.7, "lr": 0.5}
    plan = default_options(digits, model="linear", sample_rate=0.2, budget="every")
    sweeping = Trainer(digits, plan, (6, 14), runs, seed=7)
    for row in sweeping(setting, tmp_path):
        single_runs.clear()
        plain = make_learner(digits, sweeping.plan.with_changes(**setting, seed=seed_of(7, setting)), progress=False)
        plain.repeat(runs, row["steps"])
        assert len(single_runs) == runs
        for k, rule in enumerate(("exact", "paper")):
            assert row[f"{rule}_crossed"] == pytest.approx(by_hand([each[k] for each in single_runs]), rel=1e-9), rule


def test_records_measured_in_blocks_too(digits, tmp_path, single_runs) -> None:
    plan = default_options(digits, model="linear", sample_rate=0.2, budget=1.0)
    rows = Trainer(digits, plan, (6, 14), 3, seed=7)({"lr": 0.5}, tmp_path)
    assert len(single_runs) == 3
    assert rows[-1]["exact_crossed"] == pytest.approx(by_hand([each[0] for each in single_runs]), rel=1e-9)


def test_of_one_run_there_is_none(digits, tmp_path) -> None:
    plan = default_options(digits, model="linear", sample_rate=0.2)
    (row,) = Trainer(digits, plan, (3,), 1, seed=7)({"lr": 0.5}, tmp_path)
    assert "exact_crossed" not in row
    page = frontier_page([{"trial": 0, "lr": 0.5, **row}], {**FACTS, "runs": 1}).decode()
    assert "crossed" not in page.split('id="data">')[0].lower()


def test_an_interrupted_trial_gives_the_same_rows(digits, tmp_path) -> None:
    def trainer():
        return Trainer(digits, default_options(digits, model="linear", sample_rate=0.2), (20, 50), 3, seed=7)

    def stop_at(step):
        def tell(done):
            if done >= step:
                raise KeyboardInterrupt

        return tell

    wanted = trainer()({"lr": 0.5}, tmp_path / "whole")
    assert all(row["exact_crossed"] >= (1 - 1e-12) * row["exact_max"] > 0 for row in wanted)
    for step in (50, 51, 99, 101, 149):  # at the end of a run, and after it
        with pytest.raises(KeyboardInterrupt):
            trainer()({"lr": 0.5}, tmp_path / "cut", stop_at(step))
    assert trainer()({"lr": 0.5}, tmp_path / "cut") == wanted


def test_no_floor_is_made_of_a_record_that_was_not_met() -> None:
    """A record that one run alone measured: the others say 0 of it, and 1/0 is no floor."""
    assert crossed_floor(torch.tensor([[0.0, 1.0], [1.0, 0.0]])) is None
    assert crossed_floor(torch.tensor([[2.0, 1.0], [2.0, 0.0]])) == 0.5


def test_it_stands_beside_the_floor_in_table_page_and_hover() -> None:
    names = columns_of([ROW])
    assert names.index("exact_crossed") == names.index("exact_max") + 1
    assert floors_in([ROW]) == ["exact_max", "exact_q99", "lecam"]  # no floor to search or to draw by
    (found,) = csv.DictReader(table([ROW]).splitlines())
    assert found["exact_crossed"] == "3.5"
    page = frontier_page([ROW], FACTS).decode()
    text = html.unescape(page)
    front = text[text.index('id="front-exact_max"') :]
    head, row = front[front.index("<tr>") : front.index("</table>")].split("</tr>")[:2]
    cells = [part.split(">")[-1] for part in row.split("</td>")]
    titles = [part.split(">")[-1] for part in head.split("</th>")]
    assert cells[titles.index("crossed (MSE)")] == "3.5"
    assert cells[titles.index("floor (MSE)")] == "2"
    assert (
        "crossed"
        not in front[front.index('id="front-exact_q99"') : front.index('id="front-lecam"')].split("</details>")[0]
    )
    assert text.count(CROSSED) == 1
    charts = json.loads(page.split('id="data">')[1].split("</script>")[0])["charts"]
    hover = charts["chart-frontier"]["data"][0]["text"][0]
    assert "crossed: 3.5 (±1.87)" in hover
    assert "crossed" not in charts["chart-frontier"]["data"][1]["text"][0]  # Le Cam's
    trial = html.unescape(run_page([ROW], FACTS).decode())
    assert "<th>exact factor, crossed</th>" in trial
    assert CROSSED in trial


def test_the_command_prints_it(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    words = ["sweep", "digits", "--limit", "60", "--model", "linear", "--grid", "lr=1", "--grid", "sample_rate=0.2"]
    assert cli.run([*words, "--steps", "6", "--runs", "2", "--out", str(tmp_path), "--quiet"]) == 0
    capsys.readouterr()
    assert cli.run(["frontier", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["fronts"]["exact_max"]
    (kept,) = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert float(kept["exact_crossed"]) == row["exact_crossed"] >= (1 - 1e-12) * row["exact_max"]
    assert cli.run(["frontier", str(tmp_path), "--floor", "exact_max", "--floor", "lecam"]) == 0
    out = capsys.readouterr().out
    assert out.count("crossed (MSE)") == 1  # of the two tables
    assert f" {format_floor(row['exact_crossed'], 4)} " in out
    assert CROSSED in " ".join(out.split())
    assert cli.run(["frontier", str(tmp_path), "--at-least", "1e-9"]) == 0
    out = capsys.readouterr().out
    assert f"too high than too low; crossed {format_floor(row['exact_crossed'], 4)})" in out
    assert CROSSED in out
    assert cli.run(["frontier", str(tmp_path), "--floor", "lecam", "--at-least", "1e-9"]) == 0
    assert "rossed" not in capsys.readouterr().out
