"""MNIST (IDX files) and CIFAR-10 (the binary version), from a folder, or downloaded into it.

The folder is the argument, or the variable RECONBOUND_DATA; files may be plain, .gz or .xz. No pickle is ever read.
pooch transfers; the digest of the raw content decides what is kept.
"""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import json
import lzma
import math
import os
import struct
import sys
import tarfile
import tempfile
import urllib.parse
import zlib
from collections.abc import Iterator
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import IO, Any

import numpy as np

from reconbound._internal.checks import DataError, DataMissing
from reconbound._internal.files import PUBLIC, write_whole
from reconbound.data import csv
from reconbound.data.dataset import DataOptions, Dataset, Feature, Pixels

NAMES = ("mnist", "cifar10")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_OPENERS = {"": open, ".gz": gzip.open, ".xz": lzma.open}
CHUNK, MOST, RETRIES = 1 << 16, 1 << 28, 1
SOURCES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}
ARCHIVE = "cifar-10-binary.tar.gz"
#: Of each raw file its size and digest (64 digits: SHA-256, 40: SHA-1).
RAW: dict[str, Any] = json.loads((files("reconbound.data") / "digests.json").read_text(encoding="utf-8"))


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """Returns the given folder, or the one that RECONBOUND_DATA names."""
    named = folder if folder is not None else os.environ.get("RECONBOUND_DATA")
    if not named:
        raise DataMissing("no data folder: give one, or set the variable RECONBOUND_DATA")
    path = Path(named)
    if not path.is_dir():
        raise DataMissing(f"the data folder {str(path)!r} does not exist")
    return path


def load_official(name: str, options: DataOptions) -> Dataset:
    """Returns MNIST or CIFAR-10 with its own test set, from the options' folder, or downloaded into it."""
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
    kept, _ = options.choose_rows(labels, "classes", np.zeros(len(labels), dtype=bool))
    inputs, test_inputs = (_scale_pixels(part) for part in (images[kept], test))
    digits = name == "mnist"
    classes = tuple("0123456789") if digits else CIFAR10_CLASSES
    target = Feature("digit" if digits else "class", private=False)
    found = (inputs, labels[kept], test_inputs, test_labels)
    return Dataset(name, "image", *found, Pixels(inputs.shape[1:]), class_names=classes, target=target)


def _scale_pixels(images: np.ndarray) -> np.ndarray:
    """Returns bytes as float32 in [0, 1], with an axis for the planes."""
    planes = images[:, None] if images.ndim == 3 else images
    inputs = planes.astype(np.float32)
    inputs /= np.float32(255)
    return inputs


