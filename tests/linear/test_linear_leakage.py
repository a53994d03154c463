"""Closed-form leakage against dense Jacobians, autograd through the implicit function, and retrained models."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_floor
from reconbound.bounds import from_trace, theorem2
from reconbound.linear import Logistic, Softmax, Squared, leakage, minimise
from reconbound.linear.spectral import top_by_lanczos, top_of_updates

LOSSES = {"logistic": Logistic(), "softmax": Softmax(), "squared": Squared()}
NOISE = 0.1


def problem(name, n=24, d=4, seed=0):
    """Rows of unequal scales and targets as the loss takes them."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d)) * rng.uniform(0.3, 2.0, size=d)
    score = x[:, 0] + rng.normal(size=n)
    if name == "logistic":
        return x, (score > 0).astype(float)
    if name == "softmax":
        return x, np.digitize(score, [-0.5, 0.5])
    return x, score


def solved(name, l2=0.05, intercept=True, **shape):
    x, y = problem(name, **shape)
    return minimise(x, y, LOSSES[name], l2=l2, intercept=intercept, classes=3)


def torch_loss(name, w, rows, y):
    s = rows @ w.T
    if name == "logistic":
        return (torch.nn.functional.softplus(s[:, 0]) - y * s[:, 0]).sum()
    if name == "softmax":
        return torch.nn.functional.cross_entropy(s, y, reduction="sum")
    return ((s[:, 0] - y) ** 2).sum() / 2


def implicit_jacobian(name, o, record):
    """−(∂²F/∂W²)⁻¹ ∂²F/∂W∂x by autograd, nothing of ours but the optimum."""
    d = o.dim
    w, rows, y = torch.tensor(o.weights), torch.tensor(o.rows), torch.tensor(o.y)

    def objective(w, x):
        changed = torch.cat([rows[:record], torch.cat([x, rows[record, d:]])[None], rows[record + 1 :]])
        return torch_loss(name, w, changed, y) + o.penalty / 2 * (w**2).sum()

    x = rows[record, :d].clone()
    size = w.numel()
    second = torch.func.jacrev(torch.func.grad(objective, argnums=0), argnums=0)(w, x).reshape(size, size)
    mixed = torch.func.jacrev(torch.func.grad(objective, argnums=0), argnums=1)(w, x).reshape(size, d)
    return -torch.linalg.solve(second, mixed).numpy()


def retrained_jacobian(o, record, step=1e-4):
    """Central differences of the minimiser, trained anew for every moved coordinate."""
    columns = []
    for j in range(o.dim):
        ends = []
        for sign in (1, -1):
            x = o.rows[:, : o.dim].copy()
            x[record, j] += sign * step
            k = o.weights.shape[0]
            again = minimise(x, o.y, o.loss, l2=o.l2, intercept=o.intercept, classes=k, start=o.weights)
            ends.append(again.weights.ravel())
        columns.append((ends[0] - ends[1]) / (2 * step))
    return np.array(columns).T


