"""Divergences between releases whose data differ in one record: order 2, Kullback–Leibler and the overlap 1 − LC.

Everything here is a function of m, the largest norm of one record's clipped gradient over the noise's standard
deviation on the sum (m = sensitivity/noise_multiplier), of the sampling rate q and of the number of steps. All results
are in nats, in float64 and computed in log space: nothing overflows. docs/theory/divergences.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from reconbound._internal.checks import InputError, choice, number, whole
from reconbound.bounds.any_attacker import overlap_from_order2
from reconbound.bounds.bound import divergence, from_log, log_expm1

__all__ = [
    "SMOOTH_SENSITIVITY",
    "kl_fixed",
    "kl_poisson",
    "kl_pure",
    "order2_fixed",
    "order2_gaussian",
    "order2_paper",
    "order2_poisson",
    "order2_pure",
    "output_perturbation_shift",
    "overlap_fixed",
    "overlap_poisson",
    "sensitivity",
]


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


def output_perturbation_shift(records: int, l2: float, noise_std: float, data_norm: float = 1.0) -> float:
    """Returns m of output perturbation: how far one record can move the minimiser, over the noise's standard deviation.

        m = L/(nλσ),   L = sup‖∇ℓ‖ = data_norm for logistic loss;   replace-one: ε₂ = (2m)²

    Args:
        records: n.
        l2: λ of the objective Σℓ + (nλ/2)‖θ‖².
        noise_std: σ, the noise's standard deviation per coordinate of θ.
        data_norm: a bound on the rows' Euclidean norm, to which rows must be clipped; a constant feature (intercept)
            belongs to the row, so that pixels clipped to 1 together with it have norm √2.

    >>> round(4 * output_perturbation_shift(12665, 1e-2, 1e-2) ** 2, 2)      # the paper's order-2 divergence
    2.49
    """
    n, strength = whole("records", records), number("l2", l2, above=0.0)
    noise, norm = number("noise_std", noise_std, above=0.0), number("data_norm", data_norm, above=0.0)
    m = norm / n / strength / noise  # one division at a time: the product may underflow
    if m > 1e100:
        raise InputError("noise_std", "must be large enough for data_norm/(records l2 noise_std) ≤ 1e100", noise_std)
    return m


def rate(q: float) -> float:
    """Returns a sampling rate, checked."""
    return number("sample_rate", q, above=0.0, at_most=1.0)


def shift(m: float) -> float:
    """Returns m, checked."""
    return number("m", m, at_least=0.0, at_most=1e150)


def log1m(q: float) -> float:
    """Returns ln(1 − q), −inf at q = 1."""
    return math.log1p(-q) if q < 1 else -math.inf


def cells(edges: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights of Gauss–Legendre's rule on every cell between two edges, (cells, nodes)."""
    half = np.diff(edges)[:, None] / 2
    return (edges[:-1, None] + edges[1:, None]) / 2 + half * NODES, half * WEIGHTS


def order2_pure(epsilon: float) -> float:
    """Returns the largest order-2 divergence of an ε-DP mechanism (the same neighbours), tight for randomised response.

        ε₂ = ln(2 cosh ε − 1),   that is   χ² = 4 sinh²(ε/2)

    Args:
        epsilon: ε.

    >>> round(order2_pure(1.0), 6)
    0.735326
    """
    eps = divergence("epsilon", epsilon)
    if eps > 30:
        return eps  # ln(2 cosh ε − 1) < ε, and equal to rounding here
    return math.log1p(4 * math.sinh(eps / 2) ** 2)


def order2_gaussian(m: float) -> float:
    """Returns the order-2 divergence of one Gaussian release without sampling, replace-one.

        ε₂ = 4m²        (two antipodal records are 2m apart)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.

    >>> order2_gaussian(0.5)
    1.0
    """
    return 4 * shift(m) ** 2


