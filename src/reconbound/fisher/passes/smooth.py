"""LayerNorm and GELU, cheap to differentiate twice.

PyTorch writes their double backward as up to 60 small operations, and differentiates these one by one for a product
with J. Here it is a formula. With m(·) the mean over the n normalised dimensions, x̂ = r (x − m(x)) and
r = (m((x − m(x))²) + ε)^(−1/2), LayerNorm is the gradient of n/r. So its derivatives are symmetric:

    P(δ)    = r (δ − m(δ) − x̂ m(δ x̂))                                 the backward of LayerNorm
    Q(v, δ) = −r (m(δ x̂) P(v) + m(v x̂) P(δ) + m(v P(δ)) x̂)            the backward of P(δ) in x, given v
    g₂(x)   = φ(x) (2 − x²)                                           the second derivative of GELU

Each function here returns a value that was computed without a graph, with a backward that calls such a function again.
What a gradient in one input needs is computed only where that gradient is asked for. A third derivative in x is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconbound.fisher.passes import curve_kernels

_CUBE = 0.044715  # of the tanh form of GELU
_FAR = 55.0  # from here on g₂ is 0 in every precision, and larger numbers would overflow


class _Value(torch.autograd.Function):
    """A value that was computed before, as a function of inputs; what arrives goes on to all of them."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, *inputs: Tensor) -> Tensor:
        ctx.count = len(inputs)
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, *grads * ctx.count


