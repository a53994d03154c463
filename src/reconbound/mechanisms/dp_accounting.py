"""Mechanisms that dp-accounting describes: by a privacy loss distribution, or by a tree of events.

`leaves` gives the cost of each leaf of such a tree, at order 2 (replace-one) and in KL. dp-accounting is imported when
first needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, choice, number, whole
from reconbound.bounds import overlap_from_losses
from reconbound.bounds.parts import Parts
from reconbound.bounds.trade_off import TradeOff
from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, Mechanism
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
        for losses, mass, infinite in privacy_loss.directions(self.pld):
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

    def parts(self) -> tuple[Parts, ...]:
        return (*super().parts(), privacy_loss.worse_parts(self.pld, self.adjacency))

    def overlap(self) -> float:
        """Returns a lower bound on 1 − LC under replace-one.

        √LC is a metric (pq/(p + q) is a positive definite kernel): twice the distance is at most four times the LC.
        """
        known = min(overlap_from_losses(*direction) for direction in privacy_loss.directions(self.pld))
        known = max(known - 2 * privacy_loss.rounding(self.pld), 0.0)
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
        return privacy_loss.rero(self.pld, kappa)

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
class Event(Mechanism):
    """A dp-accounting DpEvent that is more than T equal Gaussian steps: its leaves' divergences are added up.

    Noise multipliers are taken as dp-accounting means them: over the add/remove sensitivity; replace-one doubles it.
    """

    event: Any
    kl_neighbours = ADD_OR_ZERO

    def __post_init__(self) -> None:
        self.order2()  # refuses what it does not know at once

    def order2(self) -> float:
        return math.fsum(count * leaf.order2 for leaf, count in leaves(self.event))

    def kl(self) -> float:
        return math.fsum(count * leaf.kl for leaf, count in leaves(self.event))

    def parts(self) -> tuple[Parts, ...]:
        pld = self._plds[ADD_REMOVE]
        return super().parts() if pld is None else (*super().parts(), privacy_loss.parts(pld, ADD_REMOVE))

    @cached_property
    def _plds(self) -> dict[str, Any]:
        return {adjacency: event_pld(self.event, adjacency == REPLACE_ONE) for adjacency in ADJACENCIES}

    def _pld(self, adjacency: str) -> Any:
        return self._plds[adjacency]

    def overlap(self) -> float:
        pld, simple = self._plds[REPLACE_ONE], super().overlap()
        return simple if pld is None else max(simple, PLD(pld, REPLACE_ONE).overlap())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        simple, pld = super().epsilon_at(delta, adjacency), self._plds[adjacency]
        better = None if pld is None else privacy_loss.epsilon(pld, delta)
        return min((e for e in (simple, better) if e is not None), default=None)

    def membership_advantage(self) -> float:
        pld, simple = self._plds[REPLACE_ONE], super().membership_advantage()
        return simple if pld is None else min(simple, privacy_loss.delta(pld, 0.0))

    def rero(self, kappa: Any) -> Any:
        pld = self._plds[ADD_REMOVE]
        return np.minimum(super().rero(kappa), privacy_loss.rero(pld, kappa) if pld is not None else 1.0)[()]

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


@dataclass(frozen=True)
class Leaf:
    """One leaf of an event: its order-2 divergence under replace-one, its KL divergence, and the event itself."""

    order2: float
    kl: float
    event: Any = None


def leaves(event: Any) -> list[tuple[Leaf, int]]:
    """Returns the event's leaves, each with the number of times it was run."""
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        times = whole("count", event.count, at_least=0)
        return [(leaf, count * times) for leaf, count in leaves(event.event) if times > 0]
    if isinstance(event, dp.ComposedDpEvent):
        return [pair for part in event.events for pair in leaves(part)]
    kind = type(event).__name__
    if kind not in _COSTS:
        raise InputError("event", f"must be made of {', '.join(sorted(_COSTS))} and compositions of them", kind)
    return [(Leaf(*_COSTS[kind](event), event), 1)]


def event_pld(event: Any, replace_one: bool) -> Any:
    """Returns the event's PLD; None where dp-accounting has none, losses are enormous, or part is not private.

    It is built leaf by leaf, because PLDAccountant 0.6 leaves what is not private at all out of its distribution (only
    a flag records it), counts a self-composed randomised response once, and has one grid for large and small
    losses (tests/mechanisms/test_dp_accounting.py).

    Args:
        event: a DpEvent of dp-accounting.
        replace_one: neighbours differ in one record's value; otherwise one record is added or removed.
    """
    import dp_accounting as dp

    relations = dp.NeighboringRelation
    relation = relations.REPLACE_ONE if replace_one else relations.ADD_OR_REMOVE_ONE
    costly = [(leaf, count) for leaf, count in leaves(event) if leaf.order2 > 0]
    parts = [(leaf.event, count) for leaf, count in costly]
    supports = dp.pld.PLDAccountant(relation).supports
    if any(leaf.order2 == math.inf or not supports(leaf.event) for leaf, _ in costly):
        return None
    width = sum(_width(part, count, replace_one) for part, count in parts)
    if width > 1e5:
        return None
    grid = max(width / 1.5e5, 1e-9)
    total = dp.pld.PLDAccountant(relation, grid)._pld
    with privacy_loss.quiet():
        for part, count in parts:
            accountant = dp.pld.PLDAccountant(relation, grid)
            if isinstance(part, dp.RandomizedResponseDpEvent):
                one = accountant.compose(part)._pld
                total = total.compose(one.self_compose(count) if count > 1 else one)
            else:
                total = total.compose(accountant.compose(part, count)._pld)
    return total


