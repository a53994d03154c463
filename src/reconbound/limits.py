"""Upper confidence limits from the sums of a few runs, and where none is given (docs/theory-accounting.md)."""

from __future__ import annotations

import torch
from scipy.stats import t as student
from torch import Tensor

from ._check import InputError, number

#: No confidence limit is given for a record that was measured less often over all runs (unless at every step), nor for
#: any where half of the records have a larger relative standard error: the sums' tail has then not been seen, and the
#: t quantile covers too rarely.
FEWEST, WIDEST = 25, 0.25


def upper_limit(
    mean: Tensor, error: Tensor, measured: Tensor, *, runs: int, confidence: float, sampled: bool
) -> Tensor:
    """U = mean + t_{1−(1−confidence)/50, R−1} · error for each record, (N,), or infinity where it would not hold.

    Args:
        mean, error: of each record over the runs, and its standard error. measured: how often it was measured, (N,).
        runs: R. confidence: of the limit. sampled: whether records were measured at some steps alone.

    >>> mean, measured = torch.ones(2, dtype=torch.float64), torch.tensor([30, 20])
    >>> upper_limit(mean, 0.1 * mean, measured, runs=10, confidence=0.95, sampled=True).round(decimals=2).tolist()
    [1.43, inf]
    """
    if runs < 2:
        raise InputError("runs", "must be at least 2 for a confidence limit", runs)
    tail = 1 - (1 - number("confidence", confidence, above=0.0, below=1.0)) / 50
    seen = measured > 0
    if bool(seen.any()) and float((error[seen] / mean[seen].clamp(min=1e-300)).median()) > WIDEST:
        return torch.full_like(mean, torch.inf)
    limit = mean + float(student.ppf(tail, runs - 1)) * error
    return limit.masked_fill(measured < (FEWEST if sampled else 1), torch.inf)
