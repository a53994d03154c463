"""The clipped gradient sum alone: what a plain private step needs, without second derivatives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconbound.fisher import layers
from reconbound.fisher.clipping import Clip, check_clip, clipping
from reconbound.fisher.gradients import GenericPass, LayerPass, NotCovered
from reconbound.fisher.private import Inputs, Private, Problem, batch_rows, check_rows


@dataclass(frozen=True)
class ClippedSum:
    """Σ c(n) g over a batch, and what went into it."""

    gradient_sum: dict[str, Tensor]
    norm: Tensor  # (B,), before clipping
    loss: Tensor  # (B,)


def clipped_gradient_sum(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: Inputs,
    targets: Any,
    *,
    max_grad_norm: float,
    clip: Clip = "smooth",
    micro_batch: int | None = None,
    mask: Tensor | None = None,
) -> ClippedSum:
    """The sum of clipped per-record gradients of a batch; one forward and one backward pass by layer rules.

        Σᵢ c(‖gᵢ‖) gᵢ

    Args: as in `step_information`. Models that no layer rule covers go through torch.func.

    Guarantee: adding or removing one record moves the sum by at most sensitivity(clip) · max_grad_norm.

    >>> linear = nn.Linear(1, 1, bias=False)
    >>> found = clipped_gradient_sum(linear, lambda o, t: o[:, 0], torch.tensor([[3.0]]), torch.zeros(1), max_grad_norm=1.0,
    ...                              clip="hard")
    >>> found.norm.tolist(), found.gradient_sum["weight"].tolist()
    ([3.0], [[1.0]])
    """
    check_clip(clip)
    problem = Problem(model, loss_fn, Private())
    records = _leading(inputs)
    check_rows("inputs", inputs, records)
    check_rows("targets", targets, records)
    size = micro_batch or max(records, 1)
    sums: dict[str, Tensor] = {}
    norms, losses = [], []
    for start in range(0, records, size):
        rows = slice(start, min(start + size, records))
        work = _open(problem, *batch_rows((inputs, targets), rows), check=start == 0)
        norm = work.squared_norms().clamp(min=0).sqrt()
        weights = clipping(norm, max_grad_norm, clip).factor
        if mask is not None:
            weights = weights * mask[rows].to(weights)
        for name, part in work.weighted_sum(weights).items():
            sums[name] = part if name not in sums else sums[name] + part
        norms.append(norm)
        losses.append(work.losses)
    return ClippedSum(sums, torch.cat(norms), torch.cat(losses))


def _leading(inputs: Inputs) -> int:
    first = (
        inputs if isinstance(inputs, Tensor) else next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
    )
    return int(first.shape[0])


def _open(problem: Problem, inputs: Inputs, targets: Any, *, check: bool) -> _Plain | _PlainGeneric:
    try:
        return _Plain(problem, inputs, targets, check=check)
    except NotCovered:
        return _PlainGeneric(problem, inputs, targets)


class _Plain(LayerPass):
    def __init__(self, problem: Problem, inputs: Inputs, targets: Any, *, check: bool) -> None:
        super().__init__(problem, _z(inputs), inputs, targets, check=check)

    def squared_norms(self) -> Tensor:
        pairs = [[pair] for pair in zip(self.inputs, self.deltas, strict=True)]
        total = torch.zeros_like(self.losses)
        for name, uses in self.weight_uses.items():
            if len(uses) == 1:
                columns, rows = self._factors(uses[0], pairs[uses[0]])
                total = total + layers.squared_norms(columns, rows)
            else:
                total = total + self._full(name, uses, pairs).flatten(1).square().sum(1)
        for uses in self.bias_uses.values():
            total = total + self._bias_direction(uses, pairs).square().sum(1)
        return total


class _PlainGeneric(GenericPass):
    def __init__(self, problem: Problem, inputs: Inputs, targets: Any) -> None:
        super().__init__(problem, _z(inputs), inputs, targets)

    def squared_norms(self) -> Tensor:
        return torch.stack([g.flatten(1).square().sum(1) for g in self.gradients.values()]).sum(0)


def _z(inputs: Inputs) -> Tensor:
    return inputs if isinstance(inputs, Tensor) else next(iter(inputs.values() if isinstance(inputs, dict) else inputs))
