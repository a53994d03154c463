"""Confidence in a ledger's estimates: upper limits over runs, statements of precision, and floors at the limits.

Upper limits and where none is given: docs/theory/accounting.md. `unit` is s̄², the squared mean of feature_scale: one
squared unit of the model's input in the data's own units.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from reconbound._internal.checks import LARGEST, InputError, number, warn_user
from reconbound._internal.formatting import format_floor
from reconbound.accounting.compact import lower_median, order_statistics, parts_of
from reconbound.bounds import Bound
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

    def relative(self) -> Tensor:
        """Returns r = error/mean of each record, 0 for one without information."""
        some = self.informative
        return torch.where(some, self.error / torch.where(some, self.mean, 1.0), 0.0)


#: Begins a pass over the estimates of all records, in parts.
Passes = Callable[[], Iterable[Estimates]]


class Spread(NamedTuple):
    """Holds what the limits of all records share: the lower quartile of their means, and the median of error/mean.

    Both are over the records that were measured with positive information; None where there are none.
    """

    least: float | None
    relative: float | None


def spread_of(passes: Passes) -> Spread:
    """Returns what the limits of all records share.

    Args:
        passes: over the estimates of all records.
    """
    means = order_statistics(
        lambda: (e.mean[e.informative].cpu().numpy() for e in passes()), lambda count: [(count + 3) // 4 - 1]
    )
    relative = lower_median(lambda: (e.relative()[e.informative].cpu().numpy() for e in passes()))
    return Spread(means[0] if means else None, relative)


def upper_limit(estimates: Estimates, confidence: float, spread: Spread | None = None) -> Tensor:
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
        spread: of all records, where the estimates are of some; their own when None.

    >>> mean = torch.tensor([1.0, 2.0, 0.1, 4.0, 9.0], dtype=torch.float64)
    >>> error, measured = mean * torch.tensor([0.1, 0.2, 0.1, 0.05, 0.1]), torch.tensor([30, 30, 30, 30, 20])
    >>> upper_limit(Estimates(mean, error, measured, runs=10, sampled=True), 0.95).round(decimals=2).tolist()
    [1.45, 3.96, 1.45, 5.78, inf]
    """
    mean, rare = estimates.mean, estimates.measured < estimates.fewest
    if estimates.runs < 2:
        raise InputError("runs", "must be at least 2 for a confidence limit", estimates.runs)
    tail = 1 - (1 - number("confidence", confidence, above=0.0, below=1.0)) / 20
    known = spread_of(lambda: [estimates]) if spread is None else spread
    if known.least is None or known.relative is None:
        return torch.zeros_like(mean).masked_fill(rare, torch.inf)
    if known.relative > WIDEST:
        return torch.full_like(mean, torch.inf)
    least, t = mean.clamp(min=known.least), float(student.ppf(tail, estimates.runs - 1))
    factor = mean.new_tensor(t * known.relative).exp()  # may be infinite
    limit = least * factor * (1 + t * (estimates.relative() - known.relative).clamp(min=0))
    return limit.masked_fill(rare, torch.inf)


def explain_no_limit(estimates: Estimates, passes: Passes | None = None) -> str | None:
    """Returns why `upper_limit` is infinite for some or all records, and the remedy; None where it is not.

    Args:
        estimates: means, errors and numbers of measurements.
        passes: over the estimates of all records, where these are of some.

    >>> few = Estimates(torch.ones(2), torch.full((2,), 0.1), torch.tensor([30, 3]), runs=10, sampled=True)
    >>> explain_no_limit(few)
    '1 of 2 records were measured fewer than 25 times over all runs: more runs or a larger budget'
    """
    if estimates.runs < 2:
        return f"{estimates.runs} finished run(s), and a limit needs two or more: use repeat"
    over = (lambda: [estimates]) if passes is None else passes
    counts = [(int((e.measured < e.fewest).sum()), len(e.measured)) for e in over()]
    reasons, (rare, records) = [], map(sum, zip(*counts, strict=True))
    if rare:
        times = f"fewer than {FEWEST} times" if estimates.sampled else "never"
        reasons.append(f"{rare:,} of {records:,} records were measured {times} over all runs")
    spread = spread_of(over).relative
    if spread is not None and spread > WIDEST:
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
    return median_ratio(lambda: [(value, error)])


