"""Opacus's data loaders: whether they draw Poisson batches, at which rate, and which records each batch has."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchSplittingSampler
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from reconbound._internal.checks import InputError
from reconbound._internal.files import json_digest
from reconbound._internal.opacus_hooks import source_digest
from reconbound._internal.rng import random_states_kept
from reconbound.training.ranks import Ranks

#: Records with which a collate function is tried.
_TRIED = 32
_GRID = 2.0**24  # of torch's float32 random numbers
#: SHA-256 of the source of `UniformWithReplacementSampler.__iter__` that `RecordedSampler` repeats: that of Opacus 1.6.
_REPEATED = "af6b9adbea9ec9a4aa060365939f328510c9e12bc4e28a7cae95d9d91481333e"


PoissonSampler: TypeAlias = Any  # of Opacus: one of one process, or of a rank


class DrawnBatches:
    """The batches that a sampler has drawn and no step was taken with, in order.

    Args:
        sampler: that draws them; its rate must not change.
        half_done: says whether the optimizer is in the middle of a batch.
        ahead: whether batches are drawn before they are asked for, as for worker processes.
        begin: called at the start of each iteration.

    Attributes:
        iteration: the number of the present one, from 1.
        refused: why it is not known which records the steps had; empty while it is.
    """

    def __init__(
        self,
        sampler: PoissonSampler,
        half_done: Callable[[], bool],
        *,
        ahead: bool,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._sampler, self._half_done, self._ahead, self._begin = sampler, half_done, ahead, begin
        self._drawn_with = (sampler.sample_rate, sampler.num_samples)
        self._waiting: deque[Tensor] = deque()
        self.iteration = self._taken = 0
        self._over = False
        self.refused = ""

    def recorded(self, drawn: Iterator[tuple[Any, Tensor]]) -> Iterator[Any]:
        """Yields the batches of a new iteration and remembers them; what earlier iterations left is forgotten.

        Args:
            drawn: each batch as the loader takes it, and its records in a tensor that nobody else has.
        """
        self.check_complete()
        if self._half_done():
            why = "must be left between two steps, not in the middle of a batch of BatchMemoryManager: its first part "
            raise InputError("data_loader", f"{why}would be added to the next step", "a new iteration")
        self.iteration, self._taken, self._over = self.iteration + 1, 0, False
        mine = self.iteration
        self._waiting.clear()
        self._begin()
        sampler = self._sampler
        for indices, records in drawn:
            if (sampler.sample_rate, sampler.num_samples) != self._drawn_with:
                why = "must draw with the same rate from the same records all the time"
                raise InputError("data_loader", why, f"the rate {sampler.sample_rate:g}")
            self._waiting.append(records)
            yield indices
            if mine != self.iteration:
                why = "must be iterated over once at a time: another iteration began inside this one, so that the "
                raise self._refusal(f"{why}records of its steps are not known", "two iterations")
        self._over = True

    def take(self, rows: int) -> Tensor:
        """Returns the records of the step that is taken now; refuses a step with another number of records.

        Args:
            rows: the number of records whose gradients were clipped.
        """
        if not self._waiting:
            why = "must be the loader that the training iterates over: no batch of it was drawn for this step"
            raise self._refusal(why, f"a step with {rows} records")
        records = self._waiting.popleft()
        self._taken += 1
        if records.numel() != rows:
            why = "must give each batch to one step, as it was drawn, also an empty one: this batch has "
            raise self._refusal(f"{why}{len(records)} records", f"a step with {rows} records")
        return records

    def check_complete(self) -> None:
        """Refuses an iteration that came to its end with fewer steps than batches: which were left out is not known.

        An iteration without any step is a look at the data. Where batches are drawn ahead, some are never asked for.
        """
        if self._over and self._taken and self._waiting and not self._ahead:
            why = "must give each batch to one step: an iteration over all of its batches ended with fewer steps"
            raise self._refusal(why, f"{len(self._waiting)} without a step")

    def _refusal(self, why: str, given: str) -> InputError:
        found = InputError("data_loader", why, given)
        self.refused = str(found)
        return found


class RecordedSampler(UniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's Poisson sampler, drawing as before, whose batches are remembered."""

    batches: DrawnBatches
    ranks: Ranks

    def __iter__(self) -> Iterator[list[int]]:
        known = source_digest(UniformWithReplacementSampler.__iter__) == _REPEATED
        return self.batches.recorded(self._again() if known else map(_with_records, super().__iter__()))

    def _again(self) -> Iterator[tuple[list[int], Tensor]]:
        """Repeats what Opacus does, and keeps the tensor from which it makes a list."""
        for _ in range(self.steps):
            mask = torch.rand(self.num_samples, generator=self.generator) < self.sample_rate
            records = mask.nonzero(as_tuple=False).reshape(-1)
            yield records.tolist(), records


