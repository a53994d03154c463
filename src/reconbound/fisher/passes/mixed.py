"""Layer rules for the layers, and a copy for each record of every other parameter.

A position embedding, a scale, a gate or a weight that is computed from others meets its record by no known function.
Such a parameter p is replaced by one leaf with a copy for each record, E (B, *shape), whose gradient is each record's
own gradient of p. The model is run record by record, by one vmap over records and copies, so that it sees a batch of
one record whatever is done to p. Known layers are run on the whole batch, from inside the vmap, and follow their rules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any, Literal

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from reconbound.fisher.passes.by_layer import LayerPass
from reconbound.fisher.passes.generic import fused_recurrence
from reconbound.fisher.passes.layers import CopyRule
from reconbound.fisher.passes.products import Params
from reconbound.fisher.passes.recorder import NotCovered, Passed, Recorder, Site, check_covered, in_two_roles, reached
from reconbound.validate.model import ModelError
from reconbound.validate.private import Inputs, Problem

_RUNS = count()


class MixedPass(LayerPass):
    """A pass with layer rules where there are any, and a copy for each record of every other parameter.

    Guarantee: a row of a copy's gradient, and of a layer's δ, comes from the loss of its own record. No operation of
    the model sees two records, in any batch or micro-batch. This takes the rules for torch.func.vmap for granted:
    PyTorch's, and those of functions that bring their own.
    """

    method: Literal["layers", "mixed", "generic"] = "mixed"

    def _run(
        self, problem: Problem, inputs: Inputs, targets: Any, passed: Passed, *, due: bool
    ) -> tuple[Tensor, list[Site]]:
        if fused_recurrence(problem.model) is not None:
            raise NotCovered("a recurrent layer of PyTorch's has no rules by record")
        versions = {name: p._version for name, p in self.params.items()}
        again = due  # the second run finds values that the model kept from the first
        while True:
            leaves = {
                name: _leaf(self.params[name], len(self.z)) for name in sorted(passed.copied & self.params.keys())
            }
            copies = {name: e.view(len(e), *self.params[name].shape) for name, e in leaves.items()}
            recorder = _RecordRecorder({n: p for n, p in self.params.items() if n not in copies})
            losses = self._each(problem, inputs, targets, copies, recorder)
            uncovered = {*reached(losses, self.params), *in_two_roles(recorder.sites)}
            if uncovered & passed.copied:
                raise NotCovered(f"the parameter {min(uncovered)} is used otherwise than by calling the model")
            passed.copied |= uncovered
            if not (uncovered or again):
                break
            again = False
        check_covered(losses, recorder.sites, self.params)
        for name, p in self.params.items():
            if p._version != versions[name]:
                raise NotCovered(f"the parameter {name} is changed by calling the model")
        own = [Site(CopyRule(), e.new_zeros(len(e)), 0, e, None, name) for name, e in leaves.items()]
        return losses, recorder.sites + own

    def _each(
        self, problem: Problem, inputs: Inputs, targets: Any, copies: Params, recorder: _RecordRecorder
    ) -> Tensor:
        """Returns the losses; every record is run by itself. Sets the outputs, if they are a tensor."""

        def run(z: Tensor, public: Any, own: Params) -> tuple[Tensor, Tensor]:
            recorder.over = z
            one = tree_map(lambda t: t.unsqueeze(0) if isinstance(t, Tensor) else t, public)
            recorder.mark(tree_leaves((z, one)), own.values())
            losses, f = problem.losses_and_outputs(z.unsqueeze(0), one[0], one[1], own or None, recorder)
            kept = isinstance(f, Tensor) and f.dim() > 1 and f.shape[0] == 1
            return losses[0], f[0] if kept else torch.zeros_like(losses[0])

        public = (inputs, targets)
        dims = tree_map(lambda t: 0 if isinstance(t, Tensor) else None, public)
        losses, self.outputs = vmap(run, in_dims=(0, dims, 0))(self.z, public, dict(copies))
        found: Tensor = losses
        return found


class _RecordRecorder(Recorder):
    """A recorder that refuses values of records from an earlier run, which the model has kept.

    vmap would take them for values of the present records: a record's gradient would depend on those before it.
    """

    def __init__(self, params: Params) -> None:
        super().__init__(params, mapped=True)
        self.run = next(_RUNS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.mark(args, (kwargs or {}).values())
        result = super().__torch_function__(func, types, args, kwargs)
        self.mark((result,))
        return result

    def mark(self, *values: Iterable[Any]) -> None:
        """Marks tensors with a row for each record as made in this run; refuses those of an earlier one."""
        for t in _tensors(values):
            if is_batchedtensor(t) and t.__dict__.setdefault("_reconbound_run", self.run) != self.run:
                raise ModelError(
                    "the model uses a value that it kept from an earlier call: a record's gradient would depend on the "
                    "records before it. Compute it anew in each call"
                )


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yields the tensors among an operation's arguments or results, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)


def _leaf(p: Tensor, records: int) -> Tensor:
    """Returns copies of a parameter, (B, *shape), of one number (B, 1); they share its memory."""
    return p.detach().expand(records, *(p.shape or (1,))).requires_grad_()
