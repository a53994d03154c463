"""Floors below, attacks above: what the attacks find on small trainings, and that faults in the accountant show."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from learning import losses
from reconbound._internal.checks import InputError
from reconbound.attacks import Changed, Training, train_many
from reconbound.attacks.limits import Distinguished, Reconstruction
from reconbound.attacks.sandwich import (
    Plan,
    Sandwich,
    Stated,
    Target,
    attack_records,
    floors_of_information,
    pieces_of,
    with_family_confidence,
)
from reconbound.attacks.trainings import clipped_sums
from reconbound.bounds import success_from_kl
from reconbound.training.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import planted_faults

GREY = torch.full((3,), 0.5, dtype=torch.float64)


def training(noise: float = 0.4, **changes) -> Training:
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(14, 3, generator=generator, dtype=torch.float64)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = Settings(noise, 1.0, 0.5, lr=0.3, seed=5, rules=None)
    return replace(Training(model, losses, x, torch.arange(14) % 2, own, 6), **changes)


def test_worlds_without_a_record_and_with_another() -> None:
    given = training()
    other = torch.rand(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    (real,) = train_many(given, 8, 9)
    (removed,) = train_many(given, 8, 9, world=Changed(2))
    (changed,) = train_many(given, 8, 9, world=Changed(2, other), records=[2])
    assert bool(real.took_part(2).any())
    assert not bool(removed.took_part(2).any())
    assert torch.equal(changed.took_part(2)[:, 0], real.took_part(2)[:, 0])  # the same batches
    for trial in range(8):
        x = given.inputs.clone()
        x[2] = other[trial]
        (plain,) = train_many(replace(given, inputs=x), 8, 9)
        assert torch.allclose(plain.sums[trial], changed.sums[trial], rtol=1e-10, atol=1e-12)
    first = real.took_part(2)[:, 0]
    assert 0 < int(first.sum()) < 8
    assert torch.allclose(removed.clean[~first, 0], real.clean[~first, 0])
    assert not torch.allclose(removed.clean[first, 0], real.clean[first, 0])


def worlds_of_three_records() -> tuple[torch.Tensor, list[Changed]]:
    """Returns the world of records 2, 5 and 0 in eight trainings (0: real, 1: left out, 2: grey), and the changes."""
    drawn = torch.randint(3, (8, 3), generator=torch.Generator().manual_seed(4))
    assert len(set(map(tuple, drawn.tolist()))) > 5
    changes = [
        Changed(record, inputs, drawn[:, k] == kind)
        for k, record in enumerate((2, 5, 0))
        for kind, inputs in ((1, None), (2, GREY[None]))
    ]
    return drawn, changes


def test_sums_of_trainings_with_worlds_of_their_own_are_those_of_single_worlds() -> None:
    given, (drawn, changes) = training(), worlds_of_three_records()
    generator = torch.Generator().manual_seed(2)
    w = torch.randn(8, given.size, generator=generator, dtype=torch.float64)
    took = torch.rand(8, 14, generator=generator) < 0.7
    for k, record in enumerate((2, 5, 0)):
        took[drawn[:, k] == 1, record] = False  # as `_train` does
    found = clipped_sums(given, w, took, changes)
    for trial in range(8):
        x = given.inputs.clone()
        x[[record for k, record in enumerate((2, 5, 0)) if drawn[trial, k] == 2]] = GREY
        alone = clipped_sums(replace(given, inputs=x), w, took)  # all trainings in the world of this one
        assert torch.equal(found[trial], alone[trial])
    assert not torch.allclose(found, clipped_sums(given, w, took))


def test_trainings_with_worlds_of_their_own_are_those_of_single_worlds(monkeypatch) -> None:
    given, (drawn, changes) = training(), worlds_of_three_records()
    (mixed,) = train_many(given, 8, 9, world=changes)
    for trial in range(8):
        x = given.inputs.clone()
        x[[record for k, record in enumerate((2, 5, 0)) if drawn[trial, k] == 2]] = GREY
        without = [Changed(record) for k, record in enumerate((2, 5, 0)) if drawn[trial, k] == 1]
        (alone,) = train_many(replace(given, inputs=x), 8, 9, world=without)
        assert torch.allclose(mixed.sums[trial], alone.sums[trial], rtol=1e-10, atol=1e-12)
        assert torch.equal(mixed.took[trial], alone.took[trial])
    monkeypatch.setattr("reconbound.attacks.trainings.FLOATS", 3 * given.size * 24)  # three trainings at a time
    took = torch.cat([part.took for part in train_many(given, 8, 9, world=changes)])
    for k, record in enumerate((2, 5, 0)):
        here = took[:, :, record].any(1)
        assert not bool(here[drawn[:, k] == 1].any())
        assert bool(here[drawn[:, k] != 1].any())


def test_parts_of_trainings_are_independent_and_all_are_there(monkeypatch) -> None:
    given = training()
    monkeypatch.setattr("reconbound.attacks.trainings.FLOATS", 3 * given.size * 24)  # batches of up to 24 records
    assert given.at_once == 3
    parts = list(train_many(given, 8, 2))
    assert [len(part.sums) for part in parts] == [3, 3, 2]
    sums = torch.cat([part.sums for part in parts])
    assert len(torch.unique(sums[:, 0, 0])) == 8


def test_fresh_parameters_for_each_training() -> None:
    def afresh(model: nn.Module) -> None:
        for module in model:
            if isinstance(module, nn.Linear):
                module.reset_parameters()

    starts = training(initialise=afresh).starts(3, 4)
    assert starts.shape == (3, training().size)
    assert not torch.equal(starts[0], starts[1])
    assert torch.equal(starts, training(initialise=afresh).starts(3, 4))
    assert torch.equal(training().starts(3, 4)[0], training().starts(3, 4)[2])


def test_sandwich_of_two_records() -> None:
    ticks: list[int] = []
    plan = Plan(30, 7, GREY, advance=ticks.append)
    first, second = attack_records(training(0.1), [Target(2, Stated(1e-9, 50.0, 50.0), "random"), Target(5)], plan)
    assert sum(ticks) == pieces_of(30, 2)
    assert (first.target.record, first.target.group, second.target.record) == (2, "random", 5)
    assert first.faults == second.faults == []
    assert np.array_equal(first.truth, training().inputs[2].numpy())
    for one in (first, second):
        assert one.membership is not None
        assert one.likeliest is not None
        assert one.probable is not None
        assert one.floor is not None
        assert one.cramer_rao is not None
        assert one.both is not None
        assert one.floor <= one.cramer_rao
        assert one.likeliest.variance > one.floor - 4 * one.likeliest.variance_error
        assert abs(one.membership.learned - one.nats[0][0]) < 4 * one.membership.learned_error + 4 * one.nats[0][1]
        assert one.membership.nats <= one.nats[0][0] + 4 * one.nats[0][1]
        assert one.both[1] <= one.both[0] <= one.both[2] <= np.square(one.truth - 0.5).mean() + 1e-12
        assert one.examples is not None
        assert one.examples.shape == (3, 3)
    again = next(attack_records(training(0.1), [Target(2, Stated(1e-9, 50.0, 50.0), "random")], plan))
    assert again.membership == first.membership
    assert np.array_equal(again.examples, first.examples)


def test_together_is_the_same_as_one_world_at_a_time_for_a_single_record() -> None:
    plan = Plan(300, 7, GREY, rebuild=0)
    apart, together = (
        next(attack_records(training(0.7), [Target(2)], replace(plan, together=way))) for way in (False, True)
    )
    assert together.membership != apart.membership
    for one, other in ((apart.membership, together.membership), (apart.replaced, together.replaced)):
        assert one is not None
        assert other is not None
        assert abs(other.trials - 300) < 4 * (900 * 2 / 9) ** 0.5
        assert abs(one.learned - other.learned) < 4 * np.hypot(one.learned_error, other.learned_error)
        for name in ("hits", "false_hits"):  # chances in about 300 trainings each
            assert abs(getattr(one, name) - getattr(other, name)) < 4 * (2 * 0.25 / 250) ** 0.5
    for (one_d, one_error), (other_d, other_error) in zip(apart.nats, together.nats, strict=True):
        assert abs(one_d - other_d) < 4 * np.hypot(one_error, other_error)


def test_together_each_record_learns_the_divergence_of_its_own_trainings(monkeypatch) -> None:
    monkeypatch.setattr("reconbound.attacks.trainings.FLOATS", 3 * training().size * 24 * 50)
    ticks: list[int] = []
    plan = Plan(400, 7, GREY, rebuild=3, together=True, advance=ticks.append)
    targets = [Target(record, group="random") for record in (2, 5, 0, 9)]
    found = list(attack_records(training(0.7), targets, plan))
    assert [one.target.record for one in found] == [2, 5, 0, 9]
    assert sum(ticks) == pieces_of(400, 4)
    for one in found:
        for tried, (nats, error) in zip((one.membership, one.replaced), one.nats, strict=True):
            assert tried is not None
            assert tried.learned_error < 0.15
            assert abs(tried.learned - nats) < 4 * np.hypot(tried.learned_error, error)
            assert tried.nats <= nats + 4 * error
        assert one.probable is not None
        assert one.probable.trials == 3
    assert len({one.membership.trials for one in found if one.membership is not None}) > 1


def test_records_together_must_be_different_and_in_each_world_more_than_once() -> None:
    with pytest.raises(InputError, match="records must be different ones"):
        next(attack_records(training(), [Target(2), Target(2)], Plan(20, 0, GREY, together=True)))
    with pytest.raises(InputError, match="trials must be larger"):
        next(attack_records(training(), [Target(2), Target(5)], Plan(2, 0, GREY, together=True)))


def test_membership_only_where_the_model_has_no_derivative() -> None:
    one = next(attack_records(training(), [Target(2)], Plan(5, 7, GREY, rebuild=0)))
    assert one.membership is not None
    assert one.both is not None
    assert (one.likeliest, one.probable, one.floor, one.examples, one.close_chances) == (None,) * 5


def test_records_are_rebuilt_from_so_many_trainings(monkeypatch) -> None:
    monkeypatch.setattr("reconbound.attacks.trainings.FLOATS", 2 * training().size * 3 * training().steps + 1)
    one = next(attack_records(training(0.1), [Target(2)], Plan(5, 7, GREY, rebuild=3)))
    assert one.membership is not None
    assert one.probable is not None
    assert one.likeliest is not None
    assert (one.membership.trials, one.probable.trials, one.likeliest.trials) == (5, 3, 3)


def test_no_likeliest_record_where_a_guess_is_better_or_the_model_is_large(monkeypatch) -> None:
    assert next(attack_records(training(9.0), [Target(2)], Plan(4, 7, GREY))).likeliest is None
    monkeypatch.setattr("reconbound.attacks.sandwich.FLOATS", 200)
    one = next(attack_records(training(0.1), [Target(2)], Plan(4, 7, GREY)))
    assert (one.likeliest, one.floor) == (None, None)
    assert one.probable is not None


def sandwich(**changes) -> Sandwich:
    tried = Distinguished(100, 0.9, 0.1, 0.8, 0.2, 1.0, 1.0, 1e-5, 1.0, 2.0, 0.1)
    good = Reconstruction(100, 0.1, 0.01, 0.1, 0.0, 0.1, 0.01)
    fields = {
        "target": Target(0, Stated(0.05, 1.5, 1.5)), "truth": np.ones(3), "reference": np.zeros(3), "membership": tried,
        "replaced": tried, "nats": ((1.5, 0.1), (1.5, 0.1)), "floor": 0.05, "cramer_rao": 0.06, "likeliest": good,
        "probable": good, "guess": 0.2, "both": (0.2, 0.1, 0.3), "close": (50, 20), "examples": None,
    }  # fmt: skip
    return Sandwich(**(fields | changes))


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, ""),
        ({"target": Target(0, Stated(0.05, 0.9, 1.5))}, "at least 1 nats of leaving the record out; 0.9 are stated"),
        ({"target": Target(0, Stated(0.05, 1.5, 0.9))}, "at least 1 nats of putting the reference in its place; 0.9"),
        ({"close": (95, 1)}, "the attack is close with a chance of at least 0.887; p_max is"),
        ({"both": (0.04, 0.03, 0.05)}, "the mean error at two values is at most 0.05; the floor is 0.0558"),
        ({"target": Target(0, Stated(0.15, 1.5, 1.5))}, "varies by 0.1 without visible bias; the floor is 0.15"),
        ({"target": Target(0, Stated(0.13, 1.5, 1.5))}, ""),  # within four standard errors
        (
            {"target": Target(0, Stated(0.15, 1.5, 1.5)), "likeliest": Reconstruction(3, 0.1, 0.01, 0.1, 0, 0.1, 0.01)},
            "",
        ),
        (
            {"target": Target(0, Stated(1.36, 1.5, 1.5)), "likeliest": Reconstruction(3, 0.1, 0.01, 0.1, 0, 0.1, 0.01)},
            "varies by 0.1 without visible bias; the floor is 1.36",
        ),  # 125.6 standard errors of two degrees of freedom
        (
            {"target": Target(0, Stated(1.35, 1.5, 1.5)), "likeliest": Reconstruction(3, 0.1, 0.01, 0.1, 0, 0.1, 0.01)},
            "",
        ),
        ({"target": Target(0, Stated())}, ""),
        ({"likeliest": None, "probable": None, "close": None, "both": None, "membership": None, "replaced": None}, ""),
        (
            {"target": Target(0, Stated(0.2, 9, 9)), "likeliest": Reconstruction(100, 0.2, 0.01, 0.1, 0.1, 0.1, 0.01)},
            "",
        ),
    ],
)
def test_faults_are_what_an_attack_may_not_do(changes, fault: str) -> None:
    found = sandwich(**changes).faults
    assert (not found) if not fault else (len(found) == 1 and fault in found[0])


def test_chances_to_be_close_are_limited_on_both_sides() -> None:
    close = sandwich().close_chances
    assert close is not None
    assert close[0][0] < 0.5 < close[0][1]
    assert close[1][0] < 0.2 < close[1][1]
    assert close[2] == success_from_kl(close[1][1], 1.5)


def test_family_confidence_and_floors() -> None:
    assert with_family_confidence(Plan(2, 0, GREY), 5).confidence == pytest.approx(0.99)
    assert floors_of_information(np.diag([1.0, 4.0])) == pytest.approx((0.4, 0.625))
    assert floors_of_information(np.diag([1.0, 0.0])) == (2.0, np.inf)
    assert floors_of_information(np.zeros((2, 2))) == (np.inf, np.inf)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(InputError, match="trials must be at least 2"):
        attack_records(training(), [Target(2)], Plan(1, 0, GREY))
    with pytest.raises(InputError, match="rebuild must be at least 2"):
        attack_records(training(), [Target(2)], Plan(2, 0, GREY, rebuild=1))
    for wrong in ([], [Target(14)], [Target(-1)]):
        with pytest.raises(InputError, match="records must be some indices from 0 to 13"):
            attack_records(training(), wrong, Plan(2, 0, GREY))
    with pytest.raises(InputError, match="reference must have 3 numbers"):
        attack_records(training(), [Target(2)], Plan(2, 0, GREY[:2]))
    with pytest.raises(InputError, match=r"settings.sampler must be poisson"):
        training(settings=Settings(1.0, 1.0, 0.5, sampler="fixed"))


@pytest.mark.slow
@pytest.mark.parametrize("fault", planted_faults.FAULTS)
def test_planted_faults_are_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planted_faults, "RUNS", 8)  # of 20: half the ledger is still 7 standard errors away
    found = planted_faults.examine(fault)
    if fault == "none":
        assert found.found == []
        assert found.ratio == pytest.approx(1.1, abs=4 * found.ratio_error)
    elif fault == "noise":
        assert found.ratio == pytest.approx(1 / 16, rel=0.5)
        assert found.away > 4
        assert any("nats of leaving the record out" in text for text in found.faults)
        assert any("the likeliest record varies" in text for text in found.faults)
    elif fault == "clip slope":
        assert found.ratio > 10
        assert found.found == ["it varies by more than 1.25 floors"]
    else:
        assert found.ratio == pytest.approx(0.55, abs=4 * found.ratio_error)
        assert found.away > 4
        assert "the attack varies less than the floor" in found.found
