"""K networks in the same operations: every product is that of the layer rules and of dense Jacobians, one by one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from learning import losses
from reconbound.fisher import Private, dense_information
from reconbound.fisher.passes.by_layer import LayerPass
from reconbound.sweep.fleet.stacked import Stack
from reconbound.validate.private import Problem

NETWORKS = 3


def strided() -> nn.Sequential:
    """Two convolutions, stride and padding, pooling at every place: the MNIST network's layout."""
    first = [nn.Conv2d(1, 3, 4, stride=2, padding=2), nn.Tanh(), nn.AvgPool2d(2, stride=1)]
    second = [nn.Conv2d(3, 2, (3, 2), stride=(2, 1), padding=(1, 0)), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3))


def side_by_side() -> nn.Sequential:
    """Padding that keeps the size, pooling side by side, three channels: the CIFAR-10 network's layout."""
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 2, 3, padding=1), nn.Tanh(), nn.AvgPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, 3))


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.exp() - targets[:, None]).square().sum(1) / 5


CASES: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...], Any]] = {
    "strided": (strided, (1, 7, 8), losses),
    "side by side": (side_by_side, (3, 4, 4), losses),
    "dense": (dense, (5,), losses),
    "another loss": (dense, (5,), square),
    "one layer": (lambda: nn.Sequential(nn.Linear(5, 3)), (5,), losses),
}


def opened(name: str, records: int = 4) -> tuple[list[nn.Sequential], Stack, Tensor, Tensor, Any]:
    torch.manual_seed(0)
    make, shape, loss_fn = CASES[name]
    models = [make().double() for _ in range(NETWORKS)]
    params = torch.stack([torch.cat([p.detach().flatten() for p in m.parameters()]) for m in models])
    x, y = torch.rand(records, *shape, dtype=torch.float64), torch.randint(0, 3, (records,))
    return models, Stack(models[0], params), x, y, loss_fn


@pytest.mark.parametrize("name", CASES)
def test_products_equal_those_of_the_layer_rules(name: str) -> None:
    models, stack, x, y, loss_fn = opened(name)
    work = stack.open(x, y, loss_fn, measured=True)
    norms, own, weights = work.norms(), work.own(), torch.rand(NETWORKS, len(x), dtype=torch.float64)
    v = torch.randn(NETWORKS * len(x), x[0].numel(), dtype=torch.float64)
    sums, moved = torch.empty_like(stack.params), work.moved(v)
    work.weighted_sum(weights, sums)
    assert work.slope is not None
    for k, model in enumerate(models):
        plain = LayerPass(Problem(model, loss_fn, Private()), x, x, y, check=False, sloped=True)
        rows = slice(k * len(x), (k + 1) * len(x))
        norm, pulled = plain.own(moving=True)
        total = torch.cat([s.flatten() for s in plain.weighted_sum(weights[k]).values()])
        pairs = {
            "norms": (norms[k], norm),
            "Jᵀg": (own[rows], pulled.flatten(1)),
            "slope": (work.slope[rows], plain.slope.flatten(1)),
            "sum": (sums[k], total),
            "Jv": (moved[k], plain.moved(v[rows].reshape(x.shape))),
        }
        for what, (ours, theirs) in pairs.items():
            assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-12 * float(theirs.abs().max())), (what, k)


@pytest.mark.parametrize("name", CASES)
def test_products_equal_those_of_dense_jacobians(name: str) -> None:
    """With the hard clip far away the dense Jacobian is J itself: Jᵀg and ‖Jv‖ from the matrix."""
    models, stack, x, y, loss_fn = opened(name, records=2)
    work = stack.open(x, y, loss_fn, measured=True)
    v = torch.randn(NETWORKS * 2, x[0].numel(), dtype=torch.float64)
    own, moved = work.own(), work.moved(v)
    for k, model in enumerate(models):
        full = dense_information(model, loss_fn, x, y, max_grad_norm=1e9, noise_multiplier=1, clip="hard")
        for b in range(2):
            i = 2 * k + b
            assert torch.allclose(own[i], full.jacobian[b].T @ full.gradient[b], rtol=1e-8, atol=1e-12)
            assert torch.allclose(moved[k, b], (full.jacobian[b] @ v[i]).square().sum(), rtol=1e-8)


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(5, 3),
        nn.Sequential(nn.Linear(5, 3), nn.ReLU()),
        nn.Sequential(nn.Linear(5, 3, bias=False)),
        nn.Sequential(nn.Conv2d(2, 2, 3, groups=2)),
        nn.Sequential(nn.Conv2d(1, 2, 3, dilation=2)),
        nn.Sequential(nn.AvgPool2d(2, padding=1)),
    ],
)
def test_other_modules_are_refused(model: nn.Module) -> None:
    params = torch.cat([torch.zeros(0), *(p.detach().flatten() for p in model.parameters())])[None]
    with pytest.raises(ValueError, match="a stack"):
        Stack(model, params)


def test_columns_must_be_the_parameters() -> None:
    with pytest.raises(ValueError, match="39 columns"):
        Stack(dense(), torch.zeros(2, 7))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with PyTorch's CUDA builds alone")
def test_triton_kernels_in_the_interpreter() -> None:
    """Patches and their transpose equal F.unfold and F.fold, by Triton's own interpreter, where it is installed."""
    code = """
import torch, torch.nn.functional as F
from reconbound.fisher.passes import convolutions as P
torch.manual_seed(0)
cases = (9, 9, (3, 3), (1, 1), (1, 1)), (12, 10, (8, 8), (2, 2), (2, 2)), (7, 10, (3, 2), (2, 1), (1, 0))
for h, w, k, s, p in cases:
    a = torch.randn(4, 3, h, w)
    found = P.patches(a, k, s, p)
    flat = F.unfold(a.reshape(-1, 1, h, w), k, 1, p, s).reshape(4, 3, k[0] * k[1], -1).transpose(1, 2)
    assert torch.equal(found.reshape(flat.shape), flat)
    back = found.reshape(flat.shape).transpose(1, 2).reshape(12, k[0] * k[1], -1)
    added = P.added_patches(found, (4, 3, h, w), k, s, p)
    assert torch.allclose(added, F.fold(back, (h, w), k, 1, p, s).reshape(added.shape), atol=1e-5)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
