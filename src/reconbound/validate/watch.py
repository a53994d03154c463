"""A watched run of the model on a few records: each module's inputs and outputs, and the operations that matter.

`TwiceDifferentiable` replaces functions whose second derivative PyTorch lacks, in this and in every other run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from reconbound.validate import model as models

LossFn = Callable[[Any, Any], Tensor]


def converted(x: Any, dtype: torch.dtype | None = None, *, leaf: bool = False) -> Any:
    """Returns a detached copy of a tensor; anything else unchanged.

    Args:
        x: a tensor, or anything else.
        dtype: the precision of floating-point ones; None: as it was.
        leaf: whether floating-point ones require a gradient.
    """
    if not isinstance(x, Tensor):
        return x
    real = x.is_floating_point()
    return x.detach().to(dtype if dtype and real else x.dtype, copy=True).requires_grad_(leaf and real)


class Call(NamedTuple):
    """The arguments of a call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Trace:
    """One watched run: the losses, each module's inputs and outputs, and the operations that matter, by module path.

    The last path of `stack` is that of the module that is running, or LOSS.
    """

    losses: Tensor = field(default_factory=lambda: torch.empty(0))
    inputs: Any = None
    buffers: dict[str, Tensor] = field(default_factory=dict)
    stack: list[str] = field(default_factory=lambda: [models.LOSS])
    calls: list[tuple[str, Call, Any]] = field(
        default_factory=list
    )  # path, what went in, what came out; innermost first
    in_place: dict[str, str] = field(default_factory=dict)
    seeded: dict[str, str] = field(default_factory=dict)
    attention: dict[str, str] = field(default_factory=dict)
    dtypes: set[torch.dtype] = field(default_factory=set)  # of all that was computed


class Watch(TorchDispatchMode):
    """A mode that notes the operations of a run on tensors of the graph, with the module that performs them."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, trace, here = func._overloadpacket.__name__, self.trace, self.trace.stack[-1]
        if torch.Tag.nondeterministic_seeded in func.tags:
            trace.seeded.setdefault(here, name)
        if any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if name.endswith("_") and func._schema.is_mutable:
                trace.in_place.setdefault(here, name)
            if "scaled_dot_product" in name:
                trace.attention.setdefault(here, name)
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            trace.dtypes.add(out.dtype)
        return out


def run(model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any) -> Trace:
    """Runs the forward pass and the losses, watched; inputs are fresh leaves, buffers are copies."""
    leaves = tree_map(partial(converted, leaf=True), inputs)
    trace = Trace(inputs=leaves, buffers={name: b.clone() for name, b in model.named_buffers()})
    with recorded_calls(model, trace), disable_saved_tensors_hooks(models.CHECKPOINTING), Watch(trace):
        try:
            outputs = call_with(model, trace.inputs, trace.buffers)
        except RuntimeError as error:
            if models.is_about_checkpointing(error):
                raise models.ModelError(f"{models.label(model, trace.stack[-1])}: {models.CHECKPOINTING}") from error
            if "in-place" in str(error):
                raise in_place_error(model, {trace.stack[-1]: "its input"}, error) from error
            why = models.describe_input_dtype(error, model, inputs) or _describe_shapes(error, model, trace, inputs)
            raise (error if why is None else models.ModelError(why)) from error
        try:
            trace.losses = loss_fn(outputs, tree_map(converted, targets))
        except RuntimeError as error:
            if models.is_about_checkpointing(error):
                raise models.ModelError(f"{models.LOSS}: {models.CHECKPOINTING}") from error
            why = models.describe_target_dtype(error, targets)
            raise (error if why is None else models.ModelError(why)) from error
        except (TypeError, AttributeError) as error:
            raise models.ModelError(f"loss_fn cannot be called with the outputs and the targets: {error}") from error
    first = next(x for x in tree_leaves(inputs) if isinstance(x, Tensor))
    models.check_losses(trace.losses, len(first))
    bad = (~torch.isfinite(trace.losses)).nonzero()
    if len(bad):
        value = trace.losses[bad[0]].item()
        raise models.ModelError(f"the loss of record {int(bad[0])} is {value}: model or loss_fn overflows")
    return trace


def arguments(inputs: Any) -> Call:
    """Returns how a model is called with a batch, model(x), model(*x) or model(**x); a Call as it is."""
    if isinstance(inputs, Call):
        return inputs
    if isinstance(inputs, Mapping):
        return Call((), dict(inputs))
    return Call(tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,), {})


def call_with(model: nn.Module, inputs: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Calls a model with other parameters and buffers; a shared one is replaced at every place.

    `functional_call` would leave it in a module that has two names.

    Args:
        model: the model.
        inputs: a tensor, a tuple or dictionary of tensors, or a Call.
        tensors: takes the place of the model's own, by name.
    """
    args, kwargs = arguments(inputs)
    given: dict[int, Tensor] = {}
    places: dict[str, int] = {}
    seen: set[nn.Module] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        for key, t in (*module._parameters.items(), *module._buffers.items()):
            name = f"{path}.{key}" if path else key
            if t is not None and name in tensors:
                given[id(t)] = tensors[name]
            if t is not None and module not in seen:
                places[name] = id(t)
        seen.add(module)
    everywhere = {name: given[t] for name, t in places.items() if t in given}
    return functional_call(model, everywhere, args, kwargs, tie_weights=False)


