"""The processes of one training (the ranks of torch.distributed, or one process), and the shards of records they share.

Whatever a rank does that may fail goes through `gather` or `from_first`, and every rank goes through the same ones in
the same order. So an error on one rank ends all of them with one line, and none waits for a rank that has ended.

Objects and tensors on the CPU go through a group that takes them: NCCL takes tensors on its GPU only. Beside a default
group of that kind stands one of gloo, in which a rank that ended is noticed at once.

The clipped gradients of a shard are summed by themselves, on any rank, and the sums are then added exactly:

    S = Σ_v round(S_v/g) · g        S_v the clipped sum of shard v in floating point, g a power of two

Whole numbers add up to the same in any order. So S has the same bits however many ranks share the shards, and with it
the noise, whose key is bound to those bits. Proof of the law of what is released: docs/theory/accounting.md.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from reconbound._internal.checks import InputError, warn_user, whole
from reconbound._internal.files import json_digest
from reconbound.divergences import sensitivity
from reconbound.training.sampling import WHOLE, Shard
from reconbound.training.settings import Settings
from reconbound.training.step import StepWork
from reconbound.validate.model import ReconboundWarning

if dist.is_available():
    # torch imports it late, for its compiler. Its functions then keep the group that is the default at that time, which
    # nobody can destroy any more: the process aborts when it ends ("terminate called without an active exception").
    import torch.distributed.nn.functional

T = TypeVar("T")

#: The groups of gloo beside default groups, neither of them kept alive: destroy_process_group ends both.
_BESIDE: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


class TrainingError(RuntimeError):
    """Training cannot continue; the last good state is in the checkpoint."""


@dataclass(frozen=True)
class Ranks:
    """The processes that train together.

    Attributes:
        rank: the number of this process, from 0.
        size: the number of processes.
    """

    rank: int = 0
    size: int = 1

    @classmethod
    def present(cls) -> Ranks:
        """Returns those of torch.distributed's default group; one process by itself where none was initialised."""
        if not (dist.is_available() and dist.is_initialized()):
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Calls a function on each rank, and returns what it returned there, in their order.

        Args:
            make: the function; what it returns is small and on the CPU.

        Raises:
            TrainingError: it failed on another rank, or another rank is lost.
        """
        if self.size == 1:
            return [make()]
        try:
            own = make()
        except Exception as reason:
            with suppress(TrainingError):
                self._exchange((False, f"{type(reason).__name__}: {_one_line(reason)}"))
            raise
        found = self._exchange((True, own))
        for rank, (made, value) in enumerate(found):
            if not made:
                raise TrainingError(f"rank {rank} failed, and rank {self.rank} ends with it: {value}")
        return [value for _, value in found]

    def try_all(self, make: Callable[[], T]) -> T:
        """Calls a function on each rank, and returns what it returned on this one.

        Args:
            make: the function.

        Raises:
            TrainingError: it failed on another rank, or another rank is lost.
        """
        if self.size == 1:
            return make()
        own: list[T] = []
        self.gather(lambda: own.append(make()))
        return own[0]

    def from_first(self, make: Callable[[], T]) -> T:
        """Calls a function on rank 0, and returns what it returned on every rank.

        Args:
            make: the function; what it returns is on the CPU.
        """
        if self.size == 1:
            return make()
        made: list[Any] = [None]

        def on_first() -> None:
            if self.rank == 0:
                made[0] = make()

        self.gather(on_first)
        self._send(lambda: dist.broadcast_object_list(made, src=0, group=_group_of_cpu()))
        found: T = made[0]
        return found

    def tensor_from_first(self, make: Callable[[], Tensor], zeros: Callable[..., Tensor]) -> Tensor:
        """Calls a function on rank 0, and returns the tensor that it returned on every rank, bit for bit.

        Args:
            make: the function; the result is float64.
            zeros: makes zeros of the same shape and device.
        """
        if self.size == 1:
            return make()
        found = make() if self.rank == 0 else zeros(dtype=torch.float64)
        self._send(lambda: dist.broadcast(found, src=0, group=_group_of(found)))
        return found

    def sum_whole(self, numbers: Tensor) -> Tensor:
        """Returns the sum of whole numbers over all ranks, which no order of adding changes.

        Args:
            numbers: of this rank, int64.
        """
        if self.size == 1:
            return numbers
        found = numbers.clone()
        self._send(lambda: dist.all_reduce(found, group=_group_of(found)))
        return found

    def check_alike(self, facts: Mapping[str, Any]) -> None:
        """Refuses facts that differ between ranks, and names the first that does. Only digests are sent.

        Args:
            facts: values that JSON can hold, by name.
        """
        if self.size == 1:
            return
        found = self.gather(lambda: {name: json_digest(value) for name, value in facts.items()})
        for rank, theirs in enumerate(found):
            for name, value in found[0].items():
                if theirs.get(name) != value:
                    why = "must be the same on all ranks, the whole of it (each takes its own share)"
                    raise InputError(name, why, f"another one on rank {rank} than on rank 0")

    def _exchange(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * self.size
        self._send(lambda: dist.all_gather_object(found, own, group=_group_of_cpu()))
        return found

    def _send(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except RuntimeError as reason:  # of the backend: a connection that was closed, or a time limit
            why = " ".join(str(reason).split())[:200]
            lost = f"rank {self.rank} (process {os.getpid()}) has lost another rank, which ended or hangs"
            raise TrainingError(f"{lost}: start again from the last checkpoint ({why})") from reason


def refuse_several(name: str) -> None:
    """Refuses work that one process does by itself, where torch.distributed or torchrun has started several.

    Args:
        name: of the work.
    """
    started = int(os.environ.get("WORLD_SIZE", "1")) if dist.is_available() and dist.is_torchelastic_launched() else 1
    size = max(started, Ranks.present().size)
    if size > 1:
        raise InputError(name, "must run on one rank: only PrivateSGD and watch share their work among ranks", size)


def _group_of(tensor: Tensor) -> Any:
    """Returns the group that a tensor is sent through: None, the default one, for tensors on a GPU."""
    return _group_of_cpu() if tensor.device.type == "cpu" else None


def _group_of_cpu() -> Any:
    """Returns the group for objects and tensors on the CPU: None, the default one, if it takes them.

    Otherwise one of gloo with the same ranks and time limit, made at the first call: all ranks must call this together.
    """
    if "cpu:" in dist.get_backend_config():
        return None
    own: Any = dist.group.WORLD
    made = _BESIDE.get(own)
    found = None if made is None else made()
    if found is None:
        found = dist.new_group(backend="gloo", timeout=_time_limit(own))
        _BESIDE[own] = weakref.ref(found)
    return found


def _time_limit(group: Any) -> timedelta | None:
    """Returns the time limit that a group was given; None, which stands for torch's own, where it does not say."""
    with suppress(AttributeError, RuntimeError, IndexError):  # torch has no public name for it
        found = group._get_backend(group._device_types[0]).options._timeout
        return found if isinstance(found, timedelta) else None
    return None


