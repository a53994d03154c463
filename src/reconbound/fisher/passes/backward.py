"""Backward passes through the graph of (a, δ), and such a pass as a function of its seeds.

A backward pass is linear in its seeds. Its derivative in them needs the values of the model and of its gradients, and
nothing that was computed from the seeds. PyTorch would keep that too, for derivatives in the values of the model, which
nobody asks for. Here it is dropped: with the seeds, a third of the memory of a vision transformer's step. In its place
is NaN, so that whoever did use it would get numbers that are not finite, and no wrong ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge, saved_tensors_hooks

from reconbound.fisher.passes.smooth import with_derivative


def gradient_at(z: Tensor, outputs: list[Tensor], seeds: list[Tensor]) -> Tensor | None:
    """Returns the gradient at z, or None where nothing leads from the outputs to z.

    Args:
        z: the private part of each record.
        outputs: where the pass begins.
        seeds: the gradients in the outputs.
    """
    if not outputs:
        return None
    (at_z,) = torch.autograd.grad(outputs, z, seeds, retain_graph=True, allow_unused=True)
    return at_z


def gradient_by_seeds(z: Tensor, outputs: list[Tensor], seeds: list[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """Returns `gradient_at`, to be differentiated in its seeds, and leaves in which that derivative is taken.

    Args:
        z: as in `gradient_at`.
        outputs: as in `gradient_at`.
        seeds: as in `gradient_at`; the list is emptied.
    """
    leaves = [seed.new_zeros(()).expand(seed.shape).requires_grad_() for seed in seeds]  # they keep no numbers
    if not outputs:
        return None, leaves
    with torch.enable_grad():
        placed = [with_derivative(seed.detach(), leaf) for seed, leaf in zip(seeds, leaves, strict=True)]
        seeds.clear()
        with _kept_values(leaves):
            begin = _begin(placed, *outputs)
            (at_z,) = torch.autograd.grad(begin, z, retain_graph=True, create_graph=True, allow_unused=True)
    return at_z, leaves


class _Begin(torch.autograd.Function):
    """A number whose gradients in the outputs are the seeds. Each seed is freed once the pass has used it."""

    @staticmethod
    def forward(ctx: Any, seeds: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.seeds = seeds
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        seeds = tuple(ctx.seeds)
        ctx.seeds.clear()
        return None, *seeds


_begin: Callable[..., Tensor] = _Begin.apply


class _Dropped(NamedTuple):
    """A value that is not kept."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


@contextmanager
def _kept_values(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Lets autograd keep only values that do not depend on the leaves."""
    depends: dict[Node, bool] = {get_gradient_edge(leaf).node: True for leaf in leaves}

    def pack(value: Tensor) -> Any:
        if value.requires_grad and _reaches(get_gradient_edge(value).node, depends):
            return _Dropped(value.shape, value.dtype, value.device)
        # autograd attaches it to its graph again; a node that held its own output would never be freed
        return value.detach()

    try:
        with saved_tensors_hooks(pack, _unpack):
            yield
    finally:
        depends.clear()  # the graph holds `pack`: a function that held the graph would never be freed


def _reaches(node: Node, known: dict[Node, bool]) -> bool:
    """Returns whether a path leads from a node to one that is known to be reached. Each node is looked at once."""
    todo = [node]
    while todo:
        following = [after for after, _ in todo[-1].next_functions if after is not None]
        unknown = [after for after in following if after not in known]
        if todo[-1] in known or not unknown:
            last = todo.pop()
            known.setdefault(last, any(known[after] for after in following if after in known))
        else:
            todo += unknown
    return known[node]


def _unpack(kept: Any) -> Tensor:
    if isinstance(kept, _Dropped):
        return torch.full((), torch.nan, dtype=kept.dtype, device=kept.device).expand(kept.shape)
    found: Tensor = kept
    return found
