"""One training on several ranks: the same numbers on any number of them, one noise, and one end for all."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy import stats

import rank_run
from learning import RECORDS, learner
from many_ranks import PATIENCE, ends_of_ranks, on_ranks
from reconbound import audit
from reconbound._internal.checks import InputError
from reconbound.training.checkpoint import CheckpointError
from reconbound.training.ranks import (
    Ranks,
    TrainingError,
    _group_of_cpu,
    _time_limit,
    check_apart,
    compute_shards,
    grid_of,
    make_shards,
    refuse_several,
)
from reconbound.training.sampling import Poisson, Shard
from reconbound.training.settings import Settings
from reconbound.training.step import StepWork

on_several = pytest.mark.parametrize("size", [2, 4])


forked = pytest.mark.slow  # it starts processes


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Equal bit for bit, which is more than the 1e-6 and 1e-9 that are asked for."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(other[name], value, err_msg=name)
        else:
            assert other[name] == value, name


# --- the same numbers --------------------------------------------------------------------


@forked
@on_several
@pytest.mark.parametrize("case", rank_run.CASES)
def test_parameters_and_ledgers_are_those_of_one_process(case: str, size: int) -> None:
    alone = rank_run.trained(case)
    for found in on_ranks(size, rank_run.trained, case):
        assert_same(alone, found)


@forked
def test_a_number_of_ranks_that_does_not_divide_the_shards() -> None:
    alone = rank_run.trained("everything")
    for found in on_ranks(3, rank_run.trained, "everything"):
        assert_same(alone, found)


@forked
def test_repeated_runs_and_chosen_records() -> None:
    alone = rank_run.repeated()
    for found in on_ranks(2, rank_run.repeated):
        assert_same(alone, found)


@forked
def test_each_rank_has_a_shard_and_rank_0_gives_parameters_and_noise() -> None:
    """Nothing is said of ranks, and each has begun with parameters of its own."""
    first, other = on_ranks(2, rank_run.defaults)
    assert (first.pop("drawn"), other.pop("drawn")) == (4, 0)
    assert_same(first, other)
    assert first["shards"] == 2
    alone = rank_run_defaults_alone()
    assert_same(first, alone)


@forked
def test_law_of_the_released_sums() -> None:
    """What is released on every rank is the clipped sum of the whole batch and σC times standard normal numbers."""
    steps, noise = 250, 0.7
    first, other = on_ranks(2, rank_run.released, steps)
    assert (first["drawn"], other["drawn"]) == (steps, 0)
    np.testing.assert_array_equal(first["released"], other["released"])
    np.testing.assert_allclose(first["sums"], other["sums"], rtol=1e-12)
    x = (np.stack(first["released"]) - np.stack(first["sums"])) / noise
    assert np.abs(np.stack(first["sums"])).max() > 0.3  # there is something to add noise to
    n = x.size
    assert n > 10_000
    assert stats.kstest(x.ravel(), "norm").pvalue > 1e-3
    assert abs(x.var() - 1) < 4 * (2 / n) ** 0.5  # half of it, or twice, would be 50 errors away
    assert abs((x[1:] * x[:-1]).mean()) < 4 / n**0.5  # steps are independent
    halves = x[:, : x.shape[1] // 2] * x[:, -(x.shape[1] // 2) :]
    assert abs(halves.mean()) < 4 / halves.size**0.5


@forked
def test_a_dataset_is_read_by_its_ranks(tmp_path) -> None:
    """In the training's process and by a worker of each rank; a rank reads no record of another one's shards."""
    alone, folder = rank_run.trained_on_items(0), str(tmp_path / "run")
    alone.pop("reads")
    ranks = on_ranks(2, rank_run.items_on_ranks, folder)
    half = RECORDS // 2
    some = np.linspace(0, RECORDS - 1, 8).astype(int)  # rank 0 computes the losses of eight records at the start
    for number, found in enumerate(ranks):
        for workers in ("workers 0", "workers 1"):
            reads = found[workers].pop("reads")
            assert_same(alone, found[workers])
            others = np.ones(RECORDS)  # all are read once, for their digest
            others[some] += number == 0
            own = slice(0, half) if number == 0 else slice(half, RECORDS)
            foreign = np.ones(RECORDS, bool)
            foreign[own] = False
            np.testing.assert_array_equal(reads[foreign], others[foreign])
            assert reads[own].sum() > others[own].sum()
        for error in found["errors"]:
            assert "item 20 is gone" in error
            assert number == 1 or error.startswith("TrainingError: rank 1 failed, and rank 0 ends with it: OSError")
            assert number == 1 or "\n" not in error
        assert "stopped" in found["stopped"]
        assert "not stopped" not in found["stopped"]
    assert_same(alone, rank_run.resumed_on_items(folder))


@forked
def test_only_tensors_on_a_gpu_go_through_a_group_for_gpus() -> None:
    """As NCCL is one: objects, and a model on the CPU, go through gloo beside it, with the same time limit."""
    alone = rank_run.trained("batches")
    for found in on_ranks(2, rank_run.trained_beside_gpus, backend="gpus_only"):
        refused, limit = found.pop("about")
        assert "No backend type associated with device type cpu" in refused
        assert limit == str(timedelta(seconds=PATIENCE))
        assert found.pop("sent") == [("meta", True)] * 2 + [("cpu", False)] * 2
        assert_same(alone, found)


def test_another_default_group_has_another_one_beside_it(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name in ("first", "second"):
        store = dist.FileStore(str(tmp_path / name), 1)
        dist.init_process_group("gpus_only", store=store, rank=0, world_size=1, timeout=timedelta(seconds=77))
        try:
            beside = _group_of_cpu()
            assert beside is _group_of_cpu()
            found: list[Any] = [None]
            dist.all_gather_object(found, name, group=beside)
            assert (found, _time_limit(beside)) == ([name], timedelta(seconds=77))
        finally:
            dist.destroy_process_group()


def rank_run_defaults_alone() -> dict[str, Any]:
    one = learner(rank_run.network(0), kind=rank_run.Kept, progress=False, check=True, shards=2).fit(4)
    return rank_run.outcome(one)


def test_shards_change_the_training_by_rounding_only(same_noise) -> None:
    one, other = (learner(rules=("exact",), budget=1.0, shards=count).fit(8) for count in (1, 5))
    for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert one.accountant is not None
    assert other.accountant is not None
    torch.testing.assert_close(one.accountant.trace(), other.accountant.trace(), rtol=1e-4, atol=1e-6)
    assert torch.equal(one.accountant.measured(), other.accountant.measured())


def test_runs_of_other_shards_share_neither_noise_nor_batches() -> None:
    """Their sums are rounded otherwise: with the same noise the difference would be bare."""
    one, other = (rank_run.made("nothing but divergences", shards=count).fit(6) for count in (1, 4))
    for a in one.drawn:
        for b in other.drawn:
            assert not bool((a == b).any())
    assert sum(a == b for a, b in zip(one.batches, other.batches, strict=True)) <= 1


# --- sums of shards ----------------------------------------------------------------------


def test_sums_of_shards_do_not_depend_on_their_order() -> None:
    settings = Settings(1.0, 0.3, 0.5)
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(2000, generator=generator) * 0.1 for _ in range(7)]
    zeros, grid = partial(torch.zeros, 2000), grid_of(settings, 100)

    def total(order: list[int]) -> torch.Tensor:
        def compute(shard: Shard) -> StepWork:
            return StepWork(torch.arange(*shard.span), parts[order[shard.number]], torch.zeros(0))  # type: ignore[misc]

        return compute_shards(make_shards(100, 7), Ranks(), zeros, grid, compute).total

    one, other = total(list(range(7))), total([6, 2, 4, 0, 5, 3, 1])
    assert torch.equal(one, other)
    exact = torch.stack(parts).double().sum(0)
    assert float((one.double() * grid - exact).abs().max()) <= 7 * grid / 2
    floats = [sum((parts[i] for i in order[1:]), parts[order[0]]) for order in (range(7), [6, 2, 4, 0, 5, 3, 1])]
    assert not torch.equal(floats[0], floats[1])  # as they are added otherwise


@pytest.mark.parametrize("records", [1, 7, 1000, 10**8])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 3e5])
def test_sums_fit_into_64_bits(records: int, norm: float) -> None:
    settings = Settings(1.0, norm, 0.5, clip="hard")
    grid = grid_of(settings, records)
    largest = norm * records / grid
    assert 2**60 <= largest <= 2**61
    assert grid / norm < 2.0**-30
    sums = torch.full((3,), norm * records, dtype=torch.float64)
    assert bool(((sums / grid).round().long() > 0).all())


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([(0, [1]), (0, [2]), (1, [12])], "each shard must be computed once"),
        ([(0, [1])], "each shard must be computed once"),
        ([(0, [1, 10]), (1, [11])], "shard 0 has records of another shard"),
        ([(0, [1]), (1, [3])], "shard 1 has records of another shard"),
    ],
)
def test_a_record_is_never_counted_in_two_shards(parts: list[tuple[int, list[int]]], message: str) -> None:
    shards = make_shards(20, 2)
    check_apart(shards, [(0, torch.tensor([1])), (1, torch.tensor([], dtype=torch.int64))])
    with pytest.raises(TrainingError, match=message):
        check_apart(shards, [(number, torch.tensor(records)) for number, records in parts])


@pytest.mark.parametrize(("records", "count"), [(10, 3), (7, 7), (1000, 16), (5, 1)])
def test_shards_are_all_records_once(records: int, count: int) -> None:
    spans = [shard.span or (0, records) for shard in make_shards(records, count)]
    assert [i for a, b in spans for i in range(a, b)] == list(range(records))
    assert max(b - a for a, b in spans) - min(b - a for a, b in spans) <= 1
    for ranks in (1, 2, 3, 5):
        owners = [shard.owner(ranks) for shard in make_shards(records, count)]
        assert owners == sorted(owners)
        assert set(owners) <= set(range(ranks))
        assert ranks > count or set(owners) == set(range(ranks))


@pytest.mark.parametrize("count", [0, 25, 1.5, "two"])
def test_impossible_numbers_of_shards_are_refused(count: Any) -> None:
    with pytest.raises(InputError, match="shards"):
        learner(shards=count)


# --- one end for all ---------------------------------------------------------------------


@forked
def test_an_error_on_one_rank_ends_all_with_one_line() -> None:
    cases = [
        (rank_run.with_a_bad_record, 20, "record 20 has loss nan"),
        (rank_run.with_a_self_test_that_fails_on, 1, "the sums of this machine are wrong"),
        (rank_run.with_an_evaluation_that_fails_on, 1, "no test records here"),
        (rank_run.with_an_evaluation_that_fails_on, 0, "no test records here"),
    ]
    started = time.monotonic()
    ranks = on_ranks(2, rank_run.errors_of, [partial(target, bad) for target, bad, _ in cases])
    assert time.monotonic() - started < 60  # gloo itself would wait for 90 seconds
    for number, (_, bad, message) in enumerate(cases):
        failed = min(bad, 1)
        own, other = (ranks[rank][number] for rank in (failed, 1 - failed))
        assert message in own
        assert f"TrainingError: rank {failed} failed, and rank {1 - failed} ends with it: " in other
        assert message in other


@forked
def test_a_rank_that_dies_ends_the_others() -> None:
    started = time.monotonic()
    ends = ends_of_ranks(3, rank_run.with_a_rank_that_dies, 1)
    assert time.monotonic() - started < 60
    assert [kind for kind, _ in ends] == ["raised", "died", "raised"]
    for rank in (0, 2):
        assert "has lost another rank, which ended or hangs: start again from the last checkpoint" in ends[rank][1]


@forked
def test_ranks_with_other_data_or_settings_are_refused() -> None:
    calls = [rank_run.with_only_its_own_records, rank_run.with_other_settings, rank_run.with_another_seed]
    for errors in on_ranks(2, rank_run.errors_of, calls):
        for name, text in zip(("data", "configuration", "seed"), errors, strict=True):
            assert text.startswith(f"InputError: {name} must be the same on all ranks, the whole of it")


def test_an_audit_on_several_ranks_is_refused(monkeypatch, tmp_path) -> None:
    """Under torchrun each rank would audit all records by itself, in the same folder."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match=r"audit must run on one rank: .* got 2"):
        audit("wine", out=tmp_path / "audit")
    assert not (tmp_path / "audit").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    refuse_several("audit")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setenv("WORLD_SIZE", "2")  # of something else
    refuse_several("audit")


