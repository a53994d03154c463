"""The smallest noise for a risk: an advantage, a true-positive rate, a chance to rebuild a record, or a μ."""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import brentq

from reconbound._internal.checks import InputError, choice, number
from reconbound._internal.formatting import format_limit, format_percent, round_to
from reconbound.mechanisms import ADJACENCIES, REPLACE_ONE, Mechanism
from reconbound.mechanisms.calibrate import LARGEST_NOISE, SMALLEST_NOISE, Noisy, with_noise
from reconbound.mechanisms.group import group_of

MEASURES = ("advantage", "tpr", "success", "mu")


@dataclass(frozen=True)
class RiskTarget:
    """A limit on what any attacker can reach.

    Attributes:
        measure: "advantage" of a test, "tpr": its true-positive rate at a false-positive rate, "success": the chance to
            rebuild a record that a blind guess rebuilds with a given chance, or "mu" of Gaussian differential privacy.
        limit: the largest value that is allowed.
        at: the false-positive rate for "tpr", the chance of a blind guess for "success".
        adjacency: "replace-one" or "add/remove". Left out, it is replace-one; for "success", any release that does not
            depend on the record, which is that without the record where batches are Poisson.

    >>> print(RiskTarget("success", 0.15, 0.1))
    a chance of at most 15% to rebuild a record that a blind guess rebuilds with a chance of 10%
    """

    measure: str
    limit: float
    at: float | None = None
    adjacency: str | None = None

    def __post_init__(self) -> None:
        choice("measure", self.measure, MEASURES)
        if self.adjacency is not None:
            choice("adjacency", self.adjacency, ADJACENCIES)
        name = f"target_{self.measure}"
        if self.measure in ("advantage", "mu"):
            if self.at is not None:
                raise InputError("at", f"does not go with {self.measure}", self.at)
            most = 1.0 if self.measure == "advantage" else 100.0
            number(name, self.limit, at_least=1e-6, below=most)
            return
        at, of = number(self.given_by, self.at, above=0.0, at_least=1e-12, below=1.0), self.given_by.replace("_", " ")
        if number(name, self.limit, above=0.0, below=1.0) <= at * (1 + 1e-3):
            raise InputError(
                name, f"must be above the {of} by a thousandth or more: {at:g} is reached blindly", self.limit
            )

    @property
    def given_by(self) -> str:
        """Returns the name of what `at` is."""
        return "fpr" if self.measure == "tpr" else "baseline"

    @property
    def neighbours(self) -> str:
        """Names the neighbours of the test; "" for a reconstruction whose neighbours were not given."""
        return self.adjacency or ("" if self.measure == "success" else REPLACE_ONE)

    def reached(self, mechanism: Mechanism) -> float | None:
        """Returns the value for a mechanism; None where it is not known for these neighbours.

        Args:
            mechanism: the mechanism, for a group where it is for one.
        """
        if self.measure == "success" and self.adjacency is None:
            return float(mechanism.rero(self.at))
        curve = mechanism.trade_off(self.neighbours)
        if curve is None:
            return None
        if self.measure == "advantage":
            return curve.advantage
        return curve.gdp().mu if self.measure == "mu" else float(curve.tpr(self.at))

    def __str__(self) -> str:
        under = f" ({self.neighbours})" if self.neighbours else ""
        if self.measure == "advantage":
            return f"an advantage of at most {format_limit(self.limit)}{under}"
        if self.measure == "mu":
            return f"μ of Gaussian differential privacy at most {format_limit(self.limit)}{under}"
        limit, at = format_percent(self.limit), format_percent(self.at or 0.0, side="near")
        if self.measure == "tpr":
            return f"a true-positive rate of at most {limit} at a false-positive rate of {at}{under}"
        return (
            f"a chance of at most {limit} to rebuild a record that a blind guess rebuilds with a chance of {at}{under}"
        )


def calibrate_risk(mechanism: Noisy, target: RiskTarget, *, group: int = 1) -> Noisy:
    """Returns the mechanism with the smallest noise at which no attacker exceeds a limit.

    Args:
        mechanism: a SampledGaussian or OutputPerturbation; its own noise is ignored.
        target: the limit.
        group: the number of rows of one person; the limit holds for all of them together.

    Guarantee: the risk was computed once more at the returned noise and is at most the limit. With noise smaller by
    more than three parts in ten thousand it is not, as far as the risk falls with the noise.

    >>> from reconbound import SampledGaussian
    >>> target = RiskTarget("advantage", 0.1, adjacency="add/remove")
    >>> round(calibrate_risk(SampledGaussian(1.0, 0.002, 10_000, clip="hard"), target).noise_multiplier, 3)
    1.025
    """
    name = f"target_{target.measure}"
    base = target.at or 0.0

    def at(noise: float) -> float:
        found = target.reached(group_of(with_noise(mechanism, noise), group))
        if found is None:
            must = "must be replace-one: for this mechanism nothing else is known"
            raise InputError("adjacency", must, target.adjacency)
        return found

    def excess(log_noise: float) -> float:
        """Returns ln (risk − blind) − ln (limit − blind): it falls with the noise, nearly as a line."""
        found = at(math.exp(log_noise)) - base
        return math.log(min(max(found, 1e-300), 1e300) / (target.limit - base))

    accuracy, step = 2e-5, math.log(4)
    large = 0.0
    while excess(large) > 0:
        large += step
        if large > math.log(LARGEST_NOISE):
            raise InputError(name, "must be one that some noise reaches: rounding alone exceeds it", target.limit)
    small = large - step
    while excess(small) <= 0:
        small, large = small - step, small
        if small < math.log(SMALLEST_NOISE):
            never = mechanism.never_drawn
            why = f": a record is in no batch with a chance of {format_percent(never, side='down')}" if never else ""
            raise InputError(name, f"is met without noise{why}, which protects no record that is drawn", target.limit)
    noise = round_to(math.exp(brentq(excess, small, large, xtol=accuracy) + accuracy), 5, "up")
    while at(noise) > target.limit:  # where the risk goes up and down in its last digits: a little more noise
        noise = round_to(noise * (1 + accuracy), 5, "up")
    return with_noise(mechanism, noise)
