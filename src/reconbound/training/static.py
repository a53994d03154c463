"""Computations at fixed shapes: records are padded into buffers that stay, and a GPU replays what it computed first.

A step of a small network is hundreds of short kernels, and Python launches them more slowly than a GPU runs them. A
CUDA graph launches them at once, but reads and writes the same memory each time. So the rows of a batch are copied into
buffers of a few sizes. Rows beyond the batch repeat its first record with a mask of 0: they add exactly zero and are
never measured. A batch that exceeds the largest size is computed eagerly.

On a CPU the same code runs without graphs, which the tests compare with the eager computation. Only `capture` and the
branch that calls it need a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from reconbound._internal.checks import warn_user
from reconbound.accounting.compact import send
from reconbound.fisher.sums import check_next_batch
from reconbound.validate.model import ReconboundWarning

#: A function's tensors by name. Those named here are of the whole batch; all others have a row for each record.
Found = dict[str, Tensor]
WHOLE = ("total", "finite", "released")
#: Two computations of the same numbers differ by less, relative to them and to the sum of all norms.
_ROUNDING, _LEAST = 5e-2, 1e-4
_FEW = 0.05  # share of records whose norms may differ by more
_MOVES = 4  # times that a model's memory may move before its work is computed eagerly
_WORDS = 8  # 64-bit numbers in a secret


class Rows:
    """Buffers for the rows of some records.

    Args:
        data: inputs and targets, trees of tensors with one row per record; on the device or in main memory.
        size: the largest number of records.
        device: of the buffers.

    Attributes:
        index: the records, (size,); padding repeats the first.
        inputs: their inputs.
        targets: their targets.
        mask: 1 for a record, 0 for padding, (size,).
        words: of the secret that was sent with the records, (16,), int32.
        more: further buffers of this size, by name; filled by whoever needs them.
    """

    def __init__(self, data: tuple[Any, Any], size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        sent = torch.zeros(_WORDS + size + 1, dtype=torch.int64, device=device)  # a secret, the records, their number
        self._sent, self.index, self._count = sent, sent[_WORDS:-1], sent[-1]
        self.words = sent[:_WORDS].view(torch.int32)
        self.mask = torch.zeros(size, device=device)
        self._places = torch.arange(size, device=device)

        def buffer(leaf: Tensor) -> Tensor:
            return torch.zeros(size, *leaf.shape[1:], dtype=leaf.dtype, device=device)

        self.inputs, self.targets = tree_map_only(Tensor, buffer, data)
        pairs = [(s.detach(), b) for s, b in zip(_tensors(data), _tensors((self.inputs, self.targets)), strict=True)]
        self._near = [pair for pair in pairs if pair[0].device == device]
        self._far = [pair for pair in pairs if pair[0].device != device]
        self.more: dict[str, list[Any]] = {}

    def send(self, records: Tensor, secret: bytes = b"") -> None:
        """Sends the indices of these records, at least one and at most `size`, and rows that are not on the device.

        Args:
            records: their indices, in main memory.
            secret: 64 bytes for `words`, or none.
        """
        end = _WORDS + len(records)
        sent = torch.empty(_WORDS + self.size + 1, dtype=torch.int64, pin_memory=self.device.type == "cuda")
        numbers = sent.numpy()  # the same memory
        numbers[:_WORDS] = np.frombuffer(secret, dtype=np.int64) if secret else 0
        numbers[_WORDS:end] = records
        numbers[end:] = records[0]
        numbers[-1] = len(records)
        self._sent.copy_(sent, non_blocking=True)
        for source, buffer in self._far:
            buffer.copy_(send(source.index_select(0, sent[_WORDS:-1].to(source.device)), self.device))

    def gather(self) -> None:
        """Copies the rows of the records that were sent; all of it can be in a CUDA graph."""
        torch.lt(self._places, self._count, out=self.mask)
        for source, buffer in self._near:
            torch.index_select(source, 0, self.index, out=buffer)

    def fill(self, records: Tensor) -> None:
        """Copies the rows of these records into the buffers."""
        self.send(records)
        self.gather()


class Near:
    """Data on the device: copied to a GPU if they fit into a quarter of its free memory, otherwise left where they are.

    Args:
        source: inputs and targets, as in Rows.
        device: where rows are needed.

    Attributes:
        data: the source, or its copy.
    """

    def __init__(self, source: tuple[Any, Any], device: torch.device) -> None:
        self._sources = _tensors(source)
        size = sum(leaf.numel() * leaf.element_size() for leaf in self._sources if leaf.device != device)
        self.data = source
        if device.type != "cpu" and 4 * size <= free_memory(device):
            self.data = tree_map_only(Tensor, lambda leaf: leaf.detach().to(device), source)
        self._versions = [leaf._version for leaf in self._sources]

    def refresh(self) -> None:
        """Copies again what has been changed in place since."""
        versions = [leaf._version for leaf in self._sources]
        if versions != self._versions:
            self._versions = versions
            for leaf, own in zip(self._sources, _tensors(self.data), strict=True):
                if own.device != leaf.device:
                    own.copy_(leaf.detach())


def free_memory(device: torch.device) -> int:
    """Returns the free bytes of a GPU."""
    return int(torch.cuda.mem_get_info(device)[0])


class StaticWork:
    """A function of records whose shapes are one of a few, computed as a CUDA graph on a GPU.

    The first call at each size, and calls 2, 4, 8, ... of all, are compared with the eager computation and its checks:
    what a graph cannot follow (a loss that depends on Python's state, for example) would otherwise go unnoticed. Where
    they differ, or where the work cannot be captured, it is computed eagerly from then on, and a warning says so once.

    Args:
        model: whose parameters the function reads. Where they move in memory, the work is captured anew.
        data: as in Rows.
        sizes: ascending.
        function: rows → tensors by name, of which "total" and "norm" are compared. It must not wait for the device.
        prepare: called with the rows before each call, for what a graph must not contain; None for nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        data: tuple[Any, Any],
        sizes: Sequence[int],
        function: Callable[[Rows], Found],
        *,
        prepare: Callable[[Rows], None] | None = None,
    ) -> None:
        self.model, self.data, self.sizes = model, data, tuple(sizes)
        self.function, self.prepare = function, prepare
        self.device, self._leaves = next(model.parameters()).device, _tensors(data)
        self.graphs = self.device.type == "cuda"
        self.eager = False  # from now on
        self._calls, self._moves = 0, 0
        self._place: list[Any] = []
        self.pool: Any = None  # of all its graphs: their tensors are copied before the next replay
        self._recorded: dict[int, tuple[Rows, torch.cuda.CUDAGraph | None, Found]] = {}

    def __call__(self, records: Tensor, secret: bytes = b"") -> Found | None:
        """Returns copies of the function's tensors, without the rows of padding; None: compute them eagerly.

        Args:
            records: their indices, in main memory.
            secret: as in Rows.
        """
        self._forget_if_moved()
        size = None if self.eager or len(records) == 0 else self._size(len(records))
        if size is None:
            return None
        try:
            found, new = self._replayed(records, size, secret)
            self._calls += 1
            if not new and self._calls & (self._calls - 1):
                return found
            check_next_batch(self.model)  # of which a graph repeats nothing
            alone = Rows(self.data, len(records), self.device)
            self._fill(alone, records)
            if not differ(found, self._computed(alone)):
                return found
            why = "depends on more than its records and parameters, which a CUDA graph cannot follow"
        except (RuntimeError, ValueError) as reason:  # the eager computation raises the function's own again
            if not self.graphs and not isinstance(reason, ValueError):
                raise
            why = f"cannot be computed at fixed shapes ({(str(reason) or type(reason).__name__).splitlines()[0][:200]})"
        self._give_up(why)
        return None

    def _size(self, records: int) -> int | None:
        """Returns the size to which so many records are padded; None if there are more than the largest size."""
        level = next((size for size in self.sizes if size >= records), None)
        return level if level is None or level < 2 * records else -(-records // 8) * 8

    def _replayed(self, records: Tensor, size: int, secret: bytes) -> tuple[Found, bool]:
        """Returns the tensors, and whether this size is computed for the first time."""
        new = size not in self._recorded
        rows, graph, found = (Rows(self.data, size, self.device), None, {}) if new else self._recorded[size]
        self._fill(rows, records, secret)
        if self.graphs:
            if graph is None:
                buffers = [buffer.clone() for buffer in self.model.buffers()]
                graph, found = capture(lambda: self._computed(rows), self.device, self.pool)
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            graph.replay()
        else:
            found = self._computed(rows)
        self._recorded[size] = rows, graph, found
        return _copied(found, len(records)), new

    def _fill(self, rows: Rows, records: Tensor, secret: bytes = b"") -> None:
        rows.send(records, secret)
        if self.prepare is not None:
            rows.gather()
            self.prepare(rows)

    def _computed(self, rows: Rows) -> Found:
        if self.prepare is None:  # the same graph copies the rows
            rows.gather()
        return self.function(rows)

    def _forget_if_moved(self) -> None:
        """Drops graphs that would read memory that is no longer the model's, or a model in another mode."""
        if self.eager:
            return
        place: list[Any] = [leaf.data_ptr() for leaf in self._leaves]
        modules: list[nn.Module | None] = [self.model]
        for module in modules:  # each as often as it occurs: `modules()` looks for those it has met, which takes longer
            if module is not None:
                place.append(module.training)
                tensors = (*module._parameters.values(), *module._buffers.values())
                place += [(t.data_ptr(), t.requires_grad) for t in tensors if t is not None]
                modules += module._modules.values()
        if place != self._place:
            self._moves += bool(self._place)
            self._place, self._recorded, self.pool = place, {}, new_pool(self.device)
            if self._moves > _MOVES:
                self._give_up("has parameters or buffers that are replaced again and again, not changed in place")

    def _give_up(self, why: str) -> None:
        self.eager, self._recorded = True, {}
        if self.graphs:
            torch.cuda.empty_cache()  # of the memory of graphs, which nothing else may use
        what = f"the work of a step of this {type(self.model).__name__} {why}"
        warn_user(f"{what}: it is computed eagerly, with the same results, more slowly", ReconboundWarning)


def _copied(found: Found, records: int) -> Found:
    """Returns copies of a function's tensors, without the rows of padding. Numbers of one kind are copied at once."""
    own, alike = dict[str, Tensor](), dict[torch.dtype, list[str]]()
    for name, value in found.items():
        if name in WHOLE or value.dim() != 1:
            own[name] = (value if name in WHOLE else value[:records]).detach().clone()
        else:
            alike.setdefault(value.dtype, []).append(name)
    for names in alike.values():
        own |= zip(names, torch.stack([found[name][:records].detach() for name in names]).unbind(), strict=True)
    return own


def differ(found: Found, other: Found) -> bool:
    """Returns whether two computations differ by more than rounding; numbers that are not finite are left to others.

    Args:
        found: a function's tensors.
        other: those of another computation, eagerly.
    """
    a, b = found["norm"].double(), other["norm"].detach().double()
    off = (a - b).abs() > _ROUNDING * b + _LEAST * b.mean()
    if bool(off.any()):  # a graph clips records further whose places nearly cancel (fisher/passes/by_layer.py)
        return float(off.double().mean()) > _FEW
    if "total" not in found:
        return False
    a, b = found["total"].double(), other["total"].detach().double()
    least = _LEAST * float(other["norm"].detach().double().sum())
    return float((a - b).norm()) > _ROUNDING * float(b.norm()) + least


def new_pool(device: torch.device) -> Any:
    """Returns memory for graphs that are never replayed two at a time; None where there are none."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def capture(function: Callable[[], Any], device: torch.device, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Returns a CUDA graph of a function, and what it returned while it was captured, which each replay overwrites.

    Args:
        function: takes nothing; it must not wait for the device.
        device: the GPU.
        pool: the memory of other graphs, which it then shares.
    """
    here = torch.cuda.current_stream(device)
    with torch.cuda.stream(here):  # a capture that fails leaves its own stream behind as the current one
        side = torch.cuda.Stream(device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(2):  # cuDNN and cuBLAS choose and allocate before the capture
                function()
        here.wait_stream(side)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        try:
            with no_collection(), torch.cuda.graph(graph, pool=pool):
                found = function()
        except Exception:
            with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph()):
                torch.zeros(1, device=device)  # a capture that ends well frees torch's generator of the failed one
            raise
    return graph, found


@contextmanager
def no_collection() -> Iterator[None]:
    """Frees unused memory, then nothing more: freeing another graph during a capture makes the capture fail."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
