"""The account of a training: the mechanism, the size of the data, and the subsampling factors of each rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, plain_number, whole
from reconbound.accounting.amplification import PoissonTable, paper_delta, paper_kappa
from reconbound.divergences import sensitivity
from reconbound.fisher.clipping import CLIPS, Clip
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.sampled_gaussian import fewest_batches

RULES = ("exact", "fixed", "paper", "none")
_DEFAULT_RULE = {"poisson": "exact", "fixed": "fixed", "shuffle": "none"}


@dataclass(frozen=True)
class MechanismSpec:
    """The mechanism of a private training: the numbers that decide its guarantee, apart from the number of steps.

    Attributes:
        noise_multiplier: σ, the standard deviation of the noise on the sum over max_grad_norm.
        max_grad_norm: C, the clip norm.
        sample_rate: q, the expected share of the records in a batch.
        sampler: "poisson", "fixed" or "shuffle".
        clip: "smooth" or "hard".
        rules: subsampling factors to keep ledgers for; the first answers by default. Empty: "exact" for Poisson
            batches, "fixed" for fixed-size ones, "none" (factor 1) for shuffled epochs. None: no Fisher information is
            measured, for models and private parts without derivatives; divergences (`worlds`) are.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    sampler: str = "poisson"
    clip: Clip = "smooth"
    rules: tuple[str, ...] | None = ()

    def __post_init__(self) -> None:
        for name, most in (("noise_multiplier", None), ("max_grad_norm", None), ("sample_rate", 1.0)):
            object.__setattr__(self, name, plain_number(name, getattr(self, name), above=0.0, at_most=most))
        choice("sampler", self.sampler, tuple(_DEFAULT_RULE))
        choice("clip", self.clip, CLIPS)
        if self.rules is not None:
            if not isinstance(self.rules, tuple | list):
                raise InputError("rules", f"must be a tuple of names ({', '.join(RULES)})", self.rules)
            object.__setattr__(self, "rules", tuple(choice("rules", rule, RULES) for rule in self.rules))

    @property
    def noise(self) -> float:
        """Returns the standard deviation of the noise on the sum, σC."""
        return self.noise_multiplier * self.max_grad_norm


@dataclass(frozen=True)
class Account(MechanismSpec):
    """A mechanism on data of a given size, for a given number of steps: what a ledger is kept for.

    Attributes:
        records: N, the number of training records.
        features: d, the number of private features of a record.
        steps: T, of one run.
        batches_per_epoch: of shuffled epochs, the number of steps of one, as len(loader). None: ⌊1/q⌋, as of a loader
            that drops the last batch: it counts at least as many epochs as any other.
    """

    rules: tuple[str, ...] | None = ()
    _: KW_ONLY
    records: int
    features: int
    steps: int
    batches_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("records", "features", "steps"):
            object.__setattr__(self, name, whole(name, getattr(self, name)))
        super().__post_init__()
        if self.batches_per_epoch is not None:
            object.__setattr__(self, "batches_per_epoch", whole("batches_per_epoch", self.batches_per_epoch))
        if self.rules is not None:
            object.__setattr__(self, "rules", self.rules or (_DEFAULT_RULE[self.sampler],))
        for rule in self.kept_rules:
            if self.kept_rules.count(rule) > 1:
                raise InputError("rules", "must be distinct", self.rules)
            if rule in ("exact", "fixed") and _DEFAULT_RULE[self.sampler] != rule:
                raise InputError("rules", f"must not claim the factor of other batches than {self.sampler} ones", rule)

    @property
    def kept_rules(self) -> tuple[str, ...]:
        """Returns the rules that ledgers of Fisher information are kept for; none where it is not measured."""
        return self.rules or ()

    def mechanism(self) -> SampledGaussian:
        """Returns the same run for the calculator; shuffled epochs are steps without sampling, one for each epoch."""
        if self.sampler == "shuffle":
            per_epoch = self.batches_per_epoch or fewest_batches(self.sample_rate)
            return SampledGaussian.shuffled(self.noise_multiplier, per_epoch, self.steps, self.clip)
        return SampledGaussian(self.noise_multiplier, self.sample_rate, self.steps, self.clip, self.sampler)


