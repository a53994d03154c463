"""Batches of each step: Poisson and fixed-size batches, and shuffled epochs, as functions of a generator.

A batch is a function of (seed, step): step 731 draws the same one whether or not the run was stopped before it, and no
generator state has to be saved. Indices are int64, in increasing order (shuffled epochs: in theirs), and may be none.
Whether a record takes part is a function of (seed, step, record): `batch(..., span)` has a range of the records only,
and the parts of several ranges are those of the whole batch. How many processes share the records changes nothing.

Every sampler has a name, the sample rate that accounting may use, the divisor of the noisy sum (fixed in advance,
whoever takes part) and the number of steps in which a record is expected to be drawn once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor

from reconbound._internal.checks import InputError, choice, number, rounded_up, warn_user, whole
from reconbound._internal.rng import numbers_of
from reconbound.accounting.measurement_plan import Blocks, Plans, Segments
from reconbound.accounting.spec import Account, MechanismSpec
from reconbound.validate.model import ReconboundWarning

if TYPE_CHECKING:
    from reconbound.training.settings import Settings

#: A range of the records: the first, and the one after the last.
Span = tuple[int, int]


def within(indices: Tensor, span: Span | None) -> Tensor:
    """Returns those of the records that are in a range, in their order; all where there is none.

    >>> within(torch.tensor([5, 1, 3, 2]), (2, 5)).tolist()
    [3, 2]
    """
    return indices if span is None else indices[(indices >= span[0]) & (indices < span[1])]


@dataclass(frozen=True)
class Shard:
    """A range of the records whose gradients are summed by themselves (shards.py).

    Attributes:
        number: from 0.
        count: the number of shards.
        span: the records; None for all of them.
    """

    number: int = 0
    count: int = 1
    span: Span | None = None

    def owner(self, ranks: int) -> int:
        """Returns the rank that computes this shard, of so many."""
        return self.number * ranks // self.count


WHOLE = Shard()


@dataclass(frozen=True)
class Poisson:
    """Poisson sampling: each record takes part with probability q, independently of all others and of all other steps.

    Attributes:
        records: N.
        sample_rate: q.
        by_gaps: draw as many random numbers as the batch has records, in place of N: the same law, other batches. Where
            a GPU takes the step, N of them would take Python longer than the GPU.

    Guarantee: what the exact factors of amplification.py and `SampledGaussian(sampler="poisson")` assume.

    >>> Poisson(5, 1.0).batch(seed=0, step=0).tolist()
    [0, 1, 2, 3, 4]
    """

    name = "poisson"
    records: int
    sample_rate: float
    by_gaps: bool = False

    def __post_init__(self) -> None:
        whole("records", self.records)
        number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)

    @property
    def divisor(self) -> float:
        return self.sample_rate * self.records

    @property
    def steps_per_epoch(self) -> float:
        return 1 / self.sample_rate

    def batch(self, seed: int, step: int, span: Span | None = None) -> Tensor:
        if self.by_gaps and self.sample_rate < 1:  # each gap follows from those before it
            drawn = _by_gaps(numbers_of(seed, "batch", step), self.records, self.sample_rate)
            return within(torch.from_numpy(drawn), span)
        # 53 random bits: with the 24 of float32 a rate of 1e-9 would never, or far too often, draw anybody
        first, end = span or (0, self.records)
        u = numbers_of(seed, "batch", step, skip=first).random(end - first)
        return torch.from_numpy((u < self.sample_rate).nonzero()[0] + first)


def _by_gaps(rng: np.random.Generator, n: int, q: float) -> npt.NDArray[np.int64]:
    """Draws a Poisson batch by the gaps between its records, which are geometric.

    P(gap > k) = (1−q)ᵏ,     gap = ⌊ln(1−u)/ln(1−q)⌋ + 1,   u uniform with 53 bits
    """
    found, last = [np.zeros(0)], -1.0
    while last < n - 1:
        mean = (n - 1 - last) * q
        u = rng.random(math.ceil(mean + 6 * math.sqrt(mean)) + 4)
        found.append(last + np.cumsum(np.floor(np.log1p(-u) / math.log1p(-q)) + 1))
        last = float(found[-1][-1])
    places = np.concatenate(found)
    return places[places < n].astype(np.int64)


@dataclass(frozen=True)
class FixedSize:
    """Fixed-size batches: a uniformly random set of B records at every step, drawn without replacement.

    >>> len(FixedSize(10, 3).batch(seed=0, step=0)), FixedSize(10, 3).sample_rate
    (3, 0.3)
    """

    name = "fixed"
    records: int
    batch_size: int

    def __post_init__(self) -> None:
        if whole("batch_size", self.batch_size) > whole("records", self.records):
            raise InputError("batch_size", f"must be at most the number of records ({self.records})", self.batch_size)

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.records

    @property
    def divisor(self) -> float:
        return float(self.batch_size)

    @property
    def steps_per_epoch(self) -> float:
        return self.records / self.batch_size

    def batch(self, seed: int, step: int, span: Span | None = None) -> Tensor:
        drawn = numbers_of(seed, "batch", step).choice(self.records, self.batch_size, replace=False, shuffle=False)
        return within(torch.from_numpy(drawn).sort().values, span)


@dataclass(frozen=True)
class ShuffledEpochs(FixedSize):
    """Shuffled epochs: each goes through all records once, in a random order. Nothing is amplified: its factor is 1.

    The last batch of an epoch has the remaining records; it is divided by the full batch size like all others.

    >>> both = [ShuffledEpochs(4, 2).batch(seed=0, step=t).tolist() for t in (0, 1)]
    >>> sorted(both[0] + both[1])
    [0, 1, 2, 3]
    """

    name = "shuffle"

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.records / self.batch_size)

    def batch(self, seed: int, step: int, span: Span | None = None) -> Tensor:
        epoch, place = divmod(step, self.steps_per_epoch)
        order = torch.from_numpy(numbers_of(seed, "epoch", epoch).permutation(self.records))
        return within(order[place * self.batch_size : (place + 1) * self.batch_size], span)


Sampler = Poisson | FixedSize


def with_gaps(sampler: Sampler) -> Sampler:
    """Returns a sampler of the same law that draws fewer random numbers, if there is one; its batches are others."""
    return replace(sampler, by_gaps=True) if isinstance(sampler, Poisson) else sampler


def steps_of(sampler: Sampler, epochs: float) -> int:
    """Returns the number of steps of a number of epochs, rounded up.

    Args:
        sampler: gives the steps of an epoch.
        epochs: the number of epochs.

    >>> steps_of(FixedSize(7, 3), 1.0), steps_of(ShuffledEpochs(7, 3), 2.0)
    (3, 6)
    """
    return rounded_up(Fraction(number("epochs", epochs, above=0.0, at_most=1e15)) * Fraction(sampler.steps_per_epoch))


def run_length(sampler: Sampler, steps: int | None, epochs: float | None) -> int:
    """Returns the number of steps of a run; refuses both ways to give it, and none.

    Args:
        sampler: gives the steps of an epoch.
        steps: the number of steps.
        epochs: the number of epochs.
    """
    if (steps is None) == (epochs is None):
        raise InputError("steps", "or epochs must be given, and not both", steps)
    return whole("steps", steps) if epochs is None else steps_of(sampler, epochs)


def padded_sizes(sampler: Sampler) -> tuple[int, ...]:
    """Returns the sizes to which batches are padded for computations at fixed shapes, ascending.

    A Poisson batch is larger than the last with a chance below 1e-9. The others save work: half of all batches have at
    most about the first, five sixths the second.

    Args:
        sampler: of the batches.

    >>> padded_sizes(FixedSize(10, 3)), padded_sizes(Poisson(60_000, 0.01))
    ((3,), (600, 632, 752))
    """
    if isinstance(sampler, FixedSize):
        return (sampler.batch_size,)
    n, q = sampler.records, sampler.sample_rate
    spread = math.sqrt(sampler.divisor * (1 - q))
    wanted = (round(sampler.divisor), sampler.divisor + spread, float(stats.binom.isf(1e-9, n, q)))
    return tuple(sorted({min(n, max(8, -(-math.ceil(size) // 8) * 8)) for size in wanted}))


def batches_per_epoch(sampler: Sampler) -> int | None:
    """Returns the number of steps of a shuffled epoch; None for samplers without epochs."""
    return sampler.steps_per_epoch if isinstance(sampler, ShuffledEpochs) else None


def make_account(settings: MechanismSpec, sampler: Sampler, features: int, steps: int) -> Account:
    """Returns the account of a training with the sampler's own rate, which is that of whole batches.

    Args:
        settings: of the training.
        sampler: of its batches.
        features: d, the number of private features of a record.
        steps: T, of one run.
    """
    own = {f.name: getattr(settings, f.name) for f in fields(MechanismSpec)} | {"sample_rate": sampler.sample_rate}
    epoch = batches_per_epoch(sampler)
    return Account(**own, records=sampler.records, features=features, steps=steps, batches_per_epoch=epoch)


def make_plan(budget: float, sampler: Sampler, steps: int) -> Blocks:
    """Returns the plan that measures each record once in each block of steps, in groups of a batch's size.

    Args:
        budget: records measured over records trained on.
        sampler: of the batches.
        steps: T, of one run.
    """
    records, rate = sampler.records, sampler.sample_rate
    return Blocks(records, rate, steps, budget, max(1, min(records, round(rate * records))))


def make_plans(settings: Settings, sampler: Sampler, steps: int, whole_at: Sequence[int], worlds: int) -> Plans:
    """Returns the plans of measurements; none where each batch itself is measured.

    Warns where a plan costs more than the training, which its budget does not ask for.

    Args:
        settings: of the training.
        sampler: of its batches.
        steps: T, of one run.
        whole_at: step counts at which blocks end, ascending, the last of them T; none for blocks of any steps.
        worlds: the number of replaced worlds. A distance takes a gradient in each world, an information one.
    """
    if not isinstance(settings.budget, float):
        return Plans()
    both = [make_plan(settings.budget / n, sampler, steps) for n in (1, 1 + worlds)]
    parts = [Segments.of(plan, whole_at) if whole_at else plan for plan in both]
    plans = Plans(parts[0] if settings.rules is not None else None, parts[1] if worlds else None)
    excess = plans.describe_excess(worlds)
    if excess is not None:
        warn_user(excess, ReconboundWarning)
    return plans


def make_sampler(name: str, records: int, sample_rate: float) -> Sampler:
    """Creates the sampler of a name.

    Args:
        name: "poisson", "fixed" or "shuffle".
        records: N, the number of records.
        sample_rate: q; fixed-size batches have round(qN) records.
    """
    if choice("sampler", name, ("poisson", "fixed", "shuffle")) == "poisson":
        return Poisson(records, sample_rate)
    number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    size = max(1, round(sample_rate * whole("records", records)))
    return FixedSize(records, size) if name == "fixed" else ShuffledEpochs(records, size)
