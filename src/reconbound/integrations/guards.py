"""Guards of a ledger beside Opacus: settings that must not change, noise that must not come twice."""

from __future__ import annotations

import gc
import hashlib
import inspect
from collections.abc import Callable, Mapping
from ctypes import string_at
from operator import attrgetter
from typing import Any

import torch
from opacus.layers.dp_rnn import DPRNNBase
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from reconbound._internal.checks import InputError, warn_user
from reconbound._internal.rng import derive, new_seed
from reconbound.validate.model import ReconboundWarning

#: Settings of Opacus's optimizer that decide what is released, and why they must stay as they were.
_SETTINGS = {
    "noise_multiplier": "schedules of the noise are not accounted for: all limits of a ledger are for one value",
    "expected_batch_size": "the noisy sum is divided by it, and no noise covers a divisor that depends on the batch",
    "loss_reduction": "it decides by what the noisy sum is divided",
    "secure_mode": "it decides how the noise is drawn",
}
_ALL_SETTINGS = attrgetter(*_SETTINGS)
_STATE_BYTES = 16
#: Of the state of torch's generator on the CPU: its length; its position, the first 64 of its 624 words; numbers that
#: it keeps for later. The seed before them is left out: 2**32 more of it give the same numbers.
_CPU_STATE, _WORDS, _KEPT = 5056, slice(8, 24 + 64 * 8), slice(24 + 624 * 8, 5056)


class Settings:
    """The settings of an optimizer when it was watched.

    Args:
        optimizer: Opacus's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer, self._kept = optimizer, _ALL_SETTINGS(optimizer)

    def check(self) -> None:
        """Refuses a setting that has changed."""
        present = _ALL_SETTINGS(self._optimizer)
        if present == self._kept:
            return
        for name, kept, found in zip(_SETTINGS, self._kept, present, strict=True):
            if found != kept:
                shown = f"{kept:g}" if type(kept) in (int, float) else repr(kept)
                raise InputError(name, f"must stay {shown}: {_SETTINGS[name]}", found)


class NoiseStates:
    """The states of the generator at the noise of each step: none may come twice, as then the noise does, too.

    Nor may those at the start of an iteration over the loader in which steps are taken: numbers that depend on the size
    of a batch, such as those of dropout, may come between it and the noise, which is then the earlier one, moved.

    Args:
        optimizer: Opacus's.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._seen: dict[str, None] = {}
        self._start = ""  # the state at the start of an iteration in which no step was taken yet

    def begin(self, device: torch.device) -> None:
        """Notes the present state as that at the start of an iteration, for the first step in it.

        Args:
            device: where the noise is drawn.
        """
        generator = _noise_generator(self._optimizer, device)
        self._start = "" if generator is None else _state_digest(generator)

    def note(self, device: torch.device) -> str:
        """Returns a digest of the present state, in hexadecimal digits; refuses a state that was there before.

        Args:
            device: where the noise is drawn.
        """
        generator = _noise_generator(self._optimizer, device)
        if generator is None:  # its numbers cannot be repeated, or its state not be read
            return derive(new_seed(), "noise state").to_bytes(32, "little")[:_STATE_BYTES].hex()
        digest = _state_digest(generator)
        if digest in self._seen or self._start in self._seen:
            why = (
                "must not be set again during a training, nor after a restart to what it was: the noise of this step "
                "would be that of an earlier one, and the difference of the two shows gradients without noise"
            )
            raise InputError("seed", why, "a state of the generator that was used before")
        return digest

    def keep(self, digest: str) -> None:
        """Keeps the state of a step that is taken, of this rank's generator or of that of the rank that adds noise."""
        self._seen[digest] = None
        if self._start:
            self._seen[self._start] = None
            self._start = ""

    def tensor(self) -> Tensor:
        """Returns the digests as bytes, (number of states, 16)."""
        rows = [list(bytes.fromhex(digest)) for digest in self._seen]
        return torch.tensor(rows, dtype=torch.uint8).reshape(-1, _STATE_BYTES)

    def restore(self, kept: Any) -> None:
        """Restores what `tensor` returned; refuses anything else."""
        if not isinstance(kept, Tensor) or kept.dtype != torch.uint8 or kept.shape[1:] != (_STATE_BYTES,):
            raise InputError("state", f"must have its noise states, bytes (n, {_STATE_BYTES})", type(kept).__name__)
        self._seen = dict.fromkeys(bytes(row).hex() for row in kept.tolist())


