"""Fast equals dense, for every model of the table; the estimators are unbiased and their errors honest."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from cases import CASES, Case
from measuring import measure, sum_clipped
from reconbound.fisher import DenseInformation, Private, covering_method, dense_information, draw_probes
from reconbound.fisher.passes.convolutions import by_shifts
from reconbound.fisher.passes.layers import ConvRule
from reconbound.validate.private import Problem, as_private, trainable
from small_models import RECORDS

NOISE = 0.7
LEVELS = {"far below": 100.0, "near": 1.07, "far above": 0.02}  # C over the median gradient norm
torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")  # PyTorch, of its own copy


def generator(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@cache
def made(case: Case) -> tuple[nn.Module, Any, Any]:
    """The same model for all tests of a case: the search for jumps is made once for each model."""
    return case.make()


@cache
def median_norm(case: Case) -> float:
    model, inputs, targets = made(case)
    kw: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "private": case.private}
    return measure(model, case.loss, inputs, targets, method="generic", **kw).norm.median().item()


def clip_norm(case: Case, level: str) -> float:
    return LEVELS[level] * median_norm(case)


@cache
def dense(case: Case, clip: Any, level: str) -> DenseInformation:
    kw: dict[str, Any] = {"max_grad_norm": clip_norm(case, level), "noise_multiplier": NOISE, "private": case.private}
    return dense_information(made(case)[0], case.loss, *made(case)[1:], clip=clip, **kw)


def fast(case: Case, clip: Any, level: str, **kw: Any) -> Any:
    model, inputs, targets = made(case)
    kw = {"max_grad_norm": clip_norm(case, level), "noise_multiplier": NOISE, "private": case.private} | kw
    return measure(model, case.loss, inputs, targets, clip=clip, **kw)


def probed(ref: DenseInformation, u: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """For one direction u and the dense J̃: J̃ᵀPu and PJ̃(J̃ᵀPu), over the noise."""
    unit = torch.where(ref.norm[:, None] > 0, ref.gradient / ref.norm[:, None].clamp(min=1e-300), 0)
    across = u - unit * (unit @ u)[:, None]
    r = torch.einsum("bpd,bp->bd", ref.jacobian, across) / noise
    moved = torch.einsum("bpd,bd->bp", ref.jacobian, r) / noise
    return r, moved - unit * (unit * moved).sum(1, keepdim=True)


def close(got: Tensor, want: Tensor, scale: Tensor) -> None:
    assert got.shape == want.shape
    scale = scale.reshape(-1, *(1,) * (want.dim() - 1)) if scale.dim() else scale
    assert ((got - want).abs() <= 1e-9 * scale + 1e-300).all(), ((got - want).abs() / scale).max()


def compare(case: Case, clip: Any, level: str, **kw: Any) -> None:
    ref = dense(case, clip, level)
    got = fast(case, clip, level, diagonal=True, generator=generator(), **kw)
    noise = NOISE * clip_norm(case, level)
    (probe,) = draw_probes(trainable(Problem(made(case)[0], case.loss, Private())), 1, generator())
    r, moved = probed(ref, torch.cat([v.flatten() for v in probe.values()]), noise)
    close(got.norm, ref.norm, ref.norm)
    close(got.along, ref.along, ref.trace)
    close(got.across, r.square().sum(1), ref.trace)
    close(got.across_error, 2**0.5 * moved.norm(dim=1), ref.trace)
    close(got.diagonal_across.flatten(1), r.square(), ref.trace)
    unit = ref.gradient / ref.norm[:, None]
    close(got.diagonal_along.flatten(1), torch.einsum("bpd,bp->bd", ref.jacobian, unit).square() / noise**2, ref.trace)
    assert got.gradient_sum.keys() == ref.gradient_sum.keys()
    for name, total in ref.gradient_sum.items():
        close(got.gradient_sum[name], total, torch.tensor(noise * RECORDS))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
@pytest.mark.slow
def test_fast_equals_dense(case: Case) -> None:
    """Near C some records are clipped and some are not, which is all that the hard clip tells apart."""
    for level, micro_batch in zip(LEVELS, (1, 7, None), strict=True):
        compare(case, "smooth", level, micro_batch=micro_batch)
    compare(case, "hard", "near")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_generic_equals_dense(case: Case) -> None:
    compare(case, "smooth", "near", micro_batch=3)  # as long as some models have positions: the way is chosen once
    compare(case, "smooth", "near", method="generic")
    compare(case, "hard", "near", method="generic", micro_batch=7)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_mixed_equals_dense(case: Case) -> None:
    """Also where the layer rules would do: a record is then a batch of one for the model, and a row for the rules."""
    compare(case, "smooth", "near", method="mixed", micro_batch=3)
    compare(case, "hard", "near", method="mixed")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_rules_cover_what_they_should(case: Case) -> None:
    model, inputs, targets = made(case)
    expected = "auto" if case.layers else "mixed" if case.mixed else "generic"
    assert covering_method(model, case.loss, inputs, targets, as_private(case.private)) == expected
    if case.layers:
        fast(case, "smooth", "near", method="layers")
    else:
        with pytest.raises(ValueError, match="no layer rule covers"):
            fast(case, "smooth", "near", method="layers")


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_clipped_sum(case: Case) -> None:
    model, inputs, targets = made(case)
    want = fast(case, "hard", "near")
    for kw in ({"micro_batch": 3}, {"method": "generic"}, {"method": "mixed"}):
        got = sum_clipped(model, case.loss, inputs, targets, max_grad_norm=clip_norm(case, "near"), clip="hard", **kw)
        assert torch.allclose(got.norm, want.norm, rtol=1e-10)
        assert torch.allclose(got.factor, want.factor, rtol=1e-10)
        for name, total in want.gradient_sum.items():
            close(got.gradient_sum[name], total, torch.tensor(clip_norm(case, "near") * RECORDS))
            assert not got.gradient_sum[name].requires_grad


def test_the_table_is_wide_enough() -> None:
    assert len(CASES) >= 25
    assert len({c.name for c in CASES}) == len(CASES)


@pytest.mark.parametrize("size", [(9, 11), (12, 10), (13, 13)])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((8, 8), 2, (2, 2)), ((4, 2), 2, (0, 1)), ((4, 4), 4, (3, 0)), ((3, 6), 3, (0, 0)), ((2, 2), 2, (1, 1))],
)
def test_transpose_by_shifts(kernel: Any, stride: int, padding: Any, size: Any) -> None:
    """⟨conv(a), δ⟩ = ⟨a, transpose(δ)⟩, also where the last rows and columns meet no kernel."""
    draw = torch.Generator().manual_seed(0)
    rule = ConvRule(kernel, (stride, stride), padding, (1, 1), 1)
    a = torch.randn(3, 2, *size, dtype=torch.float64, generator=draw)
    weight = torch.randn(4, 2, *kernel, dtype=torch.float64, generator=draw)
    output = rule.apply(a, weight)
    delta = torch.randn(output.shape, dtype=torch.float64, generator=draw)
    found = by_shifts(delta, weight, a.shape, stride, padding)
    want = torch.nn.grad.conv2d_input(a.shape, weight, delta, stride, padding)
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(rule.transpose(delta, weight, a.shape), want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rule", "shape"),
    [
        (ConvRule((8, 8), (2, 2), (2, 2), (1, 1), 1), (3, 1, 28, 28)),
        (ConvRule((5, 3), (2, 1), (1, 0), (2, 1), 2), (3, 4, 13, 11)),
        (ConvRule((17,), (3,), (2,), (1,), 1), (2, 3, 40)),
        (ConvRule((3, 3, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1), (2, 2, 5, 6, 7)),
    ],
)
def test_patches_fold_alike_by_offsets_and_by_convolution(rule, shape):
    """The CUDA way of adding patches back, run here on the CPU, equals the other and is the transpose of columns."""
    shape = torch.Size(shape)
    a = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    columns = rule.columns(a)
    v = torch.rand(columns.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    by_convolution = rule._spread_by_convolution(v, shape, rule._places(shape))
    torch.testing.assert_close(by_convolution, rule.from_columns(v, shape), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close((columns * v).sum(), (a * by_convolution).sum(), rtol=1e-12, atol=1e-9)
