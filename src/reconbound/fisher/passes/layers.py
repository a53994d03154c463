"""Rules per layer: how the weight of a linear map meets its input, record by record.

Every known layer computes, for a record, o = W·a + b with some linear layout. In one common form, with groups g:

    A (B, g, K, L)  the columns that meet the weight     D (B, g, O, L)  the gradient of the loss in the output
    G = D Aᵀ        the record's weight gradient          (B, g, O, K)

L counts the places at which a weight is used within a record (pixels, tokens). A Linear has g = 1; a Conv has patches
for columns; LayerNorm and GroupNorm have one group per weight with K = O = 1 (A is the normalised input); an Embedding
has one-hot columns, kept as indices. Products with G cost either O·K per place (G is formed) or L per place (it is not:
"ghost" products), whichever is less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as convolution_gradients

from reconbound.fisher.passes import convolutions

_FORWARD: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_INPUT: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_input,
    2: convolution_gradients.conv2d_input,
    3: convolution_gradients.conv3d_input,
}
_WEIGHT: dict[int, Callable[..., Tensor]] = {
    1: convolution_gradients.conv1d_weight,
    2: convolution_gradients.conv2d_weight,
    3: convolution_gradients.conv3d_weight,
}
_MANY_OFFSETS = 16  # on CUDA one transposed convolution beats that many launches
_MANY_CHANNELS = 16  # from here on cuDNN is faster at a convolution with the turned kernel than at its transpose
_FEW_CHANNELS = 4  # on a CPU a matrix product and adding patches back beats the transposed convolution up to here


@dataclass(frozen=True)
class LinearRule:
    """Rule of nn.Linear with any number of middle dimensions: a (B, ..., in), δ (B, ..., out)."""

    def columns(self, a: Tensor) -> Tensor:
        return a.reshape(a.shape[0], 1, -1, a.shape[-1]).transpose(2, 3)

    def rows(self, delta: Tensor) -> Tensor:
        return self.columns(delta)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        return columns.transpose(2, 3).reshape(shape)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return self.from_columns(rows, shape)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.linear(a, weight)

    def transpose(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return delta @ weight

    def total(self, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Returns the weight gradient summed over the batch."""
        return delta.reshape(-1, delta.shape[-1]).T @ a.reshape(-1, a.shape[-1])

    def bias(self, bias: Tensor, output: Tensor) -> Tensor:
        return bias


