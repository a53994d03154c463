"""Gauss–Legendre quadrature on cells, and integrals of log-concave functions in log space."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

#: Gauss–Legendre on [−1, 1].
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)


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
