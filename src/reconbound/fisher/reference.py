"""Slow references: dense Jacobians of the clipped gradient, and the paper's estimator by coordinates.

Nothing here uses the identity behind the fast computation: autograd differentiates the clip like any other function.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, jacrev, jvp, vmap
from torch.utils._pytree import tree_map

from reconbound._internal.opacus_hooks import unhooked
from reconbound._internal.rng import fresh_generator, random_states_kept
from reconbound.fisher.clipping import Clip, check_clip
from reconbound.validate import private as parts
from reconbound.validate.watch import converted


@dataclass(frozen=True)
class DenseInformation:
    """The full information matrix of one step about each record, in float64."""

    norm: Tensor  # (B,)
    gradient: Tensor  # (B, p), before clipping
    jacobian: Tensor  # (B, p, d): ∂(c g)/∂z, columns of features that are not private are zero
    matrix: Tensor  # (B, d, d): J̃ᵀJ̃/(σC)²
    along: Tensor  # (B,): ‖J̃ᵀĝ‖²/(σC)²
    across: Tensor  # (B,): ‖(I − ĝĝᵀ)J̃‖²_F/(σC)²
    gradient_sum: dict[str, Tensor]

    @property
    def trace(self) -> Tensor:
        return self.matrix.diagonal(dim1=1, dim2=2).sum(1)

    @property
    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=1, dim2=2)

    @property
    def spectral(self) -> Tensor:
        values: Tensor = torch.linalg.eigvalsh(self.matrix)
        return values[:, -1]


@dataclass(frozen=True)
class CoordinateOptions:
    """Options of `coordinate_information`.

    Attributes:
        count: k, the number of coordinates.
        at_once: coordinates that share one vmapped call. It trades memory for speed and does not change the values.
        generator: draws the coordinates; None: a fresh one.
    """

    count: int = 50
    at_once: int = 1
    generator: torch.Generator | None = None


@unhooked
@random_states_kept()
def dense_information(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: parts.Inputs,
    targets: Any,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    clip: Clip = "smooth",
    private: parts.Private | Tensor | Sequence[int] | str | None = None,
) -> DenseInformation:
    """Returns the information of one step about each record from its dense Jacobian, one record at a time, in float64.

    I = J̃ᵀJ̃/(σC)²,   J̃ = ∂/∂z [c(‖g(z)‖) g(z)]

    Memory and time grow with records × parameters × features.

    Args:
        model: as in `step_information`.
        loss_fn: as in `step_information`.
        inputs: as in `step_information`.
        targets: as in `step_information`.
        max_grad_norm: the clip norm C.
        noise_multiplier: σ.
        clip: "smooth" or "hard".
        private: as in `step_information`.

    Guarantee: exact up to float64 rounding wherever the model is twice differentiable and (hard clip) ‖g‖ ≠ C.
    """
    model = copy.deepcopy(model).double()
    inputs, targets = tree_map(lambda x: converted(x, torch.float64), (inputs, targets))
    problem = parts.Problem(model, loss_fn, parts.as_private(private))
    z = parts.private_part(problem, inputs, targets)
    chosen = parts.feature_mask(problem.private, z)
    params = {name: p.detach() for name, p in parts.trainable(problem).items()}
    gradients, clipped, jacobians = [], [], []
    for i in range(z.shape[0]):
        record = parts.batch_rows((inputs, targets), slice(i, i + 1))

        def clipped_gradient(z: Tensor, record: Any = record) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            g = grad(lambda w: problem.losses(z.unsqueeze(0), record[0], record[1], w)[0])(params)
            g = torch.cat([v.flatten() for v in g.values()])
            c = _clipped(g, max_grad_norm, clip)
            return c, (g, c)

        jacobian, (g, c) = jacrev(clipped_gradient, has_aux=True)(z[i])
        if chosen is not None:
            jacobian = jacobian * chosen
        jacobians.append(jacobian.reshape(g.numel(), -1))
        gradients.append(g)
        clipped.append(c)
    g, jacobian = torch.stack(gradients), torch.stack(jacobians)
    sizes = [p.numel() for p in params.values()]
    pieces = torch.stack(clipped).sum(0).split(sizes)
    sums = {name: piece.reshape(p.shape) for (name, p), piece in zip(params.items(), pieces, strict=True)}
    noise, norm = noise_multiplier * max_grad_norm, g.norm(dim=1)
    unit = torch.where(norm[:, None] > 0, g / torch.where(norm > 0, norm, 1)[:, None], 0)
    along = torch.einsum("bpd,bp->bd", jacobian, unit)
    across = (jacobian - unit[:, :, None] * along[:, None, :]).square().sum((1, 2)) / noise**2
    matrix = jacobian.transpose(1, 2) @ jacobian / noise**2
    return DenseInformation(norm, g, jacobian, matrix, along.square().sum(1) / noise**2, across, sums)


@unhooked
@random_states_kept()
def coordinate_information(
    model: nn.Module,
    loss_fn: Callable[[Any, Any], Tensor],
    inputs: parts.Inputs,
    targets: Any,
    *,
    max_grad_norm: float,
    noise_multiplier: float,
    clip: Clip = "smooth",
    coordinates: CoordinateOptions = CoordinateOptions(),
) -> tuple[Tensor, Tensor]:
    """Estimates Tr J̃ᵀJ̃/(σC)² as the paper does: random input coordinates, one Jacobian-vector product for each.

    Tr J̃ᵀJ̃ ≈ (d/k) Σ_{j in S} ‖J̃ e_j‖²,   S a set of k of the d coordinates, drawn without replacement

    The private part is the whole input, a tensor. One set S serves the whole batch; records are vmapped. Float
    precision is the model's own.

    Args:
        model: as in `step_information`.
        loss_fn: as in `step_information`.
        inputs: a tensor (B, ...).
        targets: as in `step_information`.
        max_grad_norm: the clip norm C.
        noise_multiplier: σ.
        clip: "smooth" or "hard".
        coordinates: the number k of coordinates, and how they are drawn.

    Returns:
        The estimate, (B,), and its standard error, (B,), from the spread of the coordinates (with the finite-population
        factor √(1 − k/d); zero when all are taken).

    Guarantee: unbiased, and exact when k ≥ d.
    """
    load_forward_mode()
    problem = parts.Problem(model, loss_fn, parts.Private())
    z = parts.private_part(problem, inputs, targets)
    d = z[0].numel()
    k = min(coordinates.count, d)
    params = {name: p.detach() for name, p in parts.trainable(problem).items()}

    def clipped_gradient(z: Tensor, target: Any) -> Any:
        target = tree_map(lambda t: t.unsqueeze(0), target)
        g = grad(lambda w: problem.losses(z.unsqueeze(0), z.unsqueeze(0), target, params=w)[0])(params)
        n = torch.stack([v.square().sum() for v in g.values()]).sum().sqrt()
        return {name: v * _factor(n, max_grad_norm, clip) for name, v in g.items()}

    def column(z: Tensor, target: Any, tangent: Tensor) -> Tensor:
        moved = jvp(lambda z: clipped_gradient(z, target), (z,), (tangent,))[1]
        return torch.stack([v.square().sum() for v in moved.values()]).sum()

    generator = coordinates.generator or fresh_generator(z.device)  # never torch's global one
    chosen = torch.randperm(d, generator=generator, device=generator.device)[:k]
    each = vmap(vmap(column, in_dims=(0, 0, None)), in_dims=(None, None, 0))
    columns = []
    for some in chosen.to(z.device).split(coordinates.at_once):
        tangents = torch.zeros(len(some), d, device=z.device, dtype=z.dtype).scatter_(1, some[:, None], 1)
        columns.append(each(z, targets, tangents.reshape(-1, *z.shape[1:])))
    values = torch.cat(columns) * (d / (noise_multiplier * max_grad_norm) ** 2)
    spread = values.std(0) if k > 1 else values.mean(0)
    return values.mean(0), spread * ((1 - k / d) / k) ** 0.5


@cache
def load_forward_mode() -> None:
    """Loads PyTorch's forward-mode rules.

    PyTorch loads them at first use and then warns of its own use of torch.jit. That warning is suppressed.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        jvp(torch.sin, (torch.zeros(()),), (torch.ones(()),))


def _factor(n: Tensor, max_grad_norm: float, clip: Clip) -> Tensor:
    if check_clip(clip) == "smooth":
        x = n / max_grad_norm - 1
        return 1 / (x * (1 + torch.erf(x / math.sqrt(2))) / 2 + 1)
    return (max_grad_norm / n).clamp(max=1)


def _clipped(g: Tensor, max_grad_norm: float, clip: Clip) -> Tensor:
    """Returns c(n) g, with n = ‖g‖ whose derivative at g = 0 is taken to be 0 (it is multiplied by g)."""
    square = g.square().sum()
    n = torch.where(square > 0, torch.where(square > 0, square, 1).sqrt(), 0)
    c = _factor(torch.where(square > 0, n, max_grad_norm * 1e-300), max_grad_norm, clip)
    return c * g