def _one_line(reason: Exception) -> str:
    r"""Returns an error's message on one line; of a long one the first line and the last.

    A DataLoader worker's begins with the name of the worker and ends with the reason; between them is a traceback.

    >>> _one_line(OSError("two\nlines"))
    'two lines'
    """
    lines = [" ".join(line.split()) for line in str(reason).splitlines() if line.strip()]
    whole = " ".join(lines)
    return whole if len(whole) <= 300 else f"{lines[0][:250]} … {lines[-1][-250:]}" if len(lines) > 1 else whole[:500]


def on_cpu(value: Any) -> Any:
    """Returns a value with its tensors on the CPU, also those in lists, tuples, dictionaries and dataclasses."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if isinstance(value, list):
        return [on_cpu(v) for v in value]
    if isinstance(value, dict):
        return {name: on_cpu(v) for name, v in value.items()}
    if isinstance(value, tuple):
        parts = [on_cpu(v) for v in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_cpu(getattr(value, f.name)) for f in fields(value)})
    return value


_BITS = 61  # of a sum, beside the sign: the sum of all rounded shards then fits into 63
Zeros = Callable[..., Tensor]


def make_shards(records: int, count: int) -> tuple[Shard, ...]:
    """Returns shards of equal size, to a record, in the order of the records.

    Args:
        records: N.
        count: the number of shards.

    >>> [shard.span for shard in make_shards(10, 3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    count = whole("shards", count)
    if count > records:
        raise InputError("shards", f"must be at most the number of records ({records})", count)
    if count == 1:
        return (WHOLE,)
    return tuple(Shard(v, count, (v * records // count, (v + 1) * records // count)) for v in range(count))


def grid_of(settings: Settings, records: int) -> float:
    """Returns g, the power of two on whose multiples sums are added: no sum of clipped gradients has more than 2⁶¹.

    Args:
        settings: the clip and its norm.
        records: N, of which all may take part.

    >>> grid_of(Settings(1.0, 1.0, 0.5, clip="hard"), 1000) == 2.0**-51
    True
    """
    largest = settings.max_grad_norm * sensitivity(settings.clip) * records
    return math.ldexp(1.0, math.frexp(largest)[1] - _BITS)


def warn_of_idle(shards: Sequence[Shard], ranks: Ranks) -> None:
    """Warns on the first rank where there are more ranks than shards."""
    idle = ranks.size - len(shards)
    if idle > 0 and ranks.rank == 0:
        more = f"{idle} of {ranks.size} ranks have nothing to do: this run has {len(shards)} shards. To"
        warn_user(f"{more} use more ranks, begin it with more shards", ReconboundWarning)


def compute_shards(
    shards: Sequence[Shard], ranks: Ranks, zeros: Zeros, grid: float, compute: Callable[[Shard], StepWork]
) -> StepWork:
    """Computes a step: each rank its shards, and all ranks have the batch, the sum and every measurement afterwards.

    Args:
        shards: all of them.
        ranks: the processes.
        zeros: makes zeros of the sum's shape and device.
        grid: g.
        compute: shard → its part of the batch, and what the step computes for it.

    Returns:
        The work of the whole step. Its sum is in units of g, int64; a single shard's is as it was computed, on its
        owner only.
    """
    total = zeros(dtype=torch.int64)

    def own() -> list[tuple[int, StepWork]]:
        nonlocal total
        found = []
        for shard in shards:
            if shard.owner(ranks.size) == ranks.rank:
                work = compute(shard)
                total = work.total if len(shards) == 1 else total + (work.total.double() / grid).round().long()
                found.append((shard.number, _portable(work)))
        return found

    parts = sorted((part for some in ranks.gather(own) for part in some), key=lambda part: part[0])
    check_apart(shards, [(number, work.batch) for number, work in parts])
    works = [work for _, work in parts]
    return StepWork(
        torch.cat([work.batch for work in works]),
        total if len(shards) == 1 else ranks.sum_whole(total),
        torch.cat([work.clipped_norm for work in works]),
        None,
        [one for work in works for one in work.information],
        [one for work in works for one in work.distances],
        next((work.followed for work in works if work.followed is not None), None),
    )


def check_apart(shards: Sequence[Shard], parts: Sequence[tuple[int, Tensor]]) -> None:
    """Refuses parts of a step in which a shard is missing, counted twice, or has records of another one.

    Args:
        shards: all of them.
        parts: of each shard its number and its records, in the order of their numbers.
    """
    if [number for number, _ in parts] != [shard.number for shard in shards]:
        raise TrainingError(f"each shard must be computed once, not {[number for number, _ in parts]}")
    for shard, (_, records) in zip(shards, parts, strict=True):
        if (
            shard.span
            and len(records)
            and not shard.span[0] <= int(records.min()) <= int(records.max()) < shard.span[1]
        ):
            raise TrainingError(f"shard {shard.number} has records of another shard")


def _portable(work: StepWork) -> StepWork:
    """Returns what other ranks need of a shard's work, on the CPU: no gradients."""
    information = [one._replace(found=replace(one.found, gradient_sum={})) for one in work.information]
    followed = None if work.followed is None else replace(work.followed, gradient_sum={})
    found: StepWork = on_cpu(replace(work, total=work.total[:0], information=information, followed=followed))
    return found
