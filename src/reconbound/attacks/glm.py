"""The GLM attack of Balle et al. 2022 on an output-perturbed linear model, and its error over many releases.

The attacker knows all other records, the label, λ and the released weights W. At the minimiser
∂ℓ/∂s ⊗ x̃ = −(Σ_others ∂ℓ/∂s ⊗ x̃ + nλW) =: v, which it can compute. `method="ratio"`: the constant feature's part of v
is ∂ℓ/∂s itself, so x = v/v₀; this never uses the label. `method="label"`: ∂ℓ/∂s = t must also be the slope at the score
that v/t has, a scalar equation in t that uses the label and no noisy denominator. With softmax ∂ℓ/∂s is a vector, but
v is of rank one: its left factor is the direction of ∂ℓ/∂s. docs/theory/linear.md, section 7.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from reconbound._internal.checks import InputError, choice, number, numbers, whole
from reconbound._internal.formatting import format_number
from reconbound.attacks.form import Guesses
from reconbound.attacks.roots import logistic_slopes, softmax_slopes, squared_slopes
from reconbound.linear.solver import Logistic, Loss, Optimum, Softmax, Squared, targets_of

METHODS, BRANCHES = ("label", "ratio"), ("nearest", "given")
#: Floats in one working array, and the share of the largest errors that the trimmed mean leaves out.
FLOATS, TRIM = 1_000_000, 0.01
#: A slope of zero has no reconstruction; this stands in for it, and the error is huge but finite.
TINY = 1e-50


#: Squared bias over the mean squared error from which a record is counted as biased when a report is printed.
BIASED = 0.1


@dataclass(frozen=True, repr=False)
class AttackReport:
    """Errors of the attack over many releases, one entry per attacked record; squared errors are per feature, /d.

    Attributes:
        records: the attacked records, indices into the training set.
        trials: number of releases.
        method: the attack's method.
        branch: the attack's branch.
        mse: mean of ‖x̂ − x‖²/d. It need not settle with more trials: see `median` and `trimmed`.
        standard_error: of `mse`, from the trials' spread (itself unreliable where the second moment is infinite).
        bias: ‖E x̂ − x‖²/d, estimated without bias (so it may be slightly negative).
        variance: E‖x̂ − E x̂‖²/d, so that mse = variance + bias.
        median: of ‖x̂ − x‖²/d over trials (of an even number the upper median).
        trimmed: trimmed mean of ‖x̂ − x‖²/d over trials; it leaves out the largest 1 %, one trial at least.
        unsolved: share of trials in which the scalar equation had no root and the fold was taken.
        reconstructions: x̂ in the first trials, (records, kept, d); None where not asked for.
    """

    records: np.ndarray
    trials: int
    method: str
    branch: str
    mse: np.ndarray
    standard_error: np.ndarray
    median: np.ndarray
    trimmed: np.ndarray
    unsolved: np.ndarray
    bias: np.ndarray
    variance: np.ndarray
    reconstructions: np.ndarray | None = None

    def __repr__(self) -> str:
        """Formats a few lines: sizes, and errors from the best to the worst record."""
        records = f"{len(self.records):,} record{'s' if len(self.records) != 1 else ''}"
        biased = int(np.sum(self.bias > BIASED * self.mse))
        lines = [
            f"AttackReport of {records}, {self.trials:,} releases (method {self.method!r}, branch {self.branch!r})",
            f"  mean squared error per feature: {_spread(self.mse)}",
            f"  its median over the releases:   {_spread(self.median)}",
            f"  variance:                       {_spread(self.variance)}",
            f"  biased (squared bias over a tenth of the error), so not bound by unbiased floors: {biased:,}",
        ]
        if self.unsolved.any():
            lines.append(f"  releases that no record explains, at the worst record: {self.unsolved.max():.0%}")
        lines.append("  Not private: for the curator")
        return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    if len(values) == 1:
        return format_number(float(values[0]))
    least, middle, most = (format_number(float(v)) for v in (values.min(), np.median(values), values.max()))
    return f"{least} (least), {middle} (median record), {most} (most)"


@dataclass(frozen=True)
class AttackerKnowledge:
    """The attacker's knowledge beside the release: all other records, the missing one's label, the training problem.

    Attributes:
        features: all other records, (n − 1, d).
        y: their targets, as the loss takes them.
        label: the missing record's target.
        loss: the loss of the training problem.
        l2: λ of the training problem.
        intercept: whether the training problem has an intercept.
    """

    features: np.ndarray
    y: np.ndarray
    label: float
    loss: Loss
    l2: float
    intercept: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.loss, Loss):
            raise InputError("loss", "must be Logistic(), Softmax() or Squared()", self.loss)
        number("l2", self.l2, above=0.0)
        x = numbers("features", self.features)
        if x.ndim != 2:
            raise InputError("features", "must have shape (n − 1, d)", f"shape {x.shape}")
        object.__setattr__(self, "features", x)

    @cached_property
    def rows(self) -> np.ndarray:
        """Returns the features with the constant one, (n − 1, p)."""
        return np.hstack([self.features, np.ones((len(self.features), 1))]) if self.intercept else self.features

    @property
    def penalty(self) -> float:
        """Returns nλ."""
        return (len(self.features) + 1) * self.l2

    def check_release(self, weights: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the released weights, (trials, K, p), and the others' targets, in the form of the loss.

        Args:
            weights: released weights, (trials, K, p).
        """
        released, p, several = numbers("weights", weights), self.rows.shape[1], isinstance(self.loss, Softmax)
        if released.ndim != 3 or released.shape[2] != p or (released.shape[1] > 1) != several:
            shape = f"(trials, {'K' if several else 1}, {p})"
            raise InputError("weights", f"must have shape {shape} for {self.loss.name} loss", np.shape(weights))
        classes = released.shape[1]
        targets_of([self.label], 1, self.loss, classes, name="label")
        return released, targets_of(self.y, len(self.rows), self.loss, classes)