def _with_records(indices: Any) -> tuple[Any, Tensor]:
    """Returns a batch and its records in a tensor of their own."""
    numbers = indices.tolist() if isinstance(indices, Tensor) else indices
    return indices, torch.from_numpy(np.fromiter(numbers, np.int64, len(numbers)))


class _Draws(TorchFunctionMode):
    """Counts the calls of torch.rand in a block."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.rand
        return func(*args, **(kwargs or {}))


class RecordedShareSampler(DistributedUniformWithReplacementSampler):  # type: ignore[misc]
    """Opacus's Poisson sampler of a rank's own records, drawing as before, whose batches are remembered."""

    batches: DrawnBatches
    ranks: Ranks

    def __iter__(self) -> Iterator[Any]:
        return self.batches.recorded(map(_with_records, self._without_skips()))

    def _without_skips(self) -> Iterator[Tensor]:
        """Yields what Opacus draws; refuses a batch that it skips because it is empty on this rank."""
        inner = super().__iter__()
        while True:
            with _Draws() as seen:
                batch = next(inner, None)
            if seen.count != (batch is not None):
                self.ranks.gather(_refuse_skip)
            if batch is None:
                return
            yield batch

    @property
    def division(self) -> list[Any]:
        """Returns what decides which records are this rank's."""
        return [self.epoch, bool(self.shuffle), self.shuffle_seed, self.num_replicas, self.batches.iteration]


def _refuse_skip() -> None:
    why = "must not draw an empty batch on any rank: Opacus skips it there, and the ranks' steps are then no longer of "
    raise InputError("data_loader", f"{why}the same draw. Take a larger batch_size or fewer ranks", "an empty batch")


_RECORDED: dict[type, type] = {
    UniformWithReplacementSampler: RecordedSampler,
    DistributedUniformWithReplacementSampler: RecordedShareSampler,
}


def record_batches(sampler: PoissonSampler, batches: DrawnBatches, ranks: Ranks) -> None:
    """Makes a sampler remember its batches, wherever it is in use; `forget_batches` undoes it."""
    sampler.__class__, sampler.batches, sampler.ranks = _RECORDED[type(sampler)], batches, ranks


def forget_batches(sampler: PoissonSampler) -> None:
    """Makes a sampler what it was before `record_batches`."""
    if isinstance(sampler, RecordedSampler | RecordedShareSampler):
        del sampler.batches, sampler.ranks
        sampler.__class__ = next(plain for plain, recorded in _RECORDED.items() if type(sampler) is recorded)


def records_drawn_from(sampler: PoissonSampler) -> int:
    """Returns the number of records of a sampler's data set, those of all ranks."""
    return int(getattr(sampler, "total_size", sampler.num_samples))


def poisson_sampler(loader: Any, ranks: Ranks | None) -> PoissonSampler:
    """Returns the Poisson sampler of a loader; refuses one that draws other batches, with the reason.

    Args:
        loader: what make_private returned, or BatchMemoryManager's loader around it.
        ranks: of the training; None for one that is not distributed.
    """
    if not isinstance(loader, DataLoader):
        why = "must be the loader that make_private returned"
        raise InputError("data_loader", why, f"a {type(loader).__name__}")
    if isinstance(loader.dataset, IterableDataset):
        why = "must have a data set whose records have numbers: a stream cannot be drawn from at random"
        raise InputError("data_loader", why, type(loader.dataset).__name__)
    sampler: Any = loader.batch_sampler
    records = len(loader.dataset)  # type: ignore[arg-type]
    if isinstance(sampler, BatchSplittingSampler):
        sampler = sampler.sampler
    if isinstance(sampler, RecordedSampler | RecordedShareSampler):
        raise InputError("data_loader", "must not be watched already: finish the first ledger", "a watched loader")
    if type(sampler) not in _RECORDED:
        drawn = type(sampler.sampler).__name__ if isinstance(sampler, BatchSampler) else type(sampler).__name__
        why = "must draw Poisson batches as that which make_private(poisson_sampling=True) returns"
        raise InputError("data_loader", f"{why}: nothing is proved of records left out of other batches", drawn)
    shared = isinstance(sampler, DistributedUniformWithReplacementSampler)
    if shared != (ranks is not None):
        why = "must be of the same call of make_private as the optimizer: it draws the records of "
        raise InputError("data_loader", why + ("one rank" if shared else "all ranks on each"), type(sampler).__name__)
    if ranks is not None and (sampler.rank, sampler.num_replicas) != (ranks.rank, ranks.size):
        why = f"must draw the records of rank {ranks.rank} of {ranks.size}"
        raise InputError("data_loader", why, (sampler.rank, sampler.num_replicas))
    if records_drawn_from(sampler) != records:
        why = f"must draw from its whole data set, of {records} records"
        raise InputError("data_loader", why, f"a sampler of {records_drawn_from(sampler)}")
    if getattr(loader.collate_fn, "rand_on_empty", False):
        why = "must leave empty batches empty (rand_on_empty=False): a made-up record moves the sum by up to C as well"
        raise InputError("data_loader", why, "rand_on_empty=True")
    if getattr(loader, "_iterator", None) is not None:
        raise InputError("data_loader", "must be watched before the training iterates over it", "one in use")
    return sampler


