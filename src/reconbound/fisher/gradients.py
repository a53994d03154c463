"""Per-record gradients of a batch, and products with their derivative in the private part: never a matrix of them.

For each record of a batch, g = ∇_w ℓ(z; w) and J = ∂g/∂z. Two ways to the same small set of products:

    LayerPass    a rule per layer, from the recorded inputs a and output gradients δ of every layer
    GenericPass  torch.func, for any module that it can differentiate

In the layer way, ⟨g, v⟩ = Σ ⟨δ, layer(a; v)⟩ over the layers' uses, so that its derivatives in δ and in a are
layer(a; v) and layerᵀ(δ; v): these seed one backward pass through the graph of (a, δ), and Jᵀv is what arrives at z. No
graph is built for the products, no record × parameter array is formed unless it is the smaller one, and every v shares
the graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from reconbound.fisher import layers
from reconbound.fisher.layers import EmbeddingRule
from reconbound.fisher.private import Inputs, Problem, batch_rows
from reconbound.fisher.recorder import NotCovered, Recorder, Site, check_covered, check_leading

Params = Mapping[str, Tensor]
Route = Literal["reverse", "forward"]
Pair = tuple[Tensor, Tensor]


class Pass(Protocol):
    """What the information of a step needs to know of one micro-batch."""

    method: Literal["layers", "generic"]
    losses: Tensor

    def squared_norms(self) -> Tensor:
        """n², (B,), alone."""

    def own(self) -> tuple[Tensor, Tensor]:
        """n², (B,), and Jᵀg, of z's shape."""

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        """⟨g, u⟩, (B,), and Jᵀu, of z's shape, for one direction u in parameter space, shared by the batch."""

    def moved(self, v: Tensor) -> Tensor:
        """‖Jv‖² for each record, (B,), for a direction v of z's shape."""

    def normal(self, v: Tensor) -> Tensor:
        """JᵀJv, of z's shape."""

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i g_i, by parameter name."""


@cache
def load_forward_mode() -> None:
    """PyTorch loads its forward-mode rules at first use and warns of its own use of torch.jit there: not our affair."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def trainable(problem: Problem) -> dict[str, Tensor]:
    """The parameters whose gradients are released, by name; a shared one once."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}


class LayerPass:
    """One forward and one backward pass, recorded; then every product by layer rules.

    check: first run a batch of another size, to see that the leading dimension of every layer's input counts records.
    measured: keep the graph, for products with J; without it there are norms and weighted sums alone.
    """

    method: Literal["layers", "generic"] = "layers"

    def __init__(
        self, problem: Problem, z: Tensor, inputs: Inputs, targets: Any, *, check: bool = True, measured: bool = True
    ) -> None:
        self.params = trainable(problem)
        if check:
            _check_small_batch(problem, self.params, z, inputs, targets)
        self.z = z.detach().requires_grad_()
        with torch.enable_grad():
            losses, sites = _recorded(problem, self.params, self.z, inputs, targets)
            check_covered(losses, sites, self.params)
            check_leading(sites, z.shape[0])
            self.losses = losses.detach()
            deltas = _output_gradients(losses, sites, create_graph=measured)
        self.graph_sites = [(s, d) for s, d in zip(sites, deltas, strict=True) if d is not None]
        self.sites = [s for s, _ in self.graph_sites]
        self.graph_deltas = [d for _, d in self.graph_sites]
        self.inputs = [s.a.detach() for s in self.sites]
        self.deltas = [_kept(s, d.detach()) for s, d in self.graph_sites]
        self.weight_uses = _uses(s.weight for s in self.sites)
        self.bias_uses = _uses(s.bias for s in self.sites)
        self.formed: dict[str, Tensor] = {}
        self.tangents: tuple[list[Tensor], Tensor] | None = None

    def squared_norms(self) -> Tensor:
        return self._squared(self._own_pairs(), keep=True)

    def own(self) -> tuple[Tensor, Tensor]:
        return self._pull(*self._record_direction(self._own_pairs(), keep=True))

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        along_output: list[Tensor | None] = []
        along_input: list[Tensor | None] = []
        for site, a, delta in zip(self.sites, self.inputs, self.deltas, strict=True):
            e = t = None
            if site.weight is not None:
                e = _kept(site, site.rule.apply(a, direction[site.weight]))
                if site.a.requires_grad:
                    t = site.rule.transpose(delta, direction[site.weight], a.shape)
            if site.bias is not None:
                b = site.rule.bias(direction[site.bias], delta)
                e = b.expand_as(delta) if e is None else e.add_(b)
            along_output.append(e)
            along_input.append(t)
        return self._pull(along_output, along_input)

    def moved(self, v: Tensor) -> Tensor:
        return self._squared(self._moved_pairs(v))

    def normal(self, v: Tensor) -> Tensor:
        return self._pull(*self._record_direction(self._moved_pairs(v)))[1]

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        sums = {name: torch.zeros_like(p) for name, p in self.params.items()}
        for name, formed in self.formed.items():
            sums[name] = (weights @ formed.flatten(1)).reshape(self.params[name].shape)
        for i, (site, a, delta) in enumerate(zip(self.sites, self.inputs, self.deltas, strict=True)):
            weighted = delta * weights.reshape(-1, *(1,) * (delta.dim() - 1))
            if site.weight is not None and site.weight not in self.formed:
                sums[site.weight] += site.rule.total(a, weighted, self.params[site.weight])
            if site.bias is not None:
                sums[site.bias] += self.sites[i].rule.rows(weighted).sum((0, 3)).reshape(sums[site.bias].shape)
        return sums

    def _own_pairs(self) -> list[list[Pair]]:
        return [[pair] for pair in zip(self.inputs, self.deltas, strict=True)]

    def _squared(self, pairs: list[list[Pair]], *, keep: bool = False) -> Tensor:
        """Squared norms of the gradients that pairs (a, δ) make, (B,)."""
        total = torch.zeros_like(self.losses)
        for name, uses in self.weight_uses.items():
            if len(uses) > 1:
                formed = self._full(name, uses, pairs)
            else:
                columns, rows = self._factors(uses[0], pairs[uses[0]])
                if not layers.forms_gradient(columns, rows, columns.shape[-1]):
                    total = total + (layers.gram(columns, columns) * layers.gram(rows, rows)).sum((1, 2, 3))
                    continue
                formed = layers.record_gradients(columns, rows)
            total = total + formed.flatten(1).square().sum(1)
            if keep:
                self.formed[name] = formed
        for uses in self.bias_uses.values():
            total = total + self._bias_direction(uses, pairs).square().sum(1)
        return total

    def _record_direction(self, pairs: list[list[Pair]], *, keep: bool = False) -> tuple[list[Any], list[Any]]:
        """Seeds in δ and in a for a direction of each record's own: the sum of the gradients that pairs (a, δ) make."""
        along_output: list[Tensor | None] = [None] * len(self.sites)
        along_input: list[Tensor | None] = [None] * len(self.sites)
        for name, uses in self.weight_uses.items():
            formed = self._single(uses[0], pairs, along_output, along_input) if len(uses) == 1 else None
            if len(uses) > 1:
                formed = self._full(name, uses, pairs)
                self._several(uses, formed, along_output, along_input)
            if keep and formed is not None:
                self.formed[name] = formed
        for uses in self.bias_uses.values():
            direction = self._bias_direction(uses, pairs)
            for i in uses:
                rows = self.sites[i].rule.rows(self.deltas[i])
                spread = direction.reshape(*rows.shape[:3], 1).expand_as(rows)
                e = self.sites[i].rule.from_rows(spread, self.deltas[i].shape)
                before = along_output[i]
                along_output[i] = e if before is None else before.add_(e)
        return along_output, along_input

    def _single(
        self, i: int, pairs: list[list[Pair]], along_output: list[Any], along_input: list[Any]
    ) -> Tensor | None:
        """Seeds of a weight that is used once; the gradients, if forming them was the cheaper way."""
        rule, a, delta = self.sites[i].rule, self.inputs[i], self.deltas[i]
        columns, rows = rule.columns(a), rule.rows(delta)
        others = (columns, rows) if pairs[i][0][1] is delta else self._factors(i, pairs[i])
        formed = None
        if layers.forms_gradient(columns, rows, others[0].shape[-1]):
            formed = layers.record_gradients(*others)
            e = formed @ columns
            t = formed.transpose(2, 3) @ rows if self.sites[i].a.requires_grad else None
        else:
            e = others[1] @ layers.gram(others[0], columns).to(rows.dtype)
            t = others[0] @ layers.gram(others[1], rows) if self.sites[i].a.requires_grad else None
        along_output[i] = _kept(self.sites[i], rule.from_rows(e, delta.shape))
        along_input[i] = None if t is None else rule.from_columns(t, a.shape)
        return formed

    def _several(self, uses: list[int], formed: Tensor, along_output: list[Any], along_input: list[Any]) -> None:
        for i in uses:
            rule, a, delta = self.sites[i].rule, self.inputs[i], self.deltas[i]
            along_output[i] = _kept(self.sites[i], layers.apply_each(rule, a, formed, delta))
            if self.sites[i].a.requires_grad:
                along_input[i] = layers.transpose_each(rule, delta, formed, a)

    def _factors(self, i: int, pairs: list[Pair]) -> Pair:
        rule = self.sites[i].rule
        columns = [rule.columns(a) for a, _ in pairs]
        rows = [rule.rows(delta) for _, delta in pairs]
        return (columns[0], rows[0]) if len(pairs) == 1 else (torch.cat(columns, -1), torch.cat(rows, -1))

    def _full(self, name: str, uses: list[int], pairs: list[list[Pair]]) -> Tensor:
        weight = self.params[name]
        each = [layers.full_gradients(self.sites[i].rule, a, d, weight) for i in uses for a, d in pairs[i]]
        return torch.stack(each).sum(0)

    def _bias_direction(self, uses: list[int], pairs: list[list[Pair]]) -> Tensor:
        """The bias gradients, (B, O). A pair (ȧ, δ) adds nothing: the bias does not meet the input."""
        each = [self.sites[i].rule.rows(d).sum(3).flatten(1) for i in uses for a, d in pairs[i] if a is self.inputs[i]]
        return torch.stack(each).sum(0) if each else self.losses.new_zeros(len(self.losses), 1)

    def _pull(self, along_output: list[Any], along_input: list[Any]) -> tuple[Tensor, Tensor]:
        """Inner product with g, and the pull-back to z, of the direction whose seeds are given."""
        total = torch.zeros_like(self.losses)
        outputs: list[Tensor] = []
        seeds: list[Tensor] = []
        for i, e in enumerate(along_output):
            if e is None:
                continue
            total = total + (self.deltas[i] * e).flatten(1).sum(1)
            if self.graph_deltas[i].requires_grad:
                outputs.append(self.graph_deltas[i])
                seeds.append(e)
            if along_input[i] is not None:
                outputs.append(self.sites[i].a)
                seeds.append(along_input[i])
        return total, _backward(outputs, self.z, seeds)

    def _moved_pairs(self, v: Tensor) -> list[list[Pair]]:
        """Jv as pairs: the gradients made by (a, δ̇) and (ȧ, δ), the dots being derivatives along v."""
        if self.tangents is None:
            self.tangents = self._transposed_graph()
        dummies, pulled = self.tangents
        dots = torch.autograd.grad(pulled, dummies, v, retain_graph=True, allow_unused=True) if dummies else ()
        found = iter(dots)
        pairs: list[list[Pair]] = []
        for site, a, delta, graph_delta in zip(self.sites, self.inputs, self.deltas, self.graph_deltas, strict=True):
            delta_dot = next(found) if graph_delta.requires_grad else None
            a_dot = next(found) if site.a.requires_grad else None
            here = [(a, _kept(site, torch.zeros_like(delta) if delta_dot is None else delta_dot))]
            if a_dot is not None:
                here.append((a_dot, delta))
            pairs.append(here)
        return pairs

    def _transposed_graph(self) -> tuple[list[Tensor], Tensor]:
        """The pull-back as a function of its seeds: linear, so its own derivative along v is the push-forward of v."""
        outputs = [t for s, d in zip(self.sites, self.graph_deltas, strict=True) for t in (d, s.a) if t.requires_grad]
        dummies = [torch.zeros_like(t).requires_grad_() for t in outputs]
        with torch.enable_grad():
            pulled = _backward(outputs, self.z, dummies, create_graph=True)
        return (dummies, pulled) if pulled.requires_grad else ([], pulled)


