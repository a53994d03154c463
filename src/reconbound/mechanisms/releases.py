"""Releases that a composition is made of: divergences and the privacy loss distribution of each.

Each release gives its distribution on the grid of the whole composition, so that dp-accounting can compose them. All
distributions are dp-accounting's pessimistic ones.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from reconbound import divergences as renyi
from reconbound.mechanisms import fixed_size_loss, privacy_loss

#: A composition has at most this many different Gaussian steps; more are put together (`merged`).
MOST_DIFFERENT = 64
_LARGEST_LOSS = 1e4  # a total loss of e^10000 is no protection
_SMALLEST_GRID = 1e-9


class Spread(NamedTuple):
    """The width of the privacy losses of all runs of a release: sum of means, sum of squares, and range of one."""

    mean: float
    square: float
    single: float


class Release(ABC):
    """One release of a composition. Subclasses are frozen and hashable, so that equal ones can be counted.

    Attributes:
        order2: the order-2 Rényi divergence under replace-one, in nats; inf where none is known.
        kl: the KL divergence to the release without the record, in nats.
        rate: the chance of a record to be in the release.
    """

    order2: float
    kl: float
    rate: float

    @abstractmethod
    def known(self, replace_one: bool) -> bool:
        """Returns whether the release has a privacy loss distribution for these neighbours."""

    @abstractmethod
    def spread(self, count: int, replace_one: bool) -> Spread:
        """Estimates how wide the losses of `count` runs spread."""

    @abstractmethod
    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        """Returns the distribution of one of `count` runs; None where the arithmetic gives up on this grid."""


@dataclass(frozen=True)
class GaussianRelease(Release):
    """A Gaussian step with Poisson sampling, or with every record (q = 1).

    Attributes:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        rate: q.
    """

    m: float
    rate: float = 1.0

    @property
    def order2(self) -> float:  # type: ignore[override]
        return _order2_poisson(self.m, self.rate)

    @property
    def kl(self) -> float:  # type: ignore[override]
        return float(renyi.poisson_kl(self.m, self.rate))

    def known(self, replace_one: bool) -> bool:
        return self.m <= privacy_loss.LARGEST_SHIFT

    def spread(self, count: int, replace_one: bool) -> Spread:
        if self.rate == 1:
            shift = self.m * math.sqrt(count) * (2 if replace_one else 1)
            return Spread(shift**2 / 2, shift**2, 12 * shift)
        mean, deviation, single = privacy_loss.loss_scale(self.m, self.rate, replace_one)
        return Spread(count * mean, count * deviation**2, single)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        return privacy_loss.one_of(partial(privacy_loss.gaussian_step, self.m, self.rate, replace_one), count, grid)


@lru_cache(maxsize=1024)
def _order2_poisson(m: float, q: float) -> float:
    return renyi.order2_poisson(m, q)


@dataclass(frozen=True)
class FixedRelease(Release):
    """A Gaussian step on a batch of fixed size, drawn without replacement: its pair is for replace-one only.

    Attributes:
        m: as in `GaussianRelease`.
        rate: q = B/N.
        single: whether the batch is used for one Gaussian only.
    """

    m: float
    rate: float = 1.0
    single: bool = True

    @property
    def order2(self) -> float:  # type: ignore[override]
        return renyi.order2_fixed(self.m, self.rate, method="convexity" if self.single else "wang")

    @property
    def kl(self) -> float:  # type: ignore[override]
        # several Gaussians on one batch, each of which may depend on the last: only these are proved then
        return renyi.kl_fixed(self.m, self.rate) if self.single else self.rate * self.m**2 / 2

    def known(self, replace_one: bool) -> bool:
        return replace_one and 1e-10 <= self.m <= privacy_loss.LARGEST_SHIFT

    def spread(self, count: int, replace_one: bool) -> Spread:
        if self.rate > 1 - 1e-9:
            return GaussianRelease(self.m).spread(count, replace_one)
        mean, deviation, single = fixed_size_loss.loss_scale(self.m, self.rate)
        return Spread(count * mean, count * deviation**2, single)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        if self.rate > 1 - 1e-9:
            return GaussianRelease(self.m).pld(count, replace_one, grid)
        return privacy_loss.one_of(partial(fixed_size_loss.fixed_size_step, self.m, self.rate), count, grid)


def counted(releases: Iterable[tuple[Release, int]]) -> list[tuple[Release, int]]:
    """Returns different releases with the sum of their counts. No bound depends on the order of a composition.

    Args:
        releases: pairs of a release and the number of its runs.
    """
    found: dict[Release, int] = {}
    for one, count in releases:
        if count > 0:
            found[one] = found.get(one, 0) + count
    return list(found.items())


def merged(releases: Sequence[tuple[Release, int]], most: int = MOST_DIFFERENT) -> list[tuple[Release, int]]:
    """Returns releases that tell at least as much, with few different Gaussian ones among them.

    Gaussian steps without sampling are one with m = √Σm². If more than `most` different sampled ones remain, steps of
    nearly equal m and q are counted with the largest of either: a pair with a larger m, or a larger q, dominates
    (docs/theory/compositions.md).

    Args:
        releases: pairs of a release and the number of its runs.
        most: the number of different sampled Gaussian steps to keep.
    """
    others: list[tuple[Release, int]] = []
    plain: list[tuple[float, int]] = []
    sampled: dict[tuple[float, float], int] = {}
    for one, count in counted(releases):
        if not isinstance(one, GaussianRelease):
            others.append((one, count))
        elif one.rate == 1:
            plain.append((one.m, count))
        else:
            sampled[one.m, one.rate] = count
    if plain:
        others.append((GaussianRelease(math.sqrt(math.fsum(n * m * m for m, n in plain)) * (1 + 1e-15)), 1))
    width = 1e-3
    while len(sampled) > most:
        bins: dict[tuple[int, int], tuple[float, float, int]] = {}
        for (m, rate), count in sampled.items():
            key = math.floor(math.log(m) / width), math.floor(math.log(rate) / width)
            old_m, old_rate, old_count = bins.get(key, (0.0, 0.0, 0))
            bins[key] = max(old_m, m), max(old_rate, rate), old_count + count
        sampled = {}
        for m, rate, count in bins.values():
            sampled[m, rate] = sampled.get((m, rate), 0) + count
        width *= 2
    return others + [(GaussianRelease(m, rate), count) for (m, rate), count in sampled.items()]


def composed_pld(releases: Sequence[tuple[Release, int]], replace_one: bool) -> Any:
    """Returns the privacy loss distribution of a composition; None where it is not known, enormous or negligible.

    Args:
        releases: pairs of a release and the number of its runs.
        replace_one: neighbours differ in one record's value; otherwise one record is added or removed.
    """
    costly = [(one, count) for one, count in releases if one.kl > 0 or one.order2 > 0]
    if not all(one.known(replace_one) for one, _ in costly):
        return None
    few = merged(costly)
    spreads = [one.spread(count, replace_one) for one, count in few]
    deviation, single = math.sqrt(sum(s.square for s in spreads)), max((s.single for s in spreads), default=0.0)
    if not sum(s.mean for s in spreads) <= _LARGEST_LOSS or not single < math.inf:
        return None
    grid = max(single / 3e4, (16 * deviation + 2 * single) / 1.5e5, _SMALLEST_GRID)
    for coarser in (1, 8, 64):
        total = _on_grid(few, replace_one, coarser * grid)
        if total is not None:
            return total
    return None


def _on_grid(releases: Sequence[tuple[Release, int]], replace_one: bool, grid: float) -> Any:
    """Composes the releases' distributions on one grid; None where one of them has none there."""
    from dp_accounting.pld import privacy_loss_distribution

    found = []
    with privacy_loss.without_overflow_warnings():
        for one, count in releases:
            pld = one.pld(count, replace_one, grid)
            if pld is None:
                return None
            found.append((pld, count))
        if not found:
            return privacy_loss_distribution.identity(value_discretization_interval=grid)
        return privacy_loss.composed(found)
