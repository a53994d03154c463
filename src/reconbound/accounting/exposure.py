"""The most exposed records of a ledger with their caveats, and quantiles of floors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from reconbound._internal.formatting import format_floor


def quantiles(values: np.ndarray, names: Mapping[str, float]) -> dict[str, float]:
    """Returns quantiles that some record has, by name; 0 where there are no values.

    Args:
        values: the numbers.
        names: the quantile, from 0 to 1, by name.
    """
    at = np.quantile(values, list(names.values()), method="lower") if len(values) else [0.0] * len(names)
    return {name: float(v) for name, v in zip(names, at, strict=True)}


class Exposed(NamedTuple):
    """A record with its floor, a squared error.

    It has the lower 95 % confidence limit (None where there is none) and the estimate.
    """

    record: int
    lower_limit: float | None
    estimate: float


class MostExposed(list[Exposed]):
    """The most exposed records, the lowest estimate first; `caveats` must be stated with their floors."""

    def __init__(self, found: Iterable[Exposed], caveats: tuple[str, ...]) -> None:
        super().__init__(found)
        self.caveats = caveats

    def __repr__(self) -> str:
        lines = [
            f"record {e.record}: MSE {format_floor(e.estimate)} (estimate without a confidence limit)"
            if e.lower_limit is None
            else f"record {e.record}: MSE at least {format_floor(e.lower_limit)} at 95 % confidence "
            f"(estimate {format_floor(e.estimate)})"
            for e in self
        ]
        return "\n".join([*lines, *self.caveats])
