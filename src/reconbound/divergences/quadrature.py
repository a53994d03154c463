"""Integrals on a line: Gauss–Legendre on cells, log-concave functions, and the KL divergence of two sampled steps.

The last is by the trapezoid rule, for NumPy and torch alike: `xp` is the one or the other. Its formulas are in
docs/theory/divergences.md 4.9.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

#: Gauss–Legendre on [−1, 1].
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)
_REACH = 8.5  # tails beyond this many standard deviations hold less than 1e-15 of an integral
_STEP, _PER_NORM = 0.55, 0.55  # the step is the smaller of the first, and the second over the larger norm
_NODES = 16  # at a time, a power of 2: for a thousand pairs these stay in the processor's cache
_SMALL_NORM = 15.0  # up to which e^(α(y − α/2)) does not overflow between the ends of the integral


def cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights of Gauss–Legendre's rule on every cell between two edges, (cells, nodes)."""
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + edges[1:, None]) / 2 + half * NODES, half * WEIGHTS


def log_integral(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """Returns ln ∫ exp(log_f) for a log-concave f.

    It finds the peak, keeps what is within e⁻⁶⁰ of it, and uses Gauss–Legendre there.
    """
    a, b = low, high
    for _ in range(60):  # ternary search on a grid: a log-concave f has one peak
        grid = np.linspace(a, b, 9)
        k = int(np.argmax(log_f(grid)))
        a, b = grid[max(k - 1, 0)], grid[min(k + 1, 8)]
        if b - a <= 1e-9 * max(abs(a), abs(b), 1e-3):
            break
    peak = (a + b) / 2
    top = float(log_f(np.array([peak]))[0])
    left, right = _drop(log_f, peak, low, top), _drop(log_f, peak, high, top)
    x, weights = cells(np.linspace(left, right, 65))
    return top + math.log(float(np.sum(np.exp(log_f(x) - top) * weights)))


def _drop(log_f: Callable[[np.ndarray], np.ndarray], peak: float, limit: float, top: float) -> float:
    """Returns the point between the peak and the limit where f has fallen by e⁻⁶⁰ (the limit if it never does)."""
    near, far = peak, limit
    if float(log_f(np.array([far]))[0]) > top - 60:
        return far
    for _ in range(60):
        grid = np.linspace(near, far, 9)
        k = int(np.argmax(log_f(grid) < top - 60))
        near, far = grid[max(k - 1, 0)], grid[k]
        if abs(far - near) <= 0.05 * abs(far - peak):
            break
    return float(far)


def line_kl(points: tuple[Any, Any, Any], q: float, top: float | None, xp: Any) -> Any:
    """Returns k_q(α, β)/q for two points of one line.

        k_q(α, β) = ∫ P_β h(u),   P_c = (1−q) φ_0 + q φ_c,   h(u) = u ln u − u + 1
        u = P_α/P_β = 1 + w expm1(θ),   w = q φ_β/P_β,   θ = (α − β)(y − (α + β)/2)

    The integrand is analytic in the strip |Im y| < π/max(|α|, β), where P_α and P_β have no zero, and falls like a
    Gaussian, so the trapezoid rule converges exponentially.

    Args:
        points: α, β ≥ 0 and α − β, which is given apart so that it keeps its digits; arrays or tensors of one shape.
        q: the sampling rate, below 1.
        top: a bound on |α| and β, from which the number of nodes follows; None reads it off the points, which waits
            for their device.
        xp: numpy or torch.
    """
    alpha, beta, _ = points
    odds = math.log(q) - math.log1p(-q)
    high = xp.maximum(_edge(alpha, odds, xp), _edge(beta, odds, xp)) + _REACH
    low = -_edge(-alpha, odds, xp) - _REACH
    if top is None:
        step = xp.clip(_PER_NORM / xp.clip(xp.maximum(xp.abs(alpha), beta), 1e-30, None), None, _STEP)
        count = math.ceil(float(((high - low) / step).max())) if math.prod(alpha.shape) else 2
    else:
        # _edge(c) rises as 2c up to the first root, and is c from the second on
        widest = max(top, min(2 * top, 2 * math.sqrt(max(-odds, 0.0) / 1.5)))
        count = math.ceil(2 * (_REACH + widest) / min(_STEP, _PER_NORM / max(top, 1e-30)))
    count = _NODES * math.ceil(count / _NODES)
    step = (high - low) / count
    integrand = _integrand if top is None or top > _SMALL_NORM else _small_integrand
    total = 0 * alpha
    for start in range(0, count, _NODES):
        nodes = range(start, start + _NODES)  # the two ends hold nothing
        j = np.array(nodes, dtype=np.float64) if xp is np else xp.arange(nodes.start, nodes.stop, device=alpha.device)
        total = total + _folded(integrand(low + step * j.reshape(-1, *(1,) * alpha.ndim), points, q, xp))
    return total * step * (1 / (q * math.sqrt(2 * math.pi)))


def _folded(values: Any) -> Any:
    """Returns the sum over the first dimension, a power of 2, in an order that does not depend on the other sizes."""
    while len(values) > 1:
        values = values[: len(values) // 2] + values[len(values) // 2 :]
    return values[0]


def _edge(c: Any, odds: float, xp: Any) -> Any:
    """Returns the right end of the mass: c, or up to 2c while a part of the record is unlikely there."""
    size = xp.clip(c, 1e-30, None)
    turn = xp.clip(size / 2 - odds / size, None, 1e30)  # where both parts of P_c are equal
    return xp.where(c > 0, xp.maximum(size, xp.minimum(turn, 2 * size)), 0 * c)


def _integrand(y: Any, points: tuple[Any, Any, Any], q: float, xp: Any) -> Any:
    """Returns √(2π) P_β h(u), without cancellation near u = 1 and without overflow far from it, for all norms."""
    alpha, beta, delta = points
    rest, odds = math.log1p(-q), math.log(q) - math.log1p(-q)
    base = rest - y * y / 2
    at_b = odds + beta * (y - beta / 2)
    soft_a, soft_b = _softplus(odds + alpha * (y - alpha / 2), xp), _softplus(at_b, xp)
    log_u = soft_a - soft_b
    v = xp.exp(at_b - soft_b) * xp.expm1(xp.clip(delta * (y - (alpha + beta) / 2), None, 700.0))  # w expm1(θ) = u − 1
    small, large = xp.abs(v) < 0.03, log_u > 2
    s = xp.where(small, v, 0 * v)
    near = _near_one(s)
    v = xp.where(small | large, 0 * v, v)
    # ln u: by log1p near u = 1, by the difference where 1 + v has lost its digits
    log_v = xp.where(v < -0.5, log_u, xp.log1p(xp.clip(v, -0.9, None)))
    between = xp.exp(log_v) * log_v - v
    p_b = xp.exp(base + soft_b)
    far = xp.exp(base + soft_a) * (log_u - 1) + p_b
    return xp.where(large, far, p_b * xp.where(small, near, between))


def _small_integrand(y: Any, points: tuple[Any, Any, Any], q: float, xp: Any) -> Any:
    """Returns the same for norms up to 15, where no exponential overflows: with half the operations."""
    alpha, beta, delta = points
    rest, odds = math.log1p(-q), math.log(q) - math.log1p(-q)
    taken = xp.exp(odds + beta * (y - beta / 2))  # q φ_β / ((1−q) φ_0)
    v = taken / (1 + taken) * xp.expm1(delta * (y - (alpha + beta) / 2))
    v = xp.clip(v, -1 + 1e-15, None)
    h = xp.where(xp.abs(v) < 0.03, _near_one(v), (1 + v) * xp.log1p(v) - v)
    return xp.exp(rest - y * y / 2) * (1 + taken) * h


def _near_one(s: Any) -> Any:
    """Returns h(1 + s) = (1 + s) ln(1 + s) − s for |s| < .03, by its series."""
    return s * s * (1 / 2 - s * (1 / 6 - s * (1 / 12 - s * (1 / 20 - s * (1 / 30 - s * (1 / 42 - s / 56))))))


def _softplus(x: Any, xp: Any) -> Any:
    """Returns ln(1 + eˣ)."""
    return xp.clip(x, 0.0, None) + xp.log1p(xp.exp(-xp.abs(x)))
