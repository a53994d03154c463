"""Functions in a form that can be differentiated twice, and cheaply: convolutions, average pooling, embedding bags.

PyTorch's own double backward of a convolution also computes the weight's part, which nothing here needs and which is by
far the dearest; and its backward of an average pooling is, on CUDA, several times slower than the same thing written as
a spreading (windows side by side) or as another pooling (stride 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from reconbound.fisher.layers import ConvRule

Pair = tuple[int, int]


class _Convolve(torch.autograd.Function):
    """A convolution with a constant weight."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, weight: Tensor, rule: ConvRule) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.rule, ctx.shape = rule, a.shape
        return rule.apply(a, weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _transposed(grads[0], weight, ctx.rule, ctx.shape), None, None


class _ConvolveTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, weight: Tensor, rule: ConvRule, shape: torch.Size) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.rule = rule
        return rule.transpose(delta, weight, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return _convolved(grads[0], weight, ctx.rule), None, None, None


_convolved: Callable[..., Any] = _Convolve.apply
_transposed: Callable[..., Any] = _ConvolveTransposed.apply


def convolve(a: Tensor, weight: Tensor, rule: ConvRule) -> Tensor:
    """A convolution with a constant weight, cheap to differentiate twice in its input."""
    output: Tensor = _convolved(a, weight, rule)
    return output


class _Pool(torch.autograd.Function):
    """Average pooling without padding."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
        ctx.kernel, ctx.stride, ctx.shape = kernel, stride, a.shape
        return average(a, kernel, stride)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _unpooled(grads[0], ctx.kernel, ctx.stride, ctx.shape), None, None


class _PoolTransposed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, delta: Tensor, kernel: Pair, stride: Pair, shape: torch.Size) -> Tensor:
        ctx.kernel, ctx.stride = kernel, stride
        return unpool(delta, kernel, stride, shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _pooled(grads[0], ctx.kernel, ctx.stride), None, None, None


_pooled: Callable[..., Any] = _Pool.apply
_unpooled: Callable[..., Any] = _PoolTransposed.apply


def poolable(shape: torch.Size, kernel: Pair, stride: Pair) -> bool:
    """Whether unpool can do it: windows side by side that fill the image, or windows at every place."""
    if len(shape) != 4 or shape[2] < kernel[0] or shape[3] < kernel[1]:
        return False
    return stride == (1, 1) or (stride == kernel and shape[2] % kernel[0] == 0 and shape[3] % kernel[1] == 0)


def pool(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Average pooling, cheap to differentiate twice on CUDA; only where poolable."""
    output: Tensor = _pooled(a, kernel, stride)
    return output


def unpool(delta: Tensor, kernel: Pair, stride: Pair, shape: torch.Size) -> Tensor:
    """The transpose of average pooling: every window's share back to its places."""
    if stride == (1, 1):
        rows, columns = kernel[0] - 1, kernel[1] - 1
        return average(F.pad(delta, (columns, columns, rows, rows)), kernel, stride)
    share = (delta / (kernel[0] * kernel[1]))[:, :, :, None, :, None]
    return share.expand(*delta.shape[:3], kernel[0], delta.shape[3], kernel[1]).reshape(shape)


def average(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Average pooling; windows of two by two at every place by two passes, which PyTorch's kernel is slower than."""
    if stride != (1, 1) or kernel != (2, 2):
        return F.avg_pool2d(a, kernel, stride)
    across = torch.lerp(a[..., 1:], a[..., :-1], 0.5)
    return torch.lerp(across[..., 1:, :], across[..., :-1, :], 0.5)


class TwiceDifferentiable(TorchFunctionMode):
    """Within it, functions whose second derivative PyTorch lacks are computed by others that have one.

    A bag of embeddings is the sum, mean or maximum of its rows; a transposed convolution with output_padding is the one
    without any padding, cut to size. (`F.embedding_bag` has no second derivative at all, that of a transposed
    convolution with output_padding fails record by record.)"""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        other = _REPLACED.get(func)
        found = None if other is None else other(func, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _bag(
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse:
        return None
    if offsets is not None:
        input, per_sample_weights, inside = _in_rows(input, offsets, per_sample_weights, include_last_offset)
    else:
        inside = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        inside = inside & (input != padding_idx % weight.shape[0])
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    empty = ~inside.any(-1, keepdim=True)
    if mode == "max":
        return rows.masked_fill(~inside.unsqueeze(-1), -torch.inf).amax(-2).masked_fill(empty, 0.0)
    total = rows.masked_fill(~inside.unsqueeze(-1), 0.0).sum(-2)
    return total if mode == "sum" else total / inside.sum(-1, keepdim=True).clamp(min=1)


def _in_rows(flat: Tensor, offsets: Tensor, weights: Tensor | None, last: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Bags that lie one after another as rows of the longest one's length, their weights, and which places are used."""
    ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_full((1,), flat.shape[0])])
    starts = offsets[:-1] if last else offsets
    places = starts[:, None] + torch.arange(flat.shape[0], device=flat.device)
    inside = places < ends[:, None]
    places = places.clamp(max=max(flat.shape[0] - 1, 0))
    return flat[places], None if weights is None else weights[places], inside


def _conv_transpose(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    rank = weight.dim() - 2
    before, after = (_each(value, rank) for value in (padding, output_padding))
    if not any(after):
        return None
    whole = func(input, weight, None, stride, 0, 0, groups, dilation)
    cut = [n for p, more in zip(reversed(before), reversed(after), strict=True) for n in (-p, more - p)]
    output = F.pad(whole, cut)
    return output if bias is None else output + bias.reshape(-1, *(1,) * rank)


def _each(value: Any, rank: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * rank if len(values) == 1 else values


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.embedding_bag: _bag,
    F.conv_transpose1d: _conv_transpose,
    F.conv_transpose2d: _conv_transpose,
    F.conv_transpose3d: _conv_transpose,
}