def reconstruct(weights: Any, known: AttackerKnowledge, *, method: str = "label", near: Any = None) -> np.ndarray:
    """Rebuilds the missing record from each released model.

    Args:
        weights: released weights, (K, p) or (trials, K, p), the intercept last.
        known: all other records, the label and the training problem.
        method: "ratio" (needs the intercept) or "label".
        near: of two records that explain the release, the one nearer to this is taken; by default the mean of the other
            records of that label (of all others in regression). With three classes or more there is no choice.

    Returns:
        x̂, (d,) or (trials, d).
    """
    single = np.ndim(weights) == 2
    loss, intercept, label, penalty = known.loss, known.intercept, known.label, known.penalty
    _check_method(method, intercept)
    released, targets = known.check_release(np.asarray(weights)[None] if single else weights)
    x, rows, d = known.features, known.rows, known.features.shape[1]
    if method == "label" and _two_classes(loss, released):
        loss, released, penalty = Logistic(), released[:, 1:] - released[:, :1], penalty / 2
    if near is None:
        alike = x if isinstance(loss, Squared) else x[targets == label]
        near = alike.mean(axis=0) if len(alike) else np.zeros(d)
    out = np.empty((len(released), d))
    for i, w in enumerate(released):
        v = -(loss.slope(rows @ w.T, targets).T @ rows + penalty * w)
        if method == "ratio":
            out[i] = v[:, d] @ v[:, :d] / max(v[:, d] @ v[:, d], TINY**2)
            continue
        if isinstance(loss, Softmax):
            out[i] = _beta(v[:, :d] @ v[:, :d].T, v[:, :d] @ w[:, :d].T, w[:, d:].sum(axis=1), label)[0] @ v[:, :d]
            continue
        b, c = np.array([w[0, :d] @ v[0, :d]]), np.array([w[0, d] if intercept else 0.0])
        first, second, _ = _slopes(loss)(b, c, np.array([label]))
        t = np.array([first, second])
        candidates = v[0, :d] / np.where(np.abs(t) < TINY, TINY, t)
        out[i] = candidates[int(np.argmin(np.sum((candidates - near) ** 2, axis=1)))]
    return out[0] if single else out


@dataclass(frozen=True)
class GLMAttack:
    """Rebuilds the missing record from each released model: `reconstruct`, in the form of every attack.

    Attributes:
        method: "label" or "ratio", as in `reconstruct`.
    """

    method: str = "label"

    def __call__(self, released: Any, known: AttackerKnowledge) -> Guesses:
        """Returns an answer for each release.

        Args:
            released: weights, (M, K, p), the intercept last.
            known: all other records, the label and the training problem.
        """
        return Guesses(reconstruct(released, known, method=self.method))


