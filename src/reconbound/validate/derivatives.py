"""Second derivatives: whether they exist, and whether differences of the gradient agree with them.

`Placed` has a few records with their private part as a variable, however it is placed, for all numerical checks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from reconbound._internal.checks import warn_user
from reconbound.validate import model as models
from reconbound.validate.private import Private, Problem, feature_mask, private_part
from reconbound.validate.watch import Call, LossFn, Trace, call_with, converted, first_line, in_place_error, run

_SHAKEN = 0.05  # how far parameters are moved, so that what an initial zero hides is seen
_SEGMENTS = 3  # random directions in which the private part is moved, besides towards the other records
_FAR = 2.0  # how far, in units of its spread

#: A function of z: its values, of each record or of all together, and the tensors that their gradient is taken in.
Function = Callable[[list[Tensor]], tuple[Tensor, list[Tensor]]]


class Placed:
    """The losses of a few records as a function of their private part.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of the few records.
        private: what is private; None: every floating-point input.
        dtype: the precision to compute in; None: that of model and data.
        shaken: move the parameters a little.

    Attributes:
        z: the private part, one tensor or (private=None) one for each input; empty where all inputs are tokens.
        features: the chosen features as 0 and 1, for each tensor of z; 1.0: all.
        params: the trained parameters, by name.
        largest_output: the largest absolute value among the outputs of the last call of `losses`.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        few: Any,
        private: Private | None,
        *,
        dtype: torch.dtype | None = None,
        shaken: bool = False,
    ) -> None:
        self.model, self.loss_fn, self.private, self.dtype = model, loss_fn, private, dtype
        self.inputs, self.targets = tree_map(lambda x: converted(x, dtype), few)
        self.state = {name: converted(t, dtype) for name, t in (*model.named_parameters(), *model.named_buffers())}
        self.params = {name: self.state[name] for name, p in model.named_parameters() if p.requires_grad}
        generator = torch.Generator().manual_seed(1)
        for p in self.params.values():
            if shaken:
                p += _SHAKEN * (p.abs().mean() + _SHAKEN) * drawn_like(p, generator)
            p.requires_grad_()
        self._problem = Problem(model, loss_fn, Private("nothing") if private is None else private)
        self._part = converted(private_part(self._problem, *few), dtype)
        leaves = tree_leaves(self.inputs)
        self._moving = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
        self.z: list[Tensor] = [leaves[i] for i in self._moving] if private is None else [self._part]
        mask = None if private is None else feature_mask(private, self._part)
        self.features: list[Tensor | float] = [1.0 if mask is None else mask for _ in self.z]
        self.largest_output = 0.0

    def losses(self, z: list[Tensor]) -> Tensor:
        """Returns the loss of each record with z in the place of the private part, (B,)."""
        fresh = {name: t if t.requires_grad else t.clone() for name, t in self.state.items()}
        part, inputs = self._part if self.private is None else z[0], self.inputs
        if self.private is None:
            leaves, structure = tree_flatten(inputs)
            moved = dict(zip(self._moving, z, strict=True))
            inputs = tree_unflatten([moved.get(i, x) for i, x in enumerate(leaves)], structure)
        with _Wide() if self.dtype == torch.float64 else nullcontext():  # type: ignore[no-untyped-call]
            losses, outputs = self._problem.losses_and_outputs(part, inputs, self.targets, fresh)
        floats = [x.detach() for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
        numbers = [x.abs().nan_to_num(0.0, 0.0, 0.0).max() for x in floats if x.numel()]  # infinite ones count as 0
        self.largest_output = max(map(float, numbers), default=0.0)
        return losses

    def moves(self) -> list[list[Tensor]]:
        """Returns directions of the private part, far enough to pass jumps; none where all inputs are tokens.

        The first leads to the private part of the record before, the others are random, of the size of its spread.
        Features that are not private do not move.
        """
        if not self.z:
            return []
        generator = torch.Generator().manual_seed(2)
        spread = [x.std() if x.numel() > 1 else x.abs().sum() for x in self.z]
        sizes = [_FAR * (s + 1e-3 * x.abs().mean() + 1e-3) for s, x in zip(spread, self.z, strict=True)]
        found = [[x.roll(1, 0) - x for x in self.z]]
        for _ in range(_SEGMENTS):
            found.append([s * drawn_like(x, generator) for s, x in zip(sizes, self.z, strict=True)])
        return [[f * d for f, d in zip(self.features, v, strict=True)] for v in found]


def along(
    function: Function,
    z: list[Tensor],
    v: list[Tensor],
    t: Tensor | float,
    weights: Sequence[Tensor] | None = None,
    *,
    sloped: bool = True,
) -> Tensor:
    """Returns the values of a function at z + t·v and their derivatives by t, (2, B), in float64 on the CPU.

    Args:
        function: of z.
        z: a point.
        v: a direction.
        t: how far, one number, or one for each record, (B,).
        weights: where given, the value is one number: the component of the gradient along these.
        sloped: whether the derivatives are wanted; otherwise they are zeros.
    """
    far = [t if isinstance(t, float) else t.to(x).reshape(-1, *(1,) * (x.dim() - 1)) for x in z]
    moved = [(x + s * d).requires_grad_() for x, s, d in zip(z, far, v, strict=True)]
    with torch.enable_grad():
        values, tensors = function(moved)
        if weights is not None:
            gradient = torch.autograd.grad(values.sum(), tensors, create_graph=True, materialize_grads=True)
            values = torch.stack([(g * w).sum() for g, w in zip(gradient, weights, strict=True)]).sum()[None]
        known = sloped and values.requires_grad
        slopes = torch.autograd.grad(values.sum(), moved, materialize_grads=True) if known else ()
    slope = torch.zeros_like(values)
    for s, d in zip(slopes, v, strict=False):
        slope = slope + (s * d).reshape(len(slope), s.numel() // len(slope)).sum(1).to(slope)
    return torch.stack([values.detach().double(), slope.detach().double()]).cpu()


class _Wide(TorchDispatchMode):
    """A mode in which casts to less precise floating-point numbers are casts to float64: rounding is not tested."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        wanted = kwargs.get("dtype")
        if func is torch.ops.aten._to_copy.default and wanted is not None and wanted.is_floating_point:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def place_precisely(model: nn.Module, loss_fn: LossFn, few: Any, private: Private | None) -> Placed:
    """Returns the records in float64 where model and loss run in it, otherwise in their own precision.

    The parameters are moved a little, so that a last layer of zeros hides nothing, where the losses stay finite.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of the few records.
        private: what is private; None: every floating-point input.
    """
    for dtype in (torch.float64, None):
        for shaken in (True, False):
            placed = Placed(model, loss_fn, few, private, dtype=dtype, shaken=shaken)
            try:
                losses = placed.losses(placed.z)
            except (RuntimeError, ValueError, TypeError):
                if dtype is None and not shaken:
                    raise
                continue
            if bool(torch.isfinite(losses).all()):
                return placed
    return placed


def drawn_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Returns standard normal numbers of x's shape, precision and device, from a generator on the CPU."""
    return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)


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
            places = ", ".join(models.label(None, path) for path in trace.attention)
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


def _innermost_first(trace: Trace) -> list[tuple[str, Call, Any]]:
    return sorted(trace.calls, key=lambda call: -len(call[0].split(".")) if call[0] else 0)


def _culprit(model: nn.Module, trace: Trace) -> str:
    """Returns the innermost module that fails by itself, on the inputs that it was given; otherwise the model."""
    for path, given, _ in _innermost_first(trace):
        module, own = model.get_submodule(path), tree_map(partial(converted, leaf=True), given)
        leaves = [x for x in (*tree_leaves(own), *module.parameters()) if _any_grad(x)]
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        try:
            outputs = [y for y in tree_leaves(call_with(module, own, buffers)) if _any_grad(y)]
            first = torch.autograd.grad([(y * y).sum() for y in outputs], leaves, create_graph=True, allow_unused=True)
            torch.autograd.grad([(g * g).sum() for g in first if _any_grad(g)], leaves, allow_unused=True)
        except (RuntimeError, ValueError):  # torch says ValueError where there is nothing to differentiate
            return path
    return ""


def check_differences(placed: Placed, trace: Trace) -> None:
    """Refuses models whose gradient changes with the private part in a way that autograd's derivative does not show.

    Args:
        placed: a few records, in the precision to compute in.
        trace: a watched run, from which the module at fault is found.

    Raises:
        ModelError: differences of the gradient converge to something else than its derivative.
    """
    model, params = placed.model, list(placed.params.values())
    if not placed.z or not _misses(lambda z: (placed.losses(z), params), placed.z, placed.features):
        return
    with math_attention():
        calls = ((path, model.get_submodule(path), given) for path, given, _ in _innermost_first(trace))
        path = next((path for path, module, given in calls if _module_misses(module, given, placed.z[0].dtype)), "")
    raise models.ModelError(
        f"{models.label(model, path)} has a gradient that changes with the inputs in a way that its second "
        "derivative does not show: information would be missed. Look for detach(), a straight-through estimator, "
        "or a backward pass written by hand that cannot be differentiated"
    )


def _misses(function: Function, z: list[Tensor], features: Sequence[Tensor | float]) -> bool:
    """Returns whether, near z, differences of a gradient converge to something other than its derivative.

    Differences across a kink change with their step and prove nothing; other points and smaller steps are then taken.

    Args:
        function: of z, with what its gradient is taken in.
        z: the point; others are chosen near it.
        features: those that move, as 0 and 1; 1.0: all.
    """
    generator = torch.Generator().manual_seed(4)
    sizes = [f * (x.abs().mean() + 1e-3) for f, x in zip(features, z, strict=True)]
    for distance in _BESIDE:
        pair = [[s * drawn_like(x, generator) for s, x in zip(sizes, z, strict=True)] for _ in range(2)]
        base = [(x + distance * b).requires_grad_() for x, b in zip(z, pair[0], strict=True)]
        try:
            weights = [drawn_like(x, generator) for x in function(base)[1]]
            if _misses_at(function, base, pair[1], weights):
                return True
        except (RuntimeError, ValueError):  # ValueError: nothing to differentiate
            return False
    return False


def _misses_at(function: Function, base: list[Tensor], direction: list[Tensor], weights: Sequence[Tensor]) -> bool:
    """Returns whether differences of the gradient's component along the weights converge to another derivative."""
    exact = all(x.dtype == torch.float64 for x in base)
    steps, allowed, rounding = ((1e-5, 1e-6, 1e-7), 1e-3, 1e-8) if exact else ((1e-2, 3e-3, 1e-3), 0.05, 0.01)
    here, derivative = map(float, along(function, base, direction, 0.0, weights))

    def close(a: float, b: float) -> bool:
        return abs(a - b) <= allowed * max(abs(a), abs(b)) + rounding * abs(here)

    found: list[float] = []
    for step in steps:
        ahead, behind = (along(function, base, direction, t, weights, sloped=False)[0] for t in (step, -step))
        found.append(float(ahead - behind) / (2 * step))
        if close(found[-1], derivative):
            return False
    return any(close(a, b) for a, b in pairwise(found))


def _module_misses(module: nn.Module, given: Call, dtype: torch.dtype) -> bool:
    """Does the same as `_misses` for one module, on the inputs that it was given, in its parameters and inputs."""
    own = dtype if dtype == torch.float64 else None
    state = {name: converted(t, own) for name, t in (*module.named_parameters(), *module.named_buffers())}
    params = [state[name].requires_grad_() for name, p in module.named_parameters() if p.requires_grad]
    leaves, structure = tree_flatten(tree_map(lambda x: converted(x, own), given))
    moving = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]

    def squares(z: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        moved = dict(zip(moving, z, strict=True))
        call = tree_unflatten([moved.get(i, x) for i, x in enumerate(leaves)], structure)
        fresh = {name: t if t.requires_grad else t.clone() for name, t in state.items()}
        outputs = [y for y in tree_leaves(call_with(module, call, fresh)) if _any_grad(y)]
        return torch.stack([(y * y).sum() for y in outputs]), [*params, *z]

    return bool(moving) and _misses(squares, [leaves[i] for i in moving], [1.0] * len(moving))


def _works_with_math_attention(model: nn.Module, loss_fn: LossFn, few: Any) -> bool:
    try:
        with math_attention():
            _second_derivative(model, run(model, loss_fn, *few))
    except RuntimeError:
        return False
    return True
