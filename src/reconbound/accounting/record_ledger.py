"""The per-record ledger: Tr I under each rule, and spectral norms if requested."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, warn_user
from reconbound.accounting import compact
from reconbound.accounting.compact import add_at, count_where, parts_of
from reconbound.accounting.confidence import describe_precision, median_of, median_ratio
from reconbound.accounting.ledger import Ledger, add_variance, covered_steps, covers_all
from reconbound.accounting.spec import Account, Factors
from reconbound.bounds import Bound, from_trace
from reconbound.fisher import StepInformation
from reconbound.validate.model import ReconboundWarning

_RULES = {"exact": "exact Poisson factors", "fixed": "the fixed-size factor", "none": "no amplification",
          "paper": "the paper's κ: comparison, no guarantee"}  # fmt: skip


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
        kind, count = compact.kinds_for(n)
        shape = (len(self.account.kept_rules), *(() if isinstance(accounts, Account) else (len(several),)), n)
        self.keep("trace", *shape, dtype=kind, error=error)
        if spectral:
            self.keep("spectral", n, dtype=kind)
        if error:
            self.state["last"] = compact.zeros(shape, kind, device)  # each record's last entry
        self.state |= {name: compact.zeros((n,), count, device) for name in ("measured", "measured_all")}
        self._counts, self._of_run = ("measured",), ("weights", "last") if error else ("weights",)
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
            add_at(state["trace"][k], index, value)
            if isinstance(found, StepInformation) and "last" in state and self.runs == 0:
                so_far = (state["trace_error"][k], state["last"][k], state["measured"])
                add_variance(*so_far, index, value, k_across * found.across_error.to(**here), chance, stratified)
        if "spectral" in state and isinstance(found, StepInformation) and found.spectral_bound is not None:
            add_at(state["spectral"], index, torch.maximum(*factors[0]) * found.spectral_bound.to(**here))
        times = torch.ones_like(index) if times is None else times
        state["measured"].index_add_(0, index, times.to(state["measured"].dtype))
        state["rare"] |= chance < 1.0
        state["weights"][0] += weight * times.sum()
        if not stratified:
            state["weights"][1].clamp_(min=weight)
        return factors[0][0], factors[0][1]

    # --- runs --------------------------------------------------------------------------

    def finish_run(self) -> None:
        """Adds the run to the averages, and starts an empty one."""
        self.state["partial"] |= bool(self.describe_missing())
        super().finish_run()

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another such ledger."""
        for part in parts_of(self.account.records):
            self.state["measured_all"][part] += other.part("measured_all", part).to(self.device)
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

    def trace_error(self, k: int, at: Any = slice(None)) -> Tensor:
        """Returns the standard error of the trace under the k-th rule, (N,); infinite where never measured.

        Args:
            k: the number of the rule.
            at: which records.
        """
        return self.standard_error("trace", (k, at)).masked_fill(self.measurements()[at] == 0, torch.inf)

    def trace_mean(self, k: int, at: Any = slice(None)) -> Tensor:
        """Returns the mean of the trace under the k-th rule in float64, (N,).

        Args:
            k: the number of the rule.
            at: which records.
        """
        return self.mean("trace")[k, at].double()

    def spectral_bound(self) -> Tensor:
        """Returns an upper bound of each record's spectral norm ‖I‖₂, (N,), in the model's input units.

        Guarantee: each measurement is above its step's spectral norm with probability at least 1 − 1e-6 over the random
        start of the power iteration, and the norm of a sum is at most the sum of the norms. Like `dfil` it is an
        unbiased estimate, here of a bound.
        """
        if "spectral" not in self.state:
            raise InputError("spectral", "must have been kept", False)
        return self.mean("spectral").to(torch.float64, copy=True)

    def floor_values(self, k: int, unit: float, at: Any = slice(None)) -> np.ndarray:
        """Returns unit/dFIL of each record under the k-th rule, (N,); 0 where never measured.

        Args:
            k: the number of the rule.
            unit: the squared size of an input unit in data units.
            at: which records.
        """
        unseen, trace = (self.measurements()[at] == 0).cpu().numpy(), self.trace_mean(k, at).cpu().numpy()
        with np.errstate(over="ignore"):  # records without information have the largest float as floor
            value = from_trace(trace, self.account.features).value * unit
        return np.where(unseen, 0.0, np.minimum(value, np.finfo(np.float64).max))

    def floors(self, k: int, unit: float, caveats: tuple[str, ...]) -> tuple[Bound, float, str]:
        """Returns unit/dFIL under the k-th rule, their median relative standard error, and the statement of it.

        Args:
            k: the number of the rule.
            unit: the squared size of an input unit in data units.
            caveats: what else must be stated with the floors.
        """
        value = np.concatenate([self.floor_values(k, unit, part) for part in parts_of(self.account.records)])
        bound, relative, precision = self.floor_facts(k, caveats)
        return replace(bound, value=value), relative, precision

    def floor_facts(self, k: int, caveats: tuple[str, ...]) -> tuple[Bound, float, str]:
        """Returns what `floors` does, with no floor in the Bound: for statements on all records without their floors.

        Args:
            k: the number of the rule.
            caveats: what else must be stated with the floors.
        """
        account, records = self.account, self.account.records
        relative = self.relative_error(k)
        precision = describe_precision(self.median_times(), relative, runs=self.runs)
        notes = (precision, *caveats, *self.describe_zeros(k), *self.describe_incomplete())
        unseen = count_where(lambda part: self.measurements()[part] == 0, records)
        if unseen:
            notes += (f"{unseen} of {records} records were never measured: no floor (0)",)
        mean = f"mean over {f'{self.runs} run(s)' if self.runs else 'a run in progress'}"
        assumes = (_RULES[account.kept_rules[k]], mean, f"{account.clip} clipping", *notes)
        bound = replace(from_trace(np.zeros(1), account.features), name="dfil", value=np.zeros(0),
                        sampler=account.sampler, attacker="unbiased", notes=notes, assumes=assumes, estimate=True,
                        proved=account.kept_rules[k] != "paper")  # fmt: skip
        return bound, relative, precision

    def relative_error(self, k: int) -> float:
        """Returns the median relative standard error of the traces under the k-th rule; infinite without any."""
        own = lambda part: (self.trace_mean(k, part), self.trace_error(k, part))  # noqa: E731
        return median_ratio(lambda: map(own, parts_of(self.account.records)))

    def median_times(self) -> float:
        """Returns the median number of measurements of a record."""
        return median_of(self.measurements())

    def zero_records(self, k: int) -> int:
        """Counts measured records about which no step gave any information: training may have diverged."""
        mean, times = self.mean("trace")[k], self.measurements()
        return count_where(lambda part: (mean[part] == 0) & (times[part] > 0), self.account.records)

    def describe_zeros(self, k: int) -> tuple[str, ...]:
        """Describes records whose measurements were all zero under the k-th rule."""
        zeros = f"{self.zero_records(k)} of {self.account.records} records had zero information at each measurement"
        return (f"{zeros}: their floor is the largest number there is",) if self.zero_records(k) else ()

    def warn_if_zeros(self, k: int) -> None:
        """Warns where most of the measured records had zero information under the k-th rule at each measurement."""
        times = self.measurements()
        if 2 * self.zero_records(k) > count_where(lambda part: times[part] > 0, self.account.records):
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
        covered, steps, records = self.steps_covered(), self.account.steps, self.account.records
        now, before = self.state["measured"], self.state["measured_all"]
        at_random = self.account.sample_rate * (1 + 1e-9) < float(self.state["weights"][1])
        if not at_random and bool(now.any()) and bool(before.any()):
            other = count_where(lambda part: (now[part] > 0) != (before[part] > 0), records)
            fault = "measured in some runs and left out of others, where they count as 0: their floors are too high"
            if other:
                return f"{other:,} of {records:,} records were {fault}"
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
