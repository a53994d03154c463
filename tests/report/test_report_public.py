"""The public page holds nothing of a record, and no page takes text from outside for markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pages import HOSTILE, Elements, data_of, hostile, page_of
from reconbound import report
from reconbound._internal.formatting import format_floor
from reconbound.report.figures import for_plotly
from reconbound.report.folder import Leakage, read_leakage, read_run, write_leakage
from reconbound.report.page import as_json


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_names_that_hold_markup_are_shown_as_text(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    run, leakage = hostile(folder)
    plain = Elements(page_of(read_run(folder), read_leakage(folder))).found
    for page, scripts in ((page_of(run, leakage), 3), (report.public_page(run).decode(), 0)):
        elements = Elements(page)
        assert sum(tag == "script" for tag, _ in elements.found) == scripts
        assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
        assert {tag for tag, _ in elements.found} <= {tag for tag, _ in plain}
        assert '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">' in elements.text
        assert "\u2028" not in page
    marks = json.dumps(data_of(page_of(run, leakage))["charts"])
    assert "pwned" in marks or "&lt;/script&gt;" in marks
    assert not re.search(r"<(?!br>)", marks)


def test_json_cannot_end_its_element() -> None:
    told = as_json({"a": HOSTILE})
    assert not set("<>&\u2028") & set(told)
    assert json.loads(told) == {"a": HOSTILE}


def test_plotly_markup_is_escaped_and_surrogates_are_replaced() -> None:
    assert for_plotly("<b>a</b> & b") == "&lt;b&gt;a&lt;/b&gt; &amp; b"
    assert for_plotly("caf\udce9\n\u202e").encode()
    assert len(for_plotly("a" * 500)) == 32


def _secrets(leakage: Leakage) -> np.ndarray:
    """Every per-record number of a leakage file, and what is made of them: floors, roots, errors."""
    parts = [leakage.dfil, leakage.error, leakage.upper, leakage.kept_diagonal, leakage.average_diagonal,
             leakage.history, leakage.guess, leakage.accuracy, leakage.kept_inputs]  # fmt: skip
    values = np.concatenate([p.double().flatten().numpy() for p in parts if p is not None])
    values = values[np.isfinite(values) & (values > 0)]
    scales = np.unique(np.append(np.atleast_1d(leakage.facts["scale"]), 1.0)).astype(float)
    found = np.concatenate([values, 1 / values, np.sqrt(values), 1 / np.sqrt(values)])
    found = np.concatenate([found * s for s in scales])
    return found[(found != np.round(found)) & (found < 1e12)]


def _leaks(text: str, secret: np.ndarray, least: int) -> list[str]:
    """The numbers of a text, with `least` significant digits or more, that some secret number rounds to."""
    known, found = np.sort(secret), []
    for token in re.findall(r"\d[\d,]*\.?\d*(?:e[+-]?\d+)?", text):
        plain = token.replace(",", "").rstrip(".")
        mantissa, _, power = plain.partition("e")
        digits = len(mantissa.replace(".", "").lstrip("0"))
        if digits < least or "." not in mantissa:
            continue
        half = 0.5000001 * 10.0 ** (int(power or 0) - len(mantissa.partition(".")[2]))
        low, high = np.searchsorted(known, [float(plain) - half, float(plain) + half])
        found += [token] * int(low < high)
    return found


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_public_page_holds_no_number_of_a_record(kind: str, request: pytest.FixtureRequest) -> None:
    """Numbers with few digits meet secrets by chance where there are many of these: the fewer, the fewer digits."""
    folder = request.getfixturevalue(kind)
    own, shown = report.build(folder)
    leakage = read_leakage(folder)
    all_of, dfil = _secrets(leakage), leakage.dfil[0].numpy()
    floors = np.concatenate([dfil, 1 / dfil, 1 / np.sqrt(dfil), 100 / np.sqrt(dfil)])
    for public in (Elements(shown.read_text()).text, (folder / "run.json").read_text()):
        assert _leaks(public, all_of, 7) == []
        assert _leaks(public, floors, 4) == []
    found = Elements(own.read_text()).text
    assert len(_leaks(found, floors, 3)) >= 12  # the search finds what is there
    assert _leaks(f"about {float(all_of[5]):.7g}", all_of, 7)


def test_public_page_does_not_change_with_the_leakage(digits: Path, tmp_path: Path) -> None:
    before = report.build(digits)[1].read_bytes()
    leakage = read_leakage(digits)
    (tmp_path / "run.json").write_bytes((digits / "run.json").read_bytes())
    write_leakage(tmp_path, replace(leakage, dfil=leakage.dfil * 3, targets=leakage.targets.flip(0)))
    own, shown = report.build(tmp_path)
    assert shown.read_bytes() == before
    assert own.read_bytes() != report.build(digits)[0].read_bytes()


def test_accuracy_is_public_only_on_request_of_run(digits: Path) -> None:
    run = read_run(digits)
    assert run.accuracy is None
    assert 'id="accuracy"' not in report.public_page(run).decode()
    assert "88%" in report.public_page(replace(run, accuracy=0.8756)).decode()


def test_public_columns_are_floors_times_their_range(people: Path) -> None:
    run = read_run(people)
    rows = {row["name"]: row for row in report.public.column_rows(run)}
    lecam = next(b["rmse"] for b in run.guarantee["bounds"] if b["name"] == "lecam")
    assert rows["age"]["any"] == f"±{format_floor(120 * lecam)}"
    assert rows["age"]["range"] == "0 to 120 years"
    assert rows["hours-per-week"]["guess"] == "±50"


def test_public_page_columns_state_condition(people: Path) -> None:
    text = " ".join(Elements(report.public_page(read_run(people)).decode()).text.split())
    head = text[text.index("column and declared range") :]
    assert head.startswith("column and declared range any attacker, on some conceivable record, at least")
    assert "any attacker, on some conceivable record, not on each · each column" in text
    assert "any attacker, at least" not in text
