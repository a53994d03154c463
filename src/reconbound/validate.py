"""What a model must satisfy, said before work starts.

The information of a record is defined when its loss depends on that record alone, without randomness, and has a mixed
second derivative in parameters and inputs. Each check names the module at fault and says what to do. `check_model`
needs no data; `check_batch` adds what a few records of a batch can show, and runs the model on three of them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_map, tree_unflatten

__all__ = ["ModelError", "ReconboundWarning", "check_batch", "check_model", "math_attention"]

LossFn = Callable[[Any, Any], Tensor]

_PROBE_RECORDS = 3
_SMOOTH = "replace them by smooth ones: tanh or GELU for the activation, average pooling for max pooling"

_KINKED_MODULES = tuple(
    getattr(nn, name)
    for name in (  # noqa: SIM905
        "ReLU ReLU6 LeakyReLU PReLU RReLU SELU Hardtanh Hardsigmoid Hardswish Hardshrink Softshrink Threshold "
        "MaxPool1d MaxPool2d MaxPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d FractionalMaxPool2d "
        "FractionalMaxPool3d"
    ).split()
)
_KINKED_OPS = frozenset(
    (  # noqa: SIM905
        "relu leaky_relu rrelu_with_noise _prelu_kernel hardtanh hardsigmoid hardswish hardshrink softshrink threshold "
        "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d "
        "fractional_max_pool3d mkldnn_max_pool2d abs maximum minimum fmax fmin multi_margin_loss sort topk"
    ).split()
)
_STEP_OPS = frozenset({"round", "floor", "ceil", "trunc", "sign", "heaviside", "floor_divide", "bucketize"})


class ModelError(ValueError):
    """The model, its loss or its data allow no statement about single records; the message says what to change."""


class ReconboundWarning(UserWarning):
    """The numbers can be computed, but what they promise is weaker than it looks; the message says why."""


def check_model(model: nn.Module) -> None:
    """Check what can be told from the model alone: trainable parameters, batch statistics, dropout, kinks.

    Args:
        model: the model, in the mode (train or eval) in which it will be used.

    Raises:
        ModelError: no parameter requires a gradient or one is not finite; a normalisation uses or keeps batch
            statistics; dropout is on.

    Warns:
        ReconboundWarning: the model has ReLU-like activations or max pooling.

    >>> check_model(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.BatchNorm1d(3)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    reconbound.validate.ModelError: module '2' (BatchNorm1d) mixes the records of a batch: ...
    """
    _check_structure(model)
    _warn_kinks(_kinked_modules(model))


def check_batch(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> None:
    """Check a model, its loss and a batch together; the model runs on three of the records, and is left as it was.

    Args:
        model: the model, in the mode (train or eval) in which it will be used.
        loss_fn: loss_fn(outputs, targets) -> one loss for each record, shape (B,).
        inputs: a tensor (B, ...), or a tuple or dictionary of such: model(x), model(*x) or model(**x).
        targets: what loss_fn takes, tensors with B rows.

    Raises:
        ModelError: all that `check_model` raises; a value of the batch is not finite; the loss was reduced over the
            batch or has another wrong shape; two runs differ; one record's loss depends on another record; the loss
            has no second derivative (in-place changes, step functions, operations cut from the graph); or it has one
            that differences of the gradient, in float64, contradict (detached parts, straight-through estimators,
            backward passes by hand). The last is skipped for models with kinks or that do not run in float64.

    Warns:
        ReconboundWarning: kinks (ReLU, max pooling, absolute values); an attention kernel without second derivatives,
            which `math_attention` replaces; buffers that the forward pass changes.

    Guarantee:
        None: a passed check is evidence from three records at the present parameters, not a proof.

    >>> check_batch(nn.Linear(2, 3), nn.CrossEntropyLoss(), torch.ones(4, 2), torch.tensor([0, 1, 2, 0]))
    Traceback (most recent call last):
        ...
    reconbound.validate.ModelError: loss_fn returned () for 3 records, not one loss for each, (3,): it was reduced
    over the batch; build the loss with reduction='none'
    """
    _check_structure(model)
    _check_data(inputs, targets)
    few = _rows((inputs, targets), [i % _records(inputs) for i in range(_PROBE_RECORDS)])
    with torch.enable_grad(), _random_state_kept(model):
        trace = _run(model, loss_fn, *few)
        _check_randomness(model, trace, _run(model, loss_fn, *few))
        _check_coupling(model, loss_fn, few, trace)
        _check_steps(model, trace)
        _check_derivatives(model, loss_fn, few, trace)
        if not (trace.kinks or _kinked_modules(model)):  # differences across a kink would say nothing
            _check_differences(model, loss_fn, few, trace)
    _warn_buffers(model, trace)
    _warn_kinks({**trace.kinks, **_kinked_modules(model)})


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


# --- the model alone -------------------------------------------------------------------------------------------------


_LOSS = "loss_fn"  # stands for a module's path where the loss function is meant


def _place(path: str) -> str:
    return path if path == _LOSS else f"module '{path}'" if path else "the model's own forward"


def _label(model: nn.Module, path: str) -> str:
    return path if path == _LOSS else f"{_place(path)} ({type(model.get_submodule(path)).__name__})"


def _check_structure(model: nn.Module) -> None:
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if not trainable:
        raise ModelError("no parameter of the model requires a gradient: call requires_grad_() on those to be trained")
    for name, p in trainable:
        if not bool(torch.isfinite(p).all()):
            raise ModelError(f"parameter '{name}' is not finite: training has diverged, or the checkpoint is damaged")
    for path, module in model.named_modules():
        if _uses_batch_statistics(module):
            raise ModelError(
                f"{_label(model, path)} mixes the records of a batch: its statistics are taken over them, so that no "
                "loss belongs to one record. Use nn.GroupNorm (or nn.LayerNorm), or, with statistics from public "
                "data, eval mode"
            )
        if _drops_at_random(module):
            raise ModelError(
                f"{_label(model, path)} drops values at random: call .eval() on it or set its rate to 0 (the noise "
                "that protects is the one on the gradient)"
            )


def _uses_batch_statistics(module: nn.Module) -> bool:
    if isinstance(module, _BatchNorm):
        return module.training or module.running_mean is None
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats


def _drops_at_random(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, nn.RNNBase):
        return module.dropout > 0 and module.num_layers > 1
    return isinstance(module, nn.RReLU) or (isinstance(module, nn.MultiheadAttention) and module.dropout > 0)


def _kinked_modules(model: nn.Module) -> dict[str, str]:
    return {path: type(m).__name__ for path, m in model.named_modules() if isinstance(m, _KINKED_MODULES)}


def _warn_kinks(kinks: Mapping[str, str]) -> None:
    if kinks:
        places = ", ".join(f"{_place(path)} ({what})" for path, what in kinks.items())
        warnings.warn(
            f"kinks in {places}: the gradient jumps with the input there, the Fisher information does not count the "
            f"jumps, and the error floors are not proved; {_SMOOTH}",
            ReconboundWarning,
            stacklevel=3,
        )


# --- the data --------------------------------------------------------------------------------------------------------


def _tensors(name: str, tree: Any) -> list[tuple[str, Tensor]]:
    leaves, _ = tree_flatten_with_path(tree)
    return [(name + "".join(map(str, path)), leaf) for path, leaf in leaves if isinstance(leaf, Tensor)]


def _records(inputs: Any) -> int:
    first = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor))
    return int(first.shape[0]) if first.dim() else 0


def _check_data(inputs: Any, targets: Any) -> None:
    named = _tensors("inputs", inputs) + _tensors("targets", targets)
    if not any(name.startswith("inputs") for name, _ in named):
        raise ModelError(f"inputs must hold at least one tensor, got {type(inputs).__name__}")
    records = _records(inputs)
    for name, x in named:
        if x.dim() == 0 or x.shape[0] != records or records == 0:
            raise ModelError(f"{name} has shape {tuple(x.shape)}: its first dimension must be the {records} records")
        finite = torch.isfinite(x)
        if not bool(finite.all()):
            where = [int(i) for i in (~finite).nonzero()[0]]
            feature = where[1] if len(where) == 2 else tuple(where[1:])
            place = f"record {where[0]}" + (f", feature {feature}," if where[1:] else "")
            raise ModelError(
                f"{name}: {place} is {x[tuple(where)].item()}, one of {int((~finite).sum())} values that are not "
                "finite: remove those records or fill the values in"
            )


def _rows(tree: Any, rows: list[int]) -> Any:
    return tree_map(lambda leaf: leaf[rows].detach() if isinstance(leaf, Tensor) else leaf, tree)


# --- a run of the model, watched -------------------------------------------------------------------------------------


@dataclass
class _Trace:
    """One watched run: the losses, what each module got and gave, and the operations that matter, by module path."""

    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    stack: list[str] = field(default_factory=list)
    calls: list[tuple[str, Any, Any]] = field(default_factory=list)  # path, (args, kwargs), output; innermost first
    kinks: dict[str, str] = field(default_factory=dict)
    steps: dict[str, str] = field(default_factory=dict)
    in_place: dict[str, str] = field(default_factory=dict)
    seeded: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)

    @property
    def here(self) -> str:
        return self.stack[-1] if self.stack else _LOSS


class _Watch(TorchDispatchMode):
    """Notes the operations that a run performs on tensors of the graph, with the module that performs them."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, trace = func._overloadpacket.__name__, self.trace
        plain = name.removesuffix("_")
        if torch.Tag.nondeterministic_seeded in func.tags:
            trace.seeded.setdefault(trace.here, name)
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if plain in _KINKED_OPS or _is_kinked(plain, args, kwargs):
                trace.kinks.setdefault(trace.here, plain)
            if plain in _STEP_OPS:
                trace.steps.setdefault(trace.here, plain)
            if name != plain and func._schema.is_mutable:
                trace.in_place.setdefault(trace.here, name)
            if "scaled_dot_product" in name:
                trace.attention.setdefault(trace.here, name)
        return func(*args, **kwargs)


def _is_kinked(name: str, args: Any, kwargs: Any) -> bool:
    """A clamp at 0 is a ReLU; ELU and its kin are smooth to first order only where alpha times the input scale is "
    "1."""
    if name in ("clamp", "clamp_min"):
        low = args[1] if len(args) > 1 else kwargs.get("min")
        return isinstance(low, int | float) and low == 0
    if name == "elu":
        alpha, input_scale = (args[i] if len(args) > i else 1 for i in (1, 3))
        return not math.isclose(alpha * input_scale, 1.0)
    return False


def _run(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> _Trace:
    """Forward pass and losses, watched; inputs are fresh leaves, buffers are copies."""
    trace = _Trace(inputs=tree_map(_leaf, inputs), buffers={name: b.clone() for name, b in model.named_buffers()})
    args, kwargs = _arguments(trace.inputs)
    with _recorded_calls(model, trace), _Watch(trace):
        try:
            outputs = functional_call(model, trace.buffers, args, kwargs)
        except RuntimeError as error:
            if "in-place" not in str(error):
                raise
            raise _in_place_error(model, {trace.here: "its input"}, error) from error
        trace.losses = loss_fn(outputs, tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, targets))
    _check_losses(trace.losses, _records(inputs))
    return trace


def _arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}


