"""Kullback–Leibler divergences of one Poisson-sampled Gaussian step between two worlds for one record, in nats.

The record's clipped gradient over the noise's standard deviation is a in the one world and b in the other, 0 where the
record is left out. Numbers, NumPy arrays and torch tensors go in; the same kind comes out, in float64.
docs/theory/divergences.md 4.9 has the proofs.
"""

from __future__ import annotations

import math
import sys
from functools import lru_cache
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, choice, number
from reconbound.divergences.quadrature import NODES, WEIGHTS, line_kl
from reconbound.divergences.sensitivity import checked_rate, checked_shift

#: Below this rate, and for pairs above this norm, the convexity bound stands in for the integral.
SMALLEST_RATE, LARGEST_NORM = 1e-30, 40.0
_UP = 1 + 2e-12  # all results are rounded up by this: above every error of quadrature and interpolation
_CELLS_PER_UNIT, _DEGREE = 16, 10
#: Up to this largest norm pairs have polynomials, whose error is found to be at most the second; they are rounded up
#: by the third.
_POLYNOMIAL_NORM, _POLYNOMIAL_ERROR, _POLYNOMIAL_UP = 2.0, 4e-12, 1 + 6e-12

_GAUSS, _GAUSS_WEIGHTS = np.polynomial.legendre.leggauss(5)


# --- the public functions --------------------------------------------------------------------------------------------


def poisson_kl(norm: Any, sample_rate: float, *, largest_norm: float | None = None) -> Any:
    """Returns the KL divergence of one Poisson-sampled Gaussian step to the same step without the record.

        k_q(m) = KL( (1−q) N(0,1) + q N(m,1) ‖ N(0,1) ),      k_q'(m) = q m k⊥(m),      k_q(m) ≤ q m²/2

    A number is integrated directly. Arrays and tensors use a table of the rate, made at its first use, on their own
    device and with no wait for it. For rates below 1e-30 arrays and tensors get q m²/2 (a number: below 1e-300).

    Args:
        norm: m = ‖a‖ ≥ 0, the clipped gradient's norm over the noise's standard deviation on the sum; a number, an
            array or a tensor. What a tensor holds is not checked: NaN counts as infinite, a negative norm by its size.
        sample_rate: q in (0, 1], each record's chance to be in the batch.
        largest_norm: a bound on all norms: less of the table is then made. Arrays and tensors get q m²/2 from a whole
            number above it on.

    Guarantee:
        - Never below the true value, and above it by less than a part in 1e11 up to `largest_norm`.
        - An upper bound for all records with clipped norm at most m. Attacker: any; neighbours: with and without the
          record; sampler: Poisson.

    >>> poisson_kl(1.0, 1.0), round(poisson_kl(1.0, 0.01), 12), poisson_kl(np.array([0.0, 1.0]), 0.01).round(9)
    (0.5, 8.3812208e-05, array([0.0000e+00, 8.3812e-05]))
    """
    q = checked_rate(sample_rate)
    xp = _namespace(norm)
    if xp is np and np.ndim(norm) == 0:
        return _number(checked_shift(norm), q)
    m = _floats("norm", norm, xp)
    convex = q * m * m / 2
    if q == 1 or q < SMALLEST_RATE:
        return convex
    top = None if largest_norm is None else number("largest_norm", largest_norm, at_least=0.0)
    return xp.minimum(_kl(m, _table_to(q, top), xp) * (q * _UP), convex)


