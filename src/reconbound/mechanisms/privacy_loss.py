"""Privacy loss distributions (PLDs) of Gaussian steps, through dp-accounting, and ε, δ and success curves from them.

dp-accounting is imported when first needed. Its distributions dominate the mechanism's, so every answer is conservative
up to the rounding of its FFTs. It finds the point at which a loss is ε in a Python loop over the grid, which takes nine
tenths of its time: `gaussian_step` has the same formulas for arrays, and leaves all else (cutting the tails, connecting
the dots) to dp-accounting.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError
from reconbound.bounds import overlap_from_losses
from reconbound.bounds.parts import Parts, both_directions, parts_from_losses
from reconbound.bounds.trade_off import Least, ProfileTradeOff, TradeOff, Worst

LARGEST_SHIFT = 60.0  # beyond it one step tells all there is to tell, and the grid would be huge
_LARGEST_LOSS = 1e4  # a total loss of e^10000 is no protection
_LARGEST_GRID = 2 * 10**6
_SMALLEST_LOSS = 1e-8  # below it dp-accounting's own arithmetic gives up, and order 2 says all


@contextmanager
def without_overflow_warnings() -> Iterator[None]:
    """Silences dp-accounting's warnings of overflows that it handles."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        yield


@lru_cache(maxsize=64)  # the searches for noise of a report, whose two pages ask for the same
def gaussian(m: float, sample_rate: float, steps: int, adjacency: str) -> Any:
    """Returns the PLD of T Poisson-sampled Gaussian steps; None where its loss is enormous or negligible.

    The grid has some ten thousand points, so that a million steps take about as long as one: ε is correct to three
    digits. A finer one would cost more and gain nothing: the rounding of the FFT grows with the grid.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q.
        steps: T.
        adjacency: "replace-one" or "add/remove".
    """
    if sample_rate > 1 - 1e-9:  # a higher rate tells no less, and dp-accounting fails just below 1
        sample_rate, m, steps = 1.0, m * math.sqrt(steps), 1  # T steps are one step with m√T
    if m > LARGEST_SHIFT:
        return None
    replaced = adjacency == "replace-one"
    return equal_steps(partial(gaussian_step, m, sample_rate, replaced), loss_scale(m, sample_rate, replaced), steps)


def equal_steps(step: Callable[[float], Any], scale: tuple[float, float, float], steps: int) -> Any:
    """Returns the PLD of T equal steps; None where its loss is enormous or negligible.

    Args:
        step: gives the PLD of one step on a grid of losses.
        scale: mean and root mean square of one step's loss, and the range of losses that matter.
        steps: T.
    """
    mean, deviation, single = scale
    if steps * mean > _LARGEST_LOSS or single < _SMALLEST_LOSS:
        return None
    grid = max(single / 3e4, (16 * math.sqrt(steps) * deviation + 2 * single) / 1.5e5)
    for coarser in (1, 8, 64):
        one = one_of(step, steps, coarser * grid)
        if one is not None:
            with without_overflow_warnings():
                return composed([(one, steps)])
    return None


def one_of(step: Callable[[float], Any], steps: int, grid: float) -> Any:
    """Returns the PLD of one of T equal steps; None where the arithmetic of T of them gives up on the grid.

    Args:
        step: gives the PLD of one step on a grid of losses.
        steps: T.
        grid: distance of the losses.
    """
    with without_overflow_warnings():
        try:
            one = step(grid)
        except ValueError:  # dp-accounting's own arithmetic gave up: order 2 answers
            return None
        # on a grid much finer than 1e-6 dp-accounting's differences cancel, and the excess grows with the steps
        excess = max(abs(float(np.sum(mass)) + infinite - 1) for _, mass, infinite in directions(one)[0])
        return one if steps * excess < 1e-3 else None


def gaussian_step(m: float, sample_rate: float, replace_one: bool, grid: float) -> Any:
    """Returns dp-accounting's distribution of one sampled Gaussian step, whose curve δ(ε) is at least the step's.

    It equals `from_gaussian_mechanism(1/m, …, sampling_prob=sample_rate)`.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.
        replace_one: neighbours differ in one record's value; otherwise one record is added or removed.
        grid: distance of the losses.
    """
    from dp_accounting.pld import privacy_loss_distribution as distributions
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

    masses = []
    for kind in ["REPLACE"] if replace_one else ["REMOVE"] if sample_rate == 1 else ["REMOVE", "ADD"]:
        loss = GaussianPrivacyLoss(1 / m, sampling_prob=sample_rate, adjacency_type=AdjacencyType[kind])
        loss.get_delta_for_epsilon = partial(_step_delta, loss, kind)
        create = distributions._create_pld_pmf_from_monotone_privacy_loss
        masses.append(create(loss, value_discretization_interval=grid, use_connect_dots=True))
    return distributions.PrivacyLossDistribution(*masses)


