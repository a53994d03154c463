"""dp-accounting's events: what each leaf of an event tree costs, at order 2 (replace-one) and in KL."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import renyi
from ._check import InputError


@dataclass(frozen=True)
class Leaf:
    order2: float
    kl: float


def leaves(event: Any) -> list[tuple[Leaf, int]]:
    """The event's leaves, each with how often it was run."""
    import dp_accounting as dp

    if isinstance(event, dp.SelfComposedDpEvent):
        return [(leaf, count * event.count) for leaf, count in leaves(event.event)]
    if isinstance(event, dp.ComposedDpEvent):
        return [pair for part in event.events for pair in leaves(part)]
    kind = type(event).__name__
    if kind not in _LEAVES:
        raise InputError("event", f"must be made of {', '.join(sorted(_LEAVES))} and compositions of them", kind)
    return [(_LEAVES[kind](event), 1)]


def _inner_shift(event: Any) -> float:
    """m of the Gaussian, or of the composition of Gaussians, inside a sampled event."""
    import dp_accounting as dp

    if isinstance(event, dp.GaussianDpEvent):
        return 1 / event.noise_multiplier if event.noise_multiplier > 0 else math.inf
    if isinstance(event, dp.SelfComposedDpEvent):
        return math.sqrt(event.count) * _inner_shift(event.event)
    if isinstance(event, dp.ComposedDpEvent):
        return math.sqrt(sum(_inner_shift(part) ** 2 for part in event.events))
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
    m, q = _inner_shift(event.event), event.sample_size / event.source_dataset_size
    if q == 0 or m == math.inf:
        return Leaf(0.0, 0.0) if q == 0 else Leaf(math.inf, math.inf)
    return Leaf(renyi.order2_fixed(m, q), renyi.kl_fixed(m, q))


def _laplace_leaf(event: Any) -> Leaf:
    """Shift 2/b under replace-one: e^{D₂} = ⅔e^t + ⅓e^{−2t}; shift 1/b without the record: KL = t + e^{−t} − 1."""
    if event.noise_multiplier <= 0:
        return Leaf(math.inf, math.inf)
    t, one = 2 / event.noise_multiplier, 1 / event.noise_multiplier
    return Leaf(t + math.log1p(math.expm1(-3 * t) / 3), one + math.expm1(-one))


def _response_leaf(event: Any) -> Leaf:
    p, k = event.noise_parameter, event.num_buckets
    if k == 1 or p == 1:
        return Leaf(0.0, 0.0)
    if p == 0:
        return Leaf(math.inf, math.inf)
    eps = math.log1p((1 - p) * k / p)
    return Leaf(renyi.order2_pure(eps), renyi.kl_pure(eps))


_LEAVES: dict[str, Callable[[Any], Leaf]] = {
    "NoOpDpEvent": lambda event: Leaf(0.0, 0.0),
    "NonPrivateDpEvent": lambda event: Leaf(math.inf, math.inf),
    "GaussianDpEvent": _gaussian_leaf,
    "PoissonSampledDpEvent": _poisson_leaf,
    "SampledWithoutReplacementDpEvent": _fixed_leaf,
    "LaplaceDpEvent": _laplace_leaf,
    "RandomizedResponseDpEvent": _response_leaf,
}