def _recorded(problem: Problem, params: Params, z: Tensor, inputs: Inputs, targets: Any) -> tuple[Tensor, list[Site]]:
    recorder = Recorder(params)
    with recorder:
        losses = problem.losses(z, inputs, targets)
    return losses, recorder.sites


def _check_small_batch(problem: Problem, params: Params, z: Tensor, inputs: Inputs, targets: Any) -> None:
    """A batch of another size must show in the first dimension of every layer's input, or it does not count records."""
    records = 1 if z.shape[0] > 1 else 2
    z, inputs, targets = batch_rows((z, inputs, targets), slice(0, 1))
    if records == 2:
        z, inputs, targets = tree_map(lambda t: torch.cat([t, t]) if isinstance(t, Tensor) else t, (z, inputs, targets))
    with torch.enable_grad():
        check_leading(_recorded(problem, params, z, inputs, targets)[1], records)


def _output_gradients(losses: Tensor, sites: list[Site], *, create_graph: bool) -> list[Tensor | None]:
    if not sites or not losses.requires_grad:
        return [None] * len(sites)
    edges: Any = [s.edge for s in sites]
    return list(torch.autograd.grad(losses.sum(), edges, create_graph=create_graph, allow_unused=True))


def _backward(outputs: list[Tensor], z: Tensor, seeds: list[Tensor], *, create_graph: bool = False) -> Tensor:
    if not outputs:
        return torch.zeros_like(z)
    (at_z,) = torch.autograd.grad(outputs, z, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return torch.zeros_like(z) if at_z is None else at_z


def _kept(site: Site, value: Tensor) -> Tensor:
    keep = site.rule.keep(site.a) if isinstance(site.rule, EmbeddingRule) else None
    return value if keep is None else value * keep


def _uses(names: Any) -> dict[str, list[int]]:
    uses: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name is not None:
            uses.setdefault(name, []).append(i)
    return uses


class GenericPass:
    """torch.func over single records: slower, and right for whatever it can differentiate."""

    method: Literal["layers", "generic"] = "generic"

    def __init__(self, problem: Problem, z: Tensor, inputs: Inputs, targets: Any, *, route: Route = "reverse") -> None:
        if route == "forward":
            load_forward_mode()
        self.problem, self.z, self.route = problem, z.detach(), route
        self.params = {name: p.detach() for name, p in trainable(problem).items()}
        self.public = (inputs, targets)
        self._check_dependence()
        self.gradients, self.losses = self._each(lambda z, pub: self._gradient(z, pub), self.z)

    def squared_norms(self) -> Tensor:
        return torch.stack([g.flatten(1).square().sum(1) for g in self.gradients.values()]).sum(0)

    def own(self) -> tuple[Tensor, Tensor]:
        return self.squared_norms(), self._each(self._pull, self.z, self.gradients)

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        dots = [g.flatten(1) @ direction[name].flatten() for name, g in self.gradients.items()]
        pull = lambda z, pub: self._pull(z, pub, direction)  # noqa: E731
        return torch.stack(dots).sum(0), self._each(pull, self.z)

    def moved(self, v: Tensor) -> Tensor:
        moved: dict[str, Tensor] = self._each(self._push, self.z, v)
        return torch.stack([m.flatten(1).square().sum(1) for m in moved.values()]).sum(0)

    def normal(self, v: Tensor) -> Tensor:
        pulled: Tensor = self._each(self._pull, self.z, self._each(self._push, self.z, v))
        return pulled

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        return {name: torch.tensordot(weights, g, 1) for name, g in self.gradients.items()}

    def _check_dependence(self) -> None:
        """With every trainable parameter replaced, nothing may still lead to one; and no layer may be fused."""
        for name, module in self.problem.model.named_modules():
            if isinstance(module, torch.nn.RNNBase):
                raise ValueError(
                    f"torch.func cannot take {name or 'the model'} ({type(module).__name__}) record by record: "
                    "write the recurrence with nn.Linear layers"
                )
        z, inputs, targets = batch_rows((self.z, *self.public), slice(0, 1))
        with torch.enable_grad():
            if self.problem.losses(z, inputs, targets, self.params).requires_grad:
                raise ValueError(
                    "the loss reaches trainable parameters by another way than calling the model (a penalty inside "
                    "loss_fn?): a record's gradient must come from its own loss alone"
                )

    def _loss(self, params: Params, z: Tensor, public: Any) -> Tensor:
        one = tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, public)
        return self.problem.losses(z.unsqueeze(0), one[0], one[1], params)[0]

    def _gradient(self, z: Tensor, public: Any) -> Any:
        gradient_and_loss = grad(lambda w: (lambda loss: (loss, loss))(self._loss(w, z, public)), has_aux=True)
        return gradient_and_loss(self.params)

    def _pull(self, z: Tensor, public: Any, direction: Params) -> Any:
        """Jᵀ·direction: the derivative in w of ∇_z ℓ (forward), or the pull-back of z ↦ ∇_w ℓ (reverse)."""
        if self.route == "forward":
            slope = lambda w: grad(lambda z: self._loss(w, z, public))(z)  # noqa: E731
            with _ForwardModeGuard():
                return jvp(slope, (self.params,), (dict(direction),))[1]
        return self._reverse(z, public)(dict(direction))[0]

    def _push(self, z: Tensor, public: Any, v: Tensor) -> Any:
        """Jv. In reverse mode alone it is the pull-back of the pull-back, which is linear in what it pulls."""
        if self.route == "forward":
            return jvp(lambda z: self._gradient(z, public)[0], (z,), (v,))[1]
        pull = self._reverse(z, public)
        return vjp(lambda w: pull(w)[0], {name: torch.zeros_like(p) for name, p in self.params.items()})[1](v)[0]

    def _reverse(self, z: Tensor, public: Any) -> Any:
        return vjp(lambda z: self._gradient(z, public)[0], z)[1]

    def _each(self, function: Any, *args: Any) -> Any:
        """vmap over records of function(z, public, ...)."""
        dims = tree_map(lambda t: 0 if isinstance(t, Tensor) else None, self.public)
        return vmap(function, in_dims=(0, dims, *(0,) * (len(args) - 1)))(args[0], self.public, *args[1:])


class _ForwardModeGuard(TorchFunctionMode):
    """Refuses what PyTorch differentiates differently forward and in reverse: the row of an embedding's padding_idx."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.embedding and (kwargs.get("padding_idx") is not None or (len(args) > 2 and args[2] is not None)):
            raise ValueError(
                'an embedding with padding_idx has no forward-mode derivative that agrees: use route="reverse"'
            )
        return func(*args, **kwargs)


__all__ = ["GenericPass", "LayerPass", "NotCovered", "Pass", "Route", "trainable"]
