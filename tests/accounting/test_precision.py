"""Precision of floors: statements, warnings, and the reason where there is no limit."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_accountant import account, info

from learning import learner
from reconbound._internal.checks import InputError
from reconbound.accounting.accountant import Chosen, FisherAccountant
from reconbound.validate import ReconboundWarning

#: these ledgers hold a few measurements, not whole runs
pytestmark = pytest.mark.filterwarnings("ignore:a run was measured over about")

COARSE = "floors from so few measurements"


def without_warnings(call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return call()


def filled(values, diagonal="none", weight: float = 2.5, runs: int = 1) -> FisherAccountant:
    """A ledger of six records, measured with these values one after the other, in each run."""
    ledger = FisherAccountant(account(rules=("none",)), diagonal=diagonal)
    for _ in range(runs):
        for value in values:
            ledger.add(torch.arange(6), info(value * torch.ones(6), torch.zeros(6)), weight=weight, stratified=True)
        ledger.finish_run()
    return ledger


def test_single_measurement_warns_once_per_run() -> None:
    ledger = filled([1.0])
    with pytest.warns(ReconboundWarning, match=f"{COARSE}.*budget.*repeat"):
        bound = ledger.mse_floor()
    error = float((ledger.standard_error() / ledger.dfil())[0])  # √(1 − π) of a rare draw, and the probes' error
    assert error == pytest.approx(math.sqrt(0.9 + 0.1 * 0.1**2))
    output = f"estimated: measured 1 time per record (median), relative standard error {100 * error:.0f} % (median)"
    output += " of measuring only: runs differ by more"
    output += "; in simulated trainings up to 85 % of the floors from one run were more than 2 times too high"
    assert any(text.startswith(output) for text in bound.assumes)
    assert output in str(bound)
    without_warnings(ledger.mse_floor)
    without_warnings(lambda: ledger.mse_floor("none"))
    ledger.add(torch.arange(6), info(torch.ones(6), torch.zeros(6)), weight=2.5, stratified=True)
    ledger.finish_run()  # a second run that says the same: no error left
    assert "relative standard error 0 %" in str(without_warnings(ledger.mse_floor))


def test_a_single_run_warns_however_well_it_was_measured() -> None:
    """A third of such floors is more than twice too high (docs/tutorials/private_sgd.md, one run, b = 1)."""
    ledger = filled([1.0, 1.3, 0.9, 1.1, 1.2, 0.8] * 2)
    with pytest.warns(ReconboundWarning, match="floors of one run are more often too high than too low.*up to 57 %"):
        bound = ledger.mse_floor()
    assert bound.estimate
    assert str(bound).startswith("dfil: by an estimate an unbiased attacker errs by at least")
    error = float((ledger.standard_error() / ledger.dfil())[0])
    assert error < 0.5
    text = f"measured 12 times per record (median), relative standard error {100 * error:.0f} % (median)"
    assert text in " ".join(bound.assumes)


def test_the_warning_points_at_the_line_that_asked() -> None:
    with pytest.warns(ReconboundWarning) as found:
        filled([1.0]).mse_floor()
    assert found[0].filename == __file__


# --- features ----------------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal", ["all", [4, 1]])
def test_errors_of_features_are_the_formula(diagonal) -> None:
    """√Σx² for one run, sd/√R over runs; the same after merging and saving."""
    values = [[1.0, 4.0], [3.0, 2.0], [5.0, 1.0], [0.5, 0.1]]
    share = np.array([1.0, 2.0, 3.0]) / 6
    one = filled(values[0], diagonal)
    expected = 2.5 * math.sqrt(1 + 16) * share
    np.testing.assert_allclose(one.feature_standard_error()[0].numpy(), expected, rtol=1e-6)

    ledgers = [filled(v, diagonal) for v in values]
    together = filled(values[0], diagonal)
    for v in values[1:]:
        for x in v:
            together.add(torch.arange(6), info(x * torch.ones(6), torch.zeros(6)), weight=2.5, stratified=True)
        together.finish_run()
    sums = 2.5 * np.array([sum(v) for v in values])
    expected = sums.std(ddof=1) / 2 * share
    np.testing.assert_allclose(together.feature_standard_error()[1].numpy(), expected, rtol=1e-5)
    ledgers[0].merge(ledgers[1])
    ledgers[2].merge(ledgers[3])
    ledgers[0].merge(ledgers[2])
    np.testing.assert_allclose(ledgers[0].feature_standard_error()[1].numpy(), expected, rtol=1e-5)
    empty = FisherAccountant(one.account, diagonal=diagonal)
    empty.merge(ledgers[0])
    np.testing.assert_allclose(empty.feature_standard_error()[1].numpy(), expected, rtol=1e-5)


@pytest.mark.slow
def test_feature_error_of_one_run_covers_spread_of_runs() -> None:
    """The formula of one run against the spread of 40 estimates of one and the same trajectory (lr 0)."""
    found, errors = [], []
    for seed in range(40):
        one = learner(seed=seed, diagonal="all", budget=2.0, lr=1e-12, noise_multiplier=4.0).fit(steps=12).accountant
        found.append(1 / one.feature_floors().value)
        errors.append(one.feature_standard_error().numpy())
    spread, output = np.std(found, axis=0, ddof=1), np.sqrt(np.mean(np.square(errors), axis=0))
    ratio = output / spread
    assert 0.9 < np.median(ratio) < 2.0  # no less, and not many times more
    assert (ratio > 0.7).mean() > 0.98


def test_feature_floors_state_error_and_warn() -> None:
    ledger = filled([1.0], "all")
    with pytest.warns(ReconboundWarning, match=COARSE):
        bound = ledger.feature_floors()
    assert "measured 1 time per record (median), relative standard error of a feature 100 %" in " ".join(bound.assumes)
    well = filled([1.0] * 9, "all")
    with pytest.warns(ReconboundWarning, match="floors of one run"):
        assert "relative standard error of a feature 33 %" in str(well.feature_floors())
    assert "estimated" not in " ".join(
        without_warnings(lambda: filled([1.0], "all").feature_floors(average=True)).assumes
    )
    with pytest.raises(InputError, match="diagonal"):
        filled([1.0], "average").feature_standard_error()


def test_a_record_never_measured_has_an_infinite_error_of_features() -> None:
    ledger = FisherAccountant(account(), diagonal="all")
    ledger.add(torch.tensor([0]), info(torch.ones(1), torch.zeros(1)))
    assert torch.isinf(ledger.feature_standard_error()).all(1).tolist() == [False] + [True] * 5


def test_chosen_records_of_one_run_have_no_error() -> None:
    few = learner(diagonal=Chosen(2, 1)).repeat(runs=2, steps=8).accountant
    with pytest.warns(ReconboundWarning, match=COARSE):
        assert "standard error of a feature not known" in str(few.feature_floors())


def test_average_is_not_reported_per_record() -> None:
    ledger = filled([1.0], "all")
    average, each = ledger.feature_floors(average=True), ledger.feature_floors()
    assert "mean over 6 records: single ones may be known better" in str(average)
    assert "most exposed" not in str(average)
    assert "most exposed in it of 6" in str(each)
    assert "single ones" not in str(each)
    assert each.coordinates == "each"


def test_loaded_ledger_keeps_chosen_records(tmp_path) -> None:
    ledger = learner(diagonal=Chosen(2, 1)).repeat(runs=3, steps=8).accountant
    assert ledger is not None
    ledger.save(tmp_path / "ledger")
    output = str(ledger.feature_floors())
    assert "measured 16 times per record" in output  # at each of 8 steps of the two runs after the choice
    assert str(FisherAccountant.load(tmp_path / "ledger").feature_floors()) == output


# --- limits ------------------------------------------------------------------------------------


def test_missing_limit_is_explained() -> None:
    few = filled([1.0, 1.1], runs=3)
    with pytest.warns(ReconboundWarning, match="6 of 6 records were measured fewer than 25 times over all runs: more"):
        assert bool(torch.isinf(few.upper()).all())
    without_warnings(few.upper)  # once
    found = few.summary()
    assert found["floor_lower_limit"] is None
    assert "fewer than 25 times" in found["no_limit_because"]

    wild = FisherAccountant(account(rules=("none",)))
    for scale in (1.0, 40.0, 0.01):
        for _ in range(10):
            wild.add(torch.arange(6), info(scale * torch.ones(6), torch.zeros(6)), weight=2.5, stratified=True)
        wild.finish_run()
    with pytest.warns(ReconboundWarning, match="the runs differ too much .median relative standard error 0.9"):
        wild.upper()
    assert wild.summary()["floor_lower_limit"] is None

    good = filled([1.0] * 10, runs=3)
    assert bool(torch.isfinite(without_warnings(good.upper)).all())
    found = good.summary()
    assert found["no_limit_because"] is None
    assert found["floor_lower_limit"]["lowest"] == pytest.approx(1 / float(good.upper().max()))


def test_lower_limit_is_printed_before_the_estimate() -> None:
    """The estimate was printed as the floor, and the limits after all else about it."""
    runs = FisherAccountant(account(rules=("none",)))
    for scale in (1.0, 1.2, 0.8):
        for _ in range(10):
            runs.add(torch.arange(6), info(scale * torch.ones(6), torch.zeros(6)), weight=2.5, stratified=True)
        runs.finish_run()
    bound = without_warnings(runs.mse_floor)
    lowest = 1 / float(runs.upper().max())
    assert lowest < 0.7 * bound.value.min()
    text = str(bound)
    printed = float(text.partition("lowest MSE ")[2].partition(";")[0])
    assert lowest * 0.99 < printed <= lowest
    assert text.startswith("dfil: lower limits at 95 % confidence: lowest MSE ")
    assert text.index("lower limits") < text.index("by an estimate")
    assert text.count("lower limits") == 1
    assert bound.notes[0] == bound.assumes[0] == bound.limits
    one = filled([1.0] * 10)
    with pytest.warns(ReconboundWarning, match="floors of one run"):
        alone = one.mse_floor()
    assert alone.limits == ""
    assert str(alone).startswith("dfil: by an estimate ")
    assert "up to 57 % of the floors from one run were more than 2 times too high" in str(alone)


# --- never measured ----------------------------------------------------------------------------


def test_printed_floors_count_unmeasured_records() -> None:
    ledger = FisherAccountant(account())
    ledger.add(torch.tensor([0, 1]), info(torch.ones(2), torch.zeros(2)), weight=0.25)
    with pytest.warns(ReconboundWarning, match="floors of one run"):
        bound = ledger.mse_floor()
    assert "4 of 6 records were never measured: no floor" in str(bound)
    assert ledger.summary()["relative_standard_error_median"] < 0.5  # of those that were
    assert ledger.dfil()[2:].tolist() == bound.value[2:].tolist() == [0.0] * 4


def test_bound_repr_shows_its_numbers() -> None:
    bound = filled([1.0] * 6).mse_floor()
    with pytest.raises(TypeError, match=r"\.value"):
        bound[:2]
    assert replace(bound, notes=()).notes == ()


def test_record_first_measured_in_open_run_has_no_floor() -> None:
    """Floors speak of the finished runs, in which it was not measured: to say that it tells nothing would be wrong."""
    ledger = FisherAccountant(account(), diagonal="all", feature_scale=10.0)
    ledger.add(torch.arange(5), info(torch.ones(5), torch.zeros(5)))
    ledger.finish_run()
    ledger.add(torch.tensor([5]), info(torch.ones(1), torch.zeros(1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # such as that a floor overflows
        floors, features = ledger.mse_floor(), ledger.feature_floors()
    assert (floors.value == 0).tolist() == [False] * 5 + [True]
    assert (features.value == 0).all(1).tolist() == [False] * 5 + [True]
    assert math.isinf(ledger.standard_error()[5])
    assert bool(torch.isinf(ledger.feature_standard_error()[5]).all())
    assert "1 of 6 records were never measured" in str(floors)
    assert sorted(e.record for e in ledger.most_exposed(6)) == [0, 1, 2, 3, 4]
    assert ledger.summary()["never_measured"] == 1
    ledger.finish_run()
    assert (ledger.mse_floor().value > 0).all()
    assert ledger.measured().tolist() == [1] * 6


def test_divergence_is_suspected_of_the_records_that_were_measured() -> None:
    """One of four with zero information is no reason, however many were never measured; three of four are."""
    for values, suspected in (([0.0, 1, 1, 1], False), ([0.0, 0, 0, 1], True)):
        ledger = FisherAccountant(account(20, rules=("none",)))
        ledger.add(torch.arange(4), info(torch.tensor(values), torch.zeros(4)), weight=0.25)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            ledger.mse_floor()
        assert any("diverged" in str(one.message) for one in found) is suspected