def agrees(found, record, j, rtol=1e-6):
    """The information is raised by the possible rounding error: not below the exact values, and not far above."""
    information, above = j.T @ j / NOISE**2, max(rtol, 2e-5)
    top = np.linalg.eigvalsh(information)[-1]
    pairs = [(found.trace, np.trace(information)), (found.diagonal, np.diag(information)), (found.spectral_norm, top)]
    for ours, exact in pairs:
        assert np.all(ours[record] >= exact * (1 - rtol))
        assert np.all(ours[record] <= exact * (1 + above))
    scale = np.abs(information).max()
    np.testing.assert_allclose(found.information(record), information, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("l2", [1e-3, 0.05, 2.0])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_autograd_and_retrained_models(name, intercept, l2):
    o = solved(name, l2, intercept)
    found = leakage(o, NOISE)
    for record in (0, 7, 19):
        agrees(found, record, implicit_jacobian(name, o, record), 1e-9)
        agrees(found, record, retrained_jacobian(o, record))


@pytest.mark.parametrize("shape", [{"n": 40, "d": 5}, {"n": 6, "d": 11}, {"n": 30, "d": 1}, {"n": 30, "d": 2}])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("name", LOSSES)
def test_equals_dense_jacobians_at_every_record(name, intercept, shape):
    for l2 in (1e-3, 1.0):
        o = solved(name, l2, intercept, **shape)
        scale = np.random.default_rng(1).uniform(0.2, 4.0, size=o.dim)
        found = leakage(o, NOISE, scale=scale)
        for record in range(shape["n"]):
            j = o.jacobian(record) / scale
            agrees(found, record, j, 1e-8)
            if np.linalg.cond(j) < 1e5:
                inverse = np.trace(np.linalg.inv(j.T @ j)) * NOISE**2
                assert inverse / o.dim * (1 - 1e-3) <= found.cramer_rao.value[record] <= inverse / o.dim * (1 + 1e-9)


@pytest.mark.parametrize("intercept", [False, True])
def test_information_about_the_target_of_a_regression(intercept):
    o = solved("squared", 0.05, intercept)
    found, step = leakage(o, NOISE), 1e-3
    for record in range(5):
        ends = []
        for sign in (1, -1):
            y = o.y.copy()
            y[record] += sign * step
            ends.append(minimise(o.rows[:, : o.dim], y, o.loss, l2=o.l2, intercept=intercept).weights)
        moved = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(found.target[record], np.sum(moved**2) / NOISE**2, rtol=1e-6)
    np.testing.assert_allclose(found.target_floor.value, 1 / found.target)
    assert leakage(solved("logistic"), NOISE).target is None


@pytest.mark.parametrize("name", LOSSES)
def test_floors_are_the_library_s_own(name):
    found = leakage(solved(name), NOISE)
    np.testing.assert_allclose(found.floor.value, from_trace(found.trace, found.dim).value)
    np.testing.assert_allclose(found.feature_floors.value, 1 / found.diagonal)
    assert np.all(found.spectral_floor.value <= found.floor.value * (1 + 1e-12))
    assert np.all(found.cramer_rao.value >= found.floor.value)
    np.testing.assert_array_equal(found.cramer_rao_of([7, 2]).value, found.cramer_rao.value[[7, 2]])
    for record in (0, 3):
        exact = theorem2(found.information(record)).value
        np.testing.assert_allclose(found.cramer_rao.value[record], exact, rtol=1e-6)
    for records in ([24], [-1, 0]):
        with pytest.raises(InputError, match="records must be indices from 0 to 23"):
            found.cramer_rao_of(records)


def test_rounding_never_raises_the_cramer_rao_floor_of_softmax():
    """Singular values are raised by what rounding may have taken: seen where the columns' units differ by 1e9."""
    o, scale = solved("softmax"), np.array([1e-5, 1.0, 1e4, 1.0])
    for record, found in enumerate(leakage(o, NOISE, scale=scale).cramer_rao_of(range(8)).value):
        values = np.linalg.svd(o.jacobian(record) / scale, compute_uv=False)
        plain = NOISE**2 * np.sum(values**-2) / o.dim
        assert 0.5 * plain < found < plain * (1 - 1e-7)


def test_a_singular_information_has_a_huge_cramer_rao_floor():
    """Softmax with a record that is fitted perfectly, g = 0 and A = 0 to rounding: nothing is told, no NaN."""
    x, y = problem("softmax")
    x[0], y[0] = [4000.0, 0, 0, 0], 2
    found = leakage(minimise(x, y, Softmax(), l2=1e-3, classes=3), NOISE)
    assert found.cramer_rao_of([0]).value[0] > 1e15
    assert np.all(np.isfinite(found.cramer_rao.value))


def test_noise_scales_all_floors_and_parts_can_be_left_out():
    o = solved("logistic")
    one, two = leakage(o, 0.1), leakage(o, 0.2, diagonal=False, spectral=False)
    np.testing.assert_allclose(two.floor.value, 4 * one.floor.value)
    np.testing.assert_allclose(two.cramer_rao.value, 4 * one.cramer_rao.value)
    for name in ("feature_floors", "spectral_floor", "target_floor"):
        with pytest.raises(InputError):
            getattr(two, name)
    with pytest.raises(InputError, match="record"):
        one.information(24)
    with pytest.raises(InputError, match="scale"):
        leakage(o, 0.1, scale=np.ones(3))
    with pytest.raises(InputError, match="noise_std"):
        leakage(o, 0.0)
    one, two = leakage(solved("softmax"), 0.1), leakage(solved("softmax"), 0.2, diagonal=False, spectral=False)
    np.testing.assert_allclose(two.cramer_rao.value, 4 * one.cramer_rao.value)


@given(st.integers(0, 10**6), st.integers(1, 9), st.booleans(), st.floats(-3, 3))
@example(345110, 3, True, -0.5785577425796511)  # a root that rounding once hid behind the pole
def test_top_eigenvalue_of_a_rank_one_update(seed, d, ties, power):
    """Also with multiple levels, zero vectors, and updates that push the top eigenvalue below the highest level."""
    rng = np.random.default_rng(seed)
    n, base = 20, rng.normal(size=(d + 1, d))
    if ties:
        base = np.linalg.qr(base)[0] * np.sort(rng.choice([0.5, 1.0, 2.0], size=d))
    a = rng.normal(size=n) * 10.0**power * rng.choice([0.0, 1.0], size=n, p=[0.1, 0.9])
    u, v = rng.normal(size=(n, d + 1)), rng.normal(size=d) * rng.choice([0.0, 1.0], p=[0.1, 0.9])
    if d > 1:  # a record that cancels the highest direction
        top = np.linalg.svd(base)
        v = top[2][0] if seed % 3 == 0 else v
        u[0], a[0] = -0.7 * a[1] * top[1][0] * top[0][:, 0], a[1]
    levels, turn = np.linalg.eigh(base.T @ base)
    found = top_of_updates(levels, a, u @ base @ turn, v @ turn, np.sum(u**2, axis=1))
    for i in range(n):
        expected = np.linalg.norm(a[i] * base + np.outer(u[i], v), 2) ** 2
        np.testing.assert_allclose(found[i], expected, rtol=1e-9, atol=1e-13 * (1 + a[i] ** 2) * levels[-1])


def test_lanczos_on_many_matrices():
    rng = np.random.default_rng(0)
    half = rng.normal(size=(6, 40, 40))
    half[0] = 0
    matrices = half @ half.transpose(0, 2, 1)
    found = top_by_lanczos(lambda v: np.einsum("nij,nj->ni", matrices, v), 6, 40)
    np.testing.assert_allclose(found, np.linalg.eigvalsh(matrices)[:, -1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", LOSSES)
def test_norms_before_clipping_show_which_rows_are_clipped(name):
    """Rounding does not make a row a clipped one; one part in a million does. Wrong norms are refused."""
    o = solved(name)
    now = np.linalg.norm(o.rows[:, : o.dim], axis=1)
    plain, before = leakage(o, NOISE), now * (1 + 1e-12)
    before[[3, 8]] *= [1 + 1e-6, 4.0]
    found = leakage(o, NOISE, norms=before)
    np.testing.assert_array_equal(np.flatnonzero(found.clipped), [3, 8])
    same = ~found.clipped
    np.testing.assert_array_equal(found.trace[same], plain.trace[same])
    np.testing.assert_array_equal(found.cramer_rao.value[same], plain.cramer_rao.value[same])
    np.testing.assert_array_equal(found.cramer_rao_of([8, 2, 3]).value > 1e200, [True, False, True])
    z = o.rows[8, : o.dim] / now[8]
    shrink = (np.eye(o.dim) - np.outer(z, z)) / 4
    np.testing.assert_allclose(found.information(8), shrink @ plain.information(8) @ shrink, rtol=1e-9, atol=1e-9)
    for wrong in (before[:-1], before[0], -before, np.full(len(before), np.nan)):
        with pytest.raises(InputError, match="norms"):
            leakage(o, NOISE, norms=wrong)


@pytest.mark.parametrize("name", LOSSES)
def test_leakage_and_its_floors_are_printed_in_a_line(name):
    """Not hundreds of rows of arrays; floors of features of different units are told feature by feature."""
    scale = np.array([15.0, 5.0, 1.0, 0.5])
    found = leakage(solved(name), NOISE, scale=scale)
    for shown in (str(found), repr(found)):
        assert "\n" not in shown
        assert len(shown) < 300
        assert "24 records with 4 private features" in shown
        assert "mixed units" in shown
    assert "X's units" in repr(leakage(solved(name), NOISE))
    reported = str(found.feature_floors)
    assert len(reported) < 300
    for least in found.feature_floors.rmse.min(axis=0):
        assert f"±{format_floor(float(least))}" in reported
    assert "in the unit of each" in reported
