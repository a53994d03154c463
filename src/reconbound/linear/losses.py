"""Losses of linear models: value, slope and curvature in the scores s = Wx̃, one row per record."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from scipy.special import expit, lambertw, logsumexp


class Loss(ABC):
    """ℓ(s, y) for scores s of shape (N, K); targets y of shape (N,)."""

    name: str

    @abstractmethod
    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """ℓ, shape (N,)."""

    @abstractmethod
    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """∂ℓ/∂s, shape (N, K)."""

    @abstractmethod
    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """∂²ℓ/∂s², shape (N,) where K = 1, else (N, K, K)."""


class Logistic(Loss):
    """ℓ = ln(1 + e^s) − ys with y ∈ {0, 1}."""

    name = "logistic"

    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        s = scores[:, 0]
        return np.asarray(np.logaddexp(0.0, s) - y * s)

    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        side = np.where(y > 0, -1.0, 1.0)[:, None]  # σ(s) − 1 = −σ(−s): no cancellation where a record is well fitted
        return np.asarray(side * expit(side * scores))

    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        s = scores[:, 0]
        return np.asarray(expit(s) * expit(-s))


class Softmax(Loss):
    """ℓ = ln Σₖ e^{sₖ} − s_y with y ∈ {0, …, K−1}."""

    name = "softmax"

    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(logsumexp(scores, axis=1) - scores[np.arange(len(y)), y])

    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        rows = np.arange(len(y))
        chance = np.exp(scores - logsumexp(scores, axis=1, keepdims=True))
        others = chance.copy()
        others[rows, y] = 0.0
        chance[rows, y] = -others.sum(axis=1)  # π_y − 1 without cancellation
        return np.asarray(chance)

    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        chance = np.exp(scores - logsumexp(scores, axis=1, keepdims=True))
        return np.asarray(chance[:, :, None] * (np.eye(scores.shape[1]) - chance[:, None, :]))


class Squared(Loss):
    """ℓ = (s − y)²/2."""

    name = "squared"

    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((scores[:, 0] - y) ** 2 / 2)

    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(scores - y[:, None])

    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.ones(len(scores))


def largest_slope(loss: Loss, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """The largest norm of ∂ℓ/∂s at any minimiser, for rows (constant feature included) of norm at most `row_norm`.

    Logistic 1, softmax √2; squared loss Y(1 + R/(2√λ)), as ‖θ*‖ ≤ Y/(2√λ) (docs/theory-linear.md, section 2)."""
    if isinstance(loss, Logistic):
        return 1.0
    if isinstance(loss, Softmax):
        return math.sqrt(2.0)
    assert target_bound is not None
    return target_bound * (1 + row_norm / (2 * math.sqrt(l2)))


def largest_weights(loss: Loss, classes: int, row_norm: float, l2: float, target_bound: float | None = None) -> float:
    """The largest norm of the minimiser, whatever the data: nλ‖W‖² = −Σ ∂ℓ/∂s·s, and nλ‖W‖ ≤ Σ‖∂ℓ/∂s‖‖x̃‖.

    −∂ℓ/∂s·s is at most Y²/4 for squared loss and Lambert's W((K − 1)/e) for softmax, logistic loss being K = 2."""
    if isinstance(loss, Squared):
        assert target_bound is not None
        most = target_bound**2 / 4
    else:
        most = float(lambertw((max(classes, 2) - 1) / math.e).real)
    return min(math.sqrt(most / l2), largest_slope(loss, row_norm, l2, target_bound) * row_norm / l2)


def largest_curvature(loss: Loss) -> float:
    """The largest eigenvalue of ∂²ℓ/∂s²: 1/4 logistic, 1/2 softmax, 1 squared."""
    return {"logistic": 0.25, "softmax": 0.5, "squared": 1.0}[loss.name]
