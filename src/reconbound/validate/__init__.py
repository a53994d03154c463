"""What a model must satisfy, said before work starts.

The information of a record is defined when its loss depends on that record alone, without randomness, and has a mixed
second derivative in parameters and inputs. Each check names the module at fault and says what to do. `check_model`
needs no data; `check_batch` adds what a few records of a batch can show, and runs the model on three of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from reconbound._opacus import unhooked
from reconbound._random import random_states_kept
from reconbound.validate.derivatives import check_derivatives, check_differences, math_attention
from reconbound.validate.runs import PROBE_RECORDS, check_coupling, check_randomness, check_steps
from reconbound.validate.structure import (
    KinkWarning,
    ModelError,
    ReconboundWarning,
    check_structure,
    kink_caveats,
    kinked_modules,
    warn_kinks,
)
from reconbound.validate.watch import LossFn, Trace, check_data, record_count, rows, run

from .._check import warn_user

__all__ = ["KinkWarning", "ModelError", "ReconboundWarning", "check_batch", "check_model", "math_attention"]


def check_model(model: nn.Module) -> None:
    """Check what can be told from the model alone: trainable parameters, batch statistics, dropout, kinks.

    Args:
        model: the model, in the mode (train or eval) in which it will be used.

    Raises:
        ModelError: no parameter requires a gradient or one is not finite; a normalisation uses or keeps batch
            statistics; dropout is on.

    Warns:
        ReconboundWarning: the model has ReLU-like activations or max pooling.

    >>> check_model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    reconbound.validate.ModelError: module '2' (BatchNorm1d) mixes the records of a batch: ...
    """
    check_structure(model)
    warn_kinks(kinked_modules(model))


@unhooked
def check_batch(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> tuple[str, ...]:
    """Check a model, its loss and a batch together; the model runs on three of the records, and is left as it was.

    Args:
        model: the model, in the mode (train or eval) in which it will be used.
        loss_fn: loss_fn(outputs, targets) -> one loss for each record, shape (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such: model(x), model(*x) or model(**x).
        targets: what loss_fn takes, tensors with B rows.

    Returns:
        Caveats that every floor of this model must carry: that it is not proved, where the model has kinks; else ().

    Raises:
        ModelError: all that `check_model` raises; a value of the batch is not finite; the loss was reduced over the
            batch or has another wrong shape; two runs differ; one record's loss depends on another record; the loss
            has no second derivative (in-place changes, step functions, operations cut from the graph); or it has one
            that differences of the gradient, in float64, contradict (detached parts, straight-through estimators,
            backward passes by hand). The last is skipped for models with kinks or that do not run in float64.

    Warns:
        ReconboundWarning: kinks (ReLU, max pooling, absolute values); an attention kernel without second derivatives,
            which `math_attention` replaces; buffers that the forward pass changes.

    Guarantee:
        None: a passed check is evidence from three records at the present parameters, not a proof.

    >>> check_batch(nn.Linear(2, 3), nn.CrossEntropyLoss(), torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    Traceback (most recent call last):
        ...
    reconbound.validate.ModelError: loss_fn returned () for 3 records, not one loss for each, (3,): it was reduced
    over the batch; build the loss with reduction='none'
    """
    check_structure(model)
    check_data(inputs, targets)
    few = rows((inputs, targets), [i % record_count(inputs) for i in range(PROBE_RECORDS)])
    with torch.enable_grad(), random_states_kept():
        trace = run(model, loss_fn, *few)
        check_randomness(model, trace, run(model, loss_fn, *few))
        check_coupling(model, loss_fn, few, trace)
        check_steps(model, trace)
        check_derivatives(model, loss_fn, few, trace)
        if not (trace.kinks or kinked_modules(model)):  # differences across a kink would say nothing
            check_differences(model, loss_fn, few, trace)
    _warn_buffers(model, trace)
    kinks = {**trace.kinks, **kinked_modules(model)}
    warn_kinks(kinks)
    return kink_caveats(kinks)


def _warn_buffers(model: nn.Module, trace: Trace) -> None:
    changed = [name for name, b in model.named_buffers() if not torch.equal(b, trace.buffers[name])]
    if changed:
        warn_user(
            f"the forward pass changes the buffers {changed}: if they keep anything of the records, it is released "
            "without noise; freeze them (eval mode) or leave them out of the released model",
            ReconboundWarning,
        )
