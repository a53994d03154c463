"""The noise of a linear model, from how far one record can move the minimiser.

Nothing here reads the data beyond its public shape: noise that is fitted to the data would itself reveal something.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from reconbound._internal.checks import InputError, number
from reconbound.linear.losses import Loss
from reconbound.mechanisms import OutputPerturbation
from reconbound.mechanisms.calibrate import calibrate_epsilon
from reconbound.mechanisms.output_perturbation import largest_curvature, largest_slope

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

    def mechanism(self, noise_std: float = 1.0) -> OutputPerturbation:
        """Returns the release as a mechanism.

        Args:
            noise_std: σ.
        """
        bound = self.target_bound if self.loss.name == "squared" else None
        facts = (self.data_norm, self.loss.name, bound, self.intercept)
        return OutputPerturbation(self.records, self.l2, noise_std, *facts)

    def worst_trace(self, noise_std: float) -> float:
        """Returns an upper bound of Tr(I) of every record in every data set of this shape.

            ‖J‖_F ≤ ‖H⁻¹‖ (sup‖A‖ sup‖x̃‖ sup‖W‖ + √d sup‖∂ℓ/∂s‖),   ‖H⁻¹‖ ≤ 1/(nλ)

        Args:
            noise_std: σ.
        """
        release = self.mechanism(noise_std)
        bent = largest_curvature(release.loss) * release.row_norm * release.largest_weights(self.classes)
        slope = largest_slope(release.loss, release.row_norm, self.l2, release.target_bound)
        return ((bent + math.sqrt(self.dim) * slope) / (self.records * self.l2 * noise_std)) ** 2


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
    values = {"noise_std": noise_std, "target_mse": target_mse, "target_epsilon": target_epsilon}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        others = " and ".join(given[1:])
        must = f"must not be given together with {others}: one of them sets the noise"
        raise InputError(given[0], must, values[given[0]])
    if target_delta is not None and given and given != ["target_epsilon"]:
        must = f"belongs to target_epsilon and must not be given with {given[0]}"
        raise InputError("target_delta", must, target_delta)
    if noise_std is not None:
        return number("noise_std", noise_std, above=0.0)
    if target_mse is not None:
        target = number("target_mse", target_mse, above=0.0)
        return math.sqrt(target * shape.worst_trace(1.0) / shape.dim)
    epsilon = DEFAULT_EPSILON if target_epsilon is None else target_epsilon
    delta = number("target_delta", DEFAULT_DELTA if target_delta is None else target_delta, above=0.0, below=1.0)
    return calibrate_epsilon(shape.mechanism(), epsilon, delta=delta).noise_std
