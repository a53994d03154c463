"""The base of all ledgers, and the per-record one: Tr I under each rule, and spectral norms if requested."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, warn_user, whole
from reconbound.accounting.confidence import describe_precision, relative_median
from reconbound.accounting.spec import Account, Factors
from reconbound.bounds import Bound, from_trace
from reconbound.fisher import StepInformation
from reconbound.validate.model import ReconboundWarning

_RULES = {"exact": "exact Poisson factors", "fixed": "the fixed-size factor", "none": "no amplification",
          "paper": "the paper's κ: comparison, no guarantee"}  # fmt: skip


class Ledger:
    """Sums over the steps of a run, their means over finished runs, and what standard errors are computed from.

    A quantity x has the tensors "x" (the sum of the present run), "x_mean" (over the finished runs) and, where it is
    kept, "x_error". Until the second run ends, x_error is the variance of the first run's sum, as far as the subclass
    can tell it from one run. From then on it is the sum of the squared deviations of the runs from their mean.
    A subclass calls `keep` for each of its quantities and adds each step's measurements to "x".

    Args:
        device: where the tensors live.
        keep_at: step counts at which the sums of each single run are kept, on the CPU: see `keep_runs`.

    Attributes:
        state: the tensors, by name.
        runs: the number of finished runs.
    """

    def __init__(self, device: torch.device, keep_at: Sequence[int] = ()) -> None:
        self.device, self.runs, self.keep_at = device, 0, tuple(keep_at)
        self.state: dict[str, Tensor] = {}
        self._quantities: dict[str, None] = {}  # their names, in order
        self._kept: dict[str, None] = {}  # the tensors of single runs

    def keep(self, name: str, *shape: int, dtype: torch.dtype = torch.float64, error: bool = False) -> None:
        """Creates the empty tensors of a quantity.

        Args:
            name: of the quantity.
            shape: of each tensor.
            dtype: of each tensor.
            error: whether to keep what its standard error is computed from.
        """
        self._quantities[name] = None
        for ending in ("", "_mean", "_error")[: 3 if error else 2]:
            self.state[name + ending] = torch.zeros(*shape, dtype=dtype, device=self.device)

    def keep_runs(self, *names: str) -> None:
        """Creates "kept_" tensors with one row for each run and step count, where step counts are asked for."""
        for name in names if self.keep_at else ():
            like = self.state[name]
            self._kept[f"kept_{name}"] = None
            self.state[f"kept_{name}"] = torch.zeros(0, *like.shape, dtype=like.dtype)

    def run_counts(self, name: str) -> int | Tensor:
        """Returns the number of finished runs in the quantity's mean; a subclass may have one for each row."""
        return self.runs

    # --- runs --------------------------------------------------------------------------

    def keep_step(self, step: int) -> None:
        """Keeps the sums of the present run after this many steps, where they are asked for."""
        for name in self._kept if step in self.keep_at else ():
            row = self.state[name.removeprefix("kept_")].cpu()[None].clone()
            self.state[name] = torch.cat([self.state[name], row])

    def finish_run(self) -> None:
        """Adds the present run to the means and starts an empty one."""
        self.runs += 1
        for name in self._quantities:
            total, mean, error = (self.state.get(name + ending) for ending in ("", "_mean", "_error"))
            assert total is not None
            assert mean is not None
            delta = total - mean
            mean += delta / self.run_counts(name)
            if error is not None and self.runs == 2:
                error.zero_()  # not times 0: the error of one run may be infinite
            if error is not None and self.runs > 1:
                error += delta * (total - mean)
        self.clear_run()

    def clear_run(self) -> None:
        """Empties the sums of the present run, except what has been kept in a finished run."""
        for name in self._quantities:
            self.state[name].zero_()
        for name in self._kept:
            self.state[name] = self.state[name][: self.runs * len(self.keep_at)]

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another ledger with the same tensors."""
        done = self.runs * len(self.keep_at)
        for name in self._kept:
            rows, theirs = self.state[name], other.state[name][: other.runs * len(self.keep_at)]
            self.state[name] = torch.cat([rows[:done], theirs, rows[done:]])
        for name in self._quantities:
            mean, theirs = self.state[f"{name}_mean"], other.state[f"{name}_mean"].to(self.device)
            more, total = other.run_counts(name), self.run_counts(name) + other.run_counts(name)
            share = more / total if isinstance(total, int) else more / total.clamp(min=1)
            delta = theirs - mean
            if f"{name}_error" in self.state:
                error, added = self.state[f"{name}_error"], other.state[f"{name}_error"].to(self.device)
                if self.runs == 0:
                    error.copy_(added)
                else:
                    if self.runs == 1:
                        error.zero_()
                    error += delta.square() * (self.run_counts(name) * share)
                    if other.runs > 1:
                        error += added
            mean += delta * share
        self.runs += other.runs

    # --- reading -----------------------------------------------------------------------

    def mean(self, name: str) -> Tensor:
        """Returns the mean of the quantity over the finished runs, or the sum of the first run so far."""
        return self.state[f"{name}_mean" if self.runs else name]

    def standard_error(self, name: str) -> Tensor:
        """Returns the standard error of `mean`: over runs, or after one run what is known from its own measurements."""
        runs = torch.as_tensor(self.run_counts(name))
        variance = self.state[f"{name}_error"].double() / (runs * (runs - 1)).clamp(min=1)
        return variance.clamp(min=0).sqrt()

    def kept_at(self, name: str, step: int) -> Tensor:
        """Returns the rows of a kept quantity after this many steps, one for each run, on the CPU."""
        if whole("step", step) not in self.keep_at:
            raise InputError("step", f"must be one of keep_runs_at, {list(self.keep_at)}", step)
        return self.state[f"kept_{name}"][self.keep_at.index(step) :: len(self.keep_at)]

    # --- keeping -----------------------------------------------------------------------

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an InputError that names the first tensor whose shape, type or content does not fit.

        Nothing is changed. Sums and means are numbers, and what errors are computed from is 0 or more.
        """
        for name, value in self.state.items():
            given = tensors.get(name)
            got = () if given is None else tuple(given.shape)
            rows = got[:1] if name.startswith("kept_") else tuple(value.shape[:1])  # single runs: any number of rows
            if given is None or got != (*rows, *value.shape[1:]) or given.dtype != value.dtype:
                kept = f"of shape {tuple(value.shape)} and {value.dtype}"
                why = f"must be a tensor {kept}, as this version of reconbound keeps it"
                raise InputError(name, why, None if given is None else f"{got}, {given.dtype}")
        for name in (name for name in self.state if self._is_sum(name)):
            given = tensors[name]
            if bool((given.isnan() if not name.endswith("_error") else ~(given >= 0)).any()):
                what = "NaN" if bool(given.isnan().any()) else float(given.min())
                raise InputError(name, "must be numbers, and errors not negative", what)

    def _is_sum(self, name: str) -> bool:
        """Returns whether a tensor holds sums of a quantity, their means, or what errors are computed from."""
        return name.removeprefix("kept_").removesuffix("_mean").removesuffix("_error") in self._quantities

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Restores the tensors, which have been checked, and the number of finished runs."""
        self.runs = runs
        for name, value in self.state.items():
            self.state[name] = tensors[name].to(value.device, value.dtype, copy=True)


def covered_steps(account: Account, weights: float) -> float:
    """Returns the number of steps that measurements cover: their weights over those of one step.

    Args:
        account: of the ledger.
        weights: the sum of the weights of a run's measurements.
    """
    of_a_step = account.sample_rate * account.records
    if account.sampler == "shuffle":  # the last batch of an epoch has what is left
        per_epoch = account.batches_per_epoch or math.ceil(account.records / max(1, round(of_a_step)))
        of_a_step = min(of_a_step, account.records / per_epoch)
    return weights / of_a_step


def covers_all(account: Account, covered: float, largest: float) -> bool:
    """Returns whether measurements cover about all steps of a run, but for what chance explains.

    Args:
        account: of the ledger.
        covered: the number of steps that they cover.
        largest: the largest weight of a measurement.
    """
    weight = max(1.0, largest)  # steps measured with chance 1/weight; batches vary as well
    chance = 6 * math.sqrt(account.steps * (weight - 1 + weight / (account.sample_rate * account.records)))
    return abs(covered - account.steps) <= 0.1 * account.steps + chance


def add_variance(
    variance: Tensor,
    last: Tensor,
    times: Tensor,
    index: Tensor,
    value: Tensor,
    error: Tensor,
    chance: float,
    stratified: bool,
) -> None:
    """Adds to the variance of a run's sum, given its trajectory: of the probes and of when a record was measured.

    Rare draws (Horvitz–Thompson): Σ (1−π) x² + π e². Once per block: half the squared differences of successive
    blocks, times B/(B−1), which counts the drift between blocks as error too; for one block it is x².

    Args:
        variance: of each record, (N,); it is changed.
        last: each record's last entry in blocks, (N,); it is changed.
        times: the number of measurements of each record before this one, (N,).
        index: the records measured.
        value: their entries x.
        error: the standard errors e of the entries.
        chance: π, that of a record to be measured at this step.
        stratified: each record is measured exactly once in each block of steps.
    """
    drawn = (1 - chance) * value.square() + chance * error.square()
    if not stratified or chance == 1.0:
        variance.index_add_(0, index, drawn)
        return
    before = times[index]
    so_far = variance[index] * (before - 1).clamp(min=0) / before.clamp(min=1)
    more = (so_far + (value - last[index]).square() / 2) * (before + 1) / before.clamp(min=1)
    variance[index] = torch.where(before > 0, more, drawn)
    last[index] = value


class Traces(NamedTuple):
    """The traces of a step, as in StepInformation; of several trainings (K, B)."""

    clipped_norm: Tensor
    across: Tensor
    along: Tensor


class RecordLedger(Ledger):
    """Traces of every record, their number of measurements and their precision, and spectral norms if requested.

    Args:
        accounts: the mechanism, the data's size and the rules; or those of several trainings that share everything
            but the noise and the clip norm. Tensors of N numbers are then of (K, N).
        device: where it lives.
        spectral: also keep the sum of the steps' spectral norms.
        error: also keep what standard errors are computed from.
        keep_at: step counts at which the sums of each single run are kept.

    Attributes:
        account: the first of the accounts.
        factors: the subsampling factors of each rule.
    """

    def __init__(
        self,
        accounts: Account | Sequence[Account],
        device: torch.device,
        *,
        spectral: bool = False,
        error: bool = True,
        keep_at: Sequence[int] = (),
    ) -> None:
        super().__init__(device, keep_at)
        several = [accounts] if isinstance(accounts, Account) else list(accounts)
        self.account, self.factors = several[0], Factors(several, device)
        n = self.account.records
        shape = (len(self.account.kept_rules), *(() if isinstance(accounts, Account) else (len(several),)), n)
        self.keep("trace", *shape, error=error)
        if spectral:
            self.keep("spectral", n)
        if error:
            self.state["last"] = torch.zeros(shape, dtype=torch.float64, device=device)  # each record's last entry
        self.state |= {name: torch.zeros(n, dtype=torch.int64, device=device) for name in ("measured", "measured_all")}
        self.state |= {name: torch.zeros(1, dtype=torch.bool, device=device) for name in ("rare", "partial")}
        # of the present run's measurements: the sum of their weights, and the largest of those at random steps
        self.state["weights"] = torch.zeros(2, dtype=torch.float64, device=device)
        self.keep_runs("trace", "measured")

    # --- writing ---------------------------------------------------------------------

    def add(
        self,
        index: Tensor,
        found: StepInformation | Traces,
        weight: float,
        stratified: bool,
        times: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Adds a step's information about these records, without waiting for the device.

        Args:
            index: the records, (B,).
            found: the step's information about them; Traces for a ledger without errors and spectral norms.
            weight: as in `FisherAccountant.add`.
            stratified: as in `FisherAccountant.add`.
            times: 1 for each record, 0 for padding, (B,), whose information must be 0. All are records when None.

        Returns:
            The two factors of the first rule, times the weight.
        """
        state, chance = self.state, min(1.0, self.account.sample_rate / weight)
        here: Any = {"device": self.device, "dtype": torch.float64}
        across, along = found.across.to(**here), found.along.to(**here)
        rules = self.account.kept_rules
        factors = [tuple(weight * f for f in self.factors(rule, found.clipped_norm)) for rule in rules]
        for k, (k_across, k_along) in enumerate(factors):
            value = k_across * across + k_along * along
            state["trace"][k].index_add_(-1, index, value)
            if isinstance(found, StepInformation) and "last" in state and self.runs == 0:
                so_far = (state["trace_error"][k], state["last"][k], state["measured"])
                add_variance(*so_far, index, value, k_across * found.across_error.to(**here), chance, stratified)
        if "spectral" in state and isinstance(found, StepInformation) and found.spectral_bound is not None:
            state["spectral"].index_add_(0, index, torch.maximum(*factors[0]) * found.spectral_bound.to(**here))
        times = torch.ones_like(index) if times is None else times
        state["measured"].index_add_(0, index, times)
        state["rare"] |= chance < 1.0
        state["weights"][0] += weight * times.sum()
        if not stratified:
            state["weights"][1].clamp_(min=weight)
        return factors[0][0], factors[0][1]

    # --- runs --------------------------------------------------------------------------

    def finish_run(self) -> None:
        """Adds the run to the averages, and starts an empty one."""
        self.state["partial"] |= bool(self.describe_missing())
        self.state["measured_all"] += self.state["measured"]
        super().finish_run()

    def clear_run(self) -> None:
        """Empties everything of the present run, except what has been kept in a finished run."""
        super().clear_run()
        for name in ("measured", "weights", "last"):
            if name in self.state:
                self.state[name].zero_()

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another such ledger."""
        self.state["measured_all"] += other.state["measured_all"].to(self.device)
        for name in ("rare", "partial"):
            self.state[name] |= other.state[name].to(self.device)
        super().merge(other)

    # --- reading -----------------------------------------------------------------------

    def dfil_of_runs(self, step: int, rule: str) -> Tensor:
        """Returns dFIL of each run after this many steps, (R, N) or (R, K, N), on the CPU. The last may be in progress.

        The paper's κ splits its δ over the steps of the run, so that it is corrected by κ(step)/κ(T).

        Args:
            step: one of `keep_at`.
            rule: one of the account's.
        """
        traces = self.kept_at("trace", step)
        choice("rule", rule, self.account.kept_rules)
        ratio = self.factors.kappa_ratio(step).cpu() if rule == "paper" else 1.0
        return traces[:, self.account.kept_rules.index(rule)] * ratio / self.account.features

    def measured_in_runs(self, step: int) -> Tensor:
        """Returns the number of measurements per record over all runs up to this step, (N,), on the CPU."""
        return self.kept_at("measured", step).sum(0)

    def measurements(self) -> Tensor:
        """Returns the number of measurements per record in finished runs, or in the first run so far, (N,)."""
        return self.state["measured_all" if self.runs else "measured"]

    @property
    def sampled(self) -> bool:
        """Returns whether records were measured at only some steps."""
        return bool(self.state["rare"].any())

    def trace_error(self, k: int) -> Tensor:
        """Returns the standard error of the trace under the k-th rule, (N,); infinite where never measured."""
        return self.standard_error("trace")[k].masked_fill(self.measurements() == 0, torch.inf)

    def spectral_bound(self) -> Tensor:
        """Returns an upper bound of each record's spectral norm ‖I‖₂, (N,), in the model's input units.

        Guarantee: each measurement is above its step's spectral norm with probability at least 1 − 1e-6 over the random
        start of the power iteration, and the norm of a sum is at most the sum of the norms. Like `dfil` it is an
        unbiased estimate, here of a bound.
        """
        if "spectral" not in self.state:
            raise InputError("spectral", "must have been kept", False)
        return self.mean("spectral").clone()

    def floors(self, k: int, unit: float, caveats: tuple[str, ...]) -> tuple[Bound, float, str]:
        """Returns unit/dFIL under the k-th rule, their median relative standard error, and the statement of it.

        Args:
            k: the number of the rule.
            unit: the squared size of an input unit in data units.
            caveats: what else must be stated with the floors.
        """
        account, times, trace = self.account, self.measurements(), self.mean("trace")[k]
        unseen, bound = (times == 0).cpu().numpy(), from_trace(trace.cpu().numpy(), account.features)
        with np.errstate(over="ignore"):  # records without information have the largest float as floor
            value = np.where(unseen, 0.0, np.minimum(bound.value * unit, np.finfo(np.float64).max))
        relative = relative_median(trace, self.trace_error(k))
        precision = describe_precision(times, relative, runs=self.runs)
        notes = (precision, *caveats, *self.describe_zeros(k), *self.describe_incomplete())
        if unseen.any():
            notes += (f"{int(unseen.sum())} of {len(unseen)} records were never measured: no floor (0)",)
        mean = f"mean over {f'{self.runs} run(s)' if self.runs else 'a run in progress'}"
        assumes = (_RULES[account.kept_rules[k]], mean, f"{account.clip} clipping", *notes)
        bound = replace(bound, name="dfil", value=value, sampler=account.sampler, attacker="unbiased", notes=notes,
                        proved=account.kept_rules[k] != "paper", assumes=assumes, estimate=True)  # fmt: skip
        return bound, relative, precision

    def zero_records(self, k: int) -> int:
        """Counts measured records about which no step gave any information: training may have diverged."""
        return int(((self.mean("trace")[k] == 0) & (self.measurements() > 0)).sum())

    def describe_zeros(self, k: int) -> tuple[str, ...]:
        """Describes records whose measurements were all zero under the k-th rule."""
        zeros = f"{self.zero_records(k)} of {self.account.records} records had zero information at each measurement"
        return (f"{zeros}: their floor is the largest number there is",) if self.zero_records(k) else ()

    def warn_if_zeros(self, k: int) -> None:
        """Warns where most of the measured records had zero information under the k-th rule at each measurement."""
        if 2 * self.zero_records(k) > int((self.measurements() > 0).sum()):
            why = "Training may have diverged, or the outputs may be saturated: look at the loss, and lower lr or "
            warn_user(f"{self.describe_zeros(k)[0]}. {why}the noise", ReconboundWarning)

    def steps_covered(self) -> float:
        """Returns the number of steps that this run's measurements cover: their weights over those of one step."""
        return covered_steps(self.account, float(self.state["weights"][0]))

    def describe_missing(self) -> str:
        """Describes a run that was not measured over all of its steps or records; "" for a complete run.

        It is incomplete where its measurements cover another number of steps than T, by more than chance explains, or
        other records than the runs before, where that is not left to chance.
        """
        covered, steps = self.steps_covered(), self.account.steps
        now, before = self.state["measured"] > 0, self.state["measured_all"] > 0
        at_random = self.account.sample_rate * (1 + 1e-9) < float(self.state["weights"][1])
        if not at_random and bool(now.any()) and bool(before.any()) and bool((now != before).any()):
            fault = "measured in some runs and left out of others, where they count as 0: their floors are too high"
            return f"{int((now != before).sum()):,} of {self.account.records:,} records were {fault}"
        if covers_all(self.account, covered, float(self.state["weights"][1])):
            return ""
        fault = "too high" if covered < steps else "too low"
        return f"a run was measured over about {covered:.3g} of its {steps} steps: its floors are {fault}"

    def describe_incomplete(self) -> tuple[str, ...]:
        """Describes runs that were not measured over all of their steps, or not yet."""
        steps, partial = self.account.steps, bool(self.state["partial"])
        why = f"a run in progress: about {self.steps_covered():.3g} of {steps} steps measured so far"
        if partial:
            why = f"some runs were not measured over all of their {steps} steps, for all records: floors of another run"
        return (why,) if partial or not self.runs else ()
