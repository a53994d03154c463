"""Solves the scalar equation of the GLM attack, (s − c) ℓ'(s, y) = b, for many b at once.

Squared loss: a quadratic. Logistic loss: with s' = s, c' = c (y = 0) or −s, −c (y = 1) it is (s' − c')σ(s') = b, so s'
= c' + b + W(b e^{−c'−b}) with Lambert's W (docs/theory/linear.md, section 7). Both have two branches that meet in a
fold. Softmax: one equation in the length of the slope, whose direction is known.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.special import expit

_SERIES = (-221 / 8505, 769 / 17280, -43 / 540, 11 / 72, -1 / 3, 1.0, -1.0)  # W about −1/e in p = ±√(2(ex + 1))


def lambert(x: np.ndarray, upper: bool) -> np.ndarray:
    """Computes the real Lambert W, branch 0 (x ≥ −1/e) or −1 (−1/e ≤ x < 0); −1 where x < −1/e.

    scipy's function is complex and slow.

    It takes a start accurate to a few per cent, two steps of fourth order (Fritsch et al. 1973), and a series at the
    end of the branch.

    Args:
        x: the arguments.
        upper: whether to return branch 0.
    """
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
    """Returns t = σ(s) − y at both roots of (s − c)(σ(s) − y) = b.

    The first is near the decision boundary, the second far from it; the third result says whether there is any.

    Where b > 0 there is one root, and both results are it. Where there is none, both are the slope at the fold.

    Args:
        b: the right-hand sides.
        c: the intercepts.
        y: the labels, 0 or 1.
    """
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
    """Returns t = s − y at both roots of (s − c)(s − y) = b, that is t² + (y − c)t = b: the smaller, the larger |t|.

    Args:
        b: the right-hand sides.
        c: the intercepts.
        y: the targets.
    """
    half = (y - c) / 2
    inside = half**2 + b
    root = np.sqrt(np.maximum(inside, 0.0))
    large = -(half + np.where(half >= 0, root, -root))
    with np.errstate(divide="ignore", invalid="ignore"):
        small = np.where(inside > 0, -b / np.where(large == 0, 1.0, large), large)
    return small, large, inside >= 0


#: ln t at which the softmax equation's sign is looked at: from the longest slope, √2, down to what rounding leaves.
LEVELS = np.linspace(math.log(2) / 2, math.log(1e-13), 56)


def softmax_slopes(z: np.ndarray, c: np.ndarray, u: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns t > 0 with u·g(z/t + c, y) = t, g = softmax − e_y the slope, and whether there is one.

    Of several roots, it is the one at which g points most nearly along u. Where there is none, it is the t that comes
    nearest (the fold).

    Args:
        z: (M, K).
        c: (M, K).
        u: (M, K), of norm 1; its entries add up to 0.
        y: class indices, (M,).
    """
    count = len(z)
    args = (*(np.ascontiguousarray(a.T) for a in (z, c, u)), y)  # classes first: sums over them are then fast
    best, fold = np.full(count, -np.inf), np.full(count, LEVELS[0])
    found: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # records, ends of an interval with a root
    before = np.full(count, -1.0)  # at t = √2 ≥ ‖g‖
    for i, level in enumerate(LEVELS):
        value = _excess(np.full(count, level), *args)[0]
        turn = np.flatnonzero((value > 0) != (before > 0))
        found.append((turn, np.full(turn.size, LEVELS[max(i - 1, 0)]), np.full(turn.size, level)))
        fold, best, before = np.where(value > best, level, fold), np.maximum(best, value), value
    lost = np.flatnonzero(best <= 0)  # two roots may hide between two levels
    reach = LEVELS[0] - LEVELS[1]
    for _ in range(8):
        part = tuple(a[..., lost] for a in args)
        for shift in (-reach / 2, reach / 2):
            level = fold[lost] + shift
            value = _excess(level, *part)[0]
            better = value > best[lost]
            fold[lost], best[lost] = np.where(better, level, fold[lost]), np.maximum(value, best[lost])
        reach /= 2
    hidden = lost[best[lost] > 0]
    wide = 2 * (LEVELS[0] - LEVELS[1])
    found += [(hidden, fold[hidden] + wide, fold[hidden]), (hidden, fold[hidden], fold[hidden] - wide)]
    records, high, low = (np.concatenate([f[i] for f in found]) for i in range(3))
    part = tuple(a[..., records] for a in args)
    levels = _between(low, high, part)
    g = _excess(levels, *part)[2]
    aside = 1 - (g * part[2]).sum(axis=0) / np.maximum(np.linalg.norm(g, axis=0), 1e-300)
    order = np.lexsort((aside, records))
    first = order[np.r_[True, np.diff(records[order]) > 0]] if records.size else order
    fold[records[first]] = levels[first]
    solved = np.zeros(count, dtype=bool)
    solved[records] = True
    return np.exp(fold), solved


def _excess(
    level: np.ndarray, z: np.ndarray, c: np.ndarray, u: np.ndarray, y: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Computes ln(u·g(z/t + c)) − ln t at ln t = level, its slope in ln t, and g; arrays are (K, M)."""
    scaled = z * np.exp(-level)
    s = scaled + c
    chance = np.exp(s - s.max(axis=0))
    chance /= chance.sum(axis=0)
    g, columns = chance.copy(), np.arange(len(level))
    g[y, columns] = 0.0
    g[y, columns] = -g.sum(axis=0)
    along = np.maximum((u * g).sum(axis=0), 1e-300)
    bent = chance * (scaled - (chance * scaled).sum(axis=0))  # A z/t
    return np.log(along) - level, -(u * bent).sum(axis=0) / along - 1, g


def _between(low: np.ndarray, high: np.ndarray, args: tuple[np.ndarray, ...]) -> np.ndarray:
    """Finds the root between two levels of different sign: Newton's steps, halving where they leave the interval."""
    rising = _excess(low, *args)[0] < 0
    at = (low + high) / 2
    for _ in range(80):
        value, slope, _ = _excess(at, *args)
        left = (value < 0) == rising  # the root lies to the right
        low, high = np.where(left, at, low), np.where(left, high, at)
        with np.errstate(divide="ignore", invalid="ignore"):
            step = at - value / slope
        new = np.where((step >= low) & (step <= high), step, (low + high) / 2)
        still = np.abs(new - at) > 1e-15 * (1 + np.abs(at))
        at = new
        if not still.any():
            break
    return np.asarray(at)
