"""Trained parameters that floors for a module's output leave out: their gradient shows what went into the module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from reconbound._internal.checks import warn_user
from reconbound._internal.rng import random_states_kept
from reconbound.validate.structure import ReconboundWarning
from reconbound.validate.watch import LossFn

if TYPE_CHECKING:
    from reconbound.validate.private import Private, Problem


def uncovered_caveats(model: nn.Module, loss_fn: LossFn, few: Any, private: Private | None) -> tuple[str, ...]:
    """Returns the caveats of floors for a module's output; nothing for other private parts.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of a few records.
        private: what is private.
    """
    from reconbound.validate.private import Problem, module_caveats

    if private is None or private.part != "module":
        return ()
    with torch.enable_grad(), random_states_kept():
        return module_caveats(model, private, find_uncovered(Problem(model, loss_fn, private), *few))


def warn_uncovered(caveats: tuple[str, ...]) -> None:
    """Warns of parameters that the floors do not cover."""
    said = [c for c in caveats if c.startswith("not covered")]
    if said:
        why = "freeze it (requires_grad_(False)), or read the floors as for an attacker who does not look there"
        warn_user(f"floors do not cover all that is released, {'; '.join(said)}: {why}", ReconboundWarning)


def find_uncovered(problem: Problem, inputs: Any, targets: Any) -> list[str]:
    """Returns the trained parameters whose gradient changes with what goes into the private module, its output kept.

    Other tokens (or values) are put in while the module returns the same output. A gradient that changes depends on
    them by another way than the module's output. Inputs that do not go into the module are public and stay.

    Args:
        problem: the model, its loss and the private module.
        inputs: of a few records.
        targets: of the same records.
    """
    from reconbound.validate.private import private_part

    z = private_part(problem, inputs, targets)
    before, given = _gradients(problem, z, inputs, targets)
    leaves, structure = tree_flatten(inputs)
    found: dict[str, None] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        for other in _others(leaf, getattr(_module(problem), "padding_idx", None)):
            changed = tree_unflatten([other if k == i else x for k, x in enumerate(leaves)], structure)
            try:
                after, now = _gradients(problem, z, changed, targets)
            except IndexError:  # no such token
                continue
            if all(_same(a, b) for a, b in zip(given, now, strict=True)):
                continue
            found |= {name: None for name in before if not _same(before[name], after[name])}
    return list(found)


def _others(x: Tensor, fixed: int | None) -> list[Tensor]:
    """Returns other values of the same kind: the records' own in another order; padding tokens stay where they are."""
    if x.dtype == torch.bool:
        return [~x]
    if x.is_floating_point():
        return [0.8 * x.roll(1, 0) + 0.1 * (x.abs().mean() + 1)]
    values = x.unique()
    values = values if fixed is None else values[values != fixed]
    if len(values) > 1:
        following = dict(zip(values.tolist(), values.roll(1).tolist(), strict=True))
        return [torch.tensor([following.get(v, v) for v in x.flatten().tolist()]).to(x).reshape(x.shape)]
    return [torch.where(x == fixed, x, x + d) if fixed is not None else x + d for d in (1, -1)]


def _gradients(problem: Problem, z: Tensor, inputs: Any, targets: Any) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Returns the gradient of the losses, each with its own weight, and what went into the private module."""
    given: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any) -> None:
        given.extend(x.detach().clone() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))

    handle = _module(problem).register_forward_pre_hook(note, with_kwargs=True)
    try:
        losses = problem.losses(z, inputs, targets)
    finally:
        handle.remove()
    params = {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
    weights = torch.linspace(1, 2, len(losses)).to(losses)
    found = torch.autograd.grad(losses @ weights, list(params.values()), allow_unused=True)
    return {n: torch.zeros_like(p) if g is None else g for (n, p), g in zip(params.items(), found, strict=True)}, given


def _same(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    return a.numel() == 0 or float((a - b).abs().max()) <= 100 * torch.finfo(a.dtype).eps * float(a.abs().max())


def _module(problem: Problem) -> nn.Module:
    return problem.model.get_submodule(str(problem.private.name))
