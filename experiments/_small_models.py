"""Many linear or one-hidden-layer models at once: gradients of every record under every model in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def shapes(features: int, classes: int, hidden: int) -> list[tuple[int, int]]:
    return [(classes, features)] if hidden == 0 else [(hidden, features), (classes, hidden)]


def start(layers: list[tuple[int, int]], copies: int, generator: torch.Generator) -> Tensor:
    """Weights and biases of each model, (copies, p), uniform within 1/√(inputs) as torch's own."""
    parts = []
    for out, into in layers:
        u = torch.rand(copies, out * into + out, generator=generator, dtype=torch.float64)
        parts.append((2 * u - 1) / math.sqrt(into))
    return torch.cat(parts, dim=1)


def parts(w: Tensor, layers: list[tuple[int, int]]) -> tuple[list[Tensor], list[Tensor]]:
    """Weights (M, outputs, inputs) and biases (M, outputs, 1) of each layer."""
    weights, biases = [], []
    for out, into in layers:
        weight, bias, w = w[:, : out * into], w[:, out * into : out * into + out], w[:, out * into + out :]
        weights.append(weight.reshape(-1, out, into))
        biases.append(bias[:, :, None])
    return weights, biases


@dataclass
class Measured:
    """Of every record under every model, in closed form. A layer's gradient is the outer product of two sides.

    sides: of each layer, (M, outputs, N) and (M or 1, inputs, N). norm: ‖g‖, (M, N). probe: ⟨g, u⟩, (M, N).
    pulled: ∇_x‖g‖ and Jᵀu, (M, d, N) each.
    """

    sides: list[tuple[Tensor, Tensor]]
    norm: Tensor
    probe: Tensor
    pulled: tuple[Tensor, Tensor]

    def total(self, factor: Tensor) -> Tensor:
        """Σ factor · g over records, (M, p), with factors (M, N)."""
        found = []
        for out, into in self.sides:
            scaled = factor[:, None] * out
            found += [(scaled @ into.mT).flatten(1), scaled.sum(2)]
        return torch.cat(found, dim=1)


def measured(
    w: Tensor, u: Tensor, x: Tensor, y: Tensor, layers: list[tuple[int, int]], squared: bool = False
) -> Measured:
    """Gradients of cross-entropy (or half the squared error) and the two pullbacks, by hand: a bias is the weight of an
    input of 1, and tests/accounting/test_coverage.py compares with autograd."""
    (weights, biases), (probes, shifts) = parts(w, layers), parts(u, layers)
    intos = [x.T[None]]
    if len(layers) == 2:
        intos.append((weights[0] @ x.T + biases[0]).tanh())
    output = weights[-1] @ intos[-1] + biases[-1]
    p = output if squared else output.softmax(1)
    outs = [p - y.T]
    if len(layers) == 2:
        back, bend = weights[1].mT @ outs[0], 1 - intos[1].square()
        outs.insert(0, back * bend)

    def to_record(d_outs: list[Tensor], d_intos: list[Tensor]) -> Tensor:
        """∇_x of a scalar, (M, d, N), from its derivatives with respect to the sides."""
        d_error = d_outs[-1] if len(layers) == 1 else d_outs[1] + weights[1] @ (d_outs[0] * bend)
        d_output = d_error if squared else p * (d_error - (p * d_error).sum(1, keepdim=True))
        d_into = weights[-1].mT @ d_output + d_intos[-1]
        if len(layers) == 1:
            return d_into
        return d_intos[0] + weights[0].mT @ ((d_into - 2 * intos[1] * back * d_outs[0]) * bend)

    sides = list(zip(outs, intos, strict=True))
    of_out, of_into = (
        [o.square().sum(1, keepdim=True) for o in outs],
        [i.square().sum(1, keepdim=True) + 1 for i in intos],
    )
    norm = sum((a * b for a, b in zip(of_out, of_into, strict=True)), torch.zeros(())).sqrt()
    radial = to_record(
        [o * b for o, b in zip(outs, of_into, strict=True)], [i * a for i, a in zip(intos, of_out, strict=True)]
    )
    against = [m @ i + b for m, b, i in zip(probes, shifts, intos, strict=True)]
    probe = sum(((o * a).sum(1) for o, a in zip(outs, against, strict=True)), torch.zeros(()))
    pulled = to_record(against, [m.mT @ o for m, o in zip(probes, outs, strict=True)])
    return Measured(sides, norm[:, 0], probe, (radial / norm, pulled))
