"""FisherAccountant: what a whole training run told about each record, summed over steps and averaged over runs.

Composition (Theorem 3): the information of the run is the sum over steps of the expected conditional information, so
a run's sum is an unbiased estimate of it, and runs are averaged. Subsampling: the exact Poisson factors, the fixed-
size factor, or the paper's κ for comparison. The ledger is as secret as the data: it is saved for its owner's eyes
alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from scipy.stats import t as student
from torch import Tensor

from ._check import InputError, choice, number, whole
from ._files import CONFIDENTIAL, write_whole
from .amplification import PoissonTable, paper_delta, paper_kappa
from .bounds import Bound, from_trace, per_feature
from .calculator import Guarantee, guarantee
from .fisher import StepInformation
from .mechanisms import SampledGaussian
from .renyi import sensitivity

RULES = ("exact", "fixed", "paper", "none")
_DEFAULT_RULE = {"poisson": "exact", "fixed": "fixed", "shuffle": "none"}


@dataclass(frozen=True)
class Account:
    """What is accounted: the mechanism, the data's size, and the rules under which the ledger is kept.

    Attributes:
        records, features: N and d. steps: T of one run. noise_multiplier, max_grad_norm, sample_rate, sampler, clip:
        the mechanism's, as in PrivateSGD. rules: the subsampling factors to keep ledgers for; the first is the one
        that answers by default. Empty: "exact" for Poisson batches, "fixed" for fixed-size ones, "none" (factor 1)
        for shuffled epochs.
    """

    records: int
    features: int
    steps: int
    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    sampler: str = "poisson"
    clip: str = "smooth"
    rules: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("records", "features", "steps"):
            whole(name, getattr(self, name))
        number("noise_multiplier", self.noise_multiplier, above=0.0)
        number("max_grad_norm", self.max_grad_norm, above=0.0)
        number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        choice("sampler", self.sampler, tuple(_DEFAULT_RULE))
        sensitivity(self.clip)
        if not self.rules:
            object.__setattr__(self, "rules", (_DEFAULT_RULE[self.sampler],))
        for rule in self.rules:
            choice("rules", rule, RULES)
            if rule in ("exact", "fixed") and _DEFAULT_RULE[self.sampler] != rule:
                raise InputError("rules", f"must not claim the factor of other batches than {self.sampler} ones", rule)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise on the sum, σC."""
        return self.noise_multiplier * self.max_grad_norm

    def mechanism(self) -> SampledGaussian:
        """The same run for the calculator; shuffled epochs are steps without sampling, one for each epoch."""
        if self.sampler == "shuffle":
            epochs = max(1, math.ceil(self.steps * self.sample_rate))
            return SampledGaussian(self.noise_multiplier, 1.0, epochs, self.clip)
        return SampledGaussian(self.noise_multiplier, self.sample_rate, self.steps, self.clip, self.sampler)


