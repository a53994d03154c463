"""Convolutions, average pooling and patches of images: cheap to differentiate twice, and fast.

PyTorch's own double backward of a convolution also computes the weight's part, which is not needed here and is by far
the most expensive. Its average pooling on a CPU, and that one's backward everywhere, is several times slower than
written as a spreading (windows side by side) or as another pooling (stride 1). Patches on CUDA are copied by one Triton
kernel, and added back by another; where Triton is missing, PyTorch's functions are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as convolution_gradients

from reconbound.validate.watch import each_side

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # a build of PyTorch without it
    triton = None

Pair = tuple[int, ...]  # of rows and of columns
_BLOCK = 1024
_FEW_SHIFTS = 2
_PART = 2**20  # numbers that stay in a CPU's cache
_LANES = 16  # numbers that a CPU computes at once: oneDNN's kernels take that many channels together

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _move_patches(  # type: ignore[no-untyped-def,unused-ignore]
        source,
        target,
        total,
        height: tl.constexpr,
        width: tl.constexpr,
        kernel_rows: tl.constexpr,
        kernel_columns: tl.constexpr,
        rows: tl.constexpr,
        columns: tl.constexpr,
        down: tl.constexpr,
        right: tl.constexpr,
        pad_rows: tl.constexpr,
        pad_columns: tl.constexpr,
        inner: tl.constexpr,
        block: tl.constexpr,
        adding: tl.constexpr,
    ):
        """Copies patches out of images, or adds them back; (v, u) = (down y + ky − pad, right x + kx − pad).

        copying: target[n, ky, kx, m, y, x] = source[n, m, v, u], zero outside
        adding:  target[n, m, v, u] = Σ source[n, ky, kx, m, y, x]
        """
        i = tl.program_id(0) * block + tl.arange(0, block)
        if adding:
            u = i % width + pad_columns
            v = (i // width) % height + pad_rows
            m = (i // (width * height)) % inner
            n = i // (width * height * inner)
            value = tl.zeros((block,), dtype=target.dtype.element_ty)
            for ky in tl.static_range(kernel_rows):
                for kx in tl.static_range(kernel_columns):
                    y = (v - ky) // down
                    x = (u - kx) // right
                    there = (v >= ky) & (u >= kx) & (y * down == v - ky) & (x * right == u - kx)
                    there = there & (y < rows) & (x < columns) & (i < total)
                    place = (((n * kernel_rows + ky) * kernel_columns + kx) * inner + m) * rows + y
                    value += tl.load(source + place * columns + x, mask=there, other=0.0)
            tl.store(target + i, value, mask=i < total)
        else:
            rest = i // (columns * rows)
            m = rest % inner
            kx = (rest // inner) % kernel_columns
            ky = (rest // (inner * kernel_columns)) % kernel_rows
            n = (rest // (inner * kernel_columns * kernel_rows)) * inner + m
            v = ((i // columns) % rows) * down + ky - pad_rows
            u = (i % columns) * right + kx - pad_columns
            inside = (v >= 0) & (v < height) & (u >= 0) & (u < width) & (i < total)
            copied = tl.load(source + (n * height + v) * width + u, mask=inside, other=0.0)
            tl.store(target + i, copied, mask=i < total)


def kernels_apply(a: Tensor, dilation: tuple[int, ...], numbers: int) -> bool:
    """Returns whether the kernels apply: CUDA, no dilation, no graph to build, and a size that one launch can do.

    Args:
        a: the tensor to work on.
        dilation: the convolution's dilation.
        numbers: n, how many numbers the kernel writes.
    """
    plain = set(dilation) == {1} and not (a.requires_grad and torch.is_grad_enabled())
    return triton is not None and a.is_cuda and plain and 0 < numbers < 2**31


def patches(a: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Returns the patches of images that meet a kernel: (N, kernel rows, kernel columns, M, rows, columns).

    Args:
        a: images, (N, M, H, W).
        kernel: rows and columns of the kernel.
        stride: its stride.
        padding: its zero padding.
    """
    a = a.contiguous()
    (n, m, height, width), (rows, columns) = a.shape, places(a.shape[2:], kernel, stride, padding)
    out = torch.empty(n, *kernel, m, rows, columns, dtype=a.dtype, device=a.device)
    launch: Any = _move_patches
    sizes = (out.numel(), height, width, *kernel, rows, columns, *stride, *padding, m, _BLOCK, False)
    launch[(triton.cdiv(out.numel(), _BLOCK),)](a, out, *sizes)
    return out


