"""Faults for the tests: a disk that refuses the k-th operation, flipped bits, and how a command ends by them."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from reconbound.cli import app as cli

#: What a disk or a folder may answer: full, over quota, read-only, not allowed, broken.
REFUSALS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO)


@dataclass
class Disk:
    """Counts operations, and makes `times` of them fail from number `first` on."""

    folder: Path
    number: int
    first: float
    times: float = float("inf")
    calls: int = 0

    def step(self, path: object) -> None:
        if not self._inside(path):
            return
        self.calls += 1
        if self.first <= self.calls - 1 < self.first + self.times:
            raise OSError(self.number, os.strerror(self.number), os.fspath(path) if not isinstance(path, int) else None)

    def _inside(self, path: object) -> bool:
        try:
            name = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.path.abspath(os.fspath(path))
        except (OSError, TypeError):
            return False
        return name.startswith(str(self.folder))


@contextmanager
def refusing(folder: Path, number: int, first: float, times: float = float("inf")) -> Iterator[Disk]:
    """Operations that write below the folder are counted, and refused from the first-th (from 0) on."""
    disk, writes = Disk(folder, number, first, times), os.O_WRONLY | os.O_RDWR | os.O_CREAT
    own = {name: getattr(os, name) for name in ("open", "fsync", "replace", "mkdir", "link", "ftruncate", "unlink")}

    def opened(path, flags, *rest, **more):
        if flags & writes:
            disk.step(path)
        return own["open"](path, flags, *rest, **more)

    def guarded(name):
        def called(path, *rest, **more):
            disk.step(path)
            return own[name](path, *rest, **more)

        return called

    def unlinked(path, *rest, **more):  # a full disk lets go of files, a read-only one does not
        if disk.number in (errno.EROFS, errno.EACCES):
            disk.step(path)
        return own["unlink"](path, *rest, **more)

    os.open, os.unlink = opened, unlinked
    for name in ("fsync", "replace", "mkdir", "link", "ftruncate"):
        setattr(os, name, guarded(name))
    try:
        yield disk
    finally:
        for name, function in own.items():
            setattr(os, name, function)


def damage(path: Path, rng: random.Random) -> str:
    """Flips a bit, or a few, or cuts the file, or empties it; what was done."""
    content = bytearray(path.read_bytes())
    how = rng.choice(["bit", "bit", "bit", "byte", "cut", "empty", "tail"])
    if how in ("bit", "byte") and content:
        at = rng.randrange(len(content))
        content[at] ^= 1 << rng.randrange(8) if how == "bit" else rng.randrange(1, 256)
        how += f" {at}"
    elif how == "cut" and content:
        del content[rng.randrange(len(content)) :]
    elif how == "tail":
        content += bytes(rng.randrange(256) for _ in range(9))
    else:
        content.clear()
    path.write_bytes(bytes(content))
    return f"{path.name}: {how}"


@dataclass
class Ended:
    """The end of a command."""

    status: int | None
    out: str
    err: str

    @property
    def clear(self) -> bool:
        """A result, or one line of its own that says what is wrong; notes may stand before it."""
        lines = [line for line in self.err.splitlines() if line.startswith("reconbound: ")]
        lines = [line for line in lines if "keep it as secret as the data" not in line and ": waiting for" not in line]
        return self.status == 0 or (self.status is not None and len(lines) == 1 and "Traceback" not in self.err)


def ended(words: list[str]) -> Ended:
    """Runs a command in this process; status None where it ended by an exception."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            status: int | None = cli.run(words)
        except OSError as reason:  # __main__ says this one
            status = 1
            err.write(f"reconbound: cannot write: {reason}\n")
        except Exception:
            status = None
            err.write(traceback.format_exc())
    return Ended(status, out.getvalue(), err.getvalue())
