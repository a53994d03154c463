"""Checkpoints of a training run: whole or not there, never a pickle, for their owner's eyes alone.

Two files take turns, so that the previous good state outlives a newer one that is damaged. A checkpoint names the
configuration and the data that it belongs to and carries a digest of its own content."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import CONFIDENTIAL, write_whole

NAMES = ("checkpoint-0.safetensors", "checkpoint-1.safetensors")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, and why."""


@dataclass(frozen=True)
class Checkpoint:
    """Tensors by name, and plain facts."""

    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


def save(folder: str | os.PathLike[str], checkpoint: Checkpoint, turn: int) -> None:
    """Write a checkpoint into the folder (made with mode 0700), over the older of the two."""
    from safetensors.torch import save as packed

    place = Path(folder)
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in checkpoint.tensors.items()}
    facts = {**checkpoint.facts, "digest": digest(tensors)}
    metadata = {"reconbound": json.dumps(facts, sort_keys=True), "confidential": "per-record leakage: keep it secret"}
    write_whole(place / NAMES[turn % 2], packed(tensors, metadata), mode=CONFIDENTIAL)


def load(folder: str | os.PathLike[str], belongs: Mapping[str, Any]) -> tuple[Checkpoint, int] | None:
    """The newest good checkpoint of the folder and the turn it was written in; None if there is none at all.

    Args:
        belongs: facts that must be equal ("configuration", "data", …); a checkpoint of another run is refused.
    """
    found: list[tuple[int, int, Checkpoint]] = []
    damaged: list[str] = []
    for turn, name in enumerate(NAMES):
        path = Path(folder) / name
        if not path.exists():
            continue
        try:
            checkpoint = _read(path)
        except CheckpointError as reason:
            damaged.append(str(reason))
            continue
        _check_belongs(path, checkpoint.facts, belongs)
        found.append((int(checkpoint.facts["order"]), turn, checkpoint))
    if damaged and not found:
        raise CheckpointError("; ".join(damaged) + "; no other checkpoint is there")
    if not found:
        return None
    _, turn, checkpoint = max(found, key=lambda item: item[0])
    if damaged:
        step = checkpoint.facts.get("step")
        warnings.warn(f"{'; '.join(damaged)}: going on from the previous one, step {step}", UserWarning, stacklevel=2)
    return checkpoint, turn


def _read(path: Path) -> Checkpoint:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads((file.metadata() or {})["reconbound"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, json.JSONDecodeError, OSError) as reason:
        raise CheckpointError(f"{path} is cut off or damaged ({type(reason).__name__})") from None
    if digest(tensors) != facts.get("digest"):
        raise CheckpointError(f"{path} is damaged (its content does not have the digest that it names)")
    return Checkpoint(tensors, facts)


def _check_belongs(path: Path, facts: Mapping[str, Any], belongs: Mapping[str, Any]) -> None:
    for name, wanted in belongs.items():
        has = facts.get(name)
        if has == wanted:
            continue
        if isinstance(wanted, Mapping) and isinstance(has, Mapping):
            keys = [k for k in {**wanted, **has} if wanted.get(k) != has.get(k)]
            told = ", ".join(f"{k} was {has.get(k)!r} and is {wanted.get(k)!r}" for k in keys)
        else:
            told = f"it was {has!r} and is {wanted!r}"
        raise CheckpointError(f"{path} belongs to another run: the {name} differs ({told})")


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and contents."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        if value.numel():
            sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
