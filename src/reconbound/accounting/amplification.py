"""Amplification by subsampling: the factors by which it shrinks Fisher information.

An attacker who does not know whether a record took part in a step learns less about it than one who does. For the
Gaussian step this is a one-dimensional integral, so it is computed exactly, for each record, with no failure
probability. The paper's κ (Theorem 4 and Algorithm 1) is kept only to reproduce the paper's figures.
Derivations: docs/theory/amplification.md.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from scipy.special import expit, logit

__all__ = ["PoissonTable", "fixed_size_factor", "paper_delta", "paper_kappa", "poisson_factors"]

Floats = npt.NDArray[np.float64]

SMALLEST_RATE = 1e-30  # the quadrature below is accurate to 2e-13 from here to 1
_FAR = 1e3  # every factor is 1 in float64 long before this norm, for every rate allowed

_NODES: Floats = np.arange(-260, 261, dtype=np.float64) * 0.05  # |x| <= 13
_WEIGHTS: Floats = np.exp(-(_NODES**2) / 2) * (0.05 / math.sqrt(2 * math.pi))


def _checked_rate(sample_rate: npt.ArrayLike) -> Floats:
    q = np.asarray(sample_rate, dtype=np.float64)
    if not np.all((q >= SMALLEST_RATE) & (q <= 1)):
        raise ValueError(f"sample_rate must lie in [{SMALLEST_RATE:g}, 1], got {sample_rate!r}")
    return q


def _checked_norm(name: str, value: npt.ArrayLike) -> Floats:
    m = np.asarray(value, dtype=np.float64)
    if not np.all(m >= 0):
        raise ValueError(f"{name} must be at least 0 and not NaN, got {value!r}")
    return np.minimum(m, _FAR)


def poisson_factors(clipped_norm_over_noise: npt.ArrayLike, sample_rate: npt.ArrayLike) -> tuple[Floats, Floats]:
    """Returns the exact factors by which Poisson sampling shrinks one Gaussian step's information, across and along.

        r(x) = q / (q + (1−q) e^{−(m x + m²/2)}),   k⊥ = E[r(x)],   k∥ = E[x² r(x)],   x ~ N(0, 1)
        I(z) = (q/s²) J̃ᵀ [ k⊥ (I − ĝĝᵀ) + k∥ ĝĝᵀ ] J̃

    Leave the leading q out when the term is added only for records that are in the batch. Not in the paper: it takes
    the place of κ in Theorem 4. The integrals are evaluated by the trapezoid rule in float64, relative error below
    1e-12.

    Args:
        clipped_norm_over_noise: m = ‖g̃‖/s ≥ 0, the clipped gradient's norm over the noise's standard deviation on
            the sum; any shape.
        sample_rate: q in [1e-30, 1], the probability that a record takes part; broadcast against m.

    Returns:
        k⊥ and k∥, in the broadcast shape, each in (0, 1]. Both are q at m = 0 and tend to 1 as m grows.

    Guarantee:
        Equality, for an attacker who knows every other record, which of them took part, the parameters before the
        step and the noisy sum, but not whether z took part; one who knows less learns less. z is the parameter and
        all other records are fixed (replace-one neighbours, infinitesimally). Sampler: Poisson, a fresh draw
        independent of the past, with a divisor that does not depend on the realised batch size. Nothing is assumed of
        the attacker's estimator here; the floors that the information enters say what they assume.

    >>> across, along = poisson_factors([0.0, (2 * np.log(99)) ** 0.5], 0.01)  # 1/2 where m² = 2 ln((1−q)/q)
    >>> [round(float(k), 12) for k in across], [round(float(k), 12) for k in along]
    ([0.01, 0.5], [0.01, 0.5])
    """
    m, shift = np.broadcast_arrays(
        _checked_norm("clipped_norm_over_noise", clipped_norm_over_noise), logit(_checked_rate(sample_rate))
    )
    across, along = np.zeros(m.shape), np.zeros(m.shape)
    for x, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):  # memory stays at a few copies of m
        r = weight * expit(m * (x + m / 2) + shift)
        across += r
        along += x * x * r
    return np.minimum(across, 1.0), np.minimum(along, 1.0)


def fixed_size_factor(
    clipped_norm_over_noise: npt.ArrayLike, clip_bound_over_noise: npt.ArrayLike, sample_rate: npt.ArrayLike
) -> Floats:
    """Returns the factor by which sampling a fixed number of records shrinks one Gaussian step's information.

        I(z) ≼ (q/s²) k J̃ᵀJ̃,      k = max(k⊥, k∥) at m = (‖g̃‖ + B)/s

    Sampling is without replacement. Not in the paper: it takes the place of κ in Theorem 4, for the sampler of
    Algorithm 1.

    Args:
        clipped_norm_over_noise: ‖g̃‖/s of each record, s the noise's standard deviation on the sum; any shape. Where
            it is not known, pass B/s: the factor then holds for every record.
        clip_bound_over_noise: B/s, where B bounds every clipped gradient's norm: C for the hard clip, 1.1153 C for the
            smooth one.
        sample_rate: q = batch size / number of records, in [1e-30, 1].

    Returns:
        k in (0, 1], in the broadcast shape.

    Guarantee:
        Proved upper bound, for an attacker who knows every other record, the parameters before the step and the noisy
        sum, even if told which other records are in the batch and which one stands in for z when z is not.
        Neighbours: replace-one, infinitesimally. Sampler: uniform subsets of fixed size, a fresh draw at every step.
        That max(k⊥, k∥) increases with m, on which this rests, is proved in docs/theory/amplification.md.

    >>> round(float(fixed_size_factor(0.0, 0.0, 0.25)), 12), float(fixed_size_factor(1.0, 1.0, 1.0))
    (0.25, 1.0)
    """
    own = _checked_norm("clipped_norm_over_noise", clipped_norm_over_noise)
    other = _checked_norm("clip_bound_over_noise", clip_bound_over_noise)
    return cast(Floats, np.maximum(*poisson_factors(own + other, sample_rate)))


class PoissonTable:
    """A table of the exact Poisson factors of one sampling rate: a few multiplications for each norm, on any device.

        k(m) ≈ Σ_j c_{i,j} sʲ,      i = ⌊32 m⌋,   s = 2(32 m − i) − 1,   j = 0..6

    Each cell of width 1/32 holds the polynomials through seven Chebyshev nodes; beyond the last cell both factors are
    1 to float64. Relative error at every m ≥ 0: below 1e-9 in float64 (1e-12 for q ≥ 1e-9). In float32 the rounding
    of m itself dominates, since ∂ln k/∂ln m reaches 2m²: below 1e-5 (2e-6 for q ≥ 1e-9), either way, so accumulate in
    float64 where that matters. Half precision is raised to float32.

    A tensor is evaluated on its own device with no wait for that device. The first use on a device copies the table
    there; call `prepare` before a CUDA graph is captured. What cannot be checked without waiting is made harmless: a
    NaN norm gives 1, the trivial factor, and a negative norm counts by its size.

    Args:
        sample_rate: q in [1e-30, 1].

    Guarantee:
        That of `poisson_factors`, to the accuracy above.

    >>> table = PoissonTable(0.01)
    >>> across, along = table(torch.tensor([0.0, 1.0, torch.inf], dtype=torch.float64))
    >>> across.numpy().round(10).tolist(), along.numpy().round(10).tolist()
    ([0.01, 0.02570468, 1.0], [0.01, 0.0471801247, 1.0])
    """

    _CELLS_PER_UNIT = 32
    _DEGREE = 6

    def __init__(self, sample_rate: float) -> None:
        self.sample_rate = float(_checked_rate(sample_rate))
        self._cells = torch.from_numpy(self._fit(self.sample_rate))
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    @classmethod
    @lru_cache(maxsize=64)  # every learner with the rate has the table: 30 ms each, some 70 kB
    def _fit(cls, q: float) -> Floats:
        """Returns coefficients (cells, degree + 1, 2) up to the norm where r(x) turns at x = −9, a tail of 1e-19."""
        end = 9 + math.sqrt(max(81 - 2 * float(logit(q)), 0.0))
        count = math.ceil(end * cls._CELLS_PER_UNIT)
        s = np.cos(math.pi * (np.arange(cls._DEGREE + 1) + 0.5) / (cls._DEGREE + 1))
        values = np.stack(poisson_factors((np.arange(count)[:, None] + (s + 1) / 2) / cls._CELLS_PER_UNIT, q), axis=-1)
        return np.asarray(np.linalg.inv(np.vander(s, increasing=True)) @ values)

    def prepare(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> PoissonTable:
        """Copies the table to a device and dtype, so that a CUDA graph can be captured; returns the table itself.

        Args:
            device: where norms will be evaluated.
            dtype: their floating-point type.
        """
        # an empty tensor names the device in full: "cuda" becomes "cuda:0"
        self(torch.empty(0, device=device, dtype=dtype))
        return self

    def __call__(self, clipped_norm_over_noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns k⊥ and k∥ at m = ‖g̃‖/s, in m's shape.

        Args:
            clipped_norm_over_noise: m ≥ 0; any shape.
        """
        wide = clipped_norm_over_noise.dtype == torch.float64
        place = (clipped_norm_over_noise.device, torch.float64 if wide else torch.float32)
        if place not in self._copies:
            self._copies[place] = self._cells.to(*place)
        cells = self._copies[place]
        m, last = clipped_norm_over_noise.to(cells.dtype).abs(), cells.shape[0] - 1
        u = (m * self._CELLS_PER_UNIT).nan_to_num(nan=last + 1.0).clamp(max=last + 1.0)
        i = u.detach().long().clamp(max=last)
        s, c = (2 * (u - i) - 1).unsqueeze(-1), cells[i]
        k = c[..., self._DEGREE, :]
        for j in reversed(range(self._DEGREE)):
            k = k * s + c[..., j, :]
        across, along = k.clamp(max=1.0).unbind(-1)
        return across, along

    def largest(self, clipped_norm_over_noise: torch.Tensor) -> torch.Tensor:
        """Returns max(k⊥, k∥) at m: at m = (‖g̃‖ + B)/s, the factor of `fixed_size_factor`.

        Args:
            clipped_norm_over_noise: m ≥ 0; any shape.
        """
        return torch.maximum(*self(clipped_norm_over_noise))