def _width(event: Any, count: int, replace_one: bool) -> float:
    """Estimates how wide the losses of `count` such events spread."""
    import dp_accounting as dp

    if isinstance(event, dp.GaussianDpEvent):
        m = math.sqrt(count) * _inner_shift(event)
        return 40 * m if m <= privacy_loss.LARGEST_SHIFT else math.inf
    if isinstance(event, dp.PoissonSampledDpEvent):
        m = _inner_shift(event.event)
        if m > privacy_loss.LARGEST_SHIFT:
            return math.inf
        _, deviation, single = privacy_loss.loss_scale(m, event.sampling_probability, replace_one)
        return 16 * math.sqrt(count) * deviation + 2 * single
    single = 1 / event.noise_multiplier if isinstance(event, dp.LaplaceDpEvent) else _response_epsilon(event)
    return 2 * single * min(float(count), 16 * math.sqrt(count))


def sampling_rate(leaf: Any) -> float:
    """Returns the chance of a record to be in the batch of a leaf: 1 where nothing is sampled."""
    kind = type(leaf).__name__
    if kind == "PoissonSampledDpEvent":
        return float(leaf.sampling_probability)
    if kind == "SampledWithoutReplacementDpEvent":
        return float(leaf.sample_size / leaf.source_dataset_size)
    return 0.0 if kind == "NoOpDpEvent" else 1.0


def _inner_shift(event: Any) -> float:
    """Returns m of the Gaussian, or of the composition of Gaussians, inside a sampled event."""
    import dp_accounting as dp

    if isinstance(event, dp.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp.SelfComposedDpEvent):
        return math.sqrt(whole("count", event.count, at_least=0)) * _inner_shift(event.event)
    if isinstance(event, dp.ComposedDpEvent):
        return math.hypot(*(_inner_shift(part) for part in event.events))
    raise InputError("event", "must hold a GaussianDpEvent inside a sampled event", type(event).__name__)


def _gaussian_cost(event: Any) -> tuple[float, float]:
    m = _inner_shift(event)
    return 4 * m * m, m * m / 2


def _sampled_cost(event: Any) -> tuple[float, float]:
    """Returns the cost of Gaussians on one batch.

    With several Gaussians on one batch, each may depend on the last. For a batch of fixed size only the convexity bound
    of KL and Wang's bound at order 2 are proved then; the Poisson ones are too (docs/theory/divergences.md 4.2).
    """
    m, q = _inner_shift(event.event), sampling_rate(event)
    if q == 0 or m == math.inf:
        return _NO_COST if q == 0 else _NOT_PRIVATE
    if type(event).__name__ == "PoissonSampledDpEvent":
        return renyi.order2_poisson(m, q), renyi.poisson_kl(m, q)
    single = type(event.event).__name__ == "GaussianDpEvent"
    order2 = renyi.order2_fixed(m, q, method="convexity" if single else "wang")
    return order2, renyi.kl_fixed(m, q) if single else q * m * m / 2


def _laplace_cost(event: Any) -> tuple[float, float]:
    """Returns the cost of Laplace noise.

    Shift 2/b under replace-one: e^{D₂} = ⅔e^t + ⅓e^{−2t}; shift 1/b without the record: KL = t + e^{−t} − 1.
    """
    if not event.noise_multiplier > 0:
        return _NOT_PRIVATE
    t, one = 2 / event.noise_multiplier, 1 / event.noise_multiplier
    return t + math.log1p(math.expm1(-3 * t) / 3), one + math.expm1(-one)


def _response_cost(event: Any) -> tuple[float, float]:
    p = number("noise_parameter", event.noise_parameter, at_least=0.0, at_most=1.0)
    if whole("num_buckets", event.num_buckets) == 1 or p == 1:
        return _NO_COST
    if p == 0:
        return _NOT_PRIVATE
    eps = _response_epsilon(event)
    return renyi.order2_pure(eps), renyi.kl_pure(eps)


def _response_epsilon(event: Any) -> float:
    """Returns ln(1 + (1 − p)k/p), for p as small as the smallest float."""
    p, k = event.noise_parameter, event.num_buckets
    return math.log1p((1 - p) * k / p) if p > 1e-9 else math.log(p + (1 - p) * k) - math.log(p)


_NO_COST, _NOT_PRIVATE = (0.0, 0.0), (math.inf, math.inf)
#: The order-2 divergence and the KL divergence of each kind of leaf.
_COSTS: dict[str, Callable[[Any], tuple[float, float]]] = {
    "NoOpDpEvent": lambda event: _NO_COST,
    "NonPrivateDpEvent": lambda event: _NOT_PRIVATE,
    "GaussianDpEvent": _gaussian_cost,
    "PoissonSampledDpEvent": _sampled_cost,
    "SampledWithoutReplacementDpEvent": _sampled_cost,
    "LaplaceDpEvent": _laplace_cost,
    "RandomizedResponseDpEvent": _response_cost,
}
