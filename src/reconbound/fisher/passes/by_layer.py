"""Per-record gradients of a batch, and products with their derivative in the private part, by a rule per layer.

For each record of a batch, g = ∇_w ℓ(z; w) and J = ∂g/∂z. J is never formed. Three classes give the same products:

    LayerPass    a rule per layer, from the recorded inputs a and output gradients δ of every layer
    MixedPass    the same, with a copy for each record of every parameter that no rule covers (mixed.py)
    GenericPass  torch.func, for any module that it can differentiate (generic.py)

With layer rules, ⟨g, v⟩ = Σ ⟨δ, layer(a; v)⟩ over the layers' uses. Its derivatives in δ and in a are layer(a; v) and
layerᵀ(δ; v). These seed one backward pass through the graph of (a, δ), and Jᵀv is what arrives at z. No graph is built
for the products, every v shares the same graph, and a record × parameter array is formed only where it is the smaller
one.
"""

from __future__ import annotations

from collections.abc import Collection
from copy import copy
from typing import Any, Literal

import torch
from torch import Tensor

from reconbound.fisher.options import capturing, dependence_error, gradient_error
from reconbound.fisher.passes import products
from reconbound.fisher.passes.backward import gradient_at, gradient_by_seeds
from reconbound.fisher.passes.layers import ConvRule
from reconbound.fisher.passes.products import Pair, Params, wide_dtype
from reconbound.fisher.passes.recorder import (
    Passed,
    Recorder,
    Site,
    check_covered,
    check_leading,
    check_order,
    check_rows_own,
    passed_checks,
    record_single_records,
    uses_by_name,
)
from reconbound.validate.private import Inputs, Problem, trainable


