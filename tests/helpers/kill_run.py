"""The run that tests/test_kills.py kills: Adam, a schedule, an evaluation at every step, everything kept."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.optim import Adam
from torch.optim.lr_scheduler import StepLR

from learning import learner

RUNS = 4

Adam([torch.zeros(1, requires_grad=True)])  # the first optimizer loads torch's compiler, a second: before the fork


def weight(model: nn.Sequential) -> dict[str, float]:
    return {"weight": model[0].weight.abs().sum().item()}


def slow_weight(model: nn.Sequential) -> dict[str, float]:
    time.sleep(0.01)  # so that kills fall all over the run
    return weight(model)


def run(folder: Any, call: str, evaluate: Any = weight) -> Any:
    """call: "fit 200" or "repeat 30", the number being that of steps."""
    one = learner(
        checkpoint=folder,
        every=3,
        evaluate=evaluate,
        evaluate_every=1,
        optimizer=lambda p: Adam(p, lr=0.05),
        schedule=lambda o: StepLR(o, 25, 0.5),
        rules=("exact", "paper"),
        diagonal="all",
        spectral=True,
    )
    kind, steps = call.split()
    return one.fit(int(steps)) if kind == "fit" else one.repeat(RUNS, int(steps))


def in_process(folder: str, call: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    pipe.send("ready")
    run(folder, call, slow_weight)
    pipe.send("done")
