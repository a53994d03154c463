"""Noise: standard normal, a function of its key, never the same twice; the cipher is RFC 8439's, bit for bit."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import calling
import injecting
from reconbound._internal.rng import keystream
from reconbound.auditing.release import load_release
from reconbound.report.folder import read_run
from reconbound.training import noise
from reconbound.training.noise import draw

CPU = torch.device("cpu")


def by_cipher(key: int, size: int) -> Tensor:
    """The numbers as they are made on a GPU, here on the CPU."""

    class Elsewhere:
        type = "elsewhere"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "keystream", lambda *given: keystream(*given[:-1], CPU))
        parts = [noise._bits(key.to_bytes(32, "little"), 0, size, Elsewhere())]  # type: ignore[arg-type]
    return noise._normal(parts[0])[:size]


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


def test_cipher_is_that_of_rfc_8439() -> None:
    """Section 2.3.2 (one block), section 2.4.2 (the stream of two blocks, from its plaintext and ciphertext), and
    appendix A.1, vectors 1 and 2 (all zeros)."""
    key = bytes(range(32))

    def stream(key: bytes, counter: int, nonce: str, blocks: int) -> bytes:
        return keystream(key, counter, bytes.fromhex(nonce), blocks, CPU).T.contiguous().numpy().tobytes()

    assert stream(key, 1, "000000090000004a00000000", 1).hex() == (
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
    )
    text = (
        b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
        b"be it."
    )
    cipher = bytes(a ^ b for a, b in zip(text, stream(key, 1, "000000000000004a00000000", 2), strict=False))
    assert cipher.hex() == (
        "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b3571639d624e65152ab"
        "8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab77937365af90bbf74a35be6b40b8eedf2785e42"
        "874d"
    )
    zeros = stream(bytes(32), 0, "00" * 12, 2).hex()
    assert zeros[:128] == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    )
    assert zeros[128:] == (
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def test_counters_run_past_two_to_the_31() -> None:
    """The words are signed; the cipher does not know it."""
    both = keystream(bytes(32), 2**31 - 1, bytes(12), 2, CPU)
    assert torch.equal(both[:, 1:], keystream(bytes(32), 2**31, bytes(12), 1, CPU))
    assert not torch.equal(both[:, 0], both[:, 1])


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
