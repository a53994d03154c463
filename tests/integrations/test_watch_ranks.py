"""The ledger beside Opacus on several ranks: that of one rank on the same batches, and what is refused."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler

import opacus_ranks
from many_ranks import ends_of_ranks, on_ranks
from opacus_examples import example
from reconbound.integrations import measuring
from reconbound.integrations.loaders import DrawnBatches, RecordedShareSampler, forget_batches, record_batches
from reconbound.training.ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Full backward hook", "ignore:Secure RNG"),
]


def alone(case: str, batches: list[list[int]], monkeypatch: pytest.MonkeyPatch, measure: bool = False) -> Any:
    """Trains in one process on these batches, with the same noise."""
    size = len(batches) // opacus_ranks.EPOCHS
    epochs = iter([batches[k * size : (k + 1) * size] for k in range(opacus_ranks.EPOCHS)])
    training = opacus_ranks.made(case, lambda inner: inner)
    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", lambda self: iter(next(epochs)))
    monkeypatch.setattr(measuring, "new_seed", lambda: 11)  # that of rank 0
    ledger = training.watch(**opacus_ranks.options_of(training, measure))
    training.train(opacus_ranks.EPOCHS)
    return opacus_ranks.outcome(training, ledger)


def joined(found: list[dict[str, Any]]) -> list[list[int]]:
    """Returns the batches of all ranks together; no record is in two of them."""
    steps = [sorted(i for batch in parts for i in batch) for parts in zip(*(f["batches"] for f in found), strict=True)]
    assert all(a < b for step in steps for a, b in pairwise(step))
    return steps


@pytest.mark.parametrize(
    ("case", "size", "measure", "virtual"),
    [
        ("hooks", 2, False, None),
        ("hooks", 2, True, None),
        ("hooks", 3, False, 4),
        ("functorch", 2, False, None),
        ("ghost", 2, False, None),
        ("per layer", 2, False, None),
        ("sums", 2, False, None),
        ("example", 2, True, None),
        ("example", 4, False, None),
    ],
)
def test_ledger_is_that_of_one_rank(case: str, size: int, measure: bool, virtual: int | None, monkeypatch: Any) -> None:
    found = on_ranks(size, opacus_ranks.watched, case, measure, virtual)
    one = alone(case, joined(found), monkeypatch, measure)
    assert float(one["ledger"]["nats_mean"].max()) > 0.01
    for rank in found:
        assert rank["account"] == one["account"]
        assert rank["fingerprints"] == found[0]["fingerprints"]
        assert rank["steps"] == one["steps"] == len(one["batches"])
        for name, value in one["parameters"].items():
            np.testing.assert_allclose(rank["parameters"][name], value, rtol=0, atol=1e-6, err_msg=name)
        for name, value in one["ledger"].items():
            np.testing.assert_allclose(rank["ledger"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)
        noise = "one noise, that of rank 0, on the sum over all ranks"
        many = [text.replace(noise, "noise on the sum") for text in rank["statements"]]
        assert many == list(one["statements"]) != list(rank["statements"])


def test_opacus_own_distributed_example_gives_the_ledger_of_one_rank(tmp_path: Any, monkeypatch: Any) -> None:
    """cifar10.py from Opacus's package with three lines more, on two ranks and on one with the same batches."""
    if not example("cifar10").exists():
        pytest.skip("this Opacus came without its examples")
    found = on_ranks(2, opacus_ranks.watched_example, str(tmp_path / "two"))
    batches = joined(found)
    assert len(batches) == 9
    epochs = iter([batches[k : k + 3] for k in (0, 3, 6)])
    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", lambda self: iter(next(epochs)))
    monkeypatch.chdir(tmp_path)
    try:
        one = opacus_ranks.watched_example(str(tmp_path / "one"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert one["batches"] == batches
    assert float(one["ledger"]["nats_mean"].max()) > 0.01
    assert [rank["report"] for rank in found] == [True, False]
    for rank in found:
        assert (rank["account"], rank["steps"]) == (one["account"], one["steps"])
        assert rank["fingerprints"] == one["fingerprints"]
        for mine, theirs in zip(rank["parameters"], one["parameters"], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
        for name, value in one["ledger"].items():
            np.testing.assert_allclose(rank["ledger"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_records_may_be_divided_anew_in_each_epoch(monkeypatch) -> None:
    found = on_ranks(2, opacus_ranks.watched_in_epochs, 0)
    assert len({*found[0]["batches"][0], *found[0]["batches"][3], *found[0]["batches"][5]}) > 30
    one = alone("hooks", joined(found), monkeypatch)
    for name, value in one["ledger"].items():
        np.testing.assert_allclose(found[1]["ledger"][name], value, rtol=1e-9, atol=1e-12, err_msg=name)


def test_rank_0_writes_the_report(tmp_path) -> None:
    on_ranks(2, opacus_ranks.watched, "hooks", False, None, str(tmp_path / "report"))
    assert (tmp_path / "report" / "report.html").exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (opacus_ranks.with_one_seed, r"data_loader must draw from another seed on each rank, .* got 'one on ranks"),
        (opacus_ranks.with_empty_batches, "data_loader must not draw an empty batch on any rank"),
        (opacus_ranks.with_the_loader_of_one_process, "it draws the records of all ranks on each"),
        (opacus_ranks.with_the_loader_of_ranks_only, "it draws the records of one rank"),
        (opacus_ranks.with_other_noise, "noise_multiplier must be the same on all ranks"),
        (opacus_ranks.with_sharded_parameters, "each rank draws the noise of its own piece of the parameters"),
        (opacus_ranks.with_a_rank_that_stops, "noise_multiplier must stay 0.8"),
    ],
)
def test_ranks_that_cannot_be_accounted_for_are_refused_on_all(target: Any, message: str) -> None:
    for kind, text in ends_of_ranks(2, target):
        assert kind == "raised"
        assert re.search(message, text.splitlines()[0]), text


def test_ranks_that_divide_the_records_otherwise_are_refused() -> None:
    for kind, text in ends_of_ranks(2, opacus_ranks.watched_in_epochs, 1):
        assert kind == "raised"
        assert "data_loader must give each record to one rank: call set_epoch on all of them" in text


def test_recorded_sampler_draws_as_opacus_does(monkeypatch) -> None:
    """The same batches from the same numbers, of each rank; and it is as before once it is forgotten."""
    for rank, size in ((0, 1), (1, 3), (2, 3)):
        monkeypatch.setattr(torch.distributed, "get_rank", lambda rank=rank: rank)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=size: size)
        options = {"total_size": 100, "sample_rate": 0.3, "steps": 20}
        drawn = []
        for recorded in (False, True):
            generator = torch.Generator().manual_seed(4)
            sampler = DistributedUniformWithReplacementSampler(generator=generator, **options)
            if recorded:
                batches = DrawnBatches(sampler, lambda: False, ahead=False)
                record_batches(sampler, batches, Ranks())
                assert isinstance(sampler, RecordedShareSampler)
            drawn.append([batch.tolist() for batch in sampler])
        assert drawn[0] == drawn[1]
        assert [batches.take(len(batch)).tolist() for batch in drawn[1]] == drawn[1]
        forget_batches(sampler)
        assert type(sampler) is DistributedUniformWithReplacementSampler
        assert not {"batches", "ranks"} & vars(sampler).keys()
