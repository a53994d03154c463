"""Mechanisms: frozen records of what was released, and what each guarantees between neighbours.

A mechanism answers five questions, each conservatively: its order-2 Rényi divergence (replace-one), its KL divergence
to a release that does not depend on the record, its overlap 1 − LC (replace-one), its (ε, δ), and how often a
membership test or a reconstruction can succeed. `as_mechanism` turns a dp-accounting DpEvent or PLD into one."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar

import numpy as np

from . import plds, renyi
from ._check import InputError, choice, number, whole
from .bounds import (
    membership_from_pure,
    overlap_from_losses,
    overlap_from_order2,
    overlap_from_pure,
    overlap_from_renyi,
    rero_from_gdp,
    rero_from_order2,
    rero_from_pure,
)
from .bounds._bound import log_expm1
from .events import leaves
from .events import pld as event_pld

REPLACE_ONE, ADD_REMOVE = "replace-one", "add/remove"
ADJACENCIES = (REPLACE_ONE, ADD_REMOVE)
ZERO_OUT = "zero-out"
ADD_OR_ZERO = "add/remove or zero-out"


class Mechanism(ABC):
    """What one release guarantees. Only `order2` must be given: every other answer has a sound default from it."""

    sampler: str = "any"

    @property
    def kl_neighbours(self) -> str:
        """Between which releases `kl` is taken."""
        return REPLACE_ONE

    @property
    def paper_neighbours(self) -> str:
        """Between which releases `order2_paper` is taken."""
        return REPLACE_ONE

    @abstractmethod
    def order2(self) -> float:
        """Order-2 Rényi divergence of the whole release under replace-one, in nats; inf where none is known."""

    def order2_paper(self) -> float | None:
        """The divergence that the paper plugs into Theorem 1, where it differs; None where the paper has none."""
        return None

    def kl(self) -> float:
        """KL divergence to one release that does not depend on the record, in nats (at most the order-2 divergence)."""
        return self.order2()

    def overlap(self) -> float:
        """A lower bound on 1 − LC under replace-one."""
        return overlap_from_order2(self.order2())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        """ε at this δ, None where the mechanism does not say. From χ², tightly: ε = ln(1 + χ²/(4δ) − δ)."""
        d, eps = number("delta", delta, above=0.0, below=1.0), self.order2()
        if choice("adjacency", adjacency, ADJACENCIES) != REPLACE_ONE or eps == math.inf:
            return None
        log_ratio = log_expm1(eps) - math.log(4 * d)
        if log_ratio > 40:
            return log_ratio
        return max(math.log1p(math.exp(log_ratio) - d), 0.0)

    def membership_advantage(self) -> float:
        """Largest advantage of a test between replace-one neighbours. From χ² in both directions: √(χ²/(4 + χ²))."""
        eps = self.order2()
        return math.sqrt(-math.expm1(-eps) / (1 + 3 * math.exp(-eps)))

    def rero(self, kappa: Any) -> Any:
        """Largest chance to reconstruct, where a blind guess succeeds with chance κ."""
        return rero_from_order2(kappa, self.order2())

    def assumes(self) -> tuple[str, ...]:
        """What every floor of this mechanism rests on."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """The mechanism's public facts, for JSON."""
        told = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"type": type(self).__name__, **told}

    def __str__(self) -> str:
        told = ", ".join(f"{k.replace('_', ' ')} {v}" for k, v in self.to_dict().items() if k != "type")
        return f"{type(self).__name__}: {told}"


def _plain(mechanism: Mechanism, **values: float) -> None:
    """Keep checked numbers as plain floats and ints, whatever NumPy type they came in."""
    for name, value in values.items():
        object.__setattr__(mechanism, name, value)


