"""Second derivatives: whether they exist, and whether differences of the gradient agree with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reconbound._internal.checks import warn_user
from reconbound.validate import model as models
from reconbound.validate.placed import Placed, converted, drawn_like
from reconbound.validate.watch import LossFn, Trace, call_with, first_line, in_place_error, leaf, run

_BESIDE = (0.1, 0.003)  # how far from the records, which may lie on kinks: pixels of 0, ties of a maximum


@contextmanager
def math_attention() -> Iterator[None]:
    """Makes scaled_dot_product_attention use the plain formula, which can be differentiated twice and forward.

        softmax(Q Kᵀ / √d) V

    The fused kernels (flash, memory-efficient, cuDNN) have a first reverse derivative only.

    >>> q = torch.ones(1, 1, 2, 4, requires_grad=True)
    >>> with math_attention():
    ...     out = nn.functional.scaled_dot_product_attention(q, q, q)
    >>> (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    >>> torch.autograd.grad(first.sum(), q)[0].shape
    torch.Size([1, 1, 2, 4])
    """
    with sdpa_kernel(SDPBackend.MATH):
        yield


def check_derivatives(model: nn.Module, loss_fn: LossFn, few: Any, trace: Trace) -> None:
    try:
        _second_derivative(model, trace)
    except RuntimeError as error:
        if models.is_about_checkpointing(error):
            raise models.ModelError(models.CHECKPOINTING) from error
        if "inplace" in str(error):
            raise in_place_error(model, trace.in_place, error) from error
        if trace.attention and _works_with_math_attention(model, loss_fn, few):
            places = ", ".join(models.place(path) for path in trace.attention)
            warn_user(
                f"the attention kernel of {places} has no second derivative: run under "
                "reconbound.validate.math_attention(), which switches to the plain formula",
                models.ReconboundWarning,
            )
            return
        path = _culprit(model, trace)
        raise models.ModelError(
            f"{models.label(model, path)} cannot be differentiated twice ({first_line(error)}): write it with "
            "operations whose gradients PyTorch can differentiate; for attention see reconbound.validate.math_attention"
        ) from error


def _second_derivative(model: nn.Module, trace: Trace) -> None:
    """Takes the derivative in the inputs of the gradient's component along a random direction of parameters."""
    params = [p for p in model.parameters() if p.requires_grad]
    inputs = [x for x in tree_leaves(trace.inputs) if isinstance(x, Tensor) and x.requires_grad]
    first: Any = [None]
    if trace.losses.requires_grad:
        first = torch.autograd.grad(trace.losses.sum(), params, create_graph=True, allow_unused=True)
    if all(g is None for g in first):
        raise _cut_error(model, trace, "the loss does not depend on any parameter that requires a gradient")
    component = torch.stack([(g * torch.randn_like(g)).sum() for g in first if g is not None]).sum()
    if inputs:  # tokens have no derivative: their embedding or the label is then the private part
        second = torch.autograd.grad(component, inputs, allow_unused=True) if component.requires_grad else [None]
        if all(g is None for g in second):
            raise _cut_error(model, trace, "the gradient does not depend on the inputs")


def _cut_error(model: nn.Module, trace: Trace, what: str) -> models.ModelError:
    """Names the first module that receives tensors of the graph and returns none."""
    for path, given, output in trace.calls:
        if _any_grad(given) and not _any_grad(output):
            return models.ModelError(
                f"{models.label(model, path)} cuts the graph: {what}. It is not differentiable: look for detach(), "
                ".data, numpy, argmax, integer casts or torch.no_grad()"
            )
    return models.ModelError(f"{what}: look for detach(), numpy, argmax or torch.no_grad() in the model and in loss_fn")


def _any_grad(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(tree))


def _innermost_first(trace: Trace) -> list[tuple[str, Any, Any]]:
    return sorted(trace.calls, key=lambda call: -len(call[0].split(".")) if call[0] else 0)


def _culprit(model: nn.Module, trace: Trace) -> str:
    """Returns the innermost module that fails by itself, on the inputs that it was given; otherwise the model."""
    for path, (args, kwargs), _ in _innermost_first(trace):
        module = model.get_submodule(path)
        args, kwargs = tree_map(leaf, (args, kwargs))
        leaves = [x for x in (*tree_leaves((args, kwargs)), *module.parameters()) if _any_grad(x)]
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        try:
            outputs = [y for y in tree_leaves(call_with(module, buffers, args, kwargs)) if _any_grad(y)]
            first = torch.autograd.grad([(y * y).sum() for y in outputs], leaves, create_graph=True, allow_unused=True)
            torch.autograd.grad([(g * g).sum() for g in first if _any_grad(g)], leaves, allow_unused=True)
        except (RuntimeError, ValueError):  # torch says ValueError where there is nothing to differentiate
            return path
    return ""


def check_differences(placed: Placed, model: nn.Module, trace: Trace) -> None:
    """Refuses models whose gradient changes with the private part in a way that autograd's derivative does not show.

    Args:
        placed: a few records, in the precision to compute in.
        model: the model.
        trace: a watched run, from which the module at fault is found.

    Raises:
        ModelError: differences of the gradient converge to something else than its derivative.
    """
    params = list(placed.params.values())
    if not placed.z or not _misses(lambda z: (placed.losses(z).sum(), params), placed.z, placed.chosen):
        return
    with math_attention():
        calls = ((path, model.get_submodule(path), given) for path, given, _ in _innermost_first(trace))
        path = next((path for path, module, given in calls if _module_misses(module, given, placed.z[0].dtype)), "")
    raise models.ModelError(
        f"{models.label(model, path)} has a gradient that changes with the inputs in a way that its second "
        "derivative does not show: information would be missed. Look for detach(), a straight-through estimator, "
        "or a backward pass written by hand that cannot be differentiated"
    )


def _misses(
    function: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]],
    z: list[Tensor],
    chosen: Callable[[list[Tensor]], list[Tensor]],
) -> bool:
    """Returns whether, near z, differences of a gradient converge to something other than its derivative.

    Differences across a kink change with their step and prove nothing; other points and smaller steps are then taken.

    Args:
        function: of z: a number, and what its gradient is taken in.
        z: the point; others are chosen near it.
        chosen: sets the features that do not move to zero in a direction.
    """
    generator = torch.Generator().manual_seed(4)
    sizes = [x.abs().mean() + 1e-3 for x in z]
    for distance in _BESIDE:
        pair = [[s * drawn_like(x, generator) for s, x in zip(sizes, z, strict=True)] for _ in range(2)]
        beside, direction = map(chosen, pair)
        base = [x + distance * b for x, b in zip(z, beside, strict=True)]
        try:
            if _misses_at(function, base, direction, generator):
                return True
        except (RuntimeError, ValueError):  # ValueError: nothing to differentiate
            return False
    return False


