"""The ledger: unbiased under every budget, honest about its error, and kept safe."""

from __future__ import annotations

import os
import stat
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from learning import FEATURES, RECORDS, learner
from reconbound._internal.checks import InputError
from reconbound._internal.files import unsealed
from reconbound.accounting.accountant import Account, Chosen, FisherAccountant
from reconbound.accounting.amplification import fixed_size_factor, paper_delta, paper_kappa, poisson_factors
from reconbound.fisher import StepInformation
from sealing import sealed


def account(records: int = 6, features: int = 3, **changes) -> Account:
    return Account(
        **{
            "records": records,
            "features": features,
            "steps": 10,
            "noise_multiplier": 2.0,
            "max_grad_norm": 0.5,
            "sample_rate": 0.25,
            **changes,
        }
    )


def info(across: Tensor, along: Tensor, norm: Tensor | float = 0.3, *, features: int = 3, error: float = 0.1):
    across, along = across.double(), along.double()
    n = torch.as_tensor(norm, dtype=torch.float64).expand(len(across))
    share = torch.arange(1.0, features + 1) / sum(range(1, features + 1))
    spectral = (across + along) / 2
    return StepInformation(
        n,
        n,
        n,
        n,
        along,
        across,
        error * across,
        {},
        features,
        1,
        along[:, None] * share,
        across[:, None] * share,
        None,
        spectral,
        1.1 * spectral,
    )


# --- factors ---------------------------------------------------------------------------------


def test_each_rule_multiplies_by_its_factor() -> None:
    norms = torch.tensor([0.0, 0.2, 0.55], dtype=torch.float64)
    across, along = torch.tensor([[1.0, 2.0, 3.0], [0.5, 0.1, 4.0]], dtype=torch.float64)
    for sampler, rules in (("poisson", ("exact", "paper", "none")), ("fixed", ("fixed", "paper", "none"))):
        ledger = FisherAccountant(account(sampler=sampler, rules=rules))
        ledger.add(torch.tensor([4, 0, 2]), info(across, along, norms), weight=1.5)
        kappa = paper_kappa(2.0, 0.25, paper_delta(6, 10))
        k_across, k_along = poisson_factors(norms.numpy() / 1.0, 0.25)
        fixed = fixed_size_factor(norms.numpy() / 1.0, 1.1153 / 2.0, 0.25)
        expected = {
            "exact": 1.5 * (k_across * across.numpy() + k_along * along.numpy()),
            "fixed": 1.5 * fixed * (across + along).numpy(),
            "paper": 1.5 * kappa * (across + along).numpy(),
            "none": 1.5 * (across + along).numpy(),
        }
        for rule in rules:
            np.testing.assert_allclose(ledger.trace(rule)[[4, 0, 2]].numpy(), expected[rule], rtol=1e-9)
            assert float(ledger.trace(rule)[[1, 3, 5]].abs().sum()) == 0
        np.testing.assert_allclose(ledger.dfil().numpy(), ledger.trace().numpy() / 3)


def test_the_spectral_bound_takes_the_larger_factor() -> None:
    ledger = FisherAccountant(account(), spectral=True)
    ledger.add(torch.tensor([1]), info(torch.tensor([2.0]), torch.tensor([4.0]), 0.5), weight=1.5)
    across, along = (float(k) for k in poisson_factors(0.5, 0.25))
    assert abs(across - along) > 1e-3
    assert float(ledger.traces.spectral_bound()[1]) == pytest.approx(1.5 * max(across, along) * 3.0 * 1.1)


def test_the_hard_clip_has_kappa_of_its_own() -> None:
    ledger = FisherAccountant(account(clip="hard", rules=("paper",)))
    ledger.add(torch.tensor([0]), info(torch.ones(1), torch.zeros(1)))
    assert float(ledger.trace()[0]) == pytest.approx(paper_kappa(2.0, 0.25, 1 / 60, clip_bound=1.0))


def test_one_record_and_one_step_need_no_delta() -> None:
    FisherAccountant(account(records=1, steps=1))


@pytest.mark.parametrize(
    ("sampler", "rule"), [("fixed", "exact"), ("shuffle", "exact"), ("shuffle", "fixed"), ("poisson", "fixed")]
)
def test_a_factor_is_not_claimed_for_other_batches(sampler: str, rule: str) -> None:
    with pytest.raises(InputError, match="rules"):
        account(sampler=sampler, rules=(rule,))


