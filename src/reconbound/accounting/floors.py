"""Floors from a ledger's numbers: at confidence limits, for a group of rows, for the most exposed records.

Plain functions of numbers that a FisherAccountant reads from its ledgers. `unit` is s̄², the squared mean of
feature_scale: one squared unit of the model's input in the data's own units.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import LARGEST
from reconbound._internal.formatting import format_floor
from reconbound.accounting.confidence import (
    Estimates,
    Exposed,
    MostExposed,
    explain_no_limit,
    quantiles,
    relative_median,
    upper_limit,
)
from reconbound.bounds import Bound


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
