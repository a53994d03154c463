"""The base of all ledgers: sums over the steps of a run, and their mean and error over runs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reconbound._internal.checks import InputError


class Ledger:
    """Sums over the steps of a run, their means over finished runs, and what standard errors are computed from.

    A quantity x has the tensors "x" (the sum of the present run), "x_mean" (over the finished runs) and, where it is
    kept, "x_error". Until the second run ends, x_error is the variance of the first run's sum, as far as the subclass
    can tell it from one run. From then on it is the sum of the squared deviations of the runs from their mean.
    A subclass calls `keep` for each of its quantities and adds each step's measurements to "x".

    Args:
        device: where the tensors live.

    Attributes:
        state: the tensors, by name.
        runs: the number of finished runs.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.runs = device, 0
        self.state: dict[str, Tensor] = {}

    def keep(self, name: str, *shape: int, dtype: torch.dtype = torch.float64, error: bool = False) -> None:
        """Creates the empty tensors of a quantity.

        Args:
            name: of the quantity.
            shape: of each tensor.
            dtype: of each tensor.
            error: whether to keep what its standard error is computed from.
        """
        for ending in ("", "_mean", "_error")[: 3 if error else 2]:
            self.state[name + ending] = torch.zeros(*shape, dtype=dtype, device=self.device)

    def _quantities(self) -> list[str]:
        return [name for name in self.state if f"{name}_mean" in self.state]

    def run_counts(self, name: str) -> int | Tensor:
        """Returns the number of finished runs in the quantity's mean; a subclass may have one for each row."""
        return self.runs

    # --- runs --------------------------------------------------------------------------

    def finish_run(self) -> None:
        """Adds the present run to the means and starts an empty one."""
        self.runs += 1
        for name in self._quantities():
            total, mean, error = (self.state.get(name + ending) for ending in ("", "_mean", "_error"))
            assert total is not None
            assert mean is not None
            delta = total - mean
            mean += delta / self.run_counts(name)
            if error is not None and self.runs == 2:
                error.zero_()  # not times 0: the error of one run may be infinite
            if error is not None and self.runs > 1:
                error += delta * (total - mean)
        self.clear_run()

    def clear_run(self) -> None:
        """Empties the sums of the present run."""
        for name in self._quantities():
            self.state[name].zero_()

    def merge(self, other: Ledger) -> None:
        """Adds the finished runs of another ledger with the same tensors."""
        for name in self._quantities():
            mean, theirs = self.state[f"{name}_mean"], other.state[f"{name}_mean"].to(self.device)
            more, total = other.run_counts(name), self.run_counts(name) + other.run_counts(name)
            share = more / total if isinstance(total, int) else more / total.clamp(min=1)
            delta = theirs - mean
            if f"{name}_error" in self.state:
                error, added = self.state[f"{name}_error"], other.state[f"{name}_error"].to(self.device)
                if self.runs == 0:
                    error.copy_(added)
                else:
                    if self.runs == 1:
                        error.zero_()
                    error += delta.square() * (self.run_counts(name) * share)
                    if other.runs > 1:
                        error += added
            mean += delta * share
        self.runs += other.runs

    # --- reading -----------------------------------------------------------------------

    def mean(self, name: str) -> Tensor:
        """Returns the mean of the quantity over the finished runs, or the sum of the first run so far."""
        return self.state[f"{name}_mean" if self.runs else name]

    def standard_error(self, name: str) -> Tensor:
        """Returns the standard error of `mean`: over runs, or after one run what is known from its own measurements."""
        variance = self.state[f"{name}_error"].double() / max(1, self.runs * (self.runs - 1))
        return variance.clamp(min=0).sqrt()

    # --- keeping -----------------------------------------------------------------------

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises an InputError that names the first tensor whose shape does not fit; nothing is changed."""
        for name, value in self.state.items():
            got = tuple(tensors[name].shape) if name in tensors else ()
            rows = got[:1] if name.startswith("kept_") else tuple(value.shape[:1])  # single runs: any number of rows
            if got != (*rows, *value.shape[1:]) or name not in tensors:
                why = f"must be a tensor of shape {tuple(value.shape)}, as this version of reconbound keeps it"
                raise InputError(name, why, got if name in tensors else None)

    def restore(self, tensors: Mapping[str, Tensor], runs: int) -> None:
        """Restores the tensors, which have been checked, and the number of finished runs."""
        self.runs = runs
        for name, value in self.state.items():
            self.state[name] = tensors[name].to(value.device, value.dtype, copy=True)
