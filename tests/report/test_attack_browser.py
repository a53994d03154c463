"""The section of attacks in a browser: its chart is drawn, its pictures load, and nothing is complained about."""

from __future__ import annotations

import pytest

from browsing import WIDTHS, opened, pytestmark  # noqa: F401
from calling import QUICK
from reconbound.auditing.attack import attack_audit
from reconbound.cli import app as cli
from reconbound.data import load_dataset


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked") / "out"
    words = ["--limit", "60", *QUICK, "--noise-multiplier", "0.05", "--out", str(folder), "--quiet"]
    assert cli.run(["audit", "digits", *words]) == 0
    attack_audit(folder, load_dataset("digits", limit=60), records="most-exposed:2", trials=2, seed=1, show=False)
    return folder / "report.html"


@pytest.mark.parametrize("width", WIDTHS)
def test_section_is_drawn(browser, page, width: int) -> None:
    with opened(browser, page, width) as shown:
        shown.wait_for_selector("#chart-attack .main-svg")
        section = shown.locator("#attack")
        assert "No attack beat a floor that binds it" in section.inner_text()
        assert "First the image, then what the informed attacker made of it" in section.inner_text()
        assert "above the audit’s by many standard errors" in section.inner_text()
        pictures = section.locator("img")
        places = [pictures.nth(k).bounding_box() for k in range(3)]  # the original is the first, however they wrap
        assert [(box["y"], box["x"]) for box in places] == sorted((box["y"], box["x"]) for box in places)
        assert pictures.count() == 2 * 3
        assert all(pictures.nth(k).evaluate("one => one.naturalWidth") == 8 for k in range(6))
        assert shown.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
