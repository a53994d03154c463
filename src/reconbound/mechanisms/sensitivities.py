"""The effect of one record on a linear model: suprema of the losses' slopes, and how far they move the minimiser.

These numbers are defined only here, for the calculator and for `reconbound.linear`. Proofs: docs/theory/linear.md,
section 2.
"""

from __future__ import annotations

import math

from scipy.special import lambertw

from reconbound._internal.checks import InputError, choice, number

LOSSES = ("logistic", "softmax", "squared")


def check_loss(loss: str, target_bound: float | None) -> None:
    """Refuses an unknown loss, and a squared loss without a bound on its targets.

    Args:
        loss: "logistic", "softmax" or "squared".
        target_bound: Y, for squared loss.
    """
    choice("loss", loss, LOSSES)
    if loss == "squared":
        if target_bound is None:
            raise InputError("target_bound", "must be given with squared loss: the largest |y|", target_bound)
        number("target_bound", target_bound, above=0.0)
    elif target_bound is not None:
        raise InputError("target_bound", "belongs to squared loss only", target_bound)


def largest_slope(loss: str, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns the largest norm of ∂ℓ/∂s at any minimiser, for rows (constant feature included) of norm ≤ `row_norm`.

    Logistic 1, softmax √2; squared loss Y(1 + R/(2√λ)), as ‖θ*‖ ≤ Y/(2√λ) (docs/theory/linear.md, section 2).

    Args:
        loss: "logistic", "softmax" or "squared".
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.
    """
    if loss == "logistic":
        return 1.0
    if loss == "softmax":
        return math.sqrt(2.0)
    assert target_bound is not None
    return target_bound * (1 + row_norm / (2 * math.sqrt(l2)))


def largest_weights(loss: str, classes: int, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns the largest norm of the minimiser, for any data: nλ‖W‖² = −Σ ∂ℓ/∂s·s, and nλ‖W‖ ≤ Σ‖∂ℓ/∂s‖‖x̃‖.

    −∂ℓ/∂s·s is at most Y²/4 for squared loss and Lambert's W((K − 1)/e) for softmax, logistic loss being K = 2.

    Args:
        loss: "logistic", "softmax" or "squared".
        classes: K, for softmax.
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.
    """
    if loss == "squared":
        assert target_bound is not None
        most = target_bound**2 / 4
    else:
        most = float(lambertw((max(classes, 2) - 1) / math.e).real)
    return min(math.sqrt(most / l2), largest_slope(loss, row_norm, l2, target_bound) * row_norm / l2)


def largest_curvature(loss: str) -> float:
    """Returns the largest eigenvalue of ∂²ℓ/∂s²: 1/4 logistic, 1/2 softmax, 1 squared."""
    return {"logistic": 0.25, "softmax": 0.5, "squared": 1.0}[loss]


def gradient_norm(loss: str, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns L = sup‖∂ℓ/∂s‖ sup‖x̃‖: the largest gradient of one record's loss at any minimiser.

    Logistic R, softmax √2·R, squared YR(1 + R/(2√λ)).

    Args:
        loss: "logistic", "softmax" or "squared".
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.

    >>> gradient_norm("logistic", 2.0, 0.1), round(gradient_norm("softmax", 2.0, 0.1), 6)
    (2.0, 2.828427)
    """
    return largest_slope(loss, row_norm, l2, target_bound) * row_norm


def replaced_norm(loss: str, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """Returns the largest difference of two records' gradients at any minimiser: 2L, but R²‖θ‖ + 2YR for squared loss.

    (xxᵀ − x'x'ᵀ)θ − yx + y'x', and xxᵀ − x'x'ᵀ has its eigenvalues in [−R², R²].

    Args:
        loss: "logistic", "softmax" or "squared".
        row_norm: R, the largest norm of a row, the constant feature included.
        l2: λ.
        target_bound: Y, for squared loss.
    """
    if loss != "squared":
        return 2 * gradient_norm(loss, row_norm, l2)
    assert target_bound is not None
    weights = largest_weights(loss, 2, row_norm, l2, target_bound)
    return row_norm * (row_norm * weights + 2 * target_bound)