def _leaf(x: Any) -> Any:
    return x.detach().clone().requires_grad_(x.is_floating_point()) if isinstance(x, Tensor) else x


@contextmanager
def _recorded_calls(model: nn.Module, trace: _Trace) -> Iterator[None]:
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


@contextmanager
def _random_state_kept(model: nn.Module) -> Iterator[None]:
    cuda = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(i for i in cuda if i is not None)):
        yield


# --- what runs can show ----------------------------------------------------------------------------------------------


def _check_losses(losses: Any, records: int) -> None:
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


def _close(a: Tensor, b: Tensor, relative: float) -> bool:
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    scale = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=relative * scale, equal_nan=True)


def _rounding(x: Tensor) -> float:
    return min(100 * torch.finfo(x.dtype).eps, 0.01)


def _first_change(before: _Trace, after: _Trace, rows: int, relative: float) -> str:
    """The first module, innermost first, that gives other rows than before; loss_fn where none does."""
    for (path, _, old), (_, _, new) in zip(before.calls, after.calls, strict=False):
        for a, b in zip(tree_leaves(old), tree_leaves(new), strict=False):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim()):
                continue
            by_record = len(a) == _PROBE_RECORDS and len(b) in (rows, _PROBE_RECORDS)
            if by_record and not _close(a[:rows], b[:rows], relative):
                return path
    return _LOSS


