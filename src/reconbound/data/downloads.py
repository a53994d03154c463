"""MNIST and CIFAR-10 over the network: https, the digest of the raw content, going on where a transfer broke off."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import ipaddress
import os
import socket
import sys
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from reconbound._internal.checks import DataError, DataMissing
from reconbound._internal.files import PUBLIC, write_whole
from reconbound._internal.progress import progress_bar

CHUNK, MOST, TIMEOUT, TRIES, PAUSE = 1 << 16, 1 << 28, 30.0, 4, 1.0
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


class WrongContent(DataError):
    """What came over the network is not what it should be."""


class _Broken(Exception):
    """A transfer that failed and may be tried again."""


def fetch(name: str, root: Path, *, mirror: str | None = None) -> None:
    """Bring the missing files of a data set into the folder, each whole and with its digest checked, or not at all.

    Args:
        name: "mnist" or "cifar10".
        mirror: an address to use instead of the usual ones, or the variable RECONBOUND_MIRROR; below it lies
            NAME/FILE. It must be https, except on this machine itself."""
    mirror = mirror or os.environ.get("RECONBOUND_MIRROR")
    sources = (f"{mirror.rstrip('/')}/{name}/",) if mirror else SOURCES[name]
    for source in sources:
        _allowed(source)
    print(f"reconbound: {name} is not all in {root}: downloading it there", file=sys.stderr)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not os.access(root, os.W_OK):
            raise PermissionError(13, "the folder may not be written")
        if name == "cifar10":
            _first_good(sources, ARCHIVE, root, _keep_batches)
        for raw in RAW["mnist"] if name == "mnist" else ():
            if not any((root / f"{raw}{ending}").exists() for ending in ("", ".gz", ".xz")):
                _first_good(sources, f"{raw}.gz", root, _keep_idx)
    except (_Broken, OSError) as reason:
        files = ", ".join(RAW[name] if name == "cifar10" else (f"{raw}.gz" for raw in RAW[name]))
        raise DataMissing(
            f"{name} is not all in {root} and could not be downloaded ({getattr(reason, 'strerror', None) or reason}): "
            f"put {files} there, or name the folder that holds {name}/ (folder, or the variable RECONBOUND_DATA)"
        ) from None


def _first_good(sources: tuple[str, ...], file: str, root: Path, keep: Callable[[Path, Path, str], None]) -> None:
    """The file from the first source that gives it whole and right."""
    part = root / f".{file}.part"
    for source in sources:
        again = part.exists()  # a part may stem from another source or be damaged: then once more from the start
        while True:
            try:
                _transfer(source + file, part)
                return keep(part, root, file.removesuffix(".gz"))
            except (_Broken, WrongContent) as reason:
                if isinstance(reason, WrongContent):
                    part.unlink(missing_ok=True)
                    if again:
                        again = False
                        continue
                if source == sources[-1]:
                    raise
                break


def _transfer(url: str, part: Path) -> None:
    """The whole of the address in the part file, going on from what it holds; tried again when it breaks off."""
    said: object = None
    for turn in range(TRIES):
        try:
            return _go_on(url, part)
        except urllib.error.HTTPError as reason:
            said = f"{reason.code} {reason.reason}"
            if reason.code == 416 and part.exists():  # nothing beyond what is here: whole, or not this file's
                if reason.headers.get("Content-Range") == f"bytes */{part.stat().st_size}":
                    return
                part.unlink()
            elif reason.code < 500 and reason.code not in (408, 429):
                break
        except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as reason:
            said = getattr(reason, "reason", None) or reason
            if isinstance(said, socket.gaierror):  # the name is not known: no network here
                break
        if turn + 1 < TRIES:
            time.sleep(PAUSE * 2**turn)
    held = part.stat().st_size if part.exists() else 0
    kept = f"; {held:,} bytes are kept, and running it again goes on from there" if held else ""
    raise _Broken(f"{url}: {said}{kept}")


def _go_on(url: str, part: Path) -> None:
    held = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"User-Agent": "reconbound", "Accept-Encoding": "identity"})
    if held:
        request.add_header("Range", f"bytes={held}-")
    with urllib.request.build_opener(_SameSafety).open(request, timeout=TIMEOUT) as answer:
        appended = answer.status == 206 and answer.headers.get("Content-Range", "").startswith(f"bytes {held}-")
        if not appended:
            held = 0
        length = answer.headers.get("Content-Length")
        whole = held + int(length) if length and length.isdigit() else None
        what = f"downloading {urllib.parse.urlsplit(url).path.rsplit('/', 1)[-1]} (kB)"
        bar = progress_bar((whole or 0) // 1024, held // 1024, whole is not None, what)
        with part.open("ab" if appended else "wb") as file, bar as done:
            for block in iter(lambda: answer.read(CHUNK), b""):
                file.write(block)
                held += len(block)
                done(len(block) // 1024)
                if held > MOST:
                    raise WrongContent(f"{url}: more than {MOST:,} bytes, so this is not the file asked for")
    if whole is not None and held < whole:
        raise ConnectionError(f"broke off after {held:,} of {whole:,} bytes")


class _SameSafety(urllib.request.HTTPRedirectHandler):
    """Follows only to addresses that would have been allowed at first."""

    def redirect_request(self, *args: Any) -> urllib.request.Request | None:
        _allowed(args[-1])
        return super().redirect_request(*args)


def _allowed(url: str) -> None:
    """https, or plain http to this machine itself."""
    parts = urllib.parse.urlsplit(url)
    host, near = parts.hostname or "", parts.hostname == "localhost"
    with suppress(ValueError):
        near = near or ipaddress.ip_address(host).is_loopback
    if not host or not (parts.scheme == "https" or (parts.scheme == "http" and near)):
        raise DataError(f"the address {url!r} is not allowed: downloads are over https alone")


def _keep_idx(part: Path, root: Path, raw: str) -> None:
    with gzip.open(part, "rb") as file:
        for _ in _checked(file, RAW["mnist"][raw], raw):
            pass
    os.chmod(part, PUBLIC)
    os.replace(part, root / f"{raw}.gz")


def _keep_batches(part: Path, root: Path, _: str) -> None:
    """The six files by their names alone, wherever in the archive: nothing else is written, so no path can lead out."""
    wanted = dict(RAW["cifar10"])
    try:
        with tarfile.open(part, "r:gz") as archive:
            for member in archive:
                base = member.name.rsplit("/", 1)[-1]
                file = archive.extractfile(member) if member.isreg() and base in wanted else None
                if file is not None:
                    content = b"".join(_checked(file, wanted.pop(base), base))
                    write_whole(root / base, content, mode=PUBLIC)
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as reason:
        raise WrongContent(f"{ARCHIVE}: not the archive it should be ({reason})") from None
    if wanted:
        raise WrongContent(f"{ARCHIVE}: holds no {', '.join(wanted)}")
    part.unlink()


def _checked(file: IO[bytes] | gzip.GzipFile, known: tuple[int, str], name: str) -> Iterator[bytes]:
    """The blocks of a file; WrongContent once it is too long, or at its end if size or digest are not as known."""
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
        raise WrongContent(f"{name}: what was downloaded is damaged ({reason})") from None
    if count != size or found.hexdigest() != digest:
        raise WrongContent(f"{name}: what was downloaded has not the known {kind} {digest}, so it was thrown away")
