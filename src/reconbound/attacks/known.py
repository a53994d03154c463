"""The attacker's knowledge, checked: the released weights, the other records, the missing one's label."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from reconbound._internal.checks import InputError, numbers
from reconbound.linear.losses import Logistic, Loss, Softmax, Squared
from reconbound.linear.solver import targets_of


class Known(NamedTuple):
    """Released weights (trials, K, p), features (n − 1, d), the same with the constant feature (n − 1, p), targets."""

    released: np.ndarray
    x: np.ndarray
    rows: np.ndarray
    y: np.ndarray


def known(weights: Any, features: Any, y: Any, label: Any, loss: Loss, intercept: bool) -> Known:
    """Returns arrays of the right shapes, or raises an error that names the argument.

    Args:
        weights: as in `glm.reconstruct`.
        features: as in `glm.reconstruct`.
        y: as in `glm.reconstruct`.
        label: as in `glm.reconstruct`.
        loss: as in `glm.reconstruct`.
        intercept: as in `glm.reconstruct`.
    """
    if not isinstance(loss, Logistic | Softmax | Squared):
        raise InputError("loss", "must be Logistic(), Softmax() or Squared()", loss)
    x = numbers("features", features)
    if x.ndim != 2:
        raise InputError("features", "must have shape (n − 1, d)", f"shape {x.shape}")
    rows = np.hstack([x, np.ones((len(x), 1))]) if intercept else x
    released, p = numbers("weights", weights), rows.shape[1]
    several = isinstance(loss, Softmax)
    if released.ndim != 3 or released.shape[2] != p or (released.shape[1] > 1) != several:
        wanted = f"(trials, {'K' if several else 1}, {p})"
        raise InputError("weights", f"must have shape {wanted} for {loss.name} loss", np.shape(weights))
    classes = released.shape[1]
    targets_of([label], 1, loss, classes, name="label")
    return Known(released, x, rows, targets_of(y, len(x), loss, classes))