def _check_randomness(model: nn.Module, first: _Trace, second: _Trace) -> None:
    relative = _rounding(first.losses)
    if not _close(first.losses, second.losses, relative):
        drawing = [
            path for path in first.seeded if path not in first.attention
        ]  # attention may draw, and mostly does not
        path = [*drawing, _first_change(first, second, _PROBE_RECORDS, relative)][0]
        raise ModelError(
            f"{_label(model, path)} is random: two runs on the same records gave different losses. Turn its "
            "randomness off (eval mode, or F.dropout(..., training=False)); the noise that protects is the one on "
            "the gradient"
        )


def _check_coupling(model: nn.Module, loss_fn: LossFn, few: Any, trace: _Trace) -> None:
    """Change the last record, then leave it out: the other losses must stay."""
    rest, relative = _PROBE_RECORDS - 1, _rounding(trace.losses)
    changed = _run(model, loss_fn, tree_map(_last_changed, few[0]), few[1])
    if not _close(trace.losses[:rest], changed.losses[:rest], relative):
        raise ModelError(
            f"{_label(model, _first_change(trace, changed, rest, relative))} couples the records of a batch: one "
            "record's loss changes when another record changes. Each loss must depend on its own record alone: no "
            "statistics, sums or comparisons over the batch (nn.GroupNorm in place of batch statistics)"
        )
    relative = min(torch.finfo(trace.losses.dtype).eps ** 0.5, 0.05)  # another shape may round differently
    fewer = _run(model, loss_fn, *_rows(few, list(range(rest))))
    if not _close(trace.losses[:rest], fewer.losses, relative):
        raise ModelError(
            f"{_label(model, _first_change(trace, fewer, rest, relative))} depends on the batch: a record's loss "
            "changes when another record is left out. Do not divide by the batch size or use anything else that is "
            "taken over the batch"
        )


