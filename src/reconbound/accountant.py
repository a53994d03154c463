"""FisherAccountant: what a whole training run told about each record, summed over steps and averaged over runs.

Composition (Theorem 3): the information of the run is the sum over steps of the expected conditional information, so
a run's sum is an unbiased estimate of it, and runs are averaged. Subsampling: the exact Poisson factors, the fixed-
size factor, or the paper's κ for comparison. The ledger is as secret as the data: it is saved for its owner's eyes
alone. Derivations: docs/theory-accounting.md."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import ledger_file
from ._check import InputError, choice, warn_user, whole
from .account import Account, checked_scale
from .bounds import Bound
from .calculator import Guarantee, guarantee
from .feature_ledger import Chosen, Diagonal, FeatureLedger
from .fisher import StepInformation
from .limits import FEWEST, WIDEST, upper_limit, why_no_limit
from .precision import relative_median, told, warn_if_coarse, warn_if_silent
from .trace_ledger import TraceLedger
from .validate.structure import ReconboundWarning


class FisherAccountant:
    """A ledger of Fisher information for every record of a data set, over the steps of a run and over runs.

    Args:
        account: what is accounted.
        diagonal: per-feature ledgers, under the account's first rule: "none", "all" (records × features numbers),
            "average" (over records); where memory is short, of a few records and the average: the indices of the
            records, or ("top", k) or a Chosen, the records that the first runs show to be most (and least) exposed,
            measured in the runs after them; "auto" or ("auto", bytes) for "all" where it fits, else Chosen().
        spectral: also the sum of the steps' spectral norms, an upper bound of the run's. Under the first rule.
        feature_scale: size of one unit of the model's input in the data's own units, one number or one per feature (of
            standardised features: their standard deviations). Floors are given in data units through it.
        device: where the ledger lives.

    Attributes:
        caveats: what every floor of this ledger must carry (a model with kinks: "not proved: …"); kept by save, merge
            and checkpoints. A learner sets it; set it yourself beside a training loop of your own.
        needs_range: `guarantee` must be told low and high, for the private part is not known to lie in [0, 1].

    Guarantee: `dfil` estimates without bias an upper bound of Tr I(z)/d for an attacker who knows all other records and
    sees every noisy step; with rule "exact" it is that value itself. One run is one draw of a random sum: for a
    confidence statement use `upper` after two runs or more. Rule "paper" is for comparison and guarantees nothing.
    """

    def __init__(
        self,
        account: Account,
        *,
        diagonal: Diagonal = "none",
        spectral: bool = False,
        feature_scale: float | Sequence[float] | Tensor = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.account = account
        self.device = torch.device(device)
        self.traces = TraceLedger(account, spectral, self.device)
        self.features = FeatureLedger(account, diagonal, self.device)
        self.feature_scale = checked_scale(feature_scale, account.features)
        self.runs = 0
        self.caveats: tuple[str, ...] = ()
        self.needs_range = False
        self._warned: dict[str, int] = {}  # of what, at how many runs

    def __repr__(self) -> str:
        a, runs = self.account, f"{self.runs:,} run{'' if self.runs == 1 else 's'} finished"
        size = f"{a.records:,} records of {a.features:,} features, {a.steps:,} steps"
        return f"FisherAccountant({size}, rules {', '.join(a.rules)}, diagonal {self.diagonal!r}, {runs})"

    @property
    def diagonal(self) -> str:
        """Which per-feature ledgers are kept: "none", "all", "average", "some" or "chosen"."""
        return self.features.kind

    @property
    def rows(self) -> Tensor | None:
        """The records whose features are kept, most exposed first if they were chosen; None for all or none."""
        return self.features.rows

    # --- writing ---------------------------------------------------------------------

    def add(
        self, indices: Tensor | Sequence[int], found: StepInformation, *, weight: float = 1.0, stratified: bool = False
    ) -> None:
        """Add one step's information about these records.

        Args:
            indices: which records, (B,), each at most once.
            found: the step's information about them.
            weight: q over the chance of a record to be measured at this step: 1 when the records are those drawn into
                the batch, 1/p when that is done at a share p of the steps, L·q when each record is measured once in L
                steps; never below q.
            stratified: the last: each record is measured exactly once in each block of steps. Not with shuffled epochs,
                where the parameters at a step depend on whether the record was seen already.
        """
        if stratified and self.account.sampler == "shuffle":
            raise InputError("stratified", "must be False with shuffled epochs: measure the batches themselves", True)
        index = self.traces.checked(indices, found)
        if index.numel() == 0:
            return
        self.features.check_found(found)
        across, along = self.traces.add(index, found, weight, stratified)
        self.features.add(index, found, across, along)

    def follow(self, found: StepInformation) -> None:
        """Add one step's information about the features of all chosen records, in the order of `rows`.

        For a learner that measures them at every step, whether drawn or not: weight q. The ledger of traces is left
        as it is. To be used at every step of a run, after `features.followed` was set, or not at all.
        """
        rows = self.rows if self.diagonal == "chosen" else None
        if rows is None or len(found.clipped_norm) != len(rows):
            have = "no" if rows is None else len(rows)
            raise InputError("found", f"must be about the {have} records that were chosen", len(found.clipped_norm))
        self.traces.check_found(rows, found)
        rate = self.account.sample_rate
        across, along = (
            rate * f.to(self.device) for f in self.traces.factors(self.account.rules[0], found.clipped_norm)
        )
        self.features.follow(found, across, along)

    def finish_run(self) -> None:
        """Close the current run: fold it into the averages over runs and start an empty ledger.

        Warns where the run's measurements tell of other than the account's steps, by a tenth and more than chance, or
        where a record was left out that other runs measured, though not by chance."""
        fault = self.traces.missing()
        if fault:
            cure = "measure every record at every step, or with the right weight, or make the Account with the steps "
            cure += "that were taken and the records that are measured"
            warn_user(f"{fault}; {cure}", ReconboundWarning)
        self.runs += 1
        self.traces.finish_run(self.runs)
        self.features.finish_run(self.runs, self.traces.trace(0, self.runs), self.traces.told_of(self.runs))

    def merge(self, other: FisherAccountant) -> None:
        """Take in the finished runs of another ledger of the same account (other machines, other seeds)."""
        if other is self:
            raise InputError("other", "must be another ledger, with runs of its own", "the same one")
        alike = other.traces.state.keys() == self.traces.state.keys() and self.features.same_parts(other.features)
        if other.account != self.account or not alike:
            raise InputError("other", "must be a ledger of the same account, with the same parts", other.account)
        if not torch.equal(self.feature_scale, other.feature_scale):
            raise InputError("other", "must have the same feature_scale", other.feature_scale)
        if other.runs == 0:
            return
        self.caveats, self.needs_range = joined(self.caveats, other.caveats), self.needs_range or other.needs_range
        self.traces.merge(other.traces, self.runs, other.runs)
        self.features.merge(other.features, self.runs, other.runs)
        self.runs += other.runs

    # --- reading -----------------------------------------------------------------------

    def trace(self, rule: str | None = None) -> Tensor:
        """Tr I of a run for each record, (N,): the mean of finished runs, or the current run before the first ends."""
        return self.traces.trace(self._rule(rule), self.runs)

    def dfil(self, rule: str | None = None) -> Tensor:
        """dFIL = Tr I/d of each record, (N,), in the model's input units: small is good.

        Of a record that was never measured it is 0, which says nothing about it (its floor is 0 as well, not infinite):
        look at `measured` where that can be, or give a larger budget."""
        return self.trace(rule) / self.account.features

    def upper(self, rule: str | None = None, confidence: float = 0.95, *, warn: bool = True) -> Tensor:
        """Upper confidence limit of each record's dFIL over runs, (N,); needs two runs or more.

            U = max(mean, m) · exp(t r̃) · (1 + t max(0, r − r̃)),     r = (sd/√R)/mean,   t = t_{0.9975, R−1} for 95 %

        m the lower quartile of the means and r̃ the median of r over records: the sums are skewed, and a record's own
        few sums have a small mean and a small spread where they missed the tail. Of the least exposed quarter of the
        records the limit says no more than that they belong to it.

        Infinite, that is refused, for a record that was measured less than 25 times over all runs without being
        measured at every step; and for all of them where r̃ exceeds 0.35 (at ten runs: a relative spread of 1.1 between
        runs). More runs, budget or probes mend either. A warning says which (warn=False: none), and `no_limit_because`.
        At R = 2, t is 127: limits from two runs say next to nothing.

        Guarantee: none that is proved. In 45,000 Poisson-sampled trainings of small models with R = 10, on seeds and
        partly on problems that the rule was not chosen on, the limits, where given, covered the record's dFIL in at
        least 99 % of cases on average over records, for every problem and budget, and the least covered record in 91 %
        (experiments/coverage.py; docs/theory-accounting.md has the figures, and harder problems, where it was 98 % and
        90 %). The maximum over records is an upper limit for the largest dFIL of all.
        """
        limits = upper_limit(
            *self._for_limits(rule), runs=self.runs, confidence=confidence, sampled=self.traces.sampled
        )
        reason = self.no_limit_because(rule) if warn else None
        if reason is not None and self._first("limits"):
            warn_user(f"no confidence limit (infinity): {reason}", ReconboundWarning)
        return limits

    def no_limit_because(self, rule: str | None = None) -> str | None:
        """Why `upper` is infinite for some or all records, and what mends it; None where all have a limit."""
        return why_no_limit(*self._for_limits(rule), runs=self.runs, sampled=self.traces.sampled)

    def _for_limits(self, rule: str | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.dfil(rule), self.standard_error(rule), self.traces.told_of(self.runs)

    def _first(self, what: str) -> bool:
        """Whether this is the first time to speak of it since the last run ended."""
        before, self._warned[what] = self._warned.get(what), self.runs
        return before != self.runs

    def standard_error(self, rule: str | None = None) -> Tensor:
        """Standard error of each record's dFIL, (N,).

        After two runs or more: of the mean over runs, with all that differs between them. Of one run: that of
        measuring alone (probes, and when the record was drawn or measured), given what the run's parameters were.
        Infinite for a record that was never measured.
        """
        return self.traces.standard_error(self._rule(rule), self.runs) / self.account.features

    def mse_floor(self, rule: str | None = None) -> Bound:
        """1/dFIL of each record: Theorem 2, for unbiased attackers, in the squares of the data's units.

            E‖ẑ − z‖²/d ≥ s̄²/dFIL,     s̄ the mean of feature_scale    (Cauchy–Schwarz; 1/dFIL when the scale is 1)

        A record that was never measured has the trivial floor 0. The floors are estimates: `assumes` says how often the
        records were measured and the median relative standard error; above 50 % there is a warning, once a run.
        """
        k = self._rule(rule)
        bound, relative, said = self._floors(k)
        if self._first("floors"):
            warn_if_coarse(relative, said)
            if 2 * self.traces.mute(k, self.runs) > int((self._told_of() > 0).sum()):
                warn_if_silent(self.traces.silent(k, self.runs))
        return bound

    def _floors(self, k: int) -> tuple[Bound, float, str]:
        return self.traces.floors(k, self.runs, unit=self._unit(), caveats=self.caveats)

    def feature_floors(self, *, average: bool = False) -> Bound:
        """1/I_jj of each record kept and feature, (kept, d), in the squares of the data's own units; kept as in `rows`.

        average: that of the information averaged over all records instead, (1, d), which bounds the mean of their
        squared errors and not each record's. Of the average no standard error is kept, and `assumes` says so.

        Like `mse_floor` they are estimates, of which `assumes` says how good they are; of single features they are
        coarser than of a record. A warning is given, once a run, where their median relative error is above 50 %.

        Guarantee: I_jj is estimated without bias, as in `dfil`; of chosen records given the choice, which the runs
        they are measured in had no part in.
        """
        found = self.features.floors(self.feature_scale, self.runs, self._told_of(), average)
        notes = (*self.caveats, *self.traces.unfinished(self.runs))
        if not (average or self.diagonal == "average"):
            measured, relative = self.features.precision(self.runs, self._told_of())
            said = told(measured, relative, " of a feature", runs=self.runs)
            notes = (said, *notes)
            if self._first("features"):
                warn_if_coarse(relative, said)
        return replace(found, assumes=(*found.assumes, *notes), notes=(*found.notes, *notes))

    def feature_standard_error(self) -> Tensor:
        """Standard error of I_jj of each record kept and feature, (kept, d), in the model's input units.

        After two runs or more, of the mean over runs. Of one run, for given or all records: √Σx² over its measurements
        x, whose square is in expectation no less than the variance of their sum given the run's parameters."""
        return self.features.standard_error(self.runs, self._told_of())

    def spectral_bound(self) -> Tensor:
        """Upper bound of each record's spectral norm ‖I‖₂, (N,), in the model's input units."""
        return self.traces.spectral(self.runs)

    def measured(self) -> Tensor:
        """How often each record was measured, over all runs, (N,)."""
        return self.traces.measured()

    def _told_of(self) -> Tensor:
        return self.traces.told_of(self.runs)

    def most_exposed(self, k: int = 10, rule: str | None = None) -> list[tuple[int, float]]:
        """The k records with the lowest floors among those measured: (index, squared error), lowest first.

        Those never measured have no floor and are left out: `summary()["never_measured"]` counts them."""
        dfil = self.dfil(rule).masked_fill(self._told_of() == 0, -1.0)
        top = torch.topk(dfil, min(whole("k", k), int((dfil >= 0).sum())))
        floors = self.mse_floor(rule).value
        return [(int(i), float(floors[int(i)])) for i in top.indices]

    def summary(self) -> dict[str, Any]:
        """Floors at the most exposed record and at quantiles, for every rule. Depends on the data: confidential.

        Quantiles are over the records that were measured. After two runs "floor_at_upper_limit" is the lowest floor of
        all at its upper limit, or None where some record has no limit: "no_limit_because" says why."""
        self.mse_floor()  # for its warnings
        names = {"lowest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9}
        measured = self._told_of().cpu()
        seen = (measured > 0).numpy()
        floors: dict[str, Any] = {}
        for k, rule in enumerate(self.account.rules):
            value = self._floors(k)[0].value[seen]
            at = np.quantile(value, list(names.values()), method="lower") if seen.any() else [0.0] * len(names)
            floors[rule] = {name: float(v) for name, v in zip(names, at, strict=True)}
        found: dict[str, Any] = {"confidential": True, "runs": self.runs, "floors": floors}
        found["measured_per_record"] = {"least": int(measured.min()), "median": float(measured.double().median())}
        found["never_measured"] = int((~seen).sum())
        found["caveats"] = [*self.caveats, *self.traces.unfinished(self.runs)]
        found["relative_standard_error_median"] = relative_median(self.dfil(), self.standard_error())
        if self.runs > 1:
            limits = self.upper(warn=False)
            worst = float(limits.max())
            found["floor_at_upper_limit"] = self._unit() / worst if 0 < worst < np.inf else None
            found["without_limit"] = int(torch.isinf(limits).sum())
            found["no_limit_because"] = self.no_limit_because()
        return found

    def guarantee(self, **space: Any) -> Guarantee:
        """What the mechanism guarantees whatever the data: all floors of the calculator (may be published).

        space: low and high of every private feature, in [0, 1] if left out, and what else `guarantee` takes. Where the
        private part is a module's output they must be given, or radius, of the ball in which its outputs lie."""
        if self.needs_range and not ({"low", "high"} <= space.keys() or "radius" in space):
            why = "and high, or radius, must be given: the private part is a module's output, not known to be in [0, 1]"
            raise InputError("low", why, space.get("low"))
        if not {"low", "high", "radius"} & space.keys() and not bool((self.feature_scale == 1).all()):
            said = "the mechanism's floors are for features in [0, 1], this ledger's in the units of feature_scale"
            warn_user(f"{said}: give low and high in those, to compare them", ReconboundWarning)
        return guarantee(self.account.mechanism(), dim=self.account.features, **space)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """A copy of the ledger's tensors, on the CPU."""
        return {name: value.cpu().clone() for name, value in (self.traces.state | self.features.state).items()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Put back what `state` gave; shapes are checked before anything is changed."""
        self.traces.check(tensors)
        self.features.check(tensors)
        self.traces.restore(tensors)
        self.features.restore(tensors)
        self.features.first = runs == 0
        self.runs = whole("runs", runs, at_least=0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger: safetensors, atomically, mode 0600, marked confidential."""
        ledger_file.write(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FisherAccountant:
        """Read a ledger that `save` wrote; anything else is refused with the reason."""
        return ledger_file.made(cls, *ledger_file.read(path), device)

    def _rule(self, rule: str | None) -> int:
        return 0 if rule is None else self.account.rules.index(choice("rule", rule, self.account.rules))

    def _unit(self) -> float:
        return float(self.feature_scale.mean()) ** 2


def joined(*caveats: Sequence[str]) -> tuple[str, ...]:
    """All of them, each once, in order."""
    return tuple(dict.fromkeys(c for some in caveats for c in some))


__all__ = ["FEWEST", "WIDEST", "Account", "Chosen", "FisherAccountant"]
