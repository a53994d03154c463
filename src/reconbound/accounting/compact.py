"""Ledgers of very many records: narrow tensors that round up, memory that is taken when it is written, passes in parts.

Above LARGE records a ledger keeps float32 and int32 numbers. They are computed in float64 and rounded up once where
they are stored, so that no sum, mean or variance is ever too small. A number that is read N times is not copied N
times: what a summary needs is computed part by part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

#: The number of records above which a ledger keeps float32 and int32 numbers.
LARGE = 2**22
#: Records, or numbers, that one part of a pass has.
PART = 2**20
#: Bits of a float64 that one pass of `order_statistics` decides.
_DIGIT = 16

Parts = Callable[[], Iterator[np.ndarray]]


def kinds_for(records: int) -> tuple[torch.dtype, torch.dtype]:
    """Returns the dtypes of sums and of counts in a ledger of this many records.

    >>> kinds_for(1000), kinds_for(10**8)
    ((torch.float64, torch.int64), (torch.float32, torch.int32))
    """
    return (torch.float32, torch.int32) if records > LARGE else (torch.float64, torch.int64)


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a tensor of zeros; on the CPU its memory is taken only where something is written."""
    if device.type != "cpu":
        return torch.zeros(*shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(tuple(shape), dtype=torch.empty(0, dtype=dtype).numpy().dtype))


def parts_of(count: int) -> Iterator[slice]:
    """Yields slices of at most PART that cover `count` rows.

    >>> list(parts_of(3))
    [slice(0, 3, None)]
    """
    yield from (slice(at, min(at + PART, count)) for at in range(0, count, PART))


