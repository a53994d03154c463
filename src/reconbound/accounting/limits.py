"""Upper confidence limits from the sums of a few runs, and where none is given (docs/theory/accounting.md)."""

from __future__ import annotations

import torch
from scipy.stats import t as student
from torch import Tensor

from reconbound._internal.checks import InputError, number

#: No confidence limit is given for a record that was measured less often over all runs (unless at every step), nor for
#: any where half of the records have a larger relative standard error: the sums' tail has then not been seen.
FEWEST, WIDEST = 25, 0.35


def upper_limit(
    mean: Tensor, error: Tensor, measured: Tensor, *, runs: int, confidence: float, sampled: bool
) -> Tensor:
    """Returns an upper confidence limit U for each record, (N,), or infinity where it would not hold.

        U = m · exp(t r̃) · (1 + t · max(0, r − r̃)),
        m = max(mean, lower quartile of mean),   r = error/mean,   r̃ = median of r,   t = t_{1−(1−confidence)/20, R−1},

    with quantiles over the records that were measured with positive information. It is on the log scale, because the
    sums are skewed to the right and vary in proportion to their size: the exponential at the median spread and, for
    records with a larger one, its tangent there. The other records bound m and r from below, because a record whose
    most informative steps were missed has both a small mean and a small spread, and looks like one that is well
    protected.

    Args:
        mean: each record's mean over the runs, (N,).
        error: its standard error, (N,).
        measured: the number of measurements of each record, (N,).
        runs: R.
        confidence: of the limit.
        sampled: whether records were measured at only some steps.

    >>> mean = torch.tensor([1.0, 2.0, 0.1, 4.0, 9.0], dtype=torch.float64)
    >>> error, measured = mean * torch.tensor([0.1, 0.2, 0.1, 0.05, 0.1]), torch.tensor([30, 30, 30, 30, 20])
    >>> upper_limit(mean, error, measured, runs=10, confidence=0.95, sampled=True).round(decimals=2).tolist()
    [1.45, 3.96, 1.45, 5.78, inf]
    """
    if runs < 2:
        raise InputError("runs", "must be at least 2 for a confidence limit", runs)
    tail = 1 - (1 - number("confidence", confidence, above=0.0, below=1.0)) / 20
    rare, voters = measured < (FEWEST if sampled else 1), _voters(mean, measured)
    if not bool(voters.any()):  # no record has information
        return torch.zeros_like(mean).masked_fill(rare, torch.inf)
    relative, spread = _relative(mean, error, voters)
    low = mean[voters].kthvalue((int(voters.sum()) + 3) // 4).values
    if float(spread) > WIDEST:
        return torch.full_like(mean, torch.inf)
    least = torch.maximum(mean, low)
    t = float(student.ppf(tail, runs - 1))
    limit = least * torch.exp(t * spread) * (1 + t * (relative - spread).clamp(min=0))
    return limit.masked_fill(rare, torch.inf)


def _voters(mean: Tensor, measured: Tensor) -> Tensor:
    """Returns which records were measured with positive information. Others have no relative spread."""
    return (measured > 0) & (mean > 0)


def _relative(mean: Tensor, error: Tensor, voters: Tensor) -> tuple[Tensor, Tensor]:
    """Returns r of each record, 0 for one without information, and r̃, the voters' median."""
    relative = torch.where(voters, error / torch.where(voters, mean, torch.ones_like(mean)), torch.zeros_like(mean))
    return relative, relative[voters].median()


def why_no_limit(mean: Tensor, error: Tensor, measured: Tensor, *, runs: int, sampled: bool) -> str | None:
    """Returns why `upper_limit` is infinite for some or all records, and the remedy; None where it is not.

    Args:
        mean: as in `upper_limit`.
        error: as in `upper_limit`.
        measured: as in `upper_limit`.
        runs: as in `upper_limit`.
        sampled: as in `upper_limit`.

    >>> few = torch.tensor([30, 3])
    >>> why_no_limit(torch.ones(2), torch.full((2,), 0.1), few, runs=10, sampled=True)
    '1 of 2 records were measured fewer than 25 times over all runs: more runs or a larger budget'
    """
    if runs < 2:
        return f"{runs} finished run(s), and a limit needs two or more: use repeat"
    voters, fewest = _voters(mean, measured), FEWEST if sampled else 1
    rare = int((measured < fewest).sum())
    reasons = []
    if rare:
        times = f"fewer than {fewest} times" if sampled else "never"
        reasons.append(f"{rare:,} of {len(measured):,} records were measured {times} over all runs")
    if bool(voters.any()):
        spread = float(_relative(mean, error, voters)[1])
        if spread > WIDEST:
            reasons.append(f"the runs differ too much (median relative standard error {spread:.2f}, above {WIDEST})")
    return "; ".join(reasons) + ": more runs or a larger budget" if reasons else None
