"""The clipped gradient sum of a batch, micro-batch by micro-batch, to which a private step adds its noise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import unhooked
from reconbound._internal.rng import random_states_kept
from reconbound.fisher.checks import (
    beyond_torch,
    capturing,
    check_arguments,
    check_clip_norm,
    check_norms,
    check_trainable,
    check_values,
    wrong_kind,
)
from reconbound.fisher.clipping import Clip, check_clip, clipping
from reconbound.fisher.options import Method, SumOptions, check_options
from reconbound.fisher.passes.by_layer import LayerPass
from reconbound.fisher.passes.generic import GenericPass
from reconbound.fisher.passes.protocol import Pass, trainable, zero_sums
from reconbound.fisher.passes.recorder import NotCovered
from reconbound.fisher.probes import SHARED_FROM
from reconbound.validate.private import Inputs, Private, Problem, batch_rows, private_part


@dataclass(frozen=True)
class ClippedSum:
    """The clipped gradient sum of a batch and each record's loss, gradient norm and clip factor, (B,)."""

    loss: Tensor
    norm: Tensor
    factor: Tensor
    gradient_sum: dict[str, Tensor]


@unhooked
def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Inputs,
    targets: Any,
    *,
    max_grad_norm: float,
    clip: Clip = "smooth",
    options: SumOptions = SumOptions(),
) -> ClippedSum:
    """Returns only the sum of clipped per-record gradients, for a step that measures no record.

    Σ_i c(‖g_i‖) g_i

    The sum is the same as that of `step_information`.

    Args:
        model: as in `step_information`.
        loss_fn: as in `step_information`.
        inputs: as in `step_information`.
        targets: as in `step_information`.
        max_grad_norm: the clip norm C.
        clip: "smooth" or "hard".
        options: micro-batches, padding, method and checks.

    Guarantee: adding or removing one record moves the sum by at most sensitivity(clip) · max_grad_norm.
    """
    check_options(options, SumOptions)
    check_clip_norm(max_grad_norm)
    check_arguments(model, loss_fn, inputs, targets)
    problem = Problem(model, loss_fn, Private("nothing"))
    params = released(problem)
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    z = next(iter(params.values())).detach().new_zeros(first.shape[0])
    checking = not (options.checked or capturing(z))
    if checking:
        check_values(model, inputs, targets)
    present = None if options.mask is None else as_present(options.mask, z)
    method = options.method
    total: dict[str, Tensor] = {}
    norms, factors, losses = [z[:0]], [z[:0]], [z[:0]]
    for rows in micro_batches(len(z), options.micro_batch):
        batch = batch_rows((z, inputs, targets), rows)
        work = open_pass(problem, batch, method, check=rows.start == 0 and not options.checked, measured=False)
        method = work.method
        norms.append(work.norms())
        if checking:
            check_norms(norms[-1])
        factors.append(clipping(norms[-1], max_grad_norm, check_clip(clip)).factor)
        losses.append(work.losses)
        part = work.weighted_sum(factors[-1] if present is None else factors[-1] * present[rows])
        total = {name: total[name] + value if total else value for name, value in part.items()}
    return ClippedSum(torch.cat(losses), torch.cat(norms), torch.cat(factors), total or zero_sums(params))


@unhooked
@random_states_kept()
def covering_method(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], inputs: Inputs, targets: Any, private: Private
) -> Method:
    """Returns the method that method="auto" selects for this model.

    A caller of many steps calls this once, on a few records. Calls with the returned method may then pass checked=True.

    Args:
        model: as in `step_information`.
        loss_fn: as in `step_information`.
        inputs: those of a few records.
        targets: those of the same records.
        private: the private part.

    Returns:
        "generic" if the layer rules do not cover the model; otherwise "auto".
    """
    problem = Problem(model, loss_fn, private)
    released(problem)
    if private.part == "nothing":
        first = next(leaf for leaf in tree_leaves((inputs, targets)) if isinstance(leaf, Tensor))
        z = next(iter(trainable(problem).values())).detach().new_zeros(first.shape[0])
    else:
        z = private_part(problem, inputs, targets)
    work = open_pass(problem, (z, inputs, targets), "auto", check=True, measured=private.part != "nothing")
    return "auto" if work.method == "layers" else "generic"


def open_pass(
    problem: Problem,
    batch: tuple[Tensor, Inputs, Any],
    method: Method,
    *,
    check: bool,
    measured: bool = True,
    sloped: bool = False,
) -> Pass:
    """Opens a pass with layer rules where they cover the model, otherwise the generic one.

    Later micro-batches must be opened with the method of the first, because a short one may by chance have the shape of
    something else.

    Args:
        problem: the model, the loss and the private part.
        batch: private part, inputs and targets.
        method: "layers", "generic" or "auto".
        check: run a batch of another size first (see LayerPass).
        measured: products with J will follow.
        sloped: ∇_z ℓ will be needed.
    """
    if method != "generic":
        try:
            return LayerPass(problem, *batch, check=check, measured=measured, sloped=sloped)
        except NotCovered as reason:
            if method == "layers":
                raise ValueError(f'no layer rule covers this model: {reason}; use method="generic"') from reason
        except RuntimeError as error:
            raise (
                (wrong_kind(error, problem.model, *batch[1:]) if check else None) or beyond_torch(error) or error
            ) from error
    try:
        return GenericPass(problem, *batch, check=check and measured)
    except RuntimeError as error:
        raise (
            (wrong_kind(error, problem.model, *batch[1:]) if check else None) or beyond_torch(error) or error
        ) from error


def first_slopes(
    problem: Problem, batch: tuple[Tensor, Inputs, Any], micro_batch: int, method: Method, *, check: bool
) -> tuple[Tensor, Method]:
    """Returns ∇_z ℓ of the first records, (R, ...), in micro-batches, and the method that covers the model.

    Args:
        problem: the model, the loss and the private part.
        batch: private part, inputs and targets of the batch.
        micro_batch: records at a time.
        method: "layers", "generic" or "auto".
        check: run a batch of another size first (see LayerPass).
    """
    slopes: list[Tensor] = []
    for rows in micro_batches(min(len(batch[0]), SHARED_FROM), micro_batch):
        some = batch_rows(batch, rows)
        work = open_pass(problem, some, method, check=check and not slopes, measured=False, sloped=True)
        method = work.method
        slopes.append(work.slope())
    return torch.cat(slopes), method


def micro_batches(records: int, size: int | None) -> Iterator[slice]:
    size = size or max(1, records)
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def released(problem: Problem) -> dict[str, Tensor]:
    """Returns the parameters whose gradients are released, or raises an error that says what is wrong with them."""
    params = trainable(problem)
    check_trainable(problem.model, params)
    return params


def as_present(mask: Tensor, z: Tensor) -> Tensor:
    if mask.shape != (z.shape[0],):
        raise InputError("mask", f"must have one entry per record, shape ({z.shape[0]},)", tuple(mask.shape))
    return mask.to(z)
