"""Random directions (probes) that estimate the information across the gradient, in parameters or in the private part.

With M = JᵀPJ (d × d), a direction u ~ N(0, I_p) gives r = JᵀPu ~ N(0, M) and E‖r‖² = Tr M; a direction v of the private
part with E[vvᵀ] = I_d gives E‖PJv‖² = E[vᵀMv] = Tr M. In the private part one may choose the basis: if the components
of v along orthonormal q_1, q_2, ... are random SIGNS (all others Gaussian), then with M in that basis

    Var[vᵀMv] = 2 (‖M‖²_F − Σ_j (q_jᵀMq_j)²)

so that a q close to a leading eigenvector of M takes its eigenvalue out of the variance. Two such directions cost next
to nothing: h = Jᵀĝ, known exactly anyway, and the slope ∇_z ℓ; a third, the slope of the outputs' own size, costs one
backward pass. Each record has its own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reconbound._internal.rng import fresh_generator

_CLOSE = 0.05  # two directions nearer than this are taken as one, for their difference would be rounding


def draw_probes(
    params: Mapping[str, Tensor], probes: int, generator: torch.Generator | None = None
) -> list[dict[str, Tensor]]:
    """Draws independent standard normal directions u ~ N(0, I) in parameter space.

    Args:
        params: the parameters, by name.
        probes: the number of directions.
        generator: None: a fresh one, never torch's global generator.
    """
    generator = generator or fresh_generator(next(iter(params.values())).device)
    return [
        {name: torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for name, p in params.items()}
        for _ in range(probes)
    ]


def draw_input_probes(z: Tensor, probes: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Draws independent standard normal directions of one record's private part.

    Args:
        z: the private part of each record.
        probes: the number of directions.
        generator: None: a fresh one, never torch's global generator.
    """
    generator = generator or fresh_generator(z.device)
    return [torch.randn(z.shape[1:], generator=generator, device=z.device, dtype=z.dtype) for _ in range(probes)]


class Basis:
    """Each record's orthonormal directions q_j (zero where there is none), for probes with signs along them.

    The directions a and b of the first two arguments enter as their bisectors, q = (a ± b)/‖a ± b‖, which are
    orthogonal since ‖a‖ = ‖b‖; where one of the two is zero or they are (nearly) parallel there is one direction.

    Few operations on whole batches are used, because each of them costs a launch on a GPU.

    Args:
        first: h, up to a factor ≥ 0 for each record.
        second: the slope.
        third: made orthogonal to these.
    """

    def __init__(self, first: Tensor | None, second: Tensor | None = None, third: Tensor | None = None) -> None:
        given = [v.flatten(1) for v in (first, second) if v is not None]
        self.q: Tensor | None = None
        if given:
            units, there = _units(torch.stack(given))
            self.q = units
            if len(given) == 2:  # (a ± b)/‖a ± b‖; where only one of a and b exists, that one and zero
                plus, minus = units[0] + units[1], units[0] - units[1]
                self.q, _ = _units(torch.stack([plus, minus * there.all(0)]), at_least=_CLOSE)
        if third is not None:
            rest, _ = _units(_removed(_units(third.flatten(1))[0], self.q), at_least=_CLOSE)
            rest, _ = _units(_removed(rest, self.q))
            self.q = rest[None] if self.q is None else torch.cat([self.q, rest[None]])

    def with_signs(self, omega: Tensor, records: int) -> Tensor:
        """Returns ω with its components along each record's basis replaced by their signs, (B, ...).

        v = ω + Σ_j q_j (sign⟨q_j, ω⟩ − ⟨q_j, ω⟩)

        For ω ~ N(0, I) the components ⟨q_j, ω⟩ are independent of each other and of the rest of ω, so
        E[vvᵀ] = (I − QQᵀ) + QQᵀ = I whatever the basis is. A zero q_j changes nothing.

        Args:
            omega: ω, of one record's shape.
            records: B.
        """
        v = omega.expand(records, *omega.shape)
        if self.q is None:
            return v
        flat = omega.flatten().to(self.q.dtype)  # in half precision the basis is float32's
        components = self.q @ flat
        change = (components.sign() - components).unsqueeze(2)
        for q, k in zip(self.q, change, strict=True):
            flat = torch.addcmul(flat, q, k)
        return flat.reshape(v.shape).to(omega.dtype)


def _units(v: Tensor, at_least: float = 0.0) -> tuple[Tensor, Tensor]:
    """Returns v/‖v‖ along the last dimension, and whether there is one; zero where ‖v‖ is not above the least."""
    size = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
    there = size > at_least
    return v * torch.where(there, 1 / size, 0), there


def _removed(v: Tensor, basis: Tensor | None) -> Tensor:
    for q in () if basis is None else basis:
        v = torch.addcmul(v, q, (q * v).sum(1, keepdim=True), value=-1)
    return v
