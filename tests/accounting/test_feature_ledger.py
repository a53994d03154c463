"""Per-feature ledgers of records that the first runs choose: unbiased given the choice, and kept through everything."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_accountant import account, info

from learning import FEATURES, RECORDS, learner, same_state
from reconbound._internal.checks import InputError
from reconbound._internal.files import unsealed
from reconbound.accounting.accountant import Chosen, FisherAccountant
from reconbound.accounting.feature_ledger import resolve_diagonal
from sealing import sealed

#: these ledgers hold a few measurements, not whole runs
pytestmark = pytest.mark.filterwarnings("ignore:a run was measured over about")


def information(ledger: FisherAccountant) -> np.ndarray:
    return 1 / ledger.feature_floors().value


# --- what is kept --------------------------------------------------------------------------------


def test_forms() -> None:
    assert resolve_diagonal(("auto", 12 * 100 * 7), 100, 7) == "all"
    assert resolve_diagonal(("auto", 12 * 100 * 7 - 1), 100, 7) == Chosen(16, 16, 1)
    assert resolve_diagonal(("top", 3), 100, 7) == Chosen(3, 0, 1)
    assert resolve_diagonal(Chosen(3, 2, 4), 100, 7) == Chosen(3, 2, 4)
    for bad in ("some", ("top",), ("top", 0), ("top", 2.5), ("best", 3), ("auto", 0), [100], [-1], [1, 1], []):
        with pytest.raises(InputError, match="diagonal"):
            resolve_diagonal(bad, 100, 7)  # type: ignore[arg-type]
    for bad in ({"most": 0, "least": 0}, {"most": -1}, {"after": 0}):
        with pytest.raises(InputError, match=next(iter(bad))):
            Chosen(**bad)


@pytest.mark.parametrize("diagonal", ["all", "average", [0, 2]])
@pytest.mark.filterwarnings("ignore")
def test_average_floors_state_unknown_error(diagonal: object) -> None:
    ledger = FisherAccountant(account(), diagonal=diagonal)
    ledger.add(torch.tensor([0, 1, 2]), info(torch.tensor([0.3, 4.0, 1.0]), torch.zeros(3)))
    ledger.finish_run()
    text = "of the average record: an estimate whose standard error is not known"
    assert text in ledger.feature_floors(average=True).assumes
    if diagonal != "average":
        assert text not in ledger.feature_floors().assumes


@pytest.mark.parametrize(
    ("wanted", "rows"),
    [(Chosen(2, 2), [4, 1, 0, 5]), (Chosen(2, 0), [4, 1]), (Chosen(0, 1), [5]), (Chosen(9, 9), [4, 1, 2, 0, 5])],
)
def test_the_most_exposed_come_first_and_the_least_exposed_last(wanted: Chosen, rows: list[int]) -> None:
    ledger = FisherAccountant(account(), diagonal=wanted)
    assert ledger.rows is not None
    assert ledger.rows.tolist() == []
    found = torch.tensor([0.3, 4.0, 1.0, 9.0, 0.1])
    ledger.add(torch.tensor([0, 1, 2, 4, 5]), info(found, torch.zeros(5)))  # 3 is never measured
    with pytest.raises(InputError, match="runs must be more than the 1"):
        ledger.feature_floors()
    ledger.finish_run()
    assert ledger.rows.tolist() == rows
    with pytest.raises(InputError, match="runs must be more than the 1"):
        ledger.feature_floors()
    assert ledger.feature_floors(average=True).value.shape == (1, 3)  # of all runs and all records


# --- unbiased --------------------------------------------------------------------------------------


def noisy_runs(ledger: FisherAccountant, runs: int, generator: torch.Generator) -> None:
    """Records that all have the same information, 1, and sums that vary: whoever leads does so by chance."""
    for _ in range(runs):
        u = torch.rand(2, ledger.account.records, generator=generator, dtype=torch.float64)
        value = -u.log().sum(0) / 2  # a gamma variable of mean 1 and variance 1/2
        ledger.add(torch.arange(ledger.account.records), info(value, torch.zeros_like(value)))
        ledger.finish_run()


@pytest.mark.parametrize("after", [1, 3])
def test_chosen_by_chance_is_not_reported_from_the_same_chance(after: int) -> None:
    """Later runs estimate the records that the first runs chose without bias; the first runs' own numbers would not."""
    generator = torch.Generator().manual_seed(after)
    kept = Chosen(20, 20, after)
    ledgers = [FisherAccountant(account(2000, rules=("none",)), diagonal=what) for what in (kept, "all")]
    for ledger in ledgers:
        noisy_runs(ledger, after, generator.manual_seed(after))
    rows = ledgers[0].rows
    assert rows is not None
    own = information(ledgers[1])[rows].sum(1)  # what choosing and reporting from the same runs would say
    assert own[:20].min() > 1.5
    assert own[20:].max() < 0.6
    noisy_runs(ledgers[0], 40, generator)
    later = information(ledgers[0])
    error = ledgers[0].feature_standard_error().numpy()
    np.testing.assert_allclose(later.sum(1).mean(), 1.0, atol=4 * 0.71 / (40 * 40) ** 0.5)  # sd of an entry: 1/√2
    share = np.arange(1, 4) / 6
    assert np.abs((later - share) / error).max() < 5
    assert abs(np.mean((later[:20] - later[20:]).sum(1))) < 4 * 0.71 * (2 / 800) ** 0.5


