"""ChaCha20 in torch's operations and as Triton kernels: published vectors, the keyed hash against whole numbers.

Without a GPU the kernels run in Triton's interpreter, and are compiled for one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from reconbound._internal import chacha
from reconbound.training.noise import by_cipher

PLACE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KEY = bytes(range(32))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

#: RFC 8439: key, counter, nonce and bytes: 2.3.2, the stream of 2.4.2 (its ciphertext over its plaintext), A.1 1 to 5.
TEXT = (
    b"Ladies and Gentlemen of the class of '99: If I could offer you only one tip for the future, sunscreen would "
    b"be it."
)
CIPHERTEXT = bytes.fromhex(
    "6e2e359a2568f98041ba0728dd0d6981e97e7aec1d4360c20a27afccfd9fae0bf91b65c5524733ab8f593dabcd62b3571639d624e65152ab"
    "8f530c359f0861d807ca0dbf500d6a6156a38e088a22b65e52bc514d16ccf806818ce91ab77937365af90bbf74a35be6b40b8eedf2785e42"
    "874d"
)
VECTORS = {
    "2.3.2": (KEY, 1, "000000090000004a00000000", "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
              "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"),
    "2.4.2": (KEY, 1, "000000000000004a00000000", bytes(a ^ b for a, b in zip(TEXT, CIPHERTEXT, strict=True)).hex()),
    "A.1 1": (bytes(32), 0, "00" * 12, "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
              "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    "A.1 2": (bytes(32), 1, "00" * 12, "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
              "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    "A.1 3": (bytes(31) + b"\1", 1, "00" * 12, "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
              "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    "A.1 4": (b"\0\xff" + bytes(30), 2, "00" * 12, "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
              "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
    "A.1 5": (bytes(32), 0, "00" * 11 + "02", "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
              "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d"),
}  # fmt: skip


def key_of(secret: bytes) -> Tensor:
    return chacha.key_words(secret, PLACE)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    pytest.importorskip("triton", reason="Triton is not installed")
    if PLACE.type == "cpu" and not INTERPRETED:
        pytest.skip("the child process of test_kernels_in_the_interpreter runs this")
    return importlib.import_module("reconbound._internal.chacha_triton")


@pytest.fixture
def kernels_or_none(request: pytest.FixtureRequest) -> Any:
    """The kernels where they run in this process, to compare with beside the torch form."""
    here = importlib.util.find_spec("triton") is not None and (PLACE.type == "cuda" or INTERPRETED)
    return request.getfixturevalue("kernels") if here else None


def test_kernels_in_the_interpreter() -> None:
    """Runs this file again where Triton interprets its kernels; it reads the variable when it is imported first."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if PLACE.type == "cuda" or INTERPRETED:
        pytest.skip("the kernels run in this process")
    here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "not compile and not interpreter", __file__)
    child = subprocess.run(
        [sys.executable, *here],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stdout[-3000:]
    assert "skipped" not in child.stdout, child.stdout[-3000:]


def bytes_of(words: Tensor) -> bytes:
    """Returns 64-bit words (8, blocks) as the stream's bytes."""
    return words.T.contiguous().cpu().numpy().tobytes()


@pytest.mark.parametrize("vector", VECTORS)
def test_torch_form_gives_the_published_stream(vector: str) -> None:
    secret, counter, nonce, expected = VECTORS[vector]
    stream = chacha.keystream(key_of(secret), counter, len(expected) // 128 + 1, bytes.fromhex(nonce))
    assert stream.T.contiguous().cpu().numpy().tobytes().hex().startswith(expected)
    assert bytes_of(chacha.paired(stream)) == stream.T.contiguous().cpu().numpy().tobytes()


@pytest.mark.parametrize("vector", [name for name, (_, _, nonce, _) in VECTORS.items() if not int(nonce, 16)])
def test_kernel_gives_the_published_stream(vector: str, kernels: ModuleType) -> None:
    secret, counter, _, expected = VECTORS[vector]
    assert bytes_of(kernels.paired_keystream(key_of(secret), counter, 1)).hex() == expected


def test_counters_run_past_two_to_the_31_and_the_32(kernels_or_none: ModuleType | None) -> None:
    """The words are signed; the cipher does not know it. Past 2³² the nonce counts on."""
    key = key_of(bytes(32))
    for start in (2**31 - 1, 2**32 - 1):
        both = chacha.keystream(key, start, 2)
        assert torch.equal(both[:, 1:], chacha.keystream(key, start + 1, 1))
        assert not torch.equal(both[:, 0], both[:, 1])
        if kernels_or_none is not None:
            assert torch.equal(kernels_or_none.paired_keystream(key, start, 2), chacha.paired(both))
    after = chacha.keystream(key, 2**32, 1)
    assert torch.equal(after, chacha.keystream(key, 0, 1, (1).to_bytes(4, "little") + bytes(8)))
    assert not torch.equal(after, chacha.keystream(key, 0, 1))


def hchacha_vector(derived_key: Any) -> str:
    """The vector of draft-irtf-cfrg-xchacha-03, section 2.2.1."""
    point = key_of(bytes.fromhex("000000090000004a0000000031415927"))
    found: Tensor = derived_key(key_of(KEY), point)
    return found.cpu().numpy().tobytes().hex()


HCHACHA = "82413b4227b27bfed30e42508a877d73a0f9e4d58a74a853c12ec41326d3ecdc"


def test_derived_key_is_hchacha20() -> None:
    assert hchacha_vector(chacha.derived_key) == HCHACHA


def test_kernel_of_derived_keys_is_hchacha20(kernels: ModuleType) -> None:
    assert hchacha_vector(kernels.derived_key) == HCHACHA


def by_whole_numbers(words: list[int], secret: bytes) -> list[int]:
    """The hash in Python's whole numbers, its factors read from the bytes of the stream."""
    blocks = (len(words) + 1) // 2
    raw = chacha.keystream(key_of(secret), 0, blocks).T.contiguous().cpu().numpy().tobytes()
    factors = [int.from_bytes(raw[at : at + 8], "little") for at in range(0, len(raw), 8)]
    sums = [sum(factors[chacha.COPIES * i + j] * (w % 2**32) for i, w in enumerate(words)) for j in range(4)]
    return [(s + 2**63) % 2**64 - 2**63 for s in sums]


@pytest.mark.parametrize("size", [1, 2, 3, 255, 256, 257, 700])
def test_hash_is_the_sum_of_products(size: int, kernels_or_none: ModuleType | None, monkeypatch) -> None:
    monkeypatch.setattr(chacha, "_BLOCKS", 100)
    generator = torch.Generator().manual_seed(size)
    words = torch.randint(-(2**31), 2**31, (size,), generator=generator).to(torch.int32)
    words[0] = -1  # the largest word
    expected = by_whole_numbers(words.tolist(), KEY)
    assert chacha.keyed_hash(words.to(PLACE), key_of(KEY)).tolist() == expected
    if kernels_or_none is not None:
        assert kernels_or_none.keyed_hash(words.to(PLACE), key_of(KEY)).tolist() == expected


def test_hash_of_nothing_and_of_every_changed_bit() -> None:
    key = key_of(KEY)
    assert chacha.keyed_hash(torch.zeros(0, dtype=torch.int32, device=PLACE), key).tolist() == [0] * 4
    words = torch.arange(5, dtype=torch.int32, device=PLACE)
    seen = {tuple(chacha.keyed_hash(words, key).tolist())}
    for i in range(5):
        for bit in range(32):
            changed = words.clone()
            changed[i] ^= torch.tensor(1 << bit).to(torch.int32).to(PLACE)
            found = chacha.keyed_hash(changed, key).tolist()
            assert all(found[j] not in {one[j] for one in seen} for j in range(4))
            seen.add(tuple(found))


def test_factors_that_let_two_words_meet_are_few() -> None:
    """The guarantee's count, for words of 4 bits modulo 2⁸: at most 2³ of the 2⁸ factors give any one difference."""
    for delta in range(1, 16):
        found = torch.bincount(torch.arange(256) * delta % 256, minlength=256)
        assert int(found.max()) <= 2**3


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 3001])
def test_normal_numbers_of_the_kernel_are_those_of_torch(size: int, kernels: ModuleType) -> None:
    key = key_of(KEY)
    torch.testing.assert_close(kernels.normal_numbers(key, size), by_cipher(key, size), rtol=1e-12, atol=1e-14)


