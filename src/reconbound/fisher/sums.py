"""The clipped gradient sum of a batch, micro-batch by micro-batch, to which a private step adds its noise."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from reconbound._internal.checks import InputError
from reconbound._internal.opacus_hooks import without_hooks
from reconbound._internal.rng import random_states_kept
from reconbound.divergences import sensitivity
from reconbound.fisher.clipping import Clip, Clipping
from reconbound.fisher.options import (
    Method,
    SumOptions,
    capturing,
    check_arguments,
    check_overflow,
    check_values,
    explain_dtype_error,
    explain_torch_error,
    released,
)
from reconbound.fisher.passes.by_layer import LayerPass
from reconbound.fisher.passes.generic import GenericPass
from reconbound.fisher.passes.mixed import MixedPass
from reconbound.fisher.passes.products import zero_sums
from reconbound.fisher.passes.recorder import _CHECKED, NotCovered, passed_checks
from reconbound.validate.model import ModelError
from reconbound.validate.private import Inputs, Private, Problem, batch_rows, count_records, private_part, trainable
from reconbound.validate.watch import arguments, converted

Pass = LayerPass | MixedPass | GenericPass


@dataclass(frozen=True)
class ClippedSum:
    """The clipped gradient sum of a batch and each record's loss, gradient norm and clip factor, (B,)."""

    loss: Tensor
    norm: Tensor
    factor: Tensor
    gradient_sum: dict[str, Tensor]


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
        - With method="generic" or "mixed": for every model, because each record is run by itself. A model that uses
          what it kept of earlier records is refused. Functions with a rule of their own for torch.func.vmap are trusted
          to keep records apart, and a model must not count its calls.
        - With method="layers": for a model that treats records alone in every batch. That is checked in the first
          batch, in those after 1, 2, 4, 8, ... batches, and in any larger one; a model that mixes records only in other
          batches is not found there.
        - For gradients as the model computes them in this batch. PyTorch may round a record's gradient otherwise in a
          batch of another size. `check_sums` refuses models whose gradients are mostly such rounding.
    """
    check_arguments(model, loss_fn, (inputs, targets), max_grad_norm, clip, options, SumOptions)
    with without_hooks(model):
        problem = Problem(model, loss_fn, Private("nothing"))
        params = released(problem)
        z = private_part(problem, inputs, targets)
        checking = not (options.checked or capturing(z))
        if checking:
            check_values(model, inputs, targets)
        present = None if options.mask is None else as_present(options.mask, z)
        method, check = options.method, not options.checked
        total: dict[str, Tensor] = {}
        norms, factors, losses = [z[:0]], [z[:0]], [z[:0]]
        for rows in micro_batches(len(z), options.micro_batch):
            batch = batch_rows((z, inputs, targets), rows)
            work = open_pass(problem, batch, method, check=check, measured=False)
            if rows.start and work.method not in ("layers", method):  # only now it shows that records are mixed
                how: Any = {"max_grad_norm": max_grad_norm, "clip": clip}
                how["options"] = replace(options, method=work.method)
                return clipped_gradient_sum(model, loss_fn, inputs, targets, **how)
            norms.append(work.norms())
            if checking:
                check_overflow(norms[-1], "gradient norm", "its gradient", rows.start)
            check = checking and check and has_flat_record(norms[-1])
            method = method if check else work.method
            factors.append(Clipping(norms[-1], max_grad_norm, clip).factor)
            losses.append(work.losses)
            part = work.weighted_sum(factors[-1] if present is None else factors[-1] * present[rows])
            total = {name: total[name].add_(value) if total else value for name, value in part.items()}
        return ClippedSum(torch.cat(losses), torch.cat(norms), torch.cat(factors), total or zero_sums(params))


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
        "auto" if the layer rules cover the model; otherwise "mixed" or "generic".
    """
    with without_hooks(model):
        problem = Problem(model, loss_fn, private)
        released(problem)
        z = private_part(problem, inputs, targets)
        work = open_pass(problem, (z, inputs, targets), "auto", check=True, measured=private.part != "nothing")
        return "auto" if work.method == "layers" else work.method