def added_patches(columns: Tensor, shape: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Returns the transpose of `patches`: every patch added back to the images, (N, M, H, W).

    Args:
        columns: patches, as `patches` returns them.
        shape: (N, M, H, W) of the images.
        kernel: rows and columns of the kernel.
        stride: its stride.
        padding: its zero padding.
    """
    out = torch.empty(shape, dtype=columns.dtype, device=columns.device)
    launch: Any = _move_patches
    at = places(shape[2:], kernel, stride, padding)
    sizes = (out.numel(), *shape[2:], *kernel, *at, *stride, *padding, shape[1], _BLOCK // 4, True)
    launch[(triton.cdiv(out.numel(), _BLOCK // 4),)](columns.contiguous(), out, *sizes)
    return out


def places(size: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Returns the number of rows and columns of places at which a kernel meets images of size (H, W)."""
    return tuple((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))


class _Linear(torch.autograd.Function):
    """A linear map whose derivative is its transpose, and the transpose's derivative the map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, apply: Any, transpose: Any) -> Any:
        ctx.maps = transpose, apply
        return apply(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _linear(grads[0], *ctx.maps), None, None


_linear: Callable[..., Tensor] = _Linear.apply


def convolve(a: Tensor, weight: Tensor, rule: Any) -> Tensor:
    """Convolves with a constant weight by a ConvRule, cheap to differentiate twice in the input."""
    shape = a.shape
    return _linear(a, lambda x: rule.apply(x, weight), lambda delta: rule.transpose(delta, weight, shape))


def groups_apply(rule: Any, channels: int, delta: Tensor) -> bool:
    """Returns whether convolutions of single records go as one with a group for each record.

    On a CPU oneDNN is then up to four times as fast as products of patches, and no patches are made. Its fast kernels
    need float32 and channels in multiples of 16.

    Args:
        rule: the convolution's ConvRule.
        channels: those of its input.
        delta: the gradient at its output, of the input's precision.
    """
    plain: bool = len(rule.kernel) == 2 and rule.groups == 1 and torch.backends.mkldnn.is_available()
    fast = delta.device.type == "cpu" and delta.dtype == torch.float32 and delta.numel() > 0
    return plain and fast and channels % _LANES == 0 == delta.shape[1] % _LANES


def in_parts(function: Callable[..., Tensor], numbers: int, *tensors: Tensor) -> Tensor:
    """Returns a function of tensors with a row for each record, computed for a few records at a time.

    What it needs on the way then stays in a CPU's cache. Memory that is not used again costs more than the products.

    Args:
        function: gives a row for each record, which no other record enters.
        numbers: how many numbers it needs for a record.
        tensors: its arguments.
    """
    records, size = len(tensors[0]), max(1, _PART // numbers)
    first = function(*(t[:size] for t in tensors))
    if size >= records:
        return first
    found = first.new_empty(records, *first.shape[1:])
    found[:size] = first
    for start in range(size, records, size):
        part = slice(start, start + size)
        found[part] = function(*(t[part] for t in tensors))
    return found


def grouped_gradients(rule: Any, pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the weight gradient of every record, summed over pairs (a, δ): (B, 1, O, C · kernel).

    The records are groups, and the pairs are the batch that PyTorch sums the gradient over.
    """
    a, delta = (torch.stack(each) if len(pairs) > 1 else each[0][None] for each in zip(*pairs, strict=True))
    (n, b, c), o = a.shape[:3], delta.shape[2]
    args = (rule.stride, rule.padding, rule.dilation, b)
    images, weight = a.reshape(n, b * c, *a.shape[3:]), (b * o, c, *rule.kernel)
    found: Tensor = convolution_gradients.conv2d_weight(
        images, weight, delta.reshape(n, b * o, *delta.shape[3:]), *args
    )
    return found.reshape(b, 1, o, -1)


def grouped_apply(rule: Any, a: Tensor, weights: Tensor) -> Tensor:
    """Returns the convolution of every record with a kernel of its own, weights (B, 1, O, C · kernel)."""
    b, c = a.shape[:2]
    images, kernels = a.reshape(1, b * c, *a.shape[2:]), weights.reshape(-1, c, *rule.kernel)
    found: Tensor = F.conv2d(images, kernels, None, rule.stride, rule.padding, rule.dilation, b)
    return found.reshape(b, -1, *found.shape[2:])


def grouped_transpose(rule: Any, delta: Tensor, weights: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the transpose of `grouped_apply` in its input, of this shape but for the number of records."""
    b, c, *size = len(delta), *shape[1:]
    rows, args = delta.reshape(1, -1, *delta.shape[2:]), (rule.stride, rule.padding, rule.dilation, b)
    kernels = weights.reshape(-1, c, *rule.kernel)
    found: Tensor = convolution_gradients.conv2d_input((1, b * c, *size), kernels, rows, *args)
    return found.reshape(b, c, *size)


def by_shifts(delta: Tensor, weight: Tensor, shape: tuple[int, ...], stride: int, padding: Pair) -> Tensor:
    """Returns the transpose of a convolution with stride s as one convolution of δ, and its pixels put in order.

    A pixel at v + pad = s m + r meets only the rows r, r + s, r + 2s, ... of the kernel, so that for each of the s × s
    shifts r the transpose is a plain convolution of δ with every s-th row and column of the kernel. On a CPU that is
    up to twice as fast as PyTorch's transpose. There a convolution with up to 16 outputs takes as long as one with 16:
    where the shifts are few, several neighbouring blocks of s × s pixels are outputs of one place.

    Args:
        delta: δ, (N, O, rows, columns).
        weight: the kernel, (O, C, k, l); s divides k and l.
        shape: of the images, (N, C, H, W).
        stride: s.
        padding: zeros that the convolution put around the images.
    """
    (o, c, *kernel), s = weight.shape, stride
    spans = [k // s for k in kernel]
    parts = weight.reshape(o, c, spans[0], s, spans[1], s).permute(1, 3, 5, 0, 2, 4).flip(4, 5)
    blocks = [n + span - 1 for n, span in zip(delta.shape[2:], spans, strict=True)]
    m = 2 if not delta.is_cuda and c * (2 * s) ** 2 <= _LANES and all(n % 2 == 0 for n in blocks) else 1
    if m > 1:  # block i of the m meets rows of δ that lie i further on
        moved = [[F.pad(parts, (j, m - 1 - j, i, m - 1 - i)) for j in range(m)] for i in range(m)]
        parts = torch.stack([torch.stack(row, 2) for row in moved], 1)  # C, i, s, j, s, O, rows, columns
    found = F.conv2d(delta, parts.reshape(-1, *parts.shape[-3:]), stride=m, padding=tuple(n - 1 for n in spans))
    images = _in_order(found, m * s)
    rows, columns = (shape[2 + i] + padding[i] - images.shape[2 + i] for i in (0, 1))
    return padded(images, (-padding[1], columns, -padding[0], rows))


def _in_order(found: Tensor, s: int) -> Tensor:
    """Returns F.pixel_shuffle(found, s); on a CPU with one copy for each shift, which is faster where they are few."""
    if found.is_cuda or s > _FEW_SHIFTS:
        return F.pixel_shuffle(found, s)
    n, c, height, width = found.shape
    images, shifts = found.new_empty(n, c // s**2, height * s, width * s), found.reshape(n, -1, s, s, height, width)
    for i in range(s):
        for j in range(s):
            images[:, :, i::s, j::s] = shifts[:, :, i, j]
    return images


def padded(images: Tensor, by: Sequence[int]) -> Tensor:
    """Returns F.pad(images, by), without the copy that it makes where there is nothing to pad."""
    return F.pad(images, by) if any(by) else images


def avg_pool2d(
    rec: Any,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor | None:
    """Computes F.avg_pool2d in a form that is cheap to differentiate, or returns None; the recorder records nothing."""
    plain = set(each_side(padding, 2)) == {0} and not ceil_mode and divisor_override is None
    if not plain:
        return None
    kernel, stride = each_side(kernel_size, 2), each_side(stride or kernel_size, 2)
    return pool(input, kernel, stride) if poolable(input.shape, kernel, stride) else None


def poolable(shape: torch.Size, kernel: Pair, stride: Pair) -> bool:
    """Returns whether `unpool` applies: windows side by side that fill the image, or windows at every place."""
    if len(shape) != 4 or shape[2] < kernel[0] or shape[3] < kernel[1]:
        return False
    return stride == (1, 1) or (stride == kernel and shape[2] % kernel[0] == 0 and shape[3] % kernel[1] == 0)


def pool(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Computes average pooling, cheap to differentiate twice; only where `poolable`."""
    shape = a.shape
    return _linear(a, lambda x: average(x, kernel, stride), lambda d: unpool(d, kernel, stride, shape))


def unpool(delta: Tensor, kernel: Pair, stride: Pair, shape: torch.Size) -> Tensor:
    """Applies the transpose of average pooling: spreads every window's share over its places."""
    if stride == (1, 1):
        rows, columns = kernel[0] - 1, kernel[1] - 1
        return average(F.pad(delta, (columns, columns, rows, rows)), kernel, stride)
    share = delta / (kernel[0] * kernel[1])
    if delta.is_cuda:
        return share[:, :, :, None, :, None].expand(-1, -1, -1, kernel[0], -1, kernel[1]).reshape(shape)
    images = share.new_empty(*delta.shape[:3], kernel[0], shape[3])
    for i in range(kernel[1]):
        images[:, :, :, 0, i :: kernel[1]] = share
    images[:, :, :, 1:] = images[:, :, :, :1]
    return images.reshape(shape)


def average(a: Tensor, kernel: Pair, stride: Pair) -> Tensor:
    """Computes average pooling; 2 × 2 windows by sums of whole images, which is faster than PyTorch's kernel."""
    if kernel == (2, 2) and stride == (1, 1):
        across = torch.lerp(a[..., 1:], a[..., :-1], 0.5)
        return torch.lerp(across[..., 1:, :], across[..., :-1, :], 0.5)
    if kernel == (2, 2) and stride == (2, 2) and not a.is_cuda and a.dtype in (torch.float32, torch.float64):
        total = a[..., ::2, ::2] + a[..., ::2, 1::2]  # in PyTorch's order, so that every bit is the same
        return total.add_(a[..., 1::2, ::2]).add_(a[..., 1::2, 1::2]).mul_(0.25)
    return F.avg_pool2d(a, kernel, stride)
