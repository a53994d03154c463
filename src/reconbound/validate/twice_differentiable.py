"""Replaces functions whose second derivative PyTorch lacks: embedding bags, transposed convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class TwiceDifferentiable(TorchFunctionMode):
    """A mode in which functions whose second derivative PyTorch lacks are computed by others that have one.

    A bag of embeddings is the sum, mean or maximum of its rows; a transposed convolution with output_padding is the one
    without any padding, cut to size. (`F.embedding_bag` has no second derivative at all, that of a transposed
    convolution with output_padding fails record by record.)
    """

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
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **how: Any,
) -> Tensor | None:
    if how["max_norm"] is not None or how["scale_grad_by_freq"] or how["sparse"]:
        return None
    if offsets is not None:
        input, per_sample_weights, inside = _in_rows(input, offsets, per_sample_weights, how["include_last_offset"])
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
    """Returns consecutive bags as rows of the longest one's length, their weights, and which places are used."""
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
    before, after = (each_side(value, rank) for value in (padding, output_padding))
    if not any(after):
        return None
    whole = func(input, weight, None, stride, 0, 0, groups, dilation)
    cut = [n for p, more in zip(reversed(before), reversed(after), strict=True) for n in (-p, more - p)]
    output = F.pad(whole, cut)
    return output if bias is None else output + bias.reshape(-1, *(1,) * rank)


def each_side(value: Any, rank: int) -> tuple[int, ...]:
    """Returns a size for each of a layer's dimensions, from one for all of them or from as many."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * rank if len(values) == 1 else values


_REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.embedding_bag: _bag,
    F.conv_transpose1d: _conv_transpose,
    F.conv_transpose2d: _conv_transpose,
    F.conv_transpose3d: _conv_transpose,
}
