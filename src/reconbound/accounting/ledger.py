"""The base of all ledgers: sums over a run, their means and errors over runs; and how they are added to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, whole
from reconbound._internal.large_files import SealedFile
from reconbound.accounting import compact
from reconbound.accounting.compact import add_at, parts_of, rounded_up
from reconbound.accounting.spec import Account


class Ledger:
    """Sums over the steps of a run, their means over finished runs, and what standard errors are computed from.

    A quantity x has the tensors "x" (the sum of the present run), "x_mean" (over the finished runs) and, where it is
    kept, "x_error". Until the second run ends, x_error is the variance of the first run's sum, as far as the subclass
    can tell it from one run. From then on it is the sum of the squared deviations of the runs from their mean.
    A subclass calls `keep` for each of its quantities and adds each step's measurements to "x".

    Args:
        device: where the tensors live.
        keep_at: step counts at which the sums of each single run are kept, on the CPU: see `keep_runs`.

    Attributes:
        state: the tensors, by name.
        stored: a file, where some tensors are to be read from it; None where all are in memory.
        in_file: the names of those tensors; `state` has zeros in their place.
        runs: the number of finished runs.
    """

    def __init__(self, device: torch.device, keep_at: Sequence[int] = ()) -> None:
        self.device, self.runs, self.keep_at = device, 0, tuple(keep_at)
        self.state: dict[str, Tensor] = {}
        self.stored: SealedFile | None = None
        self.in_file: set[str] = set()
        self._quantities: dict[str, None] = {}  # their names, in order
        self._counts: tuple[str, ...] = ()  # of the present run; those of all runs have the ending _all
        self._of_run: tuple[str, ...] = ()  # what else is of the present run only
        self._kept: dict[str, None] = {}  # the tensors of single runs

    def keep(self, name: str, *shape: int, dtype: torch.dtype = torch.float64, error: bool = False) -> None:
        """Creates the empty tensors of a quantity.

        Args:
            name: of the quantity.
            shape: of each tensor.
            dtype: of each tensor.
            error: whether to keep what its standard error is computed from.
        """
        self._quantities[name] = None
        for ending in ("", "_mean", "_error")[: 3 if error else 2]:
            self.state[name + ending] = compact.zeros(shape, dtype, self.device)

    def empty(self, *names: str) -> None:
        """Sets tensors to zero; on the CPU that gives their memory back."""
        for name in names:
            value = self.state[name]
            if value.device.type == "cpu":
                self.state[name] = compact.zeros(value.shape, value.dtype, value.device)
            else:
                value.zero_()

    def part(self, name: str, part: slice) -> Tensor:
        """Returns some numbers of a tensor, in the order of its memory, on the CPU or where the ledger lives.

        Those that come from a file are checked.
        """
        if self.stored is not None and name in self.in_file:
            found = self.stored.read(name, part.start, part.stop)
            self.check_content(name, found)
            return found
        return self.state[name].reshape(-1)[part]

    def keep_runs(self, *names: str) -> None:
        """Creates "kept_" tensors with one row for each run and step count, where step counts are asked for."""
        for name in names if self.keep_at else ():
            like = self.state[name]
            self._kept[f"kept_{name}"] = None
            self.state[f"kept_{name}"] = torch.zeros(0, *like.shape, dtype=like.dtype)

    def run_counts(self, name: str) -> int | Tensor:
        """Returns the number of finished runs in the quantity's mean; a subclass may have one for each row."""
        return self.runs

    # --- runs --------------------------------------------------------------------------

    def keep_step(self, step: int) -> None:
        """Keeps the sums of the present run after this many steps, where they are asked for."""
        for name in self._kept if step in self.keep_at else ():
            row = self.state[name.removeprefix("kept_")].cpu()[None].clone()
            self.state[name] = torch.cat([self.state[name], row])

    def finish_run(self) -> None:
        """Adds the present run to the means and starts an empty one."""
        for name in self._counts:
            if self.runs == 0:
                self.state[name], self.state[f"{name}_all"] = self.state[f"{name}_all"], self.state[name]
            else:
                self.state[f"{name}_all"] += self.state[name]
        self.runs += 1
        for name in self._quantities:
            counts = self.run_counts(name)
            total, mean, error = (self.state.get(name + ending) for ending in ("", "_mean", "_error"))
            assert total is not None
            assert mean is not None
            if self.runs == 1 and isinstance(counts, int):
                self.state[f"{name}_mean"], self.state[name] = total, mean
                continue
            if error is not None and self.runs == 2:
                error.zero_()  # not times 0: the error of one run may be infinite
            kept = error if self.runs > 1 else None
            whole = not isinstance(counts, int)  # of chosen records: they are few
            for part in [...] if whole else parts_of(total.numel()):
                own, before = (x if whole else x.view(-1)[part] for x in (total, mean))
                delta = own.double() - before.double()
                now = before.double() + delta / counts
                before.copy_(rounded_up(now, mean.dtype))
                if kept is not None:
                    squares = kept if whole else kept.view(-1)[part]
                    squares.copy_(rounded_up(squares.double() + delta * (own.double() - now), kept.dtype))
        self.clear_run()

    def clear_run(self) -> None:
        """Empties the sums of the present run, except what has been kept in a finished run."""
        self.empty(*self._quantities, *self._counts, *self._of_run)
        for name in self._kept:
            self.state[name] = self.state[name][: self.runs * len(self.keep_at)]

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another ledger with the same tensors."""
        done = self.runs * len(self.keep_at)
        for name in self._kept:
            given = other.state[name] if other.stored is None or name not in other.in_file else other.stored.read(name)
            rows, theirs = self.state[name], given[: other.runs * len(self.keep_at)]
            self.state[name] = torch.cat([rows[:done], theirs, rows[done:]])
        for name in self._quantities:
            more, own = other.run_counts(name), self.run_counts(name)
            whole = not isinstance(own, int)
            for part in [...] if whole else parts_of(self.state[name].numel()):
                self._merge_part(other, name, part, own, more)
        self.runs += other.runs

    def _merge_part(self, other: Ledger, name: str, part: Any, own: int | Tensor, more: int | Tensor) -> None:
        """Adds some numbers of another ledger's mean and error to this one's.

        Args:
            other: the other ledger.
            name: of the quantity.
            part: of their numbers, in the order of memory; ... for all, in their shape.
            own: the number of finished runs in this mean.
            more: the number of finished runs in the other.
        """
        pairs = []
        for ending in ("_mean", "_error") if f"{name}_error" in self.state else ("_mean",):
            mine = self.state[name + ending]
            theirs = other.state[name + ending] if part is ... else other.part(name + ending, part)
            pairs.append((mine if part is ... else mine.view(-1)[part], theirs.to(self.device)))
        (mean, mean_of), total = pairs[0], own + more
        share = more / total.clamp(min=1) if isinstance(total, Tensor) else more / total
        delta = mean_of.double() - mean.double()
        for error, added in pairs[1:]:
            if self.runs == 0:
                error.copy_(added)
                continue
            so_far = torch.zeros_like(delta) if self.runs == 1 else error.double()
            so_far += delta.square() * (own * share)
            error.copy_(rounded_up(so_far + added.double() if other.runs > 1 else so_far, error.dtype))
        mean.copy_(rounded_up(mean.double() + delta * share, mean.dtype))

    # --- reading -----------------------------------------------------------------------

    def mean(self, name: str) -> Tensor:
        """Returns the mean of the quantity over the finished runs, or the sum of the first run so far."""
        return self.state[f"{name}_mean" if self.runs else name]

    def standard_error(self, name: str, at: Any = ...) -> Tensor:
        """Returns the standard error of `mean`: over runs, or after one run what is known from its own measurements.

        Args:
            name: of the quantity.
            at: which of its numbers.
        """
        runs = torch.as_tensor(self.run_counts(name))
        variance = self.state[f"{name}_error"][at].double() / (runs * (runs - 1)).clamp(min=1)
        return variance.clamp(min=0).sqrt()

    def kept_at(self, name: str, step: int) -> Tensor:
        """Returns the rows of a kept quantity after this many steps, one for each run, on the CPU."""
        if whole("step", step) not in self.keep_at:
            raise InputError("step", f"must be one of keep_runs_at, {list(self.keep_at)}", step)
        return self.state[f"kept_{name}"][self.keep_at.index(step) :: len(self.keep_at)]

    # --- keeping -----------------------------------------------------------------------

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an InputError that names the first tensor whose shape, type or content does not fit.

        Nothing is changed.
        """
        for name, value in self.state.items():
            given = tensors.get(name)
            got = () if given is None else tuple(given.shape)
            rows = got[:1] if name.startswith("kept_") else tuple(value.shape[:1])  # single runs: any number of rows
            if given is None or got != (*rows, *value.shape[1:]) or given.dtype != value.dtype:
                kept = f"of shape {tuple(value.shape)} and {value.dtype}"
                why = f"must be a tensor {kept}, as this version of reconbound keeps it"
                raise InputError(name, why, None if given is None else f"{got}, {given.dtype}")
        for name in self.state:
            flat = tensors[name].reshape(-1)
            for part in parts_of(len(flat)):
                self.check_content(name, flat[part])

    def check_content(self, name: str, values: Tensor) -> None:
        """Refuses sums and means that are NaN, and what errors are computed from where it is negative.

        Args:
            name: of the tensor.
            values: some of its numbers.
        """
        if name.removeprefix("kept_").removesuffix("_mean").removesuffix("_error") not in self._quantities:
            return
        if bool((values.isnan() if not name.endswith("_error") else ~(values >= 0)).any()):
            what = "NaN" if bool(values.isnan().any()) else float(values.min())
            raise InputError(name, "must be numbers, and errors not negative", what)

    def restore(self, tensors: Mapping[str, Tensor], runs: int, *, copy: bool = True) -> None:
        """Restores the tensors, which have been checked, and the number of finished runs.

        Args:
            tensors: by name.
            runs: the number of finished runs.
            copy: whether the tensors are somebody else's too.
        """
        self.runs = runs
        for name, value in self.state.items():
            self.state[name] = tensors[name].to(value.device, value.dtype, copy=copy)


