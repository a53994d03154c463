"""The private part of a record: an input or some of its features, the label, or the output of an embedding.

Everything else (other inputs, the label, the tokens behind an embedding) is public: known to the attacker.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reconbound._internal.checks import InputError, choice
from reconbound._internal.rng import random_states_kept
from reconbound.validate.model import CHECKPOINTING, ModelError, check_losses
from reconbound.validate.watch import TwiceDifferentiable, arguments, call_with, close

_NAMED = 5  # parameters that a caveat names; the others are counted
Inputs = Any  # a tensor, or a tuple or dictionary of tensors: model(x), model(*x) or model(**x)


@dataclass(frozen=True)
class Private:
    """The private part z of a record.

    Attributes:
        part: "input" (the default), "target" (label privacy: soft targets, with a loss that is differentiable in them)
            or "module" (the OUTPUT of the named module, such as a token embedding, is the private variable; what went
            into the module is public). ("nothing": for a step that measures no record.) A floor for an embedding's
            output is about that vector, taken as any point of its space: it is not about the token, of which there are
            finitely many to choose from, and where the embedding itself is trained its gradient shows which rows were
            used: freeze it.
        name: for "input", the key or position among several inputs; for "module", its dotted name in the model.
        features: a boolean mask or integer indices over one record's flattened private part; all of it when None.
    """

    part: Literal["input", "target", "module", "nothing"] = "input"
    name: str | int | None = None
    features: Tensor | None = None

    def __post_init__(self) -> None:
        choice("part", self.part, ("input", "target", "module", "nothing"))
        if not isinstance(self.name, str | int | None):
            raise InputError("name", "must be None, a text or a position", self.name)
        if self.features is None:
            return
        given: Any = self.features  # of whatever type
        found: Tensor | None = None
        if not isinstance(given, str):
            with suppress(TypeError, ValueError, RuntimeError):
                found = torch.as_tensor(given)
        if found is None or found.is_floating_point() or found.is_complex():
            features = "a tensor or list of features (whole numbers, or a mask)"
            raise InputError("private", f'must be None, {features}, "input", "target" or a Private', given)
        object.__setattr__(self, "features", found)

    @cached_property
    def count(self) -> int:
        """Returns the number of chosen features; found once, because a CUDA graph cannot."""
        chosen = self.features
        if chosen is None:
            raise ValueError("all of the private part's features are chosen: their number is that of the part's")
        return int(chosen.sum()) if chosen.dtype == torch.bool else int(chosen.unique().numel())


@dataclass(frozen=True)
class Problem:
    """A model, its per-record loss, and what is private in a record."""

    model: nn.Module
    loss_fn: Callable[[Any, Any], Tensor]
    private: Private

    def losses(self, z: Tensor, inputs: Inputs, targets: Any, params: Mapping[str, Tensor] | None = None) -> Tensor:
        """Returns the loss of each record, (B,), with z in the place of the private part.

        Args:
            z: the private part, (B, ...).
            inputs: the model's inputs.
            targets: what the loss takes.
            params: parameters to use in place of the model's, by name.
        """
        return self.losses_and_outputs(z, inputs, targets, params)[0]

    def losses_and_outputs(
        self,
        z: Tensor,
        inputs: Inputs,
        targets: Any,
        params: Mapping[str, Tensor] | None = None,
        mode: TwiceDifferentiable | None = None,
    ) -> tuple[Tensor, Any]:
        """Returns the losses, as `losses` does, and the model's outputs.

        Functions get second derivatives where PyTorch has any; gradient checkpointing is refused.

        Args:
            z: as in `losses`.
            inputs: as in `losses`.
            targets: as in `losses`.
            params: as in `losses`.
            mode: takes the place of `TwiceDifferentiable`.
        """
        private = self.private
        answered: AbstractContextManager[Any] = nullcontext()
        if private.part == "target":
            targets = _shaped(z, targets)
        elif private.part == "module":  # it returns z; the gradient of its own parameters still flows
            answer = lambda output: _shaped(z, output) + (output - output.detach())  # noqa: E731
            answered = _called_once(self.model, private, answer)
        elif private.part == "input" and isinstance(inputs, Tensor):
            inputs = _shaped(z, inputs)
        elif private.part == "input":
            name = _only_float(inputs) if private.name is None else private.name
            if isinstance(inputs, Mapping):
                inputs = {**inputs, name: _shaped(z, inputs[name])}
            else:
                inputs = tuple(_shaped(z, x) if i == name else x for i, x in enumerate(inputs))
        with (
            answered,
            sdpa_kernel(SDPBackend.MATH),  # the others have no second derivative
            mode or TwiceDifferentiable(),
            disable_saved_tensors_hooks(CHECKPOINTING),
        ):
            call = arguments(inputs)
            outputs = self.model(*call.args, **call.kwargs) if params is None else call_with(self.model, call, params)
            losses = self.loss_fn(outputs, targets)
        check_losses(losses, z.shape[0])
        return losses, outputs


def as_private(private: Private | Tensor | Sequence[int] | str | None) -> Private:
    """Returns the private part that an argument describes.

    Args:
        private: None: the whole input; a tensor or list: those features of the input; "target": the label.
    """
    if private is None:
        return Private()
    if isinstance(private, Private):
        return private
    if isinstance(private, str) and private in ("input", "target"):
        return Private(part=private)  # type: ignore[arg-type]
    return Private(features=private)  # type: ignore[arg-type]


def module_caveats(problem: Problem, few: Any = None) -> tuple[str, ...]:
    """Returns the caveats of floors for a module's output: what they are about, and what they do not cover.

    Args:
        problem: the model, its loss and what is private; there are none for other private parts.
        few: inputs and targets of a few records, to find the trained parameters whose gradient shows what went into
            the module by another way than its output; None: they are not looked for.
    """
    model, private = problem.model, problem.private
    if private.part != "module":
        return ()
    caveats = [f"about the output of module {private.name!r}, not about what went into it (tokens)"]
    own = {id(p) for p in _module(model, private).parameters() if p.requires_grad}
    if own:
        shown = f"the parameters of module {private.name!r} are trained, and their gradient shows what went into it"
        caveats.append(f"not covered: {shown} (of an embedding: which rows)")
    with torch.enable_grad(), random_states_kept():
        seeing = [] if few is None else _uncovered(problem, *few)
    others = [name for name in seeing if id(model.get_parameter(name)) not in own]
    if others:
        named = ", ".join(repr(name) for name in others[:_NAMED])
        named += f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        shown = f"the gradient of {named} shows what went into module {private.name!r} by another way than its output"
        caveats.append(f"not covered: {shown}")
    return tuple(caveats)


def private_part(problem: Problem, inputs: Inputs, targets: Any) -> Tensor:
    """Returns the private part of the batch, z of shape (B, ...), detached.

    Args:
        problem: the model, the loss and what is private.
        inputs: the model's inputs.
        targets: what the loss takes.
    """
    private = problem.private
    if private.part == "nothing":
        return next(iter(trainable(problem).values())).detach().new_zeros(count_records((inputs, targets)))
    if private.part == "target":
        z = targets
    elif private.part == "module":
        with torch.no_grad(), _called_once(problem.model, private, lambda output: None) as outputs:
            args, kwargs = arguments(inputs)
            problem.model(*args, **kwargs)
        z = outputs[0]
    elif isinstance(inputs, Tensor):
        z = inputs
    else:
        z = inputs[_only_float(inputs) if private.name is None else private.name]
    if not isinstance(z, Tensor) or not z.is_floating_point():
        kind = z.dtype if isinstance(z, Tensor) else type(z).__name__
        where = {"input": "inputs", "target": "targets"}.get(private.part, private.part)
        raise ModelError(
            f"the private part ({where}) must be a floating-point tensor, got {kind}: numbers and images can be "
            'converted by .float(); for tokens use Private("module", "<embedding>"), for labels soft targets'
        )
    z = z.detach()
    return z[:, None] if z.dim() == 1 else z  # one number a record, (B,), is one feature; `_shaped` takes it back


def feature_mask(private: Private, z: Tensor) -> Tensor | None:
    """Returns the chosen features as a 0/1 tensor of one record's shape, or None when all are private.

    Args:
        private: the private part.
        z: its values, (B, ...).
    """
    if private.features is None:
        return None
    chosen, size = private.features.flatten(), math.prod(z.shape[1:])
    if chosen.dtype == torch.bool:
        if chosen.numel() != size:
            raise InputError("private", f"must be a mask of a record's {size} features", f"{chosen.numel()} entries")
        return chosen.to(z).reshape(z.shape[1:])
    if chosen.device.type == "cpu" and chosen.numel() and not -size <= int(chosen.min()) <= int(chosen.max()) < size:
        raise InputError("private", f"must name features from 0 to {size - 1}", f"{chosen.min()} to {chosen.max()}")
    if chosen.device.type == "cpu" and chosen.remainder(size).unique().numel() < chosen.numel():
        raise InputError("private", "must name each feature once; a mask must be of True and False", chosen.tolist())
    mask = torch.zeros(size, dtype=z.dtype, device=z.device)
    mask[chosen.to(z.device)] = 1
    return mask.reshape(z.shape[1:])


def batch_rows(tree: Any, rows: slice | list[int]) -> Any:
    """Returns those rows of every tensor in a tuple or dictionary."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, tree)