def test_shuffled_epochs_are_not_amplified() -> None:
    shuffled = account(sampler="shuffle", records=10, sample_rate=0.4, steps=7)
    assert shuffled.rules == ("none",)
    mechanism = shuffled.mechanism()
    assert (mechanism.sample_rate, mechanism.steps) == (1.0, 4)  # epochs of two batches, as if the last was dropped
    known = account(sampler="shuffle", records=10, sample_rate=0.4, steps=7, batches_per_epoch=3)
    assert known.mechanism().steps == 3  # epochs of three batches: 4, 4, 2
    assert mechanism.sampler == "shuffle"


# --- runs ------------------------------------------------------------------------------------


def run(ledger: FisherAccountant, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        chosen = torch.nonzero(torch.rand(6, generator=generator) < 0.7).flatten()
        ledger.add(
            chosen, info(torch.rand(len(chosen), generator=generator), torch.rand(len(chosen), generator=generator))
        )
    ledger.finish_run()


@pytest.mark.parametrize("diagonal", ["none", "all", "average", [5, 1]])
def test_merged_ledgers_are_the_runs_together(diagonal) -> None:
    options = {"diagonal": diagonal, "spectral": True}
    together, one, other = (FisherAccountant(account(rules=("exact", "none")), **options) for _ in range(3))
    for seed in range(5):
        run(together, seed)
        run(one if seed < 2 else other, seed)
    one.merge(other)
    assert one.runs == 5
    for name, value in together.state().items():
        if name != "fingerprints":  # these runs were measured twice here, to compare
            torch.testing.assert_close(one.state()[name], value, msg=name)
    torch.testing.assert_close(one.upper(), together.upper())
    empty = FisherAccountant(account(rules=("exact", "none")), **options)
    empty.merge(one)
    torch.testing.assert_close(empty.trace("none"), together.trace("none"))


def test_means_and_errors_over_runs() -> None:
    ledger, sums = FisherAccountant(account(rules=("none",))), []
    for seed in range(4):
        single = FisherAccountant(account(rules=("none",)))
        run(single, seed)
        sums.append(single.trace())
        run(ledger, seed)
    stacked = torch.stack(sums)
    torch.testing.assert_close(ledger.trace(), stacked.mean(0))
    torch.testing.assert_close(ledger.standard_error(), stacked.std(0) / 2 / 3)


def test_single_runs_are_kept_through_merging_and_saving(tmp_path) -> None:
    """dFIL and measurements after 2 and 4 steps of each run; κ is that of a run of so many steps."""
    short, whole = (account(rules=("exact", "paper"), steps=steps) for steps in (2, 4))
    kept = [FisherAccountant(whole, keep_runs_at=[2, 4]) for _ in range(2)]
    singles: dict[int, list[FisherAccountant]] = {2: [], 4: []}
    for k in (0, 0, 1):
        singles[2].append(FisherAccountant(short))
        singles[4].append(FisherAccountant(whole))
        for step in range(1, 5):
            found = info(torch.rand(6), torch.rand(6))
            for one in (kept[k], singles[4][-1], *([singles[2][-1]] if step <= 2 else [])):
                one.add(torch.arange(6), found, weight=0.25)
            kept[k].keep_step(step)
        kept[k].finish_run()
    kept[0].merge(kept[1])
    kept[0].save(tmp_path / "ledger")
    for ledger in (kept[0], FisherAccountant.load(tmp_path / "ledger")):
        for step, runs in singles.items():
            assert ledger.traces.measured_in_runs(step).tolist() == [3 * step] * 6
            for rule in ("exact", "paper"):
                expected = torch.stack([one.dfil(rule) for one in runs])
                torch.testing.assert_close(ledger.traces.dfil_of_runs(step, rule), expected)
    for wrong in ([4, 2], [2, 3], [2.5, 4]):
        with pytest.raises(InputError, match="keep_runs_at"):
            FisherAccountant(whole, keep_runs_at=wrong)
    with pytest.raises(InputError, match="step must be one of keep_runs_at"):
        kept[0].traces.dfil_of_runs(3, "exact")


def test_only_like_is_merged_with_like() -> None:
    ledger = FisherAccountant(account(), diagonal=[0, 1])
    for other in (
        FisherAccountant(account(steps=11)),
        FisherAccountant(account(), diagonal=[0, 2]),
        FisherAccountant(account()),
    ):
        with pytest.raises(InputError, match="other"):
            ledger.merge(other)
    with pytest.raises(InputError, match="feature_scale"):
        ledger.merge(FisherAccountant(account(), diagonal=[0, 1], feature_scale=2.0))


# --- answers ---------------------------------------------------------------------------------


def test_floors_in_data_units() -> None:
    """x = mean + scale · input: information falls by scale², the floor of a feature rises by it."""
    scale = [2.0, 3.0, 10.0]
    plain, scaled = (
        FisherAccountant(account(), diagonal="all"),
        FisherAccountant(account(), diagonal="all", feature_scale=scale),
    )
    for ledger in (plain, scaled):
        ledger.add(torch.arange(6), info(torch.ones(6), torch.ones(6)))
    np.testing.assert_allclose(scaled.feature_floors().value, plain.feature_floors().value * np.square(scale))
    np.testing.assert_allclose(scaled.mse_floor().value, plain.mse_floor().value * 25.0)  # the mean scale is 5
    exact = scaled.feature_floors().value.mean(1)  # Var_j ≥ 1/I_jj for each j: the trace's floor must not be above it
    assert bool((scaled.mse_floor().value <= exact * (1 + 1e-6)).all())
    for bad in ([1.0, 2.0], 0.0, [1.0, -1.0, 1.0], float("nan")):
        with pytest.raises(InputError, match="feature_scale"):
            FisherAccountant(account(), feature_scale=bad)


def test_diagonals_add_up_to_the_trace() -> None:
    ledgers = {
        name: FisherAccountant(account(), diagonal=kept)
        for name, kept in {"all": "all", "average": "average", "some": [4, 1]}.items()
    }
    for ledger in ledgers.values():
        ledger.add(
            torch.tensor([1, 4, 5]), info(torch.rand(3, generator=torch.Generator().manual_seed(0)), torch.ones(3))
        )
    whole, some = (
        1 / ledgers[name].feature_floors().value[[4, 1] if name == "all" else [0, 1]] for name in ("all", "some")
    )
    np.testing.assert_allclose(whole, some, rtol=1e-6)
    trace = ledgers["all"].trace().numpy()
    np.testing.assert_allclose(whole.sum(1), trace[[4, 1]], rtol=1e-6)
    for name in ledgers:
        average = 1 / ledgers[name].feature_floors(average=True).value
        np.testing.assert_allclose(average.sum(), trace.mean(), rtol=1e-6)
    with pytest.raises(InputError, match="diagonal"):
        FisherAccountant(account()).feature_floors()


def test_a_record_never_measured_has_no_floor() -> None:
    ledger = FisherAccountant(account(), diagonal="all")
    ledger.add(torch.tensor([0, 1]), info(torch.tensor([1.0, 2.0]), torch.zeros(2)))
    floor = ledger.mse_floor()
    assert floor.value[2:].tolist() == [0.0] * 4
    assert "never measured" in " ".join(floor.assumes)
    assert ledger.feature_floors().value[3].tolist() == [0.0] * 3
    assert [e.record for e in ledger.most_exposed(5)] == [1, 0]
    summary = ledger.summary()
    assert summary["never_measured"] == 4
    assert summary["floor_estimate"]["exact"]["lowest"] == pytest.approx(floor.value[1])


def test_summary_and_guarantee_travel_with_the_ledger() -> None:
    ledger = FisherAccountant(account(rules=("exact", "paper")), spectral=True)
    for seed in range(3):
        run(ledger, seed)
    summary = ledger.summary()
    assert summary["runs"] == 3
    assert summary["floor_estimate"]["exact"]["lowest"] > summary["floor_estimate"]["paper"]["lowest"]
    assert (ledger.traces.spectral_bound() <= ledger.trace()).all()
    companions = ledger.guarantee(delta=1e-6)
    assert companions.dim == 3
    assert companions.mechanism.order2() > 0
    assert companions.epsilon is not None
    assert {b.name for b in companions.bounds} >= {"theorem1", "lecam", "rate_distortion"}


@pytest.mark.parametrize("bad", [[6], [-1], [2, 2]])
def test_bad_indices_leave_ledger_unchanged(bad: list[int]) -> None:
    ledger = FisherAccountant(account())
    with pytest.raises(InputError, match="indices"):
        ledger.add(torch.tensor(bad), info(torch.ones(len(bad)), torch.ones(len(bad))))
    assert all(float(v.double().abs().sum()) == 0 for v in ledger.state().values())


# --- keeping ---------------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal", ["none", "all", "average", [3, 0]])
def test_saved_ledgers_come_back(tmp_path, diagonal) -> None:
    ledger = FisherAccountant(
        account(rules=("exact", "paper")), diagonal=diagonal, spectral=True, feature_scale=[1.0, 2.0, 3.0]
    )
    run(ledger, 0)
    run(ledger, 1)
    ledger.add(torch.tensor([2]), info(torch.ones(1), torch.ones(1)))
    path = tmp_path / "ledger.safetensors"
    before = os.umask(0)
    try:
        ledger.save(path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    back = FisherAccountant.load(path)
    assert (back.account, back.runs, back.diagonal) == (ledger.account, 2, ledger.diagonal)
    assert all(torch.equal(v, back.state()[name]) for name, v in ledger.state().items())
    torch.testing.assert_close(back.upper("paper"), ledger.upper("paper"))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("diagonal", ["all", "average", [3, 0], Chosen(2, 1)], ids=str)
def test_a_ledger_without_one_of_its_tensors_is_refused(tmp_path, diagonal) -> None:
    """With a right digest: only the tensors say what is missing."""
    path, ledger = tmp_path / "ledger.safetensors", FisherAccountant(account(), diagonal=diagonal, spectral=True)
    ledger.add(torch.tensor([0, 3]), info(torch.ones(2), torch.ones(2)))
    ledger.finish_run()
    ledger.save(path)
    tensors, facts = unsealed(path)
    assert {"diagonal", "average"} & set(tensors)
    for name in set(tensors) - {"spectral"}:  # a ledger without it keeps none
        path.write_bytes(sealed({n: v for n, v in tensors.items() if n != name}, facts))
        with pytest.raises(InputError, match="path must be a ledger of this version of reconbound") as reason:
            FisherAccountant.load(path)
        assert "\n" not in str(reason.value), name


def test_foreign_and_damaged_files_are_refused(tmp_path) -> None:
    path = tmp_path / "ledger.safetensors"
    ledger = FisherAccountant(account())
    ledger.save(path)
    good = path.read_bytes()
    import pickle

    from safetensors.torch import save

    bad = [b"", b"x", good[:-1], good[:40], pickle.dumps({"a": 1}), save({"a": torch.ones(2)}), b"\xff" * 100]
    bad += [good[:k] + bytes([good[k] ^ 16]) + good[k + 1 :] for k in range(0, len(good), 37)]
    for content in bad:
        path.write_bytes(content)
        with pytest.raises(InputError, match="path"):
            FisherAccountant.load(path)


def test_small_problem_has_what_the_tests_assume() -> None:
    one = learner(budget="every").fit(3)
    assert one.accountant is not None
    assert (one.accountant.account.records, one.accountant.account.features) == (RECORDS, FEATURES)


# --- what cannot be added ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"diagonal_across": None}, "must have the diagonal"),
        ({"diagonal_along": torch.ones(4, 5)}, r"diagonal of the account's 3 features, no others .*got \(4, 5\)"),
        ({"spectral_bound": None}, "must have the spectral norm"),
        ({"across": torch.tensor([1.0, 2.0, torch.nan, 1.0])}, r"finite numbers.*of record 5, got \[nan, 1.0\]"),
        ({"along": torch.tensor([1.0, torch.inf, 2.0, 1.0])}, r"finite numbers.*of record 3, got \[1.0, inf\]"),
        ({"across": torch.tensor([-3.0, 1.0, 1.0, 1.0])}, "no negative trace, of record 1"),
        ({"clipped_norm": torch.full((4,), torch.nan)}, "finite numbers.*of record 1"),
        ({"features": 4}, "must be about the account's 3 features, got 4"),
    ],
)
def test_what_cannot_be_added_leaves_the_ledger_as_it_was(changes: dict, text: str) -> None:
    """So that the caller may mend it and add again: nothing is counted twice, and no NaN stays."""
    ledger = FisherAccountant(account(rules=("exact", "paper")), diagonal="all", spectral=True)
    good, records = info(torch.ones(4), torch.ones(4)), torch.tensor([1, 3, 5, 0])
    with pytest.raises(InputError, match=text):
        ledger.add(records, replace(good, **changes))
    assert not any(bool(value.any()) for value in ledger.state().values())
    ledger.add(records, good)
    assert ledger.measured().tolist() == [1, 1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        (torch.tensor([1, 3, 5]), "indices must be 4, one for each record found, got 3"),
        (torch.tensor([1.0, 3.0, 5.0, 0.0]), "indices must be a tensor of record indices"),
        (torch.ones(4, dtype=torch.bool), "indices must be a tensor of record indices"),
        (["1", "3", "5", "0"], "indices must be a tensor of record indices"),
        ([[1], [3, 5], [0]], "indices must be a tensor of record indices"),
    ],
)
def test_indices_that_are_none(indices, text: str) -> None:
    ledger, good = FisherAccountant(account()), info(torch.ones(4), torch.ones(4))
    with pytest.raises(InputError, match=text):
        ledger.add(indices, good)
    ledger.add(torch.tensor([1, 3, 5, 0], dtype=torch.int32), good)
    ledger.add(torch.tensor([], dtype=torch.int64), info(torch.ones(0), torch.ones(0)))  # an empty batch
    assert ledger.measured().tolist() == [1, 1, 0, 1, 0, 1]
