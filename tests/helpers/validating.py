"""Small models, a batch and the error that the checks of models raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reconbound.validate import ModelError

per_record = nn.CrossEntropyLoss(reduction="none")


class Wrapped(nn.Module):
    """A linear layer, a function, a linear layer: the function is the forward's own, in no module of its own."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(self.first(x)))


class Inner(nn.Module):
    """The function as a module, to see that messages name it."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def network(middle: nn.Module | None = None) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh() if middle is None else middle, nn.Linear(8, 3))


def batch(records: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(records, 6, generator=generator), torch.arange(records) % 3


def says(message: str) -> Any:
    return pytest.raises(ModelError, match=message)
