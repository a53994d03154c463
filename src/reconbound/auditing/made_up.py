"""Records that are made up: what is published of a model is found on these, so that it says nothing of a real one."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from reconbound.data import Dataset
from reconbound.data.tables import MISSING


def made_up_records(dataset: Dataset, classes: int, count: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of records that could be in a data set, from the types of its columns only.

    Numbers and pixels are uniform in their range, a category is one of those that there are, nothing is missing, and
    tokens are uniform in the vocabulary.

    Args:
        dataset: the data set; no value of a record is read.
        classes: the number of classes; of no use where the target is a number.
        count: the number of records.
    """
    rng, shape = np.random.default_rng(0), (count, *dataset.shape)
    if dataset.kind == "tokens":
        inputs = rng.integers(0, dataset.vocabulary or 1, shape).astype(dataset.inputs.dtype)
    else:
        inputs = rng.random(shape).astype(dataset.inputs.dtype)
    groups: dict[str, list[int]] = defaultdict(list)
    for k, feature in enumerate(dataset.features if dataset.kind == "table" else ()):
        if feature.column and feature.name.endswith(MISSING) and not feature.category:
            inputs[:, k] = 0
        elif feature.column or feature.category:
            groups[feature.source].append(k)
    for columns in groups.values():
        inputs[:, columns] = np.eye(len(columns), dtype=inputs.dtype)[rng.integers(0, len(columns), count)]
    targets = np.arange(count) % max(1, classes) if dataset.task == "classes" else rng.random(count)
    return inputs, targets.astype(dataset.targets.dtype)
