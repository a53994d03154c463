"""The ChaCha20 block function of RFC 8439 in torch operations: the same bits on every device, at the device's speed.

Words are int32, whose sums wrap around modulo 2³² as the cipher requires.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CONSTANTS = b"expand 32-byte k"


def keystream(key: bytes, counter: int, nonce: bytes, blocks: int, device: torch.device) -> Tensor:
    """Returns the key stream of n blocks, int32 words of shape (16, blocks): column k is block counter + k.

    Args:
        key: 32 bytes.
        counter: number of the first block.
        nonce: 12 bytes.
        blocks: the number of blocks of 64 bytes; counter + blocks at most 2³².
        device: where to compute.
    """
    words = torch.frombuffer(bytearray(_CONSTANTS + key + bytes(4) + nonce), dtype=torch.int32).to(device)
    start = words[:, None].repeat(1, blocks)
    start[12] = torch.arange(counter, counter + blocks, device=device).to(torch.int32)
    a, b, c, d = start.reshape(4, 4, blocks).clone()
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
    return torch.cat([a, b, c, d]) + start


def _rotated(words: Tensor, by: int) -> Tensor:
    """Rotates the bits of each word to the left. >> repeats the sign, so the bits that it inserts are masked."""
    return (words << by) | ((words >> (32 - by)) & ((1 << by) - 1))
