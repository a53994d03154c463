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
    mechanism_successes,
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


@dataclass(frozen=True)
class World:
    """Another world of each record.

    Attributes:
        row: of the leakage file's tensors.
        name: "removed", a column's name, or "private".
        kind: "removed", "column", "category", "token" or "private".
        reference: the public value in the place of the record's own, in words; "" where the record is left out.
    """

    row: int
    name: str
    kind: str
    reference: str

    @property
    def single(self) -> bool:
        """Returns whether the world differs in one column or token only."""
        return self.kind in ("column", "category", "token")


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
        if self.leakage.nats is None:
            return []
        rows = list(self.leakage.facts.get("worlds") or ())[: len(self.leakage.nats)]
        return [
            World(k, clean(row["name"], 80), str(row["kind"]), clean(row.get("reference", ""), 80))
            for k, row in enumerate(rows)
        ]

    @cached_property
    def leading(self) -> World | None:
        """Returns the world of the first sentence: that with the largest chance, among the columns if there are any."""
        single = [w for w in self.worlds if w.kind in ("column", "category")]
        order = single or self.worlds
        return max(order, key=lambda w: (float(self.chances(w).max()), float(np.median(self.nats(w)))), default=None)

    def limited(self, world: World) -> bool:
        """Returns whether most chances in a world are at confidence limits."""
        upper = self.leakage.nats_upper
        return upper is not None and float(upper[world.row].isfinite().double().mean()) > 0.5

    def unlimited(self, world: World) -> int:
        """Returns the number of measured records in a world whose chances are estimates, without a confidence limit."""
        upper = self.leakage.nats_upper
        known = self.measured(world) > 0
        return int((known if upper is None else known & ~upper[world.row].isfinite().numpy()).sum())

    def measured(self, world: World) -> np.ndarray:
        """Returns the number of measurements of each record, (N,)."""
        assert self.leakage.nats_measured is not None
        return np.asarray(self.leakage.nats_measured[world.row].numpy())

    @property
    def unknown(self) -> int:
        """Returns the number of records that were never measured in the leading world."""
        return 0 if self.leading is None else int((self.measured(self.leading) == 0).sum())

    def towards(self, world: World) -> WorldDivergences:
        """Returns the divergences to a world as they are shown first, and the queries of them."""
        assert self.leakage.nats is not None
        found = self.leakage.nats[world.row].double().numpy()
        found = np.where(np.isnan(found), np.inf, np.maximum(found, 0.0))
        if self.leakage.nats_upper is not None:
            upper = self.leakage.nats_upper[world.row].double().numpy()
            found = np.where(np.isfinite(upper), upper, found)
        removed = world.kind == REMOVED
        name = REMOVED if removed else world.name if world.name != REMOVED else f"column {world.name!r}"
        top = largest_divergence(self._account, removed=removed)
        nats = np.minimum(np.where(self.measured(world) > 0, found, np.inf), top)
        means = np.asarray(self.leakage.facts.get("mean_nats") or (), dtype=np.float64).ravel()
        mean = max(float(means[world.row]), 0.0) if world.row < len(means) else top  # older folders have none
        return WorldDivergences(self._account, name, nats, min(mean, top))

    def nats(self, world: World) -> np.ndarray:
        """Returns the divergence D of each record as it is shown first, (N,), never above the mechanism's own limit."""
        return self.towards(world).nats

    @cached_property
    def _account(self) -> Any:
        return account_of(self.run)

    def chances(self, world: World, baseline: float = SHOWN) -> np.ndarray:
        """Returns the largest chance of success against each record, (N,).

        Args:
            world: the other world.
            baseline: κ, the chance of the same attack there.
        """
        if baseline != SHOWN:
            return np.asarray(self.towards(world).max_success(baseline).value)
        if world not in self._shown:  # pages ask several times
            self._shown[world] = np.asarray(self.towards(world).max_success(baseline).value)
        return self._shown[world]

    @cached_property
    def _shown(self) -> dict[World, np.ndarray]:
        return {}

    def mechanism_chance(self, world: World, baseline: float = SHOWN) -> float:
        """Returns the largest chance of success that the mechanism allows, whatever the data.

        Args:
            world: the other world.
            baseline: κ.
        """
        return self.towards(world).mechanism_success(baseline)

    def mechanism_chances(self, world: World, baselines: np.ndarray) -> np.ndarray:
        """Returns `mechanism_chance` for each of many baselines, (K,), in one go.

        Args:
            world: the other world.
            baselines: κ, (K,).
        """
        return mechanism_successes(self._account, baselines, removed=self.towards(world).removed)

    def with_twice_the_noise(self, world: World, baseline: float = SHOWN) -> float:
        """Returns the largest chance of success that the mechanism would allow with twice its noise.

        Args:
            world: the other world.
            baseline: κ.
        """
        more = replace(self._account, noise_multiplier=2 * self._account.noise_multiplier)
        return mechanism_success(more, baseline, removed=world.kind == "removed")

    def estimated(self, world: World, baseline: float = SHOWN) -> np.ndarray:
        """Returns for which records the chance is an estimate, (N,): neither at a confidence limit nor the mechanism's.

        Args:
            world: the other world.
            baseline: κ.
        """
        return self._estimated(world, self.chances(world, baseline), self.mechanism_chance(world, baseline))

    def _estimated(self, world: World, chances: np.ndarray, best: float) -> np.ndarray:
        upper, towards = self.leakage.nats_upper, self.towards(world)
        limited = np.zeros(self.measured(world).shape, bool) if upper is None else upper[world.row].isfinite().numpy()
        proved = (chances >= best) | (towards.nats >= towards.cap)
        return np.asarray(~limited & ~proved)

    def row(self, world: World, baseline: float = SHOWN) -> dict[str, Any]:
        """Returns what holds for half of the records, for all but 1 in 100, and for all, and on what that rests.

        "basis": "mechanism" where half of the records have no lower limit than the noise's own, which is proved; "upper
        limits" or "estimates" otherwise. "estimates": which of the three numbers rest on estimates, because too few
        records have limits.

        Args:
            world: the other world.
            baseline: κ.
        """
        return self._row(world, baseline, self.chances(world, baseline), self.mechanism_chance(world, baseline))

    def rows_at(self, world: World, baselines: np.ndarray) -> list[dict[str, Any]]:
        """Returns `row` for each of many baselines, of few records for all of them in one go.

        Args:
            world: the other world.
            baselines: κ, (K,).
        """
        best, nats, found = self.mechanism_chances(world, baselines), self.nats(world), []
        at_once = max(1, _AT_ONCE // max(1, len(nats)))
        for start in range(0, len(baselines), at_once):
            part = slice(start, start + at_once)
            chances = np.minimum(success_from_kl(baselines[part, None], nats), best[part, None])
            rows = zip(baselines[part].tolist(), chances, best[part].tolist(), strict=True)
            found += [self._row(world, *row) for row in rows]
        return found

    def _row(self, world: World, baseline: float, chances: np.ndarray, best: float) -> dict[str, Any]:
        at, estimates = over_records(chances, ~self._estimated(world, chances, best), best)
        basis = "upper limits" if self.limited(world) else "estimates"
        basis = "mechanism" if at["median"] >= best else basis
        found = {"world": world.name, "baseline": baseline, **at, "basis": basis}
        return {**found, "without_limit": self.unlimited(world), "estimates": estimates}

    def rows(self) -> list[dict[str, Any]]:
        """Returns a row for each world and baseline, for JSON."""
        return [self.row(world, baseline) for world in self.worlds for baseline in BASELINES]

    def likely(self, world: World, baseline: float = SHOWN) -> float:
        """Returns about what the best attack reaches against the most exposed record: an estimate, no bound."""
        most = float(self.nats(world).max())
        return min(float(success_estimate(baseline, most)), float(self.chances(world, baseline).max()))

    def title(self, world: World, noun: str) -> str:
        """Returns what is guessed or reconstructed in a row of the table.

        Args:
            world: of the row.
            noun: the name of a record.
        """
        return {"removed": f"anything about the {noun}", "private": "everything private together"}.get(
            world.kind, world.name
        )

    def above(self, world: World, chance: float) -> int:
        """Returns the number of records whose largest chance of success exceeds this chance."""
        return int((self.chances(world) > chance).sum())

    def most_exposed(self, world: World, count: int = 10) -> list[int]:
        """Returns the records with the largest chances, the largest first; none where all have the same."""
        if float(np.ptp(self.chances(world))) == 0:
            return []
        return [int(i) for i in np.argsort(-self.nats(world), kind="stable")[:count]]

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
        own = {world.name: self.towards(world) for world in self.worlds if world.kind == "column"}
        found = {}
        for name, width, guess, info in zip(names, scale, variance, information, strict=True):
            if not guess > 0:
                continue
            floors = [average_floor(self._account, max(info, 0.0), guess).value.item()]
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
        enough = int(sure.sum()) > place  # the records whose chance is no estimate are such a share by themselves
        so_far = max(so_far, float(np.sort(chances[sure] if enough else chances)[place]))
        found[name] = so_far
        if not enough and so_far < best:
            estimates.append(name)
    return found, estimates
