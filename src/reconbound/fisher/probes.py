"""Random directions for the part of the information across the gradient: in parameter space, or in the private part.

With M = JᵀPJ (d × d), a direction u ~ N(0, I_p) gives r = JᵀPu ~ N(0, M) and E‖r‖² = Tr M; a direction v of the private
part with E[vvᵀ] = I_d gives E‖PJv‖² = E[vᵀMv] = Tr M. In the private part one may choose the basis: if the components
of v along orthonormal q_1, q_2, ... are random SIGNS (all others Gaussian), then with M in that basis

    Var[vᵀMv] = 2 (‖M‖²_F − Σ_j (q_jᵀMq_j)²)

so that a q close to a leading eigenvector of M takes its eigenvalue out of the variance. Two such directions cost next
to nothing: h = Jᵀĝ, known exactly anyway, and the slope ∇_z ℓ; a third, the slope of the outputs' own size, costs one
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_CLOSE = 0.02  # two directions nearer than this are taken as one, for their difference is rounding


def draw_probes(
    params: Mapping[str, Tensor], probes: int, generator: torch.Generator | None = None
) -> list[dict[str, Tensor]]:
    """Independent standard normal directions in parameter space, u ~ N(0, I)."""
    return [
        {name: torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype) for name, p in params.items()}
        for _ in range(probes)
    ]


def draw_input_probes(z: Tensor, probes: int, generator: torch.Generator | None = None) -> list[Tensor]:
    """Independent standard normal directions of one record's private part."""
    return [torch.randn(z.shape[1:], generator=generator, device=z.device, dtype=z.dtype) for _ in range(probes)]


def bisectors(first: Tensor, second: Tensor) -> list[Tensor]:
    """The two bisectors of each record's pair of directions, (B, ...): orthonormal, or zero where there is none.

    For unit vectors a and b, ⟨a + b, a − b⟩ = 0: no orthogonalisation is needed. If one of the two is zero or they are
    (nearly) parallel, the first result is their common direction and the second is zero.
    """
    a, b = _unit(first), _unit(second)
    b = b * _like(torch.where(_dot(a, b) < 0, -1.0, 1.0), b)
    apart = _unit(a - b, at_least=_CLOSE)
    both = (_dot(a, a) > 0) & (_dot(b, b) > 0)
    return [_unit(a + b), apart * _like(both, apart)]


def extended(basis: list[Tensor], direction: Tensor) -> list[Tensor]:
    """The basis with one more direction, made orthogonal to it (zero where it nearly lies within it)."""
    rest = _unit(direction)
    rest = _unit(_removed(rest, basis), at_least=_CLOSE)
    return [*basis, _unit(_removed(rest, basis))]


def _removed(v: Tensor, basis: list[Tensor]) -> Tensor:
    for q in basis:
        v = torch.addcmul(v, q, _like(_dot(q, v), q), value=-1)
    return v


def with_signs(omega: Tensor, basis: list[Tensor]) -> Tensor:
    """ω with its components along each record's orthonormal basis replaced by their signs, (B, ...).

    v = ω + Σ_j q_j (sign⟨q_j, ω⟩ − ⟨q_j, ω⟩)

    For ω ~ N(0, I) the components ⟨q_j, ω⟩ and the rest of ω are independent, so E[vvᵀ] = I whatever the basis is. A
    zero q_j changes nothing.
    """
    v = omega.expand_as(basis[0])
    for q in basis:
        component = _dot(q, omega.expand_as(q))
        v = torch.addcmul(v, q, _like(component.sign() - component, q))
    return v


def _unit(v: Tensor, at_least: float = 0.0) -> Tensor:
    size = torch.linalg.vector_norm(v.flatten(1), dim=1)
    return v * _like(torch.where(size > at_least, 1 / size, 0), v)


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _like(per_record: Tensor, v: Tensor) -> Tensor:
    return per_record.reshape(-1, *(1,) * (v.dim() - 1))
