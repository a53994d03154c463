"""Second derivatives: whether they exist, and whether differences of the gradient bear them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reconbound.validate.structure import ModelError, ReconboundWarning, label, place
from reconbound.validate.watch import LossFn, Trace, arguments, first_line, in_place_error, leaf, run

from .._check import warn_user


@contextmanager
def math_attention() -> Iterator[None]:
    """Within it, scaled_dot_product_attention uses the plain formula, which can be differentiated twice and forward.

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
        if "inplace" in str(error):
            raise in_place_error(model, trace.in_place, error) from error
        if trace.attention and _works_with_math_attention(model, loss_fn, few):
            _warn_attention(trace)
            return
        path = _culprit(model, trace)
        raise ModelError(
            f"{label(model, path)} cannot be differentiated twice ({first_line(error)}): write it with operations "
            "whose gradients PyTorch can differentiate; for attention see reconbound.validate.math_attention"
        ) from error


def _second_derivative(model: nn.Module, trace: Trace) -> None:
    """The derivative in the inputs of the gradient's component along a random direction of parameters."""
    params = [p for p in model.parameters() if p.requires_grad]
    inputs = [x for x in tree_leaves(trace.inputs) if isinstance(x, Tensor) and x.requires_grad]
    if not trace.losses.requires_grad:
        raise _cut_error(model, trace, "the loss does not depend on any parameter that requires a gradient")
    first = torch.autograd.grad(trace.losses.sum(), params, create_graph=True, allow_unused=True)
    if all(g is None for g in first):
        raise _cut_error(model, trace, "the loss does not depend on any parameter that requires a gradient")
    component = torch.stack([(g * torch.randn_like(g)).sum() for g in first if g is not None]).sum()
    if inputs:  # tokens alone have no derivative: their embedding or the label is then the private part
        second = torch.autograd.grad(component, inputs, allow_unused=True) if component.requires_grad else [None]
        if all(g is None for g in second):
            raise _cut_error(model, trace, "the gradient does not depend on the inputs")


def _cut_error(model: nn.Module, trace: Trace, what: str) -> ModelError:
    """Name the first module that receives tensors of the graph and returns none."""
    for path, given, output in trace.calls:
        if _any_grad(given) and not _any_grad(output):
            return ModelError(
                f"{label(model, path)} cuts the graph: {what}. It is not differentiable: look for detach(), .data, "
                "numpy, argmax, integer casts or torch.no_grad()"
            )
    return ModelError(f"{what}: look for detach(), numpy, argmax or torch.no_grad() in the model and in loss_fn")


def _any_grad(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(tree))


def _innermost_first(trace: Trace) -> list[tuple[str, Any, Any]]:
    return sorted(trace.calls, key=lambda call: -len(call[0].split(".")) if call[0] else 0)


def _culprit(model: nn.Module, trace: Trace) -> str:
    """The innermost module that fails by itself, on the inputs that it was given; the model where none does."""
    for path, (args, kwargs), _ in _innermost_first(trace):
        module = model.get_submodule(path)
        args, kwargs = tree_map(leaf, (args, kwargs))
        leaves = [x for x in (*tree_leaves((args, kwargs)), *module.parameters()) if _any_grad(x)]
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        try:
            outputs = [y for y in tree_leaves(functional_call(module, buffers, args, kwargs)) if _any_grad(y)]
            first = torch.autograd.grad([(y * y).sum() for y in outputs], leaves, create_graph=True, allow_unused=True)
            torch.autograd.grad([(g * g).sum() for g in first if _any_grad(g)], leaves, allow_unused=True)
        except (RuntimeError, ValueError):  # torch says ValueError where there is nothing to differentiate
            return path
    return ""


def check_differences(model: nn.Module, loss_fn: LossFn, few: Any, trace: Trace) -> None:
    """Autograd's mixed derivative against differences of the gradient that training would use."""

    def total(outputs: Any) -> Tensor:
        return loss_fn(outputs, _double(few[1])).sum()

    def square(outputs: Any) -> Tensor:
        return torch.stack([(y * y).sum() for y in tree_leaves(outputs) if _any_grad(y)]).sum()

    with math_attention():
        if _agrees(model, arguments(few[0]), total, own_inputs=False):
            return
        modules = [(path, model.get_submodule(path), given) for path, given, _ in _innermost_first(trace)]
        path = next((path for path, m, given in modules if not _agrees(m, given, square, own_inputs=True)), "")
    raise ModelError(
        f"{label(model, path)} has a gradient that changes with the inputs in a way that its second derivative does "
        "not show: information would be missed. Look for detach(), a straight-through estimator, or a backward pass "
        "written by hand that cannot be differentiated"
    )


def _agrees(module: nn.Module, given: Any, scalar: Callable[[Any], Tensor], *, own_inputs: bool) -> bool:
    """The two along one random direction, in float64; True where the module does not run in float64."""
    state = {name: _double(t.detach()) for name, t in (*module.named_parameters(), *module.named_buffers())}
    params = [state[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad]
    leaves, structure = tree_flatten(_double(given))
    moving = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
    direction = [torch.randn_like(leaves[i]) * (leaves[i].abs().mean() + 1e-3) for i in moving]
    weights: list[Tensor] = []  # a random direction of what the gradient is taken in

    def component(size: float) -> tuple[Tensor, list[Tensor]]:
        z = [(leaves[i] + size * v).requires_grad_() for i, v in zip(moving, direction, strict=True)]
        moved = dict(zip(moving, z, strict=True))
        args, kwargs = tree_unflatten([moved.get(i, x) for i, x in enumerate(leaves)], structure)
        fresh = {name: t if t.requires_grad else t.clone() for name, t in state.items()}
        wrt = [*params, *z] if own_inputs else params
        value = scalar(functional_call(module, fresh, args, kwargs))
        gradient = torch.autograd.grad(value, wrt, create_graph=True, materialize_grads=True)
        weights.extend(torch.randn_like(g) for g in gradient[len(weights) :])
        return torch.stack([(g * w).sum() for g, w in zip(gradient, weights, strict=True)]).sum(), z

    try:
        here, z = component(0.0)
        second = torch.autograd.grad(here, z, materialize_grads=True)
        by_autograd = sum(float((g * v).sum()) for g, v in zip(second, direction, strict=True))
        by_differences = float((component(1e-5)[0] - component(-1e-5)[0]).detach()) / 2e-5
    except (RuntimeError, ValueError):  # ValueError: nothing to differentiate
        return True
    allowed = 1e-3 * max(abs(by_autograd), abs(by_differences)) + 1e-6 * abs(float(here.detach()))
    return abs(by_autograd - by_differences) <= allowed


def _double(tree: Any) -> Any:
    """A detached float64 copy of every floating-point tensor."""
    return tree_map(
        lambda x: x.detach().to(torch.float64, copy=True) if isinstance(x, Tensor) and x.is_floating_point() else x,
        tree,
    )


def _works_with_math_attention(model: nn.Module, loss_fn: LossFn, few: Any) -> bool:
    try:
        with math_attention():
            _second_derivative(model, run(model, loss_fn, *few))
    except RuntimeError:
        return False
    return True


def _warn_attention(trace: Trace) -> None:
    places = ", ".join(place(path) for path in trace.attention)
    warn_user(
        f"the attention kernel of {places} has no second derivative: run under reconbound.validate.math_attention(), "
        "which switches to the plain formula",
        ReconboundWarning,
    )
