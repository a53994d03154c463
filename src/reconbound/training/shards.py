"""Shards of the records: whose clipped gradients are summed by themselves, on any rank, and then added exactly.

    S = Σ_v round(S_v/g) · g        S_v the clipped sum of shard v in floating point, g a power of two

Whole numbers add up to the same in any order. So S has the same bits however many ranks share the shards, and with it
the noise, whose key is bound to those bits. Proof of the law of what is released: docs/theory/accounting.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, warn_user, whole
from reconbound.divergences import sensitivity
from reconbound.training.ranks import Ranks, TrainingError, on_cpu
from reconbound.training.sampling import WHOLE, Shard
from reconbound.training.settings import Settings
from reconbound.training.step import StepWork
from reconbound.validate.model import ReconboundWarning

_BITS = 61  # of a sum, beside the sign: the sum of all rounded shards then fits into 63
Zeros = Callable[..., Tensor]


def make_shards(records: int, count: int) -> tuple[Shard, ...]:
    """Returns shards of equal size, to a record, in the order of the records.

    Args:
        records: N.
        count: the number of shards.

    >>> [shard.span for shard in make_shards(10, 3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    count = whole("shards", count)
    if count > records:
        raise InputError("shards", f"must be at most the number of records ({records})", count)
    if count == 1:
        return (WHOLE,)
    return tuple(Shard(v, count, (v * records // count, (v + 1) * records // count)) for v in range(count))


def grid_of(settings: Settings, records: int) -> float:
    """Returns g, the power of two on whose multiples sums are added: no sum of clipped gradients has more than 2⁶¹.

    Args:
        settings: the clip and its norm.
        records: N, of which all may take part.

    >>> grid_of(Settings(1.0, 1.0, 0.5, clip="hard"), 1000) == 2.0**-51
    True
    """
    largest = settings.max_grad_norm * sensitivity(settings.clip) * records
    return math.ldexp(1.0, math.frexp(largest)[1] - _BITS)


def warn_of_idle_ranks(shards: Sequence[Shard], ranks: Ranks) -> None:
    """Warns on the first rank where there are more ranks than shards."""
    idle = ranks.size - len(shards)
    if idle > 0 and ranks.rank == 0:
        more = f"{idle} of {ranks.size} ranks have nothing to do: this run has {len(shards)} shards. To"
        warn_user(f"{more} use more ranks, begin it with more shards", ReconboundWarning)


def compute_shards(
    shards: Sequence[Shard], ranks: Ranks, zeros: Zeros, grid: float, compute: Callable[[Shard], StepWork]
) -> StepWork:
    """Computes a step: each rank its shards, and all ranks have the batch, the sum and every measurement afterwards.

    Args:
        shards: all of them.
        ranks: the processes.
        zeros: makes zeros of the sum's shape and device.
        grid: g.
        compute: shard → its part of the batch, and what the step computes for it.

    Returns:
        The work of the whole step. Its sum is in units of g, int64; a single shard's is as it was computed, on its
        owner only.
    """
    total = zeros(dtype=torch.int64)

    def own() -> list[tuple[int, StepWork]]:
        nonlocal total
        found = []
        for shard in shards:
            if shard.owner(ranks.size) == ranks.rank:
                work = compute(shard)
                total = work.total if len(shards) == 1 else total + (work.total.double() / grid).round().long()
                found.append((shard.number, _portable(work)))
        return found

    parts = sorted((part for some in ranks.gather(own) for part in some), key=lambda part: part[0])
    check_apart(shards, [(number, work.batch) for number, work in parts])
    works = [work for _, work in parts]
    return StepWork(
        torch.cat([work.batch for work in works]),
        total if len(shards) == 1 else ranks.sum_whole(total),
        torch.cat([work.clipped_norm for work in works]),
        None,
        [one for work in works for one in work.information],
        [one for work in works for one in work.distances],
        next((work.followed for work in works if work.followed is not None), None),
    )


def check_apart(shards: Sequence[Shard], parts: Sequence[tuple[int, Tensor]]) -> None:
    """Refuses parts of a step in which a shard is missing, counted twice, or has records of another one.

    Args:
        shards: all of them.
        parts: of each shard its number and its records, in the order of their numbers.
    """
    if [number for number, _ in parts] != [shard.number for shard in shards]:
        raise TrainingError(f"each shard must be computed once, not {[number for number, _ in parts]}")
    for shard, (_, records) in zip(shards, parts, strict=True):
        if (
            shard.span
            and len(records)
            and not shard.span[0] <= int(records.min()) <= int(records.max()) < shard.span[1]
        ):
            raise TrainingError(f"shard {shard.number} has records of another shard")


def _portable(work: StepWork) -> StepWork:
    """Returns what other ranks need of a shard's work, on the CPU: no gradients."""
    information = [one._replace(found=replace(one.found, gradient_sum={})) for one in work.information]
    followed = None if work.followed is None else replace(work.followed, gradient_sum={})
    found: StepWork = on_cpu(replace(work, total=work.total[:0], information=information, followed=followed))
    return found
