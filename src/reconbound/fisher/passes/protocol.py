"""The products over a micro-batch that the information of a step is computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

import torch
from torch import Tensor

from reconbound.validate.private import Problem

Params = Mapping[str, Tensor]


class Pass(Protocol):
    """The products that a pass over one micro-batch provides."""

    method: Literal["layers", "generic"]
    losses: Tensor

    def norms(self) -> Tensor:
        """Returns n = ‖g‖, (B,), in float32 or wider.

        Guarantee: not below the norm of the record's contribution to `weighted_sum`, with weight 1, as computed there.
        """

    def own(self, *, moving: bool = False) -> tuple[Tensor, Tensor]:
        """Returns the norms and Jᵀg, of z's shape.

        Args:
            moving: products Jv will follow.
        """

    def slope(self) -> Tensor:
        """Returns ∇_z ℓ, of z's shape."""

    def output_slope(self) -> Tensor | None:
        """Returns ∇_z ½‖f − mean f‖² of a record's outputs f, of z's shape.

        Returns None if the outputs are not a tensor with a row for each record.
        """

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        """Returns ⟨g, u⟩, (B,), and Jᵀu, of z's shape, for one direction u in parameter space, shared by the batch.

        Args:
            direction: u, by parameter name.
        """

    def moved(self, v: Tensor) -> Tensor:
        """Returns ‖Jv‖² for each record, (B,), in float64, for a direction v of z's shape.

        Args:
            v: a direction, of z's shape.
        """

    def normal(self, v: Tensor) -> Tensor:
        """Returns JᵀJv, of z's shape.

        Args:
            v: a direction, of z's shape.
        """

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Returns Σ_i weights_i g_i, by parameter name, in float32 or wider.

        Args:
            weights: a weight for each record, (B,).
        """


def wide_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the widest precision among floating-point tensors, and at least float32."""
    widest = torch.float32
    for tensor in tensors:
        if tensor.is_floating_point():
            widest = torch.promote_types(widest, tensor.dtype)
    return widest


def zero_sums(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a sum of no gradients, by parameter name, in float32 or wider."""
    return {name: torch.zeros(p.shape, dtype=wide_dtype(p), device=p.device) for name, p in params.items()}


def trainable(problem: Problem) -> dict[str, Tensor]:
    """Returns the parameters whose gradients are released, by name; a shared one once."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