def order2_poisson(m: float, sample_rate: float, *, method: str = "exact") -> float:
    """Returns the order-2 divergence of one Poisson-sampled Gaussian step, replace-one.

        exact:    χ² = q² ∫ (P₂ − P₁)²/((1−q)P₀ + qP₁),   P₀ = N(0,1), P₁ = N(m,1), P₂ = N(−m,1)
        closed:   χ² ≤ 4q²/(1−q) sinh(m²)          (also beyond m = 10⁴, where the two differ by ln 2 nats in 10⁸)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.
        method: "exact" (quadrature) or "closed".

    Guarantee: an upper bound of D₂ in both directions between any two data sets that differ in one record's value,
    Poisson sampling, whether or not the attacker knows which others took part. That the antipodal pair is the worst
    is proved in docs/theory/divergences.md 4.2.

    >>> round(order2_poisson(1.0, 0.01), 9)
    0.000457554
    """
    m, q = shift(m), rate(sample_rate)
    choice("method", method, ("exact", "closed"))
    if m == 0:
        return 0.0
    if q == 1:
        return order2_gaussian(m)
    if method == "closed" or m > 1e4:
        log_sinh = m * m + math.log(-math.expm1(-2 * m * m)) - math.log(2)
        closed = float(np.logaddexp(0.0, math.log(4) + 2 * math.log(q) - log1m(q) + log_sinh))
        return closed if method == "closed" else min(closed, order2_gaussian(m))

    def log_f(x: np.ndarray) -> np.ndarray:
        """Returns ln of P₀ 4 sinh²(mx) e^(−m²)/((1−q) + q e^(mx − m²/2)), log-concave on either side of 0."""
        t = m * np.abs(x)
        with np.errstate(divide="ignore"):
            log_sinh = t + np.log(-np.expm1(-2 * t)) - math.log(2)
        log_w = np.logaddexp(log1m(q), math.log(q) + m * x - m * m / 2)
        return np.asarray(2 * log_sinh - x * x / 2 - log_w)

    sides = np.logaddexp(_log_integral(log_f, -3 * m - 40, 0.0), _log_integral(log_f, 0.0, 2 * m + 40))
    log_chi2 = 2 * math.log(q) + math.log(4) - m * m - 0.5 * math.log(2 * math.pi) + float(sides)
    return min(float(np.logaddexp(0.0, log_chi2)), order2_gaussian(m))


def order2_fixed(m: float, sample_rate: float, *, method: str = "wang") -> float:
    """Returns the order-2 divergence of one Gaussian step on a fixed-size batch without replacement, replace-one.

        wang:        ε₂ = ln(1 + min{q² min(4(e^D − 1), 2e^D), q(e^D − 1)}),   D = 4m²
        convexity:   ε₂ = ln(1 + q²(e^D − 1))

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.
        method: "wang" (Wang, Balle, Kasiviswanathan 2019, with the plain convexity bound), or "convexity", whose χ² is
            up to 4 times smaller: proved by us in docs/theory/divergences.md 4.3, not yet reviewed by others, so never
            the default.

    Guarantee: an upper bound of D₂ between any two data sets that differ in one record, uniform batches of size B.

    >>> order2_fixed(0.5, 1.0), round(order2_fixed(0.5, 0.01, method="convexity"), 9)
    (1.0, 0.000171813)
    """
    m, q = shift(m), rate(sample_rate)
    choice("method", method, ("wang", "convexity"))
    if m == 0:
        return 0.0
    whole_batch = order2_gaussian(m)
    log_chi2 = log_expm1(whole_batch)
    if method == "convexity":
        return float(np.logaddexp(0.0, 2 * math.log(q) + log_chi2))
    wang = 2 * math.log(q) + min(math.log(4) + log_chi2, math.log(2) + whole_batch)
    return float(np.logaddexp(0.0, min(wang, math.log(q) + log_chi2)))


