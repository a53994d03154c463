"""The measurement plan of accounting: which records are measured at which step, and with which weight.

A record's expected information does not depend on whether it was drawn (Poisson and fixed-size batches are drawn
afresh, independently of the parameters), so measuring is independent of training. There are three ways, all unbiased:

    "every"       the batch itself, at every step, in the same pass                     weight 1
    ("steps", p)  the batch itself, at each step with probability p                     weight 1/p
    b             each record once in each block of L ≈ 1/(q b) steps, at a random one    weight L q

In each the weight is q over the chance π of a record to be measured at a step, so that the expected entry of a step is
π · (q/π) · f = q f, f being the information given participation.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from reconbound._internal.checks import InputError, number
from reconbound._internal.rng import derive, numbers_of

Budget: TypeAlias = float | str | tuple[str, float]


def checked_budget(budget: Any) -> Budget:
    """Returns a budget in one of the three forms, or raises an InputError."""
    if isinstance(budget, str) and budget == "every":
        return "every"
    if isinstance(budget, (tuple, list)) and len(budget) == 2 and budget[0] == "steps":
        return ("steps", number("budget", budget[1], above=0.0, at_most=1.0))
    if isinstance(budget, (str, tuple, list)):
        raise InputError("budget", 'must be a number, "every" or ("steps", probability)', budget)
    return number("budget", budget, above=0.0)


def batch_weight(budget: Budget, seed: int, step: int) -> float | None:
    """Returns the weight with which the batch itself is measured at this step; None if it is not.

    Args:
        budget: in one of the three forms.
        seed: of the random choice of steps.
        step: the number of the step.

    >>> batch_weight("every", 0, 0), batch_weight(("steps", 1.0), 0, 0), batch_weight(0.15, 0, 0)
    (1.0, 1.0, None)
    """
    if budget == "every":
        return 1.0
    if not isinstance(budget, tuple):
        return None
    measured = numbers_of(seed, "measured step", step).random() < budget[1]
    return 1 / budget[1] if measured else None


@dataclass(frozen=True)
class Blocks:
    """A plan that measures each record once in every block of steps, at a uniformly random step of it, in groups.

    This removes the variance of how often a record happens to be drawn. A run of T steps has max(1, ⌊T q b⌋) blocks of
    equal length (to a step), so that no more than b times the records trained on are measured, but each record at
    least once.

    Attributes:
        records: N.
        sample_rate: q.
        steps: T, the length of the run.
        budget: b, records measured over records trained on.
        group: records measured together.

    >>> plan = Blocks(records=6, sample_rate=0.5, steps=4, budget=0.5, group=3)
    >>> sorted(i for t in range(4) for group in plan.at(seed=1, step=t) for i in group.tolist()), plan.weight(0)
    ([0, 1, 2, 3, 4, 5], 2.0)
    """

    records: int
    sample_rate: float
    steps: int
    budget: float
    group: int

    @property
    def blocks(self) -> int:
        """Returns the number of blocks in a run; the 1e-9 keeps 1000 · 0.01 · 0.1 at 1."""
        return min(self.steps, max(1, math.floor(self.steps * self.sample_rate * self.budget + 1e-9)))

    def block(self, step: int) -> tuple[int, int, int]:
        """Returns the number, first step and length of the step's block."""
        k = ((step + 1) * self.blocks - 1) // self.steps
        start, end = k * self.steps // self.blocks, (k + 1) * self.steps // self.blocks
        return k, start, end - start

    def weight(self, step: int) -> float:
        """Returns L q of the step's block."""
        return self.block(step)[2] * self.sample_rate

    def at(self, seed: int, step: int) -> list[Tensor]:
        """Returns the groups that are measured at this step.

        Args:
            seed: of the random assignment.
            step: the number of the step.
        """
        block, start, length = self.block(step)
        return [group.long() for group in _assigned(self, seed, block, length)[step - start]]


