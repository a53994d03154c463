"""δ(ε) of many sampled Gaussian steps without any grid: the Laplace transform of their losses, inverted at a saddle.

    δ(ε) = 1/(2πi) ∫ e^{−sε} E_P[e^{sL}]/(s(s + 1)) ds    along Re s = a > 0

E_P[e^{sL}] of T steps is a product. a is near the saddle, so that small δ keep their digits. For few steps it
falls too slowly: the answer is then NaN. Losses on a lattice (discrete or Laplace noise) are not for this.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp
from scipy.stats import binom

NODES, WEIGHTS = np.polynomial.legendre.leggauss(20)


@dataclass(frozen=True)
class Step:
    """A Gaussian step on a Poisson sample in which a person has this many equal rows.

    Attributes:
        m: the shift of one row in standard deviations of the noise.
        rate: q of each row.
        kind: "remove" (P has the rows, Q not), "add", or "replace" (Q has the opposite rows).
        rows: the number of rows.
    """

    m: float
    rate: float
    kind: str
    rows: int = 1

    def logs(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns ln P/N(0, 1) and ln Q/N(0, 1)."""
        drawn = np.arange(self.rows + 1)[:, None]
        with np.errstate(divide="ignore"):
            chances = binom.logpmf(drawn, self.rows, self.rate)
        there, opposite = (
            logsumexp(chances + sign * drawn * self.m * x - (drawn * self.m) ** 2 / 2, axis=0) for sign in (1, -1)
        )
        absent = np.zeros_like(x)
        return {"remove": (there, absent), "add": (absent, there), "replace": (there, opposite)}[self.kind]

    def losses(self, tilt: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns losses and the logarithms of their chances under P, where e^{tilt · L} has its mass."""
        reach = self.rows * self.m * (abs(tilt) + 2) + 14
        x = np.linspace(-reach, reach, 20_001)
        p, q = self.logs(x)
        size = (1 + tilt) * p - tilt * q - x * x / 2
        near = x[size > size.max() - 60]
        cells = max(24, math.ceil((near[-1] - near[0]) * 1.2 * (1 + self.rows * self.m)))
        edges = np.linspace(near[0] - x[1] + x[0], near[-1] + x[1] - x[0], cells + 1)
        half = np.diff(edges)[:, None] / 2
        x = ((edges[1:] + edges[:-1])[:, None] / 2 + half * NODES).ravel()
        p, q = self.logs(x)
        return p - q, p - x * x / 2 - math.log(2 * math.pi) / 2 + np.log(half * WEIGHTS).ravel()


def exact_delta(steps: Sequence[tuple[Step, int]], epsilon: float, accuracy: float = 1e-9) -> float:
    """Returns δ(ε) of a composition, by far more exact than `accuracy`; NaN where the integral converges too slowly.

    Args:
        steps: pairs of a step and the number of its runs.
        epsilon: ε.
        accuracy: share of the integral that may be left out at its end.
    """

    def exponent(log_tilt: float) -> float:
        tilt = math.exp(log_tilt)
        found = [(losses + 0.0, chances, count) for (losses, chances), count in moments(tilt)]
        total = sum(count * float(logsumexp(chances + tilt * losses)) for losses, chances, count in found)
        return total - tilt * epsilon - log_tilt - math.log1p(tilt)

    def moments(tilt: float) -> list[tuple[tuple[np.ndarray, np.ndarray], int]]:
        return [(step.losses(tilt), count) for step, count in steps]

    tilt = math.exp(minimize_scalar(exponent, bounds=(-7, 9), method="bounded", options={"xatol": 1e-3}).x)
    log_size, centred, mean, square, spread = -tilt * epsilon, [], 0.0, 0.0, 1e-12
    for (losses, chances), count in moments(tilt):
        size = chances + tilt * losses
        log_total = float(logsumexp(size))
        weight = np.exp(size - log_total)
        there = weight > 1e-15
        losses, weight = losses[there], weight[there]
        own = float(weight @ losses)
        centred.append((losses - own, weight, count))
        log_size, mean = log_size + count * log_total, mean + count * own
        square, spread = square + count * float(weight @ (losses - own) ** 2), max(spread, float(np.ptp(losses)))
    width = min(0.5 / math.sqrt(square), 0.5 * tilt)
    widest = min(6 / max(abs(mean - epsilon), 1e-12), 12 / spread)
    total = at = 0.0
    for cell in range(1500):
        omega = at + width / 2 * (1 + NODES)
        log_value = 1j * omega * (mean - epsilon)
        with np.errstate(divide="ignore"):
            for losses, weight, count in centred:
                log_value = log_value + count * np.log(np.exp(1j * np.multiply.outer(omega, losses)) @ weight)
        value = np.exp(log_value) / ((tilt + 1j * omega) * (tilt + 1 + 1j * omega))
        total, at = total + width / 2 * float(WEIGHTS @ value.real), at + width
        if float(np.max(np.abs(value))) * at < accuracy * abs(total):
            # beyond the largest loss only rounding is left
            return math.exp(min(log_size + math.log(total / math.pi), 0.0)) if total > 0 else 0.0
        if cell % 4 == 3:
            width = min(2 * width, widest)
    return math.nan
