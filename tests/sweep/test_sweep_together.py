"""Settings trained many at once: their rows, and what a fleet cannot do."""

from __future__ import annotations

import gc
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_sweep import digits, trainer  # noqa: F401
from torch import nn

from reconbound._internal.checks import InputError
from reconbound._internal.rng import derive
from reconbound.accounting.spec import Account, Factors
from reconbound.auditing.models import as_tensor, make_loss, make_model, score, start_afresh
from reconbound.auditing.options import default_options
from reconbound.cli import app as cli
from reconbound.data import load_dataset
from reconbound.sweep import Sweep, run, sweep
from reconbound.sweep.fleet.trainer import Fleet, Snapshot
from reconbound.sweep.queue import ERRORS, TrialLost
from reconbound.sweep.space import seed_of
from reconbound.sweep.together import Exploded, TogetherTrainer
from reconbound.sweep.trial import Trainer

pytestmark = pytest.mark.slow

GRID = [{"noise_multiplier": s, "lr": lr} for s in (0.5, 1.0) for lr in (0.3, 1.0)]


def together(dataset, counts=(6, 14), runs=2, **plan) -> TogetherTrainer:
    own = default_options(dataset, model="linear", **{"sample_rate": 0.2, **plan})
    return TogetherTrainer(dataset, own, counts, runs, seed=7, device="cpu")


def folders(path: Path, count: int) -> list[Path]:
    return [path / str(k) for k in range(count)]