def order2_paper(m: float, sample_rate: float) -> float:
    """Returns the paper's value: the order-2 divergence of the Poisson-sampled Gaussian under ADD/REMOVE neighbours.

        ε₂ = ln(1 + q²(e^{m²} − 1))

    Args:
        m: as in `order2_poisson`.
        sample_rate: as in `order2_poisson`.

    Guarantee: none against the attacks that Theorem 1 speaks of, whose neighbours replace a record; it is here to
    reproduce the paper's figures.

    >>> round(order2_paper(1.0, 0.01), 9)
    0.000171813
    """
    m, q = shift(m), rate(sample_rate)
    return float(np.logaddexp(0.0, 2 * math.log(q) + log_expm1(m * m))) if m > 0 else 0.0


def _log_integral(log_f: Callable[[np.ndarray], np.ndarray], low: float, high: float) -> float:
    """Returns ln ∫ exp(log_f) for a log-concave f.

    It finds the peak, keeps what is within e⁻⁶⁰ of it, and uses Gauss–Legendre there.
    """
    a, b = low, high
    for _ in range(60):  # ternary search on a grid: a log-concave f has one peak
        grid = np.linspace(a, b, 9)
        k = int(np.argmax(log_f(grid)))
        a, b = grid[max(k - 1, 0)], grid[min(k + 1, 8)]
        if b - a <= 1e-9 * max(abs(a), abs(b), 1e-3):
            break
    peak = (a + b) / 2
    top = float(log_f(np.array([peak]))[0])
    left, right = _drop(log_f, peak, low, top), _drop(log_f, peak, high, top)
    x, weights = cells(np.linspace(left, right, 65))
    return top + math.log(float(np.sum(np.exp(log_f(x) - top) * weights)))


def _drop(log_f: Callable[[np.ndarray], np.ndarray], peak: float, limit: float, top: float) -> float:
    """Returns the point between the peak and the limit where f has fallen by e⁻⁶⁰ (the limit if it never does)."""
    near, far = peak, limit
    if float(log_f(np.array([far]))[0]) > top - 60:
        return far
    for _ in range(60):
        grid = np.linspace(near, far, 9)
        k = int(np.argmax(log_f(grid) < top - 60))
        near, far = grid[max(k - 1, 0)], grid[k]
        if abs(far - near) <= 0.05 * abs(far - peak):
            break
    return float(far)


def kl_pure(epsilon: float) -> float:
    """Returns the largest KL divergence of an ε-DP mechanism (the same neighbours), tight for randomised response.

        KL ≤ ε tanh(ε/2)

    Args:
        epsilon: ε.

    >>> round(kl_pure(1.0), 6)
    0.462117
    """
    eps = divergence("epsilon", epsilon)
    return eps * math.tanh(eps / 2)


def kl_poisson(m: float, sample_rate: float) -> float:
    """Returns the KL divergence of one Poisson-sampled Gaussian step to the same step without the record.

        KL(q N(m,1) + (1−q) N(0,1) ‖ N(0,1))          (q m²/2, its convexity bound, where m > 40 or q < 1e-300)

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q, each record's chance to be in the batch.

    Guarantee: an upper bound over all records with clipped norm at most m (docs/theory/divergences.md 4.4).

    >>> kl_poisson(1.0, 1.0), round(kl_poisson(1.0, 0.01), 9)
    (0.5, 8.3812e-05)
    """
    m, q = shift(m), rate(sample_rate)
    convex = q * m * m / 2
    if m > 40 or q == 1 or m == 0 or q < 1e-300:
        return convex

    # up to 2m: for a tiny rate KL ≈ χ²/2, and the integrand of χ² is (q P₁)²/P₀
    x, weights = cells(np.linspace(-13.0, 2 * m + 13.0, 16 * (26 + math.ceil(2 * m)) + 1))
    exponent = m * x - m * m / 2
    log_r = np.logaddexp(log1m(q), math.log(q) + exponent)  # r = W/P₀
    u = q * np.expm1(np.minimum(exponent, 700.0))  # beyond it r is large
    log_g = _log_kl_integrand(u, log_r)
    total = float(np.sum(np.exp(log_g - x * x / 2) * weights)) / math.sqrt(2 * math.pi)
    return min(total, convex)


