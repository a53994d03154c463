"""Checks of a batch and of its losses: tensors, devices, rows, dtypes, finite values."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from reconbound.validate.model import ModelError


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
    other = [(place, x) for place, x in tensors("inputs", inputs) if x.dtype != kind]
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
    for place, x in tensors("targets", targets):
        why = str(error).split("\n")[0]
        return (
            f"{place} is {x.dtype}, which loss_fn does not take ({why}): class numbers are {place}.long(), "
            f"values {place}.float()"
        )
    return None


def check_tensors(model: nn.Module, inputs: Any, targets: Any) -> int:
    """Checks that inputs and targets are tensors on the model's device, with a row per record each.

    Returns:
        The number of records.
    """
    devices = {p.device for p in model.parameters()}
    device = next(iter(devices)) if len(devices) == 1 else None  # spread over several: PyTorch must say
    records: int | None = None
    for name, tree in (("inputs", inputs), ("targets", targets)):
        for place, leaf in _leaves(name, tree):
            if isinstance(leaf, np.ndarray | np.generic):
                kind = model_dtype(model) if np.issubdtype(leaf.dtype, np.floating) else None
                how = place if kind is None else f"{place}, dtype={kind}"
                raise ModelError(f"{place} is a NumPy array, it must be a tensor: torch.as_tensor({how})")
        found = tensors(name, tree)
        if not found and (name == "inputs" or tree is not None):
            raise ModelError(
                f"{name} must be a tensor with one row per record, or a tuple or dictionary of such, "
                f"got {type(tree).__name__} without a tensor"
            )
        for place, leaf in found:
            records = leaf.shape[0] if records is None and leaf.dim() else records
            if leaf.dim() == 0 or leaf.shape[0] != records:
                rows = f"{records} rows, one per record of inputs" if records else "one row per record"
                raise ModelError(f"{place} must have {rows}, got the shape {tuple(leaf.shape)}")
            if leaf.is_inference():
                raise ModelError(f"{place} was made in torch.inference_mode(): pass {place}.clone()")
            if device is not None and leaf.device != device:
                raise ModelError(f"{place} is on {leaf.device}, the model on {device}: use {place}.to('{device}')")
    return records or 0


def check_finite(inputs: Any, targets: Any) -> None:
    """Refuses values that are infinite or NaN; the message names the first."""
    for place, leaf in (*tensors("inputs", inputs), *tensors("targets", targets)):
        if not leaf.is_floating_point() or leaf.is_meta:
            continue
        bad = ~torch.isfinite(leaf)
        if bool(bad.any()):
            where = [int(i) for i in bad.nonzero()[0]]
            raise ModelError(
                f"{place}{where} is {leaf[tuple(where)].item()}, one of {int(bad.sum())} values that are not "
                "finite: remove those records or fill the values in"
            )


def tensors(name: str, tree: Any) -> list[tuple[str, Tensor]]:
    return [(place, x) for place, x in _leaves(name, tree) if isinstance(x, Tensor)]


def _leaves(name: str, tree: Any) -> list[tuple[str, Any]]:
    return [(name + "".join(map(str, path)), x) for path, x in tree_flatten_with_path(tree)[0]]


def check_losses(losses: Any, records: int) -> None:
    """Checks that there is one floating-point loss for each record."""
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise ModelError(f"loss_fn must return a floating-point tensor with one loss per record, (B,), got {kind}")
    if losses.shape == (records,):
        return
    shape = tuple(losses.shape)
    if len(shape) > 1 and shape[0] == records:
        what = f"(B, {', '.join(map(str, shape[1:]))}): sum or average it over each record, losses.flatten(1).mean(1)"
    elif math.prod(shape) == 1:
        what = 'a single number: it was reduced over the batch, use reduction="none"'
    else:
        what = f"{shape} for {records} records: it was reduced over the batch or counts something else"
    raise ModelError(f"loss_fn must return one loss per record, shape (B,), got {what}")
