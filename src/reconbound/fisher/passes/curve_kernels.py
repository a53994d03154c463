"""Triton kernels of second derivatives, each in one launch: of LayerNorm, of softmax and of GELU (smooth.py).

Each row is summed by one program, in float32. Where Triton is missing, and in other precisions, PyTorch's operations
are used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconbound._internal.checks import warn_user

try:
    import triton  # type: ignore[import-not-found,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,unused-ignore]
except ImportError:  # a build of PyTorch without it
    triton = None

_LONGEST = 8192  # numbers of a row that one program holds
_BLOCK = 1024

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _curve_norm(v, delta, x, mean, r, out, n, block: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
        """Computes −r (a P(v) + b P(δ) + m(v P(δ)) x̂) of a row, a = m(δ x̂), b = m(v x̂)."""
        row = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, block)
        there, at = i < n, row * n + i
        scale = tl.load(r + row)
        normalised = tl.where(there, (tl.load(x + at, mask=there, other=0.0) - tl.load(mean + row)) * scale, 0.0)
        first = tl.load(v + at, mask=there, other=0.0)
        second = tl.load(delta + at, mask=there, other=0.0)
        along, other_along = tl.sum(second * normalised, 0) / n, tl.sum(first * normalised, 0) / n
        pulled = scale * (first - tl.sum(first, 0) / n - normalised * other_along)
        other = tl.where(there, scale * (second - tl.sum(second, 0) / n - normalised * along), 0.0)
        across = tl.sum(first * other, 0) / n
        tl.store(out + at, -scale * (along * pulled + other_along * other + across * normalised), mask=there)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _curve_softmax(v, delta, share, out, n, block: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
        """Computes q − S Σq of a row, q = S (v − Σ S v) (δ − Σ S δ)."""
        row = tl.program_id(0).to(tl.int64)
        i = tl.arange(0, block)
        there, at = i < n, row * n + i
        s = tl.load(share + at, mask=there, other=0.0)
        first = tl.load(v + at, mask=there, other=0.0)
        second = tl.load(delta + at, mask=there, other=0.0)
        q = s * (first - tl.sum(s * first, 0)) * (second - tl.sum(s * second, 0))
        tl.store(out + at, q - s * tl.sum(q, 0), mask=there)

    @triton.jit  # type: ignore[untyped-decorator,unused-ignore]
    def _curve_gelu(x, delta, out, total, tanh: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def,unused-ignore]
        """Computes g₂(x) δ; the numbers are those of `smooth`."""
        i = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
        there = i < total
        a = tl.minimum(tl.abs(tl.load(x + i, mask=there, other=0.0)), 55.0)  # g₂ is even, and 0 from there on
        square = a * a
        if tanh:
            half = 0.10703222440890037 * square  # 3 k c x²
            slope = 0.7978845608028654 + half
            small = tl.exp(-2.0 * a * (0.7978845608028654 + 0.03567740813630012 * square))  # e⁻²ᵘ
            t = (1.0 - small) / (1.0 + small)
            found = 4.0 * small / ((1.0 + small) * (1.0 + small)) * (slope + half - a * t * slope * slope)
        else:
            found = 0.3989422804014327 * tl.exp(-0.5 * square) * (2.0 - square)
        tl.store(out + i, found * tl.load(delta + i, mask=there, other=0.0), mask=there)


def kernels_apply(x: Tensor, row: int = 1) -> bool:
    """Returns whether the kernels apply: float32 on CUDA, and rows that one program can hold.

    Args:
        x: the tensor to work on.
        row: how many numbers a row has.
    """
    fits = triton is not None and x.is_cuda and x.dtype == torch.float32 and row <= _LONGEST and x.numel() > 0
    return fits and are_right(x.device)


def are_right(device: torch.device) -> bool:
    """Returns whether the kernels give PyTorch's own second derivatives on this GPU: compared once, before they serve.

    Args:
        device: the GPU.
    """
    if device not in _RIGHT:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # nothing can be compared there
            return False
        _RIGHT[device] = _try(device)
    return _RIGHT[device]


_RIGHT: dict[torch.device, bool] = {}


def _try(device: torch.device) -> bool:
    """Compares each kernel with PyTorch in float64; warns where one fails or differs."""
    v, delta, x = torch.linspace(-3, 4, 3 * 5 * 37, device=device).sin().reshape(3, 5, 37)
    mean, r = x.mean(1, keepdim=True), (x.var(1, keepdim=True, correction=0) + 1e-5).rsqrt()
    functions: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[], Tensor]]] = {
        "LayerNorm": (lambda a: F.layer_norm(a, (37,)), lambda: curve_norm(v, delta, x, mean, r, 37)),
        "softmax": (lambda a: a.softmax(1), lambda: curve_softmax(v, delta, x.softmax(1))),
        "GELU": (F.gelu, lambda: v * curve_gelu(x, delta, tanh=False)),
        "GELU, tanh": (lambda a: F.gelu(a, approximate="tanh"), lambda: v * curve_gelu(x, delta, tanh=True)),
    }
    for name, (function, kernel) in functions.items():
        wide = x.double().requires_grad_()
        with torch.enable_grad():
            (pulled,) = torch.autograd.grad(function(wide), wide, delta.double(), create_graph=True)
            (wanted,) = torch.autograd.grad(pulled, wide, v.double())
        try:
            right = bool((kernel() - wanted).abs().max() <= 1e-4 * wanted.abs().max())
            why = "" if right else "other numbers"
        except Exception as reason:  # Triton lacks a compiler, or does not know this GPU
            why = " ".join(str(reason).split())[:200]
        if why:
            warn_user(f"second derivatives of {name} are computed by PyTorch, more slowly: Triton gives {why} here")
            return False
    return True


def curve_norm(v: Tensor, delta: Tensor, x: Tensor, mean: Tensor, r: Tensor, row: int) -> Tensor:
    """Returns Q(v, δ) of LayerNorm.

    Args:
        v: one gradient.
        delta: the other one.
        x: the rows that were normalised.
        mean: their means.
        r: 1/√(variance + ε) of each.
        row: how many numbers a row has.
    """
    v, delta, x = v.contiguous(), delta.contiguous(), x.contiguous()
    out = torch.empty_like(v)
    launch: Any = _curve_norm
    launch[(v.numel() // row,)](v, delta, x, mean, r, out, row, **_sizes(row))
    return out


def curve_softmax(v: Tensor, delta: Tensor, share: Tensor) -> Tensor:
    """Returns the derivative of P(δ) in the scores, given v, for softmax S over the last dimension.

    P(δ) = S (δ − Σ S δ)

    Args:
        v: one gradient.
        delta: the other one.
        share: S.
    """
    v, delta, share = v.contiguous(), delta.contiguous(), share.contiguous()
    out, row = torch.empty_like(v), v.shape[-1]
    launch: Any = _curve_softmax
    launch[(v.numel() // row,)](v, delta, share, out, row, **_sizes(row))
    return out


def curve_gelu(x: Tensor, delta: Tensor, *, tanh: bool) -> Tensor:
    """Returns g₂(x) δ of GELU.

    Args:
        x: its input.
        delta: the gradient at its output.
        tanh: whether it is the tanh form.
    """
    x, delta = x.contiguous(), delta.contiguous()
    out, total = torch.empty_like(x), x.numel()
    launch: Any = _curve_gelu
    launch[(triton.cdiv(total, _BLOCK),)](x, delta, out, total, tanh, _BLOCK)
    return out


def _sizes(row: int) -> dict[str, int]:
    block = triton.next_power_of_2(row)
    return {"block": block, "num_warps": 4 if block <= 2048 else 8}
