"""The chances of success that a sweep compares: of the best attack on a model, where it has 10 % without the record.

They are those of an audit (report/success.py): p_max at the most exposed record, at the record that all but 1 in 100 do
not exceed, and at the median record. Lower is better.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from reconbound._internal.checks import InputError
from reconbound.accounting.divergence_ledger import DivergenceLedger
from reconbound.auditing.leakage import divergences_of
from reconbound.bounds import success_from_kl
from reconbound.fisher.worlds import REMOVED
from reconbound.report import formats
from reconbound.report.success import SHOWN, over_records
from reconbound.sweep.space import Row

#: Why rows may have no chances.
NOT_MEASURED = (
    "Chances of success were not measured: an earlier version trained these settings, or their batches are no Poisson "
    "samples."
)
#: The columns of the chances, and in words whom each is against; the first is what is shown first.
CHANCES = {
    f"success_{REMOVED}_max": "the most exposed record",
    f"success_{REMOVED}_p99": "all but 1 in 100",
    f"success_{REMOVED}_median": "the median record",
}
#: The ending of the column that says whether a chance is an estimate.
ESTIMATE = "_estimate"


def chances_of(ledger: DivergenceLedger) -> Row:
    """Returns the chance at each place over the records, and whether it is an estimate.

    A record's divergence is at its upper confidence limit where it has one, as in an audit.

    Args:
        ledger: of finished runs with the world "removed" only.
    """
    shown, cap, best = divergences_of(ledger), ledger.cap(REMOVED), ledger.towards().mechanism_success(SHOWN)
    nats = shown["nats"][0].numpy()
    upper = shown["nats_upper"][0].numpy() if "nats_upper" in shown else np.full_like(nats, np.inf)
    nats = np.where(np.isfinite(upper), upper, np.where(np.isnan(nats), cap, nats))
    chances = np.minimum(success_from_kl(SHOWN, nats), best)
    sure = np.isfinite(upper) | (nats >= cap) | (chances >= best)
    found, estimates = over_records(chances, sure, best)
    row: Row = {}
    for name in CHANCES:
        place = name.rpartition("_")[2]
        row |= {name: found[place], name + ESTIMATE: place in estimates}
    return row


def are_whole(row: Row) -> bool:
    """Returns whether a row has all chances, from 0 to 1, or none."""
    own = [row[name] for name in CHANCES if row.get(name) is not None]
    return len(own) in (0, len(CHANCES)) and all(0 <= chance <= 1 for chance in own)


def chances_in(rows: Iterable[Row]) -> list[str]:
    """Returns the chances that the rows have, in a fixed order."""
    there = {name for row in rows for name, value in row.items() if value is not None}
    return [name for name in CHANCES if name in there]


def checked_chance(rows: Sequence[Row], chance: str | None = None) -> str:
    """Returns the chance of this name, or the first that the rows have. An error lists those that they have.

    Args:
        rows: of the finished trials.
        chance: the name of a chance; None for the first.
    """
    there = chances_in(rows)
    if chance is None and there:
        return there[0]
    if chance not in there:
        what = f"must be one of {', '.join(there)}" if there else f"cannot be used. {NOT_MEASURED.rstrip('.')}"
        raise InputError("chance", what, chance)
    return chance


def head_chance(name: str) -> str:
    """Returns the heading of a chance's column.

    >>> head_chance("success_removed_max")
    'chance, most exposed'
    """
    return f"chance, {CHANCES[name].removeprefix('the ').removesuffix(' record')}"


def format_chance(row: Row, name: str) -> str:
    """Formats a row's chance; an estimate says so, and "–" stands for one that was not measured.

    >>> format_chance({"success_removed_max": 0.1234, "success_removed_max_estimate": True}, "success_removed_max")
    '12.4% (estimate)'
    """
    value = row.get(name)
    return "–" if value is None else formats.chance(float(value), estimate=bool(row.get(name + ESTIMATE)))
