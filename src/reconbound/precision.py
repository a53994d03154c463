"""How well a ledger's estimates are known, in words: said with every floor, and warned of where it is badly."""

from __future__ import annotations

import math

from torch import Tensor

from ._check import warn_user
from .validate.structure import ReconboundWarning

#: Floors whose median relative standard error is larger come with a warning: an estimate that is half too small, as is
#: common then, makes a floor that is twice too high.
COARSE = 0.5
HIGH = "Such estimates are more often too high than too low."


def relative_median(value: Tensor, error: Tensor) -> float:
    """Median of error/value where the value is positive; infinite where nothing was measured.

    >>> import torch
    >>> relative_median(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 0.2, torch.inf]))
    0.10000000149011612
    """
    there = value > 0
    return float((error[there] / value[there]).median()) if bool(there.any()) else math.inf


def told(measured: Tensor, relative: float, of: str = "", *, runs: int) -> str:
    """What stands in a floor's `assumes`; measured: how often each record was, (N,), over so many runs.

    >>> import torch
    >>> told(torch.tensor([1, 3, 3]), 0.42, runs=2)
    'estimated: measured 3 times per record (median), relative standard error 42 % (median)'
    """
    times = float(measured.double().median()) if len(measured) else 0.0
    size = f"relative standard error{of} {100 * relative:.0f} % (median)"
    if math.isinf(relative):
        size = f"standard error{of} not known"
    elif runs < 2:
        size += " by measuring alone: another run would differ by more"
    return f"estimated: measured {times:g} time{'' if times == 1 else 's'} per record (median), {size}"


def warn_if_coarse(relative: float, said: str) -> None:
    """Warn, with the cure, where the median relative standard error is above COARSE or not known."""
    if relative <= COARSE:
        return
    warn_user(
        f"floors from so few measurements are more often too high than too low, many by a factor of 2 and some of 10 "
        f"({said}): measure more often (a larger Settings.budget; in a loop of your own, every record once in a block "
        "of steps, add(..., stratified=True)) or average more runs (repeat)",
        ReconboundWarning,
    )


def warn_if_silent(said: tuple[str, ...]) -> None:
    """Warn of records with no information at all: a smooth model that learns has some about every record."""
    if said:
        warn_user(
            f"{said[0]}; their gradients do not depend on them at all, as when training has diverged or the outputs "
            "are saturated: look at the loss, and lower lr or the noise",
            ReconboundWarning,
        )