@dataclass(frozen=True)
class ConvRule:
    """Rule of nn.Conv1d, 2d, 3d with stride, zero padding, dilation, groups (other padding is applied to the input)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def rank(self) -> int:
        return len(self.kernel)

    def columns(self, a: Tensor) -> Tensor:
        """Returns patches as views, (B, g, C/g · kernel, places). F.unfold would launch one CUDA kernel per record."""
        r = self.rank
        if r == 2 and convolutions.kernels_apply(a, self.dilation, self._patch_numbers(a.shape)):
            found = convolutions.patches(a.reshape(-1, 1, *a.shape[2:]), *self._pairs())
            return found.reshape(a.shape[0], self.groups, -1, math.prod(found.shape[-2:]))
        a = F.pad(a, [p for p in reversed(self.padding) for _ in (0, 1)])
        for i in range(r):
            a = a.unfold(2 + i, (self.kernel[i] - 1) * self.dilation[i] + 1, self.stride[i])
            a = a[..., :: self.dilation[i]]
        a = a.permute(0, 1, *range(2 + r, 2 + 2 * r), *range(2, 2 + r))  # B, C, kernel, places
        return a.reshape(a.shape[0], self.groups, -1, math.prod(a.shape[2 + r :]))

    def rows(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], self.groups, delta.shape[1] // self.groups, -1)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        """Returns the transpose of `columns`: adds every patch back where it came from, one kernel offset at a time."""
        if self.rank == 2 and convolutions.kernels_apply(columns, self.dilation, columns.numel()):
            images = (shape[0] * shape[1], 1, shape[2], shape[3])
            return convolutions.added_patches(columns, images, *self._pairs()).reshape(shape)
        if columns.is_cuda and self.interleaves:
            return self.from_interleaved(columns, shape)
        if self.rank == 2 and (shape[1] > _FEW_CHANNELS or columns.is_cuda):
            flat = columns.reshape(shape[0], -1, columns.shape[-1])
            return F.fold(flat, tuple(shape[2:]), self.kernel, self.dilation, self.padding, self.stride)
        places = self._places(shape)
        if columns.is_cuda and math.prod(self.kernel) >= _MANY_OFFSETS:
            return self._spread_by_convolution(columns, shape, places)
        columns = columns.reshape(*shape[:2], math.prod(self.kernel), *places)
        padded = [s + 2 * p for s, p in zip(shape[2:], self.padding, strict=True)]
        out = columns.new_zeros(*shape[:2], *padded)
        for k in range(math.prod(self.kernel)):
            offset = _unravel(k, self.kernel)
            window = out
            for i, (o, dil, st, n) in enumerate(zip(offset, self.dilation, self.stride, places, strict=True)):
                window = window.narrow(2 + i, o * dil, (n - 1) * st + 1)
                window = window[(slice(None),) * (2 + i) + (slice(None, None, st),)]
            window += columns[:, :, k]
        inner = tuple(slice(p, p + s) for p, s in zip(self.padding, shape[2:], strict=True))
        return out[(slice(None), slice(None), *inner)]

    @property
    def interleaves(self) -> bool:
        """Returns whether patches consist of whole blocks of stride × stride pixels. F.fold is slower in that case."""
        if self.rank != 2 or set(self.dilation) != {1} or min(self.stride) < 2:
            return False
        blocks = [k / s for k, s in zip(self.kernel, self.stride, strict=True)]
        return all(b == int(b) for b in blocks) and math.prod(blocks) <= _MANY_OFFSETS

    def from_interleaved(self, columns: Tensor, shape: torch.Size) -> Tensor:
        """Computes `from_columns` by blocks.

        Pixel (i, j) of a patch lies in block (i // stride, j // stride) at a fixed place.
        """
        (down, right), (s, r), (n, m) = self.kernel, self.stride, self._places(shape)
        down, right = down // s, right // r
        high, wide = (-(-(size + 2 * p) // step) for size, p, step in zip(shape[2:], self.padding, (s, r), strict=True))
        blocks = columns.reshape(*shape[:2], down, s, right, r, n, m)
        out = columns.new_zeros(*shape[:2], max(high, n + down - 1), s, max(wide, m + right - 1), r)
        by_place = out.permute(0, 1, 3, 5, 2, 4)
        for i in range(down):
            for j in range(right):
                by_place[..., i : i + n, j : j + m] += blocks[:, :, i, :, j]
        whole = out.reshape(*shape[:2], out.shape[2] * s, out.shape[4] * r)
        up, left = self.padding
        return whole[:, :, up : up + shape[2], left : left + shape[3]]

    def _spread_by_convolution(self, columns: Tensor, shape: torch.Size, places: tuple[int, ...]) -> Tensor:
        """Computes `from_columns` as one transposed convolution with a one-hot weight: one launch instead of many."""
        size = math.prod(self.kernel)
        hot = torch.eye(size, dtype=columns.dtype, device=columns.device).reshape(size, 1, *self.kernel)
        flat = columns.reshape(shape[0] * shape[1], size, *places)
        inner = torch.Size((shape[0] * shape[1], 1, *shape[2:]))
        return _INPUT[self.rank](inner, hot, flat, self.stride, self.padding, self.dilation).reshape(shape)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.reshape(shape)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return _FORWARD[self.rank](a, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def transpose(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        if weight.shape[1] <= _FEW_CHANNELS and not delta.is_cuda:
            matrices = weight.reshape(self.groups, weight.shape[0] // self.groups, -1).transpose(1, 2)
            if self.groups == 1:
                return self.from_columns(matrices[0] @ delta.flatten(2), shape)
            return self.from_columns(matrices @ self.rows(delta), shape)
        if delta.is_cuda and self.transposes_as_convolution and weight.shape[1] >= _MANY_CHANNELS:
            return self.reversed_transpose(delta, weight)
        args = (self.stride, self.padding, self.dilation, self.groups)
        return _INPUT[self.rank](shape, weight, delta, *args)

    @property
    def transposes_as_convolution(self) -> bool:
        """Returns whether the transpose is itself a convolution with a reversed kernel. cuDNN is faster at that."""
        spans = zip(self.kernel, self.padding, self.dilation, strict=True)
        return self.groups == 1 and set(self.stride) == {1} and all(p <= d * (k - 1) for k, p, d in spans)

    def _reversed_rule(self) -> ConvRule:
        spans = zip(self.kernel, self.padding, self.dilation, strict=True)
        padding = tuple(d * (k - 1) - p for k, p, d in spans)
        return ConvRule(self.kernel, self.stride, padding, self.dilation, 1)

    def reversed_transpose(self, delta: Tensor, weight: Tensor) -> Tensor:
        turned = weight.flip(*range(2, 2 + self.rank)).transpose(0, 1)
        return _FORWARD[self.rank](delta, turned, None, 1, self._reversed_rule().padding, self.dilation)

    def transpose_records(self, weights: Tensor, delta: Tensor, shape: torch.Size) -> Tensor:
        """Returns the transpose with a different weight for each record, (B, g, O, K)."""
        if delta.is_cuda and self.transposes_as_convolution and shape[1] >= _MANY_CHANNELS:
            return self.reversed_transpose_records(weights, delta, shape)
        return self.from_columns(weights.transpose(2, 3) @ self.rows(delta), shape)

    def reversed_transpose_records(self, weights: Tensor, delta: Tensor, shape: torch.Size) -> Tensor:
        b, o, c, size = shape[0], weights.shape[2], shape[1], math.prod(self.kernel)
        turned = weights.reshape(b, o, c, size).flip(3).transpose(1, 2).reshape(b, 1, c, o * size)
        return (turned @ self._reversed_rule().columns(delta)).reshape(shape)

    def total(self, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        """Returns the weight gradient summed over the batch.

        On CUDA it is a product of matrices: cuDNN may sum it by a Fourier transform, whose rounding is not bounded by
        what is summed (for 64 channels with a 5 × 5 kernel, 87 times the gradient where an input of 1e6 meets δ = 0).
        """
        if delta.is_cuda:
            return torch.einsum("bgol,bgkl->gok", self.rows(delta), self.columns(a)).reshape(weight.shape)
        args = (self.stride, self.padding, self.dilation, self.groups)
        return _WEIGHT[self.rank](a, weight.shape, delta, *args)

    def bias(self, bias: Tensor, output: Tensor) -> Tensor:
        return bias.reshape(-1, *(1,) * self.rank)

    def _pairs(self) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        (h, w), (down, right), (rows, columns) = self.kernel, self.stride, self.padding
        return (h, w), (down, right), (rows, columns)

    def _patch_numbers(self, shape: torch.Size) -> int:
        return math.prod((*shape[:2], *self.kernel, *self._places(shape)))

    def _places(self, shape: torch.Size) -> tuple[int, ...]:
        spans = zip(shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return tuple((s + 2 * p - d * (k - 1) - 1) // st + 1 for s, p, d, k, st in spans)


@dataclass(frozen=True)
class ScaleRule:
    """Rule of the affine part of LayerNorm (weight over the last dimensions) or GroupNorm (weight over dimension 1)."""

    channels_first: bool
    weight_dims: int

    def columns(self, a: Tensor) -> Tensor:
        if self.channels_first:
            return a.reshape(a.shape[0], a.shape[1], 1, -1)
        size = math.prod(a.shape[a.dim() - self.weight_dims :])
        return a.reshape(a.shape[0], -1, size).transpose(1, 2).unsqueeze(2)

    def rows(self, delta: Tensor) -> Tensor:
        return self.columns(delta)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        if self.channels_first:
            return columns.reshape(shape)
        return columns.squeeze(2).transpose(1, 2).reshape(shape)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return self.from_columns(rows, shape)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return a * self._spread(weight, a)

    def transpose(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        return delta * self._spread(weight, delta)

    def total(self, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return (self.columns(a) * self.columns(delta)).sum((0, 2, 3)).reshape(weight.shape)

    def bias(self, bias: Tensor, output: Tensor) -> Tensor:
        return self._spread(bias, output)

    def _spread(self, weight: Tensor, like: Tensor) -> Tensor:
        return weight.reshape(-1, *(1,) * (like.dim() - 2)) if self.channels_first else weight


@dataclass(frozen=True)
class EmbeddingRule:
    """Rule of nn.Embedding: a holds indices (B, ...); the columns are one-hot and stay indices, (B, 1, L)."""

    padding_idx: int | None

    def columns(self, a: Tensor) -> Tensor:
        return a.reshape(a.shape[0], 1, -1)

    def rows(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], 1, -1, delta.shape[-1]).transpose(2, 3)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        raise AssertionError("indices have no gradient")

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.transpose(2, 3).reshape(shape)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(a, weight)

    def transpose(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        raise AssertionError("indices have no gradient")

    def total(self, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return delta.new_zeros(weight.shape).index_add_(0, a.flatten(), delta.reshape(-1, delta.shape[-1]))

    def bias(self, bias: Tensor, output: Tensor) -> Tensor:
        raise AssertionError("an embedding has no bias")

    def keep(self, a: Tensor) -> Tensor | None:
        """Returns 1 where the weight is used and 0 at the padding index, whose row gets no gradient."""
        return None if self.padding_idx is None else (a != self.padding_idx).unsqueeze(-1)


Rule = LinearRule | ConvRule | ScaleRule | EmbeddingRule


def _unravel(k: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    index: list[int] = []
    for size in reversed(shape):
        index.append(k % size)
        k //= size
    return tuple(reversed(index))
