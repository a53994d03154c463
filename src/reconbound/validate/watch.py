"""A watched run of the model on a few records: each module's inputs and outputs, and the operations that matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map

from reconbound.validate.kinds import numpy_arrays, said_of_inputs, said_of_targets
from reconbound.validate.structure import CHECKPOINTING, LOSS, ModelError, is_about_checkpointing, label

LossFn = Callable[[Any, Any], Tensor]


def _tensors(name: str, tree: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = tree_flatten_with_path(tree)
    return [(name + "".join(map(str, path)), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def record_count(inputs: Any) -> int:
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return int(first.shape[0]) if first.dim() else 0


def check_data(inputs: Any, targets: Any) -> None:
    arrays = numpy_arrays(inputs, targets)
    if arrays:
        raise ModelError(f"{arrays[0]} is a NumPy array, it must be a tensor: torch.as_tensor({arrays[0]})")
    named = _tensors("inputs", inputs) + _tensors("targets", targets)
    if not any(name.startswith("inputs") for name, _ in named):
        raise ModelError(f"inputs must hold at least one tensor, got {type(inputs).__name__}")
    records = record_count(inputs)
    for name, x in named:
        if x.dim() == 0 or x.shape[0] != records or records == 0:
            raise ModelError(
                f"{name} has shape {tuple(x.shape)}: it must have {records} rows, one per record of inputs"
            )
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            where = [int(i) for i in (~finite).nonzero()[0]]
            feature = where[1] if len(where) == 2 else tuple(where[1:])
            place = f"record {where[0]}" + (f", feature {feature}," if where[1:] else "")
            raise ModelError(
                f"{name}: {place} is {x[tuple(where)].item()}, one of {int((~finite).sum())} values that are not "
                "finite: remove those records or fill the values in"
            )


def rows(tree: Any, rows: list[int]) -> Any:
    return tree_map(lambda leaf: leaf[rows].detach() if isinstance(leaf, Tensor) else leaf, tree)


@dataclass
class Trace:
    """One watched run: the losses, each module's inputs and outputs, and the operations that matter, by module path."""

    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)  # path, (args, kwargs), output; innermost first
    in_place: dict[str, str] = field(default_factory=dict)
    seeded: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)  # of all that was computed

    @property
    def here(self) -> str:
        return self.stack[-1] if self.stack else LOSS


class _Watch(TorchDispatchMode):
    """A mode that notes the operations of a run on tensors of the graph, with the module that performs them."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, trace = func._overloadpacket.__name__, self.trace
        if torch.Tag.nondeterministic_seeded in func.tags:
            trace.seeded.setdefault(trace.here, name)
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if name.endswith("_") and func._schema.is_mutable:
                trace.in_place.setdefault(trace.here, name)
            if "scaled_dot_product" in name:
                trace.attention.setdefault(trace.here, name)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            trace.dtypes.add(out.dtype)
        return out


def run(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Trace:
    """Runs the forward pass and the losses, watched; inputs are fresh leaves, buffers are copies."""
    trace = Trace(inputs=tree_map(leaf, inputs), buffers={name: b.clone() for name, b in model.named_buffers()})
    args, kwargs = arguments(trace.inputs)
    with recorded_calls(model, trace), disable_saved_tensors_hooks(CHECKPOINTING), _Watch(trace):
        try:
            outputs = functional_call(model, trace.buffers, args, kwargs)
        except RuntimeError as error:
            if is_about_checkpointing(error):
                raise ModelError(f"{label(model, trace.here)}: {CHECKPOINTING}") from error
            if "in-place" in str(error):
                raise in_place_error(model, {trace.here: "its input"}, error) from error
            said = said_of_inputs(error, model, inputs) or _said_of_shapes(error, model, trace, inputs)
            raise (error if said is None else ModelError(said)) from error
        try:
            trace.losses = loss_fn(outputs, tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, targets))
        except RuntimeError as error:
            said = said_of_targets(error, targets)
            raise (error if said is None else ModelError(said)) from error
        except (TypeError, AttributeError) as error:
            raise ModelError(f"loss_fn cannot be called with the model's outputs and the targets: {error}") from error
    check_losses(trace.losses, record_count(inputs))
    return trace


def _said_of_shapes(error: RuntimeError, model: nn.Module, trace: Trace, inputs: Any) -> str | None:
    """Returns which module does not take its input, and a record's shape; None for other errors."""
    why = first_line(error)
    if not any(word in why for word in ("cannot be multiplied", "channels", "must match the size", "normalized_shape")):
        return None
    shapes = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in _tensors("inputs", inputs))
    return f"{label(model, trace.here)} does not take what it is given ({why}); a record has the shape {shapes}"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


@contextmanager
def recorded_calls(model: nn.Module, trace: Trace) -> Iterator[None]:
    def enter(path: str) -> Callable[..., None]:
        return lambda module, args, kwargs: trace.stack.append(path)

    def leave(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            trace.stack.pop()
            trace.calls.append((path, (args, kwargs), output))

        return hook

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(enter(path), with_kwargs=True))
        handles.append(module.register_forward_hook(leave(path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_losses(losses: Any, records: int) -> None:
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise ModelError(f"loss_fn returned {kind}: it must return a floating-point tensor, one loss for each record")
    shape = tuple(losses.shape)
    if shape == (records,):
        bad = (~torch.isfinite(losses)).nonzero()
        if len(bad):
            raise ModelError(f"the loss of record {int(bad[0])} is {losses[bad[0]].item()}: model or loss_fn overflows")
        return
    if len(shape) > 1 and shape[0] == records:
        advice = "sum or average it over each record, for example losses.flatten(1).mean(1)"
    else:
        advice = "it was reduced over the batch; build the loss with reduction='none'"
    raise ModelError(f"loss_fn returned {shape} for {records} records, not one loss for each, ({records},): {advice}")


def in_place_error(model: nn.Module, places: Mapping[str, str], error: RuntimeError) -> ModelError:
    where = " and ".join(f"{label(model, path)}: {name}" for path, name in places.items()) or "the model"
    return ModelError(
        f"a value that the derivatives need was changed in place, at {where}. Use inplace=False, and x = x + y in "
        f"place of x += y ({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0]
