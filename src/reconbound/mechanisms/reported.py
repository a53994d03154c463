"""Mechanisms of which only a reported number is known: (ε, δ), or an order-2 Rényi divergence."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import renyi
from .._check import choice, number, whole
from ..bounds import (
    membership_from_pure,
    overlap_from_order2,
    overlap_from_pure,
    overlap_from_renyi,
    rero_from_pure,
)
from ._base import ADJACENCIES, REPLACE_ONE, Mechanism, plain


@dataclass(frozen=True)
class DP(Mechanism):
    """A mechanism of which only (ε, δ) is known.

    Attributes:
        epsilon: ε.
        delta: δ.
        adjacency: for which neighbours they hold: "replace-one", or "add/remove" as Opacus and most libraries for
            private SGD report them. If you do not know, say "add/remove": replace-one answers then follow by group
            privacy, (2ε, (1 + e^ε)δ), and are lower.

    >>> round(DP(2.0).order2(), 6), DP(1.0, 1e-5).order2()
    (1.875548, inf)
    """

    epsilon: float
    delta: float = 0.0
    adjacency: str = REPLACE_ONE

    def __post_init__(self) -> None:
        epsilon = number("epsilon", self.epsilon, at_least=0.0)
        plain(self, epsilon=epsilon, delta=number("delta", self.delta, at_least=0.0, below=1.0))
        choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.adjacency

    @property
    def paper_neighbours(self) -> str:
        return self.adjacency

    def for_group(self, copies: int) -> DP:
        """Returns (kε, δ (e^{kε} − 1)/(e^ε − 1)): group privacy."""
        k, e = whole("copies", copies), min(self.epsilon, 700.0)
        times = float(k) if e == 0 else math.expm1(min(k * e, 700.0)) / math.expm1(e)
        return DP(k * self.epsilon, min(self.delta * times, 1 - 1e-16), self.adjacency)

    def _replace_one(self) -> tuple[float, float]:
        if self.adjacency == REPLACE_ONE:
            return self.epsilon, self.delta
        return 2 * self.epsilon, min(self.delta * (1 + math.exp(min(self.epsilon, 700.0))), 1.0)

    def order2(self) -> float:
        return renyi.order2_pure(self._replace_one()[0]) if self.delta == 0 else math.inf

    def order2_paper(self) -> float | None:
        return self.epsilon if self.delta == 0 else None

    def kl(self) -> float:
        return renyi.kl_pure(self.epsilon) if self.delta == 0 else math.inf

    def overlap(self) -> float:
        return overlap_from_pure(*self._replace_one())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        eps, own = (self.epsilon, self.delta) if adjacency == self.adjacency else self._replace_one()
        if choice("adjacency", adjacency, ADJACENCIES) != REPLACE_ONE and adjacency != self.adjacency:
            return None
        return eps if delta >= own else None

    def membership_advantage(self) -> float:
        return membership_from_pure(*self._replace_one())

    def rero(self, kappa: Any) -> Any:
        return rero_from_pure(kappa, self.epsilon, self.delta)

    def assumes(self) -> tuple[str, ...]:
        return (f"({self.epsilon:g}, {self.delta:g})-DP under {self.adjacency}",)

    def notes(self) -> tuple[str, ...]:
        grouped = ""
        if self.adjacency != REPLACE_ONE:
            eps, delta = self._replace_one()
            grouped = (
                "ε is for adding or removing a record; what is said of replace-one neighbours follows from it by group "
                f"privacy: ({eps:g}, {delta:.3g})."
            )
        if self.delta == 0:
            return (grouped,) if grouped else ()
        return (
            *((grouped,) if grouped else ()),
            "(ε, δ) alone allows that with chance δ everything is revealed: theorem1, corners and rate_distortion say "
            "nothing from it. Describe the mechanism itself (its noise) for all floors.",
        )

    def to_dict(self) -> dict[str, Any]:
        return {"type": "DP", "epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency}


@dataclass(frozen=True)
class RenyiDP(Mechanism):
    """A mechanism of which only a Rényi divergence under replace-one is known: (order, ε)-RDP.

    Attributes:
        epsilon: ε, the divergence in nats. order: α; from 2 on all floors speak, below 1 only Le Cam's.

    >>> RenyiDP(2.0).order2(), RenyiDP(2.0, order=1.5).order2()
    (2.0, inf)
    """

    epsilon: float
    order: float = 2.0

    def __post_init__(self) -> None:
        epsilon = number("epsilon", self.epsilon, at_least=0.0)
        plain(self, epsilon=epsilon, order=number("order", self.order, at_least=0.5))

    def order2(self) -> float:
        return self.epsilon if self.order >= 2 else math.inf

    def order2_paper(self) -> float | None:
        return self.epsilon if self.order >= 2 else None

    def kl(self) -> float:
        return self.epsilon if self.order >= 1 else math.inf

    def overlap(self) -> float:
        return max(overlap_from_renyi(self.epsilon, self.order), overlap_from_order2(self.order2()))

    def assumes(self) -> tuple[str, ...]:
        return (f"({self.order:g}, {self.epsilon:g})-RDP under replace-one",)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "RenyiDP", "order": self.order, "epsilon": self.epsilon}
