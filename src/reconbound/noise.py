"""Gaussian noise for the gradient sum: from Philox (fast, reproducible) or from a cryptographic generator.

Both are functions of a seed and a step, so that a stopped run goes on with exactly the noise that it would have
drawn. The seed is as secret as the data: whoever knows it can subtract the noise. For the same reason a seed must not
serve two data sets whose models are both released. Both are float64, to be added in float64 and rounded once: noise on
a coarser grid than the sum's would leave the sum's last digits bare."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor

from ._check import choice
from ._random import derive, numbers_of, torch_stream


def philox_noise(seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers in float64 from a Philox generator (NumPy's on the CPU, torch's on CUDA).

    Statistically sound, with a key of 128 bits (64 on CUDA); it is not a cryptographic generator."""
    if device.type == "cpu":
        return torch.from_numpy(numbers_of(seed, "noise", step).standard_normal(size))
    generator = torch_stream(seed, "noise", step, device)
    return torch.randn(size, generator=generator, device=device, dtype=torch.float64)


def secure_noise(seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers in float64 from SHAKE-256 of (seed, step): a cryptographic generator.

    Box–Muller on 53-bit uniforms; the sum of four of them over two, which hides the floating-point grid on which each
    lies (Holohan and Braghin 2021). What it costs: benchmarks/secure_noise.py."""
    pairs = (size + 1) // 2
    key = derive(seed, "secure noise", step).to_bytes(32, "little")
    raw = hashlib.shake_256(b"reconbound noise" + key).digest(8 * 8 * pairs)
    bits = np.frombuffer(raw, dtype="<u8").reshape(2, 4, pairs) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(uniform[0])), 2 * math.pi * uniform[1]
    normal = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)], axis=1).sum(axis=0) / 2
    return torch.from_numpy(normal[:size]).to(device)


SOURCES = {"philox": philox_noise, "secure": secure_noise}


def draw(source: str, seed: int, step: int, size: int, device: torch.device) -> Tensor:
    """`size` standard normal numbers from the named source.

    >>> bool((draw("secure", 1, 0, 5, torch.device("cpu")) == draw("secure", 1, 0, 5, torch.device("cpu"))).all())
    True
    """
    return SOURCES[choice("noise", source, tuple(SOURCES))](seed, step, size, device)
