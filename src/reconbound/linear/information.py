"""Information of an output-perturbed linear model about each training record, in closed form: no Jacobian is formed.

docs/theory/linear.md, sections 3 to 6. With H the Hessian, J = ∂W*/∂x = −H⁻¹(AW ⊗ x̃ + ∂ℓ/∂s ⊗ I), I = JᵀJ/σ².
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from reconbound._internal.checks import LARGEST, InputError, number, numbers
from reconbound._internal.formatting import format_floor
from reconbound.bounds import Bound, from_spectral_norm, from_trace, per_feature
from reconbound.linear.solver import UNIT, Optimum, RoundingError, Squared, rounding_error
from reconbound.linear.spectral import top_by_lanczos, top_of_updates

#: Records worked on at once, at most, and floats in one working array.
BLOCK, FLOATS = 1024, 4_000_000


@dataclass(frozen=True, repr=False)
class Leakage:
    """Fisher information of the released model about each record of the training set, one entry per record.

    It is computed from the noiseless model and is itself not private: it is for the curator, not for release.

    Attributes:
        trace: Tr(I), (N,).
        dim: d, the number of private features.
        noise_std: the noise's standard deviation per parameter.
        diagonal: Iⱼⱼ, (N, d), or None where it was not requested.
        spectral_norm: ‖I‖₂ = η², (N,), or None where it was not requested.
        inverse_trace: a lower bound of Tr(I⁻¹), (N,): lowered by the rounding error, 0 where that leaves nothing; None
            for softmax, see `cramer_rao_of`.
        target: the information about y, all features known, (N,), for regression; None otherwise.
        clipped: which rows were longer than data_norm. All values are about the row before clipping, whose length is
            lost: then Tr(I⁻¹) is infinite (1e308 σ², to stay a float).
    """

    trace: np.ndarray
    dim: int
    noise_std: float
    diagonal: np.ndarray | None
    spectral_norm: np.ndarray | None
    inverse_trace: np.ndarray | None
    target: np.ndarray | None
    clipped: np.ndarray
    _optimum: Optimum = field(repr=False)
    _scale: np.ndarray | None = field(repr=False)
    _shrunk: np.ndarray = field(repr=False)

    def __repr__(self) -> str:
        n, unit = len(self.trace), "X's units" if self._scale is None else "mixed units, those before scaling"
        floors = np.asarray(self.floor.rmse)
        least, most, middle = (format_floor(float(x)) for x in (floors.min(), floors.max(), np.median(floors)))
        return (
            f"Leakage of {n:,} records with {self.dim} private features (noise {self.noise_std:.3g}, "
            f"{int(self.clipped.sum()):,} rows clipped): floors, on average over the features in {unit}, from "
            f"±{least} to ±{most}, median ±{middle}. Not private: for the curator"
        )

    @property
    def dfil(self) -> np.ndarray:
        """Returns Tr(I)/d, (N,)."""
        return np.asarray(self.trace / self.dim)

    @property
    def floor(self) -> Bound:
        """Returns d/Tr(I), per record: the least mean squared error per feature of an unbiased attacker."""
        return from_trace(self.trace, self.dim)

    @property
    def cramer_rao(self) -> Bound:
        """Returns Tr(I⁻¹)/d, per record: the Cramér–Rao floor, at least `floor`. Slow for softmax: `cramer_rao_of`."""
        return self.cramer_rao_of(np.arange(len(self.trace)))

    def cramer_rao_of(self, records: Any) -> Bound:
        """Returns Tr(I⁻¹)/d of chosen records, in their order.

        With softmax each record costs singular values of a Kp×d matrix. There no formula serves all records at once:
        σ²I is Σₖₗ gₖgₗPₖₗ, P the blocks of H⁻², and a low-rank part, and g mixes the blocks differently for every
        record. With two classes g is one number times (−1, 1).

        Args:
            records: the indices of the records.
        """
        chosen, n = np.asarray(records, dtype=np.int64).ravel(), len(self.trace)
        if chosen.size and not (chosen.min() >= 0 and chosen.max() < n):
            raise InputError("records", f"must be indices from 0 to {n - 1}", chosen[(chosen < 0) | (chosen >= n)][0])
        if self.inverse_trace is None:
            unit = np.ones(self.dim) if self._scale is None else self._scale
            inverse = _softmax_inverse_trace(self._optimum, unit, chosen) * self.noise_std**2
            inverse[self.clipped[chosen]] = LARGEST / max(self.noise_std**2, 1.0)
        else:
            inverse = self.inverse_trace[chosen]
        values = np.maximum(inverse / self.dim, np.asarray(self.floor.value)[chosen])
        return Bound("theorem2", values, "Theorem 2 (Cramér–Rao)", "unbiased", "Fisher information at the record")

    @property
    def feature_floors(self) -> Bound:
        """Returns 1/Iⱼⱼ, (N, d): the least variance for one feature, in that feature's squared unit."""
        if self.diagonal is None:
            raise InputError("diagonal", "must be True when leakage is asked for, to have floors per feature", False)
        bound, notes = per_feature(self.diagonal), self._two_valued()
        return replace(bound, assumes=(*bound.assumes, *notes), notes=(*bound.notes, *notes))

    def _two_valued(self) -> tuple[str, ...]:
        """Returns the caveat of floors of columns with no more than two values: 0 and 1, before or after scaling."""
        rows = self._optimum.rows[:, : self.dim] / self._shrunk[:, None]
        low, high = rows.min(axis=0), rows.max(axis=0)
        near = 1e-9 * np.maximum(high - low, np.abs(high))  # rows were shortened and are stretched again
        two = np.flatnonzero(((rows - low <= near) | (high - rows <= near)).all(axis=0))
        if not two.size:
            return ()
        which = f"column{'' if two.size == 1 else 's'} {', '.join(str(int(j)) for j in two[:5])}"
        which += " and more" if two.size > 5 else ""
        columns = f"{two.size} of {self.dim} columns hold at most two values ({which})"
        return (f"{columns}: no floor of theirs bounds how well the two are told apart",)

    @property
    def spectral_floor(self) -> Bound:
        """Returns 1/‖I‖₂, per record: the least variance in any one direction."""
        if self.spectral_norm is None:
            raise InputError("spectral", "must be True when leakage is asked for, to have this floor", False)
        return from_spectral_norm(self.spectral_norm)

    @property
    def target_floor(self) -> Bound:
        """Returns 1/I(y), per record: the least variance for the target of a regression, all features known."""
        if self.target is None:
            raise InputError("target", "is public in a classifier: only regression has this floor", None)
        return per_feature(self.target)

    def information(self, record: int) -> np.ndarray:
        """Returns the whole matrix I of one record, (d, d), as computed.

        Unlike the other values it is not raised by the rounding error.

        Args:
            record: the index of the record.
        """
        n = len(self.trace)
        if not 0 <= record < n:
            raise InputError("record", f"must be an index from 0 to {n - 1}", record)
        j, shrunk = self._optimum.jacobian(record), float(self._shrunk[record])
        if shrunk < 1:
            x = self._optimum.rows[record, : self.dim]
            unit = x / np.linalg.norm(x)
            j = shrunk * (j - np.outer(j @ unit, unit))
        j = j if self._scale is None else j / self._scale
        return np.asarray(j.T @ j / self.noise_std**2)


