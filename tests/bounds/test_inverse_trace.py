"""theorem2 near singular matrices, beside mpmath with eighty digits: never too high, and close where it can be."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest

from reconbound.bounds import per_group, theorem2, van_trees


def exact(matrix: np.ndarray, jacobian: np.ndarray | None = None) -> float:
    """Tr(J A⁻¹ Jᵀ)/d of the symmetric part in high precision; inf where it is not positive definite."""
    with mpmath.workdps(80):
        a = mpmath.matrix(matrix.tolist())
        a = (a + a.T) / 2
        eigenvalues, vectors = mpmath.eigsy(a)
        j = mpmath.eye(len(matrix)) if jacobian is None else mpmath.matrix(jacobian.tolist())
        follows = j * vectors
        total = mpmath.mpf(0)
        for k in range(len(matrix)):
            reach = sum(follows[i, k] ** 2 for i in range(follows.rows))
            if eigenvalues[k] <= 0:
                if reach > mpmath.mpf(10) ** -60:
                    return float("inf")
                continue
            total += reach / eigenvalues[k]
        return float(total / len(matrix))


def nearly_singular(rng: np.random.Generator, d: int, smallest: float) -> np.ndarray:
    q, _ = np.linalg.qr(rng.normal(size=(d, d)))
    values = np.concatenate([[smallest], np.exp(rng.uniform(np.log(max(smallest, 1e-3)), 0, size=d - 1))])
    a = (q * values) @ q.T
    return np.asarray((a + a.T) / 2 * 10.0 ** rng.integers(-6, 7))


@pytest.mark.parametrize("smallest", [1e-1, 1e-6, 1e-10, 1e-13, 3e-15, 1e-15, 3e-16, 1e-16, 1e-18])
def test_theorem2_is_never_above_the_exact_floor(smallest: float) -> None:
    """It was up to 1.2 times too high at eigenvalues of the size of the rounding."""
    rng = np.random.default_rng(8)
    for d, times in ((2, 8), (3, 8), (5, 8), (9, 4), (16, 1)):
        for _ in range(times):
            a = nearly_singular(rng, d, smallest)
            truth = exact(a)
            found = theorem2(a).value
            assert found <= truth
            if smallest >= 1e-6:
                assert found >= truth * (1 - 1e-6)
            elif smallest >= 1e-13:
                assert found >= truth * 0.2


def test_floors_of_badly_scaled_features_are_kept() -> None:
    """Features in units that differ by 10¹² are no singular matrix: the floor is as exact as for equal units."""
    rng = np.random.default_rng(1)
    for _ in range(20):
        a = nearly_singular(rng, 6, 1e-2)
        units = 10.0 ** rng.uniform(-6, 6, size=6)
        scaled = a * units[:, None] * units
        assert theorem2(scaled).value <= exact(scaled)
        assert theorem2(scaled).value == pytest.approx(exact(scaled), rel=1e-6)


def test_jacobian_ignoring_dark_directions() -> None:
    rng = np.random.default_rng(2)
    for d in (3, 6, 10):
        a = nearly_singular(rng, d, 1e-16)
        _, vectors = np.linalg.eigh(a)
        for j in (vectors[:, 1:] @ vectors[:, 1:].T, rng.normal(size=(d, d)), np.diag([1.0] + [0.0] * (d - 1))):
            assert theorem2(a, jacobian=j).value <= exact(a, j) * (1 + 1e-9)


def test_matrices_of_low_rank_and_of_almost_equal_rows() -> None:
    rng = np.random.default_rng(3)
    for d in (2, 4, 8):
        half = rng.normal(size=(d, d - 1))
        assert theorem2(half @ half.T).value > 1e6  # the truth is infinite, or as good as that
        row = rng.normal(size=d)
        close = np.outer(row, row) + 1e-14 * np.eye(d)
        assert theorem2(close).value <= exact(close)
        block = per_group(close, [0, 1]).value
        assert block <= exact(close[:2, :2])


def test_asymmetry_and_negative_eigenvalues_lower_the_floor() -> None:
    """A matrix that is off by 1e-9 cannot promise 1e12."""
    a = np.array([[1.0, 1.0], [1.0 + 2e-9, 1.0 + 1e-12]])
    assert theorem2(a).value < 1e10
    off = np.array([[1.0, 1.0 + 1e-9], [1.0 + 1e-9, 1.0]])
    assert theorem2(off).value < 1e10


def test_van_trees_with_slightly_negative_information() -> None:
    """A rounding of −1e-9 times a size of 1e12 is −1,000 against the prior's 1: the floor must stay below the prior."""
    for size in (1e8, 9.99e8, 1e9 * (1 - 1e-7), 1.001e9, 1e12):
        information = size * np.array([[1.0, 1.0 + 1e-9], [1.0 + 1e-9, 1.0]])
        assert 0 <= van_trees(information, np.eye(2)).value <= 0.5 + 1e-9
    rng = np.random.default_rng(4)
    for _ in range(20):
        a, prior = nearly_singular(rng, 5, 1e-9), nearly_singular(rng, 5, 1e-6)
        with mpmath.workdps(60):
            posterior = (mpmath.matrix(a.tolist()) + mpmath.matrix(prior.tolist()) ** -1) ** -1
            truth = float(sum(posterior[i, i] for i in range(5)) / 5)
        assert van_trees(a, prior).value == pytest.approx(truth, rel=1e-6)
        assert van_trees(a, prior).value <= truth * (1 + 1e-9)
