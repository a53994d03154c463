"""FisherAccountant: the information that a training run gives about each record, summed over steps, averaged over runs.

Composition (Theorem 3): the information of the run is the sum over steps of the expected conditional information, so
a run's sum is an unbiased estimate of it, and runs are averaged. Subsampling: the exact Poisson factors, the fixed-
size factor, or the paper's κ for comparison. The ledger is as secret as the data: only its owner may read the saved
file. Derivations: docs/theory/accounting.md.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, file_path, flag, number, warn_user, whole
from reconbound._internal.fingerprints import NAME as FINGERPRINTS
from reconbound._internal.fingerprints import Fingerprints
from reconbound._internal.formatting import format_floor
from reconbound.accounting import storage as ledger_file
from reconbound.accounting.exposure import Exposed, MostExposed, quantiles
from reconbound.accounting.feature_ledger import Chosen, Diagonal, FeatureLedger
from reconbound.accounting.limits import FEWEST, WIDEST, upper_limit, why_no_limit
from reconbound.accounting.precision import relative_median, told, warn_if_coarse, warn_if_silent
from reconbound.accounting.record_ledger import TraceLedger
from reconbound.accounting.spec import Account, checked_device, checked_scale
from reconbound.bounds import Bound
from reconbound.data.copies import checked_rows
from reconbound.fisher import StepInformation
from reconbound.mechanisms.guarantee import Guarantee, guarantee
from reconbound.validate.model import ReconboundWarning


class FisherAccountant:
    """A ledger of Fisher information for every record of a data set, over the steps of a run and over runs.

    Args:
        account: the mechanism, the data's size and the rules.
        diagonal: the per-feature ledgers, under the account's first rule: "none", "all" (records × features numbers) or
            "average" (over records). Where memory is short, a few records and the average: the indices of the records,
            or ("top", k) or a Chosen for the records that the first runs show to be most (and least) exposed, measured
            in the runs after them. "auto" or ("auto", bytes): "all" where it fits, otherwise Chosen().
        spectral: also keep the sum of the steps' spectral norms, an upper bound of the run's. Under the first rule.
        feature_scale: size of one unit of the model's input in the data's own units, one number or one per feature (for
            standardised features: their standard deviations). Floors are given in data units through it.
        device: where the ledger lives.

    Attributes:
        caveats: what must be stated with every floor of this ledger (a model with kinks: "not proved: …"; tokens; that
            nothing has checked the model). Collected from what is added to it; kept by save, merge and checkpoints.
        needs_range: whether `guarantee` requires low and high, because the private part is not known to lie in [0, 1].
            Found from what is added to it.

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
        if not isinstance(account, Account):
            raise InputError("account", "must be an Account", account)
        self.account = account
        self.device = checked_device(device)
        self.traces = TraceLedger(account, flag("spectral", spectral), self.device)
        self.features = FeatureLedger(account, diagonal, self.device)
        self.feature_scale = checked_scale(feature_scale, account.features)
        self.runs = 0
        self._fingerprints = Fingerprints()
        self.caveats: tuple[str, ...] = ()
        self.needs_range = False
        self._warned: dict[str, int] = {}  # of what, at how many runs

    def __repr__(self) -> str:
        a, runs = self.account, f"{self.runs:,} run{'' if self.runs == 1 else 's'} finished"
        size = f"{a.records:,} records of {a.features:,} features, {a.steps:,} steps"
        return f"FisherAccountant({size}, rules {', '.join(a.rules)}, diagonal {self.diagonal!r}, {runs})"

    @property
    def diagonal(self) -> str:
        """Returns the kind of per-feature ledgers: "none", "all", "average", "some" or "chosen"."""
        return self.features.kind

    @property
    def rows(self) -> Tensor | None:
        """Returns the records whose features are kept, most exposed first if chosen; None for all or none."""
        return self.features.rows

    @property
    def fingerprints(self) -> list[str]:
        """Returns the fingerprints of the finished runs, one for each; a run can be in a ledger only once."""
        return self._fingerprints.finished

    # --- writing ---------------------------------------------------------------------

    def add(
        self, indices: Tensor | Sequence[int], found: StepInformation, *, weight: float = 1.0, stratified: bool = False
    ) -> None:
        """Adds one step's information about these records.

        Args:
            indices: the records, (B,), each at most once. Those of masked rows (padding) may be anything.
            found: the step's information about them.
            weight: q over the chance of a record to be measured at this step: 1 when the records are those drawn into
                the batch, 1/p when that is done at a share p of the steps, L·q when each record is measured once in L
                steps; never below q.
            stratified: the last of these: each record is measured exactly once in each block of steps. Not with
                shuffled epochs, where the parameters at a step depend on whether the record was seen already.
        """
        check_information(found)
        number("weight", weight, above=0.0)
        if flag("stratified", stratified) and self.account.sampler == "shuffle":
            raise InputError("stratified", "must be False with shuffled epochs: measure the batches themselves", True)
        indices, found = measured_rows(indices, found)
        index = self.traces.checked(indices, found)
        if index.numel() == 0:
            return
        self.features.check_found(found)
        self._collect(found)
        self._fingerprints.touch()
        across, along = self.traces.add(index, found, weight, stratified)
        self.features.add(index, found, across, along)

    def _collect(self, found: StepInformation) -> None:
        """Keeps what must be stated with floors computed from this information."""
        if not set(found.caveats) <= set(self.caveats):
            self.caveats = joined(self.caveats, found.caveats)
        self.needs_range = self.needs_range or found.part == "module"

    def follow(self, found: StepInformation) -> None:
        """Adds one step's information about the features of all chosen records, in the order of `rows`.

        It is for a learner that measures them at every step, whether drawn or not: weight q. The ledger of traces does
        not change. Use it at every step of a run, after `features.followed` was set, or not at all.

        Args:
            found: the step's information about the chosen records.
        """
        check_information(found)
        rows = self.rows if self.diagonal == "chosen" else None
        if rows is None or len(found.clipped_norm) != len(rows):
            have = "no" if rows is None else len(rows)
            raise InputError("found", f"must be about the {have} records that were chosen", len(found.clipped_norm))
        if found.mask is not None and not bool((found.mask != 0).all()):
            raise InputError("found", "must be about records that took part, not masked ones", found.mask.tolist())
        self.traces.check_found(rows, found)
        self._collect(found)
        rate = self.account.sample_rate
        across, along = (
            rate * f.to(self.device) for f in self.traces.factors(self.account.rules[0], found.clipped_norm)
        )
        self._fingerprints.touch()
        self.features.follow(found, across, along)

    def begin_run(self, fingerprint: str) -> None:
        """Names the run that is measured from now on. Without this call its fingerprint is random.

        Args:
            fingerprint: 32 hexadecimal digits, the same for the same training wherever it is repeated. One that is in
                the ledger already is refused.
        """
        self._fingerprints.begin(fingerprint)

    def finish_run(self) -> None:
        """Closes the current run: adds it to the averages over runs and starts an empty ledger.

        Warns where the number of steps that the measurements cover differs from the account's by a tenth and by more
        than chance, or where a record was left out that other runs measured, though not by chance.
        """
        fault = self.traces.missing()
        if fault:
            cure = "measure every record at every step, or with the right weight, or make the Account with the steps "
            cure += "that were taken and the records that are measured"
            warn_user(f"{fault}; {cure}", ReconboundWarning)
        self._fingerprints.finish()
        self.runs += 1
        self.traces.finish_run(self.runs)
        self.features.finish_run(self.runs, self.traces.trace(0, self.runs), self.traces.told_of(self.runs))

    def merge(self, other: FisherAccountant) -> None:
        """Adds the finished runs of another ledger of the same account (other machines, other seeds).

        Refuses runs that this ledger already has: in a copy, in what both were merged from, or trained again.

        Args:
            other: the other ledger.
        """
        if not isinstance(other, FisherAccountant):
            raise InputError("other", "must be a FisherAccountant", other)
        if other is self:
            raise InputError("other", "must be another ledger, with runs of its own", "the same one")
        alike = other.traces.state.keys() == self.traces.state.keys() and self.features.same_parts(other.features)
        if other.account != self.account or not alike:
            raise InputError("other", "must be a ledger of the same account, with the same parts", other.account)
        if not torch.equal(self.feature_scale, other.feature_scale):
            raise InputError("other", "must have the same feature_scale", other.feature_scale)
        self._fingerprints.check_apart(other._fingerprints)
        if other.runs == 0:
            return
        self.caveats, self.needs_range = joined(self.caveats, other.caveats), self.needs_range or other.needs_range
        self.traces.merge(other.traces, self.runs, other.runs)
        self.features.merge(other.features, self.runs, other.runs)
        self.runs += other.runs
        self._fingerprints.finished.extend(other.fingerprints)

    # --- reading -----------------------------------------------------------------------

    def trace(self, rule: str | None = None) -> Tensor:
        """Returns Tr I of a run for each record, (N,): the mean of finished runs, or of the first run so far.

        Args:
            rule: the subsampling factors; the account's first where left out.
        """
        return self.traces.trace(self._rule(rule), self.runs)

    def dfil(self, rule: str | None = None) -> Tensor:
        """Returns dFIL = Tr I/d of each record, (N,), in the model's input units: small is good.

        A record that was never measured has 0, which means nothing about it (its floor is 0 as well, not infinite).
        Look at `measured` where that can happen, or give a larger budget.

        Args:
            rule: the subsampling factors; the account's first where left out.
        """
        return self.trace(rule) / self.account.features

    def upper(self, rule: str | None = None, confidence: float = 0.95, *, warn: bool = True) -> Tensor:
        """Returns the upper confidence limit of each record's dFIL over runs, (N,); needs two runs or more.

            U = max(mean, m) · exp(t r̃) · (1 + t max(0, r − r̃)),     r = (sd/√R)/mean,   t = t_{0.9975, R−1} for 95 %

        m the lower quartile of the means and r̃ the median of r over records: the sums are skewed, and a record's own
        few sums have a small mean and a small spread where they missed the tail. For the least exposed quarter of the
        records the limit only says that they belong to it.

        It is infinite (no limit is given) for a record that was measured less than 25 times over all runs without being
        measured at every step; and for all of them where r̃ exceeds 0.35 (at ten runs: a relative spread of 1.1 between
        runs). More runs, budget or probes solve both. A warning and `no_limit_because` say which.
        At R = 2, t is 127: limits from two runs say next to nothing.

        Args:
            rule: the subsampling factors; the account's first where left out.
            confidence: of the limits.
            warn: whether to warn where a limit is infinite.

        Guarantee: none that is proved. In 45,000 Poisson-sampled trainings of small models with R = 10, on seeds and
        partly on problems that the rule was not chosen on, the limits, where given, covered the record's dFIL in at
        least 99 % of cases on average over records, for every problem and budget, and the least covered record in 91 %
        (experiments/coverage.py; docs/theory/accounting.md has the figures, and harder problems, where it was 98 % and
        90 %). The maximum over records is an upper limit for the largest dFIL of all.
        """
        limits = upper_limit(
            *self._for_limits(rule), runs=self.runs, confidence=confidence, sampled=self.traces.sampled
        )
        reason = self.no_limit_because(rule) if flag("warn", warn) else None
        if reason is not None and self._first("limits"):
            warn_user(f"no confidence limit (infinity): {reason}", ReconboundWarning)
        return limits

    def no_limit_because(self, rule: str | None = None) -> str | None:
        """Returns why `upper` is infinite for some or all records, and the remedy; None where all have a limit.

        Args:
            rule: the subsampling factors; the account's first where left out.
        """
        return why_no_limit(*self._for_limits(rule), runs=self.runs, sampled=self.traces.sampled)

    def _for_limits(self, rule: str | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.dfil(rule), self.standard_error(rule), self.traces.told_of(self.runs)

    def _first(self, what: str) -> bool:
        """Returns whether this is the first call for this subject since the last run ended."""
        before, self._warned[what] = self._warned.get(what), self.runs
        return before != self.runs

    def standard_error(self, rule: str | None = None) -> Tensor:
        """Returns the standard error of each record's dFIL, (N,).

        After two runs or more it is that of the mean over runs, with all that differs between them. After one run it is
        only that of measuring (probes, and when the record was drawn or measured), given the run's parameters. It is
        infinite for a record that was never measured.

        Args:
            rule: the subsampling factors; the account's first where left out.
        """
        return self.traces.standard_error(self._rule(rule), self.runs) / self.account.features

    def mse_floor(self, rule: str | None = None) -> Bound:
        """Returns 1/dFIL of each record: Theorem 2, for unbiased attackers, in squared data units.

            E‖ẑ − z‖²/d ≥ s̄²/dFIL,     s̄ the mean of feature_scale    (Cauchy–Schwarz; 1/dFIL when the scale is 1)

        A record that was never measured has the trivial floor 0. The floors are estimates: `assumes` says how often the
        records were measured and the median relative standard error. After one run, and where that is above 50 %, there
        is a warning, once a run. `assumes` names the lower confidence limits first, where there are any: `lower_limit`.

        Args:
            rule: the subsampling factors; the account's first where left out.
        """
        k = self._rule(rule)
        bound, relative, said = self._floors(k)
        limits = self._lower_limits(rule)
        if limits is not None and (limits > 0).any():
            there, none = limits[limits > 0], int((limits == 0).sum())
            first = f"lower limits at 95 % confidence: lowest MSE {format_floor(there.min())}"
            first += f", {none:,} of {len(limits):,} records without one" if none else ""
            bound = replace(bound, assumes=(first, *bound.assumes), notes=(first, *bound.notes))
        if self._first("floors"):
            warn_if_coarse(relative, said, self.runs)
            if 2 * self.traces.mute(k, self.runs) > int((self._told_of() > 0).sum()):
                warn_if_silent(self.traces.silent(k, self.runs))
        return bound

    def _floors(self, k: int) -> tuple[Bound, float, str]:
        return self.traces.floors(k, self.runs, unit=self._unit(), caveats=self.caveats)

    def feature_floors(self, *, average: bool = False) -> Bound:
        """Returns 1/I_jj of each record kept and feature, (kept, d), in squared data units; kept as in `rows`.

        Like `mse_floor` they are estimates; `assumes` says how good they are. For single features they are coarser than
        for a record. A warning is given, once a run, where their median relative error is above 50 %.

        Args:
            average: return the floor of the information averaged over all records instead, (1, d), which bounds the
                mean of their squared errors and not each record's. No standard error of the average is kept, and
                `assumes` says so.

        Guarantee: I_jj is estimated without bias, as in `dfil`; of chosen records given the choice, which the runs
        they are measured in had no part in.
        """
        found = self.features.floors(self.feature_scale, self.runs, self._told_of(), flag("average", average))
        notes = (*self.caveats, *self.traces.unfinished(self.runs))
        if not (average or self.diagonal == "average"):
            measured, relative = self.features.precision(self.runs, self._told_of())
            said = told(measured, relative, " of a feature", runs=self.runs)
            notes = (said, *notes)
            if self._first("features"):
                warn_if_coarse(relative, said, self.runs)
        return replace(found, assumes=(*found.assumes, *notes), notes=(*found.notes, *notes))

    def feature_standard_error(self) -> Tensor:
        """Returns the standard error of I_jj of each record kept and feature, (kept, d), in the model's input units.

        After two runs or more it is that of the mean over runs. After one run, for given or all records, it is √Σx²
        over its measurements x, whose square is in expectation no less than the variance of their sum given the run's
        parameters.
        """
        return self.features.standard_error(self.runs, self._told_of())

    def spectral_bound(self) -> Tensor:
        """Returns an upper bound of each record's spectral norm ‖I‖₂, (N,), in the model's input units.

        Guarantee: each measurement is above its step's spectral norm with probability at least 1 − 1e-6 over the random
        start of the power iteration, so that of T measurements all are with probability at least 1 − 1e-6 T. The norm
        of a sum is at most the sum of the norms. Like `dfil` it is one draw of a random sum over the steps that were
        measured, averaged over runs: an estimate, without bias, of a bound.
        """
        return self.traces.spectral(self.runs)

    def measured(self) -> Tensor:
        """Returns the number of measurements per record over all runs, (N,)."""
        return self.traces.measured()

    def _told_of(self) -> Tensor:
        return self.traces.told_of(self.runs)

    def most_exposed(self, k: int = 10, rule: str | None = None) -> MostExposed:
        """Returns the k records with the lowest floors among those measured, lowest estimate first, with their caveats.

        Those never measured have no floor and are left out: `summary()["never_measured"]` counts them.

        Args:
            k: the number of records.
            rule: the subsampling factors; the account's first where left out.
        """
        dfil = self.dfil(rule).masked_fill(self._told_of() == 0, -1.0)
        top = torch.topk(dfil, min(whole("k", k), int((dfil >= 0).sum()))).indices.tolist()
        floors = self.mse_floor(rule)
        limits = self._lower_limits(rule)
        own = (None if limits is None or limits[i] == 0 else float(limits[i]) for i in top)
        found = (Exposed(i, limit, float(floors.value[i])) for i, limit in zip(top, own, strict=True))
        return MostExposed(found, floors.notes)

    def group_floor(self, rows: Sequence[int], rule: str | None = None, confidence: float | None = None) -> Bound:
        """Returns the floor for a person who has several rows with the same private part (Theorem 2 for the group).

            E‖ẑ − z‖²/d ≥ s̄² d/Tr I_G,     Tr I_G ≤ k Σ Tr I_i over the k rows    (Cauchy–Schwarz)

        For k equal rows that is 1/k² of a row's floor, and it is attained where every record is in every batch. 0 where
        one of the rows was never measured, or has no limit. Derivation: docs/theory/accounting.md, "Several rows".

        Args:
            rows: the records of the group, each once.
            rule: the subsampling factors; the account's first where left out.
            confidence: return a lower limit at this confidence instead of the estimate, for all rows of the group
                together (Bonferroni); needs two finished runs or more.
        """
        index = checked_rows(rows, self.account.records)
        if confidence is not None:
            number("confidence", confidence, above=0.0, below=1.0)
        size, bound = len(index), self._floors(self._rule(rule))[0]
        said = f"for somebody with {size} rows" if size > 1 else "for one row"
        dfil = self.dfil(rule) if confidence is None else self.upper(rule, 1 - (1 - confidence) / size)
        total = size * float(dfil[index].sum())
        seen = bool((self._told_of()[index] > 0).all()) and math.isfinite(total)
        value = min(self._unit() / max(total, np.finfo(np.float64).tiny), np.finfo(np.float64).max) if seen else 0.0
        if confidence is not None:
            said += f", lower limit at {100 * confidence:g} % confidence (checked by simulation, not proved)"
        notes = (said, *bound.notes)
        return replace(bound, name="dfil_group", value=value, assumes=(*bound.assumes, said), notes=notes,
                       estimate=confidence is None)  # fmt: skip

    def lower_limit(self, rule: str | None = None, confidence: float = 0.95) -> Bound:
        """Returns the lower confidence limit of each record's floor, squared data units: s̄²/`upper`; needs two runs.

        It is 0, the trivial floor, for a record that has no limit: `no_limit_because` says why.

        Args:
            rule: the subsampling factors; the account's first where left out.
            confidence: of the limits.
        """
        limits = self.upper(rule, confidence)
        value = self._at_limits(limits)
        bound = self._floors(self._rule(rule))[0]
        said = f"lower limit at {100 * confidence:g} % confidence, checked by simulation and not proved"
        notes = (said, *self.caveats, *self.traces.unfinished(self.runs))
        return replace(bound, name="dfil_lower_limit", value=value, assumes=(*bound.assumes, said), notes=notes,
                       estimate=False)  # fmt: skip

    def _lower_limits(self, rule: str | None) -> np.ndarray | None:
        """Returns the 95 % limits of the floors, (N,), 0 where there is none; None after one run."""
        return None if self.runs < 2 else self._at_limits(self.upper(rule, warn=False))

    def _at_limits(self, upper: Tensor) -> np.ndarray:
        with np.errstate(divide="ignore"):
            value = self._unit() / upper.cpu().numpy()
        return np.minimum(value, np.finfo(np.float64).max)

    def summary(self) -> dict[str, Any]:
        """Returns floors at the most exposed record and at quantiles. They depend on the data and are confidential.

        "floor_lower_limit", after two runs or more: the 95 % lower confidence limits under the first rule, at quantiles
        of the records that have one; "without_limit" counts the others, "no_limit_because" says why there are any.
        "floor_estimate": the estimates for every rule, at quantiles of the records that were measured; they are more
        often too high than too low.
        """
        self.mse_floor()  # for its warnings
        names = {"lowest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9}
        measured = self._told_of().cpu()
        seen = (measured > 0).numpy()
        floors: dict[str, Any] = {}
        for k, rule in enumerate(self.account.rules):
            floors[rule] = quantiles(self._floors(k)[0].value[seen], names)
        limits = self._lower_limits(None)
        found: dict[str, Any] = {"confidential": True, "runs": self.runs}
        if limits is not None:
            found["floor_lower_limit"] = quantiles(limits[limits > 0], names) if (limits > 0).any() else None
            found["without_limit"] = int((limits == 0).sum())
            found["no_limit_because"] = self.no_limit_because()
        found["floor_estimate"] = floors
        found["measured_per_record"] = {"least": int(measured.min()), "median": float(measured.double().median())}
        found["never_measured"] = int((~seen).sum())
        found["caveats"] = [*self.caveats, *self.traces.unfinished(self.runs)]
        found["relative_standard_error_median"] = relative_median(self.dfil(), self.standard_error())
        return found

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
            said = "the mechanism's floors are for features in [0, 1], this ledger's in the units of feature_scale"
            warn_user(f"{said}: give low and high in those, to compare them", ReconboundWarning)
        return guarantee(self.account.mechanism().for_group(copies), dim=self.account.features, **space)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Returns a copy of the ledger's tensors, on the CPU."""
        found = {name: value.cpu().clone() for name, value in (self.traces.state | self.features.state).items()}
        return {**found, FINGERPRINTS: self._fingerprints.tensor()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Restores what `state` returned; shapes are checked before anything is changed.

        Args:
            tensors: the ledger's tensors.
            runs: the number of finished runs.
        """
        check_tensors(tensors)
        self.traces.check(tensors)
        self.features.check(tensors)
        fingerprints = self._fingerprints.restored(tensors, whole("runs", runs, at_least=0))
        self.traces.restore(tensors)
        self.features.restore(tensors)
        self.features.first = runs == 0
        self.runs, self._fingerprints = whole("runs", runs, at_least=0), fingerprints

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the ledger to a file: safetensors, atomically, mode 0600, marked confidential.

        Args:
            path: the file to write.
        """
        ledger_file.write(self, file_path("path", path))

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FisherAccountant:
        """Reads a ledger that `save` wrote; anything else is refused with the reason.

        Args:
            path: the file that `save` wrote.
            device: where the ledger will live.
        """
        return ledger_file.made(cls, *ledger_file.read(file_path("path", path)), checked_device(device))

    def _rule(self, rule: str | None) -> int:
        return 0 if rule is None else self.account.rules.index(choice("rule", rule, self.account.rules))

    def _unit(self) -> float:
        return float(self.feature_scale.mean()) ** 2


def check_information(found: Any) -> None:
    """Refuses an object that `step_information` did not return."""
    if not isinstance(found, StepInformation):
        raise InputError("found", "must be what step_information returns", found)


def check_tensors(tensors: Any) -> None:
    """Refuses anything but a dictionary of tensors."""
    if not isinstance(tensors, Mapping) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise InputError(
            "tensors", "must be a dictionary of tensors, as `state` returns", f"a {type(tensors).__name__}"
        )


def measured_rows(indices: Any, found: StepInformation) -> tuple[Any, StepInformation]:
    """Returns indices and information of the records that took part. Masked rows are padding, not measurements.

    Args:
        indices: the records, (B,).
        found: the step's information about them.
    """
    if found.mask is None or not hasattr(indices, "__len__") or len(indices) != len(found.mask):
        return indices, found
    kept = torch.nonzero(found.mask).flatten()
    names = [f.name for f in fields(found) if isinstance(getattr(found, f.name), Tensor)]
    some = replace(found, **{name: getattr(found, name)[kept] for name in names})
    return torch.as_tensor(indices)[kept.cpu()], some


def joined(*caveats: Sequence[str]) -> tuple[str, ...]:
    """Returns all caveats, each once, in order."""
    return tuple(dict.fromkeys(c for some in caveats for c in some))


__all__ = ["FEWEST", "WIDEST", "Account", "Chosen", "FisherAccountant"]
