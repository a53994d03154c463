"""Checks that numbers are finite: at once on a CPU, some steps later on a GPU, so that no step waits for the device.

Nothing is released or saved in between: a learner settles what is pending before it evaluates, saves or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from reconbound.training.settings import Fault

#: Steps between two looks at a GPU's results.
STEPS = 64


class FiniteChecks:
    """Keeps results of checks until they are looked at.

    Args:
        steps: the number of steps after which they are looked at; 0 for at once.

    Attributes:
        step: the present step, named by the errors that are found later.
    """

    def __init__(self, steps: int = 0) -> None:
        self.steps, self.step = steps, 0
        self._pending: list[tuple[int, Tensor, Callable[[], Fault]]] = []

    def add(self, finite: Tensor, explain: Callable[[], Fault]) -> None:
        """Adds a result; raises a Fault if it is looked at and is False.

        Args:
            finite: a bool of no dimension, on any device.
            explain: returns the fault that there is if it is False.
        """
        due = self.is_due
        self._pending.append((self.step, finite, explain))
        if due:
            self.settle()

    @property
    def is_due(self) -> bool:
        """Returns whether the next result that is added is looked at, with all that are pending."""
        return self.steps == 0 or (bool(self._pending) and self.step - self._pending[0][0] >= self.steps)

    def settle(self) -> None:
        """Looks at all results; raises the Fault of the first that is False, with its step."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        results = torch.stack([finite for _, finite, _ in pending]).tolist()
        for (step, _, explain), finite in zip(pending, results, strict=True):
            if not finite:
                fault = explain()
                fault.step = step
                raise fault

    def drop(self) -> None:
        """Forgets what is pending: of a state that is given up."""
        self._pending = []


def all_finite(*values: Tensor) -> Tensor:
    """Returns whether all numbers are finite, as a bool of no dimension on their device.

    Their largest size says so, found at once: on a GPU a check of each tensor by itself takes longer than a step's sum.
    """
    flat = torch.cat([value.detach().flatten() for value in values])
    if flat.numel() == 0:
        return torch.ones((), dtype=torch.bool, device=flat.device)
    size: Tensor = torch.linalg.vector_norm(flat, float("inf"))
    return size.isfinite()


def largest_parameter(params: Mapping[str, Tensor]) -> Tensor:
    """Returns the largest absolute value of all parameters; NaN where one is."""
    norms = torch._foreach_norm([p.detach() for p in params.values()], float("inf"))
    return torch.stack([norm.double() for norm in norms]).max()
