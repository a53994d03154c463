"""Several releases one after another: schedules of noise, clipping and batch size, and different mechanisms together.

What is known of each release is put together: divergences add up, and dp-accounting composes the loss distributions.
Each release may depend on the results of those before it.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, choice, numbers, whole
from reconbound.bounds.bound import log1m
from reconbound.bounds.parts import Parts, parts_from_losses
from reconbound.bounds.trade_off import Least, TradeOff
from reconbound.mechanisms import privacy_loss
from reconbound.mechanisms.base import ADD_OR_ZERO, ADD_REMOVE, ADJACENCIES, REPLACE_ONE, Mechanism
from reconbound.mechanisms.releases import MOST_DIFFERENT, GaussianRelease, Release, composed_pld, counted


class Composed(Mechanism):
    """The base class of what is made of releases: each answer is the best of the divergences' sums and the PLD."""

    @abstractmethod
    def releases(self) -> Sequence[tuple[Release, int]]:
        """Returns the releases, each with the number of its runs."""

    @cached_property
    def _counted(self) -> list[tuple[Release, int]]:
        return counted(self.releases())

    def order2(self) -> float:
        return math.fsum(count * one.order2 for one, count in self._counted)

    def kl(self) -> float:
        return math.fsum(count * one.kl for one, count in self._counted)

    @cached_property
    def _plds(self) -> dict[str, Any]:
        return {}

    def _pld(self, adjacency: str) -> Any:
        """Returns the privacy loss distribution; None where none is known."""
        if adjacency not in self._plds:
            self._plds[adjacency] = composed_pld(self._counted, adjacency == REPLACE_ONE)
        return self._plds[adjacency]

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        for adjacency, neighbours in ((ADD_REMOVE, self.kl_neighbours), (REPLACE_ONE, REPLACE_ONE)):
            pld = None if quick else self._pld(adjacency)
            if pld is not None:
                (with_record, *_), missing = privacy_loss.directions(pld)
                return (*super().parts(), parts_from_losses(*with_record, neighbours, rounding=missing))
        return super().parts()

    @cached_property
    def _by_absence(self) -> TradeOff | None:
        """Returns the curve under replace-one by way of the release without the record, where only that is known."""
        pld = None if self._pld(REPLACE_ONE) is not None else self._pld(ADD_REMOVE)
        return None if pld is None else privacy_loss.trade_off(pld).group(2)

    def overlap(self) -> float:
        simple, pld, absent = max(super().overlap(), self.never_drawn), self._pld(REPLACE_ONE), self._pld(ADD_REMOVE)
        if pld is not None:
            return max(simple, privacy_loss.overlap(pld))
        # √LC is a metric: docs/theory/divergences.md 4.6
        return simple if absent is None else max(simple, 1 - 4 * (1 - privacy_loss.overlap(absent)))

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        found = super().trade_off(adjacency)
        if adjacency != REPLACE_ONE or found is None or self._by_absence is None:
            return found
        return Least((found, self._by_absence))

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        simple, pld = super().epsilon_at(delta, adjacency), self._pld(adjacency)
        better = None if pld is None else privacy_loss.epsilon(pld, delta)
        if adjacency == REPLACE_ONE and self._by_absence is not None:
            better = self._by_absence.epsilon(delta)
        return min((e for e in (simple, better) if e is not None), default=None)

    @property
    def never_drawn(self) -> float:
        """Returns Π(1 − q), the chance that a record is in no batch: then the release does not depend on it."""
        return math.exp(self._log_never)

    @property
    def _log_never(self) -> float:
        return math.fsum(count * log1m(one.rate) for one, count in self._counted)

    def membership_advantage(self) -> float:
        simple = min(super().membership_advantage(), -math.expm1(self._log_never))  # any_attacker.md 6.5
        pld, absent = self._pld(REPLACE_ONE), self._by_absence
        if pld is not None:
            return min(simple, privacy_loss.delta(pld, 0.0))
        return simple if absent is None else min(simple, absent.advantage)

    def rero(self, kappa: Any) -> Any:
        drawn = numbers("kappa", kappa) - math.expm1(self._log_never)
        simple, pld = np.minimum(super().rero(kappa), drawn)[()], self._pld(ADD_REMOVE) or self._pld(REPLACE_ONE)
        return simple if pld is None else np.minimum(simple, privacy_loss.trade_off(pld).tpr(kappa))[()]


