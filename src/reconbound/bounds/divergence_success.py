"""Chances, advantages, errors and trade-off curves of every attack, from divergences between two worlds; nats go in.

D bounds KL(P‖Q): P is the law of the real release, Q that of the release in which one record is left out, or in which
its private part has a public reference value. docs/theory/any_attacker.md 6.7 to 6.10 has the proofs. The curves know
only Rényi divergences, in both directions (docs/theory/risks.md 8.1).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri, xlogy

from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.bounds.bound import Bound, divergence, from_log, log_expm1, mean_coordinates
from reconbound.bounds.success import chances, rero_from_order2, unwrap
from reconbound.bounds.trade_off import TradeOff

_UP = 1 + 1e-12  # what is solved by iteration is rounded up by this
_TWO_WORLDS = "two worlds of one record: as it is, and left out or with a public reference value"
_MEAN = "on average over records whose private parts are independent draws from the prior"


# --- chances ----------------------------------------------------------------------------------------------------------


def success_from_kl(baseline: Any, nats: Any) -> Any:
    """Returns the largest chance of success on the real release, p_max, of an attack that has chance κ in the other.

        p_max(κ, D) = max{ p : p ln(p/κ) + (1−p) ln((1−p)/(1−κ)) ≤ D }

    Args:
        baseline: κ in [0, 1], the chance of success in the other world; a number or an array.
        nats: D ≥ 0, a bound on KL(real‖other); a number or an array, broadcast against κ; infinity is allowed.

    Returns:
        p_max, never below its true value, and above it by less than a part in 1e11.

    Guarantee:
        - Every attacker, with any side knowledge and any notion of success; also the mean of any loss in [0, 1].
        - No smaller number holds for all P and Q with KL(P‖Q) = D: two points attain it.

    >>> round(success_from_kl(0.1, 0.01), 4), success_from_kl(0.0, 5.0), success_from_kl(0.1, math.inf)
    (0.145, 0.0, 1.0)
    """
    k, d = np.broadcast_arrays(chances("baseline", baseline), _nats(nats))
    safe = np.clip(k, 1e-320, 1 - 1e-16)
    certain = -np.log(safe) <= d  # kl(1‖κ) = ln 1/κ
    low, high = np.full(k.shape, -800.0), np.zeros(k.shape)  # ln x, where p_max = κ + x(1 − κ): by bisection
    for _ in range(64):
        middle = (low + high) / 2
        below = _binary(safe, np.exp(middle)) <= d
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    p = np.nextafter(k + np.exp(high) * (1 - k) * _UP, 2.0)
    p = np.where((k == 0) & (d < math.inf), 0.0, np.where(certain | (d == math.inf), 1.0, np.minimum(p, 1.0)))
    return unwrap(np.where((d == 0) | (k == 1), k, p))


def _binary(k: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Returns kl(κ + x(1−κ) ‖ κ) for 0 ≤ x ≤ 1.

    With t = x(1−κ)/κ it is κ h(1 + t) + (1−κ) h(1 − x), h(u) = u ln u − u + 1: no cancellation at small x.
    """
    with np.errstate(over="ignore"):
        t = x * (1 - k) / k
    p = k + x * (1 - k)
    large = t > 1e8
    first = np.where(large, p * (np.log(p) - np.log(k)) - p + k, k * _bregman(np.where(large, 0.0, t)))
    return np.asarray(first + (1 - k) * _bregman(-x))


def _bregman(v: np.ndarray) -> np.ndarray:
    """Returns (1 + v) ln(1 + v) − v for v ≥ −1, without cancellation near 0."""
    small = np.abs(v) < 0.03
    s = np.where(small, v, 0.0)
    near = s * s * (1 / 2 - s * (1 / 6 - s * (1 / 12 - s * (1 / 20 - s * (1 / 30 - s * (1 / 42 - s / 56))))))
    u = np.where(small, 0.0, v)
    return np.asarray(np.where(small, near, xlogy(1 + u, np.maximum(1 + u, 1e-320)) - u))


