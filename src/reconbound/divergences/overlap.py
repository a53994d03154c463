"""The overlap 1 − LC of two releases whose data differ in one record; LC is Le Cam's divergence."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from reconbound._internal.checks import whole
from reconbound.bounds.any_attacker import overlap_from_order2
from reconbound.bounds.bound import from_log, log1m
from reconbound.divergences.fixed_size import fixed_size_losses
from reconbound.divergences.quadrature import cells
from reconbound.divergences.sensitivity import checked_rate, checked_shift


def overlap_poisson(m: float, sample_rate: float, steps: int = 1) -> float:
    """Returns 1 − LC of T Poisson-sampled Gaussian steps under replace-one, exactly, as one Fourier integral (ours).

        1 − LC = ∫ sech(πω) M(ω)ᵀ dω,   M(ω) = ∫ √(PQ) cos(ω ln P/Q),   P, Q = (1−q)N(0,1) + q N(±m,1)

    Args:
        m: as in `order2_poisson`.
        sample_rate: as in `order2_poisson`.
        steps: T.

    Guarantee: a lower bound for any two data sets that differ in one record, met by antipodal gradients and known
    others (they dominate: docs/theory/divergences.md 4.2), up to rounding, about 1e-13. Beyond m = 16 the rigorous
    lower bound (1 − q)ᵀ stands in, smaller by a share below 1e-10 for q ≥ 1e-9 and qT ≤ 1.

    >>> round(overlap_poisson(0.5, 1.0), 6), overlap_poisson(1e6, 0.5)
    (0.795946, 0.5)
    """
    m, q, count = checked_shift(m), checked_rate(sample_rate), whole("steps", steps, at_least=0)
    if m == 0 or count == 0:
        return 1.0
    if q == 1:
        return _overlap_gaussian(m * math.sqrt(count))
    floor = from_log(count * log1m(q))
    return floor if m > 16 else min(max(_overlap_sampled(m, q, count), floor), 1.0)


def overlap_fixed(m: float, sample_rate: float, steps: int = 1, *, order2: float) -> float:
    """Returns a lower bound on 1 − LC of T fixed-size Gaussian steps under replace-one.

    It is the best of four: the Fourier integral of `overlap_poisson` for the pair that dominates the step, order ½,
    order 2 and z's absence.

        1 − LC ≥ max{ ∫ sech(πω) M(ω)ᵀ dω,  (1 − q(1 − e^{−m²/2}))^{2T},  2/(1 + e^{ε₂}),  (1 − q)ᵀ }

    Args:
        m: as in `overlap_poisson`.
        sample_rate: q = B/N.
        steps: T.
        order2: ε₂ of all T steps together.

    Guarantee: any two data sets that differ in one record, uniform batches of fixed size
    (docs/theory/divergences.md 4.5 and 4.10).

    >>> overlap_fixed(0.0, 0.5, order2=0.0)
    1.0
    """
    m, q, count = checked_shift(m), checked_rate(sample_rate), whole("steps", steps, at_least=0)
    gap = -q * math.expm1(-m * m / 2)  # 1 − BC
    log_affinity = math.log1p(-gap) if gap < 1 else -m * m / 2
    absent = from_log(count * log1m(q)) if count > 0 else 1.0
    simple = max(from_log(2 * count * log_affinity), overlap_from_order2(order2), absent)
    if m == 0 or count == 0 or m > 16:
        return simple
    return max(simple, _overlap_gaussian(m * math.sqrt(count)) if q == 1 else _overlap_fused(m, q, count))


@lru_cache(maxsize=1024)
def _overlap_fused(m: float, q: float, count: int) -> float:
    """Returns the Fourier integral of the fused pair for 0 < m ≤ 16, q < 1."""
    loss, upper, lower = fixed_size_losses(m, q)
    return min(max(_fourier(loss, 2 * np.sqrt(upper * lower), count), 0.0), 1.0)  # 2: the mirror images


@lru_cache(maxsize=1024)
def _overlap_sampled(m: float, q: float, count: int) -> float:
    """Returns the Fourier integral for 0 < m ≤ 16, q < 1.

    Results are kept, because a search for the noise asks for the same values again.
    """
    x = np.linspace(0.0, m + 10, math.ceil((m + 10) * max(50.0, (26 * m + 12) / math.pi)) + 1)
    plus = np.logaddexp(log1m(q), math.log(q) + m * x - m * m / 2)  # ln P/P₀, and ln Q/P₀ is its mirror image
    minus = np.logaddexp(log1m(q), math.log(q) - m * x - m * m / 2)
    loss, weight = plus - minus, np.exp((plus + minus - x * x) / 2) * (2 * x[1] / math.sqrt(2 * math.pi))
    weight[0] /= 2
    return _fourier(loss, weight, count)


def _fourier(loss: np.ndarray, weight: np.ndarray, count: int) -> float:
    """Returns ∫ sech(πω) M(ω)ᵀ dω, where M(ω) is the sum of weight · cos(ω · loss), with weights √(PQ)."""
    far = weight * np.cosh(np.minimum(loss, 1400.0) / 2) > 1e-22  # where P or Q has mass
    loss, weight = loss[far], weight[far]
    spread = math.sqrt(count * float(np.sum(weight * loss**2) / np.sum(weight)))
    omega, d_omega = _frequencies(spread)
    hellinger = float(np.sum(weight * 2 * np.sinh(loss / 4) ** 2))
    phase = _phase_loss(omega, loss, weight)
    missing, direct = hellinger + phase, float(np.sum(weight)) - phase  # 1 − M(ω), and M(ω) where it is small
    small = missing < 0.5
    log_size = np.where(
        small, np.log1p(-np.where(small, missing, 0.0)), np.log(np.abs(np.where(small, 1, direct)) + 1e-300)
    )
    sign = np.where(direct < 0, -1.0 if count % 2 else 1.0, 1.0)
    return float(np.sum(d_omega / np.cosh(math.pi * omega) * sign * np.exp(count * log_size)))


def _phase_loss(omega: np.ndarray, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns Σ weight (1 − cos ωl) at each ω, as Σ weight · 2 sin²(ωl/2), which does not cancel; in chunks of rows."""
    rows = max(1, 2**18 // len(loss))
    parts = []
    for k in range(0, len(omega), rows):
        sines = np.sin(np.multiply.outer(omega[k : k + rows], loss / 2))
        parts.append(np.square(sines, out=sines) @ weight)
    return 2 * np.concatenate(parts)


def _overlap_gaussian(m: float) -> float:
    """Returns 1 − LC of N(−m,1) and N(m,1): the same integral in closed form, M(ω) = exp(−m²/2 − 2m²ω²)."""
    if m > 60:
        return 0.0  # e^(−1800)
    omega, d_omega = _frequencies(2 * m)
    inner = float(np.sum(d_omega / np.cosh(math.pi * omega) * np.exp(-2 * (m * omega) ** 2)))
    return min(from_log(-m * m / 2) * inner, 1.0)


def _frequencies(spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights on |ω| ≤ 13 (sech(πω) < 1e-17 beyond) that resolve a peak of width 1/spread at 0."""
    edges = [0.0]
    width = min(0.25, 1 / spread) if spread > 0 else 0.25
    while edges[-1] < 13:
        edges.append(edges[-1] + width)
        width = min(0.25, 2 * width)
    omega, weights = cells(np.array(edges))
    return omega.ravel(), 2 * weights.ravel()
