"""Mechanisms that dp-accounting describes: by a privacy loss distribution, or by an event."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, choice, number
from reconbound.bounds import overlap_from_losses
from reconbound.mechanisms import plds
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, Mechanism
from reconbound.mechanisms.events import leaves, sampling_rate
from reconbound.mechanisms.events import pld as event_pld
from reconbound.mechanisms.sampled_gaussian import SampledGaussian


@dataclass(frozen=True)
class PLD(Mechanism):
    """A privacy loss distribution from dp-accounting, with the neighbours that it is for.

    The distribution itself does not contain them. Add/remove is dp-accounting's default, and ours: the overlap and the
    membership advantage under replace-one then follow by the triangle inequality, through the release without the
    record; order 2 and (ε, δ) under replace-one are not known.

    Optimistic distributions (pessimistic_estimate=False) are refused: their ε is a lower bound, and floors would be
    too high. Order 2 and KL are infinite where the distribution has mass at infinity, as truncated ones do.
    """

    pld: Any
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        if not (hasattr(self.pld, "_pmf_remove") and hasattr(self.pld, "_pmf_add")):
            raise InputError("pld", "must be a PrivacyLossDistribution of dp-accounting", self.pld)
        plds.check_pessimistic(self.pld)
        choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.adjacency

    def _worst(self, of: Callable[[np.ndarray, np.ndarray], float]) -> float:
        """Returns the larger of both directions' values; inf with mass at infinity or with rounding below zero."""
        worst = 0.0
        for losses, mass, infinite in plds.directions(self.pld):
            if infinite > 0 or mass.min() < 0:
                return math.inf
            there = mass > 0
            worst = max(worst, of(losses[there], mass[there]))
        return worst

    def order2(self) -> float:
        if self.adjacency != REPLACE_ONE:
            return math.inf
        return self._worst(lambda losses, mass: float(np.logaddexp.reduce(losses + np.log(mass))))  # ln E_P[e^L]

    def kl(self) -> float:
        return self._worst(lambda losses, mass: float(np.sum(mass * losses)))

    def overlap(self) -> float:
        """Returns a lower bound on 1 − LC under replace-one.

        √LC is a metric (pq/(p + q) is a positive definite kernel): twice the distance is at most four times the LC.
        """
        known = min(overlap_from_losses(*direction) for direction in plds.directions(self.pld))
        known = max(known - 2 * plds.rounding(self.pld), 0.0)
        return known if self.adjacency == REPLACE_ONE else max(1 - 4 * (1 - known), 0.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        own = choice("adjacency", adjacency, ADJACENCIES) == self.adjacency
        return plds.epsilon(self.pld, delta) if own else None

    def membership_advantage(self) -> float:
        apart = plds.delta(self.pld, 0.0)  # total variation
        return apart if self.adjacency == REPLACE_ONE else min(2 * apart, 1.0)

    def rero(self, kappa: Any) -> Any:
        return plds.rero(self.pld, kappa)

    def assumes(self) -> tuple[str, ...]:
        return (f"the given privacy loss distribution, under {self.adjacency}",)

    def notes(self) -> tuple[str, ...]:
        silent, why = [], []
        if self.order2() == math.inf:
            silent += ["theorem1", "corners"]
        if self.kl() == math.inf:
            silent += ["rate_distortion"]
            why += ["it has mass at infinity, as dp-accounting's cut tails do"]
        if self.adjacency != REPLACE_ONE:
            why += ["it is for add/remove, and bounds no order-2 divergence under replace-one"]
        if not silent:
            return ()
        return (
            f"the privacy loss distribution says nothing for {', '.join(silent)}: {'; '.join(why)}. Give the DpEvent "
            "instead of its distribution for all floors.",
        )

    def to_dict(self) -> dict[str, Any]:
        return {"type": "PLD", "adjacency": self.adjacency}


@dataclass(frozen=True)
class Event(Mechanism):
    """A dp-accounting DpEvent that is more than T equal Gaussian steps: its leaves' divergences are added up.

    Noise multipliers are taken as dp-accounting means them: over the add/remove sensitivity; replace-one doubles it.
    """

    event: Any

    def __post_init__(self) -> None:
        self.order2()  # refuses what it does not know at once

    @property
    def kl_neighbours(self) -> str:
        return ADD_OR_ZERO

    def order2(self) -> float:
        return math.fsum(count * leaf.order2 for leaf, count in leaves(self.event))

    def kl(self) -> float:
        return math.fsum(count * leaf.kl for leaf, count in leaves(self.event))

    @cached_property
    def _plds(self) -> dict[str, Any]:
        return {adjacency: event_pld(self.event, adjacency == REPLACE_ONE) for adjacency in ADJACENCIES}

    def _pld(self, adjacency: str) -> Any:
        return self._plds[choice("adjacency", adjacency, ADJACENCIES)]

    def overlap(self) -> float:
        pld = self._pld(REPLACE_ONE)
        return max(super().overlap(), PLD(pld, REPLACE_ONE).overlap() if pld is not None else 0.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        pld, simple = self._pld(adjacency), super().epsilon_at(delta, adjacency)
        known = [e for e in (simple, plds.epsilon(pld, delta) if pld is not None else None) if e is not None]
        return min(known) if known else None

    def membership_advantage(self) -> float:
        pld = self._pld(REPLACE_ONE)
        return min(super().membership_advantage(), plds.delta(pld, 0.0) if pld is not None else 1.0)

    def rero(self, kappa: Any) -> Any:
        pld = self._pld(ADD_REMOVE)
        return np.minimum(super().rero(kappa), plds.rero(pld, kappa) if pld is not None else 1.0)[()]

    @property
    def never_drawn(self) -> float:
        return math.prod((1 - sampling_rate(leaf.event)) ** count for leaf, count in leaves(self.event))

    def to_dict(self) -> dict[str, Any]:
        return {"type": "Event", "event": str(self.event)}


def as_mechanism(given: Any, adjacency: str = ADD_REMOVE) -> Mechanism:
    """Returns the mechanism itself, or the one that a dp-accounting DpEvent or PLD describes.

    Args:
        given: a Mechanism, a dp-accounting DpEvent or PrivacyLossDistribution.
        adjacency: the neighbours of a PLD ("replace-one" or "add/remove", dp-accounting's default); ignored otherwise.

    >>> import dp_accounting as dp
    >>> as_mechanism(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.01, dp.GaussianDpEvent(1.0)), 1000)).steps
    1000
    """
    if isinstance(given, Mechanism):
        return given
    dp = sys.modules.get("dp_accounting")  # not loaded: then nothing of it can have been given
    if dp is not None and isinstance(given, dp.pld.privacy_loss_distribution.PrivacyLossDistribution):
        return PLD(given, adjacency)
    if dp is not None and isinstance(given, dp.DpEvent):
        return _steps(given) or Event(given)
    raise InputError("mechanism", "must be a reconbound Mechanism, or a DpEvent or PLD of dp-accounting", given)


def _steps(event: Any) -> SampledGaussian | None:
    """Returns T equal Gaussian steps, if the event is just that; otherwise None."""
    import dp_accounting as dp

    count = 1
    while isinstance(event, dp.SelfComposedDpEvent):
        event, count = event.event, count * event.count
    q, sampler = 1.0, "poisson"
    if isinstance(event, dp.PoissonSampledDpEvent):
        event, q = event.event, event.sampling_probability
    elif isinstance(event, dp.SampledWithoutReplacementDpEvent):
        event, q, sampler = event.event, event.sample_size / event.source_dataset_size, "fixed"
    if not isinstance(event, dp.GaussianDpEvent) or event.noise_multiplier <= 0 or q == 0 or count == 0:
        return None
    return SampledGaussian(event.noise_multiplier, q, count, clip="hard", sampler=sampler)
