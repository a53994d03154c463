"""Records how a model uses its parameters: which known function is called with which parameter, on which input.

The rules are tied to the functions (F.linear, F.conv2d, ...), not to modules: a layer called twice, a weight shared by
two layers, a subclass with its own forward or a weight used by hand are all recorded. Each recorded use
computes with the parameter DETACHED, so that any remaining path from the loss to a trainable parameter is a use that
no rule covers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from reconbound.fisher.options import capturing
from reconbound.fisher.passes.attention import attend, attend_to_values, weight_norm
from reconbound.fisher.passes.convolutions import avg_pool2d, convolve
from reconbound.fisher.passes.layers import ConvRule, EmbeddingRule, LinearRule, Rule, ScaleRule
from reconbound.fisher.passes.smooth import gelu, group_norm, layer_norm, softmax
from reconbound.validate.model import CHECKPOINTING
from reconbound.validate.private import Inputs, Problem, batch_rows
from reconbound.validate.watch import REPLACED, TwiceDifferentiable, close, each_side

_OTHER_LOSS = 0.02  # the largest relative change of a loss beside other records that may be rounding
_FOREIGN = 1e-5  # the largest share of other records in a row of δ that may be rounding (sums in another order)
_CHECKED: WeakKeyDictionary[nn.Module, dict[Any, Passed]] = WeakKeyDictionary()


@dataclass
class Passed:
    """Counts the batches that passed the checks of a model with its loss, and keeps the largest size among them.

    Attributes:
        batches: how many passed.
        largest: the largest size among them.
        copied: the parameters of which each record used a copy of its own (see mixed.py).
    """

    batches: int = 0
    largest: int = 0
    copied: frozenset[str] = frozenset()

    def is_due(self, records: int) -> bool:
        """Returns whether a batch is to be checked: the first, one after 1, 2, 4, 8, ..., and any larger one."""
        return records > self.largest or self.batches & (self.batches - 1) == 0


class NotCovered(Exception):
    """Raised where the layer rules do not cover a model; the message says why."""


class _NotByRow(Exception):
    """Raised where a known function takes something that no rule knows; it is then run as PyTorch runs it."""


@dataclass
class Site:
    """One use of a layer: o = weight·a + bias. The names are those of trainable parameters, None for anything else."""

    rule: Rule
    a: Tensor
    version: int
    edge: GradientEdge | Tensor  # the output as it was, whatever is done to it in place afterwards
    weight: str | None
    bias: str | None

    def kept(self, value: Tensor) -> Tensor:
        """Returns an output's value or gradient with zeros where the weight is not used (an embedding's padding)."""
        keep = self.rule.keep(self.a) if isinstance(self.rule, EmbeddingRule) else None
        return value if keep is None else value * keep


class Recorder(TwiceDifferentiable):
    """A mode in which every use of the named parameters by a known function is appended to sites.

    Functions without a second derivative are computed by others, as in `TwiceDifferentiable`, which are recorded. So is
    attention with parameters of its own.

    Args:
        params: the parameters, by name.
        mapped: the model is run in one vmap over the records, with one record in each of its batches. What is recorded
            has a row for each record all the same.
    """

    def __init__(self, params: Mapping[str, Tensor], *, mapped: bool = False) -> None:
        super().__init__()
        self.names = {id(p): name for name, p in params.items()}
        self.sites: list[Site] = []
        self.mapped = mapped
        self.over: Tensor | None = None  # a tensor that the vmap runs over

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        levels = torch._C._functorch.maybe_current_level() or 0
        if func in _TRANSFORMS or levels > self.mapped or forward_ad._current_level >= 0:
            raise NotCovered("the model differentiates or transforms something itself, which may involve parameters")
        result, kwargs = None, kwargs or {}
        if func in _REPLACED:
            with self:
                result = _REPLACED[func](func, *args, **kwargs)
        elif func in _KNOWN and (torch.is_grad_enabled() or func is F.linear):
            result = self._by_row(func, *args, **kwargs) if self.mapped else _KNOWN[func](self, *args, **kwargs)
        return func(*args, **kwargs) if result is None else result

    def _by_row(self, func: Any, input: Tensor, *rest: Any, **how: Any) -> Tensor | None:
        """Runs a known function inside the vmap, on a tensor with a row for each record, and records that.

        None: it takes something else that the vmap runs over, such as a copy of a parameter for each record.
        """
        image = func in _IMAGES  # a record is a batch of one, whose dimension is left out
        if image and (input.dim() != (_IMAGES[func] or input.dim()) or input.shape[0] != 1):
            return None
        others = [t for t in (*rest, *how.values()) if isinstance(t, Tensor) and id(t) not in self.names]

        def run(records: int, dims: tuple[int | None, ...], a: Tensor) -> Tensor:
            if any(dim is not None for dim in dims[1:-1]):
                raise _NotByRow
            rows = a.expand(records, *a.shape) if dims[0] is None else a.movedim(dims[0], 0)
            found = _KNOWN[func](self, rows.squeeze(1) if image else rows, *rest, **how)
            if found is None:
                raise _NotByRow
            return found.unsqueeze(1) if image else found

        try:
            found: Tensor = _mapped(run, input, *others, self.over)
        except _NotByRow:
            return None
        return found

    def constant(self, param: Tensor | None) -> Any:
        """Returns the parameter, detached if its gradient is taken from the recorded uses."""
        return param.detach() if param is not None and id(param) in self.names else param

    def add(self, rule: Rule, a: Tensor, output: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        edge: GradientEdge | Tensor
        if output.requires_grad:
            edge = get_gradient_edge(output)
        else:  # a public input: the gradient in the output is still wanted, and what follows may change a copy in place
            edge = output.detach().requires_grad_()
            output = edge.clone()
        names = self.names.get(id(weight)), self.names.get(id(bias))
        self.sites.append(Site(rule, a, a._version, edge, *names))
        return output


class _Mapped(torch.autograd.Function):
    """Runs a function of whole batches inside a vmap over records: PyTorch's own way to reach the batch from there."""

    @staticmethod
    def forward(run: Any, *tensors: Tensor) -> Tensor:
        raise NotImplementedError("only inside a vmap")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], run: Any, *tensors: Tensor) -> tuple[Tensor, int]:
        return run(info.batch_size, in_dims[1:], tensors[0]), 0


