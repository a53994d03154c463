"""Sweeps: the space, one training for all step counts, searches, the frontier and its pages."""

from __future__ import annotations

import csv
import json
import math
import os
import re
from dataclasses import replace

import numpy as np
import optuna
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sweep_stub
from reconbound._internal.checks import InputError
from reconbound.accounting.measurement_plan import Blocks, Segments
from reconbound.auditing.options import default_options, make_learner
from reconbound.cli import app as cli
from reconbound.data import load_dataset
from reconbound.sweep import Range, Sweep, best, frontier, pareto, parse_grid, parse_steps, run, sweep
from reconbound.sweep.database import checked_url, shown_url
from reconbound.sweep.queue import ERRORS
from reconbound.sweep.space import seed_of, settings_of
from reconbound.sweep.trial import Trainer, floors_of
from reconbound.training.checkpoint import CheckpointError

TINY = {"limit": 60, "test_share": 0.3}


@pytest.fixture(scope="module")
def digits():
    return load_dataset("digits", **TINY)


def trainer(dataset, counts=(6, 14), runs=2, **plan) -> Trainer:
    return Trainer(dataset, default_options(dataset, model="linear", sample_rate=0.2, **plan), counts, runs, seed=7)


# --- the space -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["learning_rate=1"], "must name one of noise_multiplier, max_grad_norm, sample_rate, lr, momentum, clip"),
        ([], "must name at least one setting"),
        (["lr="], "must give lr values"),
        (["lr=,"], "must give lr values"),
        (["lr"], "must give lr values"),
        (["lr=0.1,abc"], "lr must be a number, got 'abc'"),
        (["lr=-1"], "lr must be greater than 0"),
        (["lr=nan"], "lr must be a finite number"),
        (["lr=1e300"], "lr must be at most 1e+30"),
        (["lr=1", "lr=2"], "must name lr once"),
        (["lr=2:1"], "from a smaller number to a larger"),
        (["lr=1:2:cubic"], "low:high"),
        (["clip=soft"], "clip must be one of smooth, hard"),
        (["sample_rate=3/2"], "sample_rate must be at most 1"),
    ],
)
def test_bad_grids_are_one_line(options, text, capsys, tmp_path) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        parse_grid(options)
    words = [word for option in options for word in ("--grid", option)]
    assert cli.run(["sweep", "digits", *words, "--out", str(tmp_path / "x")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("reconbound: --grid ")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--steps", "10,x"], "--steps must be a number, got x"),
        (["--steps", ","], "--steps must name at least one step count"),
        (["--runs", "0"], "--runs must be at least 1"),
        (["--search", "random"], "--search must be one of grid, tpe"),
        (["--search", "tpe"], "--trials must be given for a search"),
        (["--trials", "5"], "--trials must be left out of a grid"),
        (["--grid", "noise_multiplier=0.1:1"], "--grid must list the values of noise_multiplier: a range is for"),
        (["--storage", "nonsense"], "--storage must be a URL such as sqlite:///"),
        (["--storage", "mysql://u@h/d"], "--storage must be a SQLite file or a PostgreSQL database"),
        (["--storage", "sqlite:////no/such/folder/x.db"], "--storage must be a database that can be used"),
        (["--storage", "postgresql+psycopg2://u:secret@127.0.0.1:1/d"], "--storage must be a database that can be"),
        (["--storage", "postgresql+asyncpg://u@127.0.0.1:1/d"], "say postgresql+psycopg2://user@host/name, after pip"),
        (["--grid", "model=a.b:c"], "list of values; a model of your own is for all settings, by --model, got a.b:c"),
        (["--workers", "0"], "--workers must be at least 1"),
        (["--delta", "2"], "--delta must be less than 1"),
        (["--floor", "exact"], "--floor must be one of exact_max, exact_q99, "),
        (["--search", "tpe", "--trials", "1", "--floor", "fixed_max"],
         "--floor must be of the batches that are drawn (exact, paper), or of the mechanism, got fixed_max"),
        (["--storage", "postgresql+psycopg2://127.0.0.1:1/d?password=secret&user=u"], "--storage must be a database"),
        (["--storage", "postgresql//u:secret@h/d"], "--storage must be a URL such as sqlite:///"),
        (["--storage", "mysql://h/d?password=secret"], "--storage must be a SQLite file or a PostgreSQL database"),
        (["--storage", "postgresql://u:secret/secret@h:5x/d"], "got postgresql://***@h:5x/d"),
        (["--storage", "postgresql:/u:secret:secret@h/d"], "got postgresql:/***@h/d"),
        (["--storage", "u:p/secret@h/d"], "got ***@h/d"),
        (["--storage", "postgresql://h:5x/d?PASSWORD=secret"], "got postgresql://h:5x/d?PASSWORD=***"),
        (["--storage", "postgresql://u:p@secret@h/d"], "--storage must have an @ that is no separator, as in a"),
        (["--storage", "postgresql+psycopg2://127.0.0.1:1/d?sslpassword=secret"], "d?sslpassword=***"),
    ],
)  # fmt: skip
def test_bad_options_are_one_line(words, text, capsys, tmp_path) -> None:
    common = ["sweep", "digits", "--limit", "60", "--model", "linear", "--grid", "lr=1", "--out", str(tmp_path)]
    assert cli.run([*common, *words]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert text in lines[0]
    assert "secret" not in lines[0]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("postgresql+psycopg2://h:1/d?password=se%40cret&user=me&sslmode=require", "://me:***@h:1/d?sslmode=require"),
        ("postgresql+psycopg2://me@h:1/d?sslmode=require&password=se%40cret", "://me:***@h:1/d?sslmode=require"),
        ("postgresql+psycopg2://h:1/d?sslmode=require&password=se%40cret", "://:***@h:1/d?sslmode=require"),
        # as SQLAlchemy does, the query before the rest
        (
            "postgresql+psycopg2://a:b@h:1/d?user=me&sslmode=require&password=se%40cret",
            "://me:***@h:1/d?sslmode=require",
        ),
    ],
)
def test_a_password_in_a_urls_query_is_hidden_and_used(given, shown) -> None:
    url = checked_url(given)
    assert shown_url(url) == f"postgresql+psycopg2{shown}"
    again = checked_url(url.render_as_string(hide_password=False))  # as Optuna is given it
    used = {**again.translate_connect_args(), **again.query}
    assert used.pop("username", None) == ("me" if "me" in shown.split("@")[0] else None)
    assert used == {"password": "se@cret", "host": "h", "port": 1, "database": "d", "sslmode": "require"}


