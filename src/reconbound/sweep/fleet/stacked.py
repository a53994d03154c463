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

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconbound.fisher.passes import convolutions
from reconbound.fisher.passes.convolutions import average, poolable, unpool
from reconbound.fisher.passes.products import rounded_above


class Stack:
    """K networks of one architecture whose parameters are the rows of a tensor (K, p), in the modules' order.

    After `open`: (K, B) norms, (K, p) weighted sums, and products with J, of one batch.

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
            if type(module) not in LAYERS:
                raise ValueError(f"a stack has no layer for {type(module).__name__}")
            self.layers.append(LAYERS[type(module)](module, params, start))
            start += sum(p.numel() for p in module.parameters())

    def open(self, inputs: Tensor, targets: Tensor, loss_fn: Callable[[Any, Any], Tensor], *, measured: bool) -> Stack:
        """Runs the primal pass on a batch that all networks share; the products below are then those of this batch.

        Args:
            inputs: (B, C, H, W) or (B, d).
            targets: one per record.
            loss_fn: (outputs, targets) → one loss per record.
            measured: whether tangents will follow.
        """
        self.image, self.records, k = inputs.dim() == 4, inputs.shape[0], len(self.params)
        a = inputs.transpose(0, 1).contiguous()[None] if self.image else inputs[None]  # one for all networks
        for layer in self.layers:
            a = layer.forward(a)
        repeated = targets.expand(k, *targets.shape).flatten(0, 1)
        with torch.enable_grad():
            self.outputs = a.flatten(0, 1).detach().requires_grad_()
            losses = loss_fn(self.outputs, repeated)
            (self.at_outputs,) = torch.autograd.grad(losses.sum(), self.outputs, create_graph=measured)
        d = self.at_outputs.detach().reshape(a.shape)
        for i in reversed(range(len(self.layers))):
            d = self.layers[i].backward(d, needed=measured or i > 0)
        self.slope = self._by_record(d) if measured else None
        return self

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
        v = v.reshape(len(self.params), self.records, -1)
        if self.image:
            v = v.unflatten(2, (shape[1], *shape[3:])).transpose(1, 2).contiguous()
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
        return d.reshape(len(self.params) * self.records, -1)


# --- layers: each keeps what its later calls need; `own` moves each record's weights along its G --------


class ConvLayer:
    """A convolution: columns (K, C·kernel, B·L), rows (K, O, B·L); all networks share the first layer's columns."""

    def __init__(self, module: nn.Conv2d, params: Tensor, start: int) -> None:
        pads = module.padding
        if isinstance(pads, str) or module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros":
            raise ValueError(f"a stack has plain convolutions with a number for padding, got {module}")
        self.kernel, self.stride, self.padding = _pair(module.kernel_size), _pair(module.stride), _pair(pads)
        self.weight, self.bias, self.span = _weights(module, params, start)

    def _patches(self, a: Tensor) -> Tensor:
        k, c, b, h, w = a.shape
        flat = a.reshape(k * c, b, h, w)
        numbers = math.prod(self.kernel) * a.numel()  # at least as many as there are, for strides below the kernel
        if convolutions.kernels_apply(flat, (1, 1), numbers):
            found = convolutions.patches(flat, self.kernel, self.stride, self.padding)
        else:
            found = F.unfold(flat.reshape(-1, 1, h, w), self.kernel, 1, self.padding, self.stride)
            found = found.reshape(k * c, b, found.shape[1], -1).transpose(1, 2)
        return found.reshape(k, c * math.prod(self.kernel), -1)

    def _added(self, columns: Tensor) -> Tensor:
        _, c, b, h, w = self.shape
        k, args = columns.shape[0], (self.kernel, self.stride, self.padding)
        if convolutions.kernels_apply(columns, (1, 1), columns.numel()):
            return convolutions.added_patches(columns, (k * c, b, h, w), *args).reshape(k, c, b, h, w)
        flat = columns.reshape(k * c, math.prod(self.kernel), b, -1).transpose(1, 2)
        flat = flat.reshape(k * c * b, math.prod(self.kernel), -1)
        return F.fold(flat, (h, w), self.kernel, 1, self.padding, self.stride).reshape(k, c, b, h, w)

    def _each(self, x: Tensor, k: int) -> Tensor:
        """Returns the columns or rows of network k by record, (B, ·, L)."""
        x = x[min(k, len(x) - 1)]
        return x.reshape(x.shape[0], self.shape[2], -1).transpose(0, 1)

    def _outer(self, rows: Tensor, columns: Tensor, onto: Tensor | None = None) -> Tensor:
        """Computes rows columnsᵀ of each record, (K, B, O, J)."""
        out = onto
        if out is None:
            shape = (len(rows), self.shape[2], rows.shape[1], columns.shape[1])
            out = torch.empty(shape, dtype=rows.dtype, device=rows.device)
        for k in range(len(rows)):
            d, c = self._each(rows, k), self._each(columns, k).transpose(1, 2)
            out[k].baddbmm_(d, c) if onto is not None else torch.bmm(d, c, out=out[k])
        return out

    def _applied(self, g: Tensor, x: Tensor) -> Tensor:
        """Computes g x of each record, (K, B, ·, L)."""
        applied = torch.empty(*g.shape[:3], math.prod(self.places), dtype=g.dtype, device=g.device)
        for k in range(len(g)):
            torch.bmm(g[k], self._each(x, k), out=applied[k])
        return applied

    def forward(self, a: Tensor) -> Tensor:
        self.shape, self.columns = a.shape, self._patches(a)
        o = torch.baddbmm(self.bias[:, :, None], self.weight, self.columns.expand(len(self.weight), -1, -1))
        self.places = convolutions.places(a.shape[3:], self.kernel, self.stride, self.padding)
        return o.reshape(len(o), o.shape[1], a.shape[2], *self.places)

    def backward(self, d: Tensor, *, needed: bool) -> Tensor:
        self.rows = d.reshape(*d.shape[:2], -1)
        self.gradients = self._outer(self.rows, self.columns)
        self.bias_gradients = d.flatten(3).sum(3).transpose(1, 2)  # (K, B, O)
        return self._added(torch.bmm(self.weight.transpose(1, 2), self.rows)) if needed else d

    def squares(self) -> Tensor:
        return _squares(self.gradients) + _squares(self.bias_gradients)

    def total(self, weights: Tensor, out: Tensor) -> None:
        first, middle, last = self.span
        out[:, first:middle] = torch.bmm(weights[:, None], self.gradients.flatten(2)).squeeze(1)
        out[:, middle:last] = torch.bmm(weights[:, None], self.bias_gradients).squeeze(1)

    def tangent(self, dot: Tensor | None, own: bool) -> Tensor:
        self.columns_dot = None if dot is None else self._patches(dot)
        o = None if self.columns_dot is None else torch.bmm(self.weight, self.columns_dot)
        if own:
            applied = (
                (self._applied(self.gradients, self.columns) + self.bias_gradients[..., None])
                .transpose(1, 2)
                .reshape(*self.rows.shape)
            )
            o = applied if o is None else o.add_(applied)
        assert o is not None
        return o.reshape(*o.shape[:2], self.shape[2], *self.places)

    def tangent_backward(self, d: Tensor, own: bool, *, needed: bool) -> Tensor:
        self.rows_dot = d.reshape(*d.shape[:2], -1)
        if not needed:
            return d
        columns = torch.bmm(self.weight.transpose(1, 2), self.rows_dot)
        if own:
            columns += self._applied(self.gradients.transpose(2, 3), self.rows).transpose(1, 2).reshape(columns.shape)
        return self._added(columns)

    def moved_squares(self) -> Tensor:
        dot = self._outer(self.rows_dot, self.columns)
        if self.columns_dot is not None:
            self._outer(self.rows, self.columns_dot, onto=dot)
        bias = self.rows_dot.reshape(*self.rows_dot.shape[:2], self.shape[2], -1).sum(3).transpose(1, 2)
        return _squares(dot) + _squares(bias)


