"""The noise of a linear model: how far one record can move the minimiser, and the smallest noise that meets a target.

Nothing here reads the data beyond its public shape: noise that is fitted to the data would itself reveal something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reconbound._internal.checks import InputError, number
from reconbound.linear.losses import Loss
from reconbound.mechanisms import OutputPerturbation
from reconbound.mechanisms.sensitivities import (
    gradient_norm,
    largest_curvature,
    largest_slope,
    largest_weights,
    replaced_norm,
)

#: The guarantee when neither noise nor a target is given.
DEFAULT_EPSILON, DEFAULT_DELTA = 1.0, 1e-5


@dataclass(frozen=True)
class Shape:
    """The public facts on which the noise may depend.

    Attributes:
        loss: the name of the loss.
        records: n.
        dim: d.
        classes: the number of classes.
        l2: λ.
        intercept: whether rows have a constant feature.
        data_norm: the norm to which rows are clipped, the constant feature not counted.
        target_bound: for squared loss, |y| ≤ this.
    """

    loss: Loss
    records: int
    dim: int
    classes: int
    l2: float
    intercept: bool
    data_norm: float
    target_bound: float | None = None

    @property
    def row_norm(self) -> float:
        """Returns sup‖x̃‖, the constant feature included."""
        return math.hypot(self.data_norm, 1.0) if self.intercept else self.data_norm

    @property
    def gradient_norm(self) -> float:
        """Returns L, the largest gradient of one record's loss at any minimiser."""
        return gradient_norm(self.loss.name, self.row_norm, self.l2, self.target_bound)

    @property
    def replaced_norm(self) -> float:
        """Returns the largest difference of two records' gradients at any minimiser."""
        return replaced_norm(self.loss.name, self.row_norm, self.l2, self.target_bound)

    def mechanism(self, noise_std: float) -> OutputPerturbation:
        """Returns the release as a mechanism.

        Args:
            noise_std: σ.
        """
        bound = self.target_bound if self.loss.name == "squared" else None
        what = (self.data_norm, self.loss.name, bound, self.intercept)
        return OutputPerturbation(self.records, self.l2, noise_std, *what)

    def worst_trace(self, noise_std: float) -> float:
        """Returns an upper bound of Tr(I) of every record in every data set of this shape.

        ‖J‖_F ≤ ‖H⁻¹‖ (sup‖A‖ sup‖x̃‖ sup‖W‖ + √d sup‖∂ℓ/∂s‖), ‖H⁻¹‖ ≤ 1/(nλ).

        Args:
            noise_std: σ.
        """
        shape = (self.row_norm, self.l2, self.target_bound)
        weights = largest_weights(self.loss.name, self.classes, *shape)
        bent = largest_curvature(self.loss.name) * self.row_norm * weights
        straight = math.sqrt(self.dim) * largest_slope(self.loss.name, *shape)
        return ((bent + straight) / (self.records * self.l2 * noise_std)) ** 2


def choose_noise(
    shape: Shape,
    noise_std: float | None,
    target_mse: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
) -> float:
    """Returns the noise's standard deviation per parameter, as given or as the bounds of `shape` need.

    Args:
        shape: the public facts.
        noise_std: σ, or None.
        target_mse: the floor to reach, or None.
        target_epsilon: the ε to reach, or None.
        target_delta: δ of target_epsilon.
    """
    given = [
        name
        for name, value in (("noise_std", noise_std), ("target_mse", target_mse), ("target_epsilon", target_epsilon))
        if value is not None
    ]
    if len(given) > 1:
        first, *others = given
        values = {"noise_std": noise_std, "target_mse": target_mse, "target_epsilon": target_epsilon}
        raise InputError(
            first, f"must not be given together with {' and '.join(others)}: one of them sets the noise", values[first]
        )
    if target_delta is not None and given and given != ["target_epsilon"]:
        raise InputError(
            "target_delta", f"belongs to target_epsilon and must not be given with {given[0]}", target_delta
        )
    if noise_std is not None:
        return number("noise_std", noise_std, above=0.0)
    if target_mse is not None:
        target = number("target_mse", target_mse, above=0.0)
        return math.sqrt(target * shape.worst_trace(1.0) / shape.dim)
    epsilon = number("target_epsilon", DEFAULT_EPSILON if target_epsilon is None else target_epsilon, above=0.0)
    delta = number("target_delta", DEFAULT_DELTA if target_delta is None else target_delta, above=0.0, below=1.0)
    return noise_for_epsilon(shape, epsilon, delta)


def noise_for_epsilon(shape: Shape, epsilon: float, delta: float) -> float:
    """Returns the smallest noise with (ε, δ)-DP under replace-one, to a part in a billion and rounded up.

    Args:
        shape: the public facts.
        epsilon: ε.
        delta: δ.
    """

    def reached(noise: float) -> float:
        found = shape.mechanism(noise).epsilon_at(delta)
        assert found is not None  # the Gaussian mechanism has ε at every δ
        return found

    unit = shape.replaced_norm / (shape.records * shape.l2)  # noise at which the shift is one standard deviation
    low, high = unit, unit
    while reached(high) > epsilon:
        low, high = high, high * 4
    while reached(low) <= epsilon and low > unit * 1e-8:
        low, high = low / 4, low
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if reached(middle) > epsilon else (low, middle)
    return high
