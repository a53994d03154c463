"""Per-record gradients of a batch, and products with their derivative in the private part: never a matrix of them.

For each record of a batch, g = ∇_w ℓ(z; w) and J = ∂g/∂z. Two ways to the same small set of products:

    LayerPass    a rule per layer, from the recorded inputs a and output gradients δ of every layer
    GenericPass  torch.func, for any module that it can differentiate (generic.py)

In the layer way, ⟨g, v⟩ = Σ ⟨δ, layer(a; v)⟩ over the layers' uses, so that its derivatives in δ and in a are
layer(a; v) and layerᵀ(δ; v): these seed one backward pass through the graph of (a, δ), and Jᵀv is what arrives at z. No
graph is built for the products, no record × parameter array is formed unless it is the smaller one, and every v shares
the graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from reconbound.fisher import products
from reconbound.fisher.checks import no_dependence, no_gradient
from reconbound.fisher.layers import EmbeddingRule
from reconbound.fisher.passes import Params, Pass, Route, trainable
from reconbound.fisher.private import Inputs, Problem
from reconbound.fisher.recorder import NotCovered, Site, check_covered, check_leading, check_small_batch, recorded

Pair = tuple[Tensor, Tensor]


class LayerPass:
    """One forward and one backward pass, recorded; then every product by layer rules.

    check: first run a batch of another size, to see that the leading dimension of every layer's input counts records;
        and refuse gradients that do not depend on z.
    measured: keep the graph, for products with J; without it there are norms and weighted sums alone.
    sloped: also take ∇_z ℓ on the way.
    """

    method: Literal["layers", "generic"] = "layers"

    def __init__(
        self,
        problem: Problem,
        z: Tensor,
        inputs: Inputs,
        targets: Any,
        *,
        check: bool = True,
        measured: bool = True,
        sloped: bool = False,
    ) -> None:
        self.params = trainable(problem)
        if check:
            check_small_batch(problem, self.params, z, inputs, targets)
        self.z = z.detach().requires_grad_()
        self.strict = problem.private.part if check else None
        with torch.enable_grad():
            losses, self.outputs, sites = recorded(problem, self.params, self.z, inputs, targets)
            check_covered(losses, sites, self.params)
            check_leading(sites, z.shape[0])
            self.losses = losses.detach()
            at = [*(s.edge for s in sites), *([self.z] if sloped else [])]
            deltas = _output_gradients(losses, at, create_graph=measured)
        at_z = deltas.pop() if sloped else None
        self.at_z = torch.zeros_like(z) if at_z is None else at_z.detach()
        self.graph_sites = [(s, d) for s, d in zip(sites, deltas, strict=True) if d is not None]
        self.sites = [s for s, _ in self.graph_sites]
        self.graph_deltas = [d for _, d in self.graph_sites]
        self.inputs = [s.a.detach() for s in self.sites]
        self.deltas = [_kept(s, d.detach()) for s, d in self.graph_sites]
        self.weight_uses = _uses(s.weight for s in self.sites)
        self.bias_uses = _uses(s.bias for s in self.sites)
        self.formed: dict[str, Tensor] = {}
        self.columns: dict[int, Tensor] = {}  # of the inputs, kept while products Jv are to follow
        self.tangents: _Tangents | None = None

    def squared_norms(self) -> Tensor:
        return self._squared(self._own_pairs(), keep=True)

    def own(self, *, moving: bool = False) -> tuple[Tensor, Tensor]:
        return self._pull(*self._record_direction(self._own_pairs(), keep=True, moving=moving), moving=moving)

    def slope(self) -> Tensor:
        return self.at_z

    def output_slope(self) -> Tensor | None:
        f = self.outputs
        if not isinstance(f, Tensor) or f.dim() < 2 or f.shape[0] != len(self.losses) or not f.requires_grad:
            return None
        flat = f.detach().flatten(1)
        arrived = _backward([f], self.z, [(flat - flat.mean(1, keepdim=True)).reshape(f.shape)])
        return torch.zeros_like(self.z) if arrived is None else arrived

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
        sums: dict[str, Tensor] = {}
        for name, uses in self.bias_uses.items():
            if name not in self.formed:
                self.formed[name] = self._bias_direction(uses, self._own_pairs())
        for name, formed in self.formed.items():
            sums[name] = (weights @ formed.flatten(1)).reshape(self.params[name].shape)
        for site, a, delta in zip(self.sites, self.inputs, self.deltas, strict=True):
            if site.weight is not None and site.weight not in self.formed:
                weighted = delta * weights.reshape(-1, *(1,) * (delta.dim() - 1))
                part = site.rule.total(a, weighted, self.params[site.weight])
                sums[site.weight] = sums[site.weight] + part if site.weight in sums else part
        return {name: sums[name] if name in sums else torch.zeros_like(p).detach() for name, p in self.params.items()}

    def _own_pairs(self) -> list[list[Pair]]:
        return [[pair] for pair in zip(self.inputs, self.deltas, strict=True)]

    def _squared(self, pairs: list[list[Pair]], *, keep: bool = False) -> Tensor:
        """Squared norms of the gradients that pairs (a, δ) make, (B,)."""
        squares: list[Tensor] = []
        for name, uses in self.weight_uses.items():
            if len(uses) > 1:
                formed = self._full(name, uses, pairs)
            else:
                factors = self._factors(uses[0], pairs[uses[0]])
                if not products.forms_gradient(*factors[0], sum(columns.shape[-1] for columns, _ in factors)):
                    columns, rows = _joined(factors)
                    squares.append((products.gram(columns, columns) * products.gram(rows, rows)).sum((1, 2, 3)))
                    continue
                formed = products.summed_gradients(factors)
            squares.append(_squares(formed))
            if keep:
                self.formed[name] = formed
        for name, uses in self.bias_uses.items():
            direction = self._bias_direction(uses, pairs)
            squares.append(_squares(direction))
            if keep:
                self.formed[name] = direction
        return torch.stack(squares).sum(0) if squares else torch.zeros_like(self.losses)

    def _record_direction(
        self, pairs: list[list[Pair]], *, keep: bool = False, moving: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Seeds in δ and in a for a direction of each record's own: the sum of the gradients that pairs (a, δ) make."""
        along_output: list[Tensor | None] = [None] * len(self.sites)
        along_input: list[Tensor | None] = [None] * len(self.sites)
        for name, uses in self.weight_uses.items():
            formed = self._single(uses[0], pairs, along_output, along_input, moving) if len(uses) == 1 else None
            if len(uses) > 1:
                formed = self._full(name, uses, pairs)
                self._several(uses, formed, along_output, along_input)
            if keep and formed is not None:
                self.formed[name] = formed
        for name, uses in self.bias_uses.items():
            direction = self._bias_direction(uses, pairs)
            if keep:
                self.formed[name] = direction
            for i in uses:
                rows = self.sites[i].rule.rows(self.deltas[i])
                spread = direction.reshape(*rows.shape[:3], 1).expand_as(rows)
                e = self.sites[i].rule.from_rows(spread, self.deltas[i].shape)
                before = along_output[i]
                along_output[i] = e if before is None else before.add_(e)
        return along_output, along_input

    def _single(
        self, i: int, pairs: list[list[Pair]], along_output: list[Any], along_input: list[Any], moving: bool
    ) -> Tensor | None:
        """Seeds of a weight that is used once; the gradients, if forming them was the cheaper way."""
        site, rule, a, delta = self.sites[i], self.sites[i].rule, self.inputs[i], self.deltas[i]
        columns, rows = self._columns(i, a), rule.rows(delta)
        if moving:
            self.columns[i] = columns
        factors = [(columns, rows)] if pairs[i][0][1] is delta else self._factors(i, pairs[i])
        formed = t = None
        if products.forms_gradient(columns, rows, sum(c.shape[-1] for c, _ in factors)):
            formed = products.summed_gradients(factors)
            e = formed @ columns
            if site.a.requires_grad:
                t = products.transpose_each(rule, delta, formed, a)
        else:
            others = _joined(factors)
            e = others[1] @ products.gram(others[0], columns).to(rows.dtype)
            if site.a.requires_grad:
                t = rule.from_columns(others[0] @ products.gram(others[1], rows), a.shape)
        along_output[i] = _kept(site, rule.from_rows(e, delta.shape))
        along_input[i] = t
        return formed

    def _several(self, uses: list[int], formed: Tensor, along_output: list[Any], along_input: list[Any]) -> None:
        for i in uses:
            rule, a, delta = self.sites[i].rule, self.inputs[i], self.deltas[i]
            along_output[i] = _kept(self.sites[i], products.apply_each(rule, a, formed, delta))
            if self.sites[i].a.requires_grad:
                along_input[i] = products.transpose_each(rule, delta, formed, a)

    def _columns(self, i: int, a: Tensor) -> Tensor:
        kept = self.columns.get(i) if a is self.inputs[i] else None
        return self.sites[i].rule.columns(a) if kept is None else kept

    def _factors(self, i: int, pairs: list[Pair]) -> list[Pair]:
        return [(self._columns(i, a), self.sites[i].rule.rows(delta)) for a, delta in pairs]

    def _full(self, name: str, uses: list[int], pairs: list[list[Pair]]) -> Tensor:
        weight = self.params[name]
        each = [products.full_gradients(self.sites[i].rule, a, d, weight) for i in uses for a, d in pairs[i]]
        return torch.stack(each).sum(0)

    def _bias_direction(self, uses: list[int], pairs: list[list[Pair]]) -> Tensor:
        """The bias gradients, (B, O). A pair (ȧ, δ) adds nothing: the bias does not meet the input."""
        each = [self.sites[i].rule.rows(d).sum(3).flatten(1) for i in uses for a, d in pairs[i] if a is self.inputs[i]]
        if len(each) == 1:
            return each[0]
        return torch.stack(each).sum(0) if each else self.losses.new_zeros(len(self.losses), 1)

    def _pull(self, along_output: list[Any], along_input: list[Any], *, moving: bool = False) -> tuple[Tensor, Tensor]:
        """Inner product with g, and the pull-back to z, of the direction whose seeds are given."""
        dots: list[Tensor] = []
        outputs: list[Tensor] = []
        seeds: list[Tensor] = []
        where: list[tuple[int, bool]] = []
        for i, e in enumerate(along_output):
            if e is None:
                continue
            dots.append((self.deltas[i] * e).flatten(1).sum(1))
            if self.graph_deltas[i].requires_grad:
                outputs.append(self.graph_deltas[i])
                seeds.append(e)
                where.append((i, True))
            if along_input[i] is not None:
                outputs.append(self.sites[i].a)
                seeds.append(along_input[i])
                where.append((i, False))
        total = torch.stack(dots).sum(0) if dots else torch.zeros_like(self.losses)
        if not moving:
            return total, self._at_z(_backward(outputs, self.z, seeds))
        seeds = [seed.detach().requires_grad_() for seed in seeds]
        with torch.enable_grad():
            pulled = self._at_z(_backward(outputs, self.z, seeds, create_graph=True))
        self.tangents = _Tangents(where, seeds, pulled)
        return total, pulled.detach()

    def _at_z(self, arrived: Tensor | None) -> Tensor:
        """What arrived at z; nothing at all means that no gradient depends on it."""
        if arrived is None and self.strict is not None:
            raise no_dependence(self.strict) if self.sites else no_gradient()
        return torch.zeros_like(self.z) if arrived is None else arrived

    def _moved_pairs(self, v: Tensor) -> list[list[Pair]]:
        """Jv as pairs: the gradients made by (a, δ̇) and (ȧ, δ), the dots being derivatives along v.

        The pull-back is linear in its seeds, so its own derivative along v in the seeds is the push-forward of v.
        """
        if self.tangents is None:
            self.own(moving=True)
        assert self.tangents is not None
        where, seeds, pulled = self.tangents.where, self.tangents.seeds, self.tangents.pulled
        dots: Any = ()
        if pulled.requires_grad:
            dots = torch.autograd.grad(pulled, seeds, v, retain_graph=True, allow_unused=True)
        found = dict(zip(where, dots, strict=False))
        pairs: list[list[Pair]] = []
        for i, (site, a, delta) in enumerate(zip(self.sites, self.inputs, self.deltas, strict=True)):
            delta_dot, a_dot = found.get((i, True)), found.get((i, False))
            here = [(a, torch.zeros_like(delta) if delta_dot is None else _kept(site, delta_dot))]
            if a_dot is not None:
                here.append((a_dot, delta))
            pairs.append(here)
        return pairs


