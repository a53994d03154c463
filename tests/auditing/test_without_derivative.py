"""Models without a derivative by the record are audited too: by divergences alone, with a caveat that says so."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import auditing
from reconbound.auditing.leakage import leakage_of
from reconbound.auditing.models import check_model
from reconbound.auditing.options import make_learner, open_folder, settle, without_derivative
from reconbound.auditing.run import expected_seconds, facts_of, train
from reconbound.sweep.trial import Trainer
from reconbound.validate import ModelError

pytestmark = pytest.mark.filterwarnings("ignore::reconbound.validate.KinkWarning")


@pytest.mark.parametrize(
    ("model", "reason"),
    [("binned", "module '0' (Bins) uses floor"), ("looked_up", "the gradient does not depend on the inputs")],
)
def test_a_model_without_derivative_keeps_divergences_only(tmp_path: Path, model: str, reason: str) -> None:
    people, asked = auditing.people(), auditing.options(model=f"auditing:{model}", budget=8.0)
    caveats = check_model(people, asked.model)
    assert caveats.keys() == {"derivative"}
    assert caveats["derivative"].startswith(f"No unbiased floors: {reason}")
    options = without_derivative(asked, caveats)
    assert options.settings.rules is None
    assert options.to_dict() == asked.to_dict()
    assert options.with_changes(sampler="fixed", runs=1).settings.rules is None
    assert without_derivative(asked, {"kinks": "some"}) == asked
    settled = settle(open_folder(tmp_path / "a"), people, options)
    measured = train(people, settled, tmp_path / "a")
    found = leakage_of(people, settled, measured)
    assert found.dfil.shape == (0, 40)
    assert found.upper is found.diagonal is None
    assert [world["name"] for world in found.facts["worlds"]] == ["removed", "age", "income", "private"]
    assert bool((found.nats[[0, 1, 3]] > 0).any(1).all())
    assert bool((found.nats_upper >= found.nats).all())
    assert len(found.accuracy) == len(found.accuracy_step) == 12
    assert len(found.history) == len(found.history_step) == 0
    assert found.guess.shape == (2,)
    run = facts_of(people, settled, measured.learner, seed_from="")
    assert run.data["features"] == 2
    assert run.guarantee["epsilon"] == make_guarantee(asked)["epsilon"]
    assert 0 < expected_seconds(people, options) < 60


def make_guarantee(options: object) -> dict:
    learner = make_learner(auditing.people(), options, check=False).fit(12)
    return learner.accountant.guarantee(low=0.0, high=1.0).to_dict()


def test_the_lookup_is_exact_about_what_the_model_does_not_see(tmp_path: Path) -> None:
    """A model that looks at the age alone tells nothing of the income, and no more of both than of the age."""
    people = auditing.people()
    options = auditing.options(model="auditing:looked_up", rules=None, budget=8.0)
    ledger = make_learner(people, options).repeat(2, 12).accountant.divergences
    assert bool((ledger.divergence("income") == 0).all())
    same = torch.from_numpy((people.inputs[:, 0] * 10).astype(int) == 5)
    assert 0 < same.sum() < 40
    assert bool((ledger.divergence("age")[same] == 0).all())
    assert bool((ledger.divergence("age")[~same] > 0).all())


def test_what_clipping_needs_is_still_refused() -> None:
    with pytest.raises(ModelError, match="couples the records of a batch"):
        check_model(auditing.people(), "auditing:mixing")


def test_caveats_do_not_depend_on_the_records() -> None:
    """They are published. By how much rounding changed the loss of the first three records was told there."""
    found = [check_model(auditing.people(seed=seed), "auditing:far") for seed in (0, 8)]
    assert found[0].keys() == {"derivative"}
    assert "differs by" in found[0]["derivative"]
    assert found[0] == found[1]


def test_a_caveat_of_the_datas_records_only_is_refused() -> None:
    people = auditing.people(seed=1)
    assert people.inputs[0, 0] == np.float32(0.5118216276168823)
    with pytest.raises(ModelError, match=r"must not depend on a record.*on the data's records only: No unbiased"):
        check_model(people, "auditing:sometimes")
    assert check_model(auditing.people(seed=8), "auditing:sometimes") == {}


def test_kinks_are_audited_as_before() -> None:
    people = auditing.people()
    assert check_model(people, "auditing:kinked").keys() == {"kinks"}
    assert check_model(people, "mlp") == {}
    learner = make_learner(people, auditing.options(model="auditing:kinked"), progress=False).repeat(1, 4)
    assert learner.accountant.account.kept_rules == ("exact", "paper")


def test_a_sweep_needs_the_derivative() -> None:
    plan = auditing.options(model="auditing:binned")
    with pytest.raises(ModelError, match=r"a sweep compares unbiased floors\. No unbiased floors: module '0'"):
        Trainer(auditing.people(), plan, [4], 1, 3).caveats()
