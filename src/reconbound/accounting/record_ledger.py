"""The per-record part of a ledger: Tr I under each rule and its variance, summed over steps and averaged over runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, number
from reconbound.accounting.precision import relative_median, told
from reconbound.accounting.spec import Account, Factors
from reconbound.bounds import Bound, from_trace
from reconbound.fisher import StepInformation

_AVERAGED = ("variance", "spectral")
_NEWER = {"weights": math.nan, "partial": False}  # what ledgers of earlier versions lack, and what it then is


class TraceLedger:
    """Traces of every record, their number of measurements and their precision, and spectral norms if requested.

    Args:
        account: the mechanism, the data's size and the rules.
        spectral: also keep the sum of the steps' spectral norms.
        device: where it lives.

    Attributes:
        state: its tensors.
        factors: the subsampling factors of each rule.
    """

    def __init__(self, account: Account, spectral: bool, device: torch.device) -> None:
        self.account, self.device = account, device
        self.state = _empty(account, spectral, device)
        self.factors = Factors(account, device)

    # --- writing ---------------------------------------------------------------------

    def checked(self, indices: Tensor | Sequence[int], found: StepInformation) -> Tensor:
        """Returns the indices on the ledger's device, or raises an InputError, before any change, if they are wrong."""
        given = indices
        with suppress(TypeError, ValueError, RuntimeError):  # a list or an array of whole numbers will do
            indices = torch.as_tensor(given)
        if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dtype == torch.bool:
            raise InputError("indices", "must be a tensor of record indices", getattr(given, "dtype", given))
        if tuple(indices.shape) != (len(found.clipped_norm),):
            have = len(indices) if indices.dim() == 1 else tuple(indices.shape)
            raise InputError("indices", f"must be {len(found.clipped_norm)}, one for each record found", have)
        if indices.numel() == 0:
            return indices
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.account.records:
            bad = low if low < 0 else high
            raise InputError("indices", f"must lie between 0 and {self.account.records - 1}", bad)
        if indices.unique().numel() != indices.numel():
            raise InputError("indices", "must name each record at most once", indices.tolist())
        self.check_found(indices, found)
        return indices.to(self.device, torch.int64)

    def check_found(self, indices: Tensor, found: StepInformation) -> None:
        """Raises an InputError for another mechanism or model than the account's, and for values not finite."""
        account = self.account
        if found.features != account.features:
            raise InputError("found", f"must be about the account's {account.features} features", found.features)
        for name in ("noise_multiplier", "max_grad_norm", "clip"):
            given, wanted = getattr(found, name), getattr(account, name)
            if given is not None and given != wanted:
                why = f"must have been computed with the account's {name}, {wanted!r}, by which noise is scaled"
                raise InputError("found", why if name != "clip" else why.partition(", by")[0], given)
        if "spectral" in self.state and found.spectral_bound is None:
            raise InputError("found", "must have the spectral norm: this ledger keeps it", None)
        numbers = torch.stack([x.double() for x in (found.across, found.along, found.across_error, found.clipped_norm)])
        bad = ~torch.isfinite(numbers).all(0) | (numbers[:2].sum(0) < 0)
        if bool(bad.any()):
            first = int(torch.nonzero(bad)[0])
            where = f"must have finite numbers, and no negative trace, of record {int(indices[first])}"
            raise InputError("found", where, [float(x) for x in numbers[:2, first]])

    def add(self, index: Tensor, found: StepInformation, weight: float, stratified: bool) -> tuple[Tensor, Tensor]:
        """Adds a step's information about these records; returns the factors of the first rule, times the weight.

        Args:
            index: the records, (B,).
            found: the step's information about them.
            weight: as in `FisherAccountant.add`.
            stratified: as in `FisherAccountant.add`.
        """
        state, account = self.state, self.account
        count, rate = state["measured"][index], account.sample_rate
        weight = number("weight", weight, above=0.0)
        if weight < rate * (1 - 1e-9):
            why = f"must be at least the sample rate, {rate:g}, which is divided by a chance to make it"
            raise InputError("weight", why, weight)
        chance = min(1.0, rate / weight)
        first: list[Tensor] = []
        for k, rule in enumerate(account.rules):
            across, along = (weight * f.to(self.device) for f in self.factors(rule, found.clipped_norm))
            value = across * self._here(found.across) + along * self._here(found.along)
            error = across * self._here(found.across_error)
            self._add_variance(k, index, value, error, count, chance, stratified)
            state["trace"][k].index_add_(0, index, value)
            first = first or [across, along]
        self._add_spectral(index, found, torch.maximum(*first))
        state["measured"].index_add_(0, index, torch.ones_like(index))
        state["weights"][0] += weight * len(index)
        if not stratified:
            state["weights"][1].clamp_(min=weight)
        return first[0], first[1]

    def _add_variance(
        self, k: int, index: Tensor, value: Tensor, error: Tensor, count: Tensor, chance: float, stratified: bool
    ) -> None:
        """Adds to the variance of the run's sum, given its trajectory: of the probes and of when a record was measured.

        Rare draws (Horvitz–Thompson): Σ (1−π) x² + π e². Once per block: half the squared differences of successive
        blocks, times B/(B−1), which counts the drift between blocks as error too; for one block it is x².
        """
        drawn = (1 - chance) * value.square() + chance * error.square()
        variance, last = self.state["variance"][k], self.state["last"][k]
        self.state["rare"] |= chance < 1.0
        if not stratified or chance == 1.0:
            variance.index_add_(0, index, drawn)
            return
        so_far = variance[index] * (count - 1).clamp(min=0) / count.clamp(min=1)
        more = (so_far + (value - last[index]).square() / 2) * (count + 1) / count.clamp(min=1)
        variance[index] = torch.where(count > 0, more, drawn)
        last[index] = value

    def _add_spectral(self, index: Tensor, found: StepInformation, largest: Tensor) -> None:
        if "spectral" not in self.state:
            return
        assert found.spectral_bound is not None
        self.state["spectral"].index_add_(0, index, largest * self._here(found.spectral_bound))

    def _here(self, values: Tensor) -> Tensor:
        return values.to(device=self.device, dtype=torch.float64)

    def steps_told(self) -> float:
        """Returns the number of steps that this run's measurements cover: their weights over those of one step."""
        account = self.account
        of_a_step = account.sample_rate * account.records
        if account.sampler == "shuffle":  # the last batch of an epoch has what is left
            per_epoch = account.batches_per_epoch or math.ceil(account.records / max(1, round(of_a_step)))
            of_a_step = min(of_a_step, account.records / per_epoch)
        return float(self.state["weights"][0]) / of_a_step

    def missing(self) -> str:
        """Describes a run that was not measured over all of its steps or records; "" for a complete run.

        It is incomplete where its measurements cover another number of steps than T, by more than chance explains, or
        other records than the runs before, where that is not left to chance.
        """
        told, steps, uneven = self.steps_told(), self.account.steps, self._uneven()
        if uneven:
            fault = "measured in some runs and left out of others, where they count as if they had told nothing"
            return f"{uneven:,} of {self.account.records:,} records were {fault}: their floors are too high"
        weight = max(1.0, float(self.state["weights"][1]))  # steps measured with chance 1/weight; batches vary as well
        chance = 6 * math.sqrt(steps * (weight - 1 + weight / (self.account.sample_rate * self.account.records)))
        if math.isnan(told) or abs(told - steps) <= 0.1 * steps + chance:
            return ""
        fault = "too high" if told < steps else "too low"
        return f"the measurements of a run tell of about {told:.3g} of its {steps} steps: its floors are {fault}"

    def _uneven(self) -> int:
        """Counts records measured only in the present run or only in earlier ones, though all have their turn."""
        state, at_random = self.state, self.account.sample_rate * (1 + 1e-9) < float(self.state["weights"][1])
        now, before = state["measured"] > 0, state["measured_total"] > 0
        known = bool(now.any()) and bool(before.any()) and not bool(state["weights"].isnan().any())
        return int((now != before).sum()) if known and not at_random else 0

    def finish_run(self, runs: int) -> None:
        """Adds the run, the `runs`-th, to the averages, and starts an empty one."""
        state = self.state
        state["partial"] |= bool(self.missing())
        state["weights"].zero_()
        delta = state["trace"] - state["mean"]
        state["mean"] += delta / runs
        state["spread"] += delta * (state["trace"] - state["mean"])
        for name in _AVERAGED:
            if name in state:
                state[f"{name}_mean"] += (state[name] - state[f"{name}_mean"]) / runs
        state["measured_total"] += state["measured"]
        for name in ("trace", "last", "measured", *_AVERAGED):
            if name in state:
                state[name].zero_()

    def merge(self, other: TraceLedger, runs: int, more: int) -> None:
        """Adds the averages of another such ledger.

        Args:
            other: the other ledger.
            runs: the number of runs in this ledger.
            more: the number of runs in the other.
        """
        mine, theirs, total = self.state, other.state, runs + more
        delta = theirs["mean"].to(self.device) - mine["mean"]
        mine["spread"] += theirs["spread"].to(self.device) + delta.square() * (runs * more / total)
        mine["mean"] += delta * (more / total)
        for name in (f"{name}_mean" for name in _AVERAGED):
            if name in mine:
                mine[name] += (theirs[name].to(self.device) - mine[name]) * (more / total)
        mine["measured_total"] += theirs["measured_total"].to(self.device)
        mine["rare"] |= theirs["rare"].to(self.device)
        mine["partial"] |= theirs["partial"].to(self.device)

    # --- reading -----------------------------------------------------------------------

    def trace(self, k: int, runs: int) -> Tensor:
        """Returns Tr I under the k-th rule, (N,): the mean of finished runs, or of the first run so far.

        Args:
            k: the number of the rule.
            runs: the number of finished runs.
        """
        return (self.state["mean"] if runs else self.state["trace"])[k].clone()

    def standard_error(self, k: int, runs: int) -> Tensor:
        """Returns the standard error of the trace under the k-th rule, (N,); infinite where never measured.

        It is over runs, or after one run only that of measuring.

        Args:
            k: the number of the rule.
            runs: the number of finished runs.
        """
        if runs > 1:
            variance = self.state["spread"][k].clamp(min=0) / (runs * (runs - 1))
        else:
            variance = (self.state["variance_mean"] if runs else self.state["variance"])[k]
        return variance.sqrt().masked_fill(self.told_of(runs) == 0, torch.inf)

    def floors(self, k: int, runs: int, *, unit: float, caveats: tuple[str, ...]) -> tuple[Bound, float, str]:
        """Returns unit/dFIL under the k-th rule, their median relative standard error, and the statement of it.

        A record that was never measured has the floor 0.

        Args:
            k: the number of the rule.
            runs: the number of finished runs.
            unit: the squared size of an input unit in data units.
            caveats: what else must be stated with the floors.
        """
        account, unseen = self.account, (self.told_of(runs) == 0).cpu().numpy()
        bound = from_trace(self.trace(k, runs).cpu().numpy(), account.features)
        with np.errstate(over="ignore"):  # records without information have the largest float as floor
            value = np.where(unseen, 0.0, np.minimum(bound.value * unit, np.finfo(np.float64).max))
        note = {"exact": "exact Poisson factors", "fixed": "the fixed-size factor", "none": "no amplification"}
        rule = note.get(account.rules[k], "the paper's κ: comparison, no guarantee")
        mean = f"mean over {f'{runs} run(s)' if runs else 'a run in progress'}"
        relative = relative_median(self.trace(k, runs), self.standard_error(k, runs))
        said = told(self.told_of(runs), relative, runs=runs)
        notes: tuple[str, ...] = (said, *caveats, *self.silent(k, runs), *self.unfinished(runs))
        if unseen.any():
            notes += (f"{int(unseen.sum())} of {len(unseen)} records were never measured: no floor (0)",)
        assumes = (rule, mean, f"{account.clip} clipping", *notes)
        found = replace(bound, name="dfil", value=value, sampler=account.sampler, attacker="unbiased",
                        proved=account.rules[k] != "paper")  # fmt: skip
        return replace(found, assumes=assumes, notes=notes, estimate=True), relative, said

    def unfinished(self, runs: int) -> tuple[str, ...]:
        """Describes runs that were not measured over all of their steps, or not yet."""
        steps, told = self.account.steps, self.steps_told()
        if bool(self.state["partial"]):
            what = f"some runs were not measured over all of their {steps} steps, for all records"
            return (f"{what}: floors of another run",)
        if runs:
            return ()
        if math.isnan(told):  # a ledger of an earlier version
            return (f"a run in progress: it is not known how many of its {steps} steps were measured",)
        return (f"a run in progress: about {told:.3g} of {steps} steps measured so far",)

    def mute(self, k: int, runs: int) -> int:
        """Counts measured records about which no step gave any information: training may have diverged."""
        return int(((self.trace(k, runs) == 0) & (self.told_of(runs) > 0)).sum())

    def silent(self, k: int, runs: int) -> tuple[str, ...]:
        """Describes records whose measurements were all zero."""
        none = self.mute(k, runs)
        where = f"{none} of {self.account.records} records told nothing whenever they were measured"
        return (f"{where}: their floor is the largest number there is",) if none else ()

    def spectral(self, runs: int) -> Tensor:
        """Returns an upper bound of each record's spectral norm, (N,)."""
        if "spectral" not in self.state:
            raise InputError("spectral", "must have been kept", False)
        return (self.state["spectral_mean"] if runs else self.state["spectral"]).clone()

    def measured(self) -> Tensor:
        """Returns the number of measurements per record over all runs, the present one too, (N,)."""
        return self.state["measured_total"] + self.state["measured"]

    def told_of(self, runs: int) -> Tensor:
        """Returns the number of measurements per record in the runs that `trace` averages, (N,)."""
        return self.state["measured_total"] if runs else self.state["measured"]

    @property
    def sampled(self) -> bool:
        """Returns whether records were measured at only some steps."""
        return bool(self.state["rare"].any())

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an error that names the tensor whose shape is wrong."""
        for name, value in self.state.items():
            if name in _NEWER and name not in tensors:
                continue
            if name not in tensors or tensors[name].shape != value.shape:
                got = tuple(tensors[name].shape) if name in tensors else None
                raise InputError(name, f"must be a tensor of shape {tuple(value.shape)}", got)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `state` held. The shapes have been checked."""
        for name, value in self.state.items():
            if name in tensors:
                value.copy_(tensors[name])
            else:  # a ledger of an earlier version: it is not known whether its present run is complete
                value.fill_(_NEWER[name])


def _empty(account: Account, spectral: bool, device: torch.device) -> dict[str, Tensor]:
    n, shape = account.records, (len(account.rules), account.records)

    def zeros(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    state = {name: zeros(*shape) for name in ("trace", "mean", "spread", "variance", "variance_mean", "last")}
    state |= {name: zeros(n, dtype=torch.int64) for name in ("measured", "measured_total")}
    state["rare"], state["partial"] = zeros(1, dtype=torch.bool), zeros(1, dtype=torch.bool)
    state["weights"] = zeros(2)  # of the present run's measurements: sum, and the largest of those at random steps
    if spectral:
        state |= {"spectral": zeros(n), "spectral_mean": zeros(n)}
    return state
