"""Callbacks: when they are called, what goes into the history, and that a restart repeats nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reconbound import PrivateSGD, Settings
from reconbound._internal.checks import InputError
from reconbound.training.settings import Callback


class Counting(Callback):
    """Notes every call; stops the training once at a given step."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.steps: list[tuple[int, int]] = []
        self.ends: list[int] = []
        self.stop_at = stop_at

    def on_step(self, learner: PrivateSGD) -> dict[str, float] | None:
        if (learner.run, learner.step) == (0, self.stop_at):
            self.stop_at = None
            raise KeyboardInterrupt
        self.steps.append((learner.run, learner.step))
        return {"twice": 2.0 * learner.step} if learner.step % 2 else None

    def on_run_end(self, learner: PrivateSGD) -> None:
        self.ends.append(learner.run)


def learner(*callbacks: Any, **options: Any) -> PrivateSGD:
    torch.manual_seed(0)
    x, y = torch.rand(8, 3), torch.arange(8) % 2
    loss: Any = lambda out, target: nn.functional.cross_entropy(out, target, reduction="none")  # noqa: E731
    settings = Settings(1.0, 1.0, 0.5, seed=2**100)
    return PrivateSGD(nn.Linear(3, 2), loss, x, y, settings, callbacks=callbacks, progress=False, **options)


def test_callbacks_are_called_at_the_start_and_after_each_step() -> None:
    one = Counting()
    trained = learner(one).repeat(2, steps=3)
    assert one.steps == [(run, step) for run in range(2) for step in range(4)]
    assert one.ends == [0, 1]
    assert trained.history == [{"run": r, "step": s, "twice": 2.0 * s} for r in range(2) for s in (1, 3)]


def test_numbers_of_callbacks_stand_beside_those_of_evaluate() -> None:
    trained = learner(Counting(), evaluate=lambda model: {"one": 1.0}, evaluate_every=1).fit(2)
    assert trained.history == [
        {"run": 0, "step": 1, "one": 1.0, "twice": 2.0},
        {"run": 0, "step": 2, "one": 1.0},
    ]


@pytest.mark.parametrize("stop_at", [0, 1, 3, 4])
def test_interrupted_callback_leaves_no_duplicate_in_history(tmp_path, stop_at: int) -> None:
    whole = learner(Counting()).fit(4)
    with pytest.raises(KeyboardInterrupt):
        learner(Counting(stop_at), checkpoint=tmp_path, every=1).fit(4)
    resumed = learner(Counting(), checkpoint=tmp_path, every=1).fit(4)
    assert resumed.history == whole.history
    assert torch.equal(resumed.model.weight, whole.model.weight)


def test_objects_that_are_no_callbacks_are_refused() -> None:
    one = learner()
    for wrong in (print, "x", [print]):
        with pytest.raises(InputError, match=r"callbacks must be a list of reconbound.training.settings.Callback"):
            PrivateSGD(one.model, one.loss_fn, one.inputs, one.targets, one.settings, callbacks=wrong)  # type: ignore


def test_ledger_is_complete_at_step_counts_within_the_run() -> None:
    with pytest.raises(InputError, match="whole_at must be at most the run's 3 steps, got 4"):
        learner(whole_at=[4]).fit(3)
    early = learner(whole_at=[2]).fit(3)
    assert early.accountant is not None
    assert bool((early.accountant.measured() >= 2).all())  # once in each of the two stretches
