"""The per-feature part of a ledger: the diagonal of I for all records, for some of them, or averaged over records.

All records take N·d numbers. Where memory is short a few records are kept, and the average over all of them. The most
exposed records are known only once something has been measured, and a record that is picked by a noisy ledger must
not be reported from the same numbers, because its noise is what picked it. So the records are chosen by the first runs
and their features are measured in later runs, which are independent (docs/theory/accounting.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, number, numbers, whole
from reconbound.accounting.compact import extremes
from reconbound.accounting.confidence import describe_precision, median_of, relative_median
from reconbound.accounting.divergence_queries import group_means
from reconbound.accounting.ledger import Ledger
from reconbound.accounting.spec import Account
from reconbound.bounds import Bound, mean_van_trees, per_feature
from reconbound.fisher import StepInformation

#: Bytes that diagonal="auto" may take.
MEMORY = 2**28
#: What a ledger may keep.
KINDS = ("none", "all", "average", "some", "chosen")


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


def resolve_diagonal(diagonal: Diagonal, records: int, features: int) -> str | Chosen | Tensor:
    """Returns what a ledger keeps: "none", "all", "average", a Chosen, or the indices of records.

    ("top", k) is Chosen(k, 0). "auto" or ("auto", bytes) is "all" where that fits, otherwise Chosen().

    Args:
        diagonal: as in `FisherAccountant`.
        records: N.
        features: d.

    >>> resolve_diagonal("auto", 1_000, 20), resolve_diagonal("auto", 60_000, 784), resolve_diagonal(("top", 5), 100, 3)
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


def average_floor(account: Account, information: Any, variance: Any) -> Bound:
    """Returns the floor of the average record's squared error in each feature: van Trees, or the mechanism's own.

        mean over records of E(ẑ_ij − z_ij)² ≥ max{ 1/(mean I_jj + 1/v_j),  v_j e^{−2 KL} }

    The second is Shannon's (docs/theory/any_attacker.md 6.13): a prior with Fisher information 1/v has an entropy power
    of at least v, and KL bounds what the release tells, whatever the data.

    Args:
        account: the mechanism.
        information: mean_i I_i,jj, in the units of 1/v, (..., d); infinite where nothing was measured.
        variance: v > 0, of a Gaussian prior the variance of each feature given all that the attacker knows otherwise,
            one number or (d,); of any prior 1/J, J its Fisher information.
    """
    own = numbers("variance", variance, at_least=0.0)
    info = np.atleast_1d(np.asarray(information, dtype=np.float64))
    if own.shape not in ((), info.shape[-1:]):
        raise InputError("variance", f"must be one number, or {info.shape[-1]} of them", own.shape)
    if np.any(own < 1e-290):
        raise InputError("variance", "must be greater than 0", float(own.min()))
    mechanism, known = account.mechanism(), np.isfinite(info)
    bound = mean_van_trees(np.where(known, info, 0.0), 1 / own)
    value = np.maximum(np.where(known, bound.value, 0.0), own * np.exp(-2 * mechanism.kl()))
    over = f"errors are over {mechanism.randomness}"
    assumes = (*bound.assumes, f"{account.clip} clipping", over, "the attacker knows every other record and all else")
    return replace(bound, value=value, theorem="van Trees; Shannon", sampler=account.sampler, assumes=assumes)


