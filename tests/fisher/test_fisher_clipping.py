"""The clips: against mpmath and autograd, from zero to far beyond the clip norm."""

from __future__ import annotations

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reconbound.fisher import clipping, sensitivity


def exact_smooth(n: float, c: float) -> tuple[float, float, float]:
    """Factor, slope and radial derivative of the GELU clip with 300 digits."""
    with mpmath.workdps(300):
        x = mpmath.mpf(n) / mpmath.mpf(c) - 1
        factor = 1 / (x * mpmath.ncdf(x) + 1)
        slope = -(factor**2) * (mpmath.ncdf(x) + x * mpmath.npdf(x)) / mpmath.mpf(c)
        return float(factor), float(slope), float(factor + slope * mpmath.mpf(n))


@pytest.mark.parametrize("n", [0.0, 1e-12, 0.3, 1.0, 1.7, 2.5, 4.0, 9.0, 30.0])
@pytest.mark.parametrize("norm", [0.1, 1.0, 4.0])
def test_smooth_clip_against_many_digits(n: float, norm: float) -> None:
    factor, slope, radial = exact_smooth(n * norm, norm)
    got = clipping(torch.tensor(n * norm, dtype=torch.float64), norm, "smooth")
    assert got.factor.item() == pytest.approx(factor, rel=1e-14)
    assert got.slope.item() == pytest.approx(slope, rel=1e-13)
    assert got.radial.item() == pytest.approx(radial, rel=1e-11, abs=1e-290)


@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_clips_stay_finite_and_within_their_sensitivity(clip: str, dtype: torch.dtype) -> None:
    norms = torch.cat([torch.zeros(1), torch.logspace(-30, 30, 4001), torch.linspace(0, 6, 4001)]).to(dtype)
    for c in (1e-3, 1.0, 50.0):
        got = clipping(norms, c, clip)
        assert all(torch.isfinite(v).all() for v in (got.factor, got.slope, got.radial))
        assert (got.factor * norms / c).max() <= sensitivity(clip) + 1e-6


def test_sensitivity_of_the_smooth_clip_is_tight() -> None:
    norms = torch.linspace(1, 4, 300_001, dtype=torch.float64)
    largest = (clipping(norms, 1.0, "smooth").factor * norms).max().item()
    assert 1.1152 < largest < sensitivity("smooth")
    assert largest == pytest.approx(1.11522, abs=5e-6)


def test_smooth_factor_is_not_at_most_one() -> None:
    factor = clipping(torch.linspace(0, 3, 30_001, dtype=torch.float64), 1.0, "smooth").factor
    assert factor[0].item() == pytest.approx(1.1886, abs=5e-5)
    assert factor.max().item() == pytest.approx(1.2048, abs=5e-5)


@given(st.floats(0.01, 20), st.floats(0.1, 10), st.sampled_from(["smooth", "hard"]))
def test_radial_is_the_derivative_of_the_clipped_norm(n: float, c: float, clip: str) -> None:
    x = torch.tensor(n, dtype=torch.float64)
    got = clipping(x, c, clip)  # type: ignore[arg-type]
    assert got.radial.item() == pytest.approx((got.factor + got.slope * x).item(), rel=1e-9, abs=1e-12)


def test_an_unknown_clip_is_refused() -> None:
    with pytest.raises(ValueError, match="'soft'"):
        clipping(torch.ones(1), 1.0, "soft")  # type: ignore[arg-type]


@pytest.mark.parametrize("clip", ["smooth", "hard"])
def test_a_quotient_that_overflows_lets_nothing_through(clip: str) -> None:
    """n/C is infinite in float32: the smooth clip's factor was not a number, and so was the whole batch's sum."""
    norms = torch.tensor([2.48e34, 1.0, 3e38])
    found = clipping(norms, 1.0346e-5, clip)
    assert bool(found.factor.isfinite().all())
    assert bool((found.factor * norms <= 1.0347e-5 * 1.1153).all())
    assert bool(found.radial.isfinite().all())
