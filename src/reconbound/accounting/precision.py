"""Statements of how precise a ledger's estimates are, for every floor, and warnings where they are imprecise."""

from __future__ import annotations

import math

from torch import Tensor

from reconbound._internal.checks import warn_user
from reconbound.validate.model import ReconboundWarning

#: Floors whose median relative standard error is larger come with a warning: an estimate that is half too small, as is
#: common then, makes a floor that is twice too high.
COARSE = 0.5
#: Floors from one run that were too high by more than a factor of 2, and of 10, in squared error: the largest shares of
#: the records in simulated trainings, with fewer than ten measurements of each record and with more
#: (docs/theory/accounting.md, "One run"; experiments/one_run.py).
OFTEN, ONE_RUN = 10, {False: (85, 74), True: (57, 28)}


def relative_median(value: Tensor, error: Tensor) -> float:
    """Returns the median of error/value where the value is positive; infinite where nothing was measured.

    Args:
        value: the estimates.
        error: their standard errors.

    >>> import torch
    >>> relative_median(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 0.2, torch.inf]))
    0.10000000149011612
    """
    there = value > 0
    return float((error[there] / value[there]).median()) if bool(there.any()) else math.inf


def how_far_off(times: float, *, squared: bool = True) -> str:
    """Returns a clause that says how far floors from one run were off in simulated trainings.

    The spread between one run's measurements does not show it, because the runs themselves differ.

    Args:
        times: the number of measurements per record in the run.
        squared: whether the floors are squared errors, or their roots.

    >>> how_far_off(3.0)
    'in simulated trainings up to 85 % of the floors from one run were more than 2 times too high, and up to 74 % more
    than 10 times'
    """
    two, ten = ONE_RUN[times >= OFTEN]
    factors = ("2", "10") if squared else ("1.4", "3.1")
    return (
        f"in simulated trainings up to {two} % of the floors from one run were more than {factors[0]} times too high, "
        f"and up to {ten} % more than {factors[1]} times"
    )


def told(measured: Tensor, relative: float, of: str = "", *, runs: int) -> str:
    """Returns the statement on precision for a floor's `assumes`.

    Args:
        measured: the number of measurements of each record, (N,).
        relative: the median relative standard error.
        of: words that say what the standard error is of, such as " of a feature".
        runs: the number of runs.

    >>> import torch
    >>> told(torch.tensor([1, 3, 3]), 0.42, runs=2)
    'estimated: measured 3 times per record (median), relative standard error 42 % (median); more often too high than
    too low'
    """
    times = float(measured.double().median()) if len(measured) else 0.0
    size = f"relative standard error{of} {100 * relative:.0f} % (median)"
    if math.isinf(relative):
        size = f"standard error{of} not known"
    elif runs < 2:
        size += " by measuring alone: another run would differ by more"
    size += f"; {how_far_off(times)}" if runs < 2 else "; more often too high than too low"
    return f"estimated: measured {times:g} time{'' if times == 1 else 's'} per record (median), {size}"


def warn_if_coarse(relative: float, said: str, runs: int) -> None:
    """Warns, with the remedy, after one run and where the median relative standard error is above COARSE."""
    if relative <= COARSE and runs > 1:
        return
    what = "floors from so few measurements" if relative > COARSE else "floors of one run"
    warn_user(
        f"{what} are more often too high than too low, many by a factor of 2 and some of 10 "
        f"({said}): measure more often (a larger Settings.budget; in a loop of your own, every record once in a block "
        "of steps, add(..., stratified=True)) or average more runs (repeat)",
        ReconboundWarning,
    )


def warn_if_silent(said: tuple[str, ...]) -> None:
    """Warns of records with no information at all: a smooth model that learns has some about every record."""
    if said:
        warn_user(
            f"{said[0]}; their gradients do not depend on them at all, as when training has diverged or the outputs "
            "are saturated: look at the loss, and lower lr or the noise",
            ReconboundWarning,
        )