class _Input(torch.autograd.Function):
    """An input of such a value: what arrives at the value is mapped to the gradient in this input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transpose: Any) -> Tensor:
        ctx.transpose = transpose
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transpose(grads[0]), None


_value: Callable[..., Tensor] = _Value.apply
_input: Callable[..., Tensor] = _Input.apply
Transpose = Callable[[Tensor], Tensor]


def _differentiable(value: Tensor, *inputs: tuple[Tensor, Transpose]) -> Tensor:
    """Returns a value with its derivative.

    Args:
        value: computed without a graph.
        inputs: each input of the value's shape, with the map from a gradient at the value to the one at this input.
    """
    if not torch.is_grad_enabled():
        return value
    nodes = [_input(x, transpose) for x, transpose in inputs if x.requires_grad]
    return _value(value, *nodes) if nodes else value


def _refuse(grad: Tensor) -> Tensor:
    raise NotImplementedError("third derivatives of LayerNorm and GELU in their input are not computed")


def layer_norm(a: Tensor, shape: Any, eps: float) -> Tensor:
    """Computes F.layer_norm without its affine part; half precision in float32, as PyTorch's kernels do inside.

    Args:
        a: the input.
        shape: its last dimensions, which are normalised.
        eps: ε.
    """
    shape = tuple(shape)
    if not a.is_floating_point() or not a.numel():
        return F.layer_norm(a, shape, None, None, eps)
    wide = torch.promote_types(a.dtype, torch.float32)
    if wide == a.dtype:
        return _norm(a, shape, eps)
    dtype = F.layer_norm(a.detach().new_empty(0, *shape), shape).dtype  # autocast may make float32 of it
    return _norm(a.to(wide), shape, eps).to(dtype)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: tuple[int, ...], eps: float) -> Tensor:
        output, mean, r = torch.native_layer_norm(x, shape, None, None, eps)
        ctx.shape = shape
        ctx.save_for_backward(x, mean, r)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, mean, r = ctx.saved_tensors
        return _pulled(grads[0], _Rows(x, mean, r, ctx.shape)), None, None


_norm: Callable[..., Tensor] = _Norm.apply


@dataclass
class _Rows:
    """Rows x that were normalised over the last dimensions, of this shape, with m(x) and r of each."""

    x: Tensor
    mean: Tensor
    r: Tensor
    shape: tuple[int, ...]
    _normalised: tuple[Tensor, Tensor] | None = None

    def normalised(self) -> tuple[Tensor, Tensor]:
        """Returns x̂ and −r/n of each row."""
        if self._normalised is None:
            self._normalised = (self.x - self.mean) * self.r, self.r * (-1 / math.prod(self.shape))
        return self._normalised

    def pull(self, delta: Tensor) -> Tensor:
        """Returns P(δ)."""
        chosen = (True, False, False)
        stats = (self.mean, self.r, None, None, chosen)
        found: Tensor = torch.ops.aten.native_layer_norm_backward(delta, self.x, self.shape, *stats)[0]
        return found

    def mean_product(self, v: Tensor, w: Tensor) -> Tensor:
        """Returns −r m(v w) of each row."""
        dims = tuple(range(-len(self.shape), 0))
        return (v * w).sum(dims, keepdim=True) * self.normalised()[1]


@dataclass
class _Direction:
    """A gradient δ at the output, with P(δ) and −r m(δ x̂), computed once where they are used."""

    delta: Tensor
    rows: _Rows
    _found: tuple[Tensor, Tensor] | None = None

    def terms(self) -> tuple[Tensor, Tensor]:
        if self._found is None:
            along = self.rows.mean_product(self.delta, self.rows.normalised()[0])
            self._found = self.rows.pull(self.delta), along
        return self._found


def _pulled(delta: Tensor, rows: _Rows) -> Tensor:
    """Returns P(δ), to be differentiated in δ and in x."""
    with torch.no_grad():
        value = rows.pull(delta)
    direction = _Direction(delta, rows)
    at_x: Transpose = lambda v: _curved(_Direction(v, rows), direction)  # noqa: E731
    return _differentiable(value, (delta, lambda v: _pulled(v, rows)), (rows.x, at_x))


def _curved(first: _Direction, second: _Direction) -> Tensor:
    """Returns Q(v, δ), to be differentiated in both; ⟨w, Q(v, δ)⟩ is the same in any order of w, v and δ."""
    rows = first.rows
    with torch.no_grad():
        value = _curve(first, second)
    at_first: Transpose = lambda w: _curved(_Direction(w, rows), second)  # noqa: E731
    at_second: Transpose = lambda w: _curved(_Direction(w, rows), first)  # noqa: E731
    return _differentiable(value, (first.delta, at_first), (second.delta, at_second), (rows.x, _refuse))


def _curve(first: _Direction, second: _Direction) -> Tensor:
    """Returns Q(v, δ)."""
    rows, size = first.rows, math.prod(first.rows.shape)
    if curve_kernels.kernels_apply(rows.x, size):
        return curve_kernels.curve_norm(first.delta, second.delta, rows.x, rows.mean, rows.r, size)
    (pulled, along), (other, other_along) = first.terms(), second.terms()
    across = rows.mean_product(first.delta, other)
    return torch.addcmul(other_along * pulled, along, other).addcmul_(across, rows.normalised()[0])


def gelu(a: Tensor, approximate: str = "none") -> Tensor:
    """Computes F.gelu."""
    return _gelu(a, approximate)


class _Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.approximate = approximate
        ctx.save_for_backward(x)
        return F.gelu(x, approximate=approximate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return _gelu_pulled(grads[0], _Activation(x, ctx.approximate)), None


_gelu: Callable[..., Tensor] = _Gelu.apply


@dataclass
class _Activation:
    """The inputs x of a GELU, and which form of it."""

    x: Tensor
    approximate: str

    def pull(self, delta: Tensor) -> Tensor:
        """Returns g₁(x) δ."""
        found: Tensor = torch.ops.aten.gelu_backward(delta, self.x, approximate=self.approximate)
        return found

    def curve(self, delta: Tensor) -> Tensor:
        """Returns g₂(x) δ; half precision is computed in float32."""
        if curve_kernels.kernels_apply(self.x):
            return curve_kernels.curve_gelu(self.x, delta, tanh=self.approximate == "tanh")
        x = self.x.to(torch.promote_types(self.x.dtype, torch.float32))
        if self.approximate == "none":  # in this order nothing overflows: φ is 0 first
            height = torch.full((), 0.5 * math.log(2 / math.pi), dtype=x.dtype, device=x.device)
            found = torch.addcmul(height, x, x, value=-0.5).exp_().mul_(delta)  # 2 φ δ
            return torch.addcmul(found, x, x * found, value=-0.5).to(delta.dtype)
        x = x.clamp(-_FAR, _FAR)
        square = x.square()
        # With t = tanh u, u = k (x + c x³):   g₂ = (1 − t²) (u' + x (u''/2 − t u'²))
        k = math.sqrt(2 / math.pi)
        t = (square * (k * _CUBE)).add_(k).mul_(x).tanh_()
        half = square.mul_(3 * k * _CUBE)  # x u''/2, and u' − k
        slope = half + k
        found = torch.addcmul(slope + half, x * t, slope.square(), value=-1)
        return found.mul_(1 - t.square()).mul_(delta).to(delta.dtype)


@dataclass
class _Curvature:
    """g₂(x) δ, computed once where it is used."""

    delta: Tensor
    at: _Activation
    _found: Tensor | None = None

    def differentiable(self) -> Tensor:
        """Returns g₂(x) δ, to be differentiated in δ."""
        if self._found is None:
            with torch.no_grad():
                self._found = self.at.curve(self.delta)
        at_delta: Transpose = lambda v: _Curvature(v, self.at).differentiable()  # noqa: E731
        return _differentiable(self._found, (self.delta, at_delta), (self.at.x, _refuse))


def _gelu_pulled(delta: Tensor, at: _Activation) -> Tensor:
    """Returns g₁(x) δ, to be differentiated in δ and in x."""
    with torch.no_grad():
        value = at.pull(delta)
    curvature = _Curvature(delta, at)
    at_x: Transpose = lambda v: v * curvature.differentiable()  # noqa: E731
    return _differentiable(value, (delta, lambda v: _gelu_pulled(v, at)), (at.x, at_x))
