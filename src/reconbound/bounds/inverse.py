"""A lower bound of Tr(J A⁻¹ Jᵀ) that holds whatever rounding does to a nearly singular A."""

from __future__ import annotations

import math

import numpy as np

from reconbound._internal.checks import LARGEST

_UNIT = 2.0**-53


def inverse_trace(matrix: np.ndarray, jacobian: np.ndarray, shift: float = 0.0) -> float:
    """Returns a lower bound of Tr(J (A + shift)⁻¹ Jᵀ) for a symmetric positive semi-definite A given in float64.

        A ≼ V (Λ + η) Vᵀ   implies   Tr(J A⁻¹ Jᵀ) ≥ Σᵢ ‖J vᵢ‖²/(λᵢ + η)

    A is first scaled to unit diagonal, by powers of two. η bounds what separates the scaled A from V Λ Vᵀ: the
    residual, the rounding of the residual itself, the asymmetry of A, and what A falls short of being positive
    semi-definite. The last step accounts for V being orthogonal only up to rounding.

    Args:
        matrix: A, shape (d, d).
        jacobian: J, shape (k, d).
        shift: is added to every eigenvalue of A, which is then not scaled.

    >>> inverse_trace(np.diag([4.0, 1.0]), np.eye(2)) <= 1.25
    True
    """
    d = len(matrix)
    diagonal = np.diagonal(matrix)
    exponent = np.where(diagonal > 0, np.round(np.log2(np.where(diagonal > 0, diagonal, 1.0)) / 2), 0.0)
    exponent = np.clip(0.0 * exponent if shift else exponent, -500, 500).astype(int)
    scaled = np.ldexp(np.ldexp(matrix, -exponent[:, None]), -exponent[None, :])
    follows = np.ldexp(jacobian, -exponent[None, :])  # exact, as the powers of two are, up to underflow
    symmetric = scaled / 2 + scaled.T / 2
    values, vectors = np.linalg.eigh(symmetric)
    size = float(np.linalg.norm(symmetric))
    rebuilt = (vectors * values) @ vectors.T
    eta = float(np.linalg.norm(symmetric - rebuilt))
    eta += 4 * (d + 4) * _UNIT * math.sqrt(d) * max(size, float(np.linalg.norm(values)))
    eta += float(np.linalg.norm(scaled - scaled.T)) / 2
    eta += 2 * max(-float(values[0]), 0.0)  # what a matrix with a negative eigenvalue is known to be off by, twice
    least = np.maximum(values, 0.0) + max(eta, 1 / LARGEST) + shift
    skew = float(np.linalg.norm(vectors.T @ vectors - np.eye(d))) + 4 * (d + 4) * _UNIT * d
    reach = np.linalg.norm(follows @ vectors, axis=0)
    lost = (d + 4) * _UNIT * float(np.linalg.norm(follows))  # rounding of a product J v
    with np.errstate(over="ignore"):
        total = float(np.sum(np.maximum(reach - lost, 0.0) ** 2 / least))
    share = 1 - 2 * skew * math.sqrt(float(least[-1] / least[0]))
    return total * max(share, 0.0) ** 2 * (1 - 8 * (d + 4) * _UNIT)


__all__ = ["inverse_trace"]
