"""Gaussian noise for everything that is released: from a cryptographic generator, as a function of a 256-bit key.

A key must serve one released value only: two values with the same noise reveal their difference. The learner's keys are
bound to the whole release and to the sum itself (docs/theory/accounting.md, "Noise is never reused"), so that noise is
the same only where the released value is. The key is as secret as the data: whoever knows it can subtract the noise.

Noise is float64. It must be added in float64 and rounded once: noise on a coarser grid than the sum's would reveal the
sum's last digits. Each number is the sum of four normal numbers divided by two, which hides the floating-point grid on
which each of them lies (Mironov 2012; Holohan and Braghin 2021). benchmarks/secure_noise.py measures the cost.

Each of the four is R cos θ or R sin θ with R = √(−2 ln u), u one of 2⁵³ values, so that none exceeds √(108 ln 2) = 8.65
and no number exceeds 17.31. A real normal number exceeds 8.65 with a chance of 5e-18. R differs from that of a real
uniform number by 1e-15 on average (docs/theory/accounting.md).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconbound._internal import chacha
from reconbound._internal.files import json_digest, tensor_digest
from reconbound._internal.rng import derive, random_states_kept
from reconbound.fisher import Private
from reconbound.training.checkpoint import model_digest, plain_json
from reconbound.training.rows import record_count
from reconbound.training.settings import Settings
from reconbound.validate.private import Problem

#: Of the facts that noise and batches are bound to, on a CPU and elsewhere; another number draws others.
CONTEXT = (2, 3)
#: What decides only how a run is measured. Apart from it, all that distinguishes a run decides its noise and batches.
_MEASURING = ("rules", "budget", "probes", "private", "diagonal", "spectral", "feature_scale", "whole_at", "worlds")
_PART = 2**20  # numbers drawn at a time, to limit memory: each needs 32 bytes of key stream


def draw(key: int, size: int, device: torch.device) -> Tensor:
    """Returns `size` standard normal numbers in float64, a function of the key.

    Args:
        key: 256 bits, secret, for one released value only.
        size: the number of values.
        device: the device of the result. On the CPU the bits are SHAKE-256's, which is fastest there; elsewhere
            ChaCha20's.

    >>> bool((draw(1, 5, torch.device("cpu")) == draw(1, 5, torch.device("cpu"))).all())
    True
    """
    secret, parts = key.to_bytes(32, "little"), range(0, size, _PART)
    if device.type != "cpu":
        return by_cipher(chacha.key_words(secret, device), size)
    found = [torch.zeros(0, dtype=torch.float64)]
    for k, at in enumerate(parts):
        pairs = (min(_PART, size - at) + 1) // 2
        raw = hashlib.shake_256(b"reconbound noise" + secret + k.to_bytes(8, "little")).digest(64 * pairs)
        bits = torch.frombuffer(bytearray(raw), dtype=torch.int64).reshape(2, 4, pairs)
        found.append(_normal(bits).flatten())
    return torch.cat(found)[:size]


def draw_for(total: Tensor, run_seed: int, step: int) -> Tensor:
    """Returns standard normal numbers for a sum: equal only for the same bits, at this step of this release.

    Args:
        total: the sum, flat.
        run_seed: of the release, bound to all that distinguishes it.
        step: the number of the step.
    """
    if total.device.type == "cpu":
        bits = bytes.fromhex(tensor_digest({"sum": total}))
        return draw(derive(run_seed, "noise", step, bits), len(total), total.device)
    return draw_without_waiting(total, run_seed, step)


def draw_without_waiting(total: Tensor, run_seed: int, step: int) -> Tensor:
    """Returns `draw_for` of a sum that the device is still computing: its bits are not read.

        h = multilinear hash of the sum's bits under k₁,     ξ = ChaCha20 under H(H(k₂, h's first half), its second)

    k₁ and k₂ are keys of the release, of this step and of the sum's length and kind, H is HChaCha20.

    Args:
        total: the sum, flat.
        run_seed: as in `draw_for`.
        step: the number of the step.

    Guarantee: two sums that differ have the same h with a chance of at most 2⁻¹³²; otherwise their noise is independent
        for whoever does not know the keys, as far as ChaCha20 and HMAC-SHA-256 are pseudo-random functions.
    """
    return by_keys(total, chacha.key_words(keys_for(total, run_seed, step), total.device))


def keys_for(total: Tensor, run_seed: int, step: int) -> bytes:
    """Returns k₂ and k₁ of `draw_without_waiting`, 32 bytes each: of the sum's kind and length, not of its bits."""
    kind = hashlib.sha256(f"{total.dtype} {len(total)}".encode()).digest()
    secrets = [derive(run_seed, purpose, step, kind).to_bytes(32, "little") for purpose in ("noise key", "noise hash")]
    return b"".join(secrets)


