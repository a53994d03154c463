"""Floors for an attacker without bias, at each record.

Theorem 1 (from order-2 Rényi DP) and Theorem 2 (from Fisher information) of Guo et al. 2022, the floor by position, the
all-corners floor and that from the overlap (ours, docs/theory/floors.md 5).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reconbound._internal.checks import LARGEST, InputError, matrix, number, numbers, whole
from reconbound.bounds.bound import Bound, box, divergence, from_log, log_expm1, mean_coordinates

REPLACE_ONE = "replace-one"
LOCAL = "Fisher information at the record"
UNIT_ROUNDOFF = 2.0**-53
#: What an overlap may be off by, and the largest that counts: nearer to 1 the digits of 1 − overlap are lost.
_OVERLAP_ERROR, _LARGEST_OVERLAP = 1e-12, 1 - 1e-6
HOLDS_EVERYWHERE = "the attacker is unbiased at every record of the box"


def _over_chi2(numerator: float, epsilon: float) -> float:
    """Returns numerator / (e^ε − 1), in log space."""
    return from_log(math.log(numerator) - log_expm1(epsilon)) if numerator > 0 else 0.0


def theorem1(
    epsilon: float,
    *,
    widths: Any = 1.0,
    dim: int | None = None,
    sensitivities: Any = 1.0,
    squared_bias: float = 0.0,
    both_ends: float = math.inf,
) -> Bound:
    """Returns the floor of the paper's Theorem 1, from order-2 Rényi differential privacy.

        E‖ẑ − z‖²/d ≥ [Σᵢ γᵢ² diamᵢ² / d] · max{1/(4(e^ε − 1)), 1/(e^κ − 1)} + ‖μ(z) − z‖²/d

    Args:
        epsilon: order-2 Rényi divergence ε between neighbours that differ in this record's value.
        widths: diamᵢ, the side lengths of the data space: one number, or one per coordinate.
        dim: the number of coordinates d when `widths` is one number.
        sensitivities: γᵢ = inf |∂μᵢ/∂zᵢ|, how fast the attacker's mean follows the record; 1 when unbiased.
        squared_bias: ‖μ(z) − z‖²/d, the attacker's squared bias per coordinate; 0 when unbiased.
        both_ends: κ with ∫(p₁ − p₀)²/p_z ≤ e^κ − 1 for any three records (docs/theory/floors.md 5.4); infinite where
            none is known, as in the paper. Where κ = ε the floor is four times the paper's.

    Guarantee: holds at every z of the box, for every attacker who knows all other records, whose mean μ has the stated
    sensitivities and bias; neighbours replace one record; any sampler, through its ε. With γ = 1 and no bias it speaks
    of unbiased attackers only, and also of coordinate i by itself, with diamᵢ²/4 over e^ε − 1: the value, where all
    sides are equal.

    >>> round(theorem1(2.0, widths=100.0).value, 1)      # the paper's age example
    391.3
    """
    eps, space = divergence("epsilon", epsilon), box(widths, dim)
    gamma = numbers("sensitivities", sensitivities, at_least=0.0)
    bias = number("squared_bias", squared_bias, at_least=0.0)
    if gamma.ndim > 0 and gamma.size != space.dim:
        raise InputError("sensitivities", f"must be one number or one per coordinate ({space.dim})", gamma.size)
    with np.errstate(over="ignore"):
        square = min(float(np.mean((gamma.ravel() * space.lengths) ** 2)), LARGEST)  # Σ γᵢ² wᵢ²/d
    biased = bias > 0 or bool(np.any(gamma != 1))
    larger = max(_over_chi2(square / 4, eps), _over_chi2(square, divergence("both_ends", both_ends)))
    value = min(larger + bias, LARGEST)
    assumes = ("the attacker's mean has the stated sensitivities and bias",) if biased else (HOLDS_EVERYWHERE,)
    each = mean_coordinates(space.dim) if biased else space.each
    return Bound(
        "theorem1", value, "Theorem 1", "unbiased", REPLACE_ONE, assumes=assumes, guess=space.guess, coordinates=each
    )


def by_position(epsilon: float, record: Any, *, low: Any = 0.0, high: Any = 1.0) -> Bound:
    """Returns Theorem 1's floor, sharpened by the record's position: the farther wall is the better neighbour.

        Var(ẑᵢ) ≥ max(zᵢ − lowᵢ, highᵢ − zᵢ)² / (e^ε − 1)

    Args:
        epsilon: order-2 Rényi divergence between neighbours.
        record: z, shape (d,).
        low: the lower walls of the box, one number or shape (d,).
        high: the upper walls of the box, one number or shape (d,).

    Guarantee: holds at this z, for attackers who are unbiased on the box; neighbours replace one record. Between 1 and
    4 times Theorem 1. The value depends on the record: it is as secret as the record.

    >>> by_position(math.log(2), [0.5]).value, by_position(math.log(2), [0.0]).value
    (0.25..., 1.0...)
    """
    eps, z = divergence("epsilon", epsilon), numbers("record", record).ravel()
    lo, hi = np.broadcast_to(numbers("low", low), z.shape), np.broadcast_to(numbers("high", high), z.shape)
    if np.any(lo >= hi):
        raise InputError("low", f"must be less than high ({hi[lo >= hi][0]:g})", float(lo[lo >= hi][0]))
    if np.any(hi / 2 - lo / 2 > 1e100):
        where = int(np.argmax(hi / 2 - lo / 2 > 1e100))
        raise InputError("high", f"must be at most 1e100 above low ({lo[where]:g})", float(hi[where]))
    if np.any((z < lo) | (z > hi)):
        where = int(np.argmax((z < lo) | (z > hi)))
        raise InputError(f"record[{where}]", "must lie between low and high", float(z[where]))
    reach = np.maximum(z - lo, hi - z)
    value = _over_chi2(float(np.mean(reach**2)), eps)
    guess = float(np.mean((hi - lo) ** 2)) / 4
    assumes, theorem, each = (HOLDS_EVERYWHERE,), "Theorem 1 by position", mean_coordinates(z.size)
    return Bound("by_position", value, theorem, "unbiased", REPLACE_ONE, assumes=assumes, guess=guess, coordinates=each)


def corners(epsilon: float, *, widths: Any = 1.0, dim: int | None = None, both_ends: float = math.inf) -> Bound:
    """Returns the floor from all corners of the box at once: d times Theorem 1 (ours, docs/theory/floors.md 5.3).

        E‖ẑ − z‖²/d ≥ (Σᵢ diamᵢ)²/d · max{1/(4(e^ε − 1)), 1/(e^κ − 1)}

    Args:
        epsilon: order-2 Rényi divergence ε between neighbours that differ in this record's value.
        widths: as in `theorem1`.
        dim: as in `theorem1`.
        both_ends: as in `theorem1`.

    Guarantee: holds at every z of the box, for every attacker who knows all other records and is unbiased at z and at
    the 2ᵈ corners; neighbours replace one record; any sampler, through its ε. On average over the coordinates: one
    of them may be known better, and only `theorem1` binds it.

    >>> round(corners(math.log(2), dim=784).value / theorem1(math.log(2), dim=784).value, 9)
    784.0
    """
    eps, space = divergence("epsilon", epsilon), box(widths, dim)
    total = float(np.sum(space.lengths)) * (space.dim if space.lengths.ndim == 0 else 1)
    log_square = 2 * math.log(total) - math.log(space.dim)
    once, twice = log_square - math.log(4) - log_expm1(eps), log_square - log_expm1(divergence("both_ends", both_ends))
    value = from_log(max(once, twice))
    assumes = ("the attacker is unbiased at the record and at all corners of the box",)
    return Bound("corners", value, "all-corners HCR", "unbiased", REPLACE_ONE, assumes=assumes, guess=space.guess,
                 coordinates=mean_coordinates(space.dim))  # fmt: skip


def lecam_unbiased(overlap: float, *, widths: Any = 1.0, dim: int | None = None, order2: float = math.inf) -> Bound:
    """Returns the floor of two unbiased guesses from the overlap of their releases (ours, docs/theory/floors.md 5.5).

        MSE/d ≥ (Σᵢ wᵢ²/(4d)) (1 − LC)/LC

    Args:
        overlap: a lower bound on 1 − LC between replace-one neighbours, up to an error of 1e-12; counts up to 1 − 1e-6.
        widths: as in `theorem1`.
        dim: as in `theorem1`.
        order2: ε₂ between them in either direction: LC ≤ tanh(ε₂/2), which keeps its digits where LC is tiny.

    Guarantee: on average over the box's corners, for every attacker who knows all other records, even all other
    coordinates of this one, and is unbiased at the corners; neighbours replace one record. Coordinate i by itself has
    the floor (wᵢ²/4)(1 − LC)/LC on average over its two ends: the value, where all sides are equal. Rare outcomes count
    little, and δ > 0 is allowed.

    >>> round(lecam_unbiased(0.8).value, 9)
    1.0
    """
    share, space = number("overlap", overlap, at_least=0.0, at_most=1.0), box(widths, dim)
    eps = divergence("order2", order2)
    known = min(share, _LARGEST_OVERLAP)
    log_odds = math.log(known) - math.log(1 - known + _OVERLAP_ERROR) if known > 0 else -math.inf  # (1 − LC)/LC
    value = from_log(math.log(space.guess) + max(log_odds, math.log(2) - log_expm1(eps)))
    assumes = ("on average over the corners of the box", "the attacker is unbiased at all corners of the box")
    return Bound("lecam_unbiased", value, "Le Cam, unbiased", "unbiased", REPLACE_ONE, assumes=assumes,
                 guess=space.guess, coordinates=space.each)  # fmt: skip


def _saturated_inverse(values: np.ndarray) -> Any:
    """Returns 1/x within the finite floats, also at 0."""
    out = np.full(values.shape, LARGEST)
    np.divide(1.0, values, out=out, where=values > 1 / LARGEST)
    return float(out) if out.ndim == 0 else out


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
    eta += 4 * (d + 4) * UNIT_ROUNDOFF * math.sqrt(d) * max(size, float(np.linalg.norm(values)))
    eta += float(np.linalg.norm(scaled - scaled.T)) / 2
    eta += 2 * max(-float(values[0]), 0.0)  # what a matrix with a negative eigenvalue is known to be off by, twice
    least = np.maximum(values, 0.0) + max(eta, 1 / LARGEST) + shift
    skew = float(np.linalg.norm(vectors.T @ vectors - np.eye(d))) + 4 * (d + 4) * UNIT_ROUNDOFF * d
    reach = np.linalg.norm(follows @ vectors, axis=0)
    lost = (d + 4) * UNIT_ROUNDOFF * float(np.linalg.norm(follows))  # rounding of a product J v
    with np.errstate(over="ignore"):
        total = float(np.sum(np.maximum(reach - lost, 0.0) ** 2 / least))
    share = 1 - 2 * skew * math.sqrt(float(least[-1] / least[0]))
    return total * max(share, 0.0) ** 2 * (1 - 8 * (d + 4) * UNIT_ROUNDOFF)


def theorem2(information: Any, *, jacobian: Any = None, bias: Any = None) -> Bound:
    """Returns the floor of the paper's Theorem 2 in full: the Cramér–Rao floor.

        E‖ẑ − z‖²/d ≥ Tr(J_μ I⁻¹ J_μᵀ)/d + ‖μ(z) − z‖²/d

    Args:
        information: Fisher information matrix I about the record, shape (d, d).
        jacobian: J_μ, the Jacobian of the attacker's mean, shape (d, d); the identity (unbiased) when left out.
        bias: μ(z) − z, shape (d,); zero when left out.

    Guarantee: holds at this z for every attacker whose mean has this Jacobian and bias there. Directions that the
    release says nothing about cost an attacker who follows them infinitely much. float64 cannot tell an eigenvalue of
    0 from one of the size of its rounding: every eigenvalue is raised by what rounding can have taken from it, so that
    the value is then huge, and never too high (docs/theory/floors.md 5.2).

    >>> round(theorem2([[4.0, 0.0], [0.0, 1.0]]).value, 12)           # (1/4 + 1)/2
    0.625
    """
    fim = matrix("information", information, symmetric=True)
    d = fim.shape[0]
    j_mu = np.eye(d) if jacobian is None else numbers("jacobian", jacobian)
    if j_mu.shape != (d, d):
        raise InputError("jacobian", f"must have shape {(d, d)}", j_mu.shape)
    shift = np.zeros(d) if bias is None else numbers("bias", bias).ravel()
    if shift.size != d:
        raise InputError("bias", f"must have {d} entries", shift.size)
    with np.errstate(over="ignore"):
        value = min(inverse_trace(fim, j_mu) / d + float(np.mean(shift**2)), LARGEST)
    unbiased = jacobian is None and bias is None
    assumes = () if unbiased else ("the attacker's mean has the stated Jacobian and bias",)
    return Bound(
        "theorem2", value, "Theorem 2 (Cramér–Rao)", "unbiased", LOCAL, assumes=assumes, coordinates=mean_coordinates(d)
    )


def from_trace(trace: Any, dim: int) -> Bound:
    """Returns Theorem 2's floor from only the trace, for one record or many.

        E‖ẑ − z‖²/d ≥ d/Tr(I) = 1/dFIL

    Args:
        trace: Tr(I), one number or one per record.
        dim: the number of coordinates d.

    Guarantee: holds at each record for attackers unbiased near it; never above Tr(I⁻¹)/d.

    >>> from_trace(8.0, 2).value
    0.25
    """
    traces = numbers("trace", trace, at_least=0.0)
    d = whole("dim", dim)
    return Bound("dfil", _saturated_inverse(traces / d), "Theorem 2 (trace)", "unbiased", LOCAL,
                 coordinates=mean_coordinates(d))  # fmt: skip


def from_spectral_norm(norm: Any) -> Bound:
    """Returns Theorem 2's floor from the Fisher information loss η² = ‖I‖₂: the weakest of its floors.

        E‖ẑ − z‖²/d ≥ 1/η²

    Args:
        norm: η², one number or one per record.

    Guarantee: as for `from_trace`; never above it. It also holds for each coordinate and each direction by itself.

    >>> from_spectral_norm(4.0).value
    0.25
    """
    norms = numbers("norm", norm, at_least=0.0)
    return Bound("fil", _saturated_inverse(norms), "Theorem 2 (spectral)", "unbiased", LOCAL, coordinates="each")


def per_feature(diagonal: Any) -> Bound:
    """Returns Theorem 2's floor for each feature by itself, in the square of that feature's own unit.

        Var(ẑⱼ) ≥ [I⁻¹]ⱼⱼ ≥ 1/Iⱼⱼ

    Args:
        diagonal: the diagonal of I, shape (d,) or (records, d).

    Guarantee: holds at each record for attackers unbiased in feature j near it, even those who know all other features.

    >>> per_feature([4.0, 1.0]).value
    array([0.25, 1.  ])
    """
    entries = numbers("diagonal", diagonal, at_least=0.0)
    return Bound("per_feature", _saturated_inverse(entries), "Theorem 2 (one feature)", "unbiased", LOCAL,
                 coordinates="each")  # fmt: skip


def per_group(information: Any, features: Any) -> Bound:
    """Returns Theorem 2's floor for a group of features: its block of I, as if all other features were known.

        E‖ẑ_G − z_G‖²/|G| ≥ Tr([I⁻¹]_GG)/|G| ≥ Tr([I_GG]⁻¹)/|G|

    Args:
        information: I, shape (d, d).
        features: the indices of the group.

    Guarantee: holds at this record for attackers unbiased in the group's features near it.

    >>> round(per_group([[4.0, 0.0], [0.0, 1.0]], [0]).value, 12)
    0.25
    """
    fim = matrix("information", information, symmetric=True)
    given = numbers("features", features).ravel()
    index = given.astype(int)
    if np.any(index != given) or index.min() < 0 or index.max() >= fim.shape[0] or np.unique(index).size != index.size:
        raise InputError("features", f"must be distinct indices below {fim.shape[0]}", features)
    block = theorem2(fim[np.ix_(index, index)])
    return Bound("per_group", block.value, "Theorem 2 (a group of features)", "unbiased", LOCAL,
                 coordinates=mean_coordinates(index.size))  # fmt: skip
