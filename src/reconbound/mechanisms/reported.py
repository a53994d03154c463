"""Mechanisms for which only a reported number is known: (ε, δ), or a Rényi divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound import bounds
from reconbound import divergences as renyi
from reconbound._internal.checks import choice, number, whole
from reconbound._internal.formatting import format_limit
from reconbound.bounds.bound import from_log
from reconbound.bounds.divergence_success import ChiSquareTradeOff
from reconbound.bounds.parts import Parts, parts_from_dp
from reconbound.bounds.trade_off import DPTradeOff, Least, TradeOff
from reconbound.mechanisms import base
from reconbound.mechanisms.base import ADD_REMOVE, ADJACENCIES, REPLACE_ONE, Mechanism

#: Stated where a number was given without its neighbours.
ASSUMED = (
    "{what} came without its neighbours: it was taken as replace-one (one record exchanged for another). What Opacus, "
    "TF Privacy and most libraries for private SGD report is for add/remove: say so (adjacency, --adjacency), which is "
    "safe either way and gives lower floors."
)


class _Reported(Mechanism):
    """A mechanism for which a number was reported, with its neighbours or without."""

    adjacency: str | None

    @property
    def neighbours(self) -> str:
        """Returns the neighbours for which the number holds."""
        return REPLACE_ONE if self.adjacency is None else choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.neighbours

    @property
    def paper_neighbours(self) -> str:
        return self.neighbours

    def _own_trade_off(self) -> TradeOff:
        """Returns the trade-off curve between the neighbours for which the number holds."""
        raise NotImplementedError

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        if choice("adjacency", adjacency, ADJACENCIES) == self.neighbours:
            return self._own_trade_off()
        if adjacency == ADD_REMOVE:
            return None
        # from a record to none, and from none to another one
        return Least((self._own_trade_off().group(2), ChiSquareTradeOff(self.order2())))

    def _under(self) -> str:
        """Names the neighbours, and says whether they were assumed."""
        return f"under {self.neighbours}{' (assumed: not given)' if self.adjacency is None else ''}"

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "adjacency": self.neighbours, "adjacency_assumed": self.adjacency is None}


@dataclass(frozen=True)
class DP(_Reported):
    """A mechanism for which only (ε, δ) is known.

    Attributes:
        epsilon: ε.
        delta: δ.
        adjacency: the neighbours for which they hold: "replace-one", or "add/remove" as Opacus and most libraries for
            private SGD report them. If you do not know, say "add/remove": replace-one answers then follow by group
            privacy, (2ε, (1 + e^ε)δ), and are lower. Left out, it is taken as replace-one, and every result says so.

    >>> round(DP(2.0).order2(), 6), DP(1.0, 1e-5).order2()
    (1.875548, inf)
    """

    epsilon: float
    delta: float = 0.0
    adjacency: str | None = None

    def __post_init__(self) -> None:
        epsilon = number("epsilon", self.epsilon, at_least=0.0)
        self._set(epsilon=epsilon, delta=number("delta", self.delta, at_least=0.0, below=1.0))
        _ = self.neighbours  # refuses unknown ones

    def for_group(self, copies: int) -> DP:
        """Returns (kε, δ (e^{kε} − 1)/(e^ε − 1)): group privacy.

        Args:
            copies: k, the number of rows.
        """
        k, e = whole("copies", copies), min(self.epsilon, 700.0)
        times = float(k) if e == 0 else math.expm1(min(k * e, 700.0)) / math.expm1(e)
        return DP(k * self.epsilon, min(self.delta * times, 1 - 1e-16), self.adjacency)

    def _replace_one(self) -> tuple[float, float]:
        """Returns (ε, δ) under replace-one: two steps of add/remove are (2ε, (1 + e^ε)δ)."""
        if self.neighbours == REPLACE_ONE or self.epsilon == 0 == self.delta:
            return self.epsilon, self.delta
        if self.delta == 0:
            return 2 * self.epsilon, 0.0
        grown = math.log(self.delta) + float(np.logaddexp(0.0, self.epsilon))
        return 2 * self.epsilon, min(from_log(grown) * (1 + 1e-12), 1.0)

    def _own_trade_off(self) -> TradeOff:
        return DPTradeOff(self.epsilon, self.delta)

    def order2(self) -> float:
        return renyi.order2_pure(self._replace_one()[0]) if self.delta == 0 else math.inf

    def order2_paper(self) -> float | None:
        return self.epsilon if self.delta == 0 else None

    def kl(self) -> float:
        return renyi.kl_pure(self.epsilon) if self.delta == 0 else math.inf

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        return (*super().parts(), parts_from_dp(self.epsilon, self.delta, self.neighbours))

    def overlap(self) -> float:
        return bounds.overlap_from_pure(*self._replace_one())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, at_least=0.0, below=1.0)
        own = choice("adjacency", adjacency, ADJACENCIES) == self.neighbours
        if adjacency == ADD_REMOVE and not own:
            return None
        eps, least = (self.epsilon, self.delta) if own else self._replace_one()
        return eps if delta >= least else None

    def membership_advantage(self) -> float:
        return bounds.membership_from_pure(*self._replace_one())

    def rero(self, kappa: Any) -> Any:
        return bounds.rero_from_pure(kappa, self.epsilon, self.delta)

    def assumes(self) -> tuple[str, ...]:
        return (f"({self.epsilon:g}, {self.delta:g})-DP {self._under()}",)

    def notes(self) -> tuple[str, ...]:
        notes = [ASSUMED.format(what="ε")] if self.adjacency is None else []
        if self.neighbours != REPLACE_ONE:
            eps, delta = self._replace_one()
            follows = "ε is for adding or removing a record; replace-one neighbours follow by group privacy"
            notes.append(f"{follows}: ({format_limit(eps, 6)}, {format_limit(delta)}).")
        if self.delta > 0:
            notes.append(
                "(ε, δ) allows that with chance δ everything is revealed: theorem1 and corners say nothing from it. "
                "Describe the mechanism itself (its noise) for all floors."
            )
        return tuple(notes)


@dataclass(frozen=True)
class RenyiDP(_Reported):
    """A mechanism for which only a Rényi divergence is known: (order, ε)-RDP, in both directions.

    Attributes:
        epsilon: ε, the divergence in nats.
        order: α; from 2 on all floors apply, below 1 only Le Cam's.
        adjacency: the neighbours for which it holds: "replace-one", or "add/remove" as Opacus and most libraries report
            it. Under add/remove the order-2 divergence between replace-one neighbours is 2.5 ε from order 4 on
            (docs/theory/divergences.md 4.6) and unknown below. Left out, it is taken as replace-one, and every result
            says so.

    >>> RenyiDP(2.0).order2(), RenyiDP(2.0, order=1.5).order2(), RenyiDP(2.0, 4, "add/remove").order2()
    (2.0, inf, 5.0)
    """

    epsilon: float
    order: float = 2.0
    adjacency: str | None = None

    def __post_init__(self) -> None:
        epsilon = number("epsilon", self.epsilon, at_least=0.0)
        self._set(epsilon=epsilon, order=number("order", self.order, at_least=0.5))
        _ = self.neighbours  # refuses unknown ones

    @property
    def _own_order2(self) -> float:
        """Returns the order-2 divergence between the neighbours that it holds for."""
        return self.epsilon if self.order >= 2 else math.inf

    def _own_trade_off(self) -> TradeOff:
        return ChiSquareTradeOff(self._own_order2)

    def order2(self) -> float:
        if self.neighbours == REPLACE_ONE or self.epsilon == 0:
            return self._own_order2
        return 2.5 * self.epsilon if self.order >= 4 else math.inf

    def order2_paper(self) -> float | None:
        return self.epsilon if self.order >= 2 else None

    def kl(self) -> float:
        return self.epsilon if self.order >= 1 else math.inf

    def overlap(self) -> float:
        known = max(bounds.overlap_from_renyi(self.epsilon, self.order), bounds.overlap_from_order2(self._own_order2))
        if self.neighbours == REPLACE_ONE:
            return known
        return max(1 - 4 * (1 - known), bounds.overlap_from_order2(self.order2()), 0.0)  # √LC is a metric

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        if choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE:
            found = super().epsilon_at(delta, adjacency)
            if found is not None:
                return found
            curve = self.trade_off(REPLACE_ONE)  # order 2 is unknown: by way of the release without the record
            return None if curve is None else curve.epsilon(delta)
        return None if self.neighbours == REPLACE_ONE else base.epsilon_from_order2(self._own_order2, delta)

    def membership_advantage(self) -> float:
        simple = base.advantage_from_order2(self.order2())
        return (
            simple if self.neighbours == REPLACE_ONE else min(simple, 2 * base.advantage_from_order2(self._own_order2))
        )

    def rero(self, kappa: Any) -> Any:
        return bounds.rero_from_order2(kappa, self._own_order2)

    def assumes(self) -> tuple[str, ...]:
        return (f"({self.order:g}, {self.epsilon:g})-RDP {self._under()}",)

    def notes(self) -> tuple[str, ...]:
        notes = [ASSUMED.format(what="The divergence")] if self.adjacency is None else []
        if self.order2() == math.inf:
            why = "order 2 under replace-one does not follow from it"
            notes.append(f"This Rényi divergence says nothing for theorem1 and corners: {why}.")
        return tuple(notes)