def leakage(
    optimum: Optimum,
    noise_std: float,
    *,
    scale: np.ndarray | None = None,
    diagonal: bool = True,
    spectral: bool = True,
    norms: np.ndarray | None = None,
) -> Leakage:
    """Returns the information of W* + N(0, σ²I) about every record, from one factorisation and matrix products.

        Tr I = (1/σ²)[ℓ''²‖H⁻¹x̃‖²‖θ‖² + 2ℓ'ℓ''θᵀH⁻²x̃ + ℓ'²‖H⁻¹‖²_F],  columns of the private features only

    Args:
        optimum: from `minimise`.
        noise_std: σ, per parameter.
        scale: the factor sⱼ by which each feature was divided before training (StandardScaler's `scale_`): the
            answers are then in the units before that. One where left out.
        diagonal: whether to compute the diagonal (an N×d array).
        spectral: whether to compute the spectral norm.
        norms: the rows' Euclidean norms before they were clipped, (N,), where some were.

    Guarantee: information is at least, and Tr(I⁻¹) at most, that at the exact minimiser, for an attacker who knows all
    other records, the label, λ and σ; the difference is rounding's (docs/theory/linear.md 6.1).

    Raises:
        NotConverged: the Hessian's condition number leaves too few digits for a statement.
    """
    sigma = number("noise_std", noise_std, above=0.0)
    units = None
    if scale is not None:
        units = numbers("scale", scale, above=0.0).ravel()
        if units.size != optimum.dim:
            raise InputError("scale", f"must have one entry per feature, {optimum.dim}", units.size)
    shrunk = np.ones(len(optimum.rows))
    if norms is not None:
        norms = numbers("norms", norms, at_least=0.0)
        if norms.shape != shrunk.shape:
            raise InputError("norms", f"must have shape {shrunk.shape}, one per record", f"shape {norms.shape}")
        now = np.linalg.norm(optimum.rows[:, : optimum.dim], axis=1)
        shrunk = np.minimum(now / np.maximum(norms, np.finfo(float).tiny), 1.0)
        shrunk[norms <= now * (1 + 1e-9)] = 1.0
    off = rounding_error(optimum)
    work = _softmax_parts if optimum.weights.shape[0] > 1 else _scalar_parts
    unit = np.ones(optimum.dim) if units is None else units
    short = np.flatnonzero(shrunk < 1)
    parts = work(optimum, unit, diagonal or short.size > 0, spectral)
    if short.size:
        _before_clipping(optimum, unit, short, shrunk[short], parts)
    parts.raise_by_rounding(optimum, off, unit, short)
    target = None
    if isinstance(optimum.loss, Squared):  # dθ*/dy = H⁻¹x̃
        lost = off.products / float(np.linalg.norm(optimum.inverse_hessian)) * np.linalg.norm(optimum.rows, axis=1)
        length = np.linalg.norm(optimum.rows @ optimum.inverse_hessian, axis=1) + lost
        target = (length / (1 - off.share) / sigma) ** 2
    var = sigma**2
    diag = parts.diag / var if diagonal and parts.diag is not None else None
    norm = None if parts.norm is None else parts.norm / var
    inverse = None if parts.inverse is None else np.minimum(parts.inverse, LARGEST / max(2 * var, 1.0)) * var
    own = (optimum, units, shrunk)
    return Leakage(parts.trace / var, optimum.dim, sigma, diag, norm, inverse, target, shrunk < 1, *own)