def rounded_up(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns non-negative float64 numbers in another dtype: never smaller, and never infinite if they were finite.

    What is above the largest float32 becomes that number.

    Args:
        value: float64.
        dtype: float64 or float32.

    >>> float(rounded_up(torch.tensor([0.1], dtype=torch.float64), torch.float32).double()) > 0.1
    True
    """
    if dtype == torch.float64:
        return value
    near = value.to(dtype)
    up = torch.where(near.double() < value, torch.nextafter(near, near.new_tensor(torch.inf)), near)
    return torch.where(value.isinf(), near, up.clamp(max=torch.finfo(dtype).max))


def add_at(total: Tensor, index: Tensor, value: Tensor) -> None:
    """Adds values to a tensor at indices of its last axis, which may repeat; narrow tensors round up.

    Args:
        total: (..., N); it is changed.
        index: (B,).
        value: (..., B).
    """
    if total.dtype != torch.float32:
        total.index_add_(-1, index, value.to(total.dtype))
        return
    rows, place = index.unique(return_inverse=True)
    added = value.new_zeros((*value.shape[:-1], len(rows)), dtype=torch.float64).index_add_(-1, place, value.double())
    total[..., rows] = rounded_up(total[..., rows].double() + added, total.dtype)


def count_where(test: Callable[[slice], Tensor], records: int) -> int:
    """Returns the number of records that pass a test, part by part.

    Args:
        test: slice of records → (n,) of bool.
        records: N.
    """
    return sum(int(test(part).sum()) for part in parts_of(records))


def order_statistics(parts: Parts, ranks: Callable[[int], Sequence[int]]) -> list[float]:
    """Returns the numbers at these places in the sorted order of all numbers, exactly, without sorting or keeping them.

    Each of at most four passes decides 16 bits: non-negative floats are in the order of their bits.

    Args:
        parts: begins a pass over the numbers: float64, not negative, infinite ones among them.
        ranks: the number of numbers → places from 0; asked for only where there are numbers.

    Returns:
        The numbers; none where there are no numbers.

    >>> order_statistics(lambda: iter([np.array([3.0, 1.0]), np.array([2.0])]), lambda count: [0, count - 1])
    [1.0, 3.0]
    """
    first = _whole(parts)
    if first is not None:
        return [] if not len(first) else [float(x) for x in np.sort(first)[list(ranks(len(first)))]]
    prefixes: list[int] = []
    left: list[int] = []
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        counts = {prefix: np.zeros(2**_DIGIT, dtype=np.int64) for prefix in dict.fromkeys(prefixes or [0])}
        for values in parts():
            bits = (np.asarray(values, np.float64) + 0.0).view(np.uint64)  # −0 has the bits of the largest numbers
            above = bits >> np.uint64(shift)
            for prefix, found in counts.items():
                own = above if not prefixes else above[above >> np.uint64(_DIGIT) == prefix]
                found += np.bincount((own & np.uint64(2**_DIGIT - 1)).astype(np.int64), minlength=2**_DIGIT)
        if not prefixes:
            total = int(counts[0].sum())
            if total == 0:
                return []
            left = list(ranks(total))
            prefixes = [0] * len(left)
        for k, (prefix, rank) in enumerate(zip(prefixes, left, strict=True)):
            below = np.cumsum(counts[prefix])
            digit = int(np.searchsorted(below, rank, side="right"))
            prefixes[k], left[k] = prefix << _DIGIT | digit, rank - int(below[digit - 1] if digit else 0)
    return [float(x) for x in np.array(prefixes, dtype=np.uint64).view(np.float64)]


def _whole(parts: Parts) -> np.ndarray | None:
    """Returns all numbers where there is only one part of them, or none."""
    pass_ = parts()
    first, second = next(pass_, np.empty(0)), next(pass_, None)
    return first if second is None else None


def lower_median(parts: Parts) -> float | None:
    """Returns the lower median of the numbers, as torch.median does; None where there are none.

    Args:
        parts: as in `order_statistics`.
    """
    found = order_statistics(parts, lambda count: [(count - 1) // 2])
    return found[0] if found else None


def extremes(values: Tensor, known: Callable[[slice], Tensor], most: int, least: int) -> Tensor:
    """Returns the records with the largest numbers, the largest first, then those with the smallest, the smallest last.

    They are the first and the last ones of a stable sort of all known numbers, and no record is named twice.

    Args:
        values: of each record, (N,).
        known: slice of records → which of them may be named.
        most: how many with the largest.
        least: how many with the smallest.
    """
    count = count_where(known, len(values))
    top, low = min(most, count), min(least, count - min(most, count))
    if top + low == 0:
        return torch.zeros(0, dtype=torch.int64)

    def passes() -> Iterator[np.ndarray]:
        yield from (values[part][known(part)].double().cpu().numpy() for part in parts_of(len(values)))

    ends = order_statistics(passes, lambda n: [n - max(top, 1), max(low, 1) - 1])
    rows = []
    for part in parts_of(len(values)):
        own = values[part].double()
        near = ((own >= ends[0]) & bool(top)) | ((own <= ends[1]) & bool(low))
        rows.append(torch.nonzero(known(part) & near).flatten().cpu() + part.start)
    some = torch.cat(rows)
    order = some[torch.argsort(values[some.to(values.device)].double(), descending=True, stable=True).cpu()]
    return torch.cat([order[:top], order[len(order) - low :]])


def largest(values: Callable[[slice], Tensor], records: int, k: int) -> tuple[Tensor, Tensor]:
    """Returns the k largest numbers and their records, the largest first, part by part; of equal ones the first.

    Args:
        values: slice of records → their numbers, (n,).
        records: N.
        k: how many.
    """
    best, rows = torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
    for part in parts_of(records):
        own = values(part).double().cpu()
        least = torch.topk(own, min(k, len(own))).values[-1]
        place = torch.cat([torch.nonzero(own > least).flatten(), torch.nonzero(own == least).flatten()])[:k]
        best, rows = torch.cat([best, own[place]]), torch.cat([rows, place + part.start])
        order = torch.argsort(best, descending=True, stable=True)[:k]
        best, rows = best[order], rows[order]
    return best, rows


def send(values: Tensor, device: torch.device) -> Tensor:
    """Returns the values on the device. A copy from main memory to a GPU is made while Python goes on.

    Args:
        values: where they are; not to be changed afterwards if they are in pinned memory.
        device: where they are needed.
    """
    if device.type == "cuda" and values.device.type == "cpu":  # from pageable memory it would wait for the device
        return values.pin_memory().to(device, non_blocking=True)
    return values.to(device)
