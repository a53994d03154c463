"""Probes in the private part: the same expectation as those in parameter space, with signs along chosen directions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring import measure
from reconbound.fisher import StepInformation, dense_information
from reconbound.fisher.passes.by_layer import LayerPass
from reconbound.fisher.passes.convolutions import average, convolve, pool, poolable, unpool
from reconbound.fisher.passes.layers import ConvRule
from reconbound.fisher.probes import Basis
from reconbound.validate.private import Private, Problem
from small_models import RECORDS, Wrap, classes, cross_entropy, normal

SEEDS = 400
STEP: dict[str, Any] = {"max_grad_norm": 0.8, "noise_multiplier": 0.7}
torch.set_num_threads(1)


def small() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()
    return model, normal(6), classes(4)


def convolutional() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 4, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(16, 3),
    ).double()  # fmt: skip
    return model, normal(1, 6, 6), classes(3)


def step(model: nn.Module, x: Any, y: Any, **kw: Any) -> StepInformation:
    return measure(model, cross_entropy, x, y, **(STEP | {"probe": "inputs"} | kw))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.slow
@pytest.mark.parametrize(("probes", "deflate"), [(1, 0), (1, 2), (4, 0), (4, 3)])
def test_unbiased_with_honest_errors(probes: int, deflate: int) -> None:
    model, x, y = small()
    exact = dense_information(model, cross_entropy, x, y, **STEP)
    kw: dict[str, Any] = {"probes": probes, "deflate": deflate, "checked": True}
    runs = [step(model, x, y, generator=generator(s), **kw) for s in range(SEEDS)]
    assert torch.allclose(runs[0].along, exact.along, rtol=1e-10)
    for name, want in (("across", exact.across), ("trace", exact.trace)):
        got = torch.stack([getattr(r, name) for r in runs])
        assert ((got.mean(0) - want).abs() <= 3.3 * got.std(0) / SEEDS**0.5).all(), name
    across = torch.stack([r.across for r in runs])
    reported = torch.stack([r.across_error for r in runs]).square().mean(0).sqrt()
    if probes > 1:
        assert ((reported / across.std(0) - 1).abs() < 0.15).all()
    else:
        assert (reported > across.std(0)).all()  # the bound


@pytest.mark.slow
def test_variance_matches_theory() -> None:
    """2 (‖M‖² − Σ (qᵀMq)²), by the spread of many probes; with signs it is less than without."""
    model, x, y = small()
    unclipped = {"max_grad_norm": 1e9, "noise_multiplier": 1e-9, "clip": "hard"}
    exact = dense_information(model, cross_entropy, x, y, **unclipped)
    h = torch.einsum("bpd,bp->bd", exact.jacobian, exact.gradient / exact.norm[:, None])
    m = exact.matrix - h[:, :, None] * h[:, None]
    z = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(z), y).sum(), z)
    q = Basis(h, slope).q
    assert q is not None
    along = torch.einsum("jbd,bde,jbe->jb", q, m, q)
    plain = 2 * m.square().sum((1, 2))
    signed = plain - 2 * along.square().sum(0)
    for deflate, want in ((0, plain), (2, signed)):
        got = step(model, x, y, probes=3000, deflate=deflate, generator=generator(0), **unclipped)
        assert (got.across_error * 3000**0.5 / want.sqrt()).tolist() == pytest.approx([1] * RECORDS, rel=0.1)
    assert (signed < plain).all()


@pytest.mark.parametrize("deflate", [0, 1, 2, 3])
@pytest.mark.parametrize("method", ["layers", "mixed", "generic"])
@pytest.mark.parametrize("case", [small, convolutional])
def test_given_directions_agree_with_dense_jacobians(case: Any, method: Any, deflate: int) -> None:
    """vᵀJᵀPJv from the dense Jacobian, for the v that the basis makes of ω."""
    model, x, y = case()
    exact = dense_information(model, cross_entropy, x, y, max_grad_norm=1e9, noise_multiplier=1e-9, clip="hard")
    omega = torch.randn(x.shape[1:], generator=generator(0), dtype=torch.float64)
    unclipped = {"max_grad_norm": 1e9, "noise_multiplier": 1e-9, "clip": "hard"}
    got = step(model, x, y, directions=[omega], deflate=deflate, method=method, **unclipped)
    jacobian, unit = exact.jacobian, exact.gradient / exact.norm[:, None]
    h = torch.einsum("bpd,bp->bd", jacobian, unit)
    z = x.clone().requires_grad_()
    outputs = model(z)
    (slope,) = torch.autograd.grad(cross_entropy(outputs, y).sum(), z, retain_graph=True)
    centred = outputs - outputs.mean(1, keepdim=True)
    (third,) = torch.autograd.grad(centred.square().sum() / 2, z)
    directions = [h, slope.flatten(1), third.flatten(1) if method != "generic" else None][:deflate]
    v = Basis(*directions, *[None] * (3 - len(directions))).with_signs(omega, RECORDS).flatten(1)  # type: ignore[arg-type]
    moved = torch.einsum("bpd,bd->bp", jacobian, v)
    want = moved.square().sum(1) - (h * v).sum(1).square()
    assert torch.allclose(got.across, want, rtol=1e-8)


def test_all_coordinates_give_the_exact_value() -> None:
    """Without signs, √d e_j for every feature: their mean is the trace itself."""
    model, x, y = small()
    got = step(model, x, y, directions=list(torch.eye(6, dtype=torch.float64) * 6**0.5), deflate=0)
    assert torch.allclose(got.across, dense_information(model, cross_entropy, x, y, **STEP).across, rtol=1e-10)


@pytest.mark.parametrize("deflate", [0, 2, 3])
def test_micro_batches_do_not_matter(deflate: int) -> None:
    model, x, y = convolutional()
    kw: dict[str, Any] = {"probes": 2, "deflate": deflate}
    whole = step(model, x, y, generator=generator(3), **kw)
    for size in (1, 7):
        parts = step(model, x, y, generator=generator(3), micro_batch=size, **kw)
        assert torch.allclose(parts.across, whole.across, rtol=1e-10)
        assert torch.allclose(parts.across_error, whole.across_error, rtol=1e-8)


def test_only_chosen_features() -> None:
    model, x, y = small()
    chosen = torch.tensor([0, 2, 5])
    exact = dense_information(model, cross_entropy, x, y, private=chosen, **STEP)
    kw: dict[str, Any] = {"private": chosen, "checked": True}
    got = torch.stack([step(model, x, y, generator=generator(s), **kw).across for s in range(SEEDS)])
    assert ((got.mean(0) - exact.across).abs() <= 3.3 * got.std(0) / SEEDS**0.5).all()


def test_outputs_that_are_no_tensor_fall_back() -> None:
    model = Wrap(lambda m, x: (m.head(x), x), head=nn.Linear(3, 4)).double()
    x, y = normal(3), classes(4)
    loss = lambda o, t: cross_entropy(o[0], t)  # noqa: E731
    given = {"directions": [torch.randn(3, dtype=torch.float64)], "probe": "inputs", **STEP}
    two, three = (measure(model, loss, x, y, deflate=n, **given) for n in (2, 3))
    assert torch.equal(two.across, three.across)


def test_a_zero_gradient_and_a_record_without_slope() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = normal(3)
    loss = lambda out, target: (out[:, 0] - target).square() / 2  # noqa: E731
    y = torch.zeros(RECORDS).double()
    exact = dense_information(model, loss, x, y, **STEP)
    got = measure(model, loss, x, y, probe="inputs", deflate=3, error="bound", **STEP)
    assert torch.isfinite(got.across).all()
    assert torch.allclose(got.across, exact.across, atol=1e-12)


def test_the_basis_is_orthonormal_or_zero() -> None:
    torch.manual_seed(0)
    a, b, c = torch.randn(3, 6, 10, dtype=torch.float64)
    b[0], b[1], a[2], c[3] = a[0], -a[1], 0, a[3] + b[3]
    a[4] = b[4] = 0
    q = Basis(a, b, c).q
    assert q is not None
    gram = torch.einsum("ibd,jbd->bij", q, q)
    off = gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-12
    sizes = gram.diagonal(dim1=1, dim2=2)
    assert (((sizes - 1).abs() < 1e-12) | (sizes == 0)).all()
    assert sizes.sum(1).round().tolist() == [2, 2, 2, 2, 1, 3]


def test_auto_takes_the_inputs_unless_something_needs_the_weights() -> None:
    model, x, y = small()

    def run(**kw: Any) -> Tensor:
        return measure(model, cross_entropy, x, y, generator=generator(5), **(STEP | kw)).across

    assert torch.equal(run(error="bound"), run(error="bound", probe="inputs"))
    assert torch.equal(run(probes=2), run(probes=2, probe="inputs"))
    assert torch.equal(run(), run(probe="weights"))  # an error from one probe
    assert torch.equal(run(error="bound", diagonal=True), run(error="bound", probe="weights"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"diagonal": True}, 'space must be "weights" for diagonal=True'),
        ({"error": "product"}, 'space must be "weights" for error="product"'),
        ({"deflate": 4}, "deflate must be at most 3, got 4"),
        ({"probe": "outputs"}, "space must be one of"),
    ],
)
def test_messages(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        step(*small(), **arguments)


# --- what only a GPU takes, checked on the CPU ----------------------------------------


@pytest.mark.parametrize(("kernel", "padding", "dilation"), [((3, 3), (1, 1), (1, 1)), ((2, 4), (0, 3), (2, 1))])
def test_the_turned_kernel_is_the_transpose(
    kernel: tuple[int, int], padding: tuple[int, int], dilation: tuple[int, int]
) -> None:
    rule = ConvRule(kernel, (1, 1), padding, dilation, 1)
    assert rule.transposes_as_convolution
    a, weight = torch.randn(5, 3, 7, 8).double(), torch.randn(4, 3, *kernel).double()
    delta = torch.randn_like(rule.apply(a, weight))
    assert torch.allclose(rule.reversed_transpose(delta, weight), rule.transpose(delta, weight, a.shape))
    each = torch.randn(5, 1, 4, 3 * kernel[0] * kernel[1]).double()
    turned = rule.reversed_transpose_records(each, delta, a.shape)
    assert torch.allclose(turned, rule.transpose_records(each, delta, a.shape))


def test_a_kernel_that_strides_or_pads_too_far_does_not_turn() -> None:
    assert not ConvRule((3, 3), (2, 1), (1, 1), (1, 1), 1).transposes_as_convolution
    assert not ConvRule((1, 1), (1, 1), (1, 1), (1, 1), 1).transposes_as_convolution
    assert not ConvRule((3, 3), (1, 1), (1, 1), (1, 1), 2).transposes_as_convolution


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2), (1, 1)), ((2, 2), (2, 2)), ((3, 2), (1, 1)), ((2, 3), (2, 3))])
def test_pooling_and_its_transpose(kernel: tuple[int, int], stride: tuple[int, int]) -> None:
    a = torch.randn(2, 3, 6, 6).double().requires_grad_()
    assert poolable(a.shape, kernel, stride)
    want = F.avg_pool2d(a, kernel, stride)
    assert torch.allclose(average(a, kernel, stride), want)
    delta = torch.randn_like(want)
    (back,) = torch.autograd.grad(want, a, delta)
    assert torch.allclose(unpool(delta, kernel, stride, a.shape), back)
    assert torch.autograd.gradcheck(lambda a: pool(a, kernel, stride), a)
    assert torch.autograd.gradgradcheck(lambda a: pool(a, kernel, stride), a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_windows_side_by_side_have_the_bits_of_pytorch(dtype: torch.dtype) -> None:
    a = torch.randn(3, 4, 8, 6).to(dtype).requires_grad_()
    want = F.avg_pool2d(a, 2)
    delta = torch.randn(want.shape).to(dtype)
    assert torch.equal(average(a.detach(), (2, 2), (2, 2)), want)
    assert torch.equal(unpool(delta, (2, 2), (2, 2), a.shape), torch.autograd.grad(want, a, delta)[0])


def test_pools_that_are_left_to_pytorch() -> None:
    assert not poolable(torch.Size((2, 3, 5, 6)), (2, 2), (2, 2))
    assert not poolable(torch.Size((2, 3, 6, 6)), (3, 3), (2, 2))
    assert not poolable(torch.Size((3, 6, 6)), (2, 2), (2, 2))


def test_convolve_differentiates_twice() -> None:
    a, weight = torch.randn(2, 2, 4, 4).double().requires_grad_(), torch.randn(3, 2, 2, 2).double()
    rule = ConvRule((2, 2), (1, 1), (0, 0), (1, 1), 1)
    assert torch.autograd.gradgradcheck(lambda a: convolve(a, weight, rule).tanh(), a)


def test_sums_need_no_products_first() -> None:
    model, x, y = convolutional()
    weights = torch.rand(RECORDS).double()
    want = torch.autograd.grad(cross_entropy(model(x), y) @ weights, list(model.parameters()))
    got = LayerPass(Problem(model, cross_entropy, Private()), x, x, y).weighted_sum(weights)
    for found, exact in zip(got.values(), want, strict=True):
        assert torch.allclose(found, exact)