class LinearLayer:
    """A linear layer: inputs (K, B, I), outputs (K, B, O). A record's gradient δ aᵀ is never formed."""

    def __init__(self, module: nn.Linear, params: Tensor, start: int) -> None:
        self.weight, self.bias, self.span = _weights(module, params, start)

    def forward(self, a: Tensor) -> Tensor:
        self.shape, self.a = a.shape, a.expand(len(self.weight), -1, -1)
        self.a2 = _squares(self.a[..., None])[..., None]
        return torch.baddbmm(self.bias[:, None], self.a, self.weight.transpose(1, 2))

    def backward(self, d: Tensor, *, needed: bool) -> Tensor:
        self.d, self.d2 = d, _squares(d[..., None])[..., None]
        return torch.bmm(d, self.weight) if needed else d

    def squares(self) -> Tensor:
        return (self.d2 * (self.a2 + 1)).squeeze(2)

    def total(self, weights: Tensor, out: Tensor) -> None:
        weighted = self.d * weights[:, :, None]
        first, middle, last = self.span
        out[:, first:middle] = torch.bmm(weighted.transpose(1, 2), self.a).flatten(1)
        out[:, middle:last] = weighted.sum(1)

    def tangent(self, dot: Tensor | None, own: bool) -> Tensor:
        self.a_dot = dot
        o = None if dot is None else torch.bmm(dot, self.weight.transpose(1, 2))
        if own:
            applied = self.d * (self.a2 + 1).to(self.d.dtype)
            o = applied if o is None else o.add_(applied)
        assert o is not None
        return o

    def tangent_backward(self, d: Tensor, own: bool, *, needed: bool) -> Tensor:
        self.d_dot = d
        if not needed:
            return d
        at = torch.bmm(d, self.weight)
        return torch.addcmul(at, self.a, self.d2.to(at.dtype)) if own else at

    def moved_squares(self) -> Tensor:
        """Returns ‖δ̇aᵀ + δȧᵀ‖² + ‖δ̇‖² as a sum of squares, which cannot cancel.

        With δ̇ = αδ + δ̇', ȧ = βa + ȧ' and δ̇' ⊥ δ, ȧ' ⊥ a the first is (α + β)²‖δ‖²‖a‖² + ‖δ̇'‖²‖a‖² + ‖δ‖²‖ȧ'‖².
        """
        a2, d2 = self.a2.squeeze(2), self.d2.squeeze(2)
        along_d, across_d = _split(self.d_dot, self.d, self.d2)
        squares = across_d * a2 + _squares(self.d_dot[..., None])
        if self.a_dot is None:
            return squares + (along_d.square() * d2) * a2
        along_a, across_a = _split(self.a_dot, self.a, self.a2)
        return squares + (along_d + along_a).square() * d2 * a2 + d2 * across_a


