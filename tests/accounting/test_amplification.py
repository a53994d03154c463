"""The subsampling factors against high precision, the Fisher information of the mixture itself, and Monte Carlo."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from functools import cache

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import norm

from reconbound.accounting.amplification import (
    PoissonTable,
    fixed_size_factor,
    paper_delta,
    paper_kappa,
    poisson_factors,
)

RATES = (1e-9, 1e-6, 1e-3, 0.01, 0.1, 0.5, 0.9, 1 - 1e-9, 1.0)
SMOOTH_BOUND = 1.1153


def high_precision_factors(m: float, q: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """k⊥ and k∥ by Gauss–Legendre in 24 digits, cut where r turns: nothing shared with the trapezoid rule."""
    with mpmath.workdps(24):
        m_, q_ = mpmath.mpf(m), mpmath.mpf(q)

        @cache  # both integrals are taken at the same points
        def integrand(x: mpmath.mpf) -> mpmath.mpf:
            return mpmath.npdf(x) / (q_ + (1 - q_) * mpmath.exp(-(m_ * x + m_ * m_ / 2)))

        turn = -m_ / 2 - (mpmath.log(q_) - mpmath.log1p(-q_)) / m_ if q < 1 and m > 0 else mpmath.mpf(0)
        cuts = {mpmath.mpf(c) for c in range(-16, 17, 4)} | {
            turn + c / max(m_, 1) for c in (-30, -10, -3, 0, 3, 10, 30)
        }
        points = sorted(c for c in cuts if -16 <= c <= 16)
        return q_ * mpmath.quad(integrand, points), q_ * mpmath.quad(lambda x: x * x * integrand(x), points)


def closed_form_bounds(m: np.ndarray | float, q: float) -> np.ndarray:
    """Upper bounds by Jensen's inequality: k⊥ ≤ q/(q + (1−q)e^{−m²}), k∥ ≤ q/(q + (1−q)e^{−m²}/(1+m²))."""
    m = np.minimum(m, 1e3)
    return np.array([expit(logit(q) + m**2), expit(logit(q) + m**2 + np.log1p(m**2))])


def information_by_integration(density: Callable[[np.ndarray], np.ndarray], dimensions: int, cell: float) -> np.ndarray:
    """∫ ∇p ∇pᵀ / p over a grid of volume `cell`, from the density alone, its derivatives by central differences."""
    here, step = density(np.zeros(dimensions)), 1e-5
    slopes = [(density(step * e) - density(-step * e)) / (2 * step) for e in np.eye(dimensions)]
    return np.array([[np.sum(a * b / here) * cell for b in slopes] for a in slopes])


@pytest.mark.parametrize(
    ("m", "across", "along"),
    [(1, 0.02570468, 0.0471801247), (2, 0.1639575703, 0.3037124455), (5, 0.9314964819, 0.7580489819)],
)
def test_reference_values_of_the_design(m: float, across: float, along: float) -> None:
    assert poisson_factors(m, 0.01) == pytest.approx((across, along), abs=6e-11)


@pytest.mark.parametrize(
    ("noise", "across", "along", "kappa"),
    [(0.5, 0.23, 0.37, 1.0), (1, 0.032, 0.062, 0.99995), (2, 0.0135, 0.0175, 0.93), (5, 0.0105, 0.0110, 0.15)],
)
def test_designs_comparison_with_the_paper(noise: float, across: float, along: float, kappa: float) -> None:
    """The design prints two or three digits of each."""
    assert poisson_factors(SMOOTH_BOUND / noise, 0.01) == pytest.approx((across, along), rel=0.02)
    assert paper_kappa(noise, 0.01, 1e-9, clip_bound=SMOOTH_BOUND) == pytest.approx(kappa, rel=0.03)


@pytest.mark.parametrize("q", [1e-30, 1e-9, 1e-3, 0.1, 0.5, 0.9, 1 - 1e-9, 1.0])
@pytest.mark.slow
def test_high_precision(q: float) -> None:
    norms = np.array([0, 1e-6, 0.3, 1, 3.3, 8, 15, 1e6])
    tolerance = 1e-14 if q >= 1e-9 else 1e-12
    for m, *factors in zip(norms.tolist(), *poisson_factors(norms, q), strict=True):
        for factor, expected in zip(factors, high_precision_factors(m, q), strict=True):
            assert float(abs(factor / expected - 1)) < tolerance, m


