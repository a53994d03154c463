"""Functions with parameters, written out: self-attention as two layers to be recorded; the weight of weight_norm."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(
    func: Any, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **how: Any
) -> tuple[Tensor, Tensor | None] | None:
    """Computes F.multi_head_attention_forward with the records in the first dimension of both linear layers.

    None where it is no plain self-attention: another key or value, dropout, or biases and zeros beside the keys.

    Args:
        func: the function that is replaced.
        query: (L, N, E).
        key: the same tensor.
        value: the same tensor.
        rest: the function's other positional arguments.
        how: its keyword arguments.
    """
    _, heads, in_weight, in_bias, bias_k, bias_v, zeros, dropout, out_weight, out_bias = rest
    own, attn_mask = ("use_separate_proj_weight", "static_k", "static_v"), how["attn_mask"]
    other = bias_k is not None or bias_v is not None or zeros or (how["training"] and dropout > 0)
    other = other or any(how[name] is not None and how[name] is not False for name in own)
    other = other or (how["is_causal"] and attn_mask is None)  # PyTorch refuses that
    if other or not query is key is value or query.dim() != 3:
        return None
    x = query.transpose(0, 1)  # (N, L, E), where PyTorch has (L, N, E)
    qkv = F.linear(x, in_weight, in_bias)
    q, k, v = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)  # (N, heads, L, E/heads) each
    mask = _added(attn_mask, how["key_padding_mask"], q)
    weights = None
    if how["need_weights"]:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(2, 3)
        weights = torch.softmax(scores if mask is None else scores + mask, -1)
        mixed = weights @ v
        weights = weights.mean(1) if how["average_attn_weights"] else weights
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, mask)
    output = F.linear(mixed.transpose(1, 2).flatten(2), out_weight, out_bias)
    return output.transpose(0, 1), weights


def attend_to_values(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Tensor | None:
    """Computes F.scaled_dot_product_attention with a softmax that is cheap to differentiate, in float32 or wider.

    None where it is left to PyTorch: with a mask, whose rows may be empty; dropout; groups of heads.

    Args:
        func: the function that is replaced.
        query: (..., L, E).
        key: (..., S, E).
        value: (..., S, O).
        attn_mask: added to the scores, or which of them count.
        dropout_p: the share that is dropped.
        is_causal: place i meets the places up to i.
        how: scale and enable_gqa.
    """
    if not query.is_floating_point() or attn_mask is not None or dropout_p > 0 or how.get("enable_gqa"):
        return None
    scale = how.get("scale")
    scores = (query * (query.shape[-1] ** -0.5 if scale is None else scale)) @ key.transpose(-2, -1)
    if is_causal:
        scores = scores + torch.full(scores.shape[-2:], -torch.inf, dtype=scores.dtype, device=scores.device).triu(1)
    shares = torch.softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)
    return shares.to(value.dtype) @ value


def weight_norm(func: Any, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Computes torch._weight_norm, g v/‖v‖, by functions that a vmap knows."""
    others = [i for i in range(v.dim()) if dim < 0 or i != dim]
    found: Tensor = v * (g / torch.linalg.vector_norm(v, dim=others, keepdim=True))
    return found


def _added(attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Returns what both masks add to the scores, (N or 1, heads or 1, L or 1, L)."""
    masks = []
    if attn_mask is not None:
        masks.append(attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, q.shape[:2]))
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    added = [
        torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in masks
    ]
    return None if not added else added[0] if len(added) == 1 else added[0] + added[1]
