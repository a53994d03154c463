"""Any optimizer and schedule survives a stop."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, MultiStepLR, SequentialLR, StepLR

from learning import (
    SameNoise,
    flat,
    learner,
    network,
    same_state,
)
from reconbound._internal.checks import InputError
from reconbound.training.private_sgd import PrivateSGD


class Counting(torch.optim.Optimizer):
    """Keeps numbers, words, None and lists as its state, as some optimizers do."""

    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "pair": (1, 2)})

    def step(self, closure=None):
        for group in self.param_groups:
            assert isinstance(group["pair"], tuple)
            for p in group["params"]:
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["past"] = [*state.get("past", [])[-2:], p.grad.clone()]
                state["note"], state["none"] = "word", None
                with torch.no_grad():
                    p -= group["lr"] / state["count"] * torch.stack(state["past"]).mean(0)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "counting": Counting,
    "groups": lambda p: torch.optim.SGD([{"params": p[:2], "lr": 0.5}, {"params": p[2:]}], lr=0.1, momentum=0.5),
}
SCHEDULES = {
    "none": None,
    "step": lambda o: StepLR(o, 3, 0.5),
    "lambda": lambda o: LambdaLR(o, lambda t: 1 / (1 + t)),
    "milestones": lambda o: MultiStepLR(o, [2, 5], 0.1),
    "cosine": lambda o: CosineAnnealingLR(o, 10),
    "sequence": lambda o: SequentialLR(o, [StepLR(o, 1, 0.9), CosineAnnealingLR(o, 6)], milestones=[4]),
}


class Stop(Exception):
    pass


def stopped(folder: Path, **options) -> PrivateSGD:
    """A learner whose run is stopped after step 5 with a checkpoint there, and gone on with by a new one."""

    def stop(model: nn.Module) -> dict[str, float]:
        if first.step == 6:
            raise Stop
        return {}

    first = learner(checkpoint=folder, every=5, evaluate=stop, evaluate_every=1, **options)
    with pytest.raises(Stop):
        first.fit(9)
    return learner(network(seed=99), checkpoint=folder, every=5, **options).fit(9)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_optimizer_survives_a_stop(tmp_path, name: str) -> None:
    options = {"optimizer": OPTIMIZERS[name]}
    assert same_state(stopped(tmp_path, **options), learner(**options).fit(9))


@pytest.mark.parametrize("name", SCHEDULES)
def test_any_schedule_survives_a_stop(tmp_path, name: str) -> None:
    options = {"schedule": SCHEDULES[name], "lr": 0.5, "momentum": 0.5}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*|.*epoch parameter.*")  # SequentialLR's own
        whole, other = learner(**options).fit(9), stopped(tmp_path, **options)
    assert same_state(other, whole)
    assert other.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_weight_decay_is_outside_the_private_sum() -> None:
    """p ← p − lr (noisy mean + λ p): the mechanism is the same."""
    plain, decayed = learner(kind=SameNoise, lr=0.1), learner(kind=SameNoise, lr=0.1, weight_decay=0.5)
    start = flat(plain.model)
    plain.fit(1)
    decayed.fit(1)
    torch.testing.assert_close(flat(decayed.model), flat(plain.model) - 0.05 * start, rtol=1e-5, atol=1e-6)


def test_optimizers_that_need_a_pickle_are_refused(tmp_path) -> None:
    class Strange(Counting):
        def step(self, closure=None):
            super().step()
            self.state[self.param_groups[0]["params"][0]]["odd"] = {1, 2}

    with pytest.raises(ValueError, match="without a pickle"):
        learner(optimizer=Strange, checkpoint=tmp_path, every=1).fit(2)


def test_optimizer_instance_is_refused() -> None:
    model = network()
    made = torch.optim.Adam(model.parameters())
    with pytest.raises(InputError, match=r"optimizer must be a function .*a new optimizer, for each run"):
        learner(model, optimizer=made)
    with pytest.raises(InputError, match="schedule must be a function"):
        learner(model, schedule=StepLR(made, 2))