def mnist(folder: str | os.PathLike[str] | None = None, *, train: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Reads MNIST: images (N, 28, 28) uint8 and labels (N,) int64, from the IDX files in FOLDER/mnist."""
    root, part = data_folder(folder) / "mnist", "train" if train else "t10k"
    images = read_idx(_find(root, f"{part}-images-idx3-ubyte"))
    labels = read_idx(_find(root, f"{part}-labels-idx1-ubyte"))
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels) or not images.size:
        raise DataError(f"{root}: {part} images of shape {images.shape} but labels of shape {labels.shape}")
    if labels.max(initial=0) > 9:
        raise DataError(f"{root}: a {part} label of {labels.max()}, so these are not digits")
    return images, labels.astype(np.int64)


def cifar10(
    folder: str | os.PathLike[str] | None = None, *, train: bool = True, batches: int = 5
) -> tuple[np.ndarray, np.ndarray]:
    """Reads CIFAR-10: images (N, 3, 32, 32) uint8 and labels (N,) int64, from the binary version in FOLDER/cifar10.

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
    """Reads an array of unsigned bytes from an IDX file, plain or compressed; refuses a damaged one."""
    content = _content(Path(path))
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: not an IDX file of unsigned bytes (starts with {content[:4]!r})")
    rank = content[3]
    start = 4 + 4 * rank
    if not 1 <= rank <= 4:
        raise DataError(f"{path}: an array of {rank} axes, and 1 to 4 can be read")
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
            content = bytes(file.read(csv.MOST_UNPACKED + 1))
    except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as reason:
        raise DataError(f"{path}: damaged or cut off ({reason})") from None
    except OSError as reason:
        raise DataError(f"{path}: cannot be read ({reason.strerror})") from None
    if len(content) > csv.MOST_UNPACKED:
        raise DataError(f"{path}: unpacks to more than {csv.MOST_UNPACKED >> 20:,} MB, and no such data set does")
    return content


def fetch(name: str, root: Path, *, mirror: str | None = None) -> None:
    """Brings the missing files of a data set into the folder, each whole and with its digest checked, or not at all.

    Args:
        name: "mnist" or "cifar10".
        root: the folder.
        mirror: an address to use instead of the usual ones, or the variable RECONBOUND_MIRROR; below it is NAME/FILE.
            It must be https, except on this machine itself.

    Raises:
        DataMissing: where nothing could be downloaded; says which files to put where.
        DataError: where what was downloaded is not what it should be.
    """
    mirror = mirror or os.environ.get("RECONBOUND_MIRROR")
    sources = (f"{mirror.rstrip('/')}/{name}/",) if mirror else SOURCES[name]
    for source in sources:
        check_address(source)
    missing = [raw for raw in RAW[name] if not any((root / f"{raw}{ending}").exists() for ending in _OPENERS)]
    wanted = [ARCHIVE] if name == "cifar10" else [f"{raw}.gz" for raw in missing]
    try:
        root.mkdir(parents=True, exist_ok=True)
        for file in wanted:
            print(f"reconbound: downloading {file} into {root}", file=sys.stderr)
            _download(sources, file, root)
    except OSError as reason:  # those of requests are such, too
        needed = ", ".join(RAW[name] if name == "cifar10" else (f"{raw}.gz" for raw in RAW[name]))
        raise DataMissing(
            f"{name} is not all in {root} and could not be downloaded ({_describe_failure(reason)}): put {needed} "
            f"there, or name the folder that holds {name}/ (folder, or the variable RECONBOUND_DATA)"
        ) from None


def _download(sources: tuple[str, ...], file: str, root: Path) -> None:
    """Takes the file from the first source that gives it whole and correct."""
    import pooch

    pooch.get_logger().setLevel("WARNING")
    headers = {"Accept-Encoding": "identity", "User-Agent": "reconbound"}
    downloader = pooch.HTTPDownloader(headers=headers, hooks={"response": _check_response})
    for source in sources:
        try:
            with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as inside:
                store = pooch.create(inside, source, registry={file: None}, retry_if_failed=RETRIES)
                part = Path(store.fetch(file, downloader=downloader))
                return _keep_batches(part, root) if file == ARCHIVE else _keep_idx(part, root)
        except (OSError, DataError):
            if source == sources[-1]:
                raise


def _check_response(response: Any, **_: Any) -> None:
    """Refuses an answer that leads to an address that is not allowed, or to a file that is too long."""
    try:
        if response.is_redirect:
            check_address(urllib.parse.urljoin(response.url, response.headers["Location"]))
        elif response.ok and int(response.headers.get("Content-Length") or MOST + 1) > MOST:
            raise DataError(f"{response.url}: more than {MOST:,} bytes, or of no known length: not the file asked for")
        elif not response.ok:
            response.close()  # pooch raises then, and leaves it open
    except ValueError:
        response.close()
        raise


def _describe_failure(reason: OSError) -> str:
    """Returns in one line why a download failed."""
    import requests

    if isinstance(reason, requests.RequestException) and reason.response is None:
        return "no connection, or it broke off"
    return " ".join(str(reason.strerror or reason).split())[:200]


def check_address(url: str) -> None:
    """Refuses addresses that are not https, except plain http to this machine itself."""
    parts = urllib.parse.urlsplit(url)
    host, near = parts.hostname or "", parts.hostname == "localhost"
    with suppress(ValueError):
        near = near or ipaddress.ip_address(host).is_loopback
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and near)):
        raise DataError(f"the address {url!r} is not allowed: downloads are only over https")


def _keep_idx(part: Path, root: Path) -> None:
    raw = part.name.removesuffix(".gz")
    with gzip.open(part, "rb") as file:
        for _ in _checked_blocks(file, RAW["mnist"][raw], raw):
            pass
    os.chmod(part, PUBLIC)
    os.replace(part, root / part.name)


def _keep_batches(part: Path, root: Path) -> None:
    """Keeps the six files by their names, wherever in the archive: nothing else is written, so no path can lead out."""
    wanted = dict(RAW["cifar10"])
    try:
        with tarfile.open(part, "r:gz") as archive:
            for member in archive:
                base = member.name.rsplit("/", 1)[-1]
                file = archive.extractfile(member) if member.isreg() and base in wanted else None
                if file is not None:
                    content = b"".join(_checked_blocks(file, wanted.pop(base), base))
                    write_whole(root / base, content, mode=PUBLIC)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as reason:
        raise DataError(f"{ARCHIVE}: not the archive it should be ({reason})") from None
    if wanted:
        raise DataError(f"{ARCHIVE}: holds no {', '.join(wanted)}")


def _checked_blocks(file: IO[bytes] | gzip.GzipFile, known: tuple[int, str], name: str) -> Iterator[bytes]:
    """Yields the blocks of a file.

    Raises:
        DataError: once the file is too long, or at its end if its size or digest is wrong.
    """
    size, digest = known
    kind, count = {64: "sha256", 40: "sha1"}[len(digest)], 0
    found = hashlib.new(kind, usedforsecurity=False)
    try:
        for block in iter(lambda: file.read(CHUNK), b""):
            count += len(block)
            found.update(block)
            if count > size:
                break
            yield block
    except (EOFError, zlib.error, gzip.BadGzipFile) as reason:
        raise DataError(f"{name}: what was downloaded is damaged ({reason})") from None
    if count != size or found.hexdigest() != digest:
        raise DataError(f"{name}: what was downloaded has not the known {kind} {digest}, so it was thrown away")