# --- checkpoints -------------------------------------------------------------------------


@forked
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1), (1, 3), (2, 2)])
def test_runs_resume_on_another_number_of_ranks(before: int, after: int, tmp_path) -> None:
    """Stopped after step 5, saved at step 4; the end is that of a run that was never stopped, bit for bit."""
    folder, whole = str(tmp_path / "run"), rank_run.outcome(rank_run.made().fit(8))
    ends = [rank_run.stopped(folder, 5)] if before == 1 else on_ranks(before, rank_run.stopped, folder, 5)
    assert all("stopped" in text and "not stopped" not in text for text in ends)
    found = [rank_run.resumed(folder)] if after == 1 else on_ranks(after, rank_run.resumed, folder)
    for one in found:
        assert_same(whole, one)


@forked
def test_ranks_without_a_shard_have_nothing_to_do() -> None:
    alone = rank_run.trained("batches", shards=1)
    for rank, found in enumerate(on_ranks(2, rank_run.trained_with_warnings, "batches", 1)):
        text = "1 of 2 ranks have nothing to do: this run has 1 shards. To use more ranks, begin it with more shards"
        assert (text in found.pop("warnings")) == (rank == 0)
        assert_same(alone, found)


@forked
def test_a_run_keeps_its_shards(tmp_path) -> None:
    folder = str(tmp_path / "run")
    on_ranks(2, stop_without_shards, folder)
    whole = rank_run.outcome(rank_run.made(shards=2).fit(8))
    assert_same(whole, rank_run.resumed(folder, shards=None))
    with pytest.raises(CheckpointError, match="the shards differs"):
        rank_run.resumed(folder, shards=3)


def stop_without_shards(folder: str) -> str:
    return rank_run.stopped(folder, 5, shards=None)


def test_checkpoints_say_how_many_shards_they_have(tmp_path) -> None:
    """A run in one process has one; it is not begun anew with two by accident."""
    rank_run.stopped(str(tmp_path), 5, shards=None)
    with pytest.raises(CheckpointError, match="shards"):
        rank_run.resumed(str(tmp_path), shards=2)
    assert rank_run.resumed(str(tmp_path), shards=1)["shards"] == 1


def test_many_shards_of_few_records() -> None:
    assert Poisson(3, 0.5).batch(1, 0, (1, 1)).tolist() == []
    found = rank_run.trained("everything", shards=24)
    assert found["shards"] == 24
