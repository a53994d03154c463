"""The records of a training: tensors, or a map-style torch Dataset whose records are read when they are asked for."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_structure
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from reconbound._internal.checks import InputError, function, whole
from reconbound.data.dataset import Copies, copies_among, record_digests
from reconbound.validate.model import model_dtype

#: Bytes of a mapped file that are copied into memory at most, to change their dtype.
MOST_COPIED = 2**28
_NARROW = (torch.int8, torch.int16, torch.int32, torch.uint16, torch.uint32, torch.uint64)
#: Records that are read together in the pass over all of them.
_TOGETHER = 1024


class DatasetRows:
    """The records of a map-style torch Dataset, in place of the tensors `inputs` and `targets`.

    Only the records that a step needs are read. All are read once before training, for a digest of the data and to
    find copies.

    Args:
        dataset: its items are pairs (input, target), each a tensor, an array or a number, or a tuple or dictionary of
            such; of the same shapes for every record, and the same whenever they are read: no random augmentation.
        workers: processes that read, as num_workers of a DataLoader; 0: this process.
        collate: items → a batch, as collate_fn of a DataLoader.

    >>> pairs = torch.utils.data.TensorDataset(torch.arange(6.0).reshape(3, 2), torch.tensor([0, 1, 0]))
    >>> DatasetRows(pairs).read(torch.tensor([2, 0]))
    (tensor([[4., 5.],
            [0., 1.]]), tensor([0, 0]))
    """

    def __init__(
        self, dataset: Dataset[Any], *, workers: int = 0, collate: Callable[[list[Any]], Any] = default_collate
    ) -> None:
        sized = callable(getattr(dataset, "__len__", None)) and callable(getattr(dataset, "__getitem__", None))
        if not isinstance(dataset, Dataset) or isinstance(dataset, IterableDataset) or not sized:
            what = "must be a map-style torch Dataset, with a length and items by their number"
            raise InputError("dataset", what, f"a {type(dataset).__name__}")
        function("collate", collate, "items → a batch")
        self._length, self._asked = len(dataset), _Asked()  # type: ignore[arg-type]
        if not self._length:
            raise InputError("dataset", "must have a record", 0)
        self.workers, self._scanned = whole("workers", workers, at_least=0), (b"", Copies(0, np.empty(0, np.int64)))
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._asked,
            num_workers=self.workers,
            collate_fn=collate,
            persistent_workers=self.workers > 0,
            generator=torch.Generator(),  # the global one is not touched
        )
        self.kind: torch.dtype | None = None
        if collate is not default_collate:
            _check_collate(collate, [dataset[i] for i in range(min(2, self._length))])
        first = torch.arange(min(2, self._length))
        once, again = (tree_leaves(self.read(first)) for _ in range(2))
        if not all(torch.equal(_bytes(a), _bytes(b)) for a, b in zip(once, again, strict=True)):
            what = "must have items that are the same whenever they are read: each measurement is of the record itself"
            raise InputError("dataset", what, f"a {type(dataset).__name__} with random items")

    def __len__(self) -> int:
        return self._length

    def read(self, indices: Tensor) -> tuple[Any, Any]:
        """Returns inputs and targets of these records, in their order; floats have `kind` where that is set.

        Args:
            indices: of the records.
        """
        rows = indices.tolist()
        share = max(1, -(-len(rows) // max(1, self.workers)))
        self._asked.batches = [rows[at : at + share] for at in range(0, len(rows), share)]
        parts = [self._pair(part) for part in self._loader]
        if len(parts) == 1:
            return parts[0]
        leaves = [torch.cat(same) for same in zip(*map(tree_leaves, parts), strict=True)]
        joined: tuple[Any, Any] = torch.utils._pytree.tree_unflatten(leaves, tree_structure(parts[0]))
        return joined

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        """Returns a batch as inputs and targets; refuses items of another form."""
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise InputError(
                "dataset", "must have pairs (input, target) as items", f"a batch of {type(batch).__name__}"
            )
        found: tuple[Any, Any] = tree_map(self._converted, (_tuples(batch[0]), _tuples(batch[1])))
        return found

    def _converted(self, leaf: Any) -> Tensor:
        if not isinstance(leaf, Tensor):
            raise InputError("dataset", "must have items of numbers, arrays and tensors", f"a {type(leaf).__name__}")
        return leaf.to(self.kind) if leaf.is_floating_point() and self.kind is not None else leaf

    # --- all records -----------------------------------------------------------------------

    def _scan(self) -> tuple[bytes, Copies]:
        """Reads all records once. Returns a digest of them, and their copies."""
        if not self._scanned[0]:
            sha, digests = hashlib.sha256(), np.empty(self._length, dtype=np.uint64)
            for at in range(0, self._length, _TOGETHER):
                part = self.read(torch.arange(at, min(at + _TOGETHER, self._length)))
                leaves = tree_leaves(part)
                if at == 0:
                    sha.update(repr([(leaf.dtype, leaf.shape[1:]) for leaf in leaves]).encode())
                for leaf in leaves:
                    sha.update(_bytes(leaf).numpy().data)
                digests[at : at + _TOGETHER] = record_digests(leaves)
            self._scanned = sha.digest(), copies_among(digests)
        return self._scanned

    @property
    def digest(self) -> str:
        """Returns the SHA-256 of all records."""
        return self._scan()[0].hex()

    @property
    def copies(self) -> Copies:
        """Returns the records that are equal to others."""
        return self._scan()[1]


class _Asked:
    """A sampler of the batches that are asked for now."""

    def __init__(self) -> None:
        self.batches: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _check_collate(collate: Callable[[list[Any]], Any], items: list[Any]) -> None:
    """Refuses a function that does not make inputs and targets of some items."""
    try:
        found = collate(items)
    except Exception as error:
        what = f"must make a pair (inputs, targets) of a list of items, but failed ({type(error).__name__}: {error})"
        raise InputError("collate", what, collate) from error
    if not isinstance(found, list | tuple) or len(found) != 2:
        what = "must make a pair (inputs, targets) of a list of items"
        raise InputError("collate", what, f"one that returns a {type(found).__name__}")


def _bytes(leaf: Tensor) -> Tensor:
    return leaf.contiguous().reshape(-1).view(torch.uint8)


def _tuples(tree: Any) -> Any:
    """Returns a tree with tuples in place of the lists that collating makes of them."""
    if isinstance(tree, list | tuple):
        return tuple(_tuples(part) for part in tree)
    return {name: _tuples(part) for name, part in tree.items()} if isinstance(tree, dict) else tree


def as_rows(model: nn.Module, inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Returns inputs and targets as tensors, or a Dataset as its rows, without targets.

    Args:
        model: gives the dtype.
        inputs: as in PrivateSGD.
        targets: as in PrivateSGD.
    """
    if isinstance(inputs, Dataset):
        inputs = DatasetRows(inputs)
    if not isinstance(inputs, DatasetRows):
        return as_tensors(model, "inputs", inputs), as_tensors(model, "targets", targets)
    if targets is not None:
        raise InputError("targets", "must be None: the Dataset has them in its items", describe_given(targets))
    inputs.kind = model_dtype(model)
    return inputs, None


