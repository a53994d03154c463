"""Checkpoints of a training run: written completely or not at all, never a pickle, readable by their owner only.

Two files are written in turn, so that the previous good state remains when a newer one is damaged. A checkpoint names
the configuration and the data that it belongs to, and carries a digest of all its bytes. One process at a time holds a
folder. The lock is the operating system's, so a process that dies releases it.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from reconbound._internal.checks import warn_user
from reconbound._internal.files import CONFIDENTIAL, Unreadable, open_lock, refuse_links, sealed, unsealed, write_whole

NAMES = ("checkpoint-0.safetensors", "checkpoint-1.safetensors")
LOCK = "lock"


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A state of a training: tensors by name, and plain facts.

    The facts contain "order" (larger for a later state), "step", and what the checkpoint belongs to.
    """

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint, turn: int) -> None:
    """Writes a checkpoint over the older of the two in the folder. If writing fails, both old ones remain.

    Args:
        folder: the folder of checkpoints; created if missing.
        checkpoint: the state to write.
        turn: the number of this checkpoint; even and odd ones have a file each.
    """
    place = _made(folder)
    try:
        write_whole(place / NAMES[turn % 2], sealed(checkpoint.tensors, checkpoint.facts), mode=CONFIDENTIAL)
    except OSError as reason:
        raise CheckpointError(
            f"step {checkpoint.facts.get('step')}: no checkpoint could be written into {place} ({reason.strerror}); "
            "the one before is intact"
        ) from reason


def load(folder: str | os.PathLike[str], belongs: Mapping[str, Any]) -> tuple[Checkpoint, int] | None:
    """Loads the newest good checkpoint of a folder.

    A checkpoint that is damaged or belongs to another run is skipped, with a warning that says why, and the other one
    is used.

    Args:
        folder: the folder of checkpoints.
        belongs: facts that must be equal ("configuration", "data", …).

    Returns:
        The checkpoint and the turn it was written in; None if the folder has no checkpoint at all.

    Raises:
        CheckpointError: there are checkpoints, and none can be used.
    """
    wanted = plain_json(belongs)
    found: list[tuple[int, int, Checkpoint]] = []
    refused: list[str] = []
    foreign = False
    for turn, name in enumerate(NAMES):
        path = Path(folder) / name
        if not path.exists():
            continue
        try:
            tensors, facts = unsealed(path)
            _check_belongs(path, facts, wanted)
        except (Unreadable, CheckpointError) as reason:
            refused.append(str(reason))
            foreign |= isinstance(reason, CheckpointError)
        except OSError as reason:
            refused.append(f"{path} cannot be read ({reason.strerror})")
        else:
            found.append((int(facts["order"]), turn, Checkpoint(tensors, facts)))
    if not found:
        if refused:
            raise CheckpointError("; ".join(refused) + f"; no other checkpoint is there: {_advice(foreign)}")
        return None
    _, turn, checkpoint = max(found, key=lambda item: item[0])
    if refused:
        at = ", ".join(f"{name} {checkpoint.facts[name]}" for name in ("run", "step") if name in checkpoint.facts)
        warn_user(f"{'; '.join(refused)}: going on from the other one, {at}", UserWarning)
    return checkpoint, turn


def _advice(foreign: bool) -> str:
    if foreign:
        return "give the new run a folder of its own, or go on with what this one began with"
    return "bring the files back from a copy, or remove them to begin anew (with another seed, where one is given)"


@contextmanager
def held(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Holds a folder against other processes, and removes what a killed one left there.

    Args:
        folder: the folder; created with mode 0700 if missing.
    """
    place = _made(folder)
    refuse_links(place)
    try:
        handle = open_lock(place / LOCK)
    except OSError as reason:
        raise CheckpointError(f"the checkpoint folder {place} cannot be written ({reason.strerror})") from reason
    try:
        _take(handle, place)
        for leftover in place.glob(".checkpoint-*.part"):
            leftover.unlink(missing_ok=True)
        yield
    finally:
        os.close(handle)  # releases the lock; the file stays, because removing it would be a race


def warn_if_open(folder: str | os.PathLike[str]) -> None:
    """Warns if other users may enter a folder.

    The folder's mode is not changed, because it may be shared on purpose. The files in it have mode 0600.
    """
    if os.name == "posix" and Path(folder).stat().st_mode & 0o077:
        warn_user(f"others may enter the checkpoint folder {folder}: chmod 700 it", UserWarning)


def _take(handle: int, place: Path) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: the user must ensure that one process uses a folder
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another learner"
        raise CheckpointError(
            f"the checkpoint folder {place} is in use by {holder}: give each run a folder of its own, or wait"
        ) from None
    except OSError as reason:  # some network file systems have no locks
        warn_user(f"{place} cannot be locked ({reason.strerror}): mind that only one run uses it")
        return
    with suppress(OSError):  # for people only; a full disk is reported where something would be lost
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _made(folder: str | os.PathLike[str]) -> Path:
    place = Path(folder)
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as reason:
        raise CheckpointError(f"the checkpoint folder {place} cannot be made ({reason.strerror})") from reason
    return place


def _check_belongs(path: Path, facts: Mapping[str, Any], belongs: Mapping[str, Any]) -> None:
    for name, wanted in belongs.items():
        has = facts.get(name)
        if has == wanted:
            continue
        if isinstance(wanted, Mapping) and isinstance(has, Mapping):
            keys = [k for k in {**wanted, **has} if wanted.get(k) != has.get(k)]
            keys = ["class"] if "class" in keys else keys  # another class has other hyper-parameters anyway
            told = ", ".join(f"{k} was {_shown(has.get(k))} and is {_shown(wanted.get(k))}" for k in keys)
        elif name == "format":
            told = "another version of reconbound wrote it, which drew noise in another way: a run begun with that one "
            told += "must be finished with it, or begun anew"
        elif name == "seed":
            told = "neither is shown, for it is as secret as the data"
        else:
            told = f"it was {_shown(has)} and is {_shown(wanted)}"
        raise CheckpointError(f"{path} belongs to another run: the {name} differs ({told})")


def _shown(value: Any) -> str:
    """Formats a value, with digests of data shortened to a few digits.

    A whole digest would confirm a guess of the data.
    """
    return re.sub(r"[0-9a-f]{16,}", lambda digits: digits.group()[:6] + "…", repr(value))


def plain_json(value: Any) -> Any:
    """Returns the value as it would come back from JSON: tuples as lists, for example."""
    return json.loads(json.dumps(value, default=lambda number: number.item()))  # NumPy's numbers