@dataclass(frozen=True)
class SampledGaussian(Mechanism):
    """T steps of the Gaussian mechanism on clipped gradients, as in private SGD.

    Attributes:
        noise_multiplier: the noise's standard deviation on the SUM of clipped gradients over the clip norm, σ.
        sample_rate: q, the chance of a record to be in a batch (B/N for fixed-size batches).
        steps: T.
        clip: "smooth" (the paper's GELU clip, norms up to 1.1153 C) or "hard" (norms up to C, as in Opacus).
        sampler: "poisson", or "fixed": uniform batches of fixed size without replacement. Epoch shuffling is neither:
            for it, give sample_rate 1 and the number of epochs as steps.

    >>> round(SampledGaussian(1.0, 0.01, clip="hard").order2(), 9)
    0.000457554
    """

    noise_multiplier: float
    sample_rate: float = 1.0
    steps: int = 1
    clip: str = "smooth"
    sampler: str = "poisson"
    noise_field: ClassVar[str] = "noise_multiplier"

    def __post_init__(self) -> None:
        noise = number("noise_multiplier", self.noise_multiplier, above=0.0, at_least=1e-100, at_most=1e100)
        rate = number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)
        _plain(self, noise_multiplier=noise, sample_rate=rate, steps=whole("steps", self.steps))
        choice("clip", self.clip, ("smooth", "hard"))
        choice("sampler", self.sampler, ("poisson", "fixed"))

    @property
    def kl_neighbours(self) -> str:
        return ADD_REMOVE if self.sampler == "poisson" else ZERO_OUT

    @property
    def paper_neighbours(self) -> str:
        return ADD_REMOVE

    @property
    def m(self) -> float:
        """Largest clipped norm over the noise's standard deviation on the sum."""
        return renyi.sensitivity(self.clip) / self.noise_multiplier

    def order2(self) -> float:
        step = renyi.order2_poisson if self.sampler == "poisson" else renyi.order2_fixed
        return self.steps * step(self.m, self.sample_rate)

    def order2_paper(self) -> float:
        return self.steps * renyi.order2_paper(self.m, self.sample_rate)

    def kl(self) -> float:
        step = renyi.kl_poisson if self.sampler == "poisson" else renyi.kl_fixed
        return self.steps * step(self.m, self.sample_rate)

    def overlap(self) -> float:
        if self.sampler == "poisson":
            return renyi.overlap_poisson(self.m, self.sample_rate, self.steps)
        return renyi.overlap_fixed(self.m, self.sample_rate, self.steps, order2=self.order2())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        d, simple = number("delta", delta, above=0.0, below=1.0), super().epsilon_at(delta, adjacency)
        if self.sampler == "fixed":
            better = (
                plds.fixed_size_epsilon(self.m, self.sample_rate, self.steps, d) if adjacency == REPLACE_ONE else None
            )
        else:
            pld = plds.gaussian(self.m, self.sample_rate, self.steps, adjacency)
            better = plds.epsilon(pld, d) if pld is not None else None
        known = [e for e in (simple, better) if e is not None]
        return min(known) if known else None

    def membership_advantage(self) -> float:
        simple = super().membership_advantage()
        pld = plds.gaussian(self.m, self.sample_rate, self.steps, REPLACE_ONE) if self.sampler == "poisson" else None
        return simple if pld is None else min(simple, plds.delta(pld, 0.0))

    def rero(self, kappa: Any) -> Any:
        simple = super().rero(kappa)
        pld = plds.gaussian(self.m, self.sample_rate, self.steps, ADD_REMOVE) if self.sampler == "poisson" else None
        return simple if pld is None else np.minimum(simple, plds.rero(pld, kappa))[()]

    def assumes(self) -> tuple[str, ...]:
        size = "a fixed divisor qN" if self.sampler == "poisson" else "uniform batches of fixed size"
        return (f"{self.clip} clipping, {size}", "the attacker sees every noisy step")


@dataclass(frozen=True)
class DP(Mechanism):
    """A mechanism of which only (ε, δ) is known.

    Attributes:
        epsilon: ε. delta: δ. adjacency: for which neighbours they hold; add/remove values (as Opacus reports them) are
        doubled to replace-one by group privacy: (2ε, (1 + e^ε)δ).

    >>> round(DP(2.0).order2(), 6), DP(1.0, 1e-5).order2()
    (1.875548, inf)
    """

    epsilon: float
    delta: float = 0.0
    adjacency: str = REPLACE_ONE

    def __post_init__(self) -> None:
        epsilon = number("epsilon", self.epsilon, at_least=0.0)
        _plain(self, epsilon=epsilon, delta=number("delta", self.delta, at_least=0.0, below=1.0))
        choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.adjacency

    @property
    def paper_neighbours(self) -> str:
        return self.adjacency

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

    def to_dict(self) -> dict[str, Any]:
        return {"type": "DP", "epsilon": self.epsilon, "delta": self.delta, "adjacency": self.adjacency}


@dataclass(frozen=True)
class RenyiDP(Mechanism):
    """A mechanism of which only a Rényi divergence under replace-one is known: (order, ε)-RDP.

    >>> RenyiDP(2.0).order2(), RenyiDP(2.0, order=1.5).order2()
    (2.0, inf)
    """

    epsilon: float
    order: float = 2.0

    def __post_init__(self) -> None:
        epsilon = number("rdp2", self.epsilon, at_least=0.0)
        _plain(self, epsilon=epsilon, order=number("order", self.order, at_least=0.5))

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


