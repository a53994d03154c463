"""Confidence limits for what attacks reached: chances, mean errors, and what two worlds' trials prove of a mechanism.

None of them assumes a distribution: they hold for every number of trials, at the stated confidence at least.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import xlogy
from scipy.stats import beta, norm

from reconbound._internal.checks import InputError, number, numbers, whole

#: Thresholds on ln of a likelihood ratio, chosen before any trial: every limit below pays for all of them.
THRESHOLDS = (-2.0, -1.0, 0.0, 1.0, 2.0)


def chance_limits(count: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Returns Clopper and Pearson's limits of a chance of which so many successes were counted.

    Args:
        count: successes.
        trials: at least 1.
        confidence: that the chance lies between the two limits; it lies above the lower one, and below the upper one,
            with half the risk each.

    >>> tuple(round(x, 4) for x in chance_limits(0, 100))
    (0.0, 0.0362)
    """
    n, k = whole("trials", trials), whole("count", count, at_least=0)
    if k > n:
        raise InputError("count", f"must be at most {n}, the trials", count)
    tail = (1 - number("confidence", confidence, above=0.0, below=1.0)) / 2
    low = 0.0 if k == 0 else float(beta.ppf(tail, k, n - k + 1))
    high = 1.0 if k == n else float(beta.ppf(1 - tail, k + 1, n - k))
    return low, high


def mean_limits(values: Any, confidence: float = 0.95) -> tuple[float, float]:
    """Returns limits of the mean of a quantity in [0, 1], by Chernoff's inequality.

        { μ : n·kl(mean ‖ μ) ≤ ln(2/(1 − confidence)) }

    Args:
        values: independent trials in [0, 1].
        confidence: that the mean lies between the two limits.

    >>> tuple(round(x, 3) for x in mean_limits([0.1] * 200))
    (0.052, 0.167)
    """
    found = numbers("values", values, at_least=0.0).ravel()
    if found.max() > 1:
        raise InputError("values", "must be at most 1", float(found.max()))
    budget = math.log(2 / (1 - number("confidence", confidence, above=0.0, below=1.0))) / len(found)
    mean = float(found.mean())
    return _solve(mean, budget, 0.0), _solve(mean, budget, 1.0)


def _solve(mean: float, budget: float, end: float) -> float:
    """Returns the farthest μ between the mean and an end with kl(mean ‖ μ) ≤ budget, rounded away from the mean."""
    near, far = mean, end
    if binary_kl(mean, end) <= budget:
        return end
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (middle, far) if binary_kl(mean, middle) <= budget else (near, middle)
    return far


def binary_kl(p: float, q: float) -> float:
    """Returns kl(p ‖ q) in nats, infinite where q excludes what p allows."""
    if (p > 0 and q == 0) or (p < 1 and q == 1):
        return math.inf
    first = 0.0 if p == 0 else float(xlogy(p, p / q))
    return max(0.0, first + (0.0 if p == 1 else float(xlogy(1 - p, (1 - p) / (1 - q)))))


@dataclass(frozen=True)
class Distinguished:
    """Holds what trials of a test in two worlds prove: all limits hold together, at the confidence of `distinguish`.

    Attributes:
        trials: trainings in each world.
        hits: in the real world, the share of trainings of which the test says "real" at threshold 0.
        false_hits: the same in the other world.
        hits_low: lower limit of the chance of `hits`.
        false_high: upper limit of the chance of `false_hits`.
        nats: lower limit of KL(real ‖ other).
        epsilon: lower limit of ε at δ, in the worse direction.
        delta: δ.
        mu: lower limit of μ of Gaussian differential privacy.
        learned: the mean of ln of the likelihood ratio in the real world, an estimate of KL(real ‖ other).
        learned_error: its standard error.
    """

    trials: int
    hits: float
    false_hits: float
    hits_low: float
    false_high: float
    nats: float
    epsilon: float
    delta: float
    mu: float
    learned: float
    learned_error: float


