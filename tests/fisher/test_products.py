"""Gradients of convolutions that are formed a few records at a time are those of the whole batch and of autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from measuring import sum_clipped
from reconbound.fisher.passes import convolutions, products
from reconbound.fisher.passes.layers import ConvRule, LinearRule

RULE = ConvRule((3, 3), (1, 1), (1, 1), (1, 1), 1)


def record_gradients_by_autograd(layer: nn.Conv2d, a: Tensor, delta: Tensor) -> Tensor:
    found = [torch.autograd.grad((layer(a[i : i + 1]) * delta[i]).sum(), layer.weight)[0] for i in range(len(a))]
    return torch.stack(found)


@pytest.mark.parametrize("records", [7, 8, 9], ids=["a short last part", "whole parts", "one record more"])
@pytest.mark.parametrize(("groups", "stride"), [(1, 1), (2, 1), (1, 2)])
def test_gradients_in_parts_equal_autograd(monkeypatch, records: int, groups: int, stride: int) -> None:
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, 3, stride=stride, padding=1, groups=groups).double()
    a = torch.randn(records, 4, 10, 10, dtype=torch.float64)
    delta = torch.randn_like(layer(a))
    rule = ConvRule((3, 3), (stride, stride), (1, 1), (1, 1), groups)
    monkeypatch.setattr(convolutions, "_PART", 4 * rule.columns(a[:1]).numel())
    found = products.gradients_in_parts(rule, [(a, delta)])
    assert found is not None
    exact = record_gradients_by_autograd(layer, a, delta)
    torch.testing.assert_close(found.reshape(exact.shape), exact, rtol=1e-12, atol=1e-12)


def test_sums_with_and_without_parts_agree(monkeypatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.Tanh(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 3))
    x, y = torch.randn(9, 2, 8, 8), torch.arange(9) % 3
    loss = nn.CrossEntropyLoss(reduction="none")
    whole = sum_clipped(model, loss, x, y, max_grad_norm=0.5, clip="smooth")
    calls = []
    in_parts = products.gradients_in_parts
    monkeypatch.setattr(convolutions, "_PART", 1500)
    monkeypatch.setattr(products, "gradients_in_parts", lambda *a, **b: calls.append(in_parts(*a, **b)) or calls[-1])
    parts = sum_clipped(model, loss, x, y, max_grad_norm=0.5, clip="smooth")
    assert sum(found is not None for found in calls) >= 2
    torch.testing.assert_close(parts.norm, whole.norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(parts.gradient_sum, whole.gradient_sum, rtol=1e-5, atol=1e-6)


def test_parts_are_not_used_where_nothing_is_gained() -> None:
    a, delta = torch.randn(5, 2, 6, 6), torch.randn(5, 3, 6, 6)
    assert products.gradients_in_parts(RULE, [(a, delta)]) is not None
    assert products.gradients_in_parts(RULE, [(a[:0], delta[:0])]) is None
    assert products.gradients_in_parts(RULE, [(a, delta.double())]) is None
    assert products.gradients_in_parts(LinearRule(), [(torch.randn(5, 9), torch.randn(5, 4))]) is None
    wide = torch.randn(5, 64, 1, 1), torch.randn(5, 64, 1, 1)  # Gram matrices of one place are cheaper
    assert products.gradients_in_parts(ConvRule((1, 1), (1, 1), (0, 0), (1, 1), 1), [wide]) is None
