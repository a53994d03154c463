"""Input of the linear estimators: refused with the reason, or accepted: constant columns, wide tables, classes."""

import warnings

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.model_selection import GridSearchCV
from test_linear_estimators import ESTIMATORS, SMALL, table

from reconbound.linear import (
    NotConverged,
    PrivateLogisticRegression,
    PrivateRidge,
    ShortenedWarning,
)
from reconbound.linear.solver import minimise


def bad(name, message, error=ValueError, x=None, y=None, fitted=False, **changes):
    return pytest.param(name, message, error, x, y, fitted, changes, id=f"{name}-{message[:24]}")


X, Y = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 2
FLAT = np.where(np.arange(3) == 1, 2.5, X)
WIDE = np.random.default_rng(0).normal(size=(20, 21))
HOLE = np.where(np.arange(60).reshape(20, 3) == 5, np.nan, X)


@pytest.mark.parametrize(
    ("name", "message", "error", "x", "y", "fitted", "changes"),
    [
        bad("logistic", "only one class", y=np.ones(20)),
        bad("logistic", "NaN", x=HOLE),
        bad("ridge", "NaN", x=HOLE),
        bad("ridge", "NaN", y=np.full(20, np.nan)),
        bad("logistic", "inconsistent numbers of samples", y=Y[:-1]),
        bad("logistic", "Expected 2D array", x=X[:, 0]),
        bad("logistic", "Unknown label type", y=X[:, 0]),
        bad("logistic", r"Found 1 constant column\(s\) in X: 1 \(always 2.5\)\. .*allow_constant", x=FLAT),
        bad("ridge", r"Found 1 constant column\(s\) in X: 1 \(always 2.5\)\. .*allow_constant", x=FLAT),
        bad(
            "ridge",
            r"Found 3 constant column.*X: 0 \(always 0\), 1 \(always 0\), 2 \(always 0\)\.",
            x=0 * X,
            allow_wide=True,
        ),
        bad("logistic", "n_samples=20 is less than n_features=21.*allow_wide=True", x=WIDE),
        bad("ridge", "n_samples=20 is less than n_features=21.*allow_wide=True", x=WIDE, allow_constant_columns=True),
        bad("ridge", "l2 must be greater than 0, got 0", x=FLAT, l2=0.0, allow_constant_columns=True),
        bad("logistic", "l2 must be greater than 0, got 0", x=WIDE, l2=0.0, allow_wide=True),
        bad("ridge", "l2 must be greater than 0, got -1", l2=-1.0),
        bad("logistic", "l2 must be greater than 0, got 0", l2=0),
        bad("logistic", "l2 must be a number", l2="much"),
        bad("logistic", "noise_std must be greater than 0", noise_std=0.0),
        bad(
            "logistic",
            "noise_std must not be given together with target_epsilon: one .*, got 0.001",
            target_epsilon=1.0,
        ),
        bad("ridge", "target_delta belongs to target_epsilon", target_delta=1e-5),
        bad("ridge", "data_norm must be greater than 0", data_norm=-1.0),
        bad("ridge", "target_bound must be greater than 0", target_bound=0.0),
        bad("logistic", "gradient norm", error=NotConverged, noise_std=1e-30),
        bad("logistic", "expecting 3 features", x=X[:, :2], fitted=True),
        bad("logistic", "fitted on 20", x=X[:-1], y=Y[:-1], fitted=True),
        bad("logistic", "not the training data", x=X + 1, fitted=True),
        bad("logistic", "not fitted on", y=Y + 1, fitted=True),
    ],
)
def test_bad_input(name, message, error, x, y, fitted, changes):
    model = clone(ESTIMATORS[name]).set_params(**changes)
    x, y = X if x is None else x, Y if y is None else y
    with pytest.raises(error, match=message):
        model.fit(X, Y).leakage(x, y) if fitted else model.fit(x, y)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_constant_columns_and_wide_data_are_well_posed(name):
    """With l2 > 0 the minimiser exists and is unique; the closed forms hold there like everywhere."""
    x, y = table(name, n=8, d=20)
    x[:, 3] = 1.0
    model = clone(ESTIMATORS[name]).set_params(allow_constant_columns=True, allow_wide=True).fit(x, y)
    found, o = model.leakage(x, y), model.solve(x, y)
    assert np.all(np.isfinite(found.trace) & (found.trace > 0))
    moved = x.copy()
    moved[2, 3] += 1e-4
    ends = [minimise(z, o.y, o.loss, l2=o.l2).weights for z in (moved, 2 * x - moved)]
    slope = (ends[0] - ends[1]) / 2e-4 / model.noise_std_
    np.testing.assert_allclose(found.diagonal[2, 3], np.sum(slope**2), rtol=1e-6)


def test_square_data_and_nearly_constant_columns_fit():
    x = np.eye(6)
    x[:, 0] = [1, 1, 1, 1, 1, 1 + 1e-12]
    PrivateRidge(data_norm=2.0, target_bound=1.0, **SMALL).fit(x, np.arange(6) / 6)


