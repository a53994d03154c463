"""The chances of an attacker to succeed: membership advantage, reconstruction robustness, and the floor they imply."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import ndtr, ndtri

from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.bounds.bound import Bound, divergence, from_log, log_expm1

Curve = Callable[[np.ndarray], np.ndarray]


def membership_from_pure(epsilon: float, delta: float = 0.0) -> float:
    """Returns the largest advantage (true minus false positive rate) of a membership test under (ε, δ)-DP.

        Adv ≤ (e^ε − 1 + 2δ)/(e^ε + 1)

    Args:
        epsilon: ε.
        delta: δ.

    Guarantee: every attacker, between the neighbours for which (ε, δ) holds. The chance to be right is (1 + Adv)/2.

    >>> round((1 + membership_from_pure(0.1)) / 2, 3)        # the paper's 53 %
    0.525
    """
    eps, d = divergence("epsilon", epsilon), number("delta", delta, at_least=0.0, at_most=1.0)
    return min(math.tanh(eps / 2) + 2 * d * from_log(-float(np.logaddexp(0.0, eps))), 1.0)


def membership_from_gdp(mu: float) -> float:
    """Returns the largest membership advantage under μ-Gaussian DP.

        Adv ≤ 2Φ(μ/2) − 1

    Args:
        mu: μ.

    >>> round(membership_from_gdp(1.0), 4)
    0.3829
    """
    return float(math.erf(number("mu", mu, at_least=0.0) / math.sqrt(8)))


def rero_from_pure(kappa: Any, epsilon: float, delta: float = 0.0) -> Any:
    """Returns the largest chance of a reconstruction under (ε, δ)-DP, where guessing succeeds with chance κ.

        P[success] ≤ min(1, e^ε κ + δ)

    Args:
        kappa: κ, one number or an array.
        epsilon: ε.
        delta: δ.

    Guarantee: every attacker and success criterion whose best blind guess succeeds with probability at most κ; (ε, δ)
    towards one release that does not depend on the record (add/remove, or replacing it by a fixed record).

    >>> rero_from_pure(0.25, math.log(2))
    0.5
    """
    k, eps = chances("kappa", kappa), divergence("epsilon", epsilon)
    d = number("delta", delta, at_least=0.0, at_most=1.0)
    if eps == math.inf:
        return unwrap(np.ones_like(k))  # even at κ = 0: the reference need not have the release's support
    return unwrap(np.minimum(_grown(k, eps) + d, 1.0))


def rero_from_order2(kappa: Any, epsilon: float) -> Any:
    """Returns the largest chance of a reconstruction from the order-2 Rényi divergence.

        P[success] ≤ κ + √(κ(1 − κ)(e^ε − 1))      (never above the √(κ e^ε) of Balle et al.)

    Args:
        kappa: κ, one number or an array.
        epsilon: the divergence ε in nats.

    Guarantee: as for `rero_from_pure`.

    >>> rero_from_order2(0.5, 0.0)
    0.5
    """
    k, eps = chances("kappa", kappa), divergence("epsilon", epsilon)
    if eps == math.inf:
        return unwrap(np.ones_like(k))
    with np.errstate(divide="ignore"):
        log_square = np.log(k) + np.log1p(-k) + log_expm1(eps)
    return unwrap(np.minimum(k + np.exp(np.minimum(log_square / 2, 0.0)), 1.0))


def rero_from_curve(kappa: Any, epsilons: Any, deltas: Any) -> Any:
    """Returns the largest chance of a reconstruction from a privacy curve δ(ε): 1 − f(κ) of the trade-off function f.

        P[success] ≤ min_ε { e^ε κ + δ(ε) }

    Args:
        kappa: κ, one number or an array.
        epsilons: ε of points of the curve; any finite set of points gives a valid bound, more give a tighter one.
        deltas: δ of these points.

    Guarantee: as for `rero_from_pure`, for the neighbours of the curve.

    >>> round(rero_from_curve(0.01, [0.0, 1.0], [0.1, 0.0]), 6)
    0.027183
    """
    k, eps, delta = chances("kappa", kappa), numbers("epsilons", epsilons).ravel(), numbers("deltas", deltas).ravel()
    if eps.size != delta.size:
        raise InputError("deltas", f"must have as many entries as epsilons ({eps.size})", delta.size)
    total = _grown(k[..., None], eps) + np.clip(delta, 0.0, 1.0)
    return unwrap(np.minimum(total.min(axis=-1), 1.0))


def rero_from_gdp(kappa: Any, mu: float) -> Any:
    """Returns the largest chance of a reconstruction under μ-Gaussian DP.

        P[success] ≤ Φ(Φ⁻¹(κ) + μ)

    Args:
        kappa: κ, one number or an array.
        mu: μ.

    >>> round(rero_from_gdp(0.5, 1.0), 6)
    0.841345
    """
    k, m = chances("kappa", kappa), number("mu", mu, at_least=0.0)
    return unwrap(np.maximum(ndtr(ndtri(k) + m), k))  # ndtri knows nothing below 1e-308


def chances(name: str, values: Any) -> np.ndarray:
    """Returns chances as an array; refuses what is not from 0 to 1."""
    k = numbers(name, values, at_least=0.0)
    if np.any(k > 1):
        raise InputError(name, "must be at most 1", float(k[k > 1].flat[0]) if k.ndim else float(k))
    return k


def _grown(k: np.ndarray, eps: Any) -> np.ndarray:
    """Returns min(1, e^ε κ), in log space."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.exp(np.minimum(np.log(k) + eps, 0.0)))


