"""Fingerprints of the runs in a ledger, so that none is counted twice: 128 bits per run that reveal nothing else.

A learner's fingerprints are derived one-way from the run's secret seed: the same training has the same one wherever it
is repeated. Runs that are measured beside the caller's own loop have random ones, created when the run is first written
to.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Mapping

import torch
from torch import Tensor

from reconbound._internal.checks import InputError
from reconbound._internal.rng import derive

NAME = "fingerprints"
_BYTES = 16


def of_run(run_seed: int) -> str:
    """Returns the fingerprint of the run with this secret seed."""
    return derive(run_seed, "fingerprint").to_bytes(32, "little")[:_BYTES].hex()


class Fingerprints:
    """The fingerprints of a ledger's finished runs, and of the run under way once anything is known of it."""

    def __init__(self) -> None:
        self.finished: list[str] = []
        self.current: str | None = None

    def begin(self, fingerprint: str) -> None:
        """Names the run under way; refuses one that is among the finished ones."""
        if not isinstance(fingerprint, str) or re.fullmatch(f"[0-9a-f]{{{2 * _BYTES}}}", fingerprint) is None:
            raise InputError("fingerprint", f"must be {2 * _BYTES} hexadecimal digits", fingerprint)
        if fingerprint in self.finished:
            raise InputError("run", "must be another one: it is in the ledger already, from a merge", "the same one")
        self.current = fingerprint

    def touch(self) -> None:
        """Gives the run under way a random fingerprint, if it has none."""
        if self.current is None:
            self.current = secrets.token_hex(_BYTES)

    def finish(self) -> None:
        """Counts the run under way as finished."""
        self.touch()
        assert self.current is not None
        self.finished.append(self.current)
        self.current = None

    def check_apart(self, other: Fingerprints) -> None:
        """Refuses another ledger's finished runs if one of them is here, finished or under way."""
        double = len(set(other.finished) & {*self.finished, self.current})
        if double:
            some = "1 of its runs is" if double == 1 else f"{double} of its runs are"
            raise InputError("other", f"must hold other runs: {some} in this ledger already", f"{len(other.finished)}")

    def tensor(self) -> Tensor:
        """Returns the fingerprints as bytes, (R or R + 1, 16), the run under way last."""
        known = [*self.finished, *([] if self.current is None else [self.current])]
        return torch.tensor([list(bytes.fromhex(one)) for one in known], dtype=torch.uint8).reshape(-1, _BYTES)

    def restored(self, tensors: Mapping[str, Tensor], runs: int) -> Fingerprints:
        """Returns the fingerprints that belong to a ledger's tensors.

        Args:
            tensors: of the ledger.
            runs: the number of its finished runs.
        """
        found, kept = Fingerprints(), tensors.get(NAME)
        shapes = [(count, _BYTES) for count in (runs, runs + 1)]
        if kept is None:
            raise InputError("tensors", f"must hold {NAME}, as `state` returns", f"{', '.join(tensors) or 'none'}")
        if kept.dtype != torch.uint8 or tuple(kept.shape) not in shapes:
            raise InputError(NAME, f"must be bytes of shape {shapes[0]} or {shapes[1]}", tuple(kept.shape))
        known = [bytes(row).hex() for row in kept.tolist()]
        found.finished, found.current = known[:runs], known[runs] if len(known) > runs else None
        return found


def digest(tensors: Mapping[str, Tensor]) -> str:
    """Returns the SHA-256 over names, types, shapes and contents."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name].detach().cpu().contiguous()
        sha.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        if value.numel():
            sha.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()
