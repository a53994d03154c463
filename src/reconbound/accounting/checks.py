"""Checks of what a ledger is given: measurements, their weights, the range of the private features, and the runs.

No run is counted twice: a fingerprint of 128 bits names each, which a learner derives one-way from its secret seed, so
that the same training has the same one wherever it is measured. Other runs get a random one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from reconbound._internal.checks import InputError, flag, number, warn_user
from reconbound.accounting.spec import Account
from reconbound.divergences import sensitivity
from reconbound.fisher import StepInformation
from reconbound.fisher.worlds import StepDistances
from reconbound.validate.model import ReconboundWarning


def checked_weight(account: Account, weight: float, stratified: bool) -> float:
    """Returns the weight of a measurement; refuses one below the sample rate, and blocks of shuffled epochs."""
    rate = account.sample_rate
    if number("weight", weight, above=0.0) < rate * (1 - 1e-9):
        why = f"must be at least the sample rate, {rate:g}, which is divided by a chance to make it"
        raise InputError("weight", why, weight)
    if flag("stratified", stratified) and account.sampler == "shuffle":
        raise InputError("stratified", "must be False with shuffled epochs: measure the batches themselves", True)
    return float(weight)


Found = TypeVar("Found", StepInformation, StepDistances)


def checked_records(given: Any, found: Found, kind: type[Found], records: int) -> tuple[Tensor, Found]:
    """Returns distinct indices, one for each record measured, and the measurement; refuses others.

    Masked rows are left out: they are padding, not measurements.
    """
    if not isinstance(found, kind):
        function = "step_information" if kind is StepInformation else "step_distances"
        raise InputError("found", f"must be what {function} returns", found)
    kept = None if found.mask is None else torch.nonzero(found.mask).flatten()
    indices = _checked_indices(given, len(found.clipped_norm), records, kept)
    return indices, found if kept is None else _rows_of(found, kept)


def checked_norms(given: Any, norms: Any, account: Account) -> tuple[Tensor, Tensor]:
    """Returns distinct indices, and the clipped norm of each; refuses others.

    Args:
        given: the indices.
        norms: the clipped norms.
        account: of the ledger.
    """
    if not isinstance(norms, Tensor) or norms.dim() != 1 or not norms.is_floating_point():
        raise InputError("clipped_norm", "must be a tensor of norms, (B,)", getattr(norms, "shape", norms))
    check_clipped("clipped_norm", norms, account)
    return _checked_indices(given, len(norms), account.records), norms.detach()


def check_clipped(name: str, norms: Tensor, account: Account) -> None:
    """Refuses norms that are not finite, or that the account's clip would not let through."""
    largest = account.max_grad_norm * sensitivity(account.clip) * (1 + 1e-4)
    bad = torch.nonzero(~((norms >= 0) & (norms <= largest))).flatten()
    if len(bad):
        why = f"must be norms after clipping, from 0 to {largest:g}"
        raise InputError(name, why, float(norms[bad[0]]))


def _checked_indices(given: Any, size: int, records: int, kept: Tensor | None = None) -> Tensor:
    """Returns `size` indices of distinct records, or those in the places `kept`; refuses others."""
    indices = given
    with suppress(TypeError, ValueError, RuntimeError):  # a list or an array of whole numbers will do
        indices = torch.as_tensor(given)
    if isinstance(indices, Tensor) and indices.numel() == 0 and size == 0:
        return indices.to(torch.int64).flatten()
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dtype == torch.bool:
        raise InputError("indices", "must be a tensor of record indices", getattr(given, "dtype", given))
    if tuple(indices.shape) != (size,):
        have = len(indices) if indices.dim() == 1 else tuple(indices.shape)
        raise InputError("indices", f"must be {size}, one for each record found", have)
    indices = indices if kept is None else indices[kept.cpu()]
    if indices.numel() == 0:
        return indices
    low, high = int(indices.min()), int(indices.max())
    if low < 0 or high >= records:
        raise InputError("indices", f"must lie between 0 and {records - 1}", low if low < 0 else high)
    if indices.unique().numel() != indices.numel():
        raise InputError("indices", "must name each record at most once", indices.tolist())
    return indices


def _rows_of(found: Found, kept: Tensor) -> Found:
    """Returns the measurement of these rows only."""
    changes: dict[str, Any] = {}
    for f in fields(found):
        value = getattr(found, f.name)
        if isinstance(value, Tensor):
            changes[f.name] = value[kept]
        elif f.name in ("other_norm", "squared_distance"):
            changes[f.name] = {name: x[kept] for name, x in value.items()}
    return replace(found, **changes)


def check_information(account: Account, indices: Tensor, found: StepInformation) -> None:
    """Raises an InputError for information of another mechanism or model than the account's, or not finite."""
    if found.features != account.features:
        raise InputError("found", f"must be about the account's {account.features} features", found.features)
    check_mechanism(account, found)
    numbers = torch.stack([x.double() for x in (found.across, found.along, found.across_error, found.clipped_norm)])
    bad = ~torch.isfinite(numbers).all(0) | (numbers[:2].sum(0) < 0)
    if bool(bad.any()):
        first = int(torch.nonzero(bad)[0])
        where = f"must have finite numbers, and no negative trace, of record {int(indices[first])}"
        raise InputError("found", where, [float(x) for x in numbers[:2, first]])


def check_mechanism(account: Account, found: StepInformation | StepDistances) -> None:
    """Refuses a measurement of another mechanism than the account's."""
    for name in ("noise_multiplier", "max_grad_norm", "clip"):
        given, wanted = getattr(found, name, None), getattr(account, name)
        if given is not None and given != wanted:
            raise InputError("found", f"must have been computed with the account's {name}, {wanted!r}", given)


def check_space(space: Mapping[str, Any], needs_range: bool, feature_scale: Tensor) -> None:
    """Refuses a guarantee without the range of a module's output; warns where its units are not the ledger's.

    Args:
        space: what `guarantee` is given about the private features.
        needs_range: whether the private part is not known to lie in [0, 1].
        feature_scale: of the ledger.
    """
    if needs_range and not ({"low", "high"} <= space.keys() or "radius" in space):
        why = "and high, or radius, must be given: the private part is a module's output, not known to be in [0, 1]"
        raise InputError("low", why, space.get("low"))
    if not {"low", "high", "radius"} & space.keys() and not bool((feature_scale == 1).all()):
        why = "the mechanism's floors are for features in [0, 1], this ledger's in the units of feature_scale"
        warn_user(f"{why}: give low and high in those, to compare them", ReconboundWarning)


_BYTES = 16  # of a fingerprint


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
        found, kept = Fingerprints(), tensors.get("fingerprints")
        shapes = [(count, _BYTES) for count in (runs, runs + 1)]
        if kept is None:
            raise InputError("tensors", "must hold fingerprints, as `state` returns", f"{', '.join(tensors) or 'none'}")
        if kept.dtype != torch.uint8 or tuple(kept.shape) not in shapes:
            raise InputError("fingerprints", f"must be bytes of shape {shapes[0]} or {shapes[1]}", tuple(kept.shape))
        known = [bytes(row).hex() for row in kept.tolist()]
        found.finished, found.current = known[:runs], known[runs] if len(known) > runs else None
        return found
