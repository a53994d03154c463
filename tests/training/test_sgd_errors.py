"""Errors of the learner say what happened, and its progress bar."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from learning import (
    CLASSES,
    FEATURES,
    data,
    flat,
    learner,
    losses,
    network,
    same_state,
    settings,
)
from reconbound._internal import files
from reconbound._internal.checks import InputError
from reconbound.training import private_sgd as sgd_module
from reconbound.training.checkpoint import NAMES, CheckpointError
from reconbound.training.private_sgd import PrivateSGD, TrainingError
from sealing import sealed

# --- errors ----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("budget", [100.0, "every"])
def test_infinite_loss_names_its_record(tmp_path, value: float, budget) -> None:
    x, y = data()
    good = learner(budget=budget, checkpoint=tmp_path, every=2).fit(20)
    x[17, 2] = value
    bad = learner(budget=budget, records=(x, y))
    with pytest.raises(TrainingError, match=r"run 0, step \d+: record 17 has (loss|gradient norm) (nan|inf)"):
        bad.fit(20)
    assert bool(torch.isfinite(flat(bad.model)).all())
    assert same_state(good, learner(budget=budget, checkpoint=tmp_path, every=2).fit(20))


def test_exploding_model_raises_and_keeps_the_last_good_state(tmp_path) -> None:
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=1e38, momentum=0.9), "checkpoint": tmp_path, "every": 1}
    with pytest.raises(TrainingError, match=r"exploded|largest parameter .*the last good state is in"):
        learner(**options).fit(40)
    newest = learner(**options)
    with pytest.raises(TrainingError):
        newest.fit(40)
    files = list(tmp_path.glob("checkpoint-*.safetensors"))
    from reconbound._internal.files import unsealed

    for path in files:
        tensors, _ = unsealed(path)
        assert all(bool(torch.isfinite(v).all()) for name, v in tensors.items() if name.startswith("model/"))


def test_overflowing_gradient_raises() -> None:
    """‖g‖² overflows float32 at 1e19, where the clip factor would be 0 and the record's information with it. Norms are
    taken in float64; products with J, in float32, still overflow."""
    x, y = data()
    huge = lambda out, target: losses(out, target) * 1e25  # noqa: E731
    with pytest.raises(TrainingError, match="has information nan"):
        PrivateSGD(network(), huge, x, y, settings(), check=False).fit(3)
    PrivateSGD(network(), huge, x, y, replace(settings(), rules=None), check=False).fit(3)  # clipped as any other


def test_label_out_of_range_names_its_record() -> None:
    x, y = data()
    y[11] = CLASSES
    with pytest.raises(TrainingError, match="record 11 has an index that is out of range"):
        learner(records=(x, y), sample_rate=1.0).fit(3)


def test_data_that_change_size_while_training(tmp_path) -> None:
    x, y = data()
    inputs = {"input": x}
    whole = PrivateSGD(network(), losses, {"input": x}, y, settings(), check=False).fit(6)

    def shrink(model: nn.Module) -> dict[str, float]:
        if one.step == 3:
            inputs["input"] = x[:20]
        return {}

    options = {"checkpoint": tmp_path, "every": 2, "check": False}
    one = PrivateSGD(network(), losses, inputs, y, settings(), evaluate=shrink, evaluate_every=1, **options)
    with pytest.raises(TrainingError, match=r"the data had 24 records and have \[20, 24\] now"):
        one.fit(6)
    again = PrivateSGD(network(), losses, {"input": x}, y, settings(), **options).fit(6)
    assert same_state(again, whole)


def test_rows_must_match() -> None:
    x, y = data()
    for inputs, targets in ((x[:5], y), (x[:0], y[:0]), (torch.tensor(1.0), y)):
        with pytest.raises(InputError, match="one row for each record"):
            PrivateSGD(network(), losses, inputs, targets, settings())


def test_models_that_mix_records_are_refused() -> None:
    model = nn.Sequential(nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES))
    with pytest.raises(ValueError, match="BatchNorm1d"):
        learner(model, check=True)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": 0.0},
        {"sample_rate": 1.5},
        {"max_grad_norm": -1},
        {"clip": "soft"},
        {"probes": 0},
        {"seed": -3},
        {"micro_batch": 0},
        {"budget": 0},
    ],
)
def test_impossible_settings_are_refused(wrong: dict) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        settings(**wrong)


def test_removed_checkpoint_raises(tmp_path) -> None:
    one = learner(checkpoint=tmp_path, every=1).fit(2)
    for path in tmp_path.glob("checkpoint-*"):
        path.unlink()
    with pytest.raises(ValueError, match="have been removed"):
        one.fit(2)


@pytest.mark.parametrize(
    "change",
    [{"step": math.inf}, {"run": -math.inf}, {"seed": math.nan}, {"step": "x"}, {"history": [1]}, {"state": {}}],
    ids=str,
)
def test_sealed_checkpoint_with_other_facts_is_refused_by_its_path(tmp_path, change: dict) -> None:
    """Its digest is right, so that only its content tells. JSON has Infinity and NaN."""
    learner(seed=None, checkpoint=tmp_path, every=4).fit(12)
    newest = max((tmp_path / name for name in NAMES), key=lambda p: files.unsealed(p)[1]["order"])
    tensors, facts = files.unsealed(newest)
    newest.write_bytes(sealed(tensors, {**facts, **change}))
    with pytest.raises(CheckpointError, match=rf"{newest.name} is not as reconbound wrote it \(\w+Error: .*bring"):
        learner(seed=None, checkpoint=tmp_path, every=4).fit(12)


# --- progress --------------------------------------------------------------------------------


def test_no_progress_bar_without_terminal(capfd) -> None:
    learner().fit(3)
    out, err = capfd.readouterr()
    assert out == ""
    assert err == ""


@pytest.mark.parametrize("wanted", [True, False])
def test_progress_bar_on_a_terminal_unless_switched_off(monkeypatch, wanted: bool) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sgd_module.progress_bar.__wrapped__.__globals__["sys"], "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    learner(progress=wanted).fit(3)
    assert ("training, 1 run" in terminal.getvalue()) is wanted


def test_inputs_of_wrong_width_name_module_and_shape() -> None:
    x, y = data()
    with pytest.raises(ValueError, match=r"module '0' \(Linear\) does not take .*a record has the shape inputs \(3,\)"):
        learner(records=(x[:, :3], y), check=True)