class FeatureLedger(Ledger):
    """Per-feature information, summed over the steps of a run and averaged over runs, under the account's first rule.

    Args:
        account: the mechanism, the data's size and the rules.
        diagonal: what is kept, as in FisherAccountant.
        device: where it lives.

    Attributes:
        kind: "none", "all", "average", "some" (given records) or "chosen".
        choice: how records are chosen, for "chosen".
        rows: the records kept, None for all or none; empty until they are chosen.
        followed: chosen records are measured separately, with `follow`, and not when they happen to be among those of
            `add`.
    """

    def __init__(self, account: Account, diagonal: Diagonal, device: torch.device) -> None:
        super().__init__(device)
        self.account, self.followed = account, False
        what = resolve_diagonal(diagonal, account.records, account.features)
        self.choice = what if isinstance(what, Chosen) else None
        self.kind = what if isinstance(what, str) else "some" if isinstance(what, Tensor) else "chosen"
        self.rows: Tensor | None = None
        if self.kind in ("average", "some", "chosen"):
            self.keep("average", 1, account.features)
        if self.kind == "all":
            self.keep("diagonal", account.records, account.features, dtype=torch.float32, error=True)
        elif self.kind in ("some", "chosen"):
            self._keep_rows(what if isinstance(what, Tensor) else torch.empty(0, dtype=torch.int64))

    def _keep_rows(self, rows: Tensor) -> None:
        """Creates empty ledgers of these records. Chosen ones are few: in float64, with a number of runs for each."""
        self.rows = rows
        self._sorted, self._order = (part.to(self.device) for part in rows.sort())
        dtype = torch.float32 if self.choice is None else torch.float64
        self.keep("diagonal", len(rows), self.account.features, dtype=dtype, error=True)
        if self.choice is not None:
            self.state["diagonal_runs"] = torch.zeros(len(rows), dtype=torch.int64, device=self.device)
            self.state["rows"] = rows

    def _places(self, index: Tensor) -> Tensor:
        """Returns the place of each of these records among those kept, −1 for others."""
        if not len(self._sorted):
            return torch.full_like(index, -1)
        at = torch.searchsorted(self._sorted, index).clamp(max=len(self._sorted) - 1)
        return torch.where(self._sorted[at] == index, self._order[at], -1)

    def run_counts(self, name: str) -> int | Tensor:
        """Returns the number of finished runs in the quantity's mean; of chosen records for each, (k, 1)."""
        own = name == "diagonal" and self.choice is not None
        return self.state["diagonal_runs"][:, None] if own else self.runs

    # --- writing ---------------------------------------------------------------------

    def check_found(self, found: StepInformation) -> None:
        """Raises an error, before anything is changed, where there is no diagonal to add or one of other features."""
        for part in (found.diagonal_across, found.diagonal_along):
            if part is None:
                raise InputError("found", "must have the diagonal: this ledger keeps it", None)
            if part[0].numel() != self.account.features:
                what = f"must have the diagonal of the account's {self.account.features} features, no others"
                raise InputError("found", f"{what} (of a masked record pick its columns)", tuple(part.shape))

    def check_followed(self, found: StepInformation) -> Tensor:
        """Returns the chosen records; refuses information about others, or about masked ones."""
        if not isinstance(found, StepInformation):
            raise InputError("found", "must be what step_information returns", found)
        rows = self.rows if self.kind == "chosen" else None
        if rows is None or len(found.clipped_norm) != len(rows):
            have = "no" if rows is None else len(rows)
            raise InputError("found", f"must be about the {have} records that were chosen", len(found.clipped_norm))
        if found.mask is not None and not bool((found.mask != 0).all()):
            raise InputError("found", "must be about records that took part, not masked ones", found.mask.tolist())
        return rows

    def add(self, index: Tensor, found: StepInformation, across: Tensor, along: Tensor) -> None:
        """Adds a step's diagonals, times these factors of each record.

        Args:
            index: the records, (B,).
            found: the step's information about them.
            across: the factor of the part across the gradient, (B,).
            along: the factor of the part along it, (B,).
        """
        entries = self._entries(found, across, along)
        if "average" in self.state:
            self.state["average"] += entries.sum(0, keepdim=True) / self.account.records
        if self.kind == "average" or self.followed:
            return
        if self.rows is not None:
            place = self._places(index)
            index, entries = place[place >= 0], entries[place >= 0]
        self.state["diagonal"].index_add_(0, index, entries.to(self.state["diagonal"].dtype))
        if self.choice is None and self.runs == 0:  # in expectation no less than the variance of the run's sum
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
        assert found.diagonal_across is not None
        assert found.diagonal_along is not None
        entries = across[:, None] * found.diagonal_across.flatten(1).to(self.device, torch.float64)
        return entries + along[:, None] * found.diagonal_along.flatten(1).to(self.device, torch.float64)

    # --- runs --------------------------------------------------------------------------

    def finish_run(self) -> None:
        """Adds the run to the averages."""
        if self.choice is not None:
            self.state["diagonal_runs"] += 1
        super().finish_run()

    def choose(self, mean_trace: Tensor, measured: Tensor) -> None:
        """Chooses the records to keep where that is due: most exposed first, least exposed last.

        Args:
            mean_trace: each record's mean over the runs so far, (N,).
            measured: the number of measurements per record, (N,); a record never measured is not chosen.
        """
        wanted = self.choice
        if wanted is None or self.rows is None or len(self.rows) or self.runs < wanted.after:
            return
        self._keep_rows(extremes(mean_trace, lambda part: measured[part] > 0, wanted.most, wanted.least))

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another such ledger. Chosen records of either are kept.

        A record that both have chosen has the mean over the runs of both. A record of only one keeps that one's runs.
        """
        assert isinstance(other, FeatureLedger)
        if self.choice is not None and self.rows is not None and other.rows is not None:
            rows = torch.cat([self.rows, other.rows[~torch.isin(other.rows, self.rows)]])
            other = copy(other)
            other._widen(rows)
            self._widen(rows)
        super().merge(other)
        if self.choice is not None:
            self.state["diagonal_runs"] += other.state["diagonal_runs"].to(self.device)

    def _widen(self, rows: Tensor) -> None:
        """Keeps these records, among which are those kept so far."""
        assert self.rows is not None
        before, own, self.state = self.state, self.rows, dict(self.state)
        self._keep_rows(rows)
        at = self._places(own.to(self.device))
        for name, value in before.items():
            if name.startswith("diagonal"):
                self.state[name][at] = value

    # --- reading -----------------------------------------------------------------------

    def same_parts(self, other: FeatureLedger) -> bool:
        """Returns whether the other ledger keeps the same parts, so that the two can be merged."""
        if self.kind != other.kind or self.choice != other.choice:
            return False
        if self.kind != "some":
            return True
        return self.rows is not None and other.rows is not None and self.rows.equal(other.rows)

    def floors(
        self, scale: Tensor, measured: Tensor, average: bool, caveats: tuple[str, ...]
    ) -> tuple[Bound, float, str]:
        """Returns 1/I_jj in squared data units, their median relative standard error, and the statement of it.

        They are those of the records kept, (k, d), or of the average, (1, d). No standard error of the average is kept:
        it is infinite, and the floors state that it is not known.

        Args:
            scale: size of one input unit in the data's units, (1,) or (d,).
            measured: the number of measurements per record, (N,).
            average: return the floors of the average.
            caveats: what else must be stated with the floors.
        """
        if self.kind == "none":
            how = 'FisherAccountant(account, diagonal="all") keeps it, as does PrivateSGD(..., diagonal="all")'
            raise InputError("diagonal", f"must have been kept for floors of features ({how})", self.kind)
        seen = self._measured(measured).cpu() > 0
        if self.choice is not None and not average and not bool(seen.any()):
            why = f"must be more than the {self.choice.after} by which the records are chosen"
            raise InputError("runs", why, self.runs)
        bound = per_feature((self._information(average) / scale.square()).numpy())
        value, assumes = bound.value, (*bound.assumes, f"rule {self.account.kept_rules[0]}")
        relative, notes = math.inf, caveats
        if average:  # by Jensen: mean 1/Iⱼⱼ ≥ 1/mean Iⱼⱼ
            notes = (f"of the mean over {self.account.records:,} records: single ones may be known better", *notes)
            assumes += ("of the average record: an estimate whose standard error is not known",)
        else:
            value = np.where(seen.numpy()[:, None], value, 0.0)
            if self.choice is not None:
                assumes += (f"records chosen by {self.choice.after} run(s), measured in the others",)
            times, relative = self.precision(measured)
            notes = (describe_precision(median_of(times), relative, " of a feature", runs=self.runs), *notes)
        found = replace(bound, value=value, sampler=self.account.sampler, assumes=(*assumes, *notes), notes=notes,
                        estimate=True)  # fmt: skip
        return found, relative, notes[0]

    def mean_floors(
        self, variance: Any, scale: Tensor, measured: Tensor, caveats: tuple[str, ...], *, trace: Tensor | None,
        groups: Any,
    ) -> Bound:  # fmt: skip
        """Returns the floor of the average record in each feature, (groups, d), by `average_floor`.

        Args:
            variance: of the prior, in squared data units, one number or (d,).
            scale: size of one input unit in the data's units, (1,) or (d,).
            measured: the number of measurements per record, (N,).
            caveats: what must be stated with the floors.
            trace: Tr I of each record, (N,), where it is the only feature's information; None otherwise.
            groups: the number of each record's group, (N,); None: one group of all.
        """
        if trace is None and self.kind == "none":
            raise InputError("diagonal", 'must have been kept, for example "average", for floors of features', "none")
        if trace is None and self.kind != "all" and groups is not None:
            raise InputError("groups", 'need diagonal="all": a ledger that keeps the features of all', self.kind)
        if trace is None and self.kind != "all":
            known, information = bool((measured > 0).any()), self._information(average=True).numpy()
            information = np.where(known, information, np.inf)
        else:
            each = (self._information(average=False) if trace is None else trace[:, None].cpu()).numpy()
            seen = group_means((measured.cpu().numpy() > 0).astype(float), groups, empty=0.0) > 0
            information = np.where(seen[:, None], group_means(each, groups, empty=np.inf), np.inf)
        bound = average_floor(self.account, information / scale.square().numpy(), variance)
        public = () if groups is None else ("groups are defined by public facts",)
        rule, own = self.account.kept_rules[0], ("an estimate whose standard error is not known", *caveats)
        stated = (*bound.assumes, *public, f"rule {rule}", *own)
        return replace(bound, assumes=stated, notes=own, proved=rule != "paper")

    def diagonal_error(self, measured: Tensor) -> Tensor:
        """Returns the standard error of I_jj of the records kept, (k, d), in the model's input units.

        It is over runs where there are two or more. For one run it is √Σx² for given or all records, and infinite for
        chosen ones. It is infinite for a record never measured.

        Args:
            measured: the number of measurements per record, (N,).
        """
        if self.kind in ("none", "average"):
            raise InputError("diagonal", "must keep records, for the error of their features", self.kind)
        unknown = self._measured(measured)[:, None] < (1 if self.choice is None else 2)
        return self.standard_error("diagonal").masked_fill(unknown, torch.inf)

    def precision(self, measured: Tensor) -> tuple[Tensor, float]:
        """Returns the number of measurements per record kept, (k,), and the entries' median relative standard error."""
        relative = relative_median(self._information(average=False), self.diagonal_error(measured).cpu())
        if self.followed:  # at every step of the runs after the choice
            return self.state["diagonal_runs"] * self.account.steps, relative
        return measured if self.rows is None else measured[self.rows.to(measured.device)], relative

    def _measured(self, measured: Tensor) -> Tensor:
        """Returns how often each record kept was measured, of chosen ones in how many runs, (k,)."""
        if self.choice is not None:
            return self.state["diagonal_runs"]
        return measured if self.rows is None else measured[self.rows.to(measured.device)]

    def _information(self, average: bool) -> Tensor:
        kept = self.mean("average" if average and self.kind != "all" else "diagonal").double().cpu()
        return kept.mean(0, keepdim=True) if average and self.kind == "all" else kept

    # --- keeping -----------------------------------------------------------------------

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an InputError that names the first tensor whose shape or type does not fit; nothing is changed."""
        rows, wanted = tensors.get("rows"), self
        if self.choice is not None and rows is not None:
            size = () if "diagonal" not in tensors else tuple(tensors["diagonal"].shape)
            if rows.dtype != torch.int64 or size != (*rows.shape, self.account.features):  # before memory is taken
                raise InputError("rows", f"must be indices of the records in the diagonal, {size}", tuple(rows.shape))
            if len(rows) and not 0 <= int(rows.min()) <= int(rows.max()) < self.account.records:
                raise InputError("rows", f"must be record indices below {self.account.records}", rows.tolist())
            wanted = copy(self)
            wanted.state = dict(self.state)
            wanted._keep_rows(rows.to(torch.int64).cpu())
        super(FeatureLedger, wanted).check(tensors)

    def restore(self, tensors: Mapping[str, Tensor], runs: int, *, copy: bool = True) -> None:
        """Restores the tensors, which have been checked, and the number of finished runs."""
        if self.choice is not None:
            self._keep_rows(tensors["rows"].to("cpu", torch.int64, copy=True))
        super().restore(tensors, runs, copy=copy)
