"""The other worlds of an audit, in which private parts of a record have public values, and records that are made up.

What a divergence to such a world says: docs/theory/any_attacker.md 6.7 and 6.8. What is published of a model is found
on made-up records, so that it says nothing of a real one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_number
from reconbound.data import Dataset
from reconbound.data.tables import MISSING
from reconbound.fisher.worlds import REMOVED, Replacement

#: The name of the world in which the whole private part is replaced.
PRIVATE = "private"
#: The kind of the worlds in which a category is replaced.
CATEGORY = "category"
#: Columns that get a world of their own at most: each costs one more gradient of every measured record.
MOST_WORLDS = 40
#: Texts of at most so many tokens have a world for each.
FEW_TOKENS = 16
#: What stands in the place of every token.
_TOKEN = "token number 0"
#: Of a number in its range: what stands in its place.
_MIDDLE = 0.5


@dataclass(frozen=True)
class AuditWorld:
    """A world of an audit.

    Attributes:
        kind: "column" (of numbers), "category" (a column of categories), "token" (at one place), or "private" (the
            whole private part).
        world: what is replaced, by flat columns of a record's input.
        reference: what stands in its place, for people: "38.5 years", "an empty cell".
    """

    kind: str
    world: Replacement
    reference: str


def worlds_of(dataset: Dataset) -> dict[str, AuditWorld]:
    """Returns the replaced worlds of a data set by name: one for each private column, and "private" for all together.

    A number has the middle of its range in its place; a mark that it is missing stays, as it is public. A category has
    zeros only, as an empty cell. The first
    MOST_WORLDS columns get a world of their own. Where a table has only one private column, that is the only world. Of
    images there is only "private". Of tokens there is "private", all of them token 0, and in texts of at most
    FEW_TOKENS a world for each place.

    Args:
        dataset: the data of the audit.
    """
    if dataset.kind == "image":
        place = None if dataset.private is None else dataset.private.tolist()
        return {PRIVATE: AuditWorld(PRIVATE, Replacement(_MIDDLE, place), "mid-grey")}
    if dataset.kind == "tokens":
        length = dataset.shape[0]
        single = {f.name: [k] for k, f in enumerate(dataset.features)} if 1 < length <= FEW_TOKENS else {}
        places = {name: AuditWorld("token", Replacement(0, place), _TOKEN) for name, place in single.items()}
        return {**places, PRIVATE: AuditWorld(PRIVATE, Replacement(0), _TOKEN)}
    parts = dataset.private_columns
    if not parts:
        raise InputError("private", "must name a column: nothing is protected otherwise", dataset.name)
    names = world_names(parts)
    found = {}
    values = np.array([0.0 if feature.category else _MIDDLE for feature in dataset.features])
    for column, own in list(parts.items())[:MOST_WORLDS]:
        first, kind, reference = dataset.features[own[0]], CATEGORY, "an empty cell"
        if not first.category:  # the middle of the range, in the data's own units
            kind, reference = "column", f"{format_number(first.low / 2 + first.high / 2, 4)} {first.unit}".strip()
        found[names[column]] = AuditWorld(kind, Replacement(values[own].tolist(), own.tolist()), reference)
    if len(parts) == 1:
        return found
    together = np.concatenate(list(parts.values()))
    replaced = Replacement(values[together].tolist(), together.tolist())
    return {**found, PRIVATE: AuditWorld(PRIVATE, replaced, "all of these")}


def world_names(columns: Iterable[str]) -> dict[str, str]:
    """Returns the name of each column's world: its own, unless another world is called so.

    >>> world_names(["age", "removed"])
    {'age': 'age', 'removed': "column 'removed'"}
    """
    names, taken = {}, {*columns, REMOVED, PRIVATE}
    for column in columns:
        name = column
        while name in (REMOVED, PRIVATE, "") or (name != column and name in taken):
            name = f"column {name!r}"
        names[column] = name
        taken.add(name)
    return names


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
