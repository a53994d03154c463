"""The reports in a real browser, from disk, with the network off: Chromium of the system, driven by playwright."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.datasets import load_digits

from browsing import WIDTHS, kept_open, opened, pytestmark  # noqa: F401
from reconbound import report
from reconbound.report.folder import packed_names, read_leakage, read_run, write_leakage, write_run
from run_folders import digits_folder, people_folder

HOSTILE = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2"><b>bold</b>'


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("runs")
    found = {
        "digits": digits_folder(home / "digits", runs=2, steps=20, records=200, noise=0.1),
        "people": people_folder(home / "people", steps=20, records=200),
    }
    for folder in found.values():
        report.build(folder)
    report.compare(list(found.values()), home / "compare.html")
    return found


@pytest.fixture(scope="module")
def shown(browser: Any, folders: dict[str, Path]) -> Iterator[Callable[..., Any]]:
    """Pages of the folders that are opened once for all tests."""
    with kept_open(browser, folders["digits"].parent) as page:
        yield page


def _sideways(page: Any) -> int:
    """Returns how far the page can be scrolled sideways, in pixels."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def _width(page: Any) -> float:
    return float(page.evaluate("document.querySelector('.chart .main-svg').getBoundingClientRect().width"))


def _until(true: Callable[[], bool]) -> None:
    """Wait for something to become so (the page's policy forbids playwright's own way, which evaluates strings)."""
    end = time.monotonic() + 10
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["digits/report.html", "people/report.html", "digits/report-public.html",
                                  "people/report-public.html", "compare.html"])  # fmt: skip
def test_opens_without_error_request_or_sideways_scrolling(shown: Callable[..., Any], name: str, width: int) -> None:
    page = shown(name, width)
    assert _sideways(page) == 0
    assert page.locator("#banner").is_visible()
    charts = page.locator(".chart")
    for k in range(charts.count()):
        box = charts.nth(k).locator(".main-svg").first.bounding_box()
        assert box is not None
        assert 200 < box["width"] <= width
    titles = page.locator(".chart .xtitle")
    for k in range(titles.count()):  # axis titles are not cut off
        box, room = titles.nth(k).bounding_box(), page.locator(".chart").nth(k).bounding_box()
        assert box["x"] >= room["x"] - 1
        assert box["x"] + box["width"] <= room["x"] + room["width"] + 1
    assert page.complaints == []


@pytest.mark.parametrize("kind", ["digits", "people"])
@pytest.mark.parametrize("width", WIDTHS)
def test_slider_counts_the_records_below(
    shown: Callable[..., Any], folders: dict[str, Path], kind: str, width: int
) -> None:
    floors = np.sqrt(1 / read_leakage(folders[kind]).dfil[0].numpy())  # in this order, to the last bit
    seen = set()
    page = shown(f"{kind}/report.html", width)
    reported = page.locator("#threshold-sentence")
    for place in (0, 130, 333, 500, 640, 720, 800, 860, 1000):
        page.locator("#threshold").evaluate(
            "(slider, place) => { slider.value = place; slider.dispatchEvent(new Event('input')); }", place
        )
        threshold = float(reported.get_attribute("data-threshold"))
        count = int((floors < threshold).sum())
        seen.add(count)
        assert page.locator("#threshold-count").inner_text() == f"{count:,}"
        assert page.locator("#threshold-total").inner_text() == f"{len(floors):,}"
        line = page.evaluate("document.getElementById('chart-floors').layout.shapes[1].x0")
        assert 10**line == pytest.approx(threshold, rel=1e-9)
    exact = float(np.sort(floors)[17])  # a typed threshold is strict: the record at it is not below it
    page.locator("#threshold-exact").fill(repr(exact))
    assert page.locator("#threshold-count").inner_text() == str(int((floors < exact).sum()))
    page.locator("#threshold").focus()
    before = reported.get_attribute("data-threshold")
    page.keyboard.press("ArrowRight")
    assert reported.get_attribute("data-threshold") != before
    assert len(seen) >= 4
    assert {0, len(floors)} <= seen