def close(a: list[dict], b: list[dict]) -> None:
    for one, other in zip(a, b, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert other[name] == (None if value is None else pytest.approx(value, rel=1e-4)), name


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_rows_do_not_depend_on_who_is_trained_beside(digits, tmp_path, sampler) -> None:  # noqa: F811
    settings = [setting | {"sampler": sampler} for setting in GRID]
    reported: list[tuple[tuple[int, ...], int]] = []
    many = together(digits).train_all(
        settings, folders(tmp_path / "a", 4), lambda which, n: reported.append((*which, n))
    )
    assert [row["steps"] for row in many[0]] == [6, 14]
    assert reported == [(0, 1, 2, 3, step) for step in range(2 * 14)]
    separate = together(digits)(settings[2], tmp_path / "b")
    close(separate, many[2])
    short = together(digits, (6,))(settings[2], tmp_path / "c")  # a shorter training is the beginning of a longer one
    close(short, many[2][:1])
    assert len({rows[-1]["paper_median"] for rows in many}) == 4


def test_fleet_rows_have_fields_of_single_trainings(digits, tmp_path) -> None:  # noqa: F811
    """Accuracies are means over runs; dFIL is averaged over runs before its maximum is taken; κ is of so many steps."""
    own = together(digits)
    (rows,) = own.train_all([GRID[1]], folders(tmp_path, 1))
    plan = default_options(digits, model="linear", sample_rate=0.2, **GRID[1])
    settings = [replace(plan.settings, seed=derive(7, "together", 0))]
    fleet = Fleet(
        lambda: make_model(digits, "linear", seed=0), make_loss(digits), as_tensor(digits.inputs),
        as_tensor(digits.targets), settings, at=(6, 14), initialise=partial(start_afresh, digits, "linear"),
    )  # fmt: skip
    shots = [
        list(fleet.run(r, evaluate=lambda model: score(digits, model), seeds=[seed_of(7, GRID[1])])) for r in (0, 1)
    ]
    for at, row in enumerate(rows):
        assert row["accuracy"] == pytest.approx((shots[0][at].found[0] + shots[1][at].found[0]) / 2)
        for rule in ("exact", "paper"):
            dfil = (shots[0][at].dfil(rule)[0] + shots[1][at].dfil(rule)[0]) / 2
            assert row[f"{rule}_max"] == pytest.approx(1 / float(dfil.max()), rel=1e-5)
            a, b = (each[at].dfil(rule)[0] for each in shots)
            assert row[f"{rule}_crossed"] == pytest.approx(2 / float(a[b.argmax()] + b[a.argmax()]), rel=1e-5)
    single = trainer(digits)(GRID[1], tmp_path / "single")
    for one, other in zip(single, rows, strict=True):
        assert one.keys() == other.keys()
        for name in ("steps", "theorem1", "corners", "lecam", "epsilon", "delta", "never_measured"):
            assert one[name] == pytest.approx(other[name])


def test_the_information_is_that_of_single_trainings_in_the_mean(digits, tmp_path) -> None:  # noqa: F811
    """Other batches and other noise, the same distribution: over 30 runs the medians agree to a few per cent."""
    options = {"counts": (10,), "runs": 30}
    (one,), (other,) = (make(digits, **options)(GRID[2], tmp_path / make.__name__) for make in (trainer, together))
    assert other["exact_median"] == pytest.approx(one["exact_median"], rel=0.1)
    assert other["exact_q99"] == pytest.approx(one["exact_q99"], rel=0.25)
    assert other["accuracy"] == pytest.approx(one["accuracy"], abs=0.1)


def test_equal_settings_are_trained_once(digits, tmp_path) -> None:  # noqa: F811
    settings = [{"clip": "hard"}, {"clip": "smooth"}, {"clip": "hard", "lr": 0.5}, {"clip": "hard"}]
    parts: list[tuple[int, ...]] = []
    found = together(digits).train_all(
        settings, folders(tmp_path, 4), lambda which, done: parts.append(tuple(which)) if done == 0 else None
    )
    assert parts == [(0, 2), (1,)]
    assert found[3] == found[0] != found[2]
    again = together(digits).train_all(settings[:3], folders(tmp_path, 3), lambda which, done: pytest.fail("trained"))
    assert again == found[:3]
    kept = tmp_path / "0" / "trial.json"
    assert (kept.stat().st_mode & 0o777) == 0o600
    assert json.loads(kept.read_text())["confidential"] is True


def test_exploded_training_does_not_affect_others(digits, tmp_path) -> None:  # noqa: F811
    good, bad = together(digits).train_all([{"lr": 0.5}, {"lr": 1e30, "max_grad_norm": 1e20}], folders(tmp_path, 2))
    assert isinstance(bad, Exploded)
    assert "lower lr" in str(bad)
    close(together(digits)({"lr": 0.5}, tmp_path / "alone"), good)
    assert not (tmp_path / "1" / "trial.json").exists()
    config = Sweep(
        "digits", tmp_path / "s", {"lr": [1e-20, 1e30], "max_grad_norm": [1e20]}, (6, 14), seed=7, together=2
    )
    rows = sweep(config, make_train=lambda _: together(digits), show=False)
    assert [(row["lr"], row["steps"]) for row in rows] == [(1e-20, 6), (1e-20, 14)]
    _, facts = run.stored(tmp_path / "s")
    assert (facts["finished"], facts["failed"]) == (1, 1)
    queue = run.open_queue(config)
    assert [len(slot.attempts) for slot in queue.slots()] == [1, 1]  # it is not trained again to the same end
    queue.dispose()
    assert facts["error"].startswith("Exploded: the parameters or the ledger are not finite after 6 steps")


def test_training_exploding_in_later_run_has_no_row(digits) -> None:  # noqa: F811
    """Its second run would go into the mean as no number at all."""
    own = together(digits)

    records = len(digits.inputs)
    account = Account(1.0, 1.0, 0.2, records=records, features=64, steps=14, rules=("exact", "paper"))
    ledger = SimpleNamespace(
        factors=Factors([account], torch.device("cpu")), measured_in_runs=lambda _: torch.ones(records)
    )
    fleet = SimpleNamespace(ledger=ledger)

    def shots(step: int, *finite: bool) -> list[Snapshot]:
        dfils = dict.fromkeys(("exact", "paper"), torch.ones(1, records, dtype=torch.float64))
        return [Snapshot(step, (), dfils, torch.tensor([good]), (0.5,)) for good in finite]

    assert [row["steps"] for row in own._rows(0, fleet, [shots(6, True, True), shots(14, True, True)])] == [6, 14]
    found = own._rows(0, fleet, [shots(6, True, True), shots(14, True, False)])
    assert isinstance(found, Exploded)
    assert "not finite after 14 steps" in str(found)


@pytest.mark.parametrize(
    ("plan", "setting", "text"),
    [
        ({"budget": "every"}, {}, "budget"),
        ({"sampler": "shuffle"}, {}, "sampler"),
        ({}, {"sampler": "shuffle"}, "sampler"),
    ],
)
def test_unsupported_fleet_raises(digits, tmp_path, plan, setting, text) -> None:  # noqa: F811
    with pytest.raises(InputError, match=f"{text} must be .* for settings trained together"):
        together(digits, **plan)(setting, tmp_path)


def table(path: Path) -> Path:
    file = path / "t.csv"
    rows = "\n".join(f"{k % 7},{k % 5},{'yn'[k % 2]}" for k in range(60))
    file.write_text(f"a,b,c\n{rows}\n")
    return file


def test_a_sweep_with_other_private_columns_is_another(tmp_path, capsys) -> None:
    words = ["sweep", str(table(tmp_path)), "--target", "c", "--private", "a", "--grid", "lr=1", "--steps", "3"]
    words += ["--range", "a=0:7", "--range", "b=0:5", "-o", str(tmp_path / "out")]
    assert cli.run([*words, "--together", "2", "--budget", "every"]) == 2
    assert "budget must be a number for settings trained together" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()  # nothing was begun
    assert cli.run([*words, "--together", "0"]) == 2
    assert "together" in capsys.readouterr().err
    for together in ([], ["--together", "2"]):  # the same data, but other floors
        for private, other in (("a", "a,b"), ("a,b", "a")):
            words[5], words[-1] = private, str(tmp_path / f"{private} {len(together)}")
            assert cli.run([*words, *together]) == 0
            words[5] = other
            assert cli.run([*words, *together]) == 2
            assert "private must stay that of the sweep" in capsys.readouterr().err


@pytest.mark.parametrize("private", [["a"], ["b"], ["a", "b"]])
def test_floors_are_of_the_private_columns(tmp_path, private) -> None:
    data = load_dataset(str(table(tmp_path)), target="c", private=private, ranges={"a": (0, 7), "b": (0, 5)})
    (row,) = together(data, (6,), 1)(GRID[0], tmp_path / "one")
    columns = [["a", "b"].index(name) for name in private]
    plan = default_options(data, model="linear", sample_rate=0.2, **GRID[0])
    fleet = Fleet(
        lambda: make_model(data, "linear", seed=0), make_loss(data), as_tensor(data.inputs), as_tensor(data.targets),
        [replace(plan.settings, seed=derive(7, "together", 0))],
        at=(6,), initialise=partial(start_afresh, data, "linear"), private=columns,
    )  # fmt: skip
    (shot,) = fleet.run(0, seeds=[seed_of(7, GRID[0])])
    assert row["exact_max"] == pytest.approx(1 / float(shot.dfil()[0].max()), rel=1e-5)
    single = trainer(data, counts=(6,), runs=1)(GRID[0], tmp_path / "single")[0]
    for name in ("epsilon", "theorem1", "corners", "lecam", "rate_distortion"):
        assert row[name] == pytest.approx(single[name])


def test_one_by_one_and_together_are_not_mixed(digits, tmp_path) -> None:  # noqa: F811
    for first, then, text in ((trainer, together, "left out"), (together, trainer, "given")):
        (tmp_path / text).mkdir()
        config = Sweep("digits", tmp_path / text, {"lr": [0.1]}, (6, 14), seed=1)
        queue = run.open_queue(config)
        run.begin(queue, config, first(digits))
        run.begin(queue, config, first(digits))
        with pytest.raises(InputError, match=f"together must be {text}, as when the sweep 'sweep' in .* began"):
            run.begin(queue, config, then(digits))
        queue.dispose()
    assert Trainer.together is None


def test_the_command(tmp_path, capsys) -> None:
    words = ["sweep", "digits", "--limit", "60", "--model", "linear", "--grid", "lr=0.5,1", "--steps", "4,8"]
    assert cli.run([*words, "--together", "2", "-o", str(tmp_path / "s")]) == 0
    text = capsys.readouterr()
    assert "2 of 2 settings trained" in text.out
    assert "each with 2 settings at once" in text.err
    assert (tmp_path / "s" / "frontier.html").exists()
    assert "ledger.safetensors" not in (tmp_path / "s" / "trials" / "00000" / "index.html").read_text()
    assert cli.run([*words, "-o", str(tmp_path / "one by one")]) == 0
    assert "ledger.safetensors in this folder" in (tmp_path / "one by one/trials/00000/index.html").read_text()
    capsys.readouterr()
    assert cli.run([*words, "-o", str(tmp_path / "s")]) == 2
    assert "together must be given, as when the sweep" in capsys.readouterr().err


def test_fixed_size_batches_are_accounted_at_their_own_rate(digits, tmp_path) -> None:  # noqa: F811
    """qN need not be whole, batches are: ε and the floors of the mechanism are those of single trainings."""
    setting = {"sampler": "fixed", "sample_rate": 2.6 / len(digits.inputs)}
    (one,) = trainer(digits, (4,), 1)(setting, tmp_path / "one")
    (other,) = together(digits, (4,), 1)(setting, tmp_path / "other")
    for name in ("epsilon", "theorem1", "theorem1_paper", "corners", "lecam", "rate_distortion"):
        assert other[name] == one[name]


def test_a_setting_that_cannot_be_trained_takes_no_others_with_it(digits, tmp_path) -> None:  # noqa: F811
    space = {"sampler": ["shuffle", "poisson"], "model": ["cnn", "linear"], "lr": [0.5]}
    own = together(digits, (3,), 1)
    real, broken = own._trained_together, []

    def trained(settings, tell):
        if settings[0]["model"] == "cnn":
            broken.append(len(settings))
            raise RuntimeError("out of memory")
        return real(settings, tell)

    own._trained_together = trained
    config = Sweep("digits", tmp_path, space, (3,), seed=7, together=4)
    rows = sweep(config, make_train=lambda _: own, show=False)
    assert [(row["model"], row["sampler"]) for row in rows] == [("linear", "poisson")]
    assert broken == [1] * ERRORS  # what is no fault of the setting is tried again
    queue = run.open_queue(config)
    errors = [slot.failure or "" for slot in queue.slots()]
    assert [error.partition(":")[0] for error in errors] == ["InputError", "InputError", "RuntimeError", ""]
    assert [len(slot.attempts) for slot in queue.slots()] == [1, 1, ERRORS, 1]
    queue.dispose()


@pytest.mark.parametrize("reason", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("cannot be captured")])
def test_a_fleet_that_ends_by_an_error_is_halved(digits, tmp_path, reason) -> None:  # noqa: F811
    """Memory: by what fits, from then on. Any other error: until it is that of one setting."""
    own, memory = together(digits, (3,), 1), isinstance(reason, torch.OutOfMemoryError)
    real, tried = own._trained_together, []

    def trained(settings, tell):
        tried.append([s["lr"] for s in settings])
        if len(settings) > 2 if memory else 0.2 in tried[-1]:
            tell(1)
            raise reason
        return real(settings, tell)

    own._trained_together = trained
    settings = [{"lr": lr} for lr in (0.1, 0.2, 0.3, 0.4, 0.5)]
    reported = []
    with pytest.warns(UserWarning, match="settings at once") if memory else nullcontext() as warned:
        found = own.train_all(settings, folders(tmp_path / "a", 5), lambda which, done: reported.append((*which, done)))
    if memory:
        assert [str(w.message).partition(" for ")[2] for w in warned] == [
            f"{k} settings at once: they are trained by {fit}" for k, fit in ((5, 3), (3, 2))
        ]
        assert tried == [[0.1, 0.2, 0.3, 0.4, 0.5], [0.1, 0.2, 0.3], [0.1, 0.2], [0.3], [0.4, 0.5]]
        own.train_all(settings[:3], folders(tmp_path / "b", 3))
        assert tried[5:] == [[0.1, 0.2], [0.3]]
    else:
        assert tried == [[0.1, 0.2, 0.3, 0.4, 0.5], [0.1, 0.2, 0.3], [0.1, 0.2], [0.1], [0.2], [0.3], [0.4, 0.5]]
        assert found[1] is reason
        assert not (tmp_path / "a" / "1" / "trial.json").exists()
    assert reported[:2] == [(0, 1, 2, 3, 4, 1), (0, 1, 2, 1)]
    assert (2, 0) in reported
    whole = together(digits, (3,), 1).train_all(settings, folders(tmp_path / "c", 5))
    for k in range(5):
        if memory or k != 1:
            close(found[k], whole[k])