def _last_changed(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    changed = x.clone()
    changed[-1] = x[0]
    if x.is_floating_point() and torch.equal(changed, x):
        changed[-1] = 0.5 * x[-1] + 0.1
    return changed


def _check_steps(model: nn.Module, trace: _Trace) -> None:
    for path, name in trace.steps.items():
        raise ModelError(
            f"{_label(model, path)} uses {name}, which is not differentiable: it is flat between jumps, its "
            "derivative says nothing of what it reveals. Replace it by a smooth function, or apply it to the data "
            "beforehand"
        )


# --- second derivatives ----------------------------------------------------------------------------------------------


def _check_derivatives(model: nn.Module, loss_fn: LossFn, few: Any, trace: _Trace) -> None:
    try:
        _second_derivative(model, trace)
    except RuntimeError as error:
        if "inplace" in str(error):
            raise _in_place_error(model, trace.in_place, error) from error
        if trace.attention and _works_with_math_attention(model, loss_fn, few):
            _warn_attention(trace)
            return
        path = _culprit(model, trace)
        raise ModelError(
            f"{_label(model, path)} cannot be differentiated twice ({_first_line(error)}): write it with operations "
            "whose gradients PyTorch can differentiate; for attention see reconbound.validate.math_attention"
        ) from error


def _second_derivative(model: nn.Module, trace: _Trace) -> None:
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


def _cut_error(model: nn.Module, trace: _Trace, what: str) -> ModelError:
    """Name the first module that receives tensors of the graph and returns none."""
    for path, given, output in trace.calls:
        if _any_grad(given) and not _any_grad(output):
            return ModelError(
                f"{_label(model, path)} cuts the graph: {what}. It is not differentiable: look for detach(), .data, "
                "numpy, argmax, integer casts or torch.no_grad()"
            )
    return ModelError(f"{what}: look for detach(), numpy, argmax or torch.no_grad() in the model and in loss_fn")


def _any_grad(tree: Any) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves(tree))


