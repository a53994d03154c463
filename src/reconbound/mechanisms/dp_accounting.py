"""Mechanisms that dp-accounting describes: by a privacy loss distribution, or by a tree of events (`events`).

dp-accounting is imported when first needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, choice, number
from reconbound.bounds.parts import Parts
from reconbound.bounds.success import chances
from reconbound.bounds.trade_off import TradeOff
from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, Mechanism
from reconbound.mechanisms.composition import Composed
from reconbound.mechanisms.events import event_releases
from reconbound.mechanisms.releases import Release
from reconbound.mechanisms.sampled_gaussian import SampledGaussian


@dataclass(frozen=True)
class PLD(Mechanism):
    """A privacy loss distribution from dp-accounting, with the neighbours that it is for.

    The distribution itself does not contain them. Add/remove is dp-accounting's default, and ours: the overlap and the
    membership advantage under replace-one then follow by the triangle inequality, through the release without the
    record; order 2 and (ε, δ) under replace-one are not known.

    Optimistic distributions (pessimistic_estimate=False) are refused: their ε is a lower bound, and floors would be
    too high. Order 2 and KL are infinite where the distribution has mass at infinity, as truncated ones do; floors for
    any attacker do not need them.
    """

    pld: Any
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        if not (hasattr(self.pld, "_pmf_remove") and hasattr(self.pld, "_pmf_add")):
            raise InputError("pld", "must be a PrivacyLossDistribution of dp-accounting", self.pld)
        privacy_loss.check_pessimistic(self.pld)
        choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.adjacency

    def _worst(self, of: Callable[[np.ndarray, np.ndarray], float]) -> float:
        """Returns the larger of both directions' values; inf with mass at infinity or with rounding below zero."""
        worst = 0.0
        for losses, mass, infinite in privacy_loss.directions(self.pld)[0]:
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

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        closed = super().parts()
        return closed if quick else (*closed, privacy_loss.worse_parts(self.pld, self.adjacency))

    def overlap(self) -> float:
        """Returns a lower bound on 1 − LC under replace-one.

        √LC is a metric (pq/(p + q) is a positive definite kernel): twice the distance is at most four times the LC.
        """
        known = privacy_loss.overlap(self.pld)
        return known if self.adjacency == REPLACE_ONE else max(1 - 4 * (1 - known), 0.0)

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        if choice("adjacency", adjacency, ADJACENCIES) == self.adjacency:
            return privacy_loss.trade_off(self.pld)
        # from a record to none, and from none to another one
        return privacy_loss.trade_off(self.pld).group(2) if adjacency == REPLACE_ONE else None

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        own = choice("adjacency", adjacency, ADJACENCIES) == self.adjacency
        return privacy_loss.epsilon(self.pld, delta) if own else None

    def membership_advantage(self) -> float:
        apart = privacy_loss.delta(self.pld, 0.0)  # total variation
        return apart if self.adjacency == REPLACE_ONE else min(2 * apart, 1.0)

    def rero(self, kappa: Any) -> Any:
        return privacy_loss.trade_off(self.pld).tpr(chances("kappa", kappa))

    def assumes(self) -> tuple[str, ...]:
        return (f"the given privacy loss distribution, under {self.adjacency}",)

    def notes(self) -> tuple[str, ...]:
        vacuous, why = [], []
        if self.order2() == math.inf:
            vacuous += ["theorem1", "corners"]
        if self.adjacency == REPLACE_ONE and vacuous:
            why += ["it has mass at infinity, as dp-accounting's cut tails do"]
        if self.adjacency != REPLACE_ONE:
            why += ["it is for add/remove, and bounds no order-2 divergence under replace-one"]
        if not vacuous:
            return ()
        return (
            f"the privacy loss distribution says nothing for {', '.join(vacuous)}: {'; '.join(why)}. Give the DpEvent "
            "instead of its distribution for all floors.",
        )

    def to_dict(self) -> dict[str, Any]:
        return {"type": "PLD", "adjacency": self.adjacency}


@dataclass(frozen=True)
class Event(Composed):
    """A dp-accounting DpEvent that is more than T equal Gaussian steps.

    Noise multipliers are taken as dp-accounting means them: over the add/remove sensitivity; replace-one doubles it.
    """

    event: Any
    kl_neighbours = ADD_OR_ZERO

    def __post_init__(self) -> None:
        self.releases()  # refuses what it does not know at once

    def releases(self) -> list[tuple[Release, int]]:
        return event_releases(self.event)

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
