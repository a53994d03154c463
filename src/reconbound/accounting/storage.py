"""A ledger's file: safetensors, written atomically, readable only by its owner. Other files are refused."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, Unreadable, sealed, unsealed, write_whole
from reconbound.accounting.feature_ledger import Chosen
from reconbound.accounting.spec import Account

if TYPE_CHECKING:
    from reconbound.accounting.accountant import FisherAccountant


def write(ledger: FisherAccountant, path: str | os.PathLike[str]) -> None:
    """Writes the ledger's tensors, and the facts from which it is rebuilt."""
    kept = [] if ledger.rows is None else ledger.rows.tolist()
    about: dict[str, Any] = {"account": asdict(ledger.account), "runs": ledger.runs, "diagonal": ledger.diagonal}
    about |= {"rows": kept, "caveats": list(ledger.caveats), "needs_range": ledger.needs_range}
    if ledger.features.choice is not None:
        about |= {"choice": asdict(ledger.features.choice), "followed": ledger.features.followed}
    tensors = {**ledger.state(), "feature_scale": ledger.feature_scale}
    write_whole(path, sealed(tensors, {"ledger": about}), mode=CONFIDENTIAL)


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns tensors and facts of a ledger's file, or raises an InputError with the reason."""
    try:
        tensors, facts = unsealed(path)
    except IsADirectoryError:
        raise InputError("path", "must be a ledger's file, not a folder", os.fspath(path)) from None
    except Unreadable as reason:
        raise InputError("path", f"must be a ledger that reconbound saved ({reason})", os.fspath(path)) from None
    if "ledger" not in facts:
        raise InputError("path", "must be a ledger, not another file of reconbound's", os.fspath(path))
    return tensors, facts["ledger"]


def made(
    kind: type[FisherAccountant], tensors: dict[str, Tensor], about: dict[str, Any], device: torch.device | str
) -> FisherAccountant:
    """Returns the ledger that was written."""
    account = Account(**{**about["account"], "rules": tuple(about["account"]["rules"])})
    diagonal = about["rows"] if about["diagonal"] == "some" else about["diagonal"]
    if about["diagonal"] == "chosen":
        diagonal = Chosen(**about["choice"])
    scale, spectral = tensors.pop("feature_scale"), "spectral" in tensors
    ledger = kind(account, diagonal=diagonal, spectral=spectral, feature_scale=scale, device=device)
    ledger.restore(tensors, about["runs"])
    ledger.features.followed = bool(about.get("followed", False))  # what is not there, earlier versions did not keep
    ledger.caveats, ledger.needs_range = tuple(about.get("caveats", ())), bool(about.get("needs_range", False))
    return ledger
