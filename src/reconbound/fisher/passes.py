"""What the information of a step needs to know of a micro-batch: the products that the passes over it give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol

from torch import Tensor

from reconbound.fisher.private import Problem

Params = Mapping[str, Tensor]
Route = Literal["reverse", "forward"]


class Pass(Protocol):
    """What the information of a step needs to know of one micro-batch."""

    method: Literal["layers", "generic"]
    losses: Tensor

    def squared_norms(self) -> Tensor:
        """n², (B,), alone."""

    def own(self, *, moving: bool = False) -> tuple[Tensor, Tensor]:
        """n², (B,), and Jᵀg, of z's shape. moving: products Jv will follow."""

    def slope(self) -> Tensor:
        """∇_z ℓ, of z's shape."""

    def output_slope(self) -> Tensor | None:
        """∇_z ½‖f − mean f‖² of a record's outputs f, of z's shape, if the outputs are a tensor with a row for each."""

    def probe(self, direction: Params) -> tuple[Tensor, Tensor]:
        """⟨g, u⟩, (B,), and Jᵀu, of z's shape, for one direction u in parameter space, shared by the batch."""

    def moved(self, v: Tensor) -> Tensor:
        """‖Jv‖² for each record, (B,), for a direction v of z's shape."""

    def normal(self, v: Tensor) -> Tensor:
        """JᵀJv, of z's shape."""

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """Σ_i weights_i g_i, by parameter name."""


def trainable(problem: Problem) -> dict[str, Tensor]:
    """The parameters whose gradients are released, by name; a shared one once."""
    return {name: p for name, p in problem.model.named_parameters() if p.requires_grad}
