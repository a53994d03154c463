"""Trade-off curves: how well any test can tell two neighbouring releases apart, and what follows from that.

A curve is known in two ways, each of which gives the other (docs/theory/risks.md):

    tpr(α) = the largest true-positive rate of a test whose false-positive rate is α
    δ(ε)   = max over tests of TPR − e^ε FPR, for every real ε;   tpr(α) = min_ε { e^ε α + δ(ε) }

Both are upper bounds here, and both hold whichever of the two releases is the null hypothesis. Every attack is a test
between two releases, so they bind every attacker.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.bounds.bound import divergence
from reconbound.bounds.success import chances, rero_from_gdp, unwrap

#: Error rates below this are not looked at for the μ of Gaussian differential privacy.
LEAST_RATE = 1e-6
#: How far above its smallest value μ may be.
_TOLERANCE = 1e-4
#: A group's curve is kept at this many points on either side of ε = 0.
_HALF = 2000


@dataclass(frozen=True)
class GaussianDP:
    """The best μ of Gaussian differential privacy for a curve.

    Attributes:
        mu: every test with error rates of `least_rate` or more has TPR ≤ Φ(Φ⁻¹(FPR) + μ); infinite where no μ is
            enough.
        regret: how much μ exaggerates: by so much at most it understates the least chance to err of a membership
            test, whatever the prior. Zero for Gaussian noise without sampling.
        least_rate: false-positive and false-negative rates below this are not looked at.
    """

    mu: float
    regret: float
    least_rate: float


class TradeOff(ABC):
    """A curve that says how well any test tells two neighbouring releases apart: upper bounds, in both directions."""

    @abstractmethod
    def tpr(self, fpr: Any) -> Any:
        """Returns the largest true-positive rate.

        Args:
            fpr: the false-positive rate, one number or an array.
        """

    @abstractmethod
    def delta(self, epsilon: Any) -> Any:
        """Returns δ(ε), the largest TPR − e^ε FPR of a test.

        Args:
            epsilon: ε, one number or an array; it may be negative.
        """

    def fnr(self, fpr: Any) -> Any:
        """Returns the smallest false-negative rate, 1 − TPR.

        Args:
            fpr: the false-positive rate, one number or an array.
        """
        return 1.0 - self.tpr(fpr)

    @property
    def advantage(self) -> float:
        """Returns the largest TPR − FPR of a test: the total variation distance."""
        return float(self.delta(0.0))

    def epsilon(self, delta: float) -> float | None:
        """Returns the smallest ε ≥ 0 with δ(ε) at most this, rounded up; None where there is none below 10,000.

        Args:
            delta: δ.
        """
        target = number("delta", delta, above=0.0, below=1.0)
        low, high = 0.0, 1e4
        if float(self.delta(high)) > target:
            return None
        if float(self.delta(low)) <= target:
            return 0.0
        while high - low > 1e-12 * high:
            middle = (low + high) / 2
            low, high = (middle, high) if float(self.delta(middle)) > target else (low, middle)
        return high

    def bayes_risk(self, prior: Any) -> Any:
        """Returns the smallest chance to err of who must say which of the two releases it is.

            R(π) = min { π FNR + (1 − π) FPR } = π (1 − δ(ln((1 − π)/π)))

        Args:
            prior: π, the chance, known to the attacker, of either release; one number or an array.
        """
        p = chances("prior", prior)
        inside = np.clip(p, 1e-300, 1 - 2**-53)
        risk = p * (1.0 - self.delta(np.log1p(-inside) - np.log(inside)))
        return unwrap(np.where((p > 0) & (p < 1), np.maximum(risk, 0.0), 0.0))

    def gdp(self, least_rate: float = LEAST_RATE) -> GaussianDP:
        """Returns the best μ of Gaussian differential privacy, and its regret.

        Args:
            least_rate: false-positive and false-negative rates below this are not looked at.

        Guarantee: every test with both error rates at least `least_rate` has TPR ≤ Φ(Φ⁻¹(FPR) + μ). No μ smaller by
        more than 1e-4 has this property for the curve.
        """
        rate = number("least_rate", least_rate, above=0.0, at_least=1e-300, below=0.5)
        mu = _smallest_mu(self, rate)
        epsilons = np.linspace(0.0, 50.0, 4001)  # by symmetry the other half says the same
        own = np.ones_like(epsilons) if mu == math.inf else GaussianTradeOff(mu).delta(epsilons)
        regret = float(np.max((own - self.delta(epsilons)) / (1.0 + np.exp(epsilons))))
        return GaussianDP(mu, max(regret, 0.0), rate)

    def group(self, size: int) -> TradeOff:
        """Returns the curve of two data sets that are `size` steps of this curve's neighbours apart.

            tpr_k(α) = tpr(tpr(… tpr(α) …)), k times

        Args:
            size: k.
        """
        k = whole("size", size)
        found: TradeOff | None = None
        power: TradeOff = self
        while k:  # k in binary digits: the powers are curves of 1, 2, 4, … steps
            if k & 1:
                found = power if found is None else _chain(found, power)
            k >>= 1
            power = _chain(power, power) if k else power
        assert found is not None
        return found


@dataclass(frozen=True)
class GaussianTradeOff(TradeOff):
    """The exact curve of two normal distributions of variance 1 whose means are μ apart.

    >>> curve = GaussianTradeOff(1.0)
    >>> [float(f"{curve.tpr(rate):.4e}") for rate in (1e-4, 1e-6, 1e-10)]
    [0.0032738, 8.7218e-05, 4.1303e-08]
    """

    mu: float

    def __post_init__(self) -> None:
        number("mu", self.mu, at_least=0.0)

    def gdp(self, least_rate: float = LEAST_RATE) -> GaussianDP:
        return GaussianDP(self.mu, 0.0, number("least_rate", least_rate, above=0.0, below=0.5))

    def tpr(self, fpr: Any) -> Any:
        return rero_from_gdp(fpr, self.mu)

    def delta(self, epsilon: Any) -> Any:
        eps = numbers("epsilon", epsilon)
        if self.mu == 0:
            return unwrap(np.maximum(-np.expm1(np.minimum(eps, 0.0)), 0.0))
        size = np.abs(eps)  # the curve is its own mirror image, and small values are exact
        with np.errstate(over="ignore", invalid="ignore"):
            near, far = self.mu / 2 - size / self.mu, -self.mu / 2 - size / self.mu
            first, second = ndtr(near), np.exp(np.minimum(size + log_ndtr(far), 0.0))
            slack = 1e-15 * (first * (4.0 + near**2) + second * (4.0 + size + far**2))  # rounding is on the safe side
        found = np.clip(first - second + np.minimum(np.nan_to_num(slack), first), 0.0, 1.0)
        found = np.where(size == 0, np.minimum(found, math.erf(self.mu / math.sqrt(8))), found)
        return unwrap(np.where(eps >= 0, found, -np.expm1(-size) + np.exp(-size) * found))


@dataclass(frozen=True)
class DPTradeOff(TradeOff):
    """The curve of a mechanism of which only (ε, δ) is known, in both directions.

        tpr(α) = min(1, e^ε α + δ, 1 − e^{−ε}(1 − δ − α))

    (0, p) is that of two releases that differ with chance p only.
    """

    own_epsilon: float
    own_delta: float = 0.0

    def __post_init__(self) -> None:
        divergence("epsilon", self.own_epsilon)
        number("delta", self.own_delta, at_least=0.0, at_most=1.0)

    def tpr(self, fpr: Any) -> Any:
        a, eps, d = chances("fpr", fpr), self.own_epsilon, self.own_delta
        if eps == math.inf:
            return unwrap(np.ones_like(a))
        with np.errstate(divide="ignore"):
            steep = np.exp(np.minimum(np.log(a) + eps, 1.0)) + d
        flat = 1.0 - math.exp(-eps) * np.maximum(1.0 - d - a, 0.0)
        return unwrap(np.minimum(np.minimum(steep, flat), 1.0))

    def delta(self, epsilon: Any) -> Any:
        at, eps, d = numbers("epsilon", epsilon), self.own_epsilon, self.own_delta
        if eps == math.inf:
            return unwrap(np.ones_like(at))
        inside = np.minimum(at, eps)  # (e^ε − e^at)/(1 + e^ε), without overflow
        steep = d + (1.0 - d) * -np.expm1(inside - eps) / (1.0 + math.exp(-eps))
        flat = 1.0 - np.exp(np.minimum(at, 0.0)) * (1.0 - d)
        return unwrap(np.clip(np.where(at <= -eps, flat, np.where(at >= eps, d, steep)), 0.0, 1.0))


@dataclass(frozen=True, eq=False)
class ProfileTradeOff(TradeOff):
    """A curve from points of the privacy profile δ(ε), in one direction.

    Between two points δ lies below their chord, because it is convex in e^ε; beyond the last one it is no larger.

    Attributes:
        epsilons: ε of the points, rising.
        deltas: δ of the points, each an upper bound.
        log_corners: ln α of the corners of the curve, rising: between two of them one line is lowest.
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    log_corners: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        eps, deltas = numbers("epsilons", self.epsilons).ravel(), numbers("deltas", self.deltas, at_least=0.0).ravel()
        if eps.size != deltas.size or eps.size == 0:
            raise InputError("deltas", f"must have as many entries as epsilons ({eps.size}), at least one", deltas.size)
        if np.any(np.diff(eps) <= 0):
            raise InputError("epsilons", "must rise", float(eps[int(np.argmin(np.diff(eps)))]))
        deltas = np.minimum(
            np.minimum.accumulate(deltas), 1.0
        )  # δ falls with ε: what is known at a smaller ε holds too
        drops = np.log(np.maximum(-np.diff(deltas), 1e-320))
        log_steps = np.log(np.expm1(np.minimum(np.diff(eps), 700.0)))
        corners = np.maximum.accumulate((drops - eps[:-1] - log_steps)[::-1])
        for name, values in (("epsilons", eps), ("deltas", deltas), ("log_corners", corners)):
            object.__setattr__(self, name, values)

    def mirrored(self) -> ProfileTradeOff:
        """Returns what the curve says of the other direction, where the other release is the null hypothesis.

            δ′(−ε) = 1 − e^{−ε}(1 − δ(ε))

        Points of negative ε are left out: there δ is nearly 1, and its rounding would be multiplied by e^{−ε}.
        """
        epsilons = np.append(0.0, self.epsilons[self.epsilons > 0])
        deltas = -np.expm1(-epsilons) + np.exp(-epsilons) * self.delta(epsilons)
        return ProfileTradeOff(-epsilons[::-1], np.clip(deltas[::-1], 0.0, 1.0))

    def tpr(self, fpr: Any) -> Any:
        a = chances("fpr", fpr)
        with np.errstate(divide="ignore"):
            log_a = np.log(a)
        # every line is a bound: rounding in the search costs tightness, never soundness
        near = len(self.log_corners) - np.searchsorted(self.log_corners, log_a, side="right")
        lines = np.clip(np.asarray(near)[..., None] + np.arange(-2, 3), 0, len(self.epsilons) - 1)
        values = np.exp(np.minimum(log_a[..., None] + self.epsilons[lines], 1.0)) + self.deltas[lines]
        return unwrap(np.maximum(np.minimum(values.min(axis=-1), 1.0), a))

    def delta(self, epsilon: Any) -> Any:
        eps = numbers("epsilon", epsilon)
        right = np.searchsorted(self.epsilons, eps, side="left")
        last = len(self.epsilons) - 1
        high, low = np.minimum(right, last), np.maximum(right - 1, 0)
        left_end, right_end = self.epsilons[low], self.epsilons[high]
        inside = np.clip(eps, left_end, right_end)
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            share = np.exp(inside - right_end) * np.expm1(left_end - inside) / np.expm1(left_end - right_end)
        share = np.where(right_end > left_end, np.clip(share, 0.0, 1.0), 0.0)
        chord = self.deltas[low] + share * (self.deltas[high] - self.deltas[low])
        below = 1.0 - np.exp(np.minimum(eps - self.epsilons[0], 0.0)) * (1.0 - self.deltas[0])  # chord from e^ε = 0
        found = np.where(right == 0, below, np.where(right > last, self.deltas[-1], chord))
        return unwrap(np.clip(found, -np.expm1(np.minimum(eps, 0.0)), 1.0))  # no test says more than a guess


