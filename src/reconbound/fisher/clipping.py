"""Smooth and hard clipping: the factor, its slope, and how the clip scales a change along the gradient.

A clip maps a gradient g of norm n to c(n) g. Its derivative is c I + c'(n) n ĝĝᵀ: a change across the gradient is
scaled by c, a change along it by c + c'n. These two numbers are all that the information of a clipped gradient needs.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reconbound._internal.checks import choice

Clip = Literal["smooth", "hard"]

CLIPS: tuple[Clip, ...] = ("smooth", "hard")
_FAR = 40.0  # exp(-40²/2) is zero in float64: beyond it the smooth clip is the hard one


class Clipping:
    """The clip's values at given gradient norms: each a tensor of the norms' shape.

    Args:
        norms: gradient norms n ≥ 0, any shape.
        max_grad_norm: the clip norm C > 0.
        clip: "smooth" or "hard".

    Attributes:
        factor: c, or 0 where it has lost digits: rounded up, it would let more than C through.
    """

    def __init__(self, norms: Tensor, max_grad_norm: float, clip: Clip) -> None:
        self.norms, self.max_grad_norm, self.hard = norms, max_grad_norm, clip == "hard"
        if self.hard:
            factor = max_grad_norm / torch.where(norms <= max_grad_norm, max_grad_norm, norms)
        else:
            self.x = norms / max_grad_norm - 1
            factor = torch.where(self.x == math.inf, 0, 1 / (F.gelu(self.x) + 1))  # gelu has no value at infinity
        self.factor = torch.where(factor < torch.finfo(factor.dtype).tiny, 0, factor)

    @cached_property
    def radial(self) -> Tensor:
        """Returns c + c'n = d(c n)/dn."""
        if self.hard:
            return (self.norms <= self.max_grad_norm).to(self.norms.dtype)
        x = self.x.clamp(max=_FAR)
        square = x.square()
        density = torch.exp(square * -0.5) * math.sqrt(2 / math.pi)  # 2 φ(x)
        above = torch.erfc(x * (1 / math.sqrt(2)))  # 2 Φ(−x); special.ndtr is not accurate so far out
        return torch.addcmul(above, square + x, density, value=-1) * self.factor.square() * 0.5

    @property
    def slope(self) -> Tensor:
        """Returns c' = dc/dn."""
        if self.hard:
            return torch.where(self.norms <= self.max_grad_norm, 0, -self.factor / self.norms)
        x = self.x.clamp(max=_FAR)
        density = torch.exp(x.square() * -0.5) * math.sqrt(2 / math.pi)
        below = torch.erfc(x * (-1 / math.sqrt(2)))
        return torch.addcmul(below, x, density) * self.factor.square() * (-0.5 / self.max_grad_norm)


def clipping(norms: Tensor, max_grad_norm: float, clip: Clip = "smooth") -> Clipping:
    """Returns the clip factor, its slope and the radial derivative at the given gradient norms.

    smooth:  c = 1/(GELU(x) + 1),  x = n/C − 1,      c + c'n = c² [Φ(−x) − x(x + 1) φ(x)]
    hard:    c = min(1, C/n),                        c + c'n = 1 for n ≤ C, 0 for n > C

    (GELU in its erf form; the radial derivative is written so that nothing cancels when n is many times C.)

    Args:
        norms: gradient norms n ≥ 0, any shape.
        max_grad_norm: the clip norm C > 0.
        clip: "smooth" (the GELU clip of the paper) or "hard" (that of Opacus).

    Guarantee: factor · norm ≤ sensitivity(clip) · C. The hard clip has a kink at n = C, where the values for n < C are
    returned.

    >>> c = clipping(torch.tensor([0.0, 2.0, 1e30]), 1.0, "hard")
    >>> c.factor[:2].tolist(), c.radial.tolist()
    ([1.0, 0.5], [1.0, 0.0, 0.0])
    """
    return Clipping(norms, max_grad_norm, check_clip(clip))


def check_clip(clip: Clip) -> Clip:
    choice("clip", clip, CLIPS)
    return clip
