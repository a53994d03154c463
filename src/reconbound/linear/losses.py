"""Losses of linear models: value, slope and curvature in the scores s = Wx̃, one row per record."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
from scipy.special import expit, logsumexp


class Loss(ABC):
    """A loss ℓ(s, y) for scores s of shape (N, K); targets y of shape (N,)."""

    name: str

    @abstractmethod
    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns ℓ, shape (N,)."""

    @abstractmethod
    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns ∂ℓ/∂s, shape (N, K)."""

    @abstractmethod
    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Returns ∂²ℓ/∂s², shape (N,) where K = 1, otherwise (N, K, K)."""


class Logistic(Loss):
    """The logistic loss ℓ = ln(1 + e^s) − ys with y ∈ {0, 1}."""

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
    """The softmax loss ℓ = ln Σₖ e^{sₖ} − s_y with y ∈ {0, …, K−1}."""

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
    """The squared loss ℓ = (s − y)²/2."""

    name = "squared"

    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((scores[:, 0] - y) ** 2 / 2)

    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(scores - y[:, None])

    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.ones(len(scores))
