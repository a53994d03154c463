"""Groups: what a mechanism guarantees to a person who has several rows, all of which change together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, whole
from reconbound.bounds.parts import Parts
from reconbound.bounds.trade_off import Least, TradeOff
from reconbound.mechanisms.base import ADD_REMOVE, REPLACE_ONE, Mechanism
from reconbound.mechanisms.dp_accounting import as_mechanism


def group_of(mechanism: Any, copies: int) -> Mechanism:
    """Returns the mechanism for a person with this many rows.

    Args:
        mechanism: a Mechanism, or a DpEvent or PLD of dp-accounting.
        copies: k, the number of rows.
    """
    m, k = as_mechanism(mechanism), whole("group", copies)
    return m if k == 1 else GroupOf(m, k)


@dataclass(frozen=True)
class GroupOf(Mechanism):
    """A mechanism whose neighbours differ in k rows: each answer is the better of two that are known.

    One counts the rows as one record (`for_group`, where the mechanism has it). The other takes k steps from row to
    row: curves by docs/theory/risks.md 8.4; the overlap because √LC is a metric.

    Attributes:
        mechanism: the mechanism for one row.
        copies: k.
    """

    mechanism: Mechanism
    copies: int
    _curves: dict[str, TradeOff | None] = field(default_factory=dict, init=False, repr=False, compare=False)

    @cached_property
    def _together(self) -> Mechanism | None:
        """Returns the mechanism with all rows as one record; None where nothing is known of it."""
        try:
            return self.mechanism.for_group(self.copies)
        except InputError:
            return None

    @property
    def sampler(self) -> str:  # type: ignore[override]
        return self.mechanism.sampler

    @property
    def radius(self) -> float | None:  # type: ignore[override]
        return self.mechanism.radius

    @property
    def randomness(self) -> str:
        return self.mechanism.randomness

    @property
    def kl_neighbours(self) -> str:
        return self.mechanism.kl_neighbours

    def order2(self) -> float:
        return math.inf if self._together is None else self._together.order2()

    def order2_both_ends(self) -> float:
        return math.inf if self._together is None else self._together.order2_both_ends()

    def kl(self) -> float:
        return math.inf if self._together is None else self._together.kl()

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        return super().parts() if self._together is None else self._together.parts(quick=quick)

    def overlap(self) -> float:
        steps = max(1 - self.copies**2 * (1 - self.mechanism.overlap()), 0.0)
        return steps if self._together is None else max(steps, self._together.overlap())

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        if adjacency not in self._curves:
            single = self.mechanism.trade_off(adjacency)
            curves = [] if single is None else [single.group(self.copies)]
            together = None if self._together is None else self._together.trade_off(adjacency)
            curves += [] if together is None else [together]
            self._curves[adjacency] = Least(tuple(curves)) if curves else None
        return self._curves[adjacency]

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        together = None if self._together is None else self._together.epsilon_at(delta, adjacency)
        curve = self.trade_off(adjacency)
        steps = None if curve is None else curve.epsilon(delta)
        return min((e for e in (together, steps) if e is not None), default=None)

    def membership_advantage(self) -> float:
        curve = self.trade_off(REPLACE_ONE)
        found = [curve.advantage] if curve is not None else [1.0]
        return min([*found, *([self._together.membership_advantage()] if self._together is not None else [])])

    def rero(self, kappa: Any) -> Any:
        curves = [self.trade_off(adjacency) for adjacency in (ADD_REMOVE, REPLACE_ONE)]
        found = [curve.tpr(kappa) for curve in curves if curve is not None]  # either world is blind to the rows
        found += [] if self._together is None else [self._together.rero(kappa)]
        return np.min(found, axis=0)[()]

    @property
    def never_drawn(self) -> float:
        return 0.0 if self._together is None else self._together.never_drawn

    def for_group(self, copies: int) -> Mechanism:
        return group_of(self.mechanism, self.copies * whole("copies", copies))

    def assumes(self) -> tuple[str, ...]:
        return (*self.mechanism.assumes(), f"neighbours differ in {self.copies} rows of one person")

    def notes(self) -> tuple[str, ...]:
        own = () if self._together is None else self._together.notes()
        return (*own, f"Everything is for a person with {self.copies:,} rows, all of which change together.")

    def to_dict(self) -> dict[str, Any]:
        return {**self.mechanism.to_dict(), "group": self.copies}

    def __str__(self) -> str:
        return f"{self.mechanism}; for {self.copies:,} rows of one person"
