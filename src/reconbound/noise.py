"""Gaussian noise for the gradient sum: from torch's generator (fast, reproducible) or from a cryptographic one.

Both are functions of a seed and a step, so that a stopped run goes on with exactly the noise that it would have
drawn. The seed is as secret as the data: whoever knows it can subtract the noise."""

from __future__ import annotations

import hashlib
import math
import secrets

import numpy as np
import torch
from torch import Tensor

from ._check import choice
from .sampling import stream


def new_seed() -> int:
    """A seed from the operating system's entropy, 128 bits."""
    return secrets.randbits(128)


def torch_noise(seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers in float32 from torch's generator (Mersenne twister on CPU, Philox on CUDA).

    Statistically sound; an attacker who sees much of its output could predict the rest."""
    return torch.randn(size, generator=stream(seed, "noise", step, device), device=device)


def secure_noise(seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers in float32 from SHAKE-256 of (seed, step): a cryptographic generator.

    Box–Muller in float64 on 53-bit uniforms; the sum of four of them over two, which hides the floating-point grid on
    which each lies (Holohan and Braghin 2021). About a hundred times slower than torch_noise."""
    pairs = (size + 1) // 2
    key = seed.to_bytes(32, "little") + step.to_bytes(8, "little")
    raw = hashlib.shake_256(b"reconbound noise" + key).digest(8 * 8 * pairs)
    bits = np.frombuffer(raw, dtype="<u8").reshape(2, 4, pairs) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * math.pi * uniform[1]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).sum(axis=0) / 2
    return torch.from_numpy(normal[:size].astype(np.float32)).to(device)


SOURCES = {"torch": torch_noise, "secure": secure_noise}


def draw(source: str, seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers from the named source.

    >>> bool((draw("secure", 1, 0, 5, torch.device("cpu")) == draw("secure", 1, 0, 5, torch.device("cpu"))).all())
    True
    """
    return SOURCES[choice("noise", source, tuple(SOURCES))](seed, step, size, device)
