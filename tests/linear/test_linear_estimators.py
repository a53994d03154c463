"""The linear estimators: scikit-learn's contract, the noise, clipping and leakage."""

import pickle
import warnings

import numpy as np
import pytest
from scipy.stats import chi2, kstest
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator

import reconbound
from reconbound.linear import (
    DataNormWarning,
    NoiseWarning,
    PrivateLogisticRegression,
    PrivateRidge,
)
from reconbound.linear.base import PrivateLinear
from reconbound.linear.solver import minimise

SMALL = {"noise_std": 1e-3, "random_state": 0}
ESTIMATORS = {
    "logistic": PrivateLogisticRegression(data_norm=10.0, **SMALL),
    "ridge": PrivateRidge(data_norm=10.0, target_bound=400.0, **SMALL),
}


def solve(model, x, y, tolerance):
    """The minimiser without noise, solved to a smaller gradient than `fit` needs."""
    kind = {"l2": model.l2, "intercept": model.fit_intercept, "classes": model._classes(), "tolerance": tolerance}
    return minimise(model._clip(x)[0], model._encode(y), model._loss(), **kind)


def table(name, n=60, d=4):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d))
    return x, (x[:, 0] > 0).astype(int) if name == "logistic" else x[:, 0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "estimator",
    [
        PrivateLogisticRegression(),
        PrivateLogisticRegression(noise_std=1e-3, data_norm=10.0, fit_intercept=False),
        PrivateRidge(),
        PrivateRidge(target_mse=1e-3, fit_intercept=False),
    ],
    ids=repr,
)
@pytest.mark.slow
def test_scikit_learn_s_own_checks(estimator):
    check_estimator(estimator)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_clone_pipeline_grid_search_and_pickle(name):
    x, y = table(name)
    model = clone(ESTIMATORS[name])
    step = type(model).__name__.lower()
    search = GridSearchCV(make_pipeline(StandardScaler(), model), {f"{step}__l2": [1e-2, 100.0]}, cv=3)
    search.fit(x, y)
    assert search.best_params_.keys() == {f"{step}__l2"}
    assert search.score(x, y) > 0.9
    fitted = model.fit(x, y)
    # its own bytes, which a scikit-learn estimator must survive; the library itself loads no pickle
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(fitted)).predict(x), fitted.predict(x))
    np.testing.assert_array_equal(clone(model).fit(x, y).coef_, fitted.coef_)
    assert not np.array_equal(clone(model).set_params(random_state=1).fit(x, y).coef_, fitted.coef_)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_release_is_optimum_plus_gaussian_noise(name, intercept):
    x, y = table(name)
    model = clone(ESTIMATORS[name]).set_params(noise_std=0.3, fit_intercept=intercept)
    released = []
    for seed in range(300):
        model.set_params(random_state=seed).fit(x, y)
        released.append(np.append(np.ravel(model.coef_), np.ravel(model.intercept_)[:intercept]))
    released = np.array(released)
    best = model.solve(x, y)
    noise = (released - best.weights) / 0.3
    size = noise.size
    assert abs(noise.mean()) < 4 / np.sqrt(size)
    assert abs(np.mean(noise**2) - 1) < 4 * np.sqrt(2 / size)
    for value in vars(model).values():  # the noiseless weights are nowhere on the fitted object
        if isinstance(value, np.ndarray) and value.dtype == float:
            assert not np.any(np.isclose(value.ravel()[:, None], best.weights.ravel(), rtol=1e-9, atol=0))


def test_unseeded_noise_ignores_global_generators():
    x, y = table("logistic")
    state = np.random.get_state()  # noqa: NPY002
    model = clone(ESTIMATORS["logistic"]).set_params(random_state=None)
    found = []
    for _ in range(2):
        np.random.seed(0)  # noqa: NPY002
        found.append(model.fit(x, y).coef_)
    np.random.set_state(state)  # noqa: NPY002
    assert not np.array_equal(*found)


def test_softmax_on_digits():
    x, y = load_digits(return_X_y=True)
    x = x / 16
    keep = y < 4
    model = PrivateLogisticRegression(l2=1e-3, noise_std=1e-3, data_norm=5.0, random_state=0)
    with pytest.raises(ValueError, match=r"Found \d+ constant column\(s\) in X: 0 \(always 0\), "):
        model.fit(x[keep], y[keep])
    model.set_params(allow_constant_columns=True).fit(x[keep], y[keep])
    assert model.score(x[keep], y[keep]) > 0.98
    chance = model.predict_proba(x[keep])
    assert model.coef_.shape == (4, 64)
    assert chance.shape == (keep.sum(), 4)
    np.testing.assert_allclose(chance.sum(axis=1), 1)
    np.testing.assert_allclose(np.exp(model.predict_log_proba(x[keep])), chance)
    np.testing.assert_array_equal(model.predict(x[keep]), model.classes_[chance.argmax(axis=1)])
    found = model.leakage(x[keep], y[keep], spectral=False)
    assert found.diagonal.shape == (keep.sum(), 64)
    dead = x[keep].std(axis=0) == 0  # a pixel that is never lit still would have moved the weights
    assert dead.any()
    assert np.all(found.diagonal > 0)


