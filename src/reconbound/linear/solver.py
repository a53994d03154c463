"""The minimiser of a penalised linear model, in float64 by Newton's method, solved until rounding stops it.

`rounding_error` bounds how far a record's information is off by rounding and the solver's last step: for J = H⁻¹M,
M = g ⊗ I + (AW) ⊗ x̃, and in the safe direction (docs/theory/linear.md 6.). Information is raised, Tr(I⁻¹) is lowered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from scipy.linalg import cho_solve, cholesky, lapack
from scipy.special import expit, logsumexp
from scipy.special import softmax as _softmax

from reconbound._internal.checks import InputError, number, numbers


class Logistic:
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


class Softmax:
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


class Squared:
    """The squared loss ℓ = (s − y)²/2."""

    name = "squared"

    def value(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray((scores[:, 0] - y) ** 2 / 2)

    def slope(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.asarray(scores - y[:, None])

    def curvature(self, scores: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.ones(len(scores))


#: ℓ(s, y) for scores s of shape (N, K) and targets y of shape (N,): its value, (N,), slope ∂ℓ/∂s, (N, K), and curvature
#: ∂²ℓ/∂s², (N,) where K = 1, otherwise (N, K, K).
Loss = Logistic | Softmax | Squared
#: Newton's steps at most; far fewer are needed.
LARGEST_STEPS = 200


class NotConverged(RuntimeError):
    """Raised where the minimiser was not found to the accuracy that the closed forms and the noise need."""


@dataclass(frozen=True)
class Optimum:
    """The minimiser of Σ ℓ(Wx̃ᵢ, yᵢ) + (nλ/2)‖W‖², without noise: never release it.

    Attributes:
        loss: the loss.
        rows: x̃, shape (N, p): the features, then a 1 where there is an intercept.
        y: targets, (N,): 0/1, class indices, or numbers.
        l2: λ, per record.
        intercept: whether the last column of `rows` is the constant feature.
        weights: W, shape (K, p); K = 1 for logistic and squared loss.
        gradient_norm: the remaining ‖∇F(W)‖.
    """

    loss: Loss
    rows: np.ndarray
    y: np.ndarray
    l2: float
    intercept: bool
    weights: np.ndarray
    gradient_norm: float

    @property
    def penalty(self) -> float:
        """Returns nλ."""
        return len(self.rows) * self.l2

    @property
    def dim(self) -> int:
        """Returns d, the number of private features."""
        return int(self.rows.shape[1]) - int(self.intercept)

    @cached_property
    def scores(self) -> np.ndarray:
        """Returns s = Wx̃, (N, K)."""
        return np.asarray(self.rows @ self.weights.T)

    @cached_property
    def slopes(self) -> np.ndarray:
        """Returns ∂ℓ/∂s, (N, K)."""
        return self.loss.slope(self.scores, self.y)

    @cached_property
    def curvatures(self) -> np.ndarray:
        """Returns ∂²ℓ/∂s², (N,) or (N, K, K)."""
        return self.loss.curvature(self.scores, self.y)

    @cached_property
    def hessian(self) -> np.ndarray:
        """Returns H of the whole objective, (Kp, Kp), parameters in the order of W.ravel()."""
        return hessian(self.rows, self.curvatures, self.penalty)

    @cached_property
    def inverse_hessian(self) -> np.ndarray:
        """Returns H⁻¹, (Kp, Kp), by the Cholesky factor: symmetric to the last digit."""
        inverse, info = lapack.dpotri(_cholesky(self.hessian), lower=1)
        if info:
            raise NotConverged(f"the Hessian cannot be inverted (LAPACK dpotri says {info}): more l2 is needed")
        return np.asarray(np.tril(inverse) + np.tril(inverse, -1).T)

    def jacobian(self, record: int) -> np.ndarray:
        """Returns ∂vec(W*)/∂x of one record by the implicit function theorem, (Kp, d), column by column.

        −H⁻¹ ∂/∂xⱼ (∂ℓ/∂s ⊗ x̃) = −H⁻¹ ((A W eⱼ) ⊗ x̃ + ∂ℓ/∂s ⊗ eⱼ). It is slow: tests compare closed forms with it.

        Args:
            record: the index of the record.
        """
        row, slope, curvature = self.rows[record], self.slopes[record], np.atleast_2d(self.curvatures[record])
        units = np.eye(len(row))[: self.dim]
        columns = [np.kron(curvature @ self.weights[:, j], row) + np.kron(slope, unit) for j, unit in enumerate(units)]
        return np.asarray(-self.inverse_hessian @ np.stack(columns, axis=1))


def hessian(rows: np.ndarray, curvatures: np.ndarray, penalty: float) -> np.ndarray:
    """Returns Σ Aᵢ ⊗ x̃ᵢx̃ᵢᵀ + nλI, block by block.

    Args:
        rows: x̃, (N, p).
        curvatures: A, (N,) or (N, K, K).
        penalty: nλ.
    """
    p = rows.shape[1]
    if curvatures.ndim == 1:
        half = rows * np.sqrt(curvatures)[:, None]
        full = half.T @ half
    else:
        k = curvatures.shape[1]
        full = np.empty((k * p, k * p))
        for a in range(k):
            for b in range(a + 1):
                block = (rows * curvatures[:, a, b, None]).T @ rows
                full[a * p : (a + 1) * p, b * p : (b + 1) * p] = block
                full[b * p : (b + 1) * p, a * p : (a + 1) * p] = block.T
    full[np.diag_indices_from(full)] += penalty
    return np.asarray(full)


def _cholesky(matrix: np.ndarray) -> np.ndarray:
    """Returns the lower Cholesky factor."""
    try:
        return np.asarray(cholesky(matrix, lower=True, check_finite=False))
    except np.linalg.LinAlgError:
        raise NotConverged("the Hessian is singular to rounding: more l2 is needed") from None


def gradient(rows: np.ndarray, y: np.ndarray, loss: Loss, penalty: float, weights: np.ndarray) -> np.ndarray:
    """Returns ∇F(W) = Σ ∂ℓ/∂s x̃ᵀ + nλW, (K, p).

    Args:
        rows: x̃, (N, p).
        y: targets, (N,).
        loss: the loss ℓ.
        penalty: nλ.
        weights: W, (K, p).
    """
    return np.asarray(loss.slope(rows @ weights.T, y).T @ rows + penalty * weights)


def targets_of(y: Any, count: int, loss: Loss, classes: int, name: str = "y") -> np.ndarray:
    """Returns y in the form that the loss takes, or raises an error: the formulas would take anything."""
    values = numbers(name, y)
    if values.shape != (count,):
        raise InputError(name, f"must have shape ({count},), one target per record", f"shape {values.shape}")
    if isinstance(loss, Squared):
        return values
    top = classes - 1 if isinstance(loss, Softmax) else 1
    bad = (values != np.floor(values)) | (values < 0) | (values > top)
    if bad.any():
        raise InputError(name, f"must hold whole numbers from 0 to {top} for {loss.name} loss", values[bad][0].item())
    return values.astype(np.int64) if isinstance(loss, Softmax) else values


def minimise(
    features: np.ndarray,
    y: np.ndarray,
    loss: Loss,
    *,
    l2: float,
    intercept: bool = True,
    classes: int = 2,
    tolerance: float | None = None,
    start: np.ndarray | None = None,
) -> Optimum:
    """Minimises Σ ℓ(Wx̃ᵢ, yᵢ) + (nλ/2)‖W‖² by damped Newton steps, until the gradient is only rounding.

    Args:
        features: x, (N, d).
        y: targets, as `loss` takes them: 0/1, class indices, or numbers, (N,).
        loss: the loss ℓ.
        l2: λ > 0, per record; the intercept is penalised like every other weight. Without it constant columns and more
            features than records would have no unique minimum.
        intercept: whether to add a constant feature.
        classes: K, for softmax.
        tolerance: the gradient norm that must be reached; rounding's own size when left out.
        start: weights to begin from, (K, p).

    Raises:
        NotConverged: the tolerance was not reached.
    """
    x = numbers("features", features)
    if x.ndim != 2:
        raise InputError("features", "must have shape (N, d)", f"shape {x.shape}")
    y = targets_of(y, len(x), loss, classes)
    l2 = number("l2", l2, above=0.0)
    rows = np.ascontiguousarray(np.hstack([x, np.ones((len(x), 1))])) if intercept else x
    penalty = len(x) * l2
    shape = (classes if isinstance(loss, Softmax) else 1, rows.shape[1])
    weights = np.zeros(shape) if start is None else np.array(start, dtype=np.float64).reshape(shape)
    scale = max(float(np.sqrt(np.einsum("ij,ij->i", rows, rows)).sum()), 1.0)  # sizes that are added in a gradient
    size = max(float(np.abs(loss.slope(rows @ weights.T, y)).max()), 1.0)
    # a sum of n terms may be off by n·eps of their sizes: equal records do round alike
    enough = max(64, len(x)) * np.finfo(float).eps * scale * size if tolerance is None else tolerance

    def objective(w: np.ndarray) -> float:
        return float(loss.value(rows @ w.T, y).sum() + penalty / 2 * np.sum(w * w))

    slope = gradient(rows, y, loss, penalty, weights)
    left = float(np.linalg.norm(slope))
    for _ in range(LARGEST_STEPS):
        if left == 0:
            break
        h = hessian(rows, loss.curvature(rows @ weights.T, y), penalty)
        step = cho_solve((_cholesky(h), True), slope.ravel()).reshape(shape)
        now, descent, length = objective(weights), float(np.sum(step * slope)), 1.0
        trial = weights - step
        after = gradient(rows, y, loss, penalty, trial)
        # full steps once they shrink the gradient; before that, halve until the objective falls
        while (
            np.linalg.norm(after) > 0.5 * left and objective(trial) > now - 1e-4 * length * descent and length > 1e-10
        ):
            length /= 2
            trial = weights - length * step
            after = gradient(rows, y, loss, penalty, trial)
        new = float(np.linalg.norm(after))
        if length <= 1e-10 or (left <= enough and new >= 0.5 * left):  # accurate already: rounding stops further steps
            break
        weights, slope, left = trial, after, new
    if not left <= enough:
        raise NotConverged(f"the gradient norm is {left:.3g} after Newton's method, but {enough:.3g} is needed")
    return Optimum(loss, rows, y, l2, intercept, weights, left)


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Returns class probabilities from scores, (N, 1) or (N, K)."""
    full = np.hstack([np.zeros_like(scores), scores]) if scores.shape[1] == 1 else scores
    return np.asarray(_softmax(full, axis=1))