def _log_kl_integrand(u: np.ndarray, log_r: np.ndarray) -> np.ndarray:
    """Returns ln(r ln r − r + 1), r = 1 + u, without cancellation near r = 1 or overflow at large r."""
    small, large = np.abs(u) < 1e-2, log_r > 2
    v = np.where(small, u, 0.0)
    series = v * v * (1 / 2 - v * (1 / 6 - v * (1 / 12 - v * (1 / 20 - v * (1 / 30 - v * (1 / 42 - v / 56))))))
    v = np.where(small | large, 1.0, u)
    middle = (1 + v) * np.log1p(v) - v
    lr = np.where(large, log_r, 3.0)
    with np.errstate(divide="ignore"):
        plain = np.log(np.where(small, series, middle))
    return np.asarray(np.where(large, lr + np.log(lr - 1 + np.exp(-lr)), plain))


def kl_fixed(m: float, sample_rate: float) -> float:
    """Returns the KL divergence of one fixed-size Gaussian step to that with a zero gradient in the record's place.

        KL ≤ min{ q m²/2,  ln(1 + q² e^{q(1−q)m²/2} [e^{(2−q)²m²} − 2e^{(1−q)(2−q)m²} + e^{(1−q)²m²}]) }

    Args:
        m: largest clipped gradient norm over the noise's standard deviation on the sum.
        sample_rate: q = B/N.

    Guarantee: an upper bound over all records with clipped norm at most m and all other records
    (docs/theory/divergences.md 4.4).

    >>> kl_fixed(1.0, 1.0)
    0.5
    """
    m, q = shift(m), rate(sample_rate)
    convex = q * m * m / 2
    s = m * m
    if m == 0 or s > 100:
        return convex
    a, b = (2 - q) ** 2 * s, (1 - q) ** 2 * s
    # e^a − 2e^{(a+b−s)/2} + e^b: written as sums of expm1 so that small m does not cancel
    bracket = math.expm1(a) - 2 * math.expm1((1 - q) * (2 - q) * s) + math.expm1(b)
    log_chi2 = 2 * math.log(q) + q * (1 - q) * s / 2 + math.log(max(bracket, 1e-300))
    return min(convex, float(np.logaddexp(0.0, log_chi2)))


def overlap_poisson(m: float, sample_rate: float, steps: int = 1) -> float:
    """Returns 1 − LC of T Poisson-sampled Gaussian steps under replace-one, exactly, as one Fourier integral (ours).

        1 − LC = ∫ sech(πω) M(ω)ᵀ dω,   M(ω) = ∫ √(PQ) cos(ω ln P/Q),   P, Q = (1−q)N(0,1) + q N(±m,1)

    Args:
        m: as in `order2_poisson`.
        sample_rate: as in `order2_poisson`.
        steps: T.

    Guarantee: a lower bound for any two data sets that differ in one record, met by antipodal gradients and known
    others (they dominate: docs/theory/divergences.md 4.2), up to rounding, about 1e-13. Beyond m = 16 the rigorous
    lower bound (1 − q)ᵀ stands in, smaller by a share below 1e-10 for q ≥ 1e-9 and qT ≤ 1.

    >>> round(overlap_poisson(0.5, 1.0), 6), overlap_poisson(1e6, 0.5)
    (0.795946, 0.5)
    """
    m, q, count = shift(m), rate(sample_rate), whole("steps", steps, at_least=0)
    if m == 0 or count == 0:
        return 1.0
    if q == 1:
        return _overlap_gaussian(m * math.sqrt(count))
    floor = from_log(count * log1m(q))
    return floor if m > 16 else min(max(_overlap_sampled(m, q, count), floor), 1.0)


