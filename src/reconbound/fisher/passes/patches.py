"""Patches of images on CUDA, and their transpose, by one Triton kernel each, which is faster than PyTorch's functions.

Triton comes with PyTorch's CUDA builds; where it is missing, PyTorch's functions are used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # a build of PyTorch without it
    triton = None

Pair = tuple[int, int]
_BLOCK = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _copy_patches(  # type: ignore[no-untyped-def,unused-ignore]
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
    ):
        """Sets target[n, ky, kx, m, y, x] = source[n, m, down y + ky − pad, right x + kx − pad], zero outside."""
        i = tl.program_id(0) * block + tl.arange(0, block)
        x = i % columns
        rest = i // columns
        y = rest % rows
        rest = rest // rows
        m = rest % inner
        rest = rest // inner
        kx = rest % kernel_columns
        rest = rest // kernel_columns
        ky = rest % kernel_rows
        n = (rest // kernel_rows) * inner + m
        from_y = y * down + ky - pad_rows
        from_x = x * right + kx - pad_columns
        inside = (from_y >= 0) & (from_y < height) & (from_x >= 0) & (from_x < width) & (i < total)
        value = tl.load(source + (n * height + from_y) * width + from_x, mask=inside, other=0.0)
        tl.store(target + i, value, mask=i < total)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _add_patches(  # type: ignore[no-untyped-def,unused-ignore]
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
    ):
        """Sets target[n, m, v, u] = Σ source[n, ky, kx, m, y, x] over down y + ky − pad = v, right x + kx − pad = u."""
        i = tl.program_id(0) * block + tl.arange(0, block)
        u = i % width + pad_columns
        rest = i // width
        v = rest % height + pad_rows
        rest = rest // height
        m = rest % inner
        n = rest // inner
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


def takes(a: Tensor, dilation: tuple[int, ...], numbers: int) -> bool:
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
    launch: Any = _copy_patches
    sizes = (out.numel(), height, width, *kernel, rows, columns, *stride, *padding, m, _BLOCK)
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
    launch: Any = _add_patches
    at = places(shape[2:], kernel, stride, padding)
    sizes = (out.numel(), *shape[2:], *kernel, *at, *stride, *padding, shape[1], _BLOCK // 4)
    launch[(triton.cdiv(out.numel(), _BLOCK // 4),)](columns.contiguous(), out, *sizes)
    return out


def places(size: tuple[int, ...], kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    """Returns the number of rows and columns of places at which a kernel meets images of size (H, W)."""
    rows, columns = ((size[i] + 2 * padding[i] - kernel[i]) // stride[i] + 1 for i in (0, 1))
    return rows, columns
