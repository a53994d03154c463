"""The ledgers of a trial: dFIL after each step count, of the runs' mean and of each run, and floors of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from reconbound._internal.files import CONFIDENTIAL, Unreadable, sealed, unsealed, write_whole
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account, Factors
from reconbound.report.folder import CHECKPOINTS

#: Where over the records a floor is taken: name → quantile of dFIL.
PLACES = {"max": 1.0, "q99": 0.99, "median": 0.5}


def floors_of(dfil: Tensor, measured: Tensor) -> dict[str, float]:
    """Returns 1/dFIL at the most exposed record, at the 99 % quantile and at the median, of those that were measured.

    Args:
        dfil: of each record, (N,).
        measured: how often each record was measured, (N,).
    """
    seen = dfil[measured > 0].sort().values
    if len(seen) == 0:
        return dict.fromkeys(PLACES, 0.0)
    at = {place: float(seen[min(len(seen) - 1, math.ceil(q * (len(seen) - 1)))]) for place, q in PLACES.items()}
    return {place: 1 / max(value, 1e-300) for place, value in at.items()}


def crossed(dfil: Tensor) -> float:
    """Computes what each run finds for the record that the other runs find most exposed, on average over the runs.

        mean over r of dFIL_r(i_r),     i_r = argmax of the mean of dFIL over the other runs

    Run r has no part in the choice of i_r, so each term is unbiased for a record's dFIL, and the whole is on average at
    most the largest; the maximum over records of the runs' mean is on average at least that.

    Args:
        dfil: of each run and record, (R, N), R at least 2.
    """
    others = [torch.cat([dfil[:r], dfil[r + 1 :]]).mean(0) for r in range(len(dfil))]
    return mean_of([float(own[other.argmax()]) for own, other in zip(dfil, others, strict=True)])


def crossed_floor(dfil: Tensor) -> float | None:
    """Returns 1/crossed; None where no run measured the records that the others point at."""
    found = crossed(dfil)
    return 1 / found if found > 0 else None


def kappa_ratio(account: Account, count: int) -> float:
    """Returns κ(count)/κ(T): the paper's factor depends on the number of steps, over which it splits its δ.

    Args:
        account: of a run of T steps.
        count: a smaller number of steps.
    """
    cpu, only = torch.device("cpu"), ("paper",)
    parts = [Factors(replace(account, steps=steps, rules=only), cpu).kappa for steps in (count, account.steps)]
    return parts[0] / parts[1]


def dfil_at(ledger: FisherAccountant, count: int, runs: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Returns dFIL after `count` steps, averaged over the runs, and the number of measurements.

    Args:
        ledger: of the finished runs.
        count: the number of steps.
        runs: the number of runs.
        folder: the trial's.

    Returns:
        dFIL, (rules, N), and how often each record was measured, (N,).
    """
    account = ledger.account
    if count == account.steps:
        return torch.stack([ledger.dfil(rule).cpu() for rule in account.rules]), ledger.measured().cpu()
    kept = [_kept(folder, run, count) for run in range(runs)]
    dfil = _rescaled(torch.stack([part["trace"] for part in kept]).mean(0), account, count)
    return dfil, torch.stack([part["measured"] for part in kept]).sum(0)


def by_run(ledger: FisherAccountant, count: int, runs: int, folder: Path) -> Tensor | None:
    """Returns dFIL of each run after `count` steps, (R, rules, N).

    At the end of a run the ledger has it in its mean over the runs so far, m_r: it is r m_r − (r − 1) m_{r−1}.

    Args:
        ledger: of the finished runs.
        count: the number of steps.
        runs: the number of runs.
        folder: the trial's.

    Returns:
        The tensor; None where an earlier version did not keep the ends of all runs.
    """
    places = [_place(folder, run, count) for run in range(runs)]
    if not all(place.exists() for place in places):
        return None
    kept = [_kept(folder, run, count) for run in range(runs)]
    if count < ledger.account.steps:
        traces = torch.stack([part["trace"] for part in kept])
    else:
        totals = torch.stack([(r + 1) * part["mean"] for r, part in enumerate(kept)])
        traces = torch.cat([totals[:1], totals.diff(dim=0).clamp(min=0)])  # rounding may make 0 negative
    return torch.stack([_rescaled(trace, ledger.account, count) for trace in traces])


def _rescaled(trace: Tensor, account: Account, count: int) -> Tensor:
    """Returns dFIL after `count` steps from the traces of each rule, (rules, N)."""
    factors = [kappa_ratio(account, count) if rule == "paper" else 1.0 for rule in account.rules]
    return trace * torch.tensor(factors, dtype=trace.dtype)[:, None] / account.features


def keep(folder: Path, run: int, step: int, ledger: FisherAccountant) -> None:
    """Writes the run's ledger so far beside the checkpoints. A killed run writes the same again when it continues.

    At the run's end its ledger is part of the mean over the runs so far, which is kept in its place.

    Args:
        folder: the trial's.
        run: the number of the run.
        step: the number of the step.
        ledger: at this step.
    """
    state, ended = ledger.state(), ledger.runs > run
    names = ("mean",) if ended else ("trace", "measured")
    content = sealed({name: state[name] for name in names}, {"run": run, "step": step})
    write_whole(_place(folder, run, step), content, mode=CONFIDENTIAL)


def _kept(folder: Path, run: int, step: int) -> dict[str, Tensor]:
    """Returns what `keep` wrote. Raises Unreadable if it is gone, damaged, or of another run or step."""
    path = _place(folder, run, step)
    try:
        tensors, facts = unsealed(path)
    except FileNotFoundError:
        raise Unreadable(f"{path} has been removed") from None
    if facts != {"run": run, "step": step}:
        raise Unreadable(f"{path} is of another run or step")
    return tensors


def _place(folder: Path, run: int, step: int) -> Path:
    return folder / CHECKPOINTS / f"at-{run}-{step}.safetensors"


def mean_of(values: Sequence[float]) -> float:
    """Returns the mean of the values, rounded once."""
    return math.fsum(values) / len(values)


__all__ = ["PLACES", "by_run", "crossed", "crossed_floor", "dfil_at", "floors_of", "kappa_ratio", "keep", "mean_of"]
