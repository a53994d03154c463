"""Small audits for the tests: a table of people, tiny images, and the run that tests/test_audit_kills.py kills."""

from __future__ import annotations

import stat
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from reconbound._internal.files import unsealed
from reconbound.auditing.options import AuditOptions
from reconbound.auditing.run import run_audit
from reconbound.data import Dataset, Feature, Pixels
from reconbound.report.folder import LEAKAGE
from reconbound.training.private_sgd import PrivateSGD


def people(records: int = 40, seed: int = 0) -> Dataset:
    """Two private columns and a public one; two classes."""
    rng = np.random.default_rng(seed)
    inputs = rng.random((records + 10, 3)).astype(np.float32)
    inputs[:, 2] = inputs[:, 2] > 0.5
    targets = (inputs[:, 0] + inputs[:, 1] > 1).astype(np.int64)
    features = (
        Feature("age", "years", 0.0, 120.0),
        Feature("income", "$", 0.0, 1e5, declared=False),
        Feature("sex = f", private=False),
    )
    names = tuple(f"row {i}" for i in range(records))
    return Dataset(
        "people", "table", inputs[:records], targets[:records], inputs[records:], targets[records:], features,
        class_names=("no", "yes"), target=Feature("loan", private=False), record_names=names,
    )  # fmt: skip


def pictures(records: int = 30, size: int = 6, planes: int = 1) -> Dataset:
    rng = np.random.default_rng(1)
    inputs = rng.random((records + 5, planes, size, size)).astype(np.float32)
    targets = rng.integers(0, 3, records + 5)
    return Dataset(
        "pictures", "image", inputs[:records], targets[:records], inputs[records:], targets[records:],
        Pixels((planes, size, size), 255.0), class_names=("a", "b", "c"),
    )  # fmt: skip


def options(**changes: Any) -> AuditOptions:
    chosen: dict[str, Any] = {"model": "linear", "steps": 12, "runs": 2, "sample_rate": 0.25, "seed": 3, "lr": 0.5}
    return AuditOptions().with_changes(**{**chosen, **changes})


class Bins(nn.Module):
    """Cuts every number into ten steps: no derivative."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 10).floor() / 10


class Lookup(nn.Module):
    """Looks the first column's step up in an embedding, as a model of categories would."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.table((x[:, 0] * 10).long())
        return found


class Mixing(nn.Module):
    """Subtracts the mean of the batch, and cuts into steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x - x.mean(0)) * 10).floor()


class Far(nn.Module):
    """Rounds to whole parts: by how much the loss is off depends on the records."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 8 + 2.0**22) - 2.0**22


class Sometimes(nn.Module):
    """Cuts into steps where the first number is this one: of one record of `people`, and of none that is made up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps: torch.Tensor = (x * 10).floor() / 10 if bool((x[:, 0] == 0.5118216276168823).any()) else x
        return steps


def binned(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(Bins(), nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, outputs))


def looked_up(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(Lookup(), nn.Linear(4, outputs))


def far(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(Far(), nn.Linear(shape[0], outputs))


def sometimes(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(Sometimes(), nn.Linear(shape[0], outputs))


def mixing(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(Mixing(), nn.Linear(shape[0], outputs))


def kinked(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 8), nn.ReLU(), nn.Linear(8, outputs))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def assert_same_leakage(one: Path, other: Path) -> None:
    """Equal in every tensor and fact (the order of the parts of a safetensors header is free)."""
    (tensors, facts), (others, other_facts) = (unsealed(folder / LEAKAGE) for folder in (one, other))
    assert facts == other_facts
    assert tensors.keys() == others.keys()
    for name, value in tensors.items():
        assert torch.equal(value, others[name]), name


def _slowly(seconds: float) -> None:
    """Makes every step of a training wait, so that kills fall all over it."""
    torch.set_num_threads(1)
    step = PrivateSGD._train_step

    def paused(self: PrivateSGD) -> None:
        time.sleep(seconds)
        step(self)

    PrivateSGD._train_step = paused  # type: ignore[method-assign]


def slow(folder: str, pipe: Any) -> None:
    """The audit that is killed."""
    _slowly(0.02)
    pipe.send("ready")
    run_audit(people(), options(), Path(folder), show=False)
    pipe.send("done")


def slow_command(words: list[str], pipe: Any) -> None:
    """The same from the command line."""
    from reconbound.cli import app as cli

    _slowly(0.05)
    pipe.send("ready")
    assert cli.run(words) == 0
    pipe.send("done")
