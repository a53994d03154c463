"""Risk in the words people use: what a mechanism allows any attacker, as chances and rates."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from reconbound.bounds.success import chances
from reconbound.bounds.trade_off import GaussianDP, TradeOff
from reconbound.mechanisms.base import ADD_REMOVE, ADJACENCIES, REPLACE_ONE
from reconbound.mechanisms.group import group_of

#: False-positive rates at which true-positive rates are reported.
FPRS = tuple(10.0**-i for i in range(1, 11))
#: Chances, known to the attacker, that the record is in the data.
PRIORS = (0.5, 0.1, 0.01)
#: Chances of a blind guess at which chances to rebuild a record are reported.
BASELINES = (1e-6, 1e-4, 1e-2, 1e-1)
#: What the two worlds of a test are, by neighbours.
WORLDS = {
    ADD_REMOVE: "whether the record is in the data",
    REPLACE_ONE: "which of two candidate records is in the data",
}


@dataclass(frozen=True)
class Risks:
    """The most that attacks can reach between neighbours of one kind. Every number binds every attacker.

    Attributes:
        adjacency: the neighbours. "add/remove": the attacker tests whether a record is in the data. "replace-one": it
            tests which of two candidate records is.
        curve: the trade-off curve, an upper bound: `curve.tpr(fpr)`.
        advantage: the largest true-positive rate minus false-positive rate.
        tpr: pairs of a false-positive rate and the largest true-positive rate.
        bayes_risk: pairs of a prior chance and the smallest chance of a wrong answer.
        success: pairs of the chance of a blind guess to rebuild a record, and the largest chance with the release.
        gdp: the best μ of Gaussian differential privacy, with its regret.
    """

    adjacency: str
    curve: TradeOff = field(repr=False)
    advantage: float
    tpr: tuple[tuple[float, float], ...]
    bayes_risk: tuple[tuple[float, float], ...]
    success: tuple[tuple[float, float], ...]
    gdp: GaussianDP

    def to_dict(self) -> dict[str, Any]:
        """Returns a plain dictionary for JSON; "mu" is None where none is enough."""
        return {
            "adjacency": self.adjacency,
            "test": WORLDS[self.adjacency],
            "advantage": self.advantage,
            "tpr": [{"fpr": rate, "tpr": found} for rate, found in self.tpr],
            "bayes_risk": [{"prior": prior, "risk": found} for prior, found in self.bayes_risk],
            "success": [{"baseline": kappa, "success": found} for kappa, found in self.success],
            "mu": self.gdp.mu if np.isfinite(self.gdp.mu) else None,
            "mu_regret": self.gdp.regret,
            "mu_least_rate": self.gdp.least_rate,
        }


def risks(
    mechanism: Any,
    adjacency: str = REPLACE_ONE,
    *,
    fprs: Any = FPRS,
    priors: Any = PRIORS,
    baselines: Any = BASELINES,
    group: int = 1,
) -> Risks | None:
    """Returns what any attacker can reach between neighbouring data sets; None where it is not known.

    Args:
        mechanism: a Mechanism, or a DpEvent or PLD of dp-accounting.
        adjacency: "replace-one" or "add/remove".
        fprs: false-positive rates of tests.
        priors: chances that a record is in the data (or that it is the first of two), known to the attacker.
        baselines: chances of a blind guess to rebuild a record: 1/50257 for a token of that vocabulary. Blind means
            without the release. What is blind to it is a release without the record (add/remove) or with a public one
            in its place (replace-one).
        group: the number of rows of one person; all of them change together.

    Guarantee: no attacker does better, whatever it knows beside the release: all other records, the two candidates,
    the model, the schedule. Chances are over the mechanism's randomness.

    >>> from reconbound.mechanisms import SampledGaussian
    >>> found = risks(SampledGaussian(1.0, clip="hard"), "add/remove")
    >>> round(found.advantage, 4), float(f"{dict(found.tpr)[1e-6]:.4e}"), round(found.gdp.mu, 3)
    (0.3829, 8.7218e-05, 1.0)
    """
    rates, odds = chances("fprs", fprs).ravel(), chances("priors", priors).ravel()
    blind = chances("baselines", baselines).ravel()
    curve = group_of(mechanism, group).trade_off(adjacency)
    if curve is None:
        return None
    return Risks(
        adjacency=adjacency,
        curve=curve,
        advantage=curve.advantage,
        tpr=_pairs(rates, curve.tpr(rates)),
        bayes_risk=_pairs(odds, curve.bayes_risk(odds)),
        success=_pairs(blind, curve.tpr(blind)),
        gdp=curve.gdp(),
    )


def _pairs(given: np.ndarray, found: Any) -> tuple[tuple[float, float], ...]:
    return tuple((float(x), float(y)) for x, y in zip(given, np.ravel(found), strict=True))


def known_risks(mechanism: Any, group: int = 1) -> dict[str, Risks]:
    """Returns the risks for each kind of neighbours for which they are known.

    Args:
        mechanism: a Mechanism, or a DpEvent or PLD of dp-accounting.
        group: the number of rows of one person.
    """
    found = {adjacency: risks(mechanism, adjacency, group=group) for adjacency in ADJACENCIES}
    return {adjacency: known for adjacency, known in found.items() if known is not None}
