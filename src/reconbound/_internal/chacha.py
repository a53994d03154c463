"""ChaCha20 (RFC 8439) in torch's integer operations, on any device: key stream, derived keys and a keyed hash.

On a GPU, chacha_triton.py has the same functions as kernels, which give the same bits; `kernels_for` finds them.
Nothing here waits for the device: keys and inputs may be tensors that it is still computing.

Words are int32, as torch has no shifts of unsigned numbers on a GPU; the cipher does not know their signs.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from types import ModuleType

import torch
from torch import Tensor

from reconbound._internal.checks import warn_user

_CONSTANTS = (0x61707865, 0x3320646E, 0x79622D32, 0x6B206574)  # "expand 32-byte k"
_LOW = 2**32 - 1
#: Copies of the keyed hash: two inputs that differ meet in all of them with a chance of at most 2^(−33 · copies).
COPIES = 4
_BLOCKS = 2**19  # made at a time, to limit memory


def key_words(secret: bytes, device: torch.device) -> Tensor:
    """Returns a key of 32 bytes as words, (8,), on the device, without waiting for it."""
    words = torch.frombuffer(bytearray(secret), dtype=torch.int32)
    return words.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else words.to(device)


def keystream(key: Tensor, counter: int, blocks: int, nonce: bytes = bytes(12)) -> Tensor:
    """Returns the key stream of n blocks, int32 words of shape (16, blocks): column k is block counter + k.

    Args:
        key: as from `key_words`.
        counter: number of the first block; what exceeds 2³² is added to the nonce's first word.
        blocks: the number of blocks of 64 bytes.
        nonce: 12 bytes.
    """
    at = torch.arange(counter, counter + blocks, device=key.device)
    first, second, third = struct.unpack("<3i", nonce)
    start = _started(key, blocks)
    start[12] = (at & _LOW).to(torch.int32)
    start[13] = (at >> 32).to(torch.int32) + first
    start[14], start[15] = second, third
    return _mixed(start) + start


def derived_key(key: Tensor, point: Tensor) -> Tensor:
    """Returns a key that is a pseudo-random function of 16 bytes: HChaCha20 (the cipher without its last addition).

    Args:
        key: as from `key_words`.
        point: the 16 bytes as int32 words, (4,), on the same device.
    """
    start = _started(key, 1)
    start[12:] = point[:, None]
    mixed = _mixed(start)[:, 0]
    return torch.cat([mixed[:4], mixed[12:]])


def keyed_hash(words: Tensor, key: Tensor) -> Tensor:
    """Returns the multilinear hash of int32 words under random factors, int64 of shape (COPIES,).

        h_j = Σ_i κ_ij w_i   mod 2⁶⁴,     w_i in [0, 2³²), κ from the key stream: block b has κ_2b and κ_2b+1

    Args:
        words: of any number; that number must be fixed for a key.
        key: as from `key_words`, for hashes only.

    Guarantee: for two inputs that differ, and uniform κ, all copies agree with a chance of at most 2^(−33 · COPIES).
        If they differ in w_i by 2ˢ · odd, s ≤ 31, then one residue modulo 2^(64 − s) of κ_ij makes copy j agree.
    """
    total = torch.zeros(COPIES, dtype=torch.int64, device=words.device)
    for first in range(0, len(words), 2 * _BLOCKS):
        part = words[first : first + 2 * _BLOCKS]
        stream = paired(keystream(key, first // 2, (len(part) + 1) // 2))
        factors = stream.reshape(2, COPIES, -1).permute(2, 0, 1).reshape(-1, COPIES)[: len(part)]
        total += (factors * (part.long() & _LOW)[:, None]).sum(0)
    return total


def paired(stream: Tensor) -> Tensor:
    """Returns the key stream as 64-bit words, (8, blocks): word j of a block has its words 2j (low) and 2j + 1."""
    low, high = stream[0::2].long() & _LOW, stream[1::2].long()
    return (high << 32) | low


@lru_cache
def kernels_for(device: torch.device) -> ModuleType | None:
    """Returns the Triton kernels, on a GPU where they run and give the cipher's bits; otherwise None.

    It waits for the device at its first call.
    """
    if device.type != "cuda":
        return None
    try:
        from reconbound._internal import chacha_triton

        key = key_words(bytes(range(32)), device)
        own = paired(keystream(key, 2**32 - 2, 5))
        if not torch.equal(chacha_triton.paired_keystream(key, 2**32 - 2, 5), own):
            raise RuntimeError("its bits are not the cipher's")
    except Exception as reason:  # Triton is missing, or lacks a compiler, or does not know this GPU
        why = " ".join(str(reason).split())[:200]
        warn_user(
            f"noise is drawn by torch's own operations, which is slower: Triton's kernels do not run here ({why})"
        )
        return None
    return chacha_triton


def _started(key: Tensor, blocks: int) -> Tensor:
    """Returns states with constants and key, (16, blocks); the last four words are to be filled."""
    start = key.new_empty(16, blocks)
    for row, word in zip(start, _CONSTANTS, strict=False):
        row.fill_(word)
    start[4:12] = key[:, None]
    return start


def _mixed(start: Tensor) -> Tensor:
    """Returns the state, (16, blocks), after the cipher's 20 rounds."""
    a, b, c, d = start.reshape(4, 4, -1).clone()
    for _ in range(10):
        for turn in (1, -1):  # the columns; then the diagonals, moved to where the columns were and back
            a += b
            d = _rotated(d ^ a, 16)
            c += d
            b = _rotated(b ^ c, 12)
            a += b
            d = _rotated(d ^ a, 8)
            c += d
            b = _rotated(b ^ c, 7)
            b, c, d = b.roll(-turn, 0), c.roll(-2 * turn, 0), d.roll(turn, 0)
    return torch.cat([a, b, c, d])


def _rotated(words: Tensor, by: int) -> Tensor:
    """Rotates the bits of each word to the left. >> repeats the sign, so the bits that it inserts are masked."""
    return (words << by) | ((words >> (32 - by)) & ((1 << by) - 1))