UNIT = 2.0**-53
#: Nothing is stated where H⁻¹ may be off by more than this share.
LARGEST_SHARE = 0.25


@dataclass(frozen=True)
class RoundingError:
    """The difference between the computed information and the exact one at the exact minimiser.

    Attributes:
        share: ρ: the exact J is (I + E)⁻¹(J + F) with ‖E‖ ≤ ρ.
        moved: an upper bound of ‖F‖, (N,), before division by units.
        size: the sizes (‖g‖, ‖A‖‖x̃‖), each (N,), from which the error of products is bounded.
        products: the factor of rounding in such products, times ‖H⁻¹‖²_F.
    """

    share: float
    moved: np.ndarray
    size: tuple[np.ndarray, np.ndarray]
    products: float

    def column_errors(self, o: Optimum, unit: np.ndarray) -> np.ndarray:
        """Bounds the error of each Iⱼⱼσ² by rounding in its products, (N, d)."""
        slope, bend = self.size
        width = np.linalg.norm(o.weights[:, : o.dim], axis=0)
        return np.asarray(self.products * ((slope[:, None] + bend[:, None] * width) / unit) ** 2)

    def direction_errors(self, o: Optimum, unit: np.ndarray) -> np.ndarray:
        """Bounds the error of vᵀIvσ² for unit vectors v, (N,)."""
        slope, bend = self.size
        most = slope + bend * float(np.linalg.norm(o.weights[:, : o.dim]))
        return np.asarray(self.products * (most / float(unit.min())) ** 2)

    def upper_bound(self, value: np.ndarray, products: np.ndarray, inverse_unit: np.ndarray | float) -> np.ndarray:
        """Returns an upper bound of the exact ‖Jv‖² from the computed one: ((‖Jv‖² + error)^½ + ‖F‖)²/(1 − ρ)²."""
        moved = self.moved.reshape(-1, *[1] * (np.ndim(value) - 1)) * inverse_unit
        root = np.sqrt(np.maximum(value, 0.0) + products) + moved
        return np.asarray((root / (1 - self.share)) ** 2 * (1 + 8 * UNIT))

    def lower_bound(self, root: np.ndarray, unit: np.ndarray) -> np.ndarray:
        """Returns a lower bound of Tr(I⁻¹): (T^(−½) + ‖F‖)⁻²(1 − ρ)².

        Args:
            root: T^(−½), T a lower bound of the computed Tr(I⁻¹).
            unit: the units of the features.
        """
        with np.errstate(divide="ignore", over="ignore"):
            found = (root + self.moved / float(unit.min())) ** -2.0
        return np.asarray(found * (1 - self.share) ** 2 * (1 - 8 * UNIT))


