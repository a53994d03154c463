"""Random numbers as functions of (seed, purpose, step): nothing to save, nothing to replay, no two streams alike.

torch's CPU generator keeps 32 bits of its seed. That is too few where secrecy rests on the numbers (an attacker can
try them all, and two steps of a long run would share their noise), so batches and noise come from NumPy's Philox with
a 128-bit key; torch generators serve where numbers are public or only shape an estimate's error."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ._check import InputError

_BITS = 256


def new_seed() -> int:
    """A seed from the operating system's entropy, 128 bits."""
    return secrets.randbits(128)


def checked_seed(seed: object) -> int:
    """A whole number from 0 to 2²⁵⁶ − 1; never through a float, which would drop bits."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**_BITS:
        # its value is not shown: a seed is as secret as the data, and this may be one mistyped
        kind = "one that is not" if isinstance(seed, (int, np.integer)) else f"a {type(seed).__name__}"
        raise InputError("seed", f"must be a whole number from 0 to 2**{_BITS} - 1", kind)
    return int(seed)


def derive(seed: int, purpose: str, step: int = 0) -> int:
    """256 bits for one purpose at one step: SHA-256 of fields of fixed width, so that no two inputs run together."""
    fields = seed.to_bytes(_BITS // 8, "little") + purpose.encode().ljust(16, b"\0") + step.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(b"reconbound" + fields).digest(), "little")


def numbers_of(seed: int, purpose: str, step: int) -> np.random.Generator:
    """NumPy's generator of that purpose and step (Philox, 128-bit key).

    >>> a, b = (float(numbers_of(7, "batch", 3).random()) for _ in range(2))
    >>> a == b
    True
    """
    return np.random.Generator(np.random.Philox(key=derive(seed, purpose, step) % 2**128))


def torch_stream(seed: int, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """torch's generator of that purpose and step. On the CPU it keeps 32 bits: for probes and first parameters only."""
    return torch.Generator(device=device).manual_seed(derive(seed, purpose, step) % 2**63)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """torch's global generators seeded for the time being, and as they were afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count()) if torch.cuda.is_available() else []):
        torch.manual_seed(seed % 2**63)
        yield