def poisson_pair_kl(
    norm_a: Any,
    norm_b: Any,
    inner: Any,
    sample_rate: float,
    *,
    squared_distance: Any = None,
    largest_norm: float | None = None,
) -> Any:
    """Returns the KL divergence of one Poisson-sampled Gaussian step between two values of one record.

        k_q(a, b) = KL( (1−q) N(0,I) + q N(a,I) ‖ (1−q) N(0,I) + q N(b,I) )
                  = [k_q(‖a‖) − k_q(|α|)] + k_q(α, ‖b‖),      α = ⟨a,b⟩/‖b‖

    The last term is one integral along b; neither term is negative or cancels. Where a norm exceeds 40 or the rate is
    below 1e-30, the result is the convexity bound q‖a−b‖²/2.

    Args:
        norm_a: ‖a‖ over the noise's standard deviation: a true gradient; a number, an array or a tensor.
        norm_b: ‖b‖, that of the reference; 0 where the record is left out.
        inner: ⟨a,b⟩ over the noise's variance.
        sample_rate: q in (0, 1], each record's chance to be in the batch.
        squared_distance: ‖a−b‖² over the noise's variance. Without it, it is ‖a‖² + ‖b‖² − 2⟨a,b⟩, which loses digits
            where a and b are nearly equal.
        largest_norm: a bound on all norms. With it nothing waits for the tensors' device; pairs beyond it get the
            convexity bound.

    Guarantee:
        - Never below the true value of the norms and the distance given, and above it by less than a part in 1e9.
        - Attacker: any; neighbours: two values of one record; sampler: Poisson.

    >>> round(poisson_pair_kl(1.0, math.hypot(0.8, 0.3), 0.8, 0.01), 12)
    1.6235456e-05
    """
    q = checked_rate(sample_rate)
    top = None if largest_norm is None else min(number("largest_norm", largest_norm, at_least=0.0), LARGEST_NORM)
    na, nb, c, d2, xp = _pair(norm_a, norm_b, inner, squared_distance)
    convex = q * d2 / 2
    if q < 1 and q >= SMALLEST_RATE:
        value = _pairs((na, nb, c, d2), q, top, xp)
        convex = xp.minimum(value * _UP, convex)
    return _unwrap(convex, norm_a, norm_b, inner, squared_distance)


def pair_kl_bound(
    norm_a: Any, norm_b: Any, inner: Any, sample_rate: float, *, squared_distance: Any = None, sampler: str = "poisson"
) -> Any:
    """Returns a closed upper bound on the KL divergence of one sampled Gaussian step between two values of one record.

        poisson:      min{ ln(1 + q²/(1−q) (e^{‖a‖²} + e^{‖b‖²} − 2e^{⟨a,b⟩})),  q‖a−b‖²/2 }
        any sampler:  q‖a−b‖²/2      (q = 1 at the one step of a shuffled epoch in which the record takes part)

    Args:
        norm_a: ‖a‖ over the noise's standard deviation; a number, an array or a tensor.
        norm_b: ‖b‖.
        inner: ⟨a,b⟩ over the noise's variance.
        sample_rate: q in (0, 1], each record's chance to be in the batch.
        squared_distance: ‖a−b‖², where it is known better than by ‖a‖² + ‖b‖² − 2⟨a,b⟩.
        sampler: "poisson", or "any" for every way to draw batches in which the record takes part with chance q.

    Guarantee:
        - An upper bound on k_q(a, b); at small rates the first form is twice k_q(a, b).
        - Attacker: any; neighbours: two values of one record.

    >>> round(pair_kl_bound(1.0, math.hypot(0.8, 0.3), 0.8, 0.01), 8), pair_kl_bound(1.0, 0.0, 0.0, 0.5, sampler="any")
    (3.457e-05, 0.25)
    """
    choice("sampler", sampler, ("poisson", "any"))
    q = checked_rate(sample_rate)
    na, nb, _, d2, xp = _pair(norm_a, norm_b, inner, squared_distance)
    bound = q * d2 / 2
    if q < 1 and sampler == "poisson":
        # e^A + e^B − 2e^c = e^{max} (1 − e^{−|A−B|/2})² + 2 e^{(A+B)/2} (1 − e^{−d²/2}): no term is negative
        apart, middle = xp.abs(na - nb) * (na + nb), (na * na + nb * nb) / 2
        ends = middle + apart / 2 + 2 * _log(-xp.expm1(-apart / 2), xp)
        centre = middle + math.log(2) + _log(-xp.expm1(-d2 / 2), xp)
        log_chi2 = xp.logaddexp(ends, centre) + (2 * math.log(q) - math.log1p(-q))
        closed = xp.where(log_chi2 > 700, xp.clip(log_chi2, 700, None), xp.log1p(xp.exp(xp.clip(log_chi2, None, 700))))
        bound = xp.minimum(closed * _UP, bound)
    return _unwrap(bound, norm_a, norm_b, inner, squared_distance)


# --- pairs -----------------------------------------------------------------------------------------------------------


