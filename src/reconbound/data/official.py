"""Real data sets from the folder that the user names: MNIST (IDX files) and CIFAR-10 (the binary version), as arrays.

The folder is the argument, or the variable RECONBOUND_DATA; files may be plain, .gz or .xz. No pickle is ever read.
"""

from __future__ import annotations

import gzip
import lzma
import math
import os
import struct
import zlib
from pathlib import Path

import numpy as np

from reconbound._internal.checks import DataError, DataMissing
from reconbound.data.dataset import Dataset, Feature, Pixels
from reconbound.data.options import DataOptions

NAMES = ("mnist", "cifar10")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder given, else the one that RECONBOUND_DATA names."""
    named = folder if folder is not None else os.environ.get("RECONBOUND_DATA")
    if not named:
        raise DataMissing("no data folder: give one, or set the variable RECONBOUND_DATA")
    path = Path(named)
    if not path.is_dir():
        raise DataMissing(f"the data folder {str(path)!r} does not exist")
    return path


def load_official(name: str, options: DataOptions) -> Dataset:
    """Returns MNIST or CIFAR-10 with its own test set, from the options' folder, or downloaded into it."""
    from reconbound.data.downloads import fetch

    read = {"mnist": mnist, "cifar10": cifar10}[name]
    if options.folder is None and not os.environ.get("RECONBOUND_DATA"):
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reconbound"
        root.mkdir(parents=True, exist_ok=True)
    else:
        root = data_folder(options.folder)
    try:
        parts = [read(root, train=train) for train in (True, False)]
    except FileNotFoundError:
        fetch(name, root / name)
        parts = [read(root, train=train) for train in (True, False)]
    (images, labels), (test, test_labels) = parts
    kept, _ = options.division.choose_rows(labels, "classes", np.zeros(len(labels), dtype=bool))
    inputs, test_inputs = (_scale_pixels(part) for part in (images[kept], test))
    return Dataset(
        name,
        "image",
        inputs,
        labels[kept],
        test_inputs,
        test_labels,
        Pixels(inputs.shape[1:]),
        class_names=tuple("0123456789") if name == "mnist" else CIFAR10_CLASSES,
        target=Feature("digit" if name == "mnist" else "class", private=False),
    )


def _scale_pixels(images: np.ndarray) -> np.ndarray:
    """Bytes to [0, 1], float32, with an axis for the planes."""
    planes = images[:, None] if images.ndim == 3 else images
    inputs = planes.astype(np.float32)
    inputs /= np.float32(255)
    return inputs


def mnist(folder: str | os.PathLike[str] | None = None, *, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """MNIST: images (N, 28, 28) uint8 and labels (N,) int64, from the IDX files in FOLDER/mnist."""
    root, part = data_folder(folder) / "mnist", "train" if train else "t10k"
    images = read_idx(_find(root, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(root, f"{part}-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{root}: {part} images of shape {images.shape} but labels of shape {labels.shape}")
    if labels.max(initial=0) > 9:
        raise DataError(f"{root}: a {part} label of {labels.max()}, so these are not digits")
    return images, labels.astype(np.int64)


def cifar10(
    folder: str | os.PathLike[str] | None = None, *, train: bool = True, batches: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """CIFAR-10: images (N, 3, 32, 32) uint8 and labels (N,) int64, from the binary version in FOLDER/cifar10.

    Args:
        folder: the data folder; by default the one that RECONBOUND_DATA names.
        train: whether to read the training files; otherwise the test file.
        batches: how many of the five training files to read.
    """
    root = data_folder(folder) / "cifar10"
    names = [f"data_batch_{k + 1}.bin" for k in range(batches)] if train else ["test_batch.bin"]
    parts = []
    for name in names:
        path = _find(root, name)
        raw = np.frombuffer(_content(path), dtype=np.uint8)
        if raw.size == 0 or raw.size % 3073:
            raise DataError(f"{path}: {raw.size} bytes is not a whole number of records of 3,073 bytes")
        parts.append(raw.reshape(-1, 3073))
    records = np.concatenate(parts)
    if records[:, 0].max() > 9:
        raise DataError(f"{root}: a label above 9, so this is not CIFAR-10's binary version")
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)


def read_idx(path: str | os.PathLike[str]) -> np.ndarray:
    """An array of unsigned bytes from an IDX file, plain or compressed; a damaged one is refused with what is wrong."""
    content = _content(Path(path))
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: not an IDX file of unsigned bytes (starts with {content[:4]!r})")
    rank = content[3]
    start = 4 + 4 * rank
    if len(content) < start:
        raise DataError(f"{path}: the header ends after {len(content)} of {start} bytes")
    shape = struct.unpack(f">{rank}I", content[4:start])
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    if data.size != math.prod(shape):
        raise DataError(f"{path}: {data.size} values, but its header says {'x'.join(map(str, shape))}")
    return data.reshape(shape)


def _find(root: Path, name: str) -> Path:
    for ending in _OPENERS:
        path = root / (name + ending)
        if path.exists():
            return path
    raise DataMissing(f"{root / name} (or .gz, .xz) does not exist")


def _content(path: Path) -> bytes:
    opener = _OPENERS.get(path.suffix, open)
    try:
        with opener(path, "rb") as file:  # type: ignore[operator]
            return bytes(file.read())
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as reason:
        raise DataError(f"{path}: damaged or cut off ({reason})") from None
    except OSError as reason:
        raise DataError(f"{path}: cannot be read ({reason.strerror})") from None
