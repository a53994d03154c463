"""Convolutions and average pooling in a form that is cheap to differentiate twice.

PyTorch's own double backward of a convolution also computes the weight's part, which is not needed here and is by far
the most expensive. Its backward of an average pooling is, on CUDA, several times slower than the same operation
written as a spreading (windows side by side) or as another pooling (stride 1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconbound.fisher.passes.layers import ConvRule

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
    """Convolves with a constant weight, cheap to differentiate twice in the input."""
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
    """Returns whether `unpool` applies: windows side by side that fill the image, or windows at every place."""
    if len(shape) != 4 or shape[2] < kernel[0] or shape[3] < kernel[1]:
        return False
    return stride == (1, 1) or (stride == kernel and shape[2] % kernel[0] == 0 and shape[3] % kernel[1] == 0)


def pool(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Computes average pooling, cheap to differentiate twice on CUDA; only where `poolable`."""
    output: Tensor = _pooled(a, kernel, stride)
    return output


def unpool(delta: Tensor, kernel: Pair, stride: Pair, shape: torch.Size) -> Tensor:
    """Applies the transpose of average pooling: spreads every window's share over its places."""
    if stride == (1, 1):
        rows, columns = kernel[0] - 1, kernel[1] - 1
        return average(F.pad(delta, (columns, columns, rows, rows)), kernel, stride)
    share = (delta / (kernel[0] * kernel[1]))[:, :, :, None, :, None]
    return share.expand(*delta.shape[:3], kernel[0], delta.shape[3], kernel[1]).reshape(shape)


def average(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Computes average pooling; 2 × 2 windows at every place in two passes, which is faster than PyTorch's kernel."""
    if stride != (1, 1) or kernel != (2, 2):
        return F.avg_pool2d(a, kernel, stride)
    across = torch.lerp(a[..., 1:], a[..., :-1], 0.5)
    return torch.lerp(across[..., 1:, :], across[..., :-1, :], 0.5)
