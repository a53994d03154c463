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

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad as convolution_gradients

from reconbound.fisher.passes import convolutions

_RANKS = (1, 2, 3)
_FORWARD: dict[int, Callable[..., Tensor]] = {r: getattr(F, f"conv{r}d") for r in _RANKS}
_INPUT: dict[int, Callable[..., Tensor]] = {r: getattr(convolution_gradients, f"conv{r}d_input") for r in _RANKS}
_WEIGHT: dict[int, Callable[..., Tensor]] = {r: getattr(convolution_gradients, f"conv{r}d_weight") for r in _RANKS}
_MANY_OFFSETS = 16  # on CUDA one transposed convolution beats that many launches, on a CPU F.fold
_MANY_CHANNELS = 16  # from here on cuDNN is faster at a convolution with the turned kernel than at its transpose
_FEW_CHANNELS = 4  # on a CPU a matrix product and adding patches back beats the transposed convolution up to here


@dataclass(frozen=True)
class LinearRule:
    """Rule of nn.Linear with any number of middle dimensions: a (B, ..., in), δ (B, ..., out)."""

    def columns(self, a: Tensor) -> Tensor:
        return self.rows(a)

    def rows(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], 1, -1, delta.shape[-1]).transpose(2, 3)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        return self.from_rows(columns, shape)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.transpose(2, 3).reshape(shape)

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

    def columns(self, a: Tensor) -> Tensor:
        """Returns patches as views, (B, g, C/g · kernel, places). F.unfold would launch one CUDA kernel per record."""
        r, places = len(self.kernel), self._places(a.shape)
        if r == 2 and convolutions.kernels_apply(a, self.dilation, math.prod((*a.shape[:2], *self.kernel, *places))):
            found = convolutions.patches(a.reshape(-1, 1, *a.shape[2:]), self.kernel, self.stride, self.padding)
            return found.reshape(a.shape[0], self.groups, -1, math.prod(places))
        a = convolutions.padded(a, [p for p in reversed(self.padding) for _ in (0, 1)])
        for i in range(r):
            a = a.unfold(2 + i, (self.kernel[i] - 1) * self.dilation[i] + 1, self.stride[i])
            a = a[..., :: self.dilation[i]]
        a = a.permute(0, 1, *range(2 + r, 2 + 2 * r), *range(2, 2 + r))  # B, C, kernel, places
        return a.reshape(a.shape[0], self.groups, -1, math.prod(places))

    def rows(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], self.groups, delta.shape[1] // self.groups, -1)

    def from_columns(self, columns: Tensor, shape: torch.Size) -> Tensor:
        """Returns the transpose of `columns`: adds every patch back where it came from, one kernel offset at a time."""
        if len(self.kernel) == 2 and convolutions.kernels_apply(columns, self.dilation, columns.numel()):
            images = (shape[0] * shape[1], 1, shape[2], shape[3])
            added = convolutions.added_patches(columns, images, self.kernel, self.stride, self.padding)
            return added.reshape(shape)
        many = shape[1] > _FEW_CHANNELS or math.prod(self.kernel) >= _MANY_OFFSETS
        if len(self.kernel) == 2 and (many or columns.is_cuda):
            flat = columns.reshape(shape[0], -1, columns.shape[-1])
            return F.fold(flat, tuple(shape[2:]), self.kernel, self.dilation, self.padding, self.stride)
        places = self._places(shape)
        if columns.is_cuda and math.prod(self.kernel) >= _MANY_OFFSETS:
            return self._spread_by_convolution(columns, shape, places)
        columns = columns.reshape(*shape[:2], math.prod(self.kernel), *places)
        padded = [s + 2 * p for s, p in zip(shape[2:], self.padding, strict=True)]
        out = columns.new_zeros(*shape[:2], *padded)
        for k, offset in enumerate(itertools.product(*map(range, self.kernel))):
            spans = zip(offset, self.dilation, self.stride, places, strict=True)
            window: Any = (slice(o * dil, o * dil + (n - 1) * st + 1, st) for o, dil, st, n in spans)
            out[(..., *window)].add_(columns[:, :, k])
        return convolutions.padded(out, [-p for p in reversed(self.padding) for _ in (0, 1)])

    def _spread_by_convolution(self, columns: Tensor, shape: torch.Size, places: tuple[int, ...]) -> Tensor:
        """Computes `from_columns` as one transposed convolution with a one-hot weight: one launch instead of many."""
        size = math.prod(self.kernel)
        hot = torch.eye(size, dtype=columns.dtype, device=columns.device).reshape(size, 1, *self.kernel)
        flat = columns.reshape(shape[0] * shape[1], size, *places)
        inner = torch.Size((shape[0] * shape[1], 1, *shape[2:]))
        return _INPUT[len(self.kernel)](inner, hot, flat, self.stride, self.padding, self.dilation).reshape(shape)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.reshape(shape)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return _FORWARD[len(self.kernel)](a, weight, None, self.stride, self.padding, self.dilation, self.groups)

    def transpose(self, delta: Tensor, weight: Tensor, shape: torch.Size) -> Tensor:
        if self._goes_by_shifts and _shifts_pay(delta, weight):
            return convolutions.by_shifts(delta, weight, shape, self.stride[0], self.padding)
        if weight.shape[1] <= _FEW_CHANNELS and not delta.is_cuda:
            matrices = weight.reshape(self.groups, weight.shape[0] // self.groups, -1).transpose(1, 2)
            if self.groups == 1:
                return self.from_columns(matrices[0] @ delta.flatten(2), shape)
            return self.from_columns(matrices @ self.rows(delta), shape)
        if delta.is_cuda and self.transposes_as_convolution and weight.shape[1] >= _MANY_CHANNELS:
            return self.reversed_transpose(delta, weight)
        args = (self.stride, self.padding, self.dilation, self.groups)
        return _INPUT[len(self.kernel)](shape, weight, delta, *args)

    @property
    def _goes_by_shifts(self) -> bool:
        """Returns whether the kernel is cut into whole shifts, for a stride above 1 (`convolutions.by_shifts`)."""
        plain = len(self.kernel) == 2 and self.groups == 1 and set(self.dilation) == {1}
        return (
            plain
            and len(set(self.stride)) == 1
            and self.stride[0] > 1
            and all(k % self.stride[0] == 0 for k in self.kernel)
        )

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
        turned = weight.flip(*range(2, 2 + len(self.kernel))).transpose(0, 1)
        return _FORWARD[len(self.kernel)](delta, turned, None, 1, self._reversed_rule().padding, self.dilation)

    def transpose_records(self, weights: Tensor, delta: Tensor, shape: torch.Size) -> Tensor:
        """Returns the transpose with a different weight for each record, (B, g, O, K)."""
        if delta.is_cuda and self.transposes_as_convolution and shape[1] >= _MANY_CHANNELS:
            return self.reversed_transpose_records(weights, delta, shape)
        if delta.is_cuda:
            return self.from_columns(weights.transpose(2, 3) @ self.rows(delta), shape)
        grouped = set(self.stride) == {1} and convolutions.groups_apply(self, shape[1], delta)

        def back(part: Tensor, of_part: Tensor) -> Tensor:
            if grouped:
                return convolutions.grouped_transpose(self, part, of_part, shape)
            return self.from_columns(of_part.transpose(2, 3) @ self.rows(part), torch.Size((len(part), *shape[1:])))

        numbers = weights.shape[1] * weights.shape[3] * (weights.shape[2] if grouped else math.prod(delta.shape[2:]))
        return convolutions.in_parts(back, numbers, delta, weights)

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
        return _WEIGHT[len(self.kernel)](a, weight.shape, delta, *args)

    def bias(self, bias: Tensor, output: Tensor) -> Tensor:
        return bias.reshape(-1, *(1,) * len(self.kernel))

    def _places(self, shape: torch.Size) -> tuple[int, ...]:
        spans = zip(shape[2:], self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return tuple((s + 2 * p - d * (k - 1) - 1) // st + 1 for s, p, d, k, st in spans)


@dataclass(frozen=True)
class ScaleRule(LinearRule):
    """Rule of the affine part of LayerNorm (weight over the last dimensions) or GroupNorm (weight over dimension 1)."""

    channels_first: bool
    weight_dims: int

    def rows(self, delta: Tensor) -> Tensor:
        if self.channels_first:
            return delta.reshape(delta.shape[0], delta.shape[1], 1, -1)
        size = math.prod(delta.shape[delta.dim() - self.weight_dims :])
        return delta.reshape(delta.shape[0], -1, size).transpose(1, 2).unsqueeze(2)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.reshape(shape) if self.channels_first else rows.squeeze(2).transpose(1, 2).reshape(shape)

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
class EmbeddingRule(LinearRule):
    """Rule of nn.Embedding: a holds indices (B, ...), without gradient; one-hot columns stay indices, (B, 1, L)."""

    padding_idx: int | None

    def columns(self, a: Tensor) -> Tensor:
        return a.reshape(a.shape[0], 1, -1)

    def apply(self, a: Tensor, weight: Tensor) -> Tensor:
        return F.embedding(a, weight)

    def total(self, a: Tensor, delta: Tensor, weight: Tensor) -> Tensor:
        return delta.new_zeros(weight.shape).index_add_(0, a.flatten(), delta.reshape(-1, delta.shape[-1]))

    def keep(self, a: Tensor) -> Tensor | None:
        """Returns 1 where the weight is used and 0 at the padding index, whose row gets no gradient."""
        return None if self.padding_idx is None else (a != self.padding_idx).unsqueeze(-1)


@dataclass(frozen=True)
class CopyRule(LinearRule):
    """Rule of a parameter of which each record uses a copy of its own: δ (B, *shape) is the record's gradient.

    The copy is treated as a bias, which meets no input.
    """

    def rows(self, delta: Tensor) -> Tensor:
        return delta.reshape(delta.shape[0], 1, -1, 1)

    def from_rows(self, rows: Tensor, shape: torch.Size) -> Tensor:
        return rows.reshape(shape)


Rule = LinearRule | ConvRule


def _shifts_pay(delta: Tensor, weight: Tensor) -> bool:
    """Returns whether `convolutions.by_shifts` is faster than PyTorch's transpose, which tensor cores make fast."""
    if not delta.is_cuda:
        return True
    return weight.shape[1] >= _MANY_CHANNELS and delta.dtype == torch.float32 and not torch.backends.cudnn.allow_tf32