class Factors:
    """The two subsampling factors (across, along) of each rule, for records with given clipped gradient norms.

    Args:
        accounts: of one training, for norms of shape (B,); or of K, for norms of shape (K, B), which share everything
            but the noise and the clip norm.
        device: where the norms are.
    """

    def __init__(self, accounts: Sequence[Account], device: torch.device) -> None:
        self.accounts, self.device, first = tuple(accounts), device, accounts[0]
        self.noise = self._column([a.noise for a in accounts])
        self.reach = self._column([sensitivity(a.clip) / a.noise_multiplier for a in accounts])
        if {"exact", "fixed"} & set(first.kept_rules):
            self.table = PoissonTable(first.sample_rate).prepare(device, torch.float64)
        if "paper" in first.kept_rules:
            self.kappa = self._kappa(first.steps)

    def _column(self, values: Sequence[float]) -> Tensor:
        """Returns a number for each training, (K, 1), or a scalar for one."""
        column = torch.tensor(values, dtype=torch.float64, device=self.device)[:, None]
        return column[0, 0] if len(values) == 1 else column

    def _kappa(self, steps: int) -> Tensor:
        delta, bounds = paper_delta(self.accounts[0].records, steps), {"smooth": 1.115, "hard": 1.0}
        own = [(a.noise_multiplier, a.sample_rate, bounds[a.clip]) for a in self.accounts]
        return self._column([paper_kappa(noise, rate, delta, clip_bound=bound) for noise, rate, bound in own])

    def kappa_ratio(self, steps: int) -> Tensor:
        """Returns κ(steps)/κ(T): the paper's factor depends on the number of steps, over which it splits its δ."""
        return self._kappa(steps) / self._kappa(self.accounts[0].steps)

    def __call__(self, rule: str, clipped_norm: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the factors of this rule at these norms, of the norms' shape.

        Args:
            rule: one of the account's.
            clipped_norm: ‖g̃‖ of each record.
        """
        m = clipped_norm.to(self.device, torch.float64) / self.noise
        if rule == "exact":
            return self.table(m)
        if rule == "fixed":
            k = self.table.largest(m + self.reach)
        else:
            k = self.kappa.expand_as(m) if rule == "paper" else torch.ones_like(m)
        return k, k


def checked_device(device: Any) -> torch.device:
    """Returns the device of this name; refuses a name of no device."""
    if not isinstance(device, str | torch.device):
        raise InputError("device", "must be a torch.device or its name, such as cpu or cuda", device)
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as reason:
        why = str(reason).split("\n")[0]
        raise InputError("device", f"must be a device of this machine ({why})", device) from None
    return found


def checked_scale(feature_scale: float | Sequence[float] | Tensor, features: int) -> Tensor:
    """Returns the size of one input unit in the data's units, (1,) or (d,), float64.

    Args:
        feature_scale: one number, or one per feature.
        features: d.
    """
    try:
        scale = torch.as_tensor(feature_scale, dtype=torch.float64).flatten().cpu()
        if scale.numel() in (1, features) and bool((scale > 0).all()) and bool(scale.isfinite().all()):
            return scale
    except (TypeError, ValueError, RuntimeError, OverflowError):  # not numbers at all
        pass
    raise InputError("feature_scale", f"must be one positive number, or {features} of them", feature_scale)


def checked_counts(name: str, counts: Any) -> tuple[int, ...]:
    """Returns ascending step counts as a tuple; refuses others.

    Args:
        name: of the argument.
        counts: what was given for it.
    """
    if isinstance(counts, str) or not isinstance(counts, Sequence):
        raise InputError(name, "must be a list of step counts", counts)
    found = tuple(whole(name, count) for count in counts)
    if any(b <= a for a, b in pairwise(found)):
        raise InputError(name, "must be increasing step counts", counts)
    return found