def test_thumbnails_are_the_right_records(shown: Callable[..., Any], folders: dict[str, Path]) -> None:
    kept = read_leakage(folders["digits"]).kept.tolist()
    images = load_digits().images
    read = """image => { const c = document.createElement('canvas'); c.width = image.naturalWidth;
        c.height = image.naturalHeight; const d = c.getContext('2d'); d.drawImage(image, 0, 0);
        return [c.width, c.height, ...d.getImageData(0, 0, c.width, c.height).data]; }"""
    page = shown("digits/report.html")
    cards = page.locator("article.record")
    assert [int(cards.nth(k).get_attribute("data-record")) for k in range(cards.count())] == kept
    for k, record in enumerate(kept):
        wide, high, *data = cards.nth(k).locator("img.picture").evaluate(read)
        assert (wide, high) == (8, 8)
        pixels = np.array(data).reshape(8, 8, 4)
        np.testing.assert_array_equal(pixels[..., 0], np.round(255 * images[record] / 16))
        np.testing.assert_array_equal(pixels[..., 0], pixels[..., 2])
        assert cards.nth(k).locator("img.map").evaluate(read)[:2] == [8, 8]
        assert f"record {record}" in cards.nth(k).inner_text()


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_prints_whole(browser: Any, folders: dict[str, Path], kind: str) -> None:
    paper = 688  # CSS pixels: A4 less its margins
    with opened(browser, folders[kind] / "report.html", 1280, "dark") as page:
        assert page.pdf(format="A4").startswith(b"%PDF")
        page.set_viewport_size({"width": paper, "height": 1000})
        page.emulate_media(media="print", color_scheme="dark")
        _until(lambda: _width(page) == 640)
        assert _sideways(page) == 0
        assert page.locator("#banner").is_visible()
        assert not page.locator("#threshold").is_visible()
        assert page.locator("#threshold-sentence").is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        ends = page.evaluate("[...document.querySelectorAll('.main-svg')].map(s => s.getBoundingClientRect().right)")
        assert max(ends) <= paper
        page.emulate_media(media="screen")
        _until(lambda: _width(page) != 640)


def test_what_is_folded_is_printed(
    browser: Any, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report.records, "COLUMNS", 2)
    path = tmp_path / "report.html"
    path.write_bytes(report.confidential_page(read_run(folders["people"]), read_leakage(folders["people"])))
    with opened(browser, path) as page:
        folded = page.locator("details:not([open])")
        assert folded.count() == 8
        page.emulate_media(media="print")
        _until(lambda: folded.count() == 0)
        page.emulate_media(media="screen")
        _until(lambda: folded.count() == 8)


