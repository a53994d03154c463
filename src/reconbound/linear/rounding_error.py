"""Bounds on the error of a record's information by rounding and the solver's last step (docs/theory/linear.md 6.).

All bounds are for J = H⁻¹M, M = g ⊗ I + (AW) ⊗ x̃, and in the safe direction: information is raised, Tr(I⁻¹) is
lowered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reconbound.linear.solver import NotConverged, Optimum, Softmax, Squared

UNIT = 2.0**-53
#: Nothing is stated where H⁻¹ may be off by more than this share.
LARGEST_SHARE = 0.25


@dataclass(frozen=True)
class RoundingError:
    """The difference between the computed information and the exact one at the exact minimiser.

    Attributes:
        share: ρ: the exact J is (I + E)⁻¹(J + F) with ‖E‖ ≤ ρ.
        moved: an upper bound of ‖F‖, (N,), before division by units.
        size: the sizes (‖g‖, ‖A‖‖x̃‖), each (N,), from which the error of products is bounded.
        products: the factor of rounding in such products, times ‖H⁻¹‖²_F.
    """

    share: float
    moved: np.ndarray
    size: tuple[np.ndarray, np.ndarray]
    products: float

    def column_errors(self, o: Optimum, unit: np.ndarray) -> np.ndarray:
        """Bounds the error of each Iⱼⱼσ² by rounding in its products, (N, d)."""
        slope, bend = self.size
        width = np.linalg.norm(o.weights[:, : o.dim], axis=0)
        return np.asarray(self.products * ((slope[:, None] + bend[:, None] * width) / unit) ** 2)

    def direction_errors(self, o: Optimum, unit: np.ndarray) -> np.ndarray:
        """Bounds the error of vᵀIvσ² for unit vectors v, (N,)."""
        slope, bend = self.size
        most = slope + bend * float(np.linalg.norm(o.weights[:, : o.dim]))
        return np.asarray(self.products * (most / float(unit.min())) ** 2)

    def upper_bound(self, value: np.ndarray, products: np.ndarray, inverse_unit: np.ndarray | float) -> np.ndarray:
        """Returns an upper bound of the exact ‖Jv‖² from the computed one: ((‖Jv‖² + error)^½ + ‖F‖)²/(1 − ρ)²."""
        moved = self.moved.reshape(-1, *[1] * (np.ndim(value) - 1)) * inverse_unit
        root = np.sqrt(np.maximum(value, 0.0) + products) + moved
        return np.asarray((root / (1 - self.share)) ** 2 * (1 + 8 * UNIT))

    def lower_bound(self, root: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """Returns a lower bound of Tr(I⁻¹): (T^(−½) + ‖F‖)⁻²(1 − ρ)².

        Args:
            root: T^(−½), T a lower bound of the computed Tr(I⁻¹).
            unit: the units of the features.
        """
        with np.errstate(divide="ignore", over="ignore"):
            found = (root + self.moved / float(unit.min())) ** -2.0
        return np.asarray(found * (1 - self.share) ** 2 * (1 - 8 * UNIT))


def rounding_error(o: Optimum) -> RoundingError:
    """Bounds the error of an optimum's information by rounding and an inexact minimiser.

    Args:
        o: from `minimise`.

    Raises:
        NotConverged: H⁻¹ may be off by more than LARGEST_SHARE: its condition number is too large for float64.
    """
    n, (k, p) = len(o.rows), o.weights.shape
    steps = k * p + 8
    least, trace = o.penalty, float(np.trace(o.hessian))
    rows, weights = np.linalg.norm(o.rows, axis=1), float(np.linalg.norm(o.weights))
    slopes, squared = np.linalg.norm(o.slopes, axis=1), isinstance(o.loss, Squared)
    # strong convexity: ‖W − W*‖ ≤ ‖∇F(W)‖/nλ, the gradient being known up to rounding only
    summed = (n + steps) * UNIT * float(rows @ slopes + least * weights)
    far = (o.gradient_norm + summed) / least
    # how far scores can be off, and slopes and curvatures relative to themselves
    scores = rows * (far + steps * UNIT * weights) + 4 * UNIT * np.abs(o.scores).max(axis=1)
    shares = np.expm1(2 * scores) + steps * UNIT
    own = 4 * UNIT * k if isinstance(o.loss, Softmax) else 0.0  # 1 − π_y cancels
    curved = o.curvatures if o.curvatures.ndim == 1 else np.linalg.norm(o.curvatures, axis=(1, 2))
    if squared:
        shares = np.zeros(n)
        slope_off = scores + 4 * UNIT * (np.abs(o.scores[:, 0]) + np.abs(o.y))
    else:
        slope_off = slopes * shares
    widths = float(np.linalg.norm(o.weights[:, : o.dim]))
    bent_off = rows * (curved * (shares * widths + far) + own * widths)
    size = float(np.linalg.norm(o.inverse_hessian))
    residual = o.inverse_hessian @ o.hessian
    residual[np.diag_indices_from(residual)] -= 1
    share = float(np.linalg.norm(residual)) + steps * UNIT * size * float(np.linalg.norm(o.hessian))
    share += (n + steps) * UNIT * trace / least + own * float(rows @ rows) / least
    share += math.sqrt(trace / least) * float(shares.max())
    if not share <= LARGEST_SHARE:
        moved = f"rounding may have moved the leakage by more than {LARGEST_SHARE:.0%}"
        condition = f"the Hessian's condition number may be {trace / least:.2g}"
        raise NotConverged(f"{condition}: {moved}, so that no floor is stated; more l2 is needed (it is {o.l2:g})")
    return RoundingError(share, (slope_off + bent_off) / least, (slopes, curved * rows), 4 * steps * UNIT * size**2)
