"""LayerNorm, GroupNorm, softmax and GELU, cheap to differentiate twice.

PyTorch writes their double backward as up to 60 small operations, and differentiates these one by one for a product
with J. Here it is a formula. Each of the three is the gradient of a function: of n/r, of log Σ eˣ, and of one of each
number. So its derivative P(δ) is symmetric, and the derivative of P(δ) in x, applied to v, is so in all its arguments:

    ⟨w, Q(v, δ)⟩ = ⟨v, Q(w, δ)⟩ = ⟨δ, Q(v, w)⟩

    LayerNorm   P(δ) = r (δ − m(δ) − x̂ m(δ x̂))     Q(v, δ) = −r (m(δ x̂) P(v) + m(v x̂) P(δ) + m(v P(δ)) x̂)
    softmax     P(δ) = S (δ − Σ S δ)                 Q(v, δ) = q − S Σ q,   q = (v − Σ S v) P(δ)
    GELU        P(δ) = (Φ + x φ) δ                   Q(v, δ) = φ (2 − x²) v δ

with m(·) the mean over the n normalised dimensions, x̂ = r (x − m(x)), r = (m((x − m(x))²) + ε)^(−1/2).

P and Q are values that are computed without a graph; what a gradient in one of their arguments needs is computed where
that gradient is asked for, by P or Q again. The derivative of Q in x is refused.
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
    """An input of such a value: what arrives at the value is mapped to the gradient in this input.

    A tensor that the map needs is saved where autograd saves its own, so that it follows the same hooks (backward.py).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, transpose: Any, needed: list[Tensor]) -> Tensor:
        ctx.transpose = transpose
        ctx.save_for_backward(*needed)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return ctx.transpose(grads[0], *ctx.saved_tensors), None, None


with_derivative: Callable[..., Tensor] = _Value.apply
_input: Callable[..., Tensor] = _Input.apply
Transpose = Callable[..., Tensor]


def _differentiable(value: Tensor, *inputs: tuple[Tensor, Transpose, list[Tensor]]) -> Tensor:
    """Returns a value with its derivative.

    Args:
        value: computed without a graph.
        inputs: each input of the value's shape, with the map from a gradient at the value to the one at this input, and
            what the map takes after that gradient.
    """
    if not torch.is_grad_enabled():
        return value
    nodes = [_input(x, transpose, needed) for x, transpose, needed in inputs if x.requires_grad]
    return with_derivative(value, *nodes) if nodes else value


def _refuse(grad: Tensor) -> Tensor:
    raise NotImplementedError(
        "third derivatives of LayerNorm, GroupNorm, softmax and GELU in their input are not computed"
    )


class _Point:
    """A function at x: P, and Q."""

    x: Tensor  # in the graph

    def pull(self, delta: Tensor) -> Tensor:
        """Returns P(δ)."""
        raise NotImplementedError

    def terms(self, delta: Tensor) -> Any:
        """Returns what `curve` takes of δ, to be computed once."""

    def curve(self, v: Tensor, delta: Tensor, terms: Any) -> Tensor:
        """Returns Q(v, δ)."""
        raise NotImplementedError


class _Direction:
    """A gradient δ at a point, with its terms, computed once where they are used."""

    def __init__(self, delta: Tensor, at: _Point) -> None:
        self.delta, self.at = delta, at
        self.terms: tuple[Any, ...] = ()

    def curve(self, v: Tensor) -> Tensor:
        self.terms = self.terms or (self.at.terms(self.delta),)
        return self.at.curve(v, self.delta, *self.terms)


def _pulled(delta: Tensor, at: _Point) -> Tensor:
    """Returns P(δ), to be differentiated in δ and in x."""
    with torch.no_grad():
        value = at.pull(delta)
    directions: list[_Direction] = []

    def at_x(v: Tensor, delta: Tensor) -> Tensor:
        directions[:] = directions or [_Direction(delta, at)]
        return _curved(v, directions[0])

    return _differentiable(value, (delta, lambda v: _pulled(v, at), []), (at.x, at_x, [delta]))


def _curved(v: Tensor, direction: _Direction) -> Tensor:
    """Returns Q(v, δ), to be differentiated in v and in δ."""
    at = direction.at
    with torch.no_grad():
        value = direction.curve(v)
    at_v: Transpose = lambda w: _curved(w, direction)  # noqa: E731
    at_delta: Transpose = lambda w, v: _curved(w, _Direction(v, at))  # noqa: E731
    return _differentiable(value, (v, at_v, []), (direction.delta, at_delta, [v]), (at.x, _refuse, []))


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


