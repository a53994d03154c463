"""Saved ledgers: safetensors files, written atomically, readable only by their owner, marked confidential."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, choice, file_path
from reconbound._internal.files import Unreadable
from reconbound._internal.large_files import SealedFile, write_sealed
from reconbound.accounting import compact
from reconbound.accounting.feature_ledger import KINDS, Chosen
from reconbound.accounting.spec import Account, checked_device
from reconbound.fisher.worlds import REMOVED

if TYPE_CHECKING:
    from reconbound.accounting.measured_runs import MeasuredRuns

Runs = TypeVar("Runs", bound="MeasuredRuns")

#: What the names of tensors with a number for each record begin with; features are kept of few records.
_LONG = ("trace", "last", "measured", "spectral", "nats")


def save_ledger(ledger: MeasuredRuns, path: str | os.PathLike[str]) -> None:
    """Writes a ledger to a file.

    Args:
        ledger: the ledger.
        path: the file to write.
    """
    facts: dict[str, Any] = {"account": asdict(ledger.account), "runs": ledger.runs, "diagonal": ledger.diagonal}
    facts |= {"rows": [] if ledger.rows is None else ledger.rows.tolist(), "caveats": list(ledger.caveats)}
    facts |= {"keep_runs_at": list(ledger.traces.keep_at), "followed": ledger.features.followed}
    facts |= {"needs_range": ledger.needs_range, "worlds": list(ledger.divergences.worlds)}
    facts |= {"from_batches": ledger.divergences.from_batches}
    if ledger.features.choice is not None:
        facts["choice"] = asdict(ledger.features.choice)
    tensors = {**ledger.tensors(), "feature_scale": ledger.feature_scale}
    write_sealed(file_path("path", path), tensors, {"ledger": facts})


def load_ledger(kind: type[Runs], path: str | os.PathLike[str], device: torch.device | str) -> Runs:
    """Returns the ledger that `save_ledger` wrote; refuses any other file with the reason.

    Args:
        kind: the class of the ledger.
        path: the file.
        device: where the ledger will live.
    """
    where = checked_device(device)
    with _opened(path) as file:
        tensors = {name: file.read(name) for name in file.names}
        return _checked(kind, path, tensors, file.facts, where)


@contextmanager
def opened_ledger(kind: type[Runs], path: str | os.PathLike[str]) -> Iterator[Runs]:
    """Yields the ledger in a file for `merge` only: its large tensors are read from the file, part by part.

    Args:
        kind: the class of the ledger.
        path: the file.
    """
    with _opened(path) as file:
        large = {name for name in file.names if name.startswith(_LONG) and file.empty(name).numel() > compact.PART}
        tensors = {name: file.empty(name) if name in large else file.read(name) for name in file.names}
        ledger = _checked(kind, path, tensors, file.facts, checked_device("cpu"))
        for part in (ledger.traces, ledger.features, ledger.divergences):
            part.stored, part.in_file = file, large & set(part.state)
        yield ledger


@contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[SealedFile]:
    name = file_path("path", path)
    try:
        file = SealedFile(name)
    except (IsADirectoryError, Unreadable) as reason:
        raise InputError("path", f"must be a ledger that reconbound saved ({reason})", name) from None
    with file:
        yield file


def _checked(
    kind: type[Runs], path: Any, tensors: dict[str, Tensor], content: Mapping[str, Any], where: torch.device
) -> Runs:
    """Returns the ledger of a file's tensors and facts; refuses those that do not fit with the reason."""
    try:
        return _restored(kind, tensors, content["ledger"], where)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as reason:  # its digest is right
        why = f"({type(reason).__name__}: {' '.join(str(reason).split())[:200]})"
        what = f"must be a ledger of this version of reconbound: measure again {why}"
        raise InputError("path", what, os.fspath(path)) from None


def _restored(kind: type[Runs], tensors: dict[str, Tensor], facts: Mapping[str, Any], device: torch.device) -> Runs:
    """Returns the ledger of a file's tensors and facts. Raises errors of many kinds where they do not fit."""
    rules = facts["account"]["rules"]
    account = Account(**{**facts["account"], "rules": None if rules is None else tuple(rules)})
    worlds = [str(name) for name in facts["worlds"]]
    diagonal, few = choice("diagonal", facts["diagonal"], KINDS), Chosen(**facts.get("choice", {}))
    for name, shape in _shapes(account, diagonal, tensors, facts).items():
        given = tensors.get(name)
        if given is None or tuple(given.shape) != shape:  # before so much memory is taken
            raise InputError(name, f"must be a tensor of shape {shape}", None if given is None else tuple(given.shape))
    ledger = kind(
        account,
        diagonal={"some": facts["rows"], "chosen": few}.get(diagonal, diagonal),
        spectral="spectral" in tensors,
        feature_scale=tensors.pop("feature_scale"),
        keep_runs_at=facts["keep_runs_at"],
        worlds=[name for name in worlds if name != REMOVED] if worlds else None,
        device=device,
    )
    ledger.restore(tensors, facts["runs"], copy=False)
    ledger.features.followed, ledger.needs_range = facts["followed"], facts["needs_range"]
    ledger.divergences.from_batches = bool(facts["from_batches"])
    ledger.caveats = tuple(facts["caveats"])
    return ledger


def _shapes(
    account: Account, diagonal: str, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors that decide how much memory a ledger takes."""
    shapes: dict[str, tuple[int, ...]] = {"trace": (len(account.kept_rules), account.records)}
    if facts["worlds"]:
        shapes["nats"] = (len(facts["worlds"]), account.records)
    if diagonal in ("average", "some", "chosen"):
        shapes["average"] = (1, account.features)
    if diagonal == "all":
        shapes["diagonal"] = (account.records, account.features)
    elif diagonal in ("some", "chosen"):
        shapes["diagonal"] = (len(facts["rows"] if diagonal == "some" else tensors["rows"]), account.features)
    return shapes
