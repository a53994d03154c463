"""Floors for any attacker, biased or informed by a prior: van Trees, box minimax, Le Cam.

Each holds in the worst case over the data space or on average over a stated prior. No floor can hold for every attacker
at one fixed record, because "guess this very record" would be an attacker too.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, matrix, number, numbers, whole
from reconbound.bounds.bound import WORST_CASE, Bound, Coordinates, box, divergence, from_log, mean_coordinates
from reconbound.bounds.unbiased import REPLACE_ONE, inverse_trace

AVERAGE = "Fisher information, averaged over the prior"
WORST_CORNER = f"{WORST_CASE} over the box: on average over its corners"


# --- van Trees: Fisher information and a prior ------------------------------------------------------------------------


def van_trees(information: Any, covariance: Any) -> Bound:
    """Returns the Bayesian Cramér–Rao floor for a Gaussian prior.

        E‖ẑ − z‖²/d ≥ Tr[(E_π I + S⁻¹)⁻¹]/d

    Args:
        information: E_π I, the Fisher information averaged over the prior, shape (d, d).
        covariance: S, the prior's covariance, shape (d, d). A singular S says that some directions are known.

    Guarantee: on average over the prior N(·, S) and the release, for every attacker. Where the information at one data
    set stands in for its average over the prior, the floor is an approximation: say so.

    >>> round(van_trees([[3.0]], [[1.0]]).value, 12)
    0.25
    """
    fim = matrix("information", information, symmetric=True)
    prior = matrix("covariance", covariance, symmetric=True)
    if fim.shape != prior.shape:
        raise InputError("covariance", f"must have the shape of information, {fim.shape}", prior.shape)
    # (I + S⁻¹)⁻¹ = R (Rᵀ I R + 1)⁻¹ Rᵀ with S = R Rᵀ, valid for singular S too
    eigenvalues, vectors = np.linalg.eigh(prior)
    root = vectors * np.sqrt(np.clip(eigenvalues, 0.0, None))
    product = root.T @ fim @ root
    d = fim.shape[0]
    value, guess = inverse_trace(product, root, 1.0) / d, float(np.trace(prior)) / d
    assumes = ("on average over a Gaussian prior with the given covariance",)
    return Bound(
        "van_trees", value, "van Trees", "any", AVERAGE, assumes=assumes, guess=guess, coordinates=mean_coordinates(d)
    )


def van_trees_trace(trace: float, variances: Any, *, dim: int | None = None) -> Bound:
    """Returns van Trees' floor from only the trace of the information: the least favourable split, by water-filling.

        E‖ẑ − z‖²/d ≥ (1/d) Σᵢ min(sᵢ, 1/ν)   with   Σᵢ (ν − 1/sᵢ)₊ = E_π Tr I

    Args:
        trace: E_π Tr I, the trace averaged over the prior.
        variances: sᵢ, the eigenvalues of the Gaussian prior's covariance; one number and `dim` for equal ones.
        dim: the number of coordinates when `variances` is one number.

    Guarantee: on average over the prior and the release, for every attacker and every information of that trace.

    >>> van_trees_trace(6.0, 1.0, dim=2).value
    0.25
    """
    t = number("trace", trace, at_least=0.0)
    s, counts, d = group_variances(variances, dim)
    order = np.argsort(-s)
    s, counts = s[order], counts[order]
    positive = s > 1e-290  # what is smaller is known, for all that matters
    inverse = 1 / s[positive]
    n = np.cumsum(counts[positive])
    with np.errstate(over="ignore"):
        level = (t + np.cumsum(inverse * counts[positive])) / n  # ν if exactly the k largest variances are filled
    active = level > inverse  # none where the trace is 0, or too small next to 1/s
    water = 1 / float(level[np.nonzero(active)[0][-1]]) if active.any() else float(s[0])
    value = float(np.sum(counts * np.minimum(s, water))) / d
    assumes, guess = ("on average over a Gaussian prior with the given variances",), float(np.sum(counts * s)) / d
    each, theorem = mean_coordinates(int(d)), "van Trees (water-filling)"
    return Bound("van_trees_trace", value, theorem, "any", AVERAGE, assumes=assumes, guess=guess, coordinates=each)


def group_variances(variances: Any, dim: int | None) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns distinct variances, their multiplicities and d."""
    s = numbers("variances", variances, at_least=0.0)
    if s.ndim == 0:
        d = float(whole("dim", 1 if dim is None else dim))
        return s.reshape(1), np.array([d]), d
    if dim is not None and dim != s.size:
        raise InputError("dim", f"must equal the number of variances, {s.size}", dim)
    values, counts = np.unique(s.ravel(), return_counts=True)
    return values, counts.astype(float), float(s.size)


