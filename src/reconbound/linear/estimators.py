"""Output-perturbed linear models as scikit-learn estimators. Only what is released is kept on the fitted object."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state, column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data

from .._check import InputError, number
from .information import Leakage, leakage
from .losses import Logistic, Loss, Softmax, Squared, largest_weights
from .noise import Shape, choose_noise
from .solver import Optimum, minimise, probabilities

#: The gradient that may be left by the solver, as a share of the noise's standard deviation in gradient units, nλσ.
SOLVED = 1e-6


class DataNormWarning(UserWarning):
    """A bound that the guarantee needs was read off the data, so the guarantee holds for data within it only."""


class _PrivateLinear(BaseEstimator):  # type: ignore[misc]
    """What the estimators share: clipping, noise, leakage."""

    # the parameters and fitted attributes of the subclasses
    coef_: Any
    intercept_: Any
    l2: float
    noise_std: float | None
    target_mse: float | None
    target_epsilon: float | None
    target_delta: float | None
    data_norm: float | None
    fit_intercept: bool
    random_state: Any

    def _loss(self) -> Loss:
        raise NotImplementedError

    def _classes(self) -> int:
        return 1

    def _target_bound(self) -> float | None:
        return None

    def _encode(self, y: Any) -> np.ndarray:
        """Targets as the loss takes them."""
        raise NotImplementedError

    def _bound(self, name: str, given: float | None, sizes: np.ndarray) -> float:
        if given is not None:
            return number(name, given, above=0.0)
        largest = float(sizes.max())
        warnings.warn(
            f"{name} is None: {largest:.6g} is taken from the data, so the guarantee holds among data sets within it "
            f"only, and the bound itself is not private; give {name}",
            DataNormWarning,
            stacklevel=4,
        )
        return largest if largest > 0 else 1.0

    def _clip(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of norm at most data_norm, and their norms before."""
        norms = np.linalg.norm(x, axis=1)
        long = norms > self.data_norm_ * (1 + 1e-12)
        if long.any():
            x = x.copy()
            x[long] *= (self.data_norm_ / norms[long])[:, None]
        return x, norms

    def _shape(self) -> Shape:
        return Shape(
            self._loss(),
            self.n_samples_fit_,
            self.n_features_in_,
            self._classes(),
            float(self.l2),
            bool(self.fit_intercept),
            self.data_norm_,
            self._target_bound(),
        )

    def _release(self, x: np.ndarray, targets: np.ndarray) -> None:
        """Solve, add noise, and keep the noisy weights."""
        strength = number("l2", self.l2, above=0.0)
        self.n_samples_fit_ = len(x)
        shape = self._shape()
        sigma = choose_noise(shape, self.noise_std, self.target_mse, self.target_epsilon, self.target_delta)
        self.mechanism_ = shape.mechanism(sigma)
        self.noise_std_ = sigma
        found = self._solve(self._clip(x)[0], targets, len(x) * strength * sigma * SOLVED)
        # None means fresh entropy here, not NumPy's global generator, which somebody may have seeded
        rng = np.random.default_rng() if self.random_state is None else check_random_state(self.random_state)
        noise = rng.normal(size=found.weights.shape)
        self._keep(found.weights + sigma * noise)

    def _solve(self, x: np.ndarray, targets: np.ndarray, tolerance: float, start: np.ndarray | None = None) -> Optimum:
        return minimise(
            x,
            targets,
            self._loss(),
            l2=float(self.l2),
            intercept=bool(self.fit_intercept),
            classes=self._classes(),
            tolerance=tolerance,
            start=start,
        )

    def _keep(self, weights: np.ndarray) -> None:
        d = self.n_features_in_
        self.coef_ = weights[:, :d].copy()
        self.intercept_ = weights[:, d].copy() if self.fit_intercept else np.zeros(len(weights))

    def _released(self) -> np.ndarray:
        """(K, p)."""
        coef = np.atleast_2d(self.coef_)
        return np.hstack([coef, np.atleast_1d(self.intercept_)[:, None]]) if self.fit_intercept else coef

    def _scores(self, x: Any) -> np.ndarray:
        check_is_fitted(self)
        rows = validate_data(self, x, dtype=np.float64, reset=False)
        return np.asarray(rows @ np.atleast_2d(self.coef_).T + self.intercept_)

    def solve(self, X: Any, y: Any) -> Optimum:
        """The noiseless optimum for the training data, found again: it is not kept, and must never be released.

        Args:
            X, y: what the model was fitted on, in any order.
        """
        return self._again(X, y)[0]

    def _again(self, X: Any, y: Any) -> tuple[Optimum, np.ndarray]:
        check_is_fitted(self)
        x, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        if len(x) != self.n_samples_fit_:
            raise ValueError(
                f"X has {len(x)} records, but the model was fitted on {self.n_samples_fit_}: give the training data"
            )
        targets = self._encode(y)
        x, norms = self._clip(x)
        start = self._released()
        shape = self._shape()
        if np.linalg.norm(start) > largest_weights(
            shape.loss, shape.classes, shape.row_norm, shape.l2, shape.target_bound
        ):
            start = np.zeros_like(start)
        found = self._solve(x, targets, len(x) * float(self.l2) * self.noise_std_ * SOLVED, start)
        away = float(np.sum((found.weights - self._released()) ** 2)) / self.noise_std_**2
        if away > found.weights.size + 12 * np.sqrt(2 * found.weights.size) + 72:
            raise ValueError(
                f"X and y are not the training data: the released model would be {np.sqrt(away):.3g} standard "
                f"deviations from their optimum, where about {np.sqrt(found.weights.size):.3g} is to be expected"
            )
        return found, norms

    def leakage(self, X: Any, y: Any, *, scale: Any = None, diagonal: bool = True, spectral: bool = True) -> Leakage:
        """What the released model tells about each training record, exactly; see `reconbound.linear.leakage`.

        Args:
            X, y: what the model was fitted on.
            scale: what each feature was divided by before (a scaler's `scale_`), to be told in the units before that.
            diagonal, spectral: whether to compute the information per feature and the spectral norm.
        """
        found, norms = self._again(X, y)
        return leakage(found, self.noise_std_, scale=scale, diagonal=diagonal, spectral=spectral, norms=norms)