@pytest.mark.parametrize("m", [0.4, 1.5, 4.0])
@pytest.mark.parametrize("q", [0.01, 0.3, 0.8])
def test_information_of_the_mixture_in_one_dimension(m: float, q: float) -> None:
    """In one dimension there is nothing across the gradient."""
    noise, slope = 0.7, 1.3  # g̃(z) = m·noise + slope·z at z = 0
    y = np.linspace(-12 * noise, (m + 12) * noise, 20001)

    def density(z: np.ndarray) -> np.ndarray:
        return q * norm.pdf(y, m * noise + slope * z[0], noise) + (1 - q) * norm.pdf(y, 0, noise)

    measured = information_by_integration(density, 1, cell=y[1] - y[0])
    assert measured.item() == pytest.approx(q / noise**2 * slope**2 * poisson_factors(m, q)[1], rel=1e-7)


@pytest.mark.parametrize(("m", "q"), [(0.8, 0.05), (2.5, 0.05), (3.0, 0.4), (1.0, 0.9)])
def test_information_matrix_of_the_mixture_in_two_dimensions(m: float, q: float) -> None:
    """A gradient in a slanted direction and a J̃ with parts along and across it; the whole matrix must agree."""
    noise, direction = 0.6, np.array([0.6, 0.8])
    gradient, jacobian = m * noise * direction, np.array([[1.0, -0.4], [0.3, 0.9]])
    grid = np.linspace(-11, 11, 501) * noise
    first, second = np.meshgrid(grid + gradient[0] / 2, grid + gradient[1] / 2, indexing="ij", sparse=True)

    def density(z: np.ndarray) -> np.ndarray:
        mean = gradient + jacobian @ z
        present = norm.pdf(first, mean[0], noise) * norm.pdf(second, mean[1], noise)
        return q * present + (1 - q) * norm.pdf(first, 0, noise) * norm.pdf(second, 0, noise)

    measured = information_by_integration(density, 2, cell=(grid[1] - grid[0]) ** 2)
    across, along = poisson_factors(m, q)
    projector = np.outer(direction, direction)
    expected = q / noise**2 * jacobian.T @ (across * (np.eye(2) - projector) + along * projector) @ jacobian
    np.testing.assert_allclose(measured, expected, rtol=1e-6)


@pytest.mark.parametrize("draws", [20_000, 500_000])
def test_monte_carlo_of_the_score(draws: int) -> None:
    """Samples of the mechanism, the score by autograd of log p: within 4 standard errors, which shrink with draws."""
    q, m, noise = 0.1, 1.7, 0.5
    generator = torch.Generator().manual_seed(0)
    jacobian = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    direction = torch.tensor([2.0, -1.0, 2.0], dtype=torch.float64) / 3
    gradient = m * noise * direction
    took_part = torch.rand(draws, 1, generator=generator, dtype=torch.float64) < q
    y = took_part * gradient + noise * torch.randn(draws, 3, generator=generator, dtype=torch.float64)
    z = torch.zeros(draws, 2, dtype=torch.float64, requires_grad=True)

    def log_normal(residual: torch.Tensor) -> torch.Tensor:
        return -(residual**2).sum(1) / (2 * noise**2)

    present = math.log(q) + log_normal(y - gradient - z @ jacobian.T)
    absent = math.log(1 - q) + log_normal(y)
    (score,) = torch.autograd.grad(torch.logaddexp(present, absent).sum(), z)
    squares = (score**2).sum(1)
    standard_error = float(squares.std()) / math.sqrt(draws)
    across, along = poisson_factors(m, q)
    total, part_along = float((jacobian**2).sum()), float((direction @ jacobian).pow(2).sum())
    expected = q / noise**2 * (across * (total - part_along) + along * part_along)
    assert abs(float(squares.mean()) - expected) < 4 * standard_error
    assert standard_error < 0.05 * expected * math.sqrt(20_000 / draws)


def test_never_above_the_papers_kappa_on_its_grid() -> None:
    """Every norm that the clip allows, over noises and rates around the paper's: at most κ, and often far smaller."""
    for noise in (0.01, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 100):
        for q in (1e-4, 1e-3, 200 / 50_000, 600 / 60_000, 0.1, 0.5):
            factors = np.maximum(*poisson_factors(np.linspace(0, SMOOTH_BOUND / noise, 101), q))
            for delta in (1e-5, 1e-9, paper_delta(60_000, 6_000)):
                assert np.all(factors <= paper_kappa(noise, q, delta) * (1 + 1e-12)), (noise, q, delta)
    assert paper_kappa(2, 0.01, 1e-9) / np.maximum(*poisson_factors(SMOOTH_BOUND / 2, 0.01)) > 50


