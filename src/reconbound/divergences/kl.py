"""Kullback–Leibler divergences of a release to that without the record, in nats."""

from __future__ import annotations

import math

import numpy as np

from reconbound.bounds.bound import divergence, log1m
from reconbound.divergences.quadrature import cells
from reconbound.divergences.sensitivity import checked_rate, checked_shift


def kl_pure(epsilon: float) -> float:
    """Returns the largest KL divergence of an ε-DP mechanism (the same neighbours), tight for randomised response.

        KL ≤ ε tanh(ε/2)

    Args:
        epsilon: ε.

    >>> round(kl_pure(1.0), 6)
    0.462117
    """
    eps = divergence("epsilon", epsilon)
    return eps * math.tanh(eps / 2)


def kl_poisson(m: float, sample_rate: float) -> float:
    """Returns the KL divergence of one Poisson-sampled Gaussian step to the same step without the record.

        KL(q N(m,1) + (1−q) N(0,1) ‖ N(0,1))          (q m²/2, its convexity bound, where m > 40 or q < 1e-300)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.

    Guarantee: an upper bound over all records with clipped norm at most m (docs/theory/divergences.md 4.4).

    >>> kl_poisson(1.0, 1.0), round(kl_poisson(1.0, 0.01), 9)
    (0.5, 8.3812e-05)
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    convex = q * m * m / 2
    if m > 40 or q == 1 or m == 0 or q < 1e-300:
        return convex

    # up to 2m: for a tiny rate KL ≈ χ²/2, and the integrand of χ² is (q P₁)²/P₀
    x, weights = cells(np.linspace(-13.0, 2 * m + 13.0, 16 * (26 + math.ceil(2 * m)) + 1))
    exponent = m * x - m * m / 2
    log_r = np.logaddexp(log1m(q), math.log(q) + exponent)  # r = W/P₀
    u = q * np.expm1(np.minimum(exponent, 700.0))  # beyond it r is large
    log_g = _log_kl_integrand(u, log_r)
    total = float(np.sum(np.exp(log_g - x * x / 2) * weights)) / math.sqrt(2 * math.pi)
    return min(total, convex)


def kl_fixed(m: float, sample_rate: float) -> float:
    """Returns the KL divergence of one fixed-size Gaussian step to that with a zero gradient in the record's place.

        KL ≤ min{ q m²/2,  ln(1 + q² e^{q(1−q)m²/2} [e^{(2−q)²m²} − 2e^{(1−q)(2−q)m²} + e^{(1−q)²m²}]) }

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.

    Guarantee: an upper bound over all records with clipped norm at most m and all other records
    (docs/theory/divergences.md 4.4).

    >>> kl_fixed(1.0, 1.0)
    0.5
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    convex = q * m * m / 2
    s = m * m
    if m == 0 or s > 100:
        return convex
    a, b = (2 - q) ** 2 * s, (1 - q) ** 2 * s
    # e^a − 2e^{(a+b−s)/2} + e^b: written as sums of expm1 so that small m does not cancel
    bracket = math.expm1(a) - 2 * math.expm1((1 - q) * (2 - q) * s) + math.expm1(b)
    log_chi2 = 2 * math.log(q) + q * (1 - q) * s / 2 + math.log(max(bracket, 1e-300))
    return min(convex, float(np.logaddexp(0.0, log_chi2)))


def _log_kl_integrand(u: np.ndarray, log_r: np.ndarray) -> np.ndarray:
    """Returns ln(r ln r − r + 1), r = 1 + u, without cancellation near r = 1 or overflow at large r."""
    small, large = np.abs(u) < 1e-2, log_r > 2
    v = np.where(small, u, 0.0)
    series = v * v * (1 / 2 - v * (1 / 6 - v * (1 / 12 - v * (1 / 20 - v * (1 / 30 - v * (1 / 42 - v / 56))))))
    v = np.where(small | large, 1.0, u)
    middle = (1 + v) * np.log1p(v) - v
    lr = np.where(large, log_r, 3.0)
    with np.errstate(divide="ignore"):
        plain = np.log(np.where(small, series, middle))
    return np.asarray(np.where(large, lr + np.log(lr - 1 + np.exp(-lr)), plain))
