"""The functions of chacha.py as Triton kernels, with the same bits, and normal numbers from them.

Each lane computes one block of the cipher. The rounds are in registers; only results are written. `benchmarks/
cuda_smoke.py` compares them on a GPU with chacha.py, and the tests do in Triton's interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from reconbound._internal.chacha import COPIES

_LANES = 128


@triton.jit
def _quarter(a, b, c, d):
    a = a + b
    d = d ^ a
    d = (d << 16) | (d >> 16)
    c = c + d
    b = b ^ c
    b = (b << 12) | (b >> 20)
    a = a + b
    d = d ^ a
    d = (d << 8) | (d >> 24)
    c = c + d
    b = b ^ c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _mixed(x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15):
    for _ in range(10):
        x0, x4, x8, x12 = _quarter(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter(x3, x4, x9, x14)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


@triton.jit
def _word(pointer, k, zero):
    """Returns the k-th word behind a pointer in all lanes."""
    return zero + tl.load(pointer + k).to(tl.uint32, bitcast=True)


@triton.jit
def _wide(low, high):
    return (high.to(tl.uint64) << 32) | low.to(tl.uint64)


@triton.jit
def _block(key, at):
    """Returns block `at` (int64) of the key stream with nonce 0, as eight 64-bit words."""
    low, high = at.to(tl.uint32), (at >> 32).to(tl.uint32)
    zero = low ^ low
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    k0, k1, k2, k3 = _word(key, 0, zero), _word(key, 1, zero), _word(key, 2, zero), _word(key, 3, zero)
    k4, k5, k6, k7 = _word(key, 4, zero), _word(key, 5, zero), _word(key, 6, zero), _word(key, 7, zero)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = _mixed(
        c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7, low, high, zero, zero
    )
    w0, w1 = _wide(x0 + c0, x1 + c1), _wide(x2 + c2, x3 + c3)
    w2, w3 = _wide(x4 + k0, x5 + k1), _wide(x6 + k2, x7 + k3)
    w4, w5 = _wide(x8 + k4, x9 + k5), _wide(x10 + k6, x11 + k7)
    return w0, w1, w2, w3, w4, w5, _wide(x12 + low, x13 + high), _wide(x14, x15)


@triton.jit
def _keystream(key, first, out, blocks, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    w0, w1, w2, w3, w4, w5, w6, w7 = _block(key, lane + first)
    here = lane < blocks
    tl.store(out + lane, w0.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + blocks + lane, w1.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 2 * blocks + lane, w2.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 3 * blocks + lane, w3.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 4 * blocks + lane, w4.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 5 * blocks + lane, w5.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 6 * blocks + lane, w6.to(tl.int64, bitcast=True), mask=here)
    tl.store(out + 7 * blocks + lane, w7.to(tl.int64, bitcast=True), mask=here)


@triton.jit
def _derived(key, point, out, LANES: tl.constexpr):
    lane = tl.arange(0, LANES).to(tl.uint32)
    zero = lane ^ lane
    k0, k1, k2, k3 = _word(key, 0, zero), _word(key, 1, zero), _word(key, 2, zero), _word(key, 3, zero)
    k4, k5, k6, k7 = _word(key, 4, zero), _word(key, 5, zero), _word(key, 6, zero), _word(key, 7, zero)
    p0, p1, p2, p3 = _word(point, 0, zero), _word(point, 1, zero), _word(point, 2, zero), _word(point, 3, zero)
    c0, c1, c2, c3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
    x0, x1, x2, x3, _, _, _, _, _, _, _, _, x12, x13, x14, x15 = _mixed(
        c0, c1, c2, c3, k0, k1, k2, k3, k4, k5, k6, k7, p0, p1, p2, p3
    )
    one = lane == 0
    tl.store(out + lane, x0.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 1, x1.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 2, x2.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 3, x3.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 4, x12.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 5, x13.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 6, x14.to(tl.int32, bitcast=True), mask=one)
    tl.store(out + lane + 7, x15.to(tl.int32, bitcast=True), mask=one)


@triton.jit
def _hashed(words, key, out, size, LANES: tl.constexpr):
    """Writes a program's part of the hash: four 64-bit sums, in which overflow is the reduction modulo 2⁶⁴."""
    program = tl.program_id(0).to(tl.int64)
    lane = program * LANES + tl.arange(0, LANES)
    w0, w1, w2, w3, w4, w5, w6, w7 = _block(key, lane)
    a = tl.load(words + 2 * lane, mask=2 * lane < size, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    b = tl.load(words + 2 * lane + 1, mask=2 * lane + 1 < size, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
    out = out + 4 * program
    tl.store(out, tl.sum((w0 * a + w4 * b).to(tl.int64, bitcast=True), 0))
    tl.store(out + 1, tl.sum((w1 * a + w5 * b).to(tl.int64, bitcast=True), 0))
    tl.store(out + 2, tl.sum((w2 * a + w6 * b).to(tl.int64, bitcast=True), 0))
    tl.store(out + 3, tl.sum((w3 * a + w7 * b).to(tl.int64, bitcast=True), 0))


@triton.jit
def _unit(word):
    """Returns (k + 1/2) 2⁻⁵³, k the upper 53 bits of the word."""
    return ((word >> 11).to(tl.int64).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _pair(first, second):
    """Returns Box and Muller's two normal numbers."""
    radius = tl.sqrt(tl.log(_unit(first)) * -2.0)
    angle = _unit(second) * 6.283185307179586
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _normal(key, out, size, LANES: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    w0, w1, w2, w3, w4, w5, w6, w7 = _block(key, lane)
    a0, b0 = _pair(w0, w4)
    a1, b1 = _pair(w1, w5)
    a2, b2 = _pair(w2, w6)
    a3, b3 = _pair(w3, w7)
    tl.store(out + 2 * lane, (a0 + a1 + a2 + a3) / 2, mask=2 * lane < size)
    tl.store(out + 2 * lane + 1, (b0 + b1 + b2 + b3) / 2, mask=2 * lane + 1 < size)


def paired_keystream(key: Tensor, counter: int, blocks: int) -> Tensor:
    """Returns `paired(keystream(key, counter, blocks))`, (8, blocks), from the kernel."""
    out = torch.empty(8, blocks, dtype=torch.int64, device=key.device)
    with torch.cuda.device_of(key):
        _keystream[(triton.cdiv(blocks, _LANES),)](key, counter, out, blocks, LANES=_LANES)
    return out


def derived_key(key: Tensor, point: Tensor) -> Tensor:
    """Returns what chacha.derived_key does."""
    out = torch.empty_like(key)
    with torch.cuda.device_of(key):
        _derived[(1,)](key, point, out, LANES=32)
    return out


def keyed_hash(words: Tensor, key: Tensor) -> Tensor:
    """Returns what chacha.keyed_hash does."""
    programs = triton.cdiv(len(words), 2 * _LANES)
    parts = torch.empty(programs, COPIES, dtype=torch.int64, device=words.device)
    if programs:
        with torch.cuda.device_of(key):
            _hashed[(programs,)](words, key, parts, len(words), LANES=_LANES)
    return parts.sum(0)


def normal_numbers(key: Tensor, size: int) -> Tensor:
    """Returns standard normal numbers in float64, those of training/noise.py to rounding."""
    out = torch.empty(size, dtype=torch.float64, device=key.device)
    if size:
        with torch.cuda.device_of(key):
            _normal[(triton.cdiv(size, 2 * _LANES),)](key, out, size, LANES=_LANES)
    return out
