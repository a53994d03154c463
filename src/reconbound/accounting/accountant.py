"""FisherAccountant: the information that training runs give about each record, and the floors that follow from it.

MeasuredRuns takes in what was measured; the queries are here. The ledger is as secret as the data. Derivations:
docs/theory/accounting.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import flag, number, warn_user, whole
from reconbound.accounting import confidence as floors
from reconbound.accounting import summaries
from reconbound.accounting.compact import parts_of
from reconbound.accounting.confidence import (
    Estimates,
    MostExposed,
    Spread,
    explain_no_limit,
    spread_of,
    upper_limit,
    warn_if_imprecise,
)
from reconbound.accounting.feature_ledger import Chosen
from reconbound.accounting.measured_runs import MeasuredRuns
from reconbound.accounting.spec import Account, check_space
from reconbound.bounds import Bound
from reconbound.data.dataset import checked_rows
from reconbound.fisher.worlds import REMOVED
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.validate.model import ReconboundWarning


class FisherAccountant(MeasuredRuns):
    """A ledger of Fisher information for every record of a data set, over the steps of a run and over runs.

    Args:
        account: the mechanism, the data's size and the rules.
        diagonal: the per-feature ledgers, under the first rule: "none", "all" (records × features numbers), "average"
            (over records), or a few records and the average: their indices, or ("top", k) or a Chosen for the records
            that the first runs show to be most (and least) exposed, measured in the runs after them. "auto" or
            ("auto", bytes): "all" where it fits, otherwise Chosen().
        spectral: also keep the sum of the steps' spectral norms, under the first rule.
        feature_scale: size of one unit of the model's input in the data's own units, one number or one per feature.
        keep_runs_at: step counts, ascending, at which the sums of each run are kept for `traces.dfil_of_runs` and
            `divergences.at`; the last is the run's.
        worlds: names of the replaced worlds for which divergences are kept. "removed" is kept before them where batches
            are Poisson samples; None: no divergences.
        device: where the ledger lives.

    Attributes:
        divergences: the divergence ledger. The queries of `divergences.towards(world)` bind every attacker on every
            model.
        traces: the ledger of the records, which also reads single runs and spectral norms.
        features: the ledger of their features.
        diagonal: the kind of that ledger: "none", "all", "average", "some" or "chosen".
        caveats: what must be stated with every floor of this ledger, collected from what is added to it.
        needs_range: whether `guarantee` requires low and high: the private part is not known to lie in [0, 1].

    Guarantee: `dfil` estimates without bias an upper bound of Tr I(z)/d for an attacker who knows all other records and
    sees every noisy step; with rule "exact" it is that value itself. One run is one draw of a random sum: for a
    confidence statement use `upper` after two runs or more. Rule "paper" is for comparison and guarantees nothing.
    """

    def _unit(self) -> float:
        return float(self.feature_scale.mean()) ** 2

    def estimates(self, rule: str | None = None, at: Any = slice(None)) -> Estimates:
        """Returns means and errors of dFIL, and numbers of measurements.

        Args:
            rule: one of the account's; the first by default.
            at: which records.
        """
        k, traces, d = self._rule(rule), self.traces, self.account.features
        times = traces.measurements()[at]
        return Estimates(traces.trace_mean(k, at) / d, traces.trace_error(k, at) / d, times, self.runs, traces.sampled)

    def _passes(self, rule: str | None) -> Callable[[], Iterator[Estimates]]:
        """Returns what begins a pass over the estimates of all records, in parts."""
        return lambda: (self.estimates(rule, part) for part in parts_of(self.account.records))

    def _floors(self, k: int) -> tuple[Bound, float, str]:
        return self.traces.floors(k, self._unit(), self.caveats)

    def _statements(self) -> tuple[str, ...]:
        return (*self.caveats, *self.traces.describe_incomplete())

    def trace(self, rule: str | None = None) -> Tensor:
        """Returns Tr I of a run for each record, (N,): the mean of finished runs, or of the first run so far.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.traces.mean("trace")[self._rule(rule)].to(torch.float64, copy=True)

    def dfil(self, rule: str | None = None) -> Tensor:
        """Returns dFIL = Tr I/d of each record, (N,), in the model's input units: small is good.

        A record that was never measured has 0, which means nothing about it: see `measured`. Its floor is 0 as well.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.trace(rule) / self.account.features

    def measured(self) -> Tensor:
        """Returns the number of measurements per record over all runs, the present one too, (N,)."""
        return self.traces.state["measured_all"] + self.traces.state["measured"]

    def standard_error(self, rule: str | None = None) -> Tensor:
        """Returns the standard error of each record's dFIL, (N,); infinite for a record that was never measured.

        After two runs or more it is that of the mean over runs. After one run it is only that of the measurements of
        this run.

        Args:
            rule: one of the account's; the first by default.
        """
        return self.traces.trace_error(self._rule(rule)) / self.account.features

    def upper(self, rule: str | None = None, confidence: float = 0.95, *, warn: bool = True) -> Tensor:
        """Returns the upper confidence limit of each record's dFIL over runs, (N,); needs two runs or more.

        Formula: `accounting.confidence.upper_limit`. It is infinite for a record that was measured fewer than 25 times
        over all runs, unless at every step, and for all records where the runs differ too much: `no_limit_because`.
        For the least exposed quarter it only says that they belong to it. Limits from two runs are very wide.

        Args:
            rule: one of the account's; the first by default.
            confidence: of the limits.
            warn: whether to warn where a limit is infinite.

        Guarantee: none that is proved. In simulated trainings of ten runs the limits covered the dFIL of the least
        covered record in at least 90 % of cases, and on average over records in 98 % (docs/theory/accounting.md).
        """
        passes = self._passes(rule)
        spread = spread_of(passes)
        limits = torch.cat([upper_limit(estimates, confidence, spread) for estimates in passes()])
        reason = self.no_limit_because(rule) if flag("warn", warn) else None
        if reason is not None and self._is_first("limits"):
            warn_user(f"no confidence limit (infinity): {reason}", ReconboundWarning)
        return limits

    def spread(self, rule: str | None = None) -> Spread:
        """Returns what the upper limits of all records share.

        Args:
            rule: one of the account's; the first by default.
        """
        return spread_of(self._passes(rule))

    def no_limit_because(self, rule: str | None = None) -> str | None:
        """Returns why `upper` is infinite for some or all records, and the remedy; None where all have a limit.

        Args:
            rule: one of the account's; the first by default.
        """
        passes = self._passes(rule)
        return explain_no_limit(next(passes()), passes)

    def mse_floor(self, rule: str | None = None) -> Bound:
        """Returns 1/dFIL of each record: Theorem 2, for unbiased attackers, in squared data units.

            E‖ẑ − z‖²/d ≥ s̄²/dFIL,     s̄ the mean of feature_scale    (Cauchy–Schwarz; 1/dFIL when the scale is 1)

        The floors are estimates, 0 for a record that was never measured. `assumes` states their lower confidence limits
        and their precision. Warns, once a run, after one run and where the median relative standard error exceeds 50 %.

        Args:
            rule: one of the account's; the first by default.
        """
        k = self._rule(rule)
        limits = floors.lower_limits(self._passes(rule), self._unit()) if self.runs > 1 else None
        bound, relative, stated = self._floors(k)
        self._warn_of_floors(k, relative, stated)
        return floors.state_limits(bound, limits)

    def _warn_of_floors(self, k: int, relative: float, stated: str) -> None:
        """Warns, once a run, of floors that are imprecise or without information."""
        if self._is_first("floors"):
            warn_if_imprecise(relative, stated, self.runs)
            self.traces.warn_if_zeros(k)

    def feature_floors(self, *, average: bool = False) -> Bound:
        """Returns 1/I_jj of each record kept and feature, (kept, d), in squared data units; kept as in `rows`.

        They are estimates and warn as `mse_floor` does; their standard errors are larger.

        Args:
            average: return the floor of the information averaged over all records instead, (1, d), which bounds the
                mean of their squared errors and not each record's. Its standard error is not known.

        Guarantee: I_jj is estimated without bias, as in `dfil`. Chosen records are measured in other runs than those by
        which they were chosen, so the choice adds no bias.
        """
        average, times = flag("average", average) or self.diagonal == "average", self.traces.measurements()
        bound, relative, stated = self.features.floors(self.feature_scale, times, average, self._statements())
        if not average and self._is_first("features"):
            warn_if_imprecise(relative, stated, self.runs)
        return bound

    def feature_standard_error(self) -> Tensor:
        """Returns the standard error of I_jj of each record kept and feature, (kept, d), in the model's input units.

        After two runs or more it is that of the mean over runs. After one run, for given or all records, it is √Σx²
        over its measurements x: in expectation no less than their sum's, given the run's parameters.
        """
        return self.features.diagonal_error(self.traces.measurements())

    def mean_feature_floors(self, variance: Any, groups: Any = None) -> Bound:
        """Returns the floor of the average record's squared error in each feature, (groups, d): van Trees or mechanism.

            mean over records of E(ẑ_ij − z_ij)² ≥ max{ 1/(mean I_jj + 1/v_j),  v_j e^{−2 KL} }

        Args:
            variance: v, of a Gaussian prior the variance of each feature given all that the attacker knows otherwise,
                one number or (d,), in squared data units; of any prior 1/J, J its Fisher information.
            groups: the number of each record's group, (N,), from 0; groups must be defined by public facts. They need
                diagonal="all", or one feature.

        Guarantee: on average over the records, their private parts and releases, for every attacker, also biased ones
        who know the prior and all other records. The mean at one data set stands in for that over the prior.
        """
        self._rule(None)
        trace = self.trace() if self.account.features == 1 else None
        measured = (self.traces.measurements(), self._statements())
        return self.features.mean_floors(variance, self.feature_scale, *measured, trace=trace, groups=groups)

    def divergence(self, world: str = REMOVED, confidence: float | None = None) -> Tensor:
        """Returns D of each record in nats, (N,): how far its release is from that in another world.

            KL(real ‖ other) ≤ D

        Args:
            world: "removed", or the name of a replaced world.
            confidence: return upper limits over runs at this confidence instead; needs two finished runs or more.

        Guarantee: as for `max_success`.
        """
        return self.divergences.divergence(world, confidence)

    def max_success(self, baseline: Any, world: str = REMOVED, confidence: float | None = None) -> Bound:
        """Returns the largest chance that an attack succeeds on each record, (N,).

        Args:
            baseline: κ, the chance that the same attack succeeds in the other world.
            world: "removed", or the name of a replaced world.
            confidence: take upper limits of D over runs at this confidence; needs two finished runs or more.

        Guarantee: every attacker, every notion of success and every model. D is measured: before it is limited by the
        mechanism's cap, it is an estimate without bias of an upper bound, and one run is one draw. The chance is never
        above what the mechanism allows, which is proved.
        """
        return self.divergences.towards(world, confidence).max_success(baseline)

    def most_exposed(self, k: int = 10, rule: str | None = None) -> MostExposed:
        """Returns the k records with the lowest floors among those measured, lowest estimate first, with their caveats.

        Args:
            k: the number of records.
            rule: one of the account's; the first by default.
        """
        count, number = whole("k", k), self._rule(rule)
        bound, relative, stated = self.traces.floor_facts(number, self.caveats)
        self._warn_of_floors(number, relative, stated)
        return summaries.rank_exposed(self, count, rule, self._unit(), bound.notes)

    def group_floor(self, rows: Sequence[int], rule: str | None = None, confidence: float | None = None) -> Bound:
        """Returns the floor for a person who has several rows with the same private part (Theorem 2 for the group).

            E‖ẑ − z‖²/d ≥ s̄² d/Tr I_G,     Tr I_G ≤ k Σ Tr I_i over the k rows    (Cauchy–Schwarz)

        For k equal rows that is 1/k² of a row's floor. 0 where one of the rows was never measured, or has no limit.
        Derivation: docs/theory/accounting.md, "Several rows".

        Args:
            rows: the records of the group, each once.
            rule: one of the account's; the first by default.
            confidence: return a lower limit at this confidence instead of the estimate, for all rows of the group
                together (Bonferroni); needs two finished runs or more.
        """
        index, dfil = checked_rows(rows, self.account.records), self.dfil(rule)
        if confidence is not None:
            number("confidence", confidence, above=0.0, below=1.0)
            dfil = self.upper(rule, 1 - (1 - confidence) / len(index))
        times, bound = self.traces.measurements(), self._floors(self._rule(rule))[0]
        return floors.group_bound(bound, dfil[index], times[index], self._unit(), confidence)

    def lower_limit(self, rule: str | None = None, confidence: float = 0.95) -> Bound:
        """Returns the lower confidence limit of each record's floor, squared data units: s̄²/`upper`; needs two runs.

        It is 0, the trivial floor, for a record that has no limit: `no_limit_because`.

        Args:
            rule: one of the account's; the first by default.
            confidence: of the limits.
        """
        upper, bound = self.upper(rule, confidence), self._floors(self._rule(rule))[0]
        return floors.limit_bound(bound, upper, self._unit(), confidence, self._statements())

    def summary(self) -> dict[str, Any]:
        """Returns floors at the most exposed record and at quantiles. They depend on the data and are confidential.

        "floor_lower_limit", after two runs or more: the 95 % lower confidence limits under the first rule. Records
        without a limit are left out. "floor_estimate": the estimates for every rule; more often too high than too low.
        Both are left out where no Fisher information is kept. "divergences": for each world, what its `summary` has.
        """
        found: dict[str, Any] = {"confidential": True, "runs": self.runs, "caveats": list(self._statements())}
        if self.account.kept_rules:
            _, relative, stated = self.traces.floor_facts(0, self.caveats)
            self._warn_of_floors(0, relative, stated)
            found = summaries.summarize(self, self._unit(), self._statements())
        worlds = self.divergences.worlds
        return {**found, "divergences": {world: self.divergences.summary(world) for world in worlds}}

    def guarantee(self, *, copies: int = 1, **space: Any) -> Guarantee:
        """Returns what the mechanism guarantees whatever the data: all floors of the calculator (may be published).

        Args:
            copies: the number of rows that the person has.
            **space: low and high of every private feature ([0, 1] by default), and what else `guarantee` takes. For a
                private part that is a module's output, low and high or the radius of its ball are required.
        """
        check_space(space, self.needs_range, self.feature_scale)
        return guarantee(self.account.mechanism().for_group(copies), dim=self.account.features, **space)


__all__ = ["Account", "Chosen", "FisherAccountant"]
