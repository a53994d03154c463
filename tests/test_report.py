"""The report's pages: what they say, that they say it safely, and that the public one knows no record."""

from __future__ import annotations

import html
import json
import math
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits

from reconbound import report
from reconbound._check import InputError
from reconbound._files import Unreadable
from reconbound.bounds._bound import figure
from reconbound.report import advice, axes, charts, columns, comparison, records, thumbnails, verdicts, words
from reconbound.report.figures import for_plotly
from reconbound.report.page import as_json
from reconbound.report.public import floor_rows
from reconbound.report.view import View
from reconbound.run_folder import Leakage, Run, packed_names, prepare, read_leakage, read_run, write_leakage, write_run
from run_folders import RANGES, digits_folder, people_folder

HOSTILE = '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">&amp;<b>bold</b>\u2028[red]%{x}$'


class Elements(HTMLParser):
    """Every element of a page with its attributes, and the text outside scripts and styles."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.silent = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.silent = tag in ("script", "style")
        self.text += " " if tag in ("td", "th", "p", "div", "dd", "dt", "li") else ""

    def handle_endtag(self, tag: str) -> None:
        self.silent = False

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.text += data


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return digits_folder(tmp_path_factory.mktemp("runs") / "digits", runs=5, steps=20, records=200, noise=0.1)


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return people_folder(tmp_path_factory.mktemp("runs") / "people", steps=20, records=200, noise=0.1)


def _view(folder: Path) -> View:
    return View(read_run(folder), read_leakage(folder))


def _page(run: Run, leakage: Leakage) -> str:
    return report.confidential_page(run, leakage).decode()


def _data(page: str) -> Any:
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S).group(1))


# --- files ---------------------------------------------------------------------------------------------


def test_build_writes_both_pages_with_their_modes(digits: Path) -> None:
    own, shown = report.build(digits)
    assert (own.name, shown.name) == ("report.html", "report-public.html")
    assert stat.S_IMODE(own.stat().st_mode) == 0o600
    assert stat.S_IMODE(shown.stat().st_mode) == 0o644
    assert {p.name for p in digits.iterdir()} == {"run.json", "leakage.safetensors", own.name, shown.name}


def test_same_folder_same_bytes(digits: Path) -> None:
    own, shown = report.build(digits)
    before = own.read_bytes(), shown.read_bytes()
    code = f"from reconbound import report; report.build({str(digits)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert (own.read_bytes(), shown.read_bytes()) == before


def test_a_folder_without_an_audit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="holds no finished audit"):
        report.build(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_pages_hold_all_they_need(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    for path in report.build(folder):
        elements = Elements(path.read_text()).found
        links = [v for _, attrs in elements for k, v in attrs.items() if k in ("src", "href", "action", "srcset")]
        assert all(str(link).startswith("data:") for link in links)
        policy = next(a["content"] for t, a in elements if t == "meta" and "http-equiv" in a)
        assert str(policy).startswith("default-src 'none'")
        assert "url(" not in path.read_text().split("</style>")[0]
        ids = [a["id"] for _, a in elements if "id" in a]
        assert len(ids) == len(set(ids))


# --- what is said -----------------------------------------------------------------------------------------


def test_verdict_of_images_is_the_leakage_files_own(digits: Path) -> None:
    leakage, page = read_leakage(digits), Elements(report.build(digits)[0].read_text()).text
    floor = 1 / math.sqrt(float(leakage.dfil[0].max()))
    guess = math.sqrt(float(leakage.guess.mean()))
    images = load_digits().images[:200] / 16
    assert guess == pytest.approx(math.sqrt(float(images.var(0).mean())), rel=1e-6)
    assert f"errs by at least ±{figure(floor)} of the 0–1 range per pixel on the most exposed image" in page
    assert f"guessing the average image errs by ±{figure(guess)}." in page
    below = int((leakage.dfil[0] > 1 / guess**2).sum())
    assert 0 < below < 200
    assert f"For {below} of the 200 images" in page
    row = leakage.kept_diagonal[leakage.kept.tolist().index(int(leakage.dfil[0].argmax()))]
    single = int((1 / row.double() < leakage.guess.double()).sum())
    said = f"at the most exposed image, {single} of 64 have a floor below a guess" in page
    assert said == (single > 0)
    lowest = 1 / math.sqrt(float(leakage.upper[0].max()))
    assert f"that of any image at least ±{figure(lowest)}" in page
    assert "Average of 5 runs." in page


def test_verdict_of_tables_is_in_each_columns_unit(people: Path) -> None:
    """Each for the record that is most exposed in that column, which is named."""
    leakage = read_leakage(people)
    worst = int(leakage.dfil[0].argmax())
    most = leakage.kept_diagonal.max(0)
    whose = [int(leakage.kept[i]) for i in most.indices]
    assert len(set(whose)) > 1
    floors = [(b - a) / math.sqrt(float(i)) for (a, b), i in zip(RANGES, most.values, strict=True)]
    guesses = [(b - a) * math.sqrt(float(g)) for (a, b), g in zip(RANGES, leakage.guess, strict=True)]
    first = verdicts.verdict(_view(people))[0]
    order = np.argsort(np.array(floors) / np.array(guesses))[:3]
    names = leakage.facts["feature_names"]
    units = leakage.facts["units"]
    for j in order:
        assert f"±{figure(floors[j])} {units[j]} on {names[j]} (record {whose[j]:,}" in first
        assert f"±{figure(guesses[j])} {units[j]}" in first.split("guessing the average errs by")[1]
    assert "each for the record most exposed in that column among the 8 records looked at (of 200);" in first
    assert "3 private columns more are less exposed" in first
    rows = {row["name"]: row for row in report.public.feature_rows(_view(people))}
    chart = charts.by_feature(_view(people)).figure["data"][1]
    for j, name in enumerate(names):
        assert (rows[name]["worst"], rows[name]["whose"]) == (f"±{figure(floors[j])}", f"record {whose[j]:,}")
        assert any(f"{name}: ±{figure(floors[j])}" in text for text in chart["hovertext"])
    sure = " ".join(verdicts.sureness(_view(people)))
    assert "estimates from one run" in sure
    assert (
        f"over all its columns (record {worst:,}) is ±{figure(1 / math.sqrt(float(leakage.dfil[0, worst])))} " in sure
    )
    assert f"Guessing errs by ±{figure(math.sqrt(float(leakage.guess.mean())))}." in sure
    error = 0.5 * float(leakage.error[0, worst]) * float(leakage.dfil[0, worst]) ** -1.5
    assert f"a standard error of {error:.2g}" in sure


def test_an_attacker_does_better_by_guessing_where_floors_are_high(digits: Path) -> None:
    view = _view(digits)
    safe = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    protected = View(view.run, safe)
    assert "does better by guessing than by relying on the release" in verdicts.verdict(protected)[1]
    exposed = View(view.run, replace(view.leakage, dfil=view.leakage.dfil * 1e4))
    assert "For all of the 200 images the floor lies below that guess" in verdicts.verdict(exposed)[1]


def test_what_is_not_sure_is_called_an_estimate(digits: Path) -> None:
    view = _view(digits)
    safe = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    upper = safe.dfil * 1.5
    sure = View(view.run, replace(safe, upper=upper))
    assert verdicts.verdict(sure)[1].startswith("Such an attacker")
    assert "not at that confidence" not in " ".join(verdicts.sureness(sure))
    wide = upper.clone()
    wide[0, :3] = 1e9
    unsure = View(view.run, replace(safe, upper=wide))
    assert verdicts.verdict(unsure)[1].startswith("By this estimate, such an attacker")
    assert "For 3 images the floor lies above a guess by the estimate" in " ".join(verdicts.sureness(unsure))


def test_records_never_measured_are_counted_and_called_unprotected(digits: Path) -> None:
    view = _view(digits)
    measured = view.leakage.measured.clone()
    measured[:7] = 0
    seen = View(view.run, replace(view.leakage, measured=measured))
    assert seen.below(1e-300) == 7
    assert "7 images of 200 were never measured" in " ".join(verdicts.sureness(seen))
    assert sum(charts.histogram(seen).figure["data"][0]["y"]) == 193
    assert "7 never measured are not drawn" in charts.histogram(seen).note


def test_histogram_counts_every_record(digits: Path) -> None:
    chart = charts.histogram(_view(digits))
    assert sum(chart.figure["data"][0]["y"]) == 200
    assert {"guessing the average", "Theorem 1, any data, attacker unbiased for every image"} <= {
        key.text.split(":")[0] for key in chart.keys
    }


def test_embedded_floors_are_the_leakage_files(digits: Path) -> None:
    import base64

    data = _data(report.build(digits)[0].read_text())
    floors = np.frombuffer(base64.b64decode(data["floors"]), dtype="<f8")
    expected = np.sort(1 / np.sqrt(read_leakage(digits).dfil[0].numpy()))
    np.testing.assert_allclose(floors, expected, rtol=1e-15)


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_charts_are_plotly_figures(kind: str, request: pytest.FixtureRequest) -> None:
    import plotly.graph_objects as go

    figures = _data(report.build(request.getfixturevalue(kind))[0].read_text())["charts"]
    wanted = {"chart-floors", "chart-classes", "chart-accuracy", "chart-growth"}
    assert set(figures) == wanted | ({"chart-features"} if kind == "people" else set())
    for found in figures.values():
        go.Figure(found)  # refuses what plotly does not know
        assert found["layout"]["xaxis"]["title"]["text"]


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_what_each_unbiased_floor_asks_is_said_where_the_lines_are(kind: str, request: pytest.FixtureRequest) -> None:
    own, public = (path.read_text() for path in report.build(request.getfixturevalue(kind)))
    noun = "image" if kind == "digits" else "record"
    for page in (own, public):
        assert f"bind only one whose guesses are right on average for every {noun} there could be" in page
        assert "Report the lower one" in page
    assert own.index("chart-floors") < own.index('id="two-demands"') < own.index('class="threshold"')


def test_the_chart_over_training_says_how_often_records_were_measured(digits: Path) -> None:
    leakage = read_leakage(digits)
    run = read_run(digits)
    often = float(leakage.measured.double().mean()) / run.mechanism["runs"]
    assert often > 1.5
    assert f"Each image is measured {often:.0f} times in a run on average" in words.growth_note(View(run, leakage))
    few = replace(leakage, measured=torch.ones_like(leakage.measured))
    page = report.confidential_page(run, few).decode()
    growth = page[page.index('id="growth"') :]
    assert "Each image is measured once or less in a run on average" in growth[: growth.index("</section>")]


def test_both_pages_speak_of_an_images_floors_in_its_own_range(digits: Path) -> None:
    before = read_run(digits)
    run = replace(before, data={**before.data, "range": [0.0, 255.0]})
    view = View(run, read_leakage(digits))
    scaled = View(run, replace(view.leakage, facts={**view.leakage.facts, "scale": 255.0}))
    page = report.public_page(run).decode()
    own = report.confidential_page(run, scaled.leakage).decode()
    found = {row["title"]: row["error"] for row in floor_rows(run, 255.0)}
    for error in found.values():
        assert f'<td class="n">{error}</td>' in page
        assert f'<td class="n">{error}</td>' in own
    assert f"{scaled.of_range}; guessing the middle errs by ±128" in page
    assert any(scaled.of_range in said for said in report.headline(run))
    assert "of the range" in " ".join(report.headline(before))  # a folder that does not say the range


def test_a_target_that_needs_no_noise_is_no_advice(digits: Path) -> None:
    from reconbound import guarantee
    from reconbound.mechanisms import SampledGaussian

    found = guarantee(SampledGaussian(0.7, 0.005, 50), dim=64).to_dict()
    run = replace(read_run(digits), guarantee=found)
    assert all("each" not in row["who"] or "unbiased" in row["who"] for row in advice.targets(run, "pixel"))
    for page in (report.public_page(run).decode(), report.confidential_page(run, read_leakage(digits)).decode()):
        said = html.unescape(page)
        assert "±0.25 (any attacker, each pixel) and ±0.4 (any attacker, each pixel) are met without noise" in said
        assert "with chance 78% a record is never drawn" in said
        assert '<td class="n">1e-06</td>' not in said


def test_noise_for_a_target_meets_it(digits: Path) -> None:
    from reconbound import floor

    run = read_run(digits)
    rows = advice.targets(run, "pixel")
    assert len(rows) == len(advice.TARGETS)
    mechanism = advice.mechanism_of(run)
    for row, (target, name, _) in zip(rows, advice.TARGETS, strict=True):
        noise = float(row["noise"])
        assert floor(name, replace(mechanism, noise_multiplier=noise * 1.01), dim=64).rmse >= target
        assert floor(name, replace(mechanism, noise_multiplier=noise * 0.98), dim=64).rmse < target
        assert row["enough"] == (floor(name, mechanism, dim=64).rmse >= target)


@pytest.mark.parametrize(("low", "high"), [(-3, 5), (-1, 0.5), (0.1, 0.13), (-150, 153), (1.9999, 2.0001), (-0.6, 0.9)])
def test_log_ticks_lie_within_and_tell_their_place(low: float, high: float) -> None:
    places, texts = axes.log_ticks(low, high)
    assert 1 <= len(places) <= 7
    assert len(set(texts)) == len(texts)
    for place, text in zip(places, texts, strict=True):
        assert low - 1e-6 <= place <= high + 1e-6
        said = float(text.replace("10^", "1e").replace(",", ""))
        assert math.log10(said) == pytest.approx(place, abs=2e-3)


# --- odd runs ------------------------------------------------------------------------------------------


def _extreme(leakage: Leakage) -> Leakage:
    dfil = leakage.dfil.clone()
    dfil[0, :4] = torch.tensor([0.0, 1e-300, 1e300, torch.inf], dtype=dfil.dtype)
    error = leakage.error.clone()
    error[0, :2] = torch.inf
    upper = leakage.upper.clone() if leakage.upper is not None else None
    if upper is not None:
        upper[0, :2] = torch.tensor([torch.inf, torch.nan])
    history = leakage.history.clone()
    history[0] = 0
    accuracy = leakage.accuracy.clone()
    accuracy[0] = torch.nan
    diagonal = leakage.kept_diagonal.clone()
    diagonal[0, :2] = torch.tensor([0.0, torch.inf])
    return replace(
        leakage, dfil=dfil, error=error, upper=upper, history=history, accuracy=accuracy, kept_diagonal=diagonal
    )


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_zeros_infinities_and_huge_floors_are_shown_sensibly(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    page = _page(read_run(folder), _extreme(read_leakage(folder)))
    text = Elements(page).text
    assert not re.search(r"\b(nan|inf|None|e\+\d\d\d)\b", text)
    for found in _data(page)["charts"].values():
        low, high = found["layout"]["xaxis"].get("range", (0, 1))
        assert high - low < 20


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_a_run_that_measured_nothing_says_so(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    run, leakage = read_run(folder), read_leakage(folder)
    empty = replace(leakage, measured=torch.zeros_like(leakage.measured), dfil=torch.zeros_like(leakage.dfil))
    assert "was ever measured, so nothing can be said" in Elements(_page(run, empty)).text


def test_the_smallest_leakage_still_makes_a_page(digits: Path) -> None:
    run, full = read_run(digits), read_leakage(digits)
    none = torch.zeros(0, dtype=torch.float64)
    small = replace(
        full, upper=None, kept_diagonal=None, average_diagonal=None, kept=full.kept[:0],
        kept_inputs=full.kept_inputs[:0],
        history_step=none.long(), history=none.reshape(0, 3), accuracy_step=none.long(), accuracy=none,
        facts={"rules": ["exact"]},
    )  # fmt: skip
    assert "No accuracy was measured." in Elements(_page(run, small)).text
    bare = Run(run.data, run.mechanism, {}, {})
    assert "gives no floor worth naming" in Elements(_page(bare, small)).text
    assert report.public_page(bare)


def test_a_number_as_target_is_shown_in_its_unit(people: Path) -> None:
    run, leakage = read_run(people), read_leakage(people)
    targets = torch.linspace(0, 1, 200)
    facts = {**leakage.facts, "task": "number", "target_name": "progression", "target_offset": 25, "target_scale": 320}
    page = _page(run, replace(leakage, targets=targets, facts=facts))
    names = _data(page)["charts"]["chart-classes"]["layout"]["yaxis"]["ticktext"]
    assert sorted(names) == sorted(["25 to 89", "89 to 153", "153 to 217", "217 to 281", "281 to 345"])
    record = int(leakage.kept[0])
    assert f"progression: {25 + 320 * float(targets[record]):.4g}" in Elements(page).text
    assert "R² on test data" in Elements(page).text


# --- text from outside -----------------------------------------------------------------------------------


def _hostile(folder: Path) -> tuple[Run, Leakage]:
    run, leakage = read_run(folder), read_leakage(folder)
    d = leakage.guess.numel()
    facts = {
        **leakage.facts, "class_names": [f"{HOSTILE}{k}" for k in range(10)], "feature_names": [HOSTILE] * d,
        "units": [HOSTILE] * d, "target_name": HOSTILE,
        "public_names": [HOSTILE] * 3, "rules": [HOSTILE, "paper"],
    }  # fmt: skip
    data = {**run.data, "name": HOSTILE, "private": [HOSTILE], "public": [HOSTILE], "ranges": {HOSTILE: [0, 1]},
            "units": {HOSTILE: HOSTILE}}  # fmt: skip
    software = {HOSTILE: HOSTILE}
    training = {HOSTILE: HOSTILE, "model": HOSTILE}
    names = packed_names([HOSTILE] * len(leakage.targets))
    return replace(run, data=data, training=training, software=software), replace(leakage, facts=facts, names=names)


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_names_that_hold_markup_are_shown_as_text(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    run, leakage = _hostile(folder)
    plain = Elements(_page(read_run(folder), read_leakage(folder))).found
    for page, scripts in ((_page(run, leakage), 3), (report.public_page(run).decode(), 0)):
        elements = Elements(page)
        assert sum(tag == "script" for tag, _ in elements.found) == scripts
        assert not any(name.startswith("on") for _, attrs in elements.found for name in attrs)
        assert {tag for tag, _ in elements.found} <= {tag for tag, _ in plain}
        assert '</script><script>window.pwned=1</script><img src=x onerror="window.pwned=2">' in elements.text
        assert "\u2028" not in page
    marks = json.dumps(_data(_page(run, leakage))["charts"])
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


def test_a_comparison_escapes_folder_names(digits: Path, people: Path, tmp_path: Path) -> None:
    odd = tmp_path / "<img src=x onerror=alert(1)>"
    odd.symlink_to(digits)
    short = tmp_path / "b"
    short.symlink_to(people)
    report.compare([odd, short], tmp_path / "out.html")
    assert sum(tag == "img" for tag, _ in Elements((tmp_path / "out.html").read_text()).found) == 0


# --- the public page ---------------------------------------------------------------------------------------


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


def test_accuracy_is_public_only_where_the_run_says_so(digits: Path) -> None:
    run = read_run(digits)
    assert run.accuracy is None
    assert 'id="accuracy"' not in report.public_page(run).decode()
    assert "87.6%" in report.public_page(replace(run, accuracy=0.8756)).decode()


def test_public_columns_are_floors_times_their_range(people: Path) -> None:
    run = read_run(people)
    rows = {row["name"]: row for row in report.public.column_rows(run)}
    lecam = next(b["rmse"] for b in run.guarantee["bounds"] if b["name"] == "lecam")
    assert rows["age"]["any"] == f"±{figure(120 * lecam)}"
    assert rows["age"]["range"] == "0 to 120 years"
    assert rows["hours-per-week"]["guess"] == "±50"


# --- single records ----------------------------------------------------------------------------------------


def test_thumbnails_are_the_records_pixels() -> None:
    from io import BytesIO

    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    for shape in ((5, 7), (4, 6, 3), (3, 2, 4)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        np.testing.assert_array_equal(np.asarray(image.open(BytesIO(thumbnails.png(pixels)))), pixels)
    colour = rng.random((3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(thumbnails.picture(colour)[1, 2], np.round(255 * colour[:, 1, 2].astype(float)))


def test_leakage_maps_are_bright_where_most_is_told() -> None:
    information = np.array([[[1e-3, 1.0], [1e3, 0.0]]])
    ends = thumbnails.heat_range(information)
    colours = thumbnails.heat(information[0], ends).astype(int)
    light = colours[..., :3].sum(-1)
    assert light[1, 0] > light[0, 1] > light[0, 0] == light[1, 1]
    part = thumbnails.pixel_information(np.array([[4.0, 2.0]]), (2, 1, 2), np.array([0, 2]))
    np.testing.assert_array_equal(part, [[[3.0, np.nan]]])
    assert thumbnails.heat(part[0], (0.0, 1.0))[0, 1, 3] == 0


def test_record_facts_are_the_leakage_files(people: Path) -> None:
    run, leakage = read_run(people), read_leakage(people)
    record = int(leakage.kept[1])
    found = report.record_facts(leakage, run, record)
    dfil = float(leakage.dfil[0, record])
    assert found["floor"] == pytest.approx(dfil**-0.5, rel=1e-12)
    assert found["rank"] == 2
    assert found["floor_at_upper_limit"] is None
    age = next(c for c in found["columns"] if c["name"] == "age")
    assert age["value"] == pytest.approx(120 * float(leakage.kept_inputs[1, 0]), rel=1e-6)
    assert age["floor"] == pytest.approx(120 / math.sqrt(float(leakage.kept_diagonal[1, 0])), rel=1e-6)
    json.dumps(found, allow_nan=False)
    assert "columns" not in report.record_facts(leakage, run, int(leakage.dfil[0].argsort()[100]))
    for bad in (-1, 200, 1.5, "x"):
        with pytest.raises(InputError, match="record"):
            report.record_facts(leakage, run, bad)


def test_record_table_shows_markup_as_text(people: Path) -> None:
    run, leakage = _hostile(people)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.record_table(report.record_facts(leakage, run, int(leakage.kept[0]))))
    told = console.export_text()
    console.file.close()
    assert "[red]" in told
    assert "errs by at least" in told
    unseen = replace(leakage, measured=torch.zeros_like(leakage.measured))
    console = Console(width=100)
    with console.capture() as drawn:
        console.print(report.record_table(report.record_facts(unseen, run, 3)))
    assert "never measured" in drawn.get()


def test_cards_are_the_records_kept_in_order(digits: Path) -> None:
    view = _view(digits)
    found = records.cards(view)
    assert [card["record"] for card in found["most"] + found["least"]] == view.leakage.kept.tolist()
    floors = view.floor[[card["record"] for card in found["most"]]]
    assert floors.tolist() == sorted(view.floor)[:6]
    none = replace(view.leakage, upper=torch.full_like(view.leakage.upper, torch.inf))
    assert records.cards(View(view.run, none))["most"][0]["limit"] == "no confidence limit"
    assert found["most"][0]["limit"].startswith("with confidence at least ±")


def test_compare_sets_runs_side_by_side(digits: Path, people: Path, tmp_path: Path) -> None:
    path = report.compare([digits, people], tmp_path / "compare.html")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    text = Elements(path.read_text()).text
    for folder in (digits, people):
        assert f"±{figure(float(_view(folder).floor.min()))}" in text
    assert "Not comparable as they stand: these audits differ in data set, kind of data" in text
    assert "Confidential." in text
    with pytest.raises(InputError, match="folders"):
        report.compare([digits], tmp_path / "one.html")


def test_a_comparison_says_what_differs(people: Path, tmp_path: Path) -> None:
    """Ranges, units and columns by audit; nothing to say where only settings differ."""
    run, leakage = read_run(people), read_leakage(people)

    def other(name: str, data: dict | None = None, **facts: Any) -> Path:
        write_run(prepare(tmp_path / name), replace(run, data={**run.data, **(data or {})}))
        write_leakage(tmp_path / name, replace(leakage, facts={**leakage.facts, **facts}))
        return tmp_path / name

    same = other("same")
    found = comparison.facts([people, same])
    assert found["warning"] == ""
    assert found["differences"] == []
    assert 'id="differences"' not in report.compare([people, same], tmp_path / "c.html").read_text()
    scale, units = leakage.facts["scale"], leakage.facts["units"]
    ranges = {**run.data["ranges"], "age": [0.0, 100.0]}
    wider = other("wider", {"ranges": ranges}, scale=[100.0, *scale[1:]], units=["weeks", *units[1:]])
    off = other("off", {"ranges": {k: v for k, v in ranges.items() if k != "age"}}, scale=[100.0, *scale[1:]])
    found = comparison.facts([people, wider, off])
    assert found["differences"] == [
        {"what": "range of age",
         "values": {"people": "0 to 120", "wider": "0 to 100", "off": "0 to 100, read off the data"}},
        {"what": "unit of age", "values": {"people": "years", "wider": "weeks", "off": "years"}},
    ]  # fmt: skip
    assert found["warning"].startswith(
        "Not comparable as they stand: these audits differ in range of age, unit of age."
    )
    text = Elements(report.compare([people, wider, off], tmp_path / "c.html").read_text()).text
    assert found["warning"] in text
    assert "0 to 100 weeks" in text
    assert "0 to 100 years, read off the data" in text
    named = other("named", {"name": "others", "records": 7})
    assert comparison.facts([people, named])["warning"] == "Compare with care: these audits differ in data set."
    for folder, digest in ((people, "a" * 64), (same, "b" * 64)):
        (folder / "plan.json").write_text(json.dumps({"data": {"digest": digest}}))
    assert comparison.facts([people, same])["differences"][0]["what"] == "values of the data"
    (people / "plan.json").unlink()


def test_columns_are_counted_over_all_records_on_the_page(people: Path) -> None:
    view = _view(people)
    rng = np.random.default_rng(0)
    information = torch.from_numpy(rng.uniform(0.2, 5, (view.records, 6)) / view.leakage.guess.numpy()).float()
    information[:7, 1] = torch.nan
    found = View(view.run, replace(view.leakage, diagonal=information))
    best = information.double()
    best[view.leakage.kept] = view.leakage.kept_diagonal
    floors = view.scale / np.sqrt(best.numpy())
    page = Elements(report.confidential_page(found.run, found.leakage).decode()).text
    for j, c in enumerate(columns.counts(found)):
        below, of = int((floors[:, j] < view.guess_each[j]).sum()), int(np.isfinite(floors[:, j]).sum())
        assert (c["below"], c["of"]) == (below, of)
        assert 0 < below < of
        assert f"{below} of {'the ' if j == 1 else ''}{of} records" in columns.sentence(c)
        assert columns.sentence(c) in page
    figure_ = charts.by_feature(found).figure
    told = " ".join(text for trace in figure_["data"] for text in trace["hovertext"])
    assert for_plotly(columns.sentence(columns.counts(found)[0]), 160) in told
    assert "of all records" in columns.note(found)


def test_one_column_is_spoken_of_as_one(people: Path) -> None:
    view = _view(people)
    facts = {
        n: v[:1] if n in ("scale", "offset", "units", "feature_names", "private") else v for n, v in view.facts.items()
    }
    own = {"kept_diagonal": view.leakage.kept_diagonal[:, :1], "average_diagonal": view.leakage.average_diagonal[:1]}
    one = View(view.run, replace(view.leakage, guess=view.leakage.guess[:1], facts=facts, **own))
    told = " ".join([*verdicts.verdict(one), *advice.for_records(one), *(text for _, text in words.assumptions(one))])
    assert "private columns" not in told
    assert "all columns together" not in told
    assert "single column" not in told
    two = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    two.kept_diagonal[view.places[view.worst], 0] = 1e4
    told = advice.for_records(View(view.run, two))[0]
    assert "To lift the one column of some records that lies below a guess to the error of a guess" in told


def test_single_columns_below_a_guess_are_not_passed_over(people: Path) -> None:
    """The whole record may be safe on average and one of its columns not: the verdict says so."""
    view = _view(people)
    protected = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    none = verdicts.verdict(View(view.run, protected))
    assert none[1].startswith("By these estimates no single column’s floor lies below the error of a guess")
    assert "on its own the release hardly helps it" in none[2]
    place = view.places[view.worst]
    diagonal = protected.kept_diagonal.clone()
    diagonal[place, :2] = 1e4  # ±1 % of the range
    exposed = verdicts.verdict(View(view.run, replace(protected, kept_diagonal=diagonal)))
    assert "at least one column lies below the error of a guess for 1 of the 8 records looked at (12 %)" in exposed[1]
    assert exposed[1].endswith("more about it than a guess does: age 1, education-num 1.")
    assert "a mean that hides the columns which are exposed" in exposed[2]
    tiles = {t["title"]: t for t in records.glance(View(view.run, replace(protected, kept_diagonal=diagonal)))}
    assert tiles["Below a guess on at least one column"]["below"] == "1 of 8 records looked at"
    assert tiles["Below a guess over all columns"]["below"] == "0 of 200 records"
    assert "±1.2 years on age" in exposed[0]
    told = advice.for_records(View(view.run, replace(protected, kept_diagonal=diagonal)))[0]
    ratio = max(math.sqrt(float(g)) for g in view.leakage.guess[:2]) / 0.01
    assert f"try a noise multiplier of about {0.1 * ratio:.3g} (now 0.1): an estimate" in told
    assert "less noise may do" in advice.for_records(View(view.run, protected))[0]


def test_floors_beyond_the_range_tell_nothing_and_units_are_said_once(people: Path) -> None:
    view = _view(people)
    diagonal = view.leakage.kept_diagonal.clone()
    diagonal[:, 4] = 0.39  # ±160 of 100 hours
    facts = {**view.facts, "feature_names": ["age (years)", *view.facts["feature_names"][1:]]}
    wide = View(view.run, replace(view.leakage, kept_diagonal=diagonal, facts=facts))
    hours = columns.counts(wide)[4]
    assert "±160 hours (record" in columns.sentence(hours)
    assert columns.sentence(hours).endswith("more than the whole range: nothing is learnt")
    card = {row["name"]: row for row in records.cards(wide)["most"][0]["columns"]}
    assert (card["hours-per-week"]["beyond"], card["hours-per-week"]["unit"]) == (True, "hours")
    assert (card["age (years)"]["beyond"], card["age (years)"]["unit"]) == (False, "")
    page = Elements(_page(wide.run, wide.leakage)).text
    assert page.count("over the range") >= 5
    console = Console(width=200)
    with console.capture() as told:
        console.print(report.record_table(report.record_facts(wide.leakage, wide.run, int(wide.leakage.kept[0]))))
    assert "nothing is learnt" in told.get()
    first = verdicts.verdict(View(view.run, replace(view.leakage, kept_diagonal=diagonal * 0 + 0.39)))[0]
    assert "more than the whole range: nothing is learnt)" in first


def test_the_harmonic_mean_is_said_and_so(people: Path) -> None:
    """d/Tr I ≤ mean of 1/I_jj: a record's floor is no more than the root mean square of its columns'."""
    view = _view(people)
    for record in view.leakage.kept.tolist():
        shares = view.feature_floors(record) / view.scale
        trace = float(view.looked_at[1][view.looked_rows[record]].sum())
        assert (view.features / trace) ** 0.5 <= np.sqrt(np.square(shares).mean())
    told = dict(words.assumptions(view))["What a floor is"]
    assert "harmonic mean of their squares 1/I_jj" in told


def test_the_first_runs_chart_says_where_it_ends(digits: Path, people: Path) -> None:
    view = _view(digits)
    own = 1 / math.sqrt(float(view.leakage.history[-1, 0]))
    note = charts.growth(view).note
    assert f"ends at ±{figure(own)} for the image most exposed in it" in note
    assert f"mean over 5 runs, where the lowest is ±{figure(float(view.floor.min()))}." in note
    assert charts.growth(_view(people)).note == ""  # one run is the verdict's


def test_legends_show_what_is_drawn(digits: Path, people: Path) -> None:
    chart = charts.histogram(_view(digits))
    kinds = {key.text.split(":")[0]: key.kind for key in chart.keys}
    assert kinds["the threshold below; shaded"] == "line"
    drawn = [str(trace.get("hovertext")) for trace in chart.figure["data"]]
    for text, _, _, _ in charts.lines(_view(digits)):
        assert (kinds[text] == "line") == any(told.startswith(text) for told in drawn)
    assert "none" in kinds.values() or all("not drawn" not in key.text for key in chart.keys)
    keys = {key.text: key.kind for key in charts.by_feature(_view(people)).keys}
    assert keys["the record most exposed in that column"] == "diamond"
    assert {"line", "rect"} == {shape["type"] for shape in chart.figure["layout"]["shapes"]}
    assert all(shape["layer"] == "below" for shape in chart.figure["layout"]["shapes"])  # the guess stays in sight


def test_the_public_pages_columns_say_their_condition(people: Path) -> None:
    text = " ".join(Elements(report.public_page(read_run(people)).decode()).text.split())
    head = text[text.index("column and declared range") :]
    assert head.startswith(
        "column and declared range any attacker, in the worst case over all records there could be, at least"
    )
    assert "any attacker, in the worst case over all records there could be · each column" in text
    assert "any attacker, at least" not in text


def test_common_columns_are_compared_in_their_own_units(people: Path, tmp_path: Path) -> None:
    """By name and unit; with a column in another unit left out."""
    run, leakage = read_run(people), read_leakage(people)
    facts = {**leakage.facts, "units": ["weeks", *leakage.facts["units"][1:]]}
    write_run(prepare(tmp_path / "other"), run)
    write_leakage(tmp_path / "other", replace(leakage, facts=facts, kept_diagonal=leakage.kept_diagonal / 4))
    found = comparison.facts([people, tmp_path / "other"])
    assert [c["name"] for c in found["columns"]] == leakage.facts["feature_names"][1:]
    for j, column in enumerate(found["columns"], start=1):
        low, high = RANGES[j]
        floor = (high - low) / math.sqrt(float(leakage.kept_diagonal[:, j].max()))
        own, other = column["audits"]["people"], column["audits"]["other"]
        assert (own["lowest"], other["lowest"]) == (pytest.approx(floor), pytest.approx(2 * floor))
        assert own["below"] == columns.counts(_view(people))[j]["below"]
    text = Elements(report.compare([people, tmp_path / "other"], tmp_path / "c.html").read_text()).text
    assert f"±{figure(2 * floor)}" in text[text.index("Single columns, in their own units") :]
    assert found["audits"][0]["floors"]["lowest_at_upper_limit"] is None
    json.dumps(found, allow_nan=False)