def open_pass(
    problem: Problem,
    batch: tuple[Tensor, Inputs, Any],
    method: Method,
    *,
    check: bool,
    measured: bool = True,
    sloped: bool = False,
) -> Pass:
    """Opens a pass with layer rules where they cover the model, otherwise the mixed one, otherwise the generic one.

    Later micro-batches must be opened with the method of the first, because a short one may by chance have the shape of
    something else.

    Args:
        problem: the model, the loss and the private part.
        batch: private part, inputs and targets.
        method: "layers", "mixed", "generic" or "auto". "mixed" and "auto" go on to the next where the first fails.
        check: run a batch of another size first (see LayerPass).
        measured: products with J will follow.
        sloped: ∇_z ℓ will be needed.
    """
    how: dict[str, Any] = {"check": check, "measured": measured, "sloped": sloped}
    if method == "auto" and passed_checks(problem, batch[0], check, "mixed").copied:
        method = "mixed"  # as found before
    try:
        if method in ("auto", "layers"):
            try:
                return LayerPass(problem, *batch, **how)
            except NotCovered as reason:
                if method == "layers":
                    raise ValueError(f'no layer rule covers this model: {reason}; use method="mixed"') from reason
        if method != "generic":
            try:
                return MixedPass(problem, *batch, **how)
            except NotCovered:
                pass
            except RuntimeError as error:  # what vmap cannot do the generic way cannot do either, and explains
                if isinstance(error, torch.OutOfMemoryError):
                    raise
        return GenericPass(problem, *batch, check=check and measured)
    except RuntimeError as error:
        explained = explain_dtype_error(error, problem.model, *batch[1:]) if check else None
        raise explained or explain_torch_error(error) or error from error


@random_states_kept()
def numbers_per_record(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], inputs: Inputs, targets: Any, method: Method
) -> int | None:
    """Returns how many numbers a pass without products keeps for a record; None where not all layers have rules.

    Args:
        model: as in `step_information`.
        loss_fn: as in `step_information`.
        inputs: those of one record.
        targets: those of the same record.
        method: that `covering_method` returned.
    """
    problem = Problem(model, loss_fn, Private("nothing"))
    with without_hooks(model):
        batch = (private_part(problem, inputs, targets), inputs, targets)
        work = open_pass(problem, batch, method, check=False, measured=False)
    if isinstance(work, GenericPass) or work.method != "layers":
        return None
    uses = zip(work.sites, work.inputs, work.deltas, strict=True)
    numbers = sum(delta.numel() + (a if s.weight is None else s.rule.columns(a)).numel() for s, a, delta in uses)
    return numbers + sum(p.numel() for p in work.params.values())


def check_next_batch(model: nn.Module) -> None:
    """Makes layer rules check the model's next batch, whatever has passed before: a CUDA graph repeats no check."""
    for passed in _CHECKED.get(model, {}).values():
        passed.largest = 0


def micro_batches(records: int, size: int | None) -> Iterator[slice]:
    size = size or max(1, records)
    for start in range(0, records, size):
        yield slice(start, min(start + size, records))


def has_flat_record(norms: Tensor) -> bool:
    """Returns whether a record has no gradient. It does not show whose rows its gradient would be in."""
    return not bool(norms.all())


def as_present(mask: Tensor, z: Tensor) -> Tensor:
    if mask.shape != (z.shape[0],):
        raise InputError("mask", f"must have one entry per record, shape ({z.shape[0]},)", tuple(mask.shape))
    return mask.to(z)


LossFn = Callable[[Any, Any], Tensor]
TESTED_RECORDS = 4
_NEVER = 1e30  # a clip norm that no gradient reaches


