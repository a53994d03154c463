"""A slow reference of one record's information: the dense Jacobian of the minimiser. Tests compare with it."""

from __future__ import annotations

import numpy as np

from reconbound.linear.solver import Optimum


def jacobian(optimum: Optimum, record: int) -> np.ndarray:
    """Returns ∂vec(W*)/∂x of one record by the implicit function theorem, (Kp, d), column by column.

    −H⁻¹ ∂/∂xⱼ (∂ℓ/∂s ⊗ x̃) = −H⁻¹ ((A W eⱼ) ⊗ x̃ + ∂ℓ/∂s ⊗ eⱼ)

    Args:
        optimum: from `minimise`.
        record: the index of the record.
    """
    d, row, slope = optimum.dim, optimum.rows[record], optimum.slopes[record]
    curvature = np.atleast_2d(optimum.curvatures[record])
    p = len(row)
    mixed = np.empty((len(slope) * p, d))
    for j in range(d):
        unit = np.zeros(p)
        unit[j] = 1.0
        mixed[:, j] = np.kron(curvature @ optimum.weights[:, j], row) + np.kron(slope, unit)
    return np.asarray(-optimum.inverse_hessian @ mixed)


def information(
    optimum: Optimum, record: int, noise_std: float, scale: np.ndarray | None = None, shrunk: float = 1.0
) -> np.ndarray:
    """Returns I = JᵀJ/σ², (d, d).

    Args:
        optimum: from `minimise`.
        record: the index of the record.
        noise_std: σ.
        scale: as in `leakage`.
        shrunk: the factor by which the row was clipped; 1 where it was not.
    """
    j = jacobian(optimum, record)
    if shrunk < 1:
        x = optimum.rows[record, : optimum.dim]
        unit = x / np.linalg.norm(x)
        j = shrunk * (j - np.outer(j @ unit, unit))
    if scale is not None:
        j = j / scale
    return np.asarray(j.T @ j / noise_std**2)
