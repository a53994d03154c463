"""Files that are whole or not there: their modes whatever the mask, and what an error names."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from reconbound._internal.files import CONFIDENTIAL, PUBLIC, write_whole


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("mode", [CONFIDENTIAL, PUBLIC])
@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077])
def test_the_mode_does_not_depend_on_the_mask(tmp_path: Path, mode: int, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "file", b"old", mode=CONFIDENTIAL)
        write_whole(tmp_path / "file", b"new", mode=mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("where", ["none/file", "folder"])
def test_an_error_names_the_file_and_leaves_nothing(tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match=r"folder|none") as found:
        write_whole(tmp_path / where, b"content")
    assert found.value.filename == str(tmp_path / where)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