def _step_delta(loss: Any, kind: str, epsilon: Any) -> Any:
    """Returns δ(ε) of one step for an array of ε."""
    eps = np.asarray(epsilon, dtype=np.float64)
    at = _step_point(loss, kind, eps)
    delta = loss.mu_upper_cdf(at) - np.exp(eps + loss.mu_lower_log_cdf(at))
    least = math.log1p(-loss.sampling_prob) if loss.sampling_prob < 1 else -math.inf
    if kind == "REMOVE":  # no loss is below ln(1 − q)
        delta = np.where(eps <= least, -np.expm1(np.minimum(eps, 0.0)), delta)
    elif kind == "ADD":  # no loss is above −ln(1 − q)
        delta = np.where(eps >= -least, 0.0, delta)
    return np.clip(delta, 0.0, 1.0)


def _step_point(loss: Any, kind: str, eps: np.ndarray) -> np.ndarray:
    """Returns the point at which the loss is ε: it falls with the point. Infinite where no loss is ε.

    Between replaced records it is −(asinh(α sinh(ε/2)) + ε/2)/m² with α = e^(m²/2)(1 − q)/q, here without overflow.
    """
    q, variance = loss.sampling_prob, loss._standard_deviation**2
    if kind == "REPLACE" and q == 1:
        return np.asarray(variance * (-eps / 2))
    if kind == "REPLACE":
        half = np.abs(eps) / 2
        with np.errstate(divide="ignore"):
            log_sinh = half + np.log(-np.expm1(-2 * half)) - math.log(2)
        log_term = 0.5 / variance + math.log1p(-q) - math.log(q) + log_sinh
        asinh = np.sign(eps) * np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_term), log_term)
        return np.asarray(variance * (-asinh - eps / 2))
    side = 1.0 if kind == "REMOVE" else -1.0
    if q < 1:  # the loss l of a step that has the record: e^(±ε) = 1 − q + q e^(±l)
        scaled, rest = side * eps - math.log(q), math.log1p(-q) - math.log(q)
        with np.errstate(divide="ignore", invalid="ignore"):
            inner = scaled + np.log1p(-np.exp(np.minimum(rest - scaled, 0.0)))
        known = (rest < scaled) & ~np.isclose(side * eps, math.log1p(-q), rtol=1e-9, atol=0)
        inner = np.where(known, inner, -math.inf)
    else:
        inner = side * eps
    return np.asarray(side * (-0.5 - inner * variance))


