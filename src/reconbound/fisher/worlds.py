"""Distances between a record's clipped gradients in the real world and in those where a public value replaces a part.

No derivative with respect to the record is taken: kinks, tokens and categories are fine. What the distances say of an
attacker: docs/theory/any_attacker.md 6.7.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from reconbound._internal.checks import InputError, choice, function
from reconbound._internal.opacus_hooks import without_hooks
from reconbound._internal.rng import random_states_kept
from reconbound.fisher.clipping import Clip, Clipping
from reconbound.fisher.options import (
    SumOptions,
    check_arguments,
    check_overflow,
    check_values,
    released,
)
from reconbound.fisher.sums import Pass, as_present, micro_batches, open_pass
from reconbound.validate.private import Inputs, Private, Problem, batch_rows, private_part

#: Changes a batch: (inputs, targets) → those of another world, with the same shapes.
World = Callable[[Any, Any], tuple[Any, Any]]
REMOVED = "removed"
NO_WORLDS: Mapping[str, World] = MappingProxyType({})


@dataclass(frozen=True)
class Replacement:
    """A world in which features of every record have public reference values: a function from batch to batch.

    Attributes:
        values: what stands in for the features: one number, or one for each feature.
        features: indices of a record's flattened input; None: all of it.
        part: "input", or "target" for the label.
        name: which of several inputs, by key or position; None where there is only one.

    Guarantee: none of its own. The values must be public: they may depend on what is public of a record, on nothing
    private of it. One that is computed from the private data has to be covered by noise of its own.

    >>> Replacement([38.5], [0])(torch.tensor([[25.0, 1.0], [60.0, 2.0]]), None)[0].tolist()
    [[38.5, 1.0], [38.5, 2.0]]
    """

    values: float | Sequence[float]
    features: Sequence[int] | None = None
    part: str = "input"
    name: str | int | None = None

    def __post_init__(self) -> None:
        choice("part", self.part, ("input", "target"))
        try:
            values = torch.as_tensor(self.values, dtype=torch.float64)
            chosen = None if self.features is None else torch.as_tensor(self.features)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise InputError(
                "values", "must be a number or a list of numbers, and features a list", self.values
            ) from None
        if not bool(values.isfinite().all()) or values.dim() > 1:
            raise InputError("values", "must be a finite number, or a list of finite numbers", self.values)
        if chosen is not None and (chosen.dim() != 1 or chosen.is_floating_point() or chosen.dtype == torch.bool):
            raise InputError("features", "must be a list of whole numbers", self.features)
        if chosen is not None and values.dim() == 1 and len(values) != len(chosen):
            raise InputError("features", f"must be {len(values)}, one for each of the values", self.features)
        object.__setattr__(self, "values", values.item() if values.dim() == 0 else tuple(values.tolist()))
        object.__setattr__(self, "features", None if chosen is None else tuple(chosen.tolist()))

    def __call__(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Returns inputs and targets with the reference values in place."""
        if self.part == "target":
            return inputs, self._replaced(targets)
        if isinstance(inputs, Tensor):
            return self._replaced(inputs), targets
        keys = list(inputs) if isinstance(inputs, Mapping) else list(range(len(inputs)))
        if self.name not in keys:
            raise InputError("name", f"must say which input is replaced, one of {keys}", self.name)
        changed = {key: self._replaced(inputs[key]) if key == self.name else inputs[key] for key in keys}
        return (changed if isinstance(inputs, Mapping) else tuple(changed.values())), targets

    def _replaced(self, values: Any) -> Tensor:
        if not isinstance(values, Tensor):
            raise InputError("part", "must be a tensor", type(values).__name__)
        flat = values.clone().reshape(len(values), -1)
        wanted = torch.as_tensor(self.values, dtype=torch.float64, device=values.device)
        new = wanted.to(values.dtype)
        if not values.is_floating_point() and not torch.equal(new.double(), wanted):
            raise InputError("values", f"must fit the data, which are {values.dtype}", self.values)
        if self.features is None:
            if new.dim() and len(new) != flat.shape[1]:
                raise InputError("values", f"must be one number, or {flat.shape[1]} of them", self.values)
            flat[:] = new
        else:
            if not all(-flat.shape[1] <= f < flat.shape[1] for f in self.features):
                raise InputError("features", f"must lie between 0 and {flat.shape[1] - 1}", self.features)
            flat[:, list(self.features)] = new
        return flat.reshape(values.shape)


@dataclass(frozen=True, repr=False)
class StepDistances:
    """Clipped gradients of a batch in the real world and in others, before noise; secret like the records.

    Attributes:
        loss: of each record, (B,).
        clipped_norm: ‖g̃‖, (B,).
        other_norm: ‖g̃'‖ in each other world, by name, each (B,).
        squared_distance: ‖g̃ − g̃'‖² to each other world, by name, each (B,).
        max_grad_norm: the clip norm; a ledger refuses that of another mechanism.
        clip: the clip, checked alike.
        mask: 1 for the records that took part, 0 for padding, (B,); None: all did.
    """

    loss: Tensor
    clipped_norm: Tensor
    other_norm: dict[str, Tensor]
    squared_distance: dict[str, Tensor]
    max_grad_norm: float
    clip: str
    mask: Tensor | None = None

    def __repr__(self) -> str:
        """Returns only sizes: the values are secret, and long."""
        return f"StepDistances({len(self.loss)} records, worlds {', '.join(self.other_norm) or 'none'})"