class FisherAccountant:
    """A ledger of Fisher information for every record of a data set, over the steps of a run and over runs.

    Args:
        account: what is accounted.
        diagonal: per-feature ledgers: "none", "all" (records × features numbers), "average" (over records), or the
        indices of
            the records to keep them for.
        spectral: also the sum of the steps' spectral norms, an upper bound of the run's.
        feature_scale: size of one unit of the model's input in the data's own units, one number or one per feature:
        floors
            for single features are given in data units through it.
        device: where the ledger lives.

    Guarantee: `dfil` estimates without bias an upper bound of Tr I(z)/d for an attacker who knows all other records and
    sees every noisy step; with rule "exact" it is that value itself. One run is one draw of a random sum: for a
    confidence statement use `upper` after two runs or more.
    """

    def __init__(
        self,
        account: Account,
        *,
        diagonal: str | Sequence[int] | Tensor = "none",
        spectral: bool = False,
        feature_scale: float | Sequence[float] | Tensor = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.account = account
        self.device = torch.device(device)
        self.rows = _diagonal_rows(diagonal, account.records)
        self.diagonal = diagonal if isinstance(diagonal, str) else "some"
        self.feature_scale = torch.as_tensor(feature_scale, dtype=torch.float64).flatten()
        self.runs = 0
        self._state = _empty(account, self.diagonal, self.rows, spectral, self.device)
        self._factors = _Factors(account, self.device)
        self._place = None if self.rows is None else _places(self.rows, account.records, self.device)

    # --- writing ---------------------------------------------------------------------

    def add(self, indices: Tensor, found: StepInformation, *, weight: float = 1.0) -> None:
        """Add one step's information about these records.

        Args:
            indices: which records, (B,), each at most once.
            found: the step's information about them.
            weight: 1 when the records are those drawn into the batch; L·q for records measured once in L steps.
        """
        state, account = self._state, self.account
        if indices.numel() == 0:
            return
        if int(indices.max()) >= account.records or int(indices.min()) < 0:
            bad = int(indices.max() if int(indices.max()) >= account.records else indices.min())
            raise InputError("indices", f"must lie between 0 and {account.records - 1}", bad)
        index = indices.to(self.device)
        for k, rule in enumerate(account.rules):
            across, along = self._factors(rule, found.clipped_norm)
            state["trace"][k].index_add_(
                0, index, _ledger(weight * (across * found.across + along * found.along), self)
            )
            if k == 0:
                error = weight * across * found.across_error
                state["variance"].index_add_(0, index, _ledger(error.square(), self))
                if "spectral" in state and found.spectral is not None:
                    largest = torch.maximum(across, along)
                    state["spectral"].index_add_(0, index, _ledger(weight * largest * found.spectral, self))
                self._add_diagonal(index, found, weight * across, weight * along)
        state["measured"].index_add_(0, index, torch.ones_like(index))

    def _add_diagonal(self, index: Tensor, found: StepInformation, across: Tensor, along: Tensor) -> None:
        if "diagonal" not in self._state or found.diagonal_across is None or found.diagonal_along is None:
            return
        per_feature = across[:, None] * found.diagonal_across.flatten(1) + along[
            :, None
        ] * found.diagonal_along.flatten(1)
        per_feature = per_feature.to(self._state["diagonal"])
        if self.diagonal == "average":
            self._state["diagonal"] += per_feature.sum(0, keepdim=True) / self.account.records
        elif self._place is None:
            self._state["diagonal"].index_add_(0, index, per_feature)
        else:
            place = self._place[index]
            kept = place >= 0
            self._state["diagonal"].index_add_(0, place[kept], per_feature[kept])

    def finish_run(self) -> None:
        """Close the current run: fold it into the averages over runs and start an empty ledger."""
        state = self._state
        self.runs += 1
        delta = state["trace"] - state["mean"]
        state["mean"] += delta / self.runs
        state["spread"] += delta * (state["trace"] - state["mean"])
        for name in ("variance", "spectral", "diagonal"):
            if name in state:
                state[f"{name}_mean"] += (state[name] - state[f"{name}_mean"]) / self.runs
        state["measured_total"] += state["measured"]
        for name in ("trace", "variance", "spectral", "diagonal", "measured"):
            if name in state:
                state[name].zero_()

    def merge(self, other: FisherAccountant) -> None:
        """Take in the finished runs of another ledger of the same account (other machines, other seeds)."""
        if other.account != self.account or other._state.keys() != self._state.keys():
            raise InputError("other", "must be a ledger of the same account", other.account)
        if other.runs == 0:
            return
        mine, theirs, total = self._state, other._state, self.runs + other.runs
        delta = theirs["mean"].to(self.device) - mine["mean"]
        mine["spread"] += theirs["spread"].to(self.device) + delta.square() * (self.runs * other.runs / total)
        mine["mean"] += delta * (other.runs / total)
        for name in ("variance_mean", "spectral_mean", "diagonal_mean"):
            if name in mine:
                mine[name] += (theirs[name].to(self.device) - mine[name]) * (other.runs / total)
        mine["measured_total"] += theirs["measured_total"].to(self.device)
        self.runs = total

    # --- reading -----------------------------------------------------------------------

    def trace(self, rule: str | None = None) -> Tensor:
        """Tr I of a run for each record, (N,): the mean of finished runs, or the current run before the first ends."""
        k = self._rule(rule)
        return (self._state["mean"] if self.runs else self._state["trace"])[k].clone()

    def dfil(self, rule: str | None = None) -> Tensor:
        """dFIL = Tr I/d of each record, (N,)."""
        return self.trace(rule) / self.account.features

    def upper(self, rule: str | None = None, confidence: float = 0.95) -> Tensor:
        """Upper confidence limit of each record's dFIL over runs, (N,); needs two runs or more.

            U = mean + t_{0.99, R−1} sd/√R        (for 95 %: the sums are skewed, so the nominal 99 % quantile is taken)

        Guarantee: covers each record's dFIL in at least 95 % of cases in simulation; its maximum over records is an
        upper limit for the largest dFIL of all.
        """
        if self.runs < 2:
            raise InputError("runs", "must be at least 2 for a confidence limit", self.runs)
        tail = 1 - (1 - number("confidence", confidence, above=0.0, below=1.0)) / 5
        quantile = float(student.ppf(tail, self.runs - 1))
        return self.dfil(rule) + quantile * self.standard_error(rule)

    def standard_error(self, rule: str | None = None) -> Tensor:
        """Standard error of each record's dFIL: over runs, or (one run) of the probes alone."""
        d = self.account.features
        if self.runs > 1:
            spread = self._state["spread"][self._rule(rule)].clamp(min=0)
            return (spread / (self.runs * (self.runs - 1))).sqrt() / d
        return (self._state["variance_mean"] if self.runs else self._state["variance"]).sqrt() / d

    def mse_floor(self, rule: str | None = None) -> Bound:
        """1/dFIL of each record, in the model's input units: Theorem 2, for unbiased attackers."""
        name = self.account.rules[self._rule(rule)]
        bound = from_trace(self.trace(rule).cpu().numpy(), self.account.features)
        note = {"exact": "exact Poisson factors", "fixed": "the fixed-size factor", "none": "no amplification"}
        paper = "the paper's κ: comparison, no guarantee"
        runs = f"{self.runs} run(s)" if self.runs else "a run in progress"
        assumes = (note.get(name, paper), f"mean over {runs}", f"{self.account.clip} clipping")
        return Bound("dfil", bound.value, bound.theorem, "unbiased", bound.adjacency, self.account.sampler, assumes)

    def feature_floors(self) -> Bound:
        """1/I_jj of each record kept and feature, (kept, d), in the squares of the data's own units."""
        if "diagonal" not in self._state:
            raise InputError("diagonal", "must have been kept to speak of features", self.diagonal)
        kept = (self._state["diagonal_mean"] if self.runs else self._state["diagonal"]).double().cpu()
        return per_feature((kept / self.feature_scale.square()).numpy())

    def spectral_bound(self) -> Tensor:
        """Upper bound of each record's spectral norm ‖I‖₂, (N,)."""
        if "spectral" not in self._state:
            raise InputError("spectral", "must have been kept", False)
        return (self._state["spectral_mean"] if self.runs else self._state["spectral"]).clone()

    def measured(self) -> Tensor:
        """How often each record was measured, over all runs, (N,)."""
        return self._state["measured_total"] + self._state["measured"]

    def most_exposed(self, k: int = 10, rule: str | None = None) -> list[tuple[int, float]]:
        """The k records with the lowest floors: (index, floor), lowest first."""
        dfil = self.dfil(rule)
        top = torch.topk(dfil, min(whole("k", k), len(dfil)))
        return [(int(i), 1 / float(v) if v > 0 else math.inf) for v, i in zip(top.values, top.indices, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Floors at the most exposed record and at quantiles, for every rule. Depends on the data: confidential."""
        quantiles = torch.tensor([1.0, 0.99, 0.9, 0.5, 0.1], dtype=torch.float64)
        names = ("lowest", "1 %", "10 %", "median", "90 %")
        floors = {}
        for rule in self.account.rules:
            at = torch.quantile(self.dfil(rule).cpu(), quantiles)
            floors[rule] = {name: (1 / float(v) if v > 0 else None) for name, v in zip(names, at, strict=True)}
        measured = self.measured()
        found: dict[str, Any] = {"confidential": True, "runs": self.runs, "floors": floors}
        found["measured_per_record"] = {"least": int(measured.min()), "median": float(measured.double().median())}
        dfil, error = self.dfil(), self.standard_error()
        found["relative_standard_error_median"] = float((error / dfil.clamp(min=1e-300)).median())
        if self.runs > 1:
            worst = float(self.upper().max())
            found["floor_at_upper_limit"] = 1 / worst if worst > 0 else None
        return found

    def guarantee(self, **space: Any) -> Guarantee:
        """What the mechanism guarantees without looking at the data: all floors of the calculator (may be
        published)."""
        return guarantee(self.account.mechanism(), dim=self.account.features, **space)

    # --- keeping -----------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The ledger's tensors, on the CPU."""
        return {name: value.cpu().contiguous() for name, value in self._state.items()}

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Put back what `state` gave; shapes are checked."""
        for name, value in self._state.items():
            if name not in tensors or tensors[name].shape != value.shape:
                got = tuple(tensors[name].shape) if name in tensors else None
                raise InputError(name, f"must be a tensor of shape {tuple(value.shape)}", got)
            value.copy_(tensors[name])
        self.runs = whole("runs", runs, at_least=0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the ledger: safetensors, atomically, mode 0600, marked confidential."""
        from safetensors.torch import save

        kept = [] if self.rows is None else self.rows.tolist()
        about = {"account": asdict(self.account), "runs": self.runs, "diagonal": self.diagonal, "rows": kept}
        metadata = {"reconbound": json.dumps(about), "confidential": "per-record leakage: keep it secret"}
        tensors = {**self.state(), "feature_scale": self.feature_scale}
        write_whole(path, save(tensors, metadata), mode=CONFIDENTIAL)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: torch.device | str = "cpu") -> FisherAccountant:
        """Read a ledger that `save` wrote; anything else is refused with the reason."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(Path(path), framework="pt") as file:
                about = json.loads((file.metadata() or {})["reconbound"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, KeyError, json.JSONDecodeError) as reason:
            raise InputError(
                "path", f"must be a ledger that reconbound saved ({type(reason).__name__})", str(path)
            ) from None
        account = Account(**{**about["account"], "rules": tuple(about["account"]["rules"])})
        diagonal = about["rows"] if about["diagonal"] == "some" else about["diagonal"]
        scale = tensors.pop("feature_scale")
        ledger = cls(account, diagonal=diagonal, spectral="spectral" in tensors, feature_scale=scale, device=device)
        ledger.restore(tensors, about["runs"])
        return ledger

    def _rule(self, rule: str | None) -> int:
        return 0 if rule is None else self.account.rules.index(choice("rule", rule, self.account.rules))


class _Factors:
    """The two subsampling factors (across, along) of each rule, for records with given clipped gradient norms."""

    def __init__(self, account: Account, device: torch.device) -> None:
        self.noise, self.reach = account.noise, sensitivity(account.clip) / account.noise_multiplier
        self.table = PoissonTable(account.sample_rate).prepare(device)
        delta = paper_delta(account.records, account.steps)
        self.kappa = paper_kappa(account.noise_multiplier, account.sample_rate, delta)

    def __call__(self, rule: str, clipped_norm: Tensor) -> tuple[Tensor, Tensor]:
        m = clipped_norm / self.noise
        if rule == "exact":
            return self.table(m)
        if rule == "fixed":
            k = self.table.largest(m + self.reach)
        else:
            k = torch.full_like(m, self.kappa if rule == "paper" else 1.0)
        return k, k


def _ledger(values: Tensor, accountant: FisherAccountant) -> Tensor:
    return values.to(device=accountant.device, dtype=torch.float64)


def _diagonal_rows(diagonal: str | Sequence[int] | Tensor, records: int) -> Tensor | None:
    if isinstance(diagonal, str):
        choice("diagonal", diagonal, ("none", "all", "average"))
        return None
    rows = torch.as_tensor(diagonal, dtype=torch.int64).flatten()
    if rows.numel() == 0 or int(rows.min()) < 0 or int(rows.max()) >= records or rows.unique().numel() != rows.numel():
        raise InputError("diagonal", f"must be distinct record indices below {records}", diagonal)
    return rows


def _places(rows: Tensor, records: int, device: torch.device) -> Tensor:
    place = torch.full((records,), -1, dtype=torch.int64)
    place[rows] = torch.arange(len(rows))
    return place.to(device)


def _empty(
    account: Account, diagonal: str, rows: Tensor | None, spectral: bool, device: torch.device
) -> dict[str, Tensor]:
    n, shape = account.records, (len(account.rules), account.records)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.float64, device=device)

    state = {name: zeros(*shape) for name in ("trace", "mean", "spread")}
    state |= {name: zeros(n) for name in ("variance", "variance_mean")}
    state |= {name: torch.zeros(n, dtype=torch.int64, device=device) for name in ("measured", "measured_total")}
    if spectral:
        state |= {"spectral": zeros(n), "spectral_mean": zeros(n)}
    if diagonal != "none":
        kept = {"all": n, "average": 1}.get(diagonal, 0 if rows is None else len(rows))
        for name in ("diagonal", "diagonal_mean"):
            state[name] = torch.zeros(kept, account.features, dtype=torch.float32, device=device)
    return state