class LayerPass:
    """One recorded forward and backward pass over a micro-batch; every product then follows from layer rules.

    Args:
        problem: the model, the loss and the private part.
        z: the private part of each record.
        inputs: the model's inputs.
        targets: what the loss takes.
        check: refuse gradients that do not depend on z; and where a batch is due, first run two records without the
            others, to see that every layer's input has a row for each record, in their order. That no row has another
            record's gradients is seen without it too. Due are a first batch, one after 1, 2, 4, ..., any larger one;
            one in which no record has a gradient shows nothing and is not counted.
        measured: keep the graph, for products with J; without it there are only norms and weighted sums.
        sloped: also take ∇_z ℓ on the way.
    """

    method: Literal["layers", "mixed", "generic"] = "layers"

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
        passed, live = passed_checks(problem, z, check, self.method), not capturing(z)
        due = passed.is_due(len(z)) and (live or not passed.batches)  # a graph would replay the check
        self.z = z.detach().requires_grad_()
        self.strict = problem.private.part if check else None
        with torch.enable_grad():
            losses, sites = self._run(problem, inputs, targets, passed, due=check and due)
            self.losses = losses.detach()
            at: Any = [*(s.edge for s in sites), *([self.z] if sloped else [])]
            deltas: list[Tensor | None] = [None] * len(at)
            if at and losses.requires_grad:
                how: Any = {"create_graph": measured, "retain_graph": measured or due, "allow_unused": True}
                deltas = list(torch.autograd.grad(losses.sum(), at, **how))
            if due and live:
                check_rows_own(losses, sites, deltas[: len(sites)])
            if live and (not due or any(bool(d.any()) for d in deltas[: len(sites)] if d is not None)):
                # (a batch without a gradient shows nothing)
                passed.batches, passed.largest = passed.batches + 1, max(passed.largest, len(z))
        at_z = deltas.pop() if sloped else None
        self.slope = torch.zeros_like(z) if at_z is None else at_z.detach()  # ∇_z ℓ
        self.graph_sites = [(s, d) for s, d in zip(sites, deltas, strict=True) if d is not None]
        self.sites = [s for s, _ in self.graph_sites]
        self.graph_deltas = [d for _, d in self.graph_sites]
        self.dtype = wide_dtype(*(s.a for s in self.sites), *self.graph_deltas)
        self.inputs = [self._wide(s.a.detach()) for s in self.sites]
        self.deltas = [s.kept(self._wide(d.detach())) for s, d in self.graph_sites]
        self.own_pairs: list[list[Pair]] = [[pair] for pair in zip(self.inputs, self.deltas, strict=True)]
        self.weight_uses = uses_by_name(s.weight for s in self.sites)
        self.bias_uses = uses_by_name(s.bias for s in self.sites)
        self.biases = {name: self._bias_direction(uses, self.own_pairs) for name, uses in self.bias_uses.items()}
        self.formed: dict[str, Tensor] = {}  # gradients of each record, by name; with the norms those of biases too
        self.unformed: dict[int, products.GramSquares] = {}  # of uses with several places
        self.cancelling: set[int] = set()  # of those, the ones to be summed in float64 (products.cancelling)
        self.columns: dict[int, Tensor] = {}  # of the inputs, kept while products Jv are to follow
        self.tangents: tuple[list[tuple[int, bool]], list[Tensor], Tensor] | None = None
        # a pull-back as a function of its seeds: (site, True if in δ) of each, and what arrived at z

    def _run(
        self, problem: Problem, inputs: Inputs, targets: Any, passed: Passed, *, due: bool
    ) -> tuple[Tensor, list[Site]]:
        """Returns the losses and the uses of parameters, after a check that a rule covers every use.

        Args:
            problem: as in the class.
            inputs: as in the class.
            targets: as in the class.
            passed: what passed before.
            due: compare with single records.
        """
        alone = record_single_records(problem, self.params, self.z.detach(), inputs, targets) if due else {}
        recorder = Recorder(self.params)
        losses, self.outputs = problem.losses_and_outputs(self.z, inputs, targets, mode=recorder)
        check_covered(losses, recorder.sites, self.params)
        check_leading(recorder.sites, len(self.z))
        check_order(recorder.sites, losses, alone)
        return losses, recorder.sites

    def norms(self) -> Tensor:
        """Returns n = ‖g‖, (B,), in float32 or wider.

        Guarantee: not below the norm of the record's contribution to `weighted_sum`, with weight 1, as computed there.
        """
        squares: list[Tensor] = []
        for name, uses in self.weight_uses.items():
            factors: list[Pair] = []
            i = uses[0]
            single = len(uses) == 1
            formed = products.gradients_in_parts(self.sites[i].rule, self.own_pairs[i]) if single else None
            if formed is None:
                formed, factors = self._formed(name, uses, self.own_pairs)
            if formed is None:
                self._bound(squares, i, *factors[0])
            else:
                self.formed[name] = formed
        return self._norms(squares)

    def own(self, *, moving: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the norms and Jᵀg, of z's shape. moving: products Jv will follow."""
        squares: list[Tensor] = []
        seeds = self._record_direction(self.own_pairs, squares, moving=moving)
        return self._norms(squares), self._pull(*seeds, moving=moving)

    def output_slope(self) -> Tensor | None:
        """Returns ∇_z ½‖f − mean f‖² of a record's outputs f; None if they are no tensor with a row for each record."""
        f = self.outputs
        if not isinstance(f, Tensor) or f.dim() < 2 or f.shape[0] != len(self.losses) or not f.requires_grad:
            return None
        flat = f.detach().flatten(1)
        arrived = gradient_at(self.z, [f], [(flat - flat.mean(1, keepdim=True)).reshape(f.shape)])
        return torch.zeros_like(self.z) if arrived is None else arrived

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        """Returns ⟨g, u⟩, (B,), and Jᵀu, of z's shape, for one direction u in parameter space, shared by the batch."""
        along_output: list[Tensor | None] = []
        along_input: list[Tensor | None] = []
        for site, a, delta in zip(self.sites, self.inputs, self.deltas, strict=True):
            e = t = None
            if site.weight is not None:
                e = site.kept(site.rule.apply(a, self._wide(direction[site.weight])))
                if site.a.requires_grad:
                    t = site.rule.transpose(delta, self._wide(direction[site.weight]), a.shape)
            if site.bias is not None:
                b = site.rule.bias(self._wide(direction[site.bias]), delta)
                e = b.expand_as(delta) if e is None else e.add_(b)
            along_output.append(e)
            along_input.append(t)
        both = zip(self.deltas, along_output, strict=True)
        dots = [(delta * e).flatten(1).sum(1) for delta, e in both if e is not None]
        along = torch.stack(dots).sum(0) if dots else torch.zeros_like(self.losses)
        return along, self._pull(along_output, along_input)

    def moved(self, v: Tensor) -> Tensor:
        """Returns ‖Jv‖² for each record, (B,), in float64, for a direction v of z's shape."""
        return self._squares_of(self._moved_pairs(v))

    def squared_distances(self, weights: Tensor, other: LayerPass, other_weights: Tensor) -> Tensor:
        """Returns ‖w g − w'g'‖² for each record, (B,), in float64; g' are the gradients of another pass.

            w δ aᵀ − w'δ'a'ᵀ = (w δ − w'δ') aᵀ + w'δ'(a − a')ᵀ,      so that nothing cancels where the two are close.

        Args:
            weights: w of each record, (B,).
            other: `rows` of the same pass, with the same records in another world.
            other_weights: w' of each record, (B,).
        """
        pairs: list[list[Pair]] = [[] for _ in self.sites]
        left = [i for both in (self.weight_uses, self.bias_uses) for n in both.keys() - self.formed for i in both[n]]
        for i in {*left}:
            a, delta, a2, delta2 = self.inputs[i], self.deltas[i], other.inputs[i], other.deltas[i]
            one, two = (
                (d * self._wide(w).reshape(-1, *(1,) * (d.dim() - 1)))
                for d, w in ((delta, weights), (delta2, other_weights))
            )
            pairs[i] = [(a, one - two), (a - a2, two)] if a.is_floating_point() else [(a, one), (a2, -two)]
        found = self._squares_of(pairs, {*self.formed})
        if self.formed:
            mine, theirs = zip(*((g, other.formed[name]) for name, g in self.formed.items()), strict=True)
            found += products.squared_differences(self._wide(weights), mine, self._wide(other_weights), theirs)
        return found

    def rows(self, rows: slice) -> LayerPass:
        """Returns the pass of some rows of the batch, for `squared_distances`."""
        found = copy(self)
        found.losses, found.columns = self.losses[rows], {}
        found.formed = {name: gradients[rows] for name, gradients in self.formed.items()}
        found.biases = {name: gradients[rows] for name, gradients in self.biases.items()}
        found.inputs, found.deltas = [a[rows] for a in self.inputs], [d[rows] for d in self.deltas]
        return found

    def _squares_of(self, pairs: list[list[Pair]], without: Collection[str] = ()) -> Tensor:
        """Returns the squared norm of the gradients that pairs (a, δ) of each use make, (B,), in float64.

        Args:
            pairs: of each use.
            without: names of parameters that do not count.
        """
        found: list[Tensor] = []
        formed = [self._bias_direction(uses, pairs) for name, uses in self.bias_uses.items() if name not in without]
        for name, uses in self.weight_uses.items():
            if name in without:
                continue
            i, alone = uses[0], None
            if len(uses) == 1:
                alone = products.gradients_in_parts(self.sites[i].rule, pairs[i], squared=True)
            gradients, factors = (None, []) if alone is not None else self._formed(name, uses, pairs)
            if gradients is None:
                found.append(products.summed_squares(factors) if alone is None else alone)
            else:
                formed.append(gradients)
        if formed:
            found.append(products.squares(*formed))
        if not found:
            return self.losses.new_zeros(len(self.losses), dtype=torch.float64)
        return torch.stack(found).sum(0).clamp(min=0)

    def normal(self, v: Tensor) -> Tensor:
        """Returns JᵀJv, of z's shape."""
        return self._pull(*self._record_direction(self._moved_pairs(v)))

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns Σ_i weights_i g_i, by parameter name, in float32 or wider."""
        weights = self._wide(weights)
        found = products.weighted_sums(weights, self.formed | self.biases)
        sums = {name: total.reshape(self.params[name].shape) for name, total in found.items()}
        for i, (site, a, delta) in enumerate(zip(self.sites, self.inputs, self.deltas, strict=True)):
            if site.weight is not None and site.weight not in self.formed:
                if i in self.cancelling:
                    a, delta = a.double() if a.is_floating_point() else a, delta.double()
                weighted = delta * weights.reshape(-1, *(1,) * (delta.dim() - 1))
                part = site.rule.total(a, weighted, self.params[site.weight]).to(self.dtype)
                sums[site.weight] = sums[site.weight] + part if site.weight in sums else part
        return {
            name: sums[name] if name in sums else torch.zeros_like(p, dtype=self.dtype)
            for name, p in self.params.items()
        }

    def _wide(self, values: Tensor) -> Tensor:
        """Returns values in the precision of all sums here: at least float32, so that nothing is rounded to 8 bits."""
        return values.to(self.dtype) if values.is_floating_point() else values

    def _norms(self, squares: list[Tensor]) -> Tensor:
        """Returns the norms, (B,). squares: of weights whose gradients are not formed; biases are added here."""
        self.formed |= self.biases
        if self.formed:
            squares = [*squares, products.squares_above(*self.formed.values())]
        floats, frozen = self.dtype == torch.float64, capturing(self.losses)
        if self.unformed:
            squares = [*squares, products.gram_squares_above(self.unformed.values(), floored=frozen and not floats)]
        if not squares:
            return self.losses.new_zeros(len(self.losses), dtype=self.dtype)
        total = torch.stack(squares).sum(0).sqrt()
        if self.unformed and not (floats or frozen):
            self.cancelling = products.cancelling(self.unformed, total)
        return products.rounded_above(total, self.dtype)

    def _formed(self, name: str, uses: list[int], pairs: list[list[Pair]]) -> tuple[Tensor | None, list[Pair]]:
        """Returns the weight's gradients, if it is cheaper to form them, and (of a single use) their factors."""
        if len(uses) > 1:
            made = [(self.sites[i].rule, self._wide(a), self._wide(d)) for i in uses for a, d in pairs[i]]
            each = [products.full_gradients(*one, self.params[name]) for one in made]
            return torch.stack(each).sum(0), []
        i = uses[0]
        rule, kept = self.sites[i].rule, self.columns.get(i)
        grouped = products.gradients_in_parts(rule, pairs[i], grouped=True)  # without patches
        if grouped is not None:
            return grouped, []
        factors: list[Pair] = []
        for a, delta in pairs[i]:
            columns = rule.columns(a) if kept is None or a is not self.inputs[i] else kept
            factors.append((self._wide(columns), self._wide(rule.rows(delta))))
        (columns, rows), places = factors[0], sum(columns.shape[-1] for columns, _ in factors)
        if columns.is_floating_point() and products.forms_gradient(
            columns.shape[2], rows.shape[2], places, cuda=columns.is_cuda
        ):
            return products.summed_gradients(factors), factors
        return None, factors

    def _bound(self, squares: list[Tensor], i: int, columns: Tensor, rows: Tensor, grams: Pair | None = None) -> None:
        """Adds squares, not below those of the contributions that `weighted_sum` makes of this use, (B,).

        They go to the list, where a record has one place, so that nothing can cancel, and otherwise to `unformed`.
        """
        places, convolution = rows.shape[-1], isinstance(self.sites[i].rule, ConvRule)
        rounding = products.sum_rounding(places, self.deltas[i], convolution=convolution)
        of_columns, of_rows = grams or (products.gram(columns, columns), products.gram(rows, rows))
        if places == 1 and columns.is_floating_point():
            squares.append(products.single_place_squares_above(of_columns, of_rows, columns, rows, rounding))
        else:
            width = rows.shape[2] + (columns.shape[2] if columns.is_floating_point() else 0)
            self.unformed[i] = products.GramSquares.of(of_columns, of_rows, width, rounding)

    def _record_direction(
        self, pairs: list[list[Pair]], squares: list[Tensor] | None = None, *, moving: bool = False
    ) -> tuple[list[Any], list[Any]]:
        """Returns seeds in δ and in a for each record's own direction: the sum of the gradients that pairs (a, δ) make.

        Args:
            pairs: the pairs (a, δ) of each use.
            squares: given where the pairs are the records' own. The gradients that are formed are then kept, and
                squares not below those of the others are appended to it.
            moving: products Jv will follow.
        """
        along_output: list[Tensor | None] = [None] * len(self.sites)
        along_input: list[Tensor | None] = [None] * len(self.sites)
        for name, uses in self.weight_uses.items():
            formed, factors = self._formed(name, uses, pairs)
            if moving and factors and factors[0][0].is_cuda:
                self.columns.setdefault(uses[0], factors[0][0])
            if formed is None:
                self._seed_unformed(uses[0], factors, along_output, along_input, squares)
                continue
            if squares is not None:
                self.formed[name] = formed
            for i in uses:
                site, a, delta = self.sites[i], self.inputs[i], self.deltas[i]
                along_output[i] = site.kept(products.apply_each(site.rule, a, formed, delta, factors))
                if site.a.requires_grad:
                    along_input[i] = products.transpose_each(site.rule, delta, formed, a)
        for name, uses in self.bias_uses.items():
            direction = self._bias_direction(uses, pairs) if squares is None else self.biases[name]
            for i in uses:
                rows = self.sites[i].rule.rows(self.deltas[i])
                spread = direction.reshape(*rows.shape[:3], 1).expand_as(rows)
                e = self.sites[i].rule.from_rows(spread, self.deltas[i].shape)
                before = along_output[i]
                along_output[i] = e if before is None else before.add_(e)
        return along_output, along_input

    def _seed_unformed(
        self, i: int, factors: list[Pair], along_output: list[Any], along_input: list[Any], squares: list[Tensor] | None
    ) -> None:
        """Sets the seeds of a weight that is used once, without its gradients; squares: as in `_record_direction`."""
        site, rule, delta, own = self.sites[i], self.sites[i].rule, self.deltas[i], squares is not None
        columns, rows = factors[0][0], factors[0][1] if own else rule.rows(delta)
        if rows.shape[-1] > 1 or not own:  # with one place nothing can cancel
            columns, rows = products.precise(columns), products.precise(rows)
        others = (columns, rows)
        if not own:
            others = products.joined([(products.precise(c), products.precise(r)) for c, r in factors])
        of_columns, of_rows = products.gram(others[0], columns), products.gram(others[1], rows)
        e = products.combined(others[1], of_columns).to(self.dtype)
        along_output[i] = site.kept(rule.from_rows(e, delta.shape))
        if site.a.requires_grad:
            t = products.combined(others[0], of_rows).to(self.dtype)
            along_input[i] = rule.from_columns(t, self.inputs[i].shape)
        if squares is not None:
            self._bound(squares, i, columns, rows, (of_columns, of_rows))

    def _bias_direction(self, uses: list[int], pairs: list[list[Pair]]) -> Tensor:
        """Returns the bias gradients, (B, O). A pair (ȧ, δ) adds nothing: the bias does not meet the input."""
        each = [
            self.sites[i].rule.rows(self._wide(d)).sum(3).flatten(1)
            for i in uses
            for a, d in pairs[i]
            if a is self.inputs[i]
        ]
        if len(each) == 1:
            return each[0]
        return torch.stack(each).sum(0) if each else self.losses.new_zeros(len(self.losses), 1, dtype=self.dtype)

    def _pull(self, along_output: list[Any], along_input: list[Any], *, moving: bool = False) -> Tensor:
        """Returns the pull-back to z of the direction whose seeds are given."""
        outputs: list[Tensor] = []
        seeds: list[Tensor] = []
        where: list[tuple[int, bool]] = []
        for i, (e, t) in enumerate(zip(along_output, along_input, strict=True)):
            for at, seed, in_delta in ((self.graph_deltas[i], e, True), (self.sites[i].a, t, False)):
                if seed is not None and at.requires_grad:
                    outputs.append(at)
                    seeds.append(seed.to(at.dtype))
                    where.append((i, in_delta))
        along_output.clear()
        along_input.clear()
        leaves: list[Tensor] = []
        if moving:
            arrived, leaves = gradient_by_seeds(self.z, outputs, seeds)
        else:
            arrived = gradient_at(self.z, outputs, seeds)
        if arrived is None and self.strict is not None:  # no gradient depends on z
            raise dependence_error(self.strict) if self.sites else gradient_error()
        pulled = torch.zeros_like(self.z) if arrived is None else arrived
        if moving:
            self.tangents = where, leaves, pulled
        return pulled.detach()

    def _moved_pairs(self, v: Tensor) -> list[list[Pair]]:
        """Returns Jv as pairs: the gradients made by (a, δ̇) and (ȧ, δ), the dots being derivatives along v.

        The pull-back is linear in its seeds, so its own derivative along v in the seeds is the push-forward of v.
        """
        if self.tangents is None:
            self.own(moving=True)
        assert self.tangents is not None
        where, seeds, pulled = self.tangents
        dots: Any = ()
        if pulled.requires_grad:
            dots = torch.autograd.grad(pulled, seeds, v.to(pulled.dtype), retain_graph=True, allow_unused=True)
        found = dict(zip(where, dots, strict=False))
        pairs: list[list[Pair]] = []
        for i, (site, a, delta) in enumerate(zip(self.sites, self.inputs, self.deltas, strict=True)):
            delta_dot, a_dot = found.get((i, True)), found.get((i, False))
            here = [(a, torch.zeros_like(delta) if delta_dot is None else site.kept(delta_dot))]
            if a_dot is not None:
                here.append((a_dot, delta))
            pairs.append(here)
        return pairs