class PlainLayer:
    """A layer without parameters; one that is linear, unless it has tangents of its own."""

    forward: Any
    backward: Any

    def __init__(self, module: Any, params: Tensor, start: int) -> None:
        pass

    def tangent(self, dot: Tensor | None, own: bool) -> Any:
        return None if dot is None else self.forward(dot)

    def tangent_backward(self, d: Tensor, own: bool, *, needed: bool) -> Any:
        return self.backward(d, needed=needed)

    def squares(self) -> Tensor | None:
        return None

    def moved_squares(self) -> Tensor | None:
        return None

    def total(self, weights: Tensor, out: Tensor) -> None:
        pass


class TanhLayer(PlainLayer):
    """A tanh."""

    def forward(self, a: Tensor) -> Tensor:
        self.shape, self.t = a.shape, a.tanh()
        return self.t

    def _sloped(self, d: Tensor) -> Tensor:
        """Computes (1 − t²) d, in one pass."""
        at: Tensor = torch.ops.aten.tanh_backward(d, self.t)
        return at

    def backward(self, d: Tensor, *, needed: bool) -> Tensor:
        self.d = d
        return self._sloped(d)

    def tangent(self, dot: Tensor | None, own: bool) -> Tensor | None:
        self.dot = None if dot is None else self._sloped(dot)
        return self.dot

    def tangent_backward(self, d: Tensor, own: bool, *, needed: bool) -> Tensor:
        """Computes (1 − t²) δ̇ − 2 t ṫ δ."""
        at = self._sloped(d)
        return at if self.dot is None else at.addcmul_(self.t * self.d, self.dot, value=-2)