@dataclass
class _Parts:
    """JᵀJ = σ²I of every record: its trace, diagonal, spectral norm and Tr((JᵀJ)⁻¹), None where not computed."""

    trace: np.ndarray
    diag: np.ndarray | None
    norm: np.ndarray | None
    inverse: np.ndarray | None

    def raise_by_rounding(self, o: Optimum, off: RoundingError, unit: np.ndarray, short: np.ndarray) -> None:
        """Raises trace, diagonal and spectral norm by the rounding error (docs/theory/linear.md 6)."""
        columns, whole = off.column_errors(o, unit), off.direction_errors(o, unit)
        columns[short] = 4 * whole[short, None]  # three terms, each as large as ‖M‖² allows
        self.trace = off.upper_bound(self.trace, columns.sum(axis=1), float(np.linalg.norm(1 / unit)))
        if self.diag is not None:
            self.diag = off.upper_bound(self.diag, columns, 1 / unit)
        if self.norm is not None:
            beside = columns.sum(axis=1) + 4 * whole
            beside[short] += 2e-9 * self.norm[short]  # Lanczos stops there
            beside += 0.0 if len(o.weights) == 1 else 2e-9 * self.norm
            self.norm = np.minimum(off.upper_bound(self.norm, beside, float(1 / unit.min())), self.trace)


