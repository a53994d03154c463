"""Shared parts of the divergences: the clip's sensitivity, checked arguments, the nodes of a quadrature."""

from __future__ import annotations

import math

import numpy as np

from reconbound._internal.checks import choice, number

#: sup ‖g̃‖/C of the clip c = 1/(GELU(n/C − 1) + 1), rounded up (1.11522 for the erf GELU, 1.11524 for the tanh form).
SMOOTH_SENSITIVITY = 1.1153

#: Gauss–Legendre on [−1, 1].
NODES, WEIGHTS = np.polynomial.legendre.leggauss(16)


def sensitivity(clip: str) -> float:
    """Returns the largest norm of a clipped gradient over the clip norm: 1 for the hard clip, 1.1153 for the smooth.

    Args:
        clip: "hard" or "smooth".

    >>> sensitivity("hard"), sensitivity("smooth")
    (1.0, 1.1153)
    """
    return 1.0 if choice("clip", clip, ("smooth", "hard")) == "hard" else SMOOTH_SENSITIVITY


def rate(q: float) -> float:
    return number("sample_rate", q, above=0.0, at_most=1.0)


def shift(m: float) -> float:
    return number("m", m, at_least=0.0, at_most=1e150)


def log1m(q: float) -> float:
    """Returns ln(1 − q), −inf at q = 1."""
    return math.log1p(-q) if q < 1 else -math.inf