@dataclass(frozen=True)
class _Tangents:
    """A pull-back as a function of its seeds: (site, whether in δ) of each, and what arrived at z."""

    where: list[tuple[int, bool]]
    seeds: list[Tensor]
    pulled: Tensor


def _output_gradients(losses: Tensor, at: Any, *, create_graph: bool) -> list[Tensor | None]:
    if not at or not losses.requires_grad:
        return [None] * len(at)
    return list(torch.autograd.grad(losses.sum(), at, create_graph=create_graph, allow_unused=True))


def _backward(outputs: list[Tensor], z: Tensor, seeds: list[Tensor], *, create_graph: bool = False) -> Tensor | None:
    """None: nothing leads from the outputs to z."""
    if not outputs:
        return None
    (at_z,) = torch.autograd.grad(outputs, z, seeds, retain_graph=True, create_graph=create_graph, allow_unused=True)
    return at_z


def _joined(factors: list[Pair]) -> Pair:
    """The columns and rows of several pairs as those of one, with more places."""
    if len(factors) == 1:
        return factors[0]
    return torch.cat([columns for columns, _ in factors], -1), torch.cat([rows for _, rows in factors], -1)


def _squares(gradients: Tensor) -> Tensor:
    sizes: Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1)
    return sizes.square()


def _kept(site: Site, value: Tensor) -> Tensor:
    keep = site.rule.keep(site.a) if isinstance(site.rule, EmbeddingRule) else None
    return value if keep is None else value * keep


def _uses(names: Any) -> dict[str, list[int]]:
    uses: dict[str, list[int]] = {}
    for i, name in enumerate(names):
        if name is not None:
            uses.setdefault(name, []).append(i)
    return uses


__all__ = ["LayerPass", "NotCovered", "Pass", "Route", "trainable"]
