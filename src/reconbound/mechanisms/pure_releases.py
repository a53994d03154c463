"""Releases with Laplace noise or randomised response: pure differential privacy, and dp-accounting's distributions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from reconbound import divergences as renyi
from reconbound.mechanisms.releases import Release, Spread


@dataclass(frozen=True)
class PureRelease(Release):
    """A release of which pure ε-DP is known; its distribution is that of randomised response with the same ε.

    Attributes:
        epsilon: ε when a record is added or removed; None where that is not known.
        replace_epsilon: ε when a record is replaced.
        rate: the chance of a record to be in the release.
    """

    epsilon: float | None
    replace_epsilon: float
    rate: float = 1.0

    @property
    def order2(self) -> float:  # type: ignore[override]
        return renyi.order2_pure(self.replace_epsilon)

    @property
    def kl(self) -> float:  # type: ignore[override]
        return renyi.kl_pure(self.replace_epsilon if self.epsilon is None else self.epsilon)

    def _epsilon(self, replace_one: bool) -> float:
        return self.replace_epsilon if replace_one or self.epsilon is None else self.epsilon

    def known(self, replace_one: bool) -> bool:
        return self._epsilon(replace_one) < 700 and (replace_one or self.epsilon is not None)

    def spread(self, count: int, replace_one: bool) -> Spread:
        eps = self._epsilon(replace_one)
        return Spread(count * renyi.kl_pure(eps), count * eps * eps, eps)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        return response_pld(self._epsilon(replace_one), grid)


def response_pld(epsilon: float, grid: float) -> Any:
    """Returns the distribution of randomised response whose ε is rounded up to the grid: it dominates every ε-DP one.

    Args:
        epsilon: ε.
        grid: distance of the losses.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    steps = max(math.ceil(epsilon / grid * (1 - 1e-12)), 1)
    up = 1 / (1 + math.exp(-steps * grid))
    mass = np.zeros(2 * steps + 1)
    mass[-1], mass[0] = up, math.exp(-steps * grid) * up
    return privacy_loss_distribution.PrivacyLossDistribution(pld_pmf.DensePLDPmf(grid, -steps, mass, 0.0, True))


@dataclass(frozen=True)
class ResponseRelease(PureRelease):
    """Randomised response of k buckets, in place of one record's value: nothing is known of adding a record.

    Attributes:
        noise_parameter: p, the chance of a bucket drawn at random.
        buckets: k.
    """

    noise_parameter: float = 1.0
    buckets: int = 2

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        return distributions.from_randomized_response(
            self.noise_parameter, self.buckets, value_discretization_interval=grid
        )


@dataclass(frozen=True)
class LaplaceRelease(Release):
    """Laplace noise on a sum; one record moves it by at most 1 in the ℓ₁ norm, and by 2 when it is replaced.

        shift 2 under replace-one: e^{D₂} = ⅔e^t + ⅓e^{−2t}, t = 2/b;   shift 1 without the record: KL = t + e^{−t} − 1

    Attributes:
        noise: the scale b of the noise.
    """

    noise: float
    rate: ClassVar[float] = 1.0  # type: ignore[misc]

    @property
    def order2(self) -> float:  # type: ignore[override]
        t = 2 / self.noise
        return t + math.log1p(math.expm1(-3 * t) / 3)

    @property
    def kl(self) -> float:  # type: ignore[override]
        return 1 / self.noise + math.expm1(-1 / self.noise)

    def known(self, replace_one: bool) -> bool:
        return self.noise > 2e-3

    def spread(self, count: int, replace_one: bool) -> Spread:
        t = (2 if replace_one else 1) / self.noise
        return Spread(count * (t + math.expm1(-t)), count * t * t, t)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        return distributions.from_laplace_mechanism(
            self.noise, sensitivity=2 if replace_one else 1, value_discretization_interval=grid
        )


@dataclass(frozen=True)
class SampledLaplaceRelease(PureRelease):
    """Laplace noise on a Poisson sample: pure DP, and dp-accounting's distribution for add/remove.

    Attributes:
        noise: the scale b of the noise over the ℓ₁ sensitivity.
    """

    noise: float = 1.0

    @classmethod
    def of(cls, noise: float, rate: float) -> SampledLaplaceRelease:
        """Returns the release; ε = ln(1 − q + q e^t) or, replaced, ln((1 − q + q e^t)/(1 − q + q e^{−t})), t = 1/b."""
        up, down = (
            float(np.logaddexp(math.log1p(-rate) if rate < 1 else -math.inf, math.log(rate) + sign / noise))
            for sign in (1, -1)
        )
        return cls(max(up, -down) * (1 + 1e-15), (up - down) * (1 + 1e-15), rate, noise)

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        if replace_one:
            return super().pld(count, replace_one, grid)
        return distributions.from_laplace_mechanism(
            self.noise, sampling_prob=self.rate, value_discretization_interval=grid
        )


@dataclass(frozen=True)
class DiscreteLaplaceRelease(PureRelease):
    """Discrete Laplace noise on whole numbers: pure DP, and dp-accounting's own distribution.

    Attributes:
        noise_parameter: a, as in e^{−a|x|}.
        sensitivity: the ℓ₁ sensitivity when a record is added or removed.
    """

    noise_parameter: float = 1.0
    sensitivity: int = 1

    def pld(self, count: int, replace_one: bool, grid: float) -> Any:
        from dp_accounting.pld import privacy_loss_distribution as distributions

        shift = self.sensitivity * (2 if replace_one else 1)
        return distributions.from_discrete_laplace_mechanism(
            self.noise_parameter, shift, value_discretization_interval=grid, use_connect_dots=True
        )
