"""Summaries of a ledger, and its most exposed records, in passes over parts of the records.

No number is kept for each record beside the ledger's own, however many records there are. Quantiles are exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from reconbound.accounting.compact import count_where, largest, order_statistics, parts_of
from reconbound.accounting.confidence import (
    Estimates,
    Exposed,
    MostExposed,
    explain_no_limit,
    floors_at,
    median_of,
    quantiles,
    spread_of,
    upper_limit,
)
from reconbound.accounting.divergence_queries import WorldDivergences

if TYPE_CHECKING:
    from reconbound.accounting.accountant import FisherAccountant
    from reconbound.accounting.divergence_ledger import DivergenceLedger

#: Of the limits in a summary.
CONFIDENCE = 0.95
#: Shares of the records, by the name of the largest divergence that so many do not exceed.
PLACES = {"median": 0.5, "99 %": 0.99, "99.99 %": 0.9999, "highest": 1.0}
#: Chances in the other world for which a summary states the chance of success.
BASELINES = (0.01, 0.1)


def summarize(ledger: FisherAccountant, unit: float, caveats: tuple[str, ...]) -> dict[str, Any]:
    """Returns quantiles of the floors and of their lower 95 % limits, and the number of measurements.

    Args:
        ledger: with one rule at least.
        unit: s̄².
        caveats: what must be stated with every floor of the ledger.
    """
    traces, records = ledger.traces, ledger.account.records
    times = traces.measurements()

    def passes() -> Iterator[Estimates]:
        return (ledger.estimates(None, part) for part in parts_of(records))

    found: dict[str, Any] = {"confidential": True, "runs": ledger.runs}
    if ledger.runs > 1:
        spread = spread_of(passes)

        def limits() -> Iterator[np.ndarray]:
            return (floors_at(upper_limit(e, CONFIDENCE, spread), unit) for e in passes())

        without = sum(int((part == 0).sum()) for part in limits())
        known = without < records
        found["floor_lower_limit"] = quantiles(lambda: (part[part > 0] for part in limits())) if known else None
        found["without_limit"] = without
        found["no_limit_because"] = explain_no_limit(next(passes()), passes)

    def floors(k: int) -> Callable[[], Iterator[np.ndarray]]:
        return lambda: (
            traces.floor_values(k, unit, part)[(times[part] > 0).cpu().numpy()] for part in parts_of(records)
        )

    return found | {
        "floor_estimate": {rule: quantiles(floors(k)) for k, rule in enumerate(ledger.account.kept_rules)},
        "measured_per_record": {"least": int(times.min()), "median": median_of(times)},
        "never_measured": count_where(lambda part: times[part] == 0, records),
        "caveats": list(caveats),
        "relative_standard_error_median": traces.relative_error(0),
    }


def rank_exposed(
    ledger: FisherAccountant, k: int, rule: str | None, unit: float, notes: tuple[str, ...]
) -> MostExposed:
    """Returns the k records with the lowest floors among those measured, lowest estimate first.

    Args:
        ledger: with one rule at least.
        k: the number of records.
        rule: one of the account's; the first by default.
        unit: s̄².
        notes: what must be stated with their floors.
    """
    traces, records = ledger.traces, ledger.account.records
    number = 0 if rule is None else ledger.account.kept_rules.index(rule)

    def exposure(part: slice) -> Tensor:
        return traces.trace_mean(number, part).masked_fill(traces.measurements()[part] == 0, -1.0)

    dfil, rows = largest(exposure, records, k)
    rows = rows[dfil >= 0].to(ledger.device)
    lower: list[float | None] = [None] * len(rows)
    if ledger.runs > 1:
        spread = spread_of(lambda: (ledger.estimates(rule, part) for part in parts_of(records)))
        at = floors_at(upper_limit(ledger.estimates(rule, rows), CONFIDENCE, spread), unit)
        lower = [float(x) if x > 0 else None for x in at]
    estimates = traces.floor_values(number, unit, rows)
    found = (Exposed(i, limit, float(x)) for i, limit, x in zip(rows.tolist(), lower, estimates, strict=True))
    return MostExposed(found, notes)


def summarize_divergences(ledger: DivergenceLedger, world: str) -> dict[str, Any]:
    """Returns quantiles of D in nats over the records, and the largest chances of success that belong to them.

    Args:
        ledger: of one run or more, or of a run in progress.
        world: one of the ledger's.
    """
    records, confidence = ledger.account.records, CONFIDENCE if ledger.runs > 1 else None
    spread = None if confidence is None else ledger.spread(world)

    def nats(level: float | None) -> Callable[[], Iterator[np.ndarray]]:
        return lambda: (ledger.divergence_of(world, part, level, spread).cpu().numpy() for part in parts_of(records))

    times = ledger.measurements(world)
    found: dict[str, Any] = {"confidential": True, "runs": ledger.runs, "world": world, "cap": ledger.cap(world)}
    for name, level in {"estimate": None, "upper_limit": confidence}.items():
        if name == "estimate" or level is not None:
            at = order_statistics(nats(level), _places)
            own = WorldDivergences(ledger.account, world, np.array(at), np.array(at))
            found[name] = {"nats": dict(zip(PLACES, at, strict=True))}
            for baseline in BASELINES:
                chances = own.max_success(baseline).value.tolist()
                found[name][f"max_success at {baseline:g}"] = dict(zip(PLACES, chances, strict=True))
    found["measured_per_record"] = {"least": int(times.min()), "median": median_of(times)}
    return found | {"never_measured": count_where(lambda part: times[part] == 0, records)}


def _places(count: int) -> list[int]:
    return [max(0, math.ceil(share * count) - 1) for share in PLACES.values()]


def mean_divergence(ledger: DivergenceLedger, world: str) -> float:
    """Returns the mean over the records of D before the cap, which is that of records never measured; at most the cap.

    Args:
        ledger: of one run or more, or of a run in progress.
        world: one of the ledger's.
    """
    top, total, records = ledger.cap(world), np.zeros(1), ledger.account.records
    for part in parts_of(records):
        found = ledger.estimates(world, part)
        nats = torch.where(found.measured > 0, found.mean, top).cpu().numpy()
        np.add.at(total, np.zeros(len(nats), dtype=np.int64), nats)
    return min(float(total[0] / records), top)


def most_exposed(ledger: DivergenceLedger, k: int, world: str) -> list[tuple[int, float]]:
    """Returns the k records with the largest D among those measured, and D in nats, the largest first.

    Args:
        ledger: of one run or more, or of a run in progress.
        k: the number of records.
        world: one of the ledger's.
    """

    def exposure(part: slice) -> Tensor:
        found = ledger.estimates(world, part)
        return torch.where(found.measured > 0, found.mean, -1.0)

    means, rows = largest(exposure, ledger.account.records, k)
    rows = rows[means >= 0]
    nats = ledger.divergence_of(world, rows.to(ledger.device))
    return [(int(i), float(x)) for i, x in zip(rows, nats, strict=True)]
