"""The largest chance of an attack's success against each record, beside that in a world without the record's part.

Every number binds every attacker on every model (docs/theory/any_attacker.md 6.7 to 6.10).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from reconbound.accounting.divergence_queries import (
    WorldDivergences,
    largest_divergence,
    mechanism_success,
)
from reconbound.accounting.feature_ledger import average_floor
from reconbound.bounds import success_estimate, success_from_kl
from reconbound.fisher.worlds import REMOVED
from reconbound.report.folder import Leakage, Run, account_of
from reconbound.report.formats import clean

#: Chances of success in the other world for which the report states the chance in the real one.
BASELINES = (0.001, 0.01, 0.1, 0.5)
#: The one that the first sentence and the tables use.
SHOWN = 0.1
#: Chances that are solved for at a time, of all records at some baselines.
_AT_ONCE = 100_000
#: Shares of the records, by the name of the chance that they do not exceed.
PLACES = {"median": 0.5, "p99": 0.99, "max": 1.0}


@dataclass(frozen=True, eq=False)
class World:
    """Another world of each record, and the largest chances of success against the records beside those in it.

    Attributes:
        name: "removed", a column's name, or "private".
        kind: "removed", "column", "category", "token" or "private".
        reference: the public value in the place of the record's own, in words; "" where the record is left out.
        single: whether it differs in one column or token only.
        measured: the number of measurements of each record, (N,).
        limited: which records' divergences are at upper confidence limits, (N,).
        divergences: D of each record (its upper limit, otherwise the estimate), and what follows from it.
    """

    name: str
    kind: str
    reference: str
    single: bool
    measured: np.ndarray
    limited: np.ndarray
    divergences: WorldDivergences

    @cached_property
    def chances(self) -> np.ndarray:
        """Returns the largest chance of success against each record from SHOWN, (N,)."""
        return np.asarray(self.divergences.max_success(SHOWN).value)

    @cached_property
    def estimated(self) -> np.ndarray:
        """Returns for which records that chance is an estimate, (N,): neither at a limit nor the mechanism's."""
        return ~self.sure(self.chances, self.divergences.mechanism_success(SHOWN))

    def sure(self, chances: np.ndarray, best: float) -> np.ndarray:
        """Returns which chances are no estimates, (N,): those at a confidence limit, and the mechanism's own.

        Args:
            chances: of each record, (N,).
            best: the chance that the mechanism allows.
        """
        proved = (chances >= best) | (self.divergences.nats >= self.divergences.cap)
        return np.asarray(self.limited | proved)

    def row(self, baseline: float = SHOWN) -> dict[str, Any]:
        """Returns what holds for half of the records, for all but 1 in 100, and for all, and on what that rests.

        "basis": "mechanism" where the median record's chance is all that the noise allows, which is proved; "upper
        limits" or "estimates" otherwise. "without_limit": the number of measured records without a confidence limit.
        "estimates": which of the three numbers rest on estimates, because too few records have limits.

        Args:
            baseline: κ, the chance of the same attack in the other world.
        """
        chances = self.chances if baseline == SHOWN else np.asarray(self.divergences.max_success(baseline).value)
        return self._row(baseline, chances, self.divergences.mechanism_success(baseline))

    def rows_at(self, baselines: np.ndarray, best: np.ndarray) -> list[dict[str, Any]]:
        """Returns `row` for each of many baselines, of few records for all of them in one go.

        Args:
            baselines: κ, (K,).
            best: the chance that the mechanism allows from each, (K,).
        """
        nats, found = self.divergences.nats, []
        at_once = max(1, _AT_ONCE // max(1, len(nats)))
        for start in range(0, len(baselines), at_once):
            part = slice(start, start + at_once)
            chances = np.minimum(success_from_kl(baselines[part, None], nats), best[part, None])
            rows = zip(baselines[part].tolist(), chances, best[part].tolist(), strict=True)
            found += [self._row(*row) for row in rows]
        return found

    def _row(self, baseline: float, chances: np.ndarray, best: float) -> dict[str, Any]:
        at, estimates = over_records(chances, self.sure(chances, best), best)
        basis = "upper limits" if self.limited.mean() > 0.5 else "estimates"
        basis = "mechanism" if at["median"] >= best else basis
        without = int(((self.measured > 0) & ~self.limited).sum())
        found = {"world": self.name, "baseline": baseline, **at, "basis": basis}
        return {**found, "without_limit": without, "estimates": estimates}

    def likely(self) -> float:
        """Returns about what the best attack reaches against the most exposed record: an estimate, no bound."""
        most = float(self.divergences.nats.max())
        return min(float(success_estimate(SHOWN, most)), float(self.chances.max()))

    def with_twice_the_noise(self) -> float:
        """Returns the largest chance of success from SHOWN that the mechanism would allow with twice its noise."""
        account = self.divergences.account
        more = replace(account, noise_multiplier=2 * account.noise_multiplier)
        return mechanism_success(more, SHOWN, removed=self.divergences.removed)

    def title(self, noun: str) -> str:
        """Returns what is guessed or reconstructed.

        Args:
            noun: the name of a record.
        """
        return {"removed": f"anything about the {noun}", "private": "everything private together"}.get(
            self.kind, self.name
        )

    def most_exposed(self, count: int = 10) -> list[int]:
        """Returns the records with the largest chances, the largest first; none where all have the same."""
        if float(np.ptp(self.chances)) == 0:
            return []
        return [int(i) for i in np.argsort(-self.divergences.nats, kind="stable")[:count]]


@dataclass(frozen=True)
class Success:
    """The largest chances of success against each record, from its divergences to other worlds.

    Upper confidence limits are used where there are any, estimates elsewhere. A record that was never measured has the
    mechanism's own limit.
    """

    run: Run
    leakage: Leakage

    @cached_property
    def worlds(self) -> list[World]:
        """Returns the worlds that were measured; empty in folders without them."""
        leakage, facts = self.leakage, self.leakage.facts
        if leakage.nats is None:
            return []
        assert leakage.nats_measured is not None
        account, means = account_of(self.run), np.asarray(facts.get("mean_nats") or (), dtype=np.float64).ravel()
        found = []
        for k, row in enumerate(list(facts.get("worlds") or ())[: len(leakage.nats)]):
            name, kind = clean(row["name"], 80), str(row["kind"])
            nats, measured = leakage.nats[k].double().numpy(), leakage.nats_measured[k].numpy()
            nats, limited = np.where(np.isnan(nats), np.inf, np.maximum(nats, 0.0)), np.zeros(nats.shape, bool)
            if leakage.nats_upper is not None:
                upper = leakage.nats_upper[k].double().numpy()
                limited = np.isfinite(upper)
                nats = np.where(limited, upper, nats)
            other = REMOVED if kind == REMOVED else name if name != REMOVED else f"column {name!r}"
            top = largest_divergence(account, removed=kind == REMOVED)
            nats = np.minimum(np.where(measured > 0, nats, np.inf), top)
            mean = max(float(means[k]), 0.0) if k < len(means) else top  # older folders have none
            single, reference = kind in ("column", "category", "token"), clean(row.get("reference", ""), 80)
            divergences = WorldDivergences(account, other, nats, min(mean, top))
            found.append(World(name, kind, reference, single, measured, limited, divergences))
        return found

    @cached_property
    def leading(self) -> World | None:
        """Returns the world of the first sentence: that with the largest chance, among the columns if there are any."""
        candidates = [w for w in self.worlds if w.kind in ("column", "category")] or self.worlds
        return max(
            candidates, key=lambda w: (float(w.chances.max()), float(np.median(w.divergences.nats))), default=None
        )

    def average_floors(self) -> dict[str, tuple[float, float]]:
        """Returns for each private number the ± error of an attacker on the average record, with the model and without.

        It is the largest of van Trees' floor, the floor from the mean divergence to the column's world, and the
        mechanism's own, for a Gaussian prior around what all else predicts. Van Trees is left out for a model with
        caveats: unlike the divergences, Fisher information misses what jumps.
        """
        facts, average = self.leakage.facts, self.leakage.average_diagonal
        variance = np.asarray(facts.get("prior_variance") or (), dtype=np.float64)
        names = [clean(name, 80) for name in facts.get("feature_names") or ()]
        if len(names) != len(variance):
            return {}
        scale = np.broadcast_to(np.asarray(facts.get("scale", 1.0), dtype=np.float64), variance.shape)
        information = np.full(len(variance), np.inf)
        if not self.run.caveats and average is not None and average.numel() == len(variance):
            information = average.flatten().double().numpy()
        own = {world.name: world.divergences for world in self.worlds if world.kind == "column"}
        account, found = account_of(self.run), {}
        for name, width, guess, info in zip(names, scale, variance, information, strict=True):
            if not guess > 0:
                continue
            floors = [average_floor(account, max(info, 0.0), guess).value.item()]
            if name in own:
                floors.append(own[name].mean_error_floor(guess).value.item())
            found[name] = (float(width * np.sqrt(max(floors))), float(width * np.sqrt(guess)))
        return found


def over_records(chances: np.ndarray, sure: np.ndarray, best: float) -> tuple[dict[str, float], list[str]]:
    """Returns the chances that shares of the records do not exceed, by PLACES, and which of them are estimates.

    Args:
        chances: of each record, (N,).
        sure: which of them are no estimates, (N,).
        best: the chance that the mechanism allows.
    """
    found: dict[str, float] = {}
    estimates, so_far = [], 0.0
    for name, share in PLACES.items():
        place = min(len(chances) - 1, max(0, int(np.ceil(share * len(chances))) - 1))
        enough = int(sure.sum()) > place  # of those alone, so many have no larger chance
        so_far = max(so_far, float(np.sort(chances[sure] if enough else chances)[place]))
        found[name] = so_far
        if not enough and so_far < best:
            estimates.append(name)
    return found, estimates