Product = Callable[[np.ndarray], np.ndarray]


def _scalar_parts(o: Optimum, unit: np.ndarray, diagonal: bool, spectral: bool) -> _Parts:
    """Returns the parts of the information for one score.

    JᵀJ = a²S + q₁(av)ᵀ + (av)q₁ᵀ + c vvᵀ with a = ℓ', S = (H⁻²) on the features, q₁ = ℓ''H⁻²x̃, c = ℓ''²‖H⁻¹x̃‖².
    """
    d, n = o.dim, len(o.rows)
    square = o.inverse_hessian @ o.inverse_hessian
    a, bend, v = o.slopes[:, 0], o.curvatures, o.weights[0, :d] / unit
    s = square[:d, :d] / np.outer(unit, unit)
    levels, turn = np.linalg.eigh(s) if spectral else (np.empty(0), np.empty((0, 0)))
    levels = np.maximum(levels, 0.0)
    trace, c = np.empty(n), np.empty(n)
    diag = np.empty((n, d)) if diagonal else None
    norm = np.empty(n) if spectral else None
    s_diag, v_square, turned_v = np.diag(s), v**2, v @ turn if spectral else v
    for i in range(0, n, BLOCK):
        b = slice(i, i + BLOCK)
        moved = o.rows[b] @ square
        moved *= bend[b, None]  # ℓ''H⁻²x̃
        c[b] = bend[b] * np.einsum("ij,ij->i", moved, o.rows[b])
        q = moved[:, :d] / unit
        trace[b] = a[b] ** 2 * s_diag.sum() + 2 * a[b] * (q @ v) + c[b] * v_square.sum()
        if diag is not None:
            diag[b] = np.square(a[b])[:, None] * s_diag + (2 * a[b])[:, None] * (q * v) + c[b, None] * v_square
        if norm is not None:
            with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
                norm[b] = top_of_updates(levels, a[b], q @ turn, turned_v, c[b])
            # slopes so small that their squares are lost: vᵀIv/vᵀv is no larger than λ_max, or the trace is taken
            along = a[b] ** 2 * (v @ s @ v) + 2 * a[b] * (q @ v) * v_square.sum() + c[b] * v_square.sum() ** 2
            least = along * (1 - 1e-6) / max(v_square.sum(), np.finfo(float).tiny)
            norm[b] = np.where(norm[b] >= least, norm[b], trace[b])
    trace = np.maximum(trace, 0.0)
    if diag is not None:
        np.maximum(diag, 0.0, out=diag)
    if norm is not None:
        norm = np.minimum(norm, trace)
    return _Parts(trace, diag, norm, _inverse_trace(o, unit, rounding_error(o)))


def _inverse_trace(o: Optimum, unit: np.ndarray, off: RoundingError) -> np.ndarray:
    """Returns Tr((JᵀJ)⁻¹) by Woodbury's formula: rank two on S⁻¹ = H² (Schur complement of the intercept's row).

    Where its terms cancel, it is the smallest value that rounding leaves possible; 0 where every value is possible.
    """
    d = o.dim
    square = o.hessian @ o.hessian
    inv, shift, rho = square[:d, :d], np.zeros(d), 0.0
    if o.intercept:
        border, corner = square[:d, d], square[d, d]
        inv, shift, rho = inv - np.outer(border, border) / corner, -border / corner, 1 / corner
    a, bend, v = o.slopes[:, 0], o.curvatures, o.weights[0, :d]
    towards = inv @ v
    x = o.rows[:, :d] + shift  # S⁻¹q₁ = ℓ''(x + r)
    w12, w22 = bend * (x @ v), float(v @ towards)
    r11, r12, r22 = bend**2 * (x**2 @ unit**2), bend * (x @ (unit**2 * towards)), float(np.sum((unit * towards) ** 2))
    gap = rho * bend**2 * w22 + (a + w12) ** 2
    # the error of each, through bounds that do not cancel: |inv| ≤ big, |x| ≤ far, |a + w12| ≤ reach
    step, length, wide = 4 * (len(square) + 8) * UNIT, float(np.linalg.norm(v)), float(unit.max())
    big = float(np.sum(o.hessian**2))
    ratio = big * rho
    big *= (1 + np.sqrt(ratio)) ** 2
    far = np.linalg.norm(x, axis=1) + ratio
    reach = np.abs(a) + bend * far * length
    high11, high12 = (bend * far * wide) ** 2, bend * far * wide**2 * big * length
    high22 = (wide * big * length) ** 2
    top_off = step * (big * length**2 * high11 + 2 * reach * high12 + rho * bend**2 * high22)
    gap_off = step * (rho * bend**2 * big * length**2 + reach**2)
    top = w22 * r11 - 2 * (a + w12) * r12 - rho * bend**2 * r22 - top_off
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        part = np.where(top > 0, top / (gap + gap_off), np.where(gap > gap_off, top / (gap - gap_off), -np.inf))
        total = np.sum(unit**2 * np.diag(inv)) - step * wide**2 * big * len(v) + part
        root = np.where(total > 0, np.abs(a) / np.sqrt(total), np.inf)
    return np.asarray(np.minimum(off.lower_bound(root, unit), LARGEST))