def test_string_labels_and_two_classes():
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    names = np.array(["bad", "good"])[y]
    model = PrivateLogisticRegression(noise_std=1e-3, data_norm=20.0, random_state=0).fit(x, names)
    assert model.score(x, names) > 0.97
    assert model.decision_function(x).shape == (len(x),)
    assert model.predict_proba(x).shape == (len(x), 2)
    np.testing.assert_allclose(
        model.leakage(x, names).trace, model.leakage(x[::-1], names[::-1]).trace[::-1], rtol=1e-8
    )


def test_leakage_in_the_units_before_scaling():
    """Trained on (x − m)/s, told with scale=s: the answers of a model whose features are x itself."""
    x, y = load_diabetes(return_X_y=True, scaled=False)
    scaler = StandardScaler().fit(x)
    model = PrivateRidge(noise_std=0.1, data_norm=10.0, target_bound=400.0, random_state=0).fit(scaler.transform(x), y)
    plain = model.leakage(scaler.transform(x), y)
    own = model.leakage(scaler.transform(x), y, scale=scaler.scale_)
    np.testing.assert_allclose(own.feature_floors.value, plain.feature_floors.value * scaler.scale_**2)
    information = plain.information(3) / np.outer(scaler.scale_, scaler.scale_)
    np.testing.assert_allclose(own.information(3), information, rtol=1e-9)
    np.testing.assert_allclose(own.trace[3], np.trace(information), rtol=1e-7)
    np.testing.assert_allclose(own.spectral_norm[3], np.linalg.eigvalsh(information)[-1], rtol=1e-7)


def test_rows_are_clipped_and_targets_too():
    x, y = table("ridge")
    model = PrivateRidge(noise_std=1e-3, data_norm=1.0, target_bound=0.5, random_state=0).fit(x, y)
    short = x * np.minimum(1, 1 / np.linalg.norm(x, axis=1))[:, None]
    again = PrivateRidge(noise_std=1e-3, data_norm=1.0, target_bound=0.5, random_state=0).fit(
        short, np.clip(y, -0.5, 0.5)
    )
    np.testing.assert_allclose(model.coef_, again.coef_, rtol=1e-12)
    found = model.leakage(x, y)
    np.testing.assert_array_equal(found.clipped, np.linalg.norm(x, axis=1) > 1)
    np.testing.assert_array_equal(found.target == 0, np.abs(y) > 0.5)  # a target that was clipped is not told
    assert np.all(found.target_floor.value[np.abs(y) > 0.5] > 1e200)
    np.testing.assert_allclose(
        found.target[np.abs(y) <= 0.5], again.leakage(short, y).target[np.abs(y) <= 0.5], rtol=1e-9
    )
    assert np.linalg.norm(model.solve(x, y).rows[:, :-1], axis=1).max() <= 1 + 1e-12


@pytest.mark.parametrize("name", ["logistic", "softmax", "ridge"])
def test_leakage_is_about_the_row_before_clipping(name):
    """Against models retrained, clipping included, on rows moved by a little; rows that are short are as before."""
    x, y = table("ridge" if name == "ridge" else "logistic")
    y = np.digitize(x[:, 0], [-0.5, 0.5]) if name == "softmax" else y
    model = clone(ESTIMATORS["ridge" if name == "ridge" else "logistic"]).set_params(data_norm=1.8, l2=0.05).fit(x, y)
    scale = np.array([1.0, 2.0, 0.5, 3.0])
    found = model.leakage(x, y, scale=scale)
    lengths = np.linalg.norm(x, axis=1)
    np.testing.assert_array_equal(found.clipped, lengths > 1.8)
    step = 1e-4
    for i in (*np.flatnonzero(lengths > 1.9)[:2], np.flatnonzero(lengths < 1.7)[0]):
        columns = []
        for j in range(4):
            ends = []
            for sign in (1, -1):
                moved = x.copy()
                moved[i, j] += sign * step
                again = solve(model, moved, y, 1e-10)
                ends.append(again.weights.ravel())
            columns.append((ends[0] - ends[1]) / (2 * step * scale[j]))
        information = np.array(columns) @ np.array(columns).T / model.noise_std_**2
        np.testing.assert_allclose(found.information(i), information, rtol=1e-6, atol=1e-6 * np.trace(information))
        np.testing.assert_allclose(found.diagonal[i], np.diag(information), rtol=1e-6)
        np.testing.assert_allclose(found.trace[i], np.trace(information), rtol=1e-6)
        np.testing.assert_allclose(found.spectral_norm[i], np.linalg.eigvalsh(information)[-1], rtol=1e-6)
    assert np.all(found.cramer_rao.value[found.clipped] > 1e200)
    assert np.all(found.cramer_rao.value[~found.clipped] < 1e20)