def _pairs(pair: tuple[Any, Any, Any, Any], q: float, top: float | None, xp: Any) -> Any:
    """Returns k_q(a, b) of ‖a‖, ‖b‖, ⟨a,b⟩ and ‖a−b‖²; infinity beyond the largest norm."""
    na, nb, c, d2 = pair
    inside = xp.maximum(na, nb) <= (LARGEST_NORM if top is None else top)
    zero = xp.zeros_like(d2)
    a, b, d2 = xp.where(inside, na, zero), xp.where(inside, nb, zero), xp.where(inside, d2, zero)
    # δ = ‖b‖ − α: from the distance where a and b are close, from the inner product elsewhere
    divisor = xp.where(b > 0, b, zero + 1.0)
    close = d2 < 0.25 * b * b
    delta = xp.where(close, (d2 + (b - a) * (b + a)) / (2 * divisor), b - xp.where(inside, c, zero) / divisor)
    reach = xp.sqrt(d2)
    delta = xp.minimum(xp.maximum(delta, -reach), reach)
    alpha = xp.where(b > 0, b - delta, zero)
    alpha = xp.minimum(xp.maximum(alpha, -a), a)
    delta = xp.where(b > 0, delta, zero)
    across = xp.where(b > 0, xp.clip((reach - delta) * (reach + delta), 0.0, None), a * a)  # ‖a‖² − α²
    across = xp.minimum(across, a * a)
    if top is None or _polynomials(q, top) is None:
        value = line_kl((alpha, b, -delta), q, top, xp) + _difference(a, across, _table_to(q, top), xp)
    else:
        x = xp.stack([alpha / top, 2 * b / top - 1, 2 * a / top - 1])
        along, beside = _product_sums(_placed(("pairs", q, top), _polynomials(q, top), x), x, xp)
        value = (delta * delta * along + across * beside) * (_POLYNOMIAL_UP / 2)
    return xp.where(inside, q * value, xp.inf + zero)


def _difference(norm: Any, across: Any, table: Table, xp: Any) -> Any:
    """Returns [k_q(‖a‖) − k_q(|α|)]/q with ‖a‖² − α² given: the difference of the table's values, or ∫ t k⊥(t) dt."""
    square = norm * norm
    ends = _kl(xp.stack([norm, xp.sqrt(xp.clip(square - across, 0.0, None))]), table, xp)
    plain = xp.clip(ends[0] - ends[1], 0.0, None)
    t = xp.stack([xp.sqrt(xp.clip(square - across * ((1 - x) / 2), 0.0, None)) for x in _GAUSS.tolist()])
    integral = 0 * norm
    for factor, weight in zip(_look_up(t, table, 1, xp), _GAUSS_WEIGHTS.tolist(), strict=True):
        integral = integral + weight / 4 * factor
    return xp.where(across < 0.01 * square, integral * across, plain)


