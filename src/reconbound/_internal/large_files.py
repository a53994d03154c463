"""Sealed files: safetensors, with facts as JSON and the SHA-256 of all bytes in the header.

They are written from tensors, and read, part by part: they may be larger than the memory for a copy of them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from io import BufferedReader
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from reconbound._internal import files
from reconbound._internal.files import BLANK, CONFIDENTIAL, SEAL, Unreadable

if TYPE_CHECKING:
    from torch import Tensor
    from torch import dtype as Kind

#: Bytes that are read or written at a time.
_PIECE = 2**22
#: The longest header that is read.
_HEADER = 10**8
_KINDS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip


def write_sealed(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], facts: Mapping[str, Any], *, mode: int = CONFIDENTIAL
) -> None:
    """Writes a sealed file as `files.write_whole` does, without a copy of the tensors.

    They are read twice, for the digest and for the file, and must not change meanwhile.

    Args:
        path: the file.
        tensors: by name.
        facts: anything that JSON can hold, by name.
        mode: the file's permissions.
    """
    header, order = _header(tensors, facts)
    places = [m.start(1) for m in SEAL.finditer(header) if m.group(1).decode() == BLANK]
    if len(places) != 1:
        raise ValueError("a tensor's name or a fact looks like the file's own seal")
    sha = hashlib.sha256(header)
    for piece in _pieces(tensors, order):
        sha.update(piece)
    sealed = header[: places[0]] + sha.hexdigest().encode() + header[places[0] + len(BLANK) :]
    files.write_whole(path, chain([sealed], _pieces(tensors, order)), mode=mode)


def _header(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> tuple[bytes, list[str]]:
    """Returns the length and the header with a blank digest, and the names in the order of the data."""
    kinds = {name: code for code, name in _KINDS.items()}
    said = json.dumps(facts, sort_keys=True)
    metadata = {"reconbound": said, "confidential": "per-record leakage: keep it secret", "sha256": BLANK}
    entries: dict[str, Any] = {"__metadata__": metadata}
    order, at = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name)), 0
    for name in order:
        value = tensors[name]
        kind = str(value.dtype).removeprefix("torch.")
        if kind not in kinds:
            raise ValueError(f"no file of reconbound's holds tensors of {value.dtype}, as {name} is")
        end = at + value.numel() * value.element_size()
        entries[name] = {"dtype": kinds[kind], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, order


def _pieces(tensors: Mapping[str, Tensor], order: list[str]) -> Iterator[memoryview]:
    import torch

    for name in order:
        value = tensors[name].detach()
        flat = value.reshape(-1) if value.is_contiguous() else value.contiguous().reshape(-1)
        for part in flat.split(max(1, _PIECE // flat.element_size())) if len(flat) else ():
            yield part.cpu().view(torch.uint8).numpy().data


#: Axes of a tensor, and numbers in it, at most: what torch can hold.
_MOST_AXES, _LARGEST = 64, 2**60


class _Entry(NamedTuple):
    kind: Kind
    shape: tuple[int, ...]
    start: int  # in the file


class SealedFile:
    """A sealed file, open for reading; its digest was right when it was opened.

    Args:
        path: the file.

    Attributes:
        facts: what was given to `write_sealed`.
        names: of its tensors.

    Raises:
        Unreadable: another file, or one that was changed; gives the reason.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file: BufferedReader = open(path, "rb")  # noqa: SIM115
        try:
            header = self._checked_header()
            try:
                self.facts, self._entries = self._parsed(header)
            except Exception as reason:  # a correct digest does not say who made the file
                raise Unreadable(f"{self._path} is not a file of reconbound's ({reason})") from None
        except BaseException:
            self._file.close()
            raise
        self.names = tuple(self._entries)

    def __enter__(self) -> SealedFile:
        return self

    def __exit__(self, *reason: object) -> None:
        self._file.close()

    def _checked_header(self) -> bytes:
        """Returns the length and the header of a file whose content has the digest that it names."""
        first = self._file.read(8)
        length, size = int.from_bytes(first, "little"), os.fstat(self._file.fileno()).st_size
        header = first + self._file.read(length) if 0 < length <= min(size - 8, _HEADER) else b""
        seal = SEAL.search(header)
        if seal is None:
            raise Unreadable(f"{self._path} is cut off or not a file of reconbound's")
        sha = hashlib.sha256(header[: seal.start(1)] + BLANK.encode() + header[seal.end(1) :])
        while piece := self._file.read(_PIECE):
            sha.update(piece)
        if sha.hexdigest().encode() != seal.group(1):
            why = "its content does not have the digest that it names"
            raise Unreadable(f"{self._path} is cut off or damaged: {why}")
        return header

    def _parsed(self, header: bytes) -> tuple[dict[str, Any], dict[str, _Entry]]:
        """Returns the facts, and where each tensor is. Raises errors of many kinds for a header that does not fit."""
        import torch

        content = json.loads(header[8:])
        facts = json.loads(content.pop("__metadata__")["reconbound"])
        if not isinstance(facts, dict):
            raise TypeError("its facts are no object")
        found, spans = {}, []
        for name, entry in content.items():
            kind, shape = getattr(torch, _KINDS[entry["dtype"]]), tuple(entry["shape"])
            start, end = entry["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (*shape, start, end)):
                raise ValueError(f"the shape or place of {name} cannot be")
            if len(shape) > _MOST_AXES or math.prod(max(1, n) for n in shape) > _LARGEST:  # of nothing, too
                raise ValueError(f"the shape of {name} cannot be")
            if end - start != math.prod(shape) * kind.itemsize:
                raise ValueError(f"{name} has another size than its shape")
            spans.append((start, end))
            found[name] = _Entry(kind, shape, len(header) + start)
        spans.sort()
        ends = [0, *(end for _, end in spans)]
        if [start for start, _ in spans] != ends[:-1] or len(header) + ends[-1] != os.fstat(
            self._file.fileno()
        ).st_size:
            raise ValueError("its tensors lie within each other, or apart")
        return facts, found

    def empty(self, name: str) -> Tensor:
        """Returns a tensor of the right shape and dtype that takes no memory and holds zeros."""
        import torch

        entry = self._entries[name]
        return torch.zeros((), dtype=entry.kind).expand(entry.shape)

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Tensor:
        """Returns some numbers of a tensor in the order of its memory, (stop − start,); the tensor itself without ends.

        Args:
            name: of the tensor.
            start: the first.
            stop: after the last.
        """
        import torch

        entry = self._entries[name]
        last = math.prod(entry.shape) if stop is None else stop
        found = torch.empty(last - start, dtype=entry.kind)
        self._file.seek(entry.start + start * entry.kind.itemsize)
        if len(found) and self._file.readinto(found.view(torch.uint8).numpy().data) < found.nbytes:
            raise Unreadable(f"{self._path} was cut off while it was read")
        return found.reshape(entry.shape) if stop is None and start == 0 else found
