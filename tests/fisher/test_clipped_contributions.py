"""No record moves the released sum by more than sensitivity · C, in any precision and where gradients cancel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from measuring import measure, sum_clipped
from reconbound.fisher import sensitivity

C = 1.0
SLACK = 1e-5  # of float32's own rounding: a norm, a factor and their product


def output(outputs: Tensor, targets: Tensor) -> Tensor:
    """Losses that are the outputs themselves, scaled by the targets."""
    return outputs.flatten(1).sum(1) * targets


class Difference(nn.Module):
    """One shared layer on every place; the loss sees only signed sums over the places."""

    def __init__(self, features: int = 16, outputs: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(features, outputs)

    def forward(self, x: Tensor) -> Tensor:
        signs = 1 - 2 * (torch.arange(x.shape[1]) % 2)
        return (self.layer(x) * signs[:, None].to(x)).sum(1)


def near_copies(size: float, gap: float, *, places: int = 2, records: int = 8, features: int = 16) -> Tensor:
    """Records whose places are the same vector of that size but for a relative gap."""
    generator = torch.Generator().manual_seed(0)
    draw: Callable[..., Tensor] = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return size * (draw(records, 1, features) + gap * draw(records, places, features))


def contributions(model: nn.Module, loss_fn: Any, x: Any, y: Tensor, clip: Any, *, measured: bool = False) -> Tensor:
    """The norm of each record's contribution to the released sum, in float64, in units of C."""
    found = []
    for i in range(len(y)):
        rows = {k: v[i : i + 1] for k, v in x.items()} if isinstance(x, dict) else x[i : i + 1]
        if measured:
            sums = measure(
                model, loss_fn, rows, y[i : i + 1], max_grad_norm=C, noise_multiplier=1.0, clip=clip
            ).gradient_sum
        else:
            sums = sum_clipped(model, loss_fn, rows, y[i : i + 1], max_grad_norm=C, clip=clip).gradient_sum
        found.append(torch.cat([s.double().flatten() for s in sums.values()]).norm())
    return torch.stack(found) / C


@pytest.mark.parametrize("measured", [False, True], ids=["sum", "information"])
@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("size", [1.0, 100.0, 1000.0])
@pytest.mark.parametrize("gap", [1e-1, 1e-3, 1e-4, 1e-6])
def test_places_that_nearly_cancel_are_clipped(size: float, gap: float, clip: Any, measured: bool) -> None:
    """Fails for Gram products in float32: their norms were 0, and 156 C was released (gap 1e-4, size 1,000)."""
    torch.manual_seed(0)
    x = near_copies(size, gap).float()
    found = contributions(Difference(), output, x, torch.full((len(x),), 100.0), clip, measured=measured)
    assert found.max() <= sensitivity(clip) * (1 + SLACK)
    assert found.min() > 0.9 or gap < 1e-4 or size * gap < 1e-2, "clipped far more than needed"


@pytest.mark.parametrize("clip", ["smooth", "hard"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("places", [1, 2, 4, 9])
def test_every_precision_is_clipped(dtype: torch.dtype, places: int, clip: Any) -> None:
    """Fails for bf16 norms and factors: four tokens released 1.10 C."""
    torch.manual_seed(0)
    model = Difference(64, 48).to(dtype)
    for seed in range(20):
        torch.manual_seed(seed)
        x = (near_copies(1.0, 0.1, places=places, features=64, records=4) + 0.1 * torch.randn(4, 1, 64)).to(dtype)
        y = torch.full((4,), 3.0, dtype=dtype)
        assert contributions(model, output, x, y, clip).max() <= sensitivity(clip) * (1 + SLACK)


class Tied(nn.Module):
    """LayerNorm's weight is the bias of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = nn.LayerNorm(6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.norm.weight = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


class ScaleAndShift(nn.Module):
    """One vector is GroupNorm's weight, its bias, and the bias of a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(1, 4, 2), nn.GroupNorm(2, 4), nn.Linear(16, 3)
        self.norm.weight = self.norm.bias = self.conv.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.conv(x[:, None]))).flatten(1))


class WeightAsBias(nn.Module):
    """The only row of a linear layer is the bias of another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.row = nn.Linear(5, 6, bias=False), nn.Linear(6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.row(torch.tanh(F.linear(x, self.first.weight, self.row.weight[0]))).expand(-1, 3)


class SharedBias(nn.Module):
    """Two layers share a bias; a third uses the first's weight again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.last(F.linear(x, self.first.weight))


def models() -> list[nn.Module]:
    return [Tied(), ScaleAndShift(), WeightAsBias(), SharedBias()]


@pytest.mark.parametrize("model", models(), ids=lambda m: type(m).__name__)
def test_tied_parameters_have_the_whole_gradient(model: nn.Module) -> None:
    """A parameter that was a weight here and a bias there lost one of its shares: sums were 65 to 94 % off."""
    model = model.double()
    for p in model.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(p.numel()))
    x, y = torch.randn(7, 5, dtype=torch.float64), torch.arange(7) % 3
    loss: Any = lambda out, target: F.cross_entropy(out, target, reduction="none")  # noqa: E731
    found = sum_clipped(model, loss, x, y, max_grad_norm=1e9, clip="hard")
    plain = torch.autograd.grad(loss(model(x), y).sum(), list(model.parameters()))
    for own, (name, _) in zip(plain, model.named_parameters(), strict=True):
        torch.testing.assert_close(found.gradient_sum[name], own)
    assert contributions(model, loss, x, y, "hard").max() <= 1 + 1e-9


