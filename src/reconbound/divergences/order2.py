"""Rényi divergences of order 2 between releases whose data differ in one record, in nats."""

from __future__ import annotations

import math

import numpy as np

from reconbound._internal.checks import choice
from reconbound.bounds.bound import divergence, log1m, log_expm1
from reconbound.divergences.quadrature import log_integral
from reconbound.divergences.sensitivity import checked_rate, checked_shift


def order2_pure(epsilon: float) -> float:
    """Returns the largest order-2 divergence of an ε-DP mechanism (the same neighbours), tight for randomised response.

        ε₂ = ln(2 cosh ε − 1),   that is   χ² = 4 sinh²(ε/2)

    Args:
        epsilon: ε.

    >>> round(order2_pure(1.0), 6)
    0.735326
    """
    eps = divergence("epsilon", epsilon)
    if eps > 30:
        return eps  # ln(2 cosh ε − 1) < ε, and equal to rounding here
    return math.log1p(4 * math.sinh(eps / 2) ** 2)


def order2_gaussian(m: float) -> float:
    """Returns the order-2 divergence of one Gaussian release without sampling, replace-one.

        ε₂ = 4m²        (two antipodal records are 2m apart)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.

    >>> order2_gaussian(0.5)
    1.0
    """
    return 4 * checked_shift(m) ** 2


def order2_poisson(m: float, sample_rate: float, *, method: str = "exact") -> float:
    """Returns the order-2 divergence of one Poisson-sampled Gaussian step, replace-one.

        exact:    χ² = q² ∫ (P₂ − P₁)²/((1−q)P₀ + qP₁),   P₀ = N(0,1), P₁ = N(m,1), P₂ = N(−m,1)
        closed:   χ² ≤ 4q²/(1−q) sinh(m²)          (also beyond m = 10⁴, where the two differ by ln 2 nats in 10⁸)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.
        method: "exact" (quadrature) or "closed".

    Guarantee: an upper bound of D₂ in both directions between any two data sets that differ in one record's value,
    Poisson sampling, whether or not the attacker knows which others took part. That the antipodal pair is the worst
    is proved in docs/theory/divergences.md 4.2.

    >>> round(order2_poisson(1.0, 0.01), 9)
    0.000457554
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    choice("method", method, ("exact", "closed"))
    if m == 0:
        return 0.0
    if q == 1:
        return order2_gaussian(m)
    if method == "closed" or m > 1e4:
        log_sinh = m * m + math.log(-math.expm1(-2 * m * m)) - math.log(2)
        closed = float(np.logaddexp(0.0, math.log(4) + 2 * math.log(q) - log1m(q) + log_sinh))
        return closed if method == "closed" else min(closed, order2_gaussian(m))

    def log_f(x: np.ndarray) -> np.ndarray:
        """Returns ln of P₀ 4 sinh²(mx) e^(−m²)/((1−q) + q e^(mx − m²/2)), log-concave on either side of 0."""
        t = m * np.abs(x)
        with np.errstate(divide="ignore"):
            log_sinh = t + np.log(-np.expm1(-2 * t)) - math.log(2)
        log_w = np.logaddexp(log1m(q), math.log(q) + m * x - m * m / 2)
        return np.asarray(2 * log_sinh - x * x / 2 - log_w)

    sides = np.logaddexp(log_integral(log_f, -3 * m - 40, 0.0), log_integral(log_f, 0.0, 2 * m + 40))
    log_chi2 = 2 * math.log(q) + math.log(4) - m * m - 0.5 * math.log(2 * math.pi) + float(sides)
    return min(float(np.logaddexp(0.0, log_chi2)), order2_gaussian(m))


def order2_fixed(m: float, sample_rate: float, *, method: str = "convexity") -> float:
    """Returns the order-2 divergence of one Gaussian step on a fixed-size batch without replacement, replace-one.

        convexity:   ε₂ = ln(1 + q²(e^D − 1)),   D = 4m²
        wang:        ε₂ = ln(1 + min{q² min(4(e^D − 1), 2e^D), q(e^D − 1)})

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        method: "convexity" (ours, docs/theory/divergences.md 4.3), for one Gaussian on the batch; or "wang" (Wang,
            Balle, Kasiviswanathan 2019, with the plain convexity bound), whose χ² is up to 4 times larger, for any
            mechanism on the batch whose order-2 divergence is D, as of several Gaussians.

    Guarantee: an upper bound of D₂ between any two data sets that differ in one record, uniform batches of size B.

    >>> order2_fixed(0.5, 1.0), round(order2_fixed(0.5, 0.01), 9)
    (1.0, 0.000171813)
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    choice("method", method, ("wang", "convexity"))
    if m == 0:
        return 0.0
    whole_batch = order2_gaussian(m)
    log_chi2 = log_expm1(whole_batch)
    if method == "convexity":
        return float(np.logaddexp(0.0, 2 * math.log(q) + log_chi2))
    wang = 2 * math.log(q) + min(math.log(4) + log_chi2, math.log(2) + whole_batch)
    return float(np.logaddexp(0.0, min(wang, math.log(q) + log_chi2)))


def order2_paper(m: float, sample_rate: float) -> float:
    """Returns the paper's value: the order-2 divergence of the Poisson-sampled Gaussian under ADD/REMOVE neighbours.

        ε₂ = ln(1 + q²(e^{m²} − 1))

    Args:
        m: as in `order2_poisson`.
        sample_rate: as in `order2_poisson`.

    Guarantee: none against the attacks that Theorem 1 speaks of, whose neighbours replace a record; it is here to
    reproduce the paper's figures.

    >>> round(order2_paper(1.0, 0.01), 9)
    0.000171813
    """
    m, q = checked_shift(m), checked_rate(sample_rate)
    return float(np.logaddexp(0.0, 2 * math.log(q) + log_expm1(m * m))) if m > 0 else 0.0