def covered_steps(account: Account, weights: float) -> float:
    """Returns the number of steps that measurements cover: their weights over those of one step.

    Args:
        account: of the ledger.
        weights: the sum of the weights of a run's measurements.
    """
    of_a_step = account.sample_rate * account.records
    if account.sampler == "shuffle":  # the last batch of an epoch has what is left
        per_epoch = account.batches_per_epoch or math.ceil(account.records / max(1, round(of_a_step)))
        of_a_step = min(of_a_step, account.records / per_epoch)
    return weights / of_a_step


def covers_all(account: Account, covered: float, largest: float) -> bool:
    """Returns whether measurements cover about all steps of a run, but for what chance explains.

    Args:
        account: of the ledger.
        covered: the number of steps that they cover.
        largest: the largest weight of a measurement.
    """
    weight = max(1.0, largest)  # steps measured with chance 1/weight; batches vary as well
    chance = 6 * math.sqrt(account.steps * (weight - 1 + weight / (account.sample_rate * account.records)))
    return abs(covered - account.steps) <= 0.1 * account.steps + chance


def add_variance(
    variance: Tensor,
    last: Tensor,
    times: Tensor,
    index: Tensor,
    value: Tensor,
    error: Tensor,
    chance: float,
    stratified: bool,
) -> None:
    """Adds to the variance of a run's sum, given its trajectory: of the probes and of when a record was measured.

    Rare draws (Horvitz–Thompson): Σ (1−π) x² + π e². Once per block: half the squared differences of successive
    blocks, times B/(B−1), which counts the drift between blocks as error too; for one block it is x².

    Args:
        variance: of each record, (N,); it is changed.
        last: each record's last entry in blocks, (N,); it is changed.
        times: the number of measurements of each record before this one, (N,).
        index: the records measured.
        value: their entries x.
        error: the standard errors e of the entries.
        chance: π, that of a record to be measured at this step.
        stratified: each record is measured exactly once in each block of steps.
    """
    drawn = (1 - chance) * value.square() + chance * error.square()
    if not stratified or chance == 1.0:
        add_at(variance, index, drawn)
        return
    before = times[index]
    so_far = variance[index].double() * (before - 1).clamp(min=0) / before.clamp(min=1)
    more = (so_far + (value - last[index].double()).square() / 2) * (before + 1) / before.clamp(min=1)
    variance[index] = rounded_up(torch.where(before > 0, more, drawn), variance.dtype)
    last[index] = value.to(last.dtype)