class PrivateLogisticRegression(ClassifierMixin, _PrivateLinear):  # type: ignore[misc]
    """Logistic regression (softmax for more than two classes) whose weights are released with Gaussian noise.

        minimise Σ ℓ(Wx̃ᵢ, yᵢ) + (nλ/2)‖W‖², release W* + N(0, σ²I)

    Labels are public; features are what is protected. Of `noise_std`, `target_mse` and `target_epsilon` give one;
    with none, ε = 1 at δ = 1e-5.

    Args:
        l2: λ > 0, per record; the intercept is penalised too, as the weight of a constant feature.
        noise_std: σ, the noise's standard deviation per weight.
        target_mse: the least noise with which every record of every data set of this shape has d/Tr(I) ≥ this: a
            floor under the mean squared error per feature of an unbiased attacker, in squared units of X.
        target_epsilon, target_delta: the least noise with (ε, δ)-DP, one record's value replaced.
        data_norm: rows are clipped to this Euclidean norm. Read off the data, with a warning, where None.
        fit_intercept: whether to add the constant feature.
        random_state: the noise's seed. A seed that the attacker can guess is no noise: leave it None in earnest.

    Attributes:
        classes_, coef_ (1 or K, d), intercept_ (1 or K,), n_features_in_, feature_names_in_: as in scikit-learn.
        noise_std_: σ. data_norm_: the rows' bound. n_samples_fit_: n, which is public.
        mechanism_: the release as an `OutputPerturbation`, for `reconbound.guarantee`; its data_norm is L.

    Guarantee: (ε, δ) and order-2 Rényi DP of `mechanism_` when one record is replaced by another with the same
    label or not, n fixed; in float64, like every Gaussian mechanism here, floating-point attacks on the noise aside.

    >>> x = np.array([[-0.6, 0.2], [-0.4, -0.1], [0.5, 0.3], [0.7, -0.2]])
    >>> model = PrivateLogisticRegression(l2=0.1, noise_std=0.01, data_norm=1.0, random_state=0).fit(x, [0, 0, 1, 1])
    >>> model.predict(x)
    array([0, 0, 1, 1])
    >>> bool(model.leakage(x, [0, 0, 1, 1]).floor.value.min() > 0)
    True
    """

    def __init__(
        self,
        l2: float = 1e-2,
        *,
        noise_std: float | None = None,
        target_mse: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        data_norm: float | None = None,
        fit_intercept: bool = True,
        random_state: Any = None,
    ) -> None:
        self.l2 = l2
        self.noise_std = noise_std
        self.target_mse = target_mse
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.data_norm = data_norm
        self.fit_intercept = fit_intercept
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # the noise for a few records may drown the signal
        return tags

    def _loss(self) -> Loss:
        return Logistic() if len(self.classes_) == 2 else Softmax()

    def _classes(self) -> int:
        return len(self.classes_)

    def _encode(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        unknown = np.setdiff1d(y, self.classes_)
        if unknown.size:
            raise ValueError(f"y contains classes that the model was not fitted on: {unknown[:5].tolist()}")
        index = np.searchsorted(self.classes_, y)
        return np.asarray(index, dtype=np.float64 if len(self.classes_) == 2 else np.int64)

    def fit(self, X: Any, y: Any) -> PrivateLogisticRegression:
        """Solve, add noise, keep the noisy weights.

        Args:
            X: features, (N, d). y: labels, (N,), at least two classes.
        """
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = np.unique(column_or_1d(y))
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least 2 classes, but contains only one class: {self.classes_[0]!r}")
        self.data_norm_ = self._bound("data_norm", self.data_norm, np.linalg.norm(x, axis=1))
        self._release(x, self._encode(y))
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Scores, (N,) with two classes, else (N, K)."""
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities, (N, K)."""
        return probabilities(self._scores(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Their logarithms, (N, K)."""
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def predict(self, X: Any) -> np.ndarray:
        """The likeliest class, (N,)."""
        scores = self._scores(X)
        index = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[index])


class PrivateRidge(RegressorMixin, _PrivateLinear):  # type: ignore[misc]
    """Ridge regression whose weights are released with Gaussian noise.

        minimise Σ (θ·x̃ᵢ − yᵢ)²/2 + (nλ/2)‖θ‖², release θ* + N(0, σ²I)

    Features and targets are protected: `leakage` has the information about both. Centre and scale y beforehand with
    public constants: the noise grows with its bound.

    Args:
        target_bound: targets are clipped to ±this. Read off the data, with a warning, where None.
        l2, noise_std, target_mse, target_epsilon, target_delta, data_norm, fit_intercept, random_state: as in
            `PrivateLogisticRegression`.

    Attributes:
        coef_ (d,), intercept_ (a number), target_bound_; the rest as in `PrivateLogisticRegression`.

    Guarantee: as there, through ‖θ*‖ ≤ Y/√λ, so that gradients are at most Y(1 + R/√λ)R (docs/theory-linear.md).

    >>> x = np.array([[-0.6, 0.2], [-0.4, -0.1], [0.5, 0.3], [0.7, -0.2]])
    >>> model = PrivateRidge(l2=0.01, noise_std=1e-3, data_norm=1.0, target_bound=1.0, random_state=0)
    >>> round(float(model.fit(x, x[:, 0]).score(x, x[:, 0])), 2)
    1.0
    """

    def __init__(
        self,
        l2: float = 1e-2,
        *,
        noise_std: float | None = None,
        target_mse: float | None = None,
        target_epsilon: float | None = None,
        target_delta: float | None = None,
        data_norm: float | None = None,
        target_bound: float | None = None,
        fit_intercept: bool = True,
        random_state: Any = None,
    ) -> None:
        self.l2 = l2
        self.noise_std = noise_std
        self.target_mse = target_mse
        self.target_epsilon = target_epsilon
        self.target_delta = target_delta
        self.data_norm = data_norm
        self.target_bound = target_bound
        self.fit_intercept = fit_intercept
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def _loss(self) -> Loss:
        return Squared()

    def _target_bound(self) -> float | None:
        return float(self.target_bound_)

    def _encode(self, y: Any) -> np.ndarray:
        y = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        if not np.isfinite(y).all():
            raise InputError("y", "must be finite numbers", y[~np.isfinite(y)][0])
        return np.asarray(np.clip(y, -self.target_bound_, self.target_bound_))

    def fit(self, X: Any, y: Any) -> PrivateRidge:
        """Solve, add noise, keep the noisy weights.

        Args:
            X: features, (N, d). y: numbers, (N,).
        """
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        values = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        self.data_norm_ = self._bound("data_norm", self.data_norm, np.linalg.norm(x, axis=1))
        self.target_bound_ = self._bound("target_bound", self.target_bound, np.abs(values))
        self._release(x, self._encode(values))
        return self

    def _keep(self, weights: np.ndarray) -> None:
        super()._keep(weights)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def predict(self, X: Any) -> np.ndarray:
        """Predicted targets, (N,)."""
        return np.asarray(self._scores(X)[:, 0])
