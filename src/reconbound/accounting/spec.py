"""The account of a training (the mechanism, the size of the data, subsampling factors), and checks of what is measured.

No run is counted twice: a fingerprint of 128 bits names each, which a learner derives one-way from its secret seed, so
that the same training has the same one wherever it is measured. Other runs get a random one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, flag, number, plain_number, warn_user, whole
from reconbound.accounting.amplification import PoissonTable, paper_delta, paper_kappa
from reconbound.divergences import sensitivity
from reconbound.fisher import StepInformation
from reconbound.fisher.clipping import CLIPS, Clip
from reconbound.fisher.worlds import StepDistances
from reconbound.mechanisms import SampledGaussian
from reconbound.mechanisms.sampled_gaussian import fewest_batches
from reconbound.validate.model import ReconboundWarning

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


def checked_weight(account: Account, weight: float, stratified: bool) -> float:
    """Returns the weight of a measurement; refuses one below the sample rate, and blocks of shuffled epochs."""
    rate = account.sample_rate
    if number("weight", weight, above=0.0) < rate * (1 - 1e-9):
        why = f"must be at least the sample rate, {rate:g}, which is divided by a chance to make it"
        raise InputError("weight", why, weight)
    if flag("stratified", stratified) and account.sampler == "shuffle":
        raise InputError("stratified", "must be False with shuffled epochs: measure the batches themselves", True)
    return float(weight)


Found = TypeVar("Found", StepInformation, StepDistances)


def checked_records(given: Any, found: Found, kind: type[Found], records: int) -> tuple[Tensor, Found]:
    """Returns distinct indices, one for each record measured, and the measurement; refuses others.

    Masked rows are left out: they are padding, not measurements.
    """
    if not isinstance(found, kind):
        function = "step_information" if kind is StepInformation else "step_distances"
        raise InputError("found", f"must be what {function} returns", found)
    kept = None if found.mask is None else torch.nonzero(found.mask).flatten()
    indices = _checked_indices(given, len(found.clipped_norm), records, kept)
    return indices, found if kept is None else _rows_of(found, kept)


def checked_norms(given: Any, norms: Any, account: Account) -> tuple[Tensor, Tensor]:
    """Returns distinct indices, and the clipped norm of each; refuses others.

    Args:
        given: the indices.
        norms: the clipped norms.
        account: of the ledger.
    """
    if not isinstance(norms, Tensor) or norms.dim() != 1 or not norms.is_floating_point():
        raise InputError("clipped_norm", "must be a tensor of norms, (B,)", getattr(norms, "shape", norms))
    check_clipped("clipped_norm", norms, account)
    return _checked_indices(given, len(norms), account.records), norms.detach()


def check_clipped(name: str, norms: Tensor, account: Account) -> None:
    """Refuses norms that are not finite, or that the account's clip would not let through."""
    largest = account.max_grad_norm * sensitivity(account.clip) * (1 + 1e-4)
    bad = torch.nonzero(~((norms >= 0) & (norms <= largest))).flatten()
    if len(bad):
        why = f"must be norms after clipping, from 0 to {largest:g}"
        raise InputError(name, why, float(norms[bad[0]]))


def _checked_indices(given: Any, size: int, records: int, kept: Tensor | None = None) -> Tensor:
    """Returns `size` indices of distinct records, or those in the places `kept`; refuses others."""
    indices = given
    with suppress(TypeError, ValueError, RuntimeError):  # a list or an array of whole numbers will do
        indices = torch.as_tensor(given)
    if isinstance(indices, Tensor) and indices.numel() == 0 and size == 0:
        return indices.to(torch.int64).flatten()
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dtype == torch.bool:
        raise InputError("indices", "must be a tensor of record indices", getattr(given, "dtype", given))
    if tuple(indices.shape) != (size,):
        have = len(indices) if indices.dim() == 1 else tuple(indices.shape)
        raise InputError("indices", f"must be {size}, one for each record found", have)
    indices = indices if kept is None else indices[kept.cpu()]
    if indices.numel() == 0:
        return indices
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= records:
        raise InputError("indices", f"must lie between 0 and {records - 1}", low if low < 0 else high)
    if indices.unique().numel() != indices.numel():
        raise InputError("indices", "must name each record at most once", indices.tolist())
    return indices


def _rows_of(found: Found, kept: Tensor) -> Found:
    """Returns the measurement of these rows only."""
    changes: dict[str, Any] = {}
    for f in fields(found):
        value = getattr(found, f.name)
        if isinstance(value, Tensor):
            changes[f.name] = value[kept]
        elif f.name in ("other_norm", "squared_distance"):
            changes[f.name] = {name: x[kept] for name, x in value.items()}
    return replace(found, **changes)