def group_norm(a: Tensor, groups: int, eps: float) -> Tensor:
    """Computes F.group_norm without its affine part: a LayerNorm of each group; half precision as PyTorch does.

    Args:
        a: the input, (N, C, ...).
        groups: into how many groups the channels are divided.
        eps: ε.
    """
    divided = a.dim() > 1 and groups > 0 and a.shape[1] % groups == 0 and a.numel() > 0
    if not divided or a.dtype not in (torch.float32, torch.float64):
        return F.group_norm(a, groups, eps=eps)
    rows = a.reshape(a.shape[0], groups, -1)
    return layer_norm(rows, rows.shape[2:], eps).reshape(a.shape)


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
class _Rows(_Point):
    """Rows x that were normalised over the last dimensions, of this shape, with m(x) and r of each."""

    x: Tensor
    mean: Tensor
    r: Tensor
    shape: tuple[int, ...]
    _normalised: tuple[Tensor, Tensor] | None = None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def pull(self, delta: Tensor) -> Tensor:
        chosen = (True, False, False)
        stats = (self.mean, self.r, None, None, chosen)
        found: Tensor = torch.ops.aten.native_layer_norm_backward(delta, self.x, self.shape, *stats)[0]
        return found

    def terms(self, delta: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns P(δ) and −r m(δ x̂)."""
        if curve_kernels.kernels_apply(self.x, self.size):
            return None
        return self.pull(delta), self._mean_product(delta, self._statistics()[0])

    def curve(self, v: Tensor, delta: Tensor, terms: tuple[Tensor, Tensor] | None) -> Tensor:
        if terms is None:
            return curve_kernels.curve_norm(v, delta, self.x, self.mean, self.r, self.size)
        normalised = self._statistics()[0]
        found = torch.addcmul(self._mean_product(v, normalised) * terms[0], terms[1], self.pull(v))
        return found.addcmul_(self._mean_product(v, terms[0]), normalised)

    def _statistics(self) -> tuple[Tensor, Tensor]:
        """Returns x̂ and −r/n of each row."""
        if self._normalised is None:
            self._normalised = (self.x - self.mean) * self.r, self.r * (-1 / self.size)
        return self._normalised

    def _mean_product(self, v: Tensor, w: Tensor) -> Tensor:
        """Returns −r m(v w) of each row."""
        dims = tuple(range(-len(self.shape), 0))
        return (v * w).sum(dims, keepdim=True) * self._statistics()[1]


def softmax(a: Tensor, dim: int) -> Tensor:
    """Computes torch.softmax of float32 and float64."""
    return _softmax(_place(a), a.detach(), dim)


class _Place(torch.autograd.Function):
    """A tensor at x's place in the graph, of its shape, that keeps none of its numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach().new_empty(()).expand(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, place: Tensor, a: Tensor, dim: int) -> Tensor:
        output = torch.softmax(a, dim)
        ctx.dim = dim
        ctx.save_for_backward(place, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        place, output = ctx.saved_tensors
        return _pulled(grads[0], _Shares(place, output.detach(), ctx.dim)), None, None


_place: Callable[[Tensor], Tensor] = _Place.apply
_softmax: Callable[..., Tensor] = _Softmax.apply


@dataclass
class _Shares(_Point):
    """The place of scores x, and their softmax S over a dimension."""

    x: Tensor
    share: Tensor
    dim: int

    def pull(self, delta: Tensor) -> Tensor:
        found: Tensor = torch._softmax_backward_data(delta, self.share, self.dim, self.share.dtype)
        return found

    def terms(self, delta: Tensor) -> Tensor | None:
        """Returns P(δ)."""
        last = self.dim in (-1, self.share.dim() - 1)
        return None if last and curve_kernels.kernels_apply(self.share, self.share.shape[-1]) else self.pull(delta)

    def curve(self, v: Tensor, delta: Tensor, terms: Tensor | None) -> Tensor:
        if terms is None:
            return curve_kernels.curve_softmax(v, delta, self.share)
        q = (v - (self.share * v).sum(self.dim, keepdim=True)).mul_(terms)
        return q.addcmul_(self.share, q.sum(self.dim, keepdim=True), value=-1)


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
        return _pulled(grads[0], _Activation(x, ctx.approximate)), None


_gelu: Callable[..., Tensor] = _Gelu.apply


@dataclass
class _Activation(_Point):
    """The inputs x of a GELU, and which form of it."""

    x: Tensor
    approximate: str

    def pull(self, delta: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten.gelu_backward(delta, self.x, approximate=self.approximate)
        return found

    def terms(self, delta: Tensor) -> Tensor | None:
        """Returns g₂(x) δ, g₂ the second derivative; half precision is computed in float32. None: a kernel is fast."""
        if curve_kernels.kernels_apply(self.x):
            return None
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

    def curve(self, v: Tensor, delta: Tensor, terms: Tensor | None) -> Tensor:
        if terms is None:
            return curve_kernels.curve_gelu(self.x, delta, tanh=self.approximate == "tanh").mul_(v)
        return v * terms
