"""Which records are held out, and which are kept when only some are wanted: by seed, class by class."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from reconbound._internal.checks import DataError, InputError, number, whole


@dataclass(frozen=True)
class Division:
    """Says how records are divided: the seed, the share held out, the largest number to train on."""

    seed: int = 0
    test_share: float = 0.2
    limit: int | None = None

    def choose_rows(
        self, targets: np.ndarray, task: str, held: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns rows to train on and rows to test on.

        Args:
            targets: (N,), of all records.
            task: "classes" or "number".
            held: (N,) of bool, the test records where the data have their own.
        """
        if held is None:
            train, test = split(targets, seed=self.seed, test_share=self.test_share, task=task)
        else:
            train, test = np.flatnonzero(~held), np.flatnonzero(held)
        return train[keep(targets[train], self.limit, seed=self.seed, task=task)], test


def split(targets: np.ndarray, *, seed: int, test_share: float, task: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows to train on and rows to test on, each in ascending order.

    Of every class its share, rounded to the nearest whole record; at least one record of each stays for training.
    Depends on the classes and the seed, never on the inputs.
    """
    share = number("test_share", test_share, at_least=0.0, below=1.0)
    rng = np.random.default_rng(whole("seed", seed, at_least=0))
    groups = _groups(targets, task)
    held = [rng.permutation(rows)[: min(math.floor(share * len(rows) + 0.5), len(rows) - 1)] for rows in groups]
    test = np.sort(np.concatenate(held))
    train = np.setdiff1d(np.arange(len(targets)), test, assume_unique=True)
    return train, test


def keep(targets: np.ndarray, limit: int | None, *, seed: int, task: str) -> np.ndarray:
    """Returns at most `limit` rows, ascending: of every class its share (largest remainders), drawn by the seed."""
    count = len(targets)
    if limit is None or whole("limit", limit) >= count:
        return np.arange(count)
    groups = _groups(targets, task)
    if limit < len(groups):
        raise InputError("limit", f"must be at least {len(groups)}, one record a class", limit)
    exact = np.array([limit * len(rows) / count for rows in groups])
    sizes = np.maximum(np.floor(exact), 1).astype(int)
    while sizes.sum() < limit:
        room = np.array([size < len(rows) for size, rows in zip(sizes, groups, strict=True)])
        sizes[np.argmax(np.where(room, exact - sizes, -np.inf))] += 1
    while sizes.sum() > limit:  # classes with less than one record's share took theirs from the largest
        sizes[np.argmax(np.where(sizes > 1, sizes - exact, -np.inf))] -= 1
    rng = np.random.default_rng((whole("seed", seed, at_least=0), 1))
    return np.sort(np.concatenate([rng.permutation(rows)[:k] for rows, k in zip(groups, sizes, strict=True)]))


def _groups(targets: np.ndarray, task: str) -> list[np.ndarray]:
    if len(targets) == 0:
        raise DataError("the data set holds no records")
    if task == "number":
        return [np.arange(len(targets))]
    return [np.flatnonzero(targets == k) for k in np.unique(targets)]
