"""The base class of mechanisms, and `Protection`: whether a mechanism's guarantee is meaningful, in sentences."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from reconbound._internal.checks import InputError, choice, number, whole
from reconbound._internal.formatting import format_limit, format_percent
from reconbound.bounds import overlap_from_order2, rero_from_order2
from reconbound.bounds.bound import log_expm1
from reconbound.bounds.divergence_success import ChiSquareTradeOff
from reconbound.bounds.parts import Parts, whole_release
from reconbound.bounds.trade_off import DPTradeOff, Least, TradeOff
from reconbound.mechanisms import privacy_loss

REPLACE_ONE, ADD_REMOVE = "replace-one", "add/remove"
ADJACENCIES = (REPLACE_ONE, ADD_REMOVE)
ZERO_OUT = "zero-out"
ADD_OR_ZERO = "add/remove or zero-out"
#: A guarantee means little where a record that a blind guess rebuilds with the first chance may be rebuilt with the
#: second by whoever sees the release.
BLIND, SURE = 0.01, 0.9


@dataclass(frozen=True)
class Protection:
    """The largest chance to rebuild a record, and whether that leaves a meaningful guarantee.

    Attributes:
        success: the largest chance to rebuild a record that a blind guess rebuilds with chance BLIND (reconstruction
            robustness, docs/theory/any_attacker.md); None where it is not known.
        never_drawn: the chance that a record is in no batch, so that the release does not depend on it.
        epsilon: ε under replace-one at `delta`; None where it is not known.
        delta: the δ of epsilon.

    >>> print(Protection(0.0355).sentence())
    Who can rebuild a record with a chance of 1% without the release can do so with a chance of at most 3.55% with it.
    >>> print(Protection(1.0, epsilon=1054.0, delta=1e-5).warning("image"))
    No meaningful guarantee: an image that a blind guess rebuilds with a chance of 1% may be rebuilt with a chance of
    100% from the release. ε is 1,060 at δ = 1e-05.
    """

    success: float | None
    never_drawn: float = 0.0
    epsilon: float | None = None
    delta: float = 1e-5

    @property
    def meaningful(self) -> bool:
        """Returns whether the guarantee is meaningful: a record that is in some batch is rebuilt with less than SURE.

            chance of such a record, where all others are rebuilt as by a guess = (success − BLIND · never)/(1 − never)

        Without the condition a run of one epoch and no noise at all would pass, for a third of the records are never
        drawn. Where no chance is known nothing is decided, and the answer is True.
        """
        if self.success is None:
            return True
        never = self.never_drawn if self.never_drawn < 1 else 0.0
        return (self.success - BLIND * never) / (1 - never) < SURE

    def sentence(self, noun: str = "record") -> str:
        """Returns the largest chance to rebuild a record, in one sentence that is true by itself; "" if not known.

        Args:
            noun: the word for a record.
        """
        if self.success is None:
            return ""
        return (
            f"Who can rebuild {with_article(noun)} with a chance of {format_percent(BLIND)} without the release can do "
            f"so with a chance of at most {format_percent(self.success)} with it."
        )

    def warning(self, noun: str = "record") -> str:
        """Returns up to three sentences that come before all others where the guarantee means little; "" otherwise.

        Args:
            noun: the word for a record.
        """
        if self.meaningful or self.success is None:
            return ""
        warning = (
            f"No meaningful guarantee: {with_article(noun)} that a blind guess rebuilds with a chance of "
            f"{format_percent(BLIND)} may be rebuilt with a chance of {format_percent(self.success)} from the release."
        )
        if self.never_drawn >= 1e-3:
            chance = format_percent(1 - self.never_drawn)
            warning += f" It may be rebuilt nearly whenever it is in a batch, which has a chance of {chance}."
        if self.epsilon is not None:
            warning += f" ε is {format_limit(self.epsilon)} at δ = {format_limit(self.delta, 6)}."
        return warning


def read_protection(found: Mapping[str, Any]) -> Protection:
    """Returns the protection that a guarantee's dictionary describes (`Guarantee.to_dict`, run.json).

    Args:
        found: the dictionary.
    """
    pairs = {float(r["kappa"]): float(r["success"]) for r in found.get("rero") or ()}
    never = float(found.get("never_drawn") or 0.0)
    return Protection(pairs.get(BLIND), never, found.get("epsilon"), float(found.get("delta", 1e-5)))


def with_article(noun: str) -> str:
    """Returns the noun with "a" or "an".

    >>> with_article("image"), with_article("record")
    ('an image', 'a record')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