def test_a_ledger_that_is_not_finite_is_no_row(digits, tmp_path) -> None:  # noqa: F811
    own, real = together(digits), Fleet._snapshot

    def broken(fleet, step, evaluate):
        fleet.ledger.state["trace"][1, 1, 3] = float("nan")
        fleet.ledger.state["trace"][0, 2, 4] = float("inf")
        return real(fleet, step, evaluate)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fleet, "_snapshot", broken)
        found = own.train_all(GRID, folders(tmp_path, 4))
    assert [isinstance(rows, Exploded) for rows in found] == [False, True, True, False]


def test_a_fleet_ends_when_all_its_trials_are_lost(digits, tmp_path) -> None:  # noqa: F811
    settings, reported = [{"clip": "hard"}, {"clip": "smooth"}], []

    def lost(which, done):
        reported.append((*which, done))
        if done == 2:
            raise TrialLost

    with pytest.raises(TrialLost):
        together(digits).train_all(settings, folders(tmp_path, 2), lost)
    assert reported == [(0, 0), (0, 1), (0, 2)]


@pytest.mark.parametrize("ends", ["well", "by an error"])
def test_a_fleet_leaves_no_memory_allocated(digits, tmp_path, ends) -> None:  # noqa: F811
    """On a GPU the next one needs it."""

    def tell(which, done):
        if done == 2 and ends != "well":
            raise RuntimeError("out of memory")

    gc.collect()
    gc.disable()
    try:
        (found,) = together(digits, (4,), 1).train_all([{"lr": 0.5}], folders(tmp_path, 1), tell)
        alive = [thing for thing in gc.get_objects() if type(thing) is Fleet]
    finally:
        gc.enable()
    assert isinstance(found, RuntimeError) == (ends != "well")
    assert not alive


