"""Mechanisms for which Gaussian DP or zero-concentrated DP was stated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound import bounds
from reconbound import divergences as renyi
from reconbound._internal.checks import choice, number, whole
from reconbound.bounds.divergence_success import ChiSquareTradeOff, RenyiTradeOff
from reconbound.bounds.parts import Parts, parts_gaussian
from reconbound.bounds.success import chances, unwrap
from reconbound.bounds.trade_off import DPTradeOff, GaussianTradeOff, Least, TradeOff
from reconbound.mechanisms.base import ADJACENCIES, REPLACE_ONE, advantage_from_order2
from reconbound.mechanisms.epsilons import gaussian_epsilon
from reconbound.mechanisms.reported import ASSUMED, _Reported

_ORDERS = 1 + np.geomspace(1e-4, 1e7, 2201)  # every order gives a bound; between two of them little is lost


@dataclass(frozen=True)
class GDP(_Reported):
    """A mechanism for which μ-Gaussian DP is known: no test tells neighbours apart better than N(0, 1) from N(μ, 1).

    A μ from the central limit theorem, as Opacus' "gdp" accountant has it, is an approximation and can be too small: it
    is no such statement.

    Attributes:
        mu: μ.
        adjacency: the neighbours for which it holds: "replace-one", or "add/remove": then replace-one is 2μ. Left out,
            it is taken as replace-one, and every result says so.

    >>> GDP(1.0).order2(), GDP(1.0, "add/remove").order2(), round(GDP(1.0).epsilon_at(1e-5), 3)
    (1.0, 4.0, 4.377)
    """

    mu: float
    adjacency: str | None = None

    def __post_init__(self) -> None:
        self._set(mu=number("mu", self.mu, at_least=0.0, at_most=1e100))
        _ = self.neighbours  # refuses unknown ones

    @property
    def _replace_mu(self) -> float:
        """Returns μ under replace-one: a step to the release without the record, and one from it."""
        return self.mu if self.neighbours == REPLACE_ONE else 2 * self.mu

    def for_group(self, copies: int) -> GDP:
        """Returns kμ: group privacy.

        Args:
            copies: k, the number of rows.
        """
        return GDP(whole("copies", copies) * self.mu, self.adjacency)

    def _own_trade_off(self) -> TradeOff:
        return GaussianTradeOff(self.mu)

    def order2(self) -> float:
        return renyi.order2_gaussian(self._replace_mu / 2)

    def order2_paper(self) -> float:
        return renyi.order2_gaussian(self.mu / 2)

    def kl(self) -> float:
        return self.mu**2 / 2

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        return (*super().parts(), parts_gaussian(self.mu, self.neighbours))

    def overlap(self) -> float:
        return renyi.overlap_poisson(self._replace_mu / 2, 1.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        own = choice("adjacency", adjacency, ADJACENCIES) == self.neighbours
        if not own and adjacency != REPLACE_ONE:
            return None
        mu = self.mu if own else self._replace_mu
        return gaussian_epsilon(mu, delta) if mu > 1e-12 else 0.0 if mu == 0 else 1e-12

    def membership_advantage(self) -> float:
        return bounds.membership_from_gdp(self._replace_mu)

    def rero(self, kappa: Any) -> Any:
        return bounds.rero_from_gdp(kappa, self.mu)

    def assumes(self) -> tuple[str, ...]:
        return (f"{self.mu:g}-Gaussian DP {self._under()}",)

    def notes(self) -> tuple[str, ...]:
        clt = "μ must hold for every test. A μ from the central limit theorem (Opacus' gdp accountant) does not."
        return (ASSUMED.format(what="μ"), clt) if self.adjacency is None else (clt,)


@dataclass(frozen=True)
class ZCDP(_Reported):
    """A mechanism for which (ξ, ρ)-zCDP is known: D_α ≤ ξ + ρα at every order α > 1, in both directions.

    Attributes:
        rho: ρ.
        xi: ξ.
        adjacency: the neighbours for which it holds: "replace-one", or "add/remove": then D_α ≤ ξ(4α−1)/(2α−1) + 4ρα
            under replace-one (docs/theory/compositions.md). Left out, it is taken as replace-one, and every result
            says so.

    >>> ZCDP(0.5).order2(), ZCDP(0.5, adjacency="add/remove").order2(), round(ZCDP(0.5).epsilon_at(1e-5), 2)
    (1.0, 4.0, 4.73)
    """

    rho: float
    xi: float = 0.0
    adjacency: str | None = None

    def __post_init__(self) -> None:
        rho = number("rho", self.rho, at_least=0.0, at_most=1e100)
        self._set(rho=rho, xi=number("xi", self.xi, at_least=0.0, at_most=1e100))
        _ = self.neighbours  # refuses unknown ones

    def for_group(self, copies: int) -> ZCDP:
        """Returns (ξ k Σ_{i≤k} 1/i, k²ρ): group privacy.

        Args:
            copies: k, the number of rows.
        """
        k = whole("copies", copies)
        harmonic = math.fsum(1 / i for i in range(1, k + 1)) if k < 10**6 else 1 + math.log(k)
        return ZCDP(k * k * self.rho, self.xi * k * harmonic, self.adjacency)

    def _divergence(self, order: Any, replace_one: bool) -> Any:
        """Returns the largest D_α between the statement's own neighbours, or under replace-one."""
        if not replace_one or self.neighbours == REPLACE_ONE:
            return self.xi + self.rho * order
        return self.xi * (4 * order - 1) / (2 * order - 1) + 4 * self.rho * order

    def _own_trade_off(self) -> TradeOff:
        renyi = RenyiTradeOff(_ORDERS, self._divergence(_ORDERS, False))
        nats = float(self._divergence(1.0, False))  # Pinsker; Bretagnolle and Huber
        apart = DPTradeOff(0.0, min(math.sqrt(nats / 2), math.sqrt(-math.expm1(-nats))))
        return Least((ChiSquareTradeOff(float(self._divergence(2.0, False))), renyi, apart))

    def order2(self) -> float:
        return float(self._divergence(2.0, True))

    def order2_paper(self) -> float:
        return float(self._divergence(2.0, False))

    def kl(self) -> float:
        return self.xi + self.rho

    @property
    def _replace_kl(self) -> float:
        return float(self._divergence(1.0, True))

    def overlap(self) -> float:
        return max(super().overlap(), bounds.overlap_from_renyi(self._replace_kl, 1.0))

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        """Returns ε = min_α {D_α + ln(1 − 1/α) − (ln δ + ln α)/(α − 1)} (Canonne, Kamath and Steinke)."""
        d = number("delta", delta, above=0.0, below=1.0)
        replaced = choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE
        if not replaced and self.neighbours == REPLACE_ONE:
            return None
        a = _ORDERS
        found = self._divergence(a, replaced) + np.log1p(-1 / a) - (math.log(d) + np.log(a)) / (a - 1)
        best = float(found.min()) * (1 + 1e-12) + 1e-12
        if replaced:
            best = min(best, math.inf if (simple := super().epsilon_at(delta, adjacency)) is None else simple)
        return max(best, 0.0)

    def membership_advantage(self) -> float:
        nats = self._replace_kl  # Pinsker; Bretagnolle and Huber
        return min(advantage_from_order2(self.order2()), math.sqrt(nats / 2), math.sqrt(-math.expm1(-nats)))

    def rero(self, kappa: Any) -> Any:
        """Returns min_α (κ e^{D_α})^{(α−1)/α}, by Hölder's inequality, or the bound of order 2 where it is lower."""
        k = chances("kappa", kappa)
        with np.errstate(divide="ignore"):
            power = (np.log(k)[..., None] + self._divergence(_ORDERS, False)) * (1 - 1 / _ORDERS)
        holder = np.exp(np.minimum(power.min(axis=-1), 0.0)) * (1 + 1e-12)
        return unwrap(np.minimum(np.minimum(holder, bounds.rero_from_order2(k, self.order2_paper())), 1.0))

    def assumes(self) -> tuple[str, ...]:
        return (f"({self.xi:g}, {self.rho:g})-zCDP {self._under()}",)

    def notes(self) -> tuple[str, ...]:
        return (ASSUMED.format(what="ρ"),) if self.adjacency is None else ()
