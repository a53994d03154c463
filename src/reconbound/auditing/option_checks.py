"""Checks the model of a plan on three records before anything is timed or trained.

An error is one line. Notes on what the model's floors do not cover are kept.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from reconbound._internal.checks import InputError
from reconbound.auditing.options import Plan, as_tensor, make_loss, make_model, outputs_of
from reconbound.validate import KinkWarning, ModelError, ReconboundWarning, check_batch, check_model

if TYPE_CHECKING:
    from reconbound.data import Dataset

_FEW = 3


def check_plan(dataset: Dataset, plan: Plan) -> dict[str, str]:
    """Refuses a model that cannot be trained or accounted for. Returns notes on what its floors do not cover.

    Args:
        dataset: the data of the audit.
        plan: the options of the audit.

    Returns:
        Empty for a smooth model. "kinks": floors of single records are not proved. "model": other warnings.

    Raises:
        InputError: the factory is missing or raises, returns no module, or its model does not accept the records or
            returns too few numbers for them.
        ModelError: as `reconbound.validate.check_batch`.
    """
    model = make_model(dataset, plan.model, seed=0)
    inputs, targets = as_tensor(dataset.inputs[:_FEW]), as_tensor(dataset.targets[:_FEW])
    own = ":" in plan.model
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            check_model(model)
            _check_outputs(dataset, plan.model, model, inputs)
            private = None if dataset.private is None else as_tensor(dataset.private)
            check_batch(model, make_loss(dataset), inputs, targets, private=private)
        except ModelError as reason:
            raise ModelError(f"the model of {plan.model}: {reason}" if own else str(reason)) from reason
    found = [w.message for w in caught if isinstance(w.message, ReconboundWarning)]
    kinks = [message for message in found if isinstance(message, KinkWarning)]
    others = list(dict.fromkeys(str(message) for message in found if not isinstance(message, KinkWarning)))
    told = {"kinks": _said_of_kinks(kinks[-1].places)} if kinks else {}
    return {**told, "model": "; ".join(others)} if others else told


def _said_of_kinks(places: str) -> str:
    return (
        f"The floors of single records are not proved for this model: it has kinks, in {places}, where the gradient "
        "jumps with the input, and the Fisher information does not count the jumps. Tanh or GELU and average pooling "
        "have none. What holds whatever the data (Theorem 1, corners, Le Cam, rate–distortion, ε) needs no smooth "
        "model."
    )


def _check_outputs(dataset: Dataset, spec: str, model: nn.Module, inputs: Tensor) -> None:
    """Checks that the model returns one row per record, with a number for each class, or one number."""
    classes, wanted, given = dataset.task == "classes", outputs_of(dataset), len(inputs)
    must = "must name a factory whose model" if ":" in spec else "must be a model that"
    try:
        with torch.no_grad():
            found: Any = model(inputs)
    except Exception as reason:  # the user's code may raise anything
        said = (str(reason).splitlines() or [""])[0]
        raise InputError(
            "model", f"{must} takes records of shape {dataset.shape} ({type(reason).__name__}: {said})", spec
        ) from reason
    if not isinstance(found, Tensor):
        raise InputError("model", f"{must} returns a tensor", f"{spec} -> {type(found).__name__}")
    shape = tuple(found.shape)
    if classes and (len(shape) != 2 or shape[0] != given or shape[1] < wanted):
        what = f"gives {wanted} outputs for each record, one for each of the {wanted} classes"
        raise InputError("model", f"{must} {what}", f"{spec} -> {_outputs(shape, given)}")
    if not classes and (len(shape) < 2 or shape[0] != given or found.numel() != given):
        raise InputError("model", f"{must} gives one output for each record, (B, 1)", f"{spec} -> {shape}")


def _outputs(shape: tuple[int, ...], given: int) -> str:
    one_each = len(shape) == 2 and shape[0] == given
    return f"{shape[1]} output{'' if shape[1] == 1 else 's'}" if one_each else f"shape {shape} for {given} records"


__all__ = ["check_plan"]