@dataclass(frozen=True)
class OutputPerturbation(Mechanism):
    """Gaussian noise on the minimiser of Σℓ + (nλ/2)‖θ‖² of a linear model with logistic loss.

    nλ is a public constant: without a record its loss is left out, and the penalty stays as it is.

    Attributes:
        records: n. l2: λ. noise_std: the noise's standard deviation per coordinate of θ.
        data_norm: the Euclidean norm to which every row is clipped; the loss's gradient is at most that.

    >>> round(OutputPerturbation(12665, 1e-2, 1e-2).order2(), 2)
    2.49
    """

    records: int
    l2: float
    noise_std: float
    data_norm: float = 1.0
    sampler: ClassVar[str] = "none"  # type: ignore[misc]
    noise_field: ClassVar[str] = "noise_std"

    def __post_init__(self) -> None:
        renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.data_norm)
        _plain(self, records=int(self.records), l2=float(self.l2))
        _plain(self, noise_std=float(self.noise_std), data_norm=float(self.data_norm))

    @property
    def kl_neighbours(self) -> str:
        return ADD_OR_ZERO

    @property
    def m(self) -> float:
        """How far one record moves the minimiser at most, over the noise's standard deviation."""
        return renyi.output_perturbation_shift(self.records, self.l2, self.noise_std, self.data_norm)

    def order2(self) -> float:
        return renyi.order2_gaussian(self.m)

    def order2_paper(self) -> float:
        return renyi.order2_gaussian(self.m / self.data_norm)  # the paper takes gradients of norm 1, whatever the rows

    def kl(self) -> float:
        return self.m**2 / 2

    def overlap(self) -> float:
        return renyi.overlap_poisson(self.m, 1.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        shift = self.m * (2 if choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE else 1)
        return plds.gaussian_epsilon(shift, delta)

    def membership_advantage(self) -> float:
        return math.erf(2 * self.m / math.sqrt(8))

    def rero(self, kappa: Any) -> Any:
        return rero_from_gdp(kappa, self.m)

    def assumes(self) -> tuple[str, ...]:
        return (f"rows clipped to norm {self.data_norm:g}, logistic loss, solved to the minimum; nλ is fixed",)


@dataclass(frozen=True)
class PLD(Mechanism):
    """A privacy loss distribution from dp-accounting, with the neighbours that it is for.

    The distribution itself does not know them. Add/remove is dp-accounting's default, and ours: replace-one answers
    then follow by the triangle inequality, through the release without the record.
    Order 2 and KL are infinite where the distribution has mass at infinity, as truncated ones do."""

    pld: Any
    adjacency: str = ADD_REMOVE

    def __post_init__(self) -> None:
        choice("adjacency", self.adjacency, ADJACENCIES)

    @property
    def kl_neighbours(self) -> str:
        return self.adjacency

    def _worst(self, of: Callable[[np.ndarray, np.ndarray], float]) -> float:
        """The larger of both directions' values; inf with mass at infinity or with rounding below zero."""
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
        """√LC is a metric (pq/(p + q) is a positive definite kernel): twice the way is at most four times the LC."""
        known = min(overlap_from_losses(*direction) for direction in plds.directions(self.pld))
        known = max(known - 2 * plds.rounding(self.pld), 0.0)
        return known if self.adjacency == REPLACE_ONE else max(1 - 4 * (1 - known), 0.0)

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        number("delta", delta, above=0.0, below=1.0)
        return plds.epsilon(self.pld, delta) if adjacency == self.adjacency else None

    def membership_advantage(self) -> float:
        apart = plds.delta(self.pld, 0.0)  # total variation
        return apart if self.adjacency == REPLACE_ONE else min(2 * apart, 1.0)

    def rero(self, kappa: Any) -> Any:
        return plds.rero(self.pld, kappa)

    def assumes(self) -> tuple[str, ...]:
        return (f"the given privacy loss distribution, under {self.adjacency}",)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "PLD", "adjacency": self.adjacency}


@dataclass(frozen=True)
class Event(Mechanism):
    """A dp-accounting DpEvent that is more than T equal Gaussian steps: its leaves' divergences are added up.

    Noise multipliers are taken as dp-accounting means them: over the add/remove sensitivity; replace-one doubles it."""

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

    def to_dict(self) -> dict[str, Any]:
        return {"type": "Event", "event": str(self.event)}


def as_mechanism(given: Any, adjacency: str = ADD_REMOVE) -> Mechanism:
    """The mechanism itself, or the one that a dp-accounting DpEvent or PLD describes.

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
    """T equal Gaussian steps, if the event is just that."""
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
