"""A ledger of one's own: what would be wrong and not be seen, and what is kept of runs that were not whole."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_accountant import info
from torch import Tensor

from reconbound import Account, FisherAccountant
from reconbound._internal.checks import InputError
from reconbound.validate import ReconboundWarning


def small(records: int = 8, **changes: Any) -> FisherAccountant:
    diagonal = changes.pop("diagonal", "none")
    about = {"records": records, "features": 3, "steps": 10, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    return FisherAccountant(Account(**{**about, "sample_rate": 0.25, **changes}), diagonal=diagonal)


def ones(records: int = 8) -> Any:
    return info(torch.ones(records), torch.zeros(records))


@pytest.mark.parametrize("sampler", ["poisson", "fixed"])
def test_a_ledger_of_a_few_records_is_not_suspected(sampler: str) -> None:
    """As the closer look of an audit keeps them: fewer records than a batch has, each once in every block."""
    kept = small(sampler=sampler, steps=1000, sample_rate=0.02)
    for _ in range(10):
        kept.add(torch.arange(8), ones(), weight=100 * 0.02, stratified=True)
    assert kept.traces.steps_covered() == pytest.approx(1000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kept.finish_run()


def test_epoch_with_a_partial_batch_has_as_many_steps() -> None:
    kept = small(10, sampler="shuffle", sample_rate=0.4)
    for first, after in ((0, 4), (4, 8), (8, 10)):
        kept.add(torch.arange(first, after), ones(after - first))
    assert kept.traces.steps_covered() == pytest.approx(3)


def test_a_subset_of_the_records_wants_a_ledger_of_its_own() -> None:
    kept = small(80, steps=400)
    for _ in range(400):
        kept.add(torch.arange(8), ones(), weight=0.25)
    with pytest.warns(ReconboundWarning, match="and the records that are measured"):
        kept.finish_run()


def test_a_chance_above_one_is_refused() -> None:
    """A weight below q, as when a share p is given in place of 1/p: the floors would be too high."""
    kept = small()
    with pytest.raises(InputError, match=r"weight must be at least the sample rate, 0.25.*got 0.2"):
        kept.add(torch.arange(8), ones(), weight=0.2)
    assert int(kept.measured().sum()) == 0
    kept.add(torch.arange(8), ones(), weight=0.25)


def test_records_measured_at_some_steps_stay_partial() -> None:
    """Blocks of a run differ by a step in length: two steps, then one. Limits still need 25 measurements."""
    kept = small()
    for _ in range(3):
        kept.add(torch.arange(8), ones(), weight=0.5, stratified=True)
        kept.add(torch.arange(8), ones(), weight=0.25, stratified=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kept.finish_run()
    assert kept.traces.sampled
    assert bool(torch.isinf(kept.upper(warn=False)).all())


@pytest.mark.parametrize("indices", [torch.zeros(0, dtype=torch.int64), torch.tensor(3), torch.arange(8)[:, None]])
def test_indices_of_wrong_shape_leave_ledger_unchanged(indices: Tensor) -> None:
    kept = small()
    with pytest.raises(InputError, match="indices"):
        kept.add(indices, ones(1 if indices.dim() == 0 else 8))
    assert all(float(v.double().abs().sum()) == 0 for v in kept.state().values())


def test_summary_reports_partly_measured_run() -> None:
    kept = small(diagonal="all", steps=400)
    kept.add(torch.arange(8), ones())
    so_far = "a run in progress: about 4 of 400 steps measured so far"
    assert so_far in kept.feature_floors().notes
    assert so_far in kept.feature_floors(average=True).notes
    with pytest.warns(ReconboundWarning, match="too high"):
        kept.finish_run()
    text = "not measured over all of their 400 steps"
    assert text in str(kept.feature_floors())
    assert any(text in one for one in kept.summary()["caveats"])


def test_a_ledger_is_not_merged_with_itself() -> None:
    """The same runs twice would halve the variance of their mean."""
    kept = small()
    kept.add(torch.arange(8), ones())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept.finish_run()
    with pytest.raises(InputError, match="other must be another ledger"):
        kept.merge(kept)
    assert kept.runs == 1


@pytest.mark.parametrize(("records", "change"), [(1, {}), (3, {}), (2, {"noise_multiplier": 2.0})])
def test_followed_records_must_match_choice_and_mechanism(records: int, change: dict[str, float]) -> None:
    """One record's diagonal would be added to all of them; that of another noise is none of theirs."""
    kept = small(diagonal=("top", 2))
    kept.features.followed = True
    kept.add(torch.arange(8), ones())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept.finish_run()
    with pytest.raises(InputError, match="found"):
        kept.follow(replace(ones(records), **change))
    assert float(kept.state()["diagonal"].abs().sum()) == 0
    kept.follow(replace(ones(2), noise_multiplier=1.0))


