"""MNIST and CIFAR-10 over the network: pooch transfers, the digest of the raw content decides what is kept."""

from __future__ import annotations

import gzip
import hashlib
import ipaddress
import os
import sys
import tarfile
import tempfile
import urllib.parse
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reconbound._internal.checks import DataError, DataMissing
from reconbound._internal.files import PUBLIC, write_whole

CHUNK, MOST, RETRIES = 1 << 16, 1 << 28, 1
SOURCES = {
    "mnist": ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
}
ARCHIVE = "cifar-10-binary.tar.gz"
_BATCH = 30_730_000
RAW = {  # raw file: its size and digest (64 digits: SHA-256, 40: SHA-1)
    "mnist": {
        "train-images-idx3-ubyte": (47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
        "train-labels-idx1-ubyte": (60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
        "t10k-images-idx3-ubyte": (7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
        "t10k-labels-idx1-ubyte": (10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
    },
    "cifar10": {
        "data_batch_1.bin": (_BATCH, "aadd24acce27caa71bf4b10992e9e7b2d74c2540"),
        "data_batch_2.bin": (_BATCH, "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795"),
        "data_batch_3.bin": (_BATCH, "1dd00a74ab1d17a6e7d73e185b69dbf31242f295"),
        "data_batch_4.bin": (_BATCH, "aab85764eb3584312d3c7f65fd2fd016e36a258e"),
        "data_batch_5.bin": (_BATCH, "26e2849e66a845b7f1e4614ae70f4889ae604628"),
        "test_batch.bin": (_BATCH, "67eb016db431130d61cd03c7ad570b013799c88c"),
    },
}


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
    wanted = [ARCHIVE] if name == "cifar10" else [f"{raw}.gz" for raw in RAW[name] if not _is_there(root, raw)]
    try:
        root.mkdir(parents=True, exist_ok=True)
        for file in wanted:
            print(f"reconbound: downloading {file} into {root}", file=sys.stderr)
            _download(sources, file, root)
    except OSError as reason:  # those of requests are such, too
        files = ", ".join(RAW[name] if name == "cifar10" else (f"{raw}.gz" for raw in RAW[name]))
        raise DataMissing(
            f"{name} is not all in {root} and could not be downloaded ({_describe_failure(reason)}): put {files} "
            f"there, or name the folder that holds {name}/ (folder, or the variable RECONBOUND_DATA)"
        ) from None


def _is_there(root: Path, raw: str) -> bool:
    return any((root / f"{raw}{ending}").exists() for ending in ("", ".gz", ".xz"))


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