def _describe_shapes(error: RuntimeError, model: nn.Module, trace: Trace, inputs: Any) -> str | None:
    """Returns which module does not take its input, and a record's shape; None for other errors."""
    why = first_line(error)
    if not any(word in why for word in ("cannot be multiplied", "channels", "must match the size", "normalized_shape")):
        return None
    shapes = ", ".join(f"{name} {tuple(x.shape[1:])}" for name, x in models.tensors("inputs", inputs))
    where = models.label(model, trace.stack[-1])
    return f"{where} does not take what it is given ({why}); a record has the shape {shapes}"


@contextmanager
def recorded_calls(model: nn.Module, trace: Trace) -> Iterator[None]:
    def enter(path: str, *_: Any) -> None:
        trace.stack.append(path)

    def leave(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        trace.stack.pop()
        trace.calls.append((path, Call(args, kwargs), output))

    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(partial(enter, path), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(leave, path), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def in_place_error(model: nn.Module, places: Mapping[str, str], error: RuntimeError) -> models.ModelError:
    where = " and ".join(f"{models.label(model, path)}: {name}" for path, name in places.items()) or "the model"
    return models.ModelError(
        f"a value that the derivatives need was changed in place, at {where}. Use inplace=False, and x = x + y in "
        f"place of x += y ({first_line(error)})"
    )


def first_line(error: BaseException) -> str:
    return str(error).split("\n")[0].split(". ")[0]


PROBE_RECORDS = 3


def close(a: Tensor, b: Tensor, relative: float | None = None) -> bool:
    """Returns whether two tensors differ by at most this part of the first's largest value; None: by rounding."""
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    scale = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    relative = 100 * torch.finfo(a.dtype).eps if relative is None else relative
    return torch.allclose(a, b, rtol=0.0, atol=relative * scale, equal_nan=True)


def _first_change(before: Trace, after: Trace, rows: int, relative: float) -> str:
    """Returns the first module, innermost first, that gives other rows than before; loss_fn where none does."""
    for (path, _, old), (_, _, new) in zip(before.calls, after.calls, strict=False):
        for a, b in zip(tree_leaves(old), tree_leaves(new), strict=False):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim()):
                continue
            by_record = len(a) == PROBE_RECORDS and len(b) in (rows, PROBE_RECORDS)
            if by_record and not close(a[:rows], b[:rows], relative):
                return path
    return models.LOSS


def check_independence(model: nn.Module, loss_fn: LossFn, few: Any) -> Trace:
    """Checks that a record's loss depends on that record alone: on no random number and on no other record.

    The model runs on the same records twice, then with the last of them changed, and without it.

    Args:
        model: the model.
        loss_fn: the per-record loss.
        few: inputs and targets of PROBE_RECORDS records.

    Returns:
        The first run.
    """
    trace, again, rest = run(model, loss_fn, *few), run(model, loss_fn, *few), PROBE_RECORDS - 1
    precision = torch.finfo(trace.losses.dtype).eps
    relative = min(100 * precision, 0.01)
    if not close(trace.losses, again.losses, relative):
        drawing = [p for p in trace.seeded if p not in trace.attention]  # which may draw, and mostly does not
        path = [*drawing, _first_change(trace, again, PROBE_RECORDS, relative)][0]
        raise models.ModelError(
            f"{models.label(model, path)} is random: two runs on the same records gave different losses. Turn its "
            "randomness off (eval mode, or F.dropout(..., training=False)); the noise that protects is the one on "
            "the gradient"
        )
    changed = run(model, loss_fn, tree_map(_last_changed, few[0]), few[1])
    if not close(trace.losses[:rest], changed.losses[:rest], relative):
        raise models.ModelError(
            f"{models.label(model, _first_change(trace, changed, rest, relative))} couples the records of a batch: one "
            "record's loss changes when another record changes. Each loss must depend on its own record alone: no "
            "statistics, sums or comparisons over the batch (nn.GroupNorm in place of batch statistics)"
        )
    relative = min(precision**0.5, 0.05)  # another shape may round differently
    fewer = run(model, loss_fn, *tree_map(lambda x: x[:rest] if isinstance(x, Tensor) else x, few))
    if not close(trace.losses[:rest], fewer.losses, relative):
        raise models.ModelError(
            f"{models.label(model, _first_change(trace, fewer, rest, relative))} depends on the batch: a record's loss "
            "changes when another record is left out. Do not divide by the batch size or use anything else that is "
            "taken over the batch"
        )
    return trace


def _last_changed(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    changed = x.clone()
    changed[-1] = x[0]
    if x.is_floating_point() and torch.equal(changed, x):
        changed[-1] = 0.5 * x[-1] + 0.1
    return changed


class TwiceDifferentiable(TorchFunctionMode):
    """A mode in which functions whose second derivative PyTorch lacks are computed by others that have one.

    A bag of embeddings is the sum, mean or maximum of its rows; a transposed convolution with output_padding is the one
    without any padding, cut to size. (`F.embedding_bag` has no second derivative at all, that of a transposed
    convolution with output_padding fails record by record.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        other, kwargs = REPLACED.get(func), kwargs or {}
        found = None if other is None else other(func, *args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _bag(
    func: Any,
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **how: Any,
) -> Tensor | None:
    if how["max_norm"] is not None or how["scale_grad_by_freq"] or how["sparse"]:
        return None
    if offsets is not None:
        input, per_sample_weights, inside = _in_rows(input, offsets, per_sample_weights, how["include_last_offset"])
    else:
        inside = torch.ones_like(input, dtype=torch.bool)
    if padding_idx is not None:
        inside = inside & (input != padding_idx % weight.shape[0])
    rows = F.embedding(input, weight)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    empty = ~inside.any(-1, keepdim=True)
    if mode == "max":
        return rows.masked_fill(~inside.unsqueeze(-1), -torch.inf).amax(-2).masked_fill(empty, 0.0)
    total = rows.masked_fill(~inside.unsqueeze(-1), 0.0).sum(-2)
    return total if mode == "sum" else total / inside.sum(-1, keepdim=True).clamp(min=1)


def _in_rows(flat: Tensor, offsets: Tensor, weights: Tensor | None, last: bool) -> tuple[Tensor, Tensor | None, Tensor]:
    """Returns consecutive bags as rows of the longest one's length, their weights, and which places are used."""
    ends = offsets[1:] if last else torch.cat([offsets[1:], offsets.new_full((1,), flat.shape[0])])
    starts = offsets[:-1] if last else offsets
    places = starts[:, None] + torch.arange(flat.shape[0], device=flat.device)
    inside = places < ends[:, None]
    places = places.clamp(max=max(flat.shape[0] - 1, 0))
    return flat[places], None if weights is None else weights[places], inside


def _conv_transpose(
    func: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor | None:
    rank = weight.dim() - 2
    before, after = (each_side(value, rank) for value in (padding, output_padding))
    if not any(after):
        return None
    whole = func(input, weight, None, stride, 0, 0, groups, dilation)
    cut = [n for p, more in zip(reversed(before), reversed(after), strict=True) for n in (-p, more - p)]
    output = F.pad(whole, cut)
    return output if bias is None else output + bias.reshape(-1, *(1,) * rank)


def each_side(value: Any, rank: int) -> tuple[int, ...]:
    """Returns a size for each of a layer's dimensions, from one for all of them or from as many."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    return values * rank if len(values) == 1 else values


REPLACED: dict[Any, Callable[..., Tensor | None]] = {
    F.embedding_bag: _bag,
    F.conv_transpose1d: _conv_transpose,
    F.conv_transpose2d: _conv_transpose,
    F.conv_transpose3d: _conv_transpose,
}