def membership_from_kl(nats: Any) -> Any:
    """Returns the largest advantage (true minus false positive rate) of a test between the two worlds.

        Adv ≤ max_κ { p_max(κ, D) − κ } = λκ(1−κ),   κ = 1/λ − 1/(e^λ − 1),   λ such that kl(κ + Adv ‖ κ) = D

    It is never above √(D/2) nor √(1 − e^{−D}).

    Args:
        nats: D ≥ 0, a bound on KL(real‖other); a number or an array.

    Returns:
        The advantage, never below its true value, and above it by less than a part in 1e11 (for D > 30: √(1 − e^{−D})).

    Guarantee:
        - Every test, so total variation too. No smaller number holds for all P and Q with KL(P‖Q) = D.

    >>> round(membership_from_kl(0.02), 6), membership_from_kl(0.0), membership_from_kl(math.inf)
    (0.099889, 0.0, 1.0)
    """
    d = _nats(nats)
    with np.errstate(over="ignore"):
        upper = np.minimum(np.sqrt(d / 2), np.sqrt(-np.expm1(-d)))
    low, high = np.full(d.shape, -360.0), np.full(d.shape, 40.0)  # ln λ
    for _ in range(64):
        middle = (low + high) / 2
        k, t = _best_test(np.exp(middle))
        below = _binary(k, t / (1 - k)) <= d
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    found = np.minimum(_best_test(np.exp(high))[1] * _UP, upper)
    return unwrap(np.where((d > 30) | (d < 1e-290), upper, found))


