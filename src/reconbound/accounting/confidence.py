"""Confidence in a ledger's estimates: upper limits over runs, statements of precision, and warnings.

Upper limits and where none is given: docs/theory/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from reconbound._internal.checks import InputError, number, warn_user
from reconbound._internal.formatting import format_floor
from reconbound.validate.model import ReconboundWarning

#: No confidence limit is given for a record that was measured less often over all runs (unless at every step), nor for
#: any where half of the records have a larger relative standard error: the sums' tail has then not been seen.
FEWEST, WIDEST = 25, 0.35
#: Floors whose median relative standard error is larger come with a warning: an estimate that is half too small, as is
#: common then, makes a floor that is twice too high.
COARSE = 0.5
#: Floors from one run that were too high by more than a factor of 2, and of 10, in squared error: the largest shares of
#: the records in simulated trainings, with fewer than ten measurements of each record and with more
#: (docs/theory/accounting.md, "One run"; experiments/one_run.py).
OFTEN, ONE_RUN = 10, {False: (85, 74), True: (57, 28)}


# --- limits --------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimates:
    """Estimates of one quantity for each record, from the sums of several runs.

    Attributes:
        mean: each record's mean over the runs, (N,).
        error: its standard error, (N,).
        measured: the number of measurements of each record, (N,).
        runs: R.
        sampled: whether records were measured at only some steps.
    """

    mean: Tensor
    error: Tensor
    measured: Tensor
    runs: int
    sampled: bool

    @property
    def fewest(self) -> int:
        """Returns the number of measurements that a limit needs."""
        return FEWEST if self.sampled else 1

    @property
    def informative(self) -> Tensor:
        """Returns which records were measured with positive information. Others have no relative spread."""
        return (self.measured > 0) & (self.mean > 0)

    def relative(self) -> tuple[Tensor, Tensor]:
        """Returns r = error/mean of each record, 0 for one without information, and r̃, the median of the others."""
        some = self.informative
        relative = torch.where(some, self.error / torch.where(some, self.mean, 1.0), 0.0)
        return relative, relative[some].median()


def upper_limit(estimates: Estimates, confidence: float) -> Tensor:
    """Returns an upper confidence limit U for each record, (N,), or infinity where it would not hold.

        U = m · exp(t r̃) · (1 + t · max(0, r − r̃)),
        m = max(mean, lower quartile of mean),   r = error/mean,   r̃ = median of r,   t = t_{1−(1−confidence)/20, R−1},

    with quantiles over the records that were measured with positive information. It is on the log scale, because the
    sums are skewed to the right and vary in proportion to their size: the exponential at the median spread and, for
    records with a larger one, its tangent there. The other records bound m and r from below, because a record whose
    most informative steps were missed has both a small mean and a small spread, and looks like one that is well
    protected.

    Args:
        estimates: means, errors and numbers of measurements.
        confidence: of the limit.

    >>> mean = torch.tensor([1.0, 2.0, 0.1, 4.0, 9.0], dtype=torch.float64)
    >>> error, measured = mean * torch.tensor([0.1, 0.2, 0.1, 0.05, 0.1]), torch.tensor([30, 30, 30, 30, 20])
    >>> upper_limit(Estimates(mean, error, measured, runs=10, sampled=True), 0.95).round(decimals=2).tolist()
    [1.45, 3.96, 1.45, 5.78, inf]
    """
    mean, rare, some = estimates.mean, estimates.measured < estimates.fewest, estimates.informative
    if estimates.runs < 2:
        raise InputError("runs", "must be at least 2 for a confidence limit", estimates.runs)
    tail = 1 - (1 - number("confidence", confidence, above=0.0, below=1.0)) / 20
    if not bool(some.any()):
        return torch.zeros_like(mean).masked_fill(rare, torch.inf)
    relative, spread = estimates.relative()
    if float(spread) > WIDEST:
        return torch.full_like(mean, torch.inf)
    least = torch.maximum(mean, mean[some].kthvalue((int(some.sum()) + 3) // 4).values)
    t = float(student.ppf(tail, estimates.runs - 1))
    limit = least * torch.exp(t * spread) * (1 + t * (relative - spread).clamp(min=0))
    return limit.masked_fill(rare, torch.inf)


def explain_no_limit(estimates: Estimates) -> str | None:
    """Returns why `upper_limit` is infinite for some or all records, and the remedy; None where it is not.

    Args:
        estimates: means, errors and numbers of measurements.

    >>> few = Estimates(torch.ones(2), torch.full((2,), 0.1), torch.tensor([30, 3]), runs=10, sampled=True)
    >>> explain_no_limit(few)
    '1 of 2 records were measured fewer than 25 times over all runs: more runs or a larger budget'
    """
    if estimates.runs < 2:
        return f"{estimates.runs} finished run(s), and a limit needs two or more: use repeat"
    reasons, rare = [], int((estimates.measured < estimates.fewest).sum())
    if rare:
        times = f"fewer than {FEWEST} times" if estimates.sampled else "never"
        reasons.append(f"{rare:,} of {len(estimates.measured):,} records were measured {times} over all runs")
    if bool(estimates.informative.any()):
        spread = float(estimates.relative()[1])
        if spread > WIDEST:
            reasons.append(f"the runs differ too much (median relative standard error {spread:.2f}, above {WIDEST})")
    return "; ".join(reasons) + ": more runs or a larger budget" if reasons else None


# --- precision -----------------------------------------------------------------------


def relative_median(value: Tensor, error: Tensor) -> float:
    """Returns the median of error/value where the value is positive; infinite where nothing was measured.

    Args:
        value: the estimates.
        error: their standard errors.

    >>> relative_median(torch.tensor([1.0, 2.0, 0.0]), torch.tensor([0.5, 0.2, torch.inf]))
    0.10000000149011612
    """
    positive = value > 0
    return float((error[positive] / value[positive]).median()) if bool(positive.any()) else math.inf


def describe_one_run(times: float, *, squared: bool = True) -> str:
    """Returns a clause that states how far floors from one run were off in simulated trainings.

    The spread between one run's measurements does not show it, because the runs themselves differ.

    Args:
        times: the number of measurements per record in the run.
        squared: whether the floors are squared errors, or their roots.

    >>> describe_one_run(3.0)
    'in simulated trainings up to 85 % of the floors from one run were more than 2 times too high, and up to 74 % more
    than 10 times'
    """
    two, ten = ONE_RUN[times >= OFTEN]
    factors = ("2", "10") if squared else ("1.4", "3.1")
    clause = (
        f"in simulated trainings up to {two} % of the floors from one run were more than {factors[0]} times too high"
    )
    return f"{clause}, and up to {ten} % more than {factors[1]} times"


def describe_precision(measured: Tensor, relative: float, of: str = "", *, runs: int) -> str:
    """Returns the statement on precision for a floor's `assumes`.

    Args:
        measured: the number of measurements of each record, (N,).
        relative: the median relative standard error.
        of: words that name what the standard error is of, such as " of a feature".
        runs: the number of runs.

    >>> describe_precision(torch.tensor([1, 3, 3]), 0.42, runs=2)
    'estimated: measured 3 times per record (median), relative standard error 42 % (median); more often too high than
    too low'
    """
    times = float(measured.double().median()) if len(measured) else 0.0
    size = f"relative standard error{of} {100 * relative:.0f} % (median)"
    if math.isinf(relative):
        size = f"standard error{of} not known"
    elif runs < 2:
        size += " of measuring only: runs differ by more"
    size += f"; {describe_one_run(times)}" if runs < 2 else "; more often too high than too low"
    return f"estimated: measured {times:g} time{'' if times == 1 else 's'} per record (median), {size}"


def warn_if_imprecise(relative: float, precision: str, runs: int) -> None:
    """Warns, with the remedy, after one run and where the median relative standard error is above COARSE."""
    if relative <= COARSE and runs > 1:
        return
    what = "floors from so few measurements" if relative > COARSE else "floors of one run"
    warn_user(
        f"{what} are more often too high than too low, many by a factor of 2 and some of 10 ({precision}). Measure "
        "more often (a larger Settings.budget; in a loop of your own, every record once in a block of steps, "
        "add(..., stratified=True)) or average more runs (repeat)",
        ReconboundWarning,
    )


# --- records -------------------------------------------------------------------------


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Returns the lowest value and quantiles that some record has, by name; 0 where there are no values."""
    names = {"lowest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9}
    at = np.quantile(values, list(names.values()), method="lower") if len(values) else [0.0] * len(names)
    return {name: float(v) for name, v in zip(names, at, strict=True)}


class Exposed(NamedTuple):
    """A record with its floor, a squared error: the lower 95 % confidence limit (None: there is none), the estimate."""

    record: int
    lower_limit: float | None
    estimate: float


class MostExposed(list[Exposed]):
    """The most exposed records, the lowest estimate first; `caveats` must be stated with their floors."""

    def __init__(self, found: Iterable[Exposed], caveats: tuple[str, ...]) -> None:
        super().__init__(found)
        self.caveats = caveats

    def __repr__(self) -> str:
        lines = [
            f"record {e.record}: MSE {format_floor(e.estimate)} (estimate without a confidence limit)"
            if e.lower_limit is None
            else f"record {e.record}: MSE at least {format_floor(e.lower_limit)} at 95 % confidence "
            f"(estimate {format_floor(e.estimate)})"
            for e in self
        ]
        return "\n".join([*lines, *self.caveats])