def test_a_url_without_a_driver_takes_the_one_that_is_installed() -> None:
    pytest.importorskip("psycopg2")
    assert checked_url("postgresql://me@h/d").get_driver_name() == "psycopg2"
    assert checked_url("postgresql+asyncpg://me@h/d").drivername == "postgresql+asyncpg"


def test_settings_and_seeds() -> None:
    space = parse_grid(["lr=0.1,0.5,0.1", "sample_rate=1/4", "clip=hard,smooth"])
    settings = settings_of(space)
    assert settings[0] == {"lr": 0.1, "sample_rate": 0.25, "clip": "hard"}
    assert len(settings) == 4
    assert len({seed_of(1, setting) for setting in settings} | {seed_of(2, setting) for setting in settings}) == 8
    assert seed_of(1, {"a": 1, "b": 2}) == seed_of(1, {"b": 2, "a": 1})
    assert parse_steps("30, 10,30") == (10, 30)


# --- one training for all step counts --------------------------------------------------------


@pytest.mark.parametrize(("counts", "budget"), [((5, 12, 40), 0.5), ((1, 2, 3), 0.1), ((7,), 2.0)])
def test_segments_count_each_record_for_every_stretch_whole(counts, budget) -> None:
    """Over each stretch, the weights of a record's measurements add up to q times its length, exactly."""
    plan = Segments.of(Blocks(records=23, sample_rate=0.2, steps=counts[-1], budget=budget, group=5), counts)
    for start, end in zip((0, *counts), counts, strict=False):
        total = torch.zeros(23, dtype=torch.float64)
        for step in range(start, end):
            for group in plan.at(3, step):
                total[group] += plan.weight(step)
        torch.testing.assert_close(total, torch.full_like(total, 0.2 * (end - start)), rtol=1e-12, atol=0)