def check_generators(sampler: PoissonSampler, ranks: Ranks) -> None:
    """Refuses ranks whose samplers draw the same random numbers: their records would be drawn together.

    Args:
        sampler: of this rank.
        ranks: of the training.
    """
    generator = torch.default_generator if sampler.generator is None else sampler.generator
    seeds = ranks.gather(lambda: json_digest(generator.initial_seed()))
    if len({*seeds}) < len(seeds):
        same = [rank for rank, seed in enumerate(seeds) if seeds.count(seed) > 1]
        why = "must draw from another seed on each rank, as torch.manual_seed(seed + rank) gives: otherwise records of "
        raise InputError("data_loader", f"{why}two ranks take part together, not independently", f"one on ranks {same}")


def drawn_rate(sampler: PoissonSampler) -> float:
    """Returns the chance with which a sampler draws a record, at least its sample rate.

    Opacus compares torch's random numbers, multiples of 2⁻²⁴ in float32, with the rate in float32:

        P(u < q) = ⌈2²⁴ q⌉/2²⁴

    Args:
        sampler: Opacus's.
    """
    if torch.get_default_dtype() not in (torch.float32, torch.float64):
        why = "must draw with float32 or float64, torch's default dtype"
        raise InputError("data_loader", why, torch.get_default_dtype())
    rate = float(sampler.sample_rate)
    on_grid = math.ceil(float(np.float32(rate)) * _GRID) / _GRID
    return min(1.0, max(rate, on_grid))


@random_states_kept()
def features_of(loader: Any) -> int:
    """Returns the number of values in the inputs of a record, for the mechanism's floors; at least 1."""
    record = loader.dataset[0]
    inputs = record[0] if isinstance(record, tuple | list) and len(record) > 1 else record
    return max(1, sum(leaf.numel() for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)))


@random_states_kept()
def check_collate(loader: DataLoader[Any]) -> bool:
    """Returns whether rows of a batch depend on the other records: they are then padded to the longest.

    Refuses a loader whose batches do not keep the order of the records that were drawn, or mix them. A few records are
    collated in two orders, and the first one by itself.

    Args:
        loader: the loader.
    """
    own = loader.collate_fn
    collate = getattr(own, "wrapped_collator_fn", own)  # Opacus's wrapper keeps the first batch that it sees
    records = len(loader.dataset)  # type: ignore[arg-type]
    count = min(_TRIED, records)
    some = [loader.dataset[k * (records - 1) // max(1, count - 1)] for k in range(count)]
    order = [*range(1, count), 0]
    if collate is None or count < 2:
        return False
    (one, _), (other, _) = tree_flatten(collate(list(some))), tree_flatten(collate([some[i] for i in order]))
    axes = (0,) if getattr(own, "batch_first", True) else (1, 0)
    name = getattr(collate, "__name__", type(collate).__name__)
    if len(one) != len(other) or not all(_moved(a, b, order, axes) for a, b in zip(one, other, strict=True)):
        why = "must keep the order of the records in a batch, and mix none of them: its collate_fn does not"
        raise InputError("data_loader", why, name)
    alone = [tree_flatten(collate([record]))[0] for record in some]
    if any(len(parts) != len(one) for parts in alone):
        raise InputError("data_loader", "must give one record the form of a batch: its collate_fn does not", name)
    return any(
        _shape(part, axes) != _shape(whole, axes) for parts in alone for part, whole in zip(parts, one, strict=True)
    )


def _shape(part: Any, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the shape of a record's row in a batch."""
    if not isinstance(part, Tensor) or part.dim() == 0:
        return None
    batch = axes[0] if part.dim() > axes[0] else 0
    return tuple(size for axis, size in enumerate(part.shape) if axis != batch)


def _moved(one: Any, other: Any, order: list[int], axes: tuple[int, ...]) -> bool:
    """Returns whether a part of a batch has its rows in another order, along one of these axes."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.dim() == 0:
        return True  # names and numbers of the whole batch
    if one.shape != other.shape:
        return False
    if one.is_floating_point():
        one, other = torch.nan_to_num(one), torch.nan_to_num(other)
    rows = [axis for axis in axes if one.dim() > axis and one.shape[axis] == len(order)]
    return any(torch.equal(one.index_select(axis, torch.tensor(order)), other) for axis in rows)
