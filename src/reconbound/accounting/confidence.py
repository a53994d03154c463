"""Confidence in a ledger's estimates: upper limits over runs, statements of precision, and floors at the limits.

Upper limits and where none is given: docs/theory/accounting.md. `unit` is s̄², the squared mean of feature_scale: one
squared unit of the model's input in the data's own units.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import t as student
from torch import Tensor

from reconbound._internal.checks import LARGEST, InputError, number, warn_user
from reconbound._internal.formatting import format_floor
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


def lower_limits(estimates: Estimates, unit: float) -> np.ndarray | None:
    """Returns the lower 95 % limits of the floors, (N,), 0 where there is none; None before the second run ends.

    Args:
        estimates: of dFIL.
        unit: s̄².
    """
    return None if estimates.runs < 2 else floors_at(upper_limit(estimates, 0.95), unit)


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


def rank_exposed(estimates: Estimates, bound: Bound, limits: np.ndarray | None, k: int) -> MostExposed:
    """Returns the k records with the lowest floors among those measured, lowest estimate first.

    Args:
        estimates: of dFIL.
        bound: the estimated floors of all records.
        limits: as `lower_limits` returns them.
        k: the number of records.
    """
    dfil = estimates.mean.masked_fill(estimates.measured == 0, -1.0)
    top = torch.topk(dfil, min(k, int((dfil >= 0).sum()))).indices.tolist()
    lower = [None if limits is None or limits[i] == 0 else float(limits[i]) for i in top]
    found = (Exposed(i, limit, float(bound.value[i])) for i, limit in zip(top, lower, strict=True))
    return MostExposed(found, bound.notes)


def summarize(
    estimates: Estimates, floors: Mapping[str, np.ndarray], unit: float, caveats: tuple[str, ...]
) -> dict[str, Any]:
    """Returns quantiles of the floors and of their lower 95 % limits, and the number of measurements.

    Args:
        estimates: of dFIL under the first rule.
        floors: of all records, (N,), by rule.
        unit: s̄².
        caveats: what must be stated with every floor of the ledger.
    """
    times, limits = estimates.measured.cpu(), lower_limits(estimates, unit)
    seen = (times > 0).numpy()
    found: dict[str, Any] = {"confidential": True, "runs": estimates.runs}
    if limits is not None:
        found["floor_lower_limit"] = quantiles(limits[limits > 0]) if (limits > 0).any() else None
        found["without_limit"] = int((limits == 0).sum())
        found["no_limit_because"] = explain_no_limit(estimates)
    return found | {
        "floor_estimate": {rule: quantiles(value[seen]) for rule, value in floors.items()},
        "measured_per_record": {"least": int(times.min()), "median": float(times.double().median())},
        "never_measured": int((~seen).sum()),
        "caveats": list(caveats),
        "relative_standard_error_median": relative_median(estimates.mean, estimates.error),
    }