def test_bounds_read_off_the_data_are_warned_about():
    x, y = table("ridge")
    with pytest.warns(DataNormWarning) as reported:
        model = PrivateRidge(noise_std=1e-3).fit(x, y)
    assert [str(w.message).split()[0] for w in reported] == ["target_bound", "data_norm"]
    assert {one.filename for one in reported} == {__file__}  # the warning points at the caller's line
    assert model.data_norm_ == np.linalg.norm(x, axis=1).max()
    assert model.target_bound_ == np.abs(y).max()
    assert np.all(model.leakage(x, y).target > 0)  # a target at the bound was not clipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PrivateRidge(noise_std=1e-3, data_norm=9.0, target_bound=9.0).fit(x, y)


@pytest.mark.parametrize(
    ("model", "loose", "weights"),
    [
        (PrivateLogisticRegression(l2=1e-2, target_epsilon=1.0, data_norm=3.0, classes=[0, 1]), "l2", 5),
        (PrivateLogisticRegression(l2=1e-2, target_epsilon=1.0, data_norm=3.0, classes=[0, 1, 2]), "l2", 15),
        (PrivateRidge(l2=1e-2, target_epsilon=1.0, data_norm=3.0, target_bound=3.0, fit_intercept=False), "more", 4),
    ],
    ids=["logistic", "softmax", "ridge"],
)
def test_noise_larger_than_any_weights_warns(model, loose, weights):
    """It depends on public facts alone: other data of the same shape say the same words."""
    x, y = table("ridge" if isinstance(model, PrivateRidge) else "logistic")
    text = []
    for rows, targets in ((x, y), (x[::-1] / 3, y)):
        with pytest.warns(NoiseWarning, match=f"in each of {weights} weights, .* drowns any weights") as reported:
            fitted = clone(model).fit(rows, targets)
        assert reported[0].filename == __file__
        text.append(str(reported[0].message))
    assert text[0] == text[1]
    assert all(word in text[0] for word in ("l2 (now 0.01)", "more records (now 60)", "target_epsilon", "data_norm"))
    limit = float(text[0].partition("(norm ")[2].split()[0])  # no data of the shape have longer weights
    hard = np.clip(100 * x, -1.4, 1.4)
    best = solve(fitted, hard, y, 1e-9)
    assert np.linalg.norm(best.weights) <= limit < fitted.noise_std_ * np.sqrt(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if loose == "l2":
            clone(model).set_params(l2=20.0).fit(x, y)
        else:
            clone(model).set_params(l2=1.0).fit(np.tile(x, (50, 1)), np.tile(y, 50))


def test_where_the_noise_is_given_less_of_it_is_all_that_helps():
    """With noise_std as it is, a larger l2 makes the weights smaller still."""
    x, y = table("logistic")
    with pytest.warns(NoiseWarning, match="What helps: less noise_std$"):
        PrivateLogisticRegression(l2=0.1, noise_std=50.0, data_norm=3.0, classes=[0, 1]).fit(x, y)


@pytest.mark.filterwarnings("ignore::reconbound.linear.NoiseWarning")
def test_targets_are_met():
    x, y = table("logistic", n=500)
    for target in (1e-4, 0.3):
        model = PrivateLogisticRegression(target_mse=target, data_norm=5.0, random_state=0).fit(x, y)
        assert model.leakage(x, y).floor.value.min() >= target
    model = PrivateLogisticRegression(target_epsilon=2.0, target_delta=1e-6, data_norm=5.0).fit(x, y)
    assert 1.999 < model.mechanism_.epsilon_at(1e-6) <= 2
    assert PrivateLogisticRegression(data_norm=5.0).fit(x, y).mechanism_.epsilon_at(1e-5) == pytest.approx(1, rel=1e-6)
    np.testing.assert_allclose(model.mechanism_.gradient_norm, np.sqrt(26))
    found = reconbound.guarantee(model.mechanism_, dim=4)
    assert found["lecam"].value > 0
    assert "logistic loss" in model.mechanism_.assumes()[0]
    assert model.mechanism_.order2() == pytest.approx((2 * np.sqrt(26) / (500 * 0.01 * model.noise_std_)) ** 2)


def plant(monkeypatch, value):
    """Make all standard normal draws equal one number."""
    monkeypatch.setattr(PrivateLinear, "_noise", lambda self, *given: np.full(given[-1].shape, value))


@pytest.mark.filterwarnings("ignore::reconbound.linear.NoiseWarning")
@pytest.mark.parametrize("name", ["logistic", "softmax", "ridge"])
def test_noise_has_the_reported_standard_deviation(name, monkeypatch):
    """Exactly that, with draws that are planted; and the draws are Gaussian, all weights alike."""
    x, y = table("ridge" if name == "ridge" else "logistic")
    y = np.digitize(x[:, 0], [-0.5, 0.5]) if name == "softmax" else y
    model = clone(ESTIMATORS["ridge" if name == "ridge" else "logistic"])
    with monkeypatch.context() as planted:
        plant(planted, 1.0)
        model.set_params(noise_std=0.3).fit(x, y)
        model_of_target = clone(model).set_params(noise_std=None, target_mse=1e-3).fit(x, y)
    np.testing.assert_allclose(model._released() - model.solve(x, y).weights, 0.3, rtol=1e-9)
    left = model_of_target._released() - model_of_target.solve(x, y).weights
    np.testing.assert_allclose(left, model_of_target.noise_std_, rtol=1e-9)
    wide = np.random.default_rng(1).normal(size=(20, 100))
    model.set_params(noise_std=1.0, target_mse=None, allow_wide=True)
    y = y[:20]
    best = model.fit(wide, y).solve(wide, y).weights
    draws = [model.set_params(random_state=seed).fit(wide, y)._released() - best for seed in range(20)]
    assert kstest(np.ravel(draws), "norm").pvalue > 1e-3


@pytest.mark.parametrize("d", [1, 20, 200])
def test_training_data_check_accepts_noise_and_finds_fourfold_distance(d, monkeypatch):
    """‖released − optimum‖²/σ² is chi-squared: a value with a chance of 1e-15 passes, four times that does not."""
    x = np.random.default_rng(0).normal(size=(30, d))
    model = PrivateRidge(noise_std=0.1, data_norm=50.0, target_bound=9.0, allow_wide=True)
    rare = chi2.isf(1e-15, d + 1)
    plant(monkeypatch, np.sqrt(rare / (d + 1)))
    model.fit(x, x[:, 0]).leakage(x, x[:, 0])
    plant(monkeypatch, np.sqrt(4 * rare / (d + 1)))
    model.fit(x, x[:, 0])
    with pytest.raises(ValueError, match="not the training data"):
        model.leakage(x, x[:, 0])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_solved_to_a_millionth_of_the_noise(name, monkeypatch):
    """The gradient that is left may move the weights by 1e-6 σ at most: 1e-6 nλσ, as strong convexity has it."""
    x, y = table(name)
    asked = []

    def spy(*args, tolerance, **kind):
        asked.append(tolerance)
        return minimise(*args, tolerance=tolerance, **kind)

    monkeypatch.setattr("reconbound.linear.base.minimise", spy)
    clone(ESTIMATORS[name]).set_params(l2=0.2, noise_std=0.05).fit(x, y).leakage(x, y)
    np.testing.assert_allclose(asked, [1e-6 * 60 * 0.2 * 0.05] * 2)


@pytest.mark.filterwarnings("ignore::reconbound.linear.NoiseWarning")
def test_noise_that_drowns_the_weights_and_bounds_of_zero():
    x, y = table("logistic")
    far = clone(ESTIMATORS["logistic"]).set_params(noise_std=1e9).fit(x, y)
    near = clone(ESTIMATORS["logistic"]).fit(x, y)
    np.testing.assert_allclose(far.leakage(x, y).trace * 1e24, near.leakage(x, y).trace, rtol=1e-8)
    with pytest.warns(DataNormWarning):
        zero = PrivateRidge(allow_constant_columns=True, fit_intercept=False).fit(0 * x, 0 * y)
    assert (zero.data_norm_, zero.target_bound_) == (1, 1)


@pytest.mark.parametrize("data_norm", [2.5, 1.5])  # with and without rows that are shortened
def test_binary_column_floors_state_their_limits(data_norm):
    """One who need only tell 0 from 1 is not unbiased, and a floor of ±0.8 leaves a coin that is far from fair."""
    rng = np.random.default_rng(0)
    x = np.column_stack([rng.normal(size=60), rng.integers(0, 2, 60), rng.integers(0, 3, 60) / 3.0])
    y = np.arange(60) % 2
    model = PrivateLogisticRegression(noise_std=0.1, data_norm=data_norm, random_state=0).fit(x, y)
    found = model.leakage(x, y)
    note = (
        "1 of 3 columns hold at most two values (column 1): no floor of theirs bounds how well the two are told apart"
    )
    assert note in found.feature_floors.notes
    assert note in str(found.feature_floors)
    model = PrivateLogisticRegression(noise_std=0.1, data_norm=data_norm, random_state=0).fit(x[:, [0, 2]], y)
    assert model.leakage(x[:, [0, 2]], y).feature_floors.notes == ()
