"""A ledger beside Opacus: how far the release of a private training is from that without each record.

    ledger = watch(optimizer, data_loader, criterion)      after make_private
    ...                                                    the training, as it was
    ledger.report("folder")

The norms to which Opacus clips are read where it computes them, or where its operations are repeated in its place, and
the records of each batch where its sampler draws them. Nothing that is trained changes, and no random number is drawn
from a global generator. What a divergence says: docs/theory/any_attacker.md.
"""

from __future__ import annotations

from typing import Any

try:
    from opacus.optimizers import DPPerLayerOptimizer
except ImportError as missing:
    raise ImportError("reconbound.integrations.opacus needs Opacus: pip install opacus") from missing

from reconbound._internal.checks import InputError, number, warn_user
from reconbound.integrations.clipped_norms import DISTRIBUTED, check_optimizer, clip_norm
from reconbound.integrations.guards import check_accounted, check_loss
from reconbound.integrations.ledger import OpacusLedger
from reconbound.integrations.loaders import check_generators, drawn_rate, poisson_sampler
from reconbound.integrations.measuring import BlockMeasurer, Measuring
from reconbound.training.ranks import Ranks
from reconbound.validate.model import ReconboundWarning

_ALWAYS = 5  # statements of each training; those after them are warnings, too


def watch(optimizer: Any, data_loader: Any, loss_fn: Any, *, measure: Measuring | None = None) -> OpacusLedger:
    """Begins a ledger of a training with Opacus; the training itself stays as it is.

    Call it after make_private or make_private_with_epsilon and before the first step. It reads the clipped norms that
    Opacus computes, and the records of each batch as the loader's sampler draws them: record numbers in the data are
    not needed. Record i is number i of the loader's data set.

    Args:
        optimizer: the optimizer that make_private returned; flat or per-layer clipping, or ghost clipping.
        data_loader: the loader that make_private returned, with Poisson batches. BatchMemoryManager may stand between.
        loss_fn: the criterion of the training; with ghost clipping the one that make_private returned.
        measure: what else is measured: worlds with a public value in place of a part of each record, and Fisher
            information. None: nothing.

    With Opacus on several ranks of torch.distributed, call it on each. Each rank clips and measures its own records,
    and all of them have the whole ledger; `report` writes on rank 0.

    Returns:
        The ledger, which grows with each step.

    Raises:
        InputError: names what cannot be accounted for, and why. It is also raised by a later step where the training
            turns out to be another one: a batch without a step, another loader, a change of the noise.

    Guarantee: as that of `OpacusLedger`. The training is the same bit for bit with and without the ledger.
    """
    check_optimizer(optimizer, loss_fn)
    number("noise_multiplier", optimizer.noise_multiplier, above=0.0)
    number("max_grad_norm", clip_norm(optimizer), above=0.0)
    check_loss(loss_fn, optimizer)
    devices = {p.device for p in optimizer.params}
    if len(devices) != 1:
        raise InputError("optimizer", "must have parameters, all on one device", [str(d) for d in devices])
    shared = isinstance(optimizer, DISTRIBUTED)
    ranks = Ranks.present() if shared else Ranks()
    sampler = poisson_sampler(data_loader, ranks if shared else None)
    check_accounted(optimizer, drawn_rate(sampler))

    def prepared() -> BlockMeasurer | None:
        if measure is None:
            return None
        if not isinstance(measure, Measuring):
            raise InputError("measure", "must be a Measuring(model, epochs, ...)", f"a {type(measure).__name__}")
        if isinstance(optimizer, DPPerLayerOptimizer):
            why = "must be None with per-layer clipping: the whole gradient's clip is measured"
            raise InputError("measure", why, type(optimizer).__name__)
        return BlockMeasurer(measure, loss_fn, optimizer, data_loader, drawn_rate(sampler))

    blocks = ranks.try_all(prepared)
    if shared and not optimizer.secure_mode:
        check_generators(sampler, ranks)
    ledger = OpacusLedger(optimizer, (data_loader, sampler), loss_fn, blocks, ranks)
    for warning in ledger.statements[_ALWAYS:]:
        warn_user(warning, ReconboundWarning)
    return ledger


__all__ = ["Measuring", "OpacusLedger", "watch"]
