"""Second derivatives that are missing, partial or cut off are refused; plain attention replaces the fused one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound.validate import ReconboundWarning, check_batch, math_attention
from validating import Inner, Wrapped, batch, network, per_record, says


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class OnceDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * ctx.saved_tensors[0] ** 2 * grad


def test_in_place_module() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.ReLU(inplace=True), nn.Linear(8, 3))
    with says(
        r"changed in place, at module '2' \(ReLU\): relu_. Use inplace=False, and x = x \+ y in place of x \+= y"
    ):
        check_batch(model, per_record, *batch())


def test_in_place_function() -> None:
    with says(r"changed in place, at module '1' \(Inner\): mul_\."):
        check_batch(network(Inner(lambda h: h.tanh().mul_(2.0))), per_record, *batch())
    with says(r"changed in place, at the model's own forward \(Wrapped\): add_\."):
        check_batch(Wrapped(lambda h: h.exp().add_(1.0)), per_record, *batch())


def test_in_place_change_of_the_input() -> None:
    with says(r"changed in place, at module '0' \(Inner\): its input"):
        check_batch(nn.Sequential(Inner(lambda x: x.mul_(2.0)), nn.Linear(6, 3)), per_record, *batch())


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.tanh()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


@pytest.mark.parametrize(
    "function", [OnceDifferentiable.apply, StraightThrough.apply, lambda h: h * h.detach(), lambda h: h.tanh() * h.data]
)
def test_second_derivatives_that_miss_a_part(function: Callable[[Tensor], Tensor]) -> None:
    """Autograd raises on none of these: it leaves the missing part out, and the record would look safer than it is."""
    with says(r"module '1' \(Inner\) has a gradient that changes with the inputs .*straight-through estimator"):
        check_batch(network(Inner(function)), per_record, *batch())


def test_a_detached_shift_that_changes_nothing_passes() -> None:
    def log_sum_exp(h: Tensor) -> Tensor:
        top = h.amax(1, keepdim=True).detach()
        return h - (h - top).exp().sum(1, keepdim=True).log() - top

    check_batch(network(Inner(log_sum_exp)), per_record, *batch())


class NoSecondDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return FirstDerivative.apply(ctx.saved_tensors[0], grad)


class FirstDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        return 3 * x**2 * grad

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError("no such kernel")


def test_no_second_derivative() -> None:
    with says(r"module '1' \(Inner\) cannot be differentiated twice \(no such kernel\): write it with operations"):
        check_batch(network(Inner(NoSecondDerivative.apply)), per_record, *batch())


@pytest.mark.parametrize("function", [torch.round, torch.sign, torch.floor])
def test_step_functions(function: Callable[[Tensor], Tensor]) -> None:
    with says(rf"module '1' \(Inner\) uses {function.__name__}, which is not differentiable: it is flat between jumps"):
        check_batch(network(Inner(function)), per_record, *batch())


@pytest.mark.parametrize("function", [Tensor.detach, lambda h: F.one_hot(h.argmax(1), 8).float()])
def test_cut_graph(function: Callable[[Tensor], Tensor]) -> None:
    with says(r"module '1' \(Inner\) cuts the graph: the gradient does not depend on the inputs. .*detach\(\)"):
        check_batch(network(Inner(function)), per_record, *batch())


def test_loss_cut_from_the_parameters() -> None:
    with says("^the loss does not depend on any parameter that requires a gradient: look for detach"):
        check_batch(network(), lambda out, y: per_record(out.detach(), y), *batch())


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(len(x), 1, 2, 4)
        return F.scaled_dot_product_attention(h, h, h).flatten(1)


def test_fused_attention_is_switched_to_the_plain_formula() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Attention(), nn.Linear(8, 3))
    with pytest.warns(
        ReconboundWarning, match=r"attention kernel of module '1' has no second derivative: .*math_attention\(\)"
    ):
        check_batch(model, per_record, *batch())
    with math_attention():
        check_batch(model, per_record, *batch())


def test_transformer_layer_under_plain_attention() -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True)
    model = nn.Sequential(nn.Linear(6, 8), nn.Unflatten(1, (2, 4)), layer, nn.Flatten(), nn.Linear(8, 3))
    with pytest.warns(ReconboundWarning, match="attention kernel of module '2.self_attn'"):
        check_batch(model, per_record, *batch())
    with math_attention():
        check_batch(model, per_record, *batch())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # from within torch.func.jvp
def test_math_attention_equals_fused_kernel() -> None:
    q, k, v = torch.randn(3, 2, 5, 4, dtype=torch.float64, requires_grad=True).unsqueeze(2).unbind(0)
    fused = F.scaled_dot_product_attention(q, k, v)
    with math_attention():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v), fused)
        _, tangent = torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, k, v), (q,), (torch.ones_like(q),))
    assert tangent.shape == q.shape


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.detach().sum(0)
        return x


def test_buffers_that_keep_data_warn() -> None:
    model = network(Counting())
    with pytest.warns(ReconboundWarning, match=r"changes the buffers \['1.seen'\]: .*released without noise"):
        check_batch(model, per_record, *batch())
    assert not model[1].seen.any()
