"""The guide's code blocks run, one after the other, and print what the page says."""

import contextlib
import io
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "guide-linear.md"


def test_every_block_of_the_guide_prints_what_the_page_says():
    blocks = re.findall(r"```(python|text)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert sum(kind == "text" for kind, _ in blocks) >= 7
    names: dict = {}
    printed = ""
    for kind, body in blocks:
        if kind == "python":
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(body, str(PAGE), "exec"), names)
            printed = out.getvalue()
        else:
            assert printed == body
