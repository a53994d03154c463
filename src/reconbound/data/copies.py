"""Several rows of one person: exact copies in the data, and what they mean for floors (docs/theory/accounting.md)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reconbound._internal.checks import InputError


def find_copies(*parts: Any) -> list[list[int]]:
    """Returns the groups of records that are equal in all parts, each in order, the largest group first.

    Args:
        parts: arrays or tensors with one row per record, or tuples and dictionaries of such; others are left out.

    >>> find_copies(np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    [[0, 2]]
    """
    leaves = [leaf for part in parts for leaf in tree_leaves(part) if isinstance(leaf, (Tensor, np.ndarray))]
    arrays = [_rows(leaf) for leaf in leaves if leaf.ndim and len(leaf)]
    groups: dict[bytes, list[int]] = {}
    for record in range(len(arrays[0]) if arrays else 0):
        digest = hashlib.blake2b(digest_size=16)
        for array in arrays:
            digest.update(array[record].data)
        groups.setdefault(digest.digest(), []).append(record)
    return sorted((group for group in groups.values() if len(group) > 1), key=lambda group: (-len(group), group))


def _rows(values: Tensor | np.ndarray) -> np.ndarray:
    """Returns one row of bytes per record; 0 and −0 are alike."""
    if isinstance(values, Tensor):
        small = values.is_floating_point() and values.itemsize < 4
        values = (values.float() if small else values).numpy(force=True)
    flat = values.reshape(len(values), -1)
    plain = flat + 0 if np.issubdtype(flat.dtype, np.floating) else flat
    return np.ascontiguousarray(plain).view(np.uint8).reshape(len(values), -1)


def describe_copies(groups: Sequence[Sequence[int]], records: int) -> tuple[str, ...]:
    """Returns what floors must say of a data set with copies: one sentence, or nothing.

    >>> describe_copies([[0, 2, 5], [3, 4]], 10)
    ('5 of 10 records have exact copies (at most 3 of one): floors are for one row; for somebody with k of them see
    group_floor',)
    """
    if not groups:
        return ()
    some, most = sum(len(group) for group in groups), len(groups[0])
    copies = f"{some:,} of {records:,} records have exact copies (at most {most:,} of one)"
    return (f"{copies}: floors are for one row; for somebody with k of them see group_floor",)


def checked_rows(rows: Any, records: int) -> list[int]:
    """Returns the rows of a group as a list, or raises an InputError: one or more different records."""
    try:
        found = [int(row) for row in rows]
        whole = all(row == given for row, given in zip(found, rows, strict=True))
    except (TypeError, ValueError):
        found, whole = [], False
    inside = all(0 <= row < records for row in found)
    if not (whole and found and inside and len(set(found)) == len(found)):
        raise InputError("rows", f"must be different records from 0 to {records - 1}, one or more", rows)
    return found
