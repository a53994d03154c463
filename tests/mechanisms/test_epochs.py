"""Epochs, steps and batches: no epoch is lost by rounding, whatever the sampler and the loader."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
from torch.utils.data import DataLoader

from reconbound.accounting.spec import Account
from reconbound.cli.bound import make_mechanism
from reconbound.cli.options import epochs_as_steps
from reconbound.training.sampling import ShuffledEpochs, batches_per_epoch, make_sampler, steps_of


def counted(**given: object) -> int:
    return make_mechanism({"noise_multiplier": 1.0, "sampler": "shuffle", **given}).steps  # type: ignore[attr-defined]


@pytest.mark.parametrize("rate", [0.9, 0.5, 0.51, 0.3, 1 / 3, 2 / 3, 0.01, 256 / 50000, 1.0, 1e-9])
@pytest.mark.parametrize("epochs", [1, 2, 10, 57])
def test_shuffled_epochs_are_counted_as_given(rate: float, epochs: int) -> None:
    """10 epochs at q = 0.9 were counted as 6."""
    assert counted(sample_rate=rate, epochs=epochs) == epochs
    assert counted(epochs=epochs) == epochs  # the rate has nothing to do with it
    assert counted(sample_rate=rate, epochs=epochs - 0.5) == epochs


def test_calibrate_finds_the_noise_of_ten_epochs(answer) -> None:
    """The noise was 6.81, at which ten epochs have an epsilon of 3.98."""
    words = ["--target-epsilon", 3, "--clip", "hard", "--sample-rate", 0.9, "--epochs", 10, "--sampler", "shuffle"]
    found = answer("calibrate", *words)
    assert found["noise_multiplier"] == pytest.approx(8.80, abs=0.005)
    assert found["mechanism"]["steps"] == 10


@pytest.mark.parametrize("drop_last", [False, True])
def test_loader_steps_never_undercount_epochs(drop_last: bool) -> None:
    """Against torch's own loader: in how many batches one record is after T steps, at most."""
    draw = random.Random(1)
    for _ in range(60):
        records, size = draw.randint(1, 40), draw.randint(1, 40)
        size = min(size, records)
        steps = draw.randint(1, 30)
        loader = DataLoader(range(records), batch_size=size, shuffle=True, drop_last=drop_last)
        seen = torch.zeros(records, dtype=torch.long)
        taken = 0
        while taken < steps:
            for batch in loader:
                seen[batch] += 1
                taken += 1
                if taken == steps:
                    break
        most = int(seen.max())
        rate = size / records
        assert counted(sample_rate=rate, steps=steps) >= most
        own = Account(1.0, 1.0, rate, "shuffle", records=records, features=1, steps=steps)
        assert own.mechanism().steps >= most
        exact = Account(
            1.0, 1.0, rate, "shuffle", records=records, features=1, steps=steps, batches_per_epoch=len(loader)
        )
        assert most <= exact.mechanism().steps == math.ceil(steps / len(loader))


def test_learner_and_calculator_count_the_same_epochs() -> None:
    for records, rate in ((200, 0.32), (10, 0.3), (7, 0.9), (1000, 0.256)):
        sampler = make_sampler("shuffle", records, rate)
        assert isinstance(sampler, ShuffledEpochs)
        steps = steps_of(sampler, 3)
        account = Account(1.0, 1.0, sampler.sample_rate, "shuffle", records=records, features=1, steps=steps,
                          batches_per_epoch=batches_per_epoch(sampler))  # fmt: skip
        assert account.mechanism().steps == 3 == counted(epochs=3)


@pytest.mark.parametrize("name", ["poisson", "fixed", "shuffle"])
def test_steps_of_epochs_are_rounded_up(name: str) -> None:
    """One epoch of 7 records in batches of 3 was 2 steps of fixed-size batches."""
    for records, rate, epochs in ((7, 3 / 7, 1.0), (7, 3 / 7, 1.01), (1000, 0.3, 2.5), (10, 0.1, 3.0)):
        sampler = make_sampler(name, records, rate)
        steps = steps_of(sampler, epochs)
        assert steps - 1 < epochs * sampler.steps_per_epoch * (1 + 1e-12)
        assert steps >= epochs * sampler.steps_per_epoch * (1 - 1e-12)
    assert batches_per_epoch(make_sampler("poisson", 5, 0.3)) is None


def test_many_epochs_lose_no_step() -> None:
    """The slack for rounding, a part in 10¹², took a thousand steps from 10¹⁵."""
    for epochs, rate in ((1e15, 1.0), (1e15, 0.5), (999999999999999.0, 1.0), (123456789.0, 0.001)):
        assert epochs_as_steps(epochs, rate) >= Fraction(epochs) / Fraction(str(rate)) - 1
    assert epochs_as_steps(1e15, 1.0) == 10**15
    assert epochs_as_steps(10, 1 / 3) == 30


def test_note_states_counted_steps(answer) -> None:
    words = ["bound", "--noise-multiplier", 1, "--sample-rate", "64/1797", "--sampler", "shuffle"]
    notes = " ".join(answer(*words, "--steps", 58)["notes"])
    for text in ("58 steps", "28 batches", "3 epochs", "--epochs"):
        assert text in notes
