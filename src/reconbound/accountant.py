"""FisherAccountant: what a whole training run told about each record, summed over steps and averaged over runs.

Composition (Theorem 3): the information of the run is the sum over steps of the expected conditional information, so
a run's sum is an unbiased estimate of it, and runs are averaged. Subsampling: the exact Poisson factors, the fixed-
size factor, or the paper's κ for comparison. The ledger is as secret as the data: it is saved for its owner's eyes
alone. Derivations: docs/theory-accounting.md."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._check import InputError, choice, number, whole
from ._files import CONFIDENTIAL, Unreadable, sealed, unsealed, write_whole
from .account import Account, Factors
from .bounds import Bound, from_trace
from .calculator import Guarantee, guarantee
from .feature_ledger import Chosen, Diagonal, FeatureLedger
from .fisher import StepInformation
from .limits import FEWEST, WIDEST, upper_limit, why_no_limit
from .precision import relative_median, told, warn_if_coarse, warn_if_silent
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
        self.features = FeatureLedger(account, diagonal, self.device)
        self.feature_scale = _scale(feature_scale, account.features)
        self.runs = 0
        self.caveats: tuple[str, ...] = ()
        self.needs_range = False
        self._warned: dict[str, int] = {}  # of what, at how many runs
        self._state = _empty(account, spectral, self.device)
        self._factors = Factors(account, self.device)

    @property
    def diagonal(self) -> str:
        """Which per-feature ledgers are kept: "none", "all", "average", "some" or "chosen"."""
        return self.features.kind

    @property
    def rows(self) -> Tensor | None:
        """The records whose features are kept, most exposed first if they were chosen; None for all or none."""
        return self.features.rows

    # --- writing ---------------------------------------------------------------------

    def add(self, indices: Tensor, found: StepInformation, *, weight: float = 1.0, stratified: bool = False) -> None:
        """Add one step's information about these records.

        Args:
            indices: which records, (B,), each at most once.
            found: the step's information about them.
            weight: q over the chance of a record to be measured at this step: 1 when the records are those drawn into
                the batch, 1/p when that is done at a share p of the steps, L·q when each record is measured once in L
                steps.
            stratified: the last: each record is measured exactly once in each block of steps.
        """
        index = self._checked(indices)
        if index.numel() == 0:
            return
        state, account = self._state, self.account
        count = state["measured"][index]
        chance = min(1.0, account.sample_rate / number("weight", weight, above=0.0))
        for k, rule in enumerate(account.rules):
            across, along = (weight * f.to(self.device) for f in self._factors(rule, found.clipped_norm))
            value = across * self._here(found.across) + along * self._here(found.along)
            error = across * self._here(found.across_error)
            self._add_variance(k, index, value, error, count, chance, stratified)
            state["trace"][k].index_add_(0, index, value)
            if k == 0:
                self._add_spectral(index, found, torch.maximum(across, along))
                self.features.add(index, found, across, along)
        state["measured"].index_add_(0, index, torch.ones_like(index))

    def _checked(self, indices: Tensor) -> Tensor:
        if indices.numel() == 0:
            return indices
        low, high = int(indices.min()), int(indices.max())
        if low < 0 or high >= self.account.records:
            bad = low if low < 0 else high
            raise InputError("indices", f"must lie between 0 and {self.account.records - 1}", bad)
        if indices.unique().numel() != indices.numel():
            raise InputError("indices", "must name each record at most once", indices.tolist())
        return indices.to(self.device)

    def _add_variance(
        self, k: int, index: Tensor, value: Tensor, error: Tensor, count: Tensor, chance: float, stratified: bool
    ) -> None:
        """Variance of the run's sum, given its trajectory: of the probes and of when the record was measured.

        Rare draws (Horvitz–Thompson): Σ (1−π) x² + π e². Once per block: half the squared differences of successive
        blocks, times B/(B−1), which counts the drift between blocks as error too; one block says no more than x².
        """
        drawn = (1 - chance) * value.square() + chance * error.square()
        variance, last = self._state["variance"][k], self._state["last"][k]
        self._state["rare"].fill_(chance < 1.0)
        if not stratified or chance == 1.0:
            variance.index_add_(0, index, drawn)
            return
        so_far = variance[index] * (count - 1).clamp(min=0) / count.clamp(min=1)
        more = (so_far + (value - last[index]).square() / 2) * (count + 1) / count.clamp(min=1)
        variance[index] = torch.where(count > 0, more, drawn)
        last[index] = value

    def _add_spectral(self, index: Tensor, found: StepInformation, largest: Tensor) -> None:
        if "spectral" not in self._state:
            return
        if found.spectral is None or found.spectral_residual is None:
            raise InputError("found", "must have the spectral norm: this ledger keeps it", None)
        norm = self._here(found.spectral) + self._here(found.spectral_residual)  # power iteration comes from below
        self._state["spectral"].index_add_(0, index, largest * norm)

    def follow(self, found: StepInformation) -> None:
        """Add one step's information about the features of all chosen records, in the order of `rows`.

        For a learner that measures them at every step, whether drawn or not: weight q. The ledger of traces is left
        as it is. To be used at every step of a run, after `features.followed` was set, or not at all.
        """
        rate = self.account.sample_rate
        across, along = (rate * f.to(self.device) for f in self._factors(self.account.rules[0], found.clipped_norm))
        self.features.follow(found, across, along)

    def _here(self, values: Tensor) -> Tensor:
        return values.to(device=self.device, dtype=torch.float64)

    def finish_run(self) -> None:
        """Close the current run: fold it into the averages over runs and start an empty ledger."""
        state = self._state
        self.runs += 1
        delta = state["trace"] - state["mean"]
        state["mean"] += delta / self.runs
        state["spread"] += delta * (state["trace"] - state["mean"])
        for name in _AVERAGED:
            if name in state:
                state[f"{name}_mean"] += (state[name] - state[f"{name}_mean"]) / self.runs
        state["measured_total"] += state["measured"]
        self.features.finish_run(self.runs, state["mean"][0], state["measured_total"])
        for name in ("trace", "last", "measured", *_AVERAGED):
            if name in state:
                state[name].zero_()

    def merge(self, other: FisherAccountant) -> None:
        """Take in the finished runs of another ledger of the same account (other machines, other seeds)."""
        alike = other._state.keys() == self._state.keys() and self.features.same_parts(other.features)
        if other.account != self.account or not alike:
            raise InputError("other", "must be a ledger of the same account, with the same parts", other.account)
        if not torch.equal(self.feature_scale, other.feature_scale):
            raise InputError("other", "must have the same feature_scale", other.feature_scale)
        if other.runs == 0:
            return
        self.caveats, self.needs_range = joined(self.caveats, other.caveats), self.needs_range or other.needs_range
        mine, theirs, total = self._state, other._state, self.runs + other.runs
        delta = theirs["mean"].to(self.device) - mine["mean"]
        mine["spread"] += theirs["spread"].to(self.device) + delta.square() * (self.runs * other.runs / total)
        mine["mean"] += delta * (other.runs / total)
        for name in (f"{name}_mean" for name in _AVERAGED):
            if name in mine:
                mine[name] += (theirs[name].to(self.device) - mine[name]) * (other.runs / total)
        mine["measured_total"] += theirs["measured_total"].to(self.device)
        mine["rare"] |= theirs["rare"].to(self.device)
        self.features.merge(other.features, self.runs, other.runs)
        self.runs = total

    # --- reading -----------------------------------------------------------------------

    def trace(self, rule: str | None = None) -> Tensor:
        """Tr I of a run for each record, (N,): the mean of finished runs, or the current run before the first ends."""
        k = self._rule(rule)
        return (self._state["mean"] if self.runs else self._state["trace"])[k].clone()

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

        Guarantee: none that is proved. In 45,000 Poisson-sampled trainings of small models with R = 10, on seeds and
        partly on problems that the rule was not chosen on, the limits, where given, covered the record's dFIL in at
        least 99 % of cases on average over records, for every problem and budget, and the least covered record in 91 %
        (experiments/coverage.py; docs/theory-accounting.md has the figures, and harder problems, where it was 98 % and
        90 %). The maximum over records is an upper limit for the largest dFIL of all.
        """
        limits = upper_limit(*self._for_limits(rule), runs=self.runs, confidence=confidence, sampled=self._sampled)
        reason = self.no_limit_because(rule) if warn else None
        if reason is not None and self._first("limits"):
            warnings.warn(f"no confidence limit (infinity): {reason}", ReconboundWarning, stacklevel=2)
        return limits

    def no_limit_because(self, rule: str | None = None) -> str | None:
        """Why `upper` is infinite for some or all records, and what mends it; None where all have a limit."""
        return why_no_limit(*self._for_limits(rule), runs=self.runs, sampled=self._sampled)

    def _for_limits(self, rule: str | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.dfil(rule), self.standard_error(rule), self._state["measured_total"]

    @property
    def _sampled(self) -> bool:
        return bool(self._state["rare"].any())

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
        k = self._rule(rule)
        if self.runs > 1:
            variance = self._state["spread"][k].clamp(min=0) / (self.runs * (self.runs - 1))
        else:
            variance = (self._state["variance_mean"] if self.runs else self._state["variance"])[k]
        return (variance.sqrt() / self.account.features).masked_fill(self._told_of() == 0, torch.inf)

    def mse_floor(self, rule: str | None = None) -> Bound:
        """1/dFIL of each record: Theorem 2, for unbiased attackers, in the squares of the data's units.

            E‖ẑ − z‖²/d ≥ s̄²/dFIL,     s̄ the mean of feature_scale    (Cauchy–Schwarz; 1/dFIL when the scale is 1)

        A record that was never measured has the trivial floor 0. The floors are estimates: `assumes` says how often the
        records were measured and the median relative standard error; above 50 % there is a warning, once a run.
        """
        bound, relative, said = self._floor(rule)
        if self._first("floors"):
            warn_if_coarse(relative, said)
            if 2 * self._mute(rule) > int((self._told_of() > 0).sum()):
                warn_if_silent(self._silent(rule))
        return bound

    def _mute(self, rule: str | None) -> int:
        """Records about which no step told anything, though they were measured: training may have diverged."""
        return int(((self.trace(rule) == 0) & (self._told_of() > 0)).sum())

    def _silent(self, rule: str | None) -> tuple[str, ...]:
        none = self._mute(rule)
        where = f"{none} of {self.account.records} records told nothing whenever they were measured"
        return (f"{where}: their floor is the largest number there is",) if none else ()

    def _floor(self, rule: str | None) -> tuple[Bound, float, str]:
        """The floors, their median relative standard error, and the words for it."""
        name = self.account.rules[self._rule(rule)]
        bound = from_trace(self.trace(rule).cpu().numpy(), self.account.features)
        unseen = (self._told_of() == 0).cpu().numpy()
        with np.errstate(over="ignore"):  # of what told nothing, whose floor is the largest number already
            value = np.where(unseen, 0.0, np.minimum(bound.value * self._unit(), np.finfo(np.float64).max))
        note = {"exact": "exact Poisson factors", "fixed": "the fixed-size factor", "none": "no amplification"}
        paper = "the paper's κ: comparison, no guarantee"
        runs = f"{self.runs} run(s)" if self.runs else "a run in progress"
        assumes: tuple[str, ...] = (note.get(name, paper), f"mean over {runs}", f"{self.account.clip} clipping")
        relative = relative_median(self.dfil(rule), self.standard_error(rule))
        said = told(self._told_of(), relative, runs=self.runs)
        notes: tuple[str, ...] = (said, *self.caveats, *self._silent(rule))
        if unseen.any():
            notes += (f"{int(unseen.sum())} of {len(unseen)} records were never measured: no floor (0)",)
        found = replace(bound, name="dfil", value=value, sampler=self.account.sampler, notes=notes)
        return replace(found, attacker="unbiased", assumes=(*assumes, *notes)), relative, said

    def feature_floors(self, *, average: bool = False) -> Bound:
        """1/I_jj of each record kept and feature, (kept, d), in the squares of the data's own units; kept as in `rows`.

        average: that of the information averaged over all records instead, (1, d), which bounds the mean of their
        squared errors and not each record's.

        Like `mse_floor` they are estimates, of which `assumes` says how good they are; of single features they are
        coarser than of a record. A warning is given, once a run, where their median relative error is above 50 %.

        Guarantee: I_jj is estimated without bias, as in `dfil`; of chosen records given the choice, which the runs
        they are measured in had no part in.
        """
        found = self.features.floors(self.feature_scale, self.runs, self._told_of(), average)
        notes = self.caveats
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
        if "spectral" not in self._state:
            raise InputError("spectral", "must have been kept", False)
        return (self._state["spectral_mean"] if self.runs else self._state["spectral"]).clone()

    def measured(self) -> Tensor:
        """How often each record was measured, over all runs, (N,)."""
        return self._state["measured_total"] + self._state["measured"]

    def _told_of(self) -> Tensor:
        """How often in the runs that `trace` speaks of, (N,): 0 for a record first measured in the present one."""
        return self._state["measured_total"] if self.runs else self._state["measured"]

    def most_exposed(self, k: int = 10, rule: str | None = None) -> list[tuple[int, float]]:
        """The k records with the lowest floors among those measured: (index, floor), lowest first.

        Those never measured have no floor and are left out: `summary()["never_measured"]` counts them."""
        dfil = self.dfil(rule).masked_fill(self._told_of() == 0, -1.0)
        top = torch.topk(dfil, min(whole("k", k), int((dfil >= 0).sum())))
        floors = self.mse_floor(rule).value
        return [(int(i), float(floors[int(i)])) for i in top.indices]

    def summary(self) -> dict[str, Any]:
        """Floors at the most exposed record and at quantiles, for every rule. Depends on the data: confidential.

        Quantiles are over the records that were measured. After two runs "floor_at_upper_limit" is the lowest floor of
        all at its upper limit, or None where some record has no limit: "no_limit_because" says why."""
        names = {"lowest": 0.0, "1 %": 0.01, "10 %": 0.1, "median": 0.5, "90 %": 0.9}
        measured = self._told_of().cpu()
        seen = (measured > 0).numpy()
        floors: dict[str, Any] = {}
        for rule in self.account.rules:
            value = self._floor(rule)[0].value[seen]
            at = np.quantile(value, list(names.values()), method="lower") if seen.any() else [0.0] * len(names)
            floors[rule] = {name: float(v) for name, v in zip(names, at, strict=True)}
        found: dict[str, Any] = {"confidential": True, "runs": self.runs, "floors": floors}
        found["measured_per_record"] = {"least": int(measured.min()), "median": float(measured.double().median())}
        found["never_measured"] = int((~seen).sum())
        found["caveats"] = list(self.caveats)
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
        private part is a module's output they must be given."""
        if self.needs_range and not {"low", "high"} <= space.keys():
            why = "and high must be given: the private part is a module's output, and nothing says that it is in [0, 1]"
            raise InputError("low", why, space.get("low"))
        return guarantee(self.account.mechanism(), dim=self.account.features, **space)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """A copy of the ledger's tensors, on the CPU."""
        return {name: value.cpu().clone() for name, value in (self._state | self.features.state).items()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Put back what `state` gave; shapes are checked before anything is changed."""
        for name, value in self._state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                got = tuple(tensors[name].shape) if name in tensors else None
                raise InputError(name, f"must be a tensor of shape {tuple(value.shape)}", got)
        self.features.check(tensors)
        for name, value in self._state.items():
            value.copy_(tensors[name])
        self.features.restore(tensors)
        self.features.first = runs == 0
        self.runs = whole("runs", runs, at_least=0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger: safetensors, atomically, mode 0600, marked confidential."""
        kept = [] if self.rows is None else self.rows.tolist()
        about = {"account": asdict(self.account), "runs": self.runs, "diagonal": self.diagonal, "rows": kept}
        about["caveats"], about["needs_range"] = list(self.caveats), self.needs_range
        if self.features.choice is not None:
            about["choice"], about["followed"] = asdict(self.features.choice), self.features.followed
        tensors = {**self.state(), "feature_scale": self.feature_scale}
        write_whole(path, sealed(tensors, {"ledger": about}), mode=CONFIDENTIAL)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FisherAccountant:
        """Read a ledger that `save` wrote; anything else is refused with the reason."""
        try:
            tensors, facts = unsealed(path)
        except Unreadable as reason:
            raise InputError("path", f"must be a ledger that reconbound saved ({reason})", os.fspath(path)) from None
        if "ledger" not in facts:
            raise InputError("path", "must be a ledger, not another file of reconbound's", os.fspath(path))
        about = facts["ledger"]
        account = Account(**{**about["account"], "rules": tuple(about["account"]["rules"])})
        diagonal = about["rows"] if about["diagonal"] == "some" else about["diagonal"]
        if about["diagonal"] == "chosen":
            diagonal = Chosen(**about["choice"])
        scale = tensors.pop("feature_scale")
        ledger = cls(account, diagonal=diagonal, spectral="spectral" in tensors, feature_scale=scale, device=device)
        ledger.restore(tensors, about["runs"])
        ledger.features.followed = bool(about.get("followed", False))
        ledger.caveats, ledger.needs_range = tuple(about.get("caveats", ())), bool(about.get("needs_range", False))
        return ledger

    def _rule(self, rule: str | None) -> int:
        return 0 if rule is None else self.account.rules.index(choice("rule", rule, self.account.rules))

    def _unit(self) -> float:
        return float(self.feature_scale.mean()) ** 2


def joined(*caveats: Sequence[str]) -> tuple[str, ...]:
    """All of them, each once, in order."""
    return tuple(dict.fromkeys(c for some in caveats for c in some))


_AVERAGED = ("variance", "spectral")


def _scale(feature_scale: float | Sequence[float] | Tensor, features: int) -> Tensor:
    scale = torch.as_tensor(feature_scale, dtype=torch.float64).flatten().cpu()
    if scale.numel() not in (1, features) or not bool((scale > 0).all()) or not bool(scale.isfinite().all()):
        raise InputError("feature_scale", f"must be one positive number, or {features} of them", feature_scale)
    return scale


def _empty(account: Account, spectral: bool, device: torch.device) -> dict[str, Tensor]:
    n, shape = account.records, (len(account.rules), account.records)

    def zeros(*size: int, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.zeros(*size, dtype=dtype, device=device)

    state = {name: zeros(*shape) for name in ("trace", "mean", "spread", "variance", "variance_mean", "last")}
    state |= {name: zeros(n, dtype=torch.int64) for name in ("measured", "measured_total")}
    state["rare"] = zeros(1, dtype=torch.bool)
    if spectral:
        state |= {"spectral": zeros(n), "spectral_mean": zeros(n)}
    return state


__all__ = ["FEWEST", "WIDEST", "Account", "Chosen", "FisherAccountant"]
