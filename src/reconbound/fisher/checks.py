"""Checks of a step's arguments. Each message names the argument; nothing here changes a value.

`check_arguments` does not read the data and is always made. `check_values` reads data and parameters (on CUDA it
waits for them), so it is left out while a graph is captured and where the caller has made it before (checked=True).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from reconbound._internal.checks import InputError, number
from reconbound.validate.kinds import model_dtype, said_of_inputs, said_of_targets
from reconbound.validate.structure import (
    CHECKPOINTING,
    ModelError,
    check_module,
    check_structure,
    is_about_checkpointing,
)

_SMALLEST_CLIP = 1e-12  # the squares of gradients as small as that are lost in float32


def check_arguments(
    model: Any, loss_fn: Any, inputs: Any, targets: Any, generator: torch.Generator | None = None
) -> None:
    """Checks kinds and devices: a module, a function, tensors on the module's device, a generator there too."""
    check_module(model)
    if not callable(loss_fn):
        raise InputError("loss_fn", "must be a function (outputs, targets) -> losses, (B,)", type(loss_fn).__name__)
    check_autocast(model)
    if torch.is_inference_mode_enabled():
        raise ModelError("this call takes gradients, which torch.inference_mode() forbids: call it outside")
    devices = {p.device for p in model.parameters()}
    device = next(iter(devices)) if len(devices) == 1 else None  # spread over several: PyTorch must say
    records: int | None = None
    for name, tree in (("inputs", inputs), ("targets", targets)):
        tensors = 0
        for place, leaf in _leaves(name, tree):
            if isinstance(leaf, np.ndarray | np.generic):
                kind = model_dtype(model) if np.issubdtype(leaf.dtype, np.floating) else None
                how = place if kind is None else f"{place}, dtype={kind}"
                raise ModelError(f"{place} is a NumPy array, it must be a tensor: torch.as_tensor({how})")
            if isinstance(leaf, Tensor):
                tensors += 1
                records = leaf.shape[0] if records is None and leaf.dim() else records
                if leaf.dim() == 0 or leaf.shape[0] != records:
                    rows = f"{records} rows, one per record of inputs" if records else "one row per record"
                    raise ModelError(f"{place} must have {rows}, got the shape {tuple(leaf.shape)}")
                if leaf.is_inference():
                    raise ModelError(f"{place} was made in torch.inference_mode(): pass {place}.clone()")
                if device is not None and leaf.device != device:
                    raise ModelError(f"{place} is on {leaf.device}, the model on {device}: use {place}.to('{device}')")
        if not tensors and (name == "inputs" or tree is not None):
            raise ModelError(
                f"{name} must be a tensor with one row per record, or a tuple or dictionary of such, "
                f"got {type(tree).__name__} without a tensor"
            )
    if generator is not None and device is not None and generator.device.type != device.type:
        raise ModelError(
            f"generator is on {generator.device}, the model on {device}: torch.Generator('{device.type}') is wanted"
        )


def check_autocast(model: nn.Module) -> None:
    """Refuses autocast around the whole call: the sums of gradients would be rounded to 8 or 11 bits."""
    for kind in {p.device.type for p in model.parameters()}:
        if torch.is_autocast_enabled(kind):
            raise ValueError(
                f"autocast is on for {kind} around this call, in which gradients are clipped and summed: "
                "put `with torch.autocast(...)` into the model's forward instead"
            )


def check_values(model: nn.Module, inputs: Any, targets: Any) -> None:
    """Checks for BatchNorm, dropout in use and parameters that are not finite (ModelError), and for finite data."""
    check_structure(model)
    for name, tree in (("inputs", inputs), ("targets", targets)):
        for place, leaf in _leaves(name, tree):
            if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.is_meta:
                continue
            bad = ~torch.isfinite(leaf)
            if bool(bad.any()):
                where = [int(i) for i in bad.nonzero()[0]]
                raise ValueError(
                    f"{place}{where} is {leaf[tuple(where)].item()}, one of {int(bad.sum())} values that are not "
                    "finite: remove those records or fill the values in"
                )


def capturing(tensor: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured. Nothing may wait for a value then."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _leaves(name: str, tree: Any) -> Iterator[tuple[str, Any]]:
    for path, leaf in tree_flatten_with_path(tree)[0]:
        yield name + "".join(map(str, path)), leaf


def check_norms(norms: Tensor) -> None:
    """Refuses gradients that are not finite: one makes the whole sum not finite, which shows who took part."""
    _check_finite(norms, "gradient norm", "its gradient")


def check_information(traces: Tensor) -> None:
    """Refuses information that is not finite: products with the Jacobian overflowed, though the gradient did not."""
    _check_finite(traces, "information", "the derivative of its gradient")


def _check_finite(values: Tensor, name: str, what: str) -> None:
    bad = torch.nonzero(~torch.isfinite(values)).flatten()
    if len(bad):
        first = int(bad[0])
        raise ValueError(
            f"record {first} of the batch has {name} {values[first].item()}: {what} overflows {values.dtype} or the "
            "dtype of the model; scale the data or the loss, or use float64"
        )


def check_trainable(model: nn.Module, params: Mapping[str, Tensor]) -> None:
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
            raise ValueError(
                f"the module {name or type(module).__name__!r} is compiled: pass the model as it was before"
            )
    if not params:
        raise ValueError("the model has no trainable parameters: nothing is released")
    for name, p in params.items():
        if not p.is_floating_point():
            raise ValueError(f"the trainable parameter {name} is {p.dtype}: it must be real, as two real parameters")


def check_clip_norm(max_grad_norm: float) -> None:
    if number("max_grad_norm", max_grad_norm, above=0) < _SMALLEST_CLIP:
        raise InputError("max_grad_norm", f"must be at least {_SMALLEST_CLIP:g} (scale the loss)", max_grad_norm)


CUT = (
    "look for detach(), .data, argmax, integer casts, NumPy or torch.no_grad() in the model and in loss_fn; a true "
    "zero passes with checked=True"
)


def no_dependence(part: str) -> ValueError:
    return ValueError(f"the gradient does not depend on the private part ({part}): {CUT}")


def no_gradient() -> ValueError:
    return ValueError(f"the loss does not depend on any trainable parameter: {CUT}")


_BEYOND = (  # what PyTorch says, and of what
    (("Sparse", "sparse"), "it has sparse gradients: use nn.Embedding(..., sparse=False)"),
    (("vmap", "functorch", "transform", "torch.func"), "torch.func cannot take it record by record"),
)


def beyond_torch(error: RuntimeError) -> ModelError | None:
    """Returns an error that explains what PyTorch cannot differentiate per record, or twice; None for other errors."""
    if isinstance(error, torch.OutOfMemoryError):
        return None
    said = str(error)
    for words, why in _BEYOND:
        if any(word in said for word in words):
            return ModelError(f"this model cannot be differentiated: {why} ({said.splitlines()[0][:200]})")
    return None


def wrong_kind(error: RuntimeError, model: nn.Module, inputs: Any, targets: Any) -> ValueError | None:
    """Returns an error that explains a float64 batch with a float32 model, or unsuitable targets; otherwise None."""
    if is_about_checkpointing(error):
        return ValueError(CHECKPOINTING)
    said = said_of_inputs(error, model, inputs)
    if said is None and any(word in str(error) for word in ("target", "Long", "nll_loss")):  # by version and device
        said = said_of_targets(error, targets)
    return None if said is None else ValueError(said)