@pytest.fixture(scope="module")
def truth() -> tuple[np.ndarray, np.ndarray]:
    """Expected diagonals by brute force: all records, every step, every run, and their errors."""
    sums = []
    for seed in range(40):
        one = learner(budget=1e6, probes=2, seed=1000 + seed, diagonal="all").repeat(1, steps=5)
        assert one.accountant is not None
        sums.append(information(one.accountant))
    return np.mean(sums, axis=0), np.std(sums, axis=0, ddof=1) / len(sums) ** 0.5


@pytest.mark.parametrize("budget", [1.0, "every"])
@pytest.mark.slow
def test_chosen_records_have_the_diagonals_of_the_full_ledger(truth, budget) -> None:
    one = learner(diagonal=Chosen(3, 2), seed=5, budget=budget)
    one.repeat(41, steps=5)
    assert one.accountant is not None
    rows, found = one.accountant.rows, information(one.accountant)
    assert rows is not None
    assert found.shape == (5, FEATURES)
    mean, error = (t[rows.numpy()] for t in truth)
    spread = np.sqrt(one.accountant.feature_standard_error().numpy() ** 2 + error**2)
    assert np.abs((found - mean) / spread).max() < 4.5
    assert (spread / mean).max() < 0.4  # it can tell
    average = 1 / one.accountant.feature_floors(average=True).value
    np.testing.assert_allclose(average.sum(), float(one.accountant.trace().mean()), rtol=1e-5)  # of all runs


