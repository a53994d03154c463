"""Sealed files in parts: read as the files of safetensors are, and refused where they are damaged or impossible."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from reconbound._internal import large_files
from reconbound._internal.files import Unreadable, unsealed
from reconbound._internal.large_files import SealedFile, write_sealed
from sealing import sealed

TENSORS = {
    "b": torch.arange(7, dtype=torch.float64) / 3,
    "a": torch.arange(12, dtype=torch.int32).reshape(3, 4),
    "flags": torch.tensor([True, False, True]),
    "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
    "none": torch.zeros(0, 5),
    "one": torch.tensor(3),
    "across": torch.arange(6, dtype=torch.float32).reshape(2, 3).T,
}
FACTS = {"ledger": {"runs": 2, "caveats": ["ä sha256"]}}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_files, "_PIECE", 16)


def test_both_writers_and_both_readers_agree(tmp_path: Path) -> None:
    write_sealed(tmp_path / "parts", TENSORS, FACTS)
    (tmp_path / "whole").write_bytes(sealed(TENSORS, FACTS))
    assert (tmp_path / "parts").stat().st_mode & 0o777 == 0o600
    for name in ("parts", "whole"):
        tensors, facts = unsealed(tmp_path / name)
        with SealedFile(tmp_path / name) as file:
            assert file.facts == facts == FACTS
            assert set(file.names) == set(tensors) == set(TENSORS)
            for key, value in TENSORS.items():
                assert file.read(key).dtype == tensors[key].dtype == value.dtype
                assert torch.equal(file.read(key), value)
                assert torch.equal(tensors[key], value)
                assert file.empty(key).shape == value.shape
                flat = value.contiguous().flatten()
                assert len(flat) < 3 or torch.equal(file.read(key, 1, len(flat) - 1), flat[1:-1])


def test_every_damaged_byte_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_sealed(path, {"a": torch.arange(5)}, {"x": 1})
    content = path.read_bytes()
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(Unreadable):
            SealedFile(path)
    for size in (0, 7, 8, 30, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(Unreadable):
            SealedFile(path)
    path.write_bytes(content + b"\0")
    with pytest.raises(Unreadable):
        SealedFile(path)


def made_up(entries: dict[str, Any], data: bytes) -> bytes:
    """Returns a file with a right digest whose header says what somebody likes."""
    about = {"reconbound": json.dumps({}), "sha256": "0" * 64}
    text = json.dumps({"__metadata__": about, **entries}, separators=(",", ":")).encode()
    blank = len(text).to_bytes(8, "little") + text + data
    return blank.replace(b"0" * 64, hashlib.sha256(blank).hexdigest().encode(), 1)


@pytest.mark.parametrize(
    "entries",
    [
        {"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 8]}},  # of another size
        {"a": {"dtype": "I64", "shape": [1], "data_offsets": [8, 16]}},  # not from the start
        {"a": {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}},  # not to the end
        {name: {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]} for name in "ab"},  # one in the other
        {"a": {"dtype": "I64", "shape": [-2], "data_offsets": [0, -16]}},
        {"a": {"dtype": "I64", "shape": [2.0], "data_offsets": [0, 16]}},
        {"a": {"dtype": "I64", "shape": [True, 2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "X64", "shape": [2], "data_offsets": [0, 16]}},
        {"a": {"dtype": "I64", "shape": [2]}},
        {"a": 3},
    ],
)
def test_a_right_digest_is_not_enough(tmp_path: Path, entries: dict[str, Any]) -> None:
    good = {"a": {"dtype": "I64", "shape": [2], "data_offsets": [0, 16]}}
    (tmp_path / "file").write_bytes(made_up(good, bytes(16)))
    SealedFile(tmp_path / "file").__exit__()
    (tmp_path / "file").write_bytes(made_up(entries, bytes(16)))
    with pytest.raises(Unreadable, match="not a file of reconbound's"):
        SealedFile(tmp_path / "file")


def test_what_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="complex"):
        write_sealed(tmp_path / "file", {"a": torch.zeros(2, dtype=torch.complex64)}, {})
    assert os.listdir(tmp_path) == []
