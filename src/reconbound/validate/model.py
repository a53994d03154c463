"""Checks of a model without data (parameters, batch statistics, dropout, kinks), of a batch and of its losses."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._pytree import tree_flatten_with_path

from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import by_opacus, network

#: Names of PyTorch's operations and modules that have kinks, are flat between jumps, or compare.
OPERATIONS: dict[str, list[str]] = json.loads((files("reconbound.validate") / "operations.json").read_text("utf-8"))
_KINKED_MODULES = tuple(getattr(nn, name) for name in OPERATIONS["kinked modules"])


CHECKPOINTING = (
    "the model uses gradient checkpointing (torch.utils.checkpoint) or other saved-tensor hooks, which single records' "
    "gradients and second derivatives do not go with: turn it off (model.gradient_checkpointing_disable()), and save "
    "memory with micro_batch"
)
#: The caveat of every floor of a model that `check_batch` has not checked.
NOT_CHECKED = (
    "not checked: nothing has looked for kinks or jumps in this model (call reconbound.validate.check_batch with it "
    "once)"
)
#: The caveats that `check_batch` found for each model: those of the floors of every ledger of it.
CHECKED: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()

LOSS = "loss_fn"  # stands for a module's path where the loss function is meant


class ModelError(ValueError):
    """Raised where the model, loss or data allow no statement about single records; the message says what to change."""


class ReconboundWarning(UserWarning):
    """Warns that the numbers can be computed but promise less than it seems; the message says why."""


class KinkWarning(ReconboundWarning):
    """Warns that the gradient jumps with the input in `places`: floors of single records are not proved."""

    def __init__(self, kinks: Mapping[str, str]) -> None:
        self.places = ", ".join(f"{label(None, path)} ({what})" for path, what in kinks.items())
        super().__init__(
            f"kinks in {self.places}: the gradient jumps with the input there, the Fisher information does not count "
            "the jumps, and the error floors are not proved; replace them by smooth ones: tanh or GELU for the "
            "activation, average pooling for max pooling"
        )


for _own in (ModelError, ReconboundWarning, KinkWarning):
    _own.__module__ = "reconbound.validate"  # where they are to be imported from


def label(model: nn.Module | None, path: str) -> str:
    """Returns what messages call a module, with its class where the model is given."""
    if path == LOSS:
        return path
    place = f"module '{path}'" if path else "the model's own forward"
    return place if model is None else f"{place} ({type(model.get_submodule(path)).__name__})"


def is_about_checkpointing(error: BaseException) -> bool:
    """Returns whether PyTorch complains of gradient checkpointing, in either of its modes."""
    return "use_reentrant" in str(error) or CHECKPOINTING in str(error)


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch.nn.Module", type(model).__name__)


def check_structure(model: nn.Module) -> None:
    """Refuses a model without finite parameters to train, and modules that no record's gradient goes with.

    Those are: hooks on gradients, statistics of the batch, dropout.
    """
    check_module(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("no parameter of the model requires a gradient: call requires_grad_() on those to be trained")
    for name, p in trainable:
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"parameter '{name}' is not finite: training has diverged, or the checkpoint is damaged")
        if how := _gradient_hook(p, _PARAMETER_HOOKS):
            raise _hook_error(f"parameter '{name}'", how)
    if how := _gradient_hook(torch_module, _COMMON_HOOKS):
        raise _hook_error("every module", how)
    for path, module in model.named_modules():
        if how := _gradient_hook(module, _MODULE_HOOKS):
            raise _hook_error(label(model, path), how)
        batch_norm = isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        if batch_norm or (isinstance(module, _InstanceNorm) and module.training and module.track_running_stats):
            raise ModelError(
                f"{label(model, path)} mixes the records of a batch: its statistics are taken over them, so that no "
                "loss belongs to one record. Use nn.GroupNorm (or nn.LayerNorm), or, with statistics from public "
                "data, eval mode"
            )
        drops = (
            isinstance(module, nn.RReLU)
            or (isinstance(module, _DropoutNd) and module.p > 0)
            or (isinstance(module, nn.RNNBase) and module.dropout > 0 and module.num_layers > 1)
            or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)
        )
        if module.training and drops:
            raise ModelError(
                f"{label(model, path)} drops values at random: call .eval() on it or set its rate to 0 (the noise "
                "that protects is the one on the gradient)"
            )


_PARAMETER_HOOKS = {
    "_backward_hooks": "register_hook",
    "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook",
}
_MODULE_HOOKS = {
    "_backward_hooks": "register_full_backward_hook",
    "_backward_pre_hooks": "register_full_backward_pre_hook",
}
_COMMON_HOOKS = {
    "_global_backward_hooks": "torch.nn.modules.module.register_module_full_backward_hook",
    "_global_backward_pre_hooks": "torch.nn.modules.module.register_module_full_backward_pre_hook",
}


def _gradient_hook(holder: Any, kinds: Mapping[str, str]) -> str | None:
    """Returns what registered a hook on a gradient; None where there are no hooks but Opacus's.

    Args:
        holder: a parameter, a module, or PyTorch's module of hooks that all modules have.
        kinds: the holder's attributes that hold hooks, and what registers them.
    """
    for kind, how in kinds.items():
        if not all(by_opacus(hook) for hook in (getattr(holder, kind, None) or {}).values()):
            return how
    return None


def _hook_error(where: str, how: str) -> ModelError:
    """Returns the refusal of a hook: single records' gradients are computed without it, and it would be ignored."""
    return ModelError(
        f"{where} has a hook on its gradient ({how}), which is not run here: gradients of single records are computed "
        "without it. Remove it (handle.remove()); to leave parameters as they are, call requires_grad_(False) on them"
    )


