"""Output-perturbed linear models as scikit-learn estimators. Only what is released is kept on the fitted object."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils import column_or_1d
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from reconbound._internal.checks import InputError
from reconbound.linear.base import PrivateLinear
from reconbound.linear.information import Leakage
from reconbound.linear.solver import Logistic, Loss, Softmax, Squared, probabilities


class PrivateLogisticRegression(ClassifierMixin, PrivateLinear):  # type: ignore[misc]
    """Logistic regression (softmax for more than two classes) whose weights are released with Gaussian noise.

        minimise Σ ℓ(Wx̃ᵢ, yᵢ) + (nλ/2)‖W‖², release W* + N(0, σ²I)

    Labels are public; features are protected. Give one of `noise_std`, `target_mse` and `target_epsilon`; with none,
    ε = 1 at δ = 1e-5.

    Args:
        l2: λ > 0, per record; the intercept is penalised too, as the weight of a constant feature.
        noise_std: σ, the noise's standard deviation per weight.
        target_mse: noise with which every record of every data set of this shape has d/Tr(I) ≥ this: a floor under
            the mean squared error per feature of an unbiased attacker, in squared units of X. It comes from a bound on
            Tr(I) before the data is seen, so it is sufficient and not the smallest possible noise.
        target_epsilon: ε: the least noise that makes two normal distributions 2L/(nλ) apart (ε, δ)-close, 2L/(nλ) being
            the most that replacing one record can move the weights.
        target_delta: δ of target_epsilon.
        data_norm: rows are clipped to this Euclidean norm. Read off the data, with a warning, where None.
        fit_intercept: whether to add the constant feature.
        classes: all labels there can be, at least two, known without the data; a class may have no records. Read off y
            where None, and then published without noise.
        allow_constant_columns: whether a feature may have one value in all records, which is otherwise an error. The
            fit and the leakage are well defined (λ > 0), as on images, whose border is always black; in a table it is
            mostly a mistake. The error is for the curator: that a column is constant is a fact about the data.
        allow_wide: whether there may be more features than records, which is otherwise an error. The fit is as well
            defined.
        random_state: the noise's seed, a whole number or a RandomState; the same one on other data or with other
            options gives other noise. One that the attacker can guess or see is no noise (a number below 2**64 brings a
            warning), and it is printed with the model and lies in its pickle. Do not set it for a real release.

    Attributes:
        classes_: as in scikit-learn.
        coef_: as in scikit-learn, (1 or K, d).
        intercept_: as in scikit-learn, (1 or K,).
        n_features_in_: as in scikit-learn.
        feature_names_in_: as in scikit-learn.
        noise_std_: σ.
        data_norm_: the rows' bound.
        n_samples_fit_: n, which is public.
        mechanism_: the release as an `OutputPerturbation`, for `reconbound.guarantee`.

    Guarantee: (ε, δ) and order-2 Rényi DP of `mechanism_` when one record is replaced by another with the same label
    or not, n fixed; and, where `classes` is None, the set of classes too: it is then published without noise, so a
    class of one member gives it away.
    In float64, like every Gaussian mechanism here, floating-point attacks on the noise aside.

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
        classes: Any = None,
        allow_constant_columns: bool = False,
        allow_wide: bool = False,
        random_state: Any = None,
    ) -> None:
        self._set_parameters(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.poor_score = True  # the noise for a few records may drown the signal
        return tags

    def _loss(self) -> Loss:
        return Logistic() if len(self.classes_) == 2 else Softmax()

    def _classes(self) -> int:
        return len(self.classes_)

    def _find_classes(self, y: np.ndarray) -> np.ndarray:
        """Returns the classes as given, or those of y; sorted."""
        if self.classes is None:
            found = np.unique(column_or_1d(y))
            if len(found) < 2:
                raise ValueError(f"y must have at least 2 classes, but contains only one class: {found[0]!r}")
            return found
        try:
            given = np.asarray(self.classes)
            different = len(np.unique(given))
        except (TypeError, ValueError):  # labels of several kinds have no order
            given, different = np.empty(0), 0
        if given.ndim != 1 or different < max(2, len(given)):
            raise InputError("classes", "must be a list of at least two different labels of one kind", self.classes)
        missing = np.setdiff1d(column_or_1d(y), given)
        if missing.size:
            raise InputError("classes", "must name every label of y; not named", missing[:5].tolist())
        return np.sort(given)

    def _encode(self, y: Any) -> np.ndarray:
        y = column_or_1d(y, warn=True)
        unknown = np.setdiff1d(y, self.classes_)
        if unknown.size:
            raise ValueError(f"y contains classes that the model was not fitted on: {unknown[:5].tolist()}")
        index = np.searchsorted(self.classes_, y)
        return np.asarray(index, dtype=np.float64 if len(self.classes_) == 2 else np.int64)

    def fit(self, X: Any, y: Any) -> PrivateLogisticRegression:
        """Solves, adds noise, and keeps the noisy weights.

        Args:
            X: features, (N, d).
            y: labels, (N,), at least two classes.
        """
        x, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_ = self._find_classes(y)
        self._release(x, y)
        return self

    def decision_function(self, X: Any) -> np.ndarray:
        """Returns scores, (N,) with two classes, otherwise (N, K).

        Args:
            X: features, (N, d).
        """
        scores = self._scores(X)
        return scores[:, 0] if scores.shape[1] == 1 else scores

    def predict_proba(self, X: Any) -> np.ndarray:
        """Returns class probabilities, (N, K).

        Args:
            X: features, (N, d).
        """
        return probabilities(self._scores(X))

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Returns the logarithms of class probabilities, (N, K).

        Args:
            X: features, (N, d).
        """
        with np.errstate(divide="ignore"):
            return np.asarray(np.log(self.predict_proba(X)))

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most likely class, (N,).

        Args:
            X: features, (N, d).
        """
        scores = self._scores(X)
        index = (scores[:, 0] > 0).astype(int) if scores.shape[1] == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[index])