def box_minimax(information: float, *, width: float = 1.0, each_coordinate: bool = True) -> Bound:
    """Returns the worst record's floor for any attacker, from Fisher information that is bounded on a box.

        cos² prior:   MSE/d ≥ 1/(λ + 4π²/w²)
        two points:   MSE/d ≥ max_{δ ≤ w} (δ²/4) cos²(δ√λ/2)

    Args:
        information: λ, an upper bound on Fisher information throughout the box: on every diagonal entry Iⱼⱼ(z)
            (`each_coordinate`, and always for d = 1), or only on dFIL(z) = Tr I(z)/d.
        width: the box's side w.
        each_coordinate: which of the two λ bounds. The two-point floor needs the first; the cos² floor holds for both.

    Guarantee: for every attacker there is a record in the box at which it errs by this much on average over the
    coordinates; where λ bounds every Iⱼⱼ, there is one for each coordinate by itself, not always the same one.
    docs/theory/any_attacker.md 6.2 shows why a bound only on dFIL does not carry the two-point argument to d > 1.

    >>> [round(box_minimax(x).value, 5) for x in (0.1, 1.0, 10.0, 100.0)]
    [0.2438, 0.19254, 0.03148, 0.00717]
    """
    lam = number("information", information, at_least=0.0)
    w = number("width", width, above=0.0, at_most=1e100)
    frequency = 2 * math.pi / w
    value = 1 / (lam + frequency * frequency)  # not **, which raises where the product is infinite
    if each_coordinate:
        reach = w * math.sqrt(lam)
        best = 1.7206670  # the maximum of x cos(x/2), at x tan(x/2) = 2
        x = min(reach, best)
        two = (w * math.cos(x / 2) / 2) ** 2 * (x / reach) ** 2 if reach > 0 else w**2 / 4
        value = max(value, two)
    assumes = (
        f"{WORST_CASE} over the box",
        "the information is at most this throughout the box, " + ("in each coordinate" if each_coordinate else "dFIL"),
    )
    each: Coordinates = "each" if each_coordinate else "average"
    theorem, neighbours = "van Trees and Le Cam on a box", "Fisher information"
    return Bound("box_minimax", value, theorem, "any", neighbours, assumes=assumes, guess=w**2 / 4, coordinates=each)


# --- Le Cam: two corners that differ in one coordinate ---------------------------------------------------------------


def lecam(overlap: float, *, widths: Any = 1.0, dim: int | None = None, theorem: str = "Le Cam") -> Bound:
    """Returns Le Cam's two-point floor from the overlap of neighbouring releases.

        MSE/d ≥ (Σᵢ wᵢ²/(4d)) (1 − LC),   1 − LC = ∫ 2PQ/(P + Q)

    Args:
        overlap: a lower bound on 1 − LC between replace-one neighbours (the `overlap_from_…` functions give it).
        widths: side lengths of the box: one number, or one per coordinate.
        dim: the number of coordinates when `widths` is one number.
        theorem: the name under which the floor is reported.

    Guarantee: on average over the box's corners, hence in the worst case over the box, for every attacker who knows all
    other records, even one who knows all other coordinates of this one; neighbours replace one record. Coordinate i by
    itself has the floor (wᵢ²/4)(1 − LC): the value, where all sides are equal.

    >>> lecam(1.0, widths=2.0).value
    1.0
    """
    share = number("overlap", overlap, at_least=0.0, at_most=1.0)
    space = box(widths, dim)
    value, assumes = space.guess * share, (WORST_CORNER,)
    return Bound(
        "lecam", value, theorem, "any", REPLACE_ONE, assumes=assumes, guess=space.guess, coordinates=space.each
    )


def overlap_from_pure(epsilon: float, delta: float = 0.0) -> float:
    """Returns a lower bound on 1 − LC under (ε, δ)-DP, tight at δ = 0 for randomised response.

        1 − LC ≥ (1 − δ) sech²(ε/2)

    Args:
        epsilon: ε.
        delta: δ.

    >>> round(overlap_from_pure(1.0), 6)
    0.786448
    """
    eps, share = divergence("epsilon", epsilon), 1 - number("delta", delta, at_least=0.0, at_most=1.0)
    return share * from_log(2 * (math.log(2) - eps / 2 - math.log1p(math.exp(-eps))))


def overlap_from_order2(epsilon: float) -> float:
    """Returns a lower bound on 1 − LC from the order-2 Rényi divergence.

        1 − LC ≥ 2/(1 + e^ε)

    Args:
        epsilon: the divergence ε in nats.

    >>> overlap_from_order2(0.0)
    1.0
    """
    eps = divergence("epsilon", epsilon)
    return 2 * from_log(-float(np.logaddexp(0.0, eps)))


def overlap_from_renyi(epsilon: float, order: float = 0.5) -> float:
    """Returns a lower bound on 1 − LC from a Rényi divergence of any order α ≥ 1/2.

        1 − LC ≥ BC² = e^(−D_½) ≥ e^(−ε_α)

    Args:
        epsilon: the divergence ε_α in nats.
        order: α.

    >>> overlap_from_renyi(0.0)
    1.0
    """
    number("order", order, at_least=0.5)
    return from_log(-divergence("epsilon", epsilon))


def overlap_from_losses(losses: Any, probabilities: Any, infinite: float = 0.0) -> float:
    """Returns 1 − LC from a privacy loss distribution.

        1 − LC = E_P[2/(1 + e^L)],   L = ln P/Q under P

    Args:
        losses: the finite losses L.
        probabilities: their probabilities.
        infinite: the probability of an infinite loss; it adds nothing.

    A distribution that dominates the mechanism's (as dp-accounting's pessimistic ones do) gives a lower bound. Long FFT
    compositions leave a little mass beyond one: twice that excess is taken off the overlap.

    >>> overlap_from_losses([0.0], [1.0])
    1.0
    """
    loss, mass = numbers("losses", losses).ravel(), numbers("probabilities", probabilities).ravel()
    if loss.size != mass.size:
        raise InputError("probabilities", f"must have as many entries as losses ({loss.size})", mass.size)
    value = float(np.sum(mass * 2 * np.exp(-np.logaddexp(0.0, loss))))
    excess = float(np.sum(np.clip(mass, 0, None))) + number("infinite", infinite, at_least=0.0) - 1.0
    return min(max(value - 2 * max(excess, 0.0), 0.0), 1.0)