def _misses_at(
    function: Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]],
    base: list[Tensor],
    direction: list[Tensor],
    generator: torch.Generator,
) -> bool:
    exact = all(x.dtype == torch.float64 for x in base)
    steps, allowed, rounding = ((1e-5, 1e-6, 1e-7), 1e-3, 1e-8) if exact else ((1e-2, 3e-3, 1e-3), 0.05, 0.01)
    weights: list[Tensor] = []  # a random direction of what the gradient is taken in

    def component(size: float) -> tuple[Tensor, list[Tensor]]:
        moved = [(x + size * v).requires_grad_() for x, v in zip(base, direction, strict=True)]
        gradient = torch.autograd.grad(*function(moved), create_graph=True, materialize_grads=True)
        weights.extend(drawn_like(g, generator) for g in gradient[len(weights) :])
        return torch.stack([(g * w).sum() for g, w in zip(gradient, weights, strict=True)]).sum(), moved

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= allowed * max(abs(a), abs(b)) + rounding * abs(float(here.detach()))

    here, moved = component(0.0)
    second = torch.autograd.grad(here, moved, materialize_grads=True)
    derivative = sum(float((g * v).sum()) for g, v in zip(second, direction, strict=True))
    found: list[float] = []
    for step in steps:
        found.append(float((component(step)[0] - component(-step)[0]).detach()) / (2 * step))
        if close(found[-1], derivative):
            return False
    return any(close(a, b) for a, b in pairwise(found))


def _module_misses(module: nn.Module, given: Any, dtype: torch.dtype) -> bool:
    """Does the same as `_misses` for one module, on the inputs that it was given, in its parameters and inputs."""
    own = dtype if dtype == torch.float64 else None
    state = {name: converted(t, own) for name, t in (*module.named_parameters(), *module.named_buffers())}
    params = [state[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad]
    leaves, structure = tree_flatten(tree_map(lambda x: converted(x, own), given))
    moving = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]

    def square(z: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        moved = dict(zip(moving, z, strict=True))
        args, kwargs = tree_unflatten([moved.get(i, x) for i, x in enumerate(leaves)], structure)
        fresh = {name: t if t.requires_grad else t.clone() for name, t in state.items()}
        outputs = [y for y in tree_leaves(call_with(module, fresh, args, kwargs)) if _any_grad(y)]
        return torch.stack([(y * y).sum() for y in outputs]).sum(), [*params, *z]

    return bool(moving) and _misses(square, [leaves[i] for i in moving], lambda v: v)


def _works_with_math_attention(model: nn.Module, loss_fn: LossFn, few: Any) -> bool:
    try:
        with math_attention():
            _second_derivative(model, run(model, loss_fn, *few))
    except RuntimeError:
        return False
    return True
