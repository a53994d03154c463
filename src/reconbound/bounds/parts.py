"""Parts of a release that can carry few nats: what is left when its rarest, most telling outcomes are given away.

P is the release with the record, Q one that does not depend on it. A part of P is a measure S ≤ P. Its share ρ is its
mass, its nats are KL(S/ρ ‖ Q). The best part of each share is min(P, e^x Q). Proofs: docs/theory/any_attacker.md 6.12.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import bdtr, log_ndtr, ndtr

from reconbound._internal.checks import InputError, number, numbers, whole
from reconbound.bounds.bound import Bound, divergence

_POINTS = 160  # parts that are kept of one release
_COARSE = 8  # one in so many is tried first


@dataclass(frozen=True)
class Parts:
    """Parts of a release, the smallest share first.

    Attributes:
        shares: the mass of each part: lower bounds.
        nats: its KL divergence to Q: upper bounds.
        neighbours: names P and Q.
    """

    shares: np.ndarray
    nats: np.ndarray
    neighbours: str

    def best(self, floor: Callable[[float], Bound]) -> Bound:
        """Returns the largest floor share · floor(nats), as a Bound. Some parts may be left out, which is sound.

        Args:
            floor: a floor for any attacker from nats, such as `rate_distortion`.
        """
        last = len(self.shares) - 1
        coarse = np.append(np.arange(0, last, _COARSE), last)
        values = self.shares[coarse] * np.array([float(floor(float(nats)).value) for nats in self.nats[coarse]])
        near = int(coarse[np.argmax(values)])
        fine = np.arange(max(near - _COARSE + 1, 0), min(near + _COARSE, last + 1))
        floors = [floor(float(nats)) for nats in self.nats[fine]]
        best = int(np.argmax(self.shares[fine] * np.array([float(one.value) for one in floors])))
        share, found = float(self.shares[fine[best]]), floors[best]
        cut = "" if share == 1 else " of a part of the release"
        return Bound(
            found.name,
            float(found.value) * share * (1 - 1e-15),
            found.theorem + cut,
            found.attacker,
            self.neighbours,
            assumes=found.assumes,
            guess=found.guess,
            coordinates=found.coordinates,
        )


def whole_release(nats: float, neighbours: str) -> Parts:
    """Returns the whole release as its only part.

    Args:
        nats: KL(P‖Q).
        neighbours: names P and Q.
    """
    return Parts(np.ones(1), np.array([divergence("nats", nats)]), neighbours)


def parts_from_dp(epsilon: float, delta: float, neighbours: str) -> Parts:
    """Returns parts of a release from (ε, δ)-DP, in both directions, towards a release without the record.

        share = (1−δ)(1 + e^x)/(1 + e^ε),   nats = (x e^x − ε)/(1 + e^x) − ln share,   −ε ≤ x ≤ ε

    At x = ε the share is 1 − δ, and nats = ε tanh(ε/2) − ln(1−δ).

    Args:
        epsilon: ε.
        delta: δ.
        neighbours: the neighbours for which (ε, δ) holds.

    Guarantee: for every release that is (ε, δ)-DP; no part of this share has fewer nats at randomised response that
    tells everything with chance δ.

    >>> parts = parts_from_dp(1.0, 0.1, "add/remove")
    >>> round(float(parts.shares[-1]), 12), round(float(parts.nats[-1]), 6)          # 1 − δ, tanh(1/2) − ln(1−δ)
    (0.9, 0.567478)
    """
    eps, d = divergence("epsilon", epsilon), number("delta", delta, at_least=0.0, at_most=1.0)
    if eps == math.inf or d == 1:
        return whole_release(math.inf, neighbours)
    below = np.linspace(min(2 * eps, 60.0), 0.0, _POINTS) if eps > 0 else np.zeros(1)
    x = eps - below
    log_share = math.log1p(-d) - below + np.logaddexp(0.0, -x) - np.logaddexp(0.0, -eps)
    plus = np.exp(-np.logaddexp(0.0, -x))  # e^x/(1 + e^x)
    nats = x * plus - eps * (1 - plus) - log_share
    nats[-1] = eps * math.tanh(eps / 2) - log_share[-1]
    slack = 4e-15 * (1 + eps)  # the terms cancel where x is near −ε
    return Parts(np.exp(log_share) * (1 - 1e-15), np.maximum(nats, 0.0) + slack, neighbours)


def parts_gaussian(m: float, neighbours: str) -> Parts:
    """Returns parts of a Gaussian release that one record shifts by at most m standard deviations.

        share = Φ(a) + e^x Φ(−a−m),   nats = [(m²/2)Φ(a) − mφ(a) + x e^x Φ(−a−m)]/share − ln share,   x = ma + m²/2

    Args:
        m: the largest shift; of T adaptive steps m√T.
        neighbours: names the releases with and without the shift.

    Guarantee: for every shift of length at most m, in any dimension, also of T adaptive steps.

    >>> parts = parts_gaussian(1.0, "add/remove")
    >>> float(parts.shares[-1]), float(parts.nats[-1])
    (1.0, 0.5)
    """
    shift = number("m", m, at_least=0.0)
    if not 0 < shift <= 1e3:
        return whole_release(shift * shift / 2 if shift < 1e150 else math.inf, neighbours)
    a = np.linspace(-4.0, 8.0, _POINTS - 1)
    x = shift * a + shift * shift / 2
    beyond = np.exp(x + log_ndtr(-a - shift))
    share = ndtr(a) + beyond
    density = np.exp(-a * a / 2) / math.sqrt(2 * math.pi)
    total = shift * shift / 2 * ndtr(a) - shift * density + x * beyond
    slack = 1e-14 * (1 + np.abs(x) + shift * shift)
    cut = _normalised(share, total, 1e-14, slack, neighbours)
    return Parts(np.append(cut.shares, 1.0), np.append(cut.nats, shift * shift / 2), neighbours)


def parts_by_draws(m: float, sample_rate: float, steps: int, neighbours: str) -> Parts:
    """Returns parts of T sampled Gaussian steps: the trainings in which the record is drawn at most k times.

        share = P[K ≤ k],   nats = E[K | K ≤ k] m²/2,   K ~ Binomial(T, q)

    Args:
        m: the largest shift of one step in standard deviations of its noise.
        sample_rate: q, the chance of a record to be in a batch, whatever the past.
        steps: T.
        neighbours: names the releases with the record, and without it or with a zero gradient in its place.

    Guarantee: for every record whose shifts are at most m, and every sampler that draws it with chance q in each step.

    >>> round(float(parts_by_draws(1e9, 0.5, 1, "add/remove").shares[0]), 9)
    0.5
    """
    shift, q = number("m", m, at_least=0.0), number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    count = whole("steps", steps)
    if q == 1:
        return whole_release(count * shift * shift / 2, neighbours)
    spread = count * q + math.sqrt(count * q * (1 - q)) * np.linspace(-4.0, 8.0, _POINTS // 2)
    k = np.unique(np.clip(np.round(np.append(spread, np.arange(_POINTS // 2))), 0, count))
    share = np.minimum(bdtr(k, count, q), 1.0) * (1 - 1e-9)
    share[0] = math.exp(count * math.log1p(-q)) * (1 - 1e-12)
    drawn = np.zeros_like(share)  # E[K; K ≤ k]/(Tq) = P[Binomial(T−1, q) ≤ k − 1]
    if count > 1:
        drawn[1:] = np.minimum(bdtr(np.minimum(k[1:] - 1, count - 1), count - 1, q) * (1 + 1e-9), 1.0)
    else:
        drawn[1:] = 1.0
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        nats = np.where(drawn > 0, count * q * (shift * shift / 2) * drawn / share, 0.0)
    there = (share > 1e-12) & np.isfinite(nats)
    there[0] = True  # no draws, no nats
    return Parts(share[there], nats[there], neighbours)


def parts_from_losses(
    losses: Any, probabilities: Any, infinite: float, neighbours: str, *, rounding: float = 0.0
) -> Parts:
    """Returns parts of a release from a privacy loss distribution that dominates it.

        share(x) = E_P min(1, e^(x−L)),   nats(x) = E_P[min(1, e^(x−L)) min(L, x)]/share − ln share

    Args:
        losses: the finite losses L = ln P/Q under P.
        probabilities: their probabilities.
        infinite: the probability of an infinite loss, which belongs to no part.
        neighbours: names P and Q.
        rounding: what all probabilities together may be off by.

    Guarantee: for every release whose hockey-stick divergences to Q, at all orders, are at most those of the
    distribution.

    >>> parts = parts_from_losses([0.0], [0.5], 0.5, "add/remove")
    >>> round(float(parts.shares[-1]), 9), round(float(parts.nats[-1]), 9)          # half of it, −ln ½ nats
    (0.5, 0.693147181)
    """
    loss, mass = numbers("losses", losses).ravel(), np.clip(numbers("probabilities", probabilities).ravel(), 0.0, None)
    if loss.size != mass.size or loss.size == 0:
        raise InputError("probabilities", f"must have as many entries as losses ({loss.size}), one or more", mass.size)
    number("infinite", infinite, at_least=0.0)
    order = np.argsort(loss, kind="stable")
    loss, mass = loss[order], mass[order]
    with np.errstate(divide="ignore"):
        tail = np.logaddexp.accumulate((np.log(mass) - loss)[::-1])[::-1]  # ln Σ_{i ≥ k} p_i e^(−l_i)
    beyond = np.exp(np.minimum(loss + np.append(tail[1:], -math.inf), 0.0))
    share, total = np.cumsum(mass) + beyond, np.cumsum(mass * loss) + loss * beyond
    levels = ndtr(np.linspace(-3.5, 7.5, _POINTS))
    keep = np.unique(np.append(np.minimum(np.searchsorted(share, levels * share[-1]), loss.size - 1), loss.size - 1))
    off = number("rounding", rounding, at_least=0.0) + 1e-15 * loss.size
    return _normalised(share[keep], total[keep], off, off * float(np.abs(loss).max()), neighbours)


def _normalised(share: np.ndarray, total: np.ndarray, off: float, slack: Any, neighbours: str) -> Parts:
    """Returns parts from their masses, known up to `off`, and ∫ S ln(S/Q), known up to `slack`.

    Args:
        share: the masses, rising.
        total: the integrals.
        off: what a mass may be off by.
        slack: what an integral may be off by.
        neighbours: names P and Q.
    """
    least = np.minimum(share, 1.0) - off
    there = least > 1e-12
    upper = total + slack
    with np.errstate(divide="ignore", invalid="ignore"):
        nats = np.where(upper > 0, upper / least, upper / (share + off)) - np.log(least)
    least, nats = least[there], np.maximum(nats[there], 0.0)
    if least.size == 0:
        return whole_release(math.inf, neighbours)
    return Parts(least, nats, neighbours)


def both_directions(one: Parts, other: Parts) -> Parts:
    """Returns parts that hold whichever of two curves is the release's: at each share the larger nats.

    Args:
        one: parts in one direction.
        other: parts in the other.
    """
    shares = np.unique(np.concatenate([one.shares, other.shares]))
    shares = shares[shares <= min(one.shares[-1], other.shares[-1])]
    if shares.size == 0:
        return whole_release(math.inf, one.neighbours)
    # nats rise with the share: those of the next larger part are an upper bound
    nats = [
        np.maximum.accumulate(curve.nats)[np.searchsorted(curve.shares, shares)] for curve in (one, other)
    ]  # fmt: skip
    return Parts(shares, np.maximum(*nats), one.neighbours)
