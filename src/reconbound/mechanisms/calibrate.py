"""The smallest noise that meets a floor, or an ε: the only search for noise in the package."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeVar

from scipy.optimize import brentq

from reconbound._internal.checks import InputError, choice, number
from reconbound._internal.formatting import format_noise, format_number, round_to
from reconbound.bounds import Bound
from reconbound.bounds.bound import NOT_PROVED, data_space
from reconbound.mechanisms import ADJACENCIES, REPLACE_ONE, OutputPerturbation, SampledGaussian
from reconbound.mechanisms.guarantee import floor_on

Noisy = TypeVar("Noisy", bound=SampledGaussian | OutputPerturbation)
#: The noise is searched between these.
SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e12


class OutOfReach(InputError):
    """Raised where no noise lifts a floor to the target; `highest` is the largest floor."""

    def __init__(self, name: str, bound: str, highest: float, value: object, where: str = "") -> None:
        self.bound, self.highest = bound, highest
        super().__init__(
            name, f"must be below {format_number(highest, 6)}, which no noise lifts {bound} above{where}", value
        )


@dataclass(frozen=True)
class Calibration:
    """The mechanism with the smallest noise that meets the target, and the floor that it reaches.

    Where `without_noise` is set, the target is met whatever the noise, and `noise` is only the end of the search. The
    reason is the chance (1 − q)ᵀ that a record is in no batch, from which Le Cam's floor of sampled steps is at least
    (1 − q)ᵀ (w/2)². It protects no record that is drawn.
    """

    mechanism: SampledGaussian | OutputPerturbation
    noise: float
    target: float
    bound: Bound
    without_noise: float | None = None

    def __str__(self) -> str:
        caveat = "" if self.bound.proved else f"{self.bound.name} is {NOT_PROVED}: by it, this noise protects nobody. "
        if self.without_noise is not None:
            return f"{caveat}met without noise: {self.bound}"
        noise, protection = format_noise(self.noise), self.mechanism.protection()
        sentence = protection.warning() or protection.sentence()
        return f"{caveat}{self.mechanism.noise_field} {noise}: {self.bound}\n{sentence}"


def with_noise(mechanism: Noisy, noise: float) -> Noisy:
    """Returns the mechanism with this noise; refuses one that has no noise."""
    if not isinstance(mechanism, (SampledGaussian, OutputPerturbation)):
        raise InputError("mechanism", "must have noise to calibrate: private SGD or output perturbation", mechanism)
    changes: dict[str, Any] = {mechanism.noise_field: noise}
    return replace(mechanism, **changes)


def calibrate(
    mechanism: SampledGaussian | OutputPerturbation,
    target_mse: float,
    *,
    bound: str = "lecam",
    dim: int = 1,
    low: float | None = None,
    high: float | None = None,
    radius: float | None = None,
    units: str = "",
) -> Calibration:
    """Finds the smallest noise with which a floor is at least `target_mse`.

    Args:
        mechanism: a SampledGaussian or OutputPerturbation; its own noise is ignored.
        target_mse: the squared error per coordinate that attackers must not undercut, in squared data units.
        bound: the floor that must meet it, by name. lecam and rate_distortion bind any attacker, theorem1 and corners
            unbiased ones only. theorem1_paper is not proved: the noise is for comparison only, and
            the result says so first.
        dim: the number of private coordinates of a record.
        low: smallest value of a coordinate, as in `reconbound.floor`.
        high: largest value of a coordinate, as in `reconbound.floor`.
        radius: of a ball that holds all records, as in `reconbound.floor`.
        units: the unit of the data, for printing.

    Guarantee: the floor was computed once more at the returned noise and meets the target; no noise smaller by more
    than two parts in a million does, up to the last digit of the floor (rate_distortion of sampled steps: no noise
    smaller by more than one part in a hundred). The search rounds up.

    >>> found = calibrate(SampledGaussian(1.0, 0.01, 1000, clip="hard"), 1.0, bound="theorem1")
    >>> round(found.noise, 3), found.bound.value >= 1.0
    (1.365, True)
    """
    target = number("target_mse", target_mse, above=0.0)

    with_noise(mechanism, LARGEST_NOISE)  # refuses a mechanism without noise
    space = data_space(dim, low, high, mechanism.radius if radius is None else radius)

    def at(noise: float, quick: bool = True) -> Bound:
        """Returns the floor, by default without loss distributions: then it rises with the noise."""
        found = floor_on(bound, with_noise(mechanism, noise), space, quick=quick, units=units)
        assert found is not None  # both mechanisms have every floor
        return found

    highest = float(at(LARGEST_NOISE).value)
    if target >= highest:
        raise OutOfReach("target_mse", bound, highest, target_mse)
    if at(SMALLEST_NOISE).value >= target:
        undrawn = bound in ("lecam_unbiased", "lecam", "rate_distortion") and isinstance(mechanism, SampledGaussian)
        never = mechanism.never_drawn if undrawn else None
        least = with_noise(mechanism, SMALLEST_NOISE)
        return Calibration(least, SMALLEST_NOISE, target, at(SMALLEST_NOISE, quick=False), never)
    small, large = math.log(SMALLEST_NOISE), math.log(LARGEST_NOISE)
    while large - small > 1e-7:
        middle = (small + large) / 2
        small, large = (small, middle) if at(math.exp(middle)).value >= target else (middle, large)
    noise, step = round_to(math.exp(large), 7, "up"), 1e-6
    while at(noise).value < target:  # where the floor is flat, its last digit goes up and down
        noise, step = min(round_to(noise * (1 + step), 7, "up"), LARGEST_NOISE), 2 * step
    if bound == "rate_distortion" and isinstance(mechanism, SampledGaussian):
        noise = _less_noise(partial(at, quick=False), noise, target)
    return Calibration(with_noise(mechanism, noise), noise, target, at(noise, quick=False))


def _less_noise(at: Callable[[float], Bound], noise: float, target: float) -> float:
    """Returns the least noise near which loss distributions still meet the target, by a dozen of them or so."""

    @lru_cache
    def excess(gain: float) -> float:
        """Returns ln floor − ln target, which falls with the logarithm of the noise that is saved."""
        tried = round_to(noise * math.exp(-gain), 7, "up")
        return math.log(max(at(tried).value, 1e-300) / target) if tried > SMALLEST_NOISE else -1.0

    gain = 0.01
    while excess(gain) >= 0:
        gain *= 2
    if gain == 0.01:
        return noise  # less than a hundredth is gained
    gain = brentq(excess, gain / 2, gain, xtol=5e-5)
    while excess(gain) < 0:  # the root is known to its digits only
        gain -= 5e-5
    return round_to(noise * math.exp(-gain), 7, "up")


def calibrate_epsilon(
    mechanism: Noisy, target_epsilon: float, *, delta: float = 1e-5, adjacency: str = REPLACE_ONE
) -> Noisy:
    """Returns the mechanism with the smallest noise at which ε(δ) is at most `target_epsilon`.

    Args:
        mechanism: a SampledGaussian or OutputPerturbation; its own noise is ignored.
        target_epsilon: ε.
        delta: δ.
        adjacency: "replace-one", or "add/remove" as Opacus counts.

    Guarantee: ε was computed once more at the returned noise and is at most the target; with noise smaller by more than
    three parts in ten thousand (a part in a billion for output perturbation) it is not, as far as ε falls with the
    noise.

    >>> found = calibrate_epsilon(OutputPerturbation(1000, 0.1, 1.0), 1.0)
    >>> round(found.noise_std, 3), found.epsilon_at(1e-5) <= 1.0
    (0.075, True)
    """
    target = number("target_epsilon", target_epsilon, at_least=1e-3, at_most=1e6)
    d = number("delta", delta, above=0.0, below=1.0)
    with_noise(mechanism, 1.0)  # refuses a mechanism without noise
    if mechanism.epsilon_at(d, choice("adjacency", adjacency, ADJACENCIES)) is None:
        raise InputError("adjacency", "must be replace-one: for this mechanism no other epsilon is known", adjacency)

    def excess(log_noise: float) -> float:
        """Returns ln ε − ln target, which falls with the noise and is nearly a line in its logarithm."""
        found = with_noise(mechanism, math.exp(log_noise)).epsilon_at(d, adjacency)
        return math.log(max(1e300 if found is None else found, 1e-300) / target)

    # the loss distributions of sampled steps leave five digits; one Gaussian release has an exact curve
    accuracy, digits = (2e-5, 5) if isinstance(mechanism, SampledGaussian) else (1e-11, 11)
    step = math.log(4)
    large = 0.0
    while excess(large) > 0:
        large += step
        if large > math.log(LARGEST_NOISE):
            raise InputError("target_epsilon", "must be one that some noise reaches", target_epsilon)
    small = large - step
    while excess(small) <= 0 and small > math.log(SMALLEST_NOISE):
        small, large = small - step, small
    root = small if excess(small) <= 0 else brentq(excess, small, large, xtol=accuracy)
    noise = round_to(math.exp(root + accuracy), digits, "up")
    while excess(math.log(noise)) > 0:  # where ε goes up and down in its last digits: a little more noise
        noise = round_to(noise * (1 + accuracy), digits, "up")
    return with_noise(mechanism, noise)
