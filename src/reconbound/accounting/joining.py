"""Ledgers of different records of one run, kept apart on several ranks, become one.

What a ledger holds of the run under way is a sum over measurements, and so the sum over disjoint records is the sum of
both. Finished runs are equal on both sides and stay as they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reconbound._internal.checks import InputError
from reconbound.accounting.ledger import Ledger

if TYPE_CHECKING:
    from reconbound.accounting.measured_runs import MeasuredRuns

#: Of the run under way, beside the sums and errors: what is added, and whether something has happened.
_ADDED = ("last", "measured", "nats_last", "nats_times")
_FLAGS = ("rare", "nats_sampled")
_WEIGHTS = ("weights", "nats_weights")  # row 0: a sum; row 1: the largest
_COUNTS = ("measured", "nats_times")


def check_joinable(ledger: MeasuredRuns, other: MeasuredRuns) -> None:
    """Refuses a ledger of another run, of records that are measured here, or with other finished runs.

    Args:
        ledger: that is added to.
        other: of the same account, with the same parts.
    """
    mine, theirs = ledger._fingerprints, other._fingerprints
    if mine.current is None or mine.current != theirs.current or mine.finished != theirs.finished:
        why = "must be of the same run, under way: begin_run with one fingerprint on all ranks, after the same runs"
        raise InputError("other", why, f"{other.runs} finished runs, and one under way")
    if ledger.features.followed or other.features.followed:
        raise InputError("other", "must not follow chosen records, which are measured beside all others", True)
    for part, there in _parts(ledger, other):
        for name in (name for name in _COUNTS if name in part.state):
            both = torch.nonzero((part.state[name] > 0) & (there.state[name].to(part.device) > 0))
            if len(both):
                why = f"must have measured other records: both ledgers have record {int(both[0, -1])}"
                raise InputError("other", f"{why}, which would count twice", f"{len(both)} such records")
        for name in part.state:
            if part.state[name].shape != there.state[name].shape:
                raise InputError("other", f"must have kept as many steps of this run ({name})", there.state[name].shape)


def add_records(ledger: MeasuredRuns, other: MeasuredRuns) -> None:
    """Adds what another ledger has of the run under way; both have been checked.

    Args:
        ledger: is changed.
        other: is not changed.
    """
    for part, there in _parts(ledger, other):
        done = part.runs * len(part.keep_at)
        errors = [f"{name}_error" for name in part._quantities] if part.runs == 0 else []
        for name in (*part._quantities, *errors, *_ADDED):
            if name in part.state:
                part.state[name] += there.state[name].to(part.device)
        for name in part._kept:
            part.state[name][done:] += there.state[name][done:]
        for name in (name for name in _FLAGS if name in part.state):
            part.state[name] |= there.state[name].to(part.device)
        for name in (name for name in _WEIGHTS if name in part.state):
            total: Tensor = there.state[name].to(part.device)
            part.state[name][0] += total[0]
            part.state[name][1] = torch.maximum(part.state[name][1], total[1])


def _parts(ledger: MeasuredRuns, other: MeasuredRuns) -> list[tuple[Ledger, Ledger]]:
    ledger.divergences.settle()
    other.divergences.settle()
    names = ("traces", "features", "divergences")
    return [(getattr(ledger, name), getattr(other, name)) for name in names]