SIGNATURES = {
    "_keystream": {"key": "*i32", "first": "i64", "out": "*i64", "blocks": "i32"},
    "_derived": {"key": "*i32", "point": "*i32", "out": "*i32"},
    "_hashed": {"words": "*i32", "key": "*i32", "out": "*i64", "size": "i32"},
    "_normal": {"key": "*i32", "out": "*fp64", "size": "i32"},
}


@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("name", SIGNATURES)
def test_kernels_compile_for_a_gpu(name: str) -> None:
    """To machine code of an H100 or H200, which needs no GPU."""
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    module = importlib.import_module("reconbound._internal.chacha_triton")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    source = triton.compiler.ASTSource(
        fn=getattr(module, name),
        signature={**SIGNATURES[name], "LANES": "constexpr"},
        constexprs={"LANES": 32 if name == "_derived" else 128},
    )
    assert len(triton.compile(source, target=target).asm["cubin"]) > 1000


def test_kernels_that_give_other_bits_are_not_used(monkeypatch) -> None:
    class Wrong(ModuleType):
        @staticmethod
        def paired_keystream(key: Tensor, counter: int, blocks: int) -> Tensor:
            return torch.zeros(8, blocks, dtype=torch.int64)

    class Gpu:
        type = "cuda"

    name = "reconbound._internal.chacha_triton"
    monkeypatch.setitem(sys.modules, name, Wrong(name))
    monkeypatch.setattr("reconbound._internal.chacha_triton", Wrong(name), raising=False)
    monkeypatch.setattr(chacha, "key_words", lambda secret, device: torch.zeros(8, dtype=torch.int32))
    with pytest.warns(UserWarning, match="its bits are not the cipher's"):
        assert chacha.kernels_for(Gpu()) is None  # type: ignore[arg-type]
