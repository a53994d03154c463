"""Noise: standard normal, a function of its key, never the same twice. The cipher: tests/_internal/test_chacha.py."""

from __future__ import annotations

import hashlib
import hmac

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import calling
import injecting
from reconbound._internal import chacha
from reconbound.auditing.release import load_release
from reconbound.report.folder import read_run
from reconbound.training import noise
from reconbound.training.noise import draw

CPU = torch.device("cpu")


def by_cipher(key: int, size: int) -> Tensor:
    """The numbers as they are made on a GPU, here on the CPU."""
    return noise.by_cipher(chacha.key_words(key.to_bytes(32, "little"), CPU), size)


sources = pytest.mark.parametrize(
    "source", [lambda key, size: draw(key, size, CPU), by_cipher], ids=["shake", "chacha"]
)


@sources
def test_standard_normal(source) -> None:
    x = source(11, 200_000)
    assert x.dtype == torch.float64  # on a grid as fine as the sum's, see noise.py
    n = len(x)
    assert abs(float(x.mean())) < 4 / n**0.5
    assert abs(float(x.var()) - 1) < 4 * (2 / n) ** 0.5
    assert abs(float((x**3).mean())) < 4 * (15 / n) ** 0.5
    assert abs(float((x**4).mean()) - 3) < 4 * (96 / n) ** 0.5
    assert stats.kstest(x.numpy(), "norm").pvalue > 1e-3
    for lag in (1, n // 2):  # Box–Muller's two halves among them
        assert abs(float((x[:-lag] * x[lag:]).mean())) < 4 / (n - lag) ** 0.5
        assert abs(float((x[:-lag] ** 2 * x[lag:] ** 2).mean()) - 1) < 4 * (8 / (n - lag)) ** 0.5


@sources
def test_tails(source) -> None:
    x = source(5, 400_000).numpy()
    for cut in (2.0, 3.0, 4.0):
        expected = 2 * stats.norm.sf(cut) * len(x)
        assert abs((np.abs(x) > cut).sum() - expected) < 4.5 * expected**0.5


@sources
def test_reproduces_and_never_repeats(source) -> None:
    assert torch.equal(source(1, 9), source(1, 9))
    keys = [key + (bit << at) for key in range(20) for at in (32, 64, 128, 255) for bit in (0, 1)]
    assert len({tuple(source(key, 2).tolist()) for key in set(keys)}) == len(set(keys))


@sources
@pytest.mark.parametrize("size", [1, 2, 7])
def test_any_size(source, size: int) -> None:
    assert source(1, size).shape == (size,)


def test_sizes_of_zero_and_of_several_parts(monkeypatch) -> None:
    assert draw(1, 0, CPU).shape == (0,)
    monkeypatch.setattr(noise, "_PART", 1000)
    x = draw(3, 2501, CPU)
    assert x.shape == (2501,)
    assert len(set(x.tolist())) == 2501  # no part is another one's
    assert abs(float(x.var()) - 1) < 4 * (2 / 2501) ** 0.5


@sources
def test_steps_and_counters_are_independent(source) -> None:
    """Numbers of 300 keys, 40 of each: no two keys, and no two counters, are correlated, nor are their squares."""
    x = torch.stack([source(key, 40) for key in range(300)])
    for values in (x, (x.square() - 1) / 2**0.5):
        for along in (values, values.T):  # keys; counters
            between = along @ along.T / along.shape[1]
            there = torch.triu(torch.ones_like(between), 1).bool()
            assert abs(float(between[there].mean())) < 4.5 / (int(there.sum()) * along.shape[1]) ** 0.5
            neighbours = (along[1:] * along[:-1]).mean()
            assert abs(float(neighbours)) < 4.5 / (along.numel() - along.shape[1]) ** 0.5
    means = x.mean(1) * 40**0.5
    assert stats.kstest(means.numpy(), "norm").pvalue > 1e-3


@sources
def test_every_bit_of_a_uniform_number_is_fair(source, monkeypatch) -> None:
    seen: list[Tensor] = []
    own = noise._normal
    monkeypatch.setattr(noise, "_normal", lambda bits: seen.append(bits) or own(bits))
    source(3, 40_000)
    bits = torch.cat([one.flatten() for one in seen])
    assert len(bits) == 160_000
    for k in range(11, 64):
        assert abs(float(((bits >> k) & 1).double().mean()) - 0.5) < 4.5 * 0.5 / len(bits) ** 0.5, k


def test_the_largest_number() -> None:
    """All bits zero: u = 2⁻⁵⁴ four times over, at an angle of next to nothing."""
    x = noise._normal(torch.zeros(2, 4, 1, dtype=torch.int64)).flatten()
    assert float(x[0]) == pytest.approx(2 * (108 * np.log(2)) ** 0.5, rel=1e-12)
    assert float(x[0]) < 17.31
    ends = noise._normal(torch.full((2, 4, 1), -1))  # all bits one: u is next to 1
    assert bool(ends.isfinite().all())
    assert float(ends.abs().max()) < 1e-7


def test_a_tail_of_the_radius_has_its_probability() -> None:
    """P(R > r) is e^{−r²/2} at the ends of u's cells, down to the last one."""
    for k in (1, 2, 1000, 2**40, 2**52):
        words = torch.tensor([k - 1, k]) << 11  # the last value of u below k 2⁻⁵³, and the first above it
        both = noise._normal(torch.stack([words, torch.zeros_like(words)])[:, None].repeat(1, 4, 1))[0] / 2
        edge = (-2 * np.log(k * 2.0**-53)) ** 0.5
        assert float(both[0]) >= edge * (1 - 1e-15)
        assert float(both[1]) <= edge * (1 + 1e-15)
        assert float(both[0]) > float(both[1]) or k > 2**30


SUM = torch.randn(300, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_noise_of_a_gpu_is_the_same_for_the_same_bits_only(kind: torch.dtype) -> None:
    total = SUM.to(kind)
    own = noise.draw_without_waiting(total, 2**200, 3)
    assert own.dtype == torch.float64
    assert torch.equal(own, noise.draw_without_waiting(total.clone(), 2**200, 3))
    others = [noise.draw_without_waiting(total, seed, step) for seed, step in ((2**200, 4), (2**200 + 1, 3))]
    for i in (0, 1, 150, 299):  # one bit of one number
        near = total.clone()
        near[i] = torch.nextafter(total[i].float(), torch.tensor(9.0)) if kind == torch.float32 else total[i] * 1.01
        others.append(noise.draw_without_waiting(near, 2**200, 3))
    others.append(noise.draw_without_waiting(total.double() if kind != torch.float64 else total.float(), 2**200, 3))
    for k, other in enumerate(others):
        assert not bool((own == other).any()), k
        assert abs(float(torch.corrcoef(torch.stack([own, other]))[0, 1])) < 4.5 / 300**0.5


def test_noise_of_a_gpu_by_hand() -> None:
    """Keys by HMAC-SHA-256, the hash in whole numbers, HChaCha20 twice, and Box and Muller in NumPy."""
    kind = hashlib.sha256(b"torch.float32 300").digest()

    def key_of(purpose: bytes) -> bytes:
        fields = purpose.ljust(16, b"\0") + (3).to_bytes(8, "little") + kind
        return hmac.new((2**200).to_bytes(32, "little"), b"reconbound" + fields, "sha256").digest()

    def stream(key: bytes, blocks: int) -> np.ndarray:
        words = chacha.keystream(chacha.key_words(key, CPU), 0, blocks)
        return np.frombuffer(words.T.contiguous().numpy().tobytes(), "<u8")

    factors = stream(key_of(b"noise hash"), 150).astype(object)
    words = np.frombuffer(SUM.numpy().tobytes(), "<u4").astype(object)
    sums = [int((factors[j::4] * words).sum()) % 2**64 for j in range(4)]
    key = chacha.key_words(key_of(b"noise key"), CPU)
    for half in (sums[:2], sums[2:]):
        point = torch.tensor([s - 2**64 if s >= 2**63 else s for s in half]).view(torch.int32)
        key = chacha.derived_key(key, point)
    blocks = stream(key.numpy().tobytes(), 150).reshape(150, 2, 4)
    u = ((blocks >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53
    radius, angle = np.sqrt(-2 * np.log(u[:, 0])), 2 * np.pi * u[:, 1]
    expected = np.stack([radius * np.cos(angle), radius * np.sin(angle)], 1).sum(2) / 2
    drawn = noise.draw_without_waiting(SUM, 2**200, 3)
    np.testing.assert_allclose(drawn.numpy(), expected.flatten(), rtol=1e-12, atol=1e-14)


def test_parts_do_not_change_the_numbers_of_a_gpu(monkeypatch) -> None:
    whole = by_cipher(9, 2501)
    monkeypatch.setattr(noise, "_PART", 1000)
    assert torch.equal(by_cipher(9, 2501), whole)
    assert torch.equal(by_cipher(9, 7), whole[:7])


def by_shake(key: int, size: int) -> np.ndarray:
    """The numbers again, from SHAKE-256's bytes, by NumPy: Box and Muller's, each the sum of four over two."""
    pairs = (size + 1) // 2
    raw = hashlib.shake_256(b"reconbound noise" + key.to_bytes(32, "little") + bytes(8)).digest(64 * pairs)
    first, second = ((np.frombuffer(raw, "<u8").reshape(2, 4, pairs) >> 11) + 0.5) / 2.0**53
    radius = np.sqrt(-2 * np.log(first))
    both = radius * np.cos(2 * np.pi * second), radius * np.sin(2 * np.pi * second)
    return np.concatenate([part.sum(axis=0) / 2 for part in both])[:size]


def test_an_audit_from_the_command_line_releases_the_noise_of_this_generator(tmp_path, monkeypatch) -> None:
    """One step, with its noise and with zeros in its place: the models differ by SHAKE-256's noise and nothing else."""
    calling.write_people(tmp_path / "people.csv")
    options = ["--target", "<b>pay</b>", "--model", "linear", "--steps", "1", "--runs", "1", "--sample-rate", "1"]
    options += ["--noise-multiplier", "2", "--max-grad-norm", "1", "--lr", "0.5", "--momentum", "0", "--quiet"]
    drawn: list[tuple[int, torch.Tensor]] = []
    own, factor = noise.draw, 1.0

    def spied(key: int, size: int, device: torch.device) -> torch.Tensor:
        drawn.append((key, own(key, size, device)))
        return drawn[-1][1] * factor

    monkeypatch.setattr(noise, "draw", spied)
    models = []
    for factor in (1.0, 0.0):
        words = ["audit", str(tmp_path / "people.csv"), *options, "--seed", str(2**200), "--out"]
        found = injecting.ended([*words, str(tmp_path / f"{factor}")])
        assert found.status == 0, found
        models.append(torch.cat([p.flatten() for p in load_release(tmp_path / f"{factor}").model.parameters()]))
    (key, used), (again, _) = drawn
    assert key == again > 2**128
    np.testing.assert_allclose(used.numpy(), by_shake(key, len(used)), rtol=1e-12)
    records = read_run(tmp_path / "0.0").data["records"]
    torch.testing.assert_close((models[0] - models[1]).double(), -0.5 * 2 * used / records, rtol=1e-4, atol=1e-7)
