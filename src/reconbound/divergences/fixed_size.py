"""The pair that dominates one Gaussian step on a batch of fixed size, replace-one (docs/theory/divergences.md 4.10).

A = q N(2m, 1) + (1−q) N(0, 1) and B = N(0, 1) are dominating for orders above 1, and (B, A) for those below. Their
fusion (P, Q) has the losses L = ln A/B > 0 of x > m, with P = A and Q = B; their mirror images −L, with P and Q
exchanged; and the loss 0 with all that is left, (1−q)(2Φ(m) − 1).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import log_ndtr, ndtr

from reconbound.divergences.quadrature import cells
from reconbound.divergences.sensitivity import checked_rate, checked_shift


def fixed_size_delta(m: float, sample_rate: float, epsilon: Any) -> Any:
    """Returns the hockey-stick divergence δ(ε) of the fused pair.

        δ(ε) = q [Φ(m − s) − α Φ(−m − s)],   α = 1 + (e^ε − 1)/q,   s = ln α/(2m),      ε ≥ 0
        δ(ε) = 1 − e^ε + e^ε δ(−ε),                                                      ε < 0

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        epsilon: ε, a number or an array.

    Guarantee: an upper bound of δ(ε) between any two data sets that differ in one record, uniform batches of size B,
    for every mechanism on the batch that adds Gaussian noise to sums whose terms have norm at most m.

    >>> round(float(fixed_size_delta(0.5, 1.0, 0.0)), 6)          # q = 1: two Gaussians one standard deviation apart
    0.382925
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    eps = np.asarray(epsilon, dtype=np.float64)
    if m == 0:
        return np.maximum(-np.expm1(np.minimum(eps, 0.0)), 0.0)
    size = np.abs(eps)
    with np.errstate(over="ignore"):
        log_alpha = np.where(size < 30, np.log1p(np.expm1(np.minimum(size, 30.0)) / q), size - math.log(q))
    shift = log_alpha / (2 * m)
    above = q * np.maximum(ndtr(m - shift) - np.exp(np.minimum(log_alpha + log_ndtr(-m - shift), 0.0)), 0.0)
    return np.where(eps >= 0, above, -np.expm1(-size) + np.exp(-size) * above)


def fixed_size_losses(m: float, q: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns losses L ≥ 0 of the fused pair at quadrature nodes, with the masses of P and of Q there.

    The mirror images −L, with both masses exchanged, belong to the pair too. The first node is the loss 0.

    Args:
        m: as in `fixed_size_delta`, above 0.
        q: as in `fixed_size_delta`.
    """
    count = math.ceil((m + 10) * max(4.0, 2 * m))
    x, weights = (part.ravel() for part in cells(np.linspace(m, 2 * m + 10, count + 1)))
    loss = np.log1p(q * np.expm1(np.minimum(2 * m * (x - m), 700.0)))
    loss = np.where(2 * m * (x - m) > 700, 2 * m * (x - m) + math.log(q), loss)
    lower = weights * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    upper = np.exp(loss - x * x / 2) * weights / math.sqrt(2 * math.pi)
    atom = (1 - q) * math.erf(m / math.sqrt(2)) / 2  # a half of it: the other belongs to the mirror image
    return np.append(0.0, loss), np.append(atom, upper), np.append(atom, lower)