def test_repeated_tokens_that_cancel_are_clipped() -> None:
    torch.manual_seed(0)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 12)

        def forward(self, tokens: Tensor, weight: Tensor) -> Tensor:
            return (self.table(tokens) * weight[..., None]).sum(1)

    tokens = torch.ones(6, 8, dtype=torch.int64)
    signs = 1 - 2 * (torch.arange(8) % 2)
    weight = 1000 * (signs + 1e-4 * torch.randn(6, 8))
    loss: Any = lambda out, target: (out * target[:, None]).sum(1)  # noqa: E731
    found = contributions(Bag(), loss, {"tokens": tokens, "weight": weight}, torch.full((6,), 1000.0), "hard")
    assert 0.6 < found.min() <= found.max() <= 1 + SLACK


def test_tiny_and_huge_factors_of_a_gradient_are_clipped() -> None:
    """δ of 1e-24 beside inputs of 1e18: in float32 one square is 0, and so was the norm, which is 1e-6 > C."""
    model = nn.Linear(16, 9)
    x = torch.full((2, 16), 1e18)
    loss: Any = lambda out, target: out.sum(1) * target  # noqa: E731
    with torch.no_grad():
        model.weight.zero_()
    for scale in (1e-16, 1e-20, 1e-24, 1e-30, 1e-36):
        y = torch.full((2,), scale)
        one = sum_clipped(model, loss, x[:1], y[:1], max_grad_norm=1e-8, clip="hard")
        size = torch.stack([s.double().norm() for s in one.gradient_sum.values()]).norm()
        assert size <= 1e-8 * (1 + SLACK)
        assert size > 0.99e-8 or scale < 1e-19
    one = sum_clipped(model, loss, x[:1] * 1e12, torch.full((1,), 1e-25), max_grad_norm=1.0, clip="hard")
    assert 0.99 < torch.stack([s.double().norm() for s in one.gradient_sum.values()]).norm() <= 1 + SLACK
    many = torch.full((1, 2**16), 1e30)  # so many numbers are squared in float32, where they are infinite
    with pytest.raises(ValueError, match="record 0 of the batch has gradient norm inf"):
        sum_clipped(nn.Linear(2**16, 8), loss, many, torch.full((1,), 1e-25), max_grad_norm=1.0)


def test_the_sum_of_a_half_precision_model_is_not_rounded() -> None:
    """A sum in bf16 would move by 2⁻⁸ of its whole size when one record is added."""
    torch.manual_seed(0)
    model = nn.Linear(8, 3, bias=False).bfloat16()
    x = torch.randn(600, 8).bfloat16()
    y = torch.arange(600) % 3
    loss: Any = lambda out, target: F.cross_entropy(out, target, reduction="none")  # noqa: E731
    both = [sum_clipped(model, loss, x[:n], y[:n], max_grad_norm=0.01, clip="hard") for n in (599, 600)]
    moved = both[1].gradient_sum["weight"].double() - both[0].gradient_sum["weight"].double()
    assert moved.norm() <= 0.01 * (1 + 1e-3)
    assert both[0].gradient_sum["weight"].dtype == torch.float32


def test_cancelling_record_matches_float64_model() -> None:
    """The ledger's clipped norm and trace were 0 and 100 times too small where the norm was lost."""
    torch.manual_seed(0)
    model, x = Difference(), near_copies(100.0, 1e-4).float().double()
    y = torch.full((len(x),), 100.0)
    setting: dict[str, Any] = {"max_grad_norm": C, "noise_multiplier": 1.0, "clip": "smooth", "probe": "inputs"}
    loss: Any = lambda out, target: (out * target[:, None]).square().sum(1) / 2  # noqa: E731
    found = [
        measure(
            model.to(dtype),
            loss,
            x.to(dtype),
            y.to(dtype),
            directions=list(torch.randn(16, 2, 16, generator=torch.Generator().manual_seed(1)).to(dtype)),
            **setting,
        )
        for dtype in (torch.float64, torch.float32)
    ]
    torch.testing.assert_close(found[1].clipped_norm.double(), found[0].clipped_norm, rtol=1e-2, atol=0)
    torch.testing.assert_close(found[1].trace.double(), found[0].trace, rtol=0.05, atol=0)


@pytest.mark.parametrize("measured", [False, True], ids=["sum", "information"])
def test_a_gradient_that_is_not_finite_is_refused_by_name(measured: bool) -> None:
    """One record whose gradient overflows made the whole sum NaN, which shows that it took part."""
    x, y = torch.ones(3, 4), torch.tensor([1.0, 1e38, 1.0])
    loss: Any = lambda out, target: (out * target[:, None]).sum(1) * target  # noqa: E731
    work: Any = partial(measure, noise_multiplier=1.0) if measured else sum_clipped
    with pytest.raises(ValueError, match=r"record 1 of the batch has gradient norm (inf|nan)"):
        work(nn.Linear(4, 2), loss, x, y, max_grad_norm=C)
