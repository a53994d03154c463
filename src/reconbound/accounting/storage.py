"""A ledger's file: safetensors, written atomically, readable only by its owner. Other files are refused."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from reconbound._internal.checks import InputError
from reconbound._internal.files import CONFIDENTIAL, Unreadable, sealed, unsealed, write_whole
from reconbound.accounting.feature_ledger import Chosen
from reconbound.accounting.spec import Account

if TYPE_CHECKING:
    from reconbound.accounting.accountant import FisherAccountant


def write(ledger: FisherAccountant, path: str | os.PathLike[str]) -> None:
    """Writes the ledger's tensors, and the facts from which it is rebuilt."""
    rows = [] if ledger.rows is None else ledger.rows.tolist()
    facts: dict[str, Any] = {"account": asdict(ledger.account), "runs": ledger.runs, "diagonal": ledger.diagonal}
    facts |= {"rows": rows, "caveats": list(ledger.caveats), "needs_range": ledger.needs_range}
    facts |= {"keep_runs_at": list(ledger.traces.keep_at), "followed": ledger.features.followed}
    if ledger.features.choice is not None:
        facts["choice"] = asdict(ledger.features.choice)
    tensors = {**ledger.state(), "feature_scale": ledger.feature_scale}
    write_whole(path, sealed(tensors, {"ledger": facts}), mode=CONFIDENTIAL)


def read(kind: type[FisherAccountant], path: str | os.PathLike[str], device: torch.device) -> FisherAccountant:
    """Returns the ledger that was written, or raises an InputError with the reason."""
    try:
        tensors, content = unsealed(path)
    except IsADirectoryError:
        raise InputError("path", "must be a ledger's file, not a folder", os.fspath(path)) from None
    except Unreadable as reason:
        raise InputError("path", f"must be a ledger that reconbound saved ({reason})", os.fspath(path)) from None
    if "ledger" not in content:
        raise InputError("path", "must be a ledger, not another file of reconbound's", os.fspath(path))
    facts = content["ledger"]
    if "keep_runs_at" not in facts:
        raise InputError("path", "must be a ledger of this version of reconbound: measure again", os.fspath(path))
    account = Account(**{**facts["account"], "rules": tuple(facts["account"]["rules"])})
    diagonal = {"some": facts["rows"], "chosen": Chosen(**facts.get("choice", {}))}.get(
        facts["diagonal"], facts["diagonal"]
    )
    ledger = kind(
        account,
        diagonal=diagonal,
        spectral="spectral" in tensors,
        feature_scale=tensors.pop("feature_scale"),
        keep_runs_at=facts["keep_runs_at"],
        device=device,
    )
    ledger.restore(tensors, facts["runs"])
    ledger.features.followed, ledger.needs_range = facts["followed"], facts["needs_range"]
    ledger.caveats = tuple(facts["caveats"])
    return ledger