#: Tolerances of two computations of a gradient: relative to it, and to all of the gradient.
_PRECISE, _ROUGH = (1e-6, 1e-9), (1e-2, 1e-4)
_ROUNDING = 5e-2  # of a gradient alone and in a batch, in the model's own precision


def methods_that_pass(
    model: nn.Module,
    loss_fn: LossFn,
    few: tuple[Any, Any],
    kinds: Sequence[Private],
    *,
    max_grad_norm: float,
    clip: Clip,
) -> list[Method]:
    """Returns the method for each kind of private part whose sums pass the test on a few records.

    Args:
        model: the model, in the mode in which it will be trained.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        few: inputs and targets of a few records.
        kinds: the private parts to find a method for.
        max_grad_norm: the clip norm C.
        clip: "smooth" or "hard".

    Raises:
        ModelError: no method passes.
    """
    methods = [covering_method(model, loss_fn, *few, kind) for kind in kinds]
    following: tuple[tuple[Method, Method], ...] = (("auto", "mixed"), ("mixed", "generic"))
    for method, other in following:
        if method in methods and find_fault(model, loss_fn, few, method) is not None:
            methods = [other] * len(kinds)
    for method in sorted(set(methods)):
        check_sums(model, loss_fn, *few, max_grad_norm=max_grad_norm, clip=clip, method=method)
    return methods


def check_sums(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Any,
    targets: Any,
    *,
    max_grad_norm: float,
    clip: Clip = "smooth",
    method: Method = "auto",
) -> None:
    """Refuses a model whose gradient sums are wrong or not clipped on a few records of the batch.

    Three comparisons, on up to four records:

        the sum without a clip         against the gradient of the summed loss, by torch.autograd
        norms of the batch             against those of its records one at a time
        the sum of one record          against sensitivity(clip) · max_grad_norm, in float64

    A model that fails the first two in its own precision is tried in float64 before it is refused. If only its own
    precision fails the second, rounding decides over its gradients, and it is refused too.

    Args:
        model: the model, in the mode in which it will be trained.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such.
        targets: what loss_fn takes, with B rows.
        max_grad_norm: the clip norm C.
        clip: "smooth" or "hard".
        method: as in `clipped_gradient_sum`.

    Raises:
        ModelError: a comparison failed; the message names the parameter or the record.

    Guarantee: none; a passed test is evidence from these records at the present parameters.
    """
    few = _spread(inputs, targets)
    fault = find_fault(model, loss_fn, few, method)
    if fault is not None:
        raise ModelError(f"{fault}: the model cannot be trained privately by this way (method {method!r})")
    rounding = _find_rounding(model, loss_fn, few, method)
    if rounding is not None:
        raise ModelError(
            f"{rounding}: rounding decides over the gradients of this model in its precision, and a record would move "
            "those of others; use float64, or scale the data"
        )
    how: Any = {"max_grad_norm": max_grad_norm, "clip": clip, "options": SumOptions(method=method, checked=True)}
    for i in range(count_records(few)):
        one = clipped_gradient_sum(model, loss_fn, *batch_rows(few, slice(i, i + 1)), **how)
        size = _size(one.gradient_sum)
        if not size <= sensitivity(clip) * max_grad_norm * (1 + 1e-4):
            raise ModelError(
                f"record {i} of the batch contributes {size / max_grad_norm:.4g} times max_grad_norm to the gradient "
                f"sum, more than the {sensitivity(clip)} that the noise is made for: this model cannot be trained "
                "privately in this precision; use float64"
            )


