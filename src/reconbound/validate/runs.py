"""Checks by running the model: randomness, and records that depend on each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from reconbound.validate.structure import LOSS, ModelError, label
from reconbound.validate.watch import LossFn, Trace, rows, run

PROBE_RECORDS = 3


def _close(a: Tensor, b: Tensor, relative: float) -> bool:
    a, b = a.detach(), b.detach()
    if a.shape != b.shape:
        return False
    if not a.is_floating_point():
        return bool((a == b).all())
    scale = float(a.abs().nan_to_num(posinf=0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=0.0, atol=relative * scale, equal_nan=True)


def _rounding(x: Tensor) -> float:
    return min(100 * torch.finfo(x.dtype).eps, 0.01)


def _first_change(before: Trace, after: Trace, rows: int, relative: float) -> str:
    """Returns the first module, innermost first, that gives other rows than before; loss_fn where none does."""
    for (path, _, old), (_, _, new) in zip(before.calls, after.calls, strict=False):
        for a, b in zip(tree_leaves(old), tree_leaves(new), strict=False):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.dim() and b.dim()):
                continue
            by_record = len(a) == PROBE_RECORDS and len(b) in (rows, PROBE_RECORDS)
            if by_record and not _close(a[:rows], b[:rows], relative):
                return path
    return LOSS


def check_randomness(model: nn.Module, first: Trace, second: Trace) -> None:
    relative = _rounding(first.losses)
    if not _close(first.losses, second.losses, relative):
        drawing = [
            path for path in first.seeded if path not in first.attention
        ]  # attention may draw, and mostly does not
        path = [*drawing, _first_change(first, second, PROBE_RECORDS, relative)][0]
        raise ModelError(
            f"{label(model, path)} is random: two runs on the same records gave different losses. Turn its "
            "randomness off (eval mode, or F.dropout(..., training=False)); the noise that protects is the one on "
            "the gradient"
        )


def check_coupling(model: nn.Module, loss_fn: LossFn, few: Any, trace: Trace) -> None:
    """Checks that the other losses stay the same when the last record is changed, and when it is left out."""
    rest, relative = PROBE_RECORDS - 1, _rounding(trace.losses)
    changed = run(model, loss_fn, tree_map(_last_changed, few[0]), few[1])
    if not _close(trace.losses[:rest], changed.losses[:rest], relative):
        raise ModelError(
            f"{label(model, _first_change(trace, changed, rest, relative))} couples the records of a batch: one "
            "record's loss changes when another record changes. Each loss must depend on its own record alone: no "
            "statistics, sums or comparisons over the batch (nn.GroupNorm in place of batch statistics)"
        )
    relative = min(torch.finfo(trace.losses.dtype).eps ** 0.5, 0.05)  # another shape may round differently
    fewer = run(model, loss_fn, *rows(few, list(range(rest))))
    if not _close(trace.losses[:rest], fewer.losses, relative):
        raise ModelError(
            f"{label(model, _first_change(trace, fewer, rest, relative))} depends on the batch: a record's loss "
            "changes when another record is left out. Do not divide by the batch size or use anything else that is "
            "taken over the batch"
        )


def _last_changed(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    changed = x.clone()
    changed[-1] = x[0]
    if x.is_floating_point() and torch.equal(changed, x):
        changed[-1] = 0.5 * x[-1] + 0.1
    return changed
