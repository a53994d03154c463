"""The report's pages: files, sentences, charts and odd runs."""

from __future__ import annotations

import html
import json
import math
import os
import re
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from pages import Elements, certainty_text, data_of, meaningful, page_of, view_of
from reconbound import report
from reconbound._internal.files import Unreadable, sealed_json
from reconbound._internal.formatting import format_floor, format_limit
from reconbound.cli import app as cli
from reconbound.report import charts, records
from reconbound.report.folder import Leakage, Run, read_leakage, read_run
from reconbound.report.formats import percent
from reconbound.report.headline import any_attacker_sentences, headline
from reconbound.report.pages import feature_rows, floor_rows
from reconbound.report.text import TARGETS, growth_note, run_mechanism, targets
from reconbound.report.view import View
from run_folders import RANGES

# --- files ---------------------------------------------------------------------------------------------


def test_build_writes_both_pages(digits: Path) -> None:
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


def test_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Unreadable, match="holds no finished audit"):
        report.build(tmp_path)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("part", ["data", "mechanism", "training", "guarantee"])
def test_changed_run_json_is_refused(
    part: str, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(digits, tmp_path / "digits")
    facts = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_bytes(sealed_json({**facts, part: [3]}))
    for command in ("report", "show"):
        assert cli.run([command, str(folder)]) == 2
        why = f"is not a file of reconbound's ({part} must be an object, got [3])"
        assert capsys.readouterr().err == f"reconbound: {folder / 'run.json'} {why}\n"


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_pages_are_self_contained(kind: str, request: pytest.FixtureRequest) -> None:
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


# --- sentences -----------------------------------------------------------------------------------------


def test_finding_of_images_matches_the_leakage(digits: Path) -> None:
    leakage, page = read_leakage(digits), Elements(report.build(digits)[0].read_text()).text
    floor = 1 / math.sqrt(float(leakage.dfil[0].max()))
    guess = math.sqrt(float(leakage.guess.mean()))
    images = load_digits().images[:200] / 16
    assert guess == pytest.approx(math.sqrt(float(images.var(0).mean())), rel=1e-6)
    worst = int(leakage.dfil[0].argmax())
    own = 1 / math.sqrt(float(leakage.upper[0, worst]))
    limit = 1 / math.sqrt(float(leakage.upper[0].max()))  # of whichever image: another's may be lower than the worst's
    assert limit < own
    first = f"On the most exposed image it errs by at least ±{format_floor(limit)} per pixel on the 0–1 pixel scale"
    assert f"{first}, at 95 % confidence; guessing the average image errs by ±{format_limit(guess)}" in page
    assert f"(estimate ±{format_floor(floor)})" in page
    below = int((leakage.upper[0] > 1 / guess**2).sum())  # at the lower limits of the floors
    assert 0 < below < 200
    assert f"For {below} of 200 images ({percent(below, 200)}), the release may tell an unbiased attacker more" in page
    unsure = int(((leakage.upper[0] > 1 / guess**2) & (leakage.dfil[0] <= 1 / guess**2)).sum())
    assert unsure > 0
    assert f"For {unsure} image{'s' if unsure > 1 else ''} the estimate is above a guess and the limit is not." in page
    assert (
        f"The most exposed image over all its pixels is record {worst:,}: floor at least ±{format_floor(own)}" in page
    )
    tiles = {tile["title"]: tile["figure"] for tile in records.tiles(view_of(digits))}
    assert tiles["Most exposed image, at 95 % confidence"] == f"±{format_floor(limit)}"
    assert "Unbiased floor not above a guess at 95 % confidence" in tiles
    row = leakage.kept_diagonal[leakage.kept.tolist().index(int(leakage.dfil[0].argmax()))]
    single = int((1 / row.double() < leakage.guess.double()).sum())
    assert (f"on that image, {single} of 64 {'is' if single == 1 else 'are'} below a guess" in page) == (single > 0)
    lowest = 1 / math.sqrt(float(leakage.upper[0].max()))
    assert f"The lowest limit of any image is ±{format_floor(lowest)}." in page
    assert "Average of 5 runs." in page


def test_finding_of_tables_is_in_the_columns_unit(people: Path) -> None:
    """The headline names the most exposed value; the table has each column's most exposed record."""
    leakage = read_leakage(people)
    worst = int(leakage.dfil[0].argmax())
    most = leakage.kept_diagonal.max(0)
    whose = [int(leakage.kept[i]) for i in most.indices]
    assert len(set(whose)) > 1
    floors = [(b - a) / math.sqrt(float(i)) for (a, b), i in zip(RANGES, most.values, strict=True)]
    guesses = [(b - a) * math.sqrt(float(g)) for (a, b), g in zip(RANGES, leakage.guess, strict=True)]
    weak, *finding = headline(view_of(people))
    assert weak.startswith("No meaningful guarantee")
    j = int(np.argmin(np.array(floors) / np.array(guesses)))
    names = leakage.facts["feature_names"]
    units = leakage.facts["units"]
    assert finding[-2] == (
        f"The most exposed value is {names[j]} of record {whose[j]:,}: an unbiased attacker errs by at least "
        f"±{format_floor(floors[j])} {units[j]}; guessing the average errs by ±{format_limit(guesses[j])} {units[j]}."
    )
    assert finding[-1] == "These are estimates; a biased attacker is not bound by this."
    rows = {row["name"]: row for row in feature_rows(view_of(people))}
    chart = charts.by_feature(view_of(people)).figure["data"][1]
    for j, name in enumerate(names):
        assert (rows[name]["worst"], rows[name]["whose"]) == (f"±{format_floor(floors[j])}", f"record {whose[j]:,}")
        assert any(f"{name}: ±{format_floor(floors[j])}" in text for text in chart["hovertext"])
    sure = certainty_text(view_of(people))
    assert "One run has no confidence limit" in sure
    floor = format_floor(1 / math.sqrt(float(leakage.dfil[0, worst])))
    assert f"over all its columns is record {worst:,}: floor ±{floor} of a column’s range" in sure
    error = 0.5 * float(leakage.error[0, worst]) * float(leakage.dfil[0, worst]) ** -1.5
    assert f"standard error {error:.2g}" in sure


def test_finding_for_high_and_low_floors(digits: Path) -> None:
    view = view_of(digits)
    safe = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    safe = replace(safe, upper=1.5 * safe.dfil)
    protected = View(meaningful(view.run), safe)
    expected = "On each of the 200 images, an unbiased attacker errs at least as much as a guess does (over all pixels"
    assert headline(protected)[0].startswith(expected)
    exposed = View(view.run, replace(view.leakage, dfil=view.leakage.dfil * 1e4, upper=view.leakage.upper * 1e4))
    expected = "For 200 of 200 images, the release may tell an unbiased attacker more than a guess does"
    assert headline(exposed)[1].startswith(expected)


def test_finding_names_confidence_or_estimate(digits: Path) -> None:
    view = view_of(digits)
    safe = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    upper = safe.dfil * 1.5
    sure = View(view.run, replace(safe, upper=upper))
    assert "as a guess does (over all pixels together), at 95 % confidence" in headline(sure)[1]
    assert "and the limit is not" not in (certainty_text(sure))
    wide = upper.clone()
    wide[0, :3] = 1e4
    unsure = View(view.run, replace(safe, upper=wide))
    assert headline(unsure)[1].startswith("For 3 of 200 images (1.5 %), the release may tell")
    none = View(view.run, replace(safe, upper=None))
    assert "as a guess does (over all pixels together), by estimates" in headline(none)[1]
    assert "For 3 images the estimate is above a guess and the limit is not." in (certainty_text(unsure))


def test_histogram_without_limits(digits: Path) -> None:
    view = view_of(digits)
    none = View(view.run, replace(view.leakage, upper=torch.full_like(view.leakage.upper, torch.inf)))
    some, without = charts.histogram(view), charts.histogram(none)
    assert [key.text for key in some.keys if "95 % confidence" in key.text]
    assert not [key.text for key in without.keys if "confidence" in key.text]
    assert len(without.figure["data"]) == len(some.figure["data"]) - 1
    assert "Without a confidence limit: 200 (" in without.note


def test_useless_limits_count_as_none(digits: Path) -> None:
    """As from two runs, where t is 127: ±1e-06 of a range is no figure to print."""
    view = view_of(digits)
    upper = view.leakage.dfil * 1.5
    upper[0, :3] = 1e12
    some = View(view.run, replace(view.leakage, upper=upper))
    sure = certainty_text(some)
    assert some.unlimited == 3
    assert "3 images have no limit: " in sure
    assert "checked by simulation" in sure
    none = View(view.run, replace(view.leakage, upper=torch.full_like(upper, 1e12)))
    sure = certainty_text(none)
    assert "200 images have no limit: " in sure
    assert "checked by simulation" not in sure
    assert "e-0" not in sure
    narrow = View(view.run, replace(view.leakage, upper=upper, guess=view.leakage.guess * 1e-12))
    assert narrow.unlimited == 0  # beside a guess that is far smaller still it says something


def test_noscript_explains_blank_charts(digits: Path) -> None:
    own, public = (path.read_text() for path in report.build(digits))
    assert own.count("<noscript>") == 1
    assert "The charts need JavaScript" in own
    assert "<noscript>" not in public  # it has no charts


def test_unmeasured_records_count_as_unprotected(digits: Path) -> None:
    view = view_of(digits)
    measured = view.leakage.measured.clone()
    measured[:7] = 0
    seen = View(view.run, replace(view.leakage, measured=measured))
    assert seen.below(1e-300) == 7
    assert "7 images of 200 were never measured" in (certainty_text(seen))
    assert sum(charts.histogram(seen).figure["data"][0]["y"]) == 193
    assert "7 never measured are not drawn" in charts.histogram(seen).note


def test_histogram_counts_every_record(digits: Path) -> None:
    chart = charts.histogram(view_of(digits))
    assert sum(chart.figure["data"][0]["y"]) == 200
    assert {"guessing the average", "Theorem 1, any data, attacker unbiased for every image"} <= {
        key.text.split(":")[0] for key in chart.keys
    }


def test_embedded_floors_are_the_leakage_files(digits: Path) -> None:
    import base64

    data = data_of(report.build(digits)[0].read_text())
    floors = np.frombuffer(base64.b64decode(data["floors"]), dtype="<f8")
    expected = np.sort(1 / np.sqrt(read_leakage(digits).upper[0].numpy()))  # the lower limits, shown first
    np.testing.assert_allclose(floors, expected, rtol=1e-15)


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_charts_are_plotly_figures(kind: str, request: pytest.FixtureRequest) -> None:
    import plotly.graph_objects as go

    figures = data_of(report.build(request.getfixturevalue(kind))[0].read_text())["charts"]
    wanted = {"chart-floors", "chart-classes", "chart-accuracy", "chart-growth"}
    assert set(figures) == wanted | ({"chart-features"} if kind == "people" else set())
    for found in figures.values():
        go.Figure(found)  # refuses what plotly does not know
        assert found["layout"]["xaxis"]["title"]["text"]


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_both_kinds_of_unbiased_floors_are_explained(kind: str, request: pytest.FixtureRequest) -> None:
    own, public = (path.read_text() for path in report.build(request.getfixturevalue(kind)))
    noun = "image" if kind == "digits" else "record"
    for page in (own, public):
        assert f"bind only one who is right on average for every {noun} there could be" in page
        assert "Report the lower one" in page
    assert own.index("chart-floors") < own.index('id="two-kinds"') < own.index('class="threshold"')


def test_growth_note_counts_measurements(digits: Path) -> None:
    leakage = read_leakage(digits)
    run = read_run(digits)
    often = float(leakage.measured.double().mean()) / run.mechanism["runs"]
    assert often > 1.5
    assert f"Each image is measured {often:.0f} times in a run on average" in growth_note(View(run, leakage))
    few = replace(leakage, measured=torch.ones_like(leakage.measured))
    page = report.confidential_page(run, few).decode()
    growth = page[page.index('id="growth"') :]
    assert "Each image is measured once or less in a run on average" in growth[: growth.index("</section>")]


def test_image_floors_are_in_pixel_units(digits: Path) -> None:
    before = read_run(digits)
    run = replace(before, data={**before.data, "range": [0.0, 255.0]})
    view = View(run, read_leakage(digits))
    scaled = View(run, replace(view.leakage, facts={**view.leakage.facts, "scale": 255.0}))
    page = report.public_page(run).decode()
    own = report.confidential_page(run, scaled.leakage).decode()
    found = {row["name"]: row["error"] for row in floor_rows(run, 255.0)}
    for error in found.values():
        assert f'<td class="n">{error}</td>' in page
        assert f'<td class="n">{error}</td>' in own
    assert f"{scaled.of_range}; guessing the middle errs by ±128" in page
    assert any(scaled.of_range in sentence for sentence in any_attacker_sentences(meaningful(run)))
    assert "of the range" in " ".join(
        any_attacker_sentences(meaningful(before))
    )  # a folder that does not say the range


def test_target_met_without_noise_is_no_advice(digits: Path) -> None:
    from reconbound import guarantee
    from reconbound.mechanisms import SampledGaussian

    found = guarantee(SampledGaussian(0.7, 0.005, 50), dim=64).to_dict()
    run = replace(read_run(digits), guarantee=found)
    assert all("each" not in row["who"] or "unbiased" in row["who"] for row in targets(run, "image", "pixel")[0])
    for page in (report.public_page(run).decode(), report.confidential_page(run, read_leakage(digits)).decode()):
        message = html.unescape(page)
        each = "(any attacker, on some conceivable image, each pixel)"
        assert f"±0.25 {each} and ±0.4 {each} are met without noise" in message
        assert "a record is never drawn with chance 78%" in message
        assert '<td class="n">1e-06</td>' not in message


def test_noise_for_a_target_meets_it(digits: Path) -> None:
    from reconbound import floor

    run = read_run(digits)
    rows, _ = targets(run, "image", "pixel")
    assert len(rows) == len(TARGETS)
    mechanism = run_mechanism(run)
    for row, (target, name, _) in zip(rows, TARGETS, strict=True):
        noise = float(row["noise"])
        assert floor(name, replace(mechanism, noise_multiplier=noise * 1.01), dim=64).rmse >= target
        assert floor(name, replace(mechanism, noise_multiplier=noise * 0.98), dim=64).rmse < target
        assert row["enough"] == (floor(name, mechanism, dim=64).rmse >= target)


@pytest.mark.parametrize(("low", "high"), [(-3, 5), (-1, 0.5), (0.1, 0.13), (-150, 153), (1.9999, 2.0001), (-0.6, 0.9)])
def test_log_ticks_match_their_labels(low: float, high: float) -> None:
    axis = charts.log_axis(low, high, "")
    places, texts = axis["tickvals"], axis["ticktext"]
    assert 1 <= len(places) <= 7
    assert len(set(texts)) == len(texts)
    for place, text in zip(places, texts, strict=True):
        assert low - 1e-6 <= place <= high + 1e-6
        message = float(text.replace("10^", "1e").replace(",", ""))
        assert math.log10(message) == pytest.approx(place, abs=2e-3)


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
def test_extreme_floors_are_shown(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    page = page_of(read_run(folder), _extreme(read_leakage(folder)))
    text = Elements(page).text
    assert not re.search(r"\b(nan|inf|None|e\+\d\d\d)\b", text)
    for found in data_of(page)["charts"].values():
        low, high = found["layout"]["xaxis"].get("range", (0, 1))
        assert high - low < 20


@pytest.mark.parametrize("kind", ["digits", "people"])
def test_run_without_measurements(kind: str, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(kind)
    run, leakage = read_run(folder), read_leakage(folder)
    empty = replace(leakage, measured=torch.zeros_like(leakage.measured), dfil=torch.zeros_like(leakage.dfil))
    assert "was measured: nothing is known about them" in Elements(page_of(run, empty)).text


def test_smallest_leakage_makes_a_page(digits: Path) -> None:
    run, full = read_run(digits), read_leakage(digits)
    none = torch.zeros(0, dtype=torch.float64)
    small = replace(
        full, upper=None, kept_diagonal=None, average_diagonal=None, kept=full.kept[:0],
        kept_inputs=full.kept_inputs[:0],
        history_step=none.long(), history=none.reshape(0, 3), accuracy_step=none.long(), accuracy=none,
        facts={"rules": ["exact"]},
    )  # fmt: skip
    assert "No accuracy was measured." in Elements(page_of(run, small)).text
    bare = Run(run.data, run.mechanism, {}, {})
    assert "The noise gives no floor for it." in Elements(page_of(bare, small)).text
    assert report.public_page(bare)


def test_number_target_is_shown_in_its_unit(people: Path) -> None:
    run, leakage = read_run(people), read_leakage(people)
    targets = torch.linspace(0, 1, 200)
    facts = {**leakage.facts, "task": "number", "target_name": "progression", "target_offset": 25, "target_scale": 320}
    page = page_of(run, replace(leakage, targets=targets, facts=facts))
    names = data_of(page)["charts"]["chart-classes"]["layout"]["yaxis"]["ticktext"]
    assert sorted(names) == sorted(["25 to 89", "89 to 153", "153 to 217", "217 to 281", "281 to 345"])
    record = int(leakage.kept[0])
    assert f"progression: {25 + 320 * float(targets[record]):.4g}" in Elements(page).text
    assert "R² on test data" in Elements(page).text


# --- legends and charts ---------------------------------------------------------------------------------


def test_growth_chart_names_both_ends(digits: Path, people: Path) -> None:
    view = view_of(digits)
    own = 1 / math.sqrt(float(view.leakage.history[-1, 0]))
    note = charts.growth(view).note
    assert f"ends at ±{format_floor(own)} for the image most exposed in it" in note
    assert f"the mean over 5 runs is ±{format_floor(float(view.floor.min()))} for the image most exposed in it." in note
    assert charts.growth(view_of(people)).note == ""  # one run


def test_legends_show_what_is_drawn(digits: Path, people: Path) -> None:
    chart = charts.histogram(view_of(digits))
    kinds = {key.text.split(":")[0]: key.kind for key in chart.keys}
    assert kinds["the threshold below; shaded"] == "line"
    drawn = [str(trace.get("hovertext")) for trace in chart.figure["data"]]
    for text, _, _, _ in charts.lines(view_of(digits)):
        assert (kinds[text] == "line") == any(reported.startswith(text) for reported in drawn)
    assert "none" in kinds.values() or all("not drawn" not in key.text for key in chart.keys)
    keys = {key.text: key.kind for key in charts.by_feature(view_of(people)).keys}
    assert keys["the record most exposed in that column"] == "diamond"
    assert {"line", "rect"} == {shape["type"] for shape in chart.figure["layout"]["shapes"]}
    assert all(shape["layer"] == "below" for shape in chart.figure["layout"]["shapes"])  # the guess stays in sight
