"""Floors for any attacker from the number of nats that the release can carry: they use the dimension and only a KL."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import brentq

from reconbound._internal.checks import number, whole
from reconbound.bounds.any_attacker import group_variances
from reconbound.bounds.bound import WORST_CASE, Bound, box, divergence, from_log, mean_coordinates

REFERENCE = "KL divergence to one release that does not depend on the record"


def corners_floor(kl: float, *, widths: Any = 1.0, dim: int | None = None) -> Bound:
    """Returns the rate–distortion floor for a random corner of the box (ours, docs/theory/any_attacker.md 6.4).

        MSE/d ≥ w² η(1 − η)   with   h_b(η) = ln 2 − KL/d     (0 once KL ≥ d ln 2)

    With unequal sides the nats are spent where they help the attacker most: wᵢ² tanh(sᵢ/2)/sᵢ = ν, ηᵢ = 1/(1 + e^{sᵢ}).

    Args:
        kl: an upper bound in nats on the KL divergence from the release, whatever the record, to one fixed release; the
            release of a run without the record (add/remove), or with any fixed record in its place, will do.
        widths: side lengths of the box: one number, or one per coordinate.
        dim: the number of coordinates when `widths` is one number.

    Guarantee: on average over the box's corners, hence in the worst case over the box, for every attacker who knows all
    other records.

    >>> corners_floor(0.0, dim=784).value, corners_floor(784 * math.log(2), dim=784).value
    (0.25, 0.0)
    """
    nats, space = divergence("kl", kl), box(widths, dim)
    scale, share, budget = float(space.sides.max()), space.counts / space.dim, nats / space.dim
    if nats == 0:
        value = space.guess
    elif budget >= math.log(2):
        value = 0.0
    else:
        sides = space.sides / scale
        s = np.array([_inverse_entropy_gap(budget)]) if len(sides) == 1 else _log_odds(sides, share, budget)
        variance = np.exp(-s - 2 * np.logaddexp(0.0, -s))  # η(1 − η) at η = 1/(1+e^s), without underflow
        value = float(np.sum(share * sides**2 * variance)) * scale * scale
    assumes, theorem = (f"{WORST_CASE} over the box: on average over its corners",), "rate–distortion (corners)"
    return Bound("rate_distortion", value, theorem, "any", REFERENCE, assumes=assumes, guess=space.guess,
                 coordinates=mean_coordinates(space.dim))  # fmt: skip


def _spread(s: np.ndarray) -> np.ndarray:
    """Returns tanh(s/2)/s, 1/2 at 0: the squared error that one nat buys at log-odds s."""
    safe = np.where(s > 1e-4, s, 1.0)
    return np.asarray(np.where(s > 1e-4, np.tanh(safe / 2) / safe, 0.5 - s**2 / 24))


def _entropy_gap(s: np.ndarray) -> np.ndarray:
    """Returns ln 2 − h_b(1/(1+e^s)) in nats, accurate for small s."""
    exact = math.log(2) - np.logaddexp(0.0, -s) - s / (1 + np.exp(np.minimum(s, 700.0)))
    return np.asarray(np.where(s > 1e-2, exact, s**2 / 8 - s**4 / 64))


def _log_odds(sides: np.ndarray, share: np.ndarray, budget: float) -> np.ndarray:
    """Returns the log-odds sᵢ on which the nats are spent best; infinite where they do for all sides.

    Args:
        sides: different side lengths, the longest of them 1.
        share: the share of the coordinates that have each.
        budget: nats for each coordinate, below ln 2.
    """

    def at(nu: float) -> np.ndarray:
        """Returns sᵢ with wᵢ² tanh(sᵢ/2)/sᵢ = ν, by bisection; 0 where even the first nat is not worth ν."""
        low, high = np.zeros_like(sides), np.maximum(sides**2 / nu, 1.0)
        for _ in range(70):
            middle = (low + high) / 2
            more = sides**2 * _spread(middle) > nu
            low, high = np.where(more, middle, low), np.where(more, high, middle)
        return np.where(sides**2 / 2 > nu, high, 0.0)

    def overspent(log_nu: float) -> float:
        return float(np.sum(share * _entropy_gap(at(math.exp(log_nu))))) - budget

    top = math.log(0.5)  # no nat is worth more, at the longest side of 1
    step = 1.0
    while overspent(top - step) < 0:
        step *= 2
        if step > 600:
            return np.full_like(sides, math.inf)
    root = float(brentq(overspent, top - step, top + 1e-9, xtol=1e-14))
    return at(math.exp(root - 1e-13 * max(1.0, -root)))  # never under-spend


def _inverse_entropy_gap(budget: float) -> float:
    """Returns the log-odds s ≥ 0 whose entropy gap is `budget` < ln 2, rounded up."""
    if budget < 1e-8:
        return math.sqrt(8 * budget) * (1 + 1e-8)  # the gap is s²/8 − s⁴/64 + …, short of it by a share of at most 1e-8
    high = 1.0
    while float(_entropy_gap(np.array(high))) < budget and high < 800:
        high *= 2
    if high >= 800:
        return 800.0
    return float(brentq(lambda s: float(_entropy_gap(np.array(s))) - budget, 0.0, high, xtol=1e-14)) + 1e-12


def uniform_floor(kl: float, *, widths: Any = 1.0, dim: int | None = None) -> Bound:
    """Returns the rate–distortion floor for a record that is uniform in the box (Shannon's lower bound).

        MSE/d ≥ (w²/(2πe)) e^(−2 KL/d)

    It is above 0 at every KL, unlike that of the corners. With unequal sides, reverse water-filling over sᵢ =
    wᵢ²/(2πe).

    Args:
        kl: as in `corners_floor`.
        widths: as in `corners_floor`.
        dim: as in `corners_floor`.

    Guarantee: on average over the uniform prior on the box, hence in the worst case, for every attacker.

    >>> round(uniform_floor(0.0).value, 6)       # 1/(2πe); the truth is 1/12
    0.05855
    """
    nats, space = divergence("kl", kl), box(widths, dim)
    value = _reverse_water_filling(space.sides**2 / (2 * math.pi * math.e), space.counts, nats)
    assumes, theorem = ("on average over a uniform record in the box",), "rate–distortion (uniform)"
    return Bound("rate_distortion_uniform", value, theorem, "any", REFERENCE, assumes=assumes,
                 guess=4 * space.guess / 12, coordinates=mean_coordinates(space.dim))  # fmt: skip


def ball_floor(kl: float, radius: float, dim: int = 1) -> Bound:
    """Returns the rate–distortion floor for a record uniform in a ball (Shannon; docs/theory/any_attacker.md 6.6).

        MSE/d ≥ V^{2/d} e^(−2 KL/d)/(2πe),   V = π^{d/2} Rᵈ/Γ(d/2 + 1)

    Args:
        kl: as in `corners_floor`.
        radius: R of the ball.
        dim: the number of coordinates d.

    Guarantee: on average over the uniform prior on the ball, hence in the worst case over it, for every attacker.

    >>> round(ball_floor(0.0, 0.5).value, 6)       # d = 1: the interval of width 1
    0.05855
    """
    nats, size, d = divergence("kl", kl), number("radius", radius, above=0.0, at_most=1e100), whole("dim", dim)
    log_volume = d / 2 * math.log(math.pi) + d * math.log(size) - math.lgamma(d / 2 + 1)
    log_value = 2 * (log_volume - nats) / d - math.log(2 * math.pi * math.e)
    value = from_log(log_value - 1e-13 * max(1.0, abs(log_value))) if nats < math.inf else 0.0
    assumes, theorem = ("on average over a uniform record in the ball",), "rate–distortion (uniform in a ball)"
    return Bound("rate_distortion_ball", value, theorem, "any", REFERENCE, assumes=assumes, guess=size * size / d,
                 coordinates=mean_coordinates(d))  # fmt: skip


def rate_distortion(kl: float, *, widths: Any = 1.0, dim: int | None = None) -> Bound:
    """Returns the better of the two rate–distortion floors over the box: corners at low rates, uniform at high ones.

    Args:
        kl: as in `corners_floor`.
        widths: as in `corners_floor`.
        dim: as in `corners_floor`.

    Guarantee: in the worst case over the box, for every attacker who knows all other records; on average over the
    coordinates: the release may spend all its nats on a few of them, and give those away.

    >>> rate_distortion(1e3, dim=784).theorem
    'rate–distortion (uniform)'
    """
    low_rate, high_rate = corners_floor(kl, widths=widths, dim=dim), uniform_floor(kl, widths=widths, dim=dim)
    best = low_rate if low_rate.value >= high_rate.value else high_rate
    return replace(best, name="rate_distortion", assumes=(f"{WORST_CASE} over the box",), guess=low_rate.guess)


def gaussian_floor(kl: float, variances: Any, *, dim: int | None = None) -> Bound:
    """Returns the rate–distortion floor for a Gaussian prior.

        MSE/d ≥ (1/d) Σᵢ min(sᵢ, θ)   with   Σᵢ ½ ln⁺(sᵢ/θ) = KL

    Args:
        kl: as in `corners_floor`.
        variances: sᵢ, the eigenvalues of the prior's covariance; one number and `dim` for equal ones.
        dim: the number of coordinates when `variances` is one number.

    Guarantee: on average over the prior, for every attacker who knows all other records.

    >>> round(gaussian_floor(math.log(2), 4.0).value, 12)
    1.0
    """
    nats = divergence("kl", kl)
    s, counts, d = group_variances(variances, dim)
    value, guess = _reverse_water_filling(s, counts, nats), float(np.sum(counts * s)) / d
    prior, theorem = "on average over a Gaussian prior with the given variances", "rate–distortion (Gaussian prior)"
    return Bound("rate_distortion_gaussian", value, theorem, "any", REFERENCE, assumes=(prior,), guess=guess,
                 coordinates=mean_coordinates(int(d)))  # fmt: skip


def _reverse_water_filling(s: np.ndarray, counts: np.ndarray, nats: float) -> float:
    """Returns (1/d) Σ min(sᵢ, θ) at the water level θ that spends `nats`."""
    d = float(np.sum(counts))
    number("dim", d, at_least=1)
    order = np.argsort(-s)
    s, counts = s[order], counts[order]
    positive = s > 0
    if nats == math.inf or not positive.any():
        return 0.0
    logs, n = np.log(s[positive]), np.cumsum(counts[positive])
    levels = (np.cumsum(logs * counts[positive]) - 2 * nats) / n  # ln θ if exactly the k largest are above water
    above = levels < logs
    log_theta = float(levels[np.nonzero(above)[0][-1]]) if above.any() else float(logs[0])
    return float(np.sum(counts * np.minimum(s, math.exp(log_theta)))) / d
