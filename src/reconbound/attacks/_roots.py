"""The scalar equation of the GLM attack, (s − c) ℓ'(s, y) = b, solved for many b at once.

Squared loss: a quadratic. Logistic loss: with s' = s, c' = c (y = 0) or −s, −c (y = 1) it is (s' − c')σ(s') = b, so
s' = c' + b + W(b e^{−c'−b}) with Lambert's W (docs/theory-linear.md, section 7). Both have two
branches that meet in a fold."""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit

_SERIES = (-221 / 8505, 769 / 17280, -43 / 540, 11 / 72, -1 / 3, 1.0, -1.0)  # W about −1/e in p = ±√(2(ex + 1))


def lambert(x: np.ndarray, upper: bool) -> np.ndarray:
    """Real Lambert W, branch 0 (x ≥ −1/e) or −1 (−1/e ≤ x < 0); −1 where x < −1/e. scipy's is complex and slow.

    A start accurate to a few per cent, two steps of fourth order (Fritsch et al. 1973), a series at its end."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        p = np.sqrt(np.maximum(2 * (math.e * x + 1), 0.0))
        if upper:
            log = np.log1p(np.maximum(x, 0.0))
            above = log * (1 - np.log1p(log) / (2 + log))
            w = np.where(x > 0, above, math.e * x / (1 + 1 / (1 / p + 1 / (math.e - 1) - 1 / math.sqrt(2))))
        else:
            far = -1 - np.log(-x)
            half = np.sqrt(np.maximum(far, 0.0) / 2)
            part = 1 + 0.3361 * half / (1 - 0.0042 * far * np.exp(-0.0201 * np.sqrt(2.0) * half))
            w = -1 - far - 2 / 0.3361 * (1 - 1 / part)
        for _ in range(2):
            z = np.log(x / w) - w
            one = 1 + w
            q = 2 * one * (one + 2 / 3 * z)
            w = w * (1 + z / one * (q - z) / (q - 2 * z))
        series = np.polyval(_SERIES, p if upper else -p)
        w = np.where(p < 0.01, series, w)
        return np.where(x == 0, 0.0 if upper else -np.inf, w)


def logistic_slopes(b: np.ndarray, c: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t = σ(s) − y at both roots of (s − c)(σ(s) − y) = b: near the decision boundary, far from it, and whether any.

    Where b > 0 there is one root, and both answers are it; where none, both are the slope at the fold."""
    side = np.where(y > 0, -1.0, 1.0)
    c = side * c
    argument = b * np.exp(np.minimum(-c - b, 700.0))
    near = c + b + lambert(argument, upper=True)
    t_near = expit(near)
    negative = b < 0
    t_far = t_near.copy()
    below = np.where(negative, argument, -0.1)
    far = (c + b + lambert(below, upper=False))[negative]
    t_far[negative] = expit(far)
    return side * t_near, side * t_far, argument >= -math.exp(-1)


def squared_slopes(b: np.ndarray, c: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """t = s − y at both roots of (s − c)(s − y) = b, that is t² + (y − c)t = b: the smaller, the larger |t|."""
    half = (y - c) / 2
    inside = half**2 + b
    root = np.sqrt(np.maximum(inside, 0.0))
    large = -(half + np.where(half >= 0, root, -root))
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.where(inside > 0, -b / np.where(large == 0, 1.0, large), large)
    return small, large, inside >= 0