@pytest.mark.usefixtures("same_noise")
@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_intermediate_row_equals_shorter_training(digits, tmp_path, sampler) -> None:
    setting = {"noise_multiplier": 0.7, "sampler": sampler, "lr": 0.5}
    long = trainer(digits)(setting, tmp_path / "long")
    short = trainer(digits, (6,))(setting, tmp_path / "short")
    assert [row["steps"] for row in long] == [6, 14]
    assert long[0].keys() == short[0].keys()
    for name, value in short[0].items():
        assert long[0][name] == (None if value is None else pytest.approx(value, rel=1e-12)), name
    proved = "exact_max" if sampler == "poisson" else "fixed_max"
    assert long[0][proved] == short[0][proved]
    assert long[1]["theorem1"] < long[0]["theorem1"]
    assert long[1]["epsilon"] > long[0]["epsilon"]


@pytest.mark.usefixtures("same_noise")
def test_rows_are_those_of_the_learner_itself(digits, tmp_path) -> None:
    """With every batch measured, the floors are those of plain runs with a ledger made for that many steps, κ too."""
    setting = {"noise_multiplier": 0.7, "lr": 0.5}
    sweeping = trainer(digits, budget="every")
    rows = sweeping(setting, tmp_path)
    for row in rows:
        plan = sweeping.plan.with_changes(**setting, seed=seed_of(7, setting))
        plain = make_learner(digits, plan, progress=False).repeat(2, row["steps"])
        seen = plain.accountant.measured() > 0
        for rule in ("exact", "paper"):
            dfil = plain.accountant.dfil(rule)[seen]
            assert row[f"{rule}_max"] == pytest.approx(1 / float(dfil.max()), rel=1e-9)
            assert float((dfil > 1 / row[f"{rule}_median"] * (1 + 1e-9)).double().mean()) <= 0.5
        assert row["never_measured"] == int((~seen).sum())
        assert row["zero_information"] == 0
        floors = plain.accountant.guarantee(low=0.0, high=1.0)
        assert row["lecam"] == pytest.approx(float(floors["lecam"].value))
        assert row["epsilon"] == pytest.approx(floors.epsilon)


def test_kappa_grows_as_its_delta_is_split_over_more_steps(digits, tmp_path) -> None:
    learner = make_learner(digits, default_options(digits, model="linear", steps=400), progress=False)
    learner.steps = 400
    learner._make_ledger()
    ratio = learner.accountant.traces.factors.kappa_ratio
    assert ratio(400) == 1
    assert 0.5 < ratio(10) < ratio(100) < 1


def test_places_over_the_records() -> None:
    dfil = torch.arange(1.0, 102.0, dtype=torch.float64)
    found = floors_of(dfil, torch.ones(101))
    assert found == {"max": 1 / 101, "q99": 1 / 100, "median": 1 / 51}
    seen = (dfil < 50).double()
    assert floors_of(dfil, seen)["max"] == 1 / 49
    assert floors_of(dfil, 0 * seen) == {"max": 0.0, "q99": 0.0, "median": 0.0}


def test_interrupted_trial_gives_same_rows(digits, tmp_path) -> None:
    setting = {"noise_multiplier": 0.5}

    def stop_at(step):
        def tell(done):
            if done >= step:
                raise KeyboardInterrupt

        return tell

    wanted = trainer(digits, (20, 50))(setting, tmp_path / "whole")
    for step in (22, 51, 75):
        with pytest.raises(KeyboardInterrupt):
            trainer(digits, (20, 50))(setting, tmp_path / "cut", stop_at(step))
    assert (tmp_path / "cut" / "checkpoints").exists()
    assert trainer(digits, (20, 50))(setting, tmp_path / "cut") == wanted
    assert not (tmp_path / "cut" / "checkpoints").exists()
    assert json.loads((tmp_path / "cut" / "trial.json").read_text())["rows"] == wanted
    for path in (tmp_path / "cut").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert trainer(digits, (20, 50))(setting, tmp_path / "cut", stop_at(0)) == wanted  # trained already: not again


