"""Warnings point at the user's own line, however deep they arise."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from learning import losses
from reconbound import FisherAccountant, PrivateLogisticRegression, PrivateSGD, Settings
from reconbound.validate import check_batch

X, Y = torch.rand(12, 4), torch.arange(12) % 2
SETTINGS = Settings(1.0, 1.0, 0.5, budget="every", seed=1)


def network(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), *more, nn.Linear(5, 2))


def coarse() -> FisherAccountant:
    kept = PrivateSGD(network(nn.Tanh()), losses, X, Y, SETTINGS, progress=False).fit(2).accountant
    assert kept is not None
    return kept


CALLS: dict[str, Callable[[], object]] = {
    "check_batch": lambda: check_batch(network(nn.ReLU()), losses, X, Y),
    "PrivateSGD": lambda: PrivateSGD(network(nn.ReLU()), losses, X, Y, SETTINGS, progress=False).fit(2),
    "logistic": lambda: PrivateLogisticRegression(noise_std=1e-3, random_state=0).fit(
        np.asarray(X, dtype=float), np.asarray(Y)
    ),
    "summary": lambda: coarse().summary(),
    "mse_floor": lambda: coarse().mse_floor(),
}


@pytest.mark.parametrize("name", CALLS)
def test_warnings_point_here(name: str) -> None:
    with warnings.catch_warnings(record=True) as text:
        warnings.simplefilter("always")
        CALLS[name]()
    ours = [
        one for one in text if type(one.message).__module__.startswith("reconbound") or "reconbound" in one.filename
    ]
    assert ours
    assert {Path(one.filename).name for one in ours} == {"test_warnings.py"}
