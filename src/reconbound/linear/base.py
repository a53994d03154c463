"""The base class of the private linear estimators: checks, clipping, noise, leakage. Only what is released is kept."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted, validate_data

from reconbound._internal.checks import InputError, flag, number, warn_user
from reconbound.linear.information import Leakage, leakage
from reconbound.linear.solver import Loss, Optimum, minimise
from reconbound.mechanisms import OutputPerturbation
from reconbound.mechanisms.calibrate import calibrate_epsilon
from reconbound.mechanisms.output_perturbation import largest_curvature, largest_slope

#: The guarantee when neither noise nor a target is given.
DEFAULT_EPSILON, DEFAULT_DELTA = 1.0, 1e-5


@dataclass(frozen=True)
class Shape:
    """The public facts on which the noise may depend.

    Attributes:
        loss: the name of the loss.
        records: n.
        dim: d.
        classes: the number of classes.
        l2: λ.
        intercept: whether rows have a constant feature.
        data_norm: the norm to which rows are clipped, the constant feature not counted.
        target_bound: for squared loss, |y| ≤ this.
    """

    loss: Loss
    records: int
    dim: int
    classes: int
    l2: float
    intercept: bool
    data_norm: float
    target_bound: float | None = None

    def mechanism(self, noise_std: float = 1.0) -> OutputPerturbation:
        """Returns the release as a mechanism.

        Args:
            noise_std: σ.
        """
        bound = self.target_bound if self.loss.name == "squared" else None
        facts = (self.data_norm, self.loss.name, bound, self.intercept)
        return OutputPerturbation(self.records, self.l2, noise_std, *facts)

    def worst_trace(self, noise_std: float) -> float:
        """Returns an upper bound of Tr(I) of every record in every data set of this shape.

            ‖J‖_F ≤ ‖H⁻¹‖ (sup‖A‖ sup‖x̃‖ sup‖W‖ + √d sup‖∂ℓ/∂s‖),   ‖H⁻¹‖ ≤ 1/(nλ)

        Args:
            noise_std: σ.
        """
        release = self.mechanism(noise_std)
        bent = largest_curvature(release.loss) * release.row_norm * release.largest_weights(self.classes)
        slope = largest_slope(release.loss, release.row_norm, self.l2, release.target_bound)
        return ((bent + math.sqrt(self.dim) * slope) / (self.records * self.l2 * noise_std)) ** 2


def choose_noise(
    shape: Shape,
    noise_std: float | None,
    target_mse: float | None,
    target_epsilon: float | None,
    target_delta: float | None,
) -> float:
    """Returns the noise's standard deviation per parameter, as given or as the bounds of `shape` need.

    Args:
        shape: the public facts.
        noise_std: σ, or None.
        target_mse: the floor to reach, or None.
        target_epsilon: the ε to reach, or None.
        target_delta: δ of target_epsilon.
    """
    values = {"noise_std": noise_std, "target_mse": target_mse, "target_epsilon": target_epsilon}
    given = [name for name, value in values.items() if value is not None]
    if len(given) > 1:
        others = " and ".join(given[1:])
        must = f"must not be given together with {others}: one of them sets the noise"
        raise InputError(given[0], must, values[given[0]])
    if target_delta is not None and given and given != ["target_epsilon"]:
        must = f"belongs to target_epsilon and must not be given with {given[0]}"
        raise InputError("target_delta", must, target_delta)
    if noise_std is not None:
        return number("noise_std", noise_std, above=0.0)
    if target_mse is not None:
        target = number("target_mse", target_mse, above=0.0)
        return math.sqrt(target * shape.worst_trace(1.0) / shape.dim)
    epsilon = DEFAULT_EPSILON if target_epsilon is None else target_epsilon
    delta = number("target_delta", DEFAULT_DELTA if target_delta is None else target_delta, above=0.0, below=1.0)
    return calibrate_epsilon(shape.mechanism(), epsilon, delta=delta).noise_std


#: The gradient that may be left by the solver, as a share of the noise's standard deviation in gradient units, nλσ.
SOLVED = 1e-6
#: Rows in raw units (dollars and years) are at least this many times data_norm; rows made unit vectors rarely are.
RAW = 20.0


class DataNormWarning(UserWarning):
    """Warns that a bound of the guarantee was read off the data, so that it holds only for data within the bound."""


class NoiseWarning(UserWarning):
    """Warns that the noise is longer than any weights of data of this shape: the release hardly depends on the data."""


class ShortenedWarning(UserWarning):
    """Warns that most rows are far longer than data_norm: once clipped to it they are hardly more than directions."""


class PrivateLinear(BaseEstimator):  # type: ignore[misc]
    """The base class of the estimators: clipping, noise, leakage."""

    intercept_: Any

    def _set_parameters(self, given: dict[str, Any]) -> None:
        """Keeps the arguments of `__init__` as they are, as scikit-learn wants it."""
        for name in self._get_param_names():
            setattr(self, name, given[name])

    def _classes(self) -> int:
        return 1

    def _bound(self, name: str, given: float | None, sizes: np.ndarray) -> float:
        if given is not None:
            return number(name, given, above=0.0)
        largest = float(sizes.max())
        holds = "the guarantee holds among data sets within it only, and the bound itself is not private"
        warn_user(f"{name} is None: {largest:.6g} is taken from the data, so {holds}; give {name}", DataNormWarning)
        return largest if largest > 0 else 1.0

    def _check_table(self, x: np.ndarray) -> None:
        """Refuses tables that are usually a mistake, unless the caller says that they are intended."""
        n, d = x.shape
        if d > n and not flag("allow_wide", self.allow_wide):
            advice = "the fit rests on l2 only. Drop features, or pass allow_wide=True"
            raise ValueError(f"n_samples={n} is less than n_features={d}: {advice}")
        constant = np.flatnonzero((x == x[0]).all(axis=0))
        if constant.size and not flag("allow_constant_columns", self.allow_constant_columns):
            names = getattr(self, "feature_names_in_", None)
            labels = [int(j) if names is None else repr(str(names[j])) for j in constant[:5]]
            first = [f"{label} (always {x[0, j] + 0.0:.6g})" for label, j in zip(labels, constant, strict=False)]
            more = f" and {constant.size - 5} more" if constant.size > 5 else ""
            found = f"Found {constant.size} constant column(s) in X: {', '.join(first)}{more}"
            raise ValueError(f"{found}. Drop them, or pass allow_constant_columns=True")

    def _clip(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows of norm at most data_norm, and their norms before."""
        norms = np.linalg.norm(x, axis=1)
        long = norms > self.data_norm_ * (1 + 1e-12)
        if long.any():
            x = x.copy()
            x[long] *= (self.data_norm_ / norms[long])[:, None]
        return x, norms

    def _shape(self) -> Shape:
        sizes = (self.n_samples_fit_, self.n_features_in_, self._classes())
        bounds = (self.data_norm_, getattr(self, "target_bound_", None))
        return Shape(self._loss(), *sizes, float(self.l2), bool(self.fit_intercept), *bounds)

    def _release(self, x: np.ndarray, y: np.ndarray) -> None:
        """Checks the table, solves, adds noise, and keeps the noisy weights."""
        self._check_table(x)
        self.data_norm_ = self._bound("data_norm", self.data_norm, np.linalg.norm(x, axis=1))
        targets = self._encode(y)
        number("l2", self.l2, above=0.0)
        flag("fit_intercept", self.fit_intercept)
        self.n_samples_fit_ = len(x)
        shape = self._shape()
        sigma = choose_noise(shape, self.noise_std, self.target_mse, self.target_epsilon, self.target_delta)
        self._warn_of_noise(shape, sigma)
        self.mechanism_ = shape.mechanism(sigma)
        self.noise_std_ = sigma
        rows, norms = self._clip(x)
        if np.median(norms) > RAW * self.data_norm_:
            rows_are = f"most rows of X are more than {RAW:g} times as long as data_norm ({self.data_norm_:g})"
            advice = "Centre and scale the columns with public numbers first, or give a larger data_norm"
            warn_user(f"{rows_are}, to which they are shortened. {advice}", ShortenedWarning)
        found = self._solve(rows, targets)
        self._keep(found.weights + sigma * self._noise(shape, rows, targets, found.weights))

    def _noise(self, shape: Shape, rows: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Returns standard normal numbers that depend on all that distinguishes this release and on what is released.

        Two releases of one random_state that differ in anything share no noise, which would reveal their difference.
        """
        import torch

        from reconbound._internal.rng import derive
        from reconbound.training.noise import draw

        public = {**vars(shape), "loss": type(shape.loss).__name__, "noise_std": self.noise_std_}
        about = f"{type(self).__name__} {public} {rows.shape} {targets.shape} {targets.dtype}"
        context = hashlib.sha256(about.encode())
        for part in (rows, targets, weights):
            context.update(np.ascontiguousarray(part).tobytes())
        key = derive(self._seed(), "linear noise", 0, context.digest())
        return draw(key, weights.size, torch.device("cpu")).numpy().reshape(weights.shape)

    def _seed(self) -> int:
        """Returns the noise's secret seed: random_state, what it draws, or fresh entropy where it is None."""
        from reconbound._internal.rng import GUESSABLE, checked_seed, new_seed, seed_warning
        from reconbound.validate.model import ReconboundWarning

        given = self.random_state
        if given is None:  # not NumPy's global generator, which somebody may have seeded
            return new_seed()
        if isinstance(given, np.random.RandomState):
            return int.from_bytes(given.bytes(32), "little")
        seed = checked_seed(given, "random_state")
        if seed < GUESSABLE:
            warn_user(seed_warning("random_state"), ReconboundWarning)
        return seed

    def _warn_of_noise(self, shape: Shape, sigma: float) -> None:
        """Warns where σ√(number of weights) exceeds the largest norm of any minimiser: only public facts decide it."""
        weights = (shape.classes if shape.classes > 2 else 1) * (shape.dim + shape.intercept)
        largest = shape.mechanism().largest_weights(shape.classes)
        length = sigma * math.sqrt(weights)
        if length <= largest:
            return
        smaller = "data_norm" if shape.target_bound is None else "data_norm or target_bound"
        more = (
            f"a larger l2 (now {shape.l2:g}), more records (now {shape.records:,}), a larger target_epsilon, a smaller "
        )
        more = f"{more}target_mse or a smaller {smaller}" if self.noise_std is None else "less noise_std"
        noise = f"standard deviation {sigma:.3g} in each of {weights:,} weights, {length:.3g} together"
        drowns = f"the noise ({noise}) drowns any weights that such data can have (norm {largest:.3g} at most)"
        warn_user(f"{drowns}: predictions are hardly better than chance. What helps: {more}", NoiseWarning)

    def _solve(self, x: np.ndarray, targets: np.ndarray, start: np.ndarray | None = None) -> Optimum:
        l2, intercept, classes = float(self.l2), bool(self.fit_intercept), self._classes()
        tolerance = len(x) * l2 * self.noise_std_ * SOLVED
        kind: dict[str, Any] = {"intercept": intercept, "classes": classes, "tolerance": tolerance, "start": start}
        return minimise(x, targets, self._loss(), l2=l2, **kind)

    def _keep(self, weights: np.ndarray) -> None:
        d = self.n_features_in_
        self.coef_ = weights[:, :d].copy()
        self.intercept_ = weights[:, d].copy() if self.fit_intercept else np.zeros(len(weights))

    def _released(self) -> np.ndarray:
        """Returns the released weights, (K, p)."""
        coef = np.atleast_2d(self.coef_)
        return np.hstack([coef, np.atleast_1d(self.intercept_)[:, None]]) if self.fit_intercept else coef

    def _scores(self, x: Any) -> np.ndarray:
        check_is_fitted(self)
        rows = validate_data(self, x, dtype=np.float64, reset=False)
        return np.asarray(rows @ np.atleast_2d(self.coef_).T + self.intercept_)

    def solve(self, X: Any, y: Any) -> Optimum:
        """Returns the noiseless optimum for the training data. It must never be released.

        It is not kept by the fitted model, so it is computed again.

        Args:
            X: the features that the model was fitted on, in any order of records.
            y: the targets that the model was fitted on, in the same order.
        """
        return self._solve_again(X, y)[0]

    def _solve_again(self, X: Any, y: Any) -> tuple[Optimum, np.ndarray]:
        check_is_fitted(self)
        x, y = validate_data(self, X, y, dtype=np.float64, reset=False)
        if len(x) != self.n_samples_fit_:
            fitted = f"the model was fitted on {self.n_samples_fit_}"
            raise ValueError(f"X has {len(x)} records, but {fitted}: give the training data")
        targets = self._encode(y)
        x, norms = self._clip(x)
        start = self._released()
        if np.linalg.norm(start) > self.mechanism_.largest_weights(self._classes()):
            start = np.zeros_like(start)
        found = self._solve(x, targets, start)
        away = float(np.sum((found.weights - self._released()) ** 2)) / self.noise_std_**2
        if away > found.weights.size + 12 * np.sqrt(2 * found.weights.size) + 72:
            distance = f"{np.sqrt(away):.3g} standard deviations (about {np.sqrt(found.weights.size):.3g} expected)"
            raise ValueError(f"X and y are not the training data: the model lies {distance} from their optimum")
        return found, norms

    def leakage(self, X: Any, y: Any, *, scale: Any = None, diagonal: bool = True, spectral: bool = True) -> Leakage:
        """Returns the exact information of the released model about each training record.

        See `reconbound.linear.leakage`.

        Args:
            X: the features that the model was fitted on.
            y: the targets that the model was fitted on.
            scale: what each feature was divided by before (a scaler's `scale_`); the result is in the units before
                that.
            diagonal: whether to compute the information per feature.
            spectral: whether to compute the spectral norm.
        """
        flag("diagonal", diagonal), flag("spectral", spectral)
        found, norms = self._solve_again(X, y)
        return leakage(found, self.noise_std_, scale=scale, diagonal=diagonal, spectral=spectral, norms=norms)
