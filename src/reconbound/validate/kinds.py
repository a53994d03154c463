"""Kinds of numbers: error messages for data and a model of different dtypes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path


def model_dtype(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def is_about_kinds(error: BaseException) -> bool:
    """Returns whether PyTorch complains of a dtype, in one of its several ways."""
    said = str(error)
    return any(word in said for word in ("dtype", "scalar type", "type (", "data type", "not implemented for"))


def said_of_inputs(error: BaseException, model: nn.Module, inputs: Any) -> str | None:
    """Returns which argument has another dtype than the model, and how to convert it; None for other errors.

    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    >>> said_of_inputs(error, nn.Linear(2, 1), torch.ones(3, 2, dtype=torch.float64))
    'inputs is torch.float64, the model torch.float32: convert it, inputs.to(torch.float32)'
    """
    kind = model_dtype(model)
    if kind is None or not is_about_kinds(error):
        return None
    other = [(place, x) for place, x in _tensors("inputs", inputs) if x.dtype != kind]
    for place, x in sorted(other, key=lambda item: not item[1].is_floating_point()):  # whole numbers may be meant to be
        images = "" if x.is_floating_point() else " (images of 0 to 255: then divide by 255)"
        return f"{place} is {x.dtype}, the model {kind}: convert it, {place}.to({kind}){images}"
    return None


def said_of_targets(error: BaseException, targets: Any) -> str | None:
    """Returns which target has a dtype that the loss does not take.

    >>> error = RuntimeError("expected target dtype to be Long or Byte, but got Int")
    >>> said_of_targets(error, torch.ones(3, dtype=torch.int32))
    'targets is torch.int32, which loss_fn does not take (expected target dtype to be Long or Byte, but got Int): class
    numbers are targets.long(), values targets.float()'
    """
    if not is_about_kinds(error):
        return None
    for place, x in _tensors("targets", targets):
        why = str(error).split("\n")[0]
        return (
            f"{place} is {x.dtype}, which loss_fn does not take ({why}): class numbers are {place}.long(), "
            f"values {place}.float()"
        )
    return None


def numpy_arrays(inputs: Any, targets: Any) -> list[str]:
    """Returns the names of the arguments that are NumPy arrays."""
    named = [*_leaves("inputs", inputs), *_leaves("targets", targets)]
    return [place for place, x in named if isinstance(x, np.ndarray | np.generic)]


def _tensors(name: str, tree: Any) -> list[tuple[str, Tensor]]:
    return [(place, x) for place, x in _leaves(name, tree) if isinstance(x, Tensor)]


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    return [(name + "".join(map(str, path)), x) for path, x in tree_flatten_with_path(tree)[0]]
