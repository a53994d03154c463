"""How much noise: what one record can move the minimiser, and the smallest noise that meets a target.

Nothing here looks at the data beyond its public shape: noise that is fitted to the data would itself tell about it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._check import InputError, number
from ..mechanisms import OutputPerturbation
from .losses import Loss, Squared, largest_curvature, largest_slope, largest_weights

#: The guarantee when neither noise nor a target is given.
DEFAULT_EPSILON, DEFAULT_DELTA = 1.0, 1e-5


@dataclass(frozen=True)
class LinearRelease(OutputPerturbation):
    """Output perturbation of one of our estimators: `data_norm` is L, the bound on the gradient of one record's loss.

    Attributes:
        loss: its name. row_norm: the bound on a row, the constant feature included.
        replaced_norm: the bound on the difference of two records' gradients; 2L where None.
    """

    loss: str = "logistic"
    row_norm: float = 1.0
    replaced_norm: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.replaced_norm is not None:
            number("replaced_norm", self.replaced_norm, above=0.0, at_most=2 * self.data_norm)

    @property
    def replaced(self) -> float:
        both = 2 * self.data_norm if self.replaced_norm is None else self.replaced_norm
        return self.m * (both / self.data_norm)

    def assumes(self) -> tuple[str, ...]:
        rows = f"{self.loss} loss, rows clipped (norm {self.row_norm:g} with the constant feature)"
        return (f"{rows}, gradients of norm {self.data_norm:g} at most, solved to the minimum; nλ is fixed",)


@dataclass(frozen=True)
class Shape:
    """The public facts on which the noise may depend.

    Attributes:
        loss, records (n), dim (d), classes, l2 (λ), intercept: the problem.
        data_norm: the norm to which rows are clipped, the constant feature not counted.
        target_bound: for squared loss, |y| ≤ this."""

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
        """sup‖x̃‖, the constant feature included."""
        return math.hypot(self.data_norm, 1.0) if self.intercept else self.data_norm

    @property
    def gradient_norm(self) -> float:
        """L = sup‖∂ℓ/∂s‖ sup‖x̃‖: the largest gradient of one record's loss at any minimiser."""
        return largest_slope(self.loss, self.row_norm, self.l2, self.target_bound) * self.row_norm

    @property
    def replaced_norm(self) -> float:
        """The largest difference of two records' gradients at any minimiser: 2L, but for squared loss R²‖θ‖ + 2YR.

        (xxᵀ − x'x'ᵀ)θ − yx + y'x', and xxᵀ − x'x'ᵀ has its eigenvalues in [−R², R²]."""
        if not isinstance(self.loss, Squared):
            return 2 * self.gradient_norm
        assert self.target_bound is not None
        weights = largest_weights(self.loss, 2, self.row_norm, self.l2, self.target_bound)
        return self.row_norm * (self.row_norm * weights + 2 * self.target_bound)

    def mechanism(self, noise_std: float) -> LinearRelease:
        """The release as a mechanism."""
        both = (self.gradient_norm, self.loss.name, self.row_norm, self.replaced_norm)
        return LinearRelease(self.records, self.l2, noise_std, *both)

    def worst_trace(self, noise_std: float) -> float:
        """What Tr(I) of no record in any data set of this shape exceeds.

        ‖J‖_F ≤ ‖H⁻¹‖ (sup‖A‖ sup‖x̃‖ sup‖W‖ + √d sup‖∂ℓ/∂s‖), ‖H⁻¹‖ ≤ 1/(nλ)."""
        shape = (self.row_norm, self.l2, self.target_bound)
        weights = largest_weights(self.loss, self.classes, *shape)
        bent = largest_curvature(self.loss) * self.row_norm * weights
        straight = math.sqrt(self.dim) * largest_slope(self.loss, *shape)
        return ((bent + straight) / (self.records * self.l2 * noise_std)) ** 2


def choose_noise(
    shape: Shape,
    noise_std: float | None,
    target_mse: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
) -> float:
    """The noise's standard deviation per parameter, as given or as the bounds of `shape` need for the one target."""
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
    """The smallest noise with (ε, δ)-DP under replace-one, to a part in a billion and rounded up."""

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