@dataclass(frozen=True)
class _OneOfSeveral(TradeOff):
    """At each point the value of one of several curves: `_chosen` says of which."""

    curves: tuple[TradeOff, ...]
    _chosen: ClassVar[np.ufunc]

    def tpr(self, fpr: Any) -> Any:
        return unwrap(self._chosen.reduce([curve.tpr(fpr) for curve in self.curves], axis=0))

    def delta(self, epsilon: Any) -> Any:
        return unwrap(self._chosen.reduce([curve.delta(epsilon) for curve in self.curves], axis=0))


class Least(_OneOfSeveral):
    """The smallest of several upper bounds on one curve."""

    _chosen = np.minimum


class Worst(_OneOfSeveral):
    """The largest of several curves: of both directions, or of several neighbours."""

    _chosen = np.maximum


def _smallest_mu(curve: TradeOff, rate: float) -> float:
    """Returns the smallest μ with tpr(α) ≤ Φ(Φ⁻¹(α) + μ) for all error rates of `rate` or more.

    On a stretch [a, b] of Φ⁻¹(α), Φ⁻¹(tpr(α)) − Φ⁻¹(α) is at most Φ⁻¹(tpr at b) − a, because tpr rises; and at b it is
    Φ⁻¹(tpr at b) − b. Stretches that may hold the largest value are cut until both agree.
    """
    end = -float(ndtri(rate))
    if float(curve.tpr(rate)) > 1.0 - rate:
        return math.inf
    ends = np.linspace(-end, end, 601)
    left, right = ends[:-1], ends[1:]
    known = float(ndtri(curve.tpr(rate))) + end
    while True:
        reached = np.where(curve.tpr(ndtr(left)) > 1.0 - rate, -math.inf, ndtri(curve.tpr(ndtr(right))))
        capped = reached >= end  # tests with fewer false negatives are not looked at
        known = max(known, float(np.max(np.where(capped, -math.inf, reached - right))), 0.0)
        most = np.minimum(reached, end) - left
        open_ = most > known + _TOLERANCE
        if not open_.any():
            return known + _TOLERANCE
        cuts = np.linspace(left[open_], right[open_], 9)
        left, right = cuts[:-1].ravel(), cuts[1:].ravel()


