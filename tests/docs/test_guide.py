"""The guides run: every python block, in order, in one place; what it prints is the text block under it."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("tutorials/private_sgd.md", 8),
        ("tutorials/opacus.md", 5),
        ("guides/own_loop.md", 4),
        ("guides/gpu.md", 3),
        ("results/attacks.md", 1),
    ],
)
def test_guide_runs(name: str, least: int, tmp_path, monkeypatch) -> None:
    guide = DOCS / name
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(guide.read_text())
    assert len(blocks) > least
    names: dict = {"__name__": "guide"}
    printed = ""
    for kind, content in blocks:
        if kind == "text":
            assert printed.strip() == content.strip()
            printed = ""
            continue
        assert printed == "", "a block prints something that the guide does not show"
        told = io.StringIO()
        with contextlib.redirect_stdout(told), warnings.catch_warnings():
            warnings.simplefilter("error")  # a guide that warns is no guide
            warnings.filterwarnings("ignore", "floors of one run")  # which its short trainings are
            exec(compile(content, f"{guide.name}: {content.splitlines()[0]}", "exec"), names)
        printed = told.getvalue()
    assert printed == ""
