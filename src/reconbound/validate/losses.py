"""Checks what a loss function returns."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor


def check_losses(losses: Any, records: int) -> None:
    """Checks that there is one floating-point loss for each record."""
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        kind = losses.dtype if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(f"loss_fn must return a floating-point tensor with one loss per record, (B,), got {kind}")
    if losses.shape == (records,):
        return
    shape = tuple(losses.shape)
    if len(shape) > 1 and shape[0] == records:
        what = f"(B, {', '.join(map(str, shape[1:]))}): sum or average it over each record, losses.flatten(1).mean(1)"
    elif math.prod(shape) == 1:
        what = 'a single number: it was reduced over the batch, use reduction="none"'
    else:
        what = f"{shape} for {records} records: it was reduced over the batch or counts something else"
    raise ValueError(f"loss_fn must return one loss per record, shape (B,), got {what}")