def test_dark_and_light(browser: Any, folders: dict[str, Path]) -> None:
    def light(page: Any, script: str) -> float:
        colour = page.evaluate(script)
        return float(np.mean([int(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]))

    body = "getComputedStyle(document.body).backgroundColor"
    text = "getComputedStyle(document.querySelector('.chart text')).fill"
    card = "getComputedStyle(document.querySelector('section')).backgroundColor"
    for scheme in ("light", "dark"):
        with opened(browser, folders["people"] / "report.html", scheme=scheme) as page:
            values = [light(page, script) for script in (body, card, text)]
        sign = 1 if scheme == "light" else -1
        assert sign * (values[0] - 127) > 0
        assert sign * (values[1] - values[2]) > 80  # axis texts stand out from the card


@pytest.mark.parametrize("width", WIDTHS)
def test_what_differs_and_columns_counts_can_be_read(shown: Callable[..., Any], width: int) -> None:
    page = shown("compare.html", width)
    assert page.locator("#verdict").inner_text().startswith("Not comparable as they stand")
    box = page.locator("#differences").bounding_box()
    assert box["y"] < page.locator("#floors").bounding_box()["y"]  # before the figures
    assert "hours-per-week 0 to 100 hours" in page.locator("#audited").inner_text()
    page = shown("people/report.html", width)
    counts = page.locator("#below-guess li")
    assert counts.count() == 6
    for k in range(6):
        assert counts.nth(k).is_visible()
        assert " of 8 records " in counts.nth(k).inner_text()
    assert "only the 8 records measured closely" in page.locator("#columns-note").inner_text()


def test_wide_table_shows_hint_on_phone(shown: Callable[..., Any]) -> None:
    for width in WIDTHS:
        page = shown("compare.html", width)
        table = page.locator("#runs .scroll")
        cut = table.evaluate("e => e.scrollWidth > e.clientWidth")
        assert page.locator("#runs .swipe").is_visible() == cut == (width == 390)
        assert "linear-gradient" in table.evaluate("e => getComputedStyle(e).backgroundImage")


def test_many_audits_scroll_in_their_own_boxes(
    browser: Any, shown: Callable[..., Any], folders: dict[str, Path], tmp_path: Path
) -> None:
    copies = [shutil.copytree(folders["people"], tmp_path / f"audit-of_a_long_name-in-month-{k}") for k in range(6)]
    report.compare([*copies, folders["digits"]], tmp_path / "many.html")
    for width in (320, 390):
        with opened(browser, tmp_path / "many.html", width) as page:
            assert _sideways(page) == 0
            boxes = page.locator(".scroll")
            wide = [boxes.nth(k).evaluate("box => box.scrollWidth > box.clientWidth") for k in range(boxes.count())]
            assert sum(wide) >= 2
            for k in range(boxes.count()):
                assert boxes.nth(k).evaluate("box => getComputedStyle(box).overflowX") == "auto"
        page = shown("people/report.html", width)
        assert _sideways(page) == 0
        cards = page.locator(".record")
        for k in range(cards.count()):  # a table that is wider than its card scrolls within it
            assert cards.nth(k).evaluate("card => getComputedStyle(card).overflowX") == "auto"


def test_long_names_break_at_underscores(browser: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    run, leakage = read_run(folders["people"]), read_leakage(folders["people"])
    name = "systolic_blood_pressure_morning_average"
    facts = {**leakage.facts, "feature_names": [name, *leakage.facts["feature_names"][1:]]}
    path = tmp_path / "report.html"
    path.write_bytes(report.confidential_page(run, replace(leakage, facts=facts)))
    with opened(browser, path, 390) as page:
        assert _sideways(page) == 0
        sticks_out = "e => Math.max(...[...e.querySelectorAll('table')].map(t => t.offsetWidth)) - e.clientWidth"
        assert all(card.evaluate(sticks_out) <= 0 for card in page.locator(".record").all())
        cell = page.locator(".record td", has_text=name).first
        assert name in cell.inner_text()
        wide = "e => [...e.querySelectorAll('wbr')].length"
        assert cell.evaluate(wide) == 4


def test_hostile_names_are_text(browser: Any, folders: dict[str, Path], tmp_path: Path) -> None:
    run, leakage = read_run(folders["people"]), read_leakage(folders["people"])
    names = {"feature_names": [HOSTILE] * 6, "units": [HOSTILE] * 6, "class_names": [HOSTILE, "b"],
             "target_name": HOSTILE}  # fmt: skip
    write_run(tmp_path, replace(run, data={**run.data, "name": HOSTILE, "private": [HOSTILE]}))
    own = packed_names([HOSTILE] * len(leakage.targets))
    write_leakage(tmp_path, replace(leakage, facts={**leakage.facts, **names}, names=own))
    for path in report.build(tmp_path):
        with opened(browser, path, 390) as page:
            assert page.evaluate("window.pwned") is None
            assert page.title().startswith(HOSTILE[:40])
            assert page.locator("h1").inner_text().startswith(HOSTILE[:40])
            assert _sideways(page) == 0
            ticks = page.locator("#chart-features .ytick text")
            if path.name == "report.html":
                assert ticks.first.text_content() == HOSTILE[:17] + "…"
                assert page.locator("main b:not([id])").count() == 0
                assert page.locator(".chart a").count() == 0


@pytest.mark.parametrize("width", WIDTHS)
def test_axis_titles_and_thresholds_are_readable(
    browser: Any, folders: dict[str, Path], tmp_path: Path, width: int
) -> None:
    run, leakage = read_run(folders["digits"]), read_leakage(folders["digits"])
    facts = {**leakage.facts, "scale": 255.0}
    small = replace(leakage, dfil=leakage.dfil / 1e5, history=leakage.history / 1e5, upper=None, facts=facts)
    write_run(tmp_path, run)
    write_leakage(tmp_path, small)
    report.build(tmp_path)
    with opened(browser, tmp_path / "report.html", width) as page:
        for chart in ("#chart-growth", "#chart-floors", "#chart-accuracy"):
            title = page.locator(f"{chart} .ytitle").bounding_box()
            ticks = page.locator(f"{chart} .ytick text")
            assert ticks.count() >= 2
            left = min(ticks.nth(k).bounding_box()["x"] for k in range(ticks.count()))
            assert title["x"] + title["width"] <= left
            assert title["x"] >= page.locator(chart).bounding_box()["x"] - 1
        page.locator("#threshold-exact").fill("431000")
        assert page.locator("#threshold-value").inner_text() == "431,000"
