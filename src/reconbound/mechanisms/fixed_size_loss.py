"""Privacy loss distributions of steps on batches of fixed size, replace-one (docs/theory/divergences.md 4.10)."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any

import numpy as np

from reconbound.divergences.fixed_size import fixed_size_delta, fixed_size_losses
from reconbound.mechanisms import privacy_loss


@lru_cache(maxsize=64)
def fixed_size(m: float, sample_rate: float, steps: int) -> Any:
    """Returns a PLD that dominates T Gaussian steps on batches of fixed size; None as in `privacy_loss.gaussian`.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        steps: T.
    """
    if sample_rate > 1 - 1e-9:
        return privacy_loss.gaussian(m, 1.0, steps, "replace-one")
    if m > privacy_loss.LARGEST_SHIFT or m < 1e-10:
        return None
    return privacy_loss.equal_steps(partial(fixed_size_step, m, sample_rate), loss_scale(m, sample_rate), steps)


def loss_scale(m: float, sample_rate: float) -> tuple[float, float, float]:
    """Returns the mean and root mean square of one step's loss, and the range of losses that matter.

    Args:
        m: as in `fixed_size`.
        sample_rate: as in `fixed_size`.
    """
    losses, upper, lower = fixed_size_losses(m, sample_rate)
    mean, square = float(np.sum((upper - lower) * losses)), float(np.sum((upper + lower) * losses**2))
    return max(mean, 0.0), math.sqrt(square), 2 * float(losses.max())


def fixed_size_step(m: float, sample_rate: float, grid: float) -> Any:
    """Returns the PLD of one step on a batch of fixed size: its curve δ(ε), as dots that are connected.

        p_i = (δ_{i+1} − δ_i + e^h (δ_{i−1} − δ_i))/(e^h − 1),   p_{−i} = e^{−ih} p_i,   p₀ what is left,   P[∞] = δ_n

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        grid: h, the distance of the losses.

    Guarantee: at every ε its δ is at least that of the step, up to rounding: δ(ε) is convex in e^ε.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution

    top = float(np.logaddexp(math.log1p(-sample_rate), math.log(sample_rate) + 2 * m * (m + 10)))
    n = max(math.ceil(top / grid), 1)
    deltas = np.maximum.accumulate(fixed_size_delta(m, sample_rate, np.arange(n + 1) * grid)[::-1])[::-1]
    fall = -np.diff(deltas)
    positive = np.maximum(math.exp(grid) * fall - np.append(fall[1:], 0.0), 0.0) / math.expm1(grid)
    mirror = positive * np.exp(-np.arange(1, n + 1) * grid)
    infinite = float(deltas[-1])
    zero = max(1.0 - infinite - float(np.sum(positive)) - float(np.sum(mirror)), 0.0)
    mass = np.concatenate([mirror[::-1], [zero], positive])
    return privacy_loss_distribution.PrivacyLossDistribution(pld_pmf.DensePLDPmf(grid, -n, mass, infinite, True))
