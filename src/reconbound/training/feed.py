"""The ledger of a training: how it is made, and how it is fed with what steps measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.spec import Account
from reconbound.fisher.step import StepInformation, join
from reconbound.fisher.worlds import REMOVED
from reconbound.training.ranks import TrainingError
from reconbound.training.step import Measured, Measurer, StepWork
from reconbound.validate.private import as_private

#: On a GPU: steps whose measurements are added to the ledger at once.
_STEPS_TOGETHER = 32


class NoLedger(TrainingError, AttributeError):
    """The ledger was requested before it existed."""


class Feed:
    """Makes the ledger of a training and adds to it what steps measured; with the world "removed" also their norms.

    Args:
        account: of the training.
        measurer: of its model.
        options: of FisherAccountant.

    Attributes:
        ledger: of the training.
        steps: the number that are added together: several on a GPU, where a long addition takes as long as a short.
    """

    def __init__(self, account: Account, measurer: Measurer, options: Mapping[str, Any]) -> None:
        self.ledger = ledger = FisherAccountant(account, **options)
        ledger.divergences.from_batches = True
        ledger.caveats = measurer.caveats
        ledger.needs_range = as_private(measurer.private).part == "module"
        # within a shuffled epoch the parameters depend on whether a record was seen: only batches can be measured
        ledger.features.followed = ledger.diagonal == "chosen" and account.sampler != "shuffle"
        one_by_one = measurer.static is None or measurer.kept.diagonal or measurer.kept.spectral
        self.steps = 1 if one_by_one else _STEPS_TOGETHER
        self._pending: list[StepWork] = []

    def end_step(self, work: StepWork, step: int) -> None:
        """Adds a step, keeps the run so far where the ledger keeps it, and closes the run after its last step.

        Args:
            work: what was computed.
            step: the number of steps taken in this run.
        """
        ledger, kept, last = self.ledger, step in self.ledger.traces.keep_at, step == self.ledger.account.steps
        if self.steps > 1:  # what is pending need not hold the sums
            information = [one._replace(found=replace(one.found, gradient_sum={})) for one in work.information]
            work = replace(work, total=work.total[:0], released=None, information=information)
        self._pending.append(work)
        if kept or last or len(self._pending) >= self.steps:
            self.settle()
        if kept:
            ledger.keep_step(step)
        if last:
            ledger.finish_run()

    def settle(self) -> None:
        """Adds all that is pending."""
        ledger, pending = self.ledger, self._pending
        self._pending = []
        information = [one for work in pending for one in work.information]
        for one in joined_measurements(information) if self.steps > 1 else information:
            ledger.add(one.records, one.found, **one.how)
        for work in pending:
            if work.followed is not None:
                ledger.follow(work.followed)
            for each in work.distances:
                ledger.add_distances(each.records, each.found, **each.how)
            if REMOVED in ledger.divergences.worlds and len(work.batch):
                ledger.divergences.add_norms(work.batch, work.clipped_norm, 1.0)

    def restore(self, tensors: Mapping[str, Tensor], runs: int, caveats: Sequence[str]) -> None:
        """Puts the ledger into a saved state, and forgets what is pending.

        Args:
            tensors: of the ledger, which become its own.
            runs: the number of finished runs.
            caveats: what must be stated with its floors, beside its own.
        """
        self._pending = []
        self.ledger.restore(tensors, runs, copy=False)
        self.ledger.caveats = tuple(dict.fromkeys((*self.ledger.caveats, *caveats)))


def joined_measurements(parts: Sequence[Measured[StepInformation]]) -> list[Measured[StepInformation]]:
    """Joins successive measurements of equal weight, kind (stratified or not) and caveats.

    Those with diagonals or spectral norms are left apart, and stratified ones in which a record would occur twice.

    Args:
        parts: the measurements.
    """
    found: list[Measured[StepInformation]] = []
    for (weight, stratified, _), some in groupby(parts, key=attrgetter("weight", "stratified", "found.caveats")):
        group = list(some)
        records = torch.cat([one.records for one in group])
        more = group[0].found.diagonal_across is not None or group[0].found.spectral is not None
        if len(group) == 1 or more or (stratified and len(records.unique()) < len(records)):
            found += group
        else:
            found.append(Measured(records, join([one.found for one in group]), weight, stratified))
    return found
