"""Trade-off curves of which only Rényi divergences are known, in both directions (docs/theory/risks.md 8.1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound._internal.checks import numbers
from reconbound.bounds.bound import divergence, from_log, log_expm1
from reconbound.bounds.success import chances, rero_from_order2, unwrap
from reconbound.bounds.trade_off import TradeOff


@dataclass(frozen=True)
class ChiSquareTradeOff(TradeOff):
    """A curve from the order-2 Rényi divergence ε₂ in both directions: χ² ≤ e^{ε₂} − 1.

        (tpr − α)² ≤ χ² min{α(1 − α), tpr(1 − tpr)}, by the inequality of Cauchy and Schwarz,
        δ(ε) ≤ (a + √(a² + χ²))/2 with a = 1 − e^ε,    and A + a(1 − A)/2 for 1 ≤ e^ε ≤ 1 + χ²/2

    A = √(χ²/(4 + χ²)) is the advantage: the two parts of the curve meet at α = (1 − A)/2, tpr = (1 + A)/2.
    """

    order2: float

    def __post_init__(self) -> None:
        divergence("order2", self.order2)

    @property
    def _square(self) -> float:
        """Returns χ², at most the largest float."""
        return from_log(log_expm1(self.order2)) if self.order2 > 0 else 0.0

    def tpr(self, fpr: Any) -> Any:
        a, square = chances("fpr", fpr), self._square
        if self.order2 == math.inf:
            return unwrap(np.ones_like(a))
        # the larger root of p²(1 + χ²) − p(2α + χ²) + α² is the other direction's
        share = 1.0 / (1.0 + square)
        root = np.sqrt(1.0 - share) * np.sqrt((1.0 - share) + share * 4.0 * a * (1.0 - a))
        other = (2.0 * a * share + (1.0 - share) + root) / 2.0 * (1.0 + 1e-15)
        return unwrap(np.maximum(np.minimum(np.minimum(rero_from_order2(a, self.order2), other), 1.0), a))

    def delta(self, epsilon: Any) -> Any:
        eps, square = numbers("epsilon", epsilon), self._square
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
