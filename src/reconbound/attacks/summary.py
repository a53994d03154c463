"""Results of an attack that was tried over many releases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconbound._internal.formatting import format_number

#: Squared bias over the mean squared error from which a record is counted as biased when a report is printed.
BIASED = 0.1


@dataclass(frozen=True, repr=False)
class AttackReport:
    """Errors of the attack over many releases, one entry per attacked record; squared errors are per feature, /d.

    Attributes:
        records: the attacked records, indices into the training set.
        trials: number of releases.
        method: the attack's method.
        branch: the attack's branch.
        mse: mean of ‖x̂ − x‖²/d. It need not settle with more trials: see `median` and `trimmed`.
        standard_error: of `mse`, from the trials' spread (itself unreliable where the second moment is infinite).
        bias: ‖E x̂ − x‖²/d, estimated without bias (so it may be slightly negative); None where not asked for.
        variance: E‖x̂ − E x̂‖²/d, so that mse = variance + bias; None where not asked for.
        median: of ‖x̂ − x‖²/d over trials (of an even number the upper median).
        trimmed: trimmed mean of ‖x̂ − x‖²/d over trials; it leaves out the largest 1 %, one trial at least.
        unsolved: share of trials in which the scalar equation had no root and the fold was taken.
        reconstructions: x̂ in the first trials, (records, kept, d); None where not asked for.
    """

    records: np.ndarray
    trials: int
    method: str
    branch: str
    mse: np.ndarray
    standard_error: np.ndarray
    median: np.ndarray
    trimmed: np.ndarray
    unsolved: np.ndarray
    bias: np.ndarray | None = None
    variance: np.ndarray | None = None
    reconstructions: np.ndarray | None = None

    def __repr__(self) -> str:
        """Formats a few lines: sizes, and errors from the best to the worst record."""
        records = f"{len(self.records):,} record{'s' if len(self.records) != 1 else ''}"
        lines = [
            f"AttackReport of {records}, {self.trials:,} releases (method {self.method!r}, branch {self.branch!r})",
            f"  mean squared error per feature: {_spread(self.mse)}",
            f"  its median over the releases:   {_spread(self.median)}",
        ]
        if self.variance is not None and self.bias is not None:
            leaning = int(np.sum(self.bias > BIASED * self.mse))
            lines.append(f"  variance:                       {_spread(self.variance)}")
            lines.append(
                f"  biased (squared bias over a tenth of the error), so not bound by unbiased floors: {leaning:,}"
            )
        if self.unsolved.any():
            lines.append(f"  releases that no record explains, at the worst record: {self.unsolved.max():.0%}")
        lines.append("  Not private: for the curator")
        return "\n".join(lines)


def _spread(values: np.ndarray) -> str:
    if len(values) == 1:
        return format_number(float(values[0]))
    least, middle, most = (format_number(float(v)) for v in (values.min(), np.median(values), values.max()))
    return f"{least} (least), {middle} (median record), {most} (most)"