def flat(shape: tuple[int, ...], outputs: int) -> nn.Module:
    """A model that begins at class 3, as no layer of torch's would by itself."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    nn.init.ones_(model[1].bias.data[3:4])
    return model


def test_a_model_of_ones_own_begins_as_its_factory_makes_it(digits, tmp_path) -> None:  # noqa: F811
    own = replace(together(digits, (1,)).plan, model=f"{__name__}:flat")
    (row,) = TogetherTrainer(digits, own, (1,), 2, 7, device="cpu")({"lr": 1e-6}, tmp_path)
    assert row["accuracy"] == float((digits.test_targets == 3).mean())
    assert row["accuracy_sd"] == 0


@pytest.mark.parametrize("kind", [Trainer, TogetherTrainer])
def test_rows_count_zero_information_records(digits, tmp_path, kind) -> None:  # noqa: F811
    """A step of a million saturates the outputs; a few records may still be near the middle when they are measured."""
    own = kind(digits, default_options(digits, model="mlp", sample_rate=0.2), (3, 6), 1, seed=1)
    rows = own({"lr": 1e6}, tmp_path / "a")
    assert rows[0]["zero_information"] >= len(digits.inputs) / 2
    assert rows[0]["exact_median"] > 1e299
    assert rows[1]["zero_information"] <= rows[0]["zero_information"]
    assert all(row["zero_information"] == 0 for row in own({"lr": 0.1}, tmp_path / "b"))
