"""Convolutions of single records, in groups and in parts, against products of patches in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound import fisher
from reconbound.auditing.models import mnist_cnn
from reconbound.fisher.passes import convolutions, products
from reconbound.fisher.passes.layers import ConvRule

RECORDS = 5
ROUNDING = 2.0**-20  # 16 units in the last place, of the largest number

#: channels, outputs, kernel, stride, padding, dilation. The last two do not go in groups.
SHAPES = [
    (16, 32, (3, 3), (1, 1), (1, 1), (1, 1)),
    (16, 32, (4, 4), (2, 2), (0, 0), (1, 1)),
    (32, 16, (3, 2), (2, 1), (1, 0), (1, 2)),
    (48, 16, (1, 1), (1, 1), (0, 0), (1, 1)),
    (3, 16, (4, 4), (2, 2), (1, 1), (1, 1)),
    (16, 12, (3, 3), (1, 1), (1, 1), (1, 1)),
]


def drawn(shape) -> tuple[ConvRule, list[products.Pair], int]:
    """Returns a rule, two pairs (a, δ) in float32, and the number of outputs."""
    channels, outputs, *how = shape
    rule = ConvRule(*how, groups=1)
    torch.manual_seed(0)
    pairs = []
    for _ in range(2):
        a = torch.randn(RECORDS, channels, 11, 10)
        pairs.append((a, torch.randn_like(rule.apply(a, torch.randn(outputs, channels, *rule.kernel)))))
    return rule, pairs, outputs


def by_patches(rule: ConvRule, pairs: list[products.Pair]) -> Tensor:
    return sum(rule.rows(delta.double()) @ rule.columns(a.double()).transpose(2, 3) for a, delta in pairs)


def assert_close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() <= ROUNDING * wanted.abs().max()


@pytest.fixture(params=[1, 2**20], ids=["one record at a time", "all at once"])
def part(request, monkeypatch) -> int:
    monkeypatch.setattr(convolutions, "_PART", request.param)
    return request.param


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_and_their_squares_are_those_of_patches_in_float64(shape, count, part):
    rule, pairs, _ = drawn(shape)
    wanted = by_patches(rule, pairs[:count])
    assert_close(products.gradients_in_parts(rule, pairs[:count]), wanted)
    squares = products.gradients_in_parts(rule, pairs[:count], squared=True)
    assert squares.dtype == torch.float64
    torch.testing.assert_close(squares, wanted.flatten(1).square().sum(1), rtol=ROUNDING, atol=0)
    grouped = products.gradients_in_parts(rule, pairs[:count], grouped=True)
    assert (grouped is not None) == (shape in SHAPES[:4])


@pytest.mark.parametrize("shape", SHAPES)
def test_weights_of_single_records_are_applied_and_transposed_as_in_float64(shape, part):
    rule, ((a, delta), _), outputs = drawn(shape)
    weights = torch.randn(RECORDS, outputs, a.shape[1], *rule.kernel)
    each = [rule.apply(a[i : i + 1].double(), weights[i].double()) for i in range(RECORDS)]
    assert_close(products.apply_each(rule, a, weights, delta, []), torch.cat(each))
    args = (rule.stride, rule.padding, rule.dilation)
    back = [
        torch.nn.grad.conv2d_input(a[:1].shape, weights[i].double(), delta[i : i + 1].double(), *args)
        for i in range(RECORDS)
    ]
    assert_close(products.transpose_each(rule, delta, weights, a), torch.cat(back))


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_record_gets_does_not_depend_on_the_others_beyond_rounding(shape):
    rule, pairs, _ = drawn(shape)
    for rows in (slice(0, 1), slice(3, 5)):
        some = [(a[rows], delta[rows]) for a, delta in pairs]
        assert_close(products.gradients_in_parts(rule, some), products.gradients_in_parts(rule, pairs)[rows].double())


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize(("stride", "kernel"), [(2, (8, 8)), (2, (2, 4)), (4, (4, 8))])
@pytest.mark.parametrize("size", [(28, 28), (15, 22), (17, 20)])
def test_transposes_by_shifts_and_blocks_are_those_of_pytorch(channels, stride, kernel, size):
    torch.manual_seed(0)
    weight = torch.randn(16, channels, *kernel, dtype=torch.float64)
    images = torch.randn(3, channels, *size, dtype=torch.float64)
    for padding in ((0, 0), (2, 1)):
        delta = torch.randn_like(F.conv2d(images, weight, None, stride, padding))
        wanted = torch.nn.grad.conv2d_input(images.shape, weight, delta, stride, padding)
        found = convolutions.by_shifts(delta, weight, images.shape, stride, padding)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_step_in_float32_is_that_in_float64(part):
    torch.manual_seed(0)
    model, x, y = mnist_cnn(), torch.rand(RECORDS, 1, 28, 28), torch.arange(RECORDS)
    direction = torch.randn(1, 28, 28)
    found = {}
    for dtype in (torch.float32, torch.float64):
        probes = fisher.ProbeOptions(space="inputs", error="bound", directions=[direction.to(dtype)])
        how = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "options": fisher.StepOptions(probes=probes)}
        loss = nn.CrossEntropyLoss(reduction="none")
        found[dtype] = fisher.step_information(model.to(dtype), loss, x.to(dtype), y, **how)
    one, two = found.values()
    for name in ("norm", "along", "across"):
        torch.testing.assert_close(getattr(one, name).double(), getattr(two, name), rtol=1e-4, atol=0)
    for name, total in two.gradient_sum.items():
        assert (one.gradient_sum[name].double() - total).abs().max() <= 1e-5 * two.clipped_norm.sum()
