"""The privacy loss distribution of one Poisson-sampled Gaussian step: that of dp-accounting, computed on whole arrays.

dp-accounting finds the point at which the loss is ε in a Python loop over the grid, which takes nine tenths of its
time. The formulas here are the same ones for arrays; all else (cutting the tails, connecting the dots) is its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss


def gaussian_step(m: float, sample_rate: float, replace_one: bool, grid: float) -> Any:
    """Returns dp-accounting's distribution of one sampled Gaussian step, whose curve δ(ε) is at least the step's.

    It equals `from_gaussian_mechanism(1/m, …, sampling_prob=sample_rate)`.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.
        replace_one: neighbours differ in one record's value; otherwise one record is added or removed.
        grid: distance of the losses.
    """
    kinds = [AdjacencyType.REPLACE] if replace_one else [AdjacencyType.REMOVE, AdjacencyType.ADD]
    masses = [
        privacy_loss_distribution._create_pld_pmf_from_monotone_privacy_loss(
            _Loss(1 / m, sampling_prob=sample_rate, adjacency_type=kind),
            value_discretization_interval=grid,
            use_connect_dots=True,
        )
        for kind in (kinds[:1] if sample_rate == 1 else kinds)
    ]
    return privacy_loss_distribution.PrivacyLossDistribution(*masses)


class _Loss(GaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's loss of a Gaussian step, with δ(ε) of an array of ε without a loop."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        eps = np.asarray(epsilon, dtype=np.float64)
        at = self._point(eps)
        delta = self.mu_upper_cdf(at) - np.exp(eps + self.mu_lower_log_cdf(at))
        least = math.log1p(-self.sampling_prob) if self.sampling_prob < 1 else -math.inf
        if self.adjacency_type == AdjacencyType.REMOVE:  # no loss is below ln(1 − q)
            delta = np.where(eps <= least, -np.expm1(np.minimum(eps, 0.0)), delta)
        elif self.adjacency_type == AdjacencyType.ADD:  # no loss is above −ln(1 − q)
            delta = np.where(eps >= -least, 0.0, delta)
        return np.clip(delta, 0.0, 1.0)

    def _point(self, eps: np.ndarray) -> np.ndarray:
        """Returns the point at which the loss is ε: it falls with the point. Infinite where no loss is ε."""
        q, variance = self.sampling_prob, self._standard_deviation**2
        if self.adjacency_type == AdjacencyType.REPLACE:
            return np.asarray(variance * (self._asinh(eps) - eps / 2))
        side = 1.0 if self.adjacency_type == AdjacencyType.REMOVE else -1.0
        if q < 1:  # the loss l of a step that has the record: e^(±ε) = 1 − q + q e^(±l)
            scaled, rest = side * eps - math.log(q), math.log1p(-q) - math.log(q)
            with np.errstate(divide="ignore", invalid="ignore"):
                inner = scaled + np.log1p(-np.exp(np.minimum(rest - scaled, 0.0)))
            known = (rest < scaled) & ~np.isclose(side * eps, math.log1p(-q), rtol=1e-9, atol=0)
            inner = np.where(known, inner, -math.inf)
        else:
            inner = side * eps
        return np.asarray(side * (-0.5 - inner * variance))

    def _asinh(self, eps: np.ndarray) -> np.ndarray:
        """Returns −asinh(α sinh(ε/2)) with α = e^(m²/2)(1 − q)/q, without overflow."""
        q, half = self.sampling_prob, np.abs(eps) / 2
        if q == 1:
            return np.zeros_like(eps)
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_term = 0.5 / self._standard_deviation**2 + math.log1p(-q) - math.log(q) + log_sinh
        return np.asarray(-np.sign(eps) * np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_term), log_term))


__all__ = ["gaussian_step"]