def paper_delta(records: int, steps: int) -> float:
    """Returns the failure probability that the paper allows each step, so that all steps fail with at most 1/N.

        δ = 1 / (N T)

    Args:
        records: N, the number of training records.
        steps: T, the number of steps.

    Returns:
        δ for one step (a union bound over the T steps).

    Guarantee:
        None of privacy: see `paper_kappa`.

    >>> paper_delta(1000, 100)
    1e-05
    """
    return 1.0 / records / steps


def paper_kappa(noise_multiplier: float, sample_rate: float, delta: float, *, clip_bound: float = 1.115) -> float:
    """Returns the paper's subsampling factor (Theorem 4 and line 4 of Algorithm 1), to reproduce its figures.

        ε = 2B √(2 ln(1.25/δ)) / σ,      κ = q / (q + (1−q) e^{−ε})

    Args:
        noise_multiplier: σ > 0, the noise's standard deviation on the sum over the clip norm C.
        sample_rate: q in [1e-30, 1].
        delta: δ in (0, 1), for one step (`paper_delta`).
        clip_bound: B, the clipped gradient's largest norm over C; 1.115 is the paper's for its smooth clip (the
            supremum is 1.11522, a little more), 1 the hard clip's.

    Returns:
        κ in (0, 1]: the step's information, given participation, is multiplied by it.

    Guarantee:
        None. Theorem 4 asks for pure ε-DP, which the Gaussian step has for no ε; the formula for ε is proved only for
        ε < 1, and a failure probability inside an expectation has no coherent meaning. Use `poisson_factors` (Poisson
        batches) or `fixed_size_factor` (Algorithm 1's batches), which need no δ.

    >>> round(paper_kappa(5.0, 0.01, 1e-9, clip_bound=1.1153), 2), paper_kappa(1e-6, 0.01, 1e-9)
    (0.15, 1.0)
    """
    epsilon = 2 * clip_bound * math.sqrt(2 * (math.log(1.25) - math.log(delta))) / noise_multiplier
    return float(expit(logit(_checked_rate(sample_rate)) + epsilon))
