"""Chromium for the tests of pages: the system's, driven by playwright, from disk and with the network off."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed (the dev extra has it)")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("CHROMIUM") or next((path for path in map(shutil.which, NAMES) if path), None)
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (apt-get install chromium)"),
]

OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update",
           "--disable-sync", "--no-first-run"]  # fmt: skip
WIDTHS = [1280, 390]


@contextmanager
def chromium() -> Iterator[Any]:
    """The running browser."""
    with playwright.sync_playwright() as started:
        found = started.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield found
        found.close()


@contextmanager
def opened(browser: Any, path: Path, width: int = 1280, scheme: str = "light") -> Iterator[Any]:
    """The page, with the network off; afterwards, nothing must have been asked for or complained about."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(f"console: {message.text}"))
    page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    page.on("dialog", lambda dialog: (wrong.append("dialog"), dialog.dismiss()))
    page.on("request", lambda request: wrong.append(request.url) if _outside(request.url) else None)
    page.goto(path.as_uri())
    page.complaints = wrong
    yield page
    context.close()
    assert wrong == []


@contextmanager
def kept_open(browser: Any, home: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens a page of the folder, by name and width, and has it open for all tests of a file.

    A page takes a second or two to open. Tests that change more of it than a slider open their own."""
    pages: dict[tuple[str, int], Any] = {}
    with ExitStack() as stack:

        def page(name: str, width: int = 1280) -> Any:
            if (name, width) not in pages:
                pages[name, width] = stack.enter_context(opened(browser, home / name, width))
            return pages[name, width]

        yield page


def _outside(url: str) -> bool:
    return not url.startswith(("file:", "data:", "blob:"))
