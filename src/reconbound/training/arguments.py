"""The arguments of PrivateSGD: checks of what the user gives, data as tensors, and the functions that are called.

Inputs are checked here, once; the rest of the package takes them as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from reconbound._internal.checks import InputError, function
from reconbound.training.callbacks import Callback
from reconbound.training.settings import Settings
from reconbound.validate.batch import is_about_kinds, model_dtype


class Fault(RuntimeError):
    """A record or a model with which training cannot continue."""


def evaluate_model(evaluate: Callable[[nn.Module], Any], model: nn.Module) -> dict[str, float]:
    """Returns the numbers that a user's function computes for a model; refuses any other result.

    Args:
        evaluate: model → dictionary of numbers.
        model: the model to evaluate.
    """
    try:
        found = evaluate(model)
    except RuntimeError as reason:
        if not is_about_kinds(reason):
            raise
        why = str(reason).split("\n")[0]
        raise Fault(f"evaluate gave the model data that are not {model_dtype(model)}, as it is: {why}") from reason
    if not isinstance(found, Mapping):
        raise InputError("evaluate", "must return a dictionary of numbers, by name", _describe(found))
    numbers: dict[str, float] = {}
    for name, value in found.items():
        if str(name) in ("run", "step"):
            raise InputError("evaluate", "must not return a number of this name, which the history has itself", name)
        try:
            numbers[str(name)] = float(value)
        except (TypeError, ValueError, RuntimeError):
            raise InputError(f"evaluate's {name!r}", "must be one number", _describe(value)) from None
    return numbers


def _describe(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def as_tensors(model: nn.Module, name: str, tree: Any) -> Any:
    """Returns a data set with its NumPy arrays as tensors, the rest unchanged.

    Arrays of floats get the model's dtype (NumPy's own is float64). Targets of whole numbers become int64, as losses
    require (except bytes, which they accept). Inputs of whole numbers keep their type, because they may be tokens.

    Args:
        model: gives the dtype.
        name: the name of the argument, for messages.
        tree: an array, a tensor, or a tuple or dictionary of them.
    """
    kind = model_dtype(model)

    def convert(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if not np.issubdtype(x.dtype, np.number) and x.dtype != np.bool_:
            raise InputError(name, "must hold numbers", f"an array of {x.dtype}")
        if not x.dtype.isnative or x.dtype == np.longdouble:
            x = x.astype(np.float64 if x.dtype == np.longdouble else x.dtype.newbyteorder("="))
        own = x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy()  # what torch can share
        found = torch.as_tensor(own)
        if found.is_floating_point() and kind is not None:
            return found.to(kind)
        return found.long() if name == "targets" and found.dtype in _NARROW else found

    return tree_map(convert, tree) if any(isinstance(x, np.ndarray) for x in tree_leaves(tree)) else tree


_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)


def row_counts(inputs: Any, targets: Any) -> set[int]:
    """Returns the row counts of the tensors of a data set: one number if all agree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    return {len(t) if t.dim() > 0 else 0 for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor)}


def record_count(inputs: Any, targets: Any) -> int:
    """Returns the number of records of a data set, or raises an InputError where its tensors disagree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    sizes = row_counts(inputs, targets)
    for name, tree in (("inputs", inputs), ("targets", targets)):
        if not any(isinstance(t, Tensor) for t in tree_leaves(tree)) and (name == "inputs" or tree is not None):
            what = "must be a tensor or a NumPy array with one row per record, or a tuple or dictionary of such"
            raise InputError(name, what, f"a {type(tree).__name__} without one")
    if len(sizes) != 1 or 0 in sizes:
        raise InputError("inputs", "and targets must have one row for each record", sorted(sizes))
    return sizes.pop()


def reset_parameters(model: nn.Module) -> None:
    """Calls reset_parameters of every module that has a trainable parameter.

    Frozen parameters and buffers (of a pretrained part) stay as they are.

    Raises:
        InputError: names a parameter that no module resets.
    """
    reset: set[int] = set()
    for module in model.modules():
        own = getattr(module, "reset_parameters", None)
        mine = list(module.parameters(recurse=False))
        if not callable(own) or not any(p.requires_grad for p in mine):
            continue
        kept = [(t, t.detach().clone()) for t in (*mine, *module.buffers(recurse=False))]
        own()
        with torch.no_grad():
            for t, before in kept:
                if not t.requires_grad:
                    t.copy_(before)
        reset |= {id(p) for p in mine}
    for name, p in model.named_parameters():
        if p.requires_grad and id(p) not in reset:
            raise InputError("initialise", "must be given: no module resets the parameter", name)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the training and evaluation modes of all modules at the end of the block."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


_TAKES = {
    "loss_fn": "outputs, targets → one loss per record",
    "initialise": "model → nothing",
    "evaluate": "model → a dictionary of numbers",
    "optimizer": "parameters → a new optimizer, for each run",
    "schedule": "optimizer → a new schedule, for each run",
}


def check_functions(functions: Mapping[str, Any]) -> None:
    """Refuses functions of PrivateSGD, by the argument's name, that cannot be called."""
    for name, given in functions.items():
        if given is not None or name == "loss_fn":
            function(name, given, _TAKES[name])


def check_arguments(model: Any, settings: Any, callbacks: Any, whole_at: Any) -> None:
    """Refuses arguments of PrivateSGD that are of another type."""
    for name, value, kind, what in (
        ("settings", settings, Settings, "a Settings(noise_multiplier=..., max_grad_norm=..., sample_rate=..., ...)"),
        ("model", model, nn.Module, "a torch.nn.Module"),
        ("callbacks", callbacks, list | tuple, "a list of reconbound.training.callbacks.Callback"),
        ("whole_at", whole_at, list | tuple, "a list of step counts"),
    ):
        if not isinstance(value, kind):
            raise InputError(name, f"must be {what}", f"a {type(value).__name__}")
    for callback in callbacks:
        if not isinstance(callback, Callback):
            what = "must be a list of reconbound.training.callbacks.Callback"
            raise InputError("callbacks", what, f"{callbacks!r}"[:200])


def make_part(name: str, maker: Callable[[Any], Any], given: Any) -> Any:
    """Returns the optimizer or the schedule that a user's function creates; refuses any other result.

    Args:
        name: optimizer or schedule.
        maker: the function.
        given: the function's argument.
    """
    try:
        part = maker(given)
    except (TypeError, AttributeError) as error:
        raise InputError(name, f"must be a function that makes one ({error})", f"{maker!r}"[:200]) from error
    needed = {"optimizer": ("param_groups", "step", "state_dict"), "schedule": ("step", "state_dict")}[name]
    if not all(hasattr(part, attribute) for attribute in needed):
        raise InputError(name, f"must be a function that returns one of torch's {name}s", f"{part!r}"[:200])
    return part


def check_length(kind: str, length: int, begun: str, steps: int) -> None:
    """Refuses another kind of training or another length than a learner has begun with.

    Args:
        kind: the training that is asked for, "fit" or "repeat".
        length: its number of steps.
        begun: the training that was begun.
        steps: the number of steps that was begun; 0 for none.
    """
    anew = "make a new PrivateSGD, with a checkpoint folder of its own"
    if steps and kind != begun:
        why = f"cannot follow {begun} on one learner, whose ledger is for {begun}: {anew}"
        raise InputError(kind, why, f"{kind}({length} steps) after {begun}({steps} steps)")
    if steps and length != steps:
        why = "which steps measure which record is planned over all steps of a run"
        raise InputError("steps", f"must stay {steps}, as {kind} began with: {why}. For others {anew}", length)
