"""Checks of a model, its loss and its data, made before work starts.

The information of a record is defined when its loss depends only on that record, without randomness, and has a mixed
second derivative in parameters and inputs. Each check names the module at fault and says what to do. `check_model`
needs no data; `check_batch` adds what a few records of a batch show, and runs the model on three of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from reconbound._internal.checks import InputError, warn_user
from reconbound._internal.opacus_hooks import network, without_hooks
from reconbound._internal.rng import random_states_kept
from reconbound.validate import model as models
from reconbound.validate import watch
from reconbound.validate.derivatives import check_derivatives, check_differences, math_attention, place_precisely
from reconbound.validate.jumps import check_events, check_gaps, check_rounding
from reconbound.validate.model import KinkWarning, ModelError, ReconboundWarning, check_finite, check_tensors
from reconbound.validate.private import Private, Problem, as_private, batch_rows, module_caveats

__all__ = [
    "KinkWarning",
    "ModelError",
    "ReconboundWarning",
    "check_batch",
    "check_clipping",
    "check_model",
    "math_attention",
]


def check_model(model: nn.Module) -> None:
    """Checks what the model shows without data: trainable parameters, batch statistics, dropout, kinks.

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
    models.check_structure(model)
    if kinks := models.kinked_modules(model):
        warn_user(KinkWarning(kinks))


def check_batch(
    model: nn.Module,
    loss_fn: watch.LossFn,
    inputs: Any,
    targets: Any,
    private: Private | Tensor | Sequence[int] | str | None = None,
) -> tuple[str, ...]:
    """Checks a model, its loss and a batch together; the model runs on three of the records and is not changed.

    Args:
        model: the model, in the mode (train or eval) in which it will be used.
        loss_fn: loss_fn(outputs, targets) -> one loss for each record, shape (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such: model(x), model(*x) or model(**x).
        targets: what loss_fn takes, tensors with B rows.
        private: what is private, as in `step_information`; None: every floating-point input.

    Returns:
        Caveats that must be stated with every floor of this model: that it is not proved, where the model has kinks;
        for a module's output, what it is about and which trained parameters it does not cover; how far floors were off
        where the model computes in half precision (its own, or by autocast); otherwise (). They are remembered with the
        model: a ledger that is given its `step_information` has them.

    Raises:
        ModelError: all that `check_model` raises; a value of the batch is not finite; the loss was reduced over the
            batch or has another wrong shape; two runs differ; one record's loss depends on another record; the loss
            has no second derivative (in-place changes, operations cut from the graph); it jumps with the private part
            (comparisons used as numbers, integer casts, argmax, rounding, remainders); in its own precision it is far
            from what it is in float64; or differences of the gradient along the private part contradict its derivative
            (detached parts, straight-through estimators, backward passes by hand). All else in float64 where the model
            runs in it, at the present parameters moved a little.

    Warns:
        ReconboundWarning: kinks that the private part passes through (ReLU, clamps, maxima, medians, max pooling,
            absolute values, comparisons that leave the loss continuous); an attention kernel without second
            derivatives, which `math_attention` replaces; buffers that the forward pass changes; trained parameters
            that depend on what went into a private module by another way than its output.

    Guarantee:
        None: a passed check is evidence from three records at the present parameters, not a proof.

    >>> check_batch(nn.Linear(2, 3), nn.CrossEntropyLoss(), torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    Traceback (most recent call last):
        ...
    reconbound.validate.ModelError: loss_fn must return one loss per record, shape (B,), got a single number: it was
    reduced over the batch, use reduction="none"
    """
    few, trace = check_clipping(model, loss_fn, inputs, targets)
    chosen = None if private is None else as_private(private)
    with without_hooks(model), torch.enable_grad(), random_states_kept():
        check_derivatives(model, loss_fn, few, trace)
        autocast = partial(torch.autocast, enabled=False)  # differences of numbers that it rounds prove nothing
        with autocast("cpu"), autocast("cuda"):
            placed = place_precisely(model, loss_fn, few, chosen)
            kinks = {**check_events(placed), **models.kinked_modules(model)}
            check_differences(placed, trace)
            check_gaps(placed, smooth=not kinks)
            check_rounding(placed, few)
        beside = () if chosen is None else module_caveats(Problem(model, loss_fn, chosen), few)
    if kinks:
        warn_user(KinkWarning(kinks))
    uncovered = [caveat for caveat in beside if caveat.startswith("not covered")]
    if uncovered:
        why = "freeze it (requires_grad_(False)), or read the floors as for an attacker who does not look there"
        warn_user(f"floors do not cover all that is released, {'; '.join(uncovered)}: {why}", ReconboundWarning)
    found = models.model_caveats(model, kinks, beside, trace.dtypes)
    models.CHECKED[network(model)] = found
    return found


def check_clipping(model: nn.Module, loss_fn: watch.LossFn, inputs: Any, targets: Any) -> tuple[Any, watch.Trace]:
    """Checks what clipping needs, without derivatives by the record: kinks, tokens and categories are fine.

    Args:
        model: as in `check_batch`.
        loss_fn: as in `check_batch`.
        inputs: as in `check_batch`.
        targets: as in `check_batch`.

    Returns:
        A few of the records, and a watched run on them.

    Raises:
        ModelError: as `check_batch` does for the structure of the model, values that are not finite, a reduced loss,
            two runs that differ, and records that depend on each other.
    """
    with without_hooks(model):
        models.check_structure(model)
        records = check_tensors(model, inputs, targets)
        if records == 0:
            raise InputError("inputs", "must have at least one record", "none")
        check_finite(inputs, targets)
        some = batch_rows((inputs, targets), [i % records for i in range(watch.PROBE_RECORDS)])
        few = tree_map(watch.converted, some)
        with torch.enable_grad(), random_states_kept():
            trace = watch.check_independence(model, loss_fn, few)
    changed = [name for name, b in model.named_buffers() if not torch.equal(b, trace.buffers[name])]
    if changed:
        warn_user(
            f"the forward pass changes the buffers {changed}: if they keep anything of the records, it is released "
            "without noise; freeze them (eval mode) or leave them out of the released model",
            ReconboundWarning,
        )
    return few, trace
