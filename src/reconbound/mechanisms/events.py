"""dp-accounting's events: the cost of each leaf of an event tree, at order 2 (replace-one), in KL, and as a PLD."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from reconbound import divergences as renyi
from reconbound._internal.checks import InputError, number, whole
from reconbound.mechanisms import plds


@dataclass(frozen=True)
class Leaf:
    """The divergences of one event."""

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
    if kind not in _LEAVES:
        raise InputError("event", f"must be made of {', '.join(sorted(_LEAVES))} and compositions of them", kind)
    return [(replace(_LEAVES[kind](event), event=event), 1)]


def pld(event: Any, replace_one: bool) -> Any:
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
    parts = [(leaf.event, count) for leaf, count in leaves(event) if leaf.order2 > 0]
    if any(leaf.order2 == math.inf for leaf, _ in leaves(event)):
        return None
    if not all(dp.pld.PLDAccountant(relation).supports(part) for part, _ in parts):
        return None
    width = sum(_width(part, count, replace_one) for part, count in parts)
    if width > 1e5:
        return None
    grid = max(width / 1.5e5, 1e-9)
    total = dp.pld.PLDAccountant(relation, grid)._pld
    with plds.quiet():
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
        return 40 * m if m <= plds.LARGEST_SHIFT else math.inf
    if isinstance(event, dp.PoissonSampledDpEvent):
        m = _inner_shift(event.event)
        if m > plds.LARGEST_SHIFT:
            return math.inf
        _, deviation, single = plds.loss_scale(m, event.sampling_probability, replace_one)
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


def _gaussian_leaf(event: Any) -> Leaf:
    m = _inner_shift(event)
    return Leaf(4 * m * m, m * m / 2)


def _poisson_leaf(event: Any) -> Leaf:
    m, q = _inner_shift(event.event), event.sampling_probability
    if q == 0 or m == math.inf:
        return Leaf(0.0, 0.0) if q == 0 else Leaf(math.inf, math.inf)
    return Leaf(renyi.order2_poisson(m, q), renyi.kl_poisson(m, q))


def _fixed_leaf(event: Any) -> Leaf:
    """Returns the cost of Gaussians on one batch of fixed size.

    With several Gaussians on one batch, each may depend on the last. For these only the convexity bound of KL is proved
    (the bound at order 2 holds for any mechanism, and so does the Poisson one: docs/theory/divergences.md 4.2).
    """
    import dp_accounting as dp

    m, q = _inner_shift(event.event), event.sample_size / event.source_dataset_size
    if q == 0 or m == math.inf:
        return Leaf(0.0, 0.0) if q == 0 else Leaf(math.inf, math.inf)
    single = isinstance(event.event, dp.GaussianDpEvent)
    return Leaf(renyi.order2_fixed(m, q), renyi.kl_fixed(m, q) if single else q * m * m / 2)


def _laplace_leaf(event: Any) -> Leaf:
    """Returns the cost of Laplace noise.

    Shift 2/b under replace-one: e^{D₂} = ⅔e^t + ⅓e^{−2t}; shift 1/b without the record: KL = t + e^{−t} − 1.
    """
    if not event.noise_multiplier > 0:
        return Leaf(math.inf, math.inf)
    t, one = 2 / event.noise_multiplier, 1 / event.noise_multiplier
    return Leaf(t + math.log1p(math.expm1(-3 * t) / 3), one + math.expm1(-one))


def _response_leaf(event: Any) -> Leaf:
    p = number("noise_parameter", event.noise_parameter, at_least=0.0, at_most=1.0)
    k = whole("num_buckets", event.num_buckets)
    if k == 1 or p == 1:
        return Leaf(0.0, 0.0)
    if p == 0:
        return Leaf(math.inf, math.inf)
    eps = _response_epsilon(event)
    return Leaf(renyi.order2_pure(eps), renyi.kl_pure(eps))


def _response_epsilon(event: Any) -> float:
    """Returns ln(1 + (1 − p)k/p), for p as small as the smallest float."""
    p, k = event.noise_parameter, event.num_buckets
    return math.log1p((1 - p) * k / p) if p > 1e-9 else math.log(p + (1 - p) * k) - math.log(p)


_LEAVES: dict[str, Callable[[Any], Leaf]] = {
    "NoOpDpEvent": lambda event: Leaf(0.0, 0.0),
    "NonPrivateDpEvent": lambda event: Leaf(math.inf, math.inf),
    "GaussianDpEvent": _gaussian_leaf,
    "PoissonSampledDpEvent": _poisson_leaf,
    "SampledWithoutReplacementDpEvent": _fixed_leaf,
    "LaplaceDpEvent": _laplace_leaf,
    "RandomizedResponseDpEvent": _response_leaf,
}
