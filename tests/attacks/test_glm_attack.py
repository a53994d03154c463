"""The GLM attack: many trials as products against every reconstruction formed, and the floor met where it must be."""

import re

import mpmath
import numpy as np
import pytest
from sklearn.datasets import load_diabetes, load_digits

from reconbound._internal.checks import InputError
from reconbound.attacks import AttackerKnowledge, most_likely, reconstruct, simulate
from reconbound.attacks.roots import lambert, logistic_slopes, softmax_slopes, squared_slopes
from reconbound.linear import Logistic, Softmax, Squared, leakage, minimise

LOSSES = {"logistic": Logistic(), "softmax": Softmax(), "squared": Squared()}
WAYS = [  # loss, intercept, method
    ("logistic", False, "label"),
    ("logistic", True, "label"),
    ("logistic", True, "ratio"),
    ("squared", False, "label"),
    ("squared", True, "label"),
    ("squared", True, "ratio"),
    ("softmax", True, "ratio"),
    ("softmax", False, "label"),
    ("softmax", True, "label"),
]


def solved(name, intercept, n=80, d=5, l2=0.02):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(n, d)) / 2
    score = 3 * x[:, 0] + rng.normal(size=n)
    y = {"logistic": (score > 0).astype(float), "softmax": np.digitize(score, [-1, 1]), "squared": score}[name]
    return minimise(x, y, LOSSES[name], l2=l2, intercept=intercept, classes=3)


