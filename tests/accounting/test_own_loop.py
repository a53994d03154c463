"""A ledger beside a training loop of one's own: what it refuses or warns of (Opacus's models: test_opacus.py)."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from own_loop import SETTING, data, losses, network
from reconbound import Account, FisherAccountant, PrivateLogisticRegression, PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor
from reconbound.fisher import StepOptions, step_information
from reconbound.validate import ReconboundWarning


def ledger(**changes: Any) -> FisherAccountant:
    account = {"records": 40, "features": 6, "steps": 50, "sample_rate": 0.2, **SETTING, **changes}
    return FisherAccountant(Account(**account))


@pytest.mark.parametrize("change", [{"noise_multiplier": 3.0}, {"max_grad_norm": 0.1}, {"clip": "smooth"}])
def test_information_of_another_mechanism_is_refused(change: dict[str, Any]) -> None:
    x, y = data()
    found = step_information(network(), losses, x, y, **{**SETTING, **change})
    (name,) = change
    kept = ledger()
    with pytest.raises(InputError, match=f"account's {name}"):
        kept.add(torch.arange(40), found)
    assert int(kept.measured().sum()) == 0


def run(kept: FisherAccountant, steps: int, weight: float = 1.0) -> None:
    x, y = data()
    torch.manual_seed(3)
    model = network()
    for _ in range(steps):
        batch = torch.nonzero(torch.rand(40) < 0.2).flatten()
        if len(batch):
            kept.add(batch, step_information(model, losses, x[batch], y[batch], **SETTING), weight=weight)


def test_partly_measured_run_is_reported() -> None:
    kept = ledger()
    run(kept, 10)
    assert "about" in " ".join(kept.mse_floor().notes)
    assert "of 50 steps measured so far" in " ".join(kept.mse_floor().notes)
    with pytest.warns(ReconboundWarning, match=r"measured over about [\d.]+ of its 50 steps: its floors are too high"):
        kept.finish_run()
    text = "not measured over all of their 50 steps"
    assert text in " ".join(kept.mse_floor().notes)
    assert text in " ".join(kept.summary()["caveats"])


def test_feature_floors_carry_it_too() -> None:
    kept = FisherAccountant(Account(1.0, 1.0, 0.2, records=40, features=6, steps=50, clip="hard"), diagonal="all")
    x, y = data()
    for average in (False, True):
        kept.add(
            torch.arange(8),
            step_information(network(), losses, x[:8], y[:8], **SETTING, options=StepOptions(diagonal=True)),
        )
        assert "of 50 steps measured so far" in " ".join(kept.feature_floors(average=average).notes)
    with pytest.warns(ReconboundWarning, match="too high"):
        kept.finish_run()
    for average in (False, True):
        assert "not measured over all of their 50 steps" in " ".join(kept.feature_floors(average=average).notes)


def test_records_that_were_never_measured_do_not_hide_the_others() -> None:
    """A record without a floor is reported as such, and the lowest floor is that of the other records."""
    kept = FisherAccountant(Account(1.0, 1.0, 0.2, records=40, features=6, steps=1, clip="hard"), diagonal="all")
    x, y = data()
    kept.add(
        torch.arange(8),
        step_information(network(), losses, x[:8], y[:8], **SETTING, options=StepOptions(diagonal=True)),
    )
    kept.finish_run()
    floors, features = kept.mse_floor(), kept.feature_floors()
    least = format_floor(float(floors.rmse[:8].min()))
    assert f"at least ±{least} (MSE {format_floor(float(floors.value[:8].min()))})" in str(floors)
    assert f"the median of 8 values is ±{format_floor(float(np.median(floors.rmse[:8])))}" in str(floors)
    assert "32 of 40 have no floor (0)" in str(floors)
    assert f"at least ±{format_floor(float(features.rmse[:8, 0].min()))}, " in str(features)
    assert "32 of 40 have no floor (0)" in str(features)


def test_indices_may_be_a_list_or_an_array() -> None:
    x, y = data()
    found = step_information(network(), losses, x[:8], y[:8], **SETTING)
    traces = []
    for indices in (torch.arange(8), list(range(8)), np.arange(8)):
        kept = ledger()
        kept.add(indices, found)
        traces.append(kept.trace())
    assert torch.equal(traces[0], traces[1])
    assert torch.equal(traces[0], traces[2])


def test_wrong_weight_is_reported() -> None:
    kept = ledger(steps=400)
    run(kept, 400, weight=5.0)
    with pytest.warns(ReconboundWarning, match="too low"):
        kept.finish_run()


def test_a_whole_run_is_not_suspected() -> None:
    kept = ledger()
    run(kept, 50)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.finish_run()
    assert not any("steps" in note for note in kept.mse_floor().notes)


@pytest.mark.parametrize("budget", [0.5, 2.0, "every", ("steps", 0.3)])
@pytest.mark.parametrize("sampler", ["poisson", "fixed", "shuffle"])
def test_private_sgd_measures_whole_runs(budget: Any, sampler: str) -> None:
    x, y = data()
    settings = Settings(1.0, 1.0, 0.15, sampler=sampler, budget=budget, seed=1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*a run was measured over about.*")
        learner = PrivateSGD(network(), losses, x, y, settings, progress=False, check=False).fit(60)
    assert learner.accountant is not None
    assert not any("measured over all" in note for note in learner.accountant.mse_floor().notes)


@pytest.mark.parametrize("missing", ["weights", "trace_error"])
def test_tensors_of_another_version_are_refused(missing: str) -> None:
    kept, other = ledger(), ledger()
    run(kept, 10)
    before = {name: value for name, value in kept.state().items() if name != missing}
    with pytest.raises(InputError, match=f"{missing} must be a tensor of shape .* this version of reconbound"):
        other.restore(before, 0)
    assert int(other.measured().sum()) == 0


def test_numbers_must_be_numbers() -> None:
    with pytest.raises(InputError, match="noise_multiplier must be a number, got '1'"):
        Settings("1", 1.0, 0.1)  # type: ignore[arg-type]
    for name in ("noise_multiplier", "max_grad_norm", "sample_rate"):
        with pytest.raises(InputError, match=f"{name} must be a number, got '1'"):
            ledger(**{name: "1"})


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda: Account(1.0, 1.0, 0.2, records=40, features=6, steps="50"), "steps must be a number, got '50'"),
        (lambda: Account(1.0, "1", 0.2, records=40, features=6, steps=50), "max_grad_norm must be a number, got '1'"),
        (lambda: run(ledger(), 1, weight="1"), "weight must be a number, got '1'"),
        (
            lambda: FisherAccountant(Account(1.0, 1.0, 0.2, records=40, features=6, steps=50), feature_scale="16"),
            "feature_scale must be .*'16'",
        ),
        (lambda: PrivateSGD(network(), losses, *data(), Settings(1.0, 1.0, 0.2)).fit(steps="3"), "steps .*, got '3'"),
        (
            lambda: PrivateLogisticRegression(target_epsilon="1", data_norm=3.0).fit(*data()),
            "target_epsilon must be a number, got '1'",
        ),
    ],
)
def test_numbers_written_as_text_are_refused(wrong: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        wrong()


def test_guarantee_states_its_units_if_floors_have_others() -> None:
    """Floors in grey levels from 0 to 16 beside a guarantee for [0, 1] would be compared as they stand."""
    kept = FisherAccountant(ledger().account, feature_scale=16.0)
    with pytest.warns(ReconboundWarning, match=r"\[0, 1\].* feature_scale.* give low and high"):
        kept.guarantee()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.guarantee(low=0.0, high=16.0)["lecam"].rmse == pytest.approx(
            16 * ledger().guarantee()["lecam"].rmse
        )


def test_shuffled_epochs_measure_only_their_batches() -> None:
    """Within an epoch the parameters depend on whether the record was seen: at another step they differ."""
    x, y = data()
    kept = FisherAccountant(Account(1.0, 1.0, 0.2, records=40, features=6, steps=50, clip="hard", sampler="shuffle"))
    found = step_information(network(), losses, x[:8], y[:8], **SETTING)
    with pytest.raises(InputError, match="stratified must be False with shuffled epochs"):
        kept.add(torch.arange(8), found, weight=0.5, stratified=True)
    assert int(kept.measured().sum()) == 0
    kept.add(torch.arange(8), found)