@pytest.mark.parametrize("q", RATES)
def test_closed_forms_are_upper_bounds(q: float) -> None:
    norms = np.concatenate([np.linspace(0, 30, 601), [1e3, 1e6]])
    for exact, bound in zip(poisson_factors(norms, q), closed_form_bounds(norms, q), strict=True):
        assert np.all(exact <= bound * (1 + 1e-14))
    assert closed_form_bounds(1.0, q)[0] == pytest.approx(q / (q + (1 - q) / math.e))
    assert closed_form_bounds(1.0, q)[1] == pytest.approx(q / (q + (1 - q) / math.e / 2))


@pytest.mark.parametrize("q", RATES)
def test_limits(q: float) -> None:
    """q at m = 0, with k⊥ = q + q(1−q)² m² + … and k∥ = q + q(1−q)(2−3q) m² + …; 1 far out."""
    np.testing.assert_allclose(poisson_factors([0.0, 1e-9], q), q, rtol=1e-14)
    np.testing.assert_allclose(poisson_factors([60.0, 1e6, 1e300, np.inf], q), 1.0, rtol=1e-15)
    slopes = (np.array(poisson_factors(1e-3, q)) - q) / 1e-6 / q
    np.testing.assert_allclose(slopes, [(1 - q) ** 2, (1 - q) * (2 - 3 * q)], atol=1e-5)


@pytest.mark.parametrize("m", [0.0, 0.3, 1.0, 3.0, 6.0])
def test_increasing_with_the_rate(m: float) -> None:
    rates = np.concatenate([np.geomspace(1e-9, 0.5, 60), np.linspace(0.51, 1, 40)])
    for factor in poisson_factors(m, rates):
        assert np.all(np.diff(factor) > 0)


@pytest.mark.parametrize("q", RATES)
def test_what_is_monotone_in_the_norm(q: float) -> None:
    """k⊥ and max(k⊥, k∥) never fall (docs/theory/amplification.md); k∥ alone does, to below q, where q > 2/3."""
    across, along = poisson_factors(np.linspace(0, 25, 5001), q)
    assert np.all(np.diff(across) >= -2e-15)
    assert np.all(np.diff(np.maximum(across, along)) >= -2e-15)
    if 2 / 3 < q < 0.99:
        assert along.min() < q


@pytest.mark.parametrize("q", [1e-9, 0.01, 0.3])
def test_the_factors_cross_at_one_half(q: float) -> None:
    crossing = math.sqrt(2 * math.log((1 - q) / q))
    np.testing.assert_allclose(poisson_factors(crossing, q), 0.5, rtol=1e-13)
    across, along = poisson_factors([0.99 * crossing, 1.01 * crossing], q)
    assert (along > across).tolist() == [True, False]


@given(
    m=st.one_of(st.floats(0, 1e6), st.floats(0, 30)),
    log_q=st.floats(math.log(1e-9), 0),
    noise=st.floats(1e-9, 1e9),
    delta=st.floats(1e-300, 0.99),
)
@settings(max_examples=150, deadline=None)
def test_whole_range_is_finite_and_ordered(m: float, log_q: float, noise: float, delta: float) -> None:
    q = min(math.exp(log_q), 1.0)
    with warnings.catch_warnings(), np.errstate(over="raise", invalid="raise", divide="raise"):
        warnings.simplefilter("error")
        exact, bound = np.array(poisson_factors(m, q)), closed_form_bounds(m, q)
        fixed = fixed_size_factor(m, 1 / noise, q)
        kappa = paper_kappa(noise, q, delta)
    assert np.all((exact > 0) & (exact <= bound * (1 + 1e-13)) & (bound <= 1))
    assert exact[0] >= q * (1 - 1e-13)
    assert exact.max() * (1 - 1e-13) <= fixed <= 1
    assert q * (1 - 1e-13) <= kappa <= 1


def test_fixed_size_factor_bounds_the_mixture_that_it_stands_for() -> None:
    """Three other records, batches of two: the information of the real mixture over all six batches, in 2-D."""
    noise, bound = 0.8, 1.0
    gradient, jacobian = np.array([0.5, 0.3]), np.array([[0.7, -0.5], [0.4, 1.1]])
    others = np.array([[-0.9, 0.2], [0.6, -0.7], [0.0, 0.95]])
    grid = np.linspace(-8, 8, 401)

    def density(z: np.ndarray) -> np.ndarray:
        rows = np.vstack([gradient + jacobian @ z, others])
        sums = np.array([rows[i] + rows[j] for i in range(4) for j in range(i)])
        first, second = (norm.pdf(grid, mean[:, None], noise) for mean in sums.T)
        return first.T @ second / len(sums)

    measured = information_by_integration(density, 2, cell=(grid[1] - grid[0]) ** 2)
    factor = fixed_size_factor(np.linalg.norm(gradient) / noise, bound / noise, 0.5)
    upper = 0.5 / noise**2 * factor * jacobian.T @ jacobian
    assert np.linalg.eigvalsh(upper - measured).min() > 0