def as_tensors(model: nn.Module, name: str, tree: Any) -> Any:
    """Returns a data set with its NumPy arrays as tensors, the rest unchanged.

    Arrays of floats get the model's dtype (NumPy's own is float64). Targets of whole numbers become int64, as losses
    require (except bytes, which they accept). Inputs of whole numbers keep their type, because they may be tokens.

    Args:
        model: gives the dtype.
        name: the name of the argument, for messages.
        tree: an array, a tensor, or a tuple or dictionary of them.
    """
    kind = model_dtype(model)

    def convert(x: Any) -> Any:
        if not isinstance(x, np.ndarray):
            return x
        if not np.issubdtype(x.dtype, np.number) and x.dtype != np.bool_:
            raise InputError(name, "must hold numbers", f"an array of {x.dtype}")
        if not x.dtype.isnative or x.dtype == np.longdouble:
            x = x.astype(np.float64 if x.dtype == np.longdouble else x.dtype.newbyteorder("="))
        if isinstance(x, np.memmap):
            return _mapped(name, x, kind)
        own = x if x.flags.writeable and min(x.strides, default=0) >= 0 else x.copy()  # what torch can share
        found = torch.as_tensor(own)
        if found.is_floating_point() and kind is not None:
            return found.to(kind)
        return found.long() if name == "targets" and found.dtype in _NARROW else found

    return tree_map(convert, tree) if any(isinstance(x, np.ndarray) for x in tree_leaves(tree)) else tree


def _mapped(name: str, array: np.memmap, kind: torch.dtype | None) -> Tensor:
    """Returns a tensor on the memory of a mapped file; refuses a large one that would have to be copied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns where the file is open for reading only; nothing is written
        found = torch.from_numpy(array) if min(array.strides, default=0) >= 0 else torch.from_numpy(array.copy())
    wanted = kind if found.is_floating_point() and kind is not None else found.dtype
    wanted = torch.int64 if name == "targets" and found.dtype in _NARROW else wanted
    if wanted != found.dtype and name == "inputs" and array.nbytes > MOST_COPIED:
        what = f"must be of {wanted} where so much is mapped from a file, so that it need not be copied into memory"
        raise InputError(name, what, found.dtype)
    return found.to(wanted)


def take_rows(values: Tensor, index: Tensor) -> Tensor:
    """Returns these rows, where the values are; not all whole numbers have index_select, which is faster.

    Args:
        values: with one row per record.
        index: the rows.
    """
    place = index.to(values.device)
    return values.index_select(0, place) if values.is_floating_point() else values[place]


def row_counts(inputs: Any, targets: Any) -> set[int]:
    """Returns the row counts of the tensors of a data set: one number if all agree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    if isinstance(inputs, DatasetRows):
        return {len(inputs)}
    return {len(t) if t.dim() > 0 else 0 for t in tree_leaves((inputs, targets)) if isinstance(t, Tensor)}


def record_count(inputs: Any, targets: Any) -> int:
    """Returns the number of records of a data set, or raises an InputError where its tensors disagree.

    Args:
        inputs: tensors with one row per record.
        targets: tensors with one row per record.
    """
    if isinstance(inputs, DatasetRows):
        return len(inputs)
    sizes = row_counts(inputs, targets)
    for name, tree in (("inputs", inputs), ("targets", targets)):
        if not any(isinstance(t, Tensor) for t in tree_leaves(tree)) and (name == "inputs" or tree is not None):
            what = "must be a tensor or a NumPy array with one row per record, or a tuple or dictionary of such"
            raise InputError(name, what, f"a {type(tree).__name__} without one")
    if len(sizes) != 1 or 0 in sizes:
        raise InputError("inputs", "and targets must have one row for each record", sorted(sizes))
    return sizes.pop()


def describe_given(value: Any) -> str:
    """Returns the shape of a tensor, or the type of another value, for messages."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