@lru_cache(maxsize=64)
def _polynomials(q: float, top: float) -> np.ndarray | None:
    """Returns coefficients of F and D for norms up to `top`, (2, terms in β, terms in α); None where they miss 4e-12.

        k_q(α, β) = q (α − β)²/2 · F(α, β),      k_q(β) − k_q(|α|) = q (β² − α²)/2 · D(α, β)

    F and D have no zero and vary little, so a relative error of theirs is one of k_q, however near α is to β. They are
    interpolated at Chebyshev nodes of α/top and 2β/top − 1, and compared with the integrals at other nodes.
    """
    if not 0 < top <= _POLYNOMIAL_NORM:
        return None
    counts, table = (8 + 4 * math.ceil(6 * top), 6 + 3 * math.ceil(6 * top)), _table_to(q, top)

    def values(more: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        x, y = (np.cos(math.pi * (np.arange(n + more) + 0.5) / (n + more)) for n in counts)
        alpha, beta = np.meshgrid(top * x, top * (y + 1) / 2, indexing="ij")
        low, high = np.minimum(np.abs(alpha), beta), np.maximum(np.abs(alpha), beta)
        apart, squares = alpha - beta, (high - low) * (high + low)
        along = line_kl((alpha, beta, apart), q, None, np) / (apart * apart / 2)
        between = np.sqrt(low * low + squares * ((1 + NODES[:, None, None]) / 2))
        beside = (WEIGHTS[:, None, None] / 2 * _look_up(between, table, 1, np)).sum(0)  # the mean of k⊥ over t²
        return np.stack([along, beside]), x, y

    with np.errstate(all="ignore"):  # where α = β nothing is found, and the integrals are left
        nodes, x, y = values(0)
        of_alpha, of_beta = (np.linalg.inv(_chebyshev(z, n, np).T) for z, n in zip((x, y), counts, strict=True))
        coefficients = np.ascontiguousarray((of_alpha @ nodes @ of_beta.T).swapaxes(1, 2))
        others, x, y = values(1)
    points = np.stack(np.broadcast_arrays(x[:, None], y, y))
    off = np.abs(_product_sums(coefficients, points, np) / others - 1)
    return coefficients if bool((off <= _POLYNOMIAL_ERROR).all()) else None


def _product_sums(coefficients: Any, x: Any, xp: Any) -> Any:
    """Returns Σ_ji c_ji T_j(x₁) T_i(x₀) for the first coefficients, and with x₂ in place of x₁ for the second."""
    _, second, first = coefficients.shape
    basis = _chebyshev(x.reshape(3, -1), first, xp)
    sums = (xp.matmul(coefficients, basis[:, 0]) * basis[:second, 1:].swapaxes(0, 1)).sum(1)
    return sums.reshape(2, *x.shape[1:])


def _chebyshev(x: Any, count: int, xp: Any) -> Any:
    """Returns the Chebyshev polynomials T_0, ..., T_{count−1} at x, (count, ...): T_{k+j} = 2 T_k T_j − T_{k−j}."""
    found = xp.stack([0 * x + 1, x])
    while len(found) < count:
        found = xp.concatenate([found, 2 * found[-1] * found[1:] - xp.flip(found[:-1], (0,))])
    return found[:count]


def _number(m: float, q: float) -> float:
    convex = q * m * m / 2
    if q == 1 or m == 0 or q < 1e-300 or (m > LARGEST_NORM and q < SMALLEST_RATE):
        return convex
    if m > LARGEST_NORM:  # the two Gaussians are apart: only the entropy of taking part is missing
        return convex + q * math.log(q) + (1 - q) * math.log1p(-q)
    one = np.array([m])
    value = q * float(line_kl((one, 0 * one, one), q, None, np)[0]) * _UP
    return min(value, convex)


# --- the table of k_q(m) ---------------------------------------------------------------------------------------------


#: The table's name, coefficients (2, degree + 1, cells) of ρ = 2k_q/(q m²) and k⊥, and ρ's distance to 1 beyond them.
Table = tuple[Any, np.ndarray, float]


def _table_to(q: float, top: float | None) -> Table:
    """Returns the table of norms up to `top`; None: of all norms."""
    return _table(q, None if top is None or top >= LARGEST_NORM else math.floor(top) + 1)


@lru_cache(maxsize=64)
def _table(q: float, units: int | None = None) -> Table:
    """Makes the table of a rate. With `units`, only the cells of norms below it; beyond them ρ counts as 1, its limit.

    On cell i, m = (i + (s + 1)/2)/16 and ρ is the polynomial in s through the Chebyshev nodes. k_q' = q m k⊥ gives
    k⊥ = ρ + mρ'/2, a polynomial of the same degree. Beyond the last cell k⊥ = 1 to 1e-13 and k_q grows by q m dm.
    """
    odds = math.log(q) - math.log1p(-q)
    end = 7.5 + math.sqrt(max(7.5**2 - 2 * odds, 0.0))
    count = whole = math.ceil(end * _CELLS_PER_UNIT)
    if units is not None:
        count = min(count, units * _CELLS_PER_UNIT)
    s = np.cos(math.pi * (np.arange(_DEGREE + 1) + 0.5) / (_DEGREE + 1))
    m = (np.arange(count)[:, None] + (s + 1) / 2) / _CELLS_PER_UNIT
    rho, to_coefficients = np.empty_like(m), np.linalg.inv(np.vander(s, increasing=True)).T
    for start in range(0, count, _CELLS_PER_UNIT):  # larger norms need more nodes
        rows = slice(start, start + _CELLS_PER_UNIT)
        rho[rows] = (line_kl((m[rows], 0 * m[rows], m[rows]), q, None, np) / (m[rows] ** 2 / 2)) @ to_coefficients
    slope = rho[:, 1:] * np.arange(1, _DEGREE + 1)  # dρ/ds
    start_m = (np.arange(count) + 0.5)[:, None]
    across = rho.copy()
    across[:, :-1] += slope * start_m  # (m/2) dρ/dm = (16 m) dρ/ds = (i + ½ + s/2) dρ/ds
    across[:, 1:] += slope / 2
    last = count / _CELLS_PER_UNIT
    missing = float((1 - rho[-1].sum()) * last * last) if count == whole else 0.0
    return ("table", q, units), np.ascontiguousarray(np.stack([rho.T, across.T])), missing


_copies: dict[tuple[Any, Any], Any] = {}


def _placed(name: Any, array: Any, like: Any) -> Any:
    """Returns an array where `like` is: itself, or its copy on a tensor's device, which is kept under this name."""
    if isinstance(like, np.ndarray):
        return array
    key = (name, like.device)
    if key not in _copies:
        if len(_copies) >= 64:
            _copies.clear()
        _copies[key] = _namespace(like).from_numpy(array).to(like.device)
    return _copies[key]


def _look_up(m: Any, table: Table, kind: int, xp: Any) -> Any:
    """Returns ρ (kind 0) or k⊥ (kind 1) at m."""
    name, cells, missing = table
    cells, last = _placed(name, cells, m), cells.shape[2]
    u = xp.clip(m * _CELLS_PER_UNIT, None, float(last))
    i = xp.clip(u.astype(np.int64) if xp is np else u.long(), None, last - 1)
    s, coefficients = 2 * (u - i) - 1, cells[kind][:, i]
    value = coefficients[_DEGREE]
    for j in reversed(range(_DEGREE)):
        value = value * s + coefficients[j]
    beyond = 1 - missing / xp.clip(m * m, 1.0, None) if kind == 0 else 0 * m + 1.0
    return xp.where(m * _CELLS_PER_UNIT > last, beyond, value if kind == 0 else xp.clip(value, None, 1.0))


def _kl(m: Any, table: Table, xp: Any) -> Any:
    """Returns k_q(m)/q."""
    finite = xp.clip(m, None, 1e150)
    return xp.where(m < 1e150, _look_up(finite, table, 0, xp) * finite * finite / 2, m * m / 2)


# --- numbers, arrays and tensors -------------------------------------------------------------------------------------


def _namespace(*values: Any) -> Any:
    """Returns torch if one of the values is a tensor, NumPy otherwise; torch is not imported for numbers and arrays."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and any(isinstance(v, torch.Tensor) for v in values) else np


def _floats(name: str, value: Any, xp: Any, like: Any = None) -> Any:
    """Returns a value in float64, on the device of `like`; a NaN in a tensor becomes infinite."""
    if xp is not np:
        x = xp.as_tensor(value, dtype=xp.float64, device=None if like is None else like.device).detach()
        return xp.nan_to_num(x.abs() if name != "inner" else x, nan=xp.inf, posinf=xp.inf, neginf=-xp.inf)
    x = np.asarray(value, dtype=np.float64)
    if np.isnan(x).any() or (name != "inner" and (x < 0).any()):
        raise InputError(name, "must be at least 0 and not NaN" if name != "inner" else "must not be NaN", value)
    return x


def _pair(norm_a: Any, norm_b: Any, inner: Any, squared_distance: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Returns ‖a‖, ‖b‖, ⟨a,b⟩ and ‖a−b‖² in one shape, and their namespace."""
    given = (norm_a, norm_b, inner, squared_distance)
    xp = _namespace(*given)
    like = next((v for v in given if xp is not np and isinstance(v, xp.Tensor)), None)
    a, b, c = (_floats(n, v, xp, like) for n, v in zip(("norm_a", "norm_b", "inner"), given, strict=False))
    c = xp.minimum(xp.maximum(c, -a * b), a * b)  # rounding can take it beyond
    with np.errstate(invalid="ignore"):
        if squared_distance is None:
            d2 = xp.nan_to_num((a - b) ** 2 + 2 * (a * b - c), nan=xp.inf, posinf=xp.inf)
        else:
            d2 = _floats("squared_distance", squared_distance, xp, like)
    broadcast = np.broadcast_arrays if xp is np else xp.broadcast_tensors
    return (*broadcast(a, b, c, d2), xp)


def _log(x: Any, xp: Any) -> Any:
    """Returns ln x, a huge negative number at 0."""
    return xp.where(x > 0, xp.log(xp.clip(x, 5e-324, None)), 0 * x - 1e300)


def _unwrap(result: Any, *given: Any) -> Any:
    """Returns a float where every argument was a number, and the array or tensor otherwise."""
    return float(result) if isinstance(result, np.ndarray | np.floating) and np.ndim(result) == 0 else result