def test_fixed_size_factor_is_the_larger_one_at_the_summed_norm() -> None:
    expected = np.maximum(*poisson_factors([1.5, 3.0, 9.0], 0.01))
    np.testing.assert_array_equal(fixed_size_factor([0.5, 2.0, 8.0], 1.0, 0.01), expected)
    table = PoissonTable(0.01)
    for dtype, close in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        np.testing.assert_allclose(table.largest(torch.tensor([1.5, 3.0, 9.0], dtype=dtype)), expected, rtol=close)


def test_paper_kappa_by_hand() -> None:
    epsilon = 1.115 * 2 * math.sqrt(2 * math.log(1.25 / 1e-5)) / 3
    assert paper_kappa(3, 0.1, 1e-5) == pytest.approx(0.1 / (0.1 + 0.9 * math.exp(-epsilon)), rel=1e-14)
    assert paper_kappa(3, 1.0, 1e-5) == 1.0
    assert paper_kappa(1e-320, 0.1, 1e-320) == 1.0  # ε overflows: κ is 1, with no warning
    assert 6000 * paper_delta(60_000, 6000) == pytest.approx(1 / 60_000, rel=1e-14)


@pytest.mark.parametrize("q", [1e-30, *RATES])
def test_table_accuracy(q: float) -> None:
    cells = np.arange(0, 24, 1 / 32)
    inside = np.random.default_rng(0).uniform(0, 24, 20_000)
    norms = np.concatenate([inside, cells, np.nextafter(cells, 1e9), [1e-300, 1e3, 1e6, np.inf]])
    table, exact = PoissonTable(q), np.stack(poisson_factors(norms, q))
    double = torch.stack(table(torch.from_numpy(norms))).numpy()
    assert np.max(np.abs(double / exact - 1)) < (1e-12 if q >= 1e-9 else 1e-9)
    assert np.all(double <= 1)
    single = torch.stack(table(torch.from_numpy(norms).to(torch.float32)))
    assert single.dtype == torch.float32
    assert np.max(np.abs(single.double().numpy() / exact - 1)) < (2e-6 if q >= 1e-9 else 1e-5)


def test_table_keeps_shapes_and_raises_half_precision() -> None:
    table = PoissonTable(0.02)
    assert all(factor.shape == (27, 37) for factor in table(torch.rand(27, 37)))
    assert table(torch.tensor(2.0, dtype=torch.bfloat16))[0].shape == ()
    assert table(torch.tensor(2.0, dtype=torch.bfloat16))[0].dtype == torch.float32
    assert table.prepare("cpu") is table


def test_table_never_waits_for_the_device_and_never_returns_nan() -> None:
    """A meta tensor has no values to wait for; NaN gives the trivial factor, a negative norm counts by its size."""
    table = PoissonTable(0.02)
    assert table(torch.empty(5, device="meta"))[1].shape == (5,)
    across, along = table(torch.tensor([math.nan, math.inf, -1.0], dtype=torch.float64))
    np.testing.assert_allclose([across[:2], along[:2]], 1.0, rtol=1e-14)
    assert across[2] == table(torch.tensor(1.0, dtype=torch.float64))[0]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_table_inside_a_cuda_graph(dtype: torch.dtype) -> None:
    table = PoissonTable(0.02).prepare("cuda", dtype)
    norms = torch.zeros(64, device="cuda", dtype=dtype)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        across, along = table(norms)
    values = torch.linspace(0, 9, 64, dtype=dtype)
    norms.copy_(values)
    graph.replay()
    for captured, expected in zip((across, along), table(values), strict=True):
        torch.testing.assert_close(captured.cpu(), expected, rtol=1e-6 if dtype == torch.float32 else 1e-13, atol=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: poisson_factors(-1.0, 0.1), "clipped_norm_over_noise must be at least 0 and not NaN, got -1.0"),
        (lambda: poisson_factors(math.nan, 0.1), "clipped_norm_over_noise must be at least 0 and not NaN, got nan"),
        (lambda: poisson_factors(1.0, 0.0), r"sample_rate must lie in \[1e-30, 1\], got 0.0"),
        (lambda: PoissonTable(1.5), r"sample_rate must lie in \[1e-30, 1\], got 1.5"),
        (lambda: fixed_size_factor(1.0, -1.0, 0.1), "clip_bound_over_noise must be at least 0"),
    ],
)
def test_messages_name_the_argument_and_its_value(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
