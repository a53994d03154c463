"""Runs every python block of a page, in order, in one namespace; what it prints is the text block under it."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

from printed import assert_alike

pytestmark = pytest.mark.slow

DOCS = Path(__file__).resolve().parents[2] / "docs"
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("name", "least"),
    [
        ("tutorials/private_sgd.md", 8),
        ("tutorials/opacus.md", 14),
        ("guides/own_loop.md", 4),
        ("guides/gpu.md", 3),
        ("guides/large_data.md", 5),
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
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a guide must not warn
        warnings.filterwarnings("ignore", "floors of one run")  # its trainings are short
        for kind, content in blocks:
            if kind == "text":
                assert_alike(content, printed)
                printed = ""
                continue
            assert printed == "", "a block prints something that the guide does not show"
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(content, f"{guide.name}: {content.splitlines()[0]}", "exec"), names)
            printed = output.getvalue()
    assert printed == ""


def test_audit_from_python_runs(tmp_path, monkeypatch) -> None:
    """Runs the block of docs/tutorials/audit.md that makes a folder, with one run."""
    monkeypatch.chdir(tmp_path)
    found = [code for kind, code in BLOCK.findall((DOCS / "tutorials/audit.md").read_text()) if kind == "python"]
    (block,) = [code for code in found if '"audit-wine"' in code]
    assert '"runs": 10' in block
    exec(block.replace('"runs": 10', '"runs": 1'), {"__name__": "guide"})
    assert (tmp_path / "audit-wine" / "report.html").exists()
