"""The reading half of a ledger: dFIL, floors, their precision and limits, and the guarantee of the mechanism itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import LARGEST, InputError, choice, flag, number, warn_user, whole
from reconbound._internal.formatting import format_floor
from reconbound.accounting import confidence as precision
from reconbound.accounting.confidence import Estimates, Exposed, MostExposed
from reconbound.accounting.feature_ledger import FeatureLedger
from reconbound.accounting.record_ledger import RecordLedger
from reconbound.accounting.spec import Account
from reconbound.bounds import Bound
from reconbound.data.dataset import checked_rows
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.validate.model import ReconboundWarning


class Readings:
    """The reading half of a FisherAccountant, which writes these attributes."""

    account: Account
    traces: RecordLedger
    features: FeatureLedger
    feature_scale: Tensor
    caveats: tuple[str, ...]
    needs_range: bool
    _warned: dict[str, int]  # subject → the number of runs at its last warning

    @property
    def runs(self) -> int:
        """Returns the number of finished runs."""
        return self.traces.runs

    @property
    def diagonal(self) -> str:
        """Returns the kind of per-feature ledgers: "none", "all", "average", "some" or "chosen"."""
        return self.features.kind

    @property
    def rows(self) -> Tensor | None:
        """Returns the records whose features are kept, most exposed first if chosen; None for all or none."""
        return self.features.rows

    def _rule(self, rule: str | None) -> int:
        return 0 if rule is None else self.account.rules.index(choice("rule", rule, self.account.rules))

    def _unit(self) -> float:
        return float(self.feature_scale.mean()) ** 2

    def trace(self, rule: str | None = None) -> Tensor:
        """Returns Tr I of a run for each record, (N,): the mean of finished runs, or of the first run so far.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.traces.mean("trace")[self._rule(rule)].clone()

    def dfil(self, rule: str | None = None) -> Tensor:
        """Returns dFIL = Tr I/d of each record, (N,), in the model's input units: small is good.

        A record that was never measured has 0, which means nothing about it: see `measured`. Its floor is 0 as well.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.trace(rule) / self.account.features

    def dfil_of_runs(self, step: int, rule: str | None = None) -> Tensor:
        """Returns the dFIL of each run after this many steps, (R, N), on the CPU. The last may be in progress.

        Args:
            step: one of `keep_runs_at`.
            rule: one of the account's; the first by default.
        """
        return self.traces.dfil_of_runs(self._kept_step(step), self.account.rules[self._rule(rule)])

    def _kept_step(self, step: int) -> int:
        if whole("step", step) not in self.traces.keep_at:
            raise InputError("step", f"must be one of keep_runs_at, {list(self.traces.keep_at)}", step)
        return step

    def measured(self, step: int | None = None) -> Tensor:
        """Returns the number of measurements per record over all runs, the present one too, (N,).

        Args:
            step: one of `keep_runs_at`, to count only the first steps of each run.
        """
        if step is not None:
            return self.traces.measured_in_runs(self._kept_step(step))
        return self.traces.state["measured_all"] + self.traces.state["measured"]

    def standard_error(self, rule: str | None = None) -> Tensor:
        """Returns the standard error of each record's dFIL, (N,); infinite for a record that was never measured.

        After two runs or more it is that of the mean over runs. After one run it is only that of measuring (probes, and
        when the record was measured), given the run's parameters.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.traces.trace_error(self._rule(rule)) / self.account.features

    def upper(self, rule: str | None = None, confidence: float = 0.95, *, warn: bool = True) -> Tensor:
        """Returns the upper confidence limit of each record's dFIL over runs, (N,); needs two runs or more.

        Formula: `accounting.confidence.upper_limit`. It is infinite for a record that was measured fewer than 25 times
        over all runs, unless at every step, and for all where the runs differ too much: `no_limit_because`. For the
        least exposed quarter it only says that they belong to it. Limits from two runs say next to nothing.

        Args:
            rule: one of the account's; the first by default.
            confidence: of the limits.
            warn: whether to warn where a limit is infinite.

        Guarantee: none that is proved. In 45,000 simulated trainings with R = 10 the limits, where given, covered the
        record's dFIL in at least 99 % of cases on average over records, and the least covered record in 91 %; on
        harder problems 98 % and 90 % (docs/theory/accounting.md).
        """
        estimates = self._estimates(rule)
        limits = precision.upper_limit(estimates, confidence)
        reason = precision.explain_no_limit(estimates) if flag("warn", warn) else None
        if reason is not None and self._is_first("limits"):
            warn_user(f"no confidence limit (infinity): {reason}", ReconboundWarning)
        return limits

    def no_limit_because(self, rule: str | None = None) -> str | None:
        """Returns why `upper` is infinite for some or all records, and the remedy; None where all have a limit.

        Args:
            rule: one of the account's; the first by default.
        """
        return precision.explain_no_limit(self._estimates(rule))

    def _estimates(self, rule: str | None) -> Estimates:
        times, sampled = self.traces.measurements(), self.traces.sampled
        return Estimates(self.dfil(rule), self.standard_error(rule), times, self.runs, sampled)

    def _is_first(self, subject: str) -> bool:
        """Returns whether this is the first warning on this subject since the last run ended."""
        before, self._warned[subject] = self._warned.get(subject), self.runs
        return before != self.runs

    def mse_floor(self, rule: str | None = None) -> Bound:
        """Returns 1/dFIL of each record: Theorem 2, for unbiased attackers, in squared data units.

            E‖ẑ − z‖²/d ≥ s̄²/dFIL,     s̄ the mean of feature_scale    (Cauchy–Schwarz; 1/dFIL when the scale is 1)

        The floors are estimates, 0 for a record that was never measured. `assumes` states the lower confidence limits
        first, where there are any, and the precision. Warns, once a run, after one run and where the median relative
        standard error is above 50 %.

        Args:
            rule: one of the account's; the first by default.
        """
        k, limits = self._rule(rule), self._lower_limits(rule)
        bound, relative, stated = self._floors(k)
        if limits is not None and (limits > 0).any():
            lowest, none = limits[limits > 0].min(), int((limits == 0).sum())
            first = f"lower limits at 95 % confidence: lowest MSE {format_floor(lowest)}"
            first += f", {none:,} of {len(limits):,} records without one" if none else ""
            bound = replace(bound, assumes=(first, *bound.assumes), notes=(first, *bound.notes))
        if self._is_first("floors"):
            precision.warn_if_imprecise(relative, stated, self.runs)
            if 2 * self.traces.zero_records(k) > int((self.traces.measurements() > 0).sum()):
                why = "Training may have diverged, or the outputs may be saturated: look at the loss, and lower lr or "
                warn_user(f"{self.traces.describe_zeros(k)[0]}. {why}the noise", ReconboundWarning)
        return bound

    def _floors(self, k: int) -> tuple[Bound, float, str]:
        return self.traces.floors(k, self._unit(), self.caveats)

    def feature_floors(self, *, average: bool = False) -> Bound:
        """Returns 1/I_jj of each record kept and feature, (kept, d), in squared data units; kept as in `rows`.

        They are estimates as in `mse_floor`, and coarser; a warning is given alike.

        Args:
            average: return the floor of the information averaged over all records instead, (1, d), which bounds the
                mean of their squared errors and not each record's. Its standard error is not known.

        Guarantee: I_jj is estimated without bias, as in `dfil`; of chosen records given the choice, which the runs
        they are measured in had no part in.
        """
        average, times = flag("average", average) or self.diagonal == "average", self.traces.measurements()
        bound = self.features.floors(self.feature_scale, times, average)
        notes = (*self.caveats, *self.traces.describe_incomplete())
        if not average:
            own, relative = self.features.precision(times)
            notes = (precision.describe_precision(own, relative, " of a feature", runs=self.runs), *notes)
            if self._is_first("features"):
                precision.warn_if_imprecise(relative, notes[0], self.runs)
        return replace(bound, assumes=(*bound.assumes, *notes), notes=(*bound.notes, *notes))

    def feature_standard_error(self) -> Tensor:
        """Returns the standard error of I_jj of each record kept and feature, (kept, d), in the model's input units.

        After two runs or more it is that of the mean over runs. After one run, for given or all records, it is √Σx²
        over its measurements x: in expectation no less than their sum's, given the run's parameters.
        """
        return self.features.diagonal_error(self.traces.measurements())

    def spectral_bound(self) -> Tensor:
        """Returns an upper bound of each record's spectral norm ‖I‖₂, (N,), in the model's input units.

        Guarantee: each measurement is above its step's spectral norm with probability at least 1 − 1e-6 over the random
        start of the power iteration, and the norm of a sum is at most the sum of the norms. Like `dfil` it is an
        unbiased estimate, here of a bound.
        """
        if "spectral" not in self.traces.state:
            raise InputError("spectral", "must have been kept", False)
        return self.traces.mean("spectral").clone()

    def most_exposed(self, k: int = 10, rule: str | None = None) -> MostExposed:
        """Returns the k records with the lowest floors among those measured, lowest estimate first, with their caveats.

        Args:
            k: the number of records.
            rule: one of the account's; the first by default.
        """
        dfil = self.dfil(rule).masked_fill(self.traces.measurements() == 0, -1.0)
        top = torch.topk(dfil, min(whole("k", k), int((dfil >= 0).sum()))).indices.tolist()
        floors, limits = self.mse_floor(rule), self._lower_limits(rule)
        lower = [None if limits is None or limits[i] == 0 else float(limits[i]) for i in top]
        found = (Exposed(i, limit, float(floors.value[i])) for i, limit in zip(top, lower, strict=True))
        return MostExposed(found, floors.notes)

    def group_floor(self, rows: Sequence[int], rule: str | None = None, confidence: float | None = None) -> Bound:
        """Returns the floor for a person who has several rows with the same private part (Theorem 2 for the group).

            E‖ẑ − z‖²/d ≥ s̄² d/Tr I_G,     Tr I_G ≤ k Σ Tr I_i over the k rows    (Cauchy–Schwarz)

        For k equal rows that is 1/k² of a row's floor, and it is attained where every record is in every batch. 0 where
        one of the rows was never measured, or has no limit. Derivation: docs/theory/accounting.md, "Several rows".

        Args:
            rows: the records of the group, each once.
            rule: one of the account's; the first by default.
            confidence: return a lower limit at this confidence instead of the estimate, for all rows of the group
                together (Bonferroni); needs two finished runs or more.
        """
        index = checked_rows(rows, self.account.records)
        size, bound = len(index), self._floors(self._rule(rule))[0]
        note = f"for somebody with {size} rows" if size > 1 else "for one row"
        if confidence is None:
            dfil = self.dfil(rule)
        else:
            number("confidence", confidence, above=0.0, below=1.0)
            dfil = self.upper(rule, 1 - (1 - confidence) / size)
            note += f", lower limit at {100 * confidence:g} % confidence (checked by simulation, not proved)"
        total = size * float(dfil[index].sum())
        seen = bool((self.traces.measurements()[index] > 0).all()) and math.isfinite(total)
        value = min(self._unit() / max(total, np.finfo(np.float64).tiny), LARGEST) if seen else 0.0
        return replace(bound, name="dfil_group", value=value, assumes=(*bound.assumes, note),
                       notes=(note, *bound.notes), estimate=confidence is None)  # fmt: skip

    def lower_limit(self, rule: str | None = None, confidence: float = 0.95) -> Bound:
        """Returns the lower confidence limit of each record's floor, squared data units: s̄²/`upper`; needs two runs.

        It is 0, the trivial floor, for a record that has no limit: `no_limit_because`.

        Args:
            rule: one of the account's; the first by default.
            confidence: of the limits.
        """
        value, bound = self._at_limits(self.upper(rule, confidence)), self._floors(self._rule(rule))[0]
        note = f"lower limit at {100 * confidence:g} % confidence, checked by simulation and not proved"
        return replace(bound, name="dfil_lower_limit", value=value, assumes=(*bound.assumes, note), estimate=False,
                       notes=(note, *self.caveats, *self.traces.describe_incomplete()))  # fmt: skip

    def _lower_limits(self, rule: str | None) -> np.ndarray | None:
        """Returns the 95 % limits of the floors, (N,), 0 where there is none; None after one run."""
        return None if self.runs < 2 else self._at_limits(self.upper(rule, warn=False))

    def _at_limits(self, upper: Tensor) -> np.ndarray:
        with np.errstate(divide="ignore"):
            return np.minimum(self._unit() / upper.cpu().numpy(), LARGEST)

    def summary(self) -> dict[str, Any]:
        """Returns floors at the most exposed record and at quantiles. They depend on the data and are confidential.

        "floor_lower_limit", after two runs or more: the 95 % lower confidence limits under the first rule, of the
        records that have one. "floor_estimate": the estimates for every rule, of the records that were measured; they
        are more often too high than too low.
        """
        self.mse_floor()  # for its warnings
        times, limits, rules = self.traces.measurements().cpu(), self._lower_limits(None), self.account.rules
        seen = (times > 0).numpy()
        found: dict[str, Any] = {"confidential": True, "runs": self.runs}
        if limits is not None:
            found["floor_lower_limit"] = precision.quantiles(limits[limits > 0]) if (limits > 0).any() else None
            found["without_limit"] = int((limits == 0).sum())
            found["no_limit_because"] = self.no_limit_because()
        estimates = {rule: precision.quantiles(self._floors(k)[0].value[seen]) for k, rule in enumerate(rules)}
        return found | {
            "floor_estimate": estimates,
            "measured_per_record": {"least": int(times.min()), "median": float(times.double().median())},
            "never_measured": int((~seen).sum()),
            "caveats": [*self.caveats, *self.traces.describe_incomplete()],
            "relative_standard_error_median": precision.relative_median(self.dfil(), self.standard_error()),
        }

    def guarantee(self, *, copies: int = 1, **space: Any) -> Guarantee:
        """Returns what the mechanism guarantees whatever the data: all floors of the calculator (may be published).

        Args:
            copies: the number of rows that the person has.
            **space: low and high of every private feature, in [0, 1] if left out, and what else `guarantee` takes.
                Where the private part is a module's output, low and high are required, or radius, of the ball in which
                its outputs lie.
        """
        if self.needs_range and not ({"low", "high"} <= space.keys() or "radius" in space):
            why = "and high, or radius, must be given: the private part is a module's output, not known to be in [0, 1]"
            raise InputError("low", why, space.get("low"))
        if not {"low", "high", "radius"} & space.keys() and not bool((self.feature_scale == 1).all()):
            why = "the mechanism's floors are for features in [0, 1], this ledger's in the units of feature_scale"
            warn_user(f"{why}: give low and high in those, to compare them", ReconboundWarning)
        return guarantee(self.account.mechanism().for_group(copies), dim=self.account.features, **space)