class PrivateRidge(RegressorMixin, PrivateLinear):  # type: ignore[misc]
    """Ridge regression whose weights are released with Gaussian noise.

        minimise Σ (θ·x̃ᵢ − yᵢ)²/2 + (nλ/2)‖θ‖², release θ* + N(0, σ²I)

    Features and targets are protected: `leakage` has the information about both. Centre and scale y beforehand with
    public constants: the noise grows with its bound.

    Args:
        l2: as in `PrivateLogisticRegression`.
        noise_std: as in `PrivateLogisticRegression`.
        target_mse: as in `PrivateLogisticRegression`.
        target_epsilon: as in `PrivateLogisticRegression`.
        target_delta: as in `PrivateLogisticRegression`.
        data_norm: as in `PrivateLogisticRegression`.
        target_bound: targets are clipped to ±this. Read off the data, with a warning, where None.
        fit_intercept: as in `PrivateLogisticRegression`.
        allow_constant_columns: as in `PrivateLogisticRegression`.
        allow_wide: as in `PrivateLogisticRegression`.
        random_state: as in `PrivateLogisticRegression`.

    Attributes:
        coef_: as in scikit-learn, (d,).
        intercept_: as in scikit-learn, a number.
        target_bound_: the targets' bound. Other attributes are those of `PrivateLogisticRegression`.

    `target_mse` is about the features; `leakage` gives the information about y afterwards.

    Guarantee: as there, through ‖θ*‖ ≤ Y/(2√λ), so that gradients are at most Y(1 + R/(2√λ))R (docs/theory/linear.md).

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
        allow_constant_columns: bool = False,
        allow_wide: bool = False,
        random_state: Any = None,
    ) -> None:
        self._set_parameters(locals())

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.regressor_tags.poor_score = True
        return tags

    def _loss(self) -> Loss:
        return Squared()

    def _encode(self, y: Any) -> np.ndarray:
        y = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        if not np.isfinite(y).all():
            raise InputError("y", "must be finite numbers", y[~np.isfinite(y)][0])
        return np.asarray(np.clip(y, -self.target_bound_, self.target_bound_))

    def fit(self, X: Any, y: Any) -> PrivateRidge:
        """Solves, adds noise, and keeps the noisy weights.

        Args:
            X: features, (N, d).
            y: numbers, (N,).
        """
        x, y = validate_data(self, X, y, dtype=np.float64, y_numeric=True)
        values = np.asarray(column_or_1d(y, warn=True), dtype=np.float64)
        self.target_bound_ = self._bound("target_bound", self.target_bound, np.abs(values))
        self._release(x, values)
        return self

    def _keep(self, weights: np.ndarray) -> None:
        super()._keep(weights)
        self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def leakage(self, X: Any, y: Any, *, scale: Any = None, diagonal: bool = True, spectral: bool = True) -> Leakage:
        """Returns that of `PrivateLogisticRegression`, and the information about y (none where y was clipped).

        Args:
            X: the features that the model was fitted on.
            y: the targets that the model was fitted on.
            scale: as in `PrivateLogisticRegression.leakage`.
            diagonal: whether to compute the information per feature.
            spectral: whether to compute the spectral norm.
        """
        found = super().leakage(X, y, scale=scale, diagonal=diagonal, spectral=spectral)
        assert found.target is not None
        inside = np.abs(np.asarray(column_or_1d(y), dtype=np.float64)) <= self.target_bound_
        return replace(found, target=np.where(inside, found.target, 0.0))

    def predict(self, X: Any) -> np.ndarray:
        """Returns predicted targets, (N,).

        Args:
            X: features, (N, d).
        """
        return np.asarray(self._scores(X)[:, 0])
