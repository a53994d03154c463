"""Single records and columns in a report."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from pages import Elements, hostile, meaningful, page_of, view_of
from reconbound import report
from reconbound._internal.checks import InputError
from reconbound._internal.formatting import format_limit
from reconbound.report import charts, records, text
from reconbound.report.folder import read_leakage, read_run
from reconbound.report.formats import for_plotly, plus_minus
from reconbound.report.headline import headline
from reconbound.report.view import View


def test_thumbnails_are_the_records_pixels() -> None:
    from io import BytesIO

    image = pytest.importorskip("PIL.Image")
    rng = np.random.default_rng(1)
    for shape in ((5, 7), (4, 6, 3), (3, 2, 4)):
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        np.testing.assert_array_equal(np.asarray(image.open(BytesIO(records.png(pixels)))), pixels)
    colour = rng.random((3, 4, 6)).astype(np.float32)
    np.testing.assert_array_equal(records.picture(colour)[1, 2], np.round(255 * colour[:, 1, 2].astype(float)))


def test_leakage_maps_are_bright_where_most_leaks() -> None:
    information = np.array([[[1e-3, 1.0], [1e3, 0.0]]])
    ends = records.heat_range(information)
    colours = records.heat(information[0], ends).astype(int)
    light = colours[..., :3].sum(-1)
    assert light[1, 0] > light[0, 1] > light[0, 0] == light[1, 1]
    part = records.pixel_information(np.array([[4.0, 2.0]]), (2, 1, 2), np.array([0, 2]))
    np.testing.assert_array_equal(part, [[[3.0, np.nan]]])
    assert records.heat(part[0], (0.0, 1.0))[0, 1, 3] == 0


def test_record_facts_match_the_leakage(people: Path) -> None:
    run, leakage = read_run(people), read_leakage(people)
    record = int(leakage.kept[1])
    found = report.record_facts(leakage, run, record)
    dfil = float(leakage.dfil[0, record])
    assert found["floor_estimate"] == pytest.approx(dfil**-0.5, rel=1e-12)
    assert found["rank"] == 2
    assert found["floor_lower_limit"] is None
    age = next(c for c in found["columns"] if c["name"] == "age")
    assert age["value"] == pytest.approx(120 * float(leakage.kept_inputs[1, 0]), rel=1e-6)
    assert age["floor_estimate"] == pytest.approx(120 / math.sqrt(float(leakage.kept_diagonal[1, 0])), rel=1e-6)
    json.dumps(found, allow_nan=False)
    assert "columns" not in report.record_facts(leakage, run, int(leakage.dfil[0].argsort()[100]))
    for bad in (-1, 200, 1.5, "x"):
        with pytest.raises(InputError, match="record"):
            report.record_facts(leakage, run, bad)


def test_record_table_shows_markup_as_text(people: Path) -> None:
    run, leakage = hostile(people)
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(report.record_table(report.record_facts(leakage, run, int(leakage.kept[0]))))
    reported = console.export_text()
    console.file.close()
    assert "[red]" in reported
    assert "errs by about" in reported
    assert "an estimate, more often too high" in reported
    unseen = replace(leakage, measured=torch.zeros_like(leakage.measured))
    console = Console(width=100)
    with console.capture() as drawn:
        console.print(report.record_table(report.record_facts(unseen, run, 3)))
    assert "never measured" in drawn.get()


def test_record_table_shows_the_limit_before_the_estimate(digits: Path) -> None:
    view = view_of(digits)
    record = int(view.leakage.kept[0])
    facts = report.record_facts(view.leakage, view.run, record)
    console = Console(width=200)
    with console.capture() as drawn:
        console.print(report.record_table(facts))
    lines = [" ".join(line.split()) for line in drawn.get().splitlines()]
    assert facts["floor_lower_limit"] < facts["floor_estimate"]
    limit = next(k for k, line in enumerate(lines) if line.startswith("errs by at least ±"))
    assert "with confidence" in lines[limit]
    assert lines[limit + 1].startswith("estimate ±")
    assert not any(line.startswith("errs by about") for line in lines)


def test_cards_are_in_order(digits: Path) -> None:
    view = view_of(digits)
    found = records.cards(view)
    assert [card["record"] for card in found["most"] + found["least"]] == view.leakage.kept.tolist()
    floors = view.floor[[card["record"] for card in found["most"]]]
    assert floors.tolist() == sorted(view.floor)[:6]
    none = replace(view.leakage, upper=torch.full_like(view.leakage.upper, torch.inf))
    assert records.cards(View(view.run, none))["most"][0]["kind"] == "estimate, no confidence limit"
    card, worst = found["most"][0], int(view.leakage.kept[0])
    assert (card["kind"], card["floor"]) == ("at 95 % confidence", plus_minus(float(view.upper_floor[worst])))
    assert card["estimate"] == f"estimate {plus_minus(float(view.floor[worst]))}, "


def test_columns_are_counted_over_all_records(people: Path) -> None:
    view = view_of(people)
    rng = np.random.default_rng(0)
    information = torch.from_numpy(rng.uniform(0.2, 5, (view.records, 6)) / view.leakage.guess.numpy()).float()
    information[:7, 1] = torch.nan
    found = View(view.run, replace(view.leakage, diagonal=information))
    best = information.double()
    best[view.leakage.kept] = view.leakage.kept_diagonal
    floors = view.scale / np.sqrt(best.numpy())
    page = Elements(report.confidential_page(found.run, found.leakage).decode()).text
    for j, c in enumerate(found.columns):
        below, of = int((floors[:, j] < view.guess_each[j]).sum()), int(np.isfinite(floors[:, j]).sum())
        assert (c["below"], c["of"]) == (below, of)
        assert 0 < below < of
        assert f"{below} of {of} records{' with a value' if j == 1 else ''} are below" in text.column_sentence(c)
        assert text.column_sentence(c) in page
    figure_ = charts.by_feature(found).figure
    hover = " ".join(label for trace in figure_["data"] for label in trace["hovertext"])
    assert for_plotly(text.column_sentence(found.columns[0]), 160) in hover
    assert "of all records" in text.columns_note(found)


def test_one_column_is_singular(people: Path) -> None:
    view = view_of(people)
    facts = {
        n: v[:1] if n in ("scale", "offset", "units", "feature_names", "private") else v for n, v in view.facts.items()
    }
    own = {"kept_diagonal": view.leakage.kept_diagonal[:, :1], "average_diagonal": view.leakage.average_diagonal[:1]}
    one = View(view.run, replace(view.leakage, guess=view.leakage.guess[:1], facts=facts, **own))
    reported = " ".join([*headline(one), *text.next_steps(one), *(sentence for _, sentence in text.assumptions(one))])
    assert "private columns" not in reported
    assert "all columns together" not in reported
    assert "single column" not in reported
    two = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    two.kept_diagonal[view.places[view.worst], 0] = 1e4
    reported = text.next_steps(View(meaningful(view.run), two))[0]
    assert "To lift the 1 column of some records below a guess to the error of a guess" in reported


def test_single_columns_below_a_guess_are_named(people: Path) -> None:
    """The whole record may be safe on average and one of its columns not: the verdict says so."""
    view = view_of(people)
    protected = replace(view.leakage, dfil=view.leakage.dfil / 1e4, kept_diagonal=view.leakage.kept_diagonal / 1e4)
    run = meaningful(view.run)
    none = headline(View(run, protected))
    assert none[0].startswith(
        "In every private column of numbers of the 8 records measured, an unbiased attacker errs at least as much"
    )
    place = view.places[view.worst]
    diagonal = protected.kept_diagonal.clone()
    diagonal[place, :2] = 1e4  # ±1 % of the range
    exposed = headline(View(run, replace(protected, kept_diagonal=diagonal)))
    assert exposed[0].startswith("For 1 of 8 records measured (12 %), the release may tell an unbiased attacker more")
    changed = View(run, replace(protected, kept_diagonal=diagonal))
    assert {c["name"]: c["below"] for c in changed.columns if c["below"]} == {"age": 1, "education-num": 1}
    together = dict(text.certainty(changed))["All columns together"]
    assert "is below a guess for 0 of 200 records (0 %)" in together
    assert "An average can hide one exposed column." in together
    tiles = {t["title"]: t for t in records.tiles(View(view.run, replace(protected, kept_diagonal=diagonal)))}
    assert tiles["Unbiased floor below a guess on at least one column"]["below"] == "1 of 8 records measured"
    assert tiles["Unbiased floor below a guess over all columns"]["below"] == "0 of 200 records"
    assert f"The most exposed value is age of record {view.worst:,}" in exposed[1]
    assert "at least ±1.2 years;" in exposed[1]
    reported = text.next_steps(View(run, replace(protected, kept_diagonal=diagonal)))[0]
    ratio = max(math.sqrt(float(g)) for g in view.leakage.guess[:2]) / 0.01
    assert f"try a noise multiplier of about {format_limit(3 * ratio)} (now 3)." in reported
    assert "every floor is above the error of a guess" in text.next_steps(View(run, protected))[0]
    assert text.next_steps(view)[0].startswith("First of all more noise")  # the mechanism guarantees little


def test_floors_beyond_the_range_are_marked(people: Path) -> None:
    view = view_of(people)
    diagonal = view.leakage.kept_diagonal.clone()
    diagonal[:, 4] = 0.39  # ±160 of 100 hours
    facts = {**view.facts, "feature_names": ["age (years)", *view.facts["feature_names"][1:]]}
    wide = View(view.run, replace(view.leakage, kept_diagonal=diagonal, facts=facts))
    hours = wide.columns[4]
    assert "±160 hours (record" in text.column_sentence(hours)
    assert text.column_sentence(hours).endswith("more than the whole range")
    card = {row["name"]: row for row in records.cards(wide)["most"][0]["columns"]}
    assert (card["hours-per-week"]["beyond"], card["hours-per-week"]["unit"]) == (True, "hours")
    assert (card["age (years)"]["beyond"], card["age (years)"]["unit"]) == (False, "")
    page = Elements(page_of(wide.run, wide.leakage)).text
    assert page.count("over the range") >= 5
    console = Console(width=200)
    with console.capture() as reported:
        console.print(report.record_table(report.record_facts(wide.leakage, wide.run, int(wide.leakage.kept[0]))))
    assert "more than the whole range" in reported.get()
    far = headline(View(view.run, replace(view.leakage, kept_diagonal=diagonal * 0 + 0.39)))
    assert sum("more than the whole range" in sentence for sentence in far) == 1
    diagonal[:, 0] = 1e4
    near = headline(View(view.run, replace(view.leakage, kept_diagonal=diagonal * (diagonal > 1e3) + 0.39)))
    assert not any("more than the whole range" in sentence for sentence in near)


def test_record_floor_is_below_the_mean_of_its_columns(people: Path) -> None:
    """d/Tr I ≤ mean of 1/I_jj: a record's floor is no more than the root mean square of its columns'."""
    view = view_of(people)
    records, information = view.column_information
    for record in view.leakage.kept.tolist():
        shares = view.feature_floors(record) / view.scale
        trace = float(information[records == record].sum())
        assert (view.features / trace) ** 0.5 <= np.sqrt(np.square(shares).mean())
    reported = dict(text.assumptions(view))["What a floor is"]
    assert "harmonic mean of their squares 1/I_jj" in reported
