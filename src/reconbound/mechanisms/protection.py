"""The decision whether a mechanism's guarantee is meaningful, and the sentences that state it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconbound._internal.formatting import format_limit, format_percent

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
    No meaningful guarantee: this mechanism does not rule out that an image which a blind guess rebuilds with a chance
    of 1% is rebuilt with a chance of 100% from the release (ε = 1,060 at δ = 1e-05).
    """

    success: float | None
    never_drawn: float = 0.0
    epsilon: float | None = None
    delta: float = 1e-5

    @property
    def success_if_drawn(self) -> float | None:
        """Returns the chance for records that are in some batch, where all others are rebuilt as by a guess.

        (success − BLIND · never_drawn)/(1 − never_drawn)
        """
        if self.success is None or self.never_drawn >= 1:
            return self.success
        return min(1.0, (self.success - BLIND * self.never_drawn) / (1 - self.never_drawn))

    @property
    def meaningful(self) -> bool:
        """Returns whether the guarantee is meaningful: a drawn record is rebuilt with a chance below SURE.

        Without the condition a run of one epoch and no noise at all would pass, for a third of the records are never
        drawn. Where no chance is known nothing is decided, and the answer is True.
        """
        found = self.success_if_drawn
        return found is None or found < SURE

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
        """Returns the sentence that comes before all others where the guarantee means little; "" otherwise.

        Args:
            noun: the word for a record.
        """
        if self.meaningful or self.success is None:
            return ""
        often = f": nearly whenever it is in a batch, for which the chance is {format_percent(1 - self.never_drawn)}"
        drawn = "" if self.never_drawn < 1e-3 else often
        at = "" if self.delta is None else f" at δ = {format_limit(self.delta, 6)}"
        told = "" if self.epsilon is None else f" (ε = {format_limit(self.epsilon)}{at})"
        return (
            f"No meaningful guarantee: this mechanism does not rule out that {with_article(noun)} which a blind guess "
            f"rebuilds with a chance of {format_percent(BLIND)} is rebuilt with a chance of "
            f"{format_percent(self.success)} from the release{told}{drawn}."
        )


def read_protection(found: Mapping[str, Any]) -> Protection:
    """Returns the protection that a guarantee's dictionary describes (`Guarantee.to_dict`, run.json).

    In older dictionaries without `never_drawn` it is computed from the mechanism's sample rate and steps.

    Args:
        found: the dictionary.
    """
    pairs = {float(r["kappa"]): float(r["success"]) for r in found.get("rero") or ()}
    never = found.get("never_drawn")
    if never is None:
        mechanism = found.get("mechanism") or {}
        rate, steps = mechanism.get("sample_rate"), mechanism.get("steps")
        sampled = isinstance(rate, (int, float)) and isinstance(steps, int) and 0 < rate < 1
        never = math.exp(steps * math.log1p(-rate)) if sampled else 0.0  # type: ignore[operator]
    return Protection(pairs.get(BLIND), float(never), found.get("epsilon"), float(found.get("delta", 1e-5)))


def with_article(noun: str) -> str:
    """Returns the noun with "a" or "an".

    >>> with_article("image"), with_article("record")
    ('an image', 'a record')
    """
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