def by_keys(total: Tensor, words: Tensor) -> Tensor:
    """Returns standard normal numbers for a sum under the two keys of `keys_for`, given as words on its device, (16,).

    Nothing here waits for the device, so that it can be in a CUDA graph.
    """
    key, factors = words.split(8)
    cipher = chacha.kernels_for(total.device) or chacha
    words = total.view(torch.int32) if total.element_size() >= 4 else total.view(torch.int16).to(torch.int32)
    point = cipher.keyed_hash(words, factors).view(torch.int32)
    for half in point.split(4):
        key = cipher.derived_key(key, half)
    return by_cipher(key, len(total))


@dataclass(frozen=True)
class Release:
    """Makes the noisy mean gradient of a sum. It waits for nothing, so that it can be in the sum's own CUDA graph.

    Attributes:
        noise: σC.
        divisor: of the noisy sum.
        dtype: to which the result is rounded, once.
    """

    noise: float
    divisor: float
    dtype: torch.dtype

    def __call__(self, total: Tensor, words: Tensor) -> Tensor:
        """Returns (S + σC ξ)/divisor, with the ξ of `draw_without_waiting`.

        Args:
            total: S, flat.
            words: the keys of `keys_for`, on the sum's device, (16,), int32.
        """
        noisy: Tensor = (total.double() + self.noise * by_keys(total, words)) / self.divisor
        return noisy.to(self.dtype)


def by_cipher(key: Tensor, size: int) -> Tensor:
    """Returns `size` standard normal numbers from ChaCha20's key stream, two of each block.

    Args:
        key: its words, (8,), int32, on the device of the result.
        size: the number of values.
    """
    kernels = chacha.kernels_for(key.device)
    if kernels is not None:
        drawn: Tensor = kernels.normal_numbers(key, size)
        return drawn
    found = torch.empty(size, dtype=torch.float64, device=key.device)
    for at in range(0, size, _PART):
        part = found[at : at + _PART]
        words = chacha.paired(chacha.keystream(key, at // 2, (len(part) + 1) // 2))
        part.copy_(_normal(words.reshape(2, 4, -1)).T.flatten()[: len(part)])
    return found


def _normal(bits: Tensor) -> Tensor:
    """Applies Box–Muller to the upper 53 bits of the words, (2, 4, pairs). Returns two numbers per column."""
    uniform = ((bits >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
    radius, angle = uniform[0].log_().mul_(-2).sqrt_(), uniform[1].mul_(2 * math.pi)
    return torch.stack([(radius * angle.cos()).sum(0), (radius * angle.sin()).sum(0)]) / 2


def release_context(
    identity: Mapping[str, Any], settings: Settings, model: nn.Module, device: torch.device, losses: list[float] | None
) -> bytes:
    """Returns a digest of everything that distinguishes the release of the run that begins, 32 bytes.

    It covers data, settings, length, model (structure, device, present parameters and buffers), optimizer and schedule.
    The way the run is measured is left out, unless batches are measured in the pass that computes their sum, because
    that pass rounds differently.

    Args:
        identity: facts about the training, as in its checkpoints.
        settings: of the training.
        model: at the start of the run.
        device: of its parameters.
        losses: of some records at the start. Two losses of one name must not share batches, which amplification takes
            as independent.
    """
    facts = {
        **{name: value for name, value in identity.items() if name != "loss"},
        "format": CONTEXT[device.type != "cpu"],
        "configuration": {k: v for k, v in identity["configuration"].items() if k not in _MEASURING},
        "in the pass": None if settings.rules is None or isinstance(settings.budget, float) else settings.budget,
        "device": device.type,
        "start": model_facts(model),
        "losses": losses,
    }
    return bytes.fromhex(json_digest(plain_json(facts)))


def record_losses(model: nn.Module, loss_fn: Any, inputs: Any, targets: Any) -> list[float] | None:
    """Returns the losses of these records; None where they cannot be computed or are not finite.

    Buffers and random numbers are not changed.

    Args:
        model: at its present parameters.
        loss_fn: (outputs, targets) → one loss per record.
        inputs: of these records.
        targets: of these records.
    """
    own = {name: value.detach().clone() for name, value in model.state_dict().items()}
    problem = Problem(model, loss_fn, Private("nothing"))
    try:
        with torch.no_grad(), random_states_kept(0):
            losses = problem.losses(torch.zeros(record_count(inputs, targets)), inputs, targets, own)
    except Exception:  # errors of the loss or of a record are reported when it is trained on, not here
        return None
    return losses.double().cpu().tolist() if bool(torch.isfinite(losses).all()) else None


def model_facts(model: nn.Module) -> list[str]:
    """Returns facts that identify a model as it is now: each module's class and options, and a digest of its state."""
    modules = [f"{type(m).__module__}.{type(m).__qualname__} {m.extra_repr()}" for m in model.modules()]
    return [*modules, model_digest(model)]