@lru_cache(maxsize=4)
def _assigned(plan: Blocks, seed: int, block: int, length: int) -> list[list[Tensor]]:
    """Returns the groups of each step of a block. Groups are dealt in rounds, at most one to a step in each."""
    rng = numbers_of(seed, "block", block)
    order = np.arange(plan.records, dtype=np.int32 if plan.records < 2**31 else np.int64)
    groups = torch.from_numpy(rng.permutation(order)).split(plan.group)
    at: list[list[Tensor]] = [[] for _ in range(length)]
    for first in range(0, len(groups), length):
        places = rng.permutation(length)
        for group, place in zip(groups[first : first + length], places, strict=False):
            at[int(place)].append(group.sort().values)
    return at


@dataclass(frozen=True)
class Segments:
    """A plan whose blocks end at every given step count: one Blocks for each stretch between two of them."""

    starts: tuple[int, ...]
    parts: tuple[Blocks, ...]

    @classmethod
    def of(cls, plan: Blocks, counts: Sequence[int], budgets: Sequence[float] = ()) -> Segments:
        """Returns segments that end at these step counts, the last being the run's.

        Args:
            plan: the plan of the whole run.
            counts: the step counts.
            budgets: of each segment; the plan's for all where left out.
        """
        starts = (0, *counts[:-1])
        spans = zip(starts, counts, budgets or [plan.budget] * len(counts), strict=True)
        return cls(starts, tuple(replace(plan, steps=end - start, budget=b) for start, end, b in spans))

    def weight(self, step: int) -> float:
        """Returns L q of the step's block."""
        k = bisect.bisect_right(self.starts, step) - 1
        return self.parts[k].weight(step - self.starts[k])

    def at(self, seed: int, step: int) -> list[Tensor]:
        """Returns the groups that are measured at this step.

        Args:
            seed: of the random assignment.
            step: the number of the step.
        """
        k = bisect.bisect_right(self.starts, step) - 1
        return self.parts[k].at(derive(seed, "segment", k), step - self.starts[k])


class Plans(NamedTuple):
    """The plans of Fisher information and of distances to replaced worlds. None: batches are measured, or nothing."""

    information: Blocks | Segments | None = None
    distances: Blocks | Segments | None = None

    def describe_excess(self, worlds: int) -> str | None:
        """Describes measurements that cost more than the training, which nobody asked for; None where they do not.

        A plan measures every record at least once in a block. In a run shorter than a block of its budget that may be
        most of the work.

        Args:
            worlds: the number of replaced worlds.
        """
        planned = [(self.information, INFORMATION), (self.distances, 1.0 + worlds)]
        costs = [(_parts(plan), cost) for plan, cost in planned if plan is not None]
        if not costs or costs[0][0][0].records < FEW:
            return None
        steps, first = sum(part.steps for part in costs[0][0]), costs[0][0][0]
        drawn = steps * first.sample_rate  # times that a record is trained on
        share = sum(cost * sum(part.blocks for part in parts) for parts, cost in costs) / drawn
        asked = sum(cost * part.budget * part.steps * part.sample_rate for parts, cost in costs for part in parts)
        if share <= max(1.0, 1.5 * asked / drawn):
            return None
        cheaper = min(1.0, first.budget)
        return (
            f"measuring each of the {first.records:,} records at least once costs about {share:.1f} times what the "
            f"{steps:,} steps cost themselves: a record is drawn {drawn:.2g} times in them. "
            f'budget=("steps", {cheaper:g}) measures the batches of {100 * cheaper:g} % of the steps instead, for '
            f"about {cheaper * sum(cost for _, cost in costs):.1f} times their cost; a record that is in none of these "
            "batches then has no floor"
        )


#: Clipped gradients that a measurement of Fisher information costs with one probe (benchmarks/accounting_cost.py).
INFORMATION = 2.5
#: Below so many records nothing takes long.
FEW = 10_000


def _parts(plan: Blocks | Segments | None) -> tuple[Blocks, ...]:
    return () if plan is None else plan.parts if isinstance(plan, Segments) else (plan,)