def kinked_modules(model: nn.Module) -> dict[str, str]:
    return {path: type(m).__name__ for path, m in model.named_modules() if isinstance(m, _KINKED_MODULES)}


def model_caveats(
    model: nn.Module, kinks: Mapping[str, str], beside: Iterable[str] = (), computed: Iterable[torch.dtype] = ()
) -> tuple[str, ...]:
    r"""Returns the caveats of every floor of a model: of its kinks, of its private part, of half precision.

    The numbers are those of benchmarks/half_precision.py.

    Args:
        model: the model; the dtypes of its parameters are read.
        kinks: what has a kink, by the module that it is in.
        beside: the caveats of its private part.
        computed: dtypes of what it computed when it was run; under autocast only these show it.

    >>> model_caveats(nn.Linear(2, 1), {})
    ()
    >>> print(*model_caveats(nn.Linear(2, 1).bfloat16(), {"": "relu"}), sep="\n")
    not proved: the model has kinks (relu at the model's own forward)
    computed in bfloat16: beside float64, up to 1 in 20 floors of small networks was more than 15 % too high, and single
    ones up to 8 times; measure in float32 to be sure
    """
    places = ", ".join(f"{what} at {label(None, path)}" for path, what in kinks.items())
    kinked = (f"not proved: the model has kinks ({places})",) if kinks else ()
    short = {*computed, *(p.dtype for p in model.parameters())} & {torch.bfloat16, torch.float16}
    halves = (
        f"computed in {str(kind).removeprefix('torch.')}: beside float64, up to 1 in 20 floors of small networks was "
        "more than 15 % too high, and single ones up to 8 times; measure in float32 to be sure"
        for kind in sorted(short, key=str)
    )
    return (*kinked, *beside, *halves)


def known_caveats(model: nn.Module) -> tuple[str, ...]:
    """Returns the caveats of a model's floors: what its check found, or that there was none, with the modules' kinks.

    Args:
        model: the model as it is now, or Opacus's wrapper of it.
    """
    found = CHECKED.get(network(model))
    if found is not None:
        return found
    return (*model_caveats(model, kinked_modules(model)), NOT_CHECKED)


def model_dtype(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of the first floating-point parameter."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), None)


def is_about_kinds(error: BaseException) -> bool:
    """Returns whether PyTorch complains of a dtype, in one of its several ways."""
    message = str(error)
    return any(word in message for word in ("dtype", "scalar type", "type (", "data type", "not implemented for"))


def describe_input_dtype(error: BaseException, model: nn.Module, inputs: Any) -> str | None:
    """Returns which argument has another dtype than the model, and how to convert it; None for other errors.

    >>> error = RuntimeError("mat1 and mat2 must have the same dtype, but got Double and Float")
    >>> describe_input_dtype(error, nn.Linear(2, 1), torch.ones(3, 2, dtype=torch.float64))
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


def describe_target_dtype(error: BaseException, targets: Any) -> str | None:
    """Returns which target has a dtype that the loss does not take.

    >>> error = RuntimeError("expected target dtype to be Long or Byte, but got Int")
    >>> describe_target_dtype(error, torch.ones(3, dtype=torch.int32))
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
        found = False
        for path, leaf in tree_flatten_with_path(tree)[0]:
            place = name + "".join(map(str, path))
            if isinstance(leaf, np.ndarray | np.generic):
                kind = model_dtype(model) if np.issubdtype(leaf.dtype, np.floating) else None
                how = place if kind is None else f"{place}, dtype={kind}"
                raise ModelError(f"{place} is a NumPy array, it must be a tensor: torch.as_tensor({how})")
            if not isinstance(leaf, Tensor):
                continue
            found = True
            records = leaf.shape[0] if records is None and leaf.dim() else records
            if leaf.dim() == 0 or leaf.shape[0] != records:
                rows = f"{records} rows, one per record of inputs" if records else "one row per record"
                raise ModelError(f"{place} must have {rows}, got the shape {tuple(leaf.shape)}")
            if leaf.is_inference():
                raise ModelError(f"{place} was made in torch.inference_mode(): pass {place}.clone()")
            if device is not None and leaf.device != device:
                raise ModelError(f"{place} is on {leaf.device}, the model on {device}: use {place}.to('{device}')")
        if not found and (name == "inputs" or tree is not None):
            raise ModelError(
                f"{name} must be a tensor with one row per record, or a tuple or dictionary of such, "
                f"got {type(tree).__name__} without a tensor"
            )
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
    """Returns the tensors of a tuple or dictionary, each with its place in it."""
    leaves, _ = tree_flatten_with_path(tree)
    return [(name + "".join(map(str, path)), x) for path, x in leaves if isinstance(x, Tensor)]


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
