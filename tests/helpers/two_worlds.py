"""Gradients in the real world and in others, formed by autograd, on the small problem of learning.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from learning import losses
from reconbound import PrivateSGD
from reconbound.fisher.clipping import clipping
from reconbound.fisher.worlds import Replacement
from reconbound.training.settings import Callback

WORLDS = {"first": Replacement([0.0], [0]), "all": Replacement(0.0)}


def clipped_gradients(model: nn.Module, x: Tensor, y: Tensor, bound: float, clip: Any) -> Tensor:
    """Returns each record's clipped gradient in float64, as a row, formed by torch.func."""
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
        return losses(functional_call(model, params, x[None]), y[None])[0]

    each = vmap(grad(loss), in_dims=(None, 0, 0))(params, x, y)
    rows = torch.cat([part.flatten(1) for part in each.values()], 1).double()
    return rows * clipping(rows.norm(dim=1), bound, clip).factor[:, None]


class Stop(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step(self, learner: PrivateSGD) -> None:
        if learner.step == self.at:
            raise KeyboardInterrupt
