"""What a trial's ledgers say: dFIL after each step count, of the runs' mean and of each run, and floors of it."""

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
    """1/dFIL at the most exposed record, at the 99 % quantile and at the median, of those that were measured."""
    seen = dfil[measured > 0].sort().values
    if len(seen) == 0:
        return dict.fromkeys(PLACES, 0.0)
    at = {place: float(seen[min(len(seen) - 1, math.ceil(q * (len(seen) - 1)))]) for place, q in PLACES.items()}
    return {place: 1 / max(value, 1e-300) for place, value in at.items()}


def crossed(dfil: Tensor) -> float:
    """What each run says of the record that the other runs find most exposed, on average over the runs.

        mean over r of dFIL_r(i_r),     i_r = argmax of the mean of dFIL over the other runs

    The choice of i_r has no part in run r, so each term is unbiased for a record's dFIL, and the whole on average at
    most the largest; the maximum over records of the runs' mean is on average at least that.

    Args:
        dfil: of each run and record, (R, N), R at least 2.
    """
    others = [torch.cat([dfil[:r], dfil[r + 1 :]]).mean(0) for r in range(len(dfil))]
    return mean_of([float(own[other.argmax()]) for own, other in zip(dfil, others, strict=True)])


def crossed_floor(dfil: Tensor) -> float | None:
    """1/crossed; None where no run met the records that the others point at."""
    found = crossed(dfil)
    return 1 / found if found > 0 else None


def kappa_ratio(account: Account, count: int) -> float:
    """κ(count)/κ(T): the paper's factor depends on the number of steps, over which it splits its δ."""
    cpu, only = torch.device("cpu"), ("paper",)
    parts = [Factors(replace(account, steps=steps, rules=only), cpu).kappa for steps in (count, account.steps)]
    return parts[0] / parts[1]


def dfil_at(ledger: FisherAccountant, count: int, runs: int, folder: Path) -> tuple[Tensor, Tensor]:
    """Mean over the runs of dFIL after so many steps, (rules, N), and how often each record was measured, (N,)."""
    account = ledger.account
    if count == account.steps:
        return torch.stack([ledger.dfil(rule).cpu() for rule in account.rules]), ledger.measured().cpu()
    kept = [_kept(folder, run, count) for run in range(runs)]
    dfil = _rescaled(torch.stack([part["trace"] for part in kept]).mean(0), account, count)
    return dfil, torch.stack([part["measured"] for part in kept]).sum(0)


def by_run(ledger: FisherAccountant, count: int, runs: int, folder: Path) -> Tensor | None:
    """dFIL of each run after so many steps, (R, rules, N); None where an earlier version did not keep all runs' ends.

    At the end of a run the ledger has it in its mean over the runs so far, m_r: it is r m_r − (r − 1) m_{r−1}."""
    places = [_place(folder, run, count) for run in range(runs)]
    if not all(place.exists() for place in places):
        return None
    kept = [_kept(folder, run, count) for run in range(runs)]
    if count < ledger.account.steps:
        traces = torch.stack([part["trace"] for part in kept])
    else:
        totals = torch.stack([(r + 1) * part["mean"] for r, part in enumerate(kept)])
        traces = torch.cat([totals[:1], totals.diff(dim=0).clamp(min=0)])  # 0 is rounding's to tell
    return torch.stack([_rescaled(trace, ledger.account, count) for trace in traces])


def _rescaled(trace: Tensor, account: Account, count: int) -> Tensor:
    """dFIL after so many steps from the traces of each rule, (rules, N)."""
    factors = [kappa_ratio(account, count) if rule == "paper" else 1.0 for rule in account.rules]
    return trace * torch.tensor(factors, dtype=trace.dtype)[:, None] / account.features


def keep(folder: Path, run: int, step: int, ledger: FisherAccountant) -> None:
    """The run's ledger so far, beside the checkpoints: written anew, the same, when a killed run comes by again. At the
    run's end it is in the mean over the runs so far, which is kept in its place."""
    state, ended = ledger.state(), ledger.runs > run
    names = ("mean",) if ended else ("trace", "measured")
    content = sealed({name: state[name] for name in names}, {"run": run, "step": step})
    write_whole(_place(folder, run, step), content, mode=CONFIDENTIAL)


def _kept(folder: Path, run: int, step: int) -> dict[str, Tensor]:
    """Returns what `keep` kept; Unreadable if it is gone, damaged, or of another run or step."""
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
    """Their mean, rounded once."""
    return math.fsum(values) / len(values)


__all__ = ["PLACES", "by_run", "crossed", "crossed_floor", "dfil_at", "floors_of", "kappa_ratio", "keep", "mean_of"]