def closed(kept: FisherAccountant) -> list[str]:
    """The warnings with which a run is closed."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        kept.finish_run()
    return [str(one.message) for one in found]


@pytest.mark.parametrize(("blocks", "suspected"), [(2, True), (5, False)])
def test_blocks_leave_nothing_to_chance(blocks: int, suspected: bool) -> None:
    """Blocks of 80 steps, so a weight of 20: two of the five are no whole run, however large the weight."""
    kept = small(steps=400)
    for _ in range(blocks):
        kept.add(torch.arange(8), ones(), weight=80 * 0.25, stratified=True)
    assert bool(closed(kept)) is suspected


@pytest.mark.parametrize(("steps", "suspected"), [(12, False), (20, False), (60, True)])
def test_random_steps_are_left_to_chance(steps: int, suspected: bool) -> None:
    """Measured at a share 1/20 of 400 steps: 12 of the 20 expected are two standard deviations off, 60 are nine."""
    kept = small(800, steps=400)
    for k in range(steps):
        kept.add(torch.arange(200 * (k % 4), 200 * (k % 4) + 200), ones(200), weight=20.0)
    assert bool(closed(kept)) is suspected


def whole(kept: FisherAccountant, weight: float = 0.25) -> FisherAccountant:
    """A run of 10 steps, each record measured at all of them, or with a larger weight at fewer."""
    for _ in range(round(2.5 / weight)):
        kept.add(torch.arange(8), ones(), weight=weight, stratified=True)
    closed(kept)
    return kept


def test_a_run_that_was_not_whole_is_not_forgotten() -> None:
    text = "not measured over all of their 400 steps"
    kept = small(steps=400)
    kept.add(torch.arange(8), ones())
    assert closed(kept)
    kept.add(torch.arange(8), ones(), weight=100.0, stratified=True)
    assert not closed(kept)  # whole
    assert text in str(kept.mse_floor())
    clean = small(steps=400)
    clean.add(torch.arange(8), ones(), weight=100.0, stratified=True)
    assert not closed(clean)
    assert text not in str(clean.mse_floor())
    clean.merge(kept)
    assert text in str(clean.mse_floor())


def test_a_ledger_merged_with_a_sampled_one_is_sampled() -> None:
    every, rare = whole(whole(small())), whole(whole(small(), weight=0.5), weight=0.5)
    assert bool(torch.isfinite(every.upper(warn=False)).all())
    every.merge(rare)  # 30 measurements of each: enough
    assert every.traces.sampled
    few = whole(whole(small(), weight=1.25), weight=1.25)
    again = whole(whole(small()))
    again.merge(few)  # 24: one too few
    assert again.measured().tolist() == [24] * 8
    assert bool(torch.isinf(again.upper(warn=False)).all())


@pytest.mark.parametrize("diagonal", ["all", [5, 1], ("top", 2)])
@pytest.mark.parametrize("runs", [0, 1, 2, 3])
def test_loaded_ledger_continues_identically(tmp_path: Any, runs: int, diagonal: Any) -> None:
    """In the middle of a run, of the first and of later ones: the two differ in no number."""
    kept = small(diagonal=diagonal)
    generator = torch.Generator().manual_seed(runs)

    def measure(ledgers: list[FisherAccountant]) -> None:
        for k in range(3):
            found = info(torch.rand(6, generator=generator), torch.rand(6, generator=generator))
            for one in ledgers:
                one.add((torch.arange(6) + k) % 8, found, stratified=runs % 2 == 0)

    for _ in range(runs):
        measure([kept])
        closed(kept)
    measure([kept])
    kept.caveats, kept.needs_range = ("not proved: kinks",), True
    kept.save(tmp_path / "ledger")
    back = FisherAccountant.load(tmp_path / "ledger")
    assert (back.caveats, back.needs_range) == (kept.caveats, True)
    for _ in range(2):
        measure([kept, back])
        assert closed(kept) == closed(back)
        for name, value in kept.state().items():
            assert name == "fingerprints" or torch.equal(value, back.state()[name]), name
    torch.testing.assert_close(kept.feature_standard_error(), back.feature_standard_error())


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize(("weight", "stratified"), [(0.25, False), (2.5, True)])
def test_record_left_out_of_run_is_reported(late: bool, weight: float, stratified: bool) -> None:
    """The mean over runs counts it there as 0: its floor would be twice too high."""
    kept, everyone = small(80), torch.arange(80)
    found = []
    for some in (everyone[:-2], everyone) if late else (everyone, everyone[:-2]):
        for _ in range(round(2.5 / weight)):
            kept.add(some, ones(len(some)), weight=weight, stratified=stratified)
        found.append(closed(kept))
    assert found[0] == []
    assert "2 of 80 records were measured in some runs and left out of others" in found[1][0]
    assert "for all records: floors of another run" in str(kept.mse_floor())


def test_records_that_were_not_drawn_in_a_run_are_no_fault() -> None:
    kept = small(80)
    for some in (torch.arange(20), torch.arange(20, 40)):
        for _ in range(10):
            kept.add(some, ones(20))
        assert closed(kept) == []
