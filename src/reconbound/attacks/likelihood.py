"""Finds the most likely missing record: the GLM attack refined until it uses all that is released, for every loss.

W ~ N(W*(x), σ²I), so the most likely x minimises ‖W*(x) − W‖. One Newton step from W replaces the training of W*(x):
W*(x) − W ≈ −H⁻¹∇F_x(W), H and ∇F_x with x in the place of the missing record. docs/theory/linear.md, section 7.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, numbers
from reconbound.attacks.form import Guesses
from reconbound.attacks.glm import AttackerKnowledge, GLMAttack

#: Gauss–Newton steps at most, and floats in one working array.
STEPS, FLOATS = 30, 4_000_000
#: How far a candidate may lie, in lengths of the longest known record: further out its own part of H drowns the rest.
FAR = 1e6


def most_likely(weights: Any, known: AttackerKnowledge, start: Any) -> np.ndarray:
    """Finds the record near `start` that explains each released model best to first order in the noise.

    It takes Gauss–Newton steps:

        minimise over x: ‖H⁻¹∇F_x(W)‖²

    The change of H with x is left out of the slope. An answer is never worse than its start. At small noise its
    covariance is I⁻¹, the Cramér–Rao floor, with or without a constant feature, for any number of classes. Each release
    and step costs one system of the model's size and one of the record's size.

    Args:
        weights: released weights, (trials, K, p), the intercept last.
        known: all other records, the label and the training problem.
        start: where to begin, (trials, d): another attack's reconstructions. A start longer than a million times the
            longest known record is shortened to that.

    Returns:
        x̂, (trials, d).
    """
    released, targets = known.check_release(weights)
    x = known.features
    begin = numbers("start", start)
    if begin.shape != (len(released), x.shape[1]):
        raise InputError("start", f"must have shape ({len(released)}, {x.shape[1]})", begin.shape)
    _, k, p = released.shape
    size = max(1, FLOATS // max(k * p * k * p, len(x) * k * p))
    found = [
        _climb(_Others(released[i : i + size], known, targets), begin[i : i + size])
        for i in range(0, len(released), size)
    ]
    return np.concatenate(found)


@dataclass(frozen=True)
class LikeliestGLMRecord:
    """Refines the GLM attack's answers: `most_likely`, in the form of every attack."""

    def __call__(self, released: Any, known: AttackerKnowledge) -> Guesses:
        """Returns an answer for each release.

        Args:
            released: weights, (M, K, p), the intercept last.
            known: all other records, the label and the training problem.
        """
        return Guesses(most_likely(released, known, GLMAttack()(released, known).answers))


class _Others:
    """The attacker's knowledge in each trial: the released weights, the other records' gradient and Hessian there."""

    def __init__(self, released: np.ndarray, known: AttackerKnowledge, y: np.ndarray) -> None:
        count, k, p = released.shape
        rows, loss, penalty = known.rows, known.loss, known.penalty
        self.weights, self.loss, self.label = released, loss, known.label
        self.reach = float(np.linalg.norm(rows, axis=1).max())
        scores = np.einsum("tkp,np->tnk", released, rows).reshape(-1, k)
        repeated = np.tile(y, count)
        slopes = loss.slope(scores, repeated).reshape(count, len(rows), k)
        bends = loss.curvature(scores, repeated).reshape(count, len(rows), k, k)
        self.gradient = np.einsum("tnk,np->tkp", slopes, rows) + penalty * released
        full = np.empty((count, k, p, k, p))
        for a in range(k):
            for b in range(k):
                full[:, a, :, b, :] = (bends[:, :, a, b, None] * rows).transpose(0, 2, 1) @ rows
        self.hessian = full.reshape(count, k * p, k * p)
        self.hessian[:, np.arange(k * p), np.arange(k * p)] += penalty

    def step_from(self, x: np.ndarray, trials: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ‖H⁻¹∇F_x‖² at one candidate x per trial, (T, d), and the Gauss–Newton step from there.

        Args:
            x: one candidate for each trial, (T, d).
            trials: indices of the trials, (T,).
        """
        weights, (count, d), (_, k, p) = self.weights[trials], x.shape, self.weights.shape
        row = np.hstack([x, np.ones((count, p - d))])
        scores = np.einsum("tkp,tp->tk", weights, row)
        labels = np.full(count, self.label)
        g = self.loss.slope(scores, labels)
        bend = self.loss.curvature(scores, labels).reshape(count, k, k)
        mixed = np.einsum("tkj,tp->tkpj", bend @ weights[:, :, :d], row)
        mixed[:, :, np.arange(d), np.arange(d)] += g[:, :, None]
        left = (self.gradient[trials] + g[:, :, None] * row[:, None]).reshape(count, k * p, 1)
        outer = row[:, :, None] * row[:, None, :]
        own = (bend[:, :, None, :, None] * outer[:, None, :, None, :]).reshape(count, k * p, k * p)
        both = np.concatenate([mixed.reshape(count, k * p, d), left], axis=2)
        moved = np.linalg.solve(self.hessian[trials] + own, both)
        jacobian, away = moved[:, :, :d], moved[:, :, d]
        q, r = np.linalg.qr(jacobian)
        pivots = np.einsum("tjj->tj", r)
        least = np.maximum(1e-15 * np.abs(pivots).max(axis=1, keepdims=True), 1e-100)
        r[:, np.arange(d), np.arange(d)] = np.where(np.abs(pivots) < least, least, pivots)
        step = -np.linalg.solve(r, np.einsum("tij,ti->tj", q, away)[..., None])[..., 0]
        return np.einsum("ti,ti->t", away, away), step


def _within(x: np.ndarray, longest: float) -> np.ndarray:
    """Shortens rows to a norm of at most `longest`."""
    return np.asarray(x * np.minimum(1.0, longest / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-300)))


def _climb(others: _Others, start: np.ndarray) -> np.ndarray:
    """Takes Gauss–Newton steps, shortened where they do not help; the result is never worse than the start."""
    far = FAR * others.reach
    x, length, live = _within(start, far), np.ones(len(start)), np.arange(len(start))
    error, step = others.step_from(x, live)
    for _ in range(STEPS):
        tried = _within(x[live] + length[live, None] * step[live], far)
        new_error, new_step = others.step_from(tried, live)
        better, gain = new_error < error[live], error[live] - new_error
        short = np.linalg.norm(tried - x[live], axis=1) <= 1e-9 * np.linalg.norm(tried, axis=1)
        done = short | (better & (gain <= 1e-9 * error[live]))
        won = live[better]
        x[won], error[won], step[won] = tried[better], new_error[better], new_step[better]
        length[live] = np.where(better, 1.0, length[live] / 4)
        live = live[~done]
        if not live.size:
            break
    return x
