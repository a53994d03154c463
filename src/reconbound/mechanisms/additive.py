"""Noise on a sum that a record moves by a known amount: Laplace, and discrete Gaussian."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from reconbound._internal.checks import number, whole
from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.base import ADD_OR_ZERO
from reconbound.mechanisms.composition import Composed
from reconbound.mechanisms.pure_releases import LaplaceRelease, SampledLaplaceRelease
from reconbound.mechanisms.releases import Release, Spread


@dataclass(frozen=True)
class Laplace(Composed):
    """T releases of a sum with Laplace noise, each of all records or of a Poisson sample.

    Attributes:
        noise_multiplier: the scale b of the noise over the largest ℓ₁ norm of a record's share in the sum. A record
            that is replaced moves the sum by twice this norm.
        sample_rate: q.
        steps: T.

    >>> found = Laplace(2.0)
    >>> round(found.epsilon_at(1e-9), 3), round(found.epsilon_at(1e-9, "add/remove"), 3)
    (1.0, 0.5)
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1
    kl_neighbours = ADD_OR_ZERO

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, at_least=1e-100, at_most=1e100)
        rate = number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        self._set(noise_multiplier=noise, sample_rate=rate, steps=whole("steps", self.steps))

    def releases(self) -> list[tuple[Release, int]]:
        q, b = self.sample_rate, self.noise_multiplier
        return [(LaplaceRelease(b) if q == 1 else SampledLaplaceRelease.of(b, q), self.steps)]

    def for_group(self, copies: int) -> Laplace:
        """Returns the mechanism with the group's rows as one record: k times the norm, in any batch with one of them.

        Args:
            copies: k, the number of rows.
        """
        k = whole("copies", copies)
        rate = -math.expm1(k * math.log1p(-self.sample_rate)) if self.sample_rate < 1 else 1.0
        return self if k == 1 else replace(self, noise_multiplier=self.noise_multiplier / k, sample_rate=rate)

    def assumes(self) -> tuple[str, ...]:
        return ("a record's share in the sum has an ℓ₁ norm of at most the noise's scale over the noise multiplier",)


@dataclass(frozen=True)
class DiscreteGaussian(Composed):
    """T releases of a whole number with discrete Gaussian noise.

    For vectors of whole numbers the noise is no worse in D₂ and KL, but its loss distribution is another one: state
    their zCDP instead, ZCDP(sensitivity²/(2 noise_std²)), with the ℓ₂ sensitivity.

    Attributes:
        noise_std: σ, as in e^{−x²/(2σ²)}.
        sensitivity: the largest whole number by which a record moves the count when it is added or removed; twice it
            when the record is replaced.
        steps: T.

    >>> DiscreteGaussian(2.0).order2(), DiscreteGaussian(2.0).kl()
    (1.0, 0.125)
    """

    noise_std: float
    sensitivity: int = 1
    steps: int = 1
    kl_neighbours = ADD_OR_ZERO

    def __post_init__(self) -> None:
        noise = number("noise_std", self.noise_std, at_least=1e-100, at_most=1e100)
        whole_shift, steps = whole("sensitivity", self.sensitivity), whole("steps", self.steps)
        self._set(noise_std=noise, sensitivity=whole_shift, steps=steps)

    def releases(self) -> list[tuple[Release, int]]:
        return [(DiscreteGaussianRelease(self.noise_std, self.sensitivity), self.steps)]

    def for_group(self, copies: int) -> DiscreteGaussian:
        """Returns the mechanism with the group's rows as one record: k times the sensitivity.

        Args:
            copies: k, the number of rows.
        """
        return replace(self, sensitivity=self.sensitivity * whole("copies", copies))

    def assumes(self) -> tuple[str, ...]:
        return (f"one whole number that a record moves by at most {self.sensitivity:,}",)


@dataclass(frozen=True)
class DiscreteGaussianRelease(Release):
    """Discrete Gaussian noise on a whole number; divergences of whole shifts are those of the Gaussian, exactly.

        D₂ = k²/σ², k = 2Δ under replace-one,   KL = Δ²/(2σ²)

    Attributes:
        noise: σ.
        shift: Δ.
    """

    noise: float
    shift: int
    rate = 1.0

    @property
    def order2(self) -> float:  # type: ignore[override]
        return (2 * self.shift / self.noise) ** 2

    @property
    def kl(self) -> float:  # type: ignore[override]
        return (self.shift / self.noise) ** 2 / 2

    def known(self, replace_one: bool) -> bool:
        return self.shift / self.noise <= privacy_loss.LARGEST_SHIFT and self.noise <= 1e4

    def spread(self, count: int, replace_one: bool) -> Spread:
        m = self.shift / self.noise * (2 if replace_one else 1)
        return Spread(count * m * m / 2, count * m * m, 12 * m + m * m)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        shift = self.shift * (2 if replace_one else 1)
        return distributions.from_discrete_gaussian_mechanism(
            self.noise, shift, value_discretization_interval=grid, use_connect_dots=True
        )