def unwrap(values: Any) -> Any:
    """Returns a float where there is one number, and the array otherwise."""
    return float(values) if np.ndim(values) == 0 else np.asarray(values)


def layer_cake(success: Curve, prior: Curve, *, largest_error: float, points: int = 4000) -> Bound:
    """Returns an error floor for any attacker from reconstruction robustness and a prior.

        E err ≥ ∫₀^∞ (1 − γ(κ(t)))₊ dt

    Args:
        success: γ, from the chance κ of a blind guess to the chance with the release (a `rero_from_…` function).
        prior: κ(t), the largest chance that a blind guess has a squared error per coordinate of at most t;
            `prior_from_records` makes one from a proxy data set.
        largest_error: the t up to which to integrate; beyond it nothing is counted.
        points: the number of points at which the integrand is evaluated. It falls with t, and each stretch counts with
            its lower end, so that the sum lies below the integral.

    Guarantee: on average over the prior, for every attacker who knows all other records.

    >>> round(layer_cake(lambda k: k, lambda t: np.minimum(2 * np.sqrt(t), 1.0), largest_error=0.25).value, 3)
    0.083
    """
    top = number("largest_error", largest_error, above=0.0)
    n = whole("points", points)
    t = top * (np.arange(1, n + 1) / n) ** 2  # finer near zero, where κ moves fastest
    kappa = np.clip(numbers("prior(t)", prior(t)), 0.0, 1.0)
    kappa = np.maximum.accumulate(kappa)
    gamma = np.maximum.accumulate(np.clip(numbers("success(kappa)", success(kappa)), 0.0, 1.0))
    steps = np.diff(t, prepend=0.0)
    value = float(np.sum((1 - gamma) * steps))
    guess = float(np.sum((1 - kappa) * steps))
    theorem, neighbours = "reconstruction robustness, layer by layer", "the neighbours of the success curve"
    assumes = ("on average over the given prior",)
    return Bound("layer_cake", value, theorem, "any", neighbours, assumes=assumes, guess=guess)


def prior_from_records(records: Any, *, bins: int = 4096) -> tuple[Curve, float]:
    """Returns κ(t) for a prior that is uniform over a proxy data set, and the largest error that matters.

        κ(t) ≤ maxᵢ #{j : ‖zᵢ − zⱼ‖²/d ≤ 4t}/n

    All records within √(td) of one guess lie within 2√(td) of each other, so this is an upper bound for every guess, on
    or off the data. The proxy data set is the prior: a small one overrates what a blind guess knows.

    Args:
        records: shape (n, d) or (n, …).
        bins: resolution of the distance histogram; distances are rounded down, so κ is never too small.

    >>> prior, largest = prior_from_records([[0.0], [1.0]])
    >>> float(prior(np.array(0.0))), float(prior(np.array(largest)))
    (0.5, 1.0)
    """
    z, bins = numbers("records", records), whole("bins", bins)
    if z.ndim == 0 or len(z) < 2:
        raise InputError("records", "must hold at least two records", records)
    z = z.reshape(len(z), -1)
    n, d = z.shape
    if np.abs(z).max() > 1e100:
        raise InputError("records", "must lie within ±1e100", float(z.flat[np.abs(z).argmax()]))
    z = z - z.mean(axis=0)
    squares = np.sum(z**2, axis=1)
    top = float(4 * squares.max() / d) * (1 + 1e-9) + 1e-300  # no two records are farther apart
    best = np.zeros(bins + 1)
    rows = max(1, int(2**24 // n))
    slack = (2 * d + 64) * np.finfo(float).eps * float(squares.max())  # all that rounding can do to the expanded square
    for start in range(0, n, rows):
        block = slice(start, start + rows)
        distance = np.clip(squares[block, None] + squares - 2 * z[block] @ z.T - slack, 0.0, None) / d
        index = np.minimum((np.sqrt(distance / top) * bins).astype(int), bins)
        for row in index:
            best = np.maximum(best, np.cumsum(np.bincount(row, minlength=bins + 1)))

    def kappa(t: np.ndarray) -> np.ndarray:
        place = np.minimum((np.sqrt(4 * np.asarray(t, dtype=float) / top) * bins).astype(int), bins)
        return np.asarray(best[place] / n)

    return kappa, top / 4