def find_fault(model: nn.Module, loss_fn: LossFn, few: tuple[Any, Any], method: Method) -> str | None:
    """Returns a description of the fault in the gradient sums of a few records, or None.

    Args:
        model: the model, in the mode in which it will be trained.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        few: inputs and targets of a few records.
        method: as in `clipped_gradient_sum`.
    """
    exact = all(p.dtype == torch.float64 for p in model.parameters() if p.is_floating_point())
    own, least = _PRECISE if exact else _ROUGH
    how: Any = {"max_grad_norm": _NEVER, "clip": "hard", "options": SumOptions(method=method, checked=True)}
    whole = clipped_gradient_sum(model, loss_fn, *few, **how)
    least *= float(whole.norm.double().sum())
    fault = None
    for name, plain in _autograd_sum(model, loss_fn, few).items():
        off = float((whole.gradient_sum[name].double() - plain).norm())
        if fault is None and not off <= own * float(plain.norm()) + least:
            share = off / max(float(plain.norm()), 1e-300)
            fault = f"the gradient sum of the parameter {name} is off by {share:.1%} from autograd's"
    for i, norm in enumerate(whole.norm.tolist() if fault is None else ()):
        one = float(clipped_gradient_sum(model, loss_fn, *batch_rows(few, slice(i, i + 1)), **how).norm)
        if not abs(one - norm) <= own * one + least:
            fault = f"record {i} of the batch has gradient norm {norm:.6g}, by itself {one:.6g}"
            break
    wide = None if fault is None or exact else _in_float64(model, few)  # the difference may be only rounding
    return fault if wide is None else find_fault(wide[0], loss_fn, wide[1], method)


def _find_rounding(model: nn.Module, loss_fn: LossFn, few: tuple[Any, Any], method: Method) -> str | None:
    """Returns a description of a record whose gradient is another one alone than in the batch of a few, or None.

    A removed record changes the batches of all others. Their clipped gradients must not move with it.
    """
    how: Any = {"max_grad_norm": _NEVER, "clip": "hard"}
    for i in range(count_records(few)):
        only = torch.arange(count_records(few)) == i
        options = SumOptions(method=method, checked=True)
        beside = clipped_gradient_sum(model, loss_fn, *few, **how, options=replace(options, mask=only))
        alone = clipped_gradient_sum(model, loss_fn, *batch_rows(few, slice(i, i + 1)), **how, options=options)
        off = _size({k: v - alone.gradient_sum[k] for k, v in beside.gradient_sum.items()})
        least = _ROUGH[1] * float(beside.norm.double().sum())
        if not off <= _ROUNDING * _size(alone.gradient_sum) + least:
            share = off / max(_size(alone.gradient_sum), 1e-300)
            return f"the gradient of record {i} of the batch differs by {share:.1%} from its gradient by itself"
    return None


def _size(gradients: Mapping[str, Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in gradients.values()]).norm())


def _autograd_sum(model: nn.Module, loss_fn: LossFn, few: tuple[Any, Any]) -> Mapping[str, Tensor]:
    """Returns the gradient of the summed losses by torch.autograd, in float64, by parameter name."""
    problem = Problem(model, loss_fn, Private("nothing"))
    params = trainable(problem)
    with torch.enable_grad():
        losses = problem.losses(private_part(problem, *few), *few).double().sum()
        if not losses.requires_grad:
            return {name: torch.zeros_like(p, dtype=torch.float64) for name, p in params.items()}
        found = torch.autograd.grad(losses, list(params.values()), materialize_grads=True)
    return {name: g.double() for name, g in zip(params, found, strict=True)}


def _spread(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns up to four records from all over the batch."""
    records = count_records((inputs, targets))
    chosen = sorted({i * (records - 1) // max(1, TESTED_RECORDS - 1) for i in range(TESTED_RECORDS)})
    few: tuple[Any, Any] = tree_map(lambda t: t[chosen] if isinstance(t, Tensor) else t, (inputs, targets))
    return few


def _in_float64(model: nn.Module, few: tuple[Any, Any]) -> tuple[nn.Module, tuple[Any, Any]] | None:
    """Returns the model and the records in float64, or None where the model does not run in it."""
    widened = tree_map(lambda x: converted(x, torch.float64), few)
    try:
        wide = copy.deepcopy(model).double()
        with torch.no_grad():
            args, kwargs = arguments(widened[0])
            wide(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError):
        return None
    return wide, widened
