"""The derivative of a backward pass in its seeds: right, with less memory, and nothing is left behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reconbound.fisher import ProbeOptions, StepOptions, step_information
from reconbound.fisher.passes import backward
from reconbound.fisher.passes.backward import gradient_by_seeds
from reconbound.fisher.reference import load_forward_mode

PLACES, WIDTH = 40, 12


class Attending(nn.Module):
    """Attention over places, with what a transformer has around it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            x = x + self.down(F.gelu(self.up(x)))
        out: Tensor = self.head(torch.tanh(x).mean(1))
        return out


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors that operations made and that are still held."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata not in self.held:
                storage = leaf.untyped_storage()
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
        self.peak = max(self.peak, sum(self.held.values()))
        return found


@contextmanager
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def measure(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    losses = lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    probes = ProbeOptions(space="inputs", directions=[torch.ones_like(x[0])], error="bound")
    how = StepOptions(probes=probes, method="layers", checked=True)
    return step_information(model, losses, x, y, max_grad_norm=1.0, noise_multiplier=1.0, options=how)


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    return Attending().double(), torch.randn(3, PLACES, WIDTH, dtype=torch.float64), torch.tensor([0, 2, 1])


def test_information_is_the_same_as_with_everything_kept_and_takes_less_memory(monkeypatch) -> None:
    model, x, y = problem()
    measure(model, x, y)
    with no_collector(), Live() as less:
        found = measure(model, x, y)
    monkeypatch.setattr(backward, "_kept_values", lambda leaves: nullcontext())
    with no_collector(), Live() as more:
        expected = measure(model, x, y)
    for name in ("norm", "along", "across", "trace"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    assert less.peak < 0.87 * more.peak, (less.peak, more.peak)


def test_nothing_is_left_when_a_step_has_been_measured() -> None:
    """A cycle through autograd's own memory would never be freed, and no collector sees it."""
    model, x, y = problem()
    measure(model, x, y)
    with no_collector(), Live() as live:
        found = measure(model, x, y)
        del found
        left = sum(live.held.values())
    assert left < 0.02 * live.peak, (left, live.peak)


def test_derivative_in_the_seeds_is_the_push_forward() -> None:
    load_forward_mode()
    torch.manual_seed(1)
    z = torch.randn(4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 5, dtype=torch.float64)
    functions = [lambda z: torch.tanh(z @ weight), lambda z: torch.softmax(z, 1).log() * z.exp()]
    outputs = [function(z) for function in functions]
    seeds = [torch.randn_like(out) for out in outputs]
    own, (expected,) = list(seeds), torch.autograd.grad(outputs, z, seeds, retain_graph=True)
    pulled, leaves = gradient_by_seeds(z, outputs, own)
    assert pulled is not None
    assert not own  # the seeds are freed
    torch.testing.assert_close(pulled, expected)
    v = torch.randn_like(z)
    for _ in range(2):
        dots = torch.autograd.grad(pulled, leaves, v, retain_graph=True)
        for dot, function in zip(dots, functions, strict=True):
            _, moved = torch.func.jvp(function, (z.detach(),), (v,))
            torch.testing.assert_close(dot, moved)


def test_a_dropped_value_is_never_taken_for_a_number() -> None:
    """Derivatives in what does not depend on the seeds are not to be asked for: they are NaN, not wrong."""
    z = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    pulled, leaves = gradient_by_seeds(z, [z.square() * z], [torch.ones(3, 4, dtype=torch.float64)])
    assert pulled is not None
    (right,) = torch.autograd.grad(pulled.sum(), leaves, retain_graph=True)
    torch.testing.assert_close(right, 3 * z.detach().square())
    (wrong,) = torch.autograd.grad(pulled.sum(), z)
    assert bool(wrong.isnan().any())


@pytest.mark.parametrize("count", [0, 1])
def test_no_outputs_have_no_gradient(count: int) -> None:
    z = torch.randn(2, 2, requires_grad=True)
    constant = [torch.randn(2, requires_grad=True)][:count]
    pulled, leaves = gradient_by_seeds(z, constant, [torch.ones(2)][:count])
    assert pulled is None
    assert len(leaves) == count