_mapped: Callable[..., Tensor] = _Mapped.apply


def _linear(rec: Recorder, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    """Runs a linear layer so that a record's output is rounded in the same way beside any number of others.

    PyTorch adds the bias within the product, rounded once, if an input with places is contiguous, and otherwise after
    it, rounded twice. A slice such as x[:, 1:] is contiguous only where it has one record.
    """
    if input.dim() < 2 or weight.dim() != 2:
        return None
    constants = rec.constant(weight), rec.constant(bias)
    a = input.contiguous()
    recorded = id(weight) in rec.names or id(bias) in rec.names
    if not recorded and any(t is not None and t.requires_grad for t in constants):
        return None  # computed from others
    output = F.linear(a, *constants)
    return rec.add(LinearRule(), a, output, weight, bias) if recorded and torch.is_grad_enabled() else output


def _conv(rank: int) -> Callable[..., Tensor | None]:
    def conv(
        rec: Recorder,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor | None:
        a = input
        constant = rec.constant(weight)
        if a.dim() != rank + 2 or constant.requires_grad:
            return None
        stride, dilation, kernel = each_side(stride, rank), each_side(dilation, rank), tuple(weight.shape[2:])
        if isinstance(padding, str):
            total = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
            a = F.pad(a, [v for t in reversed(total) for v in (t // 2, t - t // 2)])
            padding = 0
        rule = ConvRule(kernel, stride, each_side(padding, rank), dilation, groups)
        kind = a.device.type
        if torch.is_autocast_enabled(kind) and a.dtype != torch.float64:  # as F.conv does, but seen by the graph
            a, constant = (t.to(torch.get_autocast_dtype(kind)) for t in (a, constant))
        output = convolve(a, constant, rule)
        if bias is not None:
            output = output + rule.bias(rec.constant(bias).to(output.dtype), output)
        if id(weight) not in rec.names and id(bias) not in rec.names:
            return output  # frozen: nothing to record, and still cheap to differentiate twice
        return rec.add(rule, a, output, weight, bias)

    return conv


def _embedding(
    rec: Recorder, input: Tensor, weight: Tensor, padding_idx: int | None = None, **how: Any
) -> Tensor | None:
    if id(weight) not in rec.names or how["max_norm"] is not None or how["scale_grad_by_freq"] or how["sparse"]:
        return None
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    output = F.embedding(input, weight.detach())
    return rec.add(EmbeddingRule(padding_idx), input, output, weight, None)


def _normalised(function: Any, rule_of: Callable[[Any], ScaleRule]) -> Callable[..., Tensor | None]:
    def normalise(
        rec: Recorder,
        input: Tensor,
        how: Any,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
    ) -> Tensor | None:
        rule, a = rule_of(how), function(input, how, eps)
        output = a if weight is None else rule.apply(a, rec.constant(weight))
        if bias is not None:
            output = output + rule.bias(rec.constant(bias), a)
        if id(weight) not in rec.names and id(bias) not in rec.names:
            return output  # nothing to record, and still cheap to differentiate twice
        return rec.add(rule, a, output, weight, bias)

    return normalise


def _gelu(rec: Recorder, input: Tensor, *, approximate: str = "none") -> Tensor:
    """Replaces GELU by a form that is cheaper to differentiate; records nothing."""
    return gelu(input, approximate)


def _softmax(
    rec: Recorder, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor | None:
    """Replaces softmax by a form that is cheaper to differentiate; records nothing. Not in half precision."""
    if dim is None or dtype is not None or input.dtype not in (torch.float32, torch.float64):
        return None
    return softmax(input, dim + 1 if rec.mapped and dim >= 0 else dim)


_KNOWN: dict[Any, Callable[..., Tensor | None]] = {
    F.linear: _linear,
    F.conv1d: _conv(1),
    F.conv2d: _conv(2),
    F.conv3d: _conv(3),
    F.avg_pool2d: avg_pool2d,
    F.embedding: _embedding,
    F.gelu: _gelu,
    F.softmax: _softmax,
    torch.softmax: _softmax,
    Tensor.softmax: _softmax,
    F.layer_norm: _normalised(layer_norm, lambda shape: ScaleRule(False, len(shape))),
    F.group_norm: _normalised(group_norm, lambda groups: ScaleRule(True, 1)),
}
_IMAGES = {F.conv1d: 3, F.conv2d: 4, F.conv3d: 5, F.avg_pool2d: 4, F.group_norm: 0}  # dimensions; 0: any
_REPLACED: dict[Any, Callable[..., Any]] = {
    **REPLACED,
    F.multi_head_attention_forward: attend,
    F.scaled_dot_product_attention: attend_to_values,
    torch._weight_norm: weight_norm,
}
_TRANSFORMS = (torch.autograd.grad, Tensor.backward)


def passed_checks(problem: Problem, z: Tensor, check: bool, method: str) -> Passed:
    """Returns what passed for this model, loss, private part and shape of a record, by `check` and by method."""
    loss = getattr(problem.loss_fn, "__code__", None) or id(problem.loss_fn)
    key = (check, method, loss, problem.model.training, tuple(z.shape[1:]), problem.private.part, problem.private.name)
    return _CHECKED.setdefault(problem.model, {}).setdefault(key, Passed())


def record_single_records(
    problem: Problem, params: Mapping[str, Tensor], z: Tensor, inputs: Inputs, targets: Any
) -> dict[int, tuple[list[Site], Tensor, float]]:
    """Returns the uses, the loss and the size of the outputs of a batch's first and last record, by row.

    Each is run in a batch of another size. That size must show in the first dimension of every layer's input; otherwise
    that dimension does not count records.
    """
    records = 1 if z.shape[0] > 1 else 2
    versions = {name: p._version for name, p in params.items()}
    found: dict[int, tuple[list[Site], Tensor, float]] = {}
    for row in {0, z.shape[0] - 1}:
        batch = batch_rows((z, inputs, targets), slice(row, row + 1))
        if records == 2:
            batch = tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) else t, batch)
        with torch.enable_grad():
            recorder = Recorder(params)
            losses, outputs = problem.losses_and_outputs(batch[0], batch[1], batch[2], mode=recorder)
        sites = recorder.sites
        check_leading(sites, records)
        if records == 2 and losses.requires_grad and not capturing(losses):  # in a batch of one, every row is its own
            edges: Any = [site.edge for site in sites]
            deltas = torch.autograd.grad(losses.sum(), edges, retain_graph=True, allow_unused=True) if edges else ()
            check_rows_own(losses, sites, list(deltas))
        sizes = [_largest(x.detach()) for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.is_floating_point()]
        found[row] = sites, losses.detach()[0], max(sizes, default=0.0)
    for name, p in params.items():
        if p._version != versions[name]:
            raise ValueError(
                f"the parameter {name} is changed by calling the model: a forward pass must leave it alone"
            )
    return found


def check_order(sites: list[Site], losses: Tensor, alone: Mapping[int, tuple[list[Site], Tensor, float]]) -> None:
    """Raises NotCovered unless a record's row of each layer's input, and its loss, are the same without the others.

    A loss may differ by 2 % of itself, and by the rounding of the outputs and of the largest loss of the batch. This
    proves nothing where two records have nearly the same values: see `check_rows_own`.
    """
    rounding = min(16 * torch.finfo(losses.dtype).eps, _OTHER_LOSS)
    for row, (own, loss, outputs) in alone.items():
        if len(own) != len(sites):
            raise NotCovered("the layers that are used depend on the other records or on their number")
        allowed = _OTHER_LOSS * _largest(loss) + rounding * (outputs + _largest(losses.detach()))
        if not torch.allclose(losses[row].detach(), loss, rtol=0.0, atol=allowed, equal_nan=True):
            raise NotCovered(f"the loss of record {row} depends on the other records or on their number")
        for site, one in zip(sites, own, strict=True):
            if not close(one.a[0], site.a[row], 0.02):  # a batch of another size is rounded otherwise
                raise NotCovered(f"the input of {site.weight or site.bias} has other values of record {row} in its row")


def uses_by_name(names: Iterable[str | None]) -> dict[str, list[int]]:
    """Returns the numbers of the sites at which each parameter is used."""
    found: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name is not None:
            found.setdefault(name, []).append(i)
    return found


def _largest(values: Tensor) -> float:
    """Returns the largest absolute value, without infinities: in float16 a loss may be infinite, its gradient not."""
    return float(values.abs().nan_to_num(0.0, 0.0, 0.0).max()) if values.numel() else 0.0


def check_rows_own(losses: Tensor, sites: list[Site], deltas: list[Tensor | None]) -> None:
    """Raises NotCovered unless each row of every δ comes from the loss of that record and from no other.

    With weights −1, 0 and 1 on the losses each row must take the weight of its own record. That is exact in every
    precision: no number becomes larger or smaller. The weights are the digits of the record's number in base 3, one
    pass for each digit, so that any two records differ in some pass.
    """
    used = [(site, delta) for site, delta in zip(sites, deltas, strict=True) if delta is not None and delta.numel()]
    at: Any = [site.edge for site, _ in used]
    numbers = torch.arange(len(losses), device=losses.device)
    while used and bool((numbers > 0).any()):
        weights = (numbers % 3 - 1).to(losses)
        numbers = numbers // 3
        weighted = torch.autograd.grad(losses, at, weights, retain_graph=True)
        for (site, delta), found in zip(used, weighted, strict=True):
            expected = delta.detach() * weights.to(delta).reshape(-1, *(1,) * (delta.dim() - 1))
            size = delta.detach().flatten(1).abs().amax(1)
            own = (found - expected).flatten(1).abs().amax(1) <= _FOREIGN * size
            own |= ~size.isfinite()  # refused later, as a gradient that overflows
            if not bool(own.all()):
                row = int(own.int().argmin())
                raise NotCovered(f"the output of {site.weight or site.bias} has other records' gradients in row {row}")


def check_covered(losses: Tensor, sites: list[Site], params: Mapping[str, Tensor]) -> None:
    """Raises NotCovered if the loss depends on a trainable parameter in a way that was not recorded."""
    for site in sites:
        if site.a._version != site.version:
            raise NotCovered(f"the input of {site.weight or site.bias} is changed in place after its use")
    both = in_two_roles(sites)
    if both:  # the rules keep weights and biases apart, and such a gradient is the sum of both shares
        raise NotCovered(f"the parameter {min(both)} is a weight in one layer and a bias in another")
    if not losses.requires_grad:
        return
    for name in reached(losses, params):
        raise NotCovered(f"the parameter {name} is used outside the known layers")


def reached(losses: Tensor, params: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields the parameters to which a path leads from the losses. No path leads through a recorded use."""
    names = {id(p): name for name, p in params.items()}
    todo, seen = [losses.grad_fn], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            yield name
        if type(node).__name__ == "CheckpointFunctionBackward":
            raise ValueError(CHECKPOINTING)
        todo.extend(following for following, _ in node.next_functions)


def in_two_roles(sites: list[Site]) -> set[str]:
    """Returns the parameters that are a weight in one use and a bias in another."""
    return {site.weight for site in sites if site.weight} & {site.bias for site in sites if site.bias}


def check_leading(sites: list[Site], records: int) -> None:
    """Raises NotCovered unless the first dimension of every recorded input counts records."""
    for site in sites:
        if site.a.dim() < 1 or site.a.shape[0] != records:
            shape = tuple(site.a.shape)
            raise NotCovered(
                f"the input of {site.weight or site.bias}, {shape}, has no leading dimension of {records} records"
            )
