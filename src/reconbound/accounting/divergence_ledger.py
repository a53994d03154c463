"""The divergence ledger: how far the release of a training is from that in other worlds of each record, in nats.

    KL(real ‖ other) ≤ D_i = Σ_t E k(a_t, b_t)      a, b the record's clipped gradients in both worlds over the noise

It binds every attacker on every model; `towards` returns what it says. Derivations: docs/theory/any_attacker.md 6.7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, whole
from reconbound._internal.formatting import format_percent
from reconbound.accounting import compact, summaries
from reconbound.accounting.compact import add_at, parts_of, rounded_up, send
from reconbound.accounting.confidence import Estimates, Spread, median_of, spread_of, upper_limit
from reconbound.accounting.divergence_queries import WorldDivergences, largest_divergence
from reconbound.accounting.ledger import Ledger, add_variance, covered_steps, covers_all
from reconbound.accounting.spec import Account, check_clipped, check_mechanism
from reconbound.divergences import poisson_kl, poisson_pair_kl
from reconbound.fisher.worlds import REMOVED, StepDistances

#: Batches whose norms are added together.
_BATCHES = 32
#: Tensors that hold no negative number.
_NOT_NEGATIVE = ("nats", "nats_mean", "kept_nats", "nats_times", "nats_times_all")


class DivergenceLedger(Ledger):
    """The divergence of every record's release to other worlds, over the steps of a run and over runs.

    Args:
        account: the mechanism and the data's size.
        worlds: names of the replaced worlds. "removed" is kept before them where batches are Poisson samples. None: no
            world is kept.
        device: where it lives.
        keep_at: step counts at which the sums of each single run are kept, for `at`.

    Attributes:
        worlds: the names of all worlds that are kept.
        from_batches: whether "removed" is measured on all batches by `add_norms`, and not with the replaced worlds.
    """

    def __init__(
        self, account: Account, worlds: Sequence[str] | None, device: torch.device, keep_at: Sequence[int] = ()
    ) -> None:
        super().__init__(device, keep_at)
        self.account, self.from_batches, self._by_information = account, False, False
        self._pending: list[tuple[Tensor, Tensor, float]] = []  # records, clipped norms and weight of some batches
        if not (worlds is None or isinstance(worlds, list | tuple)) or not all(
            isinstance(w, str) for w in worlds or ()
        ):
            raise InputError("worlds", "must be a list of names, or None", worlds)
        if worlds is not None and (REMOVED in worlds or len({*worlds}) < len(worlds)):
            why = f"must name each world once, and not {REMOVED!r}, which is kept without being asked for"
            raise InputError("worlds", why, worlds)
        removed = (REMOVED,) if account.sampler == "poisson" else ()
        self.worlds = () if worlds is None else (*removed, *worlds)
        self.reach = account.mechanism().m  # the largest clipped norm over the noise
        if self.worlds:
            shape = (len(self.worlds), account.records)
            kind, count = compact.kinds_for(account.records)
            self.keep("nats", *shape, dtype=kind, error=True)
            self.state["nats_last"] = compact.zeros(shape, kind, device)
            for name in ("nats_times", "nats_times_all"):
                self.state[name] = compact.zeros(shape, count, device)
            for name in ("nats_sampled", "nats_partial"):
                self.state[name] = torch.zeros(len(self.worlds), dtype=torch.bool, device=device)
            self._counts, self._of_run = ("nats_times",), ("nats_last",)
            # in each world: the sum of the present run's weights, and the largest of all runs
            self.state["nats_weights"] = torch.zeros((2, len(self.worlds)), dtype=torch.float64, device=device)
            self.keep_runs("nats", "nats_times")

    def index(self, world: str) -> int:
        """Returns the row of a world; refuses one that is not kept."""
        if choice("world", world, (*self.worlds, REMOVED)) not in self.worlds:
            why = f"cannot be {REMOVED!r}: leaving a record out is accounted for with Poisson batches only"
            raise InputError("world", why, f"{self.account.sampler} batches")
        return self.worlds.index(world)

    # --- writing -------------------------------------------------------------------------

    def check_found(self, index: Tensor, found: StepDistances) -> None:
        """Refuses distances of another mechanism, without a world of this ledger, or that no clip lets through."""
        check_mechanism(self.account, found)
        for name in self.worlds:
            if name != REMOVED and name not in found.squared_distance:
                why = f"must have the world {name!r}, which this ledger keeps"
                raise InputError("found", why, list(found.squared_distance))
        for norms in (found.clipped_norm, *found.other_norm.values()):
            check_clipped("found", norms, self.account)
        for name, squares in found.squared_distance.items():
            if not bool((squares.isfinite() & (squares >= 0)).all()):
                raise InputError("found", f"must have finite distances to the world {name!r}", squares.tolist()[:5])

    def add_information(self, index: Tensor, clipped_norm: Tensor, weight: float, stratified: bool) -> None:
        """Adds to "removed" what measured information has beside it, where that is not added by `add_norms`."""
        if REMOVED in self.worlds and not self.from_batches:
            self._by_information = True
            self._add_norms(index, clipped_norm, weight, stratified)

    def add_norms(self, index: Tensor, clipped_norm: Tensor, weight: float, stratified: bool = False) -> None:
        """Adds to "removed" what a step gives for records with these clipped norms.

        Args:
            index: the records, (B,).
            clipped_norm: ‖g̃‖ of each, (B,).
            weight: q over the chance of a record to be measured at this step; 1 for those of the batch.
            stratified: each record is measured exactly once in each block of steps.
        """
        self.index(REMOVED)  # refused here, not when the batch is settled
        if self._by_information:
            why = f"must not be added beside information, which counts for {REMOVED!r} itself"
            raise InputError("clipped_norm", why, f"{len(index)} norms")
        self.from_batches = True
        if stratified:
            self._add_norms(index, clipped_norm, weight, stratified)
            return
        self._pending.append((send(index.to(torch.int64), self.device), clipped_norm.detach().to(self.device), weight))
        if len(self._pending) >= _BATCHES:
            self.settle()

    def settle(self) -> None:
        """Adds what is pending of `add_norms`: many batches at a time cost little more than one."""
        pending, self._pending = self._pending, []
        for weight, some in groupby(pending, key=itemgetter(2)):
            indices, norms, _ = zip(*some, strict=True)
            self._add_norms(torch.cat(indices), torch.cat(norms), weight, False)

    def _add_norms(self, index: Tensor, clipped_norm: Tensor, weight: float, stratified: bool) -> None:
        norm = clipped_norm.to(self.device, torch.float64) / self.account.noise
        nats = removed_nats(norm, self.reach, self.account.sample_rate)
        self._add(self.index(REMOVED), index, nats, weight, stratified)

    def add(self, index: Tensor, found: StepDistances, weight: float, stratified: bool) -> None:
        """Adds what a step gives for these records in every replaced world.

        Args:
            index: the records, (B,).
            found: their clipped gradients' norms and distances.
            weight: as in `add_norms`.
            stratified: as in `add_norms`.
        """
        for name in self.worlds:
            if name != REMOVED:
                norms = (found.clipped_norm, found.other_norm[name], found.squared_distance[name])
                nats = self._pair_nats(*(value.detach().to(self.device, torch.float64) for value in norms))
                self._add(self.index(name), index, nats, weight, stratified)

    def _pair_nats(self, norm: Tensor, other: Tensor, squared_distance: Tensor) -> Tensor:
        """Returns k(a, b)/q: the divergence of a step for a record, over its chance to take part.

        poisson: k_q(a, b)/q        other samplers: ‖a − b‖²/2
        """
        a, b = ((n / self.account.noise).clamp(max=self.reach) for n in (norm, other))
        d2 = squared_distance / self.account.noise**2
        if self.account.sampler != "poisson":
            return d2 / 2
        rate, inner = self.account.sample_rate, (a.square() + b.square() - d2) / 2
        nats: Tensor = poisson_pair_kl(a, b, inner, rate, squared_distance=d2, largest_norm=self.reach)
        return nats / rate

    def _add(self, k: int, index: Tensor, nats: Tensor, weight: float, stratified: bool) -> None:
        index = index.to(self.device, torch.int64)
        entry, chance = weight * nats, min(1.0, self.account.sample_rate / weight)
        if self.account.sampler == "shuffle":
            chance = min(1.0, 1 / weight)  # of a step in which it takes part
        add_at(self.state["nats"][k], index, entry)
        self.state["nats_weights"][0, k] += weight * len(index)
        self.state["nats_weights"][1, k].clamp_(min=weight)
        self.state["nats_sampled"][k] |= chance < 1
        if self.runs == 0:
            state = self.state
            so_far = (state["nats_error"][k], state["nats_last"][k], state["nats_times"][k])
            add_variance(*so_far, index, entry, torch.zeros_like(entry), chance, stratified)
        times = self.state["nats_times"][k]
        times.index_add_(0, index, torch.ones_like(index, dtype=times.dtype))

    # --- runs ----------------------------------------------------------------------------

    def incomplete(self) -> list[str]:
        """Returns the worlds to which the present run was not measured over all of its steps, or unlike earlier runs.

        A world that no run has measured is not among them: its divergences are the mechanism's.
        """
        self.settle()
        if not self.worlds:
            return []
        before = self.state["nats_times_all"].any(1).tolist()
        found = []
        for world, total, largest, known in zip(self.worlds, *self.state["nats_weights"].tolist(), before, strict=True):
            sums = [total, *([] if known or self.runs == 0 else [0.0])]  # of this run, and of earlier ones without any
            if largest > 0 and not all(covers_all(self.account, covered_steps(self.account, x), largest) for x in sums):
                found.append(world)
        return found

    def keep_step(self, step: int) -> None:
        """Keeps the sums of the present run after this many steps, where they are asked for."""
        if step in self.keep_at:
            self.settle()
        super().keep_step(step)

    def finish_run(self) -> None:
        """Adds the run to the means, and starts an empty one."""
        for world in self.incomplete():  # settles
            self.state["nats_partial"][self.index(world)] = True
        super().finish_run()

    def clear_run(self) -> None:
        """Empties everything of the present run."""
        self._pending = []
        super().clear_run()
        if self.worlds:
            self.state["nats_weights"][0].zero_()

    def check_content(self, name: str, values: Tensor) -> None:
        """Refuses divergences and counts that are no numbers, infinite or negative."""
        super().check_content(name, values)
        if name in _NOT_NEGATIVE and not bool((values.isfinite() & (values >= 0)).all()):
            raise InputError(name, "must be finite and not negative", float(values.min()))

    def restore(self, tensors: Mapping[str, Tensor], runs: int, *, copy: bool = True) -> None:
        """Restores the tensors and the number of finished runs; what was pending is dropped."""
        self._pending = []
        super().restore(tensors, runs, copy=copy)

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another such ledger."""
        self.settle()
        if self.worlds:
            before, n = self.state["nats_times_all"].any(1), self.account.records
            theirs = torch.zeros_like(before)
            for k, row in enumerate(self.state["nats_times_all"]):
                for part in parts_of(n):
                    times = other.part("nats_times_all", slice(k * n + part.start, k * n + part.stop)).to(self.device)
                    theirs[k] |= times.any()
                    row[part] += times
            if self.runs > 0:  # the runs of a ledger without measurements of a world count as 0
                self.state["nats_partial"] |= before != theirs
            for name in ("nats_sampled", "nats_partial"):
                self.state[name] |= other.state[name].to(self.device)
            largest = self.state["nats_weights"][1]
            largest.copy_(torch.maximum(largest, other.state["nats_weights"][1].to(self.device)))
        super().merge(other)

    @classmethod
    def of_runs(
        cls, account: Account, worlds: Sequence[str], nats: Tensor, times: Tensor, sampled: bool | Tensor = True
    ) -> DivergenceLedger:
        """Returns the ledger of finished runs whose sums are known.

        Args:
            account: of one run.
            worlds: as in the ledger's `worlds`: "removed" comes first where batches are Poisson samples.
            nats: the sums of each run, (R, worlds, N).
            times: the number of measurements of each record in each run, (R, worlds, N).
            sampled: whether records were measured at only some steps; in each world, (worlds,), or in all.
        """
        ledger = cls(account, [name for name in worlds if name != REMOVED], torch.device("cpu"))
        for own, number_of in zip(nats, times, strict=True):
            ledger.state["nats"].copy_(rounded_up(own.double(), ledger.state["nats"].dtype))
            ledger.state["nats_times"].copy_(number_of)
            if ledger.runs == 0:
                ledger.state["nats_error"].fill_(torch.inf)  # the precision of a single run is not known
            ledger.finish_run()
        ledger.state["nats_sampled"].copy_(torch.as_tensor(sampled))
        return ledger

    # --- reading -------------------------------------------------------------------------

    def at(self, step: int) -> DivergenceLedger:
        """Returns the ledger of the finished runs as if each had ended after this many steps.

        Args:
            step: one of `keep_at`.

        Guarantee: that of a ledger of such runs, if every record was measured for all of these steps: in each batch,
            or in blocks of which one ends here, as PrivateSGD plans them.
        """
        if not self.worlds or not len(self.kept_at("nats", step)) >= self.runs > 0:
            why = "must be kept in a finished run: keep_step must be called after each step, and there must be a world"
            raise InputError("step", why, step)
        nats, times = (self.kept_at(name, step)[: self.runs] for name in ("nats", "nats_times"))
        account, sampled = replace(self.account, steps=step), self.state["nats_sampled"].cpu()
        found = self.of_runs(account, self.worlds, nats, times, sampled)
        found.state["nats_partial"].copy_(self.state["nats_partial"])
        return found

    def cap(self, world: str) -> float:
        """Returns what D cannot exceed, whatever the data: T steps with the largest clipped gradients, in nats."""
        self.index(world)
        return largest_divergence(self.account, removed=world == REMOVED)

    def times(self, world: str) -> Tensor:
        """Returns the number of measurements per record over all runs, (N,)."""
        self.settle()
        k = self.index(world)
        return self.state["nats_times_all"][k] + self.state["nats_times"][k]

    def measurements(self, world: str) -> Tensor:
        """Returns the number of measurements per record in finished runs, or in the first run so far, (N,)."""
        self.settle()
        return self.state["nats_times_all" if self.runs else "nats_times"][self.index(world)]

    def estimates(self, world: str, at: Any = slice(None)) -> Estimates:
        """Returns means, errors and numbers of measurements of D, without the cap.

        Measurements of a run in progress count only while it is the first: the means are those of finished runs.

        Args:
            world: one of `worlds`.
            at: which records.
        """
        k, times = self.index(world), self.measurements(world)[at].clone()
        error = torch.where(times > 0, self.standard_error("nats", (k, at)), torch.inf)
        mean = self.mean("nats")[k, at].double().clamp(min=0)
        return Estimates(mean, error, times, self.runs, bool(self.state["nats_sampled"][k]))

    def spread(self, world: str) -> Spread:
        """Returns what the upper limits of all records share.

        Args:
            world: one of `worlds`.
        """
        return spread_of(lambda: (self.estimates(world, part) for part in parts_of(self.account.records)))

    def divergence_of(
        self, world: str, at: Any, confidence: float | None = None, spread: Spread | None = None
    ) -> Tensor:
        """Returns D of some records, in nats, as `divergence` does.

        Args:
            world: one of `worlds`.
            at: which records.
            confidence: return upper limits over runs at this confidence.
            spread: what `spread` returns, for upper limits.
        """
        found = self.estimates(world, at)
        nats = found.mean if confidence is None else upper_limit(found, confidence, spread)
        return torch.where(found.measured > 0, nats, torch.inf).clamp(max=self.cap(world))

    def divergence(self, world: str = REMOVED, confidence: float | None = None) -> Tensor:
        """Returns D of each record, in nats, (N,), never above the mechanism's cap; the cap for one never measured.

        Args:
            world: one of `worlds`.
            confidence: return upper limits over runs at this confidence instead; needs two finished runs or more.
        """
        spread, records = None if confidence is None else self.spread(world), self.account.records
        return torch.cat([self.divergence_of(world, part, confidence, spread) for part in parts_of(records)])

    def towards(self, world: str = REMOVED, confidence: float | None = None) -> WorldDivergences:
        """Returns the divergences to a world, whose queries bind every attacker on every model.

        Args:
            world: one of `worlds`.
            confidence: as in `divergence`. Means are then those of the records' own limits.
        """
        nats, found, top = self.divergence(world, confidence).cpu().numpy(), self.estimates(world), self.cap(world)
        mean = torch.where(found.measured > 0, found.mean, top).cpu().numpy() if confidence is None else nats
        return WorldDivergences(self.account, world, nats, mean, self._notes(world, found, confidence))

    def mean_divergence(self, world: str) -> float:
        """Returns the mean of D over the records, in nats.

        Args:
            world: one of `worlds`.
        """
        return summaries.mean_divergence(self, world)

    def summary(self, world: str = REMOVED) -> dict[str, Any]:
        """Returns quantiles of D over the records, and the largest chances of success that belong to them.

        They depend on the data and are confidential. No number is kept for each record beside the ledger's own.

        Args:
            world: one of `worlds`.
        """
        return summaries.summarize_divergences(self, world)

    def most_exposed(self, k: int = 10, world: str = REMOVED) -> list[tuple[int, float]]:
        """Returns the k records with the largest D among those measured, and D in nats, the largest first.

        Args:
            k: the number of records.
            world: one of `worlds`.
        """
        return summaries.most_exposed(self, whole("k", k), world)

    def _notes(self, world: str, found: Estimates, confidence: float | None) -> tuple[str, ...]:
        """Describes on what the divergences to a world rest."""
        times = median_of(found.measured)
        measured = f"estimated: measured {times:g} times per record (median) in {max(self.runs, 1)} run(s)"
        if not self.runs:
            measured = f"a run in progress, so far {measured}"
        if confidence is not None:
            measured = f"at {format_percent(confidence)} confidence over {self.runs} runs"
        unseen = int((found.measured == 0).sum())
        if bool(self.state["nats_partial"][self.index(world)]):
            measured += "; some runs were not measured over all of their steps"
        return (measured,) + ((f"{unseen} records were never measured: the mechanism's",) if unseen else ())


def removed_nats(norm: Tensor, reach: Any, sample_rate: float) -> Tensor:
    """Returns k_q(a, 0)/q: the divergence of a Poisson step for records that are in its batch, over their chance q.

    Args:
        norm: ‖a‖, the clipped norm over the noise.
        reach: the largest norm that the clip lets through, over the noise; a number, or a tensor for several trainings.
        sample_rate: q.
    """
    top = None if isinstance(reach, Tensor) else float(reach)
    nats: Tensor = poisson_kl(norm.clamp(max=reach), sample_rate, largest_norm=top) / sample_rate
    return nats