def test_constant_columns_are_named_or_counted():
    x = np.zeros((9, 7))
    x[:, 0] = np.arange(9)
    model = PrivateRidge(data_norm=9.0, target_bound=9.0, **SMALL)
    with pytest.raises(ValueError, match=r"Found 6 .*5 \(always 0\) and 1 more\."):
        model.fit(x, x[:, 0])
    model.feature_names_in_ = np.array([f"f{j}" for j in range(7)], dtype=object)  # as a fit on a data frame leaves it
    with pytest.raises(ValueError, match=r"X: 'f1' \(always 0\), 'f2' \(always 0\)"):
        model._check_table(x)


def test_grid_search_with_constant_columns():
    x, y = table("logistic")
    x[:, 2] = 0.0
    search = GridSearchCV(ESTIMATORS["logistic"], {"l2": [1e-2, 1.0]}, cv=3)
    with pytest.raises(ValueError, match="constant column"):  # every fold failed, and the search says why
        search.fit(x, y)
    search.set_params(estimator__allow_constant_columns=True).fit(x, y)
    assert search.score(x, y) > 0.9


@pytest.mark.parametrize("name", ["logistic", "softmax"])
def test_slightly_long_rows_are_clipped_with_warning(name):
    """One part in a million too long is clipped; the norm itself, reached by rounding, is not."""
    x, y = table("logistic")
    y = np.digitize(x[:, 0], [-0.5, 0.5]) if name == "softmax" else y
    x = x / np.linalg.norm(x, axis=1, keepdims=True)
    x[1::3] *= 0.5
    x[2::3] *= 1 + 1e-6
    model = clone(ESTIMATORS["logistic"]).set_params(data_norm=1.0).fit(x, y)
    best = model.solve(x, y)
    assert np.linalg.norm(best.rows[:, :-1], axis=1).max() <= 1 + 1e-12
    found, too_long = model.leakage(x, y), np.arange(len(x)) % 3 == 2
    np.testing.assert_array_equal(found.clipped, too_long)
    some = np.array([5, 0, 2, 1])  # not in order, so that a mask that is not taken along is seen
    np.testing.assert_array_equal(found.cramer_rao_of(some).value > 1e200, too_long[some])


def test_classes_given_in_advance():
    """A class without records has weights too, as the minimiser with a penalty gives them; order does not matter."""
    x, y = table("logistic")
    labels = np.array(["no", "yes"])[y]
    model = PrivateLogisticRegression(data_norm=10.0, classes=["yes", "no", "perhaps"], **SMALL).fit(x, labels)
    assert model.classes_.tolist() == ["no", "perhaps", "yes"]
    rows = np.column_stack([x, np.ones(len(x))])
    w, index = np.column_stack([model.coef_, model.intercept_]), np.array([0, 2])[y]
    p = np.exp(rows @ w.T)
    p /= p.sum(1, keepdims=True)
    slope = (p - np.eye(3)[index]).T @ rows + len(x) * model.l2 * w
    assert np.abs(slope).max() < 60 * 1e-3 * 10  # at the minimum but for the noise
    assert set(model.predict(x)) <= {"no", "yes"}
    assert (
        model.mechanism_ == PrivateLogisticRegression(data_norm=10.0, classes=[0, 1, 2], **SMALL).fit(x, y).mechanism_
    )
    assert np.isfinite(model.leakage(x, labels).floor.value).all()
    same = PrivateLogisticRegression(data_norm=10.0, classes=[1, 0], **SMALL).fit(x, y)
    assert np.array_equal(same.coef_, PrivateLogisticRegression(data_norm=10.0, **SMALL).fit(x, y).coef_)
    one = PrivateLogisticRegression(data_norm=10.0, classes=[0, 1], **SMALL).fit(x, np.ones(len(x), int))
    assert one.predict(x).tolist() == [1] * len(x)


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        ([0], "classes must be a list of at least two different labels"),
        ([0, 1, 1], "classes must be a list of at least two different labels"),
        (2, "classes must be a list of at least two different labels"),
        ([0, 2], r"classes must name every label of y; not named, got \[1\]"),
    ],
)
def test_classes_that_do_not_fit(classes, message):
    with pytest.raises(ValueError, match=message):
        PrivateLogisticRegression(data_norm=10.0, classes=classes, **SMALL).fit(*table("logistic"))


def test_rows_in_raw_units_are_warned_about():
    """Rows far longer than data_norm are shortened to directions of their largest column: the model learns nothing."""
    rng = np.random.default_rng(0)
    x, y = np.column_stack([rng.normal(50, 15, 60), rng.normal(5e4, 2e4, 60)]), np.arange(60) % 2
    with pytest.warns(ShortenedWarning, match=r"most rows of X are more than 20 times as long as data_norm \(3\)"):
        PrivateLogisticRegression(noise_std=0.1, data_norm=3.0).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivateLogisticRegression(noise_std=0.1, data_norm=3.0).fit((x - [50, 5e4]) / [15, 2e4], y)
        PrivateLogisticRegression(noise_std=0.1, data_norm=1.0).fit((x - [50, 5e4]) / [5, 5e3], y)