def distinguish(real: Any, other: Any, *, confidence: float = 0.95, delta: float = 1e-5) -> Distinguished:
    """Returns what the scores of a test between two worlds prove of the mechanism.

    Both kinds of error are limited at each of THRESHOLDS, by Clopper and Pearson, and the confidence is shared among
    all these limits:

        KL ≥ kl(p ‖ κ),   ε ≥ ln((p − δ)/κ),   μ ≥ Φ⁻¹(p) − Φ⁻¹(κ)      p a lower limit, κ an upper one

    Args:
        real: ln of the likelihood ratio real : other of trainings in the real world.
        other: the same of trainings in the other world.
        confidence: of all limits together.
        delta: δ at which ε is limited.
    """
    here, there = numbers("real", real).ravel(), numbers("other", other).ravel()
    risk = 1 - number("confidence", confidence, above=0.0, below=1.0)
    number("delta", delta, at_least=0.0, below=1.0)
    each = 1 - risk / len(THRESHOLDS)  # at each threshold a lower limit of p and an upper one of κ, half the risk each
    nats = epsilon = mu = 0.0
    shown = (0.0, 1.0)
    for threshold in THRESHOLDS:
        p = chance_limits(int((here > threshold).sum()), len(here), each)
        k = chance_limits(int((there > threshold).sum()), len(there), each)
        if threshold == 0:
            shown = (p[0], k[1])
        if p[0] > k[1]:
            nats = max(nats, binary_kl(p[0], k[1]))
            mu = max(mu, float(norm.ppf(p[0]) - norm.ppf(k[1])))
        for success, failure in ((p[0], k[1]), (1 - k[1], 1 - p[0])):
            if success > delta and failure > 0:
                epsilon = max(epsilon, math.log((success - delta) / failure))
    return Distinguished(
        trials=len(here),
        hits=float((here > 0).mean()),
        false_hits=float((there > 0).mean()),
        hits_low=shown[0],
        false_high=shown[1],
        nats=nats,
        epsilon=epsilon,
        delta=delta,
        mu=mu,
        learned=float(here.mean()),
        learned_error=float(here.std(ddof=1) / math.sqrt(len(here))) if len(here) > 1 else math.inf,
    )


@dataclass(frozen=True)
class Reconstruction:
    """Errors of an attack's answers over its trainings; squared errors per feature.

    Attributes:
        trials: trainings.
        mse: the mean of ‖ẑ − z‖²/d.
        standard_error: of `mse`.
        median: of ‖ẑ − z‖²/d.
        bias: ‖E ẑ − z‖²/d, estimated without bias, so that it may be slightly negative.
        variance: E‖ẑ − E ẑ‖²/d.
        variance_error: the standard error of `variance`.
    """

    trials: int
    mse: float
    standard_error: float
    median: float
    bias: float
    variance: float
    variance_error: float

    @property
    def biased(self) -> bool:
        """Returns whether the answers are visibly biased: by more than a tenth of the error, beyond its own noise."""
        return self.bias > max(0.1 * self.mse, 3 * self.variance / self.trials)


def reconstruction_of(answers: Any, truth: Any) -> Reconstruction:
    """Returns errors, bias and variance of an attack's answers.

    Args:
        answers: one for each training, (M, d), M at least 2.
        truth: the record, (d,).
    """
    found, z = numbers("answers", answers), numbers("truth", truth)
    trials = len(found)
    if found.ndim != 2 or trials < 2 or found.shape[1:] != z.shape:
        raise InputError("answers", f"must have shape (M, {z.size}), M at least 2", found.shape)
    errors, mean = np.square(found - z).mean(axis=1), found.mean(axis=0)
    spread = np.square(found - mean).mean(axis=1) * trials / (trials - 1)
    variance = float(spread.mean())
    return Reconstruction(
        trials=trials,
        mse=float(errors.mean()),
        standard_error=float(errors.std(ddof=1) / math.sqrt(trials)),
        median=float(np.median(errors)),
        bias=float(np.square(mean - z).mean()) - variance / trials,
        variance=variance,
        variance_error=float(spread.std(ddof=1) / math.sqrt(trials)),
    )
