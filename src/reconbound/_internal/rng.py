"""Random numbers as functions of (seed, purpose, step, context): nothing to save or to replay, no two equal streams.

torch's CPU generator keeps 32 bits of its seed. That is too few where secrecy depends on the numbers (an attacker can
try them all, and two steps of a long run would share them). So batches come from NumPy's Philox with a 128-bit key, and
noise from a cryptographic generator with 256 bits (noise.py). torch generators are used where numbers are public or
only affect the error of an estimate. Nothing here draws from a global generator, which training may use.
"""

from __future__ import annotations

import hmac
import random
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from reconbound._internal.checks import InputError

_BITS = 256
#: Seeds below this can be found by trying: whoever does subtracts the noise.
GUESSABLE = 2**64


def new_seed() -> int:
    """Returns a seed from the operating system's entropy, 128 bits."""
    return secrets.randbits(128)


def checked_seed(seed: object, name: str = "seed") -> int:
    """Returns a seed from 0 to 2²⁵⁶ − 1; refuses any other value. Floats are never used: they would drop bits.

    Args:
        seed: as it was given.
        name: the user's name for it.
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**_BITS:
        # its value is not shown: a seed is as secret as the data, and this may be one with a typing error
        kind = "one that is not" if isinstance(seed, (int, np.integer)) else f"a {type(seed).__name__}"
        raise InputError(name, f"must be a whole number from 0 to 2**{_BITS} - 1", kind)
    return int(seed)


def seed_warning(name: str) -> str:
    """Returns the warning about a seed that can be guessed.

    Args:
        name: the user's name for it: seed, random_state, --seed.
    """
    return (
        f"{name} can be guessed: it is below 2**64. Whoever guesses it can subtract the noise, and no guarantee holds "
        "against them. Leave it out before you release anything"
    )


def derive(seed: int, purpose: str, step: int = 0, context: bytes = b"") -> int:
    """Returns 256 bits for one purpose, step and context: HMAC-SHA-256 of fields of fixed width under the seed as key.

    Args:
        seed: the key.
        purpose: the name of the stream.
        step: the number of the step.
        context: nothing, or a digest of 32 bytes of everything that the numbers must depend on apart from the seed.
    """
    fields = purpose.encode().ljust(16, b"\0") + step.to_bytes(8, "little") + context
    key = seed.to_bytes(_BITS // 8, "little")
    return int.from_bytes(hmac.digest(key, b"reconbound" + fields, "sha256"), "little")


def numbers_of(seed: int, purpose: str, step: int, skip: int = 0) -> np.random.Generator:
    """Returns NumPy's generator of a purpose and step (Philox, 128-bit key).

    Philox is a function of a key and a counter, each value of which gives four numbers: any place of the stream can be
    reached without drawing those before it.

    Args:
        seed: the key.
        purpose: the name of the stream.
        step: the number of the step.
        skip: numbers of 64 bits at the beginning of the stream that are left out.

    >>> whole, rest = numbers_of(7, "batch", 3), numbers_of(7, "batch", 3, skip=5)
    >>> whole.random(8)[5:].tolist() == rest.random(3).tolist()
    True
    """
    bits = np.random.Philox(key=derive(seed, purpose, step) % 2**128)
    if skip:
        bits.advance(skip // 4)
        bits.random_raw(skip % 4)
    return np.random.Generator(bits)


def torch_stream(seed: int, purpose: str, step: int, device: torch.device | str = "cpu") -> torch.Generator:
    """Returns torch's generator of a purpose and step.

    On the CPU it keeps 32 bits: for probes and first parameters only.

    Args:
        seed: the key.
        purpose: the name of the stream.
        step: the number of the step.
        device: of the generator.
    """
    return torch.Generator(device=device).manual_seed(derive(seed, purpose, step) % 2**63)


def fresh_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Returns a torch generator with a seed from the operating system: for probes when the caller gave none."""
    if torch.device(device).type == "cuda" and torch.cuda.is_current_stream_capturing():
        what = "must be given while a CUDA graph is captured, and registered with the graph; or give directions"
        raise InputError("generator", what, None)
    return torch.Generator(device=device).manual_seed(_entropy())


def _entropy() -> int:
    return secrets.randbits(63)


@contextmanager
def random_states_kept(seed: int | None = None) -> Iterator[None]:
    """Restores the global generators of Python, NumPy and torch (on the CPU and on CUDA) at the end of the block.

    Those of GPUs are left alone while a CUDA graph, which cannot use them, is captured.

    Args:
        seed: torch's generators start from it, if it is given.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    generators = [torch.default_generator]
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        generators += torch.cuda.default_generators
    states = [generator.get_state() for generator in generators]
    try:
        # not torch.manual_seed: it would also seed a GPU that is not in use yet, and nothing could undo that
        if seed is not None:
            for generator in generators:
                generator.manual_seed(seed % 2**63)
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
