"""Ledgers of different records of one run, joined, are the ledger of all records; nothing counts twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from reconbound import Account, FisherAccountant
from reconbound._internal.checks import InputError
from reconbound.fisher import StepInformation
from reconbound.fisher.worlds import StepDistances

N, D, T, Q = 12, 3, 6, 0.4
OPTIONS: dict[str, Any] = {"diagonal": "all", "spectral": True, "keep_runs_at": (3, T), "worlds": ("age",)}


def ledger(**changes: Any) -> FisherAccountant:
    rules = {"rules": ("exact", "paper"), **changes.pop("account", {})}
    account = Account(1.0, 1.0, Q, clip="hard", records=N, features=D, steps=T, **rules)
    return FisherAccountant(account, **{**OPTIONS, **changes})


def information(index: torch.Tensor, generator: torch.Generator) -> StepInformation:
    one = lambda *shape: torch.rand(len(index), *shape, generator=generator, dtype=torch.float64)  # noqa: E731
    norm = one()
    return StepInformation(
        loss=one(), norm=norm, factor=torch.ones_like(norm), clipped_norm=norm, along=one(), across=one(),
        across_error=one(), gradient_sum={}, features=D, probes=1, diagonal_along=one(D), diagonal_across=one(D),
        diagonal_error=one(D), spectral=one(), spectral_bound=one() + 1, noise_multiplier=1.0, max_grad_norm=1.0,
        clip="hard", caveats=("none",),
    )  # fmt: skip


def rows(found: StepInformation, kept: torch.Tensor) -> StepInformation:
    changes = {name: value[kept] for name, value in vars(found).items() if isinstance(value, torch.Tensor)}
    return replace(found, **changes)


def distances(norm: torch.Tensor) -> StepDistances:
    return StepDistances(norm, norm, {"age": norm / 2}, {"age": norm**2 / 4}, 1.0, "hard")


def fill(whole: FisherAccountant, shards: list[FisherAccountant], run: int, stratified: bool) -> None:
    """Adds the same measurements to one ledger of all records, and to one for each third of them."""
    generator = torch.Generator().manual_seed(run)
    size = N // len(shards)
    for each in (whole, *shards):
        each.begin_run(f"{run:032x}")
    for step in range(T):
        batch = torch.arange(N) if stratified else torch.nonzero(torch.rand(N, generator=generator) < Q).flatten()
        found = information(batch, generator)
        for each, kept in ((whole, batch >= 0), *((s, batch // size == k) for k, s in enumerate(shards))):
            part = rows(found, kept)
            how = {"weight": Q if stratified else 1.0, "stratified": stratified}
            each.add(batch[kept], part, **how)
            each.add_distances(batch[kept], distances(part.clipped_norm), **how)
            each.keep_step(step + 1)


def assert_same(one: FisherAccountant, other: FisherAccountant) -> None:
    for name, value in other.state().items():
        rtol = 1e-6 if name == "weights" else 1e-12  # the ledger counts weights in float32
        torch.testing.assert_close(one.state()[name], value, rtol=rtol, atol=0, msg=name)


@pytest.mark.parametrize("stratified", [False, True])
def test_joined_ledgers_are_the_ledger_of_all_records(stratified: bool) -> None:
    whole, shards = ledger(), [ledger() for _ in range(3)]
    for run in range(3):
        fill(whole, shards, run, stratified)
        first, *others = shards
        for other in others:
            before = other.state()
            first.join(other)
            assert all(torch.equal(value, before[name]) for name, value in other.state().items())
        assert_same(first, whole)
        for each in (whole, first):
            each.finish_run()
        assert first.caveats == whole.caveats == ("none",)
        for other in others:  # each rank goes on from the joined ledger
            other.restore(first.state(), first.runs)
    assert_same(first, whole)
    torch.testing.assert_close(first.upper(warn=False), whole.upper(warn=False), rtol=1e-12, atol=0)
    torch.testing.assert_close(first.divergence("age", 0.9), whole.divergence("age", 0.9), rtol=1e-12, atol=0)


def test_nothing_is_counted_twice() -> None:
    whole, shards = ledger(), [ledger() for _ in range(2)]
    fill(whole, shards, 0, stratified=False)
    first, second = shards
    first.join(second)
    before = first.state()
    for again, record in ((second, int(torch.nonzero(second.measured())[0])), (whole, 0)):
        with pytest.raises(InputError, match=f"must have measured other records: both ledgers have record {record}"):
            first.join(again)
    assert all(torch.equal(value, before[name]) for name, value in first.state().items())


def test_norms_of_a_record_are_counted_once() -> None:
    first, second = (ledger(account={"rules": None}, diagonal="none", spectral=False) for _ in range(2))
    for each in (first, second):
        each.begin_run("ab" * 16)
        each.add_norms([4], torch.tensor([0.5]))
    with pytest.raises(InputError, match="both ledgers have record 4, which would count twice"):
        first.join(second)


@pytest.mark.filterwarnings("ignore:a run was not measured over all")
@pytest.mark.parametrize("other", ["another run", "no run", "another run before", "finished"])
def test_other_runs_are_refused(other: str) -> None:
    first, second = ledger(), ledger()
    first.begin_run("ab" * 16)
    if other != "no run":
        second.begin_run({"another run": "ef", "another run before": "cd", "finished": "ab"}[other] * 16)
        second.add(torch.tensor([1]), information(torch.tensor([1]), torch.Generator()))
    if other in ("finished", "another run before"):
        second.finish_run()
    if other == "another run before":
        second.begin_run("ab" * 16)
    with pytest.raises(InputError, match="other must be of the same run, under way"):
        first.join(second)


def test_other_ledgers_are_refused() -> None:
    one = ledger()
    one.begin_run("ab" * 16)
    for other, why in ((one, "another ledger"), (None, "must be a FisherAccountant"),
                       (ledger(worlds=()), "same account, with the same parts"),
                       (ledger(feature_scale=2.0), "same feature_scale")):  # fmt: skip
        with pytest.raises(InputError, match=why):
            one.join(other)  # type: ignore[arg-type]
    behind = ledger()
    for each in (one, behind):
        each._fingerprints.current = "ab" * 16
    one.keep_step(3)
    with pytest.raises(InputError, match="must have kept as many steps of this run"):
        one.join(behind)