class PoolLayer(PlainLayer):
    """An average pooling."""

    def __init__(self, module: nn.AvgPool2d, params: Tensor, start: int) -> None:
        self.kernel, self.stride = _pair(module.kernel_size), _pair(module.stride)
        if _pair(module.padding) != (0, 0) or module.ceil_mode or module.divisor_override is not None:
            raise ValueError(f"a stack has average pooling without padding, got {module}")

    def forward(self, a: Tensor) -> Tensor:
        self.shape, flat = a.shape, a.flatten(0, 1)
        if not poolable(flat.shape, self.kernel, self.stride):
            raise ValueError(f"a stack pools windows side by side or at every place, got {self.kernel}, {self.stride}")
        flat = average(flat, self.kernel, self.stride)
        return flat.reshape(*a.shape[:2], *flat.shape[1:])

    def backward(self, d: Tensor, *, needed: bool) -> Tensor:
        shape = torch.Size((len(d) * self.shape[1], *self.shape[2:]))
        return unpool(d.flatten(0, 1), self.kernel, self.stride, shape).reshape(len(d), *self.shape[1:])


class FlattenLayer(PlainLayer):
    """A layer that reshapes (K, C, B, H, W) to (K, B, C·H·W)."""

    def forward(self, a: Tensor) -> Tensor:
        self.shape = a.shape
        return a.transpose(1, 2).flatten(2) if a.dim() == 5 else a

    def backward(self, d: Tensor, *, needed: bool) -> Tensor:
        if len(self.shape) != 5:
            return d
        _, c, b, h, w = self.shape
        return d.reshape(len(d), b, c, h, w).transpose(1, 2).contiguous()


#: The layer that replaces a module, made from it, the parameters of all networks (K, p) and the place of its first.
LAYERS: dict[type[nn.Module], Callable[[Any, Tensor, int], Any]] = {
    nn.Conv2d: ConvLayer,
    nn.Linear: LinearLayer,
    nn.Tanh: TanhLayer,
    nn.AvgPool2d: PoolLayer,
    nn.Flatten: FlattenLayer,
}


def _weights(module: Any, params: Tensor, start: int) -> tuple[Tensor, Tensor, tuple[int, int, int]]:
    """Returns weights (K, O, J) and biases (K, O) as views of the parameters, and their positions."""
    if module.bias is None or not (module.weight.requires_grad and module.bias.requires_grad):
        raise ValueError(f"a stack's layers have a weight and a bias to train, got {module}")
    outputs, size = module.weight.shape[0], module.weight.numel()
    middle, last = start + size, start + size + outputs
    weight = params[:, start:middle].unflatten(1, (outputs, size // outputs))
    return weight, params[:, middle:last], (start, middle, last)


def _squares(x: Tensor) -> Tensor:
    """Returns the squared norm of each network's and record's part, (K, B), in float64."""
    sizes: Tensor = torch.linalg.vector_norm(x.flatten(2), dim=2, dtype=torch.float64)
    return sizes.square()


def _split(dot: Tensor, x: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
    """Returns α and ‖dot − αx‖² with dot − αx ⊥ x, each (K, B) in float64; x2 is ‖x‖², (K, B, 1)."""
    alpha = (dot * x).sum(2, keepdim=True, dtype=torch.float64) / torch.where(x2 > 0, x2, 1)
    return alpha.squeeze(2), _squares((dot - alpha.to(dot.dtype) * x)[..., None])


def _pair(value: Any) -> tuple[int, int]:
    values = tuple(value) if isinstance(value, tuple | list) else (value, value)
    return int(values[0]), int(values[-1])