def _best_test(slope: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the baseline κ at which the advantage is largest, and that advantage, for λ = logit p − logit κ."""
    small = slope < 0.05
    s, large = np.where(small, slope, 0.0), np.where(small, 1.0, slope)
    with np.errstate(over="ignore"):
        k = np.where(small, 1 / 2 - s / 12 + s**3 / 720 - s**5 / 30240, 1 / large - 1 / np.expm1(large))
    return k, slope * k * (1 - k)


def success_estimate(baseline: Any, nats: Any) -> Any:
    """Returns about what the best attack reaches where many small steps add up: an estimate, not a bound.

        Φ( Φ⁻¹(κ) + √(2D) )

    ln dP/dQ is then nearly N(D, 2D) under the real release. `success_from_kl` is the guarantee.

    Args:
        baseline: κ in [0, 1], the chance of success in the other world; a number or an array.
        nats: D ≥ 0; a number or an array.

    >>> round(success_estimate(0.1, 1.402), 3)
    0.653
    """
    k, d = np.broadcast_arrays(chances("baseline", baseline), _nats(nats))
    return unwrap(np.where(d == 0, k, np.where(d == math.inf, 1.0, ndtr(ndtri(k) + np.sqrt(2 * np.minimum(d, 1e300))))))


# --- errors -----------------------------------------------------------------------------------------------------------


def two_point_floor(gap: Any, nats: Any) -> Bound:
    """Returns the floor of two records that differ by Δ in one feature, for any attacker and without a prior.

        [ E_z(ẑ − z)² + E_z'(ẑ − z')² ]/2 ≥ (Δ²/4) e^{−D}

    Args:
        gap: Δ > 0, in the feature's unit; a number or an array.
        nats: D ≥ KL between the releases of z and z', either way round; a number or an array. Divergences for several Δ
            give several floors, of which the largest counts.

    Guarantee:
        - The mean of the two squared errors is at least this, so the larger one is.

    >>> round(two_point_floor(2.0, 1.0).value, 4)
    0.3679
    """
    delta, d = np.broadcast_arrays(numbers("gap", gap, at_least=0.0), _nats(nats))
    value, guess = unwrap(delta * delta / 4 * np.exp(-d)), float(np.max(delta, initial=0.0)) ** 2 / 4
    assumes = ("on average over the record's value and the one moved by the gap",)
    return Bound(
        "two_point", value, "Le Cam, by KL", "any", "replace-one", assumes=assumes, guess=guess, coordinates="each"
    )


def entropy_power_floor(entropy_power: float, mean_nats: Any, *, dim: int = 1) -> Bound:
    """Returns the floor of the mean squared error from the entropy of the private part and the mean divergence.

        mean MSE ≥ N^{1/d} e^{−2·mean D/d},      N^{1/d} = e^{2h(π)/d}/(2πe)

    Args:
        entropy_power: N^{1/d} per coordinate, in squared units: the variance for a Gaussian prior, less for others.
        mean_nats: the mean over records of D; a number or an array of groups.
        dim: d, the number of private coordinates.

    Guarantee:
        - On average over records, their private parts and releases; for every attacker who knows the prior and all
          other records. D must be towards a world that does not depend on the private part.

    >>> round(entropy_power_floor(4.0, 0.5).value, 4)
    1.4715
    """
    power, d = number("entropy_power", entropy_power, at_least=0.0), whole("dim", dim)
    value = unwrap(power * np.exp(-2 * _nats(mean_nats) / d))
    coordinates = mean_coordinates(d)
    assumes = (_MEAN, "the prior has this entropy power")
    return Bound("entropy_power", value, "Shannon", "any", _TWO_WORLDS, assumes=assumes, coordinates=coordinates)


def wrong_category_floor(entropy: float, categories: int, mean_nats: Any) -> Any:
    """Returns the least chance to name a private category wrongly: Fano's inequality, solved.

        min{ P : h(P) + P ln(k−1) ≥ H(π) − mean D },      h the binary entropy

    Args:
        entropy: H(π) in nats, at most ln k.
        categories: k ≥ 2.
        mean_nats: the mean over records of D; a number or an array of groups.

    Returns:
        The floor, never above its true value.

    Guarantee:
        - As for `entropy_power_floor`.

    >>> round(wrong_category_floor(math.log(10), 10, 0.0), 6), wrong_category_floor(math.log(2), 2, 1.0)
    (0.9, 0.0)
    """
    k = whole("categories", categories, at_least=2)
    top = number("entropy", entropy, at_least=0.0, at_most=math.log(k) * (1 + 1e-12))
    missing = np.minimum(np.maximum(top - _nats(mean_nats), 0.0), math.log(k))
    low, high = np.zeros(missing.shape), np.full(missing.shape, 1 - 1 / k)
    for _ in range(60):
        p = (low + high) / 2
        below = -xlogy(p, p) - xlogy(1 - p, 1 - p) + p * math.log(k - 1) < missing
        low, high = np.where(below, p, low), np.where(below, high, p)
    return unwrap(low * (1 - 1e-12))


def mean_van_trees(mean_information: Any, prior_information: Any) -> Bound:
    """Returns van Trees' floor of one feature for the average record.

        mean over records of E(ẑ_ij − z_ij)² ≥ 1/(mean_i E I_i,jj + J_jj)

    Args:
        mean_information: the mean over records of the Fisher information I_jj; a number, or one for each feature.
        prior_information: J_jj > 0, the prior's Fisher information; of a Gaussian prior 1/J_jj is the variance of the
            column given the others.

    Guarantee:
        - On average over records, their private parts and releases; for every attacker who knows the prior and all
          other records. The mean at one data set stands in for its average over the prior: an estimate.

    >>> mean_van_trees(3.0, 1.0).value
    0.25
    """
    info = numbers("mean_information", mean_information, at_least=0.0)
    prior = numbers("prior_information", prior_information, at_least=0.0)
    if np.any(prior == 0):
        raise InputError("prior_information", "must be greater than 0", 0.0)
    value = unwrap(1 / (info + prior))
    assumes = (_MEAN, "the prior has this Fisher information")
    neighbours = "Fisher information, averaged over the records and the prior"
    return Bound(
        "mean_van_trees", value, "van Trees", "any", neighbours, assumes=assumes, coordinates="each", estimate=True
    )


# --- arguments --------------------------------------------------------------------------------------------------------


def _nats(nats: Any) -> np.ndarray:
    if np.ndim(nats) == 0:
        return np.asarray(divergence("nats", nats))
    d = np.asarray(nats, dtype=np.float64)
    if not np.all(d >= 0):
        raise InputError("nats", "must be at least 0 and not NaN", float(d[~(d >= 0)].flat[0]))
    return d


@dataclass(frozen=True)
class ChiSquareTradeOff(TradeOff):
    """A curve from the order-2 Rényi divergence ε₂ in both directions: χ² ≤ e^{ε₂} − 1.

        (tpr − α)² ≤ χ² min{α(1 − α), tpr(1 − tpr)}, by the inequality of Cauchy and Schwarz,
        δ(ε) ≤ (a + √(a² + χ²))/2 with a = 1 − e^ε,    and A + a(1 − A)/2 for 1 ≤ e^ε ≤ 1 + χ²/2

    A = √(χ²/(4 + χ²)) is the advantage: the two parts of the curve meet at α = (1 − A)/2, tpr = (1 + A)/2.
    """

    order2: float
    square: float = field(init=False, repr=False, compare=False)  # χ², at most the largest float

    def __post_init__(self) -> None:
        order2 = divergence("order2", self.order2)
        object.__setattr__(self, "square", from_log(log_expm1(order2)) if order2 > 0 else 0.0)

    def tpr(self, fpr: Any) -> Any:
        a, square = chances("fpr", fpr), self.square
        if self.order2 == math.inf:
            return unwrap(np.ones_like(a))
        # the larger root of p²(1 + χ²) − p(2α + χ²) + α² is the other direction's
        share = 1.0 / (1.0 + square)
        root = np.sqrt(1.0 - share) * np.sqrt((1.0 - share) + share * 4.0 * a * (1.0 - a))
        other = (2.0 * a * share + (1.0 - share) + root) / 2.0 * (1.0 + 1e-15)
        return unwrap(np.maximum(np.minimum(np.minimum(rero_from_order2(a, self.order2), other), 1.0), a))

    def delta(self, epsilon: Any) -> Any:
        eps, square = numbers("epsilon", epsilon), self.square
        if self.order2 == math.inf:
            return unwrap(np.ones_like(eps))
        size = np.abs(eps)
        slope = np.expm1(np.minimum(size, 700.0))
        root = np.hypot(slope, math.sqrt(square))
        found = np.divide(square, 2.0 * (root + slope), out=np.zeros_like(root), where=root + slope > 0)
        advantage = math.sqrt(square / (4.0 + square))
        found = np.where(slope <= square / 2, advantage - slope * (1.0 - advantage) / 2, found)
        found = np.clip(found, 0.0, 1.0)
        return unwrap(np.where(eps >= 0, found, -np.expm1(-size) + np.exp(-size) * found))


@dataclass(frozen=True, eq=False)
class RenyiTradeOff(TradeOff):
    """A curve from Rényi divergences D_α of orders above 1, in both directions.

    tpr(x) ≤ (x e^{D_α})^{1 − 1/α} and 1 − e^{−D_α} (1 − x)^{α/(α − 1)} by Hölder's inequality, and
    δ(ε) ≤ e^{(α−1)(D_α − ε)} (1 − 1/α)^α/(α − 1) (Canonne, Kamath and Steinke)

    Attributes:
        orders: α, each above 1.
        divergences: D_α, upper bounds, in nats.
    """

    orders: np.ndarray
    divergences: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", numbers("orders", self.orders, above=1.0).ravel())
        object.__setattr__(self, "divergences", numbers("divergences", self.divergences, at_least=0.0).ravel())

    def tpr(self, fpr: Any) -> Any:
        a = chances("fpr", fpr)
        with np.errstate(divide="ignore"):
            power = (np.log(a)[..., None] + self.divergences) * (1 - 1 / self.orders)
            kept = np.log1p(-a)[..., None] / (1 - 1 / self.orders) - self.divergences
        found = np.exp(np.minimum(power.min(axis=-1) + 1e-12, 0.0))
        return unwrap(np.maximum(np.minimum(found, -np.expm1(kept.max(axis=-1) - 1e-12)), a))

    def delta(self, epsilon: Any) -> Any:
        eps, a = numbers("epsilon", epsilon), self.orders
        size = np.abs(eps)
        log_delta = (a - 1) * (self.divergences - size[..., None]) + a * np.log1p(-1 / a) - np.log(a - 1)
        found = np.exp(np.minimum(log_delta.min(axis=-1) + 1e-12, 0.0))
        return unwrap(np.where(eps >= 0, found, -np.expm1(-size) + np.exp(-size) * found))  # the other direction