class Mechanism(ABC):
    """The guarantees of one release. Only `order2` must be given: every other answer has a sound default from it."""

    sampler: str = "any"
    #: The radius of the ball around 0 to which the mechanism clips records; None where it does not clip.
    radius: float | None = None

    @property
    def randomness(self) -> str:
        """Returns, in words, the randomness over which chances and mean errors are taken."""
        return "the mechanism's own randomness"

    @property
    def kl_neighbours(self) -> str:
        """Names the releases between which `kl` is taken."""
        return REPLACE_ONE

    @property
    def paper_neighbours(self) -> str:
        """Names the releases between which `order2_paper` is taken."""
        return REPLACE_ONE

    @abstractmethod
    def order2(self) -> float:
        """Returns the release's order-2 Rényi divergence under replace-one, in nats; inf where none is known."""

    def order2_paper(self) -> float | None:
        """Returns the divergence that the paper uses in Theorem 1, where it differs; None where the paper has none."""
        return None

    def order2_both_ends(self) -> float:
        """Returns ln(1 + K) with ∫(p₁ − p₀)²/p_z ≤ K for any three values of a record; inf where none is proved."""
        return math.inf

    def kl(self) -> float:
        """Returns the KL divergence to a release that does not depend on the record, in nats (at most `order2`)."""
        return self.order2()

    def parts(self, *, quick: bool = False) -> tuple[Parts, ...]:
        """Returns parts of the release that carry few nats: each gives a rate–distortion floor.

        Args:
            quick: only those in closed form: loss distributions take longer.
        """
        return (whole_release(self.kl(), self.kl_neighbours),)

    def overlap(self) -> float:
        """Returns a lower bound on 1 − LC under replace-one."""
        return overlap_from_order2(self.order2())

    def epsilon_at(self, delta: float, adjacency: str = REPLACE_ONE) -> float | None:
        """Returns ε at this δ; None where it is not known. The default is computed from order 2.

        Args:
            delta: δ.
            adjacency: "replace-one" or "add/remove".
        """
        number("delta", delta, above=0.0, below=1.0)
        if choice("adjacency", adjacency, ADJACENCIES) != REPLACE_ONE:
            return None
        return epsilon_from_order2(self.order2(), delta)

    def _pld(self, adjacency: str) -> Any:
        """Returns dp-accounting's privacy loss distribution between these neighbours; None where none is known."""
        return None

    def trade_off(self, adjacency: str = REPLACE_ONE) -> TradeOff | None:
        """Returns the trade-off curve: how well any test tells neighbouring releases apart; None where not known.

        Args:
            adjacency: "replace-one" or "add/remove".

        Guarantee: no test between such neighbours, in either direction, has a larger true-positive rate.
        """
        curves: list[TradeOff] = []
        if choice("adjacency", adjacency, ADJACENCIES) == REPLACE_ONE:
            curves.append(ChiSquareTradeOff(self.order2()))
        pld = self._pld(adjacency)
        if pld is not None:
            curves.append(privacy_loss.trade_off(pld))
        if not curves:
            return None
        if self.never_drawn > 0:  # without the record in any batch both releases are the same
            curves.append(DPTradeOff(0.0, min(1.0 - self.never_drawn + 1e-15, 1.0)))
        return Least(tuple(curves))

    def membership_advantage(self) -> float:
        """Returns the largest advantage of a test between replace-one neighbours."""
        return advantage_from_order2(self.order2())

    def rero(self, kappa: Any) -> Any:
        """Returns the largest chance to reconstruct, where a blind guess succeeds with chance κ.

        Args:
            kappa: κ, one number or an array.
        """
        return rero_from_order2(kappa, self.order2())

    @property
    def never_drawn(self) -> float:
        """Returns the chance that a record is in no batch: then the release does not depend on it; 0 if not known."""
        return 0.0

    def for_group(self, copies: int) -> Mechanism:
        """Returns a mechanism whose guarantees hold for a person who has this many rows (docs/theory/accounting.md).

        Args:
            copies: the number of rows, 1 or more.
        """
        if whole("copies", copies) == 1:
            return self
        raise InputError("copies", f"must be 1: nothing is known of groups from a {type(self).__name__}", copies)

    def releases(self) -> Sequence[tuple[Any, int]]:
        """Returns what a composition adds up: the mechanism's releases, each with the number of its runs."""
        raise InputError("mechanisms", f"must be ones that can be composed, not a {type(self).__name__}", str(self))

    def protection(self, delta: float = 1e-5) -> Protection:
        """Returns the largest chance to rebuild a record, and whether that is a meaningful guarantee.

        Args:
            delta: the δ at which ε is reported with it.
        """
        return Protection(float(self.rero(BLIND)), self.never_drawn, self.epsilon_at(delta, REPLACE_ONE), delta)

    def assumes(self) -> tuple[str, ...]:
        """Lists what every floor of this mechanism assumes."""
        return ()

    def notes(self) -> tuple[str, ...]:
        """Explains why floors of this mechanism are vacuous, where that is not clear from their size."""
        return ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the mechanism's public facts, for JSON."""
        facts = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        return {"type": type(self).__name__, **facts}

    def __str__(self) -> str:
        facts = {k: v for k, v in self.to_dict().items() if k != "type" and v is not None and v is not False}
        forms = {float: ".7g", int: ","}  # whole numbers with thousands separators
        words = [f"{name.replace('_', ' ')} {value:{forms.get(type(value), '')}}" for name, value in facts.items()]
        return f"{type(self).__name__}: {', '.join(words)}"

    def _set(self, **values: float | str) -> None:
        """Keeps checked numbers as plain floats and ints, whatever NumPy type they came in, and words."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


def epsilon_from_order2(order2: float, delta: float) -> float | None:
    """Returns ε at this δ from χ² = e^ε₂ − 1: ln(1 + χ²/(4δ) − δ); None where χ² is infinite.

    Args:
        order2: ε₂, in nats.
        delta: δ.
    """
    d = number("delta", delta, above=0.0, below=1.0)
    if order2 == math.inf:
        return None
    log_ratio = log_expm1(order2) - math.log(4) - math.log(d)
    if log_ratio > 40:
        return log_ratio
    return max(math.log1p(math.exp(log_ratio) - d), 0.0)


def advantage_from_order2(order2: float) -> float:
    """Returns the largest advantage of a test from χ² in both directions: √(χ²/(4 + χ²)).

    Args:
        order2: ε₂ in both directions, in nats.

    >>> round(advantage_from_order2(1.0), 6), advantage_from_order2(math.inf)
    (0.548169, 1.0)
    """
    return math.sqrt(-math.expm1(-order2) / (1 + 3 * math.exp(-order2)))