def _innermost_first(trace: _Trace) -> list[tuple[str, Any, Any]]:
    return sorted(trace.calls, key=lambda call: -len(call[0].split(".")) if call[0] else 0)


def _culprit(model: nn.Module, trace: _Trace) -> str:
    """The innermost module that fails by itself, on the inputs that it was given; the model where none does."""
    for path, (args, kwargs), _ in _innermost_first(trace):
        module = model.get_submodule(path)
        args, kwargs = tree_map(_leaf, (args, kwargs))
        leaves = [x for x in (*tree_leaves((args, kwargs)), *module.parameters()) if _any_grad(x)]
        buffers = {name: b.clone() for name, b in module.named_buffers()}
        try:
            outputs = [y for y in tree_leaves(functional_call(module, buffers, args, kwargs)) if _any_grad(y)]
            first = torch.autograd.grad([(y * y).sum() for y in outputs], leaves, create_graph=True, allow_unused=True)
            torch.autograd.grad([(g * g).sum() for g in first if _any_grad(g)], leaves, allow_unused=True)
        except (RuntimeError, ValueError):  # torch says ValueError where there is nothing to differentiate
            return path
    return ""


def _check_differences(model: nn.Module, loss_fn: LossFn, few: Any, trace: _Trace) -> None:
    """Autograd's mixed derivative against differences of the gradient that training would use."""

    def total(outputs: Any) -> Tensor:
        return loss_fn(outputs, _double(few[1])).sum()

    def square(outputs: Any) -> Tensor:
        return torch.stack([(y * y).sum() for y in tree_leaves(outputs) if _any_grad(y)]).sum()

    with math_attention():
        if _agrees(model, _arguments(few[0]), total, own_inputs=False):
            return
        modules = [(path, model.get_submodule(path), given) for path, given, _ in _innermost_first(trace)]
        path = next((path for path, m, given in modules if not _agrees(m, given, square, own_inputs=True)), "")
    raise ModelError(
        f"{_label(model, path)} has a gradient that changes with the inputs in a way that its second derivative does "
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


def _in_place_error(model: nn.Module, places: Mapping[str, str], error: RuntimeError) -> ModelError:
    where = " and ".join(f"{_label(model, path)}: {name}" for path, name in places.items()) or "the model"
    return ModelError(
        f"a value that the derivatives need was changed in place, at {where}. Use inplace=False, and x = x + y in "
        f"place of x += y ({_first_line(error)})"
    )


def _works_with_math_attention(model: nn.Module, loss_fn: LossFn, few: Any) -> bool:
    try:
        with math_attention():
            _second_derivative(model, _run(model, loss_fn, *few))
    except RuntimeError:
        return False
    return True


def _warn_attention(trace: _Trace) -> None:
    places = ", ".join(_place(path) for path in trace.attention)
    warnings.warn(
        f"the attention kernel of {places} has no second derivative: run under reconbound.validate.math_attention(), "
        "which switches to the plain formula",
        ReconboundWarning,
        stacklevel=4,
    )


def _warn_buffers(model: nn.Module, trace: _Trace) -> None:
    changed = [name for name, b in model.named_buffers() if not torch.equal(b, trace.buffers[name])]
    if changed:
        warnings.warn(
            f"the forward pass changes the buffers {changed}: if they keep anything of the records, it is released "
            "without noise; freeze them (eval mode) or leave them out of the released model",
            ReconboundWarning,
            stacklevel=3,
        )


def _first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0]