def simulate(
    optimum: Optimum,
    noise_std: float,
    trials: int,
    *,
    method: str = "label",
    branch: str = "nearest",
    records: Any = None,
    keep: int = 0,
    random_state: Any = None,
) -> AttackReport:
    """Attacks every record in many independent releases W* + N(0, σ²I), without forming the reconstructions.

    With r = ∇F at the released weights and g the record's own slope there, v = g ⊗ x̃ − r, so x̂ − x = αx − Σₖβₖrₖ with
    scalars α, β per record and release, and ‖x̂ − x‖² = α²‖x‖² − 2αβ·(Rx) + βᵀRRᵀβ: matrix products over all trials.

    Args:
        optimum: the noiseless optimum, from `minimise` or an estimator's `solve`.
        noise_std: σ.
        trials: number of releases.
        method: "label" or "ratio", as in `reconstruct`.
        branch: which of two records that explain a release is taken: "nearest" to the mean of the others of that label,
            or "given": the attacker knows on which side of the fold the record lies. With three classes or more the
            slope's direction decides it, and both are the same.
        records: indices of the records to attack; all by default.
        keep: the number of first trials whose reconstructions are returned.
        random_state: seed or numpy Generator.
    """
    sigma, count = number("noise_std", noise_std, above=0.0), whole("trials", trials, at_least=2)
    choice("branch", branch, BRANCHES)
    given: Any = optimum
    if not isinstance(given, Optimum):
        must = "must be the optimum without noise: an estimator's solve(X, y), or minimise"
        raise InputError("optimum", must, f"a {type(given).__name__}")
    _check_method(method, optimum.intercept)
    chosen = np.arange(len(optimum.rows)) if records is None else np.asarray(records, dtype=np.int64).ravel()
    if chosen.size == 0 or chosen.min() < 0 or chosen.max() >= len(optimum.rows):
        raise InputError("records", f"must be some indices from 0 to {len(optimum.rows) - 1}", chosen.tolist()[:5])
    keep = min(whole("keep", keep, at_least=0), count)
    rng = np.random.default_rng(random_state)
    k, p = optimum.weights.shape
    released = optimum.weights + sigma * rng.standard_normal((count, k, p))
    if method == "label" and _two_classes(optimum.loss, released):
        optimum, released = _as_logistic(optimum), released[:, 1:] - released[:, :1]
        k = 1
    release = _Release(optimum, released, method, branch)
    d = optimum.dim
    parts = {name: np.empty(len(chosen)) for name in ("mse", "standard_error", "median", "trimmed", "unsolved", "bias")}
    kept = np.empty((len(chosen), keep, d)) if keep else None
    size = max(1, FLOATS // (count * k))
    cut = count - max(1, int(TRIM * count))
    for i in range(0, len(chosen), size):
        b = slice(i, i + size)
        x = optimum.rows[chosen[b], :d]
        alpha, beta, solved, errors = release.errors(chosen[b])
        errors /= d
        parts["mse"][b] = errors.mean(axis=1)
        parts["standard_error"][b] = errors.std(axis=1, ddof=1) / np.sqrt(count)
        parts["unsolved"][b] = 1 - solved.mean(axis=1)
        mean = alpha.mean(axis=1)[:, None] * x - beta.reshape(len(x), count * k) @ release.flat / count
        parts["bias"][b] = np.einsum("ij,ij->i", mean, mean) / d
        if kept is not None:
            moved = np.einsum("itk,tkj->itj", beta[:, :keep], release.gradients[:keep, :, :d])
            kept[b] = x[:, None] + alpha[:, :keep, None] * x[:, None] - moved
        errors.partition((count // 2, cut), axis=1)
        parts["trimmed"][b] = errors[:, :cut].mean(axis=1)
        parts["median"][b] = errors[:, count // 2]
    variance = np.maximum(parts["mse"] - parts["bias"], 0.0) * count / (count - 1)
    parts["bias"] -= variance / count  # of the mean over so many trials
    return AttackReport(chosen, count, method, branch, **parts, variance=variance, reconstructions=kept)


def _check_method(method: str, intercept: bool) -> None:
    choice("method", method, METHODS)
    if method == "ratio" and not intercept:
        must = "must be 'label' without an intercept: there is no constant feature to divide by"
        raise InputError("method", must, method)


def _two_classes(loss: Loss, weights: np.ndarray) -> bool:
    return isinstance(loss, Softmax) and weights.shape[-2] == 2


def _as_logistic(o: Optimum) -> Optimum:
    """Converts softmax with two classes to logistic in θ = W₁ − W₀.

    The penalty is halved: ‖W‖² = ‖θ‖²/2 at the minimiser.
    """
    y, weights = o.y.astype(np.float64), o.weights[1:] - o.weights[:1]
    return Optimum(Logistic(), o.rows, y, o.l2 / 2, o.intercept, weights, o.gradient_norm)


def _beta(gram: np.ndarray, on_weights: np.ndarray, intercepts: np.ndarray, y: Any) -> tuple[np.ndarray, np.ndarray]:
    """Solves for softmax: returns the weights β with x̂ = Σₖ βₖvₖ, and whether the scalar equation had a root.

    v = gxᵀ up to noise, and g adds up to zero, so its direction u is the first left singular vector of the centred v;
    then x̂ = vᵀu/t, where t must be the length of the slope at x̂'s own score, u·g(Wx̂, y) = t.

    Args:
        gram: vₖ·vₗ, (…, K, K).
        on_weights: vₖ·Wₗ, features only, (…, K, K).
        intercepts: (…, K).
        y: labels, (…).
    """
    lead, k = gram.shape[:-2], gram.shape[-1]
    centred = gram - gram.mean(axis=-1, keepdims=True)
    centred -= centred.mean(axis=-2, keepdims=True)
    u = np.linalg.eigh(centred)[1][..., -1].reshape(-1, k)
    labels = np.broadcast_to(np.asarray(y, dtype=np.int64), lead).ravel()
    u *= np.where(u[np.arange(len(u)), labels] > 0, -1.0, 1.0)[:, None]  # the label's own slope is negative
    z = np.einsum("ik,ikl->il", u, on_weights.reshape(-1, k, k))
    t, solved = softmax_slopes(z, np.broadcast_to(intercepts, (*lead, k)).reshape(-1, k), u, labels)
    return (u / t[:, None]).reshape(*lead, k), solved.reshape(lead)


def _slopes(loss: Loss) -> Any:
    return squared_slopes if isinstance(loss, Squared) else logistic_slopes


class _Release:
    """Many released models and what the attacker derives from each, shared by all records."""

    def __init__(self, optimum: Optimum, released: np.ndarray, method: str, branch: str) -> None:
        self.optimum, self.method, self.branch = optimum, method, branch
        self.count, k, p = released.shape
        self.columns = np.ascontiguousarray(released.reshape(self.count * k, p).T)  # (p, trials·K)
        self.gradients = self._gradients(released)
        d = optimum.dim
        self.flat = np.ascontiguousarray(self.gradients[:, :, :d]).reshape(self.count * k, d)
        self.gram = np.einsum("tkj,tlj->tkl", self.gradients[:, :, :d], self.gradients[:, :, :d])
        self.along = np.einsum("tkj,tlj->tkl", self.gradients[:, :, :d], released[:, :, :d])  # rₖ·Wₗ
        self.intercepts = released[:, :, d] if optimum.intercept else np.zeros((self.count, k))
        x = optimum.rows[:, :d]
        self.squares = np.einsum("ij,ij->i", x, x)
        alike = np.zeros(len(x)) if isinstance(optimum.loss, Squared) else optimum.y
        labels, self.kind = np.unique(alike, return_inverse=True)
        self.members = np.bincount(self.kind)
        self.means = np.array([x[alike == label].mean(axis=0) for label in labels])
        self.means_on_r = self.means @ self.flat.T  # (labels, trials·K)

    def _gradients(self, released: np.ndarray) -> np.ndarray:
        """Computes ∇F at every release, (trials, K, p): two matrix products."""
        o = self.optimum
        k, p = o.weights.shape
        out = o.penalty * released
        per = max(1, FLOATS // (1024 * k))
        for t in range(0, self.count, per):
            part = slice(t, min(t + per, self.count))
            wide = self.columns[:, part.start * k : part.stop * k]
            total = np.zeros((wide.shape[1], p))
            for i in range(0, len(o.rows), 1024):
                rows = o.rows[i : i + 1024]
                total += self._slopes_at(slice(i, i + 1024), rows @ wide).T @ rows
            out[part] += total.reshape(-1, k, p)
        return np.asarray(out)

    def _slopes_at(self, records: Any, scores: np.ndarray) -> np.ndarray:
        """Returns the records' slopes at these scores, (records, trials·K)."""
        o, k = self.optimum, self.optimum.weights.shape[0]
        y, n = o.y[records], len(scores)
        if k == 1:
            return o.loss.slope(scores, y)
        repeated = np.repeat(y, scores.shape[1] // k)
        return o.loss.slope(scores.reshape(-1, k), repeated).reshape(n, -1)

    def errors(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns α (B, T), β (B, T, K), whether solved (B, T), ‖x̂ − x‖² (B, T) of these records."""
        o, n, k = self.optimum, len(records), self.optimum.weights.shape[0]
        x = o.rows[records, : o.dim]
        scores = o.rows[records] @ self.columns
        g = self._slopes_at(records, scores).reshape(n, self.count, k)
        towards = (x @ self.flat.T).reshape(n, self.count, k)  # Rx
        solved = np.ones((n, self.count), dtype=bool)
        if self.method == "ratio":
            part = g - self.gradients[:, :, o.dim]
            beta = part / np.maximum(np.einsum("itk,itk->it", part, part), TINY**2)[:, :, None]
            alpha = np.einsum("itk,itk->it", beta, g) - 1 if k > 1 else (self.gradients[:, :, o.dim] * beta)[:, :, 0]
        elif k > 1:
            beta, solved = self._softmax_label(records, scores, g, towards)
            alpha = np.einsum("itk,itk->it", beta, g) - 1
        else:
            t, solved = self._label(records, scores, g[:, :, 0], towards[:, :, 0])
            alpha, beta = (g[:, :, 0] - t) / t, (1 / t)[:, :, None]
        norm = self.squares[records][:, None]
        if k == 1:
            one, near = beta[:, :, 0], towards[:, :, 0]
            square = alpha * (alpha * norm - 2 * one * near) + one * one * self.gram[:, 0, 0]
        else:
            square = alpha * (alpha * norm - 2 * np.einsum("itk,itk->it", beta, towards))
            square += np.einsum("itk,tkl,itl->it", beta, self.gram, beta, optimize=True)
        return alpha, beta, solved, np.maximum(square, 0.0)

    def _softmax_label(
        self, records: np.ndarray, scores: np.ndarray, g: np.ndarray, towards: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns β (B, T, K) of the label-using attacker, and whether its equation had a root; v = gxᵀ − r."""
        own = scores.reshape(g.shape) - self.intercepts  # Wx, features only
        gram = g[..., :, None] * (self.squares[records][:, None, None] * g - towards)[..., None, :]
        gram += self.gram - towards[..., :, None] * g[..., None, :]
        on_weights = g[..., :, None] * own[..., None, :] - self.along
        return _beta(gram, on_weights, self.intercepts, self.optimum.y[records][:, None])

    def _label(
        self, records: np.ndarray, scores: np.ndarray, g: np.ndarray, towards: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the slope t that the label-using attacker finds, and whether its equation had a root."""
        o, intercepts = self.optimum, self.intercepts[:, 0]
        b = g * (scores - intercepts) - self.along[:, 0, 0]  # θ·v, features only
        y = np.broadcast_to(o.y[records][:, None], b.shape)
        first, second, solved = _slopes(o.loss)(b, np.broadcast_to(intercepts, b.shape), y)
        if self.branch == "given":
            truth = o.slopes[records, 0][:, None]
            at = o.scores[records, 0] - (o.weights[0, o.dim] if o.intercept else 0.0)
            bend = o.slopes[records, 0] + o.curvatures[records] * at  # d/ds of (s − c)ℓ': its sign is the side
            if isinstance(o.loss, Squared):
                middle = -(o.y[records][:, None] - intercepts) / 2  # t at the fold
                pick_first = (first > middle) == (truth > middle)
            else:
                pick_first = np.broadcast_to(np.where(o.y[records] > 0, -1, 1)[:, None] * bend[:, None] > 0, b.shape)
        else:
            own, members = self.squares[records], self.members[self.kind[records]]
            others = np.maximum(members - 1, 1)
            mean = np.einsum("ij,ij->i", self.means[self.kind[records]], o.rows[records, : o.dim])
            on_x = ((members * mean - own) / others)[:, None]
            on_r = (members[:, None] * self.means_on_r[self.kind[records]] - towards) / others[:, None]
            middle_v = g * on_x - on_r  # v · (mean of the others of that label)
            square_v = g * (g * own[:, None] - 2 * towards) + self.gram[:, 0, 0]
            inverse = [1 / np.where(np.abs(t) < TINY, TINY, t) for t in (first, second)]
            far = [(square_v * u - 2 * middle_v) * u for u in inverse]  # ‖v/t − mean‖² − ‖mean‖²
            pick_first = far[0] <= far[1]
        t = np.where(pick_first, first, second)
        return np.where(np.abs(t) < TINY, TINY, t), solved
