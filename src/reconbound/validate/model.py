"""Checks of the model without data: trainable parameters, batch statistics, dropout, kinks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm

from reconbound._internal.checks import InputError, warn_user
from reconbound._internal.opacus_hooks import by_opacus, is_wrapper

_SMOOTH = "replace them by smooth ones: tanh or GELU for the activation, average pooling for max pooling"

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
#: The caveats that `check_batch` found for each model.
_CHECKED: WeakKeyDictionary[nn.Module, tuple[str, ...]] = WeakKeyDictionary()

LOSS = "loss_fn"  # stands for a module's path where the loss function is meant


class ModelError(ValueError):
    """Raised where the model, loss or data allow no statement about single records; the message says what to change."""


class ReconboundWarning(UserWarning):
    """Warns that the numbers can be computed but promise less than it seems; the message says why."""


class KinkWarning(ReconboundWarning):
    """Warns that the gradient jumps with the input in `places`: floors of single records are not proved."""

    def __init__(self, message: str, places: str) -> None:
        super().__init__(message)
        self.places = places


for _own in (ModelError, ReconboundWarning, KinkWarning):
    _own.__module__ = "reconbound.validate"  # where they are to be imported from


def place(path: str) -> str:
    return path if path == LOSS else f"module '{path}'" if path else "the model's own forward"


def label(model: nn.Module, path: str) -> str:
    return path if path == LOSS else f"{place(path)} ({type(model.get_submodule(path)).__name__})"


def is_about_checkpointing(error: BaseException) -> bool:
    """Returns whether PyTorch complains of gradient checkpointing, in either of its modes."""
    return "use_reentrant" in str(error) or CHECKPOINTING in str(error)


def check_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError("model", "must be a torch.nn.Module", type(model).__name__)


def check_structure(model: nn.Module) -> None:
    check_module(model)
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("no parameter of the model requires a gradient: call requires_grad_() on those to be trained")
    for name, p in trainable:
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"parameter '{name}' is not finite: training has diverged, or the checkpoint is damaged")
    _check_hooks(model, dict(trainable))
    for path, module in model.named_modules():
        if _uses_batch_statistics(module):
            raise ModelError(
                f"{label(model, path)} mixes the records of a batch: its statistics are taken over them, so that no "
                "loss belongs to one record. Use nn.GroupNorm (or nn.LayerNorm), or, with statistics from public "
                "data, eval mode"
            )
        if _drops_at_random(module):
            raise ModelError(
                f"{label(model, path)} drops values at random: call .eval() on it or set its rate to 0 (the noise "
                "that protects is the one on the gradient)"
            )


def _check_hooks(model: nn.Module, trainable: Mapping[str, nn.Parameter]) -> None:
    """Refuses hooks on gradients.

    Single records' gradients are computed without them, so that training and measuring would ignore them.
    """
    kinds = {"_backward_hooks": "register_hook", "_post_accumulate_grad_hooks": "register_post_accumulate_grad_hook"}
    holders: list[tuple[str, Any, Mapping[str, str]]] = [(f"parameter '{n}'", p, kinds) for n, p in trainable.items()]
    kinds = {"_backward_hooks": "full_backward_hook", "_backward_pre_hooks": "full_backward_pre_hook"}
    own = {kind: f"register_{how}" for kind, how in kinds.items()}
    holders += [(label(model, path), module, own) for path, module in model.named_modules()]
    everywhere = {f"_global{kind}": f"torch.nn.modules.module.register_module_{how}" for kind, how in kinds.items()}
    holders.append(("every module", torch_module, everywhere))
    for where, holder, hooks in holders:
        for kind, how in hooks.items():
            if all(by_opacus(hook) for hook in (getattr(holder, kind, None) or {}).values()):
                continue
            raise ModelError(
                f"{where} has a hook on its gradient ({how}), which is not run here: gradients of single records are "
                "computed without it. Remove it (handle.remove()); to leave parameters as they are, call "
                "requires_grad_(False) on them"
            )


def _uses_batch_statistics(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats


def _drops_at_random(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.RReLU) or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)


def kinked_modules(model: nn.Module) -> dict[str, str]:
    return {path: type(m).__name__ for path, m in model.named_modules() if isinstance(m, _KINKED_MODULES)}


def kink_caveats(kinks: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the caveat of every floor of a model with these kinks: nothing, or one sentence."""
    if not kinks:
        return ()
    places = ", ".join(f"{what} at {place(path)}" for path, what in kinks.items())
    return (f"not proved: the model has kinks ({places})",)


def precision_caveats(model: nn.Module, computed: Iterable[torch.dtype] = ()) -> tuple[str, ...]:
    """Returns the caveat of every floor of a model that computes in half precision: nothing, or one sentence.

    The numbers are those of benchmarks/half_precision.py.

    Args:
        model: the model; the dtypes of its parameters are read.
        computed: dtypes of what it computed when it was run; under autocast only these show it.

    >>> precision_caveats(nn.Linear(2, 1))
    ()
    >>> print(precision_caveats(nn.Linear(2, 1).bfloat16())[0])
    computed in bfloat16: beside float64, up to 1 in 20 floors of small networks was more than 15 % too high, and single
    ones up to 8 times; measure in float32 to be sure
    """
    short = {*computed, *(p.dtype for p in model.parameters())} & {torch.bfloat16, torch.float16}
    return tuple(
        f"computed in {str(kind).removeprefix('torch.')}: beside float64, up to 1 in 20 floors of small networks was "
        "more than 15 % too high, and single ones up to 8 times; measure in float32 to be sure"
        for kind in sorted(short, key=str)
    )


def remember_check(model: nn.Module, caveats: tuple[str, ...]) -> None:
    """Remembers the caveats that a check found, for the floors of every ledger of this model.

    Args:
        model: the model that was checked, or Opacus's wrapper of it.
        caveats: what must be stated with its floors.
    """
    _CHECKED[_network(model)] = caveats


def known_caveats(model: nn.Module) -> tuple[str, ...]:
    """Returns the caveats of a model's floors: what its check found, or that there was none, with the modules' kinks.

    Args:
        model: the model as it is now, or Opacus's wrapper of it.
    """
    found = _CHECKED.get(_network(model))
    if found is not None:
        return found
    return (*kink_caveats(kinked_modules(model)), *precision_caveats(model), NOT_CHECKED)


def _network(model: nn.Module) -> nn.Module:
    inner = getattr(model, "_module", None) if is_wrapper(model) else None
    return inner if isinstance(inner, nn.Module) else model


def warn_kinks(kinks: Mapping[str, str]) -> None:
    if kinks:
        places = ", ".join(f"{place(path)} ({what})" for path, what in kinks.items())
        said = (
            f"kinks in {places}: the gradient jumps with the input there, the Fisher information does not count the "
            f"jumps, and the error floors are not proved; {_SMOOTH}"
        )
        warn_user(KinkWarning(said, places))
