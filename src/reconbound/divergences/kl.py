"""Kullback–Leibler divergences of a release to that without the record, in nats; Poisson sampling: `poisson_kl`."""

from __future__ import annotations

import math

import numpy as np

from reconbound.bounds.bound import divergence
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
