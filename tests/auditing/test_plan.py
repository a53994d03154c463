"""Plans: defaults for each data set, models, losses, what is known before any training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import auditing
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import FEWEST
from reconbound.auditing import options as plans
from reconbound.auditing.options import Plan, default_plan, make_learner, make_loss, make_model
from reconbound.auditing.run import expected_seconds, floors_of
from reconbound.data import load_dataset


@pytest.mark.parametrize("name", ["digits", "breast_cancer", "wine", "diabetes"])
@pytest.mark.filterwarnings("ignore::reconbound.data.DataWarning")
def test_defaults_train_a_step(name: str) -> None:
    dataset = load_dataset(name)
    plan = default_plan(dataset)
    assert plan.runs >= 3
    learner = make_learner(dataset, plan, progress=False).repeat(1, 2)
    assert learner.features == len(dataset.scale)
    assert plan.runs * int(plan.steps * plan.sample_rate * plan.budget) >= FEWEST  # enough for a confidence limit


def test_defaults_by_size() -> None:
    small, large = default_plan(auditing.people(30)), default_plan(auditing.people(20000))
    assert small.sample_rate == 1.0
    assert large.sample_rate == pytest.approx(512 / 20000)
    for records in (30, 20000, 10**6):
        rate, steps, budget = (lambda p: (p.sample_rate, p.steps, p.budget))(default_plan(auditing.people(records)))
        assert 5 * int(steps * rate * budget + 1e-9) >= 25
    assert default_plan(auditing.people(), lr=0.25, runs=7).runs == 7


def test_defaults_of_a_part_keep_the_batch() -> None:
    """The noise is on a batch's sum: 3,000 of MNIST's 60,000 are trained by batches of 300, as the whole is."""
    whole_set = replace(auditing.pictures(), name="mnist")

    def of(records: int) -> Plan:
        few = np.broadcast_to(whole_set.inputs[:1], (records, *whole_set.shape))
        return default_plan(replace(whole_set, inputs=few, targets=np.zeros(records, dtype=np.int64)))

    full, half, small, tiny = (of(n) for n in (60_000, 30_000, 3_000, 100))
    assert (full.sample_rate, full.steps) == (0.005, 400)
    assert (half.sample_rate, half.steps) == (pytest.approx(0.01), 400)
    assert (small.sample_rate, small.steps) == (pytest.approx(0.1), 150)
    assert (tiny.sample_rate, tiny.steps) == (pytest.approx(0.32), 50)
    for plan in (full, half, small, tiny):
        assert (plan.noise_multiplier, plan.lr) == (full.noise_multiplier, full.lr)
    for name in ("digits", "breast_cancer", "wine"):  # the whole sets are what the defaults are meant for
        found = load_dataset(name)
        assert plans._WHOLE[name] == len(found.inputs)
        assert default_plan(found).sample_rate == plans._OWN[name]["sample_rate"]
    assert plans._WHOLE["diabetes"] == len(load_dataset("diabetes").inputs)


def test_models_are_what_was_asked_and_seeded() -> None:
    people, pictures = auditing.people(), auditing.pictures()
    assert sum(p.numel() for p in make_model(people, "linear").parameters()) == 8
    assert isinstance(make_model(pictures, "auto")[0], nn.Conv2d)
    one, same, other = (make_model(people, "mlp", seed=s).state_dict()["1.weight"] for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    with pytest.raises(InputError, match="must be linear or mlp"):
        make_model(people, "cnn")
    for bad in ("forest", "no.such.module:f", "json:nothing", "json:loads", "auditing:plan"):
        with pytest.raises(InputError, match=r"^model must"):
            make_model(people, Plan(model=bad).model)


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


def test_plans_are_checked() -> None:
    for bad in ({"steps": 0}, {"runs": 1.5}, {"lr": -1}, {"momentum": 1}, {"sampler": "x"}, {"noise_multiplier": 0},
                {"budget": "some"}, {"seed": -1}, {"clip": "soft"}):  # fmt: skip
        with pytest.raises(InputError, match=f"^{next(iter(bad))} must"):
            Plan(**bad)


def test_expected_time_and_floors_need_no_training() -> None:
    people, plan = auditing.people(), auditing.plan()
    assert 0 < expected_seconds(people, plan) < 60
    assert 0 < expected_seconds(people, replace(plan, budget="every")) < 60
    assert floors_of(people, plan).dim == 2