@dataclass(frozen=True)
class Composition(Composed):
    """Several mechanisms one after another on the same records; each may depend on the results of those before it.

    A training whose noise, clipping or sampling rate changes is a composition of its stretches. The order does not
    matter. Two batches of different stretches are drawn independently.

    Attributes:
        mechanisms: SampledGaussian, Laplace, DiscreteGaussian, events of dp-accounting, and compositions of them.

    >>> from reconbound.mechanisms import SampledGaussian
    >>> stretches = [SampledGaussian(1.0, 0.01, 500, clip="hard"), SampledGaussian(2.0, 0.01, 500, clip="hard")]
    >>> round(Composition(stretches).epsilon_at(1e-5, "add/remove"), 2)
    1.4
    """

    mechanisms: tuple[Mechanism, ...]

    def __post_init__(self) -> None:
        given = self.mechanisms
        if not isinstance(given, Sequence) or not given or not all(isinstance(m, Mechanism) for m in given):
            raise InputError("mechanisms", "must be a sequence of one mechanism or more", given)
        flat = [one for m in given for one in (m.mechanisms if isinstance(m, Composition) else (m,))]
        object.__setattr__(self, "mechanisms", tuple(flat))
        self.releases()  # refuses what cannot be composed at once

    def releases(self) -> list[tuple[Release, int]]:
        return [pair for mechanism in self.mechanisms for pair in mechanism.releases()]

    def _one_of(self, names: set[str]) -> str:
        return names.pop() if len(names) == 1 else ADD_OR_ZERO

    @property
    def sampler(self) -> str:  # type: ignore[override]
        samplers = {m.sampler for m in self.mechanisms}
        return samplers.pop() if len(samplers) == 1 else "several"

    @property
    def kl_neighbours(self) -> str:
        return self._one_of({m.kl_neighbours for m in self.mechanisms})

    @property
    def paper_neighbours(self) -> str:
        return self._one_of({m.paper_neighbours for m in self.mechanisms})

    @property
    def randomness(self) -> str:
        return " and ".join(dict.fromkeys(m.randomness for m in self.mechanisms))

    def order2_paper(self) -> float | None:
        found = [m.order2_paper() for m in self.mechanisms]
        return None if None in found else math.fsum(x for x in found if x is not None)

    def _compares(self, adjacency: str) -> bool:
        """Returns whether anything is known for these neighbours: without a record, some batches are cut otherwise."""
        cut = any(m.sampler in ("fixed", "shuffle") for m in self.mechanisms)
        return choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE or not cut

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        return super().epsilon_at(delta, adjacency) if self._compares(adjacency) else None

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        return super().trade_off(adjacency) if self._compares(adjacency) else None

    def for_group(self, copies: int) -> Composition:
        k = whole("copies", copies)
        return self if k == 1 else Composition(tuple(m.for_group(k) for m in self.mechanisms))

    def assumes(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for m in self.mechanisms for text in m.assumes()))

    def notes(self) -> tuple[str, ...]:
        notes = list(dict.fromkeys(text for m in self.mechanisms for text in m.notes()))
        different = sum(isinstance(one, GaussianRelease) and one.rate < 1 for one, _ in self._counted)
        if different > MOST_DIFFERENT:
            notes.append(
                f"{different:,} different steps: for ε and the chances, steps of nearly equal noise and rate were "
                "counted with the least noise and the highest rate among them."
            )
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        return {"type": "Composition", "mechanisms": [m.to_dict() for m in self.mechanisms]}

    def __str__(self) -> str:
        few = [str(m) for m in self.mechanisms[:3]]
        more = len(self.mechanisms) - len(few)
        return f"Composition of {'; '.join(few)}{f'; and {more:,} more' if more else ''}"