def test_following_leaves_training_and_traces_as_they_were() -> None:
    plain, kept = (learner(diagonal=what, budget="every").repeat(3, steps=5) for what in ("average", Chosen(2, 2)))
    assert plain.accountant is not None
    assert kept.accountant is not None
    for name, value in plain.accountant.state().items():
        assert torch.equal(value, kept.accountant.state()[name]), name
    pairs = zip(plain.model.state_dict().values(), kept.model.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert kept.accountant.state()["diagonal_runs"].tolist() == [2] * 4


def test_shuffled_epochs_measure_the_chosen_in_their_batches() -> None:
    one = learner(sampler="shuffle", budget="every", diagonal=("top", 3)).repeat(3, epochs=2)
    assert one.accountant is not None
    assert not one.accountant.features.followed
    whole = learner(sampler="shuffle", budget="every", diagonal="all").repeat(3, epochs=2)
    assert whole.accountant is not None
    rows = one.accountant.rows
    first = learner(sampler="shuffle", budget="every", diagonal="all").repeat(1, epochs=2)
    assert first.accountant is not None
    later = (3 * information(whole.accountant) - information(first.accountant))[rows] / 2  # runs 2 and 3 alone
    np.testing.assert_allclose(information(one.accountant), later, rtol=1e-4)


# --- kept through everything -------------------------------------------------------------------------


class Stop(Exception):
    pass


@pytest.mark.parametrize("at", [(0, 4), (1, 1), (2, 3)])
def test_stopped_run_keeps_chosen_records(tmp_path, at: tuple[int, int]) -> None:
    options = {"diagonal": Chosen(2, 1), "every": 1}
    whole = learner(**options).repeat(3, steps=4)

    def stop(model) -> dict[str, float]:
        if (first.run, first.step) == at:
            raise Stop
        return {}

    first = learner(checkpoint=tmp_path, evaluate=stop, evaluate_every=1, **options)
    with pytest.raises(Stop):
        first.repeat(3, steps=4)
    again = learner(checkpoint=tmp_path, **options).repeat(3, steps=4)
    assert same_state(again, whole)
    assert again.accountant is not None
    assert whole.accountant is not None
    assert again.accountant.rows is not None
    assert torch.equal(again.accountant.rows, whole.accountant.rows)  # type: ignore[arg-type]
    np.testing.assert_array_equal(information(again.accountant), information(whole.accountant))


def ledger_of(seed: int, runs: int, after: int = 1) -> tuple[FisherAccountant, list[torch.Tensor]]:
    """A ledger of so many runs, and each run's diagonals of all records."""
    ledger, generator = FisherAccountant(account(), diagonal=Chosen(2, 1, after)), torch.Generator().manual_seed(seed)
    diagonals = []
    for _ in range(runs):
        single = FisherAccountant(account(), diagonal="all")
        found = info(torch.rand(6, generator=generator), torch.rand(6, generator=generator))
        for one in (ledger, single):
            one.add(torch.arange(6), found)
            one.finish_run()
        diagonals.append(torch.from_numpy(information(single)))
    return ledger, diagonals


def test_merged_ledgers_keep_the_chosen_of_both() -> None:
    (one, first), (other, second) = ledger_of(0, 4), ledger_of(1, 3)
    assert one.rows is not None
    assert other.rows is not None
    mine, theirs = set(one.rows.tolist()), set(other.rows.tolist())
    assert mine & theirs  # of both, of one, of the other: all are there
    assert mine - theirs
    assert theirs - mine
    one.merge(other)
    assert one.runs == 7
    assert set(one.rows.tolist()) == mine | theirs
    found, error = information(one), one.feature_standard_error()
    for k, row in enumerate(one.rows.tolist()):
        runs = [d[row] for d in first[1:] if row in mine] + [d[row] for d in second[1:] if row in theirs]
        stacked = torch.stack(runs)
        np.testing.assert_allclose(found[k], stacked.mean(0).numpy(), rtol=1e-5)
        np.testing.assert_allclose(error[k].numpy(), (stacked.std(0) / len(runs) ** 0.5).numpy(), rtol=1e-4)
    empty = FisherAccountant(account(), diagonal=Chosen(2, 1))
    empty.merge(one)
    np.testing.assert_allclose(information(empty), found)
    with pytest.raises(InputError, match="other"):
        one.merge(FisherAccountant(account(), diagonal=Chosen(2, 2)))
    assert empty.rows is not None
    empty.add(torch.arange(6), info(torch.ones(6), torch.ones(6)))  # and it goes on with all of them
    empty.finish_run()
    assert len(information(empty)) == len(empty.rows)


def test_a_chosen_record_without_a_run_has_the_trivial_floor() -> None:
    one, _ = ledger_of(0, 3)
    fresh, _ = ledger_of(3, 1)  # its choice is made, its records not yet measured
    one.merge(fresh)
    floors = one.feature_floors().value
    runs = one.state()["diagonal_runs"]
    assert 0 in runs.tolist()
    assert (floors[(runs == 0).numpy()] == 0).all()
    assert (floors[(runs > 0).numpy()] > 0).all()
    assert bool(torch.isinf(one.feature_standard_error()[runs < 2]).all())


def test_saved_ledgers_come_back_with_their_chosen(tmp_path) -> None:
    ledger, _ = ledger_of(1, 5, after=2)
    ledger.add(torch.tensor([2, 0]), info(torch.ones(2), torch.ones(2)))
    ledger.save(tmp_path / "ledger.safetensors")
    back = FisherAccountant.load(tmp_path / "ledger.safetensors")
    assert back.features.choice == Chosen(2, 1, 2)
    assert all(torch.equal(v, back.state()[name]) for name, v in ledger.state().items())
    for one in (ledger, back):
        one.finish_run()
    np.testing.assert_array_equal(information(ledger), information(back))
    state = ledger.state()
    for wrong in ({"rows": torch.tensor([0, 9, 1])}, {"diagonal": torch.zeros(2, 3)}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            back.restore({**state, **wrong}, 5)


def test_memory_is_that_of_the_records_kept() -> None:
    ledger = FisherAccountant(account(60_000, 784), diagonal="auto")
    for _ in range(2):
        ledger.add(torch.arange(RECORDS), info(torch.rand(RECORDS), torch.rand(RECORDS), features=784))
        ledger.finish_run()
    kept = sum(v.numel() * v.element_size() for v in ledger.features.state.values())
    assert ledger.diagonal == "chosen"
    assert kept < 1e6  # against 376 MB


@pytest.mark.parametrize("diagonal", ["all", "average", [0, 1], Chosen(1, 1)], ids=str)
@pytest.mark.parametrize("how", ["missing", "empty"])
def test_a_ledger_takes_no_more_memory_than_its_file(diagonal, how, tmp_path) -> None:
    """A tensor that is missing, or has no rows, does not let a sealed description ask for any number of features."""
    path, many = tmp_path / "ledger.safetensors", 10**12
    FisherAccountant(account(4, 3), diagonal=diagonal).save(path)
    FisherAccountant.load(path)
    tensors, facts = unsealed(path)
    for name in [name for name in tensors if name.startswith(("diagonal", "average"))]:
        tensor = tensors.pop(name)
        if how == "empty" and tensor.dim() == 2:
            tensors[name] = torch.zeros(0, many, dtype=tensor.dtype)
    facts["ledger"]["account"]["features"] = many
    path.write_bytes(sealed(tensors, facts))
    with pytest.raises(InputError, match=r"path must be a ledger .*(diagonal|average) must be a tensor of shape"):
        FisherAccountant.load(path)


@pytest.mark.parametrize(("said", "missing"), [("all", "diagonal"), ("average", "average"), ("none", "trace")])
def test_a_ledger_without_the_tensor_that_it_describes_is_refused(said, missing, tmp_path) -> None:
    path = tmp_path / "ledger.safetensors"
    FisherAccountant(account(4, 3), diagonal="all").save(path)
    tensors, facts = unsealed(path)
    tensors.pop(missing, None)
    facts["ledger"]["diagonal"] = said
    path.write_bytes(sealed(tensors, facts))
    with pytest.raises(InputError, match=rf"path must be a ledger .*{missing} must be a tensor of shape .*got None"):
        FisherAccountant.load(path)


@pytest.mark.parametrize("rows", [torch.zeros(10**6, dtype=torch.int64), torch.zeros(3), torch.zeros((), dtype=int)])
def test_rows_that_are_not_those_of_the_diagonal_are_refused(rows) -> None:
    ledger, _ = ledger_of(1, 3)
    with pytest.raises(InputError, match="rows must be indices of the records in the diagonal"):
        ledger.restore({**ledger.state(), "rows": rows}, 3)
