"""The result of a step for each record of its batch, and how the results of micro-batches are joined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from reconbound.validate.model import NOT_CHECKED


@dataclass(frozen=True, repr=False)
class StepInformation:
    """The information that one step gives about each record of the batch, in units of 1/(private part)².

    Every per-record tensor has shape (B,), every per-feature tensor the shape of the private part, (B, ...). All are
    divided by (σC)², the variance of the noise on the sum. For a record that is known to take part in the step the
    information is `trace`; exact subsampling weights `across` and `along` by its two factors, and the diagonals alike.
    These numbers reveal single records: keep them as confidential as the records.

    Attributes:
        loss: ℓ, (B,).
        norm: n = ‖g‖, the gradient's norm before clipping, (B,).
        factor: c(n), (B,).
        clipped_norm: c(n) n, (B,).
        along: (c + c'n)² ‖h‖²/(σC)², the part along the gradient, exact, (B,).
        across: c² Tr JᵀPJ/(σC)², the part across it, estimated, (B,).
        across_error: the standard error of `across`, (B,).
        gradient_sum: Σ c g over the batch, by parameter name, each of the parameter's shape; no noise is on it.
        features: d, the number of private features of a record.
        probes: the number of probes that `across` is estimated from.
        diagonal_along: `along` for each feature, if requested, (B, ...).
        diagonal_across: `across` for each feature, if requested, (B, ...).
        diagonal_error: `across_error` for each feature, if requested, (B, ...).
        spectral: the largest eigenvalue of J̃ᵀJ̃/(σC)², by power iteration, from below, if requested, (B,).
        spectral_bound: above that eigenvalue, for each record with probability at least 1 − 1e-6 over the iteration's
            random start, (B,).
        mask: 1 for the records that took part, 0 for padding, (B,); None: all did. Padding is no measurement.
        noise_multiplier: the σ that it was computed for; a ledger refuses that of another mechanism.
        max_grad_norm: the clip norm that it was computed for, checked alike.
        clip: the clip that it was computed for, checked alike.
        part: what is private: "input", "target" or "module" (a module's output, whose range is not known).
        caveats: what must be stated with every floor computed from it; a ledger collects them.
    """

    loss: Tensor
    norm: Tensor
    factor: Tensor
    clipped_norm: Tensor
    along: Tensor
    across: Tensor
    across_error: Tensor
    gradient_sum: dict[str, Tensor]
    features: int
    probes: int
    diagonal_along: Tensor | None = None
    diagonal_across: Tensor | None = None
    diagonal_error: Tensor | None = None
    spectral: Tensor | None = None
    spectral_bound: Tensor | None = None
    noise_multiplier: float | None = None
    max_grad_norm: float | None = None
    clip: str | None = None
    mask: Tensor | None = None
    part: str = "input"
    caveats: tuple[str, ...] = (NOT_CHECKED,)

    def __repr__(self) -> str:
        """Returns only sizes: the values are secret, and long."""
        also = [name for name in ("diagonal", "spectral") if getattr(self, name) is not None]
        more = f", with {' and '.join(also)}" if also else ""
        probes = f"{self.probes} probe{'s' if self.probes != 1 else ''}"
        return f"StepInformation({len(self.loss)} records, {self.features} private features, {probes}{more})"

    @property
    def trace(self) -> Tensor:
        """Returns Tr J̃ᵀJ̃/(σC)², (B,). Its standard error is across_error: the part along the gradient has none."""
        return self.along + self.across

    @property
    def diagonal(self) -> Tensor | None:
        """Returns diag(J̃ᵀJ̃)/(σC)², how much each feature leaks, of the private part's shape."""
        if self.diagonal_along is None or self.diagonal_across is None:
            return None
        return self.diagonal_along + self.diagonal_across


def join(parts: Sequence[StepInformation]) -> StepInformation:
    """Returns the result of a batch from those of its micro-batches."""
    if len(parts) == 1:
        return parts[0]
    values: dict[str, Any] = {}
    for f in fields(StepInformation):
        pieces = [getattr(part, f.name) for part in parts]
        if isinstance(pieces[0], Tensor):
            values[f.name] = torch.cat(pieces)
        elif f.name == "gradient_sum":
            values[f.name] = {name: sum((p[name] for p in pieces[1:]), first) for name, first in pieces[0].items()}
    return replace(parts[0], **values)