def check_information(account: Account, indices: Tensor, found: StepInformation) -> None:
    """Raises an InputError for information of another mechanism or model than the account's, or not finite."""
    if found.features != account.features:
        raise InputError("found", f"must be about the account's {account.features} features", found.features)
    check_mechanism(account, found)
    numbers = torch.stack([x.double() for x in (found.across, found.along, found.across_error, found.clipped_norm)])
    bad = ~torch.isfinite(numbers).all(0) | (numbers[:2].sum(0) < 0)
    if bool(bad.any()):
        first = int(torch.nonzero(bad)[0])
        where = f"must have finite numbers, and no negative trace, of record {int(indices[first])}"
        raise InputError("found", where, [float(x) for x in numbers[:2, first]])


def check_mechanism(account: Account, found: StepInformation | StepDistances) -> None:
    """Refuses a measurement of another mechanism than the account's."""
    for name in ("noise_multiplier", "max_grad_norm", "clip"):
        given, wanted = getattr(found, name, None), getattr(account, name)
        if given is not None and given != wanted:
            raise InputError("found", f"must have been computed with the account's {name}, {wanted!r}", given)


def check_space(space: Mapping[str, Any], needs_range: bool, feature_scale: Tensor) -> None:
    """Refuses a guarantee without the range of a module's output; warns where its units are not the ledger's.

    Args:
        space: what `guarantee` is given about the private features.
        needs_range: whether the private part is not known to lie in [0, 1].
        feature_scale: of the ledger.
    """
    if needs_range and not ({"low", "high"} <= space.keys() or "radius" in space):
        why = "and high, or radius, must be given: the private part is a module's output, not known to be in [0, 1]"
        raise InputError("low", why, space.get("low"))
    if not {"low", "high", "radius"} & space.keys() and not bool((feature_scale == 1).all()):
        why = "the mechanism's floors are for features in [0, 1], this ledger's in the units of feature_scale"
        warn_user(f"{why}: give low and high in those, to compare them", ReconboundWarning)


_BYTES = 16  # of a fingerprint


class Fingerprints:
    """The fingerprints of a ledger's finished runs, and of the run under way once anything is known of it."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.current: str | None = None

    def begin(self, fingerprint: str) -> None:
        """Names the run under way; refuses one that is among the finished ones."""
        if not isinstance(fingerprint, str) or re.fullmatch(f"[0-9a-f]{{{2 * _BYTES}}}", fingerprint) is None:
            raise InputError("fingerprint", f"must be {2 * _BYTES} hexadecimal digits", fingerprint)
        if fingerprint in self.finished:
            raise InputError("run", "must be another one: it is in the ledger already, from a merge", "the same one")
        self.current = fingerprint

    def touch(self) -> None:
        """Gives the run under way a random fingerprint, if it has none."""
        if self.current is None:
            self.current = secrets.token_hex(_BYTES)

    def finish(self) -> None:
        """Counts the run under way as finished."""
        self.touch()
        assert self.current is not None
        self.finished.append(self.current)
        self.current = None

    def check_apart(self, other: Fingerprints) -> None:
        """Refuses another ledger's finished runs if one of them is here, finished or under way."""
        double = len(set(other.finished) & {*self.finished, self.current})
        if double:
            some = "1 of its runs is" if double == 1 else f"{double} of its runs are"
            raise InputError("other", f"must hold other runs: {some} in this ledger already", f"{len(other.finished)}")

    def tensor(self) -> Tensor:
        """Returns the fingerprints as bytes, (R or R + 1, 16), the run under way last."""
        known = [*self.finished, *([] if self.current is None else [self.current])]
        return torch.tensor([list(bytes.fromhex(one)) for one in known], dtype=torch.uint8).reshape(-1, _BYTES)

    def restored(self, tensors: Mapping[str, Tensor], runs: int) -> Fingerprints:
        """Returns the fingerprints that belong to a ledger's tensors.

        Args:
            tensors: of the ledger.
            runs: the number of its finished runs.
        """
        found, kept = Fingerprints(), tensors.get("fingerprints")
        shapes = [(count, _BYTES) for count in (runs, runs + 1)]
        if kept is None:
            raise InputError("tensors", "must hold fingerprints, as `state` returns", f"{', '.join(tensors) or 'none'}")
        if kept.dtype != torch.uint8 or tuple(kept.shape) not in shapes:
            raise InputError("fingerprints", f"must be bytes of shape {shapes[0]} or {shapes[1]}", tuple(kept.shape))
        known = [bytes(row).hex() for row in kept.tolist()]
        found.finished, found.current = known[:runs], known[runs] if len(known) > runs else None
        return found