@lru_cache(maxsize=1024)
def _overlap_sampled(m: float, q: float, count: int) -> float:
    """Returns the Fourier integral for 0 < m ≤ 16, q < 1.

    Results are kept, because a search for the noise asks for the same values again.
    """
    x = np.linspace(0.0, m + 10, math.ceil((m + 10) * max(50.0, (26 * m + 12) / math.pi)) + 1)
    plus = np.logaddexp(log1m(q), math.log(q) + m * x - m * m / 2)  # ln P/P₀, and ln Q/P₀ is its mirror image
    minus = np.logaddexp(log1m(q), math.log(q) - m * x - m * m / 2)
    loss, weight = plus - minus, np.exp((plus + minus - x * x) / 2) * (2 * x[1] / math.sqrt(2 * math.pi))
    weight[0] /= 2
    far = weight * np.cosh(np.minimum(loss, 1400.0) / 2) > 1e-22  # where P or Q has mass
    loss, weight = loss[far], weight[far]
    spread = math.sqrt(count * float(np.sum(weight * loss**2) / np.sum(weight)))
    omega, d_omega = _frequencies(spread)
    hellinger = float(np.sum(weight * 2 * np.sinh(loss / 4) ** 2))
    phase = _phase_loss(omega, loss, weight)
    missing, direct = hellinger + phase, float(np.sum(weight)) - phase  # 1 − M(ω), and M(ω) where it is small
    small = missing < 0.5
    log_size = np.where(
        small, np.log1p(-np.where(small, missing, 0.0)), np.log(np.abs(np.where(small, 1, direct)) + 1e-300)
    )
    sign = np.where(direct < 0, -1.0 if count % 2 else 1.0, 1.0)
    return float(np.sum(d_omega / np.cosh(math.pi * omega) * sign * np.exp(count * log_size)))


def _phase_loss(omega: np.ndarray, loss: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Returns Σ weight (1 − cos ωl) at each ω, as Σ weight · 2 sin²(ωl/2), which does not cancel; in chunks of rows."""
    rows = max(1, 2**18 // len(loss))
    parts = []
    for k in range(0, len(omega), rows):
        sines = np.sin(np.multiply.outer(omega[k : k + rows], loss / 2))
        parts.append(np.square(sines, out=sines) @ weight)
    return 2 * np.concatenate(parts)


def _overlap_gaussian(m: float) -> float:
    """Returns 1 − LC of N(−m,1) and N(m,1): the same integral in closed form, M(ω) = exp(−m²/2 − 2m²ω²)."""
    if m > 60:
        return 0.0  # e^(−1800)
    omega, d_omega = _frequencies(2 * m)
    inner = float(np.sum(d_omega / np.cosh(math.pi * omega) * np.exp(-2 * (m * omega) ** 2)))
    return min(from_log(-m * m / 2) * inner, 1.0)


def _frequencies(spread: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns nodes and weights on |ω| ≤ 13 (sech(πω) < 1e-17 beyond) that resolve a peak of width 1/spread at 0."""
    edges = [0.0]
    width = min(0.25, 1 / spread) if spread > 0 else 0.25
    while edges[-1] < 13:
        edges.append(edges[-1] + width)
        width = min(0.25, 2 * width)
    omega, weights = cells(np.array(edges))
    return omega.ravel(), 2 * weights.ravel()


def overlap_fixed(m: float, sample_rate: float, steps: int = 1, *, order2: float) -> float:
    """Returns a lower bound on 1 − LC of T fixed-size Gaussian steps under replace-one.

    It is the best of order ½, order 2 and z's absence.

        1 − LC ≥ max{ (1 − q(1 − e^{−m²/2}))^{2T},  2/(1 + e^{ε₂}),  (1 − q)ᵀ }

    Args:
        m: as in `overlap_poisson`.
        sample_rate: q = B/N.
        steps: T.
        order2: ε₂ of all T steps together.

    Guarantee: any two data sets that differ in one record, uniform batches of fixed size
    (docs/theory/divergences.md 4.5).

    >>> overlap_fixed(0.0, 0.5, order2=0.0)
    1.0
    """
    m, q, count = shift(m), rate(sample_rate), whole("steps", steps, at_least=0)
    gap = -q * math.expm1(-m * m / 2)  # 1 − BC
    log_affinity = math.log1p(-gap) if gap < 1 else -m * m / 2
    absent = from_log(count * log1m(q)) if count > 0 else 1.0
    return max(from_log(2 * count * log_affinity), overlap_from_order2(order2), absent)