# --- the frontier ----------------------------------------------------------------------------

ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12)


@given(ROWS, st.integers(1, 5))
def test_front_is_undominated(points, least) -> None:
    rows = [{"trial": i, "accuracy": float(a), "exact_max": float(f)} for i, (a, f) in enumerate(points)]
    front = pareto(rows, "exact_max")
    pairs = [(row["accuracy"], row["exact_max"]) for row in front]

    def beaten(a: float, f: float) -> bool:
        return any(x >= a and y >= f and (x, y) != (a, f) for x, y in points)

    assert sorted(pairs) == sorted({(float(a), float(f)) for a, f in points if not beaten(a, f)})
    assert [f for _, f in pairs] == sorted(f for _, f in pairs)
    enough = [(a, f) for a, f in points if f >= least]
    found = best(rows, "exact_max", least)
    assert (found is None) == (not enough)
    if found is not None:
        assert (found["accuracy"], found["exact_max"]) == max(enough)


def test_a_search_prefers_what_meets_the_floor() -> None:
    def score(accuracy, floor):
        return frontier.score_of([{"accuracy": accuracy, "exact_max": floor}], "exact_max", 1.0)

    assert score(0.1, 2.0) > score(0.9, 0.9) > score(0.95, 0.5) > score(0.99, 0.0)
    assert math.isfinite(score(0.5, 0.0))


# --- sweeps ------------------------------------------------------------------------------------


