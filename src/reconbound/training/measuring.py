"""Measurements of a learner: its ledger, the records to measure at a step, and the clipped sum of the batch.

Nothing here changes the learner. Results go into the ledger after the step has been taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reconbound._internal.rng import torch_stream
from reconbound.accounting.accountant import FisherAccountant
from reconbound.accounting.measurement_plan import Blocks, batch_weight
from reconbound.accounting.spec import Account
from reconbound.fisher import StepInformation
from reconbound.training.sampling import batches_per_epoch
from reconbound.training.step import Fault
from reconbound.validate.private import as_private

if TYPE_CHECKING:
    from reconbound.training.private_sgd import PrivateSGD

Measured = list[tuple[Tensor, StepInformation, float, bool]]  # records, information, weight, once per block


def ledger_and_plan(learner: PrivateSGD) -> tuple[FisherAccountant | None, Blocks | None]:
    """Creates an empty ledger and the plan of measurements for runs of the learner's length.

    Returns:
        The ledger (None without accounting), and the plan (None where each batch itself is measured).
    """
    s, rate = learner.settings, learner.sampler.sample_rate
    if s.rules is None:
        return None, None
    account = Account.of(
        s,
        sample_rate=rate,
        records=learner.records,
        features=learner.features,
        steps=learner.steps,
        batches_per_epoch=batches_per_epoch(learner.sampler),
    )
    ledger = FisherAccountant(
        account,
        diagonal=learner.diagonal,
        spectral=learner.spectral,
        feature_scale=learner.feature_scale,
        device=learner.device,
    )
    ledger.caveats = learner.measurer.caveats
    ledger.needs_range = as_private(learner.private).part == "module"
    # within a shuffled epoch the parameters depend on whether a record was seen: only batches can be measured
    ledger.features.followed = ledger.diagonal == "chosen" and s.sampler != "shuffle"
    if not isinstance(s.budget, float):
        return ledger, None
    group = max(1, min(learner.records, round(rate * learner.records)))
    return ledger, Blocks(learner.records, rate, learner.steps, s.budget, group)


def gradient_sum(learner: PrivateSGD, chosen: Tensor, seed: int, measured: Measured) -> Tensor:
    """Computes Σ c g over the batch, flattened. If the batch itself is to be measured, the same pass does it.

    Args:
        learner: the learner at its present step.
        chosen: indices of the batch.
        seed: the seed of the run.
        measured: the list to which a measurement of the batch is appended.
    """
    if len(chosen) == 0:
        return torch.cat([torch.zeros_like(p).flatten() for p in learner.params.values()])
    weight = None if learner.accountant is None else batch_weight(learner.settings.budget, seed, learner.step)
    if weight is not None:
        found = learner.measurer.information(chosen, _probes(learner, seed, "0"))
        measured.append((chosen, found, weight, False))
        sums = found.gradient_sum
    else:
        sums = learner.measurer.gradient_sum(chosen)
    flat = torch.cat([sums[name].flatten() for name in learner.params])
    if not bool(torch.isfinite(flat).all()):
        raise Fault("the clipped gradient sum is not finite: the model has exploded; lower lr")
    return flat


def measured_groups(learner: PrivateSGD, seed: int) -> Measured:
    """Measures the records that the plan names for this step, at the parameters before the step.

    Args:
        learner: the learner at its present step.
        seed: the seed of the run.
    """
    if learner.accountant is None or learner.plan is None:
        return []
    measured: Measured = []
    for k, group in enumerate(learner.plan.at(seed, learner.step)):
        found = learner.measurer.information(group, _probes(learner, seed, f"{k + 1}"))
        measured.append((group, found, learner.plan.weight(learner.step), True))
    return measured


def followed(learner: PrivateSGD, seed: int) -> StepInformation | None:
    """Measures the records whose features are kept, drawn or not, at the parameters before this step.

    Args:
        learner: the learner at its present step.
        seed: the seed of the run.
    """
    ledger = learner.accountant
    if ledger is None or not ledger.features.followed or ledger.rows is None or len(ledger.rows) == 0:
        return None
    return learner.measurer.information(ledger.rows, _probes(learner, seed, "kept"))


def _probes(learner: PrivateSGD, seed: int, part: str) -> torch.Generator:
    return torch_stream(seed, f"probe {part}", learner.step, learner.device)
