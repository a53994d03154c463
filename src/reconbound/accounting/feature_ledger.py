"""The per-feature part of a ledger: the diagonal of I for all records, for some of them, or averaged over records.

All records take N·d numbers. Where memory is short a few records are kept, and the average over all of them. The most
exposed records are known only once something has been measured, and a record that is picked by a noisy ledger must
not be reported from the same numbers, because its noise is what picked it. So the records are chosen by the first runs
and their features are measured in later runs, which are independent (docs/theory/accounting.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, number, whole
from reconbound.accounting.precision import relative_median
from reconbound.accounting.spec import Account
from reconbound.bounds import Bound, per_feature
from reconbound.fisher import StepInformation

#: Bytes that diagonal="auto" may take.
MEMORY = 2**28


@dataclass(frozen=True)
class Chosen:
    """Records whose features are kept, picked by the ledger of the first runs: the most and the least exposed.

    Attributes:
        most: the number of most exposed records.
        least: the number of least exposed records.
        after: the number of runs by whose mean they are picked. Their features are measured in the runs after these, so
            at least after + 1 runs are needed.
    """

    most: int = 16
    least: int = 16
    after: int = 1

    def __post_init__(self) -> None:
        whole("most", self.most, at_least=0)
        whole("least", self.least, at_least=0)
        whole("after", self.after)
        if self.most + self.least < 1:
            raise InputError("most", "and least must name at least one record", self.most)


Diagonal: TypeAlias = str | tuple[Any, ...] | Chosen | Sequence[int] | Tensor


def resolved(diagonal: Diagonal, records: int, features: int) -> str | Chosen | Tensor:
    """Returns what a ledger keeps: "none", "all", "average", a Chosen, or the indices of records.

    ("top", k) is Chosen(k, 0). "auto" or ("auto", bytes) is "all" where that fits, otherwise Chosen().

    Args:
        diagonal: as in `FisherAccountant`.
        records: N.
        features: d.

    >>> resolved("auto", 1_000, 20), resolved("auto", 60_000, 784), resolved(("top", 5), 100, 3)
    ('all', Chosen(most=16, least=16, after=1), Chosen(most=5, least=0, after=1))
    """
    if isinstance(diagonal, Chosen):
        return diagonal
    if isinstance(diagonal, str) and diagonal != "auto":
        return choice("diagonal", diagonal, ("none", "all", "average", "auto"))
    if isinstance(diagonal, str):
        diagonal = ("auto", MEMORY)
    if isinstance(diagonal, (tuple, list)) and len(diagonal) and isinstance(diagonal[0], str):
        if len(diagonal) == 2 and diagonal[0] == "top":
            return Chosen(whole("diagonal", diagonal[1]), 0)
        if len(diagonal) == 2 and diagonal[0] == "auto":
            fits = 12 * records * features <= number("diagonal", diagonal[1], above=0.0)  # float32: run, mean, error
            return "all" if fits else Chosen()
        raise InputError("diagonal", 'must be ("top", records) or ("auto", bytes) where it is such a pair', diagonal)
    try:
        rows = torch.as_tensor(diagonal, dtype=torch.int64).flatten().cpu()
    except (TypeError, ValueError, RuntimeError, OverflowError):
        kinds = '"none", "all", "average", "auto", ("top", records), ("auto", bytes), a Chosen'
        raise InputError("diagonal", f"must be {kinds} or indices of records", diagonal) from None
    if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= records or rows.unique().numel() != rows.numel():
        raise InputError("diagonal", f"must be distinct record indices below {records}", diagonal)
    return rows


class FeatureLedger:
    """Per-feature information, summed over the steps of a run and averaged over runs, under the account's first rule.

    Args:
        account: the mechanism, the data's size and the rules.
        diagonal: what is kept, as in FisherAccountant.
        device: where it lives.

    Attributes:
        kind: "none", "all", "average", "some" (given records) or "chosen".
        rows: the records kept, None for all or none; empty until they are chosen.
        state: its tensors.
        followed: chosen records are measured separately, with `follow`, and not when they happen to be among those of
            `add`.
        first: no run has ended yet.
    """

    def __init__(self, account: Account, diagonal: Diagonal, device: torch.device) -> None:
        self.account, self.device, self.followed, self.first = account, device, False, True
        what = resolved(diagonal, account.records, account.features)
        self.choice = what if isinstance(what, Chosen) else None
        self.kind = what if isinstance(what, str) else "some" if isinstance(what, Tensor) else "chosen"
        self.rows: Tensor | None = None
        self.state: dict[str, Tensor] = {}
        if self.kind in ("average", "some", "chosen"):
            self.state |= {name: self._zeros(1, torch.float64) for name in ("average", "average_mean")}
        if self.kind == "all":
            self._keep(None, account.records)
        elif isinstance(what, Tensor):
            self._keep(what, len(what))
        elif self.kind == "chosen":
            self._keep(torch.empty(0, dtype=torch.int64), 0)

    def _zeros(self, rows: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, self.account.features, dtype=dtype, device=self.device)

    def _keep(self, rows: Tensor | None, count: int) -> None:
        """Creates empty ledgers of these records. Chosen ones are few: in float64, with their spread between runs."""
        self.rows = rows
        if rows is not None:
            place = torch.full((self.account.records,), -1, dtype=torch.int64)
            place[rows] = torch.arange(len(rows))
            self._place = place.to(self.device)
        dtype = torch.float64 if self.kind == "chosen" else torch.float32
        self.state |= {name: self._zeros(count, dtype) for name in ("diagonal", "diagonal_mean")}
        if self.kind == "chosen" and rows is not None:
            self.state["diagonal_spread"] = self._zeros(count, dtype)
            self.state["diagonal_runs"] = torch.zeros(count, dtype=torch.int64)
            self.state["rows"] = rows
        elif self.kind != "chosen":
            # after one run Σx² over its measurements, from the second on the squared spread between runs
            self.state["diagonal_error"] = self._zeros(count, dtype)

    # --- writing ---------------------------------------------------------------------

    def check_found(self, found: StepInformation) -> None:
        """Raises an error, before anything is changed, where there is no diagonal to add or one of other features."""
        if self.kind == "none":
            return
        if found.diagonal_across is None or found.diagonal_along is None:
            raise InputError("found", "must have the diagonal: this ledger keeps it", None)
        for part in (found.diagonal_across, found.diagonal_along):
            if part[0].numel() != self.account.features:
                what = f"must have the diagonal of the account's {self.account.features} features, no others"
                raise InputError("found", f"{what} (of a masked record pick its columns)", tuple(part.shape))

    def add(self, index: Tensor, found: StepInformation, across: Tensor, along: Tensor) -> None:
        """Adds a step's diagonals, times these factors of each record.

        Args:
            index: the records, (B,).
            found: the step's information about them.
            across: the factor of the part across the gradient, (B,).
            along: the factor of the part along it, (B,).
        """
        if self.kind == "none":
            return
        entries = self._entries(found, across, along)
        if "average" in self.state:
            self.state["average"] += entries.sum(0, keepdim=True) / self.account.records
        if self.kind in ("some", "chosen") and not self.followed:
            place = self._place[index]
            kept = place >= 0
            index, entries = place[kept], entries[kept]
        if self.kind == "average" or self.followed:
            return
        self.state["diagonal"].index_add_(0, index, entries.to(self.state["diagonal"].dtype))
        if "diagonal_error" in self.state and self.first:
            self.state["diagonal_error"].index_add_(0, index, entries.square().to(torch.float32))

    def follow(self, found: StepInformation, across: Tensor, along: Tensor) -> None:
        """Adds a step's diagonals of all the chosen records, in the order of `rows`.

        Args:
            found: the step's information about the chosen records.
            across: the factor of the part across the gradient, (k,).
            along: the factor of the part along it, (k,).
        """
        self.state["diagonal"] += self._entries(found, across, along)

    def _entries(self, found: StepInformation, across: Tensor, along: Tensor) -> Tensor:
        self.check_found(found)
        assert found.diagonal_across is not None
        assert found.diagonal_along is not None
        entries = across[:, None] * found.diagonal_across.flatten(1).to(self.device, torch.float64)
        return entries + along[:, None] * found.diagonal_along.flatten(1).to(self.device, torch.float64)

    def finish_run(self, runs: int, mean_trace: Tensor, measured: Tensor) -> None:
        """Adds the run to the averages and chooses records where that is due.

        Args:
            runs: the number of this run.
            mean_trace: each record's mean over the runs so far, (N,).
            measured: the number of measurements per record, (N,).
        """
        if "diagonal_error" in self.state and runs > 1:
            if runs == 2:
                self.state["diagonal_error"].zero_()  # not times 0: what one run left may be infinite
            self.state["diagonal_error"] += (self.state["diagonal"] - self.state["diagonal_mean"]).square() * (
                (runs - 1) / runs
            )
        self.first = False
        for name in ("average", "diagonal"):
            if name in self.state and not (self.kind == "chosen" and name == "diagonal"):
                self.state[f"{name}_mean"] += (self.state[name] - self.state[f"{name}_mean"]) / runs
        if self.choice is not None and self.rows is not None:
            self._fold_chosen()
            if len(self.rows) == 0 and runs >= self.choice.after:
                self._keep(*self._chosen(self.choice, mean_trace, measured))
        for name in ("average", "diagonal"):
            if name in self.state:
                self.state[name].zero_()

    def _fold_chosen(self) -> None:
        state = self.state
        state["diagonal_runs"] += 1
        delta = state["diagonal"] - state["diagonal_mean"]
        state["diagonal_mean"] += delta / state["diagonal_runs"][:, None].to(self.device)
        state["diagonal_spread"] += delta * (state["diagonal"] - state["diagonal_mean"])

    def _chosen(self, wanted: Chosen, mean_trace: Tensor, measured: Tensor) -> tuple[Tensor, int]:
        """Returns the chosen records, most exposed first, least exposed last. A record never measured is not chosen."""
        order = torch.argsort(mean_trace, descending=True, stable=True).cpu()
        order = order[(measured.cpu() > 0)[order]]
        least = order[max(wanted.most, len(order) - wanted.least) :] if wanted.least else order[:0]
        rows = torch.cat([order[: wanted.most], least])
        return rows, len(rows)

    def merge(self, other: FeatureLedger, runs: int, more: int) -> None:
        """Adds the averages of another such ledger. Chosen records of either are kept.

        Args:
            other: the other ledger.
            runs: the number of runs in this ledger.
            more: the number of runs in the other.
        """
        mine, theirs = self.state, other.state
        if "diagonal_error" in mine:
            self._merge_error(other, runs, more)
        self.first = False
        for name in ("average_mean", "diagonal_mean"):
            if name in mine and not (self.kind == "chosen" and name == "diagonal_mean"):
                mine[name] += (theirs[name].to(self.device) - mine[name]) * (more / (runs + more))
        if self.kind == "chosen":
            self._merge_chosen(other)

    def _merge_error(self, other: FeatureLedger, runs: int, more: int) -> None:
        """Merges the squared spread between the runs of both; for only one run, its own Σx²."""
        mine, theirs = self.state["diagonal_error"], other.state["diagonal_error"].to(self.device)
        if runs == 0:
            mine.copy_(theirs)
            return
        delta = other.state["diagonal_mean"].to(self.device) - self.state["diagonal_mean"]
        if runs == 1:
            mine.zero_()
        mine += delta.square() * (runs * more / (runs + more))
        if more > 1:
            mine += theirs

    def _merge_chosen(self, other: FeatureLedger) -> None:
        """Merges the chosen records of both ledgers.

        A record of both has the mean over the runs of both. A record of only one of them keeps that one's runs.
        """
        assert self.rows is not None
        assert other.rows is not None
        mine = {name: value.clone() for name, value in self.state.items()}
        new = other.rows[~torch.isin(other.rows, self.rows)]
        had, rows = len(self.rows), torch.cat([self.rows, new])
        self._keep(rows, len(rows))
        for name in ("diagonal", "diagonal_mean", "diagonal_spread", "diagonal_runs"):
            self.state[name][:had] = mine[name]
        at = self._place[other.rows.to(self.device)].cpu()
        state, theirs = self.state, {n: v.to(self.device) for n, v in other.state.items() if n.startswith("diagonal_")}
        a, b = state["diagonal_runs"][at].double(), theirs["diagonal_runs"].cpu().double()
        share = torch.where(a + b > 0, b / (a + b).clamp(min=1), torch.zeros_like(a))[:, None].to(self.device)
        at_here = at.to(self.device)
        delta = theirs["diagonal_mean"] - state["diagonal_mean"][at_here]
        both = theirs["diagonal_spread"] + delta.square() * a[:, None].to(self.device) * share
        state["diagonal_spread"].index_add_(0, at_here, both)
        state["diagonal_mean"].index_add_(0, at_here, delta * share)
        state["diagonal_runs"].index_add_(0, at, theirs["diagonal_runs"].cpu())

    # --- reading -----------------------------------------------------------------------

    def same_parts(self, other: FeatureLedger) -> bool:
        """Returns whether the other ledger keeps the same parts, so that the two can be merged."""
        if self.kind != other.kind or self.choice != other.choice:
            return False
        given = self.kind == "some" and self.rows is not None and other.rows is not None
        return not given or torch.equal(self.rows, other.rows)  # type: ignore[arg-type]

    def floors(self, scale: Tensor, runs: int, measured: Tensor, average: bool) -> Bound:
        """Returns 1/I_jj in squared data units: of the records kept, (k, d), or of the average, (1, d).

        No standard error of the average is kept, and the result says so.

        Args:
            scale: size of one input unit in the data's units, (1,) or (d,).
            runs: the number of finished runs.
            measured: the number of measurements per record, (N,).
            average: return the floors of the average.
        """
        if self.kind == "none":
            how = 'FisherAccountant(account, diagonal="all") keeps it, as does PrivateSGD(..., diagonal="all")'
            raise InputError("diagonal", f"must have been kept to speak of features ({how})", self.kind)
        average = average or self.kind == "average"
        if self.choice is not None and not average and not bool((self.state["diagonal_runs"] > 0).any()):
            raise InputError("runs", f"must be more than the {self.choice.after} by which the records are chosen", runs)
        kept = self._information(runs, average)
        bound = per_feature((kept / scale.square()).numpy())
        value = bound.value
        if not average:
            never = (measured == 0).cpu()
            unseen = never if self.rows is None else never[self.rows]
            if self.choice is not None:
                unseen = self.state["diagonal_runs"] == 0
            value = np.where(unseen.numpy()[:, None], 0.0, value)
        assumes = (*bound.assumes, f"rule {self.account.rules[0]}")
        if average:
            assumes += ("of the average record: an estimate whose standard error is not known",)
        if self.choice is not None and not average:
            assumes += (f"records chosen by {self.choice.after} run(s), measured in the others",)
        notes: tuple[str, ...] = ()
        if average:  # by Jensen: mean 1/Iⱼⱼ ≥ 1/mean Iⱼⱼ
            notes = (f"of the mean over {self.account.records:,} records: single ones may be known better",)
        return replace(
            bound, value=value, sampler=self.account.sampler, assumes=(*assumes, *notes), notes=notes, estimate=True
        )

    def standard_error(self, runs: int, measured: Tensor) -> Tensor:
        """Returns the standard error of I_jj of the records kept, (k, d), in the model's input units.

        It is over runs where there are two or more. For one run it is √Σx² for given or all records, and infinite for
        chosen ones. It is infinite for a record never measured.

        Args:
            runs: the number of finished runs.
            measured: the number of measurements per record, (N,).
        """
        if self.kind in ("none", "average"):
            raise InputError("diagonal", "must keep records, for the error of their features", self.kind)
        if self.choice is None:
            variance = self.state["diagonal_error"].double() / max(1, runs * (runs - 1))
            seen = (measured if self.rows is None else measured[self.rows.to(measured.device)]) > 0
            return variance.sqrt().masked_fill(~seen[:, None].to(self.device), torch.inf)
        return self._chosen_error()

    def precision(self, runs: int, measured: Tensor) -> tuple[Tensor, float]:
        """Returns the number of measurements per record kept, (k,), and the entries' median relative standard error."""
        kept, error = self._information(runs, average=False), self.standard_error(runs, measured).cpu()
        if self.followed and self.rows is not None:  # at every step of the runs after the choice
            return self.state["diagonal_runs"] * self.account.steps, relative_median(kept, error)
        times = measured if self.rows is None else measured[self.rows.to(measured.device)]
        return times, relative_median(kept, error)

    def _chosen_error(self) -> Tensor:
        runs = self.state["diagonal_runs"].to(self.device)[:, None]
        variance = self.state["diagonal_spread"].clamp(min=0) / (runs * (runs - 1)).clamp(min=1)
        return variance.sqrt().masked_fill(runs < 2, torch.inf)

    def _information(self, runs: int, average: bool) -> Tensor:
        name = "average" if average and self.kind != "all" else "diagonal"
        ending = "_mean" if runs else ""
        kept = self.state[f"{name}{ending}"].double().cpu()
        return kept.mean(0, keepdim=True) if average and self.kind == "all" else kept

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state` held. Shapes have been checked, except the number of chosen records."""
        if self.kind == "chosen":
            rows = tensors["rows"].to(torch.int64).cpu()
            self._keep(rows.clone(), len(rows))
        for name, value in self.state.items():
            if name in tensors:
                value.copy_(tensors[name])
            else:  # the error of a ledger that was written before errors were kept: not known
                value.fill_(torch.inf)

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an error that names the tensor whose shape is wrong."""
        rows = tensors["rows"] if self.kind == "chosen" and "rows" in tensors else None
        if rows is not None and len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.account.records:
            raise InputError("rows", f"must be record indices below {self.account.records}", rows.tolist())
        for name, value in self.state.items():
            if name == "diagonal_error" and name not in tensors:
                continue
            free = rows is not None and (name.startswith("diagonal") or name == "rows")
            shape = (len(rows), *value.shape[1:]) if free and rows is not None else tuple(value.shape)
            if name not in tensors or tuple(tensors[name].shape) != shape:
                got = tuple(tensors[name].shape) if name in tensors else None
                raise InputError(name, f"must be a tensor of shape {shape}", got)
