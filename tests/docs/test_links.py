"""Relative links and anchors of the README, the docs and the other pages lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "experiments" / "results" / "README.md"])


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    plain = [re.sub(r"[`*\\]|\]\([^)]*\)|\[", "", title) for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        generated = place == ROOT / "docs" / "reference" / "index.md"
        assert place.exists() or generated, target
        assert not anchor or anchor in anchors(place), target


def test_pages_named_in_code_exist() -> None:
    """Docstrings and messages name pages as docs/....md."""
    seen = 0
    for folder in ("src", "tests", "experiments", "benchmarks"):
        for file in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"docs/[\w/-]+\.md", file.read_text(encoding="utf-8")):
                assert (ROOT / name).exists(), f"{file.relative_to(ROOT)}: {name}"
                seen += 1
    assert seen > 20


def test_site_lists_every_page() -> None:
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    assert set(listed) == pages | {"reference/index.md"}
