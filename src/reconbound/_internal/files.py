"""Files that are written completely or not at all, and that detect damage: safetensors and JSON, never a pickle.

A file is written beside its target, flushed and renamed. Confidential files are for their owner only. A sealed file
carries the SHA-256 of all its bytes (its own digits taken as zeros), so that every flipped bit, in the tensors or in
the facts, is detected.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

CONFIDENTIAL = 0o600
PUBLIC = 0o644
BLANK = "0" * 64
_PART = re.compile(r"\..+\.[0-9a-f]{8}\.part")
_STEERING = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
SEAL = re.compile(rb'"sha256":"([0-9a-f]{64})"')


class Unreadable(ValueError):
    """A file that reconbound did not write as it is; the message says why."""


def write_whole(
    path: str | os.PathLike[str], content: bytes | Iterable[bytes | memoryview], *, mode: int = CONFIDENTIAL
) -> None:
    """Writes a file so that a reader, or a crash at any moment, sees the old content or the new, never a part.

    Args:
        path: the file.
        content: its bytes, or pieces of them.
        mode: its permissions.
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            for piece in [content] if isinstance(content, bytes) else content:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, mode)
        os.replace(beside, target)
    except OSError as reason:
        if reason.errno is None:
            raise
        raise OSError(reason.errno, reason.strerror, str(target)) from None  # not the name of the temporary file
    finally:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
    with suppress(OSError):  # makes the rename survive a loss of power, where the system lets a folder be flushed
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def disk_fault(error: BaseException) -> str | None:
    """Returns what a disk or a folder refused, in one line; None for an error of any other kind."""
    reason: BaseException | None = error
    while reason is not None:
        if isinstance(reason, OSError) and not isinstance(reason, ValueError):
            if reason is not error and type(error).__module__.startswith("reconbound."):
                return str(error)  # it says more: the step, and what is intact
            where = f"{os.fsdecode(reason.filename)}: " if isinstance(reason.filename, str | bytes) else ""
            return f"{where}{reason.strerror or reason}"
        reason = reason.__cause__
    return None


def is_leftover(name: str) -> bool:
    """Returns whether a killed `write_whole` left a file of this name; not so another program's hidden .part."""
    return _PART.fullmatch(name) is not None


def remove_leftovers(*folders: Path, older_than: float = 0.0) -> None:
    """Removes what killed or refused calls of `write_whole` left in these folders.

    Args:
        *folders: the folders.
        older_than: leave files that are younger, in seconds: another process may be writing them.
    """
    for leftover in (path for folder in folders for path in folder.glob(".*.part")):
        with suppress(FileNotFoundError):
            if is_leftover(leftover.name) and time.time() - leftover.stat().st_mtime >= older_than:
                leftover.unlink()


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """Returns the content as JSON text with a digest of it: a change is detected when the file is read."""
    body = {name: value for name, value in content.items() if name != "sha256"}
    text = json.dumps({**body, "sha256": json_digest(body)}, indent=1, sort_keys=True, allow_nan=False)
    return text.encode() + b"\n"


def unsealed_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the content that was given to `sealed_json`.

    Raises:
        Unreadable: another file, or one that was changed; gives the reason.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as reason:
        raise Unreadable(f"{os.fspath(path)} is damaged, or not a file of reconbound's ({reason})") from None
    if not isinstance(content, dict):
        raise Unreadable(f"{os.fspath(path)} is not a file of reconbound's")
    seal = content.pop("sha256", None)
    if seal != json_digest(content):
        why = "it has no digest (or is of an earlier version)" if seal is None else "its content has another digest"
        raise Unreadable(f"{os.fspath(path)} was changed or damaged: {why}")
    return content


def printable(value: Any) -> Any:
    r"""Returns a value from a file without characters that control a terminal or change the direction of reading.

    >>> printable({"name": ["a\x1b[31mb", 3]})
    {'name': ['a?[31mb', 3]}
    """
    if isinstance(value, str):
        return _STEERING.sub("?", value)
    if isinstance(value, dict):
        return {printable(name): printable(part) for name, part in value.items()}
    return [printable(part) for part in value] if isinstance(value, list) else value


def json_digest(content: Any) -> str:
    """Returns the SHA-256 of a value that JSON can hold, however it is written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Returns the SHA-256 of a file's bytes."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def tensor_digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over names, types, shapes and contents."""
    import torch

    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        if value.numel():
            sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def open_lock(path: Path) -> int:
    """Opens a lock file, created if missing, and returns its handle. It is never a link, and its content is kept.

    Raises:
        OSError: the name belongs to something other than a plain file: a link would lock, and write to, its target.
    """
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    handle = os.open(path, flags, CONFIDENTIAL)
    about = os.fstat(handle)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(handle)
        raise OSError(errno.ELOOP, "it is a link or no plain file", str(path))
    return handle


def refuse_special_files(folder: str | os.PathLike[str], *deeper: str) -> None:
    """Refuses a folder that contains a symbolic link, a pipe, a socket or a device.

    Files written or removed through a link would be elsewhere, and reading a pipe may never end.

    Args:
        folder: it may itself be a link: whoever names it knows its target.
        deeper: names of folders in it that are checked as well.
    """
    for place in (Path(folder), *(Path(folder) / name for name in deeper)):
        try:
            entries = list(os.scandir(place))
        except OSError:  # not there, or not a folder: reported where it is used
            continue
        for entry in entries:
            try:
                mode = entry.stat(follow_symlinks=False).st_mode
            except FileNotFoundError:  # another process has just removed it
                continue
            if stat.S_ISLNK(mode):
                raise Unreadable(
                    f"{entry.path} is a symbolic link, and nothing is read or written through one: remove it"
                )
            if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
                raise Unreadable(
                    f"{entry.path} is a pipe, a socket or a device, and no file of reconbound's: remove it"
                )


def unsealed(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors and facts of a sealed file, as `large_files.write_sealed` writes it.

    Raises:
        Unreadable: another file, or one that was changed; gives the reason.
    """
    from safetensors.torch import load

    content = Path(path).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")  # of the header
    seal = SEAL.search(content[:end]) if 8 < end <= len(content) else None
    if seal is None:
        raise Unreadable(f"{os.fspath(path)} is cut off or not a file of reconbound's")
    blank = content[: seal.start(1)] + BLANK.encode() + content[seal.end(1) :]
    if hashlib.sha256(blank).hexdigest().encode() != seal.group(1):
        raise Unreadable(f"{os.fspath(path)} is cut off or damaged: its content does not have the digest that it names")
    try:
        facts = json.loads(json.loads(content[8:end])["__metadata__"]["reconbound"])
        if not isinstance(facts, dict):
            raise TypeError("its facts are no object")
        return load(content), facts
    except Exception as reason:  # a correct digest does not say who made the file
        raise Unreadable(f"{os.fspath(path)} is not a file of reconbound's ({reason})") from None
