"""Files that are whole or not there: written beside, flushed, renamed. Confidential ones are for their owner alone."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

CONFIDENTIAL = 0o600
PUBLIC = 0o644


def write_whole(path: str | os.PathLike[str], content: bytes, *, mode: int = CONFIDENTIAL) -> None:
    """Write a file so that a reader, or a crash at any moment, sees the old content or the new, never a part."""
    target = Path(path)
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, mode)
        os.replace(beside, target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