@pytest.mark.parametrize("noise", [1e-5, 0.3])
@pytest.mark.parametrize(("name", "intercept", "method"), WAYS)
def test_products_equal_every_reconstruction_formed(name, intercept, method, noise):
    """Also where the noise is so large that roots are missing and branches change."""
    o, trials = solved(name, intercept), 40
    found = simulate(o, noise, trials, method=method, keep=trials, random_state=3)
    released = o.weights + noise * np.random.default_rng(3).standard_normal((trials, *o.weights.shape))
    x = o.rows[:, : o.dim]
    for i in (0, 13, 57):
        others = np.arange(len(x)) != i
        known = AttackerKnowledge(x[others], o.y[others], o.y[i], o.loss, o.l2, intercept)
        guess = reconstruct(released, known, method=method)
        np.testing.assert_allclose(found.reconstructions[i], guess, rtol=1e-6, atol=1e-8)
        errors = np.mean((guess - x[i]) ** 2, axis=1)
        np.testing.assert_allclose(found.mse[i], errors.mean(), rtol=1e-6)
        np.testing.assert_allclose(found.median[i], np.sort(errors)[trials // 2], rtol=1e-6)
        np.testing.assert_allclose(found.trimmed[i], np.sort(errors)[:-1].mean(), rtol=1e-6)
        variance = np.mean(np.var(guess, axis=0, ddof=1))
        np.testing.assert_allclose(found.variance[i], variance, rtol=1e-6)
        np.testing.assert_allclose(found.bias[i], errors.mean() - variance, rtol=1e-5, atol=1e-6 * errors.mean())


@pytest.mark.parametrize(("name", "intercept", "method"), WAYS)
def test_without_noise_the_record_is_found(name, intercept, method):
    o = solved(name, intercept)
    found = simulate(o, 1e-12, 2, method=method, branch="given", random_state=0)
    bend = np.ones(len(o.y)) if name == "softmax" else np.abs(o.slopes[:, 0] + o.curvatures * o.scores[:, 0])
    clear = (np.linalg.norm(o.slopes, axis=1) > 1e-3) & (bend > 1e-2)
    assert clear.sum() > 50
    assert found.mse[clear].max() < 1e-12


@pytest.mark.parametrize("name", ["logistic", "squared"])
def test_branch_counts_side_from_intercept(name):
    """A large intercept: were it left out, a fifth of the records or more would be put on the other side."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(80, 3)) / 2
    score = 3 * x[:, 0] + rng.normal(size=80) + 2
    o = minimise(x, score if name == "squared" else (score > 0).astype(float), LOSSES[name], l2=0.02)
    assert abs(o.weights[0, -1]) > 0.5
    at = o.scores[:, 0] - o.weights[0, -1]
    side, naive = (o.slopes[:, 0] + o.curvatures * s for s in (at, o.scores[:, 0]))
    clear = (np.abs(o.slopes[:, 0]) > 1e-3) & (np.abs(side) > 1e-2)
    assert np.mean((side > 0) != (naive > 0)) > 0.2
    assert simulate(o, 1e-12, 2, branch="given", random_state=0).mse[clear].max() < 1e-12


def test_nearest_leaves_the_attacked_record_out_of_the_mean():
    """The one other member of a class of two stands for it: with the record in the mean other roots would be taken."""
    other_roots = 0
    for seed, noise in ((seed, noise) for seed in range(20) for noise in (1e-6, 0.3)):
        rng = np.random.default_rng(seed)
        x, y = rng.normal(size=(14, 2)) - [1.0, 0.0], np.zeros(14)
        x[0], y[:2] = [0.8, 0.3], 1
        x[1] = x[0] * rng.uniform(1.5, 6)
        o = minimise(x, y, Logistic(), l2=0.02, intercept=False)
        released = o.weights + noise * np.random.default_rng(0).standard_normal((30, 1, 2))
        found = simulate(o, noise, 30, records=[0, 1], keep=30, random_state=0).reconstructions
        for i in (0, 1):
            rest = np.arange(14) != i
            known = AttackerKnowledge(x[rest], y[rest], 1, o.loss, o.l2, intercept=False)
            guess = reconstruct(released, known, near=x[1 - i])
            np.testing.assert_allclose(found[i], guess, rtol=1e-6, atol=1e-9)
            np.testing.assert_allclose(reconstruct(released, known), guess)
            with_it = reconstruct(released, known, near=x[:2].mean(axis=0))
            other_roots += noise < 1e-5 and not np.allclose(with_it, guess, rtol=1e-3)
    assert other_roots > 3


def test_what_an_attack_does_not_use():
    """ "Ratio" never asks for the label; with three classes neither the branch nor `near` is asked for."""
    o = solved("softmax", True)
    x, rest = o.rows[:, : o.dim], np.arange(80) > 0
    given, nearest = (simulate(o, 0.1, 20, branch=branch, random_state=0) for branch in ("given", "nearest"))
    np.testing.assert_array_equal(given.mse, nearest.mse)
    known = [AttackerKnowledge(x[rest], o.y[rest], label, o.loss, o.l2) for label in (0, 1)]
    np.testing.assert_array_equal(*[reconstruct(o.weights, one, method="ratio") for one in known])
    guesses = [reconstruct(o.weights + 0.1, known[1], near=at) for at in (np.zeros(5), np.ones(5))]
    np.testing.assert_array_equal(*guesses)


def tight(o, noise, trials=10_000):
    """Ratio of realised variance to the Cramér–Rao floor on records in the linear regime, and that floor."""
    floor = leakage(o, noise, spectral=False, diagonal=False).cramer_rao.value
    fold = np.abs(o.slopes[:, 0] + o.curvatures * o.scores[:, 0])  # the scalar equation's slope: zero at the fold
    error = np.sqrt(floor * o.dim)
    far_from_fold = error * np.linalg.norm(o.weights) < 0.02 * fold / o.curvatures  # the error in s, against its scale
    linear = np.flatnonzero((error < 0.02 * np.linalg.norm(o.rows, axis=1)) & far_from_fold)
    found = simulate(o, noise, trials, branch="given", records=linear, random_state=0)
    return found, floor[linear]


@pytest.mark.parametrize("name", ["digits", "diabetes"])
def test_floor_is_tight_without_a_constant_feature(name):
    """The attack inverts the mechanism, so at small noise its variance is the Cramér–Rao floor Tr(I⁻¹)/d."""
    if name == "digits":
        x, y = load_digits(n_class=2, return_X_y=True)
        o = minimise(x / 16, y.astype(float), Logistic(), l2=1e-2, intercept=False)
    else:
        x, y = load_diabetes(return_X_y=True)
        o = minimise(x * 20, (y - 150) / 80, Squared(), l2=1e-2, intercept=False)
    found, floor = tight(o, 1e-7)
    ratio = found.variance / floor
    assert len(ratio) >= 50
    sampling = np.sqrt(2 / found.trials)  # at most, of a sum of squares of Gaussians
    assert np.all(ratio > 1 - 5 * sampling)
    assert np.all(ratio < 1.1)
    assert np.all(found.bias < 0.01 * found.variance)
    assert np.median(ratio) == pytest.approx(1, abs=0.02)
    assert found.unsolved.max() == 0


@pytest.mark.parametrize(
    ("name", "intercept"), [("logistic", True), ("squared", True), ("softmax", False), ("softmax", True)]
)
@pytest.mark.slow
def test_floor_is_tight_for_the_likeliest_record(name, intercept):
    """With a constant feature or three classes more is released than unknown; weighed by likelihood it is all used.

    A variance over T trials is known to √(2/T), 2 % (softmax: 6 %); the cruder attack is off by 10 %."""
    o, noise = solved(name, intercept), 1e-7
    trials, some = (600, 20) if name == "softmax" else (4_000, 25)
    exact = leakage(o, noise, spectral=False)
    floor = exact.cramer_rao.value
    clear = np.flatnonzero(np.sqrt(floor * o.dim) < 0.01 * np.linalg.norm(o.rows[:, : o.dim], axis=1))[:some]
    assert len(clear) == some
    method = "ratio" if intercept else "label"
    first = simulate(o, noise, trials, method=method, branch="given", records=clear, keep=trials, random_state=0)
    released = o.weights + noise * np.random.default_rng(0).standard_normal((trials, *o.weights.shape))
    x, ratio, bias, shape = o.rows[:, : o.dim], [], [], []
    for i, start in zip(clear, first.reconstructions, strict=True):
        others = np.arange(len(x)) != i
        known = AttackerKnowledge(x[others], o.y[others], o.y[i], o.loss, o.l2, intercept)
        found = most_likely(released, known, start)
        ratio.append(np.mean(np.var(found, axis=0, ddof=1)) / floor[i])
        bias.append(np.mean((found.mean(axis=0) - x[i]) ** 2) / floor[i])
        half = np.linalg.cholesky(exact.information(i))
        shape.append(np.linalg.eigvalsh(half.T @ np.cov(found.T) @ half))  # 1 where the covariance is I⁻¹
    sampling = np.sqrt(2 / trials)
    assert min(ratio) > 1 - 5 * sampling
    assert max(ratio) < 1 + max(0.1, 5 * sampling)
    assert np.median(ratio) == pytest.approx(1, abs=2 * sampling)
    assert max(bias) < 0.01 + 10 / trials
    edge = np.sqrt(o.dim / trials)  # eigenvalues of a sample covariance lie within (1 ± edge)²
    assert np.all((np.array(shape) > (1 - 2 * edge) ** 2) & (np.array(shape) < (1 + 2 * edge) ** 2))
    assert np.median(first.variance / floor[clear]) > 1.1  # the cruder attack, from which it began


def explained(o, released, x, record):
    """H⁻¹∇F_x(W) and its slope in x (H held), the plain way: whole data set, x in the record's place."""
    rows, (k, p) = o.rows.copy(), o.weights.shape
    rows[record, : o.dim] = x
    s, n = rows @ released.T, len(rows)
    g, bend = o.loss.slope(s, o.y), o.loss.curvature(s, o.y).reshape(n, k, k)
    hessian = sum(np.kron(a, np.outer(row, row)) for a, row in zip(bend, rows, strict=True)) + o.penalty * np.eye(k * p)
    mixed = np.kron(bend[record] @ released[:, : o.dim], rows[record][:, None])
    mixed += np.kron(g[record][:, None], np.eye(p)[:, : o.dim])
    left = (g.T @ rows + o.penalty * released).ravel()
    return np.linalg.solve(hessian, left), np.linalg.solve(hessian, mixed)


@pytest.mark.parametrize(
    ("name", "intercept"), [("logistic", True), ("squared", True), ("softmax", False), ("softmax", True)]
)
def test_the_likeliest_record_solves_its_equations(name, intercept, monkeypatch):
    """The remainder of H⁻¹∇F_x is orthogonal to every change of x; far starts never give a worse result."""
    o, i, trials = solved(name, intercept, n=30), 7, 40
    x, rest, rng = o.rows[:, : o.dim], np.arange(30) != 7, np.random.default_rng(0)
    known = AttackerKnowledge(x[rest], o.y[rest], o.y[i], o.loss, o.l2, intercept)
    released = o.weights + 1e-5 * rng.standard_normal((trials, *o.weights.shape))
    found = most_likely(released, known, np.tile(x[i] + 1e-2, (trials, 1)))
    for w, at in zip(released, found, strict=True):
        away, slopes = explained(o, w, at, i)
        across = np.linalg.qr(slopes)[0].T @ away
        assert np.linalg.norm(across) < 1e-3 * np.linalg.norm(away)
    for noise in (1e-3, 0.3):
        released = o.weights + noise * rng.standard_normal((trials, *o.weights.shape))
        start = x[i] + rng.normal(size=(trials, o.dim)) * rng.choice([0.3, 2.0, 30.0], size=(trials, 1))
        with np.errstate(all="raise", under="ignore"):
            found = most_likely(released, known, start)
        sizes = [
            [np.linalg.norm(explained(o, w, at, i)[0]) for w, at in zip(released, p, strict=True)]
            for p in (start, found)
        ]
        assert np.all(np.array(sizes[1]) <= np.array(sizes[0]) * (1 + 1e-6))
        share = np.array(sizes[1]) / sizes[0]
        assert np.quantile(share, 0.25) < 0.5
        assert noise < 0.1 or np.quantile(share, 0.75) < 0.95  # where whole steps do not help, shorter ones do
    monkeypatch.setattr("reconbound.attacks.likelihood.FLOATS", 1)  # a chunk per trial
    chunks = most_likely(released[:8], known, start[:8])
    np.testing.assert_allclose(chunks, found[:8], rtol=1e-6, atol=1e-6)
    for far in (1e20, -1e20, 1e140, 0.0):  # as a vanishing denominator leaves them: nothing overflows or is singular
        with np.errstate(all="raise", under="ignore"):
            found = most_likely(released[:3], known, np.full((3, o.dim), far))
        assert np.all(np.isfinite(found))


@pytest.mark.parametrize("intercept", [False, True])
def test_softmax_with_two_classes_is_the_binary_attack(intercept):
    """θ = W₁ − W₀ and half the penalty: the same reconstructions, release by release."""
    binary = solved("logistic", intercept)
    x, y = binary.rows[:, : binary.dim], binary.y.astype(int)
    o = minimise(x, y, Softmax(), l2=2 * binary.l2, intercept=intercept, classes=2)
    np.testing.assert_allclose(o.weights[1] - o.weights[0], binary.weights[0], rtol=1e-8)
    released = o.weights + 0.01 * np.random.default_rng(0).standard_normal((20, *o.weights.shape))
    both = simulate(o, 0.01, 20, keep=20, random_state=0)
    for i in (0, 40):
        others = np.arange(len(x)) != i
        known = AttackerKnowledge(x[others], y[others], y[i], Softmax(), o.l2, intercept)
        one = reconstruct(released, known)
        theta = released[:, 1:] - released[:, :1]
        known = AttackerKnowledge(x[others], binary.y[others], binary.y[i], Logistic(), binary.l2, intercept)
        two = reconstruct(theta, known)
        np.testing.assert_allclose(one, two, rtol=1e-9)
        np.testing.assert_allclose(both.reconstructions[i], two, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("intercept", [False, True])
def test_softmax_s_answer_by_singular_values(intercept):
    """Along the first right singular vector of the centred v, at the length where slopes agree."""
    o = solved("softmax", intercept)
    x, d, others = o.rows[:, : o.dim], o.dim, np.arange(len(o.y)) != 7
    for seed in range(5):
        w = o.weights + 1e-3 * np.random.default_rng(seed).standard_normal(o.weights.shape)
        found = reconstruct(w, AttackerKnowledge(x[others], o.y[others], o.y[7], o.loss, o.l2, intercept))
        slopes = Softmax().slope(o.rows[others] @ w.T, o.y[others])
        v = -(slopes.T @ x[others] + o.penalty * w[:, :d])
        left, _, _ = np.linalg.svd(v - v.mean(axis=0))
        u = left[:, 0] * -np.sign(left[o.y[7], 0])
        t = u @ v @ found / (found @ found)
        np.testing.assert_allclose(found, u @ v / t, rtol=1e-8)
        own = Softmax().slope((w[:, :d] @ found + w[:, d:].sum(axis=1))[None], o.y[7:8])[0]
        np.testing.assert_allclose(u @ own, t, rtol=1e-7)


def test_softmax_s_scalar_equation():
    """Roots that were planted are found, for slopes from √2 down to 1e-11, and a missing root is said."""
    rng = np.random.default_rng(0)
    c, s = rng.normal(size=(500, 4)) / 3, rng.normal(size=(500, 4)) * rng.choice([0.1, 3.0, 12.0], size=(500, 1))
    y = rng.integers(0, 4, size=500)
    g = Softmax().slope(s, y)
    t = np.linalg.norm(g, axis=1)
    assert t.min() < 1e-9
    found, ok = softmax_slopes((s - c) * t[:, None], c, g / t[:, None], y)
    assert ok.mean() > 0.99  # at the fold rounding decides
    assert np.quantile(np.abs(found / t - 1), 0.98) < 1e-8
    small = t < 1e-7
    assert small.sum() >= 5
    assert np.abs(found / t - 1)[small].max() < 1e-8
    b = np.array([-0.28, -0.278, -0.1, 0.5, 20.0])  # (s − c)σ(s) = b has no root below −0.27846
    two = np.tile(np.array([-1.0, 1.0]) / np.sqrt(2), (5, 1))
    found, ok = softmax_slopes(two * b[:, None], np.zeros((5, 2)), two, np.zeros(5, dtype=int))
    near, far, solved = logistic_slopes(b, np.zeros(5), np.zeros(5))
    np.testing.assert_array_equal(ok, solved)
    np.testing.assert_array_equal(ok, [False, True, True, True, True])
    away = np.minimum(np.abs(found / np.sqrt(2) - near), np.abs(found / np.sqrt(2) - far))
    assert away[0] < 0.01  # the fold
    assert np.all(away[1:] < 1e-12)


def test_ratio_attack_with_constant_feature_stays_above_floor():
    """It throws information away: the intercept's column and the label are not used."""
    o = solved("logistic", True)
    floor = leakage(o, 1e-7).cramer_rao.value
    found = simulate(o, 1e-7, 4000, method="ratio", random_state=0)
    steady = found.mse < 3 * found.median
    ratio = (found.variance / floor)[steady]
    assert steady.sum() > 50
    assert ratio.min() > 1 - 5 * np.sqrt(2 / 4000)
    assert np.median(ratio) > 1.5


def test_where_the_mean_cannot_settle_the_median_does():
    """A noisy denominator: ‖x̂ − x‖² has no mean, and single trials make the average."""
    o = solved("logistic", True)
    found = simulate(o, 0.1, 4000, method="ratio", random_state=0)
    assert np.median(found.mse / found.median) > 20
    assert np.all(found.trimmed < found.mse)
    again = simulate(o, 0.1, 4000, method="ratio", random_state=1)
    assert np.max(np.abs(np.log(again.median / found.median))) < 0.25
    assert np.max(np.abs(np.log(again.mse / found.mse))) > 1


def test_biased_attack_is_flagged_and_may_undercut_floor():
    """Choosing the root nearer to the others' mean shrinks towards it; with the given root it is no better."""
    x, y = load_digits(n_class=2, return_X_y=True)
    o, noise = minimise(x / 16, y.astype(float), Logistic(), l2=1e-2, intercept=False), 1e-2
    floor = leakage(o, noise, spectral=False).floor.value
    found = simulate(o, noise, 1000, random_state=0)
    below = found.mse < floor
    assert below.sum() > 100
    assert np.all(found.bias[below] > 0.1 * found.mse[below])
    assert np.all(simulate(o, noise, 1000, branch="given", random_state=0).mse >= floor)


def test_lambert_against_mpmath():
    x = np.concatenate([-np.exp(-np.linspace(1.0001, 700, 200)), -np.exp(-1) + np.logspace(-9, -2, 40)])
    for upper, branch in ((True, 0), (False, -1)):
        points = np.concatenate([x, np.logspace(-300, 300, 100)]) if upper else x
        exact = np.array([float(mpmath.lambertw(mpmath.mpf(v), branch).real) for v in points])
        np.testing.assert_allclose(lambert(points, upper), exact, rtol=1e-9)
    assert lambert(np.array([0.0, -0.5]), True).tolist() == [0.0, -1.0]


@pytest.mark.parametrize("intercept", [0.0, 0.7, -1.3])
def test_both_roots_of_the_scalar_equation(intercept):
    s = np.linspace(-30, 30, 241)
    for y in (0.0, 1.0):
        t = Logistic().slope(s[:, None], np.full(len(s), y))[:, 0]
        near, far, solved = logistic_slopes((s - intercept) * t, np.full_like(s, intercept), np.full_like(s, y))
        assert solved.all()
        away = np.minimum(np.abs(near / t - 1), np.abs(far / t - 1))
        assert np.quantile(away, 0.97) < 1e-9
        assert away.max() < 1e-6  # at the fold half of the digits are lost
    y = np.linspace(-2, 2, 241)
    small, large, solved = squared_slopes((s - intercept) * (s - y), np.full_like(s, intercept), y)
    assert solved.all()
    assert np.minimum(np.abs(small - (s - y)), np.abs(large - (s - y))).max() < 1e-6
    assert np.all(np.abs(small) <= np.abs(large))
    b, apart = (
        np.array([1.0, 1.0, -1e-9]),
        np.array([1e6, -1e6, 2.0]),
    )  # t² + apart t = b: no digits lost in the small one
    small, large, _ = squared_slopes(b, np.zeros(3), apart)
    np.testing.assert_allclose(small, b / apart * (1 - b / apart**2), rtol=1e-14)
    np.testing.assert_allclose(large, -apart - small, rtol=1e-14)
    assert not squared_slopes(np.array([-9.0]), np.zeros(1), np.ones(1))[2].any()
    assert not logistic_slopes(np.array([-9.0]), np.zeros(1), np.ones(1))[2].any()


def test_bad_input():
    o = solved("logistic", False)
    with pytest.raises(InputError, match="no constant feature"):
        simulate(o, 0.1, 10, method="ratio")
    for records in ([], [80], [-1]):
        with pytest.raises(InputError, match="records"):
            simulate(o, 0.1, 10, records=records)
    with pytest.raises(InputError, match=r"y must have shape \(9,\)"):
        reconstruct(np.zeros((1, 6)), AttackerKnowledge(np.zeros((9, 5)), np.zeros(8), 0, Logistic(), 0.1))
    for changes in ({"noise_std": 0.0}, {"trials": 1}, {"method": "guess"}, {"branch": "left"}, {"keep": -1}):
        with pytest.raises(InputError, match=next(iter(changes))):
            simulate(o, **{"noise_std": 0.1, "trials": 10, **changes})
    with pytest.raises(InputError, match="weights"):
        reconstruct(np.zeros((1, 5)), AttackerKnowledge(np.zeros((9, 5)), np.zeros(9), 0, Logistic(), 0.1))
    for name, changes in (
        ("features", {"features": np.zeros(9)}),
        ("features", {"features": np.full((9, 5), np.nan)}),
        ("weights", {"weights": np.zeros((3, 6))}),
        ("weights", {"weights": np.zeros((1, 6)), "loss": Softmax()}),
        ("weights", {"weights": np.zeros(6)}),
        (r"y must have shape \(9,\)", {"y": np.zeros(8)}),
        ("y must hold", {"y": np.full(9, 2)}),
        ("label", {"label": 2}),
        ("label", {"label": 3, "loss": Softmax(), "weights": np.zeros((3, 6))}),
        ("label", {"label": np.nan, "loss": Squared()}),
        ("l2", {"l2": 0.0}),
    ):
        given = {"weights": np.zeros((1, 6)), "features": np.zeros((9, 5)), "y": np.zeros(9), "label": 1, **changes}
        given = {"loss": Logistic(), "l2": 0.1, **given}
        weights = given.pop("weights")
        with pytest.raises(InputError, match=name):
            reconstruct(weights, AttackerKnowledge(**given))
        with pytest.raises(InputError, match=name):
            most_likely(weights[None], AttackerKnowledge(**given), np.zeros((1, 5)))
    for weights, start, name in ((np.zeros((1, 6)), np.zeros((1, 5)), "weights"), (np.zeros((2, 1, 6)), 0, "start")):
        with pytest.raises(InputError, match=name):
            most_likely(weights, AttackerKnowledge(np.zeros((9, 5)), np.zeros(9), 0, Logistic(), 0.1), start)


def test_a_report_prints_a_few_lines_and_its_figures():
    found = simulate(solved("logistic", True), 0.01, 50, keep=3, random_state=0)
    lines = str(found).splitlines()
    assert repr(found) == str(found)
    assert len(lines) <= 7
    assert max(map(len, lines)) <= 120
    assert lines[0] == "AttackReport of 80 records, 50 releases (method 'label', branch 'nearest')"
    for line, values in zip(lines[1:4], (found.mse, found.median, found.variance), strict=True):
        printed = [float(word.replace(",", "")) for word in re.findall(r"([\d.,e+-]+) \(", line.split(":")[1])]
        np.testing.assert_allclose(printed, [values.min(), np.median(values), values.max()], rtol=6e-3)
    assert lines[4].endswith(f": {np.sum(found.bias > found.mse / 10)}")
    assert "at the worst record" in lines[5]
    single = simulate(solved("logistic", True), 0.01, 50, method="ratio", records=[4], random_state=0)
    one = str(single).splitlines()
    assert one[0].startswith("AttackReport of 1 record,")
    assert len(one) == 6
    assert float(one[1].split(":")[1].replace(",", "")) == pytest.approx(single.mse[0], rel=6e-3)


def test_what_is_no_optimum_or_loss_is_named():
    best = solved("logistic", True)
    with pytest.raises(InputError, match=r"optimum must be .*solve\(X, y\).*, got 'a Logistic'"):
        simulate(Logistic(), 1e-3, 10)
    with pytest.raises(InputError, match=r"loss must be Logistic\(\), Softmax\(\) or Squared\(\), got 'logistic'"):
        AttackerKnowledge(best.rows[1:, :5], best.y[1:], best.y[0], "logistic", 0.02)