def rounding_error(o: Optimum) -> RoundingError:
    """Bounds the error of an optimum's information by rounding and an inexact minimiser.

    Args:
        o: from `minimise`.

    Raises:
        NotConverged: H⁻¹ may be off by more than LARGEST_SHARE: its condition number is too large for float64.
    """
    n, (k, p) = len(o.rows), o.weights.shape
    steps = k * p + 8
    least, trace = o.penalty, float(np.trace(o.hessian))
    rows, weights = np.linalg.norm(o.rows, axis=1), float(np.linalg.norm(o.weights))
    slopes, squared = np.linalg.norm(o.slopes, axis=1), isinstance(o.loss, Squared)
    # strong convexity: ‖W − W*‖ ≤ ‖∇F(W)‖/nλ, the gradient being known up to rounding only
    summed = (n + steps) * UNIT * float(rows @ slopes + least * weights)
    far = (o.gradient_norm + summed) / least
    # how far scores can be off, and slopes and curvatures relative to themselves
    scores = rows * (far + steps * UNIT * weights) + 4 * UNIT * np.abs(o.scores).max(axis=1)
    shares = np.expm1(2 * scores) + steps * UNIT
    own = 4 * UNIT * k if isinstance(o.loss, Softmax) else 0.0  # 1 − π_y cancels
    curved = o.curvatures if o.curvatures.ndim == 1 else np.linalg.norm(o.curvatures, axis=(1, 2))
    if squared:
        shares = np.zeros(n)
        slope_off = scores + 4 * UNIT * (np.abs(o.scores[:, 0]) + np.abs(o.y))
    else:
        slope_off = slopes * shares
    widths = float(np.linalg.norm(o.weights[:, : o.dim]))
    bent_off = rows * (curved * (shares * widths + far) + own * widths)
    size = float(np.linalg.norm(o.inverse_hessian))
    residual = o.inverse_hessian @ o.hessian
    residual[np.diag_indices_from(residual)] -= 1
    share = float(np.linalg.norm(residual)) + steps * UNIT * size * float(np.linalg.norm(o.hessian))
    share += (n + steps) * UNIT * trace / least + own * float(rows @ rows) / least
    share += math.sqrt(trace / least) * float(shares.max())
    if not share <= LARGEST_SHARE:
        moved = f"rounding may have moved the leakage by more than {LARGEST_SHARE:.0%}"
        condition = f"the Hessian's condition number may be {trace / least:.2g}"
        raise NotConverged(f"{condition}: {moved}, so that no floor is stated; more l2 is needed (it is {o.l2:g})")
    return RoundingError(share, (slope_off + bent_off) / least, (slopes, curved * rows), 4 * steps * UNIT * size**2)