def median_ratio(passes: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> float:
    """Returns the median of error/value where the value is positive; infinite where nothing was measured.

    Args:
        passes: begins a pass over values and errors, in parts.
    """

    def ratios() -> Iterator[np.ndarray]:
        for value, error in passes():
            positive = value > 0
            yield (error[positive] / value[positive]).double().cpu().numpy()

    found = lower_median(ratios)
    return math.inf if found is None else found


def median_of(counts: Tensor) -> float:
    """Returns the lower median of counts, (N,); 0 where there are none.

    Args:
        counts: of each record.
    """
    parts = lambda: (counts[part].double().cpu().numpy() for part in parts_of(len(counts)))  # noqa: E731
    return lower_median(parts) or 0.0


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


def describe_precision(times: float, relative: float, of: str = "", *, runs: int) -> str:
    """Returns the statement on precision for a floor's `assumes`.

    Args:
        times: the median number of measurements of a record.
        relative: the median relative standard error.
        of: words that name what the standard error is of, such as " of a feature".
        runs: the number of runs.

    >>> describe_precision(3.0, 0.42, runs=2)
    'estimated: measured 3 times per record (median), relative standard error 42 % (median); more often too high than
    too low'
    """
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


#: Shares of the records, by the name of the lowest value that so many have.
QUANTILES = {"lowest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9}


def quantiles(passes: Callable[[], Iterator[np.ndarray]]) -> dict[str, float]:
    """Returns the lowest value and quantiles that some record has, by name; 0 where there are no values.

    Args:
        passes: begins a pass over the values, in parts.
    """
    found = order_statistics(passes, lambda count: [math.floor((count - 1) * q) for q in QUANTILES.values()])
    return dict(zip(QUANTILES, found or [0.0] * len(QUANTILES), strict=True))


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


# --- floors --------------------------------------------------------------------------


def floors_at(upper: Tensor, unit: float) -> np.ndarray:
    """Returns unit/upper of each record, (N,): 0 where the upper limit of dFIL is infinite.

    Args:
        upper: upper limits of dFIL, (N,).
        unit: s̄².

    >>> floors_at(torch.tensor([2.0, torch.inf], dtype=torch.float64), 4.0).tolist()
    [2.0, 0.0]
    """
    with np.errstate(divide="ignore"):
        return np.minimum(unit / upper.cpu().numpy(), LARGEST)


def lower_limits(passes: Passes, unit: float) -> np.ndarray:
    """Returns the lower 95 % limits of the floors after two runs or more, (N,), 0 where there is none.

    Args:
        passes: over the estimates of dFIL of all records.
        unit: s̄².
    """
    spread = spread_of(passes)
    return np.concatenate([floors_at(upper_limit(e, 0.95, spread), unit) for e in passes()])


def state_limits(bound: Bound, limits: np.ndarray | None) -> Bound:
    """Returns the floors with a statement on their lower limits before all others, where there are any.

    Args:
        bound: the floors of all records.
        limits: as `lower_limits` returns them.
    """
    if limits is None or not (limits > 0).any():
        return bound
    lowest, none = limits[limits > 0].min(), int((limits == 0).sum())
    first = f"lower limits at 95 % confidence: lowest MSE {format_floor(lowest)}"
    first += f", {none:,} of {len(limits):,} records without one" if none else ""
    return replace(bound, assumes=(first, *bound.assumes), notes=(first, *bound.notes), limits=first)


def limit_bound(bound: Bound, upper: Tensor, unit: float, confidence: float, notes: tuple[str, ...]) -> Bound:
    """Returns the lower confidence limits of the floors as a Bound.

    Args:
        bound: the estimated floors of all records.
        upper: upper limits of dFIL, (N,).
        unit: s̄².
        confidence: of the limits.
        notes: what must be stated with every floor of the ledger.
    """
    note = f"lower limit at {100 * confidence:g} % confidence, checked by simulation and not proved"
    return replace(bound, name="dfil_lower_limit", value=floors_at(upper, unit), assumes=(*bound.assumes, note),
                   estimate=False, notes=(note, *notes))  # fmt: skip


def group_bound(bound: Bound, dfil: Tensor, measured: Tensor, unit: float, confidence: float | None) -> Bound:
    """Returns the floor for a person who has several rows with the same private part.

        s̄² d/Tr I_G,     Tr I_G ≤ k Σ Tr I_i over the k rows    (Cauchy–Schwarz)

    Args:
        bound: the estimated floors of all records.
        dfil: dFIL of the k rows, or upper limits of it, (k,).
        measured: the number of measurements of each row, (k,).
        unit: s̄².
        confidence: of the upper limits, for all rows together; None for estimates.
    """
    size, total = len(dfil), len(dfil) * float(dfil.sum())
    note = f"for somebody with {size} rows" if size > 1 else "for one row"
    if confidence is not None:
        note += f", lower limit at {100 * confidence:g} % confidence (checked by simulation, not proved)"
    seen = bool((measured > 0).all()) and math.isfinite(total)
    value = min(unit / max(total, np.finfo(np.float64).tiny), LARGEST) if seen else 0.0
    return replace(bound, name="dfil_group", value=value, assumes=(*bound.assumes, note),
                   notes=(note, *bound.notes), estimate=confidence is None)  # fmt: skip