def trainable(problem: Problem) -> dict[str, Tensor]:
    """Returns the parameters whose gradients are released, by name; a shared one once."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}


def count_records(tree: Any) -> int:
    """Returns the number of rows of the first tensor in a tuple or dictionary."""
    return next(len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def _shaped(z: Tensor, original: Tensor) -> Tensor:
    """Returns z without the dimension that `private_part` gave to single numbers."""
    return z.squeeze(-1) if z.dim() == original.dim() + 1 else z


def _only_float(inputs: Inputs) -> Any:
    items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    floats = [key for key, x in items if isinstance(x, Tensor) and x.is_floating_point()]
    if len(floats) != 1:
        raise ValueError(f'several inputs: say which is private with Private("input", name), one of {floats}')
    return floats[0]


@contextmanager
def _called_once(
    model: nn.Module, private: Private, answer: Callable[[Tensor], Tensor | None]
) -> Iterator[list[Tensor]]:
    """Makes the private module return an answer to its output (None: the output itself), and notes its outputs."""
    outputs: list[Tensor] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        outputs.append(output)
        return answer(output)

    handle = _module(model, private).register_forward_hook(hook)
    try:
        yield outputs
    finally:
        handle.remove()
    if len(outputs) != 1:
        raise ValueError(
            f"the private module {private.name!r} must be called once in a forward pass, got {len(outputs)} calls"
        )


def _module(model: nn.Module, private: Private) -> nn.Module:
    modules: dict[str, nn.Module] = dict(model.named_modules())
    if private.name not in modules:
        raise ValueError(f"the model has no module named {private.name!r}; it has {sorted(m for m in modules if m)}")
    return modules[str(private.name)]


def _uncovered(problem: Problem, inputs: Any, targets: Any) -> list[str]:
    """Returns the trained parameters whose gradient changes with what goes into the private module, its output kept.

    Other tokens (or values) are put in while the module returns the same output. A gradient that changes depends on
    them by another way than the module's output. Inputs that do not go into the module are public and stay.

    Args:
        problem: the model, its loss and the private module.
        inputs: of a few records.
        targets: of the same records.
    """
    z = private_part(problem, inputs, targets)
    before, given = _gradients(problem, z, inputs, targets)
    leaves, structure = tree_flatten(inputs)
    found: dict[str, None] = {}
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        for other in _others(leaf, getattr(_module(problem.model, problem.private), "padding_idx", None)):
            changed = tree_unflatten([other if k == i else x for k, x in enumerate(leaves)], structure)
            try:
                after, now = _gradients(problem, z, changed, targets)
            except IndexError:  # no such token
                continue
            if all(close(a, b) for a, b in zip(given, now, strict=True)):
                continue
            found |= {name: None for name in before if not close(before[name], after[name])}
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

    handle = _module(problem.model, problem.private).register_forward_pre_hook(note, with_kwargs=True)
    try:
        losses = problem.losses(z, inputs, targets)
    finally:
        handle.remove()
    params = trainable(problem)
    weights = torch.linspace(1, 2, len(losses)).to(losses)
    found = torch.autograd.grad(losses @ weights, list(params.values()), materialize_grads=True)
    return dict(zip(params, found, strict=True)), given