def check_worlds(worlds: Any) -> dict[str, World]:
    """Returns the replaced worlds by name; refuses what is none."""
    if not isinstance(worlds, Mapping) or not all(isinstance(name, str) and name for name in worlds):
        raise InputError(
            "worlds", "must be a dictionary from a world's name to a function of inputs and targets", worlds
        )
    if REMOVED in worlds:
        raise InputError("worlds", f"must not name {REMOVED!r}, which is kept without being asked for", list(worlds))
    for name, world in worlds.items():
        function(f"worlds[{name!r}]", world, "inputs, targets → those of the other world")
    return dict(worlds)


@random_states_kept()
def step_distances(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Inputs,
    targets: Any,
    worlds: Mapping[str, World],
    *,
    max_grad_norm: float,
    clip: Clip = "smooth",
    options: SumOptions = SumOptions(),
) -> StepDistances:
    """Returns how far each record's clipped gradient is from that in other worlds, at the present parameters.

        ‖g̃‖,   ‖g̃'‖,   ‖g̃ − g̃'‖²      g̃ the clipped gradient, g̃' the one with the reference in place

    It costs one forward and backward pass, and one more for each world; all are one batch.

    Args:
        model: as in `step_information`; it may have kinks, and need not be differentiable by the record.
        loss_fn: (outputs, targets) → one loss per record, (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such.
        targets: what loss_fn takes, with B rows.
        worlds: the replaced worlds by name, such as Replacement.
        max_grad_norm: the clip norm C.
        clip: "smooth" or "hard".
        options: micro-batches, padding, method and checks.
    """
    check_arguments(model, loss_fn, (inputs, targets), max_grad_norm, clip, options, SumOptions)
    given = check_worlds(worlds)
    with without_hooks(model):
        problem = Problem(model, loss_fn, Private("nothing"))
        released(problem)
        z = private_part(problem, inputs, targets)
        if not options.checked:
            check_values(model, inputs, targets)
        found = []
        for rows in micro_batches(len(z), options.micro_batch):
            own, *real = batch_rows((z, inputs, targets), rows)
            there = [changed_batch(name, world, real[0], real[1]) for name, world in given.items()]
            joined = tree_map(
                lambda *parts: torch.cat(parts) if isinstance(parts[0], Tensor) else parts[0], *[tuple(real), *there]
            )
            batch = (own.repeat(1 + len(there)), joined[0], joined[1])  # all worlds go through the model in one batch
            work = open_pass(problem, batch, options.method, check=not options.checked, measured=False)
            found.append(_distances(work, list(given), clip, max_grad_norm, check=not options.checked))
        present = None if options.mask is None else as_present(options.mask, z)
    if not found:
        none = {name: z for name in given}
        return StepDistances(z, z, none, {name: z.double() for name in given}, max_grad_norm, clip, present)
    return StepDistances(
        torch.cat([one.loss for one in found]),
        torch.cat([one.clipped_norm for one in found]),
        {name: torch.cat([one.other_norm[name] for one in found]) for name in given},
        {name: torch.cat([one.squared_distance[name] for one in found]) for name in given},
        max_grad_norm,
        clip,
        present,
    )


def _distances(work: Pass, worlds: list[str], clip: Clip, bound: float, *, check: bool) -> StepDistances:
    """Returns the distances of a micro-batch from a pass over it and, after it, over its other worlds."""
    norms = work.norms()
    if check:
        check_overflow(norms, "gradient norm", "its gradient")
    factor = Clipping(norms, bound, clip).factor
    records = len(norms) // (1 + len(worlds))
    real, *others = (slice(k * records, (k + 1) * records) for k in range(1 + len(worlds)))
    own = work.rows(real)
    distances = {
        name: own.squared_distances(factor[real], work.rows(rows), factor[rows])  # type: ignore[arg-type]
        for name, rows in zip(worlds, others, strict=True)
    }
    clipped = factor * norms
    other_norm = {name: clipped[rows] for name, rows in zip(worlds, others, strict=True)}
    return StepDistances(work.losses[real], clipped[real], other_norm, distances, bound, clip)


def changed_batch(name: str, world: World, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns the batch of another world; refuses one of other shapes or types.

    The world gets copies: one that writes into its arguments would otherwise change the real world too.
    """
    own = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (inputs, targets))
    found = world(*own)
    if not isinstance(found, tuple) or len(found) != 2:
        raise InputError(f"worlds[{name!r}]", "must return inputs and targets", type(found).__name__)
    (before, tree), (after, other) = tree_flatten((inputs, targets)), tree_flatten(tuple(found))
    kinds = [[(x.shape, x.dtype) if isinstance(x, Tensor) else type(x) for x in leaves] for leaves in (before, after)]
    if tree != other or kinds[0] != kinds[1]:
        raise InputError(f"worlds[{name!r}]", "must keep the shapes and types of inputs and targets", kinds[1])
    return found[0], found[1]
