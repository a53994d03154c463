"""dp-accounting's DpEvents as releases: what each kind costs, and its privacy loss distribution.

PLDAccountant 0.6 leaves what is not private at all out of its distribution (only a flag records it), counts a
self-composed randomised response once, and has one grid for large and small losses: each release is built here, and
dp-accounting composes them (tests/mechanisms/test_dp_accounting.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.pure_releases import (
    DiscreteLaplaceRelease,
    LaplaceRelease,
    ResponseRelease,
    SampledLaplaceRelease,
)
from reconbound.mechanisms.releases import FixedRelease, GaussianRelease, Release, Spread

#: A record that moves the sum by more deviations of the noise is told for sure.
LARGEST_M = 1e100
#: What is refused, and why.
_REFUSED = {
    "SampledWithReplacementDpEvent": "a record can be in a batch more than once, and no distribution is known",
    "SingleEpochTreeAggregationDpEvent": "it is accounted for neighbours with a zeroed record only",
    "RepeatAndSelectDpEvent": "only its Renyi divergences are known",
    "UnsupportedDpEvent": "nothing is known of it",
}


def event_releases(event: Any) -> list[tuple[Release, int]]:
    """Returns the releases that an event consists of, each with the number of its runs.

    Args:
        event: a DpEvent of dp-accounting.
    """
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        times = whole("count", event.count, at_least=0)
        return [(one, count * times) for one, count in event_releases(event.event) if times > 0]
    if isinstance(event, dp.ComposedDpEvent):
        return [pair for part in event.events for pair in event_releases(part)]
    kind = type(event).__name__
    if kind not in _KINDS:
        known = "must be made of " + ", ".join(sorted(_KINDS)) + " and compositions of them"
        why = f" ({kind}: {_REFUSED[kind]})" if kind in _REFUSED else ""
        raise InputError("event", known + why, kind)
    found = _KINDS[kind](event)
    return [] if found is None else [(found, 1)]


@dataclass(frozen=True)
class NonPrivate(Release):
    """A release that is not private at all; it counts as if every record were in it."""

    rate = 1.0
    order2 = math.inf
    kl = math.inf

    def known(self, replace_one: bool) -> bool:
        return False

    def spread(self, count: int, replace_one: bool) -> Spread:
        return Spread(math.inf, math.inf, math.inf)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        return None


@dataclass(frozen=True)
class MixtureRelease(Release):
    """Gaussian noise on a shift of random length (MixtureOfGaussiansDpEvent).

        by joint convexity: e^{D₂} ≤ Σ pᵢ e^{4cᵢ²/σ²},   KL ≤ Σ pᵢ cᵢ²/(2σ²)

    Attributes:
        deviation: σ.
        shifts: cᵢ.
        chances: pᵢ.
    """

    deviation: float
    shifts: tuple[float, ...]
    chances: tuple[float, ...]

    @property
    def rate(self) -> float:  # type: ignore[override]
        return min(math.fsum(p for c, p in zip(self.shifts, self.chances, strict=True) if c != 0), 1.0)

    @property
    def _m(self) -> np.ndarray:
        return np.asarray(self.shifts) / self.deviation

    @property
    def order2(self) -> float:  # type: ignore[override]
        with np.errstate(divide="ignore"):
            return max(float(np.logaddexp.reduce(np.log(self.chances) + 4 * self._m**2)), 0.0)

    @property
    def kl(self) -> float:  # type: ignore[override]
        return float(np.sum(np.asarray(self.chances) * self._m**2)) / 2

    def known(self, replace_one: bool) -> bool:
        return not replace_one and float(self._m.max()) <= privacy_loss.LARGEST_SHIFT

    def spread(self, count: int, replace_one: bool) -> Spread:
        largest = float(self._m.max())
        single = 12 * largest + largest**2  # dp-accounting needs a search for each point: an eighth of them
        return Spread(count * self.kl, count * 2 * self.kl, 8 * single)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        return distributions.from_mixture_gaussian_mechanism(
            self.deviation, self.shifts, self.chances, value_discretization_interval=grid
        )


@dataclass(frozen=True)
class ZCRelease(Release):
    """A release of which only (ξ, ρ)-zCDP under add/remove is known: D_α ≤ ξ + ρα. It has no distribution.

        D₂ ≤ (7/3)ξ + 8ρ under replace-one (docs/theory/compositions.md),   KL ≤ ξ + ρ

    Attributes:
        rho: ρ.
        xi: ξ.
    """

    rho: float
    xi: float = 0.0
    rate: ClassVar[float] = 1.0  # type: ignore[misc]

    @property
    def order2(self) -> float:  # type: ignore[override]
        return 7 / 3 * self.xi + 8 * self.rho

    @property
    def kl(self) -> float:  # type: ignore[override]
        return self.xi + self.rho

    def known(self, replace_one: bool) -> bool:
        return False

    def spread(self, count: int, replace_one: bool) -> Spread:
        return Spread(math.inf, math.inf, math.inf)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        return None


@dataclass(frozen=True)
class TruncatedRelease(Release):
    """A Gaussian step on a Poisson sample that is cut to a largest size (TruncatedSubsampledGaussianDpEvent).

    Given the others drawn, a record is in the batch with a chance of at most q, and its replacement in the same one. By
    joint convexity e^{D₂} − 1 ≤ q(e^{4m²} − 1) and KL ≤ qm²/2, for a release with a zero in the record's place.

    Attributes:
        records: N.
        rate: q.
        largest_batch: the size to which batches are cut.
        noise_multiplier: σ.
    """

    records: int
    rate: float
    largest_batch: int
    noise_multiplier: float

    @property
    def order2(self) -> float:  # type: ignore[override]
        whole_batch = renyi.order2_gaussian(1 / self.noise_multiplier)
        return float(
            np.logaddexp(math.log1p(-self.rate) if self.rate < 1 else -math.inf, math.log(self.rate) + whole_batch)
        )

    @property
    def kl(self) -> float:  # type: ignore[override]
        return self.rate / self.noise_multiplier**2 / 2

    def known(self, replace_one: bool) -> bool:
        return 1 / self.noise_multiplier <= privacy_loss.LARGEST_SHIFT

    def spread(self, count: int, replace_one: bool) -> Spread:
        m = 2 / self.noise_multiplier
        return Spread(count * min(self.order2, m * m), count * self.rate * m * m, 12 * m + m * m)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        import dp_accounting as dp
        from dp_accounting.pld import privacy_loss_distribution as distributions

        relations = dp.NeighboringRelation
        return distributions.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=self.records,
            sampling_probability=self.rate,
            truncated_batch_size=self.largest_batch,
            noise_multiplier=self.noise_multiplier,
            value_discretization_interval=grid,
            neighboring_relation=relations.REPLACE_ONE if replace_one else relations.ADD_OR_REMOVE_ONE,
        )


# --- what each kind of event is ----------------------------------------------------


def gaussian_shift(event: Any) -> float:
    """Returns m of a Gaussian event, or of a composition of them: inf without noise.

    Args:
        event: a DpEvent of dp-accounting.
    """
    import dp_accounting as dp

    if isinstance(event, dp.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp.SelfComposedDpEvent):
        times = whole("count", event.count, at_least=0)
        return math.sqrt(times) * gaussian_shift(event.event) if times else 0.0
    if isinstance(event, dp.ComposedDpEvent):
        return math.hypot(*(gaussian_shift(part) for part in event.events))
    raise InputError("event", "must hold a GaussianDpEvent inside a sampled event", type(event).__name__)


def _gaussian(event: Any) -> Release | None:
    m = gaussian_shift(event)
    if m == 0:
        return None
    return GaussianRelease(m) if m <= LARGEST_M else NonPrivate()


def _poisson(event: Any) -> Release | None:
    q = number("sampling_probability", event.sampling_probability, at_least=0.0, at_most=1.0)
    if type(event.event).__name__ == "LaplaceDpEvent":
        noise = event.event.noise_multiplier
        if q == 0:
            return None
        if q == 1 or not noise > 0:
            return _laplace(event.event)
        return SampledLaplaceRelease.of(noise, q)
    m = gaussian_shift(event.event)  # several Gaussians on one batch are one (docs/theory/divergences.md 4.2)
    if q == 0 or m == 0:
        return None
    return GaussianRelease(m, q) if m <= LARGEST_M else NonPrivate()


def _fixed(event: Any) -> Release | None:
    records = whole("source_dataset_size", event.source_dataset_size)
    q = whole("sample_size", event.sample_size, at_least=0) / records
    number("sample_size", q, at_least=0.0, at_most=1.0)
    m = gaussian_shift(event.event)
    if q == 0 or m == 0:
        return None
    return FixedRelease(m, q, type(event.event).__name__ == "GaussianDpEvent") if m <= LARGEST_M else NonPrivate()


def _laplace(event: Any) -> Release | None:
    return LaplaceRelease(event.noise_multiplier) if event.noise_multiplier > 0 else NonPrivate()


def _discrete_laplace(event: Any) -> Release | None:
    a = number("noise_parameter", event.noise_parameter, at_least=0.0)
    sensitivity = whole("sensitivity", event.sensitivity, at_least=0)
    if sensitivity == 0:
        return None
    return DiscreteLaplaceRelease(a * sensitivity, 2 * a * sensitivity, 1.0, a, sensitivity) if a > 0 else NonPrivate()


def _response(event: Any) -> Release | None:
    p = number("noise_parameter", event.noise_parameter, at_least=0.0, at_most=1.0)
    k = whole("num_buckets", event.num_buckets)
    if k == 1 or p == 1:
        return None
    if p == 0:
        return NonPrivate()
    eps = math.log1p((1 - p) * k / p) if p > 1e-9 else math.log(p + (1 - p) * k) - math.log(p)
    return ResponseRelease(None, eps, 1.0, p, k)


def _mixture(event: Any) -> Release | None:
    shifts = numbers("sensitivities", event.sensitivities, at_least=0.0).ravel()
    chances = numbers("sampling_probs", event.sampling_probs, at_least=0.0).ravel()
    if len(shifts) != len(chances) or abs(math.fsum(chances) - 1) > 1e-9:
        raise InputError("sampling_probs", "must be one chance for each sensitivity, and add up to 1", chances.tolist())
    pairs = [(float(c), float(p)) for c, p in zip(shifts, chances, strict=True) if p > 0]
    if all(c == 0 for c, _ in pairs):
        return None
    deviation = number("standard_deviation", event.standard_deviation, at_least=0.0)
    found = MixtureRelease(deviation, tuple(c for c, _ in pairs), tuple(p for _, p in pairs))
    return found if deviation > 0 else NonPrivate()


def _truncated(event: Any) -> Release | None:
    records = whole("dataset_size", event.dataset_size, at_least=0)
    q = number("sampling_probability", event.sampling_probability, at_least=0.0, at_most=1.0)
    largest = whole("truncated_batch_size", event.truncated_batch_size, at_least=0)
    noise = number("noise_multiplier", event.noise_multiplier, at_least=0.0)
    if records == 0 or q == 0 or largest == 0:
        return None
    return TruncatedRelease(records, q, largest, noise) if noise > 0 else NonPrivate()


def _zcdp(event: Any) -> Release | None:
    rho, xi = number("rho", event.rho, at_least=0.0), number("xi", event.xi, at_least=0.0)
    return ZCRelease(rho, xi) if rho > 0 or xi > 0 else None


def _nothing(event: Any) -> None:
    return None


def _everything(event: Any) -> Release:
    return NonPrivate()


#: The release that each kind of event is; None for one that tells nothing.
_KINDS: dict[str, Callable[[Any], Release | None]] = {
    "DiscreteLaplaceDpEvent": _discrete_laplace,
    "GaussianDpEvent": _gaussian,
    "LaplaceDpEvent": _laplace,
    "MixtureOfGaussiansDpEvent": _mixture,
    "NoOpDpEvent": _nothing,
    "NonPrivateDpEvent": _everything,
    "PoissonSampledDpEvent": _poisson,
    "RandomizedResponseDpEvent": _response,
    "SampledWithoutReplacementDpEvent": _fixed,
    "TruncatedSubsampledGaussianDpEvent": _truncated,
    "ZCDpEvent": _zcdp,
}
