"""Largest eigenvalues of many matrices at once: diagonal plus a rank-two update (secular equation), and Lanczos.

docs/theory/linear.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

#: Relative accuracy of the secular equation's root.
ACCURACY = 1e-13


def top_of_updates(
    levels: np.ndarray, a: np.ndarray, first: np.ndarray, second: np.ndarray, square: np.ndarray
) -> np.ndarray:
    """Returns λ_max of a² diag(s) + [q₁ q₂] [[0, a], [a, c]] [q₁ q₂]ᵀ for many (a, q₁, c) and one q₂.

    These are the JᵀJ of J = aG + uvᵀ in the eigenbasis of GᵀG: s its eigenvalues, q₁ = Gᵀu, q₂ = v, c = ‖u‖².

    Args:
        levels: s, ascending, (d,).
        a: (N,).
        first: q₁, (N, d).
        second: q₂, (d,).
        square: c, (N,).
    """
    highest = levels[-1]
    base = a**2 * highest
    cross, own, other = first * second, first**2, second**2
    if len(levels) == 1:
        return np.asarray(np.maximum(base + 2 * a * cross[:, 0] + square * other[0], 0.0))
    reach = np.sqrt(square * other.sum())
    top = 2 * np.abs(a) * np.sqrt(highest) * reach + reach**2  # λ_max ≤ (|a|√s + ‖u‖‖v‖)²
    found = base + top
    live = np.flatnonzero(top > ACCURACY * base)
    found[top <= ACCURACY * base] = base[top <= ACCURACY * base]
    gaps = highest - levels

    apart = np.square(first[:, -1:] * second - first * second[-1])

    def excess(t: np.ndarray, i: np.ndarray) -> np.ndarray:
        """Returns 1/λ_max(BK(t)) − 1: rises with t, nearly straight, zero at the eigenvalue a²s_max + t."""
        w = 1 / (t[:, None] + np.square(a[i])[:, None] * gaps)
        k11, k12, k22 = np.einsum("ij,ij->i", own[i], w), np.einsum("ij,ij->i", cross[i], w), w @ other
        half = a[i] * k12 + square[i] * k22 / 2
        # det K without cancellation at the pole w → ∞ of the highest level: its part is a sum of squares
        pole = w[:, -1]
        r11, r12, r22 = k11 - pole * own[i, -1], k12 - pole * cross[i, -1], k22 - pole * other[-1]
        rest = np.maximum(r11 * r22 - r12**2, 0.0)
        minus_det = np.square(a[i]) * (pole * np.einsum("ij,ij->i", apart[i], w) + rest)
        root = np.sqrt(half**2 + minus_det)
        with np.errstate(divide="ignore", invalid="ignore"):
            largest = np.where(half >= 0, half + root, minus_det / (root - half))
            return np.asarray(np.where(largest > 0, 1 / largest, np.inf) - 1)

    if not live.size:
        return np.asarray(found)
    low = ACCURACY / 8 * (base[live] + top[live])
    at_low = excess(low, live)
    for _ in range(15):  # rounding may hide the root from points too near to the pole: any point below it will do
        hidden = np.flatnonzero(at_low >= 0)
        if not hidden.size:
            break
        higher = np.minimum(low[hidden] * 10, top[live[hidden]])
        found_low = excess(higher, live[hidden])
        low[hidden], at_low[hidden] = higher, found_low
    inner = live[at_low >= 0]  # nothing above a²s_max: the eigenvalue was pushed below it, or stays there
    keep = at_low < 0
    live, low, at_low = live[keep], low[keep], at_low[keep]
    high = top[live]
    at_high = excess(high, live)
    t = high
    for step in range(200):
        found[live] = base[live] + high
        width = high - low
        going = (width > ACCURACY * (base[live] + low)) & (at_high > 0)
        if not going.any():
            break
        live, low, high, at_low, at_high = live[going], low[going], high[going], at_low[going], at_high[going]
        if step % 3 == 2:  # keeps the bracket shrinking when the secant stays on one side
            t = np.where(high > 8 * low, np.sqrt(low * high), (low + high) / 2)
        else:
            t = low - at_low * (high - low) / (at_high - at_low)
            margin = ACCURACY / 4 * (base[live] + low)
            t = np.clip(t + np.where(t - low < high - t, margin, -margin), low, high)
        value = excess(t, live)
        below = value < 0
        low, at_low = np.where(below, t, low), np.where(below, value, at_low)
        high, at_high = np.where(below, high, t), np.where(below, at_high, value)
    if inner.size:
        found[inner] = _below_highest(levels, a[inner], own[inner], cross[inner], other, square[inner])
    return np.asarray(found)


def _below_highest(
    levels: np.ndarray, a: np.ndarray, own: np.ndarray, cross: np.ndarray, other: np.ndarray, square: np.ndarray
) -> np.ndarray:
    """Returns λ_max where it lies in [a²s₂, a²s₁]: halving, with the eigenvalues above μ counted by inertia."""
    low, high = a**2 * levels[-2], a**2 * levels[-1]
    for _ in range(200):
        middle = (low + high) / 2
        going = (middle > low) & (middle < high) & (high - low > ACCURACY / 4 * high)
        if not going.any():
            break
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            w = 1 / (middle[:, None] - np.square(a)[:, None] * levels)
            k11, k12, k22 = np.einsum("ij,ij->i", own, w), np.einsum("ij,ij->i", cross, w), w @ other
            m11, m12, m22 = -square - a**2 * k11, a - a**2 * k12, -(a**2) * k22  # a²(B⁻¹ − K)
            none_above = (m11 > 0) & (m11 * m22 > m12**2)
        high = np.where(going & none_above, middle, high)
        low = np.where(going & ~none_above, middle, low)
    return np.asarray(high)


def top_by_lanczos(
    product: Callable[[np.ndarray], np.ndarray], count: int, dim: int, *, accuracy: float = 1e-9, seed: int = 0
) -> np.ndarray:
    """Returns λ_max of `count` positive semi-definite matrices of size `dim` from products v ↦ Av.

    Lanczos with full orthogonalisation from random vectors, until the residual, which bounds the distance to an
    eigenvalue, is below `accuracy` times it; after `dim` steps it is exact.

    Args:
        product: v ↦ Av, (count, dim) each.
        count: the number of matrices.
        dim: their size.
        accuracy: relative accuracy of the eigenvalues.
        seed: of the random vectors.
    """
    rng = np.random.default_rng(seed)
    v = rng.standard_normal((count, dim))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    basis = np.empty((count, dim, dim)) if dim <= 16 else np.empty((count, 16, dim))
    alphas, betas = np.zeros((count, dim)), np.zeros((count, dim))
    found = np.zeros(count)
    for step in range(dim):
        if step == basis.shape[1]:
            basis = np.concatenate([basis, np.empty((count, min(step, dim - step), dim))], axis=1)
        basis[:, step] = v
        w = product(v)
        alphas[:, step] = np.einsum("ij,ij->i", w, v)
        for _ in range(2):  # twice is enough
            past = basis[:, : step + 1]
            w = w - np.einsum("ik,ikj->ij", np.einsum("ij,ikj->ik", w, past), past)
        betas[:, step] = np.linalg.norm(w, axis=1)
        last = step == dim - 1
        if last or step % 4 == 3:
            small = _tridiagonal(alphas[:, : step + 1], betas[:, :step])
            values, vectors = np.linalg.eigh(small)
            found = values[:, -1]
            residual = betas[:, step] * np.abs(vectors[:, -1, -1])
            if last or np.all(residual <= accuracy * found):
                break
        v = w / np.maximum(betas[:, step], np.finfo(float).tiny)[:, None]
    return np.maximum(found, 0.0)


def _tridiagonal(diagonal: np.ndarray, off: np.ndarray) -> np.ndarray:
    size = diagonal.shape[1]
    out = np.zeros((len(diagonal), size, size))
    i = np.arange(size)
    out[:, i, i] = diagonal
    out[:, i[1:], i[:-1]] = off
    out[:, i[:-1], i[1:]] = off
    return out