def composed(plds: Sequence[tuple[Any, int]], cut: float = 1e-15) -> Any:
    """Composes distributions on one grid by one real FFT without negligible frequencies: ten times faster than theirs.

    Returns None where the result would not fit into memory. A single run is returned as it is.

    Args:
        plds: pairs of a privacy loss distribution and the number of its runs.
        cut: the mass to which tails are cut.
    """
    from dp_accounting.pld import pld_pmf, privacy_loss_distribution
    from scipy import fft

    if [steps for _, steps in plds] == [1]:
        return plds[0][0]
    sides = [[pld._pmf_remove for pld, _ in plds]]
    if any(pld._pmf_add is not pld._pmf_remove for pld, _ in plds):
        sides.append([pld._pmf_add for pld, _ in plds])
    found = []
    for side in sides:
        dense = [(pmf.to_dense_pmf(), steps) for pmf, (_, steps) in zip(side, plds, strict=True)]
        low, high = _convolve_bounds([(pmf._probs, steps) for pmf, steps in dense], cut)
        if high - low > _LARGEST_GRID:  # the tails of very many steps: order 2 answers
            return None
        size = fft.next_fast_len(max(high - low + 1, *(pmf.size for pmf, _ in dense)), real=True)
        log_total = np.zeros(size // 2 + 1, dtype=complex)
        matters = np.ones(size // 2 + 1, dtype=bool)
        for pmf, steps in dense:
            spectrum = fft.rfft(pmf._probs, size)
            matters &= np.abs(spectrum) > math.exp(-80 / steps)
            log_total[matters] += steps * np.log(spectrum[matters])
            matters &= log_total.real > -80
        spectrum = np.where(matters, np.exp(np.where(matters, log_total, 0.0)), 0.0)
        mass = np.roll(fft.irfft(spectrum, size), -low)[: high - low + 1]  # the transform wraps around
        infinite = cut - math.expm1(sum(steps * math.log1p(-pmf._infinity_mass) for pmf, steps in dense))
        start = sum(pmf._lower_loss * steps for pmf, steps in dense) + low
        found.append(pld_pmf.DensePLDPmf(dense[0][0]._discretization, start, mass, infinite, True))
    return privacy_loss_distribution.PrivacyLossDistribution(found[0], found[-1])


def _convolve_bounds(lists: Sequence[tuple[np.ndarray, int]], cut: float) -> tuple[int, int]:
    """Returns the first and the last place of a convolution, outside of which its mass is at most `cut` (Chernoff).

    For one list these are the bounds of dp-accounting's `compute_self_convolve_bounds`.

    Args:
        lists: pairs of probabilities and how often they take part.
        cut: the mass outside.
    """
    factors = np.arange(1, 21) if len(lists) == 1 else np.array([1, 2, 3, 5, 8, 13, 20])
    sizes = {min(len(p) for p, _ in lists), max(len(p) for p, _ in lists)}
    low, high = 0, sum((len(p) - 1) * steps for p, steps in lists)
    for order in (sign * k / size for size in sizes for sign in (-1, 1) for k in factors):
        log_moments = 0.0  # Σ steps ln Σ_k p_k e^{k·order}; SciPy's logsumexp takes four times as long
        for mass, steps in lists:
            exponents = np.arange(len(mass)) * order
            top = max(float(exponents[-1]), 0.0)
            exponents -= top
            with np.errstate(divide="ignore", invalid="ignore"):
                log_moments += steps * (float(np.log(mass @ np.exp(exponents, out=exponents))) + top)
        bound = (log_moments + math.log(2 / cut)) / order
        if math.isfinite(bound) and order > 0:
            high = min(high, math.ceil(bound))
        elif math.isfinite(bound):
            low = max(low, math.floor(bound))
    return low, high


def loss_scale(m: float, q: float, replace_one: bool) -> tuple[float, float, float]:
    """Returns the mean and root mean square of one step's loss, and the range of losses that matter.

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        q: the sampling rate.
        replace_one: neighbours differ in one record's value; otherwise one record is added or removed.
    """
    x = np.linspace(-m - 10, m + 10, 4001)
    low = math.log1p(-q) if q < 1 else -math.inf
    upper = np.logaddexp(low, math.log(q) + m * x - m * m / 2)
    lower = np.logaddexp(low, math.log(q) - m * x - m * m / 2) if replace_one else np.zeros_like(x)
    weight = np.exp(upper - x * x / 2) * ((x[1] - x[0]) / math.sqrt(2 * math.pi))
    loss = upper - lower
    mean, square = float(np.sum(weight * loss)), float(np.sum(weight * loss**2))
    return max(mean, 0.0), math.sqrt(square), float(loss.max() - loss.min())


def check_pessimistic(pld: Any) -> None:
    """Refuses a distribution that is not an upper bound: dp-accounting's optimistic estimates, in either direction."""
    for pmf in (pld._pmf_remove, pld._pmf_add):
        if getattr(pmf, "_pessimistic_estimate", None) is not True:
            must = "must be a pessimistic estimate (pessimistic_estimate=True): an optimistic one promises too much"
            raise InputError("pld", must, "pessimistic_estimate=False")


def delta(pld: Any, at: float) -> float:
    """Returns δ(ε), at most 1 (a long FFT can leave a little more).

    Args:
        pld: a privacy loss distribution.
        at: ε.
    """
    with without_overflow_warnings():
        return min(max(float(pld.get_delta_for_epsilon(at)), 0.0) + directions(pld)[1], 1.0)


def overlap(pld: Any) -> float:
    """Returns a lower bound on 1 − LC between the distribution's own neighbours.

    Args:
        pld: a privacy loss distribution.
    """
    found, missing = directions(pld)
    known = min(overlap_from_losses(*direction) for direction in found)
    return max(known - 2 * missing, 0.0)


def epsilon(pld: Any, target_delta: float) -> float | None:
    """Returns ε at this δ; None where the distribution has no finite one, or its rounding is as large as δ.

    With the losses l₁ > l₂ > … > 0 of a direction, U_k = P[∞] + Σ_{i≤k} p_i and V_k = Σ_{i≤k} p_i e^{−l_i},
    δ(ε) = U_k − e^ε V_k for ε from l_{k+1} to l_k: ε is ln((U_k − δ)/V_k) of the first k for which that is at least
    l_{k+1}. dp-accounting's get_epsilon_for_delta is the same in a loop, some hundred times slower.

    Args:
        pld: a privacy loss distribution.
        target_delta: δ.
    """
    both, missing = directions(pld)
    sure = target_delta - missing
    if sure <= 0:
        return None
    least = []
    for losses, mass, infinite in both:
        if infinite > sure:
            return None
        first = int(np.searchsorted(losses, 0.0, side="right"))
        above, p = losses[first:][::-1], mass[first:][::-1]
        upper, lower = np.cumsum(np.append(infinite, p)), np.cumsum(np.append(0.0, p * np.exp(-above)))
        with np.errstate(all="ignore"):
            found = np.where((upper > sure) & (lower > 0), np.log((upper - sure) / lower), -math.inf)
        unseen = np.nonzero((upper >= sure) & (lower <= 0) & (upper > infinite))[0]  # e^{−l} is 0 in float64
        reached = np.nonzero(found[:-1] >= above)[0]
        k = int(reached[0]) if len(reached) else len(above)
        least.append(float(above[unseen[0] - 1]) if len(unseen) and unseen[0] <= k else max(float(found[k]), 0.0))
    return max(least) if math.isfinite(max(least)) else None


@lru_cache(maxsize=16)
def trade_off(pld: Any) -> TradeOff:
    """Returns the trade-off curve of a distribution: the worse of its two directions, at every point.

    Its `tpr` is min_ε {e^ε α + δ(ε)} over the distribution's grid, which also limits reconstructions. Few false
    negatives are many false positives of the other direction, where the distribution is exact to small chances: both
    are used.

    Args:
        pld: a privacy loss distribution.
    """
    found, missing = directions(pld)
    own = [ProfileTradeOff(losses, _deltas(losses, mass, inf) + missing) for losses, mass, inf in found]
    if len(own) == 1:
        return Least((own[0], own[0].mirrored()))
    remove, add = own
    return Worst((Least((remove, add.mirrored())), Least((add, remove.mirrored()))))


def _deltas(losses: np.ndarray, mass: np.ndarray, infinite: float) -> np.ndarray:
    """Returns δ(ε) = Σ_{L > ε} p(L)(1 − e^{ε − L}) + P[L = ∞] at every ε of an even grid, by one backward recursion."""
    from scipy.signal import lfilter

    above = np.cumsum(mass[::-1]) - mass[::-1]
    decay = math.exp(-float(losses[1] - losses[0])) if len(losses) > 1 else 0.0
    weighted = lfilter([0.0, decay], [1.0, -decay], mass[::-1])  # Σ_{L > ε} p(L) e^{ε − L}
    return np.asarray(np.clip((above - weighted)[::-1] + infinite, 0.0, 1.0))


def directions(pld: Any) -> tuple[list[tuple[np.ndarray, np.ndarray, float]], float]:
    """Returns (losses, probabilities, probability of an infinite loss) of both directions, and the missing probability.

    The first direction is that of the release with the record. The missing probability is what the FFTs lost (a bin is
    below zero only by their rounding), and what the sum falls short of 1. It matters to a small δ after many steps:
    5e-10 at a million.
    """
    found, missing = [], 0.0
    for pmf in {id(p): p for p in (pld._pmf_remove, pld._pmf_add)}.values():
        dense = pmf.to_dense_pmf()
        losses = (np.arange(dense.size) + dense._lower_loss) * dense._discretization if dense.size else np.zeros(1)
        mass = np.asarray(dense._probs) if dense.size else np.zeros(1)
        infinite = max(float(dense._infinity_mass), 0.0)  # a tail of rounding, cut off, can be negative
        short = 1.0 - float(np.sum(mass)) - infinite
        missing = max(missing, len(mass) * max(-float(mass.min()), 0.0), short if short > 1e-12 else 0.0)
        found.append((losses, mass, infinite))
    return found, missing


def worse_parts(pld: Any, neighbours: str) -> Parts:
    """Returns parts that carry few nats, for the worse of both directions: it is not sure which release has the record.

    Args:
        pld: a privacy loss distribution.
        neighbours: names the releases that it compares.
    """
    found, missing = directions(pld)
    curves = [parts_from_losses(*direction, neighbours, rounding=missing) for direction in found]
    return both_directions(curves[0], curves[-1])
