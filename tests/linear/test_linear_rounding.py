"""Leakage of linear models at condition numbers up to 1e16, beside mpmath at the exact minimiser: never too low."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from reconbound.linear import Logistic, Softmax, Squared, leakage, minimise
from reconbound.linear.solver import NotConverged, Optimum

LOSSES = {"logistic": Logistic(), "softmax": Softmax(), "squared": Squared()}


def parts(o: Optimum, i: int, w: mpmath.matrix) -> tuple[list, list]:
    """Slopes and curvatures of record i in high precision."""
    k, p = o.weights.shape
    row = [mpmath.mpf(float(x)) for x in o.rows[i]]
    s = [mpmath.fsum(w[c * p + j] * row[j] for j in range(p)) for c in range(k)]
    if isinstance(o.loss, Squared):
        return [s[0] - mpmath.mpf(float(o.y[i]))], [[mpmath.mpf(1)]]
    if isinstance(o.loss, Logistic):
        chance = 1 / (1 + mpmath.exp(-s[0]))
        return [chance - int(o.y[i])], [[chance * (1 - chance)]]
    total = mpmath.fsum(mpmath.exp(x) for x in s)
    chances = [mpmath.exp(x) / total for x in s]
    slopes = [chances[c] - (c == o.y[i]) for c in range(k)]
    return slopes, [[chances[a] * ((a == b) - chances[b]) for b in range(k)] for a in range(k)]


def exact(o: Optimum, records: list[int]) -> list[tuple[float, np.ndarray, float, float]]:
    """Trace, diagonal, largest eigenvalue and inverse trace of JᵀJ at the exact minimiser, with sixty digits."""
    with mpmath.workdps(60):
        (k, p), n, d = o.weights.shape, len(o.rows), o.dim
        penalty = mpmath.mpf(n) * mpmath.mpf(float(o.l2))
        w = mpmath.matrix([float(x) for x in o.weights.ravel()])
        for _ in range(15):
            slope, hessian = penalty * w, mpmath.eye(k * p) * penalty
            for i in range(n):
                g, bend = parts(o, i, w)
                row = mpmath.matrix([float(x) for x in o.rows[i]])
                outer = row * row.T
                for a in range(k):
                    for j in range(p):
                        slope[a * p + j] += g[a] * row[j]
                    for b in range(k):
                        for j in range(p):
                            for m in range(p):
                                hessian[a * p + j, b * p + m] += bend[a][b] * outer[j, m]
            if mpmath.norm(slope) < mpmath.mpf(10) ** -45:
                break
            w = w - mpmath.lu_solve(hessian, slope)
        inverse, found = hessian**-1, []
        for i in records:
            g, bend = parts(o, i, w)
            mixed = mpmath.zeros(k * p, d)
            for j in range(d):
                for a in range(k):
                    moved = mpmath.fsum(bend[a][b] * w[b * p + j] for b in range(k))
                    for m in range(p):
                        mixed[a * p + m, j] += moved * mpmath.mpf(float(o.rows[i, m]))
                    mixed[a * p + j, j] += g[a]
            jacobian = inverse * mixed
            information = jacobian.T * jacobian
            values = mpmath.eigsy(information, eigvals_only=True)
            back = mpmath.fsum(1 / x for x in values) if min(values) > 0 else mpmath.inf
            diagonal = np.array([float(information[j, j]) for j in range(d)])
            found.append((float(sum(values)), diagonal, float(max(values)), float(back)))
        return found


def problem(name: str, seed: int, d: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of norm 1 at most whose columns are nearly collinear."""
    rng = np.random.default_rng(seed)
    turn, _ = np.linalg.qr(rng.normal(size=(d, d)))
    x = rng.normal(size=(8, d)) * 10.0 ** (-rng.uniform(0, 6, size=d) * (np.arange(d) > 0)) @ turn.T
    x /= np.linalg.norm(x, axis=1).max()
    score = 3 * x[:, 0] + 0.5 * rng.normal(size=8)
    targets = {"logistic": score > 0, "softmax": np.digitize(score, [-0.3, 0.3]), "squared": score}[name]
    return x, np.asarray(targets, dtype=int if name == "softmax" else float)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("l2", [1e-4, 1e-8, 1e-10, 1e-12, 1e-14, 1e-16])
def test_floors_stay_below_exact_for_any_conditioning(name: str, l2: float) -> None:
    """Traces of softmax were up to 1.7 times too low at l2 = 1e-10, and 0 at 1e-14, where now nothing is stated."""
    for seed, (intercept, d) in enumerate([(False, 2), (True, 2), (True, 3), (False, 1), (True, 1)]):
        if name == "softmax" and d == 3:
            continue
        x, y = problem(name, seed, d)
        try:
            o = minimise(x, y, LOSSES[name], l2=l2, intercept=intercept, classes=3)
            found = leakage(o, 1.0)
        except NotConverged:
            assert l2 < 1e-6
            continue
        records = [0, 5]
        cramer_rao = found.cramer_rao_of(records).value * d
        for (trace, diagonal, top, inverse), i, back in zip(exact(o, records), records, cramer_rao, strict=True):
            assert trace <= found.trace[i]
            assert np.all(diagonal <= found.diagonal[i])
            assert top <= found.spectral_norm[i]
            assert back <= inverse
            if l2 >= 1e-4:
                assert found.trace[i] == pytest.approx(trace, rel=1e-6)
                assert back >= inverse * 0.99


@pytest.mark.parametrize("intercept", [False, True])
def test_exactly_fitted_record_has_finite_floor(intercept: bool) -> None:
    """Its slope is 0, and yet the model moves with x: Tr(I⁻¹) = 1/I, where 1e308 was said."""
    x, y = np.array([[0.5], [-0.5], [0.25]]), np.array([1.0, -1.0, 0.5])
    o = minimise(x, y, Squared(), l2=1e-3, intercept=intercept)
    again = y.copy()
    again[2] = o.scores[2, 0]
    o = Optimum(o.loss, o.rows, again, o.l2, intercept, o.weights, o.gradient_norm)  # the third residual is exactly 0
    found = leakage(o, 1.0)
    assert o.slopes[2, 0] == 0
    assert found.cramer_rao.value[2] == pytest.approx(1 / found.trace[2], rel=1e-6)
    assert found.inverse_trace[2] <= (1 + 1e-6) / found.trace[2]


def test_nearly_singular_record_has_no_more_than_rounding_allows() -> None:
    """a + ℓ''xᵀθ = 0 makes J singular; how singular, rounding hides."""
    x, y = problem("squared", 3, 2)
    o = minimise(x, y, Squared(), l2=1e-3, intercept=False)
    bent = y.copy()
    bent[0] = 2 * o.scores[0, 0]  # a = s − y = −s, and ℓ''xᵀθ = s
    changed = Optimum(o.loss, o.rows, bent, o.l2, False, o.weights, o.gradient_norm)
    largest = float(leakage(changed, 1.0).inverse_trace[0])
    assert 1e10 < largest < 1e40
    assert math.isfinite(largest)
