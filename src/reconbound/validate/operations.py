"""Lists of the operations of PyTorch that have kinks, and of those that are flat between jumps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

_KINKED = frozenset(
    (  # noqa: SIM905
        "relu leaky_relu rrelu_with_noise _prelu_kernel prelu hardtanh hardsigmoid hardswish softshrink "
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
        "fractional_max_pool3d mkldnn_max_pool2d max_pool1d max_pool2d max_pool3d quantized_max_pool2d abs maximum "
        "minimum fmax fmin max min amax amin aminmax median nanmedian kthvalue mode cummax cummin sort topk clamp "
        "clamp_min clamp_max clip multi_margin_loss multilabel_margin_loss_forward renorm grid_sampler_2d "
        "grid_sampler_3d"
    ).split()
)
_FLAT = frozenset(
    (  # noqa: SIM905
        "round floor ceil trunc fix sign sgn heaviside floor_divide copysign fake_quantize_per_tensor_affine_cachemask "
        "fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine "
        "_fake_quantize_learnable_per_channel_affine histc nextafter"
    ).split()
)
_COMPARISONS = frozenset(
    (  # noqa: SIM905
        "gt ge lt le eq ne isnan isinf isposinf isneginf signbit logical_not logical_and logical_or logical_xor "
        "isclose all any equal is_nonzero isin"
    ).split()
)
_NORMS = frozenset({"linalg_vector_norm", "norm", "dist", "cdist", "_cdist_forward"})


def is_kinked(name: str, args: Any, kwargs: Any) -> bool:
    """Returns whether the operation's derivative jumps somewhere.

    ELU and its kin, the Huber and the smooth L1 loss have a continuous first derivative, so that the gradient that is
    released does not jump; an ELU only where alpha times the input scale is 1.

    Args:
        name: the operation's name in PyTorch, without the underscore of in-place ones.
        args: its positional arguments.
        kwargs: its named arguments.
    """
    if name in _KINKED:
        return True
    if name == "elu":
        alpha, input_scale = (args[i] if len(args) > i else 1 for i in (1, 3))
        return not math.isclose(alpha * input_scale, 1.0)
    if name in _NORMS:
        order = [x for x in (*args, *kwargs.values()) if isinstance(x, int | float) and not isinstance(x, bool)][:1]
        return bool(order) and (math.isinf(order[0]) or order[0] <= 1)
    return False


def is_comparison(name: str) -> bool:
    """Returns whether the operation's result is a truth value."""
    return name in _COMPARISONS


def flat_parts(name: str, args: Any, kwargs: Any, output: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the parts of an operation's output that are flat between jumps.

    Args:
        name: the operation's name in PyTorch, without the underscore of in-place ones.
        args: its positional arguments.
        kwargs: its named arguments.
        output: what it returned for floating-point arguments.

    Returns:
        Pairs of an output tensor that has jumps and the values whose changes are the jumps: itself, for a remainder
        the quotient, for a shrinkage whether the value is kept.
    """
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    if _is_about_infinity(name, args):
        return []
    if name in _FLAT or (name == "div" and kwargs.get("rounding_mode") is not None):
        return [(x, x) for x in outputs]
    part = _jumping_part(name, args, kwargs)
    if part is not None:
        return [(outputs[0], part)]
    return [(x, x) for x in outputs if not x.is_floating_point() and not x.is_complex()]


def _jumping_part(name: str, args: Any, kwargs: Any) -> Tensor | None:
    x = args[0] if args else None
    if not isinstance(x, Tensor):
        return None
    x = x.detach()
    if name == "frac":
        return x.trunc()
    if name in ("remainder", "fmod"):
        other = args[1].detach() if isinstance(args[1], Tensor) else args[1]
        return (x / other).floor() if name == "remainder" else (x / other).trunc()
    if name == "hardshrink":
        return torch.gt(x.abs(), args[1] if len(args) > 1 else kwargs.get("lambd", 0.5))
    if name == "threshold":
        return torch.gt(x, args[1])
    return None


def _is_about_infinity(name: str, args: Any) -> bool:
    """Returns whether the operation tests for infinite values or NaN, which never changes for finite values."""
    if name in ("isnan", "isinf", "isposinf", "isneginf"):
        return True
    if name not in _COMPARISONS or len(args) < 2:
        return False
    first, second = args[:2]
    if isinstance(second, Tensor) and second.dim() == 0 and second.device.type == "cpu" and second.is_floating_point():
        second = float(second)
    return first is second or (isinstance(second, float) and not math.isfinite(second))
