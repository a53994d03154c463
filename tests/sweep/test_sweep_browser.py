"""The page of a sweep in a real browser: hover, the way to a run and back, no error, request or sideways scrolling."""

from __future__ import annotations

import pytest

from browsing import WIDTHS, opened, pytestmark  # noqa: F401
from reconbound.sweep.page import write_pages

FACTS = {"data": "<b>digits</b>", "runs": 2, "trials": 4, "finished": 3, "failed": 1}


@pytest.fixture(scope="module")
def page_path(tmp_path_factory):
    rows = [
        {"trial": k, "noise_multiplier": noise, "clip": "smooth", "steps": steps,
         "accuracy": 0.9 - noise / 10 + steps / 900, "accuracy_sd": 0.01,
         "success_removed_max": 0.28 / noise, "success_removed_max_estimate": True,
         "success_removed_median": 0.2 / noise, "success_removed_median_estimate": False,
         "exact_max": noise**2 * 10 / steps, "exact_q99": noise**2 * 20 / steps,
         "exact_median": noise**2 * 90 / steps, "exact_crossed": noise**2 * 15 / steps,
         "paper_max": noise**2 / steps, "theorem1": 10.0 ** (-9 / noise),
         "lecam": 0.2, "epsilon": 3 / noise, "delta": 1e-5, "never_measured": 0}
        for k, noise in enumerate((0.3, 1.0, 3.0)) for steps in (10, 30)
    ]  # fmt: skip
    return write_pages(tmp_path_factory.mktemp("sweep"), rows, FACTS)


@pytest.mark.parametrize(
    ("chart", "shown"),
    [("#chart-chances", "chance against the most exposed record: "), ("#chart-places", "exact factor, most exposed")],
)
@pytest.mark.parametrize("width", WIDTHS)
def test_point_shows_setting_and_links_to_run(browser, page_path, width, chart, shown) -> None:
    with opened(browser, page_path, width) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert "<b>digits</b>" in page.locator("h1").inner_text()
        point = page.locator(f"{chart} .scatterlayer .point").first
        point.scroll_into_view_if_needed()
        box = point.bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        page.mouse.move(x, y)
        hover = page.locator(f"{chart} .hovertext").first
        hover.wait_for()
        assert "noise_multiplier" in hover.text_content()
        assert shown in hover.text_content()
        page.mouse.click(x, y)
        page.wait_for_url("**/trials/*/index.html")
        for text in ("exact factor, most exposed record", "chance against the most exposed record"):
            assert text in page.locator("#rows").inner_text()
        page.get_by_text("all settings").click()
        page.wait_for_url("**/frontier.html")
