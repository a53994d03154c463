"""Options of an audit: defaults for each data set, models, losses, expected time and floors."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import auditing
from reconbound._internal.checks import InputError
from reconbound.accounting.confidence import FEWEST
from reconbound.auditing import options as audit_options
from reconbound.auditing.models import make_loss, make_model
from reconbound.auditing.options import AuditOptions, default_options, make_learner
from reconbound.auditing.run import expected_seconds, floors_of
from reconbound.data import load_dataset


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "wine", "diabetes"])
@pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
def test_defaults_train_a_step(name: str) -> None:
    dataset = load_dataset(name)
    options = default_options(dataset)
    assert options.runs >= 3
    learner = make_learner(dataset, options, progress=False).repeat(1, 2)
    assert learner.features == len(dataset.scale)
    assert (
        options.runs * int(options.steps * options.settings.sample_rate * options.settings.budget) >= FEWEST
    )  # enough for a confidence limit


def _rate_steps_budget(options: AuditOptions) -> tuple[Any, ...]:
    return options.settings.sample_rate, options.steps, options.settings.budget


def test_defaults_by_size() -> None:
    small, large = default_options(auditing.people(30)), default_options(auditing.people(20000))
    assert small.settings.sample_rate == 1.0
    assert large.settings.sample_rate == pytest.approx(512 / 20000)
    for records in (30, 20000, 10**6):
        rate, steps, budget = _rate_steps_budget(default_options(auditing.people(records)))
        assert 5 * int(steps * rate * budget + 1e-9) >= 25
    assert default_options(auditing.people(), lr=0.25, runs=7).runs == 7


def test_defaults_of_a_part_keep_the_batch() -> None:
    """The noise is on a batch's sum: 3,000 of MNIST's 60,000 are trained by batches of 300, as the whole is."""
    whole_set = replace(auditing.pictures(), name="mnist")

    def of(records: int) -> AuditOptions:
        few = np.broadcast_to(whole_set.inputs[:1], (records, *whole_set.shape))
        return default_options(replace(whole_set, inputs=few, targets=np.zeros(records, dtype=np.int64)))

    full, half, small, tiny = (of(n) for n in (60_000, 30_000, 3_000, 100))
    assert (full.settings.sample_rate, full.steps) == (0.005, 400)
    assert (half.settings.sample_rate, half.steps) == (pytest.approx(0.01), 400)
    assert (small.settings.sample_rate, small.steps) == (pytest.approx(0.1), 150)
    assert (tiny.settings.sample_rate, tiny.steps) == (pytest.approx(0.32), 50)
    for options in (full, half, small, tiny):
        assert (options.settings.noise_multiplier, options.settings.lr) == (
            full.settings.noise_multiplier,
            full.settings.lr,
        )
    for name in ("digits", "breast_cancer", "wine"):  # the whole sets are what the defaults are meant for
        found = load_dataset(name)
        assert audit_options._WHOLE[name] == len(found.inputs)
        assert default_options(found).settings.sample_rate == audit_options._OWN[name]["sample_rate"]
    assert audit_options._WHOLE["diabetes"] == len(load_dataset("diabetes").inputs)


def test_models_by_name_and_seed() -> None:
    people, pictures = auditing.people(), auditing.pictures()
    assert sum(p.numel() for p in make_model(people, "linear").parameters()) == 8
    assert isinstance(make_model(pictures, "auto")[0], nn.Conv2d)
    one, same, other = (make_model(people, "mlp", seed=s).state_dict()["1.weight"] for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(InputError, match="must be linear or mlp"):
        make_model(people, "cnn")
    for bad in ("forest", "no.such.module:f", "json:nothing", "json:loads", "auditing:options"):
        with pytest.raises(InputError, match=r"^model must"):
            make_model(people, AuditOptions(model=bad).model)


def test_loss_is_one_number_a_record() -> None:
    people = auditing.people()
    x, y = torch.from_numpy(people.inputs), torch.from_numpy(people.targets)
    outputs = make_model(people, "linear")(x)
    expected = -outputs.log_softmax(1)[torch.arange(40), y]
    torch.testing.assert_close(make_loss(people)(outputs, y), expected)
    numbers = replace(people, task="number", targets=people.inputs[:, 0].copy(),
                      test_targets=people.test_inputs[:, 0].copy())  # fmt: skip
    found = make_loss(numbers)(torch.tensor([[3.0], [1.0]]), torch.tensor([1.0, 1.0]))
    assert found.tolist() == [2.0, 0.0]


def test_changed_settings_keep_the_rest() -> None:
    options = default_options(auditing.people(), runs=2, lr=0.25)
    changed = options.with_changes(sampler="fixed", seed=5, steps=7)
    assert (changed.runs, changed.steps, changed.settings.lr, changed.settings.seed) == (2, 7, 0.25, 5)
    assert (options.settings.rules, changed.settings.rules) == (("exact", "paper"), ("fixed", "paper"))
    assert changed.with_changes(settings=options.settings, steps=options.steps) == options


def test_wrong_options_are_refused() -> None:
    for bad in ({"steps": 0}, {"runs": 1.5}, {"lr": -1}, {"momentum": 1}, {"sampler": "x"}, {"noise_multiplier": 0},
                {"budget": "some"}, {"seed": -1}, {"clip": "soft"}, {"settings": 3}):  # fmt: skip
        with pytest.raises(InputError, match=f"^{next(iter(bad))} must"):
            AuditOptions().with_changes(**bad)
    with pytest.raises(InputError, match=r"^options must be fields .* 'noise'"):
        AuditOptions().with_changes(noise=1.0)


def test_expected_time_and_floors_need_no_training() -> None:
    people, options = auditing.people(), auditing.options()
    assert 0 < expected_seconds(people, options) < 60
    assert 0 < expected_seconds(people, options.with_changes(budget="every")) < 60
    assert floors_of(people, options).dim == 2
