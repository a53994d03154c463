"""Chances, advantages and errors of every attacker, from divergences to another world and from the mechanism.

Derivations: docs/theory/any_attacker.md 6.8 to 6.13. The ledger and the report ask the same object.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy.special import xlogy

from reconbound._internal.checks import InputError, number, numbers
from reconbound.accounting.spec import Account
from reconbound.bounds import (
    Bound,
    entropy_power_floor,
    membership_from_kl,
    success_from_kl,
    two_point_floor,
    wrong_category_floor,
)
from reconbound.divergences import pair_kl_bound, poisson_kl
from reconbound.fisher.worlds import REMOVED
from reconbound.mechanisms.base import ADD_REMOVE, REPLACE_ONE

#: The attacker of every statement here.
KNOWS = "the attacker knows every other record and all else of this one, and sees every noisy step"
_MEAN = "on average over records whose private parts are independent draws from the prior"
_PUBLIC = "groups are defined by public facts"


@dataclass(frozen=True)
class WorldDivergences:
    """The divergence D of each record's release to another world of it, and what it says of every attacker.

        KL(real ‖ other) ≤ D

    Attributes:
        account: the mechanism and the data's size.
        world: "removed", or the name of a replaced world.
        nats: D of each record, an estimate or an upper confidence limit, (N,); never above `cap`.
        mean_nats: what means are taken of, (N,) or one number: where D is estimated, the estimates before the cap,
            which would cut off errors upwards and leave those downwards.
        notes: on what D rests, in words.
    """

    account: Account
    world: str
    nats: np.ndarray
    mean_nats: np.ndarray | float
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> bool:
        """Returns whether the record is left out in the other world; otherwise its private part is replaced."""
        return self.world == REMOVED

    @property
    def cap(self) -> float:
        """Returns what D cannot exceed, whatever the data: T steps with the largest clipped gradients, in nats."""
        return largest_divergence(self.account, removed=self.removed)

    # --- each record -----------------------------------------------------------------------

    def mechanism_success(self, baseline: float) -> float:
        """Returns the largest chance of success that the mechanism allows, whatever the data.

        Args:
            baseline: κ, the chance in the other world.
        """
        chance = number("baseline", baseline, at_least=0.0, at_most=1.0)
        return mechanism_success(self.account, chance, removed=self.removed)

    def max_success(self, baseline: float) -> Bound:
        """Returns p_max of each record, the largest chance that an attack succeeds, (N,): ledger or mechanism.

            p_max(κ, D) = max{p : kl(p ‖ κ) ≤ D}

        Args:
            baseline: κ, the chance that the same attack succeeds in the other world.
        """
        kappa = number("baseline", baseline, at_least=0.0, at_most=1.0)
        value = np.minimum(success_from_kl(kappa, self.nats), self.mechanism_success(kappa))
        return self._bound("max_success", value, measure="chance", guess=kappa)

    def membership(self) -> Bound:
        """Returns the largest advantage of a test between the two worlds, for each record, (N,)."""
        best = self.account.mechanism().membership_advantage()  # replace-one; removing is no easier to see
        return self._bound("membership", np.minimum(membership_from_kl(self.nats), best), measure="advantage")

    def two_point_floor(self, gap: Any) -> Bound:
        """Returns the floor of each record's squared error in a number that the other world replaces, (N,).

            [ E(ẑ − z)² + E'(ẑ − z')² ]/2 ≥ (Δ²/4) max{ e^{−D}, overlap }      Δ = |z − z'|

        z is the record's own value, z' the public one in its place. No prior is needed: of the two values, every
        attacker errs by this much on average, so by no less on one of them.

        Args:
            gap: Δ of each record, in the number's unit; one number, or one for each record, (N,).
        """
        if self.removed:
            raise InputError("world", "must be one in which a number has another value, not one without the record",
                             self.world)  # fmt: skip
        delta = numbers("gap", gap, at_least=0.0)
        if delta.shape not in ((), self.nats.shape):
            raise InputError("gap", f"must be one number, or {len(self.nats)} of them", delta.shape)
        best = delta**2 / 4 * _overlap(self.account)
        bound = two_point_floor(delta, self.nats)
        value = np.maximum(bound.value, best)
        guess = bound.guess if delta.size and delta.min() == delta.max() else None  # of each record another one
        more: dict[str, Any] = {"measure": "error", "guess": guess, "coordinates": "each"}
        return self._bound("two_point", value, bound.theorem, holds=bound.assumes, **more)

    # --- the average record ----------------------------------------------------------------

    def mean(self, groups: Any = None) -> np.ndarray:
        """Returns the mean of D over the records, (1,), or over those of each group, (groups,), in nats.

        Args:
            groups: the number of each record's group, (N,), from 0; groups must be defined by public facts.
        """
        nats = np.broadcast_to(self.mean_nats, self.nats.shape)
        return np.asarray(np.minimum(group_means(nats, groups, empty=self.cap), self.cap))

    def mean_success(self, baseline: float, groups: Any = None) -> Bound:
        """Returns p_max of the average record: of the mean chance, where κ is the mean chance in the other world.

        Args:
            baseline: κ, averaged over the records.
            groups: as in `mean`.
        """
        value = np.minimum(success_from_kl(baseline, self.mean(groups)), self.mechanism_success(baseline))
        holds = ("on average over the records", *_group_assumptions(groups))
        return self._bound("mean_success", value, holds=holds, measure="chance", guess=float(baseline))

    def mean_error_floor(self, entropy_power: float, *, dim: int = 1, groups: Any = None) -> Bound:
        """Returns the floor of the average record's squared error per number, from the prior's entropy, (groups,).

            mean MSE ≥ N e^{−2 min(mean D, KL)/d}      KL the mechanism's own, whatever the data

        Args:
            entropy_power: N, in squared data units, of the prior given all that the attacker knows otherwise: the
                variance of a Gaussian one; of any prior with Fisher information J at least 1/J.
            dim: d, how many numbers the other world replaces.
            groups: as in `mean`.
        """
        bound = entropy_power_floor(entropy_power, self._information(groups), dim=dim)
        more: dict[str, Any] = {"measure": "error", "guess": None, "coordinates": bound.coordinates}
        holds = (*bound.assumes, *_group_assumptions(groups))
        return self._bound("entropy_power", bound.value, "Shannon, KL", holds=holds, **more)

    def mean_category_success(self, shares: Any, groups: Any = None) -> Bound:
        """Returns the largest chance to name the average record's category, (groups,): Fano, p_max or mechanism.

            1 − Fano(H(π), k, I),   p_max(max π, I),   the mechanism's own at max π;      I = min(mean D, KL)

        Args:
            shares: π, the chances of the k categories given all that the attacker knows otherwise, (k,), or one row for
                each group, (groups, k).
            groups: as in `mean`.
        """
        nats = self._information(groups)
        prior = _checked_shares(shares, len(nats))
        guess = prior.max(1)
        wrong = [_fano(row, amount) for row, amount in zip(prior, nats, strict=True)]
        best = self.account.mechanism().rero(guess)
        value = np.minimum(np.minimum(1 - np.array(wrong), success_from_kl(guess, nats)), best)
        value = np.minimum(np.nextafter(value, 2.0), 1.0)
        holds = (_MEAN, "the prior has these chances", *_group_assumptions(groups))
        same = float(guess[0]) if guess.min() == guess.max() else None
        return self._bound("mean_category_success", value, "Fano and KL", holds=holds, measure="chance", guess=same)

    def _information(self, groups: Any) -> np.ndarray:
        """Returns an upper bound on the mean information about the replaced part, (groups,): ledger or mechanism."""
        return np.asarray(np.minimum(self.mean(groups), self.account.mechanism().kl()))

    # --- statements ------------------------------------------------------------------------

    def _bound(
        self, name: str, value: Any, theorem: str = "KL, data processing", holds: tuple[str, ...] = (), **more: Any
    ) -> Bound:
        """Returns a Bound with what these statements assume."""
        other = "left out" if self.removed else f"with the public value in the place of {self.world}"
        over = f"chances and errors are over {self.account.mechanism().randomness}"
        means = "divergences are means over trainings on the true data"
        assumes = (*holds, *self.notes, f"{self.account.clip} clipping", means, over, KNOWS)
        return Bound(name, np.asarray(value), theorem, "any", f"the record {other}", self.account.sampler,
                     assumes=assumes, notes=self.notes, estimate=True, **more)  # fmt: skip


def group_means(values: np.ndarray, groups: Any, *, empty: float) -> np.ndarray:
    """Returns the mean of the values over all records, (1, ...), or over those of each group, (groups, ...).

    Args:
        values: of each record, (N, ...).
        groups: the number of each record's group, (N,), from 0; None: one group.
        empty: the mean of a group without records.
    """
    count = len(values)
    try:
        at = np.zeros(count, dtype=np.int64) if groups is None else np.asarray(groups)
    except ValueError:  # lists of different lengths
        at = np.empty(0)
    if at.shape != (count,) or at.dtype.kind not in "iu" or (at.size and not 0 <= at.min() <= at.max() < count):
        why = f"must be {count} whole numbers from 0 to {count - 1}, one for each record"
        raise InputError("groups", why, at.shape if at.shape != (count,) else at.tolist()[:8])
    sizes = np.bincount(at)
    total = np.zeros((len(sizes), *values.shape[1:]))
    np.add.at(total, at, values)
    shape = (-1, *(1,) * (values.ndim - 1))
    return np.where(sizes.reshape(shape) > 0, total / np.maximum(sizes, 1).reshape(shape), empty)


def _group_assumptions(groups: Any) -> tuple[str, ...]:
    """Returns what a statement about groups assumes; nothing for all records together."""
    return () if groups is None else (_PUBLIC,)


def _checked_shares(shares: Any, groups: int) -> np.ndarray:
    """Returns the chances of the categories in each group, (groups, k); refuses what are no chances."""
    given = numbers("shares", shares, at_least=0.0)
    if given.ndim not in (1, 2) or given.shape[-1] < 2 or (given.ndim == 2 and len(given) != groups):
        why = f"must be the chances of two or more categories, one row or {groups} of them"
        raise InputError("shares", why, given.shape)
    total = given.sum(-1)
    if not np.allclose(total, 1, rtol=0, atol=1e-6):
        raise InputError("shares", "must add up to 1", total.tolist())
    return np.broadcast_to(given / total[..., None], (groups, given.shape[-1]))


def _fano(prior: np.ndarray, nats: float) -> float:
    """Returns the least chance to name a category with this prior wrongly; categories without a chance do not count."""
    possible = prior[prior > 0]
    if len(possible) < 2:
        return 0.0
    entropy = min(float(-xlogy(possible, possible).sum()) * (1 - 1e-14), float(np.log(len(possible))))
    return float(wrong_category_floor(entropy, len(possible), float(nats)))


def largest_divergence(account: Account, *, removed: bool) -> float:
    """Returns what D cannot exceed, whatever the data: T steps with the largest clipped gradients, in nats.

        removed:   T k_q(m, 0)        replaced:   T times the closed bound on k_q(m, −m)        m = B/σ

    Args:
        account: the mechanism.
        removed: whether the record is left out in the other world; otherwise its private part is replaced.
    """
    mechanism = account.mechanism()  # of shuffled epochs: one step without sampling for each
    m, rate = mechanism.m, mechanism.sample_rate
    if removed:
        return float(mechanism.steps * poisson_kl(m, rate))
    sampler = "poisson" if account.sampler == "poisson" else "any"
    return float(mechanism.steps * pair_kl_bound(m, m, -m * m, rate, sampler=sampler))


@lru_cache(maxsize=256)
def mechanism_success(account: Account, baseline: float, *, removed: bool) -> float:
    """Returns the largest chance of success that the mechanism allows, whatever the data.

    Args:
        account: the mechanism.
        baseline: κ, the chance in the other world.
        removed: as in `largest_divergence`.
    """
    return float(mechanism_successes(account, baseline, removed=removed))


def mechanism_successes(account: Account, baselines: Any, *, removed: bool) -> np.ndarray:
    """Returns `mechanism_success` for an array of chances in the other world, in about the time of one.

    Args:
        account: the mechanism.
        baselines: κ, one number or an array.
        removed: as in `largest_divergence`.
    """
    return np.asarray(account.mechanism().rero(baselines, ADD_REMOVE if removed else REPLACE_ONE))


@lru_cache(maxsize=64)
def _overlap(account: Account) -> float:
    return float(account.mechanism().overlap())
