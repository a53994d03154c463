"""Which records each step sees: Poisson and fixed-size batches, and shuffled epochs, as functions of a generator.

Every draw takes an explicit generator. `stream` makes one for each (seed, purpose, step), so that step 731 draws the
same batch whether or not the run was stopped before it: no generator state has to be saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ._check import InputError, number, whole


class Sampler(Protocol):
    """How batches are drawn: a name, the rate that accounting may use, and the draw itself."""

    @property
    def records(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def sample_rate(self) -> float:
        """Chance of a record to be in a batch."""

    def batch(self, seed: int, step: int) -> Tensor:
        """Indices of the step's batch, int64 in increasing order (shuffled epochs: in their order); may be empty."""


@dataclass(frozen=True)
class Poisson:
    """Each record takes part with probability q, independently of all others and of all other steps.

    Guarantee: what the exact factors of amplification.py and `SampledGaussian(sampler="poisson")` assume.

    >>> Poisson(5, 1.0).batch(seed=0, step=0).tolist()
    [0, 1, 2, 3, 4]
    """

    records: int
    sample_rate: float

    def __post_init__(self) -> None:
        whole("records", self.records)
        number("sample_rate", self.sample_rate, above=0.0, at_most=1.0)

    @property
    def name(self) -> str:
        return "poisson"

    def batch(self, seed: int, step: int) -> Tensor:
        # 53 random bits: with the 24 of float32 a rate of 1e-9 would never, or far too often, draw anybody
        u = torch.rand(self.records, generator=stream(seed, "batch", step), dtype=torch.float64)
        return torch.nonzero(u < self.sample_rate).flatten()


@dataclass(frozen=True)
class FixedSize:
    """A uniformly random set of B records, drawn afresh at every step, without replacement.

    >>> len(FixedSize(10, 3).batch(seed=0, step=0)), FixedSize(10, 3).sample_rate
    (3, 0.3)
    """

    records: int
    batch_size: int

    def __post_init__(self) -> None:
        if whole("batch_size", self.batch_size) > whole("records", self.records):
            raise InputError("batch_size", f"must be at most the number of records ({self.records})", self.batch_size)

    @property
    def name(self) -> str:
        return "fixed"

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.records

    def batch(self, seed: int, step: int) -> Tensor:
        order = torch.randperm(self.records, generator=stream(seed, "batch", step))
        return order[: self.batch_size].sort().values


@dataclass(frozen=True)
class ShuffledEpochs:
    """Each epoch goes through all records once, in a random order. Nothing is amplified: its factor is 1.

    >>> both = [ShuffledEpochs(4, 2).batch(seed=0, step=t).tolist() for t in (0, 1)]
    >>> sorted(both[0] + both[1])
    [0, 1, 2, 3]
    """

    records: int
    batch_size: int

    def __post_init__(self) -> None:
        FixedSize(self.records, self.batch_size)

    @property
    def name(self) -> str:
        return "shuffle"

    @property
    def sample_rate(self) -> float:
        return self.batch_size / self.records

    def batch(self, seed: int, step: int) -> Tensor:
        per_epoch = math.ceil(self.records / self.batch_size)
        epoch, place = divmod(step, per_epoch)
        order = torch.randperm(self.records, generator=stream(seed, "epoch", epoch))
        return order[place * self.batch_size : (place + 1) * self.batch_size]


_PURPOSES = ("batch", "epoch", "noise", "probe", "block", "initial", "run")


def stream(seed: int, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A generator of its own for one purpose at one step: a function of the seed, not of what was drawn before.

    >>> a, b = (torch.rand(1, generator=stream(7, "noise", 3)).item() for _ in range(2))
    >>> a == b
    True
    """
    state = np.random.SeedSequence((seed, _PURPOSES.index(purpose), step)).generate_state(1, np.uint64)[0]
    return torch.Generator(device=device).manual_seed(int(state) >> 1)


def make_sampler(name: str, records: int, sample_rate: float) -> Sampler:
    """The sampler of that name; fixed-size batches have round(qN) records."""
    if name == "poisson":
        return Poisson(records, sample_rate)
    number("sample_rate", sample_rate, above=0.0, at_most=1.0)
    size = max(1, round(sample_rate * whole("records", records)))
    if name == "fixed":
        return FixedSize(records, size)
    if name == "shuffle":
        return ShuffledEpochs(records, size)
    raise InputError("sampler", "must be one of poisson, fixed, shuffle", name)


@dataclass(frozen=True)
class MeasureBlocks:
    """When each record's information is measured: once in every block of steps, at a uniformly random step of it.

    A record's expected information does not depend on whether it was drawn, so measuring is apart from training. In a
    block of L steps each record is measured once and counts with weight L·q: unbiased, and free of the variance of
    how often a record happens to be drawn. Records are measured in groups, each at a random step of the block.

    Attributes:
        records: N. sample_rate: q. steps: T, the length of the run.
        budget: records measured over records trained on, so that L = 1/(q · budget).
        group: records measured together.

    >>> plan = MeasureBlocks(records=6, sample_rate=0.5, steps=4, budget=0.5, group=3)
    >>> sorted(i for t in range(4) for group in plan.at(seed=1, step=t) for i in group.tolist()), plan.weight(0)
    ([0, 1, 2, 3, 4, 5], 2.0)
    """

    records: int
    sample_rate: float
    steps: int
    budget: float
    group: int

    def __post_init__(self) -> None:
        number("budget", self.budget, above=0.0)
        whole("group", self.group)

    @property
    def length(self) -> int:
        """Steps in a block."""
        return min(self.steps, max(1, round(1 / (self.sample_rate * self.budget))))

    def weight(self, step: int) -> float:
        """L·q of the step's block; the last block may be shorter."""
        start = step // self.length * self.length
        return min(self.length, self.steps - start) * self.sample_rate

    def at(self, seed: int, step: int) -> list[Tensor]:
        """The groups that are measured at this step."""
        block = step // self.length
        start = block * self.length
        length = min(self.length, self.steps - start)
        generator = stream(seed, "block", block)
        groups = torch.randperm(self.records, generator=generator).split(self.group)
        rounds = math.ceil(len(groups) / length)
        slots = torch.cat([torch.randperm(length, generator=generator) for _ in range(rounds)])[: len(groups)]
        return [groups[i].sort().values for i in torch.nonzero(slots == step - start).flatten().tolist()]
