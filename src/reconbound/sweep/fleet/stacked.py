"""The same small network K times, each with its own parameters, on one batch: gradients and information of all at once.

For chains of Conv2d, Tanh, AvgPool2d, Flatten and Linear (the paper's two networks). All derivatives are written by
hand, layer by layer, on tensors that hold the K networks side by side, so that the number of launches does not grow
with K. Conv activations are (K, C, B, H, W): then a layer is one matrix product for each network.

    primal     a, the inputs of every layer, and δ, the gradient of the loss in its output; G = δ aᵀ for each record
    tangent    their derivatives ȧ, δ̇ when the input moves along v, or a record's weights along a direction U of its own

With U = G the tangent of ∇_z ℓ is Jᵀg; with v the tangent of G is Jv. These are the products that `fisher/passes`
computes, with which the tests compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from reconbound.fisher.passes.products import rounded_above
from reconbound.sweep.fleet.stacked_layers import make_layer


class Stack:
    """K networks of one architecture whose parameters are the rows of a tensor (K, p), in the modules' order.

    Raises:
        ValueError: a module is none of those above.
    """

    def __init__(self, model: nn.Module, params: Tensor) -> None:
        if not isinstance(model, nn.Sequential):
            raise ValueError(f"a stack needs an nn.Sequential, got {type(model).__name__}")
        size = sum(p.numel() for p in model.parameters())
        if params.shape[1] != size:
            raise ValueError(f"params must have {size} columns, one for each parameter, got {params.shape[1]}")
        self.params, self.layers, start = params, [], 0
        for module in model:
            layer, used = make_layer(module, params, start)
            self.layers.append(layer)
            start += used

    def open(self, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Any, Any], Tensor], *, measured: bool) -> Opened:
        """Runs the primal pass on a batch that all networks share.

        Args:
            inputs: (B, C, H, W) or (B, d).
            targets: one per record.
            loss_fn: (outputs, targets) → one loss per record.
            measured: whether tangents will follow.
        """
        return Opened(self, inputs, targets, loss_fn, measured)


class Opened:
    """The results of a stack on one batch: (K, B) norms, (K, p) weighted sums, and products with J."""

    def __init__(
        self, stack: Stack, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Any, Any], Tensor], measured: bool
    ) -> None:
        self.layers, k = stack.layers, stack.params.shape[0]
        image = inputs.dim() == 4
        a = inputs.transpose(0, 1).contiguous()[None] if image else inputs[None]  # one for all networks
        self.image, self.trainings, self.records = image, k, inputs.shape[0]
        for layer in self.layers:
            a = layer.forward(a)
        repeated = targets.expand(k, *targets.shape).flatten(0, 1)
        with torch.enable_grad():
            self.outputs = a.flatten(0, 1).detach().requires_grad_()
            self.losses = loss_fn(self.outputs, repeated)
            (self.at_outputs,) = torch.autograd.grad(self.losses.sum(), self.outputs, create_graph=measured)
        d = self.at_outputs.detach().reshape(a.shape)
        for i in reversed(range(len(self.layers))):
            d = self.layers[i].backward(d, needed=measured or i > 0)
        self.slope = self._by_record(d) if measured else None

    def norms(self) -> Tensor:
        """Returns n = ‖g‖, (K, B), not below the norms of the contributions to `weighted_sum`, as computed there."""
        squares = torch.stack([n for layer in self.layers if (n := layer.squares()) is not None]).sum(0)
        return rounded_above(squares.sqrt(), self.outputs.dtype)

    def weighted_sum(self, weights: Tensor, out: Tensor) -> None:
        """Computes Σ_b weights[k, b] g_b, into out (K, p).

        Args:
            weights: (K, B).
            out: (K, p), overwritten.
        """
        for layer in self.layers:
            layer.total(weights, out)

    def own(self) -> Tensor:
        """Computes Jᵀg of each record, (K·B, d)."""
        return self._by_record(self._tangent(None))

    def moved(self, v: Tensor) -> Tensor:
        """Computes ‖Jv‖², (K, B), for directions v (K·B, d) of the input."""
        shape = self.layers[0].shape
        if self.image:
            v = v.reshape(self.trainings, self.records, shape[1], *shape[3:]).transpose(1, 2).contiguous()
        else:
            v = v.reshape(self.trainings, self.records, -1)
        self._tangent(v)
        return torch.stack([n for layer in self.layers if (n := layer.moved_squares()) is not None]).sum(0)

    def _tangent(self, v: Tensor | None) -> Tensor:
        """Computes the tangent of ∇_z ℓ when the input moves along v; without v, each record's weights along its g."""
        own, dot = v is None, v
        for layer in self.layers:
            dot = layer.tangent(dot, own)
        assert dot is not None
        (at,) = torch.autograd.grad(self.at_outputs, self.outputs, dot.reshape(self.outputs.shape), retain_graph=True)
        d = at.reshape(dot.shape)
        for i in reversed(range(len(self.layers))):
            d = self.layers[i].tangent_backward(d, own, needed=own or i > 0)
        return d

    def _by_record(self, d: Tensor) -> Tensor:
        d = d.transpose(1, 2) if self.image else d
        return d.reshape(self.trainings * self.records, -1)