def _state_digest(generator: torch.Generator) -> str:
    """Returns a digest of a generator's state, in hexadecimal digits.

    Guarantee:
        - Equal for equal states, and for those which differ in the seed only, but not in the numbers that follow.
    """
    state = generator.get_state()
    found = string_at(state.data_ptr(), state.numel())  # bytes, on the CPU: much faster than through NumPy
    if len(found) == _CPU_STATE:
        found = found[_WORDS] + found[_KEPT]
    return hashlib.blake2b(found, digest_size=_STATE_BYTES).hexdigest()


def _noise_generator(optimizer: Any, device: torch.device) -> torch.Generator | None:
    """Returns the generator of the noise; None for a secure one, and on devices whose generator is not at hand."""
    if optimizer.secure_mode:
        return None
    if optimizer.generator is not None:
        return optimizer.generator  # type: ignore[no-any-return]
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator if device.type == "cpu" else None


def is_same_mark(own: Mapping[str, Any], given: Any) -> bool:
    """Returns whether a state names the training that a ledger is of, whatever it holds in place of its values.

    Args:
        own: names and plain values of this training.
        given: what the state has.
    """
    found = given if isinstance(given, Mapping) else {}
    return all(type(found.get(name)) is type(value) and found[name] == value for name, value in own.items())


def packed_sequences_refused(parameters: list[nn.Parameter]) -> Callable[[], None]:
    """Makes Opacus's recurrent layers with these parameters refuse packed sequences; returns what undoes it.

    Opacus puts the rows of their gradients in the order of lengths, and those of all other layers in the order of the
    batch: each norm, and each clip factor, is then that of parts of two records.

    Args:
        parameters: of the optimizer, which does not know its model.
    """
    own = {id(p) for p in parameters}
    layers = [found for found in gc.get_objects() if issubclass(type(found), DPRNNBase)]
    trained = [layer for layer in layers if not own.isdisjoint(map(id, layer.parameters()))]
    handles = [layer.register_forward_pre_hook(_refuse_packed) for layer in trained]

    def undo() -> None:
        for handle in handles:
            handle.remove()

    return undo


def _refuse_packed(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    if layer.training and torch.is_grad_enabled() and isinstance(inputs[0], PackedSequence):
        why = (
            "must have padded sequences, not packed ones: Opacus orders the gradients of packed ones by length, and "
            "then clips parts of two records together"
        )
        raise InputError("model", why, f"a PackedSequence into {type(layer).__name__}")


def check_loss(loss_fn: Any, optimizer: Any) -> None:
    """Refuses a loss whose gradient of one record depends on the other records of the batch, where that can be seen.

    Args:
        loss_fn: the criterion of the training.
        optimizer: Opacus's, which was told how the loss is reduced.
    """
    if not callable(loss_fn):
        raise InputError("loss_fn", "must be the criterion of the training", f"a {type(loss_fn).__name__}")
    divides = isinstance(loss_fn, nn.CrossEntropyLoss | nn.NLLLoss) and loss_fn.reduction == "mean"
    if divides and loss_fn.weight is not None:
        why = "must not have class weights with reduction='mean', which divides by the weights of the whole batch: a "
        raise InputError("loss_fn", f"{why}record then moves others' gradients, and no clip bounds that", str(loss_fn))
    own = getattr(loss_fn, "reduction", None)
    if own in ("mean", "batchmean", "sum") and (own == "sum") != (optimizer.loss_reduction == "sum"):
        why = (
            f"must be reduced by {optimizer.loss_reduction!r}, as make_private was told: otherwise the size of the "
            "batch is in each gradient, and a record moves those of others"
        )
        raise InputError("loss_fn", why, own)


def check_accounted(optimizer: Any, rate: float) -> None:
    """Warns where Opacus accounts for a lower rate than that of the loader: its ε is then too small.

    Args:
        optimizer: Opacus's.
        rate: with which the loader draws.
    """
    accounted = _of_hook(optimizer).get("sample_rate")
    if isinstance(accounted, float) and accounted < rate * (1 - 1e-3):
        what = f"Opacus accounts for the sample rate {accounted:.6g}, but the loader draws with {rate:.6g}"
        warn_user(f"{what}: its epsilon is too small. This ledger's get_epsilon has the loader's", ReconboundWarning)


def steps_before(optimizer: Any) -> int:
    """Returns the number of steps that Opacus's accountant has counted so far; 0 where it is not known."""
    history = getattr(_of_hook(optimizer).get("self"), "history", ())
    return sum(int(row[2]) for row in history)


def _of_hook(optimizer: Any) -> Mapping[str, Any]:
    """Returns what the accountant's step hook holds: the accountant and its sample rate."""
    hook = optimizer.step_hook
    return inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