def _softmax_parts(o: Optimum, unit: np.ndarray, diagonal: bool, spectral: bool) -> _Parts:
    """Returns the same parts with blocks P_kl of H⁻².

    J's columns are −H⁻¹((AW)ⱼ ⊗ x̃ + g ⊗ eⱼ), g = ∂ℓ/∂s.
    """
    n, d, (k, p) = len(o.rows), o.dim, o.weights.shape
    square = o.inverse_hessian @ o.inverse_hessian
    blocks = square.reshape(k, p, k, p)
    by_row = np.ascontiguousarray(blocks.transpose(1, 0, 2, 3)).reshape(p, k * k * p)
    pure = np.einsum("kjlj->klj", blocks[:, :d, :, :d]) / unit**2
    trace, diag, norm = np.empty(n), np.empty((n, d)), np.empty(n) if spectral else None
    size = max(1, FLOATS // (k * k * p))
    for i in range(0, n, size):
        b = slice(i, i + size)
        rows, g = o.rows[b], o.slopes[b]
        bent = np.einsum("nkl,lj->nkj", o.curvatures[b], o.weights[:, :d]) / unit  # (AW)D⁻¹
        moved = (rows @ by_row).reshape(len(rows), k, k, p)  # x̃ᵀP_kl
        weight = np.einsum("nklp,np->nkl", moved, rows)
        mixed = np.einsum("nl,nklj->nkj", g, moved[..., :d]) / unit
        diag[b] = np.einsum("nkj,nklj->nj", bent, weight[..., None] * bent[:, None])
        diag[b] += 2 * np.einsum("nkj,nkj->nj", bent, mixed)
        diag[b] += np.einsum("nk,nl,klj->nj", g, g, pure, optimize=True)
        if norm is not None:
            norm[b] = top_by_lanczos(_product(o, np.arange(n)[b], square, unit), len(rows), d)
    np.maximum(diag, 0.0, out=diag)
    trace = diag.sum(axis=1)
    return _Parts(trace, diag if diagonal else None, None if norm is None else np.minimum(norm, trace), None)


def _softmax_inverse_trace(o: Optimum, unit: np.ndarray, records: np.ndarray) -> np.ndarray:
    """Returns Tr((JᵀJ)⁻¹) = Σ 1/sⱼ², s the singular values of J, record by record in chunks.

    J = −(Σₗ gₗ H⁻¹_{·l} + H⁻¹(I ⊗ x̃)AW). Values are raised by the rounding error, so that the floor is no
    larger than the exact one; a singular J gives a huge number.
    """
    d, (k, p), off = o.dim, o.weights.shape, rounding_error(o)
    blocks, least = o.inverse_hessian.reshape(k * p, k, p), float(unit.min())
    slope, bend = off.size
    lost = float(np.linalg.norm(o.inverse_hessian)) * (slope + bend * float(np.linalg.norm(o.weights[:, :d]))) / least
    lost = 4 * (k * p + 8) * UNIT * lost + off.moved / least
    out, size = np.empty(len(records)), max(1, FLOATS // (k * p * d))
    for i in range(0, len(records), size):
        part = records[i : i + size]
        bent = np.einsum("nkl,lj->nkj", o.curvatures[part], o.weights[:, :d])
        jacobian = np.einsum("nl,alj->naj", o.slopes[part], blocks[:, :, :d], optimize=True)
        jacobian += np.einsum("alp,np->nal", blocks, o.rows[part], optimize=True) @ bent
        values = np.linalg.svd(jacobian / unit, compute_uv=False)
        raised = values + k * p * np.finfo(float).eps * values[:, :1] + lost[part, None]
        out[i : i + size] = np.sum(np.maximum(raised / (1 - off.share), 1e-100) ** -2.0, axis=1)
    return out


def _product(o: Optimum, records: np.ndarray, square: np.ndarray, unit: np.ndarray | float = 1.0) -> Product:
    """Returns v ↦ D⁻¹JᵀJD⁻¹v for these records, one v each, by products with H⁻²."""
    d, (k, p) = o.dim, o.weights.shape
    rows, g = o.rows[records], o.slopes[records]
    bent = np.einsum("nkl,lj->nkj", o.curvatures[records].reshape(-1, k, k), o.weights[:, :d])

    def product(v: np.ndarray) -> np.ndarray:
        v = v / unit
        lifted = np.einsum("nkj,nj->nk", bent, v)[:, :, None] * rows[:, None, :]
        lifted[..., :d] += g[:, :, None] * v[:, None, :]
        back = (lifted.reshape(len(v), k * p) @ square).reshape(len(v), k, p)
        out = np.einsum("nkj,nk->nj", bent, np.einsum("nkp,np->nk", back, rows))
        return np.asarray((out + np.einsum("nk,nkj->nj", g, back[..., :d])) / unit)

    return product


def _unclipped(product: Product, unit: np.ndarray, direction: np.ndarray, factor: np.ndarray) -> Product:
    """Returns v ↦ D⁻¹C JᵀJ CD⁻¹v with C = c(I − ẑẑᵀ)."""

    def project(v: np.ndarray) -> np.ndarray:
        return np.asarray(factor * (v - direction * np.einsum("ij,ij->i", v, direction)[:, None]))

    return lambda v: project(product(project(v / unit))) / unit


def _before_clipping(o: Optimum, unit: np.ndarray, short: np.ndarray, factor: np.ndarray, parts: _Parts) -> None:
    """Turns results about clipped rows x into the same about z, x = cz with c = data_norm/‖z‖, in place.

    ∂x/∂z = c(I − ẑẑᵀ), so the diagonal is c²(Iⱼⱼ − 2ẑⱼ(Iẑ)ⱼ + ẑⱼ² ẑᵀIẑ).
    """
    square, trace, diag, norm = o.inverse_hessian @ o.inverse_hessian, parts.trace, parts.diag, parts.norm
    assert diag is not None
    for i in range(0, len(short), BLOCK // 4):
        part, c = short[i : i + BLOCK // 4], factor[i : i + BLOCK // 4, None]
        x = o.rows[part, : o.dim]
        z = x / np.linalg.norm(x, axis=1, keepdims=True)
        product = _product(o, part, square)
        along = product(z)
        total = np.einsum("ij,ij->i", along, z)[:, None]
        diag[part] = np.maximum(c**2 * (diag[part] * unit**2 - 2 * z * along + z**2 * total), 0.0) / unit**2
        trace[part] = diag[part].sum(axis=1)
        if norm is not None:
            norm[part] = top_by_lanczos(_unclipped(product, unit, z, c), len(part), o.dim)
            norm[part] = np.minimum(norm[part], trace[part])
    if parts.inverse is not None:
        parts.inverse[short] = LARGEST
