"""Real data sets from the folder that the user names: MNIST (IDX files) and CIFAR-10 (the binary version), as arrays.

The folder is the argument, or the variable RECONBOUND_DATA; files may be plain, .gz or .xz. No pickle is ever read."""

from __future__ import annotations

import gzip
import lzma
import os
import struct
from pathlib import Path

import numpy as np

_OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, else the one that RECONBOUND_DATA names."""
    named = folder if folder is not None else os.environ.get("RECONBOUND_DATA")
    if not named:
        raise FileNotFoundError("no data folder: give one, or set the variable RECONBOUND_DATA")
    path = Path(named)
    if not path.is_dir():
        raise FileNotFoundError(f"the data folder {str(path)!r} does not exist")
    return path


def mnist(folder: str | os.PathLike[str] | None = None, *, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """MNIST: images (N, 28, 28) uint8 and labels (N,) int64, from the IDX files in FOLDER/mnist."""
    root, part = data_folder(folder) / "mnist", "train" if train else "t10k"
    images = read_idx(_find(root, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(root, f"{part}-labels-idx1-ubyte"))
    if len(images) != len(labels):
        raise ValueError(f"{root}: {len(images)} {part} images but {len(labels)} labels")
    return images, labels.astype(np.int64)


def cifar10(
    folder: str | os.PathLike[str] | None = None, *, train: bool = True, batches: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10: images (N, 3, 32, 32) uint8 and labels (N,) int64, from the binary version in FOLDER/cifar10.

    Args:
        batches: how many of the five training files to read."""
    root = data_folder(folder) / "cifar10"
    names = [f"data_batch_{k + 1}.bin" for k in range(batches)] if train else ["test_batch.bin"]
    parts = []
    for name in names:
        path = _find(root, name)
        raw = np.frombuffer(_content(path), dtype=np.uint8)
        if raw.size == 0 or raw.size % 3073:
            raise ValueError(f"{path}: {raw.size} bytes is not a whole number of records of 3,073 bytes")
        parts.append(raw.reshape(-1, 3073))
    records = np.concatenate(parts)
    if records[:, 0].max() > 9:
        raise ValueError(f"{root}: a label above 9, so this is not CIFAR-10's binary version")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """An array of unsigned bytes from an IDX file, plain or compressed; a damaged one is refused with what is wrong."""
    content = _content(Path(path))
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path}: not an IDX file of unsigned bytes (starts with {content[:4]!r})")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise ValueError(f"{path}: the header ends after {len(content)} of {start} bytes")
    shape = struct.unpack(f">{rank}I", content[4:start])
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    if data.size != int(np.prod(shape)):
        raise ValueError(f"{path}: {data.size} values, but its header says {'x'.join(map(str, shape))}")
    return data.reshape(shape)


def _find(root: Path, name: str) -> Path:
    for ending in _OPENERS:
        path = root / (name + ending)
        if path.exists():
            return path
    raise FileNotFoundError(f"{root / name} (or .gz, .xz) does not exist")


def _content(path: Path) -> bytes:
    opener = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:  # type: ignore[operator]
            return bytes(file.read())
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError) as reason:
        raise ValueError(f"{path}: damaged or cut off ({reason})") from None