@lru_cache(maxsize=16)  # groups of several sizes have steps in common
def _chain(first: TradeOff, second: TradeOff) -> TradeOff:
    """Returns the curve of two steps, one of each curve.

        δ(ε) = min_a { δ₁(a) + e^a δ₂(ε − a) }

    P₃(S) ≤ e^a P₂(S) + δ₁(a) and P₂(S) ≤ e^{ε−a} P₁(S) + δ₂(ε − a). Any finite set of a gives an upper bound.
    """
    if isinstance(first, GaussianTradeOff) and isinstance(second, GaussianTradeOff):
        return GaussianTradeOff(first.mu + second.mu)
    one, other = _largest_epsilon(first), _largest_epsilon(second)
    grid = (one + other) / _HALF
    own = np.arange(-math.ceil(one / grid), math.ceil(one / grid) + 1)
    total = np.arange(-_HALF, _HALF + 1)
    rest = np.arange(total[0] - own[-1], total[-1] - own[0] + 1)
    deltas_1, deltas_2 = np.asarray(first.delta(own * grid)), np.asarray(second.delta(rest * grid))
    grown = np.exp(own * grid)
    backwards, found = deltas_2[::-1], np.empty(len(own))  # one array for all sums: they are the time
    deltas = np.empty(len(total))
    for k in range(len(total)):
        np.multiply(grown, backwards[len(total) - 1 - k :][: len(own)], out=found)
        found += deltas_1
        deltas[k] = found.min()
    return ProfileTradeOff(*_convex(total * grid, np.minimum(np.minimum.accumulate(deltas), 1.0)))


def _convex(epsilons: np.ndarray, deltas: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points that lie on no chord of others: δ is convex in e^ε, so the rest says nothing.

    Without this the search for the lowest line could miss it.
    """
    while True:
        left, right = epsilons[:-2], epsilons[2:]
        share = np.exp(epsilons[1:-1] - right) * np.expm1(left - epsilons[1:-1]) / np.expm1(left - right)
        keep = deltas[1:-1] < deltas[:-2] + share * (deltas[2:] - deltas[:-2])
        if keep.all():
            return epsilons, deltas
        keep = np.concatenate([[True], keep, [True]])
        epsilons, deltas = epsilons[keep], deltas[keep]


def _largest_epsilon(curve: TradeOff) -> float:
    """Returns an ε beyond which δ(ε) hardly falls any more, at most 700."""
    least = float(curve.delta(1e4)) + 1e-13
    low, high = 0.0, 1e-3
    while high < 700.0 and float(curve.delta(high)) > least:
        low, high = high, 2 * high
    for _ in range(30):  # the end of a pure ε is found to its digits
        middle = (low + high) / 2
        low, high = (middle, high) if float(curve.delta(middle)) > least else (low, middle)
    return min(high, 700.0)