def test_a_small_sweep_on_digits(tmp_path, capsys) -> None:
    """The command, its files and their modes, the frontier, and going on."""
    out = tmp_path / "sweep"
    words = ["sweep", "digits", "--limit", "60", "--model", "linear", "--grid", "noise_multiplier=0.5,2"]
    words += ["--grid", "sample_rate=0.2", "--steps", "6,12", "--runs", "2", "--out", str(out)]
    assert cli.run([*words, "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(out / "frontier.html")
    for path in out.rglob("*"):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [(row["noise_multiplier"], row["steps"]) for row in rows] == [
        ("0.5", "6"), ("0.5", "12"), ("2.0", "6"), ("2.0", "12")
    ]  # fmt: skip
    for name in (
        "exact_max",
        "exact_q99",
        "exact_median",
        "paper_max",
        "theorem1",
        "theorem1_paper",
        "corners",
        "lecam",
    ):
        assert all(float(row[name]) >= 0 for row in rows)
    page = (out / "frontier.html").read_text()
    assert "Confidential." in page
    assert 'href="trials/00001/index.html"' in page
    assert not re.search(r'(src|href)="(https?:)?//', re.sub(r"<script>.*?</script>", "", page, flags=re.S))
    assert "noise_multiplier" in (out / "trials" / "00001" / "index.html").read_text()

    assert cli.run(["frontier", str(out), "--json"]) == 0
    told_json = json.loads(capsys.readouterr().out)
    assert set(told_json["fronts"]) >= {"exact_max", "lecam", "rate_distortion"}
    assert (told_json["finished"], told_json["failed"]) == (2, 0)
    wanted = max(float(row["accuracy"]) for row in rows if float(row["exact_max"]) >= 5)
    assert cli.run(["frontier", str(out), "--floor", "exact_max", "--at-least", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["exact_max"]["accuracy"] == wanted
    assert cli.run(["frontier", str(out), "--at-least", "5"]) == 0
    assert f"accuracy {wanted:.4f}" in capsys.readouterr().out
    assert cli.run(["frontier", str(out), "--at-least", "1e12"]) == 1
    assert "no setting has a floor of at least 1e+12" in capsys.readouterr().out
    assert cli.run(["frontier", str(out), "--floor", "magic"]) == 2
    assert "--floor must be one of exact_max" in capsys.readouterr().err
    assert cli.run(["frontier", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no sweep" in capsys.readouterr().err

    before = (out / "sweep.csv").read_text()
    more = [word.replace("=0.5,2", "=0.5,2,4") for word in words]  # a grid may grow
    assert cli.run([*more, "--json"]) == 0
    grown = json.loads(capsys.readouterr().out)
    assert grown["trials"] == 3
    assert len(grown["rows"]) == 6
    assert [line.rpartition(",")[0] for line in before.splitlines()] == [
        line.rpartition(",")[0] for line in (out / "sweep.csv").read_text().splitlines()[:5]
    ]
    other = [word.replace("6,12", "6,13") for word in words]
    assert cli.run(other) == 2
    assert "--steps must stay that of the sweep" in capsys.readouterr().err
    assert cli.run([*words, "--seed", "5"]) == 2
    assert "--seed must stay the one in" in capsys.readouterr().err


class Searched(sweep_stub.Stub):
    """A setting's rows without waiting; counts how often it is asked."""

    def __init__(self) -> None:
        self.asked: list[dict] = []

    def __call__(self, setting, folder, tell):
        self.asked.append(setting)
        noise, lr = setting["noise_multiplier"], setting["lr"]
        return [{"steps": 5, "accuracy": 1 - noise / 10 - (lr - 0.3) ** 2, "exact_max": noise**2, "delta": None}]


@pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
def test_guesses_are_of_the_data() -> None:
    dataset = load_dataset("wine", ranges={"alcohol": (0, 20)}, private="alcohol", limit=60)
    found = Trainer(dataset, default_options(dataset), (2,), 1, 0).guesses()
    classes, counts = np.unique(dataset.targets, return_counts=True)
    assert found["accuracy"] == np.mean(dataset.test_targets == classes[counts.argmax()])
    assert found["error"] == pytest.approx(dataset.inputs[:, dataset.private[0]].std(), rel=1e-6)


def test_tpe_searches_ranges_and_lists_and_can_be_longer(tmp_path, monkeypatch) -> None:
    tpe, stub = optuna.samplers.TPESampler, Searched()
    monkeypatch.setattr(optuna.samplers, "TPESampler", lambda **options: tpe(**{**options, "seed": 0}))
    space = {"noise_multiplier": Range(0.1, 5.0, log=True), "lr": [0.1, 0.3, 0.9]}
    config = Sweep("stub", tmp_path, space, (5,), search="tpe", trials=12, at_least=1.0, seed=1)
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert len(rows) == 12
    assert all(0.1 <= row["noise_multiplier"] <= 5 and row["lr"] in (0.1, 0.3, 0.9) for row in rows)
    rows = sweep(replace(config, trials=40), make_train=lambda _: stub, show=False)
    assert len(rows) == 40 == len(stub.asked)
    scores = [frontier.score_of([row], "exact_max", 1.0) for row in rows]
    assert sum(scores[20:]) / 20 > sum(scores[:20]) / 20 + 0.1  # it has learnt where the floor is met
    assert best(rows, "exact_max", 1.0)["accuracy"] > 0.85  # the best possible is 0.9, at noise 1 and lr 0.3
    with pytest.raises(InputError, match="at_least must stay that of the sweep"):
        sweep(replace(config, at_least=2.0), make_train=lambda _: stub, show=False)


def test_repeated_setting_is_trained_and_counted_once(tmp_path) -> None:
    stub = Searched()
    space = {"noise_multiplier": [0.5, 1.0], "lr": [0.1, 0.3]}
    config = Sweep("stub", tmp_path, space, (5,), search="tpe", trials=12, seed=1)
    rows = sweep(config, make_train=lambda _: stub, show=False)
    settings = {(row["noise_multiplier"], row["lr"]) for row in rows}
    assert len(rows) == len(settings) == len(stub.asked) <= 4
    _, facts = run.stored(tmp_path)
    assert facts["finished"] == 12


def test_a_failed_trial_is_retried_and_then_given_up(tmp_path, capsys) -> None:
    class Fails(Searched):
        def __call__(self, setting, folder, tell):
            found = super().__call__(setting, folder, tell)
            if setting["lr"] == 0.1 or (setting["lr"] == 0.2 and self.asked.count(setting) < ERRORS):
                raise RuntimeError("the model has exploded")
            return found

    stub = Fails()
    config = Sweep("stub", tmp_path, {"lr": [0.1, 0.2, 0.3], "noise_multiplier": [1.0]}, (5,), seed=1)
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert [row["lr"] for row in rows] == [0.2, 0.3]
    asked = [setting["lr"] for setting in stub.asked]
    assert [asked.count(lr) for lr in (0.1, 0.2, 0.3)] == [ERRORS, ERRORS, 1]
    _, facts = run.stored(tmp_path)
    assert (facts["finished"], facts["failed"], facts["error"]) == (2, 1, "RuntimeError: the model has exploded")


def test_trial_with_locked_folder_waits(tmp_path) -> None:
    """A worker that was suspended, not killed: others pass its trial over, and nobody takes it for a failure."""

    class Busy(Searched):
        def __call__(self, setting, folder, tell):
            found = super().__call__(setting, folder, tell)
            if setting["lr"] == 0.1 and self.asked.count(setting) < 3:
                raise CheckpointError(f"the checkpoint folder {folder} is in use by process 1 on another")
            return found

    stub = Busy()
    config = Sweep("stub", tmp_path, {"lr": [0.1, 0.2], "noise_multiplier": [1.0]}, (5,), seed=1, grace=1)
    rows = sweep(config, make_train=lambda _: stub, show=False)
    assert [row["lr"] for row in rows] == [0.1, 0.2]
    assert [setting["lr"] for setting in stub.asked] == [0.1, 0.2, 0.1, 0.1]


def test_a_sweep_of_another_seed_or_other_data_is_refused(tmp_path, digits) -> None:
    config = Sweep("digits", tmp_path, {"lr": [0.1]}, (5,), seed=1)
    queue = run.open_queue(config)
    for one, facts in (("seed", {"seed": 2}), ("data", {"dataset": load_dataset("digits", limit=50)})):
        first, other = ({"dataset": digits, "counts": (5,), "runs": 1, "seed": 1} | more for more in ({}, facts))
        plan = default_options(digits, model="linear")
        run.begin(queue, config, Trainer(plan=plan, **first))
        with pytest.raises(InputError, match=f"{one} must (be|stay) that of the sweep"):
            run.begin(queue, config, Trainer(plan=plan, **other))
    queue.dispose()


def test_sweep_removes_what_was_left_of_a_file_but_not_what_another_worker_writes(tmp_path) -> None:
    config = Sweep(data="stub", out=tmp_path / "s", space=parse_grid(["noise_multiplier=1", "lr=0.3"]), steps=(5, 10))
    stub = sweep_stub.Stub()
    stub.pause = 0.0
    rows = sweep(config, make_train=lambda _: stub, show=False)
    old, young = (tmp_path / "s" / f".sweep.json.{name}.part" for name in ("0badcafe", "12345678"))
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    assert sweep(config, make_train=lambda _: stub, show=False) == rows
    assert (old.exists(), young.exists()) == (False, True)


def test_a_sweep_that_cannot_begin_leaves_no_folder(tmp_path, capsys) -> None:
    out = tmp_path / "out"
    assert cli.run(["sweep", str(tmp_path / "none.csv"), "--grid", "lr=1", "--out", str(out)]) == 2
    assert "none.csv does not exist" in capsys.readouterr().err
    assert not out.exists()
    out.mkdir()  # the user's own stays
    assert cli.run(["sweep", str(tmp_path / "none.csv"), "--grid", "lr=1", "--out", str(out)]) == 2
    assert out.exists()
